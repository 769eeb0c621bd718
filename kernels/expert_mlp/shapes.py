"""Grouping of rows by expert: integers and copies, shared by the Mosaic-GPU implementations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

ROW_STEP = 8
"""An expert's rows are padded to a multiple of this: the narrowest product of the tensor core."""

LARGEST_ROWS = 128
"""Most rows of one tile."""

ROW_CHOICES = (32, 64, 128)
"""Rows that a tile's product is computed with: the smallest that holds the tile. No row's bits depend on it."""

COPY_CHOICES = (8, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a tile that are brought to the product: the smallest that holds the tile. Products of further rows use
whatever memory holds, and are not stored."""

_RANK_BLOCK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """(token, choice) pairs sorted by expert, each expert's rows padded to a multiple of ROW_STEP.

    source: int32 [R], token of a row, -1 for padding. position: int32 [T, k], row of a pair, -1 if its id is no
    expert's. tiles: int32 [tiles, 3]: expert, first row, rows.
    count: int32 [1], tiles in use. R is fixed by the shapes and leaves LARGEST_ROWS rows behind the last in use.
    """

    source: jax.Array
    position: jax.Array
    tiles: jax.Array
    count: jax.Array


def row_capacity(pairs: int, experts: int) -> int:
    """Rows R that hold `pairs` pairs however they are spread, and a whole tile behind them."""
    used = pairs + (ROW_STEP - 1) * min(pairs, experts)
    return -(-(used + LARGEST_ROWS) // LARGEST_ROWS) * LARGEST_ROWS


def tile_capacity(pairs: int, experts: int) -> int:
    """Most tiles that `pairs` pairs can need."""
    return min(pairs, experts) + pairs // LARGEST_ROWS


def _ranks(keys: jax.Array, buckets: int) -> tuple[jax.Array, jax.Array]:
    """(rank of each key among equal keys before it, number of each key 0..buckets-1)."""
    size = min(_RANK_BLOCK, keys.shape[0])
    blocks = -(-keys.shape[0] // size)
    padded = jnp.pad(keys, (0, blocks * size - keys.shape[0]), constant_values=buckets).reshape(blocks, size)
    counts = jnp.sum(padded[:, :, None] == jnp.arange(buckets + 1), axis=1, dtype=jnp.int32)
    before = jnp.cumsum(counts, axis=0) - counts
    index = jnp.arange(size)
    equal = (padded[:, :, None] == padded[:, None, :]) & (index[None, :] < index[:, None])
    ranks = jnp.sum(equal, axis=2, dtype=jnp.int32) + jnp.take_along_axis(before, padded, axis=1)
    return ranks.reshape(-1)[: keys.shape[0]], jnp.sum(counts, axis=0)[:buckets]


def group_rows(expert_ids: jax.Array, experts: int) -> GroupedRows:
    """Sort the pairs of expert_ids int32 [T, k] by expert, stably; ids outside 0..experts-1 take no part."""
    pairs = expert_ids.size
    per_token = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    valid = (flat >= 0) & (flat < experts)
    keys = jnp.where(valid, flat, experts)
    ranks, counts = _ranks(keys, experts)
    padded = -(-counts // ROW_STEP) * ROW_STEP
    starts = jnp.cumsum(padded) - padded
    position = jnp.where(valid, starts[jnp.minimum(keys, experts - 1)] + ranks, -1)
    rows = row_capacity(pairs, experts)
    token = jnp.arange(pairs, dtype=jnp.int32) // per_token
    source = jnp.full(rows, -1, jnp.int32).at[jnp.where(valid, position, rows)].set(token, mode="drop")

    tiles_of = -(-padded // LARGEST_ROWS)
    ends = jnp.cumsum(tiles_of)
    number = jnp.arange(tile_capacity(pairs, experts), dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32), experts - 1)
    inside = LARGEST_ROWS * (number - (ends - tiles_of)[expert])
    tiles = jnp.stack([expert, starts[expert] + inside, jnp.minimum(padded[expert] - inside, LARGEST_ROWS)], axis=1)
    return GroupedRows(source, position.reshape(expert_ids.shape), tiles.astype(jnp.int32), ends[-1:])


def sort_weights(weights: jax.Array, grouped: GroupedRows) -> jax.Array:
    """weights [T, k] by sorted row [R], 0 for padding."""
    rows = grouped.source.shape[0]
    place = jnp.where(grouped.position >= 0, grouped.position, rows).reshape(-1)
    return jnp.zeros(rows, weights.dtype).at[place].set(weights.reshape(-1), mode="drop")
