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
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.mhc_mix.mosaic_mix import PARTS, ROWS_LAYOUT, STEP, SUMS_LAYOUT, TILE_ROWS, split
from deepinfer_jax.kernels.mosaic.rows import WARPS, inline_text
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


def fetch_weights(fn: Any, weights: Any, number: Any, columns: int, first: Any) -> None:
    """Split the weights of 32 columns of every stream into parts, in shared memory. Each warp takes one stream.

    fn: float32 [N, 4 * D] in global memory, N a multiple of 8.
    weights: bfloat16 [4 * columns, 3 * N, 32] in shared memory: for every step of 32 columns the leading, middle and
        last parts of all rows. Columns of a step stand as (pair, thread, 2) where fn has (thread, pair, 2).
    number: of the step, among the `columns` steps of a stream. first: its first column.
    """
    (_interpreted_split if interpreting() else _split)(fn, weights, number, columns, first)


def in_order(columns: Array) -> Array:
    """Columns [.., 32] of a step, (thread, pair, 2), in the order in which the instruction meets them."""
    return columns.reshape(-1, PAIRS, PAIRS, 2).swapaxes(1, 2).reshape(columns.shape)


def _interpreted_split(fn: Any, weights: Any, number: Any, columns: int, first: Any) -> None:
    width = fn.shape[1]
    for stream in range(WARPS):
        values = fn[:, pl.ds(stream * (width // WARPS) + first, STEP)]
        weights[stream * columns + number] = jnp.concatenate(split(in_order(values)))


def _split(fn: Any, weights: Any, number: Any, columns: int, first: Any) -> None:
    """A thread takes 8 columns of every eighth row, and stores 16 bytes of each of their parts."""
    mixes, width = fn.shape
    assert mixes % 8 == 0

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(WEIGHT_TRANSFORMS), *NUMBERS[:2]))
    def body(_: Any, source: Any, target: Any, *numbers: Any) -> None:
        f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

        def constant(value: int) -> Any:
            return arith.constant(i32, value)

        def scaled(number: Any, by: int, plus: Any) -> Any:
            return arith.addi(arith.muli(number, constant(by)), plus)

        start, step = (n.registers.item() for n in numbers)
        thread = mgpu.utils.thread_idx()
        stream = arith.andi(arith.shrui(thread, constant(5)), constant(WARPS - 1))
        row = arith.andi(arith.shrui(thread, constant(2)), constant(7))
        chunk = arith.andi(thread, constant(3))
        # The swizzle of 64 bytes exchanges chunks of 16 bytes: every two rows of 64 bytes in the same way.
        place = arith.xori(chunk, arith.andi(arith.shrui(row, constant(1)), constant(3)))
        place = scaled(row, 2 * STEP, arith.shli(place, constant(4)))
        place = scaled(scaled(stream, columns, step), PARTS * mixes * 2 * STEP, place)
        held = arith.addi(llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target)), place)
        column = arith.addi(scaled(stream, width // WARPS, start), arith.shli(chunk, constant(1)))
        origin = arith.extui(i64, scaled(row, width, column))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source), [origin], f32)
        pair = ir.VectorType.get((2,), i32)
        loaded = [
            [
                llvm.load(pair, mgpu.utils.getelementptr(base, [group * 8 * width + t * 8], f32), alignment=8)
                for t in range(PAIRS)
            ]
            for group in range(mixes // 8)
        ]
        for group, pairs in enumerate(loaded):
            parts = zip(*(_parts_of_pair(values) for values in pairs), strict=True)
            for number, words in enumerate(parts):
                address = arith.addi(held, constant((number * mixes // 8 + group) * 8 * 2 * STEP))
                inline_text("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", address, *words)

    body(fn, weights, jnp.asarray(first, jnp.int32), jnp.asarray(number, jnp.int32))


def _parts_of_pair(values: Any) -> list[Any]:
    """`split` of two neighbouring float32 numbers, int32 [2]: words of two bfloat16 each."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    mask = arith.constant(i32, -(1 << 16))
    rests = [
        arith.bitcast(f32, vector.extract(values, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])))
        for i in range(2)
    ]
    words = []
    for number in range(PARTS):
        bits = [arith.bitcast(i32, rest) for rest in rests]
        words.append(arith.ori(arith.shrui(bits[0], arith.constant(i32, 16)), arith.andi(bits[1], mask)))
        if number < PARTS - 1:
            rests = [
                arith.subf(rest, arith.bitcast(f32, arith.andi(bit, mask)))
                for rest, bit in zip(rests, bits, strict=True)
            ]
    return words


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


def multiply(streams: list[tuple[Array, Any]], weights: Any, rows: Any) -> list[Array]:
    """Products, all under way at once, of (bfloat16 [64, 32], number): float32 [64, N] each.

    The other operand is weights number `number` of [.., 3*N, 32] in shared memory; its last parts are added first.
    rows: memory of this warpgroup for the interpreter, which multiplies from shared memory only; else None.
    """
    if interpreting():
        all_sums = [_interpreted(stream, weights.at[number], rows) for stream, number in streams]
    else:
        all_sums = _products(streams, weights)
    columns = all_sums[0].shape[1] // PARTS
    found = []
    for sums in all_sums:
        high, middle, low = (sums[:, i * columns : (i + 1) * columns] for i in range(PARTS))
        found.append((low + middle) + high)
    return found


def _interpreted(stream: Array, weights: Any, rows: Any) -> Array:
    """float32 [64, 3*N]; columns (thread, pair, 2) of a step become (pair, thread, 2)."""
    rows[...] = in_order(stream)
    plgpu.commit_smem()

    def product(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, rows, weights.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return accumulator[...]

    accumulator = plgpu.ACC((TILE_ROWS, weights.shape[0]), jnp.float32)  # type: ignore[attr-defined]
    return pl.run_scoped(product, accumulator)


_DESCRIPTOR = (2 << 62) | (8 * STEP * 2 // 16 << 32)
"""Matrix descriptor (PTX, "matrix-descriptor") of the swizzle of 64 bytes: 8 rows are 512 bytes, the next 8 follow."""


def _instructions(sums: int, rows: int, descriptor: str, columns: int) -> str:
    """The product of 32 columns in two instructions, the first of which ignores what the sums were."""

    def instruction(ignore: int, first: int, held: str) -> str:
        operands = (range(sums, sums + columns // 2), range(first, first + 4))
        to, left = (", ".join(f"${i}" for i in numbers) for numbers in operands)
        return (
            f"setp.ne.b32 add, {1 - ignore}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
            f"{{{to}}}, {{{left}}}, {held}, add, 1, 1, 0;"
        )

    next_columns = f"add.s64 next, {descriptor}, 2;"  # 16 of them
    return f"{instruction(1, rows, descriptor)} {next_columns} {instruction(0, rows + 4, 'next')}"


def _products(streams: list[tuple[Array, Any]], weights: Any) -> list[Array]:
    """float32 [64, 3*N] of each stream.

    All instructions and the wait for them are one piece of PTX: `plgpu.wgmma` takes sums that have to be set to zero.
    """
    count, columns = len(streams), weights.shape[1]
    shape, length = (TILE_ROWS, columns), columns // 2
    size = columns * STEP * 2
    lefts = count * length
    descriptors = lefts + count * 8
    pieces = [_instructions(i * length, lefts + i * 8, f"${descriptors + i}", columns) for i in range(count)]
    text = (
        f"{{ .reg .pred add; .reg .b64 next; wgmma.fence.sync.aligned; {' '.join(pieces)}"
        " wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    )
    constraints = ",".join(["=&f"] * lefts + ["r"] * (8 * count) + ["l"] * count + ["~{memory}"])
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), SUMS_LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(WEIGHT_TRANSFORMS), *(ROWS_LAYOUT,) * count, *NUMBERS[:1] * count),
        return_type=(result,) * count,
    )
    def body(_: Any, held: Any, *operands: Any) -> Any:
        f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        # Of each step of 16 columns: rows above and below, in the first 8 columns and in the others.
        left = [
            mgpu.utils.bitcast(mgpu.utils.vector_slice(rows, slice(2 * pair, 2 * pair + 2)), i32)
            for array in operands[:count]
            for pair in range(PAIRS)
            for rows in array.registers.flat
        ]
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(held))
        signed = _DESCRIPTOR - (1 << 64) if _DESCRIPTOR >> 63 else _DESCRIPTOR
        places = []
        for place in operands[count:]:
            address = arith.addi(base, arith.muli(place.registers.item(), arith.constant(i32, size)))
            address = arith.extui(i64, arith.shrui(address, arith.constant(i32, 4)))
            places.append(arith.ori(address, arith.constant(i64, signed)))
        results = llvm.StructType.get_literal([f32] * lefts)
        made = llvm.inline_asm(results, [*left, *places], text, constraints, has_side_effects=True)
        return tuple(_sums_from(made, number * length, shape) for number in range(count))

    products: list[Array] = body(weights, *(s for s, _ in streams), *(jnp.int32(number) for _, number in streams))
    return list(products)


def _sums_from(made: Any, first: int, shape: tuple[int, int]) -> Any:
    """Elements `first`, ... of a structure of float32 as an array in `SUMS_LAYOUT`."""
    f32 = ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    to = SUMS_LAYOUT.to_mgpu()
    registers = np.empty(to.registers_shape(shape), dtype=object)
    for i, index in enumerate(np.ndindex(registers.shape)):
        two = llvm.mlir_undef(pair)
        for j in range(2):
            element = llvm.extractvalue(f32, made, [first + 2 * i + j])
            two = vector.insert(element, two, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([j]))
        registers[index] = two
    return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)
