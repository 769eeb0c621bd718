"""Tools of the tool-call task: each with a schema, sentences that ask for it, and arguments to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.evals.words import CITIES, LANGUAGES, NAMES, WORDS
from deepinfer_jax.prompt import Tool

Rng = np.random.Generator


def pick(rng: Rng, options: tuple[Any, ...]) -> Any:
    """One of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


def words(rng: Rng, low: int, high: int) -> str:
    """low..high different words."""
    count = int(rng.integers(low, high + 1))
    return " ".join(WORDS[i] for i in rng.choice(len(WORDS), count, replace=False))


@dataclass(frozen=True)
class ToolKind:
    """A tool and how users ask for it.

    Attributes:
        tool: what the model is told.
        requests: sentences with the arguments as fields.
        draw: draws arguments, in the order of the schema.
    """

    tool: Tool
    requests: tuple[str, ...]
    draw: Callable[[Rng], dict[str, Any]]


def _kind(
    name: str, text: str, types: dict[str, str], requests: tuple[str, ...], draw: Callable[[Rng], dict[str, Any]]
) -> ToolKind:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return ToolKind(Tool(name, text, parameters), requests, draw)


KINDS: tuple[ToolKind, ...] = (
    _kind(
        "get_weather",
        "Weather in a city.",
        {"city": "string"},
        ("What is the weather in {city}?", "Tell me the weather in {city}."),
        lambda rng: {"city": pick(rng, CITIES)},
    ),
    _kind(
        "get_time",
        "Local time in a city.",
        {"city": "string"},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        lambda rng: {"city": pick(rng, CITIES)},
    ),
    _kind(
        "set_timer",
        "Start a timer.",
        {"minutes": "number"},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
        lambda rng: {"minutes": int(rng.integers(1, 121))},
    ),
    _kind(
        "add_numbers",
        "Add two numbers.",
        {"a": "number", "b": "number"},
        ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."),
        lambda rng: {"a": int(rng.integers(1, 1000)), "b": int(rng.integers(1, 1000))},
    ),
    _kind(
        "send_message",
        "Send a text to a person.",
        {"to": "string", "text": "string"},
        ("Send {to} the message: {text}", "Write to {to}: {text}"),
        lambda rng: {"to": pick(rng, NAMES), "text": words(rng, 2, 6)},
    ),
    _kind(
        "translate",
        "Translate a text.",
        {"text": "string", "language": "string"},
        ("Translate to {language}: {text}", "How do you say this in {language}: {text}"),
        lambda rng: {"text": words(rng, 1, 4), "language": pick(rng, LANGUAGES)},
    ),
    _kind(
        "search",
        "Search the library.",
        {"query": "string", "limit": "number"},
        ("Search for {query} and show {limit} results.", "Find {limit} results for {query}."),
        lambda rng: {"query": words(rng, 1, 4), "limit": int(rng.integers(1, 21))},
    ),
    _kind(
        "set_light",
        "Switch the light of a room.",
        {"room": "string", "on": "boolean"},
        ("Set the light in the {room} to {on}.", "Light in the {room}: {on}."),
        lambda rng: {"room": words(rng, 1, 2), "on": bool(rng.integers(2))},
    ),
)


def request(kind: ToolKind, arguments: dict[str, Any], rng: Rng) -> str:
    """A sentence that asks for the call."""
    shown = {key: ("on" if value else "off") if isinstance(value, bool) else value for key, value in arguments.items()}
    return pick(rng, kind.requests).format(**shown)
