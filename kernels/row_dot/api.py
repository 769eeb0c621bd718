"""Contract of `row_dot`: products of rows with a weight, one accumulation order per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor


def _check(op: str, x: jax.Array, w: jax.Array | QuantTensor, columns: int) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{op}: rows are {x.dtype}; expected bfloat16 or float32")
    if len(w.shape) != 2 or w.shape[1] != columns:
        raise ValueError(f"{op}: weight {tuple(w.shape)} does not take rows of {columns} elements")


@contract("row_dot")
def row_dot(
    x: jax.Array,
    w: jax.Array | QuantTensor,
    *,
    quantize_input: bool = False,
    out_dtype: DTypeLike | None = None,
    column_tile: int | None = None,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """y = x @ w^T with float32 accumulation (`spec/attention.md` 7.3: L8, L16 and L32).

    Args:
        x: [T, K] bfloat16 or float32 (float32 products are true float32).
        w: [N, K] array, or packed weight of that logical shape; used in x's dtype (exact).
        quantize_input: FP8 quantise-dequantise x per 32 elements first (L8).
        out_dtype: dtype of the result, one rounding of the accumulator; default x's dtype.
        column_tile: multiply the output columns in pieces of this width (it must divide N), so that
            a weight sharded along N gives the same bits on every mesh. None = all at once.
    Returns: [T, N].
    Raises: ValueError for shapes or dtypes outside the contract.
    """
    _check("row_dot", x, w, x.shape[-1])
    if x.ndim != 2:
        raise ValueError(f"row_dot: rows have shape {x.shape}; expected [T, K]")
    if quantize_input and x.shape[1] % GROUP:
        raise ValueError(f"row_dot: cannot quantise rows of {x.shape[1]} elements in groups of {GROUP}")
    if column_tile is not None and w.shape[0] % column_tile:
        raise ValueError(f"row_dot: column_tile {column_tile} does not divide {w.shape[0]} columns")
    module = implementation_module("row_dot", implementation)
    return module.row_dot(x, w, quantize_input, out_dtype or x.dtype, column_tile, row_tile)


@contract("row_dot")
def row_dot_grouped(
    x: jax.Array,
    w: jax.Array | QuantTensor,
    *,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Grouped low-rank output projection, input not quantised (`spec/attention.md` 3.9, wo_a).

    Args:
        x: [T, G, K] bfloat16 or float32.
        w: [G * N, K]: rows g*N .. (g+1)*N belong to group g.
    Returns: [T, G, N] in x's dtype, float32 accumulation.
    """
    _check("row_dot_grouped", x, w, x.shape[-1])
    if x.ndim != 3 or w.shape[0] % x.shape[1]:
        raise ValueError(f"row_dot_grouped: {w.shape[0]} weight rows do not split into the groups of {x.shape}")
    return implementation_module("row_dot", implementation).row_dot_grouped(x, w, row_tile)
