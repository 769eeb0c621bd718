"""Random parameters that keep routing, gates and selections alive.

Drawn on the host from integers, so that a key gives the same weights on every machine and backend.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.quantization import (
    GROUP,
    QuantTensor,
    e4m3_bytes,
    e8m0_to_float32,
    pack_nibbles,
    power_of_two_scale_byte,
    quantize_fp4,
    quantize_fp8,
)
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import Parameter, Params, build_params

_GAIN = 1.5  # weights ~ N(0, 1.5^2 / fan_in) give attention and routing that are not flat
_PIECE = 1 << 18  # elements quantised at once: few shapes, hence few compilations

Pair = tuple[jax.Array, jax.Array]


def _quantize_block(x: jax.Array) -> Pair:
    """e4m3 bytes and one e8m0 byte of each 32x32 block [n, 1024]."""
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=1), np.float32(1e-4))
    scale = power_of_two_scale_byte(amax, 448.0)
    codes = jnp.clip(x / e8m0_to_float32(scale)[:, None], -448, 448).astype(jnp.float8_e4m3fn)
    return e4m3_bytes(codes), scale[:, None]


def _quantize_row(x: jax.Array) -> Pair:
    codes, scale = quantize_fp8(x)
    return e4m3_bytes(codes), scale


def _quantize_nibbles(x: jax.Array) -> Pair:
    codes, scale = quantize_fp4(x)
    return pack_nibbles(codes), scale


def _in_pieces(function: Callable[[jax.Array], Pair], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Apply a quantiser to [n, k] in pieces of one size."""
    rows, width = values.shape
    step = _PIECE // width
    padded = np.zeros((-(-rows // step) * step, width), np.float32)
    padded[:rows] = values
    parts = [function(jnp.asarray(padded[i : i + step])) for i in range(0, len(padded), step)]
    data, scale = (np.concatenate([np.asarray(part[i]) for part in parts])[:rows] for i in (0, 1))
    return data, scale


def quantize_weight(values: np.ndarray, storage: str) -> QuantTensor:
    """Pack float32 weights [..., out, in] into checkpoint storage "fp8", "fp4" or "fp8_row"."""
    *lead, rows, columns = values.shape
    if storage == "fp8":
        blocks = values.reshape(-1, rows // GROUP, GROUP, columns // GROUP, GROUP)
        data, scale = _in_pieces(_quantize_block, blocks.swapaxes(2, 3).reshape(-1, GROUP * GROUP))
        data = data.reshape(-1, rows // GROUP, columns // GROUP, GROUP, GROUP).swapaxes(2, 3)
        scale = scale.reshape(*lead, rows // GROUP, columns // GROUP)
        return QuantTensor(jnp.asarray(data.reshape(values.shape)), jnp.asarray(scale), "fp8")
    groups = values.reshape(-1, GROUP)
    data, scale = _in_pieces(_quantize_nibbles if storage == "fp4" else _quantize_row, groups)
    shape = (*lead, rows, columns // GROUP)
    packed = jnp.asarray(data.reshape(*lead, rows, -1))
    return QuantTensor(packed, jnp.asarray(scale.reshape(shape)), "fp4" if storage == "fp4" else "fp8_row")


def _bell(key: jax.Array, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal float32 values: each is a sum of four 16-bit integers from one Philox word.

    Integers, because NumPy promises the raw words of a bit generator for ever, but not its normals.
    """
    words = np.asarray(jax.random.key_data(key)).astype(np.uint64).ravel()
    own = np.array([words[0] << np.uint64(32) | words[-1], zlib.crc32(name.encode())], np.uint64)
    raw = np.random.Philox(key=own).random_raw(int(np.prod(shape)))
    total = sum(((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int32) for i in range(4))
    deviation = 65536 * np.sqrt(4 / 12)
    return ((total - 2 * 65535) / deviation).astype(np.float32).reshape(shape)


def _scaled(parameter: Parameter, bell: np.ndarray) -> np.ndarray:
    """float32 values of one parameter from unit-variance ones."""
    kind = parameter.init
    if kind == "linear":
        return bell * np.float32(_GAIN / np.sqrt(parameter.shape[-1]))
    if kind == "hc_fn":
        return bell / np.float32(np.sqrt(parameter.shape[-1]))
    if kind == "ones":
        return 1 + np.float32(0.1) * bell
    if kind == "hc_scale":
        return 1 + np.float32(0.2) * bell
    if kind == "bias":
        return np.float32(0.1) * bell
    if kind == "hc_base":
        return np.float32(0.5) * bell
    if kind == "zeros":
        return np.zeros_like(bell)
    return bell  # embedding, sink


def init_params(config: ModelConfig, key: jax.Array, engram_token_map: jax.Array | None = None) -> Params:
    """Draw a model in the released storage. key: typed PRNG key.

    Every parameter of every layer has its own stream (named by its checkpoint name), so adding one
    changes no other. engram_token_map: int32 [vocab_size]; default: token id modulo the classes.
    """
    if config.engram_layer_ids and engram_token_map is None:
        engram_token_map = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_compressed_vocab_size

    def place(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        experts = (parameter.experts,) if parameter.experts else ()
        shape = (*experts, *parameter.shape)
        values = np.stack([_scaled(parameter, _bell(key, prefix + parameter.key, shape)) for prefix in prefixes])
        values = values.reshape(*lead, *shape)
        if parameter.quantized:
            return quantize_weight(values, parameter.storage)
        return jnp.asarray(values, jnp.bfloat16 if parameter.storage == "bf16" else jnp.float32)

    return build_params(config, place, engram_token_map)
