"""The proof of a rounding flip accepts flips and nothing else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.profile import F32_ALLQ
from deepinfer_jax.kernels.quantization import CacheFormat, pack_cache, unpack_cache

from .golden import load_model
from .rounding_flip import (
    AGREES,
    Border,
    Change,
    Situation,
    Trace,
    WatchedLayers,
    borders,
    find_flip,
    first_difference,
    one_code_apart,
    record_codes,
)

FORMATS: tuple[CacheFormat, ...] = ("fp8", "fp4", "fp4_e4m3")
SIZE = 64


@functools.partial(jit, static_argnums=1)
def stored(values: jax.Array, fmt: CacheFormat) -> tuple[jax.Array, jax.Array]:
    """(records, what they hold)."""
    records = pack_cache(values, fmt)
    return records, unpack_cache(records, fmt, SIZE)


def records_of(seed: int, fmt: CacheFormat) -> tuple[np.ndarray, np.ndarray]:
    """Random records [5, width] and what they hold."""
    records, held = stored(np.random.default_rng(seed).normal(size=(5, SIZE)).astype(np.float32), fmt)
    return np.asarray(records), np.asarray(held)


@pytest.mark.fast
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), fmt=st.sampled_from(FORMATS), element=st.integers(0, SIZE - 1))
def test_one_code_apart(seed: int, fmt: CacheFormat, element: int) -> None:
    """Guards the comparison of codes: one code away is explained, two codes away and another scale are not."""
    records, held = records_of(seed, fmt)
    differs, explained = one_code_apart(records, held, fmt)
    assert not differs.any()
    assert not explained.any()

    places, scale = record_codes(records, fmt, SIZE)
    table = {"fp8": _ascending("fp8"), "fp4": _ascending("fp4"), "fp4_e4m3": _ascending("fp4")}[fmt]
    ordered = int(np.searchsorted(table, held[2, element] / scale[2, element // (SIZE // scale.shape[-1])]))
    inward = -1 if ordered > len(table) // 2 else 1
    for steps, accepted in ((1, True), (2, False), (3, False)):
        moved = held.copy()
        moved[2, element] = table[ordered + inward * steps] * scale[2, element // (SIZE // scale.shape[-1])]
        differs, explained = one_code_apart(records, moved, fmt)
        assert np.argwhere(differs).tolist() == [[2, element]]
        assert explained.any() == accepted
    assert places.shape == held.shape

    doubled = held.copy()
    doubled[1] *= 2
    differs, explained = one_code_apart(records, doubled, fmt)
    assert (differs & ~explained).any()


def _ascending(fmt: str) -> np.ndarray:
    """All values of a format, ascending, zero once."""
    if fmt == "fp4":
        magnitudes = np.array([0.5, 1, 1.5, 2, 3, 4, 6])
    else:
        codes = jnp.arange(1, 127, dtype=jnp.uint8)
        magnitudes = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32), np.float64)
    return np.concatenate([-magnitudes[::-1], [0.0], magnitudes])


# ---- a synthetic flip -----------------------------------------------------------------------------

CLOSENESS = 1e-3
"""Random values do not lie as close to a border as noise reaches, so the search looks further."""

ROWS = 16


@pytest.fixture(scope="module")
def situation() -> Situation:
    """Layer 0 of a golden model on random input."""
    config, params = load_model("g1_attn")
    layers = WatchedLayers(config, params, F32_ALLQ)
    generator = np.random.default_rng(5)
    streams = generator.normal(size=(1, ROWS, config.hc_mult, config.hidden_size)).astype(np.float32)
    pre = generator.uniform(0.1, 1, size=(1, ROWS, config.hc_mult)).astype(np.float32)
    got = Trace(streams, np.arange(ROWS), pre)
    empty = np.zeros((config.num_hidden_layers, 0, 0), np.int32)
    start = Situation(layers, layers.prompt(np.arange(ROWS), None), got, empty, empty, layers.empty_state().pages)
    return dataclasses.replace(start, got=extended(got, start.replay(0, 0)[0]))


def extended(got: Trace, after: Trace) -> Trace:
    """What entered layer 0 and what left it."""
    streams, pre = np.concatenate([got.streams[:1], after.streams]), np.concatenate([got.pre[:1], after.pre])
    return Trace(streams, got.stream_rows, pre)


def other_side(situation: Situation, border: Border) -> Trace:
    """The result of layer 0 with one value on the side of a border where it was not."""
    amount = border.below if abs(border.below) > abs(border.above) else border.above
    after, _ = situation.replay(0, 0, Change(border.site, border.element, amount))
    return extended(situation.got, after)


def test_finds_the_value_that_flipped(situation: Situation) -> None:
    """Guards the acceptance: a single value on the other side of its border is found by name."""
    _, seen = situation.replay(0, 0)
    near = sorted(borders(0, seen, ROWS, CLOSENESS), key=lambda border: border.offset)
    assert near, "no value near a border"
    visible = [b for b in near[:8] if first_difference(other_side(situation, b), situation.got) == 0]
    assert visible, "no flip that shows"
    want = other_side(situation, visible[0])
    flip = find_flip(want, situation, closeness=CLOSENESS)
    assert flip is not None
    assert (flip.border.site, flip.border.element) == (visible[0].site, visible[0].element)
    assert flip.last_layer == 0
    assert max(flip.to_want, flip.to_got) <= AGREES


def test_does_not_explain_anything_else(situation: Situation) -> None:
    """Guards against a proof that accepts any difference: a shifted row, a scaled layer, a difference at the input."""
    got = situation.got
    for layer, row, amount in ((1, 3, 1e-3), (1, slice(None), 1e-2), (0, 3, 1e-3)):
        streams = got.streams.copy()
        streams[layer, row] += amount
        want = Trace(streams, got.stream_rows, got.pre)
        assert first_difference(want, got) == layer - 1
        assert find_flip(want, situation, closeness=CLOSENESS, trials=4) is None
    assert find_flip(got, situation) is None
