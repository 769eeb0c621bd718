"""Trimming decoder rows (design 2.9): exact where it must be, and it really saves rows."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax.batching import Chunk, Replay, decoder_start_position, make_batch
from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig

from .harness import Runner, Shape, assert_same_bits, plain_tables

CONFIG = ModelConfig.micro()
KEPT = CONFIG.exact_trim_rows  # (8 - 1) * 4 + 1 = 29
SHAPE = Shape()
IDS = np.random.default_rng(5).integers(0, 92, 512).tolist()
BORDERS = sorted({1, 7, 8, 9, 15, 16, 17, 24, KEPT - 1, KEPT, KEPT + 1, KEPT + 7, 40, 56, 2 * KEPT, 2 * KEPT + 1, 97})


def prefill_and_decode(replay: Replay, length: int, chunk: int, steps: int) -> np.ndarray:
    """Logits of the last prompt row and of `steps` following rows."""
    runner = Runner(REFERENCE, SHAPE, plain_tables(SHAPE), replay=replay)
    result = []
    for start in range(0, length, chunk):
        piece = IDS[start : min(start + chunk, length)]
        last = start + len(piece) == length
        outputs = runner.run([Chunk(0, start, piece, length, "last" if last else "none")])
        if last:
            result.append(outputs.logits[0])
    for i in range(steps):
        result.append(runner.run([Chunk(0, length + i, [IDS[length + i]], length)]).logits[0])
    return np.stack(result)


@pytest.mark.parametrize("length", BORDERS)
def test_exact_trim_keeps_every_bit(length: int) -> None:
    """One row too few shows in the last logits or in the window keys that decode reads."""
    want = prefill_and_decode("none", length, 48, 10)
    assert_same_bits(prefill_and_decode("exact_trim", length, 48, 10), want, f"exact_trim, {length} tokens")
    assert_same_bits(prefill_and_decode("exact_trim", length, 11, 10), want, f"exact_trim in chunks, {length} tokens")


def test_one_row_less_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is tight: keeping one row less changes a result, so the test above can fail."""
    want = prefill_and_decode("none", 97, 48, 10)
    monkeypatch.setattr(ModelConfig, "exact_trim_rows", property(lambda self: KEPT - 2))
    assert (prefill_and_decode("exact_trim", 97, 48, 10) != want).any()


@pytest.mark.parametrize("length", [3, CONFIG.sliding_window])
def test_bounded_is_exact_up_to_the_window(length: int) -> None:
    """A prompt inside one window loses nothing (attention.md 2.4.4)."""
    want = prefill_and_decode("none", length, 48, 10)
    assert_same_bits(prefill_and_decode("bounded", length, 48, 10), want, f"bounded, {length} tokens")


def test_bounded_is_an_approximation_beyond() -> None:
    """Longer prompts differ under the reference system's rule, independently of chunking."""
    want = prefill_and_decode("none", 97, 48, 6)
    whole, pieces = prefill_and_decode("bounded", 97, 48, 6), prefill_and_decode("bounded", 97, 7, 6)
    assert np.isfinite(whole).all()
    assert (whole != want).any()
    assert_same_bits(pieces, whole, "bounded in chunks")


def test_trimmed_prompt_runs_at_most_six_tenths_of_the_layer_rows() -> None:
    """Counted on the device: rows whose sublayer output was recorded, layer by layer."""
    length = 16 * (CONFIG.sliding_window - 1) * CONFIG.decoder_layers
    runner = Runner(REFERENCE, SHAPE, plain_tables(SHAPE), captures=("ffn_output",), replay="exact_trim")
    executed = 0
    for start in range(0, length, SHAPE.rows):
        piece = IDS[start : min(start + SHAPE.rows, length)]
        last = start + len(piece) == length
        outputs = runner.run([Chunk(0, start, piece, length, "last" if last else "none")])
        executed += int((outputs.captured["ffn_output"] != 0).any(axis=-1).sum())
    total = length * CONFIG.num_hidden_layers
    assert executed >= 5 * length  # the encoder runs on everything
    assert executed <= 0.6 * total, f"{executed} of {total} layer-rows"


def test_wanted_row_must_be_kept() -> None:
    """Asking for logits of a dropped row is an error, never a silent zero."""
    chunk = Chunk(0, 0, IDS[:100], 100, "all")
    with pytest.raises(ValueError, match="drops its row"):
        make_batch(CONFIG, [chunk], plain_tables(SHAPE), rows=112, replay="exact_trim")
    with pytest.raises(ValueError, match="replay='fast' is unknown"):
        decoder_start_position(CONFIG, 10, "fast")  # type: ignore[arg-type]
