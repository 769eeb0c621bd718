"""Sampling arrays of the rows of one step, made on the host from what the samples have written so far."""

from __future__ import annotations

import jax
import numpy as np

from deepinfer_jax.engine.request import Sample
from deepinfer_jax.kernels.sample_tokens import Controls

_BIAS_ENTRIES = 32
"""Least room for biased tokens of a row, so that few programs are compiled."""


class ControlArrays:
    """Makes the `Controls` of each step of one engine.

    While the same samples draw again, what their parameters say stays on the device and only positions move.
    Masks, biases and token counts are all given or all None: two programs, and neutral values change no bit.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._samples: list[Sample] = []
        self._fixed: dict[str, jax.Array] = {}
        self._may_shape: list[Sample] = []
        self._position = np.zeros(0, np.int32)

    def make(self, samples: list[Sample], rows: int) -> Controls:
        """Controls of the samples' next tokens, [rows]; rows beyond the samples are neutral."""
        if samples == self._samples and samples and len(self._position) == rows:
            self._position = self._position + 1  # each has drawn one token since
        else:
            self._samples, self._fixed = samples, jax.device_put(_parameters(samples, rows))
            self._may_shape = [sample for sample in samples if sample.may_shape]
            self._position = np.zeros(rows, np.int32)
            self._position[: len(samples)] = [len(sample.tokens) for sample in samples]
        shaped = any(sample.shaped for sample in self._may_shape)
        extra = _shaping(samples, self._vocabulary, rows) if shaped else {}
        return Controls(position=self._position, **self._fixed, **extra)  # type: ignore[arg-type]

    def neutral(self, shaped: bool, rows: int) -> Controls:
        """Controls of no sample, with or without masks, biases and counts."""
        extra = _shaping([], self._vocabulary, rows) if shaped else {}
        fixed = jax.device_put(_parameters([], rows))
        return Controls(position=np.zeros(rows, np.int32), **fixed, **extra)  # type: ignore[arg-type]


def _parameters(samples: list[Sample], rows: int) -> dict[str, np.ndarray]:
    count = len(samples)
    numbers = np.zeros((6, rows), np.float32)
    numbers[1] = numbers[3] = 1  # top_p, repetition
    integers = np.zeros((2, rows), np.int32)
    seed = np.zeros((rows, 2), np.uint32)
    processed = np.zeros(rows, bool)
    if count:
        fixed = [sample.fixed_controls for sample in samples]
        numbers[:, :count] = np.transpose([f.numbers for f in fixed])
        integers[:, :count] = np.transpose([f.integers for f in fixed])
        seed[:count] = [f.seed for f in fixed]
        processed[:count] = [f.processed for f in fixed]
    names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    return {
        **dict(zip(names, numbers, strict=True)),
        "top_k": integers[0],
        "sample_index": integers[1],
        "seed": seed,
        "processed": processed,
    }


def _shaping(samples: list[Sample], vocabulary: int, rows: int) -> dict[str, np.ndarray]:
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
