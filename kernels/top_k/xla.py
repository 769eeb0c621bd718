"""Portable selection. `lax.top_k` on integers is exact, and breaks ties by the lower index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = np.int32(np.iinfo(np.int32).min)
HIGHEST = np.int32(np.iinfo(np.int32).max)
MINUS_INFINITY_KEY = np.int32(np.uint32(0xFF800000 ^ 0x7FFFFFFF).astype(np.int32))


def order_key(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the float32 values, with -0 equal to +0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(bits == LOWEST, 0, bits)  # LOWEST is the pattern of -0
    return bits ^ ((bits >> 31) & HIGHEST)


def _pad_columns(x: jax.Array, columns: int, value: np.int32) -> jax.Array:
    missing = columns - x.shape[1]
    return x if missing <= 0 else jnp.pad(x, ((0, 0), (0, missing)), constant_values=value)


def top_k(scores: jax.Array, k: int, block_mask: jax.Array | None, block_size: int) -> jax.Array:
    """See the contract in `api.py`."""
    keys = order_key(lax.stop_gradient(scores))
    if block_mask is not None:
        allowed = jnp.repeat(block_mask, block_size, axis=1)[:, : keys.shape[1]]
        keys = jnp.where(allowed, keys, MINUS_INFINITY_KEY)
    best, positions = lax.top_k(_pad_columns(keys, k, MINUS_INFINITY_KEY), k)
    ascending = jnp.sort(jnp.where(best > MINUS_INFINITY_KEY, positions, HIGHEST), axis=1)
    return jnp.where(ascending == HIGHEST, -1, ascending).astype(jnp.int32)


def candidate_blocks(scores: jax.Array, visible: jax.Array, block_size: int, blocks: int) -> jax.Array:
    """See the contract in `api.py`."""
    rows = scores.shape[0]
    count = -(-scores.shape[1] // block_size)
    keys = _pad_columns(order_key(lax.stop_gradient(scores)), count * block_size, MINUS_INFINITY_KEY)
    best = jnp.max(keys.reshape(rows, count, block_size), axis=2)
    newest = (visible - 1) // block_size
    best = jnp.where(jnp.arange(count)[None] == newest[:, None], HIGHEST, best)
    values, kept = lax.top_k(best, min(blocks, count))
    kept = jnp.where(values > MINUS_INFINITY_KEY, kept, count)
    mask = jnp.zeros((rows, count), bool)
    return mask.at[jnp.arange(rows)[:, None], kept].set(True, mode="drop")
