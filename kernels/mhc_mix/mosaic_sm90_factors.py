"""Factors of the boundary's rows in shared memory, for SM90 (Hopper).

Every step of a tile multiplies its streams by the same 24 numbers of a row, and there are not enough registers to
keep them. Loads from global memory, which missed the first-level cache, were a third of the kernel's time. The numbers
of the next tile are on their way (`cp.async`) while this one is worked on. A warp copies the factors of its own 16
rows, which nobody else reads: no barrier of more than a warp is needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.mhc_mix.mosaic_mix import COUNT, ROWS_LAYOUT, STEP, TILE_ROWS
from deepinfer_jax.kernels.mosaic.rows import LANES, WARPS, Block, inline_text
from deepinfer_jax.kernels.mosaic.target import interpreting

Array = jax.Array

STRIDE = 28
"""Numbers from a row to the next: 8 rows that a warp reads at once lie in different banks."""

_NUMBER = plgpu.Layout.WG_SPLAT(())
_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Factors:
    """Of tiles: `comb` [T, 16], `post` [T, 4], `pre` [T, 4] in global memory.

    held: shared memory of the block, float32 [2 * warpgroups * 64, STRIDE]: for tiles with an even and an odd number,
    a row's comb, post and pre.
    """

    comb: Any
    post: Any
    pre: Any
    held: Any

    @staticmethod
    def scratch(warpgroups: int) -> Any:
        """The shared memory `held` of a block."""
        return plgpu.SMEM((2 * warpgroups * TILE_ROWS, STRIDE), jnp.float32)

    def start(self, block: Block, half: Any) -> None:
        """Start to copy the factors of a tile to a half of the memory, whose factors the warp has read.

        They arrive with the group of copies that is closed next.
        """
        if interpreting():
            return

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, *(_NUMBER,) * 2))
        def body(_: Any, *operands: Any) -> None:
            *sources, held, first, half = operands
            f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
            last = ir.MemRefType(sources[0].type).shape[0] - 1
            row, lane = _row_and_lane()
            to = _address(held, half, row)
            comb, post, pre = (mgpu.utils.memref_ptr(source) for source in sources)
            inline_text("bar.warp.sync 0xffffffff;", "")

            def copy(base: Any, below: Any, width: int, column: Any, place: Any) -> None:
                """Four numbers of the row `below` the thread's upper one."""
                at = arith.addi(arith.addi(first.registers.item(), tile_row()), below)
                at = arith.extui(i64, arith.minsi(at, arith.constant(i32, last)))
                at = arith.addi(arith.muli(at, arith.constant(i64, width)), arith.extui(i64, column))
                number = arith.addi(arith.muli(below, arith.constant(i32, STRIDE)), place)
                slot = arith.addi(to, arith.muli(number, arith.constant(i32, _BYTES)))
                address = mgpu.utils.getelementptr(base, [at], f32)
                inline_text("cp.async.cg.shared.global [$0], [$1], 16;", "r,l", slot, address)

            zero, eight = arith.constant(i32, 0), arith.constant(i32, 8)
            # Lane i of the four that share a row copies row i of its comb; lanes 0 and 1 post and pre of the upper
            # row, lanes 2 and 3 those of the lower one.
            column = arith.muli(lane, arith.constant(i32, COUNT))
            for below in (zero, eight):
                copy(comb, below, COUNT * COUNT, column, column)
            odd = arith.trunci(ir.IntegerType.get_signless(1), lane)
            place = arith.muli(
                arith.addi(arith.extui(i32, odd), arith.constant(i32, COUNT)), arith.constant(i32, COUNT)
            )
            lower = arith.muli(arith.shrui(lane, arith.constant(i32, 1)), eight)
            copy(arith.select(odd, pre, post), lower, COUNT, zero, place)

        body(self.comb, self.post, self.pre, self.held, _scalar(block.first), _scalar(half))

    def _load(self, block: Block, half: Any, ref: Any, columns: range, place: int) -> list[Array]:
        """Factors of `columns` of `ref`, each repeated along its row [64, 32]; they are held from `place` on."""
        shape = (TILE_ROWS, STEP)
        if interpreting():
            return [block.load(ref, ROWS_LAYOUT, shape, column=i, same=True) for i in columns]
        result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), ROWS_LAYOUT)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER), return_type=(result,) * len(columns))
        def body(_: Any, held: Any, half: Any) -> Any:
            f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
            layout: Any = ROWS_LAYOUT.to_mgpu()
            to = _address(held, half, _row_and_lane()[0])
            arrays = []
            for column in columns:
                registers = np.empty(layout.registers_shape(shape), dtype=object)
                for i, index in enumerate(np.ndindex(registers.shape)):  # the upper row, then the lower one
                    at = arith.addi(to, arith.constant(i32, (8 * i * STRIDE + place + column) * _BYTES))
                    number = llvm.inline_asm(
                        f32, [at], "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", has_side_effects=True
                    )
                    registers[index] = vector.broadcast(ir.VectorType.get((layout.vector_length,), f32), number)
                arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
            return tuple(arrays)

        arrays: Any = body(self.held, _scalar(half))  # type: ignore[call-arg]
        return list(arrays)

    def arrived(self) -> None:
        """What the other lanes of a warp have copied, and waited for, is there."""
        if not interpreting():
            plgpu.inline_mgpu()(lambda _: inline_text("bar.warp.sync 0xffffffff;", ""))()

    def of_stream(self, block: Block, half: Any, stream: int) -> list[Array]:
        """Factors comb[i, stream] of the old streams."""
        return self._load(block, half, self.comb, range(stream, COUNT * COUNT, COUNT), 0)

    def of_sublayer(self, block: Block, half: Any) -> list[Array]:
        """post: for each new stream the factor of the sublayer's output."""
        return self._load(block, half, self.post, range(COUNT), COUNT * COUNT)

    def of_collapse(self, block: Block, half: Any) -> list[Array]:
        """pre: factors of the new streams in their collapse."""
        return self._load(block, half, self.pre, range(COUNT), COUNT * COUNT + COUNT)


def _scalar(number: Any) -> Array:
    return jnp.asarray(number, jnp.int32)


def tile_row() -> Any:
    """The upper of a thread's two rows in a tile of `ROWS_LAYOUT`: a warp has 16 rows, four lanes share one."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.andi(mgpu.utils.thread_idx(), arith.constant(i32, WARPS * LANES - 1))
    four = arith.shrui(thread, arith.constant(i32, 2))
    return arith.addi(four, arith.andi(four, arith.constant(i32, -8)))


def _row_and_lane() -> tuple[Any, Any]:
    """(the upper of a thread's rows among those of all warpgroups, which of the four lanes of the row it is)."""
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.thread_idx()
    warpgroup = arith.shrui(thread, arith.constant(i32, (WARPS * LANES).bit_length() - 1))
    row = arith.addi(arith.muli(warpgroup, arith.constant(i32, TILE_ROWS)), tile_row())
    return row, arith.andi(thread, arith.constant(i32, 3))


def _address(held: Any, half: Any, row: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    rows = ir.MemRefType(held.type).shape[0] // 2
    row = arith.addi(row, arith.muli(half.registers.item(), arith.constant(i32, rows)))
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(held))
    return arith.addi(base, arith.muli(row, arith.constant(i32, STRIDE * _BYTES)))
