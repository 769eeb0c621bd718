"""Mosaic-GPU `row_dot`: FP8 and bfloat16 weights times bfloat16 rows, accumulated in float32.

A row's bits depend on the row, the weight and the weight's shape only (`shapes.py`). The element formats have
limits that the data must keep, because nothing can raise from inside a compiled program: scales up to 2^7 (larger
ones, and the NaN byte, give NaN), and no NaN codes (0x7F and 0xFF would count as 480 and -480).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.mosaic.quantize import quantize_rows
from deepinfer_jax.kernels.mosaic.target import Architecture, architecture
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor
from deepinfer_jax.kernels.row_dot import mosaic_sm90, mosaic_sm100, shapes, shapes_sm100
from deepinfer_jax.kernels.row_dot.shapes import BLOCK

Weight = jax.Array | QuantTensor


def _check(op: str, x: jax.Array, w: Weight, out_dtype: DTypeLike) -> Architecture:
    """The target. NotImplementedError, with the reason, for what there is no kernel for."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"{op}: mosaic_gpu multiplies bfloat16 rows, whose products are exact in float32; true {x.dtype} products "
            "have no tensor core instruction. Use the xla implementation for float32 profiles"
        )
    if isinstance(w, QuantTensor):
        if w.format != "fp8":
            raise NotImplementedError(f"{op}: mosaic_gpu has no kernel for {w.format!r} weights; only fp8 and bfloat16")
    elif w.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"{op}: mosaic_gpu multiplies bfloat16 rows with fp8 or bfloat16 weights, not {w.dtype}"
        )
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{op}: mosaic_gpu rounds to bfloat16 or keeps float32, not {jnp.dtype(out_dtype)}")
    try:
        return architecture()
    except NotImplementedError as error:
        raise NotImplementedError(f"{op}: {error}") from None


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Append zeros along an axis up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _padded_inputs(x: jax.Array, w: Weight) -> tuple[jax.Array, Weight]:
    """Rows [..., K] and weight with zeros appended to K up to whole tiles; K of the released model already is."""
    size = -(-x.shape[-1] // BLOCK) * BLOCK
    x = _pad(x, -1, size)
    if isinstance(w, QuantTensor):
        return x, QuantTensor(_pad(w.data, 1, size), _pad(w.scale, 1, size // GROUP), w.format)
    return x, _pad(w, 1, size)


def _padded_outputs(w: Weight, groups: int, size: int) -> Weight:
    """The weight with zero rows appended to every group, up to `size` rows a group."""

    def pad(array: jax.Array, rows: int) -> jax.Array:
        return _pad(array.reshape(groups, -1, array.shape[1]), 1, rows).reshape(groups * rows, -1)

    if isinstance(w, QuantTensor):
        return QuantTensor(pad(w.data, size), pad(w.scale, size // GROUP), w.format)
    return pad(w, size)


def _parts_of(target: Architecture, outputs: int, inputs: int) -> int:
    return (shapes if target == "sm90" else shapes_sm100).parts_of(outputs, inputs)


def _product(
    target: Architecture, x: jax.Array, w: Weight, groups: int, out_dtype: DTypeLike, parts: int, quantize: bool
) -> jax.Array:
    """Products of padded operands, with the schedule of the target; rows are quantised first where asked."""
    rows, packed = x.shape[0], isinstance(w, QuantTensor)
    outputs, inputs = w.shape
    if target == "sm90":
        plan = shapes.schedule(
            rows,
            outputs,
            inputs,
            packed=packed,
            parts=parts,
            group_outputs=outputs // groups if groups > 1 else -(-outputs // BLOCK) * BLOCK,
            quantize=quantize,
        )
        if quantize and not plan.quantizing:
            x = quantize_rows(x)
        return mosaic_sm90.product(x, w, groups, out_dtype, plan)
    out_size = jnp.dtype(out_dtype).itemsize
    plan = shapes_sm100.schedule(
        rows, outputs, inputs, packed=packed, parts=parts, out_size=out_size, quantize=quantize
    )
    if quantize and not plan.quantizing:
        x = quantize_rows(x)
    return mosaic_sm100.product(x, w, groups, out_dtype, plan)


def row_dot(
    x: jax.Array,
    w: Weight,
    quantize_input: bool,
    out_dtype: DTypeLike,
    column_tile: int | None,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`. row_tile is not used.

    Every column is a sum of its own, so `column_tile` changes no product; with it, K is never cut into parts, since
    their number depends on the height of the weight, which differs between the shards of a weight.
    """
    target = _check("row_dot", x, w, out_dtype)
    outputs, inputs = w.shape
    parts = 1 if column_tile is not None else _parts_of(target, outputs, inputs)
    x, w = _padded_inputs(x, w)
    if outputs > 8 and not isinstance(w, QuantTensor):
        w = _pad(w, 0, -(-outputs // 8) * 8)
    return _product(target, x, w, 1, out_dtype, parts, quantize_input)[:, :outputs]


def row_dot_grouped(x: jax.Array, w: Weight, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`. row_tile is not used."""
    target = _check("row_dot_grouped", x, w, x.dtype)
    rows, groups, inputs = x.shape
    group_outputs = w.shape[0] // groups
    parts = _parts_of(target, w.shape[0], inputs)
    x, w = _padded_inputs(x, w)
    tile = BLOCK if target == "sm90" else shapes_sm100.ROWS
    padded = -(-group_outputs // tile) * tile
    w = _padded_outputs(w, groups, padded)
    y = _product(target, x.reshape(rows, -1), w, groups, x.dtype, parts, False)
    return y.reshape(rows, groups, padded)[:, :, :group_outputs]
