"""Projection of the streams, and the boundary between two sublayers, for SM90 (Hopper).

A block keeps the weights of one piece in shared memory and goes through tiles of 64 rows, one to each warpgroup at a
time. Pieces depend on the size of a stream alone, and the sum of a piece is made in one order, so a row's bits do
not depend on how many rows there are, nor on which warpgroup adds them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from deepinfer_jax.kernels.mhc_mix.mosaic_mix import (
    PARTIAL,
    PARTS,
    ROWS_LAYOUT,
    STEP,
    TILE_ROWS,
    Shape,
    Sums,
    no_sums,
    store_sums,
)
from deepinfer_jax.kernels.mhc_mix.mosaic_rows import weighted_sum
from deepinfer_jax.kernels.mhc_mix.mosaic_sm90_factors import Factors, tile_row
from deepinfer_jax.kernels.mhc_mix.mosaic_sm90_product import (
    NUMBERS,
    WEIGHT_TRANSFORMS,
    fetch_weights,
    floats,
    multiply,
)
from deepinfer_jax.kernels.mosaic.row_arithmetic import rounded
from deepinfer_jax.kernels.mosaic.rows import LANES, WARPS, Block, Staged, inline_text
from deepinfer_jax.kernels.mosaic.target import interpreting

Array = jax.Array

PIECE = 160
"""Columns of every stream in one piece, at most: weights of 90 KiB. Released streams are 32 such pieces, and 4096 rows
the same number of tiles for each of 4 blocks a piece."""

PROCESSORS = 132
"""Blocks that run at the same time; a block fills a multiprocessor. Results do not depend on it."""


@dataclasses.dataclass(frozen=True)
class Depth:
    """warpgroups: of a block. stages: steps of a warpgroup in shared memory or on their way there.
    at_once: streams whose products are under way at the same time."""

    warpgroups: int
    stages: int
    at_once: int


PROJECT, BOUNDARY = Depth(4, 4, 1), Depth(2, 2, 2)
"""Of the two kernels. Registers and 227 KiB limit them; more on its way made both slower (`docs/performance.md`)."""


def shape_of(streams: Array) -> Shape:
    """Sizes and pieces of streams [T, C, D]."""
    rows, count, size = streams.shape
    return Shape(rows, count, size, most=PIECE, in_turns=True)


# ---- the walk over tiles ---------------------------------------------------------------------------


Make = Callable[[Iterator[Array], Array], Iterable[Array]]
"""Makes the streams to be projected from the arrays of a step, which it takes one by one, and their first column."""

Sources = list[tuple[Block, Any, int]]
"""(block of rows, matrix, first column) of every array of a step."""

_WORDS = 4
"""32-bit words of one copy."""


def _addresses(ref: Any, first: Any, column: Any) -> list[Any]:
    """Where a thread's two vectors of 8 columns of a tile in `ROWS_LAYOUT` lie; rows after the last repeat it."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    rows, width = ir.MemRefType(ref.type).shape
    above = tile_row()
    place = arith.shli(arith.andi(mgpu.utils.thread_idx(), arith.constant(i32, 3)), arith.constant(i32, 3))
    along = arith.extui(i64, arith.addi(column, place))

    def address(half: int) -> Any:
        row = arith.addi(first, arith.addi(above, arith.constant(i32, half)))
        row = arith.extui(i64, arith.minsi(row, arith.constant(i32, rows - 1)))
        start = arith.addi(arith.muli(row, arith.constant(i64, width)), along)
        return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [start], ir.MemRefType(ref.type).element_type)

    return [address(half) for half in (0, 8)]


@dataclasses.dataclass(frozen=True)
class _WarpgroupStaged(Staged):
    """`Staged` for blocks of several warpgroups, each of which has its own place and its own progress."""

    warpgroups: int = 1

    @property
    def _threads(self) -> int:
        return self.warpgroups * WARPS * LANES

    @property
    def _copies(self) -> int:
        """Copies of a thread in one stage."""
        return self.arrays * math.prod(self.layout.to_mgpu().registers_shape(self.shape))

    @property
    def buffer(self) -> Any:
        return plgpu.SMEM((self.stages * self._copies * self._threads, _WORDS), jnp.int32)

    def _slot(self, buffer: Any, stage: Any, number: int) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        place = arith.muli(stage, arith.constant(i32, self._copies * self._threads))
        place = arith.addi(place, arith.addi(arith.constant(i32, number * self._threads), mgpu.utils.thread_idx()))
        place = arith.muli(place, arith.constant(i32, 4 * _WORDS))
        return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(buffer), [place], ir.IntegerType.get_signless(8))

    def start(self, buffer: Any, stage: Any, sources: Sources, moved: Any) -> None:
        if interpreting():
            return

        for number, (block, ref, column) in enumerate(sources):

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *NUMBERS))
            def body(_: Any, source: Any, target: Any, *numbers: Any, number: int = number) -> None:
                first, start, stage = (n.registers.item() for n in numbers)
                for i, address in enumerate(_addresses(source, first, start)):
                    slot = llvm.ptrtoint(ir.IntegerType.get_signless(32), self._slot(target, stage, 2 * number + i))
                    inline_text("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "r,l", slot, address)

            body(ref, buffer, jnp.int32(block.first), jnp.int32(column) + moved, jnp.int32(stage))
        self.close()

    def wait_all(self) -> None:
        """Wait for all copies."""
        if not interpreting():
            plgpu.inline_mgpu()(lambda _: inline_text("cp.async.wait_all;", ""))()


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number that is not negative: two instructions for powers of two."""
    if by & (by - 1):
        return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
    return number >> (by.bit_length() - 1), number & (by - 1)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How blocks share the tiles and pieces of streams.

    arrays: loaded in a step. streams: projected in a step.
    """

    shape: Shape
    arrays: int
    streams: int
    depth: Depth

    @property
    def warpgroups(self) -> int:
        return self.depth.warpgroups

    @property
    def stages(self) -> int:
        return self.depth.stages

    @property
    def tiles(self) -> int:
        return -(-self.shape.rows // TILE_ROWS)

    @property
    def groups(self) -> int:
        """Blocks of one piece."""
        return min(self.tiles, max(1, PROCESSORS // self.shape.pieces))

    @property
    def workers(self) -> int:
        """Warpgroups of one piece."""
        return self.groups * self.warpgroups

    @property
    def columns(self) -> int:
        """Steps of 32 columns in a piece of one stream."""
        return self.shape.piece // STEP

    def column(self, piece: Any, number: Any) -> Any:
        """First column of 32 columns of a piece. Those of all pieces with one number lie together: blocks go through
        them at about the same time, and what memory is asked for at one time is whole pages of it."""
        return (number * self.shape.pieces + piece) * STEP

    @property
    def substeps(self) -> int:
        """Steps for 32 columns of all streams."""
        return self.shape.count // self.streams

    @property
    def steps(self) -> int:
        """Steps in a piece of all streams: for 32 columns after the other, the streams in ascending order."""
        return self.columns * self.substeps

    @property
    def staged(self) -> _WarpgroupStaged:
        return _WarpgroupStaged(ROWS_LAYOUT, (TILE_ROWS, STEP), jnp.bfloat16, self.arrays, self.stages, self.warpgroups)

    def kernel(self, body: Callable[..., None], out_type: Any, **further: Any) -> Any:
        """The kernel of `body`, whose scratch memory is that of `run` and `further`."""
        weights = (self.shape.count * self.columns, PARTS * self.shape.mixes, STEP)
        scratch = {
            "buffer": self.staged.buffer,
            "weights_s": plgpu.SMEM(weights, jnp.bfloat16, transforms=WEIGHT_TRANSFORMS),
            "arrived": plgpu.Barrier(num_arrivals=self.warpgroups),
            **further,
        }
        if interpreting():
            rows = (self.warpgroups, TILE_ROWS, STEP)
            scratch["rows_s"] = plgpu.SMEM(rows, jnp.bfloat16, transforms=WEIGHT_TRANSFORMS)
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(self.groups, self.shape.pieces),
            grid_names=("group", "piece"),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            scratch_types=scratch,
        )

    def run(
        self,
        sources: Callable[[Block], Sources],
        begin: Callable[[Block, Array], Make],
        fn_ref: Any,
        partial_ref: Any,
        *,
        ahead: Callable[[Block, Any], None] | None = None,
        buffer: Any,
        weights_s: Any,
        arrived: Any,
        rows_s: Any = None,
    ) -> None:
        """Project all tiles of this warpgroup.

        sources: of a tile. begin: called with a tile and the half of double memory that is its own, gives the function
            of a step's arrays and first column that makes the streams to be projected.
        ahead: called with the next tile and its half when a tile begins, to start copies of what it needs.
        """
        shape, staged, steps = self.shape, self.staged, self.steps
        warpgroup, piece = lax.axis_index("warpgroup"), lax.axis_index("piece")
        worker = warpgroup * self.groups + lax.axis_index("group")

        def moved_by(columns: Any, substep: Any) -> Any:
            return substep * (self.streams * shape.size) + self.column(piece, columns)

        def start(number: Any, step: Any) -> None:
            """Start the loads of this warpgroup's step `step` from its tile `number` on."""
            done = number * steps + step
            if self.stages <= steps:  # it belongs to this tile or the next one
                further = (step >= steps).astype(jnp.int32)
                number, step = number + further, step - further * steps
            else:
                more, step = _divided(step, steps)
                number = number + more
            tile = worker + number * self.workers

            @pl.when(tile < self.tiles)
            def _() -> None:
                stage = _divided(done, self.stages)[1]
                moved = moved_by(*_divided(step, self.substeps))
                staged.start(buffer, stage, sources(Block(tile * TILE_ROWS)), moved)

            @pl.when(tile >= self.tiles)
            def _() -> None:
                staged.close()

        if ahead is not None:
            ahead(Block(worker * TILE_ROWS), 0)
        for number in range(self.stages - 1):
            start(jnp.int32(0), jnp.int32(number))
        for each in range(0, self.columns, self.warpgroups):
            at = each + warpgroup

            @pl.when(at < self.columns)
            def _(at: Any = at) -> None:
                fetch_weights(fn_ref, weights_s, at, self.columns, self.column(piece, at))

        plgpu.commit_smem()
        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived)

        def add(products: Array, streams: list[tuple[Array, Any]]) -> Array:
            for product in multiply(streams, weights_s, None if rows_s is None else rows_s.at[warpgroup]):
                products = products + product
            return products

        def visit(number: Array, carry: None) -> None:
            block = Block((worker + number * self.workers) * TILE_ROWS)
            half = number & 1
            make = begin(block, half)
            if ahead is not None:
                if steps < self.stages - 1:
                    # What was started ahead has not been waited for with the steps of the tile before.
                    staged.wait_all()
                ahead(Block((worker + (number + 1) * self.workers) * TILE_ROWS), 1 - half)

            def step(columns: Array, sums: Sums) -> Sums:
                squares, products = sums
                total: Any = None
                waiting: list[tuple[Array, Any]] = []
                for substep in range(self.substeps):
                    done = (number * self.columns + columns) * self.substeps + substep
                    staged.wait()
                    moved = moved_by(columns, substep)
                    stage = _divided(done, self.stages)[1]
                    taken = (staged.take(buffer, stage, at, source, moved) for at, source in enumerate(sources(block)))
                    for stream, value in enumerate(list(make(taken, moved)), substep * self.streams):
                        numbers = floats(value)
                        total = numbers * numbers if total is None else total + numbers * numbers
                        waiting.append((value, stream * self.columns + columns))
                    # Loads go to where the step before this one was. Their branch stands here so that the compiler
                    # does not move work across it: there are not enough registers for both sides at once.
                    start(number, columns * self.substeps + (substep + self.stages - 1))
                    while len(waiting) >= self.depth.at_once:
                        products = add(products, waiting[: self.depth.at_once])
                        waiting = waiting[self.depth.at_once :]
                if waiting:
                    products = add(products, waiting)
                return squares + jnp.sum(total, axis=1), products

            store_sums(block, partial_ref, lax.fori_loop(0, self.columns, step, no_sums(shape)), piece, shape)
            return carry

        lax.fori_loop(0, lax.div(self.tiles - worker + self.workers - 1, jnp.int32(self.workers)), visit, None)


# ---- kernels ---------------------------------------------------------------------------------------


def project(streams: Array, fn: Array) -> Array:
    """Partial sums float32 [T, pieces * 32] of streams [T, C, D] and fn float32 [C*(2+C), C*D]."""
    shape = shape_of(streams)
    walk = Walk(shape, arrays=1, streams=1, depth=PROJECT)

    def mhc_project_kernel(streams_ref: Any, fn_ref: Any, partial_ref: Any, **scratch: Any) -> None:
        walk.run(
            lambda block: [(block, streams_ref, 0)],
            lambda block, half: lambda values, moved: values,
            fn_ref,
            partial_ref,
            **scratch,
        )

    out = jax.ShapeDtypeStruct((shape.rows, shape.pieces * PARTIAL), jnp.float32)
    return walk.kernel(mhc_project_kernel, out)(streams.reshape(shape.rows, -1), fn)


def expand_project(
    y: Array, streams: Array, post: Array, comb: Array, pre: Array, fn: Array
) -> tuple[Array, Array, Array]:
    """(new streams [T, C, D], their collapse by `pre` [T, D], their partial sums as `project` gives them)."""
    shape = shape_of(streams)
    walk = Walk(shape, arrays=1 + shape.count, streams=shape.count, depth=BOUNDARY)
    count = shape.count
    columns = [i * shape.size for i in range(count)]

    def mhc_boundary_kernel(
        y_ref: Any, streams_ref: Any, post_ref: Any, comb_ref: Any, pre_ref: Any, fn_ref: Any,
        new_ref: Any, collapsed_ref: Any, partial_ref: Any, factors_s: Any, **scratch: Any,
    ) -> None:  # fmt: skip
        def sources(block: Block) -> Sources:
            return [(block, y_ref, 0), *((block, streams_ref, column) for column in columns)]

        factors = Factors(comb_ref, post_ref, pre_ref, factors_s)

        def begin(block: Block, half: Array) -> Make:
            def make(values: Iterator[Array], moved: Array) -> list[Array]:
                sublayer, *old = map(floats, values)
                factors.arrived()
                new = []
                for j, factor in enumerate(factors.of_sublayer(block, half)):
                    total = factor * sublayer + weighted_sum(factors.of_stream(block, half, j), old)
                    new.append(rounded(total, streams.dtype, ROWS_LAYOUT))
                collapsed = weighted_sum(factors.of_collapse(block, half), list(map(floats, new)))
                for column, value in zip(columns, new, strict=True):
                    block.store(new_ref, value, ROWS_LAYOUT, column=column, moved=moved)
                block.store(collapsed_ref, rounded(collapsed, y.dtype, ROWS_LAYOUT), ROWS_LAYOUT, moved=moved)
                return new

            return make

        walk.run(sources, begin, fn_ref, partial_ref, ahead=factors.start, **scratch)

    flat = jax.ShapeDtypeStruct((shape.rows, shape.count * shape.size), streams.dtype)
    out = (
        flat,
        jax.ShapeDtypeStruct(y.shape, y.dtype),
        jax.ShapeDtypeStruct((shape.rows, shape.pieces * PARTIAL), jnp.float32),
    )
    kernel = walk.kernel(mhc_boundary_kernel, out, factors_s=Factors.scratch(walk.warpgroups))
    new, collapsed, partial = kernel(y, streams.reshape(flat.shape), post, comb.reshape(shape.rows, -1), pre, fn)
    return new.reshape(streams.shape), collapsed, partial
