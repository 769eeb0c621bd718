"""From what a caller passes to checked requests, and from finished samples to outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.engine.request import Request, Sample
from deepinfer_jax.load import tokenizer_of
from deepinfer_jax.model.params import Params
from deepinfer_jax.outputs import RequestOutput, Usage
from deepinfer_jax.prompt import Tokenizer, encode_completion, encode_conversation
from deepinfer_jax.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text or token ids, completed as they are, or messages of a conversation."""

Sampling = SamplingParams | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """How conversations are encoded; see `prompt.encode_conversation`."""

    tools: Sequence[Any] = ()
    thinking: bool | None = None
    reasoning_effort: int | str | None = None


def _as_list(prompts: Any) -> list[Any]:
    """One prompt gives a list of one; what is no prompt is refused later, with its number."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(p, int | np.integer) and not isinstance(p, bool) for p in prompts):
        return [prompts]
    if prompts and all(isinstance(p, Mapping) or hasattr(p, "role") for p in prompts):
        return [prompts]
    return prompts


def _check_for_model(sampling: SamplingParams, params: Params, tokenizer: Tokenizer | None) -> None:
    vocabulary = params.config.vocab_size
    ids = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
    }
    for name, values in ids.items():
        for value in values:
            if not 0 <= value < vocabulary:
                raise ValueError(f"{name}: id {value} is outside 0..{vocabulary - 1}")
    if sampling.stop and tokenizer is None:
        raise ValueError("stop: strings need a tokenizer; pass tokenizer= or use stop_token_ids")


def _make_request(
    params: Params,
    index: int,
    prompt: Any,
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    options: Options,
    whole: bool,
) -> Request:
    """Check and encode one prompt. Raises ValueError that says what is wrong with it."""
    _check_for_model(sampling, params, tokenizer)
    if isinstance(prompt, Mapping) or hasattr(prompt, "role"):
        raise ValueError("a single message; a conversation is a list of messages: [message]")
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise ValueError(f"{prompt!r} is no prompt; expected a text, a list of token ids, or a list of messages")
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    text, output = None, None
    conversation = not isinstance(prompt, str) and any(isinstance(p, Mapping) or hasattr(p, "role") for p in prompt)
    if isinstance(prompt, str) or conversation:
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; pass tokenizer= or token ids")
        if isinstance(prompt, str):
            if prompt == "":
                raise ValueError("the prompt is empty")
            encoded = encode_completion(tokenizer, prompt)
        else:
            encoded = encode_conversation(
                tokenizer,
                prompt,
                tools=options.tools,
                thinking=options.thinking,
                reasoning_effort=options.reasoning_effort,
            )
            output = encoded.output
        ids, text = encoded.token_ids, prompt if isinstance(prompt, str) else encoded.text
    else:
        ids = tuple(_token_id(params, i, value) for i, value in enumerate(prompt))
        text = tokenizer.decode(ids) if tokenizer and all(i < tokenizer.vocab_size for i in ids) else None
    if not ids:
        raise ValueError("the prompt is empty")
    context = params.config.max_position_embeddings
    if whole and len(ids) > context:
        raise ValueError(f"{len(ids)} tokens do not fit the model's context of {context}")
    if not whole and len(ids) >= context:
        raise ValueError(f"the prompt has {len(ids)} tokens; the context of {context} leaves no room to generate")
    return Request(index, tuple(ids), sampling, tokenizer, text, output)


def _token_id(params: Params, place: int, value: Any) -> int:
    vocabulary = params.config.vocab_size
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < vocabulary:
        raise ValueError(f"token {place} is {value!r}; expected an id in 0..{vocabulary - 1}")
    return int(value)


def make_requests(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None,
    tokenizer: Tokenizer | None,
    options: Options,
    changes: Mapping[str, Any],
    *,
    whole: bool = False,
) -> tuple[list[Request], dict[int, str], int]:
    """(good requests, error of each bad prompt, number of prompts).

    whole: prompts are only scored and may fill the context.
    """
    listed = _as_list(prompts)
    if isinstance(sampling, Sequence):
        if len(sampling) != len(listed):
            raise ValueError(f"{len(sampling)} sampling parameters for {len(listed)} prompts")
        each: list[Any] = list(sampling)
    else:
        each = [sampling] * len(listed)
    requests: list[Request] = []
    errors: dict[int, str] = {}
    tokenizer = tokenizer or tokenizer_of(params)
    for index, (prompt, given) in enumerate(zip(listed, each, strict=True)):
        try:
            chosen = SamplingParams.make(given, **changes)
            requests.append(_make_request(params, index, prompt, chosen, tokenizer, options, whole))
        except ValueError as error:  # PromptError and every check of ours
            errors[index] = f"prompt {index}: {error}"
    return requests, errors, len(listed)


def request_output(request: Request, samples: Sequence[Sample]) -> RequestOutput:
    failed = next((s.error for s in samples if s.error), None)
    completions = () if failed else tuple(s.completion() for s in samples)
    top = request.sampling.prompt_logprobs
    logs = None if top is None or failed else samples[0].prompt_logs.finish(top)
    reasoning = sum(_reasoning_tokens(request, c.token_ids) for c in completions)
    cached = sum(s.cached_tokens for s in samples)
    usage = Usage(len(request.token_ids), sum(len(s.generated) for s in samples), reasoning, cached)
    error = None if failed is None else f"prompt {request.index}: {failed}"
    return RequestOutput(request.text, request.token_ids, completions, usage, logs, error)


def _reasoning_tokens(request: Request, ids: Sequence[int]) -> int:
    """Tokens up to and with the one that closes the reasoning; all if none does."""
    if request.output is None or not request.output.stage.startswith("reasoning") or request.tokenizer is None:
        return 0
    closing = request.tokenizer.control_id("</think>")
    return ids.index(closing) + 1 if closing in ids else len(ids)
