"""Shape of results, kinds of prompts, streaming, text and where generation ends."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import Params, RequestOutput, SamplingParams, TokenEvent
from deepinfer_jax.prompt import Tokenizer, encode_completion, encode_conversation

from .tiny import PROMPTS, SAMPLING, TOP, by_sample, everything, first, generate, texts_as_they_grow

# ---- prompts -----------------------------------------------------------------------------------------


def test_kinds_of_prompts(params: Params, tokenizer: Tokenizer, batch: dict[str, RequestOutput]) -> None:
    """Guards the encoding: a text gets BOS, ids stay as they are, messages follow the protocol."""
    text = encode_completion(tokenizer, PROMPTS["text"])
    assert batch["text"].prompt_token_ids == tuple(text.token_ids)
    assert batch["text"].prompt == PROMPTS["text"]
    assert batch["ids"].prompt_token_ids == tuple(PROMPTS["ids"])
    assert batch["ids"].prompt == tokenizer.decode(PROMPTS["ids"])
    conversation = encode_conversation(tokenizer, PROMPTS["conversation"])
    assert batch["conversation"].prompt_token_ids == tuple(conversation.token_ids)
    assert batch["conversation"].prompt == conversation.text
    forms: list[Any] = [np.array(PROMPTS["ids"], np.int32), tuple(PROMPTS["ids"]), iter([PROMPTS["ids"]])]
    for form in forms:
        assert deepinfer_jax.generate(params, form, SAMPLING["ids"]) == [batch["ids"]]


@pytest.mark.parametrize("name", ["text", "ids", "conversation"])
def test_one_prompt_gives_a_list_of_one(params: Params, batch: dict[str, RequestOutput], name: str) -> None:
    """Guards the shortcut: one prompt without a list around it."""
    assert deepinfer_jax.generate(params, PROMPTS[name], SAMPLING[name]) == [batch[name]]


def test_no_prompts(params: Params) -> None:
    """Guards an empty batch, such as the rest of a finished job."""
    assert deepinfer_jax.generate(params, []) == []
    assert list(deepinfer_jax.stream(params, [])) == []
    assert deepinfer_jax.score(params, []) == []


def test_sampling_of_all_and_changes(params: Params) -> None:
    """Guards the ways to give parameters: object, mapping, keywords, keywords over an object."""
    wanted = generate(params, "Hello", SamplingParams(max_tokens=4, seed=3, top_k=20))
    for sampling, changes in (
        (None, {"max_tokens": 4, "seed": 3, "top_k": 20}),
        ({"max_tokens": 4, "seed": 3}, {"top_k": 20}),
        (SamplingParams(max_tokens=9, seed=3, top_k=20), {"max_tokens": 4}),
        ([{"max_tokens": 4, "seed": 3, "top_k": 20}], {}),
    ):
        assert generate(params, "Hello", sampling, **changes) == wanted


def test_conversation_is_parsed(params: Params, tokenizer: Tokenizer, batch: dict[str, RequestOutput]) -> None:
    """Guards the parse of an answer: reasoning until it is closed, content after it, tokens counted."""
    thinking = batch["conversation"].outputs[0]
    assert thinking.reasoning == thinking.text
    assert thinking.content == ""
    assert batch["conversation"].usage.reasoning_tokens == 20
    (output,) = generate(params, PROMPTS["conversation"], thinking=False, max_tokens=8)
    plain = output.outputs[0]
    assert (plain.content, plain.reasoning, output.usage.reasoning_tokens) == (plain.text, None, 0)
    close = tokenizer.control_id("</think>")
    (output,) = generate(
        params, PROMPTS["conversation"], max_tokens=3, **everything([close, 70], logit_bias={close: 9})
    )
    assert output.outputs[0].token_ids[0] == close
    assert output.usage.reasoning_tokens == 1


# ---- log-probabilities -------------------------------------------------------------------------------


def test_forms_of_logprobs(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards what is reported: nothing, the tokens' own values, and k more; equal values for equal tokens."""
    few, many = (batch[name].outputs[0] for name in ("ids", "text"))
    for completion, k in ((few, 3), (many, TOP)):
        count = len(completion.token_ids)
        assert completion.logprobs is not None
        assert completion.top_ids is not None
        assert completion.top_logprobs is not None
        assert (completion.logprobs.dtype, completion.logprobs.shape) == (np.float32, (count,))
        assert (completion.top_ids.dtype, completion.top_ids.shape) == (np.int32, (count, k))
        assert (completion.top_logprobs.dtype, completion.top_logprobs.shape) == (np.float32, (count, k))
        for row, token in enumerate(completion.token_ids):
            found = np.flatnonzero(completion.top_ids[row] == token)
            assert (completion.top_logprobs[row][found] == completion.logprobs[row]).all()
    sampling = [dataclasses.replace(SAMPLING["ids"], logprobs=k) for k in (None, 0, TOP)]
    none, own, _ = (output.outputs[0] for output in deepinfer_jax.generate(params, [PROMPTS["ids"]] * 3, sampling))
    assert none.logprobs is none.top_ids is none.top_logprobs is None
    assert none.token_ids == few.token_ids
    assert own.top_ids is not None
    assert own.top_ids.shape == (12, 0)
    assert own.logprobs is not None
    assert few.logprobs is not None
    assert own.logprobs.tobytes() == few.logprobs.tobytes()


# ---- streaming ---------------------------------------------------------------------------------------


def check_events(events: list[TokenEvent], batch: dict[str, RequestOutput]) -> None:
    """Events of the mixed batch must add up to its results."""
    found = by_sample(events)
    samples = {(i, s.index): s for i, output in enumerate(batch.values()) for s in output.outputs}
    assert found.keys() == samples.keys()
    for key, sample in samples.items():
        own = found[key]
        assert tuple(event.token_id for event in own) == sample.token_ids
        assert "".join(event.text for event in own) == sample.text
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [sample.finish_reason]
        logprobs = [event.logprob for event in own]
        assert logprobs == ([None] * len(own) if sample.logprobs is None else sample.logprobs.tolist())


def test_stream_equals_generate(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards streaming: tokens, text, log-probabilities and ends add up to what `generate` returns."""
    events = list(deepinfer_jax.stream(params, list(PROMPTS.values()), list(SAMPLING.values())))
    check_events(events, batch)
    one = list(deepinfer_jax.stream(params, PROMPTS["text"], SAMPLING["text"]))
    assert "".join(event.text for event in one) == batch["text"].text


def test_on_token(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards the callback: it sees every event, and the results stay the same."""
    events: list[TokenEvent] = []
    outputs = deepinfer_jax.generate(
        params, list(PROMPTS.values()), list(SAMPLING.values()), on_token=events.append, progress=False
    )
    check_events(events, batch)
    assert outputs == list(batch.values())


def test_progress(params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the bar: shown when asked for, never without a terminal by itself."""
    generate(params, ["a", "b"], max_tokens=2)
    assert capsys.readouterr().err == ""
    generate(params, ["a", "b"], max_tokens=2, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_closing_a_stream(params: Params, batch: dict[str, RequestOutput]) -> None:
    """Guards against device memory that stays taken after a loop was left, and against a next call that notices."""

    def taken() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = taken()
    events = deepinfer_jax.stream(params, [PROMPTS["text"], PROMPTS["ids"]], max_tokens=100, logprobs=TOP)
    for _ in range(3):
        next(events)
    assert taken() > before
    events.close()  # type: ignore[attr-defined]
    assert taken() == before
    with pytest.raises(StopIteration):
        next(events)
    assert deepinfer_jax.generate(params, PROMPTS["text"], SAMPLING["text"]) == [batch["text"]]


# ---- where generation ends ---------------------------------------------------------------------------


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that stand for the single bytes of `data`."""
    found = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [found[bytes([byte])] for byte in data]


def expected_stop(texts: list[str], stops: list[str], from_token: int = 1) -> tuple[str, int, str] | None:
    """(text, tokens, stop string): the first token at which a stop string is in the new text, cut there."""
    for count in range(from_token, len(texts)):
        old, new = texts[count - 1], texts[count]
        hits = [(new.find(s, max(0, len(old) - len(s) + 1)), -len(s), s) for s in stops]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            place, _, stop = min(hits)
            return new[:place], count, stop
    return None


def test_stop_strings(params: Params, tokenizer: Tokenizer) -> None:
    """Guards stop strings: within a token, over two and three borders, several at once, also while streaming."""
    whole = first(params, "Stop", max_tokens=30, seed=4, ignore_eos=True)
    texts = texts_as_they_grow(tokenizer, whole.token_ids)
    text = texts[-1]
    assert whole.text == text
    edges = [len(t) for t in texts]
    cases = [
        [text[edges[6] - 1 : edges[6] + 1]],
        [text[edges[9] - 1 : edges[11] + 1]],
        [text[edges[3] : edges[4]]],
        [text[edges[12] : edges[12] + 1]],
        ["never in it", text[edges[20] :][:9]],
        [text[edges[7] : edges[9]], text[edges[7] + 1 : edges[9]], text[edges[8] : edges[9]]],
        [text[edges[5] - 1 : edges[8]] + "\x00", text[edges[8] - 1 : edges[8] + 1]],
        ["never in it"],
    ]
    sampling = [SamplingParams(max_tokens=30, seed=4, ignore_eos=True, stop=tuple(case)) for case in cases]
    events: list[TokenEvent] = []
    outputs = generate(params, ["Stop"] * len(cases), sampling, on_token=events.append)
    streamed = by_sample(events)
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        (got,) = output.outputs
        want = expected_stop(texts, case)
        if want is None:
            assert got == whole
        else:
            assert (got.text, len(got.token_ids), got.stop_reason) == want, case
            assert got.finish_reason == "stop"
            assert got.token_ids == whole.token_ids[: want[1]]
            assert got.content == got.text
        assert "".join(event.text for event in streamed[i, 0]) == got.text


def test_stop_inside_characters(params: Params, tokenizer: Tokenizer) -> None:
    """Guards tokens that are single bytes: a stop string ends in the middle of a token stream's character."""
    ids = byte_tokens(tokenizer, b"a\xc3\xa9\xe2\x82\xac")  # a, é, €
    options = everything(ids, max_tokens=60, seed=1, ignore_eos=True, logit_bias=dict.fromkeys(ids[1:3], 4.0))
    whole = first(params, "Bytes", **options)
    texts = texts_as_they_grow(tokenizer, whole.token_ids)
    assert "é" in texts[-1]
    assert "\ufffd" in texts[-1]
    assert whole.text.startswith(texts[-1])
    assert whole.text.removeprefix(texts[-1]) in ("", "\ufffd")  # a character that never became complete
    cases = [["é"], ["éé"], ["\ufffda"], ["\ufffd"], ["é\ufffd", "\ufffdé"], ["aé"]]
    sampling = [SamplingParams.make(options, stop=tuple(case)) for case in cases]
    events: list[TokenEvent] = []
    outputs = generate(params, ["Bytes"] * len(cases), sampling, on_token=events.append)
    found = 0
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        (got,) = output.outputs
        want = expected_stop(texts, case)
        if want is not None:
            found += 1
            assert (got.text, len(got.token_ids), got.stop_reason) == want, case
        assert "".join(event.text for event in by_sample(events)[i, 0]) == got.text
    assert found >= 4


def test_stop_ids(params: Params, tokenizer: Tokenizer) -> None:
    """Guards ending ids: listed ones and the end token, kept in the ids, out of the text, reason told."""
    whole = first(params, "Stop", max_tokens=30, seed=4, ignore_eos=True)
    place = 6
    token = whole.token_ids[place]
    count = whole.token_ids.index(token) + 1
    got = first(params, "Stop", max_tokens=30, seed=4, ignore_eos=True, stop_token_ids=[token])
    assert got.token_ids == whole.token_ids[:count]
    assert (got.finish_reason, got.stop_reason) == ("stop", token)
    assert got.text == tokenizer.decode(whole.token_ids[: count - 1])
    eos = tokenizer.eos_id
    ending: dict[str, Any] = everything([eos, 70], logit_bias={eos: 50.0}, max_tokens=5)
    got = first(params, "Stop", **ending)
    assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == ((eos,), "", "stop", None)
    got = first(params, "Stop", **ending, ignore_eos=True)
    assert (got.token_ids[0], len(got.token_ids), got.finish_reason) == (eos, 5, "length")


def test_min_tokens(params: Params, tokenizer: Tokenizer) -> None:
    """Guards the minimum: end token, stop ids and stop strings do not apply before it, and do right after."""
    eos = tokenizer.eos_id
    options: dict[str, Any] = everything([eos, 70, 71], logit_bias={eos: 50.0, 71: 25.0}, max_tokens=9)
    got = first(params, "Least", **options, min_tokens=4, stop_token_ids=[71])
    assert got.token_ids == (70, 70, 70, 70, eos)
    assert got.stop_reason is None
    got = first(params, "Least", **options, min_tokens=4, ignore_eos=True, stop_token_ids=[71])
    assert got.token_ids[:4] == (70,) * 4  # ids that end, and the end token, stay out before the minimum
    got = first(
        params, "Least", **options | {"allowed_token_ids": (70, 3)}, min_tokens=4, stop=[tokenizer.decode([70])]
    )
    assert got.finish_reason == "stop"
    assert len(got.token_ids) >= 4
    assert got.text == tokenizer.decode(got.token_ids[:-1])


def test_stop_string_in_reasoning(params: Params) -> None:
    """Guards the parse of a cut answer: reasoning and content end where the text ends."""
    whole = first(params, PROMPTS["conversation"], max_tokens=20, seed=2)
    got = first(params, PROMPTS["conversation"], max_tokens=20, seed=2, stop=whole.text[12:15])
    assert got.reasoning == got.text == whole.text[: len(got.text)]


def test_stop_string_that_stood_before_the_minimum(params: Params, tokenizer: Tokenizer) -> None:
    """Guards content when the stop string also occurs before min_tokens, where it stays."""
    options = everything([70, 71], logit_bias={70: 9.0}, max_tokens=12, min_tokens=5, stop=[tokenizer.decode([70])])
    got = first(params, PROMPTS["conversation"], thinking=False, **options)
    assert got.content == got.text == tokenizer.decode(got.token_ids[:-1])
