"""Messages, tools and tool calls: data classes, and the checks that turn user input into them.

Plain dicts in OpenAI form are accepted everywhere. Every error is a PromptError that names message and field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_jax.prompt.control import TASKS
from deepinfer_jax.prompt.errors import PromptError, check_text, suggestion
from deepinfer_jax.prompt.json_text import from_json_object, plain_json, to_json

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_TOOL_CALLS = 1_000
MAX_PARTS = 10_000
MAX_CHARACTERS = 16 << 20
"""Most characters of all texts together; a context of 2^20 tokens holds about 5 million."""

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")

_NAME = re.compile(r'[^"\r\n]{1,256}')


@dataclass(frozen=True)
class ImagePart:
    """The place of an image in a message. Images are not supported yet; see docs/prompts.md."""

    source: Any = field(default=None, compare=False)


Content = str | tuple[str | ImagePart, ...]
"""Text, or parts that are joined by a blank line."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the model.

    Attributes:
        name: name of the tool.
        arguments: the arguments as JSON text of an object.
        id: names the call in the tool message that answers it.
    """

    name: str
    arguments: str = "{}"
    id: str = ""

    def arguments_object(self) -> dict[str, Any] | None:
        """The parsed arguments; None when the text is no strict JSON object."""
        return from_json_object(self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call; parameters is a JSON schema of the arguments object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: one of ROLES.
        content: text or parts.
        reasoning: what the model thought before its content; assistant only.
        tool_calls: calls after the content; assistant only.
        tool_call_id: the call that this message answers; tool only.
        prefix: the output continues this message; last message, assistant only.
        task: quick-instruction task, a key of `control.TASKS`; last message, user only.
    """

    role: str
    content: Content = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    task: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """OpenAI form, without the fields that are empty. An ImagePart becomes {"type": "image"} with its source."""
        content: Any = self.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part.source}
                for part in content
            ]
        optional = {
            "reasoning_content": self.reasoning,
            "tool_calls": [call.to_dict() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "prefix": self.prefix,
            "task": self.task,
        }
        return {"role": self.role, "content": content} | {key: value for key, value in optional.items() if value}


MessageLike = Message | Mapping[str, Any]
ToolLike = Tool | Mapping[str, Any]

_KEYS = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "prefix", "task")
_UNUSED_KEYS = ("name", "refusal", "annotations", "audio", "function_call")
"""Keys of OpenAI's form without a meaning in this protocol: accepted when they hold nothing."""

_OTHER_ROLES = {"developer": "system", "function": "tool", "model": "assistant", "human": "user"}


def _check_keys(value: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise PromptError(f"{where}: has the unknown key {str(key)[:100]!r}{suggestion(key, known)}")


def _list(value: Any, limit: int, where: str) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise PromptError(f"{where}: must be a list, not {type(value).__name__}")
    if len(value) > limit:
        raise PromptError(f"{where}: has {len(value)} entries; at most {limit} are allowed")
    return value


def _name(value: Any, where: str) -> str:
    if not _NAME.fullmatch(check_text(value, where)):
        raise PromptError(f"{where}: {value[:100]!r} must have 1 to 256 characters, no quote and no line break")
    return value


def _content(value: Any, where: str) -> Content:
    if value is None:
        return ""
    if isinstance(value, str):
        return check_text(value, where)
    parts: list[str | ImagePart] = []
    for i, part in enumerate(_list(value, MAX_PARTS, where)):
        here = f"{where}[{i}]"
        if isinstance(part, str | ImagePart):
            parts.append(check_text(part, here) if isinstance(part, str) else part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            _check_keys(part, ("type", "text"), here)
            parts.append(check_text(part.get("text"), f"{here}.text"))
        elif kind in ("image", "image_url"):
            _check_keys(part, ("type", kind), here)
            parts.append(ImagePart(part.get(kind)))
        else:
            raise PromptError(f'{here}: must be a string or an object with type "text" or "image_url"')
    return tuple(parts) if any(isinstance(part, ImagePart) for part in parts) else "\n\n".join(map(str, parts))


def _tool_call(value: Any, where: str) -> ToolCall:
    if isinstance(value, Mapping):
        _check_keys(value, ("id", "type", "function", "index"), where)
        function = value.get("function")
        if value.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise PromptError(f'{where}: must have type "function" and an object "function"')
        _check_keys(function, ("name", "arguments"), f"{where}.function")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            arguments = to_json(plain_json(arguments, f"{where}.function.arguments"))
        value = ToolCall(function.get("name", ""), arguments, value.get("id") or "")
    if not isinstance(value, ToolCall):
        raise PromptError(f"{where}: must be a ToolCall or an object, not {type(value).__name__}")
    _name(value.name, f"{where}.function.name")
    check_text(value.arguments, f"{where}.function.arguments")
    check_text(value.id, f"{where}.id")
    for key in value.arguments_object() or {}:
        if '"' in key:
            raise PromptError(f"{where}.function.arguments: the protocol has no way to write a key with a quote: {key}")
    return value


def _from_mapping(value: Mapping[str, Any], where: str) -> Message:
    _check_keys(value, (*_KEYS, *_UNUSED_KEYS), where)
    role = value.get("role")
    for key in _UNUSED_KEYS:
        if value.get(key) and not (key == "name" and role == "tool"):  # a tool's name is known from its call
            raise PromptError(f"{where}.{key}: has no place in this protocol; remove it")
    if value.get("reasoning") and value.get("reasoning_content"):
        raise PromptError(f"{where}: give reasoning or reasoning_content, not both")
    prefix = value.get("prefix")
    return Message(
        role=role or "",
        content=value.get("content", ""),
        reasoning=value.get("reasoning_content") or value.get("reasoning") or "",
        tool_calls=value.get("tool_calls") or (),
        tool_call_id=value.get("tool_call_id"),
        prefix=False if prefix is None else prefix,
        task=value.get("task"),
    )


def _check_fields(message: Message, where: str) -> None:
    """The role is known and only fields of that role are set."""
    if message.role not in ROLES:
        hint = _OTHER_ROLES.get(str(message.role))
        hint = f"; use {hint!r}" if hint else suggestion(message.role, ROLES)
        raise PromptError(f"{where}.role: {str(message.role)[:100]!r} is not one of {', '.join(ROLES)}{hint}")
    owners = {
        "reasoning": "assistant",
        "tool_calls": "assistant",
        "prefix": "assistant",
        "tool_call_id": "tool",
        "task": "user",
    }
    for name, role in owners.items():
        if getattr(message, name) and message.role != role:
            shown = "reasoning_content" if name == "reasoning" else name
            raise PromptError(f"{where}.{shown}: only a message of role {role!r} has it, this is {message.role!r}")
    if not isinstance(message.prefix, bool):
        raise PromptError(f"{where}.prefix: must be true or false")
    if message.prefix and message.tool_calls:
        raise PromptError(f"{where}.prefix: a message that the output continues cannot have tool calls")
    if message.task is not None and message.task not in TASKS:
        raise PromptError(f"{where}.task: {message.task!r} is not one of {', '.join(TASKS)}")
    if message.role == "assistant" and not isinstance(message.content, str):
        raise PromptError(f"{where}.content: an assistant message holds text only")
    if message.role == "latest_reminder" and not isinstance(message.content, str):
        raise PromptError(f"{where}.content: a reminder holds text only")


def _message(value: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if isinstance(value, Mapping):
        value = _from_mapping(value, where)
    if not isinstance(value, Message):
        raise PromptError(f"{where}: must be a Message or an object, not {type(value).__name__}")
    calls = _list(value.tool_calls, MAX_TOOL_CALLS, f"{where}.tool_calls")
    message = replace(
        value,
        content=_content(value.content, f"{where}.content"),
        reasoning=check_text(value.reasoning, f"{where}.reasoning_content"),
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
    )
    _check_fields(message, where)
    return message


def _check_order(messages: Sequence[Message]) -> None:
    """Tool results answer the calls right before them, all of them, once; prefix and task come last."""
    open_calls: list[str] = []
    caller = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        last = index == len(messages) - 1
        if message.role == "tool":
            if message.tool_call_id is None:
                raise PromptError(f"{where}.tool_call_id: is missing; it names the call that this message answers")
            check_text(message.tool_call_id, f"{where}.tool_call_id")
            if message.tool_call_id not in open_calls:
                raise PromptError(
                    f"{where}.tool_call_id: {message.tool_call_id[:100]!r} is no unanswered call of the assistant "
                    f"message before; open are {open_calls[:5]}"
                )
            open_calls.remove(message.tool_call_id)
            continue
        if open_calls:
            raise PromptError(
                f"{where}: the calls {open_calls[:5]} of messages[{caller}] need tool messages before anything else"
            )
        if message.tool_calls:
            caller, open_calls = index, [call.id for call in message.tool_calls]
            if len(set(open_calls)) != len(open_calls) or "" in open_calls:
                raise PromptError(f"{where}.tool_calls: every call needs an id of its own")
        if message.role == "latest_reminder" and index and messages[index - 1].role == "latest_reminder":
            raise PromptError(f"{where}: follows another reminder; join the two texts in one message")
        for name in ("prefix", "task"):
            if getattr(message, name) and not last:
                raise PromptError(f"{where}.{name}: only the last message can have it")
    if open_calls:
        raise PromptError(f"messages[{caller}].tool_calls: the conversation ends without answers to {open_calls[:5]}")
    if messages[-1].role == "assistant" and not messages[-1].prefix:
        raise PromptError(
            f"messages[{len(messages) - 1}]: the conversation ends with a complete assistant turn; add a user message, "
            f"or set prefix to continue that turn"
        )


def _characters(message: Message) -> int:
    parts = (message.content,) if isinstance(message.content, str) else message.content
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return sum(len(part) for part in parts if isinstance(part, str)) + len(message.reasoning) + calls


def normalize_messages(messages: Sequence[MessageLike]) -> tuple[Message, ...]:
    """Check a conversation and return it as Message objects whose contents have their final form.

    Raises PromptError naming message and field for unknown roles and keys, fields of another role, tool results that
    do not answer the calls before them, and more than MAX_MESSAGES messages or MAX_CHARACTERS characters.
    """
    if isinstance(messages, Mapping | Message):
        raise PromptError("messages: must be a list of messages; this is one message")
    listed = _list(messages, MAX_MESSAGES, "messages")
    if not listed:
        raise PromptError("messages: is empty")
    result: list[Message] = []
    total = 0
    for index, value in enumerate(listed):
        message = _message(value, index)
        total += _characters(message)
        if total > MAX_CHARACTERS:
            raise PromptError(f"messages[{index}]: the texts up to here have more than {MAX_CHARACTERS} characters")
        result.append(message)
    _check_order(result)
    return tuple(result)


def normalize_tools(tools: Sequence[ToolLike]) -> tuple[Tool, ...]:
    """Check tools, given as Tool objects or in OpenAI form, and return them with copied parameters."""
    result: list[Tool] = []
    total = 0
    for i, value in enumerate(_list(tools, MAX_TOOLS, "tools")):
        where = f"tools[{i}]"
        if isinstance(value, Mapping):
            _check_keys(value, ("type", "function"), where)
            function = value.get("function")
            if value.get("type", "function") != "function" or not isinstance(function, Mapping):
                raise PromptError(f'{where}: must have type "function" and an object "function"')
            where += ".function"
            _check_keys(function, ("name", "description", "parameters", "strict"), where)
            if function.get("strict"):
                raise PromptError(f"{where}.strict: schemas are not enforced; leave it out")
            parameters = function.get("parameters")
            value = Tool(
                function.get("name", ""), function.get("description") or "", {} if parameters is None else parameters
            )
        if not isinstance(value, Tool):
            raise PromptError(f"{where}: must be a Tool or an object, not {type(value).__name__}")
        if not isinstance(value.parameters, Mapping):
            raise PromptError(f"{where}.parameters: must be a JSON schema, an object")
        tool = Tool(
            _name(value.name, f"{where}.name"),
            check_text(value.description, f"{where}.description"),
            plain_json(value.parameters, f"{where}.parameters"),
        )
        total += len(tool.description) + len(to_json(tool.parameters))
        if total > MAX_CHARACTERS:
            raise PromptError(f"{where}: the tools up to here have more than {MAX_CHARACTERS} characters")
        if any(tool.name == other.name for other in result):
            raise PromptError(f"{where}.name: there are two tools named {tool.name!r}")
        result.append(tool)
    return tuple(result)
