"""Rows in registers: layouts and transfers of the kernels that work row by row.

A row of D elements is an array (D/32, 32). A thread holds 8 neighbouring elements (16 bytes of bfloat16), four
threads one quantisation group; a warpgroup holds one long row or several short ones. Which thread holds which
element depends on D alone, so that sums of a row always add in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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

from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP

WARPS = 4
LANES = 32
VECTOR = 8
"""Elements of a row that one thread holds next to each other."""


def tiled_layout(tiles: tuple[tuple[int, ...], ...], warp_dims: Any, lane_dims: Any, vector_dim: int) -> Any:
    """Register layout of a tiling, whatever sizes of 1 it has (`plgpu.Layout.TILED` refuses those)."""
    layout = mgpu.TiledLayout(
        plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=vector_dim, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )


def _replicated(times: int) -> tuple[Any, ...]:
    return () if times == 1 else (plgpu.Replicated(times),)


def plane_layout(rows: int, columns: int, vector_length: int) -> tuple[int, Any]:
    """(rows of a tile, layout) of arrays [multiple of the tile, columns]; threads run along the columns first.

    rows: power of two that the tile's rows must divide; threads without a row of their own repeat one.
    """
    across = math.gcd(columns // vector_length, LANES)
    down = min(LANES // across, rows)
    warps = min(WARPS, rows // down)
    tiles = ((warps * down, across * vector_length), (down, across * vector_length), (vector_length,))
    layout = tiled_layout(
        tiles, (-5, *_replicated(WARPS // warps)), (-3, -2, *_replicated(LANES // (across * down))), -1
    )
    return warps * down, layout


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Rows [rows, groups, group] of one block: `matrix` lays out the elements, `packed` bytes of two neighbours,
    `scales` one number of each group."""

    rows: int
    groups: int
    group: int
    matrix: Any
    packed: Any

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.groups * self.group

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rows, self.groups, self.group)

    @property
    def scales(self) -> Any:
        return self.matrix.reduce((2,))


def row_layout(size: int, group: int = GROUP) -> RowLayout:
    """The layout of rows of `size` elements. Raises NotImplementedError unless they are whole groups."""
    if size % group or group % VECTOR:
        raise NotImplementedError(f"mosaic_gpu: rows of {size} elements are not whole groups of {group}")
    groups, most = size // group, LANES * VECTOR // group
    lanes = math.gcd(groups, most)
    warps = math.gcd(groups // lanes, WARPS)
    lane_rows, warp_rows = most // lanes, WARPS // warps
    rows = lane_rows * warp_rows

    def tiles(width: int, vector_length: int) -> tuple[tuple[int, ...], ...]:
        return (rows, warps * lanes, width), (lane_rows, lanes, width), (vector_length,)

    matrix, packed = (tiled_layout(tiles(group // each, VECTOR // each), (-7, -6), (-4, -3, -2), -1) for each in (1, 2))
    return RowLayout(rows, groups, group, matrix, packed)


# ---- transfers -------------------------------------------------------------------------------------


class _Places:
    """Addresses of the registers of an array [rows, ...] whose rows lie in a matrix [T, width].

    Rows count from `first`; those after the last repeat it. The rest of a row lies together, from `column` on;
    without `inner` every element of a row has the address of that column.
    """

    def __init__(
        self, ref: Any, numbers: tuple[Any, Any], last: int | None, layout: Any, shape: tuple[int, ...], inner: bool
    ) -> None:
        first, column = (number.registers.item() for number in numbers)
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        strides = tuple(math.prod(shape[axis + 1 :]) if inner else 0 for axis in range(1, len(shape)))
        self.row_steps = layout.tiling.tile_strides((1, *(0 for _ in strides)))
        self.column_steps = layout.tiling.tile_strides((0, *strides))

        def of_thread(steps: tuple[int, ...]) -> Any:
            constants = [arith.constant(i32, step) for step in steps[-layout.tiled_tiling_rank :]]
            of_warp = mgpu.utils.dyn_dot(layout.warp_indices(), constants)
            return arith.addi(of_warp, mgpu.utils.dyn_dot(layout.lane_indices(), constants))

        self.row = arith.addi(first, of_thread(self.row_steps))
        self.last = arith.constant(i32, ir.MemRefType(ref.type).shape[0] - 1 if last is None else last)
        self.column = arith.extui(i64, arith.addi(column, of_thread(self.column_steps)))
        self.width = ir.MemRefType(ref.type).shape[1]
        self.element = ir.MemRefType(ref.type).element_type
        if mgpu.utils.bitwidth(self.element) == 8:  # LLVM knows no narrow floats
            self.element = ir.IntegerType.get_signless(8)
        self.base = mgpu.utils.memref_ptr(ref)
        self.starts: dict[int, Any] = {}

    def row_of(self, index: tuple[int, ...]) -> int:
        """Row of a register, counted from its thread's first row."""
        return sum(i * step for i, step in zip(index, self.row_steps, strict=True))

    def at(self, index: tuple[int, ...], further: int = 0) -> Any:
        """Address of a register, `further` columns on."""
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        below = self.row_of(index)
        if below not in self.starts:
            row = arith.minsi(arith.addi(self.row, arith.constant(i32, below)), self.last)
            place = arith.muli(arith.extui(i64, row), arith.constant(i64, self.width))
            self.starts[below] = mgpu.utils.getelementptr(self.base, [arith.addi(place, self.column)], self.element)
        along = sum(i * step for i, step in zip(index, self.column_steps, strict=True)) + further
        return mgpu.utils.getelementptr(self.starts[below], [along], self.element)


def _alignment(ref: Any, vector_length: int, column: int) -> int:
    """Bytes that every vector's address is a multiple of."""
    memory = ir.MemRefType(ref.type)
    return math.gcd(vector_length, memory.shape[1], column) * mgpu.utils.bitwidth(memory.element_type) // 8


_NUMBERS = (plgpu.Layout.WG_SPLAT(()),) * 2


def _signed(dtype: Any) -> bool | None:
    return jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows `first`, `first` + 1, ... of a matrix [T, width] in global or shared memory; arrays are [rows, ...].

    Rows after `last` (None: the matrix's last) repeat it: they compute and store the same bytes again, so no row
    count needs padding.
    """

    first: Any
    last: int | None = None

    def _window(self, ref: Any, rows: int) -> tuple[Any, int, Any]:
        """For interpretation: a range of the matrix that holds these rows, its length, the rows' places in it."""
        limit = ref.shape[0] if self.last is None else self.last + 1
        number = min(rows, limit)
        base = jnp.minimum(self.first, limit - number)
        return base, number, jnp.minimum(self.first + jnp.arange(rows), limit - 1) - base

    def load(
        self,
        ref: Any,
        layout: Any,
        shape: tuple[int, ...],
        column: int = 0,
        moved: Any = 0,
        same: bool = False,
        terms: int = 1,
        apart: int = 0,
    ) -> jax.Array:
        """Columns from `column` + `moved` on.

        moved: multiple of 32, may be traced. same: repeat the one number of that column along its row.
        terms: add, first to last, as many float32 arrays, whose columns lie `apart` (multiple of 32).
        """
        size = math.prod(shape[1:])
        start = column + moved
        if interpreting():
            base, number, rows = self._window(ref, shape[0])

            def term(offset: int) -> jax.Array:
                read = ref[pl.ds(base, number), pl.ds(start + offset, 1 if same else size)][rows]
                return jnp.broadcast_to(read.reshape(-1, *((1,) * (len(shape) - 1) if same else shape[1:])), shape)

            total = term(0)
            for number_of_term in range(1, terms):
                total = total + term(number_of_term * apart)
            return total

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *_NUMBERS), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout)
        )
        def body(_: Any, source: Any, *numbers: Any) -> Any:
            to = layout.to_mgpu()
            places = _Places(source, numbers, self.last, to, shape, inner=not same)
            element = ir.MemRefType(source.type).element_type
            vector_type = ir.VectorType.get((to.vector_length,), element)
            alignment = _alignment(source, to.vector_length, math.gcd(column, GROUP))

            def read(index: tuple[int, ...], term: int) -> Any:
                place = places.at(index, term * apart)
                if not same:
                    return llvm.load(vector_type, place, alignment=alignment)
                return vector.broadcast(vector_type, llvm.load(element, place))

            known: dict[int, Any] = {}
            registers = np.empty(to.registers_shape(shape), dtype=object)
            for index in np.ndindex(registers.shape):
                row = places.row_of(index)
                if same and row in known:
                    registers[index] = known[row]
                    continue
                total = read(index, 0)
                for term in range(1, terms):
                    total = arith.addf(total, read(index, term))
                known[row] = registers[index] = total
            return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=_signed(ref.dtype))

        return body(ref, _scalar(self.first), _scalar(start))

    def store(self, ref: Any, value: jax.Array, layout: Any, column: int = 0, moved: Any = 0) -> None:
        """Store to the columns from `column` + `moved` on; moved: multiple of 32, may be traced.

        Bytes may be stored as uint8 whatever their type.
        """
        shape = value.shape
        size = math.prod(shape[1:])
        start = column + moved
        if interpreting():
            if value.dtype != ref.dtype:
                value = lax.bitcast_convert_type(value, ref.dtype)
            stored = value.reshape(shape[0], size)
            limit = ref.shape[0] if self.last is None else self.last + 1
            for count in {shape[0], limit % shape[0]} - {0}:  # whole blocks, and what is left

                @pl.when(jnp.minimum(limit - self.first, shape[0]) == count)
                def _(count: int = count) -> None:
                    ref[pl.ds(self.first, count), pl.ds(start, size)] = stored[:count]

            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *_NUMBERS))
        def body(_: Any, target: Any, array: Any, *numbers: Any) -> None:
            places = _Places(target, numbers, self.last, array.layout, shape, inner=True)
            stored = ir.VectorType.get((array.layout.vector_length,), places.element)
            alignment = _alignment(target, array.layout.vector_length, math.gcd(column, GROUP))
            for index in np.ndindex(array.registers.shape):
                register = mgpu.utils.bitcast(array.registers[index], stored)
                llvm.store(register, places.at(index), alignment=alignment)

        body(ref, value, _scalar(self.first), _scalar(start))


def _scalar(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


SHARED = Block(0)
"""Operands that all rows share, as matrices of one row."""


def prefetch(ref: Any, apart: int, count: int, first: Any, columns: int) -> None:
    """Ask for parts of every row of a matrix to come to the second-level cache, all at once.

    Parts are `columns` elements long (a multiple of 16 bytes) and begin at columns `first` + i * `apart`, i < count.
    There are at most as many parts as a warpgroup has threads.
    """
    rows, width = ref.shape
    if interpreting():
        return
    assert rows * count <= WARPS * LANES
    size = columns * jnp.dtype(ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *_NUMBERS[:1]))
    def body(_: Any, *operands: Any) -> None:
        source, start = operands
        i32 = ir.IntegerType.get_signless(32)
        number = [arith.constant(i32, n) for n in (rows, count, width, apart)]
        thread = mgpu.utils.thread_idx()
        part = arith.minsi(arith.divui(thread, number[0]), arith.subi(number[1], arith.constant(i32, 1)))
        place = arith.muli(arith.remui(thread, number[0]), number[2])
        place = arith.addi(arith.addi(place, arith.muli(part, number[3])), start.registers.item())
        element = ir.MemRefType(source.type).element_type
        address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source), [place], element)
        text = f"setp.lt.u32 wanted, $1, {rows * count}; @wanted cp.async.bulk.prefetch.L2.global [$0], {size};"
        inline_text("{ .reg .pred wanted; " + text + " }", "l,r", address, thread)

    body(ref, _scalar(first))


# ---- staged loads ----------------------------------------------------------------------------------

_COPY_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Staged:
    """Loads that are under way while earlier ones are worked on (`cp.async`).

    Every thread copies to shared memory what it will read itself, so that no barrier is needed. Threads hold 16
    neighbouring bytes of an array. When interpreted, `take` loads from the matrix itself.
    layout, shape, dtype: of each array. arrays: of a step. stages: steps in shared memory.
    """

    layout: Any
    shape: tuple[int, ...]
    dtype: Any
    arrays: int
    stages: int

    @property
    def _registers(self) -> int:
        return math.prod(self.layout.to_mgpu().registers_shape(self.shape))

    @property
    def buffer(self) -> Any:
        """Scratch memory of a block: [stage, array, register, thread] of 16 bytes."""
        threads = WARPS * LANES
        return plgpu.SMEM((self.stages * self.arrays * self._registers * threads, _COPY_BYTES // 4), jnp.int32)

    def _slot(self, buffer: Any, stage: Any, number: int) -> Any:
        """Address of this thread's register `number` of a stage."""
        i32 = ir.IntegerType.get_signless(32)
        threads = WARPS * LANES
        place = arith.muli(stage, arith.constant(i32, self.arrays * self._registers * threads))
        place = arith.addi(place, arith.addi(arith.constant(i32, number * threads), mgpu.utils.thread_idx()))
        place = arith.muli(place, arith.constant(i32, _COPY_BYTES))
        return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(buffer), [place], ir.IntegerType.get_signless(8))

    def start(self, buffer: Any, stage: Any, sources: list[tuple[Block, Any, int]], moved: Any) -> None:
        """Start to copy the arrays at (block, matrix, column), `moved` columns on, as one group."""
        if interpreting():
            return
        for number, (block, ref, column) in enumerate(sources):

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *_NUMBERS, *_NUMBERS[:1]))
            def body(_: Any, source: Any, target: Any, *numbers: Any, block: Block = block, at: int = number) -> None:
                to = self.layout.to_mgpu()
                places = _Places(source, numbers[:2], block.last, to, self.shape, inner=True)
                stage = numbers[2].registers.item()
                for i, index in enumerate(np.ndindex(to.registers_shape(self.shape))):
                    slot = self._slot(target, stage, at * self._registers + i)
                    slot = llvm.ptrtoint(ir.IntegerType.get_signless(32), slot)
                    inline_text("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "r,l", slot, places.at(index))

            body(ref, buffer, _scalar(block.first), _scalar(column + moved), _scalar(stage))
        self.close()

    def close(self) -> None:
        """End a group of copies; a group may be empty."""
        if not interpreting():
            plgpu.inline_mgpu()(lambda _: inline_text("cp.async.commit_group;", ""))()

    def wait(self) -> None:
        """Wait for the oldest of `stages` - 1 groups."""
        if not interpreting():
            plgpu.inline_mgpu()(lambda _: inline_text(f"cp.async.wait_group {self.stages - 2};", ""))()

    def take(self, buffer: Any, stage: Any, number: int, source: tuple[Block, Any, int], moved: Any) -> jax.Array:
        """Array `number` of a stage that has arrived, which `start` copied from `source`."""
        block, ref, column = source
        if interpreting():
            return block.load(ref, self.layout, self.shape, column=column, moved=moved)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *_NUMBERS[:1]),
            return_type=plgpu.ShapeDtypeStruct(self.shape, self.dtype, self.layout),
        )
        def body(_: Any, *operands: Any) -> Any:
            held, at = operands
            to = self.layout.to_mgpu()
            vector_type = ir.VectorType.get((to.vector_length,), mgpu.utils.dtype_to_ir_type(self.dtype))
            registers = np.empty(to.registers_shape(self.shape), dtype=object)
            for i, index in enumerate(np.ndindex(registers.shape)):
                slot = self._slot(held, at.registers.item(), number * self._registers + i)
                registers[index] = llvm.load(vector_type, slot, alignment=_COPY_BYTES)
            return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=_signed(self.dtype))

        return body(buffer, _scalar(stage))


def inline_text(text: str, constraints: str, *operands: Any) -> None:
    """PTX without a result, which may read and write memory."""
    clobbers = "~{memory}" if not constraints else f"{constraints},~{{memory}}"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, clobbers, has_side_effects=True)


# ---- launches --------------------------------------------------------------------------------------


def row_kernel(body: Callable[..., None], out_type: Any, rows: int, layout: RowLayout, **settings: Any) -> Any:
    """The kernel that runs `body` once for every block of `layout.rows` rows (axis "block")."""
    return plgpu.kernel(body, out_type=out_type, grid=(-(-rows // layout.rows),), grid_names=("block",), **settings)
