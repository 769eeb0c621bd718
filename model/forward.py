"""The forward pass: one function for prefill, decode, verification and scoring.

Rows run through the encoder layers in blocks of `row_block`; at the border one gather keeps the rows
that can still matter, and those run through the decoder layers. Inside a block every floating-point
shape depends on the configuration and on `row_block` only, so a row's bits do not depend on what else
is in the call (design 2).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.mhc_mix import collapse_norm
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram import hash_rows, remember_tokens
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE, Exchange
from deepinfer_jax.model.flow import CAPTURES, Flow, Rows, Setting, rows_of
from deepinfer_jax.model.layer import LayerNumbers, apply_layer, make_source
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.plan import LayerKind, Segment, layer_plan
from deepinfer_jax.model.state import PAGE, Batch, State, pooling_sources, sources_by_ratio


@functools.partial(jax.tree_util.register_dataclass, data_fields=["logits", "taps", "captured"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outputs:
    """logits: float32 [L, V] of `logit_rows`. taps: [Rd, targets * D] of `decoder_rows` for the draft
    (zero columns without one). captured: name -> [layers, R, ...]. Padding rows hold anything finite."""

    logits: jax.Array
    taps: jax.Array
    captured: dict[str, jax.Array]


def forward(
    params: Params,
    state: State,
    batch: Batch,
    *,
    config: ModelConfig,
    profile: NumericsProfile,
    kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    exchange: Exchange = LOCAL_EXCHANGE,
    captures: Collection[str] = (),
    embed_all: bool = False,
) -> tuple[Outputs, State]:
    """Process the rows of a batch: append their cache entries and return the logits asked for.

    Args:
        params: weights; `config` must be theirs. state: donated by the caller's jit.
        batch: see `Batch`. Row counts must be multiples of `kernels.row_tile` (None: one whole block,
            differentiable, without the promise of equal bits at other row counts).
        profile: rounding rules; `state` must have been made for it.
        captures: names out of `CAPTURES` to record; recording changes no bit of anything else.
        embed_all: use `batch.embeddings` for every row, not only for image rows.
    Returns: (Outputs, new State).
    Raises: ValueError for an unknown capture or row counts that do not fit.
    """
    unknown = set(captures) - set(CAPTURES)
    if unknown:
        raise ValueError(f"captures: {sorted(unknown)} unknown; choose from {', '.join(CAPTURES)}")
    for name in ("token_ids", "decoder_rows", "logit_rows"):
        try:
            kernels.block_of(getattr(batch, name).shape[0])
        except ValueError as error:
            raise ValueError(f"batch.{name}: {error}") from None
    setting = Setting(config, profile, kernels, exchange, frozenset(captures))
    hashes = hash_rows(setting, params, batch, state)
    state = remember_tokens(batch, state) if params.engram_token_map is not None else state

    rows = rows_of(batch, jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32))
    flow = _start(setting, params, batch, state, embed_all)
    segments = list(zip(layer_plan(config), params.segments, strict=True))
    encoder = [item for item in segments if item[0].first_layer < config.decoder_start]
    decoder = [item for item in segments if item[0].first_layer >= config.decoder_start]
    for segment, weights in encoder:
        flow = _run_segment(setting, segment, weights, hashes, rows, flow)
    if decoder:
        flow = _run_source(setting, *decoder[0], rows, flow)

    flow, rows, hashes = _keep_decoder_rows(setting, batch, flow, hashes)
    for segment, weights in decoder:
        flow = _run_segment(setting, segment, weights, hashes, rows, flow)
    last = jnp.int32(config.num_hidden_layers)
    flow = flow.capture(setting, "streams", last, rows, flow.streams)
    flow = flow.capture(setting, "pre", last, rows, flow.pre)
    taps = jnp.moveaxis(flow.taps, 0, 1).reshape(flow.taps.shape[1], -1)
    logits = _head(setting, params, batch.logit_rows, flow)
    return Outputs(logits, taps, flow.captured), flow.state


# ---- rows in blocks -------------------------------------------------------------------------------


def _over_blocks(
    setting: Setting, rows: Rows, flow: Flow, hashes: jax.Array, body: Callable[[Rows, Flow, jax.Array], Flow]
) -> Flow:
    """Run `body` on each block of rows in order; blocks without a valid row at the end are skipped."""
    block = setting.kernels.block_of(rows.sequence.shape[0])
    if block is None or setting.kernels.one_block(rows.sequence.shape[0]):
        return body(rows, flow, hashes)
    used = jnp.max(jnp.where(rows.valid, jnp.arange(rows.sequence.shape[0]) + 1, 0))

    def step(number: jax.Array, whole: Flow) -> Flow:
        start = number * block

        def piece(x: jax.Array, axis: int = 0) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, block, axis)

        part = body(
            jax.tree.map(piece, rows),
            dataclasses.replace(
                whole,
                streams=piece(whole.streams),
                pre=piece(whole.pre),
                selection=piece(whole.selection),
                candidates=piece(whole.candidates),
                taps=piece(whole.taps, 1),
            ),
            piece(hashes, 1),
        )

        def put(target: jax.Array, value: jax.Array, axis: int = 0) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(target, value, start, axis)

        return dataclasses.replace(
            part,
            streams=put(whole.streams, part.streams),
            pre=put(whole.pre, part.pre),
            selection=put(whole.selection, part.selection),
            candidates=put(whole.candidates, part.candidates),
            taps=put(whole.taps, part.taps, 1),
        )

    return lax.fori_loop(0, (used + block - 1) // block, step, flow)


# ---- layers ---------------------------------------------------------------------------------------


def _layer_numbers(config: ModelConfig, ids: tuple[tuple[int, ...], ...]) -> LayerNumbers:
    """Stacked numbers [repeats, count] of a run's layers."""
    pooling = pooling_sources(config)
    by_ratio = sources_by_ratio(config)

    def source_id(layer: int) -> int:
        owner = config.kv_owner(layer)
        return 0 if owner is None else by_ratio[config.compress_ratios[layer]].index(owner)

    def place(values: tuple[int, ...], layer: int) -> int:
        return values.index(layer) if layer in values else len(values)

    def table(function: Callable[[int], int]) -> jax.Array:
        return jnp.asarray(np.array([[function(layer) for layer in row] for row in ids], np.int32))

    return LayerNumbers(
        layer=table(lambda layer: layer),
        source_id=table(source_id),
        pool_id=table(lambda layer: place(pooling, layer)),
        engram_id=table(lambda layer: place(config.engram_layer_ids, layer)),
        tap_id=table(lambda layer: place(config.dspark_target_layer_ids, layer)),
    )


def _first(tree: Any) -> Any:
    """First element of every leaf's leading axis. A single element is reshaped, which copies nothing:
    a slice of an Engram table would be a second table."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]) if leaf.shape[0] == 1 else leaf[0], tree)


def _scan(body: Callable[[Flow, tuple], Flow], flow: Flow, stacked: tuple, count: int) -> Flow:
    """Fold `body` over the leading axis of `stacked`; a single step is called without a loop."""
    if count == 1:
        return body(flow, _first(stacked))
    return lax.scan(lambda carry, item: (body(carry, item), None), flow, stacked)[0]


def _run_segment(
    setting: Setting,
    segment: Segment,
    weights: tuple[LayerParams, ...],
    hashes: jax.Array,
    rows: Rows,
    flow: Flow,
) -> Flow:
    """All layers of a plan segment: a scan over its repeats, inside it a scan over each run."""
    numbers = tuple(_layer_numbers(setting.config, segment.layer_ids(i)) for i in range(len(segment.runs)))

    def one_layer(kind: LayerKind) -> Callable[[Flow, tuple], Flow]:
        def body(current: Flow, item: tuple[LayerParams, LayerNumbers]) -> Flow:
            p, number = item
            return _over_blocks(
                setting,
                rows,
                current,
                hashes,
                lambda some, part, ids: apply_layer(setting, kind, p, number, ids, some, part),
            )

        return body

    def one_repeat(current: Flow, items: tuple) -> Flow:
        for run, item in zip(segment.runs, items, strict=True):
            current = _scan(one_layer(run.kind), current, item, run.count)
        return current

    return _scan(one_repeat, flow, tuple(zip(weights, numbers, strict=True)), segment.repeats)


def _run_source(setting: Setting, segment: Segment, weights: tuple[LayerParams, ...], rows: Rows, flow: Flow) -> Flow:
    """Cache entries of the decoder's key-value source for all rows, before rows are dropped."""
    kind = segment.runs[0].kind
    p = _first(_first(weights[0]))
    numbers = _first(_first(_layer_numbers(setting.config, segment.layer_ids(0))))
    none = jnp.zeros((0, rows.sequence.shape[0], 0), jnp.int32)
    return _over_blocks(
        setting, rows, flow, none, lambda some, part, _: make_source(setting, kind, p, numbers, some, part)
    )


# ---- ends -----------------------------------------------------------------------------------------


def _start(setting: Setting, params: Params, batch: Batch, state: State, embed_all: bool) -> Flow:
    """Embedded rows copied to every stream, one-hot collapse weights, empty buffers."""
    config, dtype = setting.config, setting.profile.dtype
    count = batch.token_ids.shape[0]
    embedded = params.embed[batch.token_ids].astype(dtype)
    if batch.embeddings is not None:
        given = batch.embeddings.astype(dtype)
        embedded = given if embed_all else jnp.where(batch.image_mask[:, None], given, embedded)
    streams = jnp.broadcast_to(embedded[:, None], (count, config.hc_mult, config.hidden_size))
    pre = jnp.zeros((count, config.hc_mult), jnp.float32).at[:, 0].set(1.0)
    return Flow(
        streams=streams,
        pre=pre,
        selection=jnp.full((count, config.index_topk), -1, jnp.int32),
        candidates=jnp.zeros((count, _candidate_columns(config, batch)), bool),
        taps=jnp.zeros((len(config.dspark_target_layer_ids), count, config.hidden_size), dtype),
        captured=_capture_buffers(setting, batch, state),
        state=state,
    )


def _candidate_columns(config: ModelConfig, batch: Batch) -> int:
    """Blocks that the candidate source may have: those of the page table's capacity."""
    if not config.kv_source_layer_ids:
        return 0
    ratio = config.compress_ratios[config.kv_source_layer_ids[-1]]
    entries = batch.page_table.shape[1] * (PAGE // ratio)
    return -(-entries // config.candidate_block_size)


def _capture_buffers(setting: Setting, batch: Batch, state: State) -> dict[str, jax.Array]:
    config, dtype = setting.config, setting.profile.dtype
    rows, layers = batch.token_ids.shape[0], config.num_hidden_layers
    hidden = (layers, rows, config.hidden_size)
    entries = max((pool.kv.shape[2] for pool in state.pages.values()), default=0) * batch.page_table.shape[1]
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
        "streams": ((layers + 1, rows, config.hc_mult, config.hidden_size), dtype),
        "pre": ((layers + 1, rows, config.hc_mult), jnp.float32),
        "attention_input": (hidden, dtype),
        "attention_output": (hidden, dtype),
        "ffn_input": (hidden, dtype),
        "ffn_output": (hidden, dtype),
        "router_ids": ((layers, rows, config.num_experts_per_tok), jnp.int32),
        "router_weights": ((layers, rows, config.num_experts_per_tok), jnp.float32),
        "index_scores": ((layers, rows, entries), jnp.float32),
        "selection": ((layers, rows, config.index_topk), jnp.int32),
        "candidates": ((layers, rows, _candidate_columns(config, batch)), jnp.bool_),
        "engram_rows": ((layers, rows, config.engram_columns), jnp.int32),
        "engram_gate": ((layers, rows, config.hc_mult), jnp.float32),
    }
    return {name: jnp.zeros(*shapes[name]) for name in sorted(setting.captures)}


def _keep_decoder_rows(setting: Setting, batch: Batch, flow: Flow, hashes: jax.Array) -> tuple[Flow, Rows, jax.Array]:
    """The gather at the border. Selections start anew: the first decoder layer makes its own."""
    config = setting.config
    numbers = batch.decoder_rows
    rows = rows_of(batch, numbers)
    safe = jnp.maximum(numbers, 0)
    kept = dataclasses.replace(
        flow,
        streams=flow.streams[safe],
        pre=flow.pre[safe],
        selection=jnp.full((numbers.shape[0], config.index_topk), -1, jnp.int32),
        candidates=jnp.zeros((numbers.shape[0], flow.candidates.shape[1]), bool),
        taps=flow.taps[:, safe],
    )
    return kept, rows, hashes[:, safe]


def head_column_tile(config: ModelConfig) -> int:
    """Width of the vocabulary pieces in which the head is multiplied: it divides the share of every
    power-of-two number of devices up to 8 (small vocabularies) or 256."""
    devices = 256 if config.vocab_size >= 1 << 16 else 8
    return config.vocab_size // int(np.gcd(config.vocab_size, devices))


def project_logits(
    setting: Setting, params: Params, norm: jax.Array, streams: jax.Array, pre: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(collapsed hidden [T, D] before the norm, float32 logits [T, V])."""
    config, run = setting.config, setting.kernels
    hidden = run(collapse_norm, streams, pre, None, eps=config.rms_norm_eps)
    normed = run(collapse_norm, streams, pre, norm, eps=config.rms_norm_eps)

    def project(x: jax.Array) -> jax.Array:
        return run(row_dot, x, params.head, out_dtype=jnp.float32, column_tile=head_column_tile(config))

    return hidden, setting.exchange.logits(project, normed)


def _head(setting: Setting, params: Params, logit_rows: jax.Array, flow: Flow) -> jax.Array:
    """Logits of the wanted rows, block by block."""
    safe = jnp.maximum(logit_rows, 0)
    streams, pre = flow.streams[safe], flow.pre[safe]
    count = logit_rows.shape[0]
    block = setting.kernels.block_of(count)
    if block is None or setting.kernels.one_block(count):
        return project_logits(setting, params, params.norm, streams, pre)[1]
    used = jnp.max(jnp.where(logit_rows >= 0, jnp.arange(count) + 1, 0))

    def step(number: jax.Array, logits: jax.Array) -> jax.Array:
        start = number * block
        rows = lax.dynamic_slice_in_dim(streams, start, block)
        factors = lax.dynamic_slice_in_dim(pre, start, block)
        part = project_logits(setting, params, params.norm, rows, factors)[1]
        return lax.dynamic_update_slice_in_dim(logits, part, start, 0)

    empty = jnp.zeros((count, setting.config.vocab_size), jnp.float32)
    return lax.fori_loop(0, (used + block - 1) // block, step, empty)
