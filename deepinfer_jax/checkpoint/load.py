"""Load a checkpoint folder into `Params`: check every tensor first, then fill leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.checkpoint.engram_map import load_token_map
from deepinfer_jax.checkpoint.files import (
    CheckpointError,
    check_depth,
    parse_json,
    read_small,
    shortened,
)
from deepinfer_jax.checkpoint.reader import MAX_TENSORS, Checkpoint
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import (
    CheckpointTensor,
    Parameter,
    Params,
    all_parameters,
    build_params,
    checkpoint_table,
)

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1 << 20
_MAX_MESSAGE = 1000  # an error may quote a value of any length

_ALIGNMENT = 64  # jax on CPU takes over a NumPy buffer without a copy from this alignment on

DevicePut = Callable[[np.ndarray], Any]
"""Moves a host array, which nobody else holds, to where the model wants it."""

PlaceHook = Callable[[Checkpoint, Parameter, tuple[int, ...], tuple[str, ...]], Any]
"""(checkpoint, declaration, leading axes, checkpoint prefixes) -> leaf, or None for the usual way."""


def load_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` of a checkpoint folder; CheckpointError names the file and the field."""
    folder = Path(folder)
    where = str(folder / CONFIG_FILE)
    document = parse_json(read_small(folder, CONFIG_FILE, MAX_CONFIG_BYTES), where)
    check_depth(document, where)
    try:
        config = ModelConfig.from_dict(document)
    except ValueError as error:
        text = str(error).removeprefix(f"{CONFIG_FILE}: ")
        raise CheckpointError(f"{where}: {text[:_MAX_MESSAGE]}") from error
    count = sum((p.experts or 1) * (2 if p.quantized else 1) for _, p in all_parameters(config))
    if count > MAX_TENSORS:
        raise CheckpointError(f"{where}: describes {count} tensors; at most {MAX_TENSORS} are allowed")
    return config


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError unless names, dtypes and shapes are exactly those of `checkpoint_table`."""
    expected = {tensor.name: tensor for tensor in checkpoint_table(config)}
    missing = [name for name in expected if name not in checkpoint.entries]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: lacks {len(missing)} of {len(expected)} tensors: {shortened(missing, len(missing))}"
        )
    extra = [name for name in checkpoint.entries if name not in expected]
    if extra:
        others = f", nor do {shortened(extra[1:], len(extra) - 1)}" if len(extra) > 1 else ""
        raise CheckpointError(f"{checkpoint.where(extra[0])} does not belong to this model{others}")
    for name, tensor in expected.items():
        entry = checkpoint.entries[name]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"{checkpoint.where(name)} is {entry.dtype} {list(entry.shape)}, but config.json needs "
                f"{tensor.dtype} {list(tensor.shape)}"
            )


def _stack(checkpoint: Checkpoint, tensors: list[CheckpointTensor], abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """One new host array of the abstract shape and dtype, filled with the tensors in row-major order."""
    size = sum(tensor.nbytes for tensor in tensors)
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    flat = buffer[start : start + size]
    position = 0
    for tensor in tensors:
        data = checkpoint.read_bytes(tensor.name)
        flat[position : position + data.size] = data
        position += data.size
    return flat.view(abstract.dtype).reshape(abstract.shape)


def read_leaf(
    checkpoint: Checkpoint,
    parameter: Parameter,
    lead: tuple[int, ...],
    prefixes: tuple[str, ...],
    device_put: DevicePut = jax.device_put,
) -> Any:
    """The leaf of one declaration: all its layers and experts stacked, [*lead, experts, *shape].

    Returns what `device_put` makes of the host array, in a QuantTensor for quantised storage.
    Takes host memory for this leaf once. Raises CheckpointError for NaN scales.
    """
    tensors = [tensor for prefix in prefixes for tensor in parameter.checkpoint_tensors(prefix)]
    abstract = parameter.abstract(lead)
    if not isinstance(abstract, QuantTensor):
        return device_put(_stack(checkpoint, tensors, abstract))
    data: Any = abstract.data
    scale: Any = abstract.scale
    stacked_scale = _stack(checkpoint, tensors[1::2], scale)  # first: small, and may be refused
    stacked_data = device_put(_stack(checkpoint, tensors[0::2], data))
    return QuantTensor(stacked_data, device_put(stacked_scale), abstract.format)


def load_checkpoint(
    folder: str | Path,
    *,
    device_put: DevicePut = jax.device_put,
    place: PlaceHook | None = None,
) -> tuple[ModelConfig, Params]:
    """Load a checkpoint folder of the released format (`spec/blocks.md` 4).

    Args:
        folder: holds config.json, model.safetensors or its shards with an index, and, for Engram
            layers, engram_token_map.npy or tokenizer.json.
        device_put: makes a leaf array from a host array. Host memory peaks at one leaf when it copies
            to another device.
        place: called first for every leaf; what it returns is used unless it is None. It can keep a
            large table mapped on the host (`checkpoint.read(name)`) or split it over devices.

    Returns:
        The configuration and the parameters: bfloat16, float32, and packed QuantTensor leaves.

    Raises:
        CheckpointError: anything is missing, left over, damaged or inconsistent. Names, dtypes, shapes
            and sizes are all checked before the first tensor is read.
    """
    folder = Path(folder)
    config = load_config(folder)
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint, config)
    token_map = load_token_map(folder, config)

    def place_leaf(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        leaf = place(checkpoint, parameter, lead, prefixes) if place is not None else None
        return leaf if leaf is not None else read_leaf(checkpoint, parameter, lead, prefixes, device_put)

    return config, build_params(config, place_leaf, None if token_map is None else device_put(token_map))
