"""Model output to reasoning, content and tool calls (`spec/vision_prompt_demo.md` B.3), whole or as it streams.

Control tokens are recognised by their ids when ids are given, so text that spells one stays text. The result
never depends on how the output was cut into pieces, and nothing in an output raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from deepinfer_jax.prompt import control
from deepinfer_jax.prompt.calls import CallsBlock
from deepinfer_jax.prompt.errors import PromptError, check_text
from deepinfer_jax.prompt.json_filter import JsonFilter, held_suffix
from deepinfer_jax.prompt.messages import Message, ToolCall
from deepinfer_jax.prompt.tokenizer import Tokenizer

Stage = Literal["reasoning", "reasoning_continued", "content", "content_continued", "calls"]

_MARKS = (control.END_THINK, control.DSML, control.EOS)
_MARK = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")


@dataclass(frozen=True)
class OutputStart:
    """Where in the protocol an output begins; `EncodedPrompt.output` holds it.

    Attributes:
        stage: what the first token belongs to. "reasoning" and "content" open a new text, whose leading line breaks
            are dropped; "..._continued" goes on with a text of the prompt; "calls" is inside a calls block.
        parse_tool_calls: whether calls are recognised; without tools they are content.
        first_call: number of the first call, for its id. Calls of earlier turns count.
        json_output: keep of the content only its JSON value (see `JsonFilter`).
    """

    stage: Stage = "content"
    parse_tool_calls: bool = True
    first_call: int = 0
    json_output: bool = False

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise PromptError(f"stage: {self.stage!r} is not one of {', '.join(get_args(Stage))}")


@dataclass(frozen=True)
class ParsedDelta:
    """What one more piece of output added. Joined over all pieces, it is the ParsedOutput."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ParsedOutput:
    """An output, parsed.

    Attributes:
        raw: the output as text, control tokens spelled out; nothing is missing here.
        reasoning: the text before `</think>`; "" in chat mode.
        content: the answer.
        tool_calls: the calls of a well-formed calls block; ids are "call_0", "call_1", ...
        notes: what was unusual, one sentence each; empty for an output that keeps to the protocol.
        reasoning_finished: whether the output got past its reasoning; True in chat mode.
        token_ids: the output as ids, None if it was given as text.
    """

    raw: str
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    notes: tuple[str, ...] = ()
    reasoning_finished: bool = True
    token_ids: tuple[int, ...] | None = None

    def to_message(self) -> Message:
        """The assistant message that puts this output into the next prompt."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


class OutputParser:
    """Parses an output piece by piece: `push` each, then `finish` once, then read `result`."""

    def __init__(self, start: OutputStart | None = None, *, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: given, the pieces are token ids; None, they are text."""
        self._start = start or OutputStart()
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._marks = {tokenizer.control_id(mark): mark for mark in _MARKS} if tokenizer else {}
        self._ids: list[int] = []
        self._raw: list[str] = []
        self._partial = ""  # text mode: the end of a piece that may become a control token
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._reported = (0, 0, 0)  # lengths of these three lists when `push` last returned
        self._notes: dict[str, None] = {}
        self._filter = JsonFilter() if self._start.json_output else None
        self._in_reasoning = self._start.stage.startswith("reasoning")
        self._skip_breaks = self._start.stage in ("reasoning", "content")
        self._breaks, self._angle = 0, False  # line breaks, then "<": dropped if a control token follows
        self._block = CallsBlock(opened=True) if self._start.stage == "calls" else None
        self._after_calls = False
        self._ended = False
        self._finished = False

    def push(self, piece: str | Sequence[int]) -> ParsedDelta:
        """Add a piece of output: ids if the parser has a tokenizer, text otherwise."""
        if self._finished:
            raise PromptError("the output is finished; a new one needs a new parser")
        if self._tokenizer is None:
            if not isinstance(piece, str):
                raise PromptError("output: token ids need a tokenizer; this parser was made for text")
            self._push_text(check_text(piece, "output"))
        else:
            if isinstance(piece, str):
                raise PromptError("output: this parser was made with a tokenizer, for token ids; it got text")
            self._push_ids(self._tokenizer.check_ids(piece, "output"))
        return self._delta()

    def push_cut(self, text: str) -> ParsedDelta:
        """Add the text that is left of a token which a stop string cuts; `finish` follows."""
        self._on_text(check_text(text, "output"), raw=True)
        return self._delta()

    def finish(self) -> ParsedDelta:
        """End the output; returns what had been held back."""
        if self._finished:
            return ParsedDelta()
        if self._detokenizer is not None:
            self._on_text(self._detokenizer.finish(), raw=True)
        else:
            self._on_text(self._partial, raw=True)
        if self._block is not None:
            self._block.fail("the output ends before the block is closed")
            self._settle()
        self._release()
        if self._filter is not None:
            self._content.append(self._filter.finish())
        self._finished = True
        return self._delta()

    @property
    def result(self) -> ParsedOutput:
        """The parsed output; PromptError before `finish`."""
        if not self._finished:
            raise PromptError("the output is not finished; call finish() first")
        return ParsedOutput(
            raw="".join(self._raw),
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(self._calls),
            notes=tuple(self._notes),
            reasoning_finished=not self._in_reasoning or self._after_calls,
            token_ids=tuple(self._ids) if self._tokenizer else None,
        )

    def _delta(self) -> ParsedDelta:
        reasoning, content, calls = self._reported
        self._reported = (len(self._reasoning), len(self._content), len(self._calls))
        return ParsedDelta(
            "".join(self._reasoning[reasoning:]), "".join(self._content[content:]), tuple(self._calls[calls:])
        )

    def _push_ids(self, ids: Sequence[int]) -> None:
        assert self._detokenizer is not None
        self._ids += ids
        for number in ids:
            mark = self._marks.get(number)
            if mark is None:
                self._on_text(self._detokenizer.push(number), raw=True)
            else:
                self._on_text(self._detokenizer.finish(), raw=True)
                self._on_mark(mark)

    def _push_text(self, text: str) -> None:
        text = self._partial + text
        *complete, tail = _MARK.split(text)
        hold = held_suffix(tail, _MARKS)
        self._partial = tail[len(tail) - hold :]
        for i, piece in enumerate([*complete, tail[: len(tail) - hold]]):
            if i % 2:
                self._on_mark(piece)
            else:
                self._on_text(piece, raw=True)

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _emit(self, text: str) -> None:
        """Text that certainly belongs to the current stage."""
        if self._in_reasoning:
            self._reasoning.append(text)
        else:
            self._content.append(self._filter.push(text) if self._filter else text)

    def _release(self) -> None:
        """What was held back is text after all."""
        held = "\n" * self._breaks + ("<" if self._angle else "")
        self._breaks, self._angle = 0, False
        if held:
            self._emit(held)

    def _on_text(self, text: str, raw: bool = False) -> None:
        if raw:
            self._raw.append(text)
        if not text:
            return
        if self._ended:
            self._note("Text after the end-of-sentence token was ignored.")
            return
        if self._after_calls:
            if text.strip():
                self._note("Text after the tool calls was ignored.")
            return
        if self._block is not None:
            self._block.text(text)
            self._settle()
            return
        if self._skip_breaks:
            text = text.lstrip("\n")
            if not text:
                return
            self._skip_breaks = False
        if self._angle:
            self._release()
        body = text.removesuffix("<")
        kept = body.rstrip("\n")
        if kept:
            self._release()
            self._emit(kept)
        self._breaks += len(body) - len(kept)
        self._angle = len(body) < len(text)

    def _on_mark(self, mark: str) -> None:
        self._raw.append(mark)
        if self._ended:
            self._note("Text after the end-of-sentence token was ignored.")
        elif mark == control.EOS:
            self._ended = True
        elif mark == control.DSML:
            self._on_dsml()
        else:
            self._on_end_think()

    def _on_dsml(self) -> None:
        if self._block is not None:
            self._block.mark()
            self._settle()
        elif self._after_calls:
            self._note("Text after the tool calls was ignored.")
        elif self._start.parse_tool_calls and self._angle:
            self._block = CallsBlock(before="\n" * self._breaks + "<" + control.DSML)
            self._breaks, self._angle, self._skip_breaks = 0, False, False
        else:
            if self._start.parse_tool_calls:
                self._note("A DSML token outside of a calls block was kept as text.")
            self._on_text(control.DSML)

    def _on_end_think(self) -> None:
        if self._block is not None and self._block.in_value:
            self._block.text(control.END_THINK)
            return
        if self._block is not None:
            self._block.fail("the end of thinking stands inside the block")
            self._settle()
        if self._after_calls:
            self._note("Text after the tool calls was ignored.")
        elif self._in_reasoning:
            if self._angle:
                self._release()
            self._breaks = 0
            self._in_reasoning, self._skip_breaks = False, True
        else:
            self._release()
            self._skip_breaks = False
            self._note("An end of thinking outside of reasoning was dropped.")

    def _settle(self) -> None:
        """Act on a block that is complete or has failed. A failed one becomes text where it began."""
        block = self._block
        assert block is not None
        if block.error is not None:
            self._block = None
            self._note(f"A malformed calls block was kept as text: {block.error}.")
            self._on_text("".join(block.raw))
        elif block.closed:
            self._block, self._after_calls = None, True
            for name, arguments in block.calls:
                number = self._start.first_call + len(self._calls)
                self._calls.append(ToolCall(name, arguments, f"call_{number}"))
            self._on_text(block.rest)


def parse_output(
    output: str | Sequence[int], start: OutputStart | None = None, *, tokenizer: Tokenizer | None = None
) -> ParsedOutput:
    """Parse a whole output.

    Args:
        output: token ids, which need a tokenizer, or text, in which control tokens are recognised by their spelling.
        start: where the output begins, `EncodedPrompt.output`; None is chat mode with tools.
    """
    parser = OutputParser(start, tokenizer=tokenizer)
    parser.push(output)
    parser.finish()
    return parser.result
