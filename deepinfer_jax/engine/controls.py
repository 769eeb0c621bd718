"""Sampling arrays of the rows of one step, made on the host from what the samples have written so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_jax.engine.request import Sample
from deepinfer_jax.kernels.sample_tokens import Controls

_BIAS_ENTRIES = 32
"""Least room for biased tokens of a row, so that few programs are compiled."""


def make_controls(samples: Sequence[Sample], vocabulary: int, rows: int) -> Controls:
    """Sampling arrays of `rows` rows; rows beyond the samples are neutral and their result is not used.

    Masks, biases and token counts are all given or all None: two programs, and neutral values change no bit.
    """
    count = len(samples)
    numbers = np.zeros((rows, 7), np.float32)
    numbers[:, 1] = numbers[:, 3] = 1  # top_p, repetition
    integers = np.zeros((rows, 3), np.int32)
    seed = np.zeros((rows, 2), np.uint32)
    processed = np.zeros(rows, bool)
    if count:
        fixed = [sample.fixed_controls for sample in samples]
        numbers[:count, :6] = [f.numbers for f in fixed]
        integers[:count, :2] = [f.integers for f in fixed]
        integers[:count, 2] = [len(sample.tokens) for sample in samples]
        seed[:count] = [f.seed for f in fixed]
        processed[:count] = [f.processed for f in fixed]
    controls: dict[str, np.ndarray] = {
        "temperature": numbers[:, 0],
        "top_p": numbers[:, 1],
        "min_p": numbers[:, 2],
        "repetition": numbers[:, 3],
        "presence": numbers[:, 4],
        "frequency": numbers[:, 5],
        "top_k": integers[:, 0],
        "sample_index": integers[:, 1],
        "position": integers[:, 2],
        "seed": seed,
        "processed": processed,
    }
    if any(sample.shaped for sample in samples):
        controls |= _shaping(samples, vocabulary, rows)
    return Controls(**{name: np.ascontiguousarray(value) for name, value in controls.items()})  # type: ignore[arg-type]


def neutral_shaping(vocabulary: int, rows: int) -> dict[str, np.ndarray]:
    """Masks, biases and counts that change nothing."""
    return _shaping([], vocabulary, rows)


def _shaping(samples: Sequence[Sample], vocabulary: int, rows: int) -> dict[str, np.ndarray]:
    allowed = np.ones((rows, -(-vocabulary // 32) * 32), bool)
    seen, counts = np.zeros((rows, vocabulary), bool), np.zeros((rows, vocabulary), np.int32)
    widest = max((len(s.request.sampling.logit_bias) for s in samples), default=0)
    size = max(_BIAS_ENTRIES, 1 << max(0, widest - 1).bit_length())
    ids, bias = np.full((rows, size), -1, np.int32), np.zeros((rows, size), np.float32)
    for i, sample in enumerate(samples):
        mask = sample.allowed()
        if mask is not None:
            allowed[i, :vocabulary] = mask
        for j, (token, value) in enumerate(sample.request.sampling.logit_bias):
            ids[i, j], bias[i, j] = token, value
        if sample.counts is not None and sample.prompt_seen is not None:
            seen[i], counts[i] = sample.prompt_seen, sample.counts
    words = np.packbits(allowed, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    return {"mask": words, "bias_ids": ids, "bias": bias, "prompt_seen": seen, "output_counts": counts}
