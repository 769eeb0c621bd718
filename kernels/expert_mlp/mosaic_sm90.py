"""Grouped FP4 products on Hopper: weights dequantised in registers, bfloat16 tensor-core products.

Each block takes (row tile, columns) items in turn, as many blocks as the GPU has cores. One warpgroup streams
tiles of weights and rows through a ring in shared memory; each of the others turns 64 x 64 weights at a time into
the register operand of `wgmma` (`kernels/mosaic/fp4.py`), while the product before runs. Rows are the other
operand, so a tile of few rows costs few products. The sum over K has one order, whatever the number of rows of
the tile is: a row's bits depend on the row and the weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.mosaic_stream import ROW_TRANSFORMS, Finish, Item, Plan, bring_rows
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS
from deepinfer_jax.kernels.fp4_fragments import TILE, TILE_WORDS
from deepinfer_jax.kernels.mosaic import fp4
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import QuantTensor, WeightFormat

plgpu: Any = mosaic_gpu  # its types are not those of its functions


def _multiply(p: Plan, size: int, number: jax.Array, warpgroup: jax.Array, ring: Any) -> tuple[jax.Array, ...]:
    """float32 (64, size) products of this warpgroup's weight tiles with the rows of one item.

    While one product runs, the next one's weights are dequantised; it starts when the first is done. (Products in
    flight while the operand of a product of the same wait is written would make the assembler serialise all.)
    """
    x_ring, word_ring, scale_ring, full, empty = ring
    order = [(part, a) for part in range(p.depth_tiles) for a in range(p.accumulators)]

    def slot_of(k: Any) -> jax.Array:
        return lax.rem(number * p.steps + k, jnp.int32(p.stages))

    def weights_of(slot: jax.Array, part: int, a: int) -> jax.Array:
        tile = a * p.warpgroups + warpgroup
        words = plgpu.load(word_ring.at[slot, tile, part], layout=fp4.WORDS)
        scales = plgpu.load(scale_ring.at[slot, tile, part], layout=fp4.SCALES, optimized=False)
        return fp4.dequantize_tile(words, scales)

    def step(k: jax.Array, weights: jax.Array, multiply: Callable[..., None]) -> jax.Array:
        slot = slot_of(k)
        for (part, a), (next_part, next_a) in zip(order, [*order[1:], order[0]], strict=True):
            multiply(a, weights, x_ring.at[slot, pl.ds(0, size), pl.ds(part * TILE, TILE)])
            last = (part, a) == order[-1]
            ahead = jnp.minimum(k + 1, p.steps - 1) if last else k  # behind the last stage: once more, unused
            if last:
                pl.when(k + 1 < p.steps)(lambda: plgpu.barrier_wait(full.at[slot_of(k + 1)]))
            weights = weights_of(slot_of(ahead), next_part, next_a)
            if not interpreting():
                plgpu.wgmma_wait(0)
        if interpreting():
            # The race detector wants a fence between reads and the copy engine's next write. The barrier, which
            # that write waits for, orders them.
            plgpu.commit_smem()
        plgpu.barrier_arrive(empty.at[slot])
        return weights

    plgpu.barrier_wait(full.at[slot_of(0)])
    weights = weights_of(slot_of(0), *order[0])
    if interpreting():

        def interpreted(k: jax.Array, carry: Any) -> Any:
            weights, sums = carry[0], list(carry[1:])

            def multiply(a: int, weights: jax.Array, rows: Any) -> None:
                operands = weights.astype(jnp.float32), rows[...].astype(jnp.float32).T
                sums[a] += jnp.dot(*operands, precision=lax.Precision.HIGHEST)

            weights = step(k, weights, multiply)
            return (weights, *sums)

        zero = jnp.zeros((TILE, size), jnp.float32)
        return lax.fori_loop(0, p.steps, interpreted, (weights, *[zero] * p.accumulators))[1:]

    def scope(*sums: Any) -> tuple[jax.Array, ...]:
        def multiply(a: int, weights: jax.Array, rows: Any) -> None:
            plgpu.wgmma(sums[a], weights, rows.transpose((1, 0)))

        lax.fori_loop(0, p.steps, lambda k, weights: step(k, weights, multiply), weights)
        return tuple(accumulator[...] for accumulator in sums)

    return pl.run_scoped(scope, *[plgpu.ACC((TILE, size), jnp.float32)] * p.accumulators)


FORMAT: WeightFormat = "fp4_sm90"
"""Format of the weights."""


def row_operands(x: jax.Array, tiles: jax.Array) -> tuple[jax.Array, ...]:
    """What kernels read of rows bfloat16 [R, K], whose tiles are int32 [tiles, 3]: the rows."""
    del tiles
    return (x,)


def weight_operands(weight: QuantTensor) -> tuple[jax.Array, jax.Array]:
    """What kernels read of a weight: (words, scales)."""
    return weight.data, weight.scale


def ring(p: Plan) -> list[Any]:
    """Shared memory of the stages, and the barriers of full and of empty ones."""
    weights = p.stages, p.weight_tiles, p.depth_tiles
    return [
        plgpu.SMEM((p.stages, LARGEST_ROWS, p.depth_tiles * TILE), jnp.bfloat16, transforms=ROW_TRANSFORMS),
        plgpu.SMEM((*weights, *TILE_WORDS), jnp.uint32),
        plgpu.SMEM((*weights, TILE), jnp.uint16),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=5 if p.gated else 3),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=p.warpgroups),
    ]


def bring(
    p: Plan, rows: Sequence[Any], weights: Sequence[tuple[Any, Any]], ring: Any, slot: Any, k: Any, item: Item
) -> None:
    """Start the copies of one step of an item into a stage of the ring."""
    x_ring, word_ring, scale_ring, full, _ = ring
    of_weight = p.weight_tiles // len(weights)
    for i, (words, scales) in enumerate(weights):
        columns, depth = pl.ds(item.column * of_weight, of_weight), pl.ds(k * p.depth_tiles, p.depth_tiles)
        target = (slot, pl.ds(i * of_weight, of_weight))
        plgpu.copy_gmem_to_smem(words.at[item.expert, columns, depth], word_ring.at[target], full.at[slot])
        plgpu.copy_gmem_to_smem(scales.at[item.expert, columns, depth], scale_ring.at[target], full.at[slot])
    bring_rows(p, rows[0], x_ring.at[slot], full.at[slot], k, item)


def scratch(p: Plan) -> list[Any]:
    """Memory of the products beside the ring."""
    del p
    return []


def multiply(
    p: Plan, size: int, number: jax.Array, warpgroup: jax.Array, ring: Any, memory: Any, finish: Finish
) -> None:
    """Products of this warpgroup's weight tiles with `size` rows of one item, given to `finish` at once."""
    del memory
    finish(_multiply(p, size, number, warpgroup, ring), 0)
