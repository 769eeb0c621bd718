"""Compiled steps: one optimiser step of a phase, and evaluation of held-out rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.model.config import ModelConfig

from .forward import backbone, setting_of
from .objectives import PHASES, Metrics, backbone_loss, choose_anchors, documents_of, draft_loss
from .optimizer import OptimizerState, apply_gradients, balance_biases
from .weights import Weights, bias_names, forward_values, trained_names

WEIGHT_DECAY = {"p1": 0.1, "p2": 0.1, "p3": 0.0}
BIAS_STEP = {"p1": 2e-3, "p2": 1e-3, "p3": 2e-3}

ANCHORS = 64
"""Draft blocks per row and step."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["trained", "biases", "moments", "step"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes. step: int32, steps since the moments were zero."""

    trained: Weights
    biases: Weights
    moments: OptimizerState
    step: jax.Array


def split_weights(
    config: ModelConfig, weights: Mapping[str, Any], phase: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(trained, biases, frozen) of a phase: frozen are the backbone weights that p3 only reads."""
    trained = {name: weights[name] for name in trained_names(config, phase)}
    biases = {name: weights[name] for name in bias_names(config, phase)}
    frozen = {}
    if phase == "p3":
        names = (*trained_names(config, "p1"), *bias_names(config, "p1"))
        frozen = {name: weights[name] for name in names}
    return trained, biases, frozen


def _rows(block: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(block, index, keepdims=False).astype(jnp.int32)


def _frozen_backbone(
    config: ModelConfig, frozen: Mapping[str, jax.Array], token_map: jax.Array, tokens: jax.Array
) -> tuple[Weights, Any]:
    phase = PHASES["p3"]
    values = jax.tree.map(lax.stop_gradient, forward_values(config, frozen, phase.quantize))
    setting, documents = setting_of(config, phase.profile), documents_of(config, tokens)
    hidden = backbone(setting, values, token_map, tokens[:, :-1], attention=phase.attention, documents=documents)
    return values, jax.tree.map(lax.stop_gradient, hidden)


def make_step(config: ModelConfig, phase_name: str, anchors: int = ANCHORS) -> Callable[..., Any]:
    """(TrainState, frozen, token_map, tokens [S, B, T + 1], weights of the same shape, index, rate) ->
    (TrainState, metrics)."""
    phase = PHASES[phase_name]

    def loss_of(
        trained: Weights,
        biases: Weights,
        frozen: Weights,
        token_map: jax.Array,
        tokens: jax.Array,
        counts: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        if phase_name != "p3":
            noise = jax.random.fold_in(jax.random.key(21), step)
            return backbone_loss(config, phase, {**trained, **biases}, token_map, tokens, counts, key=noise)
        values, hidden = _frozen_backbone(config, frozen, token_map, tokens)
        key = jax.random.fold_in(jax.random.key(20), step)
        places = choose_anchors(key, counts, anchors, config.dspark_block_size)
        return draft_loss(config, phase, {**trained, **biases}, values, hidden, tokens, counts, places)

    def step(
        state: TrainState,
        frozen: Weights,
        token_map: jax.Array,
        token_block: jax.Array,
        weight_block: jax.Array,
        index: jax.Array,
        rate: jax.Array,
    ) -> tuple[TrainState, Metrics]:
        tokens, counts = _rows(token_block, index), _rows(weight_block, index)
        gradient = jax.grad(loss_of, has_aux=True)
        gradients, (metrics, load) = gradient(
            state.trained, state.biases, frozen, token_map, tokens, counts, state.step
        )
        trained, moments, norm = apply_gradients(
            config, state.trained, gradients, state.moments, rate, state.step, WEIGHT_DECAY[phase_name]
        )
        biases = balance_biases(config, state.biases, load, phase_name, jnp.float32(BIAS_STEP[phase_name]))
        metrics = {**metrics, "gradient_norm": norm}
        return TrainState(trained, biases, moments, state.step + 1), metrics

    return step


def make_evaluation(config: ModelConfig, phase_name: str, anchors: int = ANCHORS) -> Callable[..., Metrics]:
    """(trained and biases, frozen, token_map, tokens [B, T + 1], weights) -> metrics of one batch."""
    phase = PHASES[phase_name]

    def evaluate(
        weights: Weights, frozen: Weights, token_map: jax.Array, tokens: jax.Array, counts: jax.Array
    ) -> Metrics:
        tokens, counts = tokens.astype(jnp.int32), counts.astype(jnp.int32)
        if phase_name != "p3":
            measure = phase.attention == "dense"
            return backbone_loss(config, phase, weights, token_map, tokens, counts, measure=measure)[1][0]
        values, hidden = _frozen_backbone(config, frozen, token_map, tokens)
        places = choose_anchors(jax.random.key(30), counts, anchors, config.dspark_block_size)
        return draft_loss(config, phase, weights, values, hidden, tokens, counts, places)[1][0]

    return evaluate
