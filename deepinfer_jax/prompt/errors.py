"""The error of this package, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PromptError(ValueError):
    """A conversation, tool, setting or token list that cannot be encoded or parsed; the message names the place."""


def suggestion(name: object, choices: Iterable[str]) -> str:
    """ " (did you mean ...?)" for a misspelt name, "" when nothing is close."""
    close = difflib.get_close_matches(str(name)[:100].lower(), list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_text(value: object, where: str) -> str:
    """The value if it is text that UTF-8 can hold; PromptError otherwise."""
    if not isinstance(value, str):
        raise PromptError(f"{where}: must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: has a lone surrogate at character {error.start}, which is no text") from None
    return value
