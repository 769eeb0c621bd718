"""Numerics profiles: which values are rounded where. Named in every manifest, never changed silently."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.quantization import CacheFormat


@dataclasses.dataclass(frozen=True)
class NumericsProfile:
    """Rounding rules of a forward pass (design 4; the golden modes of the same names).

    bf16_activations: streams, linear outputs, queries and index scores are rounded to bfloat16, and
        probabilities before the value product; otherwise all are float32.
    quantize_activations: exact FP8 quantise-dequantise in front of FP8 and FP4 linears.
    quantize_cache: window keys in FP8, compressed keys-values and index keys and queries in FP4.
    """

    name: str
    bf16_activations: bool
    quantize_activations: bool
    quantize_cache: bool

    @property
    def dtype(self) -> DTypeLike:
        """dtype of activations."""
        return jnp.bfloat16 if self.bf16_activations else jnp.float32

    @property
    def window_format(self) -> CacheFormat:
        return "fp8" if self.quantize_cache else "float32"

    @property
    def compressed_format(self) -> CacheFormat:
        return "fp4_e4m3" if self.quantize_cache else "float32"

    @property
    def index_format(self) -> CacheFormat:
        return "fp4" if self.quantize_cache else "float32"


REFERENCE = NumericsProfile("reference", True, True, True)
F32_NOQ = NumericsProfile("f32_noq", False, False, False)
F32_KVQ = NumericsProfile("f32_kvq", False, False, True)
F32_ALLQ = NumericsProfile("f32_allq", False, True, True)

PROFILES = {profile.name: profile for profile in (REFERENCE, F32_NOQ, F32_KVQ, F32_ALLQ)}


def numerics_profile(name: str) -> NumericsProfile:
    """Profile by name; ValueError lists the known ones."""
    if name not in PROFILES:
        raise ValueError(f"numerics={name!r} is unknown; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]
