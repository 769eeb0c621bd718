"""Conversations and tools from users: accepted forms, and errors that name message and field."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_jax.prompt import ImagePart, Message, PromptError, Tool, ToolCall, messages, normalize_messages
from deepinfer_jax.prompt import normalize_tools as tools_of

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "q"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a"} | fields


def tool(call: Any = "c", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "r", "tool_call_id": call} | fields


def test_forms_are_equal() -> None:
    """Guards the accepted forms: dicts in OpenAI form with empty extra keys, and dataclasses, are the same."""
    dicts = [
        {"role": "system", "content": [{"type": "text", "text": "s"}, "t"], "name": None},
        USER,
        assistant(content=None, reasoning="why", tool_calls=[CALL], refusal=None, audio=None, prefix=None),
        tool(name="f"),
        user_parts := {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, "q"]},
    ]
    classes = [
        Message("system", "s\n\nt"),
        Message("user", "q"),
        Message("assistant", "", "why", (ToolCall("f", '{"a": 1}', "c"),)),
        Message("tool", "r", tool_call_id="c"),
        Message("user", (ImagePart(), "q")),
    ]
    assert normalize_messages(dicts) == tuple(classes) == normalize_messages(classes)
    assert user_parts["content"][0] == {"type": "image_url", "image_url": {"url": "x"}}
    given = {"id": "c", "function": {"name": "f", "arguments": {"a": 1, "b": (True, None)}}}
    parsed = normalize_messages([assistant(tool_calls=[given]), tool()])[0].tool_calls[0]
    assert parsed == ToolCall("f", '{"a": 1, "b": [true, null]}', "c")
    assert parsed.arguments_object() == {"a": 1, "b": [True, None]}
    assert ToolCall("f", "[1]").arguments_object() is None


def test_to_dict_round_trip() -> None:
    """Guards the way out: the dict form of a message reads back as the same message."""
    call = ToolCall("f", "{}", "c")
    sequence = (
        Message("user", ("a", ImagePart(7))),
        Message("assistant", "b", "why", (call,)),
        Message("tool", "r", tool_call_id="c"),
        Message("user", "q", task="title"),
    )
    again = normalize_messages([message.to_dict() for message in sequence])
    assert again == sequence
    assert isinstance(again[0].content[1], ImagePart)
    assert again[0].content[1].source == 7


DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]

BAD_MESSAGES: list[tuple[Any, str]] = [
    ("Hello", "messages: must be a list, not str"),
    (USER, "this is one message"),
    (Message("user", "q"), "this is one message"),
    ([], "messages: is empty"),
    ([USER, 3], r"messages\[1\]: must be a Message or an object, not int"),
    ([{"role": "usr", "content": ""}], r"messages\[0\]\.role: 'usr' is not one of .*did you mean 'user'"),
    ([{"role": "developer", "content": ""}], r"messages\[0\]\.role: .*use 'system'"),
    ([{"content": "q"}], r"messages\[0\]\.role: ''"),
    ([USER, {"role": "user", "contents": "q"}], r"messages\[1\]: has the unknown key 'contents' \(did you mean 'conte"),
    ([USER | {"name": "Ann"}], r"messages\[0\]\.name: has no place in this protocol"),
    ([USER | {"content": 3}], r"messages\[0\]\.content: must be a list, not int"),
    ([USER | {"content": [3]}], r"messages\[0\]\.content\[0\]: must be a string or an object"),
    ([USER | {"content": [{"type": "audio"}]}], r"messages\[0\]\.content\[0\]: must be"),
    ([USER | {"content": [{"type": "text", "txt": ""}]}], r"messages\[0\]\.content\[0\]: has the unknown key 'txt'"),
    ([USER | {"content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text: must be a string, not NoneType"),
    ([USER | {"content": "a\udc80"}], r"messages\[0\]\.content: has a lone surrogate at character 1"),
    ([USER | {"reasoning": "r"}], r"messages\[0\]\.reasoning_content: only a message of role 'assistant'"),
    ([USER | {"prefix": True}], r"messages\[0\]\.prefix: only a message of role 'assistant'"),
    ([USER | {"tool_calls": [CALL]}], r"messages\[0\]\.tool_calls: only a message of role 'assistant'"),
    ([USER | {"tool_call_id": "c"}], r"messages\[0\]\.tool_call_id: only a message of role 'tool'"),
    ([assistant(task="title"), USER], r"messages\[0\]\.task: only a message of role 'user'"),
    ([USER | {"task": "titel"}], r"messages\[0\]\.task: 'titel' is not one of action"),
    ([USER | {"task": "title"}, USER], r"messages\[0\]\.task: only the last message can have it"),
    ([USER, assistant()], r"messages\[1\]: the conversation ends with a complete assistant turn; .*prefix"),
    ([assistant(prefix=True), USER], r"messages\[0\]\.prefix: only the last message can have it"),
    ([assistant(prefix="yes")], r"messages\[0\]\.prefix: must be true or false"),
    ([assistant(prefix=True, tool_calls=[CALL])], r"messages\[0\]\.prefix: a message that the output continues"),
    ([assistant(reasoning="a", reasoning_content="b"), USER], r"messages\[0\]: give reasoning or reasoning_content"),
    ([assistant(content=[ImagePart()]), USER], r"messages\[0\]\.content: an assistant message holds text only"),
    ([assistant(reasoning=3), USER], r"messages\[0\]\.reasoning_content: must be a string, not int"),
    ([tool()], r"messages\[0\]\.tool_call_id: 'c' is no unanswered call"),
    ([assistant(tool_calls=[CALL]), USER], r"messages\[1\]: the calls \['c'\] of messages\[0\] need tool messages"),
    ([assistant(tool_calls=[CALL])], r"messages\[0\]\.tool_calls: the conversation ends without answers to \['c'\]"),
    ([assistant(tool_calls=[CALL]), tool(), tool()], r"messages\[2\]\.tool_call_id: 'c' is no unanswered call"),
    ([assistant(tool_calls=[CALL]), tool("d")], r"messages\[1\]\.tool_call_id: 'd' is no .* open are \['c'\]"),
    ([assistant(tool_calls=[CALL]), tool(None)], r"messages\[1\]\.tool_call_id: is missing"),
    ([assistant(tool_calls=[CALL]), tool(3)], r"messages\[1\]\.tool_call_id: must be a string, not int"),
    ([assistant(tool_calls=[CALL, CALL]), tool()], r"messages\[0\]\.tool_calls: every call needs an id of its own"),
    ([assistant(tool_calls=[{"function": {"name": "f"}}])], r"messages\[0\]\.tool_calls: every call needs an id"),
    ([assistant(tool_calls=CALL)], r"messages\[0\]\.tool_calls: must be a list, not dict"),
    ([assistant(tool_calls=["f"])], r"messages\[0\]\.tool_calls\[0\]: must be a ToolCall or an object"),
    ([assistant(tool_calls=[{"name": "f"}])], r"messages\[0\]\.tool_calls\[0\]: has the unknown key 'name'"),
    ([assistant(tool_calls=[{"id": "c"}])], r"messages\[0\]\.tool_calls\[0\]: must have type"),
    ([assistant(tool_calls=[ToolCall('a"b')])], r"messages\[0\]\.tool_calls\[0\]\.function\.name: 'a\"b' must have"),
    ([assistant(tool_calls=[ToolCall("f", '{"a\\"b": 1}')])], r"arguments: the protocol has no way to write a key"),
    ([assistant(tool_calls=[ToolCall("f", {"a": 1})])], r"function\.arguments: must be a string"),  # type: ignore[arg-type]
    ([{"role": "latest_reminder", "content": "a"}] * 2 + [USER], r"messages\[1\]: follows another reminder"),
    ([{"role": "latest_reminder", "content": [ImagePart()]}], r"messages\[0\]\.content: a reminder holds text only"),
]


@pytest.mark.parametrize(("value", "message"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_bad_messages(value: Any, message: str) -> None:
    """Guards against conversations that would be rendered as something else; the error names message and field."""
    with pytest.raises(PromptError, match=message):
        normalize_messages(value)


BAD_TOOLS: list[tuple[Any, str]] = [
    ({"name": "f"}, "tools: must be a list, not dict"),
    ([{"name": "f"}], r"tools\[0\]: has the unknown key 'name'"),
    ([{"type": "web_search"}], r'tools\[0\]: must have type "function"'),
    ([{"function": {"name": ""}}], r"tools\[0\]\.function\.name: '' must have 1 to 256 characters"),
    ([{"function": {"name": "f", "descripton": ""}}], r"unknown key 'descripton' \(did you mean 'description'\?\)"),
    ([{"function": {"name": "f", "strict": True}}], r"tools\[0\]\.function\.strict: schemas are not enforced"),
    ([{"function": {"name": "f", "parameters": []}}], r"tools\[0\]\.function\.parameters: must be a JSON schema"),
    ([Tool("f"), Tool("f")], r"tools\[1\]\.name: there are two tools named 'f'"),
    ([Tool("f", "", {"a": float("nan")})], r"tools\[0\]\.parameters\.a: nan is not JSON"),
    ([Tool("f", "", {"a": [b"x"]})], r"tools\[0\]\.parameters\.a\[0\]: bytes is not JSON"),
    ([Tool("f", "", {1: 2})], r"tools\[0\]\.parameters, a key: must be a string"),  # type: ignore[dict-item]
    ([Tool("f", "", {"a": DEEP})], "nested more than 64 deep"),
    ([3], r"tools\[0\]: must be a Tool or an object"),
]


@pytest.mark.parametrize(("value", "message"), BAD_TOOLS, ids=range(len(BAD_TOOLS)))
def test_bad_tools(value: Any, message: str) -> None:
    """Guards against tools that the model would see wrongly; the error names tool and field."""
    with pytest.raises(PromptError, match=message):
        tools_of(value)


def test_tools_are_copied() -> None:
    """Guards against a schema that changes after it was checked, and reads OpenAI's form."""
    schema: dict[str, Any] = {"type": "object", "required": ("a",)}
    (kept,) = tools_of([{"type": "function", "function": {"name": "f", "description": None, "parameters": schema}}])
    schema["type"] = "array"
    assert kept == Tool("f", "", {"type": "object", "required": ["a"]})
    assert tools_of([{"function": {"name": "f", "parameters": None, "strict": False}}]) == (Tool("f"),)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limits on messages, tools, calls, parts and characters; the error says which and where."""
    monkeypatch.setattr(messages, "MAX_MESSAGES", 2)
    monkeypatch.setattr(messages, "MAX_TOOLS", 1)
    monkeypatch.setattr(messages, "MAX_TOOL_CALLS", 1)
    monkeypatch.setattr(messages, "MAX_PARTS", 1)
    monkeypatch.setattr(messages, "MAX_CHARACTERS", 30)
    for value, message in (
        ([USER] * 3, "messages: has 3 entries; at most 2"),
        ([assistant(tool_calls=[CALL, CALL]), USER], r"messages\[0\]\.tool_calls: has 2 entries; at most 1"),
        ([USER | {"content": ["a", "b"]}], r"messages\[0\]\.content: has 2 entries; at most 1"),
        (
            [USER | {"content": "a" * 20}, USER | {"content": "b" * 11}],
            r"messages\[1\]: the texts up to here have more",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            normalize_messages(value)
    with pytest.raises(PromptError, match="tools: has 2 entries; at most 1"):
        tools_of([Tool("f"), Tool("g")])
    with pytest.raises(PromptError, match=r"tools\[0\]: the tools up to here have more than 30"):
        tools_of([Tool("f", "d" * 31)])
    assert len(normalize_messages([USER | {"content": "a" * 30}])) == 1
