"""The safetensors reader: what it reads, and that every defect is refused with file and tensor named."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from deepinfer_jax.checkpoint import Checkpoint, CheckpointError, check_tensors
from deepinfer_jax.checkpoint import files as checkpoint_limits
from deepinfer_jax.checkpoint import reader as reader_limits
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import CheckpointTensor

from .checkpoint_files import file_bytes, header_of, random_tensors, write_folder

pytestmark = pytest.mark.fast

MICRO = ModelConfig.micro()
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TENSORS = {
    CheckpointTensor("codes", "F8_E4M3", (2, 4)): bytes(range(8)),
    CheckpointTensor("scales", "F8_E8M0", (3,)): bytes([0, 127, 254]),
    CheckpointTensor("packed", "I8", (1, 2)): bytes([0x29, 0xB7]),
    CheckpointTensor("half", "BF16", (2,)): np.array([1.5, -2.0], ml_dtypes.bfloat16).tobytes(),
    CheckpointTensor("single", "F32", ()): np.float32(0.1).tobytes(),
}
"""One tensor per dtype; the odd sizes leave "half" and "single" unaligned."""


def write_single(folder: Path, header: dict[str, Any] | bytes, payload: bytes) -> None:
    (folder / SINGLE).write_bytes(file_bytes(header, payload))


def small() -> tuple[dict[str, Any], bytes]:
    """Header document and payload of TENSORS."""
    return header_of(list(TENSORS)), b"".join(TENSORS.values())


def refused(folder: Path) -> str:
    """Message with which the folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    return str(caught.value)


# ---- what is read ---------------------------------------------------------------------------------


def test_values_and_dtypes(tmp_path: Path) -> None:
    """Guards the dtype of every storage kind: FP8 as FP8, scales and packed FP4 as bytes."""
    write_single(tmp_path, *small())
    checkpoint = Checkpoint(tmp_path)
    assert {name: checkpoint.read(name).dtype for name in checkpoint.entries} == {
        "codes": ml_dtypes.float8_e4m3fn,
        "scales": np.uint8,
        "packed": np.uint8,
        "half": ml_dtypes.bfloat16,
        "single": np.float32,
    }
    for tensor, stored in TENSORS.items():
        value = checkpoint.read(tensor.name)
        assert value.shape == tensor.shape
        assert value.tobytes() == stored == checkpoint.read_bytes(tensor.name).tobytes()
    assert checkpoint.read("half").tolist() == [1.5, -2.0]
    assert checkpoint.read("single") == np.float32(0.1)


def test_arrays_are_read_only(tmp_path: Path) -> None:
    """Guards against writing through a view into a file that others have mapped."""
    write_single(tmp_path, *small())
    checkpoint = Checkpoint(tmp_path)
    for name in checkpoint.entries:
        assert not checkpoint.read(name).flags.writeable
        assert not checkpoint.read_bytes(name).flags.writeable


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    """Guards against a view whose mapping is gone once the reader object is."""
    write_single(tmp_path, *small())
    view = Checkpoint(tmp_path).read("codes")
    assert view.tobytes() == bytes(range(8))


def test_library_files_are_read(tmp_path: Path) -> None:
    """Guards against refusing what the safetensors library writes: padding, metadata, its own order."""
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5).astype(ml_dtypes.bfloat16),
        "c": np.arange(7, dtype=np.int8),
        "empty": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / SINGLE, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert checkpoint.read(name).tobytes() == array.tobytes()
        assert checkpoint.read(name).shape == array.shape


@pytest.mark.parametrize("shards", [1, 3])
def test_micro_checkpoint(tmp_path: Path, shards: int) -> None:
    """Guards both layouts on a complete checkpoint."""
    tensors = random_tensors(MICRO)
    write_folder(tmp_path, MICRO, tensors, shards)
    checkpoint = Checkpoint(tmp_path)
    check_tensors(checkpoint, MICRO)
    assert all(checkpoint.read_bytes(tensor.name).tobytes() == data for tensor, data in tensors.items())
    assert len({entry.shard for entry in checkpoint.entries.values()}) == shards


def test_header_agrees_with_the_library(tmp_path: Path) -> None:
    """Guards against reading names, dtypes or shapes otherwise than the format's own parser."""
    write_folder(tmp_path, MICRO, random_tensors(MICRO))
    checkpoint = Checkpoint(tmp_path)
    with safetensors.safe_open(tmp_path / SINGLE, "np") as library:
        assert set(library.keys()) == set(checkpoint.entries)
        for name, entry in checkpoint.entries.items():
            view = library.get_slice(name)
            assert (view.get_dtype(), tuple(view.get_shape())) == (entry.dtype, entry.shape)


def test_white_space_after_the_header_is_allowed(tmp_path: Path) -> None:
    """Guards against refusing the padding that aligns the data."""
    header, payload = small()
    write_single(tmp_path, json.dumps(header).encode() + b" " * 13, payload)
    assert len(Checkpoint(tmp_path).entries) == len(TENSORS)


# ---- defects of one file --------------------------------------------------------------------------

BAD_ENTRIES: list[tuple[str, Any, str]] = [
    ("dtype", "F64", "dtype 'F64'"),
    ("dtype", "i8", "dtype 'i8'"),
    ("dtype", None, "dtype None"),
    ("dtype", ["I8"], "dtype a JSON array"),
    ("shape", [2, 5], "needs 10"),
    ("shape", [2, True, 4], "shape"),
    ("shape", [2, 4.0], "shape"),
    ("shape", [-2, -4], "shape"),
    ("shape", 8, "shape"),
    ("shape", [1] * 8 + [8], "shape"),
    ("shape", [1 << 40, 1 << 40, 1 << 40], "needs"),
    ("shape", [1 << 60], "shape"),
    ("shape", [0, 10**4000], "shape"),
    ("data_offsets", [0, 9], "hold 9 bytes"),
    ("data_offsets", [8, 0], "hold -8 bytes"),
    ("data_offsets", [False, 8], "data_offsets"),
    ("data_offsets", [0.0, 8.0], "data_offsets"),
    ("data_offsets", [0, 8, 8], "data_offsets"),
    ("data_offsets", [-8, 0], "data_offsets"),
    ("data_offsets", [0, 10**30], "data_offsets"),
    ("data_offsets", {"begin": 0}, "data_offsets"),
    ("data_offsets", [1, 9], "overlaps|hole"),
    ("padding", 0, "exactly dtype, shape and data_offsets"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_ENTRIES, ids=lambda value: str(value)[:30])
def test_bad_entry(tmp_path: Path, key: str, value: Any, message: str) -> None:
    """Guards each check of one header entry; the error names the file and the tensor."""
    header, payload = small()
    header["codes"][key] = value
    write_single(tmp_path, header, payload)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert SINGLE in str(caught.value)
    assert "'codes'" in str(caught.value) or "overlaps" in message
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_missing_entry_key(tmp_path: Path, key: str) -> None:
    """Guards against a KeyError for an incomplete entry."""
    header, payload = small()
    del header["packed"][key]
    write_single(tmp_path, header, payload)
    assert "'packed'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "does not start"),
        (b" {}", "does not start"),
        (b"[]", "does not start"),
        (b"{", "not valid JSON"),
        (b"{}x", "not valid JSON"),
        (b'{"a":1}', "'a': must be an object"),
        (b'{"a":null}', "'a': must be an object"),
        (b'{"__metadata__":{"a":1}}', "__metadata__"),
        (b'{"__metadata__":[]}', "__metadata__"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":1,"a":1}', "'a' occurs twice"),
        (b'{"a":{"dtype":"I8","dtype":"I8"}}', "'dtype' occurs twice"),
        (b'{"\xff":1}', "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "does not start"),
        (b'{"\\ud800":1}', r"\\ud800"),
        (b'{"\\u001b[31m":1}', r"\\x1b"),
        (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_header_text(tmp_path: Path, text: bytes, message: str) -> None:
    """Guards the JSON layer: no other exception, no control characters in the message."""
    write_single(tmp_path, text, b"")
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert SINGLE in str(caught.value)
    str(caught.value).encode("utf-8")  # a lone surrogate could not be printed
    assert "\x1b" not in str(caught.value)


def test_duplicate_tensor(tmp_path: Path) -> None:
    """Guards against the last of two entries winning silently."""
    header, payload = small()
    entry = json.dumps(header["codes"])
    text = json.dumps(header)[:-1] + f', "codes": {entry}}}'
    write_single(tmp_path, text.encode(), payload)
    assert "'codes' occurs twice" in refused(tmp_path)


def test_overlap_and_hole(tmp_path: Path) -> None:
    """Guards against tensors that share bytes, and bytes that belong to no tensor."""
    header, payload = small()
    header["scales"]["data_offsets"] = [7, 10]
    write_single(tmp_path, header, payload)
    assert "tensor 'scales' overlaps" in refused(tmp_path)
    del header["scales"]
    write_single(tmp_path, header, payload)
    assert "tensor 'packed' leaves a hole" in refused(tmp_path)
    header, payload = small()
    write_single(tmp_path, header, payload + b"12")
    assert "2 bytes after the last tensor" in refused(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 20, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    """Guards against an interrupted download at any place."""
    content = file_bytes(*small())
    (tmp_path / SINGLE).write_bytes(content[:size])
    assert SINGLE in refused(tmp_path)


def test_header_length_is_checked_before_reading(tmp_path: Path) -> None:
    """Guards against reading, or allocating, what a forged length asks for."""
    for length, message in ((1 << 63, "exceeds 100000000"), (100_000_001, "exceeds 100000000"), (99_999_999, "file's")):
        (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little") + b"{}")
        tracemalloc.start()
        text = refused(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert message in text
        assert peak < 1 << 20


def test_dense_json_is_refused_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a header of a few megabytes that parses to gigabytes of small objects."""
    monkeypatch.setattr(checkpoint_limits, "MAX_JSON_STRUCTURE", 100_000)
    write_single(tmp_path, b'{"a":[' + b"[]," * 200_000 + b"[]]}", b"")
    tracemalloc.start()
    text = refused(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "JSON elements" in text
    assert peak < 3 << 20


def test_number_of_tensors_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bound itself, in a file and in an index."""
    monkeypatch.setattr(reader_limits, "MAX_TENSORS", 4)
    write_single(tmp_path, *small())
    assert "at most 4" in refused(tmp_path)
    (tmp_path / SINGLE).unlink()
    weight_map = {f"t{i}": SINGLE for i in range(5)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "at most 4" in refused(tmp_path)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_scale_is_refused_when_read(tmp_path: Path, position: int) -> None:
    """Guards against NaN weights, which would surface as NaN logits much later."""
    header, payload = small()
    damaged = bytearray(payload)
    damaged[8 + position] = 255
    write_single(tmp_path, header, bytes(damaged))
    checkpoint = Checkpoint(tmp_path)
    for read in (checkpoint.read, checkpoint.read_bytes):
        with pytest.raises(CheckpointError, match=rf"'scales': scale number {position} is NaN"):
            read("scales")
    assert checkpoint.read("codes").shape == (2, 4)


# ---- folders and shards ---------------------------------------------------------------------------


def test_no_folder_and_no_file(tmp_path: Path) -> None:
    """Guards the message for the two most common mistakes."""
    assert "is not a folder" in refused(tmp_path / "absent")
    assert SINGLE in refused(tmp_path)
    assert INDEX in refused(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../part-1.safetensors", "/part-1.safetensors", "a/part-1.safetensors", "a\\part-1.safetensors",
        "C:part-1.safetensors", "part-1.safetensors\n", "part\x00.safetensors", ".hidden.safetensors", "..",
        ".safetensors", "part-1.bin", "model.safetensors.index.json", "é.safetensors", "a" * 300 + ".safetensors",
        "", 3, None, ["part-1.safetensors"],
    ],
)  # fmt: skip
def test_shard_name_must_be_plain(tmp_path: Path, shard: Any) -> None:
    """Guards against an index that points out of its folder, or at something that is no tensor file."""
    write_folder(tmp_path, MICRO, random_tensors(MICRO), 2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["embed.weight"] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    text = refused(tmp_path)
    assert INDEX in text
    assert "'embed.weight'" in text
    assert "plain file name" in text


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A folder with two shards of three and two tensors."""
    for name, own in (("a.safetensors", list(TENSORS)[:3]), ("b.safetensors", list(TENSORS)[3:])):
        (tmp_path / name).write_bytes(file_bytes(header_of(own), b"".join(TENSORS[t] for t in own)))
    write_index(tmp_path, codes="a", scales="a", packed="a", half="b", single="b")
    return tmp_path


def write_index(folder: Path, **shards: str) -> None:
    weight_map = {name: f"{shard}.safetensors" for name, shard in shards.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_index_and_headers_must_agree(two_shards: Path) -> None:
    """Guards against an index that misplaces, invents or forgets a tensor."""
    assert len(Checkpoint(two_shards).entries) == 5
    write_index(two_shards, codes="a", scales="a", packed="b", half="b", single="b")
    assert "tensor 'packed' is here, but model.safetensors.index.json puts it in 'b.safetensors'" in refused(two_shards)
    write_index(two_shards, codes="a", scales="a", packed="a", half="b", single="b", extra="b")
    assert "b.safetensors: lacks what model" in refused(two_shards)
    assert "'extra'" in refused(two_shards)
    write_index(two_shards, codes="a", scales="a", half="b", single="b")
    assert "a.safetensors: tensor 'packed' is here, but" in refused(two_shards)
    assert "no shard" in refused(two_shards)
    write_index(two_shards, codes="a", scales="a", packed="a", half="c", single="b")
    assert "b.safetensors: tensor 'half'" in refused(two_shards)
    write_index(two_shards, codes="a", scales="a", packed="a")
    assert len(Checkpoint(two_shards).entries) == 3  # a file that the index does not name is not looked at


def test_tensor_in_two_shards(two_shards: Path) -> None:
    """Guards against a tensor whose value depends on which shard is read last."""
    own = [*list(TENSORS)[3:], next(iter(TENSORS))]
    (two_shards / "b.safetensors").write_bytes(file_bytes(header_of(own), b"".join(TENSORS[t] for t in own)))
    assert "b.safetensors: tensor 'codes' is here, but" in refused(two_shards)


def test_missing_shard(two_shards: Path) -> None:
    """Guards an incomplete download."""
    (two_shards / "b.safetensors").unlink()
    assert "b.safetensors: cannot be opened" in refused(two_shards)


def test_single_file_beside_an_index(two_shards: Path) -> None:
    """Guards against loading the older of two checkpoints in one folder."""
    write_single(two_shards, *small())
    assert "also holds model.safetensors" in refused(two_shards)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 200_000])
def test_bad_index(two_shards: Path, text: str) -> None:
    """Guards the index's own structure."""
    (two_shards / INDEX).write_text(text)
    assert INDEX in refused(two_shards)


def test_index_size_and_shard_count_are_bounded(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an index that is read or opened without bound."""
    monkeypatch.setattr(reader_limits, "MAX_SHARDS", 1)
    assert "at most 1 are allowed" in refused(two_shards)
    monkeypatch.setattr(reader_limits, "MAX_INDEX_BYTES", 10)
    assert "at most 10 are allowed" in refused(two_shards)


def test_links(two_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards against a link out of the folder; a link inside it is fine."""
    outside = tmp_path_factory.mktemp("outside") / "b.safetensors"
    (two_shards / "b.safetensors").rename(outside)
    (two_shards / "b.safetensors").symlink_to(outside)
    assert "b.safetensors: is a link that leaves the folder" in refused(two_shards)
    (two_shards / "b.safetensors").unlink()
    (two_shards / "real").mkdir()
    outside.rename(two_shards / "real" / "b")
    (two_shards / "b.safetensors").symlink_to("real/b")
    assert len(Checkpoint(two_shards).entries) == 5
    (two_shards / "b.safetensors").unlink()
    (two_shards / "b.safetensors").symlink_to("b.safetensors")
    assert "b.safetensors: cannot be opened" in refused(two_shards)


def test_linked_folder(two_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards against refusing a folder that is itself reached through a link."""
    link = tmp_path_factory.mktemp("links") / "checkpoint"
    link.symlink_to(two_shards)
    assert len(Checkpoint(link).entries) == 5


def test_hub_cache_layout(two_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards the one exception for links: a download cache keeps the files in `blobs` beside `snapshots`."""
    repository = tmp_path_factory.mktemp("hub") / "models--x"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in list(two_shards.iterdir()):
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert len(Checkpoint(snapshot).entries) == 5
    (repository / "blobs" / "b.safetensors").rename(repository / "b.safetensors")
    (snapshot / "b.safetensors").unlink()
    (snapshot / "b.safetensors").symlink_to("../../b.safetensors")
    assert "leaves the folder" in refused(snapshot)


def test_special_files(two_shards: Path) -> None:
    """Guards against waiting for ever on a pipe, and against a folder in place of a file."""
    (two_shards / "b.safetensors").unlink()
    os.mkfifo(two_shards / "b.safetensors")
    assert "is not a regular file" in refused(two_shards)
    (two_shards / "b.safetensors").unlink()
    (two_shards / "b.safetensors").mkdir()
    assert "b.safetensors" in refused(two_shards)


# ---- the set of tensors ---------------------------------------------------------------------------


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    """Guards against loading half a model; long lists are shortened."""
    tensors = random_tensors(MICRO)
    few = {tensor: data for tensor, data in tensors.items() if not tensor.name.startswith("layers.3.")}
    write_folder(tmp_path, MICRO, few)
    missing = len(tensors) - len(few)
    with pytest.raises(CheckpointError, match=rf"lacks {missing} of \d+ tensors: .* and {missing - 3} more") as caught:
        check_tensors(Checkpoint(tmp_path), MICRO)
    assert str(caught.value).count("'layers.3.") == 3
    write_folder(tmp_path, MICRO, tensors | {CheckpointTensor("layers.3.new", "F32", (1,)): bytes(4)})
    with pytest.raises(CheckpointError, match=r"'layers\.3\.new' does not belong to this model$") as caught:
        check_tensors(Checkpoint(tmp_path), MICRO)
    assert SINGLE in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (64, 96)),
        ("layers.0.attn.attn_sink", "I8", (16,)),
        ("layers.0.attn.wq_a.scale", "I8", (2, 2)),
        ("layers.0.ffn.experts.1.w2.weight", "F8_E4M3", (64, 32)),
        ("layers.0.ffn.experts.1.w2.scale", "F8_E8M0", (2, 64)),
    ],
)
def test_mistyped_and_misshaped_tensors(tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Guards against reinterpreting bytes: transposed, retagged, or scales of another block size."""
    tensors = random_tensors(MICRO)
    changed = {
        CheckpointTensor(name, dtype, shape) if tensor.name == name else tensor: data
        for tensor, data in tensors.items()
    }
    write_folder(tmp_path, MICRO, changed)
    with pytest.raises(CheckpointError, match=f"{name}' is {dtype}") as caught:
        check_tensors(Checkpoint(tmp_path), MICRO)
    assert SINGLE in str(caught.value)
