"""Small checkpoint folders for tests, built from the tensor table without the package's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import CheckpointTensor, checkpoint_table

DATA = Path(__file__).parent / "data" / "checkpoint"


def random_bytes(tensor: CheckpointTensor, random: np.random.Generator) -> bytes:
    """Any bytes, except that scales are ordinary powers of two and floats are finite."""
    if tensor.dtype == "F8_E8M0":
        return random.integers(118, 128, tensor.nbytes, np.uint8).tobytes()
    if tensor.dtype == "F32":
        return random.standard_normal(tensor.shape).astype(np.float32).tobytes()
    if tensor.dtype == "BF16":  # the high halves of finite float32 numbers
        return random.standard_normal(tensor.shape).astype(np.float32).view(np.uint16).reshape(-1)[1::2].tobytes()
    return random.integers(0, 127, tensor.nbytes, np.uint8).tobytes()


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[CheckpointTensor, bytes]:
    """A value for every tensor of the table, in table order."""
    random = np.random.default_rng(seed)
    return {tensor: random_bytes(tensor, random) for tensor in checkpoint_table(config)}


def header_of(tensors: Sequence[CheckpointTensor]) -> dict[str, Any]:
    """The header document of a file that holds the tensors in this order."""
    header: dict[str, Any] = {}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    return header


def file_bytes(header: dict[str, Any] | bytes, payload: bytes) -> bytes:
    """A safetensors file; `header` may be any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + payload


def token_map(config: ModelConfig) -> np.ndarray:
    """Some map onto all classes."""
    return (np.arange(config.vocab_size) % config.engram_compressed_vocab_size).astype(np.int32)


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[CheckpointTensor, bytes], shards: int = 1) -> None:
    """Write config.json, the token map and the tensors, dealt out over `shards` files in turn."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    if config.engram_layer_ids:
        np.save(folder / "engram_token_map.npy", token_map(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(file_bytes(header_of(list(tensors)), b"".join(tensors.values())))
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"part-{shard}.safetensors"
        own = list(tensors)[shard::shards]
        (folder / name).write_bytes(file_bytes(header_of(own), b"".join(tensors[tensor] for tensor in own)))
        weight_map.update((tensor.name, name) for tensor in own)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
