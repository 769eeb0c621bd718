"""The public functions: `generate`, `stream`, `score`. Each makes an engine for one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from deepinfer_jax.engine.engine import Call, Engine, GenerationError
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.kernels.dispatch import Implementation, Kernels
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE
from deepinfer_jax.outputs import Logprobs, RequestOutput, TokenEvent
from deepinfer_jax.prompt import Tokenizer
from deepinfer_jax.requests import Options, Prompt, Sampling, make_requests
from deepinfer_jax.sampling_params import SamplingParams

__all__ = ["Call", "Engine", "GenerationError", "Prompt", "Sampling", "generate", "score", "stream"]

_MIN_PAGES = 32


def _runtime(
    params: Params,
    requests: Sequence[Request],
    runtime: RuntimeConfig | None,
    implementation: Implementation | None,
    kernels: Kernels | None,
) -> RuntimeConfig:
    """Sizes for one call: few context sizes, so that few programs are compiled."""
    if runtime is not None and (kernels is not None or implementation is not None):
        raise ValueError("give implementation and kernels as fields of RuntimeConfig")
    if runtime is not None:
        return runtime
    context = params.config.max_position_embeddings
    longest = 1
    for request in requests:
        room = context - len(request.token_ids)
        limit = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        longest = max(longest, len(request.token_ids) + limit)
    pages = max(_MIN_PAGES, 1 << (-(-longest // PAGE) - 1).bit_length())
    return RuntimeConfig(context=min(context, pages * PAGE), implementation=implementation, kernels=kernels)


def generate(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tools: Sequence[Any] = (),
    thinking: bool | None = None,
    reasoning_effort: int | str | None = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    progress: bool | None = None,
    errors: Literal["raise", "return"] = "raise",
    runtime: RuntimeConfig | None = None,
    implementation: Implementation | None = None,
    kernels: Kernels | None = None,
    **changes: Any,
) -> list[RequestOutput]:
    """Generate for every prompt; results come in input order, one prompt gives a list of one.

    A request's tokens and log-probabilities depend on the weights, its prompt, its sampling parameters
    and the numerics profile only: never on the other prompts or on how the work is arranged.

    Args:
        params: from `load_params`.
        prompts: a text or token ids (completed as they are), a list of messages (a conversation, encoded
            by the V4.1 protocol), or a list of these.
        sampling: parameters for all prompts, or one per prompt; further keywords change single fields:
            `generate(params, "Hello", temperature=0, max_tokens=20)`.
        tokenizer: default: the one loaded with params.
        tools, thinking, reasoning_effort: for conversations.
        on_token: called with every TokenEvent as it appears.
        progress: show a bar; None = on a terminal, for more than one prompt.
        errors: "raise": a bad prompt raises before any device work, and one that fails later raises
            GenerationError, which holds all results; "return": its result carries `error`.
        runtime: sizes of the engine; they change speed and memory only.
        implementation: "xla", "mosaic_gpu" (docs/kernels.md) or None: chosen for the device and the model.
        kernels: implementation of each op by name, in place of `implementation`.
    Raises: TypeError for an unknown keyword, ValueError for bad input, GenerationError.
    """
    options = Options(tools, thinking, reasoning_effort)
    requests, bad, count = make_requests(params, prompts, sampling, tokenizer, options, changes)
    if bad and errors == "raise":
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]))
    with Engine(params, _runtime(params, requests, runtime, implementation, kernels), tokenizer=tokenizer) as engine:
        return engine.run(requests, bad, count, on_token=on_token, progress=progress, errors=errors)


def stream(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tools: Sequence[Any] = (),
    thinking: bool | None = None,
    reasoning_effort: int | str | None = None,
    runtime: RuntimeConfig | None = None,
    implementation: Implementation | None = None,
    kernels: Kernels | None = None,
    **changes: Any,
) -> Iterator[TokenEvent]:
    """As `generate`, token by token. Closing the iterator ends the work and frees device memory."""
    options = Options(tools, thinking, reasoning_effort)
    requests, bad, count = make_requests(params, prompts, sampling, tokenizer, options, changes)
    if bad:
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]))

    def events() -> Iterator[TokenEvent]:
        with Engine(
            params, _runtime(params, requests, runtime, implementation, kernels), tokenizer=tokenizer
        ) as engine:
            yield from engine.events(requests, count)

    return events()


def score(
    params: Params,
    sequences: str | Sequence[int] | Sequence[str | Sequence[int]],
    top_k: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    progress: bool | None = None,
    runtime: RuntimeConfig | None = None,
    implementation: Implementation | None = None,
    kernels: Kernels | None = None,
) -> list[Logprobs]:
    """Log-probabilities of given tokens: the very bits that `generate` would report for them.

    Args:
        sequences: texts (BOS is put in front) or token ids; one sequence gives a list of one.
        top_k: how many of the most likely tokens to report beside each.
    Returns: one Logprobs per sequence; entry i-1 belongs to token i, given the tokens before it.
    Raises: ValueError for bad input, GenerationError if a sequence's logits are not finite.
    """
    sampling = SamplingParams(prompt_logprobs=top_k, max_tokens=1)
    requests, bad, _ = make_requests(params, sequences, sampling, tokenizer, Options(), {}, whole=True)
    if bad:
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]).replace("prompt ", "sequence "))
    with Engine(params, _runtime(params, requests, runtime, implementation, kernels), tokenizer=tokenizer) as engine:
        requests = [dataclasses.replace(request, score_only=True) for request in requests]
        outputs = engine.run(requests, {}, len(requests), progress=progress)
    return [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
