"""Portable mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.expert_mlp.api import ExpertRows
from deepinfer_jax.kernels.quantization import QuantTensor, quantize_dequantize_fp8
from deepinfer_jax.kernels.row_dot.xla import dot, weight_values
from deepinfer_jax.kernels.tiling import tile_rows
from deepinfer_jax.kernels.top_k.xla import order_key

Weight = jax.Array | QuantTensor


def scores_of(logits: jax.Array) -> jax.Array:
    """sqrt(softplus(z)); the log1p form keeps exp(z/2) for very negative z."""
    return jnp.sqrt(jnp.maximum(logits, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))


def route(
    logits: jax.Array,
    bias: jax.Array,
    experts_per_token: int,
    normalize: bool,
    scale: float,
    temperature: float,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array]:
    """See the contract in `api.py`."""

    def tile(z: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = scores_of(z if temperature == 1 else z / temperature)
        # Integer keys: the choice cannot depend on how a backend compares or sorts floats.
        _, ids = lax.top_k(order_key(lax.stop_gradient(scores + b)), experts_per_token)
        ids = jnp.sort(ids, axis=-1)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if normalize and experts_per_token > 1:
            total = weights[:, 0]
            for i in range(1, experts_per_token):
                total = total + weights[:, i]
            weights = weights / (total[:, None] + 1e-20)
        return ids, weights * scale

    return tile_rows(tile, row_tile, logits, bias)


def activate(gate: jax.Array, up: jax.Array, weight: jax.Array | None, limit: float, dtype: DTypeLike) -> jax.Array:
    """Clamped SwiGLU in float32 with the routing weight [T, 1]; one rounding to dtype."""
    g = jnp.minimum(gate.astype(jnp.float32), limit)
    hidden = g * jax.nn.sigmoid(g) * jnp.clip(up.astype(jnp.float32), -limit, limit)
    return (hidden if weight is None else weight * hidden).astype(dtype)


def _quantized(x: jax.Array, enabled: bool) -> jax.Array:
    return quantize_dequantize_fp8(x) if enabled else x


def gated_mlp(
    x: jax.Array, weight: jax.Array | None, w1: Weight, w3: Weight, w2: Weight, limit: float, quantize: bool
) -> jax.Array:
    """One expert on [T, D]; x is already quantised for w1 and w3."""
    dtype = x.dtype
    gate = dot(x, weight_values(w1, dtype)).astype(dtype)
    up = dot(x, weight_values(w3, dtype)).astype(dtype)
    hidden = activate(gate, up, weight, limit, dtype)
    return dot(_quantized(hidden, quantize), weight_values(w2, dtype)).astype(dtype)


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    quantize_input: bool,
    row_tile: int | None,
) -> ExpertRows:
    """See the contract in `api.py`.

    Walks over all experts; an expert that no row of the tile chose is skipped. Rows that did not
    choose it are computed with weight zero and not written.
    """

    def tile(rows: jax.Array, ids: jax.Array, factors: jax.Array) -> jax.Array:
        operand = _quantized(rows, quantize_input)

        def one(e: jax.Array, out: jax.Array) -> jax.Array:
            chosen = ids == e
            factor = jnp.max(jnp.where(chosen, factors, 0.0), axis=1, keepdims=True)
            y = gated_mlp(operand, factor, w1[e], w3[e], w2[e], limit, quantize_input)
            return jnp.where(chosen[:, :, None], y[:, None, :], out)

        def step(out: jax.Array, e: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond(jnp.any(ids == e), lambda o: one(e, o), lambda o: o, out), None

        empty = jnp.zeros((*ids.shape, rows.shape[1]), rows.dtype)
        return lax.scan(step, empty, jnp.arange(w1.shape[0], dtype=jnp.int32))[0]

    return ExpertRows(tile_rows(tile, row_tile, x, expert_ids, weights))


def shared_mlp(
    x: jax.Array, w1: Weight, w3: Weight, w2: Weight, limit: float, quantize_input: bool, row_tile: int | None
) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array) -> jax.Array:
        return gated_mlp(_quantized(rows, quantize_input), None, w1, w3, w2, limit, quantize_input)

    return tile_rows(tile, row_tile, x)


def combine_experts(rows: ExpertRows, shared: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""

    def tile(outputs: jax.Array, other: jax.Array) -> jax.Array:
        total = outputs[:, 0].astype(jnp.float32)
        for i in range(1, outputs.shape[1]):
            total = total + outputs[:, i].astype(jnp.float32)
        return (total + other.astype(jnp.float32)).astype(other.dtype)

    return tile_rows(tile, row_tile, rows.in_order, shared)
