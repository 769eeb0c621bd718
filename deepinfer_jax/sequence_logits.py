"""Logits of a whole sequence, for research in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax.batching import Chunk, make_batch
from deepinfer_jax.engine.implementations import choose_kernels
from deepinfer_jax.engine.programs import forward_program
from deepinfer_jax.kernels.dispatch import Implementation, Kernels
from deepinfer_jax.kernels.profile import NumericsProfile, numerics_profile
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import Outputs
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE, init_state

ROWS = 128
"""Tokens per call. Results do not depend on it."""

MAX_BYTES = 1 << 30
"""Largest result of `logits`."""


def check_token_ids(config: ModelConfig, ids: Sequence[int], what: str = "token ids") -> np.ndarray:
    """int32 array of the ids; ValueError for an empty sequence or an id outside the vocabulary."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what}: expected a non-empty sequence of integers")
    bad = np.flatnonzero((array < 0) | (array >= config.vocab_size))
    if bad.size:
        place = int(bad[0])
        raise ValueError(f"{what}: id {array[place]} at {place} is outside 0..{config.vocab_size - 1}")
    if array.size > config.max_position_embeddings:
        raise ValueError(f"{what}: {array.size} tokens; the model has {config.max_position_embeddings} positions")
    return array.astype(np.int32)


def logits(
    params: Params,
    ids: Sequence[int],
    *,
    numerics: str = "reference",
    implementation: Implementation | None = None,
    kernels: Kernels | None = None,
) -> np.ndarray:
    """Next-token logits at every position of one sequence.

    Args:
        params: weights. ids: token ids [T]. numerics: name of a profile (`kernels/profile.py`).
        implementation: as for `generate`. kernels: implementation of each op by name, in place of it.
    Returns: float32 [T, vocab_size]; row t is the same whatever follows position t.
    Raises: ValueError for bad ids, and for a result above 1 GiB: use `score`, which keeps only the
        log-probabilities of the given tokens.
    """
    config, profile = params.config, numerics_profile(numerics)
    array = check_token_ids(config, ids)
    size = array.size * config.vocab_size * 4
    if size > MAX_BYTES:
        raise ValueError(
            f"logits of {array.size} tokens x {config.vocab_size} would take {size / 1e9:.1f} GB; "
            "use score(params, sequences) for long sequences"
        )
    kernels = kernels or choose_kernels(params, profile, implementation)
    parts = [np.asarray(outputs.logits)[:count] for outputs, count in whole_sequence(params, array, profile, kernels)]
    return np.concatenate(parts)


def whole_sequence(
    params: Params,
    ids: np.ndarray,
    profile: NumericsProfile,
    kernels: Kernels | None = None,
    *,
    logits: bool = True,
    least_pages: int = 1,
) -> Iterator[tuple[Outputs, int]]:
    """Run all rows of one sequence [T] through all layers, ROWS at a time.

    Args:
        kernels: None = chosen for the device and the model.
        logits: compute the logits of every row; without them only taps are of use.
        least_pages: capacity of the page table at least: fewer capacities, fewer compilations.
    Returns: (Outputs, rows in use) of each call, in order.
    """
    config, kernels = params.config, kernels or choose_kernels(params, profile)
    needed = max(least_pages, -(-len(ids) // PAGE))
    pages = 1 << (needed - 1).bit_length()
    state = init_state(config, profile, slots=1, pages=pages, row_block=kernels.most_rows(ROWS))
    table = np.arange(pages, dtype=np.int32)[None]
    step = forward_program(config, profile, kernels)
    for start in range(0, len(ids), ROWS):
        piece = ids[start : start + ROWS].tolist()
        chunk = Chunk(0, start, piece, len(ids), logits="all" if logits else "none")
        logit_rows = ROWS if logits else kernels.row_tile or ROWS
        batch = make_batch(config, [chunk], table, rows=ROWS, logit_rows=logit_rows, replay="none")
        outputs, state = step(params, state, batch)
        yield outputs, len(piece)
