"""A calls block in the output, read as it arrives.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="F">
    <｜DSML｜ parameter name="K" string="true">text, as it is</｜DSML｜ parameter>
    <｜DSML｜ parameter name="N" string="false">JSON</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

The space after the token may be missing and "calls" may read "tool_calls" (the older spelling). `string` may be
missing; then the value is JSON if it parses, else text. All else is an error, and an error fails the whole block.
"""

from __future__ import annotations

import re

from deepinfer_jax.prompt.control import DSML
from deepinfer_jax.prompt.json_text import from_json, to_json

MAX_TAG = 4096
"""Most characters from a DSML token to the end of its tag."""

_TAG = re.compile(r'([^"<>]*(?:"[^"]*"[^"<>]*)*)>')
_CALLS = re.compile(r"\s*(?:tool_)?calls\s*")
_INVOKE = re.compile(r"\s*invoke\s*")
_PARAMETER = re.compile(r"\s*parameter\s*")
_OPEN_INVOKE = re.compile(r'\s*invoke\s+name="([^"\r\n]{1,256})"\s*')
_OPEN_PARAMETER = re.compile(r'\s*parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*')
_OPENINGS = tuple(space + name for space in (" ", "") for name in ("calls>", "tool_calls>"))


class CallsBlock:
    """Feed `text` and `mark` (a DSML token) in order; then `closed` or `error` says how it went.

    Errors are found at the same place, with the same message, however the text is cut.

    Attributes:
        raw: everything fed so far, and what came before.
        calls: (name, arguments as JSON text) of each complete call.
        rest: text after the closing tag.
    """

    def __init__(self, before: str = "", opened: bool = False) -> None:
        """before: the text of the opening up to its DSML token. opened: the prompt holds the opening tag instead."""
        self.raw: list[str] = [before]
        self.calls: list[tuple[str, str]] = []
        self.rest = ""
        self.error: str | None = None
        self.closed = False
        self._state = "block" if opened else "opening"  # opening, block, invoke, value
        self._tag: str | None = None if opened else ""  # text of a tag after its token, None between tags
        self._closing = False  # whether the tag began with "</"
        self._between = ""  # between tags: the text so far without leading white space
        self._value: list[str] = []  # inside a parameter
        self._name, self._key, self._kind = "", "", None
        self._arguments: dict[str, str] = {}

    @property
    def in_value(self) -> bool:
        """Whether text now belongs to the value of a parameter."""
        return self._state == "value" and self._tag is None

    def fail(self, error: str) -> None:
        """End the block as malformed; the first error counts."""
        if self.error is None and not self.closed:
            self.error = error

    def text(self, text: str) -> None:
        """Add text. Once the block has closed or failed, it is only kept."""
        self.raw.append(text)
        if self.closed:
            self.rest += text
        elif self.error is None:
            self._text(text)

    def _text(self, text: str) -> None:
        if self._tag is not None:
            self._tag += text
            self._try_tag()
        elif self._state == "value":
            self._value.append(text)
        else:
            self._between = (self._between + text).lstrip()
            if self._between not in ("", "<", "</"):
                self.fail("there is text between its tags")

    def mark(self) -> None:
        """Add a DSML token."""
        self.raw.append(DSML)
        if self.closed or self.error is not None:
            return
        if self._tag is not None:
            self.fail("a tag is not closed")
            return
        before = "".join(self._value) if self._state == "value" else self._between
        if not before.endswith(("<", "</")):
            self.fail("a DSML token stands outside of a tag")
            return
        self._closing = before.endswith("</")
        if self._state == "value":
            self._value = [before[: -2 if self._closing else -1]]
        self._tag, self._between = "", ""

    def _try_tag(self) -> None:
        assert self._tag is not None
        if self._state == "opening" and not any(
            option.startswith(self._tag) or self._tag.startswith(option) for option in _OPENINGS
        ):
            self.fail("it does not open with the calls tag")
            return
        found = _TAG.match(self._tag)
        if (found.end() if found else len(self._tag)) > MAX_TAG:
            self.fail("a tag is too long")
        elif found:
            after = self._tag[found.end() :]
            self._tag = None
            self._on_tag(found[1])
            if self.closed:
                self.rest = after
            elif self.error is None and after:
                self._text(after)

    def _on_tag(self, tag: str) -> None:
        if self._state == "opening":
            self._state = "block"
        elif self._state == "block":
            opening = None if self._closing else _OPEN_INVOKE.fullmatch(tag)
            if opening:
                self._state, self._name, self._arguments = "invoke", opening[1], {}
            elif self._closing and _CALLS.fullmatch(tag):
                self.closed = bool(self.calls)
                if not self.calls:
                    self.fail("it holds no call")
            else:
                self.fail("a call does not begin with an invoke tag that names the tool")
        elif self._state == "invoke":
            opening = None if self._closing else _OPEN_PARAMETER.fullmatch(tag)
            if opening:
                self._state, self._key, self._kind, self._value = "value", opening[1], opening[2], []
            elif self._closing and _INVOKE.fullmatch(tag):
                pairs = (f"{to_json(key)}: {value}" for key, value in self._arguments.items())
                self.calls.append((self._name, "{" + ", ".join(pairs) + "}"))
                self._state = "block"
            else:
                self.fail("a call holds something other than parameters with a name")
        elif self._closing and _PARAMETER.fullmatch(tag):
            self._on_value("".join(self._value))
        else:
            self.fail("a parameter is not closed")

    def _on_value(self, value: str) -> None:
        if self._key in self._arguments:
            self.fail("a call names one parameter twice")
            return
        text = value.strip(" \t\r\n")
        is_json = self._kind != "true"
        if is_json:
            try:
                from_json(text)
            except ValueError:
                is_json = False
                if self._kind == "false":
                    self.fail("the value of a parameter is not JSON")
                    return
        self._arguments[self._key] = text if is_json else to_json(value)
        self._state = "invoke"
