"""FP8 quantise-dequantise of activations in registers, bit for bit that of `kernels/quantization.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from deepinfer_jax.kernels.mosaic import rows as mosaic_rows
from deepinfer_jax.kernels.mosaic.row_arithmetic import spread
from deepinfer_jax.kernels.mosaic.rows import Block
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP

_E4M3_MAX = np.float32(448)
_SMALLEST_AMAX = np.int32(np.float32(1e-4).view(np.int32))
_NAN = np.int32(0x7FC00000)
_INFINITE = np.int32(255)
_VECTOR = GROUP // 4


def _magnitude_bits(values: jax.Array) -> jax.Array:
    """Magnitudes as integers that compare as they do, in which NaN is the largest."""
    return lax.bitcast_convert_type(values, jnp.int32) & np.int32(0x7FFFFFFF)


def _scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(1 / scale, scale) of groups from the largest of their `_magnitude_bits`; a scale of NaN for bad groups."""
    amax = lax.bitcast_convert_type(jnp.maximum(largest, _SMALLEST_AMAX), jnp.float32)
    bits = lax.bitcast_convert_type(amax * np.float32(1.0 / _E4M3_MAX), jnp.int32) & np.int32(0x7FFFFFFF)
    byte = (bits >> 23) + jnp.where((bits & np.int32(0x7FFFFF)) != 0, np.int32(1), np.int32(0))
    special = byte >= _INFINITE
    byte = jnp.minimum(byte, np.int32(253))  # a finite amax gives at most 247
    scale = lax.bitcast_convert_type(jnp.where(special, _NAN, byte << 23), jnp.float32)
    return lax.bitcast_convert_type((np.int32(254) - byte) << 23, jnp.float32), scale


def _round(values: jax.Array, inverse: jax.Array, scale: jax.Array) -> jax.Array:
    """To the nearest e4m3 multiple of the scale. A product by the inverse of a power of two is the quotient."""
    # To nearest, ties to even, subnormals included; no quotient of finite numbers is beyond 448 by more than a
    # rounding, so none has to be clipped. Back by way of float16: there is an instruction for that.
    return (values * inverse).astype(jnp.float8_e4m3fn).astype(jnp.float16).astype(jnp.float32) * scale


def quantize_dequantize(values: jax.Array) -> jax.Array:
    """Activation quantisation of groups, `spec/blocks.md` 4.5.

    Args:
        values: float32 [..., 32], one group along the last axis, in any register layout.
    Returns: float32 of that shape and layout, exact in bfloat16; NaN for groups that hold an infinity or NaN.
    """
    scales = _scales(jnp.max(_magnitude_bits(values), axis=-1))
    axes = tuple(range(values.ndim - 1))
    return _round(values, *(spread(number, values.shape, axes) for number in scales))


TILE_COLUMNS = 128
"""Width of the tiles that `quantize_tile` takes."""


def quantize_tile(ref: Any) -> None:
    """Activation quantisation in place, in shared memory, by one warpgroup.

    Args:
        ref: SMEM ref bfloat16 [rows, 128], rows a multiple of 8. Follow with `plgpu.commit_smem`.
    """
    rows, columns = ref.shape
    tile_rows, layout = mosaic_rows.plane_layout(8, columns, _VECTOR)
    if columns != TILE_COLUMNS or rows % tile_rows:
        raise ValueError(f"quantize_tile: a tile of {ref.shape} is not whole blocks of {(tile_rows, TILE_COLUMNS)}")
    values = plgpu.load(ref, layout=layout).astype(jnp.float32)
    ref[...] = _round(values, *_scales(_group_maximum(_magnitude_bits(values), layout))).astype(ref.dtype)


def _group_maximum(numbers: jax.Array, layout: Any) -> jax.Array:
    """The largest of each group's numbers, at every place of the group; int32 in the layout of `quantize_tile`."""
    if interpreting():
        groups = numbers.reshape(numbers.shape[0], -1, GROUP)
        return jnp.repeat(jnp.max(groups, axis=-1), GROUP, axis=1)

    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.int32, layout=layout)  # type: ignore[arg-type]

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def maximum(_: Any, array: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            elements = [
                vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
                for i in range(_VECTOR)
            ]
            largest = functools.reduce(arith.maxsi, elements)
            for distance in (1, 2):  # four neighbouring lanes hold a group
                largest = arith.maxsi(largest, mgpu.utils.shfl_bfly(largest, distance))
            registers[index] = vector.broadcast(ir.VectorType.get((_VECTOR,), i32), largest)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=True)

    return maximum(numbers)  # type: ignore[call-arg]


def quantize_rows(x: jax.Array) -> jax.Array:
    """`quantize_dequantize_fp8` as a kernel of its own.

    Args:
        x: bfloat16 or float32 [T, K], K a multiple of 32.
    Returns: [T, K] in x's dtype.
    """
    rows, size = x.shape
    layout = mosaic_rows.row_layout(size)

    def kernel(x_g: Any, out_g: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows, rows - 1)
        values = block.load(x_g, layout.matrix, layout.shape).astype(jnp.float32)
        block.store(out_g, quantize_dequantize(values).astype(x.dtype), layout.matrix)

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return mosaic_rows.row_kernel(kernel, out_type, rows, layout)(x)
