"""Index sources: scores, candidate blocks, selection (`spec/attention.md` 3.5-3.7)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.index_scores import index_scores
from deepinfer_jax.kernels.rms_norm_quant import rotary
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.kernels.top_k import candidate_blocks, top_k
from deepinfer_jax.model.flow import Flow, Rows, Setting
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.plan import LayerKind
from deepinfer_jax.model.rope import inverse_frequencies


def select_entries(
    setting: Setting,
    kind: LayerKind,
    p: LayerParams,
    x: jax.Array,
    q_low: jax.Array,
    rows: Rows,
    flow: Flow,
    layer: jax.Array,
    source_id: jax.Array,
) -> Flow:
    """Choose each row's entries of the source's cache; publishes flow.selection and flow.candidates.

    x: attention input [T, D]. q_low: normed low-rank query [T, q_lora_rank].
    """
    config, profile, run = setting.config, setting.profile, setting.kernels
    ratio, heads, size = kind.compress_ratio, config.index_n_heads, config.index_head_dim
    queries = run(row_dot, q_low, p["attn.indexer.wq_b"], quantize_input=profile.quantize_activations)
    queries = run(
        rotary,
        queries.reshape(-1, heads, size),
        rows.positions,
        jnp.asarray(inverse_frequencies(config, ratio)),
        quantize=profile.quantize_cache,
    )
    pool = flow.state.pages[ratio].index
    flat = pool.reshape(-1, *pool.shape[2:])
    page_ids = jnp.where(rows.page_ids >= 0, rows.page_ids + source_id * pool.shape[1], -1)
    visible = jnp.where(rows.valid, (rows.positions + 1) // ratio, 0)
    scores = run(
        index_scores,
        queries,
        run(row_dot, x, p["attn.indexer.weights_proj"]),
        flat,
        page_ids,
        visible,
        scale=size**-0.5 * heads**-0.5,
        fmt=profile.index_format,
        bf16_chain=profile.bf16_activations,
    )
    flow = flow.capture(setting, "index_scores", layer, rows, scores)
    block = config.candidate_block_size
    if kind.candidate_source:
        candidates = run(candidate_blocks, scores, visible, block_size=block, blocks=config.candidate_topk_blocks)
        flow = dataclasses.replace(flow, candidates=candidates)
        flow = flow.capture(setting, "candidates", layer, rows, candidates)
    mask = flow.candidates if kind.candidate_consumer else None
    selection = run(top_k, scores, k=config.index_topk, block_mask=mask, block_size=block)
    flow = dataclasses.replace(flow, selection=selection)
    return flow.capture(setting, "selection", layer, rows, selection)
