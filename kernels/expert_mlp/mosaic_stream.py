"""What the grouped products of both architectures share: items of work, their split, the warpgroup that streams.

Each block of a persistent kernel takes (row tile, columns) items in turn. One of its warpgroups brings tiles of
weights and rows to a ring in shared memory, and the others consume them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.shapes import COPY_CHOICES, LARGEST_ROWS, ROW_CHOICES, ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE, TILE_WORDS
from deepinfer_jax.kernels.mosaic.target import interpreting

plgpu: Any = mosaic_gpu  # its types are not those of its functions

RING_BYTES = 196 * 1024
"""Shared memory of the ring of operand tiles, at most."""

MAX_STAGES = 8

REDUCTION_NUMBERS = 512
"""Numbers of shared memory through which a warpgroup's warps exchange maxima: four of each of 128 rows."""

ROW_TRANSFORMS = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
"""Rows of bfloat16 in shared memory, as `wgmma` and the copy engine want them."""


Finish = Callable[[Sequence[jax.Array], int], None]
"""(sums float32 [64, n] of a warpgroup's weight tiles, number of their first row in the item) -> None."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shape of one grouped product.

    columns, depth: N and K. gated: two weights, and the products are combined. warpgroups: that multiply.
    accumulators: 64-column tiles of one warpgroup. depth_tiles: 64-wide tiles of K in one ring stage.
    row_choices: ascending numbers of rows that a tile's product may be computed with.
    """

    columns: int
    depth: int
    gated: bool
    warpgroups: int
    accumulators: int
    depth_tiles: int
    stages: int
    row_choices: tuple[int, ...]

    @property
    def weight_tiles(self) -> int:
        """Weight tiles of 64 rows in a stage."""
        return self.warpgroups * self.accumulators

    @property
    def output_tiles(self) -> int:
        """64-column tiles of the result that an item covers."""
        return self.warpgroups if self.gated else self.weight_tiles

    @property
    def column_items(self) -> int:
        """Items that share a row tile."""
        return self.columns // TILE // self.output_tiles

    @property
    def steps(self) -> int:
        """Ring stages that one item consumes."""
        return self.depth // TILE // self.depth_tiles


def plan(columns: int, depth: int, row_choices: tuple[int, ...] | None = None, *, gated: bool) -> Plan:
    """Split a product [N, K]: two warpgroups of two tiles each where N allows it.

    row_choices: None: ROW_CHOICES, or few when interpreted, where every choice takes seconds to trace.
    """
    if row_choices is None:
        row_choices = (16, LARGEST_ROWS) if interpreting() else ROW_CHOICES
    tiles = columns // TILE
    warpgroups = 2 if tiles % 2 == 0 else 1
    accumulators = 2 if gated or tiles % (2 * warpgroups) == 0 else 1
    depth_tiles = 2 if depth % (2 * TILE) == 0 else 1
    weight_bytes = warpgroups * accumulators * (4 * TILE_WORDS[0] * TILE_WORDS[1] + 2 * TILE)
    stage = depth_tiles * (LARGEST_ROWS * TILE * 2 + weight_bytes)
    stages = min(MAX_STAGES, RING_BYTES // stage)
    return Plan(columns, depth, gated, warpgroups, accumulators, depth_tiles, stages, row_choices)


def programs() -> int:
    """Blocks of a persistent kernel: the GPU's cores; two when interpreted, so that items are shared out."""
    if interpreting():
        return 2
    device: Any = jax.config.jax_default_device or jax.devices()[0]
    return device.core_count


def smallest(choices: Sequence[int], rows: jax.Array) -> jax.Array:
    """Index of the smallest of ascending `choices` that is not below `rows`."""
    return sum(((rows > choice).astype(jnp.int32) for choice in choices[:-1]), jnp.int32(0))


def for_each_item(p: Plan, tiles: Any, count: Any, body: Callable[..., None]) -> jax.Array:
    """Call body(number, expert, first row, rows, column item) for the items of this block; returns their number."""
    program, stride = lax.axis_index("program"), lax.axis_size("program")
    total = count[0] * p.column_items

    def step(number: jax.Array, _: None) -> None:
        item = program + number * stride
        tile, column = lax.div(item, jnp.int32(p.column_items)), lax.rem(item, jnp.int32(p.column_items))
        first = pl.multiple_of(tiles[tile, 1], ROW_STEP)
        body(number, tiles[tile, 0], first, tiles[tile, 2], column)

    items = lax.div(jnp.maximum(total - program, 0) + (stride - 1), jnp.int32(stride))
    lax.fori_loop(0, items, step, None)
    return items


def stream(p: Plan, x: Any, weights: Sequence[tuple[Any, Any]], tiles: Any, count: Any, ring: Any) -> None:
    """The warpgroup that fills the ring."""
    x_ring, word_ring, scale_ring, full, empty = ring
    of_weight = p.weight_tiles // len(weights)

    def item(number: jax.Array, expert: Any, first: Any, rows: Any, column: Any) -> None:
        def step(k: jax.Array, _: None) -> None:
            done = number * p.steps + k
            slot = lax.rem(done, jnp.int32(p.stages))

            @pl.when(done >= p.stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            for i, (words, scales) in enumerate(weights):
                source = (expert, pl.ds(column * of_weight, of_weight), pl.ds(k * p.depth_tiles, p.depth_tiles))
                target = (slot, pl.ds(i * of_weight, of_weight))
                plgpu.copy_gmem_to_smem(words.at[source], word_ring.at[target], full.at[slot])
                plgpu.copy_gmem_to_smem(scales.at[source], scale_ring.at[target], full.at[slot])

            depth = p.depth_tiles * TILE

            def copy_rows(size: int) -> None:
                source = x.at[pl.ds(first, size), pl.ds(k * depth, depth)]
                plgpu.copy_gmem_to_smem(source, x_ring.at[slot, pl.ds(0, size)], full.at[slot])

            lax.switch(smallest(COPY_CHOICES, rows), [functools.partial(copy_rows, size) for size in COPY_CHOICES])

        lax.fori_loop(0, p.steps, step, None)

    used = for_each_item(p, tiles, count, item) * p.steps
    for slot in range(p.stages):  # a barrier's last phase has to be seen before the block ends
        pl.when(used > slot)(functools.partial(plgpu.barrier_wait, empty.at[slot]))
