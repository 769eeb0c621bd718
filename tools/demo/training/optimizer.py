"""AdamW with clipping, a cosine, and the rule that balances routing biases."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from deepinfer_jax.model.config import ModelConfig

from .weights import Weights, bias_names, declarations

BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8
CLIP_NORM = 1.0
TABLE_RATE = 2.0
"""Learning rate of Engram tables relative to the others: each row is seen rarely."""

OptimizerState = dict[str, dict[str, jax.Array]]
"""{"m": ..., "v": ...}, moments by weight name."""


def learning_rate(done: float, *, peak: float, floor: float) -> float:
    """Half a cosine from `peak` (done = 0) to `floor * peak` (done = 1)."""
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def start_moments(weights: Mapping[str, jax.Array]) -> OptimizerState:
    """Zero moments."""
    return {part: {name: jnp.zeros_like(w) for name, w in weights.items()} for part in ("m", "v")}


def apply_gradients(
    config: ModelConfig,
    weights: Mapping[str, jax.Array],
    gradients: Mapping[str, jax.Array],
    moments: OptimizerState,
    rate: jax.Array,
    step: jax.Array,
    weight_decay: float,
) -> tuple[Weights, OptimizerState, jax.Array]:
    """One AdamW step; step counts from 0 since the moments were zero. Returns also the gradients' norm.

    Weights of declarations that are initialised as "linear" decay. A step whose gradients are not finite
    changes nothing.
    """
    table = declarations(config)
    norm = jnp.sqrt(sum((jnp.sum(g * g) for g in gradients.values()), start=jnp.float32(0)))
    factor = jnp.minimum(1.0, CLIP_NORM / (norm + 1e-9))
    sound = jnp.isfinite(norm)
    count = step.astype(jnp.float32) + 1
    bias_1, bias_2 = 1 - BETA_1**count, 1 - BETA_2**count
    new: Weights = {}
    m_new, v_new = {}, {}
    for name, w in weights.items():
        parameter = table[name]
        g = gradients[name] * factor
        m = BETA_1 * moments["m"][name] + (1 - BETA_1) * g
        v = BETA_2 * moments["v"][name] + (1 - BETA_2) * g * g
        change = (m / bias_1) / (jnp.sqrt(v / bias_2) + EPSILON)
        decay = weight_decay if parameter.init == "linear" else 0.0
        own_rate = rate * (TABLE_RATE if parameter.storage == "fp8_row" else 1.0)
        new[name] = jnp.where(sound, w - own_rate * (change + decay * w), w)
        m_new[name] = jnp.where(sound, m, moments["m"][name])
        v_new[name] = jnp.where(sound, v, moments["v"][name])
    return new, {"m": m_new, "v": v_new}, norm


def balance_biases(config: ModelConfig, biases: Weights, load: jax.Array, phase: str, rate: jax.Array) -> Weights:
    """Raise the bias of experts that were chosen too rarely; load: [layers, E]. rate: size of the change."""
    change = rate * jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
    return {name: biases[name] + change[i] for i, name in enumerate(bias_names(config, phase))}
