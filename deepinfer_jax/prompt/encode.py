"""Conversations to prompts (`spec/vision_prompt_demo.md` B.2): text with the places of control tokens, and ids.

The words of the effort line, the tool section and the response format are part of the protocol, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.prompt import control
from deepinfer_jax.prompt.errors import PromptError, check_text, suggestion
from deepinfer_jax.prompt.json_text import from_json_object, plain_json, to_json
from deepinfer_jax.prompt.messages import (
    MAX_CHARACTERS,
    Content,
    ImagePart,
    Message,
    MessageLike,
    Tool,
    ToolCall,
    ToolLike,
    normalize_messages,
    normalize_tools,
)
from deepinfer_jax.prompt.parser import OutputStart
from deepinfer_jax.prompt.tokenizer import Tokenizer

EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
"""Named reasoning efforts; "none" turns thinking off."""

DEFAULT_EFFORT = 75

_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

_TOOL_SECTION = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOL_SECTION_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT_SECTION = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_SECTION_TOKENS = re.compile(f"({control.DSML}|{control.THINK}|{control.END_THINK})")
_GROUNDING_TOKENS = re.compile("(" + "|".join(map(re.escape, control.GROUNDING)) + ")")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text.

    Attributes:
        text: the prompt with control tokens spelled out.
        special_ranges: ascending [start, end) in characters of `text`, each one control token; all else is text,
            even where it spells one.
        output: how to parse what the model writes after it.
        images: the images whose placeholders the prompt holds, in order.
    """

    text: str
    special_ranges: tuple[tuple[int, int], ...]
    output: OutputStart
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text and as token ids; the other fields are those of RenderedPrompt."""

    text: str
    token_ids: tuple[int, ...]
    special_ranges: tuple[tuple[int, int], ...]
    output: OutputStart
    images: tuple[ImagePart, ...] = ()


class _Writer:
    """Collects a prompt piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ranges: list[tuple[int, int]] = []
        self.images: list[ImagePart] = []
        self._length = 0

    def text(self, text: str) -> None:
        self.pieces.append(text)
        self._length += len(text)

    def control(self, spelling: str) -> None:
        self.ranges.append((self._length, self._length + len(spelling)))
        self.text(spelling)

    def mixed(self, text: str, tokens: re.Pattern[str]) -> None:
        """Text in which the matches of `tokens` are control tokens."""
        for i, piece in enumerate(tokens.split(text)):
            (self.control if i % 2 else self.text)(piece)

    def content(self, content: Content) -> None:
        for i, part in enumerate((content,) if isinstance(content, str) else content):
            if i:
                self.text("\n\n")
            if isinstance(part, str):
                self.text(part)
            else:
                self.control(control.IMAGE)
                self.images.append(part)

    def tag(self, text: str) -> None:
        """A DSML tag, `text` beginning with "<" or "</" and the token following it."""
        slash = 2 if text.startswith("</") else 1
        self.text(text[:slash])
        self.control(control.DSML)
        self.text(text[slash:])


def _resolve_thinking(thinking: bool | None, effort: int | str | None, task: str | None) -> int | None:
    """Effort 1..100, or None for chat mode."""
    if thinking is not None and not isinstance(thinking, bool):
        raise PromptError(f"thinking: must be True, False or None, not {type(thinking).__name__}")
    number: int | None
    if effort is None:
        number = DEFAULT_EFFORT
    elif effort == "none":
        number = None
    elif isinstance(effort, str):
        if effort not in EFFORTS:
            names = (*EFFORTS, "none")
            hint = suggestion(effort, names)
            raise PromptError(f"reasoning_effort: {effort[:100]!r} is not 1..100 or one of {', '.join(names)}{hint}")
        number = EFFORTS[effort]
    elif isinstance(effort, bool) or not isinstance(effort, int) or not 1 <= effort <= 100:
        raise PromptError(f"reasoning_effort: {str(effort)[:100]} is not an integer of 1..100 or a name")
    else:
        number = effort
    if task is not None:
        if thinking or (effort is not None and number is not None):
            raise PromptError(f"thinking: the task {task!r} is answered without thinking; leave it off")
        return None
    if thinking and number is None:
        raise PromptError('thinking: is on, but reasoning_effort "none" turns it off')
    if thinking is False and effort is not None and number is not None:
        raise PromptError(f"reasoning_effort: {effort!r} was asked with thinking off")
    return None if thinking is False else number


def _format_schema(response_format: Mapping[str, Any] | None) -> str | None:
    """JSON text that the response must follow, None for free text. OpenAI's three forms."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    keys = set(response_format) - {"type", "json_schema"} if isinstance(response_format, Mapping) else set()
    if kind not in ("text", "json_object", "json_schema") or keys:
        raise PromptError('response_format: must be {"type": "text" | "json_object" | "json_schema", ...}')
    if kind == "text":
        return None
    if kind == "json_object":
        return to_json({"type": "json_object"})
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise PromptError("response_format.json_schema.schema: must be a JSON schema, an object")
    return to_json(plain_json(schema, "response_format.json_schema.schema"))


def _choose_tools(
    tools: tuple[Tool, ...], choice: Any, thinking: bool, messages: Sequence[Message]
) -> tuple[Tool, ...]:
    """The tools to show for a tool_choice, which is checked."""
    if isinstance(choice, Mapping):
        raise PromptError('tool_choice: a named tool cannot be forced; pass only that tool and "required"')
    if choice not in ("auto", "none", "required"):
        raise PromptError(f"tool_choice: {str(choice)[:100]!r} is not one of auto, none, required")
    if choice == "none":
        return ()
    if choice == "required":
        if not tools:
            raise PromptError('tool_choice: "required" needs tools')
        if thinking:
            raise PromptError('tool_choice: "required" needs thinking off, since the prompt itself opens the calls')
        if messages[-1].prefix or messages[-1].task:
            raise PromptError('tool_choice: "required" cannot follow a message with prefix or task')
    return tools


def _write_head(
    out: _Writer, messages: Sequence[Message], effort: int | None, tools: Sequence[Tool], schema: str | None
) -> Sequence[Message]:
    """BOS, effort line, first system message, tools and response format. Returns the messages that follow."""
    out.control(control.BOS)
    has_system = messages[0].role == "system"
    if has_system or tools or schema is not None or effort is not None:
        out.control(control.SYSTEM)
    if effort is not None:
        out.text(_EFFORT_LINE.format(effort))
    if has_system:
        out.content(messages[0].content)
    if tools:
        out.text("\n\n")
        out.mixed(_TOOL_SECTION, _SECTION_TOKENS)
        shown = ({"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools)
        out.text("\n".join(map(to_json, shown)))
        out.text(_TOOL_SECTION_END)
    if schema is not None:
        out.text("\n\n" + _FORMAT_SECTION + schema)
    return messages[1:] if has_system else messages


def _write_user_turn(out: _Writer, turn: Sequence[Message], calls: Sequence[ToolCall]) -> None:
    """One user turn of adjacent user and tool messages; results stand in the order of the calls they answer."""
    order = {call.id: i for i, call in enumerate(calls)}
    results = sorted((m for m in turn if m.role == "tool"), key=lambda m: order[m.tool_call_id or ""])
    out.control(control.USER)
    for i, message in enumerate([*results, *(m for m in turn if m.role == "user")]):
        if i:
            out.text("\n\n")
        if message.role == "tool":
            out.text("<tool_result>")
        out.content(message.content)
        if message.role == "tool":
            out.text("</tool_result>")


def _write_calls(out: _Writer, calls: Sequence[ToolCall]) -> None:
    """A calls block. Arguments that are no JSON object become one text parameter named "arguments"."""
    out.tag("< calls>\n")
    for call in calls:
        out.tag(f'< invoke name="{call.name}">\n')
        arguments = from_json_object(call.arguments)
        if arguments is None:
            arguments = {"arguments": call.arguments}
        for i, (key, value) in enumerate(arguments.items()):
            is_text = isinstance(value, str)
            out.text("\n" if i else "")
            out.tag(f'< parameter name="{key}" string="{"true" if is_text else "false"}">')
            out.text(value if is_text else to_json(value))
            out.tag("</ parameter>")
        out.text("\n")
        out.tag("</ invoke>\n")
    out.tag("</ calls>")


def _write_assistant_turn(out: _Writer, message: Message, keep_reasoning: bool) -> None:
    """Header, reasoning, content, calls and EOS. A message with prefix stays open where its text ends."""
    out.control(control.ASSISTANT)
    if keep_reasoning:
        out.control(control.THINK)
        out.mixed(message.reasoning, _GROUNDING_TOKENS)
        if message.prefix and not message.content:
            return
    out.control(control.END_THINK)
    assert isinstance(message.content, str)  # checked by normalize_messages
    out.mixed(message.content, _GROUNDING_TOKENS)
    if message.tool_calls:
        out.text("\n\n")
        _write_calls(out, message.tool_calls)
    if not message.prefix:
        out.control(control.EOS)


def _write_turns(out: _Writer, messages: Sequence[Message], keep_all: bool, thinking: bool) -> None:
    """Everything after the head. Reasoning is kept in all turns, or in the one that the output continues."""
    calls: Sequence[ToolCall] = ()
    index = 0
    while index < len(messages):
        message = messages[index]
        end = index + 1
        if message.role in ("user", "tool"):
            while end < len(messages) and messages[end].role in ("user", "tool"):
                end += 1
            _write_user_turn(out, messages[index:end], calls)
        elif message.role == "assistant":
            calls = message.tool_calls
            _write_assistant_turn(out, message, thinking and (keep_all or message.prefix))
        else:
            out.control(control.SYSTEM if message.role == "system" else control.LATEST_REMINDER)
            out.content(message.content)
        index = end


def _open_turn(
    out: _Writer, last: Message, thinking: bool, required: bool, has_tools: bool, first_call: int
) -> OutputStart:
    """Write what opens the output's turn, and say how the output is to be parsed."""
    if last.prefix:
        if not thinking:
            if last.reasoning and not last.content:
                raise PromptError("messages: the last one continues its reasoning; that needs thinking on")
            return OutputStart("content_continued", has_tools, first_call)
        if last.content:
            return OutputStart("content_continued", has_tools, first_call)
        return OutputStart("reasoning_continued" if last.reasoning else "reasoning", has_tools, first_call)
    if last.task is not None and last.task != "action":
        out.control(control.TASKS[last.task])
        return OutputStart("content", False, first_call)
    out.control(control.ASSISTANT)
    out.control(control.THINK if thinking else control.END_THINK)
    if last.task is not None:
        out.control(control.TASKS[last.task])
        return OutputStart("content", False, first_call)
    if required:
        out.text("\n\n")
        out.tag("< calls>\n")
        return OutputStart("calls", True, first_call)
    return OutputStart("reasoning" if thinking else "content", has_tools, first_call)


def render_conversation(
    messages: Sequence[MessageLike],
    *,
    tools: Sequence[ToolLike] = (),
    thinking: bool | None = None,
    reasoning_effort: int | str | None = None,
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """Render a conversation up to the point where the model writes. Needs no tokenizer.

    Args:
        messages: Message objects or dicts in OpenAI form; the last is no complete assistant turn.
        tools: Tool objects or dicts in OpenAI form, shown in the first system turn.
        thinking: whether the model reasons first. None: yes, unless the effort is "none" or the last message has
            a task.
        reasoning_effort: 1..100 or a name of EFFORTS; None is 75. It is told to the model in words.
        tool_choice: "auto"; "none" hides the tools; "required" opens a calls block (thinking off only).
        response_format: OpenAI form; tells the model a JSON schema in words and enforces nothing.

    Raises PromptError, a ValueError, naming the message and field.
    """
    checked = normalize_messages(messages)
    last = checked[-1]
    effort = _resolve_thinking(thinking, reasoning_effort, last.task)
    shown = _choose_tools(normalize_tools(tools), tool_choice, effort is not None, checked)
    out = _Writer()
    rest = _write_head(out, checked, effort, shown, _format_schema(response_format))
    _write_turns(out, rest, bool(shown), effort is not None)
    first_call = sum(len(message.tool_calls) for message in checked)
    start = _open_turn(out, last, effort is not None, tool_choice == "required", bool(shown), first_call)
    return RenderedPrompt("".join(out.pieces), tuple(out.ranges), start, tuple(out.images))


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[MessageLike],
    *,
    tools: Sequence[ToolLike] = (),
    thinking: bool | None = None,
    reasoning_effort: int | str | None = None,
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
    image_placeholders: bool = False,
) -> EncodedPrompt:
    """Encode a conversation: `render_conversation` (same arguments), then ids.

    Control tokens are those that the encoder wrote; text of messages never becomes one, whatever it spells (but for
    the grounding tokens in assistant turns, which the model itself writes).

    image_placeholders: images are not supported yet, so a message with an image is an error. True leaves one
        placeholder token per image, for callers that replace it.
    """
    rendered = render_conversation(
        messages,
        tools=tools,
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        tool_choice=tool_choice,
        response_format=response_format,
    )
    if rendered.images and not image_placeholders:
        raise PromptError("messages: images are not supported yet; remove the image parts")
    ids = tokenizer.encode_ranges(rendered.text, rendered.special_ranges)
    return EncodedPrompt(rendered.text, tuple(ids), rendered.special_ranges, rendered.output, rendered.images)


def encode_completion(tokenizer: Tokenizer, text: str) -> EncodedPrompt:
    """A text to be completed as it is: BOS and the text, in which nothing is a control token."""
    if len(check_text(text, "prompt")) > MAX_CHARACTERS:
        raise PromptError(f"prompt: has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    full = control.BOS + text
    ranges = ((0, len(control.BOS)),)
    return EncodedPrompt(
        full, tuple(tokenizer.encode_ranges(full, ranges)), ranges, OutputStart("content_continued", False)
    )
