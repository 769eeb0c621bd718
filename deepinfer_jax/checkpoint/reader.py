"""Read safetensors files by memory map, one file or sharded with an index, as untrusted input.

The `safetensors` package cannot hand FP8 tensors to NumPy, so this module reads the format itself:
8 bytes of header length, a JSON header, then the tensors without holes (`spec/style.md` 3.3).
Everything that the files claim is checked against their real sizes before any tensor is touched.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.files import (
    CheckpointError,
    exists,
    open_regular,
    parse_json,
    read_exactly,
    read_small,
    shortened,
    shown,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 64 << 20
MAX_TENSORS = 1 << 18
MAX_SHARDS = 512  # each stays open
MAX_RANK = 8
MAX_AXIS = 1 << 48

DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
"""safetensors tag -> dtype of the array. Scales and packed FP4 are bytes (`spec/blocks.md` 4.1)."""

E8M0_NAN = 255

_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes begin..end of file `shard`, counted from the start of the file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _is_count(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _parse_entry(info: Any, shard: str, base: int, payload: int, where: str) -> TensorEntry:
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: must be an object with exactly dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {shown(dtype)} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(n, MAX_AXIS) for n in shape):
        raise CheckpointError(f"{where}: shape must be a list of at most {MAX_RANK} axis sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n, payload) for n in offsets):
        raise CheckpointError(f"{where}: data_offsets must be two byte counts within the {payload} bytes of data")
    begin, end = offsets
    size = DTYPES[dtype].itemsize
    for n in shape:
        size *= n
    if end - begin != size:
        raise CheckpointError(f"{where}: data_offsets hold {end - begin} bytes, {dtype} {shape} needs {size}")
    return TensorEntry(shard, dtype, tuple(shape), base + begin, base + end)


def read_header(file: BinaryIO, size: int, shard: str, where: str) -> dict[str, TensorEntry]:
    """Parse and check the header of one safetensors file of `size` bytes.

    Raises CheckpointError, naming the file and the tensor, unless the tensors cover the data exactly,
    without overlap and without holes.
    """
    length = int.from_bytes(read_exactly(file, 8, where), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where}: header length {length} exceeds {MAX_HEADER_BYTES} bytes")
    if 8 + length > size:
        raise CheckpointError(f"{where}: header length {length} exceeds the file's {size} bytes")
    data = read_exactly(file, length, where)
    if not data.startswith(b"{"):
        raise CheckpointError(f"{where}: header does not start with '{{'; not a safetensors file")
    document = parse_json(data, f"{where}: header")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings")
    if len(document) > MAX_TENSORS:
        raise CheckpointError(f"{where}: has {len(document)} tensors; at most {MAX_TENSORS} are allowed")
    base, payload = 8 + length, size - 8 - length
    entries = {
        name: _parse_entry(info, shard, base, payload, f"{where}: tensor {shown(name)}")
        for name, info in document.items()
    }
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {shown(name)} {problem}")
        position = entry.end
    if position != size:
        raise CheckpointError(f"{where}: {size - position} bytes after the last tensor belong to no tensor")
    return entries


def _read_weight_map(folder: Path) -> dict[str, str]:
    where = str(folder / INDEX_FILE)
    document = parse_json(read_small(folder, INDEX_FILE, MAX_INDEX_BYTES), where)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map is missing, empty or not an object")
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{where}: lists {len(weight_map)} tensors; at most {MAX_TENSORS} are allowed")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{where}: tensor {shown(name)} is in {shown(shard)}, which is not a plain file name "
                "that ends in .safetensors"
            )
    shards = set(weight_map.values())
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{where}: lists {len(shards)} shards; at most {MAX_SHARDS} are allowed")
    if exists(folder, SINGLE_FILE) and SINGLE_FILE not in shards:
        raise CheckpointError(f"{where}: the folder also holds {SINGLE_FILE}; remove the one that is not meant")
    return weight_map


class Checkpoint:
    """The tensors of a folder: headers checked, data mapped into memory and read on demand.

    The files must not be truncated while this object or an array read from it is alive.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open `model.safetensors`, or the shards of `model.safetensors.index.json`.

        Raises CheckpointError for every defect that headers, index and file sizes can show.
        """
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._bytes: dict[str, np.ndarray] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: is not a folder")
        if not exists(self.folder, INDEX_FILE):
            if not exists(self.folder, SINGLE_FILE):
                raise CheckpointError(f"{self.folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
            self.entries = self._open_shard(SINGLE_FILE)
            return
        weight_map = _read_weight_map(self.folder)
        for shard in sorted(set(weight_map.values())):
            entries = self._open_shard(shard)
            for name in entries:
                if weight_map.get(name) != shard:
                    listed = shown(weight_map[name]) if name in weight_map else "no shard"
                    raise CheckpointError(
                        f"{self.folder / shard}: tensor {shown(name)} is here, but {INDEX_FILE} puts it in {listed}"
                    )
            self.entries.update(entries)
        absent = [name for name in weight_map if name not in self.entries]
        if absent:
            raise CheckpointError(
                f"{self.folder / weight_map[absent[0]]}: lacks what {INDEX_FILE} lists: "
                + shortened(absent, len(absent))
            )

    def _open_shard(self, shard: str) -> dict[str, TensorEntry]:
        file, size = open_regular(self.folder, shard)
        with file:
            entries = read_header(file, size, shard, str(self.folder / shard))
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._bytes[shard] = np.frombuffer(mapping, np.uint8)
        return entries

    def where(self, name: str) -> str:
        """File and tensor, for error messages."""
        return f"{self.folder / self.entries[name].shard}: tensor {shown(name)}"

    def read_bytes(self, name: str) -> np.ndarray:
        """uint8 [nbytes]: the stored bytes of a tensor, a read-only view of the file.

        Raises CheckpointError for a scale tensor with a NaN scale (byte 255).
        """
        entry = self.entries[name]
        data = self._bytes[entry.shard][entry.begin : entry.end]
        if entry.dtype == "F8_E8M0" and data.size and data.max() == E8M0_NAN:
            row = int(np.argmax(data == E8M0_NAN))
            raise CheckpointError(f"{self.where(name)}: scale number {row} is NaN (byte 255)")
        return data

    def read(self, name: str) -> np.ndarray:
        """A tensor in its shape and in the dtype of DTYPES; read-only, a view of the file where aligned.

        Raises CheckpointError for a scale tensor with a NaN scale.
        """
        entry = self.entries[name]
        data = self.read_bytes(name)
        dtype = DTYPES[entry.dtype]
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()
            data.flags.writeable = False
        return data.view(dtype).reshape(entry.shape)
