"""Portable `row_dot`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.quantization import QuantTensor, dequantize, quantize_dequantize_fp8
from deepinfer_jax.kernels.tiling import tile_rows


def weight_values(w: jax.Array | QuantTensor, dtype: DTypeLike) -> jax.Array:
    """The weight in the operand dtype (exact for packed and bfloat16 weights)."""
    return dequantize(w, dtype) if isinstance(w, QuantTensor) else w.astype(dtype)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., K] @ [N, K]^T in float32; the precision is named so that no backend lowers it."""
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def row_dot(
    x: jax.Array,
    w: jax.Array | QuantTensor,
    quantize_input: bool,
    out_dtype: DTypeLike,
    column_tile: int | None,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""
    values = weight_values(w, x.dtype)

    def tile(rows: jax.Array) -> jax.Array:
        operand = quantize_dequantize_fp8(rows) if quantize_input else rows
        if column_tile is None or column_tile == values.shape[0]:
            return dot(operand, values).astype(out_dtype)
        pieces = values.reshape(-1, column_tile, values.shape[1])
        columns = lax.map(lambda piece: dot(operand, piece).astype(out_dtype), pieces)
        return jnp.moveaxis(columns, 0, 1).reshape(rows.shape[0], -1)

    return tile_rows(tile, row_tile, x)


def row_dot_grouped(x: jax.Array, w: jax.Array | QuantTensor, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""
    groups, columns = x.shape[1], x.shape[2]
    values = weight_values(w, x.dtype).reshape(groups, -1, columns)

    def tile(rows: jax.Array) -> jax.Array:
        y = lax.dot_general(
            rows,
            values,
            (((2,), (2,)), ((1,), (0,))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return jnp.moveaxis(y, 0, 1).astype(rows.dtype)

    return tile_rows(tile, row_tile, x)
