"""Rotary frequencies (`spec/attention.md` 3.3, appendix A)."""

from __future__ import annotations

import functools
import math

import numpy as np

from deepinfer_jax.model.config import ModelConfig


@functools.cache
def _frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    size = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    # The power in float64, rounded once: float32 powers differ between CPUs and NumPy versions.
    powers = np.power(np.float64(theta), np.arange(0, size, 2) / size).astype(np.float32)
    plain = np.float32(1.0) / powers
    if not compressed:
        return plain
    scaling = config.rope_scaling

    def turns(count: float) -> float:
        wave = scaling.original_max_position_embeddings / (count * 2 * math.pi)
        return size * math.log(wave) / (2 * math.log(theta))

    low = max(math.floor(turns(scaling.beta_fast)), 0)
    high = min(math.ceil(turns(scaling.beta_slow)), size - 1)
    steps = np.arange(size // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(max(high - low, 0.001)), 0, 1).astype(np.float32)
    smooth = np.float32(1) - ramp
    return plain / np.float32(scaling.factor) * (np.float32(1) - smooth) + plain * smooth


def inverse_frequencies(config: ModelConfig, compress_ratio: int) -> np.ndarray:
    """float32 [rope/2]. Layers that read a compressed cache use the second theta and YaRN for everything."""
    return _frequencies(config, compress_ratio > 0)
