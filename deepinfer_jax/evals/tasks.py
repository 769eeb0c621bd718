"""Checkable tasks of the demo model (`spec/vision_prompt_demo.md` C.4): generated problems with one right answer.

    rng = np.random.Generator(np.random.PCG64(seed))
    item = make_item("sort", "test", rng)
    prompt_ids, answer_ids = encode_item(item)
    check_output(item, answer_ids)

A problem belongs to the test split if a hash of it says so, and `make_item` draws until the split is right: no problem
of the test split is ever trained, under any phrasing or effort. Definitions are facts, which have to be trained to be
known; there the split is over pairs of word and phrasing, one phrasing of each word being kept for the test.

Everything is a function of the rng; no part of it needs jax.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

import numpy as np

from deepinfer_jax.demo import load_tokenizer
from deepinfer_jax.evals import arithmetic
from deepinfer_jax.evals.tools import KINDS, pick, request
from deepinfer_jax.evals.words import CITIES, LETTERS, NAMES, TALK, VALUES, WEEKDAYS, WORDS
from deepinfer_jax.prompt import (
    EncodedPrompt,
    Message,
    ParsedOutput,
    Tokenizer,
    Tool,
    ToolCall,
    encode_conversation,
    parse_output,
)
from deepinfer_jax.prompt.control import END_THINK

Split = Literal["train", "test"]
Rng = np.random.Generator

TEST_SHARE = 0.1
THINKING_SHARE = 0.3
"""Of training items whose task does not fix the mode."""

_TRIES = 10_000


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        task: name of its task.
        problem: identifies the problem; its hash chooses the split.
        message: what the user says.
        thinking, effort: mode of the prompt; effort is None in chat mode.
        reasoning: the expected reasoning; "" in chat mode. It is trained, but not checked.
        content: the expected answer.
        call: the expected tool call instead of an answer.
        tools: what the model may call.
        response_format: as in `encode_conversation`.
        facts: numbers about the problem that reports group by.
    """

    task: str
    problem: str
    message: str
    thinking: bool = False
    effort: int | None = None
    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None
    tools: tuple[Tool, ...] = ()
    response_format: Mapping[str, Any] | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """What a generator of a task draws; `make_item` adds the mode.

    Attributes:
        problem, message, content, call, tools, response_format, facts: as in Item.
        plan: reasoning in thinking mode from an effort of 34 on; a function of the effort, or text.
    """

    problem: str
    message: str
    content: str = ""
    call: ToolCall | None = None
    plan: str | Callable[[int], str] = ""
    tools: tuple[Tool, ...] = ()
    response_format: Mapping[str, Any] | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    Attributes:
        name: as in reports.
        draw: draws a problem for a split; only definitions and recall treat the splits differently.
        thinking: whether items are in thinking mode; None = chat mode, with a share in thinking mode for training.
        efforts: lowest and highest effort in thinking mode.
        measured: False = trained only.
    """

    name: str
    draw: Callable[[Rng, Split], Problem]
    thinking: bool | None = None
    efforts: tuple[int, int] = (1, 100)
    measured: bool = True


def split_of(problem: str) -> Split:
    """The split that a problem belongs to."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


def _choose(rng: Rng, options: Sequence[str], count: int) -> list[str]:
    """`count` different options in random order."""
    return [options[int(i)] for i in rng.choice(len(options), count, replace=False)]


def _integer(rng: Rng, low: int, high: int) -> int:
    """low..high, both possible."""
    return int(rng.integers(low, high + 1))


def _series(rng: Rng) -> list[str]:
    if rng.integers(2):
        return _choose(rng, WORDS, _integer(rng, 4, 24))
    return _choose(rng, LETTERS, _integer(rng, 4, 16))


def _copy(rng: Rng, _: Split) -> Problem:
    text = " ".join(_series(rng))
    return Problem(f"copy {text}", f"Repeat: {text}", text, plan="Repeat the list.")


def _reverse(rng: Rng, _: Split) -> Problem:
    series = _series(rng)
    text = " ".join(series)
    return Problem(f"reverse {text}", f"Reverse: {text}", " ".join(series[::-1]), plan="Start from the end.")


def _numbers(rng: Rng, low: int, high: int) -> list[int]:
    """low..high different two-digit numbers."""
    return [int(n) + 10 for n in rng.choice(90, _integer(rng, low, high), replace=False)]


def _sort(rng: Rng, _: Split) -> Problem:
    numbers = _numbers(rng, 3, 10)
    text = " ".join(map(str, numbers))
    return Problem(f"sort {text}", f"Sort: {text}", " ".join(map(str, sorted(numbers))), plan="Smallest first.")


def _extreme(rng: Rng, _: Split) -> Problem:
    numbers = _numbers(rng, 3, 8)
    word, function = (("Smallest", min), ("Largest", max))[_integer(rng, 0, 1)]
    text = " ".join(map(str, numbers))
    message = f"{word} of: {text}"
    return Problem(f"extreme {message}", message, str(function(numbers)), plan="Compare the numbers.")


def _count(rng: Rng, _: Split) -> Problem:
    letters = [LETTERS[i] for i in rng.integers(0, 4, _integer(rng, 4, 16))]
    asked = LETTERS[_integer(rng, 0, 3)]
    message = f"Count {asked} in: {' '.join(letters)}"
    return Problem(f"count {message}", message, str(letters.count(asked)), plan="Look at each letter.")


def _weekday_plan(start: int, days: int, step: int) -> str:
    """Whole weeks are taken away, then the days are counted: "10-7=3", "1 Tuesday", "2 Wednesday", "3 Thursday"."""
    rest = days % 7
    counted = [f"{i} {WEEKDAYS[(start + step * i) % 7]}" for i in range(1, rest + 1)]
    return "\n".join([f"{days}-{days - rest}={rest}", *counted])


def _weekday(rng: Rng, _: Split) -> Problem:
    start, days, step = _integer(rng, 0, 6), _integer(rng, 1, 150), (1, -1)[_integer(rng, 0, 1)]
    word = "after" if step == 1 else "before"
    message = f"Which day is {days} day{'s' * (days > 1)} {word} {WEEKDAYS[start]}?"
    answer = WEEKDAYS[(start + step * days) % 7]
    return Problem(f"weekday {message}", message, answer, plan=_weekday_plan(start, days, step))


def _sum(rng: Rng, digits: int) -> tuple[int, str, int]:
    """Numbers of up to `digits` digits, each length equally likely; a difference is never negative."""
    a, b = (_integer(rng, 0, 10 ** _integer(rng, 1, digits) - 1) for _ in range(2))
    if rng.integers(2):
        return a, "+", b
    return max(a, b), "-", min(a, b)


def _digits_without_trace(rng: Rng, split: Split) -> int:
    """Tests have two digits; half of the training has three, which low efforts of the task "effort" ask for."""
    return 2 if split == "test" or rng.integers(2) else 3


def _product(rng: Rng, digits: int) -> tuple[int, str, int]:
    return _integer(rng, 10, 10 ** _integer(rng, 2, digits) - 1), "*", _integer(rng, 2, 9)


def _arithmetic(a: int, sign: str, b: int) -> Problem:
    text = f"{a}{sign}{b}"
    low, high = sorted((a, b))
    problem = f"{low}{sign}{high}" if sign == "+" else text  # a+b and b+a are one problem
    answer = str(arithmetic.evaluate(a, sign, b))
    facts = {"digits": max(len(str(a)), len(str(b)))}
    return Problem(problem, f"What is {text}?", answer, plan=lambda n: arithmetic.trace(a, sign, b, n), facts=facts)


def _recall_sizes(rng: Rng, split: Split) -> tuple[int, int]:
    """(pairs, look-ups). A test looks up one of 120 to 180 pairs.

    Half of the training lists are short, down to 2 pairs, and most ask for many: what a short list teaches
    carries over to long ones, and only the values of looked-up keys teach anything.
    """
    if split == "test":
        return _integer(rng, 120, 180), 1
    count = _integer(rng, 20, 180) if rng.integers(2) else int(2 * 10 ** rng.random())
    return count, 1 if rng.random() < 0.1 else _integer(rng, 1, min(count, 60))


def _recall(rng: Rng, split: Split) -> Problem:
    """Look up values in a list of pairs, a line of four tokens each: dash, key, value, line end.

    Answers are lines of the list, so that a key is the same token in both, and no value is a key. The fact
    "distance" is the number of tokens from the (first) asked pair to the end of the list. Lists are long enough that
    a random selection of entries seldom holds the right one.
    """
    count, lookups = _recall_sizes(rng, split)
    keys = _choose(rng, WORDS, count)
    lines = [f"- {key} {VALUES[int(i)]}" for key, i in zip(keys, rng.integers(0, len(VALUES), count), strict=True)]
    asked = [int(i) for i in rng.choice(count, lookups, replace=False)]
    message = "\n".join(["Pairs:", *lines, f"Look up: {', '.join(keys[i] for i in asked)}"])
    content = "\n".join(lines[i] for i in asked)
    facts = {"pairs": count, "distance": (count - asked[0]) * 4}
    return Problem(f"recall {message}", message, content, plan="Find the pairs.", facts=facts)


_RECORDS = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "In {city} lives {name}, who is {age} years old.",
    "This is {name} from {city}, aged {age}.",
)


def _record(rng: Rng, _: Split) -> Problem:
    record = {"name": pick(rng, NAMES), "age": _integer(rng, 10, 99), "city": pick(rng, CITIES)}
    return Problem(
        f"record {record['name']} {record['age']} {record['city']}",
        pick(rng, _RECORDS).format(**record),
        json.dumps(record),
        plan="Write name, age and city.",
        response_format={"type": "json_object"},
    )


def _tool_call(rng: Rng, _: Split) -> Problem:
    chosen = [KINDS[i] for i in rng.choice(len(KINDS), _integer(rng, 1, 2), replace=False)]
    kind = chosen[0]
    arguments = kind.draw(rng)
    if rng.integers(2):
        chosen.reverse()
    call = ToolCall(kind.tool.name, json.dumps(arguments), "call_0")
    return Problem(
        f"tool {call.name} {call.arguments}",
        request(kind, arguments, rng),
        call=call,
        plan="Call the tool.",
        tools=tuple(kind.tool for kind in chosen),
    )


_PHRASINGS = ("Define: {}", "What does {} mean?", "Meaning of {}?", "Explain the word {}.")


@lru_cache(maxsize=1)
def glosses() -> tuple[tuple[str, str], ...]:
    """(word, gloss): the most frequent words of WordNet 3.0 with a short gloss, most frequent first."""
    packed = resources.files("deepinfer_jax.evals").joinpath("data/glosses.txt.xz").read_bytes()
    lines = lzma.decompress(packed).decode("ascii").splitlines()
    pairs = (line.split("\t") for line in lines)
    return tuple((word, gloss) for word, gloss in pairs)


def _define(rng: Rng, split: Split) -> Problem:
    word, gloss = pick(rng, glosses())
    kept = hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % len(_PHRASINGS)
    phrasing = kept if split == "test" else (kept + _integer(rng, 1, len(_PHRASINGS) - 1)) % len(_PHRASINGS)
    message = _PHRASINGS[phrasing].format(word)
    return Problem(f"define {message}", message, gloss, plan="Recall the meaning.")


def _talk(rng: Rng, _: Split) -> Problem:
    message, answer = pick(rng, TALK)
    return Problem(f"talk {message}", message, answer, plan="Be kind.")


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("copy", _copy),
        Task("reverse", _reverse),
        Task("sort", _sort),
        Task("extreme", _extreme),
        Task("count", _count),
        Task("weekday", _weekday, thinking=True, efforts=(34, 100)),
        Task("add", lambda rng, split: _arithmetic(*_sum(rng, _digits_without_trace(rng, split))), thinking=False),
        Task("add_thinking", lambda rng, _: _arithmetic(*_sum(rng, 3)), thinking=True, efforts=(34, 100)),
        Task("effort", lambda rng, _: _arithmetic(*_sum(rng, 3)), thinking=True),
        Task("multiply", lambda rng, _: _arithmetic(*_product(rng, 3)), thinking=True, efforts=(34, 100)),
        Task("recall", _recall),
        Task("record", _record),
        Task("tool_call", _tool_call),
        Task("define", _define),
        Task("talk", _talk, measured=False),
    )
}
"""All tasks by name."""


def _fits(task: Task, problem: Problem, split: Split) -> bool:
    if task.name == "define" or not task.measured:
        return True  # `_define` has chosen by itself
    return split_of(problem.problem) == split


def make_item(task: str, split: Split, rng: Rng) -> Item:
    """Draw a problem of a task and a split; ValueError for an unknown task.

    Test items are in chat mode where the task leaves the mode open.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; choose one of {', '.join(TASKS)}")
    kind = TASKS[task]
    for _ in range(_TRIES):
        problem = kind.draw(rng, split)
        if _fits(kind, problem, split):
            break
    else:
        raise AssertionError(f"task {task}: no problem of the split {split} in {_TRIES} tries")
    thinking = kind.thinking
    if thinking is None:
        thinking = split == "train" and rng.random() < THINKING_SHARE
    effort = _integer(rng, *kind.efforts) if thinking else None
    reasoning = ""
    if effort is not None and effort > 33:
        reasoning = problem.plan if isinstance(problem.plan, str) else problem.plan(effort)
    return Item(
        task,
        problem.problem,
        problem.message,
        thinking,
        effort,
        reasoning,
        problem.content,
        problem.call,
        problem.tools,
        problem.response_format,
        problem.facts,
    )


def item_prompt(item: Item, tokenizer: Tokenizer | None = None) -> EncodedPrompt:
    """The prompt of an item; its `output` tells how to parse what follows. Default tokenizer: the demo model's."""
    return encode_conversation(
        tokenizer or load_tokenizer(),
        [Message("user", item.message)],
        tools=item.tools,
        thinking=item.thinking,
        reasoning_effort=item.effort,
        response_format=item.response_format,
    )


def _answer(item: Item, tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    ids: list[int] = []
    if item.call is not None:  # as the encoder writes it into the prompt of the next turn
        turns = [
            Message("user", item.message),
            Message("assistant", item.content, item.reasoning, (item.call,)),
            Message("tool", "", tool_call_id=item.call.id),
        ]
        whole = encode_conversation(
            tokenizer, turns, tools=item.tools, thinking=item.thinking, reasoning_effort=item.effort
        ).token_ids
        return list(whole[len(prompt) : whole.index(tokenizer.eos_id) + 1])
    if item.thinking:
        ids += tokenizer.encode(item.reasoning, control_tokens=False)
        ids.append(tokenizer.control_id(END_THINK))
    return [*ids, *tokenizer.encode(item.content, control_tokens=False), tokenizer.eos_id]


def encode_item(item: Item, tokenizer: Tokenizer | None = None) -> tuple[list[int], list[int]]:
    """(ids of the prompt, ids of the expected output with its EOS). Default tokenizer: the demo model's."""
    tokenizer = tokenizer or load_tokenizer()
    prompt = list(item_prompt(item, tokenizer).token_ids)
    return prompt, _answer(item, tokenizer, prompt)


def is_correct(item: Item, output: ParsedOutput) -> bool:
    """Whether a parsed output answers an item: the same text, the same JSON object, or the same one call.

    Reasoning is free. Numbers compare by value and keys in any order; white space around an answer does not count.
    """
    if item.call is not None:
        calls = output.tool_calls
        expected = item.call.arguments_object()
        return len(calls) == 1 and calls[0].name == item.call.name and _same(calls[0].arguments_object(), expected)
    if output.tool_calls or not output.reasoning_finished:
        return False
    if item.response_format is not None:
        try:
            return _same(json.loads(output.content), json.loads(item.content))
        except ValueError:
            return False
    return output.content.strip() == item.content


def _same(value: Any, expected: Any) -> bool:
    """Equal as JSON; unlike in Python, true is not 1."""
    return json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def check_output(item: Item, output_ids: Sequence[int], tokenizer: Tokenizer | None = None) -> bool:
    """Whether generated ids answer an item, which they can only after an EOS."""
    tokenizer = tokenizer or load_tokenizer()
    if tokenizer.eos_id not in output_ids:
        return False
    start = item_prompt(item, tokenizer).output
    return is_correct(item, parse_output(output_ids, start, tokenizer=tokenizer))
