"""Contract of `pool_pair`: the ratio-2 compressor's gated pooling."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module


@contract("pool_pair")
def pool_pair(
    values: jax.Array,
    gates: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    out_dtype: DTypeLike,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Softmax over the two tokens per channel, weighted sum, norm (`spec/attention.md` 3.4).

    Args:
        values, gates: float32 [T, 2, d], the older token first. weight: [d] of compressor.norm.
        out_dtype: the pooled value is rounded to it before the norm.
    Returns: [T, d] in out_dtype.
    """
    if values.shape != gates.shape or values.ndim != 3 or values.shape[1] != 2:
        raise ValueError(f"pool_pair: values {values.shape} and gates {gates.shape} must both be [T, 2, d]")
    if weight.shape != values.shape[2:]:
        raise ValueError(f"pool_pair: weight {weight.shape} does not fit values {values.shape}")
    module = implementation_module("pool_pair", implementation)
    return module.pool_pair(values, gates, weight, eps, out_dtype, row_tile)
