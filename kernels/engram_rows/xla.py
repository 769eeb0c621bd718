"""Portable Engram."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.quantization import QuantTensor, dequantize_rows
from deepinfer_jax.kernels.tiling import tile_rows


def _remainder(high: jax.Array, low: jax.Array, moduli: jax.Array) -> jax.Array:
    """(high * 2^32 + low) mod moduli, byte by byte: moduli < 2^24, so nothing exceeds 32 bits."""
    result = high[:, None] % moduli
    for shift in (24, 16, 8, 0):
        result = ((result << 8) | ((low[:, None] >> shift) & 0xFF)) % moduli
    return result


def engram_hash(classes: jax.Array, products: jax.Array, moduli: jax.Array, offsets: jax.Array) -> jax.Array:
    """See the contract in `api.py`."""
    ngram = classes.shape[1]
    heads = moduli.shape[0] // (ngram - 1)
    high, low = products[0, classes[:, 0], 0], products[0, classes[:, 0], 1]
    columns = []
    for back in range(1, ngram):
        high = high ^ products[back, classes[:, back], 0]
        low = low ^ products[back, classes[:, back], 1]
        columns.append(_remainder(high, low, moduli[(back - 1) * heads : back * heads]))
    return jnp.concatenate(columns, axis=1).astype(jnp.int32) + offsets


def engram_rows(table: QuantTensor, row_ids: jax.Array, dtype: DTypeLike, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(ids: jax.Array) -> jax.Array:
        values = dequantize_rows(table.data[ids], table.scale[ids]).astype(dtype)
        return values.reshape(ids.shape[0], -1)

    return tile_rows(tile, row_tile, row_ids)


def engram_gate(
    streams: jax.Array,
    projected: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    keep: jax.Array,
    eps: float,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array]:
    """See the contract in `api.py`."""
    count, size = q_weight.shape

    def tile(rows: jax.Array, memory: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = rows.astype(jnp.float32)
        keys = memory[:, : count * size].reshape(-1, count, size).astype(jnp.float32)
        value = memory[:, count * size :].astype(jnp.float32)
        weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
        norm_h = lax.rsqrt(jnp.mean(h * h, axis=-1) + eps)
        norm_k = lax.rsqrt(jnp.mean(keys * keys, axis=-1) + eps)
        product = jnp.sum(h * weight * keys, axis=-1) * norm_h * norm_k / math.sqrt(size)
        root = jnp.sqrt(jnp.maximum(jnp.abs(product), 1e-6))
        gate = jax.nn.sigmoid(jnp.where(jnp.signbit(product), -root, root))
        added = (h + gate[:, :, None] * value[:, None]).astype(rows.dtype)
        # A select, not a product with zero: image rows keep their exact bits.
        return jnp.where(live[:, None, None], added, rows), jnp.where(live[:, None], gate, 0.0)

    return tile_rows(tile, row_tile, streams, projected, keep)
