"""Grouping of few (token, choice) pairs by expert in one kernel.

With the rows of a decode step, the integer work of `shapes.group_rows` costs XLA many launches of almost nothing. Here
every pair has a block, which works out alone where its row belongs: each of its threads looks at one pair.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS, ROW_STEP, row_capacity, tile_capacity
from deepinfer_jax.kernels.mosaic import rows as mosaic_rows
from deepinfer_jax.kernels.mosaic.quantize import quantize_dequantize
from deepinfer_jax.kernels.mosaic.rows import LANES, WARPS, Block, RowLayout
from deepinfer_jax.kernels.mosaic.target import interpreting

plgpu: Any = mosaic_gpu  # its types are not those of its functions

_THREADS = WARPS * LANES

MOST_PAIRS = min(_THREADS, LARGEST_ROWS)
"""Most pairs that the kernels take: a pair for each thread of a block, and one tile for each expert."""

_MOST_UNROLLED = 16


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """Operands of the experts' products, and the places of their rows.

    rows: [R, D]; factors: [R]; both undefined but for rows of pairs with an expert. tiles: int32 [tiles, 3], undefined
    behind those in use; count: int32 [1]; position: int32 [T, k]: as in `shapes.GroupedRows`.
    """

    rows: jax.Array
    factors: jax.Array
    tiles: jax.Array
    count: jax.Array
    position: jax.Array


def _only_row() -> Block:
    """The row of a matrix of one row; threads without a part of it repeat another's."""
    return Block(jnp.int32(0))  # an int would have interpreted slices checked for cases that do not occur


def _number_by_thread(numbers: Any, layout: Any) -> jax.Array:
    """int32 [_THREADS] of int32 [n] in global memory, n <= _THREADS; the last number is repeated."""
    size = numbers.shape[0]
    if interpreting():
        return jnp.pad(numbers[...], (0, _THREADS - size), mode="edge")

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((_THREADS,), jnp.int32, layout=layout)
    )
    def body(_: Any, source: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        place = arith.minui(mgpu.utils.thread_idx(), arith.constant(i32, size - 1))
        number = llvm.load(i32, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(source), [place], i32))
        register = vector.broadcast(ir.VectorType.get((1,), i32), number)
        return mgpu.FragmentedArray(
            _registers=np.array([register], dtype=object), _layout=layout.to_mgpu(), _is_signed=True
        )

    return body(numbers)


def _ones(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, np.int32(1), np.int32(0))


def _ranks(numbers: jax.Array, ids: Any, index: jax.Array, layout: Any) -> jax.Array:
    """For each thread's number, how many of `ids` [pairs] before it are equal; int32 [_THREADS]."""
    pairs = ids.shape[0]

    def count(pair: jax.Array, ranks: jax.Array) -> jax.Array:
        return ranks + _ones((numbers == ids[pair]) & (index > pair))

    # The loads of several turns are under way at once.
    unroll = max(n for n in range(1, _MOST_UNROLLED + 1) if pairs % n == 0)
    zero = plgpu.layout_cast(jnp.zeros((_THREADS,), jnp.int32), layout)
    return lax.fori_loop(0, pairs, count, zero, unroll=unroll)


def _sort_kernel(
    x_g: Any,
    ids_g: Any,
    weights_g: Any,
    rows_g: Any,
    factors_g: Any,
    tiles_g: Any,
    count_g: Any,
    position_g: Any,
    *,
    layout: RowLayout,
    experts: int,
    choices: int,
    quantize: bool,
) -> None:
    pair, pairs = lax.axis_index("pair"), ids_g.shape[0]
    token = lax.div(pair, jnp.int32(choices))
    row = _only_row().load(x_g.at[pl.ds(token, 1)], layout.matrix, layout.shape)  # on its way while pairs are counted

    threads = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, (_THREADS,), 0, layout=threads)
    keys = _number_by_thread(ids_g, threads)
    keys = jnp.where((keys >= 0) & (keys < experts) & (index < pairs), keys, np.int32(experts))
    ids = ids_g[...] if interpreting() else ids_g  # an interpreted load takes long
    ranks = _ranks(keys, ids, index, threads)
    key = ids[pair]
    valid = (key >= 0) & (key < experts)

    # Four numbers up to 128 in the bytes of one, of which the last stays below 128. A key's padded rows are ROW_STEP
    # for every rank that is a multiple of ROW_STEP.
    equal, below = keys == key, keys < key
    parts = (equal & (index < pair), equal, below & (ranks % ROW_STEP == 0), below & (ranks == 0))
    numbers = [_ones(part) << (8 * byte) for byte, part in enumerate(parts)]
    total = jnp.sum(functools.reduce(lambda a, b: a + b, numbers))
    rank, size, steps, tile = ((total >> (8 * byte)) & 0xFF for byte in range(4))
    first = steps * ROW_STEP
    position_g[pair] = jnp.where(valid, first + rank, -1)

    @pl.when(pair == 0)
    def _() -> None:
        count_g[0] = jnp.sum(_ones((ranks == 0) & (keys < experts)))

    @pl.when(valid & (rank == 0))
    def _() -> None:
        tiles_g[tile, 0] = key
        tiles_g[tile, 1] = first
        tiles_g[tile, 2] = lax.div(size + (ROW_STEP - 1), jnp.int32(ROW_STEP)) * ROW_STEP

    @pl.when(valid)
    def _() -> None:
        place = first + rank
        factors_g[place] = weights_g[pair]
        stored = quantize_dequantize(row.astype(jnp.float32)).astype(row.dtype) if quantize else row
        _only_row().store(rows_g.at[pl.ds(place, 1)], stored, layout.matrix)


def sort_rows(x: jax.Array, expert_ids: jax.Array, weights: jax.Array, experts: int, *, quantize: bool) -> SortedRows:
    """Rows of x for each (token, choice) pair, sorted by expert as `shapes.group_rows` does, in one launch.

    Places are integers and equal to those of `group_rows`; a row is quantised as `quantize_rows` does or copied, on
    its own. So no row's bits depend on whether this or the portable grouping sorted it. Rows of padding stay undefined:
    products of different rows do not mix, and what padding computes is never brought back to a pair.

    Args:
        x: bfloat16 or float32 [T, D], D a multiple of 32. expert_ids: int32 [T, k], T * k <= MOST_PAIRS; ids outside
            0..experts-1 take no part. weights: float32 [T, k]. quantize: quantise-dequantise the rows.
    """
    choices, pairs, size = expert_ids.shape[1], expert_ids.size, x.shape[1]
    if pairs > MOST_PAIRS:
        raise ValueError(f"sort_rows: {pairs} pairs are more than {MOST_PAIRS}")
    body = functools.partial(
        _sort_kernel, layout=mosaic_rows.row_layout(size), experts=experts, choices=choices, quantize=quantize
    )
    capacity = row_capacity(pairs, experts)
    rows, factors, tiles, count, position = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((capacity, size), x.dtype),
            jax.ShapeDtypeStruct((capacity,), weights.dtype),
            jax.ShapeDtypeStruct((tile_capacity(pairs, experts), 3), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((pairs,), jnp.int32),
        ),
        grid=(pairs,),
        grid_names=("pair",),
    )(x, expert_ids.reshape(-1), weights.reshape(-1))
    return SortedRows(rows, factors, tiles, count, position.reshape(expert_ids.shape))
