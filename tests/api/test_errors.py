"""Bad input is refused before any device work and named; what fails later does not take the others with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import pytest

import deepinfer_jax
from deepinfer_jax import GenerationError, Params, RequestOutput, SamplingParams, TokenEvent

from .tiny import CONFIG, PROMPTS, SAMPLING, TOP, by_sample, everything, generate, some_ids

# ---- sampling parameters -----------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature is nan; expected a finite number"),
    ({"temperature": math.inf}, "temperature is inf; expected a finite number"),
    ({"temperature": -0.5}, r"temperature is -0\.5; expected 0 \(greedy\) or more"),
    ({"temperature": 1e-6}, r"temperature is 1e-06; expected 0 \(greedy\) or at least 0\.001"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": True}, "temperature is True"),
    ({"top_p": 0}, r"top_p is 0; expected a number in \(0, 1\]"),
    ({"top_p": 1.5}, r"top_p is 1\.5"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"top_k": -1}, "top_k is -1; expected an integer in 0"),
    ({"top_k": 1.5}, r"top_k is 1\.5"),
    ({"min_p": -0.1}, r"min_p is -0\.1; expected a number in \[0, 1\]"),
    ({"min_p": 1.1}, r"min_p is 1\.1"),
    ({"n": 0}, "n is 0; expected an integer in 1"),
    ({"n": 1025}, "n is 1025"),
    ({"seed": -1}, "seed is -1; expected an integer in 0"),
    ({"seed": 1 << 64}, "seed is 18446744073709551616"),
    ({"seed": None}, "seed is None"),
    ({"seed": 0.0}, r"seed is 0\.0"),
    ({"max_tokens": 0}, "max_tokens is 0; expected an integer in 1.* or None"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"stop": ""}, "stop is ''; expected non-empty strings"),
    ({"stop": ["a", ""]}, "stop is ''"),
    ({"stop": [1]}, "stop is 1"),
    ({"stop": ["a"] * 65}, "stop is '65 strings'; expected at most 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
    ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'; expected a list"),
    ({"stop_token_ids": [3072]}, r"stop_token_ids: id 3072 is outside 0\.\.3071"),
    ({"allowed_token_ids": []}, "allowed_token_ids is .*expected at least one"),
    ({"allowed_token_ids": [3072]}, r"allowed_token_ids: id 3072 is outside 0\.\.3071"),
    ({"logit_bias": {3072: 1.0}}, r"logit_bias: id 3072 is outside 0\.\.3071"),
    ({"logit_bias": {3: math.inf}}, r"logit_bias is \(3, inf\)"),
    ({"logit_bias": {"a": 1.0}}, r"logit_bias is \('a', 1\.0\)"),
    ({"presence_penalty": math.nan}, "presence_penalty is nan"),
    ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number above 0"),
    ({"logprobs": -1}, r"logprobs is -1; expected an integer in 0\.\.64 or None"),
    ({"logprobs": 65}, "logprobs is 65"),
    ({"prompt_logprobs": 65}, "prompt_logprobs is 65"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode is 'cooked'; expected 'raw' or 'processed'"),
    ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_refused_parameters(params: Params, change: dict[str, Any], message: str) -> None:
    """Guards ranges and types: the parameter, its value and the expected range are named, and the prompt."""
    with pytest.raises(ValueError, match=rf"^prompt 1: {message}"):
        deepinfer_jax.generate(params, ["a", "b"], [{}, change])
    with pytest.raises(ValueError, match=rf"^prompt 0: {message}"):
        deepinfer_jax.stream(params, "a", **change)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("max_token", "did you mean 'max_tokens'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("stop_tokens", "did you mean 'stop_token"),
        ("colour", "known: max_tokens, temperature"),
    ],
)
def test_unknown_keyword(params: Params, name: str, hint: str) -> None:
    """Guards typing errors: an unknown keyword is an error with a suggestion, also in a mapping."""
    change: dict[str, Any] = {name: 1}
    for call in (
        lambda: deepinfer_jax.generate(params, "a", **change),
        lambda: deepinfer_jax.generate(params, "a", change),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert f"unknown sampling parameter {name!r}; {hint}" in str(caught.value)


def test_number_of_parameters(params: Params) -> None:
    """Guards a list of parameters that does not match the prompts, and an unknown way to treat errors."""
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        deepinfer_jax.generate(params, ["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="errors='ignore' is unknown"):
        deepinfer_jax.generate(params, "a", errors="ignore")  # type: ignore[arg-type]


def test_every_field_is_tested_above() -> None:
    """Guards this file: a new sampling parameter needs its bad values here."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for change, _ in REFUSED for name in change} == fields


# ---- prompts -----------------------------------------------------------------------------------------

CONTEXT = CONFIG.max_position_embeddings

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ([1, 3072], r"token 1 is 3072; expected an id in 0\.\.3071"),
    ([-1], r"token 0 is -1"),
    ([1, 2.5], r"token 1 is 2\.5"),
    ([1, True], "token 1 is True"),
    ([5] * CONTEXT, "the prompt has 8192 tokens; the context of 8192 leaves no room to generate"),
    ("a\ud800", "lone surrogate at character 1"),
    ([{"role": "nobody", "content": "x"}], "role"),
    ([{"role": "user", "content": "x", "colour": 1}], "colour"),
    ([{"role": "assistant", "content": "x"}], "ends with a complete assistant turn"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[m for _, m in BAD_PROMPTS])
def test_bad_prompts(params: Params, prompt: Any, message: str) -> None:
    """Guards the prompt's number and the place of the fault; good neighbours do not hide it."""
    with pytest.raises(ValueError, match=rf"^prompt 1: .*{message}"):
        deepinfer_jax.generate(params, ["good", prompt, [5]])


def test_sequences_that_cannot_be_scored(params: Params) -> None:
    """Guards the same checks in `score`, where they speak of sequences."""
    with pytest.raises(ValueError, match=r"^sequence 1: token 0 is 9999"):
        deepinfer_jax.score(params, [[5], [9999]])
    with pytest.raises(ValueError, match="prompt_logprobs is 65"):
        deepinfer_jax.score(params, [5, 6], 65)


def test_text_without_tokenizer(bare: Params) -> None:
    """Guards weights without a tokenizer: ids work, text and stop strings say what is missing."""
    (output,) = generate(bare, PROMPTS["ids"], SAMPLING["ids"])
    assert output.prompt is None
    assert (output.outputs[0].text, output.outputs[0].content) == ("", "")
    assert len(output.outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="prompt 0: a text prompt needs a tokenizer; pass tokenizer= or token ids"):
        deepinfer_jax.generate(bare, "a")
    with pytest.raises(ValueError, match="prompt 0: stop: strings need a tokenizer"):
        deepinfer_jax.generate(bare, [5], stop="x")


def test_returned_errors(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards a batch with bad prompts: with errors="return" they carry their error and the others their results."""
    outputs = deepinfer_jax.generate(params, ["", PROMPTS["text"], [4000]], [{}, SAMPLING["text"], {}], errors="return")
    assert outputs[1] == batch["text"]
    assert outputs[0].error == "prompt 0: the prompt is empty"
    assert outputs[2].error is not None
    assert outputs[2].error.startswith("prompt 2: token 0 is 4000")
    for output in (outputs[0], outputs[2]):
        assert output.outputs == ()
        with pytest.raises(ValueError, match="this prompt has no output: prompt"):
            _ = output.text


# ---- numbers that are not finite ---------------------------------------------------------------------

POISONED = 1234


@pytest.fixture(scope="module")
def poisoned(params: Params) -> Params:
    """The tiny model with NaN in the embedding of one token."""
    return dataclasses.replace(params, embed=params.embed.at[POISONED].set(jnp.nan))


def test_not_finite_logits(poisoned: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards against NaN that becomes a token: its prompt fails and is named, the others keep their bits."""
    bad = [*some_ids(31, 20), POISONED]
    prompts = [PROMPTS["text"], bad, PROMPTS["ids"]]
    sampling = [SAMPLING["text"], {"logprobs": TOP}, SAMPLING["ids"]]
    outputs = deepinfer_jax.generate(poisoned, prompts, sampling, errors="return")
    assert outputs[::2] == [batch["text"], batch["ids"]]
    assert outputs[1].error == "prompt 1: the model's logits after 21 tokens are not finite or all masked"
    assert outputs[1].outputs == ()
    assert outputs[1].prompt_token_ids == tuple(bad)
    with pytest.raises(GenerationError, match=r"^prompt 1: the model's logits after 21 tokens") as caught:
        deepinfer_jax.generate(poisoned, prompts, sampling)
    assert caught.value.outputs == outputs


def test_not_finite_logits_while_streaming(poisoned: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards a stream with one failing prompt: the others are streamed to their end, then the error is raised."""
    prompts = [[POISONED], PROMPTS["text"]]
    events: list[TokenEvent] = []
    stream = deepinfer_jax.stream(poisoned, prompts, [{"logprobs": TOP}, SAMPLING["text"]])
    with pytest.raises(GenerationError, match=r"^prompt 0: ") as caught:
        events.extend(event for event in stream)
    assert by_sample(events).keys() == {(1, 0)}
    assert "".join(event.text for event in events) == batch["text"].text
    assert caught.value.outputs[1] == batch["text"]


def test_not_finite_scores(poisoned: Params) -> None:
    """Guards scores: a NaN anywhere in a sequence is an error with the other sequences' results."""
    with pytest.raises(GenerationError, match=r"^(prompt|sequence) 1: .*not finite") as caught:
        deepinfer_jax.score(poisoned, [[5, 6, 7], [5, POISONED, 7, 8]], TOP)
    scored = caught.value.outputs[0].prompt_logprobs
    assert scored == deepinfer_jax.score(poisoned, [5, 6, 7], TOP)[0]


def test_nothing_allowed(params: Params) -> None:
    """Guards a mask that leaves nothing: before min_tokens the only allowed id is one that ends."""
    options = everything([1, 5], allowed_token_ids=[1], min_tokens=2)
    (output,) = generate(params, [[5]], options, errors="return")
    assert output.error == "prompt 0: the model's logits after 1 tokens are not finite or all masked"
    assert output.usage.completion_tokens == 0


@pytest.mark.parametrize("bad", [None, 5, 2.5, b"ab", {"role": "user", "content": "x"}], ids=repr)
def test_values_that_are_no_prompt(params: Params, bad: Any) -> None:
    """Guards against a TypeError without a number, and against a message or bytes taken for a list of prompts."""
    with pytest.raises(ValueError, match=r"^prompt 1: "):
        deepinfer_jax.generate(params, ["good", bad])
    outputs = deepinfer_jax.generate(params, ["good", bad], max_tokens=1, errors="return")
    assert outputs[0].error is None
    assert outputs[1].error is not None


@pytest.mark.parametrize("bad", [5, "greedy", ["abc"]], ids=repr)
def test_sampling_of_another_type(params: Params, bad: Any) -> None:
    """Guards against parameters that are ignored without a word."""
    with pytest.raises((TypeError, ValueError), match="sampling"):
        deepinfer_jax.generate(params, "a", bad)
