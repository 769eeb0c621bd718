"""Compiled steps. A step of the engine is two launches: forward, then sample."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.sample_tokens import Controls, Sampled, sample_tokens, token_logprobs
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, State


@functools.lru_cache(maxsize=16)
def forward_program(config: ModelConfig, profile: NumericsProfile, kernels: Kernels) -> Callable[..., Any]:
    """(params, state, batch) -> (logits float32 [L, V], state); the state is donated."""

    def step(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
        outputs, state = forward(params, state, batch, config=config, profile=profile, kernels=kernels)
        return outputs.logits, state

    return jit(step, donate_argnums=1)


@functools.lru_cache(maxsize=16)
def sample_program(kernels: Kernels, top: int) -> Callable[..., Sampled]:
    """(logits [L, V], rows int32 [T], controls of T rows) -> Sampled of T rows."""

    def sample(logits: jax.Array, rows: jax.Array, controls: Controls) -> Sampled:
        return kernels(sample_tokens, logits[rows], controls, top=top)

    return jit(sample)


@functools.lru_cache(maxsize=16)
def score_program(kernels: Kernels, top: int) -> Callable[..., Sampled]:
    """(logits [L, V], token ids int32 [L]) -> raw log-probabilities of the tokens."""

    def score(logits: jax.Array, token_ids: jax.Array) -> Sampled:
        return kernels(token_logprobs, logits, token_ids, top=top)

    return jit(score)
