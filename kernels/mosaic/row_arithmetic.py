"""Arithmetic of rows in registers that has the same bits in every kernel, and exchanges between neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.mosaic.rows import VECTOR, RowLayout
from deepinfer_jax.kernels.mosaic.target import interpreting


def inline_float(text: str, layout: Any, *operands: jax.Array) -> jax.Array:
    """PTX that makes float32 $0 of float32 $1, $2, ..., for every element of arrays of one layout."""
    result = plgpu.ShapeDtypeStruct(operands[0].shape, operands[0].dtype, layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(operands), return_type=result)
    def body(_: Any, *arrays: Any) -> Any:
        f32 = ir.F32Type.get()
        registers = np.empty_like(arrays[0].registers)
        for index in np.ndindex(registers.shape):
            given = [array.registers[index] for array in arrays]
            made = llvm.mlir_undef(given[0].type)
            for i in range(ir.VectorType(made.type).shape[0]):
                place = ir.DenseI64ArrayAttr.get([i])
                values = [vector.extract(register, dynamic_position=[], static_position=place) for register in given]
                # Side effects keep an exchange between threads where it is.
                element = llvm.inline_asm(f32, values, text, "=f" + ",f" * len(values), has_side_effects=True)
                made = vector.insert(element, made, dynamic_position=[], static_position=place)
            registers[index] = made
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    return body(*operands)


def divide(numerator: jax.Array | float, denominator: jax.Array | float, layout: Any) -> jax.Array:
    """The correctly rounded float32 quotient; `/` compiles to an approximation. One operand may be a number."""
    if interpreting():
        return jnp.asarray(numerator, jnp.float32) / jnp.asarray(denominator, jnp.float32)
    arrays, names = [], []
    for operand in (numerator, denominator):
        if isinstance(operand, jax.Array):
            arrays.append(operand)
            names.append(f"${len(arrays)}")
        else:
            names.append(f"0f{np.float32(operand).view(np.uint32):08x}")
    return inline_float(f"div.rn.f32 $0, {names[0]}, {names[1]};", layout, *arrays)


def rounded(x: jax.Array, dtype: Any, layout: Any) -> jax.Array:
    """float32 x in `dtype`. To bfloat16 in pairs: one instruction for two elements, also where each of them is used
    on its own afterwards, which otherwise takes two that are four times as slow."""
    if interpreting() or dtype != jnp.bfloat16:
        return x.astype(dtype)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), layout))
    def body(_: Any, *arrays: Any) -> Any:
        [array] = arrays
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            [length] = ir.VectorType(register.type).shape
            words = llvm.mlir_undef(ir.VectorType.get((length // 2,), i32))
            for i in range(length // 2):
                low, high = (
                    vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([2 * i + j]))
                    for j in range(2)
                )
                word = llvm.inline_asm(i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
                place = ir.DenseI64ArrayAttr.get([i])
                words = vector.insert(word, words, dynamic_position=[], static_position=place)
            registers[index] = mgpu.utils.bitcast(words, ir.VectorType.get((length,), ir.BF16Type.get()))
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return body(x)


def spread(numbers: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...] = (0,)) -> jax.Array:
    """Repeat numbers of rows (axes = (0,)) or groups (axes = (0, 1)) along the other axes of `shape`."""
    return lax.broadcast_in_dim(numbers, shape, axes)


def swap_pairs(x: jax.Array, layout: Any) -> jax.Array:
    """Exchange the elements of every pair (2i, 2i + 1) of the last axis; `layout` keeps 8 neighbours in a thread."""
    if interpreting():
        return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    order = [i ^ 1 for i in range(VECTOR)]

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout))
    def body(_: Any, *arrays: Any) -> Any:
        [array] = arrays
        registers = np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            registers[index] = vector.shuffle(register, register, order)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)

    return body(x)


def pack_pairs(codes: jax.Array, layout: RowLayout) -> jax.Array:
    """uint8 [rows, groups, group/2] of 4-bit codes, int32 [rows, groups, group]; even element in the low nibble."""
    shape = (*codes.shape[:-1], codes.shape[-1] // 2)
    if interpreting():
        return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(jnp.uint8)
    halves = [list(range(first, VECTOR, 2)) for first in range(2)]
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.uint8), layout.packed)

    @plgpu.inline_mgpu(arg_types=(layout.matrix,), return_type=result)
    def body(_: Any, *arrays: Any) -> Any:
        [array] = arrays
        to = layout.packed.to_mgpu()
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        packed = []
        for register in array.registers.flat:
            even, odd = (vector.shuffle(register, register, half) for half in halves)
            four = arith.constant(even.type, ir.DenseElementsAttr.get_splat(even.type, ir.IntegerAttr.get(i32, 4)))
            packed.append(arith.trunci(ir.VectorType.get((VECTOR // 2,), i8), arith.ori(even, arith.shli(odd, four))))
        registers = np.array(packed, dtype=object).reshape(to.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=False)

    return body(codes)


def normalize(values: jax.Array, weight: jax.Array, eps: float, layout: RowLayout) -> jax.Array:
    """RMS norm of float32 rows [rows, groups, 32] by a float32 weight of that shape, not yet rounded."""
    squares = jnp.sum(values * values, axis=2)
    # Mosaic finds no layout for a sum over a single group.
    total, axes = (squares, (0, 1)) if layout.groups == 1 else (jnp.sum(squares, axis=1), (0,))
    inverse = lax.rsqrt(total * np.float32(1.0 / layout.size) + np.float32(eps))
    return weight * (values * spread(inverse, layout.shape, axes))
