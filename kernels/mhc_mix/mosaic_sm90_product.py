"""Products of streams with weights in three parts, for SM90 (Hopper).

Every weight is three bfloat16 parts, as in `mosaic_mix.py`. They are one operand of the warpgroup product, 72 columns
wide, so that the instruction keeps their sums apart; every 32 columns of a stream are a sum of their own there.
Streams are multiplied from registers. A thread holds 8 neighbours of a row; which column is which does not matter to
a product as long as both operands agree, so the weights' columns stand in the order in which the instruction finds
the streams' in the threads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.mhc_mix.mosaic_mix import PARTS, ROWS_LAYOUT, STEP, SUMS_LAYOUT, TILE_ROWS, split
from deepinfer_jax.kernels.mosaic.rows import Block, tiled_layout
from deepinfer_jax.kernels.mosaic.target import interpreting

Array = jax.Array

NUMBERS = (plgpu.Layout.WG_SPLAT(()),) * 3
"""Layouts of numbers that every thread has."""

WEIGHT_TRANSFORMS = (
    plgpu.TilingTransform((8, STEP)),  # type: ignore[abstract]
    plgpu.SwizzleTransform(2 * STEP),  # type: ignore[abstract]
)


# ---- weights ---------------------------------------------------------------------------------------

PAIRS = STEP // 8
"""Pairs of neighbours that a thread holds of a row's step, and threads that share the step."""

SPLIT_BLOCKS = 4
"""Steps that one block splits the weights of, one in each warp."""


def split_layouts(mixes: int) -> tuple[Any, Any]:
    """Layouts of weights [N, steps, thread, pair, 2] as they are loaded and of parts [steps, N, 32] for a store.

    A thread loads the pairs of one number from all four threads, and stores them next to each other.
    """
    assert mixes % 8 == 0
    loaded = tiled_layout(
        ((8, SPLIT_BLOCKS, PAIRS, PAIRS, 2), (8, 1, PAIRS, PAIRS, 2), (8, 1, 1, PAIRS, 2)), (-14,), (-5, -2), -1
    )
    stored = tiled_layout(((SPLIT_BLOCKS, 8, STEP), (1, 8, STEP), (8,)), (-7,), (-3, -2), -1)
    return loaded, stored


def _exchanged(part: Array, loaded: Any, stored: Any) -> Array:
    """bfloat16 [N, steps, thread, pair, 2] in `loaded` -> [steps, N, (pair, thread, 2)] in `stored`."""
    mixes, steps = part.shape[:2]
    shape = (steps, mixes, STEP)
    if interpreting():
        return part.transpose(1, 0, 3, 2, 4).reshape(shape)

    @plgpu.inline_mgpu(arg_types=(loaded,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(part.dtype), stored))
    def body(_: Any, *arrays: Any) -> Any:
        to = stored.to_mgpu()
        joined = []
        for first, second, third, fourth in arrays[0].registers.reshape(-1, PAIRS):
            left = vector.shuffle(first, second, [0, 1, 2, 3])
            right = vector.shuffle(third, fourth, [0, 1, 2, 3])
            joined.append(vector.shuffle(left, right, list(range(2 * PAIRS))))
        registers = np.empty(to.registers_shape(shape), dtype=object)
        registers.flat[:] = joined
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

    return body(part)


def split_weights(fn: Array) -> Array:
    """`split` of float32 [C*(2+C), C*D] as a kernel.

    Returns: bfloat16 [C*D/32 * 3*C*(2+C), 32]: for every step of 32 columns the leading, middle and last parts of all
        rows. Columns of a step stand as (pair, thread, 2) where fn has (thread, pair, 2).
    """
    mixes, columns = fn.shape
    steps = columns // STEP
    loaded, stored = split_layouts(mixes)

    def mhc_split_kernel(fn_ref: Any, parts_ref: Any) -> None:
        step = lax.axis_index("block") * SPLIT_BLOCKS
        shape = (mixes, SPLIT_BLOCKS, PAIRS, PAIRS, 2)
        weights = Block(0).load(fn_ref, loaded, shape, moved=step * STEP)
        for number, part in enumerate(split(weights)):
            Block(step).store(parts_ref, _exchanged(part, loaded, stored), stored, column=number * mixes * STEP)

    out = jax.ShapeDtypeStruct((steps, PARTS * mixes * STEP), jnp.bfloat16)
    parts = plgpu.kernel(mhc_split_kernel, out_type=out, grid=(steps // SPLIT_BLOCKS,), grid_names=("block",))(fn)
    return parts.reshape(steps * PARTS * mixes, STEP)


# ---- products --------------------------------------------------------------------------------------


def floats(stream: Array) -> Array:
    """bfloat16 [64, 32] as float32: one instruction for an element, where a conversion takes two for every other."""
    if interpreting():
        return stream.astype(jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(ROWS_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(stream.shape, jnp.dtype(jnp.float32), ROWS_LAYOUT),
    )
    def body(_: Any, *arrays: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty_like(arrays[0].registers)
        for index, register in np.ndenumerate(arrays[0].registers):
            [length] = ir.VectorType(register.type).shape
            words = mgpu.utils.bitcast(register, ir.VectorType.get((length // 2,), i32))
            numbers = llvm.mlir_undef(ir.VectorType.get((length,), i32))
            for i in range(length // 2):
                word = vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
                low = arith.shli(word, arith.constant(i32, 16))
                high = arith.andi(word, arith.constant(i32, -(1 << 16)))
                for j, number in enumerate((low, high)):
                    place = ir.DenseI64ArrayAttr.get([2 * i + j])
                    numbers = vector.insert(number, numbers, dynamic_position=[], static_position=place)
            registers[index] = mgpu.utils.bitcast(numbers, ir.VectorType.get((length,), ir.F32Type.get()))
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    return body(stream)


def multiply(stream: Array, weights: Any, number: Any, rows: Any) -> Array:
    """bfloat16 [64, 32] times weights number `number` of [.., 3*N, 32] in shared memory -> float32 [64, N].

    The last parts are added first. rows: memory of this warpgroup for the interpreter, which multiplies from shared
    memory only; else None.
    """
    sums = _interpreted(stream, weights.at[number], rows) if interpreting() else _product(stream, weights, number)
    columns = sums.shape[1] // PARTS
    high, middle, low = (sums[:, i * columns : (i + 1) * columns] for i in range(PARTS))
    return (low + middle) + high


def _interpreted(stream: Array, weights: Any, rows: Any) -> Array:
    """float32 [64, 3*N]; columns (thread, pair, 2) of a step become (pair, thread, 2)."""
    rows[...] = stream.reshape(TILE_ROWS, PAIRS, PAIRS, 2).transpose(0, 2, 1, 3).reshape(stream.shape)
    plgpu.commit_smem()

    def product(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, rows, weights.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return accumulator[...]

    accumulator = plgpu.ACC((TILE_ROWS, weights.shape[0]), jnp.float32)  # type: ignore[attr-defined]
    return pl.run_scoped(product, accumulator)


_DESCRIPTOR = (2 << 62) | (8 * STEP * 2 // 16 << 32)
"""Matrix descriptor (PTX, "matrix-descriptor") of the swizzle of 64 bytes: 8 rows are 512 bytes, the next 8 follow."""


def _product(stream: Array, weights: Any, number: Any) -> Array:
    """float32 [64, 3*N].

    Both instructions and the wait for them are one piece of PTX, whose first instruction ignores what the sums were:
    `plgpu.wgmma` takes sums that have to be set to zero.
    """
    _, columns, _ = weights.shape
    shape, length = (TILE_ROWS, columns), columns // 2
    size = columns * STEP * 2

    def instruction(ignore: int, first: int, descriptor: str) -> str:
        sums, rows = (
            ", ".join(f"${i}" for i in range(start, start + count)) for start, count in ((0, length), (first, 4))
        )
        return (
            f"setp.ne.b32 add, {1 - ignore}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
            f"{{{sums}}}, {{{rows}}}, {descriptor}, add, 1, 1, 0;"
        )

    text = (
        "{ .reg .pred add; .reg .b64 next; wgmma.fence.sync.aligned;"
        f" add.s64 next, ${length + 8}, 2;"  # 16 columns
        f" {instruction(1, length, f'${length + 8}')} {instruction(0, length + 4, 'next')}"
        " wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    )
    constraints = ",".join(["=&f"] * length + ["r"] * 8 + ["l", "~{memory}"])

    @plgpu.inline_mgpu(
        arg_types=(ROWS_LAYOUT, plgpu.RefType(WEIGHT_TRANSFORMS), NUMBERS[0]),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), SUMS_LAYOUT),
    )
    def body(_: Any, *operands: Any) -> Any:
        array, held, place = operands
        f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        # Of each step of 16 columns: rows above and below, in the first 8 columns and in the others.
        left = [
            mgpu.utils.bitcast(mgpu.utils.vector_slice(rows, slice(2 * pair, 2 * pair + 2)), i32)
            for pair in range(PAIRS)
            for rows in array.registers.flat
        ]
        address = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(held))
        address = arith.addi(address, arith.muli(place.registers.item(), arith.constant(i32, size)))
        address = arith.extui(i64, arith.shrui(address, arith.constant(i32, 4)))
        signed = _DESCRIPTOR - (1 << 64) if _DESCRIPTOR >> 63 else _DESCRIPTOR
        descriptor = arith.ori(address, arith.constant(i64, signed))
        results = llvm.StructType.get_literal([f32] * length)
        made = llvm.inline_asm(results, [*left, descriptor], text, constraints, has_side_effects=True)
        pair = ir.VectorType.get((2,), f32)
        to = SUMS_LAYOUT.to_mgpu()
        registers = np.empty(to.registers_shape(shape), dtype=object)
        for i, index in enumerate(np.ndindex(registers.shape)):
            two = llvm.mlir_undef(pair)
            for j in range(2):
                element = llvm.extractvalue(f32, made, [2 * i + j])
                place_in_pair = ir.DenseI64ArrayAttr.get([j])
                two = vector.insert(element, two, dynamic_position=[], static_position=place_in_pair)
            registers[index] = two
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

    return body(stream, weights, jnp.int32(number))
