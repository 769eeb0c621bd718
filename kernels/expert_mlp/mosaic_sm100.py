"""Grouped FP4 products on Blackwell: weights dequantised in registers, bfloat16 tensor-core products.

The schedule of `mosaic_sm90.py` with Blackwell's tensor cores: a warpgroup turns two tiles of 64 x 64 weights at a
time into exact bfloat16 (`kernels/mosaic/fp4.py`) and stores them to tensor memory, as the 128-row operand of
`tcgen05` (`kernels/mosaic/stacked_tiles.py`). The rows of the batch are the other operand, in shared memory, and
float32 sums stay in tensor memory until the last product. The operand is double buffered: weights of one ring stage
are dequantised while the product of the stage before runs. Weights have the order of Hopper's kernel ("fp4_sm90"),
because registers of both layouts are the same.

The products are bfloat16 ones, not block-scaled FP8 ones: those would run at twice the rate, but could not
multiply unquantised rows, and no interpreter can check them. The sum over K has one order, whatever the number of
rows of the tile is: a row's bits depend on the row and the weights only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.mosaic_middle import gated_hidden, store_columns
from deepinfer_jax.kernels.expert_mlp.mosaic_stream import (
    REDUCTION_NUMBERS,
    ROW_TRANSFORMS,
    Plan,
    for_each_item,
    plan,
    programs,
    smallest,
    stream,
)
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS, ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE, TILE_WORDS
from deepinfer_jax.kernels.mosaic import fp4
from deepinfer_jax.kernels.mosaic.stacked_tiles import LANES, split_tiles, stack_tiles
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import QuantTensor

plgpu: Any = mosaic_gpu  # its types are not those of its functions

BUFFERS = 2
"""Operands of a warpgroup in tensor memory."""

STORED_ROWS = 64
"""Rows whose products a warpgroup takes from tensor memory at a time."""


def _multiply(p: Plan, size: int, number: jax.Array, warpgroup: jax.Array, ring: Any, memory: Any) -> None:
    """Products of this warpgroup's two weight tiles with `size` rows of one item, to its sums in tensor memory.

    With one tile of weights it takes both places, and the second product is not used.
    """
    x_ring, word_ring, scale_ring, full, empty = ring
    sums, operands, done = memory
    depth = p.depth_tiles * TILE
    total = sums.at[:, pl.ds(pl.multiple_of(warpgroup * LARGEST_ROWS, LARGEST_ROWS), size)]

    def weights_of(slot: jax.Array, part: int) -> jax.Array:
        tiles = []
        for a in range(p.accumulators):
            tile = a * p.warpgroups + warpgroup
            words = plgpu.load(word_ring.at[slot, tile, part], layout=fp4.WORDS)
            scales = plgpu.load(scale_ring.at[slot, tile, part], layout=fp4.SCALES, optimized=False)
            tiles.append(fp4.dequantize_tile(words, scales))
        return stack_tiles(tiles[0], tiles[-1])

    def step(k: jax.Array, _: None) -> None:
        slot = lax.rem(number * p.steps + k, jnp.int32(p.stages))
        buffer = warpgroup * BUFFERS + lax.rem(k, jnp.int32(BUFFERS))
        plgpu.barrier_wait(full.at[slot])
        weights = [weights_of(slot, part) for part in range(p.depth_tiles)]

        @pl.when(k >= BUFFERS)
        def _() -> None:  # for the product that read this buffer
            plgpu.barrier_wait(done.at[buffer])

        for part, values in enumerate(weights):
            start = pl.multiple_of(buffer * depth + part * TILE, TILE)
            plgpu.async_store_tmem(operands.at[:, pl.ds(start, TILE)], values)
        plgpu.commit_tmem()
        if interpreting():
            # The race detector wants a fence between reads of weights and the copy engine's next write. The barriers
            # of `commit_tmem` and `empty`, which that write waits for, order them.
            plgpu.commit_smem()
        operand = operands.at[:, pl.ds(pl.multiple_of(buffer * depth, depth), depth)]
        rows = x_ring.at[slot, pl.ds(0, size)].transpose((1, 0))
        plgpu.tcgen05_mma(total, operand, rows, done.at[buffer], accumulate=k > 0)
        # Arrives behind this product, and so behind the reads of weights: all threads had stored their share.
        plgpu.tcgen05_commit_arrive(empty.at[slot])

    lax.fori_loop(0, p.steps, step, None)
    for k in range(max(0, p.steps - BUFFERS), p.steps):
        plgpu.barrier_wait(done.at[warpgroup * BUFFERS + k % BUFFERS])


def _kernel(*refs: Any, p: Plan, limit: float, quantize: bool) -> None:
    weights: Sequence[tuple[Any, Any]]
    if p.gated:
        x, words1, scales1, words3, scales3, factors, tiles, count, out, *scratch = refs
        weights = ((words1, scales1), (words3, scales3))
    else:
        x, words2, scales2, tiles, count, out, *scratch = refs
        weights, factors = ((words2, scales2),), None
    *ring, sums, operands, done, out_tiles, reduction = scratch
    warpgroup = lax.axis_index("warpgroup")
    registers = p.warpgroups == 2  # 384 threads share the registers evenly unless told otherwise

    @pl.when(warpgroup == p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(24, action="decrease")
        stream(p, x, weights, tiles, count, ring)

    @pl.when(warpgroup < p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(240, action="increase")

        def store_products(first: Any, rows: Any, column: Any, start: int, size: int) -> None:
            place = pl.multiple_of(warpgroup * LARGEST_ROWS + start, ROW_STEP)
            products = plgpu.async_load_tmem(sums.at[:, pl.ds(place, size)], layout=plgpu.Layout.TCGEN05)
            plgpu.wait_load_tmem()
            both = split_tiles(products)
            first = pl.multiple_of(first + start, ROW_STEP)
            store = functools.partial(store_columns, out, out_tiles.at[warpgroup], first, rows - start)
            if p.gated:
                scratch = reduction.at[warpgroup]
                hidden = gated_hidden(*both, factors, first, limit=limit, quantize=quantize, scratch=scratch)
                store(column * p.output_tiles + warpgroup, hidden)
            else:
                for a, values in enumerate(both[: p.accumulators]):
                    store(column * p.output_tiles + a * p.warpgroups + warpgroup, values.astype(jnp.bfloat16))

        def item(number: jax.Array, expert: Any, first: Any, rows: Any, column: Any) -> None:
            del expert

            def compute(size: int) -> None:
                _multiply(p, size, number, warpgroup, ring, (sums, operands, done))
                for start in range(0, size, STORED_ROWS):
                    store_products(first, rows, column, start, min(STORED_ROWS, size - start))

            lax.switch(smallest(p.row_choices, rows), [functools.partial(compute, size) for size in p.row_choices])

        for_each_item(p, tiles, count, item)
        plgpu.wait_smem_to_gmem(0)


def _grouped_product(p: Plan, rows: int, limit: float, quantize: bool, *operands: jax.Array) -> jax.Array:
    depth = p.depth_tiles * TILE
    arrivals = 5 if p.gated else 3
    buffers = p.warpgroups * BUFFERS
    ring = [
        plgpu.SMEM((p.stages, LARGEST_ROWS, depth), jnp.bfloat16, transforms=ROW_TRANSFORMS),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, *TILE_WORDS), jnp.uint32),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, TILE), jnp.uint16),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=p.warpgroups, orders_tensor_core=True),
    ]
    return plgpu.kernel(
        functools.partial(_kernel, p=p, limit=limit, quantize=quantize),
        out_type=jax.ShapeDtypeStruct((rows, p.columns), jnp.bfloat16),
        grid=(programs(),),
        grid_names=("program",),
        num_threads=p.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *ring,
            plgpu.TMEM((LANES, p.warpgroups * LARGEST_ROWS), jnp.float32),
            plgpu.TMEM((LANES, buffers * depth), jnp.bfloat16, packed=True),
            plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
            plgpu.SMEM((p.warpgroups, TILE, TILE), jnp.bfloat16, transforms=ROW_TRANSFORMS),
            plgpu.SMEM((p.warpgroups, REDUCTION_NUMBERS), jnp.float32),
        ],
    )(*operands)


def gate_up(
    x: jax.Array,
    w1: QuantTensor,
    w3: QuantTensor,
    factors: jax.Array,
    tiles: jax.Array,
    count: jax.Array,
    *,
    limit: float,
    quantize: bool,
    row_choices: tuple[int, ...] | None = None,
) -> jax.Array:
    """Hidden rows of the experts, ready for `down`: both products, clamp, SiLU, routing weight, quantisation.

    Args:
        x: bfloat16 [R, D] rows sorted by expert, already quantised. w1, w3: "fp4_sm90" [E, N, D].
        factors: float32 [R]. tiles, count: of `shapes.group_rows`; rows outside tiles stay undefined.
        row_choices: for tests that the choice changes no bit; the last one has to be LARGEST_ROWS.
    Returns: bfloat16 [R, N].
    """
    p = plan(w1.shape[1], w1.shape[2], row_choices, gated=True)
    operands = (x, w1.data, w1.scale, w3.data, w3.scale, factors, tiles, count)
    return _grouped_product(p, x.shape[0], limit, quantize, *operands)


def down(
    hidden: jax.Array,
    w2: QuantTensor,
    tiles: jax.Array,
    count: jax.Array,
    *,
    row_choices: tuple[int, ...] | None = None,
) -> jax.Array:
    """hidden bfloat16 [R, N] times w2 "fp4_sm90" [E, D, N] -> bfloat16 [R, D]; rows outside tiles are undefined."""
    p = plan(w2.shape[1], w2.shape[2], row_choices, gated=False)
    return _grouped_product(p, hidden.shape[0], np.inf, False, hidden, w2.data, w2.scale, tiles, count)
