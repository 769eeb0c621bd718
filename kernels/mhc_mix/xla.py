"""Portable hyper-connections."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.quantization import quantize_dequantize_fp8
from deepinfer_jax.kernels.rms_norm_quant.xla import normalize
from deepinfer_jax.kernels.row_dot.xla import dot
from deepinfer_jax.kernels.tiling import tile_rows


def _sum(parts: jax.Array) -> jax.Array:
    """Sum over the leading axis, first to last."""
    total = parts[0]
    for i in range(1, parts.shape[0]):
        total = total + parts[i]
    return total


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Doubly normalise [T, C, C]: softmax over destinations, then alternate, ending on columns.

    Works on [source, destination, T] with sums written out: a C of 4 leaves nothing to reduce in
    parallel, and plain additions compile several times faster than 40 reductions.
    """
    matrix = jnp.moveaxis(logits, 0, -1)
    largest = matrix[:, 0]
    for j in range(1, matrix.shape[1]):
        largest = jnp.maximum(largest, matrix[:, j])
    matrix = jnp.exp(matrix - largest[:, None])

    def by_rows(current: jax.Array, floor: float) -> jax.Array:
        return current / (_sum(jnp.moveaxis(current, 1, 0)) + floor)[:, None]

    def by_columns(current: jax.Array) -> jax.Array:
        return current / (_sum(current) + eps)[None]

    matrix = by_columns(by_rows(matrix, 0.0) + eps)
    matrix = lax.fori_loop(0, iterations - 1, lambda _, current: by_columns(by_rows(current, eps)), matrix)
    return jnp.moveaxis(matrix, -1, 0)


def coefficients(
    mixes: jax.Array, base: jax.Array, scale: jax.Array, count: int, iterations: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(pre, post, comb) from the normalised projection [T, C*(2+C)]."""
    pre = jax.nn.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * jax.nn.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = mixes[:, 2 * count :] * scale[2] + base[2 * count :]
    comb = sinkhorn(logits.reshape(-1, count, count), iterations, eps)
    return pre, post, comb


def mhc_mix(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        flat = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
        return coefficients(dot(flat, fn) * inverse, base, scale, rows.shape[1], iterations, hc_eps)

    return tile_rows(tile, row_tile, streams)


def collapse_norm(
    streams: jax.Array, pre: jax.Array, weight: jax.Array | None, eps: float, row_tile: int | None
) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array, factors: jax.Array) -> jax.Array:
        total = factors[:, 0, None] * rows[:, 0].astype(jnp.float32)
        for i in range(1, rows.shape[1]):
            total = total + factors[:, i, None] * rows[:, i].astype(jnp.float32)
        collapsed = total.astype(rows.dtype)
        return collapsed if weight is None else normalize(collapsed, weight, eps)

    return tile_rows(tile, row_tile, streams, pre)


def expand(y: jax.Array, streams: jax.Array, post: jax.Array, comb: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(out: jax.Array, rows: jax.Array, factor: jax.Array, matrix: jax.Array) -> jax.Array:
        total = matrix[:, 0, :, None] * rows[:, 0, None].astype(jnp.float32)
        for i in range(1, rows.shape[1]):
            total = total + matrix[:, i, :, None] * rows[:, i, None].astype(jnp.float32)
        return (factor[:, :, None] * out[:, None].astype(jnp.float32) + total).astype(rows.dtype)

    return tile_rows(tile, row_tile, y, streams, post, comb)


def expand_collapse_norm_quant(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    quantize: bool,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, jax.Array, jax.Array]]:
    """See the contract in `api.py`."""
    new = expand(y, streams, post, comb, row_tile)
    x = collapse_norm(new, pre, weight, norm_eps, row_tile)
    quantized = tile_rows(quantize_dequantize_fp8, row_tile, x) if quantize else None
    return new, x, quantized, mhc_mix(new, fn, base, scale, iterations, norm_eps, hc_eps, row_tile)


def stream_mean(streams: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array) -> jax.Array:
        total = rows[:, 0].astype(jnp.float32)
        for i in range(1, rows.shape[1]):
            total = total + rows[:, i].astype(jnp.float32)
        return (total / rows.shape[1]).astype(rows.dtype)

    return tile_rows(tile, row_tile, streams)
