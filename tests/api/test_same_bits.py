"""The promise, seen from outside: equal requests give equal bits, whatever runs beside them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import Params, RequestOutput, SamplingParams
from deepinfer_jax.prompt import Tokenizer

from .tiny import CONFIG, PROMPTS, SAMPLING, TOP, first, generate, some_ids


def test_batch_is_what_was_asked(batch: dict[str, RequestOutput]) -> None:
    """Guards the comparisons below against comparing empty results."""
    assert {name: output.error for name, output in batch.items()} == dict.fromkeys(PROMPTS)
    for name, output in batch.items():
        sampling = SAMPLING[name]
        assert [completion.index for completion in output.outputs] == list(range(sampling.n))
        for completion in output.outputs:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == sampling.max_tokens
        assert output.usage.completion_tokens == sampling.n * (sampling.max_tokens or 0)
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
    assert len({output.outputs[0].token_ids for output in batch.values()}) == len(batch)


@pytest.mark.parametrize("name", PROMPTS)
def test_alone(params: Params, batch: dict[str, RequestOutput], name: str) -> None:
    """Guards against a neighbour, a slot or a chunk that reaches another request's tokens or log-probabilities."""
    assert deepinfer_jax.generate(params, [PROMPTS[name]], SAMPLING[name]) == [batch[name]]


def test_other_order(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards input order: the same requests backwards give the same results backwards."""
    names = list(PROMPTS)[::-1]
    outputs = deepinfer_jax.generate(params, [PROMPTS[n] for n in names], [SAMPLING[n] for n in names])
    assert dict(zip(names, outputs, strict=True)) == batch


def test_other_capacity(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards against bits that depend on the context's capacity: a neighbour fills all 8,192 positions.

    It has no max_tokens, so it also shows that generation then ends with the context.
    """
    names = ["ids", "two pages", "everything", "samples"]
    long = some_ids(6, CONFIG.max_position_embeddings - 5)
    prompts = [long, *(PROMPTS[n] for n in names)]
    sampling = [SamplingParams(ignore_eos=True, logprobs=TOP), *(SAMPLING[n] for n in names)]
    full, *others = deepinfer_jax.generate(params, prompts, sampling)
    assert dict(zip(names, others, strict=True)) == {name: batch[name] for name in names}
    assert full.outputs[0].finish_reason == "length"
    assert len(full.outputs[0].token_ids) == 5


def test_fewer_tokens_are_a_prefix(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards against a limit that changes what comes before it."""
    longer = batch["text"].outputs[0]
    shorter = first(params, PROMPTS["text"], sampling=dataclasses.replace(SAMPLING["text"], max_tokens=5))
    assert shorter.token_ids == longer.token_ids[:5]
    assert longer.logprobs is not None
    assert shorter.logprobs is not None
    assert shorter.logprobs.tobytes() == longer.logprobs[:5].tobytes()


def test_going_on_with_what_was_generated(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards noise by absolute position: a prompt with 5 of its tokens attached goes on with the same tokens."""
    whole = batch["ids"].outputs[0]
    sampling = dataclasses.replace(SAMPLING["ids"], max_tokens=7)
    rest = first(params, [*PROMPTS["ids"], *whole.token_ids[:5]], sampling=sampling, logprobs=3)
    assert rest.token_ids == whole.token_ids[5:]
    assert whole.logprobs is not None
    assert rest.logprobs is not None
    assert rest.logprobs.tobytes() == whole.logprobs[5:].tobytes()


def test_samples_do_not_depend_on_their_number(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards the sample index: sample i of n=3 is sample i of any n, and samples differ."""
    three = batch["samples"].outputs
    for count in (1, 4):
        (output,) = generate(params, PROMPTS["samples"], dataclasses.replace(SAMPLING["samples"], n=count))
        assert output.outputs[:3] == three[:count]
    assert len({sample.token_ids for sample in three}) == 3


def test_seeds(params: Params) -> None:
    """Guards the 64-bit seed: both halves count, up to the last bit, and the same seed draws the same."""
    seeds = [5, 5 + (1 << 32), 5 + (1 << 63), 6, (1 << 64) - 1, 5]
    outputs = generate(params, ["A seed"] * 6, [SamplingParams(seed=seed, max_tokens=6) for seed in seeds])
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[5] == ids[0]
    assert len(set(ids)) == 5


def test_greedy_needs_no_seed(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards temperature 0: the most likely token each time, whatever the seed."""
    greedy = batch["greedy"].outputs[0]
    other = first(params, PROMPTS["greedy"], temperature=0, max_tokens=12, seed=99)
    assert other == greedy
    assert greedy.top_ids is not None
    assert greedy.token_ids == tuple(greedy.top_ids[:, 0].tolist())


def test_packed_weights(bare: Params, tokenizer: Tokenizer, batch: dict[str, RequestOutput]) -> None:
    """Guards unpacking at load: FP8 and FP4 weights give the bits that their bfloat16 copies give."""
    names = ["text", "two pages"]
    prompts, sampling = [PROMPTS[n] for n in names], [SAMPLING[n] for n in names]
    outputs = deepinfer_jax.generate(bare, prompts, sampling, tokenizer=tokenizer)
    assert outputs == [batch[name] for name in names]


# ---- scores ------------------------------------------------------------------------------------------


def test_score_equals_generation(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards the second half of the promise: scoring reports the very bits that generation reported."""
    names = ["text", "ids", "greedy", "everything", "one token", "conversation"]
    sequences = [[*batch[n].prompt_token_ids, *batch[n].outputs[0].token_ids] for n in names]
    for name, score in zip(names, deepinfer_jax.score(params, sequences, TOP), strict=True):
        completion = batch[name].outputs[0]
        start = len(batch[name].prompt_token_ids) - 1
        assert completion.logprobs is not None
        assert completion.top_ids is not None
        assert completion.top_logprobs is not None
        k = completion.top_ids.shape[1]
        assert score.token_logprobs[start:].tobytes() == completion.logprobs.tobytes(), name
        assert score.top_ids[start:, :k].tobytes() == completion.top_ids.tobytes(), name
        assert score.top_logprobs[start:, :k].tobytes() == completion.top_logprobs.tobytes(), name


def test_score_equals_prompt_logprobs(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards prompt log-probabilities, across chunks and pages, alone and in a batch."""
    ids = PROMPTS["prompt logprobs"]
    scores = deepinfer_jax.score(params, [ids, PROMPTS["ids"], ids], TOP)
    assert batch["prompt logprobs"].prompt_logprobs == scores[0] == scores[2]
    assert len(scores[0]) == len(ids) - 1
    assert deepinfer_jax.score(params, ids, TOP) == scores[:1]


def test_scores_are_log_probabilities(params: Params) -> None:
    """Guards the meaning: natural logarithms, descending, each token's own value among the most likely ones."""
    ids = PROMPTS["prompt logprobs"]
    (score,) = deepinfer_jax.score(params, ids, TOP)
    assert score.token_logprobs.dtype == score.top_logprobs.dtype == np.float32
    assert score.top_ids.dtype == np.int32
    assert (np.diff(score.top_logprobs, axis=1) <= 0).all()
    assert (np.exp(score.top_logprobs.astype(np.float64)).sum(axis=1) < 1).all()
    best = [[*ids[:i], int(score.top_ids[i - 1, 0])] for i in (1, 20, 149)]
    for sequence, row in zip(best, (0, 19, 148), strict=True):
        (other,) = deepinfer_jax.score(params, sequence, TOP)
        assert other.token_logprobs[-1] == score.top_logprobs[row, 0]
        assert other.token_logprobs[:-1].tobytes() == score.token_logprobs[:row].tobytes()


def test_equality_means_bits(batch: dict[str, RequestOutput]) -> None:
    """Guards the comparison that all of this rests on: one bit of one log-probability makes a difference."""
    output = batch["text"]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    changed = completion.logprobs.copy()
    changed.view(np.uint32)[-1] ^= 1
    other = dataclasses.replace(output, outputs=(dataclasses.replace(completion, logprobs=changed),))
    assert other != output
    assert dataclasses.replace(output) == output
    with pytest.raises(TypeError, match="unhashable"):
        hash(output)
