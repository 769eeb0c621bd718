"""Damaged checkpoints: each is refused with CheckpointError or is still valid, within bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.checkpoint import CheckpointError, load_checkpoint
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import abstract_params

from .checkpoint_files import file_bytes, header_of, random_tensors, write_folder

MICRO = dataclasses.replace(ModelConfig.micro(), n_routed_experts=2, dspark_n_routed_experts=2)
TENSORS = random_tensors(MICRO)
PAYLOAD = b"".join(TENSORS.values())
HEADER = header_of(list(TENSORS))
HEADER_TEXT = json.dumps(HEADER, separators=(",", ":")).encode()
SCALES = [entry["data_offsets"] for entry in HEADER.values() if entry["dtype"] == "F8_E8M0"]
INDEX = "model.safetensors.index.json"
SHARDS = 3

Files = dict[str, bytes]


def folder_files(shards: int) -> Files:
    """Content of a good checkpoint folder."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), MICRO, TENSORS, shards)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


SINGLE_FILES = folder_files(1)
SHARDED_FILES = folder_files(SHARDS)

INTEGERS = st.one_of(
    st.integers(-2, 70), st.integers(), st.sampled_from([len(PAYLOAD), 1 << 31, 1 << 63, 1 << 64, 10**30, 10**4000])
)
JSON_VALUES = st.one_of(
    INTEGERS, st.none(), st.booleans(), st.floats(), st.text(max_size=4), st.lists(INTEGERS, max_size=10)
)


def json_bytes(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


# ---- one damage each ------------------------------------------------------------------------------


def bytes_changed(draw: st.DrawFn, data: bytes) -> bytes:
    """Replace, insert, remove or repeat a few bytes."""
    at = draw(st.integers(0, len(data) - 1))
    length = draw(st.integers(0, 4))
    action = draw(st.sampled_from(["replace", "insert", "remove", "repeat"]))
    new = draw(
        st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b" ", b"\n", b'"', b"[", b"{", b",", b"0"]))
    )
    if action == "replace":
        return data[:at] + new + data[at + len(new) :]
    if action == "insert":
        return data[:at] + new + data[at:]
    return data[:at] + (data[at : at + length] * 2 if action == "repeat" else b"") + data[at + length :]


def damage_header_bytes(draw: st.DrawFn) -> Files:
    """The JSON text changes; the length field fits it."""
    return SINGLE_FILES | {"model.safetensors": file_bytes(bytes_changed(draw, HEADER_TEXT), PAYLOAD)}


def damage_length(draw: st.DrawFn) -> Files:
    """The length field lies."""
    content = SINGLE_FILES["model.safetensors"]
    true = int.from_bytes(content[:8], "little")
    near = st.integers(-16, 16).map(lambda n: true + n)
    length = draw(st.one_of(near, st.integers(0, (1 << 64) - 1), st.integers(0, len(content)), st.just(100_000_000)))
    return SINGLE_FILES | {"model.safetensors": length.to_bytes(8, "little") + content[8:]}


def damage_entry(draw: st.DrawFn) -> Files:
    """One header entry gets other values, loses a key, moves or changes its name."""
    header: dict[str, Any] = json.loads(HEADER_TEXT)
    name = draw(st.sampled_from(sorted(header)))
    entry = header[name]
    action = draw(st.sampled_from(["dtype", "shape", "axis", "offset", "shift", "key", "remove", "rename", "swap"]))
    if action == "dtype":
        entry["dtype"] = draw(
            st.one_of(JSON_VALUES, st.sampled_from(["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "F64"]))
        )
    elif action == "shape":
        entry["shape"] = draw(JSON_VALUES)
    elif action == "axis":
        entry["shape"][draw(st.integers(0, len(entry["shape"]) - 1))] = draw(JSON_VALUES)
    elif action == "offset":
        entry["data_offsets"][draw(st.integers(0, 1))] = draw(JSON_VALUES)
    elif action == "shift":
        step = draw(st.integers(-100, 100))
        entry["data_offsets"] = [offset + step for offset in entry["data_offsets"]]
    elif action == "key":
        entry[draw(st.text(max_size=4))] = entry.pop(draw(st.sampled_from(sorted(entry))))
    elif action == "remove":
        del header[name]
    elif action == "rename":
        header[draw(st.text(max_size=10))] = header.pop(name)
    else:
        other = draw(st.sampled_from(sorted(header)))
        header[name], header[other] = header[other], header[name]
    return SINGLE_FILES | {"model.safetensors": file_bytes(header, PAYLOAD)}


def damage_size(draw: st.DrawFn) -> Files:
    """A file is cut off, or goes on with its own beginning."""
    files = draw(st.sampled_from([SINGLE_FILES, SHARDED_FILES]))
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    cut = draw(st.one_of(st.integers(0, len(content)), st.integers(0, min(len(content), 200))))
    return files | {name: content + content[:cut] if draw(st.booleans()) else content[:cut]}


def damage_index(draw: st.DrawFn) -> Files:
    """The index moves, forgets or invents tensors, or names other files."""
    index = json.loads(SHARDED_FILES[INDEX])
    weight_map = index["weight_map"]
    name = draw(st.sampled_from(sorted(weight_map)))
    names = [
        *(f"part-{i}.safetensors" for i in range(SHARDS + 1)),
        "../part-0.safetensors",
        "/part-0.safetensors",
        "",
        ".",
    ]
    shard = draw(st.one_of(st.sampled_from(names), st.text(max_size=6).map(lambda t: t + ".safetensors"), JSON_VALUES))
    action = draw(st.sampled_from(["move", "remove", "add", "rename", "replace", "bytes"]))
    if action == "bytes":
        return SHARDED_FILES | {INDEX: bytes_changed(draw, SHARDED_FILES[INDEX])}
    if action == "move":
        weight_map[name] = shard
    elif action == "remove":
        del weight_map[name]
    elif action == "add":
        weight_map[draw(st.text(max_size=10))] = shard
    elif action == "rename":
        moved = weight_map[name]
        index["weight_map"] = {key: shard if value == moved else value for key, value in weight_map.items()}
    else:
        index[draw(st.sampled_from(["weight_map", "metadata", "other"]))] = draw(JSON_VALUES)
    return SHARDED_FILES | {INDEX: json_bytes(index)}


def damage_files(draw: st.DrawFn) -> Files:
    """A file is missing, doubled under another name, or exchanged with another."""
    files = dict(draw(st.sampled_from([SINGLE_FILES, SHARDED_FILES])))
    first, second = draw(st.sampled_from(sorted(files))), draw(st.sampled_from([*sorted(files), "model.safetensors"]))
    action = draw(st.sampled_from(["remove", "copy", "swap"]))
    if action == "remove":
        del files[first]
    elif action == "copy":
        files[second] = files[first]
    else:
        files[first], files[second] = files.get(second, b""), files[first]
    return files


def damage_payload(draw: st.DrawFn) -> Files:
    """One byte of the data: a scale may become NaN, everything else stays valid."""
    content = bytearray(SINGLE_FILES["model.safetensors"])
    any_byte = st.integers(0, len(PAYLOAD) - 1)
    in_scales = st.sampled_from(SCALES).flatmap(lambda offsets: st.integers(offsets[0], offsets[1] - 1))
    nan = draw(st.booleans())
    at = draw(in_scales if nan else any_byte)
    content[len(content) - len(PAYLOAD) + at] = 255 if nan else draw(st.sampled_from([0, 127, 255]))
    return SINGLE_FILES | {"model.safetensors": bytes(content)}


def damage_config(draw: st.DrawFn) -> Files:
    """config.json changes, so that it may describe another model."""
    return SINGLE_FILES | {"config.json": bytes_changed(draw, SINGLE_FILES["config.json"])}


DAMAGES: dict[Callable[[st.DrawFn], Files], tuple[int, bool]] = {
    damage_header_bytes: (40, True),
    damage_length: (20, False),
    damage_entry: (50, True),
    damage_size: (25, False),
    damage_index: (35, True),
    damage_files: (15, False),
    damage_payload: (20, True),
    damage_config: (15, True),
}
"""Kind of damage -> (number of examples, whether some examples must still load)."""

MAX_PEAK = 8 << 20
"""Bytes: the file has 1.5 MB, its header 470 entries; forged sizes reach 2^64."""

EXPECTED = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract_params(MICRO))]


def attempt(files: Files) -> bool:
    """Write the files and load them; True when they are a checkpoint, False when they are refused."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        params, message = None, ""
        tracemalloc.start()
        try:
            _, params = load_checkpoint(folder, device_put=lambda array: array)
        except CheckpointError as error:
            message = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_PEAK
        if params is None:
            assert folder in message
            assert len(message) < 5000
            message.encode("utf-8")
            return False
        assert [(np.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(params)] == EXPECTED
        return True


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_or_harmless(damage: Callable[[st.DrawFn], Files]) -> None:
    """Guards against any other exception, an unbounded allocation, and values that do not fit the model."""
    examples, some_load = DAMAGES[damage]
    outcomes: collections.Counter[bool] = collections.Counter()

    @given(st.composite(damage)())
    @settings(max_examples=examples)
    def run(files: Files) -> None:
        outcomes[attempt(files)] += 1

    run()
    assert outcomes[False] > 0
    assert not some_load or outcomes[True] > 0


def test_number_of_damaged_checkpoints() -> None:
    """Guards against trimming the search below what it is meant to cover."""
    assert sum(examples for examples, _ in DAMAGES.values()) >= 200


@pytest.mark.parametrize("files", [SINGLE_FILES, SHARDED_FILES], ids=["single", "sharded"])
def test_undamaged_checkpoints_load(files: Files) -> None:
    """Guards the search itself: what it damages is good before."""
    assert attempt(files)
