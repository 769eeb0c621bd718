"""The corpus tools: texts out of their containers, splits, and the 4-gram baseline."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.demo import load_tokenizer

from .demo_tools import tool

corpus, corpus_text, ngram = tool("corpus"), tool("corpus_text"), tool("ngram")

pytestmark = pytest.mark.fast


def test_strings_of_an_r_database(tmp_path: Path) -> None:
    """Guards against a reader that loses strings or takes other objects for strings."""

    def vector(strings: list[bytes]) -> bytes:
        body = b"".join(struct.pack(">II", 0x40009, len(s)) + s for s in strings)
        return struct.pack(">II", 16, len(strings)) + body

    raw = b"X\n" + bytes(12) + struct.pack(">II", 13, 2) + bytes(8) + vector([b"one", b"", b"three"])
    records = [raw, b"X\n" + vector([b"next"])]
    path = tmp_path / "data.rdb"
    path.write_bytes(b"".join(struct.pack(">I", len(r)) + zlib.compress(r) for r in records))
    assert [b"one", b"", b"three"] in list(corpus_text._rdb_strings(path))
    assert [b"next"] in list(corpus_text._rdb_strings(path))
    path.write_bytes(struct.pack(">I", 5) + zlib.compress(raw))
    with pytest.raises(ValueError, match="another length"):
        list(corpus_text._rdb_strings(path))


def test_text_of_a_page() -> None:
    """Guards against scripts and menus in the corpus, and against lost lines of code."""
    page = (
        "<html><head><title>T</title><style>p{}</style></head><body><div class='nosearch'><div>menu</div>x</div>"
        "<h1>Title</h1><p>One\n two &amp; <b>three</b>.</p><ul><li>a<li>b</ul><pre>x = 1\n  y = 2</pre>"
        "<script>var a;</script><p>End</p></body></html>"
    )
    parser = corpus_text._Text(frozenset({"nosearch"}))
    parser.feed(page)
    parser.close()
    assert corpus.clean(parser.text()) == "Title\n\nOne two & three.\n\n- a\n- b\n\nx = 1\n  y = 2\n\nEnd"


def test_clean() -> None:
    """Guards against characters that the tokenizer spells byte by byte for no gain."""
    assert corpus.clean("\ufeff\u201cA\u201d\u2014b \r\n\r\n\r\n\r\nc\x07\u200b\tx\n") == '"A"--b\n\nc    x'


def test_split_by_hash_is_stable_and_keeps_what_must_be_trained() -> None:
    """Guards against documents that move between training and test when others are added."""
    source = corpus.Source("demo", "none", lambda _: iter(()), True)
    documents = [(f"key {i}", f"text {i}") for i in range(2000)]
    train, held = corpus.split(source, documents, frozenset())
    assert len(train) + len(held) == 2000
    assert 40 < len(held) < 120
    fewer = corpus.split(source, documents[:1000], frozenset())[1]
    assert held[: len(fewer)] == fewer
    must = frozenset(f"key {text.split()[1]}" for text in held[:10])
    assert corpus.split(source, documents, must)[1] == held[10:]


def test_tail_of_every_work_is_held_out() -> None:
    """Guards against held-out pieces between trained ones of the same work, and against works without any."""
    source = corpus.Source("demo", "none", lambda _: iter(()), False)
    documents = [(f"work {w}/{i:04}", f"{w} {i}") for w in "ab" for i in range(50)]
    _, held = corpus.split(source, documents, frozenset())
    assert held == ["a 48", "a 49", "b 48", "b 49"]


def test_starts_cover_long_passages() -> None:
    """Guards against text that no row can reach: verse without blank lines needs places to start at."""
    tokenizer = load_tokenizer()
    text = "\n".join(f"line {i} of a very long poem" for i in range(300))
    ids, starts = corpus.tokenize(tokenizer, [text, "short one\n\nwith a paragraph"], whole=True)
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eos_id
    assert np.diff(starts[:-2]).max() < corpus.LINE_GAP + 20
    assert all(ids[s] == 0 or tokenizer.token_bytes(int(ids[s - 1])).endswith(b"\n") for s in starts)
    assert tokenizer.decode(ids[starts[-1] : -1].tolist()) == "with a paragraph"


def test_glosses_are_shortened() -> None:
    """Guards against examples and remarks in what the model learns by heart."""
    gloss = '(chiefly British) a small, sweet cake (or bun); usually round; "he ate a bun"'
    assert corpus_text.short_gloss(gloss) == "a small, sweet cake"
    assert corpus_text.short_gloss("x" * 65) is None
    assert corpus_text.short_gloss("tiny") is None


def test_ngram_is_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a baseline that is too good or too bad: after any history the probabilities sum to one."""
    monkeypatch.setattr(ngram, "VOCABULARY", 7)
    rng = np.random.default_rng(3)
    model = ngram.NgramModel((rng.integers(0, 5, 400) ** 2 % 7).astype(np.uint16))
    for _ in range(20):
        history = rng.integers(0, 7, 3)
        ids = [np.append(history, word).astype(np.uint16) for word in range(7)]
        total = sum(np.exp(model.log_probabilities(x)[-1]) for x in ids)
        assert abs(total - 1) < 1e-12


def test_ngram_of_a_known_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against wrong back-off weights, by a case counted by hand: 1 2 1 2 1 2."""
    monkeypatch.setattr(ngram, "VOCABULARY", 3)
    model = ngram.NgramModel(np.array([1, 2, 1, 2, 1, 2], np.uint16))
    unigram = (3 + 2 / 3) / (6 + 2)
    after_two = (2 + 1 * unigram) / (2 + 1)  # "2 1" twice, one kind of word after 2
    after_12 = (2 + 1 * after_two) / (2 + 1)
    after_121_2 = (1 + 1 * after_12) / (1 + 1)  # "2 1 2 -> 1" once
    got = np.exp(model.log_probabilities(np.array([2, 1, 2, 1], np.uint16))[-1])
    assert got == pytest.approx(after_121_2, abs=1e-12)
