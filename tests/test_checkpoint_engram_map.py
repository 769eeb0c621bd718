"""The Engram token map: derived from a tokenizer by the rule, or read from its file, and checked."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.checkpoint import CheckpointError, load_token_map, token_classes
from deepinfer_jax.checkpoint.engram_map import check_token_map, token_map_bytes
from deepinfer_jax.model.config import ModelConfig

from .checkpoint_files import DATA, token_map

pytestmark = pytest.mark.fast

MICRO = ModelConfig.micro()
DEMO = ModelConfig.demo()
MAP = "engram_token_map.npy"


@pytest.fixture(scope="module")
def demo_tokenizer() -> bytes:
    """The demo model's tokenizer.json."""
    return gzip.decompress((DATA / "demo_tokenizer.json.gz").read_bytes())


def word_tokenizer(words: list[str]) -> bytes:
    """A tokenizer.json whose token i is words[i]."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return tokenizers.Tokenizer(model).to_str().encode()


# ---- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["a", "A", " a", "a\n", "\t A \r\n", "b"], [0, 0, 0, 0, 0, 1]),
        (["é", "e", "E\u0301", "ê", "è", "ệ"], [0, 0, 0, 0, 0, 0]),
        (["ａ", "a", "①", "1", "ﬁ", "fi"], [0, 0, 1, 1, 2, 2]),  # noqa: RUF001
        ([" ", "\n", "\t\r\n ", "a", "\ue000"], [0, 0, 0, 1, 0]),
        (["a  b", "a b", "a\n\nb", "a\u3000b", "ab"], [0, 0, 0, 0, 1]),
        (["\u0301", "\u0300", "x"], [0, 1, 2]),
        (["x\ufffd", "X\ufffd", "x"], [0, 1, 2]),
        (["z", "y", "z ", "w"], [0, 1, 0, 2]),
    ],
    ids=["case and ends", "accents", "compatibility", "spaces", "inner spaces", "empty", "partial", "first seen"],
)
def test_rule(words: list[str], classes: list[int]) -> None:
    """Guards each step of the rule: forms, accents, case, white space, empty results, partial UTF-8."""
    assert token_classes(word_tokenizer(words)).tolist() == classes


def test_demo_tokenizer(demo_tokenizer: bytes) -> None:
    """Guards the whole map of a byte-level tokenizer: the class count that the demo configuration names."""
    classes = token_classes(demo_tokenizer)
    assert (classes.dtype, classes.shape) == (np.int32, (DEMO.vocab_size,))
    assert len(set(classes.tolist())) == int(classes.max()) + 1 == DEMO.engram_compressed_vocab_size == 2340
    tokenizer = tokenizers.Tokenizer.from_str(demo_tokenizer.decode())

    def same(*tokens: str) -> bool:
        return len({int(classes[tokenizer.token_to_id(token)]) for token in tokens}) == 1

    assert same("the", "The", "Ġthe", "ĠThe")
    assert same("Ġ", "ĠĠ", "Ċ", "ĉ")
    assert not same("Â", "Ã")  # single bytes that are no text keep their own classes
    assert classes[:4].tolist() == [0, 1, 2, 3]
    digest = hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest()
    assert digest == "4da8dbe114d66c2f23b7fc310982685deab89c84ee9c34ce2df372392276a8e1"


def test_classes_are_numbered_by_first_occurrence(demo_tokenizer: bytes) -> None:
    """Guards the numbering, which the hash depends on."""
    classes = token_classes(demo_tokenizer)
    first = np.unique(classes, return_index=True)[1]
    assert (np.diff(first) > 0).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "is not a tokenizer"),
        (b'{"model": 3}', "is not a tokenizer"),
        (b'{"model": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_tokenizer(tmp_path: Path, content: bytes, message: str) -> None:
    """Guards against the tokenizer library's own exceptions reaching the user."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_token_map(tmp_path, MICRO)
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.json"))


def test_gap_in_the_ids() -> None:
    """Guards against a token id that is no token."""
    document = json.loads(word_tokenizer(["a", "b", "c"]))
    document["model"]["vocab"]["c"] = 7
    with pytest.raises(CheckpointError, match="no token has id 2, but there are 3 tokens"):
        token_classes(json.dumps(document).encode())


# ---- where the map comes from ---------------------------------------------------------------------


def test_derived_map_is_checked(tmp_path: Path, demo_tokenizer: bytes) -> None:
    """Guards against another model's tokenizer: the error names both counts."""
    (tmp_path / "tokenizer.json").write_bytes(demo_tokenizer)
    derived = load_token_map(tmp_path, DEMO)
    assert derived is not None
    assert np.array_equal(derived, token_classes(demo_tokenizer))
    with pytest.raises(CheckpointError, match=r"gives 2340 Engram classes, but .* is 2341"):
        load_token_map(tmp_path, dataclasses.replace(DEMO, engram_compressed_vocab_size=2341))
    with pytest.raises(CheckpointError, match=r"has 3072 tokens, but vocab_size is 3073"):
        load_token_map(tmp_path, dataclasses.replace(DEMO, vocab_size=3073))


def test_file_goes_before_tokenizer(tmp_path: Path, demo_tokenizer: bytes) -> None:
    """Guards the ready-made map, which needs no tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes(demo_tokenizer)
    np.save(tmp_path / MAP, token_map(DEMO))
    loaded = load_token_map(tmp_path, DEMO)
    assert loaded is not None
    assert np.array_equal(loaded, token_map(DEMO))


def test_neither_file(tmp_path: Path) -> None:
    """Guards the message when both are missing; without Engram layers nothing is needed."""
    with pytest.raises(CheckpointError, match=r"neither engram_token_map\.npy nor tokenizer\.json"):
        load_token_map(tmp_path, MICRO)
    assert load_token_map(tmp_path, dataclasses.replace(MICRO, engram_layer_ids=(), engram_num_embeddings=())) is None


def test_golden_map_is_read(tmp_path: Path) -> None:
    """Guards against refusing a map whose classes are not numbered by first occurrence."""
    (tmp_path / MAP).write_bytes((DATA / "golden_engram_token_map.npy").read_bytes())
    config = ModelConfig.from_dict(json.loads((DATA / "golden_config.json").read_text(encoding="utf-8")))
    loaded = load_token_map(tmp_path, config)
    assert loaded is not None
    assert np.array_equal(loaded, np.load(tmp_path / MAP))


# ---- the file -------------------------------------------------------------------------------------


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


def forged(description: str, payload: bytes = b"") -> bytes:
    """An .npy file with this header text."""
    text = description.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + payload


GOOD = token_map(MICRO)
HUGE = "{'descr': '<i4', 'fortran_order': False, 'shape': (9999999999,), }"
BAD_FILES = {
    "empty": (b"", r"is not a one-dimensional"),
    "other dtype": (npy(GOOD.astype(np.int64)), r"bytes; at most|is not a one-dimensional"),
    "big endian": (npy(GOOD.astype(">i4")), r"is not a one-dimensional"),
    "two axes": (npy(GOOD.reshape(2, -1)), r"is not a one-dimensional"),
    "objects": (npy(np.array([1, "x"], object), allow_pickle=True), r"is not a one-dimensional"),
    "pickle": (pickle.dumps([1, 2]), r"is not a one-dimensional"),
    "too few": (npy(GOOD[:-1]), r"has 95 entries, but vocab_size is 96"),
    "too many": (npy(np.append(GOOD, GOOD[:1])), r"has 97 entries, but vocab_size is 96"),
    "truncated": (npy(GOOD)[:-1], r"bytes, expected"),
    "left over": (npy(GOOD) + b"x", r"bytes, expected"),
    "too large": (npy(GOOD) + bytes(5000), r"at most \d+ are allowed"),
    "huge shape": (forged(HUGE), r"has 9999999999 entries"),
    "expression": (forged("{'descr': '<i4', 'fortran_order': False, 'shape': (" + "(" * 500), r"is not a one"),
    "long header": (b"\x93NUMPY\x01\x00\xff\xff" + bytes(900), r"is not a one-dimensional"),
    "negative": (npy(np.where(np.arange(96) == 5, -1, GOOD).astype(np.int32)), r"has classes -1\.\.79, but .* 80"),
    "too high": (npy(np.where(np.arange(96) == 5, 80, GOOD).astype(np.int32)), r"has classes 0\.\.80, but .* 80"),
    "not onto": (npy(np.where(GOOD == 79, 0, GOOD).astype(np.int32)), r"1 of the 80 classes .* first is 79"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_map_file(tmp_path: Path, name: str) -> None:
    """Guards against interpreting anything but a plain int32 vector, and against classes out of range."""
    content, message = BAD_FILES[name]
    (tmp_path / MAP).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_token_map(tmp_path, MICRO)
    assert str(caught.value).startswith(str(tmp_path / MAP))


@given(st.integers(0, len(npy(GOOD)) - 1), st.integers(0, 255))
@settings(max_examples=100)
def test_any_changed_byte(tmp_path_factory: pytest.TempPathFactory, position: int, value: int) -> None:
    """Guards the parser with every single-byte damage: refused, or still a map onto all classes."""
    content = bytearray(npy(GOOD))
    content[position] = value
    folder = tmp_path_factory.getbasetemp()
    (folder / MAP).write_bytes(bytes(content))
    try:
        loaded = load_token_map(folder, MICRO)
    except CheckpointError:
        return
    assert loaded is not None
    assert set(loaded.tolist()) == set(range(80))


def test_written_file_is_numpys_own() -> None:
    """Guards against a file that only this package reads."""
    assert token_map_bytes(GOOD) == npy(GOOD)


def test_check_refuses_other_arrays() -> None:
    """Guards the writer's side of the check."""
    with pytest.raises(CheckpointError, match=r"is int64 \[96\], expected int32 \[96\]"):
        check_token_map(GOOD.astype(np.int64), MICRO, "map")
    with pytest.raises(CheckpointError, match=r"is int32 \[48, 2\]"):
        check_token_map(GOOD.reshape(48, 2), MICRO, "map")
