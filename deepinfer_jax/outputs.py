"""Results of generation. No times and no random ids: equal requests give equal results."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from deepinfer_jax.prompt import ToolCall

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


def _plain(value: Any) -> Any:
    """A comparable form: arrays by dtype, shape and bytes, so that equality means equal bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value


class _BitEquality:
    """Equality of dataclasses that hold arrays."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(_plain(getattr(self, name)) == _plain(getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, eq=False)
class Logprobs(_BitEquality):
    """Log-probabilities of T tokens, natural logarithm.

    token_logprobs: float32 [T]. top_ids: int32 [T, k], top_logprobs: float32 [T, k], most likely first.
    """

    token_logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def __len__(self) -> int:
        return len(self.token_logprobs)


@dataclasses.dataclass(frozen=True, eq=False)
class Completion(_BitEquality):
    """One sample of one prompt.

    text: what the model wrote, as text, without the stop string, the end token and what follows.
    token_ids: every generated token, the ending one included.
    logprobs: float32 per generated token, None unless asked for; top_ids, top_logprobs: [T, k].
    finish_reason: "stop" (end token, stop id or string), "length", "tool_calls", "cancelled", "error".
    stop_reason: the stop string or id that ended it; None for the end token or the length.
    content, reasoning, tool_calls: the parse of a conversation's answer. For a plain completion content
        is the text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one request, summed over its samples.

    cached_tokens: prompt rows that were not processed because their prefix was cached. It depends on what
    ran before, so it is no part of equality.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class RequestOutput(_BitEquality):
    """Everything about one prompt. `outputs` has one entry per sample; empty when `error` is set.

    prompt: the prompt as text, None when it was given as ids and no tokenizer is known.
    prompt_logprobs: of prompt tokens 1.., row i-1 belongs to token i.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: Logprobs | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        if not self.outputs:
            raise ValueError(f"this prompt has no output: {self.error}")
        return self.outputs[0].text


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One generated token, as it appears.

    prompt_index, sample_index: which prompt and sample. token_id: the token. text: the text that became
    certain with it (may be empty: unfinished characters and possible stop strings are held back).
    finish_reason: set with the last token. logprob: None unless logprobs were asked for.
    """

    prompt_index: int
    sample_index: int
    token_id: int
    text: str
    logprob: float | None = None
    finish_reason: FinishReason | None = None
