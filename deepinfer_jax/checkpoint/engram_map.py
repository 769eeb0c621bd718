"""The Engram token map: the class of every token id (`spec/blocks.md` 1.2).

Tokens whose texts differ only in case, accents, width or white space share a class. The map is a
function of the tokenizer; a checkpoint folder may hold it ready-made as `engram_token_map.npy`.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.files import CheckpointError, exists, parse_json, read_small
from deepinfer_jax.model.config import ModelConfig

MAP_FILE = "engram_token_map.npy"
TOKENIZER_FILE = "tokenizer.json"

MAX_TOKENIZER_BYTES = 64 << 20
_MAX_NPY_HEADER = 1024
_NPY_HEADER = re.compile(rb"\{'descr': '<i4', 'fortran_order': False, 'shape': \((\d{1,10}),\), \} *\n")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONE_SPACE = "\ue000"  # stands for a text that is one space while the ends are stripped


def token_classes(tokenizer_json: bytes, where: str = TOKENIZER_FILE) -> np.ndarray:
    """int32 [tokens]: class of each token id, numbered in the order of first occurrence.

    tokenizer_json: content of a `tokenizer.json`; where: its name for error messages.
    Raises CheckpointError when it is not a tokenizer or its ids have gaps.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    parse_json(tokenizer_json, where)
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where}: is not a tokenizer: {error}") from error
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    classes: dict[str, int] = {}
    result = np.empty(tokenizer.get_vocab_size(), np.int32)
    for token in range(len(result)):
        stored = tokenizer.id_to_token(token)
        if stored is None:
            raise CheckpointError(f"{where}: no token has id {token}, but there are {len(result)} tokens")
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:  # bytes that are no text by themselves
            key = stored
        else:
            key = normalizer.normalize_str(text) or text
        result[token] = classes.setdefault(key, len(classes))
    return result


def _read_map(folder: Path, config: ModelConfig) -> np.ndarray:
    """Parse the one form of .npy that a map can have, so that nothing else in the file is interpreted."""
    where = folder / MAP_FILE
    data = read_small(folder, MAP_FILE, _MAX_NPY_HEADER + 4 * config.vocab_size)
    length = int.from_bytes(data[8:10], "little")
    header = _NPY_HEADER.fullmatch(data[10 : 10 + length])
    if data[:8] != b"\x93NUMPY\x01\x00" or length > _MAX_NPY_HEADER or header is None:
        raise CheckpointError(f"{where}: is not a one-dimensional little-endian int32 array in .npy format 1.0")
    count = int(header[1])
    if count != config.vocab_size:
        raise CheckpointError(f"{where}: has {count} entries, but vocab_size is {config.vocab_size}")
    if len(data) != 10 + length + 4 * count:
        raise CheckpointError(f"{where}: has {len(data)} bytes, expected {10 + length + 4 * count}")
    return np.frombuffer(data, "<i4", count, 10 + length).astype(np.int32)


def check_token_map(token_map: np.ndarray, config: ModelConfig, where: str) -> None:
    """Raise CheckpointError unless the map is int32 [vocab_size] onto the configured classes."""
    classes = config.engram_compressed_vocab_size
    if token_map.dtype != np.int32 or token_map.shape != (config.vocab_size,):
        raise CheckpointError(
            f"{where}: is {token_map.dtype} {list(token_map.shape)}, expected int32 [{config.vocab_size}]"
        )
    if token_map.min() < 0 or token_map.max() >= classes:
        raise CheckpointError(
            f"{where}: has classes {token_map.min()}..{token_map.max()}, but engram_compressed_vocab_size "
            f"{classes} allows 0..{classes - 1}"
        )
    unused = np.flatnonzero(np.bincount(token_map, minlength=classes) == 0)
    if unused.size:
        raise CheckpointError(
            f"{where}: {unused.size} of the {classes} classes have no token (the first is {unused[0]})"
        )


def load_token_map(folder: str | Path, config: ModelConfig) -> np.ndarray | None:
    """int32 [vocab_size] from the folder's map file, else from its tokenizer; None without Engram layers.

    Raises CheckpointError when both are missing or the map does not fit the configuration.
    """
    folder = Path(folder)
    if not config.engram_layer_ids:
        return None
    if exists(folder, MAP_FILE):
        token_map = _read_map(folder, config)
        check_token_map(token_map, config, str(folder / MAP_FILE))
        return token_map
    if not exists(folder, TOKENIZER_FILE):
        raise CheckpointError(f"{folder}: has Engram layers but neither {MAP_FILE} nor {TOKENIZER_FILE}")
    where = str(folder / TOKENIZER_FILE)
    token_map = token_classes(read_small(folder, TOKENIZER_FILE, MAX_TOKENIZER_BYTES), where)
    if len(token_map) != config.vocab_size:
        raise CheckpointError(f"{where}: has {len(token_map)} tokens, but vocab_size is {config.vocab_size}")
    count = int(token_map.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{where}: gives {count} Engram classes, but engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}; the tokenizer belongs to another model"
        )
    return token_map


def token_map_bytes(token_map: np.ndarray) -> bytes:
    """Content of the map file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(token_map, "<i4"), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()
