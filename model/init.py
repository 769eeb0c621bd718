"""Random parameters that keep routing, gates and selections alive."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.quantization import (
    GROUP,
    QuantTensor,
    e4m3_bytes,
    pack_nibbles,
    power_of_two_scale_byte,
    quantize_fp4,
    quantize_fp8,
)
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import Parameter, Params, build_params

_GAIN = 1.5  # weights ~ N(0, 1.5^2 / fan_in) give attention and routing that are not flat


def quantize_weight(values: jax.Array, storage: str) -> QuantTensor:
    """Pack float32 weights [..., out, in] into checkpoint storage "fp8", "fp4" or "fp8_row"."""
    if storage == "fp4":
        codes, scale = quantize_fp4(values)
        return QuantTensor(pack_nibbles(codes), scale, "fp4")
    if storage == "fp8_row":
        codes, scale = quantize_fp8(values)
        return QuantTensor(e4m3_bytes(codes), scale, "fp8_row")
    *lead, rows, columns = values.shape
    blocks = values.reshape(*lead, rows // GROUP, GROUP, columns // GROUP, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=(-3, -1)), np.float32(1e-4))
    scale = power_of_two_scale_byte(amax, 448.0)
    quotient = blocks / jnp.exp2(scale.astype(jnp.float32) - 127)[..., :, None, :, None]
    codes = jnp.clip(quotient, -448, 448).astype(jnp.float8_e4m3fn)
    return QuantTensor(e4m3_bytes(codes).reshape(values.shape), scale, "fp8")


def _draw(parameter: Parameter, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """float32 values of one stacked parameter."""
    kind = parameter.init
    normal = jax.random.normal(key, shape, jnp.float32)
    if kind == "linear":
        return normal * (_GAIN / np.sqrt(parameter.shape[-1]))
    if kind == "hc_fn":
        return normal / np.sqrt(parameter.shape[-1])
    if kind == "ones":
        return 1 + 0.1 * normal
    if kind == "hc_scale":
        return 1 + 0.2 * normal
    if kind == "bias":
        return 0.1 * normal
    if kind == "hc_base":
        return 0.5 * normal
    if kind == "zeros":
        return jnp.zeros(shape, jnp.float32)
    return normal  # embedding, sink


def init_params(config: ModelConfig, key: jax.Array, engram_token_map: jax.Array | None = None) -> Params:
    """Draw a model in the released storage. key: typed PRNG key.

    Every parameter has its own key (folded from its name), so adding one changes no other.
    engram_token_map: int32 [vocab_size]; default: token id modulo the number of classes.
    """
    if config.engram_layer_ids and engram_token_map is None:
        engram_token_map = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_compressed_vocab_size

    def place(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        own = jax.random.fold_in(key, zlib.crc32((prefixes[0] + parameter.key).encode()))
        experts = (parameter.experts,) if parameter.experts else ()
        values = _draw(parameter, (*lead, *experts, *parameter.shape), own)
        if parameter.quantized:
            return quantize_weight(values, parameter.storage)
        return values.astype(jnp.bfloat16 if parameter.storage == "bf16" else jnp.float32)

    return build_params(config, place, engram_token_map)
