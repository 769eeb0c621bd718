"""Checks of `rms_norm_quant`: norm, rotary embedding, cache records."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from deepinfer_jax.kernels.quantization import CacheFormat
from deepinfer_jax.kernels.rms_norm_quant import norm_rotary_pack, rms_norm, rotary

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    MICRO,
    RELEASED,
    RowCase,
    Size,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    load_unit,
    normal,
    values,
)
from .reference_formats import bf16, cache_record, decode_record

EPS = 1e-20
YARN = (16.0, 32.0, 1.0, 65536.0)
FREQUENCIES = reference.inverse_frequencies(16, 160000.0, YARN).astype(np.float32)


def places(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Positions of up to a million, small ones more often."""
    return np.exp2(rng.uniform(0, 20, size=rows)).astype(np.int32) - 1


def record_case(name: str, fmt: CacheFormat, dtype: type) -> RowCase:
    """Norm, rotation and packing of 64-wide rows."""
    return RowCase(
        name,
        lambda rng, t: (normal(rng, t, 64, spread=4).astype(dtype), places(rng, t)),
        lambda rng: (bf16_normal(rng, 64, spread=0), FREQUENCIES),
        lambda k, r, c: k(norm_rotary_pack, r[0], c[0], r[1], c[1], fmt=fmt, eps=EPS),
        bad_rows(0),
    )


CASES = (
    RowCase(
        "norm, float32",
        lambda rng, t: (normal(rng, t, DEMO.hidden, spread=20),),
        lambda rng: (bf16_normal(rng, DEMO.hidden, spread=0),),
        lambda k, r, c: k(rms_norm, r[0], c[0], eps=EPS),
        bad_rows(0),
    ),
    RowCase(
        "rotary and inverse, float32",
        lambda rng, t: (normal(rng, t, 4, 64), places(rng, t)),
        lambda rng: (FREQUENCIES,),
        lambda k, r, c: (k(rotary, r[0], r[1], c[0]), k(rotary, r[0], r[1], c[0], inverse=True)),
        bad_rows(0),
    ),
    record_case("window record of float32 rows", "fp8", np.float32),
    record_case("compressed record", "fp4_e4m3", BF16),
)


class RmsNormQuantTests(OpTests):
    """Every implementation of `rms_norm_quant`."""

    op: ClassVar[str] = "rms_norm_quant"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("norm examples")
        x, weight, positions = bf16_normal(rng, 5, 64), bf16_normal(rng, 64, spread=0), places(rng, 5)
        heads = bf16_normal(rng, 5, 2, 64)
        return [
            (rms_norm, (x, weight), {"eps": EPS}),
            (rotary, (heads, positions, FREQUENCIES), {"inverse": True}),
            (rotary, (heads, positions, FREQUENCIES), {"quantize": True}),
            (norm_rotary_pack, (x, weight, positions, FREQUENCIES), {"fmt": "fp8", "eps": EPS}),
            (norm_rotary_pack, (x, None, positions, FREQUENCIES), {"fmt": "fp4_e4m3", "eps": EPS}),
        ]

    # ---- norm ------------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_norm_golden(self) -> None:
        """Guards eps = 1e-20 on rows scaled from 2^-60 to 2^20 and a zero row, and the one rounding."""
        unit = load_unit("rmsnorm_eps")
        y = self.run(rms_norm, unit["x"], unit["weight"], eps=EPS)
        assert_same_bits(y, unit["y_bf16"], "bfloat16 norm")
        y = self.run(rms_norm, unit["x"].astype(np.float32), unit["weight"], eps=EPS)
        expected = values(unit["y_f64_as_f32"])
        assert_within(y, expected, 4e-7 * np.abs(expected) + 1e-30)
        wrong = values(self.run(rms_norm, unit["x"], unit["weight"], eps=1e-6))
        assert (wrong != values(unit["y_bf16"])).any(axis=1).sum() >= 17

    @pytest.mark.parametrize("size", [MICRO, DEMO, RELEASED], ids=lambda size: size.name)
    def test_norm_against_float64(self, size: Size) -> None:
        """Guards the norm at every model's width, in both dtypes."""
        rng = generator("norm", size.name)
        x, weight = normal(rng, 18, size.hidden, spread=30), bf16_normal(rng, size.hidden, spread=0)
        expected = reference.rms_norm(x, values(weight), EPS)
        assert_within(self.run(rms_norm, x, weight, eps=EPS), expected, 1e-6 * np.abs(expected))
        rounded = x.astype(BF16)
        expected = reference.rms_norm(values(rounded), values(weight), EPS)
        y = self.run(rms_norm, rounded, weight, eps=EPS)
        assert_within(y, expected, 0.5001 * bf16_ulp(expected))

    # ---- rotary ----------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_rotary_golden(self) -> None:
        """Guards pairs, tail, sign, and the float32 angle at positions up to 1,048,575 of the released model.

        cos and sin of a float32 angle differ between implementations by a few units of 2^-24; next to a
        rounding border that moves a bfloat16 result by one step.
        """
        unit = load_unit("rope_real")
        positions, frequencies = unit["positions"], unit["inv_freq_compress"]
        y = self.run(rotary, unit["x"].astype(np.float32), positions, frequencies)
        assert_within(y[..., -64:], values(unit["rope_compress_f32"]), 1e-6 * np.abs(values(unit["x"])).max())
        assert_same_bits(y[..., :-64], unit["x"].astype(np.float32)[..., :-64], "dims that are not rotated")
        for inverse, key in ((False, "rope_compress_bf16"), (True, "rope_inverse_compress_bf16")):
            y = self.run(rotary, unit["x"], positions, frequencies, inverse=inverse)
            expected = values(unit[key])
            assert_within(y, expected, bf16_ulp(expected))
            assert (values(y) != expected).mean() < 1e-3

    @pytest.mark.fast
    def test_cosines_golden(self) -> None:
        """Guards the angle itself: the product of position and frequency is rounded to float32 first."""
        unit = load_unit("rope_real")
        x = np.zeros((13, 1, 64), np.float32)
        x[..., 0::2] = 1
        for kind in ("main", "compress"):
            y = values(self.run(rotary, x, unit["positions"], unit[f"inv_freq_{kind}"]))[:, 0]
            np.testing.assert_allclose(y[:, 0::2], unit[f"cos_{kind}"], rtol=0, atol=2e-7)
            np.testing.assert_allclose(y[:, 1::2], unit[f"sin_{kind}"], rtol=0, atol=2e-7)

    def test_inverse_undoes_rotary(self) -> None:
        """Guards the sign convention of the inverse at large positions."""
        rng = generator("inverse")
        x, positions = normal(rng, 18, 4, 64, spread=0), places(rng, 18)
        there = self.run(rotary, x, positions, FREQUENCIES)
        back = self.run(rotary, there, positions, FREQUENCIES, inverse=True)
        np.testing.assert_allclose(back, x, atol=2e-6)
        assert np.abs(there[..., 48:] - x[..., 48:]).max() > 0.1
        zero = self.run(rotary, x, np.zeros(18, np.int32), FREQUENCIES)
        assert_same_bits(zero, x, "position 0")

    def test_index_queries(self) -> None:
        """Guards rotation followed by the MXFP4 quantiser of each head, and not of the whole row."""
        rng = generator("index queries")
        x, positions = bf16_normal(rng, 18, 4, 32, spread=3), places(rng, 18)
        x[:, 1] *= 64  # heads of different magnitude
        y = self.run(rotary, x, positions, FREQUENCIES, quantize=True)
        rotated = self.run(rotary, x, positions, FREQUENCIES)
        expected = decode_record(cache_record(values(rotated), "fp4"), "fp4", 32)
        assert y.dtype == BF16
        np.testing.assert_array_equal(values(y), expected)

    # ---- records ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp4_e4m3", "float32"])
    @pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
    def test_records_are_norm_rotary_and_quantiser(self, fmt: CacheFormat, normed: bool) -> None:
        """Guards the order and the rounding points: norm, round, rotate, round, quantise, pack."""
        rng = generator("records", fmt, normed)
        x, positions = bf16_normal(rng, 19, 64, spread=3), places(rng, 19)
        weight = bf16_normal(rng, 64, spread=0) if normed else None
        record = self.run(norm_rotary_pack, x, weight, positions, FREQUENCIES, fmt=fmt, eps=EPS)
        rows = x if weight is None else self.run(rms_norm, x, weight, eps=EPS)
        rotated = self.run(rotary, rows[:, None], positions, FREQUENCIES)[:, 0]
        assert_same_bits(record, cache_record(values(rotated), fmt), fmt)

    @pytest.mark.parametrize("size", [DEMO, RELEASED], ids=lambda size: size.name)
    def test_records_against_float64(self, size: Size) -> None:
        """Guards the whole chain at every model's width: nearly all bytes equal, none more than one step off."""
        rng = generator("records", size.name)
        frequencies = reference.inverse_frequencies(size.rope, 10000.0, None).astype(np.float32)
        x, positions = bf16_normal(rng, 18, size.head_dim), places(rng, 18)
        weight = bf16_normal(rng, size.head_dim, spread=0)
        normed = reference.rms_norm(values(x), values(weight), EPS, bf16)
        rotated = reference.rotary(normed, positions, frequencies, act=bf16)
        for fmt in ("fp8", "fp4_e4m3"):
            record = self.run(norm_rotary_pack, x, weight, positions, frequencies, fmt=fmt, eps=EPS)
            expected = cache_record(rotated, fmt)
            assert (record != expected).mean() < 2e-3
            difference = np.abs(decode_record(record, fmt, size.head_dim) - decode_record(expected, fmt, size.head_dim))
            step = 2.0**-3 if fmt == "fp8" else 0.5
            assert_within(difference, np.zeros_like(difference), step * np.abs(rotated) + 0.1)

    # ---- gradients, contract ---------------------------------------------------------------------

    def test_gradients(self) -> None:
        """Guards the training mode of norm and rotation."""
        rng = generator("norm gradients")
        x, weight = normal(rng, 3, 8, spread=0), normal(rng, 8, spread=0)
        kernels = self.kernels(None)
        check_gradients(lambda a, b: kernels(rms_norm, a, b, eps=EPS), x, weight)
        positions, frequencies = np.arange(3, dtype=np.int32), FREQUENCIES[:2]
        check_gradients(lambda a: kernels(rotary, a, positions, frequencies), x[:, None])

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast or cut without a word."""
        x, weight, positions = np.zeros((3, 64), np.float32), np.zeros(64, np.float32), np.zeros(3, np.int32)
        heads = x[:, None]
        self.refuses(rms_norm, x, weight[:32], eps=EPS, match="do not fit")
        self.refuses(rms_norm, heads, weight, eps=EPS, match="do not fit")
        self.refuses(rotary, x, positions, FREQUENCIES, match="do not fit")
        self.refuses(rotary, heads, positions[:2], FREQUENCIES, match="do not fit")
        self.refuses(rotary, heads[..., :8], positions, FREQUENCIES, match="do not fit")
        self.refuses(rotary, heads[..., :40], positions, FREQUENCIES, quantize=True, match="groups of 32")
        pack = {"fmt": "fp8", "eps": EPS}
        self.refuses(norm_rotary_pack, heads, weight, positions, FREQUENCIES, match="do not fit", **pack)
        self.refuses(norm_rotary_pack, x, weight, positions[:1], FREQUENCIES, match="do not fit", **pack)
        self.refuses(norm_rotary_pack, x, weight[:1], positions, FREQUENCIES, match="do not fit", **pack)
        self.refuses(norm_rotary_pack, x[:, :8], weight[:8], positions, FREQUENCIES, match="do not fit", **pack)
        self.refuses(norm_rotary_pack, x[:, :40], None, positions, FREQUENCIES, match="groups of 32", **pack)
