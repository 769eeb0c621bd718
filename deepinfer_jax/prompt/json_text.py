"""JSON as the protocol writes it, and JSON from outside, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.prompt.errors import PromptError, check_text

MAX_JSON_DEPTH = 64
"""Most brackets inside one another. A fixed bound, so that nothing depends on the depth of Python's stack."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def to_json(value: Any) -> str:
    """JSON text of plain values: separators ", " and ": ", keys in their order, letters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:50]} is beyond the range of a double")
    return number


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _depth(text: str) -> int:
    deepest = level = 0
    for mark in re.findall(r"[\[{\]}]", _STRING.sub("", text)):
        level += 1 if mark in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def from_json(text: str) -> Any:
    """Parse strict JSON; of repeated keys the last counts.

    Raises ValueError for NaN, infinities, numbers beyond a double, lone surrogates, integers of more than
    4300 digits and for brackets more than MAX_JSON_DEPTH deep.
    """
    if _depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"is nested more than {MAX_JSON_DEPTH} deep")
    value = json.loads(text, parse_float=_finite, parse_constant=_no_constant)
    if "\\u" in text:
        to_json(value).encode("utf-8")  # an escape may spell half a surrogate pair; UnicodeEncodeError is a ValueError
    return value


def from_json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text holds, None for any other text."""
    try:
        value = from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def plain_json(value: Any, where: str, depth: int = MAX_JSON_DEPTH) -> Any:
    """A copy of JSON-like values made of dict, list, str, int, float, bool and None only.

    PromptError names the place of whatever JSON cannot hold.
    """
    if depth < 0:
        raise PromptError(f"{where}: is nested more than {MAX_JSON_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_text(str(value), where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PromptError(f"{where}: {value} is not JSON")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            check_text(key, f"{where}, a key")
        return {str(key): plain_json(child, f"{where}.{key[:50]}", depth - 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(child, f"{where}[{i}]", depth - 1) for i, child in enumerate(value)]
    raise PromptError(f"{where}: {type(value).__name__} is not JSON")
