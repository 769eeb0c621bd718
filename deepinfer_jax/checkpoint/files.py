"""Files of a checkpoint folder, read as untrusted input.

A checkpoint comes from a download, so nothing in it is believed: names stay inside the folder, sizes
are checked before anything is read, and JSON is bounded before it is parsed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_DEPTH = 32
MAX_JSON_STRUCTURE = 1 << 22
"""Most brackets, commas and colons in one JSON text: bounds the memory that parsing can take."""


class CheckpointError(ValueError):
    """A checkpoint folder that is incomplete, damaged, inconsistent or not of the released format."""


def shown(value: object) -> str:
    """A value from a file for an error message: escaped, at most about 100 characters, no nesting."""
    if not isinstance(value, str | int | float | bool | None):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if not isinstance(value, str) or len(value) <= 100 else text + "..."


def shortened(names: Iterable[str], total: int, limit: int = 3) -> str:
    """The first few of `total` names and how many more there are."""
    first = [shown(name) for name, _ in zip(names, range(limit), strict=False)]
    return ", ".join(first) + (f" and {total - len(first)} more" if total > len(first) else "")


def exists(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of this name, even a broken link."""
    return os.path.lexists(folder / name)


def _resolve(folder: Path, name: str) -> Path:
    """Real path of a file, which must lie in the folder.

    One exception: in a hub cache, `snapshots/<revision>` holds links into the `blobs` folder beside it.
    """
    try:
        root = Path(os.path.realpath(folder, strict=True))
        target = Path(os.path.realpath(folder / name, strict=True))
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be opened: {error.strerror}") from error
    in_cache = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not target.is_relative_to(root) and not in_cache:
        raise CheckpointError(f"{folder / name}: is a link that leaves the folder; copy the file instead")
    return target


def open_regular(folder: Path, name: str) -> tuple[BinaryIO, int]:
    """Open one file of the folder for reading; returns the file and its size in bytes.

    Raises CheckpointError when it is missing, is not a regular file or lies outside the folder.
    """
    target = _resolve(folder, name)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not block
    try:
        handle = os.open(target, flags)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be opened: {error.strerror}") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CheckpointError(f"{folder / name}: is not a regular file")
    return os.fdopen(handle, "rb"), status.st_size


def read_exactly(file: BinaryIO, count: int, where: str) -> bytes:
    """Read `count` bytes; CheckpointError when the file ends early."""
    data = file.read(count)
    if len(data) != count:
        raise CheckpointError(f"{where}: ends after {len(data)} of {count} bytes")
    return data


def read_small(folder: Path, name: str, limit: int) -> bytes:
    """Whole content of a file of at most `limit` bytes."""
    file, size = open_regular(folder, name)
    with file:
        if size > limit:
            raise CheckpointError(f"{folder / name}: has {size} bytes; at most {limit} are allowed")
        return read_exactly(file, size, str(folder / name))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} occurs twice in one object")
            seen.add(key)
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object.

    Raises CheckpointError for anything that is not strict JSON, for repeated keys and for texts with
    more structure than MAX_JSON_STRUCTURE.
    """
    structure = sum(data.count(mark) for mark in (b"{", b"[", b",", b":"))
    if structure > MAX_JSON_STRUCTURE:
        raise CheckpointError(f"{where}: has {structure} JSON elements; at most {MAX_JSON_STRUCTURE} are allowed")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError and integers of over 4300 digits
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: is not a JSON object")
    return document


def check_depth(document: Any, where: str) -> None:
    """Refuse JSON nested deeper than MAX_JSON_DEPTH, so that nothing later recurses without bound."""
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise CheckpointError(f"{where}: is nested deeper than {MAX_JSON_DEPTH} levels")
