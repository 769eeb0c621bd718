"""What the grouped products of both architectures share: items of work, their split, the warpgroup that streams.

Each block of a persistent kernel takes (row tile, columns) items in turn. One of its warpgroups brings tiles of
weights and rows to a ring in shared memory, and the others consume them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.shapes import COPY_CHOICES, LARGEST_ROWS, ROW_CHOICES, ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE
from deepinfer_jax.kernels.mosaic.target import Architecture, interpreting

plgpu: Any = mosaic_gpu  # its types are not those of its functions

RING_BYTES = 196 * 1024
"""Shared memory of the ring of operand tiles, at most."""

MAX_STAGES = 8

TILE_BYTES = TILE * TILE // 2 + 2 * TILE
"""Of a tile of weights: half a byte a code, and two scales a row."""

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
    accumulators: 64-column tiles of one warpgroup. depth_tiles: 64-wide tiles of K in one ring stage; of the last
    stage, the last may be missing.
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
        return -(-self.depth // (TILE * self.depth_tiles))

    @property
    def missing_tiles(self) -> int:
        """Tiles of K that the last ring stage lacks."""
        return self.steps * self.depth_tiles - self.depth // TILE


class Item(NamedTuple):
    """One item of work: `rows` rows from `first` on, of tile number `tile`, times an expert's `column`-th columns."""

    tile: jax.Array
    expert: jax.Array
    first: jax.Array
    rows: jax.Array
    column: jax.Array


def plan(
    columns: int, depth: int, row_choices: tuple[int, ...] | None = None, *, gated: bool, target: Architecture
) -> Plan:
    """Split a product [N, K]: two warpgroups of two tiles each where N allows it.

    Hopper takes whole stages of K, or stages of one tile; Blackwell's products always have two (`mosaic_sm100.py`).

    row_choices: None: ROW_CHOICES, or few when interpreted, where every choice takes seconds to trace.
    """
    if row_choices is None:
        row_choices = (16, LARGEST_ROWS) if interpreting() else ROW_CHOICES
    tiles = columns // TILE
    warpgroups = 2 if tiles % 2 == 0 else 1
    accumulators = 2 if gated or tiles % (2 * warpgroups) == 0 else 1
    depth_tiles = 2 if target == "sm100" or depth % (2 * TILE) == 0 else 1
    row_bytes = TILE + 2 if target == "sm100" else 2 * TILE
    stage = depth_tiles * (LARGEST_ROWS * row_bytes + warpgroups * accumulators * TILE_BYTES)
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


def for_each_item(p: Plan, tiles: Any, count: Any, body: Callable[[jax.Array, Item], None]) -> jax.Array:
    """Call body(number, item) for the items of this block; returns their number."""
    program, stride = lax.axis_index("program"), lax.axis_size("program")
    total = count[0] * p.column_items

    def step(number: jax.Array, _: None) -> None:
        item = program + number * stride
        tile, column = lax.div(item, jnp.int32(p.column_items)), lax.rem(item, jnp.int32(p.column_items))
        first = pl.multiple_of(tiles[tile, 1], ROW_STEP)
        body(number, Item(tile, tiles[tile, 0], first, tiles[tile, 2], column))

    items = lax.div(jnp.maximum(total - program, 0) + (stride - 1), jnp.int32(stride))
    lax.fori_loop(0, items, step, None)
    return items


Bring = Callable[[jax.Array, jax.Array, Item], None]
"""(ring slot, step, item) -> None: starts the copies that fill a stage."""


def stream(p: Plan, tiles: Any, count: Any, empty: Any, bring: Bring) -> None:
    """The warpgroup that fills the ring."""

    def of_item(number: jax.Array, item: Item) -> None:
        def step(k: jax.Array, _: None) -> None:
            done = number * p.steps + k
            slot = lax.rem(done, jnp.int32(p.stages))

            @pl.when(done >= p.stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            bring(slot, k, item)

        lax.fori_loop(0, p.steps, step, None)

    used = for_each_item(p, tiles, count, of_item) * p.steps
    for slot in range(p.stages):  # a barrier's last phase has to be seen before the block ends
        pl.when(used > slot)(functools.partial(plgpu.barrier_wait, empty.at[slot]))


def bring_rows(p: Plan, rows: Any, target: Any, barrier: Any, k: jax.Array, item: Item) -> None:
    """Bring the rows of an item's step to a stage of the ring: only so many as there are, or a few more."""
    depth = p.depth_tiles * TILE

    def copy(size: int) -> None:
        source = rows.at[pl.ds(item.first, size), pl.ds(k * depth, depth)]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, size)], barrier)

    copies = [functools.partial(copy, size) for size in COPY_CHOICES]
    lax.switch(smallest(COPY_CHOICES, item.rows), copies)
