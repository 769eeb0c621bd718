"""One request and the samples that are being made of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from deepinfer_jax.engine.text import TextStream
from deepinfer_jax.outputs import Completion, FinishReason, Logprobs
from deepinfer_jax.prompt import OutputStart, Tokenizer
from deepinfer_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked prompt.

    index: its place among the caller's prompts. token_ids: at least one. text: the prompt as text, if known.
    output: where in the protocol the answer begins, for a conversation. score_only: generate nothing.
    """

    index: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tokenizer: Tokenizer | None
    text: str | None = None
    output: OutputStart | None = None
    score_only: bool = False


class Logs:
    """Log-probabilities (natural logarithm) that arrive row by row: of the token, and of the most likely ones."""

    def __init__(self) -> None:
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, logprob: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, top: int) -> None:
        self._rows.append((logprob, top_ids[:top], top_logprobs[:top]))

    def __len__(self) -> int:
        return len(self._rows)

    def finish(self, top: int) -> Logprobs:
        count = len(self._rows)
        return Logprobs(
            np.array([row[0] for row in self._rows], np.float32),
            np.array([row[1] for row in self._rows], np.int32).reshape(count, top),
            np.array([row[2] for row in self._rows], np.float32).reshape(count, top),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class FixedControls:
    """What a sample's sampling parameters say, in the order of the arrays of `controls.ControlArrays`."""

    numbers: tuple[float, float, float, float, float, float]
    integers: tuple[int, int]
    seed: tuple[int, int]
    processed: bool


def _fixed_controls(s: SamplingParams, index: int) -> FixedControls:
    numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    halves = s.seed >> 32, s.seed & 0xFFFFFFFF
    return FixedControls(numbers, (s.top_k, index), halves, s.logprobs_mode == "processed")


class Sample:
    """State of one sample on the host. `tokens`: prompt and output."""

    def __init__(self, request: Request, index: int, context: int, eos_token_id: int, vocabulary: int) -> None:
        sampling = request.sampling
        self.request, self.index = request, index
        self.fixed_controls = _fixed_controls(sampling, index)
        self.tokens: list[int] = list(request.token_ids)
        self.prompt_length = len(request.token_ids)
        room = context - self.prompt_length
        self.limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.text = TextStream(request.tokenizer, sampling.stop, request.output)
        self._writes = request.tokenizer is not None
        self.logs, self.prompt_logs = Logs(), Logs()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {eos_token_id})
        self._eos, self._vocabulary = eos_token_id, vocabulary
        self.cached_tokens = 0
        self.counts: np.ndarray | None = None
        self.prompt_seen: np.ndarray | None = None
        if self.penalized:
            self.counts = np.zeros(vocabulary, np.int32)
            self.prompt_seen = np.zeros(vocabulary, bool)
            self.prompt_seen[list(request.token_ids)] = True

    @property
    def may_shape(self) -> bool:
        """Masks, biases or counts may apply to some token."""
        s = self.request.sampling
        return bool(s.min_tokens or s.logit_bias or s.allowed_token_ids is not None or self.counts is not None)

    @property
    def shaped(self) -> bool:
        """Masks, biases or counts apply to the next token."""
        s = self.request.sampling
        return self.early or bool(s.logit_bias or s.allowed_token_ids is not None or self.counts is not None)

    @property
    def early(self) -> bool:
        """The output has fewer than min_tokens tokens."""
        return len(self.tokens) - self.prompt_length < self.request.sampling.min_tokens

    @property
    def penalized(self) -> bool:
        s = self.request.sampling
        return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def cancel(self) -> None:
        """End here; what was generated stays."""
        if not self.finished:
            self.finish_reason = "cancelled"
            self.text.finish()

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and self.index == 0

    def allowed(self) -> np.ndarray | None:
        """bool [V] of tokens that may come next, None = all."""
        s = self.request.sampling
        early = self.early
        if s.allowed_token_ids is None and not early:
            return None
        mask = np.ones(self._vocabulary, bool)
        if s.allowed_token_ids is not None:
            mask[:] = False
            mask[list(s.allowed_token_ids)] = True
        if early:
            mask[list(self.ends | {self._eos})] = False
        return mask

    def accept(self, token: int) -> str:
        """Append a drawn token; returns the text that became certain."""
        self.tokens.append(token)
        if self.counts is not None:
            self.counts[token] += 1
        if token in self.ends:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.request.sampling.stop_token_ids else None
            return self.text.finish()
        count = len(self.tokens) - self.prompt_length
        piece = ""
        if self._writes:
            piece, found = self.text.push(token, count >= self.request.sampling.min_tokens)
            if found is not None:
                self.finish_reason, self.stop_reason = "stop", found
                return piece
        if count >= self.limit:
            self.finish_reason = "length"
            piece += self.text.finish()
        return piece

    def completion(self) -> Completion:
        """The finished sample."""
        sampling = self.request.sampling
        reason = self.finish_reason or "error"
        parsed = self.text.parse()
        calls = parsed.tool_calls if parsed else ()
        content = parsed.content if parsed else self.text.text
        logs = None if sampling.logprobs is None else self.logs.finish(sampling.logprobs)
        return Completion(
            index=self.index,
            text=self.text.text,
            token_ids=tuple(self.generated),
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            stop_reason=self.stop_reason,
            logprobs=None if logs is None else logs.token_logprobs,
            top_ids=None if logs is None else logs.top_ids,
            top_logprobs=None if logs is None else logs.top_logprobs,
            content=content,
            reasoning=parsed.reasoning or None if parsed else None,
            tool_calls=calls,
        )
