"""The JSON part of an answer, found while it streams."""

from __future__ import annotations

import re

_FENCES = ("```json\n", "```\n")
_START = re.compile(r"```(?:json)?\n|[{\[]")
_END = "\n```"


def held_suffix(text: str, patterns: tuple[str, ...]) -> int:
    """Length of the longest proper prefix of a pattern that the text ends with: it may become the pattern."""
    longest = min(len(text), max(map(len, patterns)) - 1)
    for length in range(longest, 0, -1):
        if any(len(pattern) > length and text.endswith(pattern[:length]) for pattern in patterns):
            return length
    return 0


class JsonFilter:
    """Keeps the first JSON value of a text: from a code fence to its end, or from the first bracket on.

    One space stands for all text before it, and one for all text after its fence. A text without JSON becomes one
    space. Pieces may be cut anywhere.
    """

    def __init__(self) -> None:
        self._state = "before"
        self._held = ""
        self._dropped = False

    def push(self, text: str) -> str:
        """The text of this piece that is certainly kept."""
        text = self._held + text
        self._held = ""
        kept = ""
        if self._state == "before":
            found = _START.search(text)
            if found is None:
                hold = held_suffix(text, _FENCES)
                self._dropped |= len(text) > hold
                self._held = text[len(text) - hold :]
                return ""
            kept = " " if self._dropped or found.start() else ""
            text = text[found.end() :] if found[0][0] == "`" else text[found.start() :]
            self._state = "inside"
        if self._state == "inside":
            body, fence, after = text.partition(_END)
            if not fence:
                hold = held_suffix(text, (_END,))
                self._held = text[len(text) - hold :]
                return kept + text[: len(text) - hold]
            kept, text = kept + body, after
            self._state, self._dropped = "after", False
        if text and not self._dropped:
            self._dropped = True
            kept += " "
        return kept

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        if self._state == "before":
            return " " if held or self._dropped else ""
        return held
