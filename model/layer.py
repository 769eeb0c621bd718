"""One layer on one block of rows: Engram, attention and experts around the residual streams."""

from __future__ import annotations

import dataclasses
import functools

import jax

from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand, expand_collapse_norm_quant, mhc_mix, stream_mean
from deepinfer_jax.kernels.mhc_mix.api import Mix
from deepinfer_jax.model.attention import attention
from deepinfer_jax.model.compressor import compress
from deepinfer_jax.model.engram import apply_engram
from deepinfer_jax.model.flow import Flow, Rows, Setting
from deepinfer_jax.model.moe import mixture_of_experts
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.plan import LayerKind


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layer", "source_id", "pool_id", "engram_id", "tap_id"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class LayerNumbers:
    """What differs between layers of one kind, int32: layer id, number of its source in the ratio's page
    pool, number among pooling sources, number among Engram layers, place of its tap (out of range = none)."""

    layer: jax.Array
    source_id: jax.Array
    pool_id: jax.Array
    engram_id: jax.Array
    tap_id: jax.Array


def mix(setting: Setting, p: LayerParams, which: str, streams: jax.Array) -> Mix:
    """Hyper-connection coefficients (pre, post, comb) of sublayer `which` ("attn" or "ffn")."""
    config = setting.config
    return setting.kernels(
        mhc_mix,
        streams,
        p[f"hc_{which}_fn"],
        p[f"hc_{which}_base"],
        p[f"hc_{which}_scale"],
        iterations=config.hc_sinkhorn_iters,
        norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
    )


def enter_experts(
    setting: Setting, p: LayerParams, y: jax.Array, streams: jax.Array, mixed: Mix
) -> tuple[jax.Array, jax.Array, Mix]:
    """The boundary inside a layer, from the attention's output y [T, D] and its coefficients.

    Returns: (streams with y in them, input of the experts [T, D], coefficients of that sublayer).
    """
    config = setting.config
    pre, post, comb = mixed
    streams, x, _, mixed = setting.kernels(
        expand_collapse_norm_quant,
        y,
        streams,
        post,
        comb,
        pre,
        p["ffn_norm"],
        p["hc_ffn_fn"],
        p["hc_ffn_base"],
        p["hc_ffn_scale"],
        iterations=config.hc_sinkhorn_iters,
        norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
    )
    return streams, x, mixed


def attention_input(setting: Setting, p: LayerParams, flow: Flow) -> jax.Array:
    """Collapsed and normed input of the attention sublayer [T, D]."""
    return setting.kernels(collapse_norm, flow.streams, flow.pre, p["attn_norm"], eps=setting.config.rms_norm_eps)


def make_source(
    setting: Setting, kind: LayerKind, p: LayerParams, numbers: LayerNumbers, rows: Rows, flow: Flow
) -> Flow:
    """Only the part of a key-value source that later rows need: its cache entries (stage B)."""
    x = attention_input(setting, p, flow)
    state = compress(setting, p, x, rows, flow.state, kind.compress_ratio, numbers.source_id, numbers.pool_id)
    return dataclasses.replace(flow, state=state)


def apply_layer(
    setting: Setting,
    kind: LayerKind,
    p: LayerParams,
    numbers: LayerNumbers,
    engram_row_ids: jax.Array,
    rows: Rows,
    flow: Flow,
) -> Flow:
    """Run one layer. flow holds the arrays of these rows; `engram_row_ids` is [Engram layers, T, columns].

    A decoder key-value source has made its entries for all rows before (`make_source`).
    """
    run, config, layer = setting.kernels, setting.config, numbers.layer
    flow = flow.capture(setting, "streams", layer, rows, flow.streams)
    flow = flow.capture(setting, "pre", layer, rows, flow.pre)
    if kind.engram:
        flow = apply_engram(setting, p, engram_row_ids[numbers.engram_id], rows, flow, layer)
    if kind.decoder and config.has_draft:
        taps = flow.taps.at[numbers.tap_id].set(run(stream_mean, flow.streams), mode="drop")
        flow = dataclasses.replace(flow, taps=taps)
    if kind.kv_source and not kind.decoder:
        flow = make_source(setting, kind, p, numbers, rows, flow)

    mixed = mix(setting, p, "attn", flow.streams)
    x = attention_input(setting, p, flow)
    y, flow = attention(setting, kind, p, x, rows, flow, layer, numbers.source_id)
    flow = flow.capture(setting, "attention_input", layer, rows, x)
    flow = flow.capture(setting, "attention_output", layer, rows, y)
    streams, x, (next_pre, post, comb) = enter_experts(setting, p, y, flow.streams, mixed)
    y, ids, weights = mixture_of_experts(setting, p, x, rows.image, config.num_experts_per_tok)
    flow = flow.capture(setting, "ffn_input", layer, rows, x)
    flow = flow.capture(setting, "ffn_output", layer, rows, y)
    flow = flow.capture(setting, "router_ids", layer, rows, ids)
    flow = flow.capture(setting, "router_weights", layer, rows, weights)
    return dataclasses.replace(flow, streams=run(expand, y, streams, post, comb), pre=next_pre)
