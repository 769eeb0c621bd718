"""`deepinfer_jax.logits`: the notebook function gives the bits of every other path, and says what it cannot do."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import abstract_params
from deepinfer_jax.sequence_logits import MAX_BYTES, check_token_ids, logits

from .harness import assert_same_bits, micro_params, one_shot

CONFIG = ModelConfig.micro()
IDS = np.random.default_rng(133).integers(0, 92, 133).tolist()


@functools.cache
def whole() -> np.ndarray:
    return logits(micro_params(), IDS)


def test_equals_the_other_paths() -> None:
    """Other row counts, other page capacity, one slot: the same bits as the batched program gives."""
    assert whole().shape == (133, CONFIG.vocab_size)
    assert whole().dtype == np.float32
    assert_same_bits(whole(), one_shot(REFERENCE, IDS), "logits of 133 tokens")


@pytest.mark.parametrize("length", [129, 132])
def test_rows_do_not_depend_on_what_follows(length: int) -> None:
    """A prefix has the same rows, also where it ends just behind a call of 128 rows."""
    assert_same_bits(logits(micro_params(), IDS[:length]), whole()[:length], f"prefix of {length}")


def test_other_continuation() -> None:
    """Other tokens behind a row leave it alone; rows from there on change."""
    changed = [*IDS[:100], *((token + 1) % 92 for token in IDS[100:])]
    other = logits(micro_params(), changed)
    assert_same_bits(other[:100], whole()[:100], "rows before the change")
    assert (other[100:] != whole()[100:]).any(axis=1).all()


@pytest.mark.parametrize("kind", [tuple, np.int64, np.uint8])
def test_integer_sequences(kind: type) -> None:
    """Ids may come as any sequence or array of integers."""
    ids = tuple(IDS) if kind is tuple else np.array(IDS, kind)
    np.testing.assert_array_equal(check_token_ids(CONFIG, ids), IDS)  # type: ignore[arg-type]
    assert check_token_ids(CONFIG, ids).dtype == np.int32  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 6, 96, 7, 99], r"token ids: id 96 at 2 is outside 0\.\.95"),
        ([5, -1], r"token ids: id -1 at 1 is outside 0\.\.95"),
        ([], "token ids: expected a non-empty sequence of integers"),
        ([1.5], "token ids: expected a non-empty sequence of integers"),
        ([[1, 2]], "token ids: expected a non-empty sequence of integers"),
        ([1] * 1025, "token ids: 1025 tokens; the model has 1024 positions"),
    ],
)
def test_bad_ids_are_named(ids: list, message: str) -> None:
    """A wrong id would be clamped by a gather and give plausible logits of another text."""
    with pytest.raises(ValueError, match=message):
        logits(micro_params(), ids)


def test_unknown_profile_is_named() -> None:
    """The message lists what exists."""
    with pytest.raises(ValueError, match="numerics='bf16' is unknown; choose one of reference"):
        logits(micro_params(), IDS, numerics="bf16")


def test_large_results_are_refused_before_anything_runs() -> None:
    """4 GB of logits are rarely meant; the message names the function that keeps the log-probabilities only."""
    config = ModelConfig.released()
    tokens = MAX_BYTES // (config.vocab_size * 4)
    with pytest.raises(ValueError, match=rf"logits of {tokens + 1} tokens x 129280 would take 1\.1 GB; use score\("):
        logits(abstract_params(config), [0] * (tokens + 1))
    small = dataclasses.replace(CONFIG, vocab_size=128, max_position_embeddings=1 << 22)
    with pytest.raises(ValueError, match="use score"):
        logits(abstract_params(small), np.zeros(MAX_BYTES // (128 * 4) + 1, np.int32))  # type: ignore[arg-type]
