"""What a caller may ask of generation, checked before any device work."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_SAMPLES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Frozen and hashable; equal parameters give equal results.

    max_tokens: generated tokens at most; None = up to the context.
    temperature: 0 = greedy (argmax, ties to the lowest id). top_p: in (0, 1]. top_k: 0 = off.
    min_p: in [0, 1], relative to the most likely token. seed: 0 <= seed < 2^64.
    n: independent samples; sample i draws with (seed, i).
    stop: strings that end generation and are cut off. stop_token_ids: ids that end it and are not part
        of the text. ignore_eos: go on after the end-of-sequence token.
    min_tokens: end and stop ids are masked before this many tokens.
    presence_penalty, frequency_penalty: subtracted for tokens of the output. repetition_penalty: > 0,
        divides (multiplies) positive (negative) logits of tokens in prompt or output.
    logit_bias: token id -> added logit. allowed_token_ids: only these (None = all).
    logprobs: None = none; 0 = of the generated tokens; k = also the k most likely.
    prompt_logprobs: the same for prompt tokens. logprobs_mode: "raw" logits, or "processed" by all
        filters. The exact order of filters: `kernels/sample_tokens/api.py`.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"

    def __post_init__(self) -> None:
        # Friendly spellings become the canonical hashable ones.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
            elif value is None and field.name in ("stop", "stop_token_ids", "logit_bias"):
                object.__setattr__(self, field.name, ())
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, _tuple(name, value))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias.items())))
        _check(self)

    @classmethod
    def make(cls, given: SamplingParams | Mapping[str, Any] | None = None, **changes: Any) -> SamplingParams:
        """Parameters from an object or mapping and changes; an unknown name is an error with a suggestion."""
        base = dict(given) if isinstance(given, Mapping) else {}
        names = [field.name for field in dataclasses.fields(cls)]
        for name in (*base, *changes):
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
                raise TypeError(f"unknown sampling parameter {name!r}{hint}")
        if given is not None and not isinstance(given, SamplingParams | Mapping):
            raise TypeError(f"sampling is {given!r}; expected SamplingParams, a mapping of its fields, or None")
        if isinstance(given, SamplingParams):
            return dataclasses.replace(given, **changes)
        return cls(**{**base, **changes})


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence | frozenset | set):
        raise ValueError(f"{name} is {value!r}; expected a list")
    return tuple(sorted(value) if isinstance(value, frozenset | set) else value)


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(p: SamplingParams) -> None:
    ranges: dict[str, tuple[int, int, bool]] = {
        "max_tokens": (1, 1 << 30, True),
        "top_k": (0, 1 << 30, False),
        "seed": (0, (1 << 64) - 1, False),
        "n": (1, MAX_SAMPLES, False),
        "min_tokens": (0, 1 << 30, False),
        "logprobs": (0, MAX_LOGPROBS, True),
        "prompt_logprobs": (0, MAX_LOGPROBS, True),
    }
    for name, (low, high, optional) in ranges.items():
        value = getattr(p, name)
        fits = (optional and value is None) or (_is_int(value) and low <= value <= high)
        _require(fits, name, value, f"an integer in {low}..{high}" + (" or None" if optional else ""))
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        _require(_is_number(getattr(p, name)), name, getattr(p, name), "a finite number")
    _require(p.temperature >= 0, "temperature", p.temperature, "0 (greedy) or more")
    _require(p.temperature == 0 or p.temperature >= 1e-3, "temperature", p.temperature, "0 (greedy) or at least 0.001")
    _require(0 < p.top_p <= 1, "top_p", p.top_p, "a number in (0, 1]")
    _require(0 <= p.min_p <= 1, "min_p", p.min_p, "a number in [0, 1]")
    _require(p.repetition_penalty > 0, "repetition_penalty", p.repetition_penalty, "a number above 0")
    for name in ("ignore_eos",):
        _require(isinstance(getattr(p, name), bool), name, getattr(p, name), "True or False")
    _require(p.logprobs_mode in ("raw", "processed"), "logprobs_mode", p.logprobs_mode, "'raw' or 'processed'")
    _require(len(p.stop) <= MAX_STOPS, "stop", f"{len(p.stop)} strings", f"at most {MAX_STOPS}")
    for value in p.stop:
        _require(isinstance(value, str) and value != "", "stop", value, "non-empty strings")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for value in getattr(p, name) or ():
            _require(_is_int(value) and value >= 0, name, value, "token ids")
    _require(p.allowed_token_ids is None or len(p.allowed_token_ids) > 0, "allowed_token_ids", (), "at least one id")
    for pair in p.logit_bias:
        fits = isinstance(pair, tuple) and len(pair) == 2 and _is_int(pair[0]) and _is_number(pair[1])
        _require(fits, "logit_bias", pair, "token id -> finite number")
