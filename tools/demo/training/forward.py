"""The backbone over whole rows of tokens, differentiable: the model's own functions without its paged state.

Positions of a row are 0 .. T-1, so a row is one sequence. Layers that the model scans are written out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.engram_rows import engram_gate, engram_hash
from deepinfer_jax.kernels.expert_mlp.xla import activate, scores_of
from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand, stream_mean
from deepinfer_jax.kernels.pool_pair import pool_pair
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.rms_norm_quant import rms_norm, rotary
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.kernels.top_k.xla import order_key
from deepinfer_jax.model.attention import project_output, project_query
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram import hash_constants
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.layer import mix
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.plan import layer_kind
from deepinfer_jax.model.rope import inverse_frequencies

from .attention import Selection, attend, candidate_entries, index_scores, select_entries, visible_entries
from .ops import SAVED, TrainingKernels, product, round_activation, round_compressed
from .weights import layer_values

Attention = Literal["dense", "selected"]
"""Compressed entries that layers read: all visible ones, or the selected ones."""

TRAINING_BF16 = NumericsProfile("training_bf16", True, False, False)
"""Bfloat16 activations without quantisation: the first phase."""


def setting_of(config: ModelConfig, profile: NumericsProfile, kernels: Kernels | None = None) -> Setting:
    """Static arguments for the model's functions."""
    return Setting(config, profile, kernels or TrainingKernels(), LOCAL_EXCHANGE)


# ---- experts --------------------------------------------------------------------------------------


def dense_route(
    setting: Setting, logits: jax.Array, bias: jax.Array, experts_per_token: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routing weights [T, E] with zeros for experts that are not chosen, the choice, and scores.

    The values of `expert_mlp.route` without sorting: an expert is chosen if fewer than k come before it.
    """
    config = setting.config
    scores = scores_of(logits if config.gate_temp == 1 else logits / config.gate_temp)
    keys = order_key(lax.stop_gradient(scores + bias))
    place = jnp.arange(keys.shape[1])
    earlier = (keys[:, None] > keys[:, :, None]) | ((keys[:, None] == keys[:, :, None]) & (place < place[:, None]))
    chosen = jnp.sum(earlier, axis=2, dtype=jnp.int32) < experts_per_token
    weights = jnp.where(chosen, scores, 0)
    if config.norm_topk_prob and experts_per_token > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor, chosen, scores


def dense_experts(
    setting: Setting, p: LayerParams, x: jax.Array, experts_per_token: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mixture of experts as three products over all experts; (output [T, D], choice [T, E], scores [T, E])."""
    config, dtype = setting.config, x.dtype
    quantize, limit = setting.profile.quantize_activations, config.swiglu_limit
    logits = setting.kernels(row_dot, x, p["ffn.gate"], out_dtype=jnp.float32)
    bias = lax.stop_gradient(p["ffn.gate.bias"])[None]
    factors, chosen, scores = dense_route(setting, logits, bias, experts_per_token)
    operand = round_activation(x, quantize)

    def through(w: jax.Array) -> jax.Array:
        y = product("tk,nk->tn", operand, w.astype(dtype), dtype)
        return checkpoint_name(y, SAVED)

    w1, w3, w2 = (p[f"ffn.experts.{{}}.{name}"] for name in ("w1", "w3", "w2"))
    count, inner, width = w1.shape
    gate, up = (through(w.reshape(count * inner, width)) for w in (w1, w3))
    factor = jnp.repeat(factors, inner, axis=1)
    hidden = round_activation(activate(gate, up, factor, limit, dtype), quantize)
    joined = jnp.moveaxis(w2, 0, 1).reshape(width, count * inner).astype(dtype)
    routed = product("tk,nk->tn", hidden, joined, jnp.float32)

    w1, w3, w2 = (p[f"ffn.shared_experts.{name}"] for name in ("w1", "w3", "w2"))
    hidden = round_activation(activate(through(w1), through(w3), None, limit, dtype), quantize)
    shared = product("tk,nk->tn", hidden, w2.astype(dtype), dtype)
    output = (routed + shared.astype(jnp.float32)).astype(dtype)
    return checkpoint_name(output, SAVED), chosen, scores


def balance_loss(chosen: jax.Array, scores: jax.Array, rows: int, experts_per_token: int) -> jax.Array:
    """Mean over rows of E * sum_e share chosen * share of scores: 1 when a row's experts are balanced."""
    count = chosen.shape[-1]
    picked = jnp.mean(chosen.reshape(rows, -1, count).astype(jnp.float32), axis=1) / experts_per_token
    share = scores / jnp.sum(scores, axis=1, keepdims=True)
    share = jnp.mean(share.reshape(rows, -1, count), axis=1)
    return count * jnp.mean(jnp.sum(picked * share, axis=1))


# ---- Engram ---------------------------------------------------------------------------------------


def engram_row_ids(config: ModelConfig, token_map: jax.Array, tokens: jax.Array) -> jax.Array:
    """Table rows int32 [Engram layers, B, T, columns] of the n-grams that end at each token [B, T]."""
    classes = token_map[tokens]
    pad = token_map[config.engram_pad_token_id]
    columns = []
    for back in range(config.engram_max_ngram_size):
        shifted = jnp.pad(classes[:, : classes.shape[1] - back], ((0, 0), (back, 0)))
        columns.append(jnp.where(jnp.arange(classes.shape[1])[None] < back, pad, shifted))
    flat = jnp.stack(columns, axis=-1).reshape(-1, config.engram_max_ngram_size)
    result = []
    for which in range(len(config.engram_layer_ids)):
        result.append(engram_hash(flat, *hash_constants(config, which)).reshape(*tokens.shape, -1))
    return jnp.stack(result)


def _add_memory(setting: Setting, p: LayerParams, row_ids: jax.Array, streams: jax.Array) -> jax.Array:
    """Engram on flat rows [T, C, D]. Rows are gathered in float32, so that their gradients are summed in it."""
    memory = p["engram.embed"][row_ids].reshape(row_ids.shape[0], -1).astype(streams.dtype)
    run = setting.kernels
    projected = run(row_dot, memory, p["engram.wkv"], quantize_input=setting.profile.quantize_activations)
    everywhere = jnp.ones(streams.shape[:1], bool)
    weights = (p["engram.q_weight"], p["engram.k_weight"])
    return run(engram_gate, streams, projected, *weights, everywhere, eps=setting.config.rms_norm_eps)[0]


# ---- attention ------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["entries", "keys"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Source:
    """What a key-value source publishes: compressed entries [B, S, d] and index keys [B, S, e]."""

    entries: jax.Array
    keys: jax.Array


def _make_source(setting: Setting, p: LayerParams, x: jax.Array, shape: tuple[int, int], ratio: int) -> Source:
    """Compressed entries and index keys of attention inputs x [B * T, D]. Index keys send no gradient back."""
    config, run = setting.config, setting.kernels
    batch, tokens = shape
    eps, quantize = config.rms_norm_eps, setting.profile.quantize_cache
    if ratio == 2:
        value, gate = (
            run(row_dot, x, p[f"attn.compressor.{name}"], out_dtype=jnp.float32).reshape(-1, 2, config.head_dim)
            for name in ("wkv", "wgate")
        )
        latent = run(pool_pair, value, gate, p["attn.compressor.norm"], eps=eps, out_dtype=x.dtype)
    else:
        latent = run(rms_norm, run(row_dot, x, p["attn.compressor.wkv"]), p["attn.compressor.norm"], eps=eps)
    entries = tokens // ratio
    origin = jnp.tile(jnp.arange(entries, dtype=jnp.int32) * ratio, batch)
    frequencies = jnp.asarray(inverse_frequencies(config, ratio))
    key = run(row_dot, lax.stop_gradient(latent), p["attn.indexer.wk"])
    key = run(rms_norm, key, p["attn.indexer.k_norm"], eps=eps)
    key = run(rotary, key, origin, frequencies, quantize=quantize)
    record = round_compressed(run(rotary, latent, origin, frequencies), quantize)
    return Source(
        checkpoint_name(record, SAVED).reshape(batch, entries, -1),
        checkpoint_name(key, SAVED).reshape(batch, entries, -1),
    )


def _index(
    setting: Setting, p: LayerParams, x: jax.Array, q_low: jax.Array, positions: jax.Array, source: Source, ratio: int
) -> jax.Array:
    """Index scores [B, T, S]; gradients reach the indexer's own weights only."""
    config, profile, run = setting.config, setting.profile, setting.kernels
    heads, size = config.index_n_heads, config.index_head_dim
    batch = source.keys.shape[0]
    queries = run(
        row_dot, lax.stop_gradient(q_low), p["attn.indexer.wq_b"], quantize_input=profile.quantize_activations
    )
    frequencies = jnp.asarray(inverse_frequencies(config, ratio))
    queries = run(rotary, queries.reshape(-1, heads, size), positions, frequencies, quantize=profile.quantize_cache)
    weights = run(row_dot, lax.stop_gradient(x), p["attn.indexer.weights_proj"])
    return index_scores(
        queries.reshape(batch, -1, heads, size),
        weights.reshape(batch, -1, heads),
        source.keys,
        scale=size**-0.5 * heads**-0.5,
        bf16_chain=profile.bf16_activations,
    )


def _select(
    setting: Setting,
    layer: int,
    scores: jax.Array,
    documents: jax.Array,
    attention: Attention,
    earlier: Selection | None,
) -> Selection:
    """What index source `layer` publishes. documents: int32 [B, T]."""
    config = setting.config
    kind = layer_kind(config, layer)
    ratio = kind.compress_ratio
    visible = visible_entries(documents, scores.shape[2], ratio)
    candidates = earlier.candidates if earlier is not None else None
    candidate_scores = earlier.candidate_scores if earlier is not None else None
    if attention == "dense":
        candidate_scores = scores if kind.candidate_source else candidate_scores
        return Selection(scores, visible, None, candidate_scores)
    if kind.candidate_source:
        size, blocks = config.candidate_block_size, config.candidate_topk_blocks
        candidates = candidate_entries(scores, visible, ratio=ratio, block_size=size, blocks=blocks)
        candidates, candidate_scores = checkpoint_name(candidates, SAVED), scores
    allowed = visible & candidates if kind.candidate_consumer and candidates is not None else visible
    mask = select_entries(scores, allowed, config.index_topk)
    return Selection(scores, checkpoint_name(mask, SAVED), candidates, candidate_scores)


def index_loss(scores: jax.Array, share: jax.Array, mask: jax.Array) -> jax.Array:
    """Cross entropy of softmax(scores) against attention `share` [B, T, S] over the entries in `mask`.

    Tokens count by the share of their attention that goes to compressed entries.
    """
    logits = jnp.where(mask, scores.astype(jnp.float32), -1e30)
    log_probability = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    total = jnp.sum(share, axis=-1)
    entropy = -jnp.sum(jnp.where(mask, share * log_probability, 0), axis=-1)
    return jnp.mean(entropy / (total + 0.05))


def recall(share: jax.Array, mask: jax.Array) -> jax.Array:
    """Fraction of the attention on compressed entries that falls on `mask`, over all tokens of the batch."""
    return jnp.sum(jnp.where(mask, share, 0)) / (jnp.sum(share) + 1e-9)


# ---- regularisation -------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "sublayers", "memory"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Noise of a training step. sublayers, memory: float32 [B * T], each token's rate of dropping elements of
    sublayer outputs, and of dropping what Engram adds altogether (it knows n-grams by heart)."""

    key: jax.Array
    sublayers: jax.Array
    memory: jax.Array

    def elements(self, layer: int, place: int, y: jax.Array) -> jax.Array:
        """Sublayer output [B * T, D] with elements dropped and the others scaled."""
        key = jax.random.fold_in(self.key, 4 * layer + place)
        kept = 1 - self.sublayers[:, None]
        alive = jax.random.uniform(key, y.shape, jnp.float32) < kept
        return jnp.where(alive, y / kept.astype(y.dtype), 0).astype(y.dtype)

    def tokens(self, layer: int, added: jax.Array, without: jax.Array) -> jax.Array:
        """Streams with Engram for tokens that keep it, without for the others."""
        key = jax.random.fold_in(self.key, 4 * layer + 3)
        alive = jax.random.uniform(key, self.memory.shape, jnp.float32) >= self.memory
        return jnp.where(alive[:, None, None], added, without)


# ---- layers ---------------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["streams", "pre", "source", "selection"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Stream:
    """Values in motion: streams [B * T, C, D], collapse weights [B * T, C], newest source and selection."""

    streams: jax.Array
    pre: jax.Array
    source: Source | None = None
    selection: Selection | None = None


def _attention_layer(
    setting: Setting,
    attention: Attention,
    layer: int,
    p: LayerParams,
    x: jax.Array,
    flow: Stream,
    documents: jax.Array,
    reach: jax.Array | None,
    measure: bool,
) -> tuple[jax.Array, Stream, dict[str, jax.Array]]:
    """Attention output [B * T, D], the flow with what a source publishes, index losses of the layer."""
    config, profile, run = setting.config, setting.profile, setting.kernels
    kind = layer_kind(config, layer)
    ratio = kind.compress_ratio
    batch, tokens = documents.shape
    shape = (batch, tokens)
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), batch)
    queries, q_low = project_query(setting, p, x, positions, ratio)
    window = run(row_dot, x, p["attn.wkv"], quantize_input=profile.quantize_activations)
    window = run(rms_norm, window, p["attn.kv_norm"], eps=config.rms_norm_eps)
    window = run(rotary, window, positions, jnp.asarray(inverse_frequencies(config, ratio)))
    window = round_activation(window, profile.quantize_cache)
    if kind.kv_source:
        flow = dataclasses.replace(flow, source=_make_source(setting, p, x, shape, ratio))
    if kind.index_source:
        assert flow.source is not None
        scores = checkpoint_name(_index(setting, p, x, q_low, positions, flow.source, ratio), SAVED)
        flow = dataclasses.replace(
            flow, selection=_select(setting, layer, scores, documents, attention, flow.selection)
        )
    source = flow.source if ratio else None
    whole = jnp.full(batch, config.sliding_window, jnp.int32)
    selection = flow.selection if ratio else None
    heads, share = attend(
        config.head_dim**-0.5,
        config.sliding_window,
        queries.reshape(batch, tokens, config.num_attention_heads, -1),
        window.reshape(batch, tokens, -1),
        None if source is None else source.entries,
        None if selection is None else selection.mask,
        p["attn.attn_sink"],
        documents,
        whole if reach is None or not ratio else reach,
    )
    extra = {}
    share = None if share is None else lax.stop_gradient(share).astype(jnp.float32)
    if share is not None and selection is not None:
        extra["index_loss"] = index_loss(selection.scores, share, selection.mask)
        if config.is_candidate_consumer(config.index_owner(layer) or 0) and selection.candidate_scores is not None:
            extra["index_loss"] += index_loss(selection.candidate_scores, share, selection.mask)
        extra["compressed_share"] = jnp.mean(jnp.sum(share, axis=-1))
        if measure:
            extra["recall"] = recall(share, _real_mask(setting, layer, selection))
    heads = heads.reshape(batch * tokens, config.num_attention_heads, -1)
    return project_output(setting, p, heads, positions, ratio), flow, extra


def _real_mask(setting: Setting, layer: int, dense: Selection) -> jax.Array:
    """The entries that a layer which ran on all visible ones would select."""
    config = setting.config
    allowed = dense.mask
    if config.is_candidate_consumer(config.index_owner(layer) or 0) and dense.candidate_scores is not None:
        size, blocks = config.candidate_block_size, config.candidate_topk_blocks
        ratio = config.compress_ratios[layer]
        allowed &= candidate_entries(dense.candidate_scores, dense.mask, ratio=ratio, block_size=size, blocks=blocks)
    return select_entries(dense.scores, allowed, config.index_topk)


def _layer(
    setting: Setting,
    attention: Attention,
    layer: int,
    measure: bool,
    p: LayerParams,
    row_ids: jax.Array | None,
    flow: Stream,
    dropout: Dropout | None,
    documents: jax.Array,
    reach: jax.Array | None,
) -> tuple[Stream, dict[str, jax.Array]]:
    """One layer; returns the flow and what it reports (tap, expert load, losses)."""
    config, run = setting.config, setting.kernels
    eps, k = config.rms_norm_eps, config.num_experts_per_tok
    streams = flow.streams
    if row_ids is not None:
        added = _add_memory(setting, p, row_ids, streams)
        streams = added if dropout is None else dropout.tokens(layer, added, streams)
    report = {}
    if layer in config.dspark_target_layer_ids and config.has_draft:
        report["tap"] = run(stream_mean, streams)
    pre, post, comb = mix(setting, p, "attn", streams)
    x = run(collapse_norm, streams, flow.pre, p["attn_norm"], eps=eps)
    y, flow, extra = _attention_layer(setting, attention, layer, p, x, flow, documents, reach, measure)
    if dropout is not None:
        y = dropout.elements(layer, 0, y)
    streams = run(expand, y, streams, post, comb)
    next_pre, post, comb = mix(setting, p, "ffn", streams)
    x = run(collapse_norm, streams, pre, p["ffn_norm"], eps=eps)
    y, chosen, scores = dense_experts(setting, p, x, k)
    if dropout is not None:
        y = dropout.elements(layer, 1, y)
    report |= extra
    report["load"] = jnp.mean(chosen.astype(jnp.float32), axis=0)
    report["balance_loss"] = balance_loss(chosen, scores, documents.shape[0], k)
    return dataclasses.replace(flow, streams=run(expand, y, streams, post, comb), pre=next_pre), report


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["streams", "pre", "taps", "load", "losses"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Hidden:
    """What leaves the last layer: streams [B * T, C, D] and pre for the head, taps [B * T, targets * D].

    load: [layers, E], mean choices of each expert per token. losses: name -> scalar or one value per layer.
    """

    streams: jax.Array
    pre: jax.Array
    taps: jax.Array
    load: jax.Array
    losses: dict[str, jax.Array]


def backbone(
    setting: Setting,
    values: Mapping[str, jax.Array],
    token_map: jax.Array,
    tokens: jax.Array,
    *,
    attention: Attention,
    documents: jax.Array | None = None,
    reach: jax.Array | None = None,
    measure: bool = False,
    dropout: Dropout | None = None,
) -> Hidden:
    """All layers on rows of tokens.

    Args:
        values: float32 weights as products use them (`forward_values`).
        token_map: int32 [vocab_size], Engram classes. tokens: int32 [B, T], T a multiple of the window.
        documents: int32 [B, T], which document of its row a token belongs to, ascending: attention stays inside,
            as requests do not see each other. Default: a row is one document. Engram's n-grams do not stop.
        reach: int32 [B], positions of the window that layers with compressed entries see. Default: the window.
        measure: also report the recall of the real selection (with attention="dense").
        dropout: noise of a training step.
    """
    config, dtype = setting.config, setting.profile.dtype
    batch, length = tokens.shape
    row_ids = engram_row_ids(config, token_map, tokens) if config.engram_layer_ids else None
    embedded = values["embed"][tokens.reshape(-1)].astype(dtype)
    streams = jnp.broadcast_to(embedded[:, None], (batch * length, config.hc_mult, config.hidden_size))
    pre = jnp.zeros((batch * length, config.hc_mult), jnp.float32).at[:, 0].set(1.0)
    flow = Stream(streams, pre)
    documents = jnp.zeros((batch, length), jnp.int32) if documents is None else documents
    reports = []
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    for layer in range(config.num_hidden_layers):
        body = functools.partial(_layer, setting, attention, layer, measure)
        ids = None
        if layer in config.engram_layer_ids and row_ids is not None:
            ids = row_ids[config.engram_layer_ids.index(layer)].reshape(batch * length, -1)
        run = jax.checkpoint(body, policy=policy)
        flow, report = run(layer_values(values, f"layers.{layer}."), ids, flow, dropout, documents, reach)
        reports.append(report)
    taps = [report["tap"] for report in reports if "tap" in report]
    losses = {}
    for name in ("index_loss", "compressed_share", "recall", "balance_loss"):
        found = [report[name] for report in reports if name in report]
        if found:
            losses[name] = jnp.stack(found)
    return Hidden(
        flow.streams,
        flow.pre,
        jnp.concatenate(taps, axis=1) if taps else jnp.zeros((batch * length, 0), dtype),
        jnp.stack([report["load"] for report in reports]),
        losses,
    )


def head_logits(
    setting: Setting, values: Mapping[str, jax.Array], norm: jax.Array, streams: jax.Array, pre: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(collapsed hidden [T, D] before the norm, float32 logits [T, V])."""
    config, run = setting.config, setting.kernels
    hidden = run(collapse_norm, streams, pre, None, eps=config.rms_norm_eps)
    normed = run(rms_norm, hidden, norm, eps=config.rms_norm_eps)
    return hidden, product("tk,nk->tn", normed, values["head"].astype(normed.dtype), jnp.float32)
