"""The Mosaic-GPU `rms_norm_quant`, interpreted on the CPU with race detection.

What only a device can tell (its cosines, conversions, exchange between threads) is checked by
`benchmarks/kernel_cases/rms_norm_quant.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.mosaic.rows import plane_layout, row_layout
from deepinfer_jax.kernels.quantization import CacheFormat
from deepinfer_jax.kernels.rms_norm_quant import norm_rotary_pack, rms_norm, rotary

from . import reference
from .base_rms_norm_quant import EPS, FREQUENCIES, places
from .cases import BF16, assert_same_bits, assert_within, bf16_normal, bf16_ulp, generator, normal, values
from .reference_formats import cache_record, decode_record
from .test_mhc_mix_mosaic import elements_of_threads

pytestmark = pytest.mark.interpret


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> np.ndarray:
    """Call a contract function with the interpreted kernels."""
    arrays = jax.tree.map(jnp.asarray, operands)
    with interpret("sm90", detect_races=True):
        return np.asarray(function(*arrays, implementation="mosaic_gpu", **settings))


@pytest.mark.fast
def test_layouts_hold_every_element() -> None:
    """Guards the layouts: each element in some thread, each row and group always in the same registers, eight
    neighbours in a thread, and no thread with more than its share."""
    for size, group in ((64, 32), (128, 32), (256, 32), (512, 16), (512, 32), (1280, 32), (2304, 32), (5120, 32)):
        layout = row_layout(size, group)
        held = elements_of_threads(layout.matrix, layout.shape)
        assert sorted(held.ravel().tolist()) == list(range(layout.rows * size))
        assert (held == held[..., :1] + np.arange(8)).all()
        assert (held[..., 0] % 8 == 0).all()
        packed = elements_of_threads(layout.packed, (*layout.shape[:2], group // 2))
        np.testing.assert_array_equal(packed, held[..., 0::2] // 2)
        scales = elements_of_threads(layout.scales, layout.shape[:2])
        np.testing.assert_array_equal(scales[..., 0], held[..., 0] // group)
    for rows, columns, length in ((1, 64, 1), (2, 64, 1), (8, 64, 1), (16, 16, 1), (64, 64, 8), (4, 16, 8), (1, 2, 1)):
        tile, layout = plane_layout(rows, columns, length)
        assert rows % tile == 0
        held = elements_of_threads(layout, (rows, columns))
        assert sorted(set(held.ravel().tolist())) == list(range(rows * columns))


@pytest.mark.parametrize(
    ("size", "dtype"), [(64, BF16), (256, np.float32), (1280, BF16)], ids=["micro", "demo, float32", "queries"]
)
def test_norm_against_float64(size: int, dtype: type) -> None:
    """Guards the norm with one rounding at the end, blocks of several rows, and rows past the last."""
    rng = generator("norm mosaic", size)
    x = normal(rng, 18, size, spread=20).astype(dtype)
    weight = bf16_normal(rng, size, spread=0)
    x[3] = 0
    y = run(rms_norm, x, weight, eps=EPS)
    expected = reference.rms_norm(values(x), values(weight), EPS)
    rounding = 1e-6 * np.abs(expected) if dtype is np.float32 else 0.5001 * bf16_ulp(expected)
    assert_within(y, expected, rounding)
    assert y.dtype == dtype
    for rows in (slice(3, 4), slice(16, 18)):
        assert_same_bits(run(rms_norm, x[rows], weight, eps=EPS), y[rows], f"rows {rows}")


@pytest.mark.parametrize(
    ("heads", "size", "frequencies", "settings"),
    [
        (6, 64, FREQUENCIES, {"inverse": True}),
        (4, 32, FREQUENCIES, {"quantize": True}),
        (8, 128, np.exp2(-np.arange(32) / 3).astype(np.float32), {"quantize": True, "inverse": True}),
    ],
    ids=["in place, inverse", "quantised, a table a head", "quantised, inverse, a table a token"],
)
def test_rotary_has_the_portable_bits(heads: int, size: int, frequencies: np.ndarray, settings: dict[str, Any]) -> None:
    """Guards pairs, signs, the tail, large positions, zeros of either sign, the heads' own scales, and that the
    caller's array stays as it was."""
    rng = generator("rotary mosaic", heads, size)
    x, positions = bf16_normal(rng, 3, heads, size, spread=3), places(rng, 3)
    positions[0], x[1, 0, ::3] = 0, -0.0
    given = jnp.asarray(x)
    expected = np.asarray(rotary(given, jnp.asarray(positions), jnp.asarray(frequencies), **settings))
    y = run(rotary, given, positions, frequencies, **settings)
    # Sums of two products may differ by their roundings before the last one; nearly all bits are equal.
    assert_within(y, values(expected), bf16_ulp(expected) if not settings.get("quantize") else np.abs(values(x)).max())
    assert (values(y) != values(expected)).mean() < 0.002
    assert_same_bits(given, x, "the caller's heads")
    if not settings.get("quantize"):
        tail = 2 * len(frequencies)
        assert_same_bits(y[..., :-tail], x[..., :-tail], "dims that are not rotated")
    if heads != 4:  # the heads of three tokens fill no block there, and those of one no other one
        alone = run(rotary, x[2:], positions[2:], frequencies, **settings)
        assert_same_bits(alone, y[2:], "a token alone")


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp4_e4m3", "float32"])
def test_records_have_the_portable_bits(fmt: CacheFormat) -> None:
    """Guards the order norm, round, rotate, round, quantise, pack; and the places of codes and scales."""
    rng = generator("records mosaic", fmt)
    x, positions = bf16_normal(rng, 19, 64, spread=3), places(rng, 19)
    for weight in (bf16_normal(rng, 64, spread=0), None) if fmt == "fp8" else (None,):
        operands = (x, weight, positions, FREQUENCIES)
        record = run(norm_rotary_pack, *operands, fmt=fmt, eps=EPS)
        expected = np.asarray(norm_rotary_pack(*jax.tree.map(jnp.asarray, operands), fmt=fmt, eps=EPS))
        assert record.dtype == expected.dtype
        assert record.shape == expected.shape
        assert (record != expected).mean() < 0.005
        actual, wanted = (decode_record(r, fmt, 64) for r in (record, expected))
        assert_within(actual, wanted, (0 if fmt == "float32" else 0.5) * np.abs(wanted) + 0.1)
        if weight is not None:
            part = run(norm_rotary_pack, x[17:19], weight, positions[17:19], FREQUENCIES, fmt=fmt, eps=EPS)
            assert_same_bits(part, record[17:19], "two rows")


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp4_e4m3"])
def test_quantisers_have_the_portable_bits(fmt: CacheFormat) -> None:
    """Guards ties, subnormals, floors of amax, scales at powers of two and clipping, on every magnitude."""
    rng = generator("quantisers mosaic", fmt)
    x = rng.normal(size=(64, 128)) * np.exp2(rng.integers(-130, 120, size=(64, 8)).repeat(16, axis=1))
    grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -6, 0, -0.0, 448, 17, 19, 1e-5])
    x[:8] = np.tile(grid, 8) * np.exp2(np.arange(8))[:, None]
    x[8], x[9, :64], x[10] = 0, 1e-5, 6 * 2.0**-9
    operands = (jnp.asarray(x, BF16), None, jnp.zeros(64, jnp.int32), jnp.ones(1, jnp.float32))
    record = run(norm_rotary_pack, *operands, fmt=fmt, eps=EPS)
    assert_same_bits(record, np.asarray(norm_rotary_pack(*operands, fmt=fmt, eps=EPS)), fmt)


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp4_e4m3"])
def test_reference_of_the_device_check(fmt: CacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a device's records are compared with: it must agree with the tests' own formats on every finite
    bfloat16 pattern, mark bad groups by their scales alone, and say where two records differ."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    bits = importlib.import_module("benchmarks.kernel_cases.bits")
    group = 16 if fmt == "fp4_e4m3" else 32
    rows = bits.all_bfloat16(128)
    turned = bits.turned_by_nothing(rows, 16)
    record, free = bits.expected_record(turned, fmt)
    finite = np.isfinite(turned).all(axis=1)
    assert 4000 < finite.sum() < len(rows)
    np.testing.assert_array_equal(record[finite], cache_record(turned[finite].astype(np.float64), fmt))
    assert not free[finite].any()
    nan = np.isnan(turned.reshape(len(rows), -1, group))
    bad = (nan if fmt == "fp4_e4m3" else nan | np.isinf(turned.reshape(nan.shape))).any(axis=2)
    scales = record[:, -bad.shape[1] :]
    np.testing.assert_array_equal(scales[bad], 0x7F if fmt == "fp4_e4m3" else 255)
    codes = free.shape[1] - bad.shape[1]
    np.testing.assert_array_equal(free[:, :codes].reshape(*bad.shape, -1).all(axis=2), bad)
    assert not free[:, codes:].any()
    assert bits.differences(record, record, free, rows, group)["passed"]
    wrong = record ^ np.where(np.arange(record.shape[1]) == codes + 1, 1, 0).astype(np.uint8)
    report = bits.differences(wrong, record, free, rows, group)
    assert not report["passed"]
    assert report["wrong_scales"] == len(rows)
    assert report["first"]["element"] == group
    assert report["first"]["group"][0] == hex(int(rows.view(np.uint16)[0, group]))


@pytest.mark.fast
def test_unsupported_says_so() -> None:
    """Guards against a silent fallback: a device without these kernels, dtypes and shapes that they lack."""
    x, positions = np.zeros((2, 64), BF16), np.zeros(2, np.int32)
    weight = np.zeros(64, BF16)
    with pytest.raises(NotImplementedError, match="rms_norm_quant: rms_norm: mosaic_gpu: cpu"):
        rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=EPS, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="not float16"):
        run(rms_norm, x.astype(np.float16), weight, eps=EPS)
    with pytest.raises(NotImplementedError, match="groups of 32"):
        run(rms_norm, x[:, :40], weight[:40], eps=EPS)
    with pytest.raises(NotImplementedError, match="cannot rotate 12 elements"):
        run(rotary, x[:, None], positions, FREQUENCIES[:6])
