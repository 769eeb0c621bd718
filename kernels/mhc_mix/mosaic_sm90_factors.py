"""Factors of the boundary's rows in shared memory, for SM90 (Hopper).

Every step of a tile multiplies its streams by the same 24 numbers of a row, and there are not enough registers to
keep them. Loads from global memory, which missed the first-level cache, were a third of the kernel's time. A warp
loads the factors of its 16 rows once in a tile, and nobody else reads them: no barrier of more than a warp is needed.
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
from deepinfer_jax.kernels.mosaic.rows import LANES, WARPS, Block
from deepinfer_jax.kernels.mosaic.target import interpreting

Array = jax.Array

STRIDE = 28
"""Numbers from a row to the next: 8 rows that a warp reads at once lie in different banks."""

_NUMBER = plgpu.Layout.WG_SPLAT(())
_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Factors:
    """Of one tile: `comb` [T, 16], `post` [T, 4], `pre` [T, 4] in global memory.

    held: shared memory of the block, float32 [warpgroups * 64, STRIDE]: for every new stream the four numbers of comb
    that make it, then post, then pre.
    """

    block: Block
    comb: Any
    post: Any
    pre: Any
    held: Any

    @staticmethod
    def scratch(warpgroups: int) -> Any:
        return plgpu.SMEM((warpgroups * TILE_ROWS, STRIDE), jnp.float32)

    def load(self) -> None:
        """Bring the factors of the tile to shared memory; the warp has read those of the tile before."""
        if interpreting():
            return
        vector_type = ir.VectorType

        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, _NUMBER))
        def body(_: Any, *operands: Any) -> None:
            *sources, held, first = operands
            f32, i32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
            last = ir.MemRefType(sources[0].type).shape[0] - 1
            row, lane = _row_and_lane()
            to = _address(held, row)
            comb, post, pre = (mgpu.utils.memref_ptr(source) for source in sources)

            def read(base: Any, half: Any, width: int, column: Any) -> list[Any]:
                at = arith.addi(arith.addi(first.registers.item(), _tile_row()), half)
                at = arith.extui(i64, arith.minsi(at, arith.constant(i32, last)))
                at = arith.addi(arith.muli(at, arith.constant(i64, width)), arith.extui(i64, column))
                four = llvm.load(
                    vector_type.get((COUNT,), f32), mgpu.utils.getelementptr(base, [at], f32), alignment=COUNT * _BYTES
                )
                place = [ir.DenseI64ArrayAttr.get([i]) for i in range(COUNT)]
                return [vector.extract(four, dynamic_position=[], static_position=p) for p in place]

            zero, eight = arith.constant(i32, 0), arith.constant(i32, 8)
            # Lane i of the four that share a row has row i of its comb; lanes 0 and 1 post and pre of the upper row,
            # lanes 2 and 3 those of the lower one.
            combs = [
                read(comb, half, COUNT * COUNT, arith.muli(lane, arith.constant(i32, COUNT))) for half in (zero, eight)
            ]
            odd = arith.trunci(ir.IntegerType.get_signless(1), lane)
            lower = arith.muli(arith.shrui(lane, arith.constant(i32, 1)), eight)
            others = read(arith.select(odd, pre, post), lower, COUNT, zero)
            _inline("bar.warp.sync 0xffffffff;", "")
            for half, numbers in enumerate(combs):
                for j, number in enumerate(numbers):  # comb[i, j] to place j * 4 + i
                    offset = arith.constant(i32, (8 * half * STRIDE + j * COUNT) * _BYTES)
                    at = arith.addi(arith.addi(to, offset), arith.muli(lane, arith.constant(i32, _BYTES)))
                    _inline("st.shared.f32 [$0], $1;", "r,f", at, number)
            at = arith.addi(to, arith.muli(lower, arith.constant(i32, STRIDE * _BYTES)))
            place = arith.addi(arith.extui(i32, odd), arith.constant(i32, COUNT))
            at = arith.addi(at, arith.muli(place, arith.constant(i32, COUNT * _BYTES)))
            _inline("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f", at, *others)
            _inline("bar.warp.sync 0xffffffff;", "")

        body(self.comb, self.post, self.pre, self.held, jnp.asarray(self.block.first, jnp.int32))

    def _four(self, ref: Any, columns: range, place: int) -> list[Array]:
        """Four factors, each repeated along its row [64, 32]: the numbers at `place`, columns `columns` of `ref`."""
        shape = (TILE_ROWS, STEP)
        if interpreting():
            return [self.block.load(ref, ROWS_LAYOUT, shape, column=i, same=True) for i in columns]
        result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), ROWS_LAYOUT)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result,) * COUNT)
        def body(_: Any, held: Any) -> Any:
            f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
            layout = ROWS_LAYOUT.to_mgpu()
            shape_of_registers = layout.registers_shape(shape)
            row, _lane = _row_and_lane()
            at = _address(held, row)
            arrays = [np.empty(shape_of_registers, dtype=object) for _ in range(COUNT)]
            four = llvm.StructType.get_literal([f32] * COUNT)
            for half, index in enumerate(np.ndindex(shape_of_registers)):  # the upper row, then the lower one
                offset = arith.constant(i32, (8 * half * STRIDE + place) * _BYTES)
                text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
                read = llvm.inline_asm(
                    four, [arith.addi(at, offset)], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True
                )
                for i, array in enumerate(arrays):
                    number = llvm.extractvalue(f32, read, [i])
                    array[index] = vector.broadcast(ir.VectorType.get((layout.vector_length,), f32), number)
            return tuple(mgpu.FragmentedArray(_registers=a, _layout=layout, _is_signed=None) for a in arrays)

        return list(body(self.held))

    def of_stream(self, stream: int) -> list[Array]:
        """Factors comb[i, stream] of the old streams."""
        return self._four(self.comb, range(stream, COUNT * COUNT, COUNT), stream * COUNT)

    def of_sublayer(self) -> list[Array]:
        """post: for each new stream the factor of the sublayer's output."""
        return self._four(self.post, range(COUNT), COUNT * COUNT)

    def of_collapse(self) -> list[Array]:
        """pre: factors of the new streams in their collapse."""
        return self._four(self.pre, range(COUNT), COUNT * COUNT + COUNT)


def _inline(text: str, constraints: str, *operands: Any) -> None:
    clobbers = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, clobbers, has_side_effects=True)


def _tile_row() -> Any:
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
    row = arith.addi(arith.muli(warpgroup, arith.constant(i32, TILE_ROWS)), _tile_row())
    return row, arith.andi(thread, arith.constant(i32, 3))


def _address(held: Any, row: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(held))
    return arith.addi(base, arith.muli(row, arith.constant(i32, STRIDE * _BYTES)))
