"""Data and strategies shared by the prompt tests."""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st

from deepinfer_jax.prompt import Tokenizer, control

DATA = Path(__file__).parents[1] / "data" / "prompt"

SPELLINGS = (*control.REQUIRED, *control.OPTIONAL)

PIECES = (*SPELLINGS, "<", ">", "</", "\n", "\n\n", " ", "a", "12345", '"', "\\", "{", "\t", "\r\n", "\x00", "｜ ", "﻿")


def unpack(name: str) -> bytes:
    """Content of a compressed data file."""
    return lzma.decompress((DATA / f"{name}.xz").read_bytes())


@lru_cache(maxsize=1)
def released() -> Tokenizer:
    """The tokenizer of DeepSeek-V4.1-Flash."""
    return Tokenizer(unpack("tokenizer_v41.json"))


@lru_cache(maxsize=1)
def library() -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The same file in the `tokenizers` library: as it is, and without its added vocabulary."""
    document = json.loads(unpack("tokenizer_v41.json"))
    whole = tokenizers.Tokenizer.from_str(json.dumps(document))
    document["added_tokens"] = []
    return whole, tokenizers.Tokenizer.from_str(json.dumps(document))


@lru_cache(maxsize=1)
def golden() -> dict[str, Any]:
    """Prompts and parses recorded with the released encoder and the official library."""
    return json.loads(unpack("prompt_golden.json"))


@lru_cache(maxsize=1)
def random_cases() -> dict[str, Any]:
    """Random conversations and outputs recorded with the official library."""
    return json.loads(unpack("random_cases.json"))


def settings_of(request: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `encode_conversation` for a recorded chat request."""
    names = ("tools", "reasoning_effort", "tool_choice", "response_format")
    settings = {name: request[name] for name in names if name in request}
    if "thinking" in request:
        settings["thinking"] = request["thinking"]["type"] != "disabled"
    return settings


unicode_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
texts = st.lists(st.one_of(st.sampled_from(PIECES), unicode_texts), max_size=8).map("".join)
"""Texts full of control spellings."""
