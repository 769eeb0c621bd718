"""Products of FP4 weights with FP8 rows by Blackwell's block-scaled tensor-core instructions.

`tcgen05` with `kind::mxf8f6f4.block_scale` multiplies e4m3 by e4m3 and each 32 products by two powers of two, and
adds in float32. The weights' codes are widened in registers (`kernels/fp4_block_scaled.py`) and stored to tensor
memory, two 64-row tiles as the 128 rows of an operand, in the order of `stacked_tiles.py`: sums come back as its
`split_tiles` wants them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.fp4_block_scaled import (
    GROUP,
    LOWER_SHIFTS,
    REST,
    SCALE_COLUMNS,
    SIGN,
    TILE,
    UPPER_SHIFTS,
    words_to_e4m3,
)
from deepinfer_jax.kernels.mosaic.rows import tiled_layout
from deepinfer_jax.kernels.mosaic.stacked_tiles import LANES, stack_tiles
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import e8m0_to_float32

plgpu: Any = mosaic_gpu  # its types are not those of its functions

E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu

DEPTH = SCALE_COLUMNS
"""Columns of K in one operand."""

SCALES_SHAPE = (1, 1, 32, 16)
"""Scale bytes of 128 rows and DEPTH columns in shared memory: [0, 0, row % 32, 4 * (row // 32) + group]."""

OPERAND = tiled_layout(((LANES, 4), (32, 4)), (-4,), (-2,), -1)
"""Register layout of an operand of tensor memory: a lane's thread holds its row, four codes a register."""

_WORD_GROUPS = DEPTH // GROUP


def _tile_codes(words: jax.Array) -> jax.Array:
    """e4m3 (64, 128) of a tile's words uint32 (2, 2, 256), as the compiled kernel computes them."""
    registers = words_to_e4m3(words.reshape(_WORD_GROUPS, TILE, 4)).swapaxes(0, 1)
    return lax.bitcast_convert_type(registers, E4M3).reshape(TILE, DEPTH)


def _registers_of_word(word: ir.Value) -> list[ir.Value]:
    i32 = ir.IntegerType.get_signless(32)

    def moved(bits: int) -> ir.Value:
        if bits == 0:
            return word
        amount = arith.constant(i32, abs(bits))
        return arith.shli(word, amount) if bits > 0 else arith.shrui(word, amount)

    def masked(value: ir.Value, mask: int) -> ir.Value:
        return arith.andi(value, arith.constant(i32, mask - (1 << 32) if mask >> 31 else mask))

    return [
        arith.ori(masked(moved(sign), SIGN), masked(moved(rest), REST)) for sign, rest in (LOWER_SHIFTS, UPPER_SHIFTS)
    ]


def _widened_registers(first: Any, second: Any) -> Any:
    """Body for the compiler: two tiles' words in shared memory -> e4m3 (128, 128) in layout OPERAND."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, LANES))
    warp = arith.divui(thread, arith.constant(i32, 32))
    inside = arith.remui(thread, arith.constant(i32, 16))
    row = arith.addi(arith.muli(warp, arith.constant(i32, 16)), inside)
    upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, arith.constant(i32, 16)), arith.constant(i32, 0))
    base = arith.select(upper, mgpu.utils.memref_ptr(second), mgpu.utils.memref_ptr(first))
    four_words, four_codes = ir.VectorType.get((4,), i32), ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    registers = []
    for group in range(_WORD_GROUPS):
        place = arith.addi(arith.muli(row, arith.constant(i32, 4)), arith.constant(i32, group * 4 * TILE))
        words = llvm.load(four_words, mgpu.utils.getelementptr(base, [place], i32), alignment=16)
        for number in range(4):
            word = vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([number]))
            registers += [mgpu.utils.bitcast(register, four_codes) for register in _registers_of_word(word)]
    layout = OPERAND.to_mgpu()
    shaped = np.empty(len(registers), dtype=object)
    shaped[:] = registers
    shape = layout.registers_shape((LANES, DEPTH))
    return mgpu.FragmentedArray(_registers=shaped.reshape(shape), _layout=layout, _is_signed=None)


def widened(first: Any, second: Any) -> jax.Array:
    """e4m3 (128, 128) in layout OPERAND and lane order: code values times 2^-6 of two weight tiles' rows.

    Args:
        first, second: uint32 (2, 2, 256) in shared memory, the words of 64 rows and 128 columns each.
    """
    if interpreting():
        return stack_tiles(_tile_codes(first[...]), _tile_codes(second[...]))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 2,
        return_type=plgpu.ShapeDtypeStruct((LANES, DEPTH), E4M3, layout=OPERAND),
    )
    def widen(_: Any, *tiles: Any) -> Any:
        return _widened_registers(*tiles)

    return widen(first, second)


def scales_memory(operands: int) -> Any:
    """Tensor memory for the scales of `operands` operands: one's are columns 4 i ... 4 i + 3."""
    return plgpu.TMEM((LANES, 4 * operands), E8M0, layout=plgpu.TMEMLayout.SCALES_LAYOUT)


def _powers(scales: Any, rows: int) -> jax.Array:
    """float32 (rows, 4) of scale bytes SCALES_SHAPE."""
    octets = lax.bitcast_convert_type(scales[...], jnp.uint8).reshape(32, 4, 4).swapaxes(0, 1)
    return e8m0_to_float32(octets.reshape(LANES, 4)[:rows])


def scaled_product(
    total: Any,
    weights: Any,
    rows: Any,
    scales: tuple[Any, Any],
    scales_in_tensor_memory: tuple[Any, Any],
    done: Any,
    *,
    accumulate: jax.Array,
) -> None:
    """total (+)= scaled weights times scaled rows, transposed; arrives at `done` when it is.

    Args:
        total: float32 (128, n) in tensor memory. weights: e4m3 (128, 128) in tensor memory.
        rows: e4m3 (n, 128) in shared memory, tiled and swizzled. scales: e8m0 SCALES_SHAPE in shared memory, of
        weights and of rows. scales_in_tensor_memory: where they are copied to, (128, 4) each; the tensor core
        copies and multiplies in order.
    """
    if interpreting():
        operands = []
        for values, scale in ((plgpu.async_load_tmem(weights), scales[0]), (rows[...], scales[1])):
            powers = _powers(scale, values.shape[0])
            groups = values.astype(jnp.float32).reshape(values.shape[0], 4, GROUP) * powers[:, :, None]
            operands.append(groups.reshape(values.shape))
        product = jnp.dot(operands[0], operands[1].T, precision=lax.Precision.HIGHEST)
        before = plgpu.async_load_tmem(total)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(total, jnp.where(accumulate, before, jnp.zeros_like(before)) + product)
        plgpu.commit_tmem()
        # The race detector wants a fence between reads of shared memory and the copy engine's next write. The tensor
        # core's reads, and reads of threads before `commit_tmem`, are ordered by the barrier that the write waits for.
        plgpu.commit_smem()
        plgpu.tcgen05_commit_arrive(done)
        return
    for scale, place in zip(scales, scales_in_tensor_memory, strict=True):
        plgpu.async_copy_scales_to_tmem(scale, place)
    plgpu.tcgen05_mma(
        total,
        weights,
        rows.transpose((1, 0)),
        done,
        a_scale=scales_in_tensor_memory[0],
        b_scale=scales_in_tensor_memory[1],
        accumulate=accumulate,
    )
