"""Writes the data that ships with the demo evaluation: glosses, held-out texts, and the 4-gram figures of both.

python tools/demo/eval_data.py DIR        DIR is the --out of corpus.py
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from itertools import pairwise
from pathlib import Path

import corpus
import corpus_text
import numpy as np
from ngram import BOS, NgramModel

TARGET = Path(__file__).parents[2] / "deepinfer_jax" / "evals" / "data"
ROW = 1024
ROWS = 12
"""Rows of at most ROW tokens of each source; an evaluation reads at most 12 k tokens a source."""


def _compress(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    return lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=filters)


def write_glosses(folder: Path) -> None:
    """The table of the define task."""
    with tempfile.TemporaryDirectory() as temporary:
        wordnet = corpus.unpack(folder / "packages", "wordnet-base", Path(temporary))
        lines = [f"{lemma}\t{gloss}\n" for lemma, gloss, _ in corpus_text.definitions(wordnet)]
    (TARGET / "glosses.txt.xz").write_bytes(_compress("".join(lines).encode("ascii")))
    print(f"{len(lines)} glosses, {(TARGET / 'glosses.txt.xz').stat().st_size} bytes")


def _rows(ids: np.ndarray) -> list[np.ndarray]:
    """Up to ROWS rows spread evenly over the documents, each BOS and consecutive tokens of one document.

    Short documents follow one another in a row, each with its BOS.
    """
    rows = []
    bounds = np.append(np.flatnonzero(ids == BOS), len(ids))
    if np.diff(bounds).max() < ROW:  # short documents
        end = 0
        for place in bounds[:-1]:
            if end <= place <= len(ids) - ROW // 2:
                rows.append(ids[place : place + ROW])
                end = place + ROW
    else:
        for begin, end in pairwise(bounds):
            for place in range(begin + 1, end, ROW - 1):
                row = np.append(np.uint16(BOS), ids[place : min(end, place + ROW - 1)])
                rows.append(row.astype(np.uint16))
    chosen = np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).round().astype(int)
    return [rows[i] for i in np.unique(chosen)]


def write_heldout(folder: Path) -> None:
    """Held-out rows of every source as uint16, and the 4-gram's loss on exactly these."""
    tokens = folder / "tokens"
    manifest = json.loads((tokens / "manifest.json").read_text())
    train = {name: np.load(tokens / f"{name}.train.npy") for name in manifest["sources"]}
    everything = NgramModel(np.concatenate(list(train.values())))
    facts = {}
    packed = []
    for name, known in train.items():
        rows = _rows(np.load(tokens / f"{name}.heldout.npy"))
        ids = np.concatenate(rows)
        losses = [-m.log_probabilities(ids)[ids != BOS].mean() for m in (NgramModel(known), everything)]
        facts[name] = {
            "rows": [len(row) for row in rows],
            "ngram_nats_per_token": round(float(min(losses)), 4),
        }
        packed.append(ids.astype("<u2").tobytes())
        print(f"{name:12} {len(rows):3} rows {len(ids):6} tokens, 4-gram own {losses[0]:.3f} all {losses[1]:.3f}")
    (TARGET / "heldout.u16.xz").write_bytes(_compress(b"".join(packed)))
    document = {"tokenizer_sha256": manifest["tokenizer"], "sources": facts}
    (TARGET / "heldout.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"held-out rows: {(TARGET / 'heldout.u16.xz').stat().st_size} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    TARGET.mkdir(parents=True, exist_ok=True)
    write_glosses(folder)
    write_heldout(folder)


if __name__ == "__main__":
    main()
