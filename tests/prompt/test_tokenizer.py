"""The tokenizer wrapper: text exact both ways, control tokens apart, damaged files refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer_jax import demo
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.prompt import PromptError, Tokenizer, control

from .cases import SPELLINGS, library, released, texts

RELEASED_IDS = {
    control.BOS: 0, control.EOS: 1, control.PAD: 2, control.SYSTEM: 128799, control.USER: 128803,
    control.ASSISTANT: 128804, control.THINK: 128821, control.END_THINK: 128822, control.DSML: 128825,
    control.LATEST_REMINDER: 128828, "<｜action｜>": 128829, "<｜query｜>": 128830, "<｜authority｜>": 128831,
    "<｜domain｜>": 128832, "<｜title｜>": 128836, "<｜read_url｜>": 128845, control.IMAGE: 129264,
    "<｜/polygon｜>": 129271, "<｜polygon｜>": 129272, "<｜/point｜>": 129273, "<｜point｜>": 129274,
    "<｜/box｜>": 129275, "<｜box｜>": 129276, "<｜/ref｜>": 129277, "<｜ref｜>": 129278,
}  # fmt: skip


def test_released_ids() -> None:
    """Guards against a data file that is not the released one, and against spellings that find another token."""
    tokenizer = released()
    assert tokenizer.sha256 == "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
    assert tokenizer.vocab_size == 129280
    assert {spelling: tokenizer.control_id(spelling) for spelling in SPELLINGS} == RELEASED_IDS


def test_demo_ids_differ() -> None:
    """Guards against ids written into the code: the demo tokenizer has the same tokens at other places."""
    tokenizer = demo.load_tokenizer()
    assert tokenizer.vocab_size == 3072
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    ids = [tokenizer.control_id(spelling) for spelling in SPELLINGS]
    assert len(set(ids)) == len(ids)
    assert ids[3:] != [released().control_id(spelling) for spelling in SPELLINGS][3:]


def random_text(source: random.Random) -> str:
    """Letters of all planes, controls, combining marks, digits, spaces and control spellings."""
    planes = [(0x20, 0x7F), (0x00, 0x20), (0x80, 0x250), (0x300, 0x370), (0x3040, 0x30FF), (0x4E00, 0x9FA6)]
    planes += [(0x2000, 0x2070), (0xE000, 0xF900), (0x1F300, 0x1F700), (0xF0000, 0xF0100), (0x600, 0x700)]
    pieces = []
    for _ in range(source.randrange(7)):
        low, high = source.choice(planes)
        count = source.randrange(1, 6)
        pieces.append("".join(chr(source.randrange(low, high)) for _ in range(count)))
        pieces.append(source.choice(["", " ", "  ", "\n", source.choice(SPELLINGS)]))
    return "".join(pieces)


def test_random_texts_equal_the_library() -> None:
    """Guards segment-wise encoding: 2,000 random texts between control tokens, against the library used by hand."""
    whole, plain = library()
    tokenizer = released()
    source = random.Random(20261130)
    for _ in range(2000):
        text, expected, ranges = "", [], []
        for _ in range(source.randrange(1, 4)):
            segment, token = random_text(source), source.choice(SPELLINGS)
            expected += plain.encode(segment, add_special_tokens=False).ids if segment else []
            expected.append(whole.token_to_id(token))
            ranges.append((len(text + segment), len(text + segment + token)))
            text += segment + token
        tail = random_text(source)
        expected += plain.encode(tail, add_special_tokens=False).ids
        assert tokenizer.encode_ranges(text + tail, ranges) == expected
        assert tokenizer.decode(expected) == text + tail
        assert tokenizer.encode(tail, control_tokens=True) == whole.encode(tail, add_special_tokens=False).ids


def test_control_tokens_is_explicit() -> None:
    """Guards against user text that becomes control tokens by default."""
    tokenizer = released()
    assert tokenizer.encode("<think>", control_tokens=True) == [128821]
    assert tokenizer.encode("<think>", control_tokens=False) == [30, 37947, 32]
    with pytest.raises(TypeError, match="control_tokens"):
        tokenizer.encode("<think>")  # type: ignore[call-arg]


@pytest.mark.parametrize("load", [released, demo.load_tokenizer], ids=["released", "demo"])
def test_every_token_decodes_as_in_the_library(load: Any) -> None:
    """Guards the byte table: each token alone, and all of them in one text, against the library's decoder."""
    tokenizer: Tokenizer = load()
    reference = tokenizer._full
    ids = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)
    for token in ids[:: max(1, len(ids) // 4000)]:
        assert tokenizer.decode([token]) == reference.decode([token], skip_special_tokens=False)


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that stand for one byte each, by byte."""
    found = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [found[bytes([byte])] for byte in range(256)]


BYTE_TOKENS = byte_tokens(demo.load_tokenizer())


@st.composite
def id_lists(draw: st.DrawFn) -> list[int]:
    """Ids of the demo tokenizer with many lone bytes, among them continuation bytes and broken characters."""
    tokens = st.integers(0, 3071)
    lone = st.sampled_from([BYTE_TOKENS[b] for b in (0x80, 0xBF, 0xC3, 0xE2, 0xE0, 0xED, 0xF0, 0xF4, 0x9F, 0xA0, 0xFF)])
    whole = texts.map(lambda text: [BYTE_TOKENS[byte] for byte in text.encode()])
    parts = draw(st.lists(st.one_of(tokens.map(lambda i: [i]), lone.map(lambda i: [i]), whole), max_size=20))
    return [i for part in parts for i in part]


@given(ids=id_lists(), cuts=st.lists(st.integers(0, 200), max_size=10))
@example(ids=[BYTE_TOKENS[0xF0], BYTE_TOKENS[0x9F], BYTE_TOKENS[0x99]], cuts=[1, 2])
@example(ids=[BYTE_TOKENS[0x80], BYTE_TOKENS[0xE2], BYTE_TOKENS[0x82], BYTE_TOKENS[0x41]], cuts=[1, 2, 3])
def test_detokenizer_equals_full_decode(ids: list[int], cuts: list[int]) -> None:
    """Guards streaming text: pieces at any cuts join to the full decode, and no piece breaks a character."""
    tokenizer = demo.load_tokenizer()
    full = tokenizer.decode(ids)
    assert full == tokenizer._full.decode(ids, skip_special_tokens=False)
    stream = tokenizer.detokenizer()
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    seen = ""
    for start, end in itertools.pairwise(edges):
        seen += stream.push(*ids[start:end])
        assert full.startswith(seen)
    assert seen + stream.finish() == full
    assert stream.push(BYTE_TOKENS[0x41]) == "A"


@given(text=texts)
def test_text_survives(text: str) -> None:
    """Guards exactness: any text comes back from both kinds of encoding, with nothing cleaned up."""
    for tokenizer in (released(), demo.load_tokenizer()):
        for control_tokens in (False, True):
            assert tokenizer.decode(tokenizer.encode(text, control_tokens=control_tokens)) == text
        assert not set(tokenizer.encode(text, control_tokens=False)) & set(tokenizer.control_ids.values())


def test_ids_are_checked() -> None:
    """Guards against ids outside the vocabulary, which the library would skip without a word."""
    tokenizer = demo.load_tokenizer()
    assert tokenizer.check_ids(np.array([0, 3071], np.int32)) == [0, 3071]
    for bad, place in ([[0, 3072], 1], [[-1], 0], [[True], 0], [[1.0], 0], [["1"], 0]):
        with pytest.raises(PromptError, match=rf"token_ids\[{place}\].*below 3072"):
            tokenizer.check_ids(bad)
    with pytest.raises(PromptError, match="3072 is not a token id"):
        tokenizer.decode([3072])
    with pytest.raises(PromptError, match="no control token '<｜nothing｜>'"):
        tokenizer.control_id("<｜nothing｜>")
    with pytest.raises(PromptError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800", control_tokens=False)


def test_config_must_agree() -> None:
    """Guards against weights used with the tokenizer of another model."""
    released().check_config(ModelConfig.released())
    with pytest.raises(ValueError, match="image_token_id 129264"):
        demo.load_tokenizer().check_config(ModelConfig.released())
    with pytest.raises(ValueError, match=r"has 129280 tokens; config\.json allows"):
        released().check_config(ModelConfig.demo())
    demo.load_tokenizer().check_config(ModelConfig.demo())


def test_file_and_folder(tmp_path: Path) -> None:
    """Guards loading by path, and that a missing or oversized file is named."""
    (tmp_path / "tokenizer.json").write_bytes(demo.tokenizer_json())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Tokenizer.from_file(path).sha256 == demo.load_tokenizer().sha256
    with pytest.raises(ValueError, match=r"other\.json"):
        Tokenizer.from_file(tmp_path / "other.json")
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json: has 67108865 bytes; at most"):
        Tokenizer.from_file(tmp_path)


def damaged(change: Any) -> bytes:
    document = json.loads(demo.tokenizer_json())
    change(document)
    return json.dumps(document).encode()


def rename(document: dict[str, Any], old: str, new: str) -> None:
    next(token for token in document["added_tokens"] if token["content"] == old)["content"] = new


DAMAGE = {
    "unigram": (lambda d: d["model"].update(type="Unigram"), "only byte-level BPE"),
    "dropout": (lambda d: d["model"].update(dropout=0.1), "dropout makes the ids of a text random"),
    "truncation": (lambda d: d.update(truncation={"max_length": 8}), "truncation would change prompts"),
    "no added tokens": (lambda d: d.pop("added_tokens"), "added_tokens must be a list"),
    "other model": (lambda d: rename(d, control.DSML, "｜XSML｜"), "lacks the control token ｜DSML｜"),
    "twice": (lambda d: rename(d, control.THINK, control.END_THINK), "lists '</think>' twice"),
    "one id": (lambda d: d["added_tokens"][-1].update(id=3070), "gives one id to two tokens"),
    "strips": (lambda d: d["added_tokens"][3].update(lstrip=True), "takes text around it"),
    "no id": (lambda d: d["added_tokens"][3].update(id="3047"), r"added_tokens\[3\] must have"),
    "lower case": (lambda d: d.update(normalizer={"type": "NFC"}), "does not survive"),
    "prefix space": (lambda d: d["pre_tokenizer"]["pretokenizers"][3].update(add_prefix_space=True), "not survive"),
    "no decoder": (lambda d: d.update(decoder=None), "does not survive"),
    "bad regex": (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="("), "is not a tokenizer"),
    "gap": (lambda d: d["model"]["vocab"].update(extra=5000), "no token has id"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_refused(name: str) -> None:
    """Guards against files that would give other ids, lose text or act as another model's tokenizer."""
    change, message = DAMAGE[name]
    with pytest.raises(ValueError, match=message):
        Tokenizer(damaged(change), "x.json")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"added_tokens": []}', b"\xff\xfe", b'{"a": 1, "a": 2}'])
def test_other_content_is_refused(data: bytes) -> None:
    """Guards against content that is no tokenizer at all; the file is named."""
    with pytest.raises(ValueError, match=r"^x\.json: "):
        Tokenizer(data, "x.json")
