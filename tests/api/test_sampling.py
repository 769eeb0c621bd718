"""Sampling parameters end to end, recomputed in NumPy from raw log-probabilities that `score` reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import Completion, Params, SamplingParams

from .tiny import TOP, everything, generate, some_ids

PROMPT = some_ids(21, 12)
SEEN = sorted(set(PROMPT))[:6]
IDS = sorted({*SEEN, *some_ids(22, TOP - 6)})
"""The allowed ids: six that are in the prompt, ten that are not."""

NEUTRAL: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "logprobs_mode": "processed", "logprobs": TOP}


def run(params: Params, *changes: dict[str, Any]) -> list[Completion]:
    """One completion of PROMPT per set of changes; all in one batch, with all optional arrays in use."""
    sampling = [SamplingParams(**everything(IDS, **NEUTRAL | change)) for change in changes]
    return [output.outputs[0] for output in generate(params, [PROMPT] * len(changes), sampling)]


def reported(completion: Completion, row: int) -> np.ndarray:
    """float64 [len(IDS)]: processed log-probabilities of IDS at one generated token."""
    assert completion.top_ids is not None
    assert completion.top_logprobs is not None
    pairs = zip(completion.top_ids[row].tolist(), completion.top_logprobs[row].tolist(), strict=True)
    found = {token: value for token, value in pairs if value > -np.inf}
    assert found.keys() <= set(IDS)
    return np.array([found.get(token, -np.inf) for token in IDS], np.float64)


def raw(params: Params, prefix: list[int]) -> np.ndarray:
    """float64 [len(IDS)]: raw log-probabilities of IDS after a prefix."""
    scores = deepinfer_jax.score(params, [[*prefix, token] for token in IDS], TOP)
    return np.array([score.token_logprobs[-1] for score in scores], np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.fixture(scope="module")
def start(params: Params) -> np.ndarray:
    """Raw log-probabilities of IDS after the prompt."""
    return raw(params, PROMPT)


def bias_of(bias: dict[int, float]) -> np.ndarray:
    return np.array([bias.get(token, 0.0) for token in IDS])


def test_allowed_and_bias(params: Params, start: np.ndarray) -> None:
    """Guards mask and bias: only allowed ids, renormalised, with the bias added; greedy takes the largest."""
    bias = {IDS[3]: 4.0, IDS[7]: -2.5, IDS[11]: 1.25}
    completions = run(params, {}, {"logit_bias": bias})
    for completion, added in zip(completions, ({IDS[0]: 0.5, IDS[1]: -0.25}, bias), strict=True):
        want = log_softmax(start + bias_of(added))
        np.testing.assert_allclose(reported(completion, 0), want, rtol=1e-5, atol=1e-5)
        assert completion.token_ids[0] == IDS[int(want.argmax())]
        assert set(completion.token_ids) <= set(IDS)


def test_presence_and_frequency(params: Params) -> None:
    """Guards penalties on the output: counts of generated tokens only, not of the prompt, token after token."""
    bias = {IDS[2]: 8.0, IDS[9]: 7.0}
    settings = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0.75},
        {"presence_penalty": -0.5, "frequency_penalty": 0.5},
    ]
    completions = run(params, *({"logit_bias": bias} | setting for setting in settings))
    for completion, setting in zip(completions, settings, strict=True):
        for row in range(4):
            before = completion.token_ids[:row]
            counts = np.array([before.count(token) for token in IDS])
            logits = raw(params, [*PROMPT, *before]) + bias_of(bias)
            logits = logits - setting["frequency_penalty"] * counts - setting["presence_penalty"] * (counts > 0)
            want = log_softmax(logits)
            np.testing.assert_allclose(reported(completion, row), want, rtol=1e-5, atol=1e-5)
            assert completion.token_ids[row] == IDS[int(want.argmax())]


def test_repetition(params: Params, start: np.ndarray) -> None:
    """Guards the repetition penalty: prompt tokens too; positive logits are divided, negative ones multiplied.

    Raw log-probabilities are logits up to one number. It follows from one token; the other five must agree.
    """
    factor = 2.0
    bias = {token: 6.0 if i % 2 else -6.0 for i, token in enumerate(SEEN)}
    plain, punished = run(params, {"logit_bias": bias}, {"logit_bias": bias, "repetition_penalty": factor})
    seen = np.array([token in SEEN for token in IDS])
    change = reported(punished, 0) - reported(plain, 0)
    change -= change[~seen].mean()  # a change of all logits is none
    np.testing.assert_allclose(change[~seen], 0, atol=1e-5)

    def changes(logits: np.ndarray) -> np.ndarray:
        return np.where(logits > 0, logits / factor, logits * factor) - logits

    known, one = start + bias_of(bias), int(np.flatnonzero(seen)[0])
    guesses = [change[one] / (1 / factor - 1), change[one] / (factor - 1)]  # if it is positive, if negative
    logits = [known + guess - known[one] for guess in guesses]
    errors = [np.abs(changes(guess) - change)[seen].max() for guess in logits]
    assert min(errors) < 1e-4
    assert {bool(logit > 0) for logit in logits[int(np.argmin(errors))][seen]} == {True, False}


def test_filters(params: Params, start: np.ndarray) -> None:
    """Guards temperature, top_k, top_p and min_p together: support and renormalised values, and draws inside it."""
    bias, temperature = bias_of({IDS[0]: 0.5, IDS[1]: -0.25}), 0.7
    settings = [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
    ]
    completions = run(params, *({"temperature": temperature, "seed": i} | s for i, s in enumerate(settings)))
    scaled = (start + bias) / temperature
    for completion, setting in zip(completions, settings, strict=True):
        order = np.argsort(-scaled, kind="stable")
        kept = list(order[: setting.get("top_k", len(order))])
        mass = np.exp(log_softmax(scaled[kept]))
        kept = kept[: int(np.searchsorted(np.cumsum(mass), setting.get("top_p", 2.0))) + 1]
        kept = [i for i in kept if np.exp(scaled[i] - scaled[order[0]]) >= setting.get("min_p", 0.0)]
        want = np.full(len(IDS), -np.inf)
        want[kept] = log_softmax(scaled[kept])
        np.testing.assert_allclose(reported(completion, 0), want, rtol=1e-5, atol=1e-5)
        assert IDS.index(completion.token_ids[0]) in kept
        assert completion.logprobs is not None
        assert np.isfinite(completion.logprobs).all()


def test_raw_log_probabilities_are_before_all_of_it(params: Params, start: np.ndarray) -> None:
    """Guards logprobs_mode "raw": the model's own values, the bits of `score`, whatever is masked or punished."""
    (completion,) = run(params, {"logprobs_mode": "raw", "repetition_penalty": 1.5, "temperature": 0.5})
    (score,) = deepinfer_jax.score(params, [*PROMPT, *completion.token_ids], TOP)
    assert completion.logprobs is not None
    assert completion.logprobs.tobytes() == score.token_logprobs[len(PROMPT) - 1 :].tobytes()
    assert completion.logprobs[0] == np.float32(start[IDS.index(completion.token_ids[0])])


def test_first_tokens_follow_the_distribution(params: Params, start: np.ndarray) -> None:
    """Guards noise end to end: 512 samples of one token against the probabilities, with fixed seeds."""
    wanted = 256
    sampling = [SamplingParams(**everything(IDS, max_tokens=1, n=wanted, seed=seed, logprobs=TOP)) for seed in (0, 1)]
    outputs = deepinfer_jax.generate(params, [PROMPT, PROMPT], sampling)
    drawn = [completion.token_ids[0] for output in outputs for completion in output.outputs]
    counts = np.array([drawn.count(token) for token in IDS])
    expected = 2 * wanted * np.exp(log_softmax(start + bias_of({IDS[0]: 0.5, IDS[1]: -0.25})))
    cells = expected >= 10
    assert counts.sum() == 2 * wanted
    chi_square = ((counts - expected) ** 2 / expected)[cells].sum()
    degrees = int(cells.sum())
    assert degrees >= 4
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)
