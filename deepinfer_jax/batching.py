"""Host side of a call: turn chunks of sequences into the integer arrays of a `Batch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.state import Batch

Replay = Literal["none", "exact_trim", "bounded"]
"""Which prompt rows run through the decoder layers (design 2.9).

none: all. exact_trim: those that can influence anything later; every result keeps its bits. bounded:
the last sliding_window rows, as the reference system serves; results differ for longer prompts.
"""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence.

    slot: state slot. start: position of the first token. token_ids: the tokens.
    prompt_length: whole length of the prompt; rows from there on are never trimmed.
    logits: rows whose logits are wanted.
    image: per token, True inside an image span; empty = no image.
    replay: in place of the batch's rule for this sequence.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    prompt_length: int
    logits: Literal["none", "last", "all"] = "last"
    image: Sequence[bool] = ()
    replay: Replay | None = None


def decoder_start_position(config: ModelConfig, prompt_length: int, replay: Replay) -> int:
    """First position of a prompt that runs through the decoder layers."""
    if replay not in get_args(Replay):
        raise ValueError(f"replay={replay!r} is unknown; choose one of {', '.join(get_args(Replay))}")
    if replay == "none":
        return 0
    kept = config.exact_trim_rows if replay == "exact_trim" else config.sliding_window
    return max(0, prompt_length - kept)


def _padded(values: Sequence[int], size: int, fill: int, what: str) -> np.ndarray:
    if len(values) > size:
        raise ValueError(f"{what}: {len(values)} do not fit {size}")
    result = np.full(size, fill, np.int32)
    result[: len(values)] = values
    return result


def make_batch(
    config: ModelConfig,
    chunks: Sequence[Chunk],
    page_table: np.ndarray,
    *,
    rows: int,
    decoder_rows: int | None = None,
    logit_rows: int | None = None,
    replay: Replay = "exact_trim",
) -> Batch:
    """Lay chunks out one after the other.

    Args:
        page_table: int32 [slots, P], -1 = none. Must hold pages for every token of the chunks.
        rows, decoder_rows, logit_rows: array sizes R, Rd and L; by default all R.
    Returns: Batch of NumPy arrays; logits come in the order of the chunks' wanted rows.
    Raises: ValueError if something does not fit or logits are wanted of a row that `replay` drops.
    """
    ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    image: list[bool] = []
    kept: list[int] = []
    wanted: list[int] = []
    window_start = np.zeros(page_table.shape[0], np.int32)
    for chunk in chunks:
        rule = chunk.replay or replay
        first = decoder_start_position(config, chunk.prompt_length, rule)
        window_start[chunk.slot] = first
        size = len(chunk.token_ids)
        for offset in range(size):
            position = chunk.start + offset
            asked = chunk.logits == "all" or (chunk.logits == "last" and offset == size - 1)
            if position >= first:
                if asked:
                    wanted.append(len(kept))
                kept.append(len(ids) + offset)
            elif asked:
                raise ValueError(f"logits of position {position} are wanted, but replay={rule!r} drops its row")
        ids.extend(int(token) for token in chunk.token_ids)
        positions.extend(range(chunk.start, chunk.start + size))
        sequence.extend([chunk.slot] * size)
        image.extend(chunk.image or [False] * size)
    return Batch(
        token_ids=_padded(ids, rows, 0, "rows"),  # type: ignore[arg-type]
        positions=_padded(positions, rows, 0, "rows"),  # type: ignore[arg-type]
        sequence=_padded(sequence, rows, -1, "rows"),  # type: ignore[arg-type]
        decoder_rows=_padded(kept, decoder_rows or rows, -1, "decoder rows"),  # type: ignore[arg-type]
        logit_rows=_padded(wanted, logit_rows or rows, -1, "logit rows"),  # type: ignore[arg-type]
        page_table=page_table.astype(np.int32),  # type: ignore[arg-type]
        window_start=window_start,  # type: ignore[arg-type]
        encoder_start=np.zeros_like(window_start),  # type: ignore[arg-type]
        page_start=np.zeros_like(window_start),  # type: ignore[arg-type]
        image_mask=_padded(image, rows, 0, "rows").astype(bool),  # type: ignore[arg-type]
    )
