"""Grouped FP4 products on Hopper: weights dequantised in registers, bfloat16 tensor-core products.

Each block takes (row tile, columns) items in turn, as many blocks as the GPU has cores. One warpgroup streams
tiles of weights and rows through a ring in shared memory; each of the others turns 64 x 64 weights at a time into
the register operand of `wgmma` (`kernels/mosaic/fp4.py`), while the product before runs. Rows are the other
operand, so a tile of few rows costs few products. The sum over K has one order, whatever the number of rows of
the tile is: a row's bits depend on the row and the weights only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS
from deepinfer_jax.kernels.fp4_fragments import TILE, TILE_WORDS
from deepinfer_jax.kernels.mosaic import fp4
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import QuantTensor

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


def _kernel(*refs: Any, p: Plan, limit: float, quantize: bool) -> None:
    if p.gated:
        x, words1, scales1, words3, scales3, factors, tiles, count, out, *scratch = refs
        weights = ((words1, scales1), (words3, scales3))
    else:
        x, words2, scales2, tiles, count, out, *scratch = refs
        weights, factors = ((words2, scales2),), None
    *ring, out_tiles, reduction = scratch
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

        def item(number: jax.Array, expert: Any, first: Any, rows: Any, column: Any) -> None:
            del expert

            def compute(size: int) -> None:
                sums = _multiply(p, size, number, warpgroup, ring)
                store = functools.partial(store_columns, out, out_tiles.at[warpgroup], first, rows)
                if p.gated:
                    gate, up = sums
                    hidden = gated_hidden(
                        gate, up, factors, first, limit=limit, quantize=quantize, scratch=reduction.at[warpgroup]
                    )
                    store(column * p.output_tiles + warpgroup, hidden)
                else:
                    for a, values in enumerate(sums):
                        store(column * p.output_tiles + a * p.warpgroups + warpgroup, values.astype(jnp.bfloat16))

            lax.switch(smallest(p.row_choices, rows), [functools.partial(compute, size) for size in p.row_choices])

        for_each_item(p, tiles, count, item)
        plgpu.wait_smem_to_gmem(0)


def _grouped_product(p: Plan, rows: int, limit: float, quantize: bool, *operands: jax.Array) -> jax.Array:
    depth = p.depth_tiles * TILE
    arrivals = 5 if p.gated else 3
    ring = [
        plgpu.SMEM((p.stages, LARGEST_ROWS, depth), jnp.bfloat16, transforms=ROW_TRANSFORMS),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, *TILE_WORDS), jnp.uint32),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, TILE), jnp.uint16),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=p.warpgroups),
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
