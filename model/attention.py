"""Attention of one layer over its window ring and its source's compressed pages (`attention.md` 3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.rms_norm_quant import norm_rotary_pack, rms_norm, rotary
from deepinfer_jax.kernels.row_dot import row_dot, row_dot_grouped
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.model.compressor import page_of
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.flow import Flow, Rows, Setting
from deepinfer_jax.model.indexer import select_entries
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.plan import LayerKind
from deepinfer_jax.model.rope import inverse_frequencies
from deepinfer_jax.model.state import PAGE


def project_query(
    setting: Setting, p: LayerParams, x: jax.Array, positions: jax.Array, ratio: int
) -> tuple[jax.Array, jax.Array]:
    """Rotated queries [T, H, d] and the normed low-rank query [T, q_lora_rank] (3.1; no head norm)."""
    config, run = setting.config, setting.kernels
    quantize = setting.profile.quantize_activations
    q_low = run(row_dot, x, p["attn.wq_a"], quantize_input=quantize)
    q_low = run(rms_norm, q_low, p["attn.q_norm"], eps=config.rms_norm_eps)
    queries = run(row_dot, q_low, p["attn.wq_b"], quantize_input=quantize)
    queries = queries.reshape(-1, config.num_attention_heads, config.head_dim)
    return run(rotary, queries, positions, jnp.asarray(inverse_frequencies(config, ratio))), q_low


def window_record(setting: Setting, p: LayerParams, x: jax.Array, positions: jax.Array, ratio: int) -> jax.Array:
    """Window records [T, width]: one vector is key and value of every head (3.2)."""
    config, run = setting.config, setting.kernels
    return run(
        norm_rotary_pack,
        run(row_dot, x, p["attn.wkv"], quantize_input=setting.profile.quantize_activations),
        p["attn.kv_norm"],
        positions,
        jnp.asarray(inverse_frequencies(config, ratio)),
        fmt=setting.profile.window_format,
        eps=config.rms_norm_eps,
    )


def project_output(setting: Setting, p: LayerParams, heads: jax.Array, positions: jax.Array, ratio: int) -> jax.Array:
    """Inverse rotation and grouped low-rank output projection [T, D] (3.9)."""
    config, run = setting.config, setting.kernels
    frequencies = jnp.asarray(inverse_frequencies(config, ratio))
    heads = run(rotary, heads, positions, frequencies, inverse=True)
    grouped = heads.reshape(heads.shape[0], config.o_groups, -1)
    low = run(row_dot_grouped, grouped, p["attn.wo_a"])
    low = low.reshape(low.shape[0], -1)
    return run(row_dot, low, p["attn.wo_b"], quantize_input=setting.profile.quantize_activations)


def window_rows(config: ModelConfig, rows: Rows, ring: int, base: jax.Array, first: jax.Array) -> jax.Array:
    """Flat ring places [T, window] of the positions p-window+1 .. p; -1 before position `first` [T]."""
    back = jnp.arange(config.sliding_window - 1, -1, -1, dtype=jnp.int32)
    wanted = rows.positions[:, None] - back[None, :]
    seen = (wanted >= first[:, None]) & rows.valid[:, None]
    return jnp.where(seen, base[:, None] * ring + wanted % ring, -1)


def attention(
    setting: Setting,
    kind: LayerKind,
    p: LayerParams,
    x: jax.Array,
    rows: Rows,
    flow: Flow,
    layer: jax.Array,
    source_id: jax.Array,
) -> tuple[jax.Array, Flow]:
    """Attention output [T, D]. Window keys are written before they are read: the ring has room for a
    whole block besides the window. Key-value sources have appended their entries already."""
    config, profile, run = setting.config, setting.profile, setting.kernels
    ratio = kind.compress_ratio
    queries, q_low = project_query(setting, p, x, rows.positions, ratio)
    state = flow.state
    slots, ring = state.window.shape[1:3]
    record = window_record(setting, p, x, rows.positions, ratio)
    window = state.window.at[layer, rows.write_slot(slots), rows.positions % ring].set(record, mode="drop")
    flow = dataclasses.replace(flow, state=dataclasses.replace(state, window=window))
    if kind.index_source:
        flow = select_entries(setting, kind, p, x, q_low, rows, flow, layer, source_id)

    first = jnp.maximum(rows.window_start if kind.decoder else rows.encoder_start, 0)
    places = window_rows(config, rows, ring, layer * slots + rows.read_slot, first)
    compressed = compressed_rows = None
    if ratio:
        pool = flow.state.pages[ratio].kv
        entries = PAGE // ratio
        page = page_of(rows.page_ids, flow.selection, ratio)
        flat = (source_id * pool.shape[1] + page) * entries + flow.selection % entries
        compressed_rows = jnp.where((flow.selection >= 0) & (page >= 0), flat, -1)
        compressed = pool.reshape(-1, pool.shape[-1])
    heads = run(
        sparse_attention,
        queries,
        window.reshape(-1, window.shape[-1]),
        places,
        compressed,
        compressed_rows,
        p["attn.attn_sink"],
        window_format=profile.window_format,
        compressed_format=profile.compressed_format,
        scale=config.head_dim**-0.5,
    )
    return project_output(setting, p, heads, rows.positions, ratio), flow
