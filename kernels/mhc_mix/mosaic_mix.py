"""Coefficients of the hyper-connections, and the boundary between two sublayers.

The projection is a matrix product of exact bfloat16 streams and float32 weights. Every weight is split into
three bfloat16 parts that hold its 24 bits, so that tensor cores (`mma.sync`; SM90 has faster ones, in
`mosaic_sm90.py`) give float32 products. Tensor cores cut sums off instead of rounding them, so every 32 columns are
a sum of their own, smallest parts first, and are added in float32. The split is a kernel of its own: in the
projection it would be repeated for every tile of rows, and was two thirds of the instructions there. A block
takes 64 rows and a fixed piece of every stream; a last kernel adds the pieces of a row in ascending order and
makes the coefficients. Rows of a tile do not meet in a matrix product, and a row's pieces never depend on the
row count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from deepinfer_jax.kernels.mhc_mix.mosaic_rows import expanded, load_factors, weighted_sum
from deepinfer_jax.kernels.mosaic.row_arithmetic import divide, inline_float
from deepinfer_jax.kernels.mosaic.rows import SHARED, Block, Staged, prefetch, row_kernel, row_layout, tiled_layout
from deepinfer_jax.kernels.mosaic.target import interpreting

Array = jax.Array

TILE_ROWS = 64
STEP = 32
"""Columns of a stream in one step of the product: 8 neighbours in each of 4 threads."""

PIECE = 256
"""Columns of every stream in one block, at most."""

STAGES = 4
"""Steps of the streams that are in shared memory or on their way to it."""

PARTIAL = 32
"""Numbers of one row and piece: the projection, then the sum of squares, then nothing."""

ROWS_LAYOUT = plgpu.Layout.WGMMA_UPCAST_4X
SUMS_LAYOUT = plgpu.Layout.WGMMA
WEIGHTS_LAYOUT = tiled_layout(((8, STEP), (8,)), (plgpu.Replicated(4),), (-3, -2), -1)

_HIGH = np.uint32(0xFFFF0000)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes: rows, streams, columns of a stream; columns of a piece, at most and as it is; number of pieces.

    in_turns: 32 columns of every piece come after another, not all columns of a piece.
    """

    rows: int
    count: int
    size: int
    most: int = PIECE
    in_turns: bool = False

    @property
    def mixes(self) -> int:
        return self.count * (2 + self.count)

    @property
    def piece(self) -> int:
        steps = self.size // STEP
        return STEP * max(n for n in range(1, self.most // STEP + 1) if steps % n == 0)

    @property
    def pieces(self) -> int:
        return self.size // self.piece

    @property
    def pieces_of_columns(self) -> np.ndarray:
        """The piece of each column of a stream, int [D]."""
        columns = np.arange(self.size)
        return columns // STEP % self.pieces if self.in_turns else columns // self.piece


Parts = tuple[Array, Array, Array]
"""Leading, middle and last parts of weights, bfloat16."""


def split(weights: Array) -> Parts:
    """Three bfloat16 arrays whose sum is the float32 array, each the leading 8 bits of what is left."""

    def leading(x: Array) -> Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & _HIGH, jnp.float32)

    high = leading(weights)
    rest = weights - high
    middle = leading(rest)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), (rest - middle).astype(jnp.bfloat16)


PARTS = 3


def split_weights(fn: Array) -> Array:
    """`split` of float32 [C*(2+C), C*D] as a kernel: bfloat16 [C*(2+C), 3*C*D], for each step of 32 columns its
    leading, middle and last parts."""
    rows = fn.size // STEP
    layout = row_layout(STEP)

    def mhc_split_kernel(fn_ref: Any, parts_ref: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows)
        for number, part in enumerate(split(block.load(fn_ref, layout.matrix, layout.shape))):
            block.store(parts_ref, part, layout.matrix, column=number * STEP)

    out = jax.ShapeDtypeStruct((rows, PARTS * STEP), jnp.bfloat16)
    parts = row_kernel(mhc_split_kernel, out, rows, layout)(fn.reshape(rows, STEP))
    return parts.reshape(fn.shape[0], PARTS * fn.shape[1])


def left_pairs() -> list[tuple[int, int]]:
    """(register, pair in it) of rows in the order of the instruction: step of 16, half of it, half of 16 rows."""
    return [(rows, 2 * step + half) for step in range(2) for half in range(2) for rows in range(2)]


def right_pairs(columns: int) -> list[tuple[int, int]]:
    """(register, pair in it) of weights in the order of the instruction: step of 16, 8 columns, half of the step."""
    return [(n, 2 * step + half) for step in range(2) for n in range(columns // 8) for half in range(2)]


def multiply(rows: Array, weights: Parts) -> Array:
    """float32 rows [64, 32] @ weights [N, 32]^T on the tensor cores, the last parts of the weights first.

    A thread holds 8 neighbouring columns of a row and of a weight; the instruction wants 2 pairs that lie 8
    apart. Which column is which does not matter to a product as long as both operands agree, so pairs are
    handed over in the order in which they lie.
    """
    count = weights[0].shape[0]
    if interpreting():
        total = jnp.zeros((TILE_ROWS, count), jnp.float32)
        for part in weights[::-1]:
            total = total + lax.dot_general(
                rows.astype(jnp.float32), part.astype(jnp.float32), (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
            )  # fmt: skip
        return total

    @plgpu.inline_mgpu(
        arg_types=(SUMS_LAYOUT, ROWS_LAYOUT, *(WEIGHTS_LAYOUT,) * PARTS),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, count), jnp.dtype(jnp.float32), SUMS_LAYOUT),
    )
    def body(_: Any, *operands: Any) -> Any:
        total, a, *parts = operands
        layouts = mgpu.MMALayouts(ir.BF16Type.get(), m_warps=4)

        def pair(register: Any, number: int) -> Any:
            return mgpu.utils.vector_slice(register, slice(2 * number, 2 * number + 2))

        zero = _zero()
        left = [_own_register(pair(a.registers.flat[register], number), zero) for register, number in left_pairs()]
        left_registers = np.array(left, dtype=object).reshape(layouts.lhs.registers_shape((TILE_ROWS, STEP)))
        lhs = mgpu.FragmentedArray(_registers=left_registers, _layout=layouts.lhs, _is_signed=None)
        for b in parts[::-1]:
            right = [pair(b.registers.flat[register], number) for register, number in right_pairs(count)]
            right_registers = np.array(right, dtype=object).reshape(layouts.rhs.registers_shape((STEP, count)))
            rhs = mgpu.FragmentedArray(_registers=right_registers, _layout=layouts.rhs, _is_signed=None)
            total = mgpu.mma(total, lhs, rhs)
        return total

    return body(_zeros((TILE_ROWS, count), SUMS_LAYOUT), rows, *weights)


def _own_register(pair: Any, zero: Any) -> Any:
    """The same pair of bfloat16 in a register of its own.

    The four registers of an operand come out of two loads. Without this they were copied to neighbouring ones for
    each of the 18 instructions that use them.
    """
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.bitcast(arith.addi(mgpu.utils.bitcast(pair, i32), zero), pair.type)


def _zero() -> Any:
    """0 that no compiler knows to be 0: the third dimension of a grid, which has 16 bits, shifted by 16."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [], "{ .reg .u32 size; mov.u32 size, %nctaid.z; shr.u32 $0, size, 16; }", "=r")


def _zeros(shape: tuple[int, ...], layout: Any) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


Sums = tuple[Array, Array]
"""Sum of squares [64], products [64, N]."""


def no_sums(shape: Shape) -> Sums:
    return _zeros((TILE_ROWS,), ROWS_LAYOUT.reduce((1,))), _zeros((TILE_ROWS, shape.mixes), SUMS_LAYOUT)


def _add_step(sums: Sums, stream: Array, weights: Parts) -> Sums:
    """Add one step of one stream, bfloat16 [64, 32]; weights: [N, 32]."""
    squares, products = sums
    values = stream.astype(jnp.float32)
    return squares + jnp.sum(values * values, axis=1), products + multiply(stream, weights)


def store_sums(block: Block, partial_ref: Any, sums: Sums, piece: Array, shape: Shape) -> None:
    squares, products = sums
    moved = piece * PARTIAL
    block.store(partial_ref, products, SUMS_LAYOUT, moved=moved)
    block.store(partial_ref, squares, ROWS_LAYOUT.reduce((1,)), column=shape.mixes, moved=moved)


def shape_of(streams: Array) -> Shape:
    """Sizes and pieces of streams [T, C, D]."""
    rows, count, size = streams.shape
    return Shape(rows, count, size)


def _grid(shape: Shape) -> dict[str, Any]:
    return {"grid": (-(-shape.rows // TILE_ROWS), shape.pieces), "grid_names": ("tile", "piece")}


def _run_steps(shape: Shape, staged: Staged, buffer: Any, sources: list[Any], piece: Array, body: Any) -> Sums:
    """Sums over the steps of a piece. body(values, moved, sums): adds a step; `moved` is its first column."""
    steps = shape.piece // STEP
    ahead = staged.stages - 1

    def column(number: Any) -> Any:
        return piece * shape.piece + number * STEP

    for number in range(ahead):
        if number < steps:
            staged.start(buffer, number, sources, column(number))
        else:
            staged.close()

    def step(number: Array, sums: Sums) -> Sums:
        staged.wait()
        stage = lax.rem(number, staged.stages)
        moved = column(number)
        values = [staged.take(buffer, stage, i, source, moved) for i, source in enumerate(sources)]
        later = number + ahead

        @pl.when(later < steps)
        def _() -> None:
            staged.start(buffer, lax.rem(later, staged.stages), sources, column(later))

        @pl.when(later >= steps)
        def _() -> None:
            staged.close()

        return body(values, moved, sums)

    return lax.fori_loop(0, steps, step, no_sums(shape))


def _load_weights(ref: Any, shape: Shape, column: int, moved: Any) -> Parts:
    """Parts of the weights of one step of one stream, from `split_weights`."""
    high, middle, low = (
        Block(0).load(
            ref, WEIGHTS_LAYOUT, (shape.mixes, STEP), column=PARTS * column + number * STEP, moved=PARTS * moved
        )
        for number in range(PARTS)
    )
    return high, middle, low


def _prefetch_weights(ref: Any, shape: Shape, piece: Array) -> None:
    prefetch(ref, PARTS * shape.size, shape.count, piece * (PARTS * shape.piece), PARTS * shape.piece)


def _staged(arrays: int) -> Staged:
    return Staged(ROWS_LAYOUT, (TILE_ROWS, STEP), jnp.bfloat16, arrays, STAGES)


def project(streams: Array, fn: Array) -> Array:
    """Partial sums float32 [T, pieces * 32] of streams [T, C, D] and fn float32 [C*(2+C), C*D]."""
    shape = shape_of(streams)
    staged = _staged(shape.count)
    columns = [i * shape.size for i in range(shape.count)]

    def mhc_project_kernel(streams_ref: Any, weights_ref: Any, partial_ref: Any, buffer: Any) -> None:
        block = Block(lax.axis_index("tile") * TILE_ROWS)
        piece = lax.axis_index("piece")
        _prefetch_weights(weights_ref, shape, piece)

        def step(values: list[Array], moved: Array, sums: Sums) -> Sums:
            for column, value in zip(columns, values, strict=True):
                sums = _add_step(sums, value, _load_weights(weights_ref, shape, column, moved))
            return sums

        sources = [(block, streams_ref, column) for column in columns]
        store_sums(block, partial_ref, _run_steps(shape, staged, buffer, sources, piece, step), piece, shape)

    out = jax.ShapeDtypeStruct((shape.rows, shape.pieces * PARTIAL), jnp.float32)
    kernel = plgpu.kernel(mhc_project_kernel, out_type=out, scratch_types=[staged.buffer], **_grid(shape))
    return kernel(streams.reshape(shape.rows, -1), split_weights(fn))


def expand_project(
    y: Array, streams: Array, post: Array, comb: Array, pre: Array, fn: Array
) -> tuple[Array, Array, Array]:
    """(new streams [T, C, D], their collapse by `pre` [T, D], their partial sums as `project` gives them)."""
    shape = shape_of(streams)
    staged = _staged(1 + shape.count)
    columns = [i * shape.size for i in range(shape.count)]

    def mhc_boundary_kernel(
        y_ref: Any, streams_ref: Any, post_ref: Any, comb_ref: Any, pre_ref: Any, weights_ref: Any,
        new_ref: Any, collapsed_ref: Any, partial_ref: Any, buffer: Any,
    ) -> None:  # fmt: skip
        block = Block(lax.axis_index("tile") * TILE_ROWS)
        piece = lax.axis_index("piece")
        _prefetch_weights(weights_ref, shape, piece)
        post_factors, comb_factors = (
            load_factors(block, ref, ROWS_LAYOUT, (TILE_ROWS, STEP)) for ref in (post_ref, comb_ref)
        )

        def step(values: list[Array], moved: Array, sums: Sums) -> Sums:
            sublayer, *old = values
            new = expanded(sublayer, old, post_factors, comb_factors, ROWS_LAYOUT)
            # Loaded again in every step: there are not enough registers to keep them.
            pre_factors = load_factors(block, pre_ref, ROWS_LAYOUT, (TILE_ROWS, STEP))
            collapsed = weighted_sum(pre_factors, new).astype(collapsed_ref.dtype)
            # Everything is stored before a weight is loaded: a compiler cannot move those loads ahead of stores, and
            # there are not enough registers for weights beside the old streams.
            for column, value in zip(columns, new, strict=True):
                block.store(new_ref, value, ROWS_LAYOUT, column=column, moved=moved)
            block.store(collapsed_ref, collapsed, ROWS_LAYOUT, moved=moved)
            for column, value in zip(columns, new, strict=True):
                sums = _add_step(sums, value, _load_weights(weights_ref, shape, column, moved))
            return sums

        sources = [(block, y_ref, 0), *((block, streams_ref, column) for column in columns)]
        store_sums(block, partial_ref, _run_steps(shape, staged, buffer, sources, piece, step), piece, shape)

    flat = jax.ShapeDtypeStruct((shape.rows, shape.count * shape.size), streams.dtype)
    out = (
        flat,
        jax.ShapeDtypeStruct(y.shape, y.dtype),
        jax.ShapeDtypeStruct((shape.rows, shape.pieces * PARTIAL), jnp.float32),
    )
    kernel = plgpu.kernel(mhc_boundary_kernel, out_type=out, scratch_types=[staged.buffer], **_grid(shape))
    new, collapsed, partial = kernel(
        y, streams.reshape(flat.shape), post, comb.reshape(shape.rows, -1), pre, split_weights(fn)
    )
    return new.reshape(streams.shape), collapsed, partial


# ---- coefficients ----------------------------------------------------------------------------------

COUNT = 4
"""Streams that the coefficients are written for: four numbers of a row stand in four neighbouring threads."""

GATE_ROWS = 16
GATE_SHAPE = (GATE_ROWS, COUNT)
GATE_LAYOUT = tiled_layout(
    ((GATE_ROWS, COUNT), (GATE_ROWS // 4, COUNT), (1,)), (-5,), (plgpu.Replicated(2), -3, -2), -1
)
TOTALS_LAYOUT = tiled_layout(((GATE_ROWS, PARTIAL), (GATE_ROWS // 4, PARTIAL), (4,)), (-5,), (-3, -2), -1)
"""Numbers of 16 rows as they lie in memory: 16 bytes a thread. With a number a thread, most of the time went by in
waiting for loads."""


def _across(x: Array, instruction: str) -> Array:
    """Combine the four numbers of a row ("add" or "max"), neighbours first; each thread of the row gets the result.

    The same bits in all four: the operations commute.
    """
    if interpreting():
        function = {"add": jnp.add, "max": jnp.maximum}[instruction]
        total = function(function(x[:, 0], x[:, 1]), function(x[:, 2], x[:, 3]))
        return jnp.broadcast_to(total[:, None], x.shape)
    exchange = " ".join(
        f"shfl.sync.bfly.b32 other, sum, {distance}, 0x1f, 0xffffffff; {instruction}.f32 sum, sum, other;"
        for distance in (1, 2)
    )
    return inline_float("{ .reg .f32 sum, other; mov.f32 sum, $1; " + exchange + " mov.f32 $0, sum; }", GATE_LAYOUT, x)


def _reciprocal(x: Array) -> Array:
    """1 / x to about half a unit in the last place, for x from 1e-30 to 1e30.

    A correctly rounded quotient has a branch for numbers outside such a range. 160 of them one after the other,
    each with its branch, took most of the time of a call with few rows.
    """
    if interpreting():
        return 1.0 / x
    newton = "neg.f32 minus, $1; fma.rn.f32 error, minus, near, 0f3f800000; fma.rn.f32 $0, near, error, near;"
    text = "{ .reg .f32 near, minus, error; rcp.approx.ftz.f32 near, $1; " + newton + " }"
    return inline_float(text, GATE_LAYOUT, x)


def sinkhorn(matrix: list[Array], iterations: int, eps: float) -> list[Array]:
    """`xla.sinkhorn` on rows of logits, one array [rows, 4] for every source."""
    floor = np.float32(eps)

    def by_rows(current: list[Array], smallest: np.float32) -> list[Array]:
        return [x * _reciprocal(_across(x, "add") + smallest) for x in current]

    def by_columns(current: list[Array]) -> list[Array]:
        total = current[0]
        for x in current[1:]:
            total = total + x
        inverse = _reciprocal(total + floor)
        return [x * inverse for x in current]

    exponentials = [jnp.exp(x - _across(x, "max")) for x in matrix]
    first = by_columns([x + floor for x in by_rows(exponentials, np.float32(0))])
    body = lambda _, current: tuple(by_columns(by_rows(list(current), floor)))  # noqa: E731
    return list(lax.fori_loop(0, iterations - 1, body, tuple(first)))


def _sigmoid(x: Array) -> Array:
    return divide(1.0, 1.0 + jnp.exp(-x), GATE_LAYOUT)


def coefficients(
    partial: Array, base: Array, scale: Array, shape: Shape, iterations: int, norm_eps: float, hc_eps: float
) -> tuple[Array, Array, Array]:
    """(pre, post, comb) from the partial sums of `project`."""

    def mhc_gates_kernel(
        partial_ref: Any, base_ref: Any, scale_ref: Any, pre_ref: Any, post_ref: Any, comb_ref: Any, totals_s: Any
    ) -> None:
        block = Block(lax.axis_index("block") * GATE_ROWS)
        # Sums of the pieces, first to last.
        totals = block.load(partial_ref, TOTALS_LAYOUT, (GATE_ROWS, PARTIAL), terms=shape.pieces, apart=PARTIAL)
        Block(0).store(totals_s, totals, TOTALS_LAYOUT)
        plgpu.commit_smem()

        def total(column: int, same: bool = False) -> Array:
            """Four numbers of each row, or (same) one number for all four."""
            return Block(0).load(totals_s, GATE_LAYOUT, GATE_SHAPE, column=column, same=same)

        squares = total(shape.mixes, same=True)
        mean = squares * np.float32(1.0 / (shape.count * shape.size))
        inverse = lax.rsqrt(mean + np.float32(norm_eps))

        def logits(number: int, kind: int) -> Array:
            column = number * COUNT
            mixes = total(column) * inverse
            shift = SHARED.load(base_ref, GATE_LAYOUT, GATE_SHAPE, column=column)
            return mixes * SHARED.load(scale_ref, GATE_LAYOUT, GATE_SHAPE, column=kind, same=True) + shift

        block.store(pre_ref, _sigmoid(logits(0, 0)) + np.float32(hc_eps), GATE_LAYOUT)
        block.store(post_ref, 2 * _sigmoid(logits(1, 1)), GATE_LAYOUT)
        matrix = sinkhorn([logits(2 + i, 2) for i in range(COUNT)], iterations, hc_eps)
        for i, value in enumerate(matrix):
            block.store(comb_ref, value, GATE_LAYOUT, column=i * COUNT)

    four = jax.ShapeDtypeStruct((shape.rows, COUNT), jnp.float32)
    out = (four, four, jax.ShapeDtypeStruct((shape.rows, COUNT * COUNT), jnp.float32))
    pre, post, comb = plgpu.kernel(
        mhc_gates_kernel,
        out_type=out,
        grid=(-(-shape.rows // GATE_ROWS),),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((GATE_ROWS, PARTIAL), jnp.float32)],
    )(partial, base.reshape(1, -1), scale.reshape(1, -1))
    return pre, post, comb.reshape(-1, COUNT, COUNT)
