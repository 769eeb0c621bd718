"""Portable norms, rotary embedding and cache packing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.quantization import CacheFormat, dequantize_fp4, pack_cache, quantize_fp4
from deepinfer_jax.kernels.tiling import tile_rows


def normalize(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm of the last axis: float32 inside, one rounding to x's dtype."""
    values = x.astype(jnp.float32)
    mean_square = jnp.mean(values * values, axis=-1, keepdims=True)
    return (weight.astype(jnp.float32) * (values * lax.rsqrt(mean_square + eps))).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array, inverse: bool) -> jax.Array:
    """Rotate the tail of [T, ..., d]; positions [T]."""
    half = inverse_frequencies.shape[0]
    angle = positions.astype(jnp.float32)[:, None] * inverse_frequencies
    angle = angle.reshape(x.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if inverse:
        sin = -sin
    tail = x[..., -2 * half :].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(tail.shape)
    return jnp.concatenate([x[..., : -2 * half], rotated.astype(x.dtype)], axis=-1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""
    return tile_rows(lambda rows: normalize(rows, weight, eps), row_tile, x)


def rotary(
    x: jax.Array,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    inverse: bool,
    quantize: bool,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array, where: jax.Array) -> jax.Array:
        rotated = rotate(rows, where, inverse_frequencies, inverse)
        return dequantize_fp4(*quantize_fp4(rotated)).astype(rows.dtype) if quantize else rotated

    return tile_rows(tile, row_tile, x, positions)


def norm_rotary_pack(
    x: jax.Array,
    weight: jax.Array | None,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    fmt: CacheFormat,
    eps: float,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array, where: jax.Array) -> jax.Array:
        normed = rows if weight is None else normalize(rows, weight, eps)
        return pack_cache(rotate(normed, where, inverse_frequencies, False), fmt)

    return tile_rows(tile, row_tile, x, positions)
