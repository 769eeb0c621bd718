"""DSpark stages over many anchors of each row at once (`model/dspark.py` for one block at a time)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand
from deepinfer_jax.kernels.rms_norm_quant import rms_norm, rotary
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.attention import project_output, project_query
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.layer import mix
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.rope import inverse_frequencies

from .forward import balance_loss, dense_experts, head_logits
from .ops import SAVED, product, round_activation
from .weights import layer_values


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["logits", "confidence", "load", "balance_loss"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class BlockOutputs:
    """logits: float32 [N, block, V] with the Markov bias. confidence: float32 [N, block], raw.
    load: [stages, E]. balance_loss: [stages]."""

    logits: jax.Array
    confidence: jax.Array
    load: jax.Array
    balance_loss: jax.Array


def _window_record(setting: Setting, p: LayerParams, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys-values [T, d] of rows x [T, D]."""
    config, run, profile = setting.config, setting.kernels, setting.profile
    record = run(row_dot, x, p["attn.wkv"], quantize_input=profile.quantize_activations)
    record = run(rms_norm, record, p["attn.kv_norm"], eps=config.rms_norm_eps)
    record = run(rotary, record, positions, jnp.asarray(inverse_frequencies(config, 0)))
    return round_activation(record, profile.quantize_cache)


def _attend(
    queries: jax.Array, context: jax.Array, seen: jax.Array, own: jax.Array, sink: jax.Array, scale: float
) -> jax.Array:
    """queries [N, b, H, d]; context [N, W, d] with seen bool [N, W]; own [N, b, d]: all rows see all of it."""
    keys = jnp.concatenate([jnp.where(seen[..., None], context, 0), own], axis=1)
    valid = jnp.concatenate([seen, jnp.ones(own.shape[:2], bool)], axis=1)
    logits = product("nbhd,nsd->nbhs", queries, keys, jnp.float32) * scale
    logits = jnp.where(valid[:, None, None], logits, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[None, None, :, None] - largest)
    output = product("nbhs,nsd->nbhd", weights.astype(queries.dtype), keys, jnp.float32)
    return (output / total).astype(queries.dtype)


def _stage(
    setting: Setting,
    p: LayerParams,
    streams: jax.Array,
    pre: jax.Array,
    main: jax.Array,
    facts: tuple[jax.Array, jax.Array, jax.Array],
    shape: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One stage on the rows of all blocks [N * b]; main [B * T, D] makes the context rows of B rows of T tokens."""
    config, run = setting.config, setting.kernels
    positions, context_rows, seen = facts
    batch, tokens = shape
    block, eps = config.dspark_block_size, config.rms_norm_eps
    everywhere = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), batch)
    context = _window_record(setting, p, main, everywhere)[context_rows]
    next_pre, post, comb = mix(setting, p, "attn", streams)
    x = run(collapse_norm, streams, pre, p["attn_norm"], eps=eps)
    queries, _ = project_query(setting, p, x, positions, 0)
    own = _window_record(setting, p, x, positions)
    heads = _attend(
        queries.reshape(-1, block, config.num_attention_heads, config.head_dim),
        context,
        seen,
        own.reshape(-1, block, config.head_dim),
        p["attn.attn_sink"],
        config.head_dim**-0.5,
    )
    heads = heads.reshape(-1, config.num_attention_heads, config.head_dim)
    streams = run(expand, project_output(setting, p, heads, positions, 0), streams, post, comb)
    last_pre, post, comb = mix(setting, p, "ffn", streams)
    x = run(collapse_norm, streams, next_pre, p["ffn_norm"], eps=eps)
    k = config.dspark_num_experts_per_tok
    y, chosen, scores = dense_experts(setting, p, x, k)
    load = jnp.mean(chosen.astype(jnp.float32), axis=0)
    return run(expand, y, streams, post, comb), last_pre, load, balance_loss(chosen, scores, batch, k)


def draft_blocks(
    setting: Setting,
    values: Mapping[str, jax.Array],
    taps: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
) -> BlockOutputs:
    """Draft one block at each anchor with the true tokens as predecessors.

    Args:
        values: weights of backbone and stages as products use them.
        taps: [B * T, targets * D]. tokens: int32 [B, T + block or more], so that labels exist.
        anchors: int32 [B, A] positions; the context is the window before the anchor, as at generation.
    """
    config, run, profile = setting.config, setting.kernels, setting.profile
    batch, count = anchors.shape
    length = taps.shape[0] // batch
    block, size = config.dspark_block_size, config.sliding_window
    stages = [layer_values(values, f"mtp.{i}.") for i in range(config.num_nextn_predict_layers)]
    main = run(row_dot, taps, stages[0]["main_proj"], quantize_input=profile.quantize_activations)
    main = run(rms_norm, main, stages[0]["main_norm"], eps=config.rms_norm_eps)

    flat = anchors.reshape(-1)  # [N]
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count)
    wanted = flat[:, None] + jnp.arange(-size, 0, dtype=jnp.int32)
    context_rows = row[:, None] * length + jnp.maximum(wanted, 0)
    offsets = jnp.arange(block, dtype=jnp.int32)
    positions = (flat[:, None] + offsets).reshape(-1)
    previous = tokens[row[:, None], flat[:, None] + offsets]  # [N, b], the true predecessors
    ids = jnp.full(previous.shape, config.dspark_noise_token_id, jnp.int32).at[:, 0].set(previous[:, 0])
    embedded = values["embed"][ids.reshape(-1)].astype(profile.dtype)
    streams = jnp.broadcast_to(embedded[:, None], (embedded.shape[0], config.hc_mult, config.hidden_size))
    pre = jnp.zeros(streams.shape[:2], jnp.float32).at[:, 0].set(1.0)
    loads, balances = [], []
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    for p in stages:
        body = functools.partial(_stage, setting, shape=(batch, length))
        stage = jax.checkpoint(body, policy=policy)
        streams, pre, load, balance = stage(p, streams, pre, main, (positions, context_rows, wanted >= 0))
        loads.append(load)
        balances.append(balance)
    last = stages[-1]
    hidden, base = head_logits(setting, values, last["norm"], streams, pre)
    memory = last["markov_head.embed"][previous.reshape(-1)].astype(hidden.dtype)
    biased = base + run(row_dot, memory, last["markov_head.head"], out_dtype=jnp.float32)
    joined = jnp.concatenate([hidden, memory], axis=1)
    confidence = run(row_dot, joined, last["confidence_head.proj"], out_dtype=jnp.float32)
    return BlockOutputs(
        biased.reshape(flat.shape[0], block, -1),
        confidence.reshape(flat.shape[0], block),
        jnp.stack(loads),
        jnp.stack(balances),
    )
