"""Portable `pool_pair`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.rms_norm_quant.xla import normalize
from deepinfer_jax.kernels.tiling import tile_rows


def pool_pair(
    values: jax.Array,
    gates: jax.Array,
    weight: jax.Array,
    eps: float,
    out_dtype: DTypeLike,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(u: jax.Array, z: jax.Array) -> jax.Array:
        largest = jnp.maximum(z[:, 0], z[:, 1])
        first, second = jnp.exp(z[:, 0] - largest), jnp.exp(z[:, 1] - largest)
        total = first + second
        pooled = (first / total) * u[:, 0] + (second / total) * u[:, 1]
        return normalize(pooled.astype(out_dtype), weight, eps)

    return tile_rows(tile, row_tile, values, gates)
