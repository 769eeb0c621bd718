"""The rules of the encoder one by one, and that no text becomes a control token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import demo
from deepinfer_jax.prompt import (
    EncodedPrompt,
    ImagePart,
    Message,
    OutputStart,
    PromptError,
    Tool,
    ToolCall,
    control,
    encode_completion,
    encode_conversation,
    render_conversation,
)

from .cases import released, texts

EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(messages: list[Any], **settings: Any) -> str:
    """The prompt after BOS and effort line, with short names for the control tokens."""
    text = render_conversation(messages, **settings).text.removeprefix(control.BOS)
    for effort in (75, 50, 100):
        text = text.replace(control.SYSTEM + EFFORT.format(effort), "")
    names = {control.USER: "[U]", control.ASSISTANT: "[A]", control.SYSTEM: "[S]", control.EOS: "[E]"}
    names |= {control.THINK: "[t]", control.END_THINK: "[/t]", control.LATEST_REMINDER: "[R]"}
    for spelling, name in names.items():
        text = text.replace(spelling, name)
    return text


def test_effort() -> None:
    """Guards the number told to the model: the default, every name, integers, and that chat mode has none."""
    expected = {None: 75, "minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, 1: 1, 62: 62}
    for effort, number in expected.items():
        text = render_conversation(HELLO, reasoning_effort=effort).text
        assert text == f"{control.BOS}{control.SYSTEM}{EFFORT.format(number)}{control.USER}Hello" + (
            control.ASSISTANT + control.THINK
        )
    for chat in ({"thinking": False}, {"reasoning_effort": "none"}, {"thinking": False, "reasoning_effort": "none"}):
        text = render_conversation(HELLO, **chat).text  # type: ignore[arg-type]
        assert text == f"{control.BOS}{control.USER}Hello{control.ASSISTANT}{control.END_THINK}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reasoning_effort": 0}, "0 is not an integer of 1..100"),
        ({"reasoning_effort": 101}, "101 is not an integer"),
        ({"reasoning_effort": True}, "True is not an integer"),
        ({"reasoning_effort": 50.0}, "50.0 is not an integer"),
        ({"reasoning_effort": "hihg"}, "did you mean 'high'"),
        ({"thinking": 1}, "thinking: must be True, False or None"),
        ({"thinking": True, "reasoning_effort": "none"}, '"none" turns it off'),
        ({"thinking": False, "reasoning_effort": 30}, "30 was asked with thinking off"),
        ({"tool_choice": "required", "tools": [ADD]}, "needs thinking off"),
        ({"tool_choice": "required", "thinking": False}, '"required" needs tools'),
        ({"tool_choice": "any"}, "'any' is not one of auto, none, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "a named tool cannot be forced"),
        ({"response_format": {"type": "json"}}, "response_format: must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "schema: must be a JSON schema"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format: must be"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    """Guards against settings that contradict each other or are silently replaced by a default."""
    with pytest.raises(PromptError, match=message):
        render_conversation(HELLO, **settings)


def test_reasoning_is_dropped_without_tools() -> None:
    """Guards multi-turn prompts: old reasoning goes, that turn opens closed, the last one opens thinking."""
    turns = [user("a"), Message("assistant", "b", "why"), user("c")]
    assert body(turns) == "[U]a[A][/t]b[E][U]c[A][t]"
    assert body(turns, thinking=False) == "[U]a[A][/t]b[E][U]c[A][/t]"
    with_tools = body(turns, tools=[ADD])
    assert with_tools.endswith("[U]a[A][t]why[/t]b[E][U]c[A][t]")
    assert body(turns, tools=[ADD], tool_choice="none") == body(turns)


def test_prefix() -> None:
    """Guards continuations: nothing is closed after the given text, and the parser starts where the text stops."""
    tail = {
        ("", "r"): ("[A][t]r", "reasoning_continued"),
        ("c", ""): ("[A][t][/t]c", "content_continued"),
        ("c", "r"): ("[A][t]r[/t]c", "content_continued"),
        ("", ""): ("[A][t]", "reasoning"),
    }
    for (content, reasoning), (expected, stage) in tail.items():
        turns = [user("q"), Message("assistant", content, reasoning, prefix=True)]
        assert body(turns) == "[U]q" + expected
        assert render_conversation(turns).output == OutputStart(stage, False)  # type: ignore[arg-type]
    chat = [user("q"), Message("assistant", "c", prefix=True)]
    assert body(chat, thinking=False) == "[U]q[A][/t]c"
    with pytest.raises(PromptError, match="needs thinking on"):
        render_conversation([user("q"), Message("assistant", "", "r", prefix=True)], thinking=False)
    with pytest.raises(PromptError, match="cannot follow a message with prefix"):
        render_conversation(chat, thinking=False, tools=[ADD], tool_choice="required")


def test_turns() -> None:
    """Guards headers: user turns merge, a later system message and a reminder stand alone, each answer has a header."""
    assert body([user("a"), user(""), user("b")]) == "[U]a\n\n\n\nb[A][t]"
    assert body([user("a"), {"role": "system", "content": "s"}, user("b")]) == "[U]a[S]s[U]b[A][t]"
    assert body([user("a"), {"role": "latest_reminder", "content": "r"}]) == "[U]a[R]r[A][t]"
    assert body([user("a"), Message("assistant", "x"), Message("assistant", "y"), user("b")]) == (
        "[U]a[A][/t]x[E][A][/t]y[E][U]b[A][t]"
    )
    assert body([{"role": "system", "content": "s"}], thinking=False) == "[S]s[A][/t]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert body([user(parts)]) == body([user(["a", "b"])]) == "[U]a\n\nb[A][t]"


def test_tool_results_stand_in_call_order() -> None:
    """Guards tool loops: results are sorted, come before the user's text, and call ids count on over turns."""
    calls = tuple(ToolCall("add", "{}", f"id{i}") for i in range(3))
    results = [Message("tool", f"r{i}", tool_call_id=f"id{i}") for i in (2, 0, 1)]
    rendered = render_conversation([user("q"), Message("assistant", "", "", calls), *results, user("go on")])
    assert rendered.text.endswith(
        f"{control.USER}<tool_result>r0</tool_result>\n\n<tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>"
        f"\n\ngo on{control.ASSISTANT}{control.THINK}"
    )
    assert rendered.output == OutputStart("reasoning", False, 3)


def test_arguments() -> None:
    """Guards argument values: text raw, the rest as JSON with long integers kept, and texts that are no JSON object."""

    def parameters(arguments: str) -> str:
        call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": "x", "content": ""}
        text = body([user("q"), {"role": "assistant", "tool_calls": [call]}, answer])
        return text.partition('invoke name="f">\n')[2].partition("\n</｜DSML｜ invoke>")[0]

    def line(key: str, kind: str, value: str) -> str:
        return f'<｜DSML｜ parameter name="{key}" string="{kind}">{value}</｜DSML｜ parameter>'

    big = "123456789012345678901234567890"
    assert parameters(f'{{"a": "x\\ny", "n": {big}}}') == line("a", "true", "x\ny") + "\n" + line("n", "false", big)
    assert parameters('{"a": 1, "b": 2, "a": [1,{"c":"\\u00e9"}]}') == (
        line("a", "false", '[1, {"c": "é"}]') + "\n" + line("b", "false", "2")
    )
    for text in (
        "",
        "[1]",
        "no",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a": ' + "[" * 99 + "]" * 99 + "}",
    ):
        assert parameters(text) == line("arguments", "true", text)
    assert parameters("{}") == ""


def test_tasks() -> None:
    """Guards quick instructions: the token in place of the header or after it, and thinking off."""
    for task, token in control.TASKS.items():
        rendered = render_conversation([user("a"), {"role": "user", "content": "q", "task": task}])
        header = control.ASSISTANT + control.END_THINK if task == "action" else ""
        assert rendered.text == f"{control.BOS}{control.USER}a\n\nq{header}{token}"
        assert rendered.output == OutputStart("content", False)
    for thinking in ({"thinking": True}, {"reasoning_effort": 5}):
        with pytest.raises(PromptError, match="is answered without thinking"):
            render_conversation([{"role": "user", "content": "q", "task": "title"}], **thinking)  # type: ignore[arg-type]


def test_images_are_refused() -> None:
    """Guards against an image that is dropped, or a placeholder that reaches the model without an image."""
    turns = [user(["look", ImagePart(b"data"), "and say"])]
    with pytest.raises(PromptError, match="images are not supported yet"):
        encode_conversation(released(), turns)
    encoded = encode_conversation(released(), turns, image_placeholders=True)
    assert encoded.token_ids.count(released().control_id(control.IMAGE)) == 1
    assert [part.source for part in encoded.images] == [b"data"]
    spelled = encode_conversation(released(), [user(f"look {control.IMAGE}")])
    assert released().control_id(control.IMAGE) not in spelled.token_ids


def test_completion() -> None:
    """Guards plain prompts: BOS and the text, nothing else, no control tokens, line breaks of the output kept."""
    encoded = encode_completion(released(), "<think>\n")
    assert encoded.token_ids == (0, 30, 37947, 1018)
    assert (encoded.text, encoded.output) == (control.BOS + "<think>\n", OutputStart("content_continued", False))
    assert encode_completion(released(), "").token_ids == (0,)
    with pytest.raises(PromptError, match="prompt: must be a string"):
        encode_completion(released(), 3)  # type: ignore[arg-type]


def control_sequence(encoded: EncodedPrompt, known: set[int]) -> list[int]:
    return [number for number in encoded.token_ids if number in known]


def conversation(content: str, name: str) -> tuple[list[Message], list[Tool]]:
    """A conversation with `content` in every place that a user or a tool fills."""
    name = "".join(c for c in name if c not in '"\r\n')[:200] or "f"
    call = ToolCall(name, '{"k": "v"}', "c")
    messages = [
        Message("system", content),
        Message("latest_reminder", content),
        Message("user", content),
        Message("assistant", "ok", "why", (call,)),
        Message("tool", content, tool_call_id="c"),
        Message("system", content),
        Message("user", content),
    ]
    return messages, [Tool(name, content, {"type": "object", "description": content})]


@settings(max_examples=60)
@given(content=texts, thinking=st.booleans())
def test_text_never_becomes_control(content: str, thinking: bool) -> None:
    """Guards against injection: whatever the text spells, the control tokens are those of the same form with "x"."""
    for tokenizer in (released(), demo.load_tokenizer()):
        known = set(tokenizer.control_ids.values())
        messages, tools = conversation(content, content)
        encoded = encode_conversation(tokenizer, messages, tools=tools, thinking=thinking)
        plain, plain_tools = conversation("x", "x")
        expected = encode_conversation(tokenizer, plain, tools=plain_tools, thinking=thinking)
        assert control_sequence(encoded, known) == control_sequence(expected, known)
        assert len(control_sequence(encoded, known)) == len(encoded.special_ranges)
        assert tokenizer.decode(encoded.token_ids) == encoded.text


def test_grounding_tokens_belong_to_the_assistant() -> None:
    """Guards the one exception: grounding tokens are control tokens in assistant text, there only."""
    spelled = "".join(control.GROUNDING)
    turns = [user(spelled), Message("assistant", spelled + control.EOS, spelled), user("q")]
    encoded = encode_conversation(released(), turns, tools=[ADD])
    ids = [released().control_id(spelling) for spelling in control.GROUNDING]
    assert [i for i in encoded.token_ids if i in ids] == ids + ids
    assert encoded.token_ids.count(released().eos_id) == 1
