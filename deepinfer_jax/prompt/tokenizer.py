"""The tokenizer of a checkpoint: control tokens apart from text, exact bytes both ways (`spec/style.md` 3.2).

Two `tokenizers` objects are made from one file. The full one knows the added vocabulary, so a control token's
spelling becomes its id. The plain one has none, so text that merely spells a control token stays text.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from deepinfer_jax.checkpoint.files import parse_json, read_small, shown
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.prompt import control
from deepinfer_jax.prompt.errors import PromptError, check_text

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20

_PROBES = ("a", " a", "  two\n\n\tlines \r\n", "e\u0301 \u00e9 \ufb01 \u65e5\u672c", "\U0001f642\u200d 0123 \x00\x7f")
"""Texts that any normaliser, prefix space or lossy decoder would change."""


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Visible Latin-1 characters stand for themselves; the other bytes, in order, are U+0100 and following.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = sorted(set(range(256)) - set(visible))
    return table | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def _stored_bytes(stored: str) -> bytes:
    table = _byte_of_char()
    if all(char in table for char in stored):
        return bytes(table[char] for char in stored)
    return stored.encode("utf-8")  # an added token, written as it is


def _added_tokens(document: dict[str, Any], where: str) -> dict[str, int]:
    """Spelling -> id of the added vocabulary; ValueError when the file lists one spelling or id twice."""
    listed = document.get("added_tokens")
    if not isinstance(listed, list):
        raise ValueError(f"{where}: added_tokens must be a list")
    found: dict[str, int] = {}
    for i, token in enumerate(listed):
        content, number = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        if not isinstance(content, str) or not content or type(number) is not int:
            raise ValueError(f"{where}: added_tokens[{i}] must have a content and an integer id")
        if content in found:
            raise ValueError(f"{where}: added_tokens lists {shown(content)} twice")
        known = (*control.REQUIRED, *control.OPTIONAL)
        if content in known and any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"{where}: the token {shown(content)} takes text around it with it (lstrip, rstrip, ...)")
        found[content] = number
    if len(set(found.values())) != len(found):
        raise ValueError(f"{where}: added_tokens gives one id to two tokens")
    return found


def _build(document: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{where}: is not a tokenizer: {str(error)[:500]}") from error


class Tokenizer:
    """A byte-level BPE tokenizer with the control tokens of V4.1. Immutable; safe to share between threads.

    Attributes:
        vocab_size: number of token ids, which are 0..vocab_size-1 without gaps.
        control_ids: spelling -> id of the whole added vocabulary.
        sha256: hex digest of the file it was made from.
    """

    vocab_size: int
    control_ids: MappingProxyType[str, int]
    sha256: str

    def __init__(self, data: bytes, where: str = TOKENIZER_FILE) -> None:
        """data: content of a `tokenizer.json`; where: its name for error messages. ValueError says what is wrong."""
        if len(data) > MAX_TOKENIZER_BYTES:
            raise ValueError(f"{where}: has {len(data)} bytes; at most {MAX_TOKENIZER_BYTES} are allowed")
        document = parse_json(data, where)
        self._where = where
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.control_ids = MappingProxyType(_added_tokens(document, where))
        model = document.get("model")
        if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback"):
            raise ValueError(f"{where}: only byte-level BPE is supported (model.type BPE without byte_fallback)")
        if model.get("dropout"):
            raise ValueError(f"{where}: model.dropout makes the ids of a text random; set it to null")
        for field in ("truncation", "padding"):
            if document.get(field) is not None:
                raise ValueError(f"{where}: {field} would change prompts; set it to null")
        self._full = _build(document, where)
        self._plain = _build(document | {"added_tokens": []}, where)
        self.vocab_size = self._full.get_vocab_size(with_added_tokens=True)
        stored = [self._full.id_to_token(i) for i in range(self.vocab_size)]
        if None in stored:
            raise ValueError(f"{where}: no token has id {stored.index(None)}, but there are {self.vocab_size} tokens")
        self._stored: list[str] = [text for text in stored if text is not None]
        self._check()

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder; ValueError names the file."""
        path = Path(path)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        return cls(read_small(path.parent, path.name, MAX_TOKENIZER_BYTES), str(path))

    def _check(self) -> None:
        """Refuse a file that would not keep text exactly or whose control tokens are not what they seem."""
        missing = [spelling for spelling in control.REQUIRED if spelling not in self.control_ids]
        if missing:
            raise ValueError(f"{self._where}: lacks the control token {missing[0]}; it is no tokenizer of this model")
        for spelling in (*control.REQUIRED, *control.OPTIONAL):
            number = self.control_ids.get(spelling)
            if number is None:
                continue
            if self.encode(spelling, control_tokens=True) != [number] or self._stored_at(number) != spelling:
                raise ValueError(f"{self._where}: {spelling} does not stand for the id {number} that it is listed with")
        for probe in _PROBES:
            ids = self.encode(probe, control_tokens=False)
            if self.decode(ids) != probe or self._full.decode(ids, skip_special_tokens=False) != probe:
                raise ValueError(f"{self._where}: text does not survive encoding and decoding; is it byte-level BPE?")

    def _stored_at(self, number: int) -> str | None:
        return self._stored[number] if 0 <= number < self.vocab_size else None

    def check_config(self, config: ModelConfig) -> None:
        """Refuse a model whose config.json gives other ids to the special tokens; ValueError names the field."""
        if self.vocab_size > config.vocab_size:
            raise ValueError(f"{self._where}: has {self.vocab_size} tokens; config.json allows {config.vocab_size}")
        named = {"bos": control.BOS, "eos": control.EOS, "pad": control.PAD, "image": control.IMAGE}
        for name, spelling in named.items():
            field = f"{name}_token_id"
            expected = getattr(config, field)
            if expected is not None and expected != self.control_ids.get(spelling):
                raise ValueError(
                    f"{self._where}: {spelling} has id {self.control_ids.get(spelling)}, config.json says "
                    f"{field} {expected}; the two files do not belong together"
                )

    def control_id(self, spelling: str) -> int:
        """Id of a control token; PromptError when this tokenizer has no such token."""
        if spelling not in self.control_ids:
            raise PromptError(f"{self._where}: has no control token {shown(spelling)}, which this prompt needs")
        return self.control_ids[spelling]

    @property
    def bos_id(self) -> int:
        """Id that starts every prompt."""
        return self.control_ids[control.BOS]

    @property
    def eos_id(self) -> int:
        """Id that ends every assistant turn."""
        return self.control_ids[control.EOS]

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Token ids of a text; nothing is added at either end.

        control_tokens: whether spellings of control tokens become their ids (True) or stay text (False). Use
        False for anything that a user or a tool wrote.
        """
        check_text(text, "text")
        encoder = self._full if control_tokens else self._plain
        return encoder.encode(text, add_special_tokens=False).ids

    def encode_ranges(self, text: str, special_ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Token ids of a text in which only the given ranges are control tokens.

        special_ranges: ascending, disjoint [start, end) in characters, each one control token.
        """
        ids: list[int] = []
        last = 0
        for start, end in special_ranges:
            if last < start:
                ids += self.encode(text[last:start], control_tokens=False)
            ids.append(self.control_id(text[start:end]))
            last = end
        return ids + (self.encode(text[last:], control_tokens=False) if last < len(text) else [])

    def check_ids(self, ids: Iterable[Any], where: str = "token_ids") -> list[int]:
        """The ids, of any integer type, as Python ints; PromptError names the first that is no token id."""
        checked: list[int] = []
        for i, number in enumerate(ids):
            value = number.__index__() if hasattr(number, "__index__") and not isinstance(number, bool) else -1
            if not 0 <= value < self.vocab_size:
                raise PromptError(f"{where}[{i}]: {shown(str(number))} is not a token id below {self.vocab_size}")
            checked.append(value)
        return checked

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they need not be whole characters."""
        if not 0 <= token_id < self.vocab_size:
            raise PromptError(f"{token_id} is not a token id below {self.vocab_size}")
        return _stored_bytes(self._stored[token_id])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, control tokens spelled out, nothing cleaned up.

        Bytes that are no UTF-8 become U+FFFD, one for each maximal piece of a character.
        """
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        """A decoder for ids that arrive one by one."""
        return Detokenizer(self)


class Detokenizer:
    """Decodes ids as they arrive. What `push` and `finish` return, joined, is `Tokenizer.decode` of all ids.

    Bytes of a character are held until it is complete, so no text contains a broken character that later
    ids would have completed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        """Text that the ids complete; "" while a character is still open."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids))

    def finish(self) -> str:
        """Text of the bytes that are still held (U+FFFD), "" if none; afterwards a new text may begin."""
        return self._decoder.decode(b"", final=True)
