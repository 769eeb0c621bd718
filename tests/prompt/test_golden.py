"""Prompts, ids and parses against recordings of other implementations."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_jax.prompt import OutputStart, encode_completion, encode_conversation, parse_output

from .cases import golden, random_cases, released, settings_of

STAGES = {
    None: "content",
    "ReasoningStart": "reasoning",
    "ReasoningContinuation": "reasoning_continued",
    "ContentContinuation": "content_continued",
}


@pytest.mark.parametrize("case", golden()["prompts"], ids=lambda case: case["id"])
def test_golden_prompt(case: dict[str, Any]) -> None:
    """Guards every byte, every id and every control position of the recorded prompts, and where their parse starts."""
    request = case["request"]
    if "prompt" in request:
        encoded = encode_completion(released(), request["prompt"])
    else:
        settings = settings_of(request)
        encoded = encode_conversation(released(), request["messages"], image_placeholders=True, **settings)
    assert encoded.text == case["prompt"]
    assert list(encoded.token_ids) == case["token_ids"]
    if "special_ranges" not in case:  # recorded from an encoder without them
        assert next(encoded.text[a:b] for a, b in encoded.special_ranges) == "<｜begin▁of▁sentence｜>"
        return
    assert [list(pair) for pair in encoded.special_ranges] == case["special_ranges"]
    stage = "calls" if case["parse_starts_in_tool_calls"] else STAGES[case["parse_start"]]
    if case["id"] == "prefix_chat":
        stage = "content_continued"  # the library would drop line breaks that continue the given text
    assert encoded.output.stage == stage
    assert encoded.output.parse_tool_calls == case["parse_tool_calls"]


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
@pytest.mark.parametrize("number", range(len(golden()["output_parsing"])))
def test_golden_parse(number: int, as_ids: bool) -> None:
    """Guards reasoning, content and calls of the recorded outputs, from ids and from text."""
    case = golden()["output_parsing"][number]
    stage = "calls" if case["starts_in_tool_calls"] else STAGES[case["start_stage"]]
    start = OutputStart(stage, case["parse_tool_calls"], json_output=case["parse_json_output"])  # type: ignore[arg-type]
    if as_ids:
        parsed = parse_output(case["output_ids"], start, tokenizer=released())
    else:
        parsed = parse_output(case["output_text"], start)
    expected = case["expect"]
    assert parsed.raw == case["output_text"]
    assert parsed.reasoning == expected["reasoning_content"]
    assert parsed.content == expected["content"]
    assert [{"name": c.name, "arguments": c.arguments} for c in parsed.tool_calls] == expected["tool_calls"]
    assert bool(parsed.tool_calls) == (expected["finish_reason"] == "tool_calls")


def test_random_conversations() -> None:
    """Guards the rules in combination: 300 random conversations give the text, positions and ids of the library."""
    cases = random_cases()["prompts"]
    assert len(cases) == 300
    for number, case in enumerate(cases):
        names = ("tools", "thinking", "reasoning_effort", "tool_choice", "response_format")
        encoded = encode_conversation(released(), case["messages"], **{name: case[name] for name in names})
        assert encoded.text == case["prompt"], number
        assert [list(pair) for pair in encoded.special_ranges] == case["special_ranges"], number
        assert list(encoded.token_ids) == case["token_ids"], number


def test_random_outputs() -> None:
    """Guards the parser in combination: 400 random outputs give reasoning, content and calls of the library."""
    cases = random_cases()["outputs"]
    assert sum(bool(case["tool_calls"]) for case in cases) > 100
    for number, case in enumerate(cases):
        start = OutputStart(case["stage"], case["parse_tool_calls"])
        parsed = parse_output(case["token_ids"], start, tokenizer=released())
        assert parsed.raw == case["text"], number
        assert (parsed.reasoning, parsed.content) == (case["reasoning"], case["content"]), number
        assert [[c.name, c.arguments] for c in parsed.tool_calls] == case["tool_calls"], number
