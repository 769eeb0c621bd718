"""Key-value sources: latents, index keys and compressed records (`spec/attention.md` 3.4, 3.5)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.pool_pair import pool_pair
from deepinfer_jax.kernels.rms_norm_quant import norm_rotary_pack, rms_norm
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.flow import Rows, Setting
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.rope import inverse_frequencies
from deepinfer_jax.model.state import PAGE, PagePool, State


def _previous_in_block(rows: Rows) -> jax.Array:
    """bool [T]: the row before this one in the block is the token before it."""
    same = (rows.sequence[1:] == rows.sequence[:-1]) & (rows.positions[1:] == rows.positions[:-1] + 1)
    return jnp.concatenate([jnp.zeros((1,), bool), same])


def last_positions(rows: Rows) -> jax.Array:
    """int32 [T]: the highest position of each row's sequence among these rows."""
    same = rows.sequence[:, None] == rows.sequence[None, :]
    return jnp.max(jnp.where(same, rows.positions[None, :], -1), axis=1)


def _pooled(
    setting: Setting, p: LayerParams, x: jax.Array, rows: Rows, state: State, pool_id: jax.Array
) -> tuple[jax.Array, State]:
    """Ratio-2 latents [T, d] of the group that ends at each row (meaningful for odd positions)."""
    run = setting.kernels
    value = run(row_dot, x, p["attn.compressor.wkv"], out_dtype=jnp.float32)
    gate = run(row_dot, x, p["attn.compressor.wgate"], out_dtype=jnp.float32)
    pair = jnp.stack([value, gate], axis=1)  # [T, 2, d]
    ring = state.open_groups.shape[2]
    stored = state.open_groups[pool_id, rows.read_slot, (rows.positions - 1) % ring]
    shifted = jnp.concatenate([pair[:1], pair[:-1]])
    older = jnp.where(_previous_in_block(rows)[:, None, None], shifted, stored)
    latent = run(
        pool_pair,
        jnp.stack([older[:, 0], value], axis=1),
        jnp.stack([older[:, 1], gate], axis=1),
        p["attn.compressor.norm"],
        eps=setting.config.rms_norm_eps,
        out_dtype=x.dtype,
    )
    # One writer per ring place: only the newest rows of a sequence in this block.
    newest = rows.positions + ring > last_positions(rows)
    slot = jnp.where(newest, rows.write_slot(state.slots), state.slots)
    groups = state.open_groups.at[pool_id, slot, rows.positions % ring].set(pair, mode="drop")
    return latent, dataclasses.replace(state, open_groups=groups)


def compress(
    setting: Setting,
    p: LayerParams,
    x: jax.Array,
    rows: Rows,
    state: State,
    ratio: int,
    source_id: jax.Array,
    pool_id: jax.Array,
) -> State:
    """Append what a key-value source makes of its attention input x [T, D] to the pages.

    A group is written by the row that closes it; its rotary position is its first token's.
    source_id: number in the ratio's page pool. pool_id: number among pooling sources.
    """
    config, profile, run = setting.config, setting.profile, setting.kernels
    if ratio == 2:
        latent, state = _pooled(setting, p, x, rows, state, pool_id)
    else:
        projected = run(row_dot, x, p["attn.compressor.wkv"])
        latent = run(rms_norm, projected, p["attn.compressor.norm"], eps=config.rms_norm_eps)
    entry = (rows.positions + 1) // ratio - 1
    closes = rows.valid & ((rows.positions + 1) % ratio == 0) & (rows.positions >= rows.page_start)
    origin = entry * ratio
    frequencies = jnp.asarray(inverse_frequencies(config, ratio))
    eps = config.rms_norm_eps
    key = run(row_dot, latent, p["attn.indexer.wk"])
    index = run(norm_rotary_pack, key, p["attn.indexer.k_norm"], origin, frequencies, fmt=profile.index_format, eps=eps)
    record = run(norm_rotary_pack, latent, None, origin, frequencies, fmt=profile.compressed_format, eps=eps)
    pool = state.pages[ratio]
    place = page_of(rows.page_ids, entry, ratio)
    page = jnp.where(closes & (place >= 0), place, pool.kv.shape[1])
    offset = entry % (PAGE // ratio)
    written = PagePool(
        kv=pool.kv.at[source_id, page, offset].set(record, mode="drop"),
        index=pool.index.at[source_id, page, offset].set(index, mode="drop"),
    )
    return dataclasses.replace(state, pages={**state.pages, ratio: written})


def page_of(page_ids: jax.Array, entries: jax.Array, ratio: int) -> jax.Array:
    """Page that holds each row's entries; page_ids [T, P], entries [T] or [T, K]; -1 = none."""
    column = entries // (PAGE // ratio)
    inside = (column >= 0) & (column < page_ids.shape[1])
    column = jnp.where(inside, column, 0)
    if entries.ndim == 1:
        found = jnp.take_along_axis(page_ids, column[:, None], axis=1)[:, 0]
    else:
        found = jnp.take_along_axis(page_ids, column, axis=1)
    return jnp.where(inside, found, -1)
