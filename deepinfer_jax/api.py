"""The public functions: `generate`, `stream`, `score`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from deepinfer_jax.engine.driver import Driver
from deepinfer_jax.engine.request import Request, Sample
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.load import tokenizer_of
from deepinfer_jax.model.params import Params
from deepinfer_jax.outputs import Logprobs, RequestOutput, TokenEvent, Usage
from deepinfer_jax.prompt import Tokenizer, encode_completion, encode_conversation
from deepinfer_jax.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text or token ids, completed as they are, or messages of a conversation."""

Sampling = SamplingParams | Mapping[str, Any]


class GenerationError(ValueError):
    """Some prompts failed. `outputs` holds every result, in input order; failed ones carry `error`."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclasses.dataclass(frozen=True)
class Options:
    """How conversations are encoded; see `prompt.encode_conversation`."""

    tools: Sequence[Any] = ()
    thinking: bool | None = None
    reasoning_effort: int | str | None = None


def _as_list(prompts: Any) -> list[Any]:
    """One prompt gives a list of one."""
    if isinstance(prompts, str):
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
    params: Params, index: int, prompt: Any, sampling: SamplingParams, tokenizer: Tokenizer | None, options: Options
) -> Request:
    """Check and encode one prompt. Raises ValueError that says what is wrong with it."""
    _check_for_model(sampling, params, tokenizer)
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
    if len(ids) >= context:
        raise ValueError(f"the prompt has {len(ids)} tokens; the context of {context} leaves no room to generate")
    return Request(index, tuple(ids), sampling, tokenizer, text, output)


def _token_id(params: Params, place: int, value: Any) -> int:
    vocabulary = params.config.vocab_size
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < vocabulary:
        raise ValueError(f"token {place} is {value!r}; expected an id in 0..{vocabulary - 1}")
    return int(value)


def _make_requests(
    params: Params,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None,
    tokenizer: Tokenizer | None,
    options: Options,
    changes: Mapping[str, Any],
) -> tuple[list[Request], dict[int, str], int]:
    """(good requests, error of each bad prompt, number of prompts)."""
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
            requests.append(_make_request(params, index, prompt, chosen, tokenizer, options))
        except ValueError as error:  # PromptError and every check of ours
            errors[index] = f"prompt {index}: {error}"
    return requests, errors, len(listed)


def _output(request: Request, samples: Sequence[Sample]) -> RequestOutput:
    failed = next((s.error for s in samples if s.error), None)
    completions = () if failed else tuple(s.completion() for s in samples)
    top = request.sampling.prompt_logprobs
    logs = None if top is None or failed else samples[0].prompt_logs.finish(top)
    reasoning = sum(_reasoning_tokens(request, c.token_ids) for c in completions)
    usage = Usage(len(request.token_ids), sum(len(s.generated) for s in samples), reasoning)
    error = None if failed is None else f"prompt {request.index}: {failed}"
    return RequestOutput(request.text, request.token_ids, completions, usage, logs, error)


def _reasoning_tokens(request: Request, ids: Sequence[int]) -> int:
    """Tokens up to and with the one that closes the reasoning; all if none does."""
    if request.output is None or not request.output.stage.startswith("reasoning") or request.tokenizer is None:
        return 0
    closing = request.tokenizer.control_id("</think>")
    return ids.index(closing) + 1 if closing in ids else len(ids)


def _collect(driver: Driver, requests: Sequence[Request], errors: Mapping[int, str], count: int) -> list[RequestOutput]:
    by_request: dict[int, list[Sample]] = {request.index: [] for request in requests}
    for sample in driver.samples:
        by_request[sample.request.index].append(sample)
    good = {request.index: _output(request, by_request[request.index]) for request in requests}
    empty = Usage(0, 0)
    return [good.get(i) or RequestOutput(None, (), (), empty, None, errors[i]) for i in range(count)]


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
    Raises: TypeError for an unknown keyword, ValueError for bad input, GenerationError.
    """
    options = Options(tools, thinking, reasoning_effort)
    requests, bad, count = _make_requests(params, prompts, sampling, tokenizer, options, changes)
    if errors not in ("raise", "return"):
        raise ValueError(f"errors={errors!r} is unknown; choose 'raise' or 'return'")
    if bad and errors == "raise":
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]))
    driver = Driver(params, requests, kernels=kernels)
    with _progress(progress, len(driver.samples)) as bar:
        for event in driver.run():
            if on_token is not None:
                on_token(event)
            if event.finish_reason is not None and bar is not None:
                bar.update()
    outputs = _collect(driver, requests, bad, count)
    failed = [output.error for output in outputs if output.error]
    if failed and errors == "raise":
        raise GenerationError("; ".join(failed[:3]), outputs)
    return outputs


def stream(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tools: Sequence[Any] = (),
    thinking: bool | None = None,
    reasoning_effort: int | str | None = None,
    kernels: Kernels | None = None,
    **changes: Any,
) -> Iterator[TokenEvent]:
    """As `generate`, token by token. Closing the iterator ends the work and frees device memory."""
    options = Options(tools, thinking, reasoning_effort)
    requests, bad, _ = _make_requests(params, prompts, sampling, tokenizer, options, changes)
    if bad:
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]))
    driver = Driver(params, requests, kernels=kernels)

    def events() -> Iterator[TokenEvent]:
        yield from driver.run()
        failed = [f"prompt {s.request.index}: {s.error}" for s in driver.samples if s.error]
        if failed:
            raise GenerationError("; ".join(failed[:3]), _collect(driver, requests, {}, len(requests)))

    return events()


def score(
    params: Params,
    sequences: str | Sequence[int] | Sequence[str | Sequence[int]],
    top_k: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    kernels: Kernels | None = None,
) -> list[Logprobs]:
    """Log-probabilities of given tokens: the very bits that `generate` would report for them.

    Args:
        sequences: texts (BOS is put in front) or token ids; one sequence gives a list of one.
        top_k: how many of the most likely tokens to report beside each.
    Returns: one Logprobs per sequence; entry i-1 belongs to token i, given the tokens before it.
    """
    sampling = SamplingParams(prompt_logprobs=top_k, max_tokens=1)
    requests, bad, count = _make_requests(params, sequences, sampling, tokenizer, Options(), {})
    if bad:
        raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]).replace("prompt ", "sequence "))
    requests = [dataclasses.replace(request, score_only=True) for request in requests]
    driver = Driver(params, requests, kernels=kernels)
    for _ in driver.run():
        raise AssertionError("a sequence that is only scored generates nothing")
    outputs = _collect(driver, requests, {}, count)
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise GenerationError("; ".join(failed[:3]), outputs)
    return [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]


class _progress:
    """A tqdm bar on a terminal, or nothing."""

    def __init__(self, wanted: bool | None, count: int) -> None:
        self._wanted, self._count = wanted, count
        self._bar: Any = None

    def __enter__(self) -> Any:
        import sys

        shown = sys.stderr.isatty() and self._count > 1 if self._wanted is None else self._wanted
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=self._count, unit="sample", desc="generating")
        return self._bar

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
