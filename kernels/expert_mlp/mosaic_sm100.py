"""Grouped FP4 products on Blackwell: block-scaled tensor-core products of e4m3.

The schedule of `mosaic_sm90.py` with Blackwell's tensor cores: a warpgroup widens the codes of two tiles of weights,
64 rows times 128 columns each, to e4m3 and stores them to tensor memory, as the 128-row operand of `tcgen05`
(`kernels/mosaic/block_scaled.py`). Rows of the batch are the other operand, as e4m3 codes in shared memory; scales
of both are copied to tensor memory by the tensor core itself. float32 sums stay there until the last product. The
operand is double buffered: weights of one ring stage are widened while the product of the stage before runs.

Rows arrive as bfloat16 values of the FP8 quantiser. Taking them apart again is exact: the largest number of a group
may have been rounded down to 448 times half the scale, and then codes of half the scale hold the same values.

The sum over K has one order, whatever the number of rows of the tile is: a row's bits depend on the row and the
weights only. A last stage of 64 columns multiplies whatever weights memory holds by codes of zero: every four bits
are a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.mosaic_stream import Finish, Item, Plan, bring_rows
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS, ROW_STEP
from deepinfer_jax.kernels.fp4_block_scaled import SCALE_TILE, TILE_WORDS, tile_row_scales
from deepinfer_jax.kernels.mosaic.block_scaled import (
    DEPTH,
    E4M3,
    E8M0,
    SCALES_SHAPE,
    scaled_product,
    scales_memory,
    widened,
)
from deepinfer_jax.kernels.mosaic.stacked_tiles import LANES, split_tiles
from deepinfer_jax.kernels.quantization import QuantTensor, WeightFormat, quantize_fp8

plgpu: Any = mosaic_gpu  # its types are not those of its functions

FORMAT: WeightFormat = "fp4_sm100"
"""Format of the weights."""

BUFFERS = 2
"""Operands of a warpgroup in tensor memory."""

STORED_ROWS = 64
"""Rows whose products a warpgroup takes from tensor memory at a time."""

CODE_TRANSFORMS = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
"""Rows of e4m3 codes in shared memory, as `tcgen05` and the copy engine want them."""


def row_operands(x: jax.Array, tiles: jax.Array) -> tuple[jax.Array, ...]:
    """What kernels read of quantised rows bfloat16 [R, K], whose tiles are int32 [tiles, 3].

    Returns: codes e4m3 [R, K'] and scales e8m0 [tiles, K'/128, 32, 16], K' = K rounded up to 128; the codes behind
    K are zeros.
    """
    codes, scales = quantize_fp8(x)
    padded = jnp.pad(codes, ((0, 0), (0, -x.shape[1] % DEPTH)))
    return padded, lax.bitcast_convert_type(tile_row_scales(scales, tiles[:, 1], LARGEST_ROWS), E8M0)


def weight_operands(weight: QuantTensor) -> tuple[jax.Array, jax.Array]:
    """What kernels read of a weight: (words, scales)."""
    return weight.data, lax.bitcast_convert_type(weight.scale, E8M0)


def _tiles_of_copy(p: Plan) -> int:
    """Weight tiles whose codes are brought at once: alone, where a stage may lack a part of each."""
    return 1 if p.missing_tiles else p.weight_tiles // (2 if p.gated else 1)


def ring(p: Plan) -> list[Any]:
    """Shared memory of the stages, and the barriers of full and of empty ones."""
    copies = p.weight_tiles // _tiles_of_copy(p) + 2 * p.warpgroups + 2
    return [
        plgpu.SMEM((p.stages, LARGEST_ROWS, DEPTH), E4M3, transforms=CODE_TRANSFORMS),
        plgpu.SMEM((p.stages, *SCALES_SHAPE), E8M0),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, *TILE_WORDS), jnp.uint32),
        plgpu.SMEM((p.stages, p.warpgroups, *SCALES_SHAPE), E8M0),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=copies),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=p.warpgroups, orders_tensor_core=True),
    ]


def bring(
    p: Plan, rows: Sequence[Any], weights: Sequence[tuple[Any, Any]], ring: Any, slot: Any, k: Any, item: Item
) -> None:
    """Start the copies of one step of an item into a stage of the ring."""
    code_ring, row_scale_ring, word_ring, scale_ring, full, _ = ring
    barrier = full.at[slot]
    of_weight = p.weight_tiles // len(weights)

    def copy_words(depth_tiles: int) -> None:
        size = _tiles_of_copy(p)
        for first in range(0, p.weight_tiles, size):
            words, _ = weights[first // of_weight]
            columns = pl.ds(item.column * of_weight + first % of_weight, size)
            source = words.at[item.expert, columns, pl.ds(k * p.depth_tiles, depth_tiles)]
            target = word_ring.at[slot, pl.ds(first, size), pl.ds(0, depth_tiles)]
            plgpu.copy_gmem_to_smem(source, target, barrier)

    if p.missing_tiles:
        pl.when(k < p.steps - 1)(lambda: copy_words(p.depth_tiles))
        pl.when(k == p.steps - 1)(lambda: copy_words(p.depth_tiles - p.missing_tiles))
    else:
        copy_words(p.depth_tiles)
    for warpgroup in range(p.warpgroups):
        for half in range(2):  # of the tensor core's 128 rows; one tile of weights takes both
            tile = min(half, p.accumulators - 1) * p.warpgroups + warpgroup
            _, scales = weights[tile // of_weight]
            source = scales.at[item.expert, item.column * of_weight + tile % of_weight, k]
            target = scale_ring.at[slot, warpgroup, 0, 0, pl.ds(half * SCALE_TILE[0], SCALE_TILE[0])]
            plgpu.copy_gmem_to_smem(source, target, barrier)
    codes, row_scales = rows
    plgpu.copy_gmem_to_smem(row_scales.at[pl.ds(item.tile, 1), pl.ds(k, 1)], row_scale_ring.at[slot], barrier)
    bring_rows(p, codes, code_ring.at[slot], barrier, k, item)


def _multiply(p: Plan, size: int, number: jax.Array, warpgroup: jax.Array, ring: Any, memory: Any) -> None:
    """Products of this warpgroup's two weight tiles with `size` rows of one item, to its sums in tensor memory.

    With one tile of weights it takes both places, and the second product is not used.
    """
    code_ring, row_scale_ring, word_ring, scale_ring, full, empty = ring
    sums, operands, weight_scales, row_scales, done = memory
    total = sums.at[:, pl.ds(pl.multiple_of(warpgroup * LARGEST_ROWS, LARGEST_ROWS), size)]
    own = pl.ds(pl.multiple_of(warpgroup * 4, 4), 4)
    last = (p.accumulators - 1) * p.warpgroups

    def step(k: jax.Array, _: None) -> None:
        slot = lax.rem(number * p.steps + k, jnp.int32(p.stages))
        buffer = warpgroup * BUFFERS + lax.rem(k, jnp.int32(BUFFERS))
        plgpu.barrier_wait(full.at[slot])
        weights = widened(word_ring.at[slot, warpgroup], word_ring.at[slot, last + warpgroup])

        @pl.when(k >= BUFFERS)
        def _() -> None:  # for the product that read this buffer
            plgpu.barrier_wait(done.at[buffer])

        operand = operands.at[:, pl.ds(pl.multiple_of(buffer * DEPTH, DEPTH), DEPTH)]
        plgpu.async_store_tmem(operand, weights)
        plgpu.commit_tmem()
        scaled_product(
            total,
            operand,
            code_ring.at[slot, pl.ds(0, size)],
            (scale_ring.at[slot, warpgroup], row_scale_ring.at[slot]),
            (weight_scales.at[:, own], row_scales.at[:, own]),
            done.at[buffer],
            accumulate=k > 0,
        )
        # Arrives behind this product, and so behind the reads of weights: all threads had stored their share.
        plgpu.tcgen05_commit_arrive(empty.at[slot])

    lax.fori_loop(0, p.steps, step, None)
    for k in range(max(0, p.steps - BUFFERS), p.steps):
        plgpu.barrier_wait(done.at[warpgroup * BUFFERS + k % BUFFERS])


def scratch(p: Plan) -> list[Any]:
    """Memory of the products beside the ring: sums, weights and scales in tensor memory, a barrier for each operand."""
    buffers = p.warpgroups * BUFFERS
    return [
        plgpu.TMEM((LANES, p.warpgroups * LARGEST_ROWS), jnp.float32),
        plgpu.TMEM((LANES, buffers * DEPTH), E4M3, packed=True),
        scales_memory(p.warpgroups),
        scales_memory(p.warpgroups),
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
