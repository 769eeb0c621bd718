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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.mosaic_stream import Finish, Plan
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS, ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE
from deepinfer_jax.kernels.mosaic import fp4
from deepinfer_jax.kernels.mosaic.stacked_tiles import LANES, split_tiles, stack_tiles
from deepinfer_jax.kernels.mosaic.target import interpreting

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


ORDERS_TENSOR_CORE = True
"""Whether freeing a ring stage waits for tensor-core instructions that run by themselves."""


def scratch(p: Plan) -> list[Any]:
    """Memory of the products beside the ring: sums and weights in tensor memory, and a barrier for each operand."""
    buffers = p.warpgroups * BUFFERS
    return [
        plgpu.TMEM((LANES, p.warpgroups * LARGEST_ROWS), jnp.float32),
        plgpu.TMEM((LANES, buffers * p.depth_tiles * TILE), jnp.bfloat16, packed=True),
        plgpu.Barrier(num_barriers=buffers, orders_tensor_core=True),
    ]


def multiply(
    p: Plan, size: int, number: jax.Array, warpgroup: jax.Array, ring: Any, memory: Any, finish: Finish
) -> None:
    """Products of this warpgroup's weight tiles with `size` rows of one item, to `finish` STORED_ROWS at a time."""
    _multiply(p, size, number, warpgroup, ring, memory)
    for start in range(0, size, STORED_ROWS):
        place = pl.multiple_of(warpgroup * LARGEST_ROWS + start, ROW_STEP)
        products = plgpu.async_load_tmem(
            memory[0].at[:, pl.ds(place, min(STORED_ROWS, size - start))], layout=plgpu.Layout.TCGEN05
        )
        plgpu.wait_load_tmem()
        finish(split_tiles(products)[: p.accumulators], start)
