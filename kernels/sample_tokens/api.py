"""Contract of `sample_tokens`: order of filters, draw and log-probabilities of one row of logits.

A row's result depends on its logits and its own controls only. The order is

    1. mask             tokens whose bit is clear get -inf (allowed ids, min_tokens, grammar)
    2. bias             added
    3. repetition       positive logits of tokens seen in prompt or output are divided, negative multiplied
    4. frequency        count in the output times the penalty is subtracted
    5. presence         the penalty is subtracted from tokens that are in the output
    6. temperature      0: the largest logit, ties to the lowest id, and nothing below applies
    7. top_k            tokens not below the k-th largest logit (ties with it stay)
    8. top_p            of those, the smallest set of largest logits whose mass reaches top_p; ties stay
    9. min_p            of those, tokens with at least min_p times the probability of the largest
   10. draw             argmax of logit / temperature + Gumbel noise, ties to the lowest id

Masses are integers (2^30 times the weight relative to the largest), so their sums do not depend on the
order of addition. The noise of a token is a function of (seed, sample index, absolute position, token id).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "sample_index",
        "position",
        "processed",
        "repetition",
        "presence",
        "frequency",
        "mask",
        "bias_ids",
        "bias",
        "prompt_seen",
        "output_counts",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Controls:
    """Per-row controls of T rows.

    temperature, top_p, min_p: float32 [T]. top_k: int32 [T], 0 = off. seed: uint32 [T, 2], high and
    low half. sample_index, position: int32 [T]; position is that of the token to be drawn.
    processed: bool [T], log-probabilities after all filters instead of the raw ones.
    repetition, presence, frequency: float32 [T], neutral at 1, 0, 0.
    mask: uint32 [T, ceil(V/32)], bit v%32 of word v//32 set = allowed. bias_ids: int32 [T, B], -1 = none;
    bias: float32 [T, B]. prompt_seen: bool [T, V]. output_counts: int32 [T, V].
    The last five may be None where no row needs them; that changes no bit of any row.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    sample_index: jax.Array
    position: jax.Array
    processed: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    mask: jax.Array | None = None
    bias_ids: jax.Array | None = None
    bias: jax.Array | None = None
    prompt_seen: jax.Array | None = None
    output_counts: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "logprobs", "top_ids", "top_logprobs", "valid"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampled:
    """token_ids: int32 [T]. logprobs: float32 [T]. top_ids, top_logprobs: [T, top], largest first, ties
    to the lowest id. valid: bool [T], False where the logits held NaN or +inf or nothing was allowed."""

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    valid: jax.Array


@contract("sample_tokens")
def sample_tokens(
    logits: jax.Array,
    controls: Controls,
    *,
    top: int = 0,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> Sampled:
    """Draw one token per row of float32 logits [T, V]; `top`: number of most likely tokens to report."""
    if logits.ndim != 2 or logits.dtype != jnp.float32 or controls.temperature.shape != logits.shape[:1]:
        raise ValueError(f"sample_tokens: logits {logits.dtype} {logits.shape} do not fit the controls")
    if not 0 <= top <= logits.shape[1]:
        raise ValueError(f"sample_tokens: top={top} is outside 0..{logits.shape[1]}")
    return implementation_module("sample_tokens", implementation).sample_tokens(logits, controls, top, row_tile)


@contract("sample_tokens")
def token_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    *,
    top: int = 0,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> Sampled:
    """Raw log-probabilities of given tokens int32 [T]: the very bits that `sample_tokens` reports."""
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_logprobs: logits {logits.shape} and tokens {token_ids.shape} do not fit")
    return implementation_module("sample_tokens", implementation).token_logprobs(logits, token_ids, top, row_tile)
