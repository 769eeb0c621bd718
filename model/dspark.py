"""DSpark draft model: context rows from the backbone's taps, and blocks of drafts (`spec/dspark.md` 1-2).

Drafts need no promise of their own: verification accepts a draft only if it equals the target's own
sample. They still use the same ops and tiles, so they are reproducible.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.rms_norm_quant import rms_norm
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.kernels.tiling import pad_rows
from deepinfer_jax.model.attention import project_output, project_query, window_record
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE, Exchange
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.forward import project_logits
from deepinfer_jax.model.layer import enter_experts, mix
from deepinfer_jax.model.moe import mixture_of_experts
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.state import State

SampleFn = Callable[[jax.Array, jax.Array, int], jax.Array]
"""(logits float32 [G, V], numbers of the drafting sequences int32 [G], step) -> token ids int32 [G]."""


def greedy_sample(logits: jax.Array, _numbers: jax.Array, _step: int) -> jax.Array:
    """The most likely token; ties choose the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "logits", "base_logits", "confidence", "hidden"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Drafts of N sequences, B = dspark_block_size.

    token_ids: int32 [N, B]. logits: float32 [N, B, V] with the Markov bias; base_logits: without.
    confidence: float32 [N, B], raw (a logit). hidden: [N, B, D] before the final norm.
    """

    token_ids: jax.Array
    logits: jax.Array
    base_logits: jax.Array
    confidence: jax.Array
    hidden: jax.Array


def _setting(config: ModelConfig, profile: NumericsProfile, kernels: Kernels, exchange: Exchange) -> Setting:
    if not config.has_draft:
        raise ValueError("this configuration has no draft stages (num_nextn_predict_layers is 0)")
    return Setting(config, profile, kernels, exchange)


def draft_context(
    params: Params,
    state: State,
    taps: jax.Array,
    positions: jax.Array,
    sequence: jax.Array,
    *,
    config: ModelConfig,
    profile: NumericsProfile,
    kernels: Kernels = Kernels(),  # noqa: B008 - frozen
) -> tuple[jax.Array, State]:
    """Append committed rows to every stage's draft window.

    Args:
        taps: [T, targets * D] from `Outputs.taps`. positions, sequence: int32 [T]; -1 = skip the row.
            At most ring - window - block rows of a sequence may stand in one row block.
    Returns: (main_x [T, D], new State).
    """
    setting = _setting(config, profile, kernels, LOCAL_EXCHANGE)
    run, eps = kernels, config.rms_norm_eps
    first = params.draft[0]
    tile = kernels.row_tile or taps.shape[0]
    tiles = -(-taps.shape[0] // tile)
    padded = [pad_rows(x, tiles * tile) for x in (taps, positions, sequence + 1)]
    slots, ring = state.draft_window.shape[1:3]

    def step(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, window = carry
        x, where, owner = (lax.dynamic_slice_in_dim(a, number * tile, tile) for a in padded)
        main = run(row_dot, x, first["main_proj"], quantize_input=profile.quantize_activations)
        main = run(rms_norm, main, first["main_norm"], eps=eps)
        slot = jnp.where(owner > 0, owner - 1, slots)
        for stage, p in enumerate(params.draft):
            record = window_record(setting, p, main, where, 0)
            window = window.at[stage, slot, where % ring].set(record, mode="drop")
        return lax.dynamic_update_slice_in_dim(out, main, number * tile, 0), window

    empty = jnp.zeros((tiles * tile, config.hidden_size), profile.dtype)
    main_x, window = lax.fori_loop(0, tiles, step, (empty, state.draft_window))
    return main_x[: taps.shape[0]], dataclasses.replace(state, draft_window=window)


def draft_block(
    params: Params,
    state: State,
    anchors: jax.Array,
    starts: jax.Array,
    sequence: jax.Array,
    first: jax.Array,
    *,
    config: ModelConfig,
    profile: NumericsProfile,
    kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    exchange: Exchange = LOCAL_EXCHANGE,
    sample: SampleFn = greedy_sample,
) -> tuple[Drafts, State]:
    """Draft one block for each of N sequences.

    Args:
        anchors: int32 [N], the newest token, not yet processed by the backbone. starts: int32 [N], its
            position: context are the rows before it. sequence: int32 [N] slot, -1 = skip.
        first: int32 [N], lowest position that has a draft window row.
        sample: draws a token from the logits of one step.
    Returns: (Drafts, State); the block's own keys stay in the ring beyond the committed rows, where
        the true rows of those positions overwrite them.
    """
    setting = _setting(config, profile, kernels, exchange)
    block = config.dspark_block_size
    count = anchors.shape[0]
    tile = kernels.row_tile or count * block
    if block > tile:
        raise NotImplementedError(f"draft blocks of {block} rows do not fit a row tile of {tile}")
    group = tile // block
    tiles = -(-count // group)
    padded = [pad_rows(x, tiles * group) for x in (anchors, starts, sequence + 1, first)]

    def step(window: jax.Array, items: tuple[jax.Array, ...]) -> tuple[jax.Array, Drafts]:
        number, *facts = items
        some = dataclasses.replace(state, draft_window=window)
        return _draft_tile(setting, params, some, number * group, tuple(facts), tile, sample)

    stacked = [x.reshape(tiles, group) for x in padded]
    numbers = jnp.arange(tiles, dtype=jnp.int32)
    window, drafts = lax.scan(step, state.draft_window, (numbers, *stacked))
    drafts = jax.tree.map(lambda x: x.reshape(tiles * group, *x.shape[2:])[:count], drafts)
    return drafts, dataclasses.replace(state, draft_window=window)


def _draft_tile(
    setting: Setting,
    params: Params,
    state: State,
    number: jax.Array,
    facts: tuple[jax.Array, ...],
    tile: int,
    sample: SampleFn,
) -> tuple[jax.Array, Drafts]:
    """One tile of whole blocks: stages, head, then tokens one after the other."""
    config, run = setting.config, setting.kernels
    anchors, starts, owners, first = facts
    group, block = anchors.shape[0], config.dspark_block_size
    ids = jnp.full((group, block), config.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchors)
    offsets = jnp.arange(block, dtype=jnp.int32)

    def rows(x: jax.Array) -> jax.Array:
        return pad_rows(x.reshape(group * block), tile)

    positions = rows(starts[:, None] + offsets)
    starts_, owners_, first_ = (rows(jnp.repeat(x, block)) for x in (starts, owners, first))
    embedded = params.embed[rows(ids)].astype(setting.profile.dtype)
    streams = jnp.broadcast_to(embedded[:, None], (tile, config.hc_mult, config.hidden_size))
    pre = jnp.zeros((tile, config.hc_mult), jnp.float32).at[:, 0].set(1.0)
    window = state.draft_window
    for stage, p in enumerate(params.draft):
        streams, pre, window = _stage(setting, p, stage, streams, pre, window, positions, starts_, owners_, first_)
    last = params.draft[-1]
    hidden, base = project_logits(setting, params, last["norm"], streams, pre)
    hidden = hidden[: group * block].reshape(group, block, -1)
    base = base[: group * block].reshape(group, block, -1)

    tokens, logits, confidence = [], [], []
    previous = anchors
    numbers = number + jnp.arange(group, dtype=jnp.int32)
    for i in range(block):
        memory = last["markov_head.embed"][previous].astype(setting.profile.dtype)
        biased = base[:, i] + run(row_dot, memory, last["markov_head.head"], out_dtype=jnp.float32)
        joined = jnp.concatenate([hidden[:, i], memory], axis=1)
        score = run(row_dot, joined, last["confidence_head.proj"], out_dtype=jnp.float32)
        previous = sample(biased, numbers, i)
        tokens.append(previous)
        logits.append(biased)
        confidence.append(score[:, 0])
    stack = functools.partial(jnp.stack, axis=1)
    return window, Drafts(stack(tokens), stack(logits), base, stack(confidence), hidden)


def _stage(
    setting: Setting,
    p: LayerParams,
    stage: int,
    streams: jax.Array,
    pre: jax.Array,
    window: jax.Array,
    positions: jax.Array,
    starts: jax.Array,
    owners: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One draft stage on a tile of rows. All rows of a block see the same keys: the window before the
    block and the whole block, in both directions. owners: slot + 1, 0 = padding."""
    config, profile, run = setting.config, setting.profile, setting.kernels
    slots, ring = window.shape[1:3]
    mixed = mix(setting, p, "attn", streams)
    x = run(collapse_norm, streams, pre, p["attn_norm"], eps=config.rms_norm_eps)
    queries, _ = project_query(setting, p, x, positions, 0)
    record = window_record(setting, p, x, positions, 0)
    slot = jnp.where(owners > 0, owners - 1, slots)
    window = window.at[stage, slot, positions % ring].set(record, mode="drop")

    size, block = config.sliding_window, config.dspark_block_size
    wanted = starts[:, None] + jnp.arange(-size, block, dtype=jnp.int32)
    seen = (wanted >= jnp.maximum(first, 0)[:, None]) & (owners > 0)[:, None]
    base = (stage * slots + jnp.maximum(owners - 1, 0))[:, None] * ring
    heads = run(
        sparse_attention,
        queries,
        window.reshape(-1, window.shape[-1]),
        jnp.where(seen, base + wanted % ring, -1),
        None,
        None,
        p["attn.attn_sink"],
        window_format=profile.window_format,
        compressed_format=profile.compressed_format,
        scale=config.head_dim**-0.5,
    )
    y = project_output(setting, p, heads, positions, 0)
    streams, x, (last_pre, post, comb) = enter_experts(setting, p, y, streams, mixed)
    y, _, _ = mixture_of_experts(setting, p, x, None, config.dspark_num_experts_per_tok)
    return run(expand, y, streams, post, comb), last_pre, window
