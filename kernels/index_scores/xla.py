"""Portable `index_scores`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.quantization import CacheFormat, unpack_cache
from deepinfer_jax.kernels.tiling import tile_rows


def score_page(queries: jax.Array, head_weights: jax.Array, keys: jax.Array, bf16_chain: bool) -> jax.Array:
    """Scores [T, entries] of one page; queries [T, H, d], keys [T, entries, d]."""
    dots = lax.dot_general(
        queries,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if not bf16_chain:
        return jnp.sum(head_weights.astype(jnp.float32)[:, :, None] * jnp.maximum(dots, 0), axis=1)
    relu = jnp.maximum(dots.astype(jnp.bfloat16), 0)
    weighted = relu * head_weights.astype(jnp.bfloat16)[:, :, None]
    return jnp.sum(weighted.astype(jnp.float32), axis=1).astype(jnp.bfloat16).astype(jnp.float32)


def index_scores(
    queries: jax.Array,
    head_weights: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    visible: jax.Array,
    scale: float,
    fmt: CacheFormat,
    bf16_chain: bool,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`.

    Only pages that some row of the tile sees are read. With row_tile=None every page is read, so that
    the loop can be differentiated.
    """
    entries, size = pages.shape[1], queries.shape[2]
    capacity = page_ids.shape[1]

    def tile(q: jax.Array, raw: jax.Array, table: jax.Array, limit: jax.Array) -> jax.Array:
        w = (raw.astype(jnp.float32) * scale).astype(raw.dtype)

        def one(page: jax.Array, scores: jax.Array) -> jax.Array:
            column = lax.dynamic_index_in_dim(table, page, axis=1, keepdims=False)
            keys = unpack_cache(pages[jnp.maximum(column, 0)], fmt, size).astype(q.dtype)
            seen = page * entries + jnp.arange(entries)[None] < limit[:, None]
            keys = jnp.where(seen[:, :, None], keys, 0)
            part = jnp.where(seen, score_page(q, w, keys, bf16_chain), -jnp.inf)
            return lax.dynamic_update_slice(scores, part, (jnp.int32(0), page * entries))

        empty = jnp.full((q.shape[0], capacity * entries), -jnp.inf, jnp.float32)
        used = jnp.max((limit + entries - 1) // entries) if row_tile is not None else capacity
        return lax.fori_loop(0, used, one, empty)

    return tile_rows(tile, row_tile, queries, head_weights, page_ids, visible)
