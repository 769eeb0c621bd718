"""Engram: n-gram hashing over the sequence, and the memory added at a layer's entry (`blocks.md` 1)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.engram_rows import engram_gate, engram_hash, engram_rows
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram_hash import engram_tables
from deepinfer_jax.model.flow import Flow, Rows, Setting
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.state import Batch, State


def _ngram_classes(config: ModelConfig, token_map: jax.Array, batch: Batch, state: State) -> jax.Array:
    """int32 [R, n]: class of each token and its predecessors, newest first. Once a look-back leaves the
    sequence or meets an image, it and everything older is the pad class (`blocks.md` 1.5)."""
    ids = jnp.where(batch.image_mask, -1, batch.token_ids)
    rows = ids.shape[0]
    slot = jnp.maximum(batch.sequence, 0)
    ring = state.lookback.shape[1]
    pad = token_map[config.engram_pad_token_id]
    blocked = jnp.zeros((rows,), bool)
    columns = []
    for back in range(config.engram_max_ngram_size):
        shifted = jnp.roll(ids, back)
        same = (jnp.arange(rows) >= back) & (jnp.roll(batch.sequence, back) == batch.sequence)
        stored = state.lookback[slot, (batch.positions - back) % ring]
        token = jnp.where(same, shifted, stored)
        blocked = blocked | (batch.positions < back) | (token < 0)
        columns.append(jnp.where(blocked, pad, token_map[jnp.maximum(token, 0)]))
    return jnp.stack(columns, axis=1)


def hash_constants(config: ModelConfig, which: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(products, moduli, offsets) of the `which`-th Engram layer, as `engram_hash` takes them."""
    tables = engram_tables(
        config.engram_layer_ids,
        which,
        config.engram_max_ngram_size,
        config.engram_n_heads,
        config.engram_vocab_size,
        config.engram_compressed_vocab_size,
    )
    return jnp.asarray(tables.products), jnp.asarray(tables.moduli), jnp.asarray(tables.offsets)


def hash_rows(setting: Setting, params: Params, batch: Batch, state: State) -> jax.Array:
    """Table rows int32 [Engram layers, R, columns] of the whole call; depends on ids only."""
    config = setting.config
    if params.engram_token_map is None:
        return jnp.zeros((0, batch.token_ids.shape[0], 0), jnp.int32)
    classes = _ngram_classes(config, params.engram_token_map, batch, state)
    result = []
    for which in range(len(config.engram_layer_ids)):
        result.append(setting.kernels(engram_hash, classes, *hash_constants(config, which)))
    return jnp.stack(result)


def remember_tokens(batch: Batch, state: State) -> State:
    """Store the newest tokens of each sequence for the look-back of later calls."""
    ring = state.lookback.shape[1]
    slot = jnp.where(batch.sequence >= 0, batch.sequence, state.slots)
    last = jnp.full((state.slots,), -1, jnp.int32).at[slot].max(batch.positions, mode="drop")
    newest = batch.positions + ring > last[jnp.maximum(batch.sequence, 0)]
    slot = jnp.where(newest, slot, state.slots)
    ids = jnp.where(batch.image_mask, -1, batch.token_ids)
    lookback = state.lookback.at[slot, batch.positions % ring].set(ids, mode="drop")
    return dataclasses.replace(state, lookback=lookback)


def apply_engram(
    setting: Setting, p: LayerParams, row_ids: jax.Array, rows: Rows, flow: Flow, layer: jax.Array
) -> Flow:
    """Add the layer's memory to the streams; image rows pass through with their exact bits."""
    run, dtype = setting.kernels, setting.profile.dtype

    def gather(ids: jax.Array) -> jax.Array:
        return run(engram_rows, p["engram.embed"], ids, dtype=dtype)

    memory = setting.exchange.engram_rows(gather, row_ids)
    projected = run(row_dot, memory, p["engram.wkv"], quantize_input=setting.profile.quantize_activations)
    streams, gate = run(
        engram_gate,
        flow.streams,
        projected,
        p["engram.q_weight"],
        p["engram.k_weight"],
        ~rows.image,
        eps=setting.config.rms_norm_eps,
    )
    flow = flow.capture(setting, "engram_rows", layer, rows, row_ids)
    flow = flow.capture(setting, "engram_gate", layer, rows, gate)
    return dataclasses.replace(flow, streams=streams)
