"""Portable `sparse_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.quantization import CacheFormat, unpack_cache
from deepinfer_jax.kernels.tiling import tile_rows


def attend(queries: jax.Array, keys: jax.Array, valid: jax.Array, sink: jax.Array, scale: float) -> jax.Array:
    """queries [T, H, d], keys [T, M, d] (also values), valid [T, M]."""
    keys = jnp.where(valid[:, :, None], keys, 0)
    logits = lax.dot_general(
        queries,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    logits = jnp.where(valid[:, None, :], logits * scale, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # A row without a visible slot gives zeros, and its sink stays finite: so does its gradient.
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = jnp.exp(logits - lax.stop_gradient(largest))
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[None, :, None] - lax.stop_gradient(largest))
    output = lax.dot_general(
        weights.astype(queries.dtype),
        keys,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (output / total).astype(queries.dtype)


def sparse_attention(
    queries: jax.Array,
    window: jax.Array,
    window_rows: jax.Array,
    compressed: jax.Array | None,
    compressed_rows: jax.Array | None,
    sink: jax.Array,
    window_format: CacheFormat,
    compressed_format: CacheFormat,
    scale: float,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""
    size = queries.shape[2]

    def tile(q: jax.Array, rows: jax.Array, *selected: jax.Array) -> jax.Array:
        keys = unpack_cache(window[jnp.maximum(rows, 0)], window_format, size)
        slots = rows
        if selected:
            assert compressed is not None
            more = unpack_cache(compressed[jnp.maximum(selected[0], 0)], compressed_format, size)
            keys = jnp.concatenate([keys, more], axis=1)
            slots = jnp.concatenate([rows, selected[0]], axis=1)
        return attend(q, keys.astype(q.dtype), slots >= 0, sink, scale)

    extra = () if compressed_rows is None else (compressed_rows,)
    return tile_rows(tile, row_tile, queries, window_rows, *extra)
