"""Row tiles: how the portable implementations keep a row's bits independent of the row count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Append zero rows to reach `rows` rows."""
    missing = rows - x.shape[0]
    return x if missing == 0 else jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def tile_rows(function: Callable[..., Any], row_tile: int | None, *row_arrays: jax.Array) -> Any:
    """Apply `function` to row arrays [T, ...] in tiles of exactly `row_tile` rows.

    Everything `function` computes has shapes that depend on `row_tile` and constants only, so XLA
    compiles the same arithmetic for every T. Results are pytrees of [T, ...]. None: one whole call.
    """
    rows = row_arrays[0].shape[0]
    if row_tile is None or rows == row_tile:
        return function(*row_arrays)
    tiles = max(1, -(-rows // row_tile))
    padded = [pad_rows(x, tiles * row_tile) for x in row_arrays]
    if tiles == 1:
        result = function(*padded)
    else:
        stacked = [x.reshape(tiles, row_tile, *x.shape[1:]) for x in padded]
        result = lax.map(lambda tile: function(*tile), tuple(stacked))
        result = jax.tree.map(lambda y: y.reshape(tiles * row_tile, *y.shape[2:]), result)
    return jax.tree.map(lambda y: y[:rows], result)
