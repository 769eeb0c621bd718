"""Write `Params` as a checkpoint folder of the released format; the same parameters give the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import numpy as np

from deepinfer_jax.checkpoint.engram_map import MAP_FILE, check_token_map, token_map_bytes
from deepinfer_jax.checkpoint.files import CheckpointError
from deepinfer_jax.checkpoint.load import CONFIG_FILE
from deepinfer_jax.checkpoint.reader import DTYPES, E8M0_NAN, INDEX_FILE, SINGLE_FILE
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import CheckpointTensor, Parameter, Params, build_params, checkpoint_table

ShardLayout = Literal["single", "released"]

_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for a leaf of Params: which declaration it holds, and of which layers."""

    parameter: Parameter
    lead: tuple[int, ...]
    prefixes: tuple[str, ...]

    def arrays(self, leaf: Any) -> Iterator[tuple[CheckpointTensor, np.ndarray]]:
        """Each checkpoint tensor of the leaf with its elements, flat."""
        tensors = [t for prefix in self.prefixes for t in self.parameter.checkpoint_tensors(prefix)]
        abstract = self.parameter.abstract(self.lead)
        if not isinstance(abstract, QuantTensor):
            yield from _rows(leaf, abstract, tensors)
        elif not isinstance(leaf, QuantTensor) or leaf.format != abstract.format:
            raise ValueError(f"{tensors[0].name}: the parameter is not a QuantTensor of format {abstract.format!r}")
        else:
            yield from _rows(leaf.data, abstract.data, tensors[0::2])
            yield from _rows(leaf.scale, abstract.scale, tensors[1::2])


def _rows(leaf: Any, expected: Any, tensors: list[CheckpointTensor]) -> Iterator[tuple[CheckpointTensor, np.ndarray]]:
    array = np.asarray(leaf)
    if array.shape != expected.shape or array.dtype != expected.dtype:
        raise ValueError(
            f"{tensors[0].name}: the parameter is {array.dtype} {list(array.shape)}, but the configuration "
            f"needs {expected.dtype} {list(expected.shape)}"
        )
    rows = np.ascontiguousarray(array).reshape(len(tensors), -1)
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor.dtype == "F8_E8M0" and row.max() == E8M0_NAN:
            raise ValueError(f"{tensor.name}: holds a NaN scale (byte 255)")
        yield tensor, row


def _unstack(params: Params) -> dict[str, np.ndarray]:
    """Checkpoint name -> flat host array, a view into its leaf."""
    result: dict[str, np.ndarray] = {}

    def visit(slot: _Slot, leaf: Any) -> None:
        result.update((tensor.name, row) for tensor, row in slot.arrays(leaf))

    slots = build_params(params.config, _Slot)
    leaves = dataclasses.replace(params, engram_token_map=None)
    jax.tree.map(visit, slots, leaves, is_leaf=lambda node: isinstance(node, _Slot))
    return result


def _released_shard(name: str) -> tuple[int, int]:
    """Sort key of the released file that holds a tensor (`spec/blocks.md` 4.3)."""
    first, _, rest = name.partition(".")
    if first in ("layers", "mtp"):
        number, _, rest = rest.partition(".")
        if first == "mtp":
            return 4, int(number)
        return (5 if rest.startswith("engram.") else 2), int(number)
    return {"embed": 1, "norm": 3, "head": 3}.get(first, 0), 0


def shard_layout(config: ModelConfig, shards: ShardLayout = "single") -> dict[str, tuple[CheckpointTensor, ...]]:
    """File name -> tensors in file order.

    "single": everything in model.safetensors. "released": vision, embedding, one file per layer,
    head with norm, one file per draft stage, one per Engram layer. Wider elements come first in a
    file, then names ascend, so that every tensor is aligned to its element size.
    """
    groups: dict[tuple[int, int], list[CheckpointTensor]] = {}
    for tensor in checkpoint_table(config):
        key = _released_shard(tensor.name) if shards == "released" else (0, 0)
        groups.setdefault(key, []).append(tensor)
    ordered = [tuple(sorted(groups[key], key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))) for key in sorted(groups)]
    if shards == "single":
        return {SINGLE_FILE: ordered[0]}
    return {f"model-{i:05d}-of-{len(ordered):05d}.safetensors": group for i, group in enumerate(ordered, 1)}


def header_bytes(tensors: Iterable[CheckpointTensor]) -> bytes:
    """Length and header of a safetensors file that holds the tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # other libraries ask for this entry
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(folder: Path, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Write under a temporary name and rename, so that `name` is never seen half written."""
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(folder: Path, name: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    _write_file(folder, name, lambda file: file.write(text.encode()))


def _present(folder: Path) -> list[str]:
    """Names of checkpoint files that the folder already holds."""
    fixed = (CONFIG_FILE, SINGLE_FILE, INDEX_FILE, MAP_FILE)
    return sorted(p.name for p in folder.iterdir() if p.name in fixed or _SHARD_FILE.fullmatch(p.name))


def save_checkpoint(
    folder: str | Path,
    params: Params,
    *,
    shards: ShardLayout = "single",
    overwrite: bool = False,
) -> None:
    """Write a checkpoint folder that `load_checkpoint` reads back bit for bit.

    Args:
        folder: made when missing. Files that are no checkpoint files (a tokenizer) stay as they are.
        params: stacked leaves as `build_params` makes them; all of them are copied to the host.
        shards: see `shard_layout`. More than one file comes with an index.
        overwrite: replace a checkpoint that is there, whatever its layout was.

    Raises:
        CheckpointError: the folder holds a checkpoint and `overwrite` is False.
        ValueError: a leaf does not fit `params.config`, or holds a NaN scale. Nothing is written.
    """
    folder = Path(folder)
    config = params.config
    arrays = _unstack(params)
    token_map = None
    if config.engram_layer_ids:
        if params.engram_token_map is None:
            raise ValueError("engram_token_map: is None, but the configuration has Engram layers")
        token_map = np.asarray(params.engram_token_map)
        check_token_map(token_map, config, "engram_token_map")
    folder.mkdir(parents=True, exist_ok=True)
    present = _present(folder)
    if present and not overwrite:
        raise CheckpointError(f"{folder / present[0]}: exists already; choose another folder or pass overwrite=True")

    layout = shard_layout(config, shards)
    written = {CONFIG_FILE, *layout}
    for name, tensors in layout.items():
        _write_file(folder, name, lambda file, tensors=tensors: _write_tensors(file, tensors, arrays))
    if token_map is not None:
        content = token_map_bytes(token_map)
        _write_file(folder, MAP_FILE, lambda file: file.write(content))
        written.add(MAP_FILE)
    _write_json(folder, CONFIG_FILE, config.to_dict())
    if shards != "single":
        weight_map = {tensor.name: name for name, tensors in layout.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in layout.values() for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder, INDEX_FILE, index)
        written.add(INDEX_FILE)
    for name in set(present) - written:
        (folder / name).unlink()


def _write_tensors(file: BinaryIO, tensors: tuple[CheckpointTensor, ...], arrays: dict[str, np.ndarray]) -> None:
    file.write(header_bytes(tensors))
    for tensor in tensors:
        file.write(arrays[tensor.name].view(np.uint8).data)
