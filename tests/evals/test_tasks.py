"""Generated problems: deterministic, in one split each, encoded by the protocol, and checked strictly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.demo import load_tokenizer
from deepinfer_jax.evals import arithmetic
from deepinfer_jax.evals.tasks import (
    TASKS,
    Item,
    Split,
    check_output,
    encode_item,
    glosses,
    is_correct,
    item_prompt,
    make_item,
    split_of,
)
from deepinfer_jax.evals.words import VALUES, WORDS
from deepinfer_jax.prompt import Message, ParsedOutput, ToolCall, encode_conversation

pytestmark = pytest.mark.fast

MEASURED = [task.name for task in TASKS.values() if task.measured]
seeds = st.integers(0, 2**32 - 1)


def draw(task: str, split: Split, seed: int, count: int = 1) -> list[Item]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [make_item(task, split, rng) for _ in range(count)]


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_items(task: str) -> None:
    """Guards against hidden state: batches are rebuilt from their seed after an interruption."""
    assert draw(task, "train", 5, 20) == draw(task, "train", 5, 20)
    assert draw(task, "train", 5, 20) != draw(task, "train", 6, 20)


def test_problems_are_those_that_the_model_was_not_trained_on() -> None:
    """Guards against a changed generator: then problems of the test split may have been trained under other names."""
    digest = hashlib.sha256()
    for task in MEASURED:
        for item in draw(task, "test", 1, 5):
            call = None if item.call is None else (item.call.name, item.call.arguments)
            digest.update(repr((task, item.problem, item.message, item.content, call)).encode())
    assert digest.hexdigest()[:16] == "cbb765a2967148dc"


@given(st.sampled_from([name for name in MEASURED if name != "define"]), st.sampled_from(["train", "test"]), seeds)
def test_a_problem_belongs_to_one_split(task: str, split: Split, seed: int) -> None:
    """Guards against test problems in the training data."""
    assert split_of(draw(task, split, seed)[0].problem) == split


def test_sums_share_their_split_between_tasks() -> None:
    """Guards against a sum that is tested in one mode and trained in another, or with its numbers swapped."""
    sums = {task: {item.problem for item in draw(task, "train", 3, 1500)} for task in ("add", "add_thinking", "effort")}
    tested = {item.problem for task in sums for item in draw(task, "test", 4, 300)}
    assert tested
    assert not tested & set().union(*sums.values())
    for item in draw("add", "train", 3, 200):
        found = re.fullmatch(r"What is (\d+)([+-])(\d+)\?", item.message)
        assert found is not None
        if found[2] == "+":
            assert item.problem == "+".join(sorted((found[1], found[3]), key=int))


def test_definitions_keep_a_phrasing_for_the_test() -> None:
    """Guards against a word whose tested question was trained; the meaning itself has to be."""
    trained = {item.message for item in draw("define", "train", 1, 4000)}
    tested = {item.message for item in draw("define", "test", 2, 1000)}
    assert not trained & tested


@given(st.sampled_from(list(TASKS)), st.sampled_from(["train", "test"]), seeds)
def test_expected_answer_passes(task: str, split: Split, seed: int) -> None:
    """Guards against an expected output that the output parser does not read as the answer."""
    item = draw(task, split, seed)[0]
    prompt, answer = encode_item(item)
    assert prompt[0] == load_tokenizer().bos_id
    assert answer[-1] == load_tokenizer().eos_id
    assert check_output(item, answer)
    assert not check_output(item, answer[:-1]), "an answer without an end is none"
    assert not check_output(item, [load_tokenizer().eos_id])


@given(st.sampled_from(MEASURED), seeds)
def test_other_answers_fail(task: str, seed: int) -> None:
    """Guards against a check that passes anything: the answer of another problem is wrong."""
    item, other = draw(task, "test", seed, 2)
    same = (item.content, item.call) == (other.content, other.call)
    assert check_output(item, encode_item(dataclasses.replace(other, thinking=item.thinking))[1]) == same


@given(st.sampled_from([name for name in TASKS if name != "tool_call"]), seeds)
def test_answers_are_what_the_encoder_writes(task: str, seed: int) -> None:
    """Guards against a second, slightly different, rendering of answers: it must be the V4.1 protocol's."""
    item = draw(task, "train", seed)[0]
    prompt, answer = encode_item(item)
    if item.thinking and not item.reasoning:
        return  # a prefix without reasoning cannot close it
    message = Message("assistant", item.content, item.reasoning, prefix=True)
    whole = encode_conversation(
        load_tokenizer(),
        [Message("user", item.message), message],
        thinking=item.thinking,
        reasoning_effort=item.effort,
        response_format=item.response_format,
    )
    assert [*prompt, *answer[:-1]] == list(whole.token_ids)


def test_thinking_is_part_of_training_only_where_the_task_leaves_it_open() -> None:
    """Guards against a test whose mode depends on chance, and against a model that was never shown thinking."""
    for task in TASKS.values():
        trained = [item.thinking for item in draw(task.name, "train", 9, 100)]
        tested = [item.thinking for item in draw(task.name, "test", 9, 20)]
        if task.thinking is None:
            assert 10 < sum(trained) < 50
            assert not any(tested)
        else:
            assert set(trained) == set(tested) == {task.thinking}


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-"))
def test_traces_are_true_and_lead_to_the_answer(a: int, b: int, sign: str) -> None:
    """Guards against a wrong line: the model would learn to calculate wrongly."""
    if sign == "-":
        a, b = max(a, b), min(a, b)
    lines = arithmetic.trace(a, sign, b, 50).splitlines()
    results = []
    for line in lines:
        assert eval(line.replace("=", "=="))
        results.append(int(line.split("=")[1]))
    digits = [r % 10 for r in results]
    value = sum(d * 10**i for i, d in enumerate(digits)) + results[-1] // 10 * 10 ** len(digits)
    assert value == arithmetic.evaluate(a, sign, b)


@given(st.integers(10, 999), st.integers(2, 9))
def test_products(a: int, b: int) -> None:
    """Guards against a wrong line of a product."""
    lines = arithmetic.trace(a, "*", b, 50).splitlines()
    assert all(eval(line.replace("=", "==")) for line in lines)
    results = [int(line.split("=")[1]) for line in lines]
    value = sum(r % 10 * 10**i for i, r in enumerate(results)) + results[-1] // 10 * 10 ** len(results)
    assert value == a * b


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-*"))
def test_effort_adds_to_the_trace(a: int, b: int, sign: str) -> None:
    """Guards against efforts that look alike: nothing up to 33, lines up to 66, then the same lines and a check."""
    a, b = max(a, b), min(a, b) if sign != "*" else b % 10
    levels = [arithmetic.trace(a, sign, b, effort) for effort in (1, 33, 34, 66, 67, 100)]
    assert levels[0] == levels[1] == ""
    assert levels[2] == levels[3] != ""
    assert levels[4] == levels[5]
    assert levels[4].startswith(levels[2] + "\ncheck ")


def test_recall_reaches_beyond_the_window() -> None:
    """Guards against a recall task that the sliding window alone could solve, and against wrong distances."""
    tokenizer = load_tokenizer()
    distances, lengths = [], []
    for item in draw("recall", "test", 1, 60):
        prompt, _ = encode_item(item)
        text = tokenizer.decode(prompt)
        listed = text[text.index(f"\n{item.content}\n") : text.index("\nLook up")]
        assert len(tokenizer.encode(listed, control_tokens=False)) == item.facts["distance"]
        distances.append(item.facts["distance"])
        lengths.append(len(prompt))
        assert 120 <= item.facts["pairs"] <= 180
    assert sum(d > 64 for d in distances) > 40
    assert max(distances) > 600
    assert max(lengths) < 1024


def test_json_and_calls_compare_by_value() -> None:
    """Guards against a check of spelling: key order and spaces are free, values and types are not."""
    record = draw("record", "test", 1)[0]
    value = json.loads(record.content)
    swapped = json.dumps(dict(reversed(value.items())), indent=1)
    assert is_correct(record, ParsedOutput("", content=swapped))
    assert not is_correct(record, ParsedOutput("", content=json.dumps(value | {"age": str(value["age"])})))
    assert not is_correct(record, ParsedOutput("", content=json.dumps(value | {"more": 1})))
    assert not is_correct(record, ParsedOutput("", content=record.content[:-1]))
    item = next(item for item in draw("tool_call", "test", 1, 50) if item.call and item.call.name == "set_light")
    assert item.call is not None
    arguments = json.loads(item.call.arguments)
    right = ToolCall("set_light", json.dumps(dict(reversed(arguments.items()))), "call_7")
    assert is_correct(item, ParsedOutput("", tool_calls=(right,)))
    number = json.dumps(arguments | {"on": int(arguments["on"])})
    for wrong in ((ToolCall("set_light", number),), (ToolCall("other", right.arguments),), (right, right), ()):
        assert not is_correct(item, ParsedOutput("", tool_calls=wrong))


def test_open_reasoning_is_no_answer() -> None:
    """Guards against counting an answer that stands inside reasoning which never ended."""
    item = draw("add_thinking", "test", 1)[0]
    ids = load_tokenizer().encode(item.content, control_tokens=False)
    assert not check_output(item, [*ids, load_tokenizer().eos_id])


def test_words_are_single_tokens() -> None:
    """Guards against tasks about lists that measure spelling: every word is one token after a space."""
    assert len(set(WORDS)) == len(WORDS) > 120
    assert len(set(VALUES)) == len(VALUES) > 120
    assert not set(VALUES) & set(WORDS)
    assert [
        word for word in WORDS + VALUES if len(load_tokenizer().encode(f" {word}", control_tokens=False)) != 1
    ] == []


def test_glosses() -> None:
    """Guards against a damaged or swollen table, and against shipping it without its notice."""
    table = glosses()
    assert len(table) == len({word for word, _ in table}) == 3000
    assert all(re.fullmatch("[a-z]{3,14}", word) and 6 <= len(gloss) <= 64 for word, gloss in table)
    folder = resources.files("deepinfer_jax.evals").joinpath("data")
    assert len(folder.joinpath("glosses.txt.xz").read_bytes()) < 150_000
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in folder.joinpath("LICENSES.txt").read_text()


def test_unknown_task() -> None:
    """Guards against a bare KeyError: the message lists the names."""
    with pytest.raises(ValueError, match=r"task 'sorting' is unknown.*copy, reverse"):
        draw("sorting", "test", 0)


def test_prompt_says_how_to_parse() -> None:
    """Guards against outputs of tool problems being read as text."""
    assert item_prompt(draw("tool_call", "test", 0)[0]).output.parse_tool_calls
    assert item_prompt(draw("add_thinking", "test", 0)[0]).output.stage == "reasoning"
