"""Number formats: every bfloat16 value under every scale, decode tables, records, worked numbers.

Compared with `reference_formats.py`. What is not finite has no place in a cache: a group with NaN or infinity
decodes to NaN in the e8m0 formats, and so does a group with NaN in the e4m3-scaled one, where infinity saturates
like every value beyond 2688.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import compile as compilation
from deepinfer_jax.kernels import quantization as q

from . import reference_formats as reference
from .cases import BF16, as_bits, assert_same_bits, bf16_normal, fp4_weight, fp8_weight, generator, load_unit, values

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16)
FINITE = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))]
POSITIVE = np.sort(FINITE[FINITE.astype(np.float32) > 0])
CHUNK = 16

FORMATS: tuple[q.CacheFormat, ...] = ("fp8", "fp4", "fp4_e4m3")
GROUPS = {"fp8": 32, "fp4": 32, "fp4_e4m3": 16}


def quantisers(fmt: q.CacheFormat) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(quantiser, dequantiser, reference quantiser)."""
    return {
        "fp8": (q.quantize_fp8, q.dequantize_fp8, reference.quantize_fp8),
        "fp4": (q.quantize_fp4, q.dequantize_fp4, reference.quantize_fp4),
        "fp4_e4m3": (q.quantize_fp4_e4m3, q.dequantize_fp4_e4m3, reference.quantize_fp4_e4m3),
    }[fmt]


def codes_of(fmt: q.CacheFormat, x: Any) -> tuple[Any, Any, Any, Any]:
    """(codes as bytes, scale bytes, values in x's dtype, values of the packed and unpacked record)."""
    quantise, dequantise, _ = quantisers(fmt)
    codes, scale = quantise(x)
    record = q.unpack_cache(q.pack_cache(x, fmt), fmt, x.shape[-1])
    raw = codes if codes.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(codes, jnp.uint8)
    raw_scale = scale if scale.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scale, jnp.uint8)
    numbers = q.quantize_dequantize_fp8(x) if fmt == "fp8" else dequantise(codes, scale).astype(x.dtype)
    return raw, raw_scale, numbers, record


@functools.cache
def compiled(fmt: q.CacheFormat) -> Callable[..., Any]:
    """`codes_of` of one format, compiled once per shape."""
    return compilation.jit(lambda x: codes_of(fmt, x))


SMALL_ROWS = 80


def small(fmt: q.CacheFormat, x: np.ndarray) -> list[np.ndarray]:
    """`codes_of` few rows of up to 64 elements; zero-padded to one shape, so that one program serves all."""
    rows = np.zeros((SMALL_ROWS, 64), x.dtype)
    rows[: x.shape[0], : x.shape[1]] = x
    return [np.asarray(part)[: x.shape[0]] for part in compiled(fmt)(rows)]


def expected_of(fmt: q.CacheFormat, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same from the reference: (codes as bytes, scale bytes, float64 values)."""
    numbers, scale = quantisers(fmt)[2](values(x))
    if fmt == "fp8":
        codes = reference.encode_e4m3(numbers)
    else:
        packed = reference.encode_nibbles(numbers)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(numbers.shape)
    raw_scale = reference.encode_e4m3(scale) if fmt == "fp4_e4m3" else reference.encode_e8m0(scale)
    return codes, raw_scale, reference.scaled(numbers, scale)


def check(fmt: q.CacheFormat, x: np.ndarray, found: tuple[Any, ...]) -> None:
    """All results of `codes_of` are those of the reference, bit for bit, signs of zeros included."""
    codes, scale, numbers = expected_of(fmt, x)
    assert_same_bits(found[1], scale, f"{fmt} scales")
    assert_same_bits(found[0], codes, f"{fmt} codes")
    with np.errstate(over="ignore"):  # a group maximum next to the largest float may round to 2^128
        exact = numbers.astype(np.float32)
    assert ((exact == numbers) | (np.abs(numbers) == 2.0**128)).all()
    assert_same_bits(found[2], exact.astype(BF16), f"{fmt} values")
    assert_same_bits(found[2].astype(np.float32), exact, f"{fmt} values in bfloat16")
    assert_same_bits(found[3], exact, f"{fmt} record")


def largest_of_each_scale(fmt: q.CacheFormat) -> np.ndarray:
    """For every scale that can occur, the largest finite bfloat16 group maximum that leads to it."""
    groups = np.zeros((len(POSITIVE), GROUPS[fmt]))
    groups[:, 0] = values(POSITIVE)
    _, scale = quantisers(fmt)[2](groups)
    _, last = np.unique(scale[::-1, 0], return_index=True)
    return POSITIVE[::-1][last]


def chunks(fmt: q.CacheFormat) -> Iterator[np.ndarray]:
    """Arrays [CHUNK, groups, group size]: one scale each, its maximum first, then every value up to it."""
    size = GROUPS[fmt]
    count = -(-len(FINITE) // (size - 1))
    padded = np.zeros(count * (size - 1), BF16)
    padded[: len(FINITE)] = FINITE
    magnitude = np.abs(padded.astype(np.float32))
    maxima = largest_of_each_scale(fmt)
    for start in range(0, len(maxima), CHUNK):
        block = np.zeros((CHUNK, count, size), BF16)
        for i, largest in enumerate(maxima[start : start + CHUNK]):
            block[i, :, 0] = largest
            allowed = magnitude <= np.float32(largest)
            if np.float32(largest) < 2.0**-120:  # MXFP4 only: a subnormal is zero on some devices and not on others
                allowed &= magnitude >= 2.0**-126
            block[i, :, 1:] = np.where(allowed, padded, BF16(0)).reshape(count, size - 1)
        yield block


@pytest.mark.parametrize(("fmt", "scales"), [("fp8", 143), ("fp4", 253), ("fp4_e4m3", 126)])
def test_every_value_under_every_scale(fmt: q.CacheFormat, scales: int) -> None:
    """Guards rounding, ties, clipping, scales and packing for all bfloat16 values, compiled."""
    assert len(largest_of_each_scale(fmt)) == scales
    for block in chunks(fmt):
        check(fmt, block, compiled(fmt)(block))


@pytest.mark.fast
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_group_maximum(fmt: q.CacheFormat) -> None:
    """Guards the scale of every possible group maximum, and the element that has it.

    Compiled and eager: a compiler that rewrote the quotient or merged roundings would show here.
    """
    maxima = FINITE if fmt != "fp4" else FINITE[np.abs(FINITE.astype(np.float32)) > 2.0**-124]  # no subnormals
    groups = np.zeros((len(maxima), GROUPS[fmt]), BF16)
    groups[:, 3] = maxima
    groups[:, 7] = (maxima.astype(np.float32) * np.float32(0.4)).astype(BF16)
    check(fmt, groups, compiled(fmt)(groups))
    check(fmt, groups, codes_of(fmt, jnp.asarray(groups)))


@pytest.mark.fast
@pytest.mark.parametrize("fmt", FORMATS)
def test_golden(fmt: q.CacheFormat) -> None:
    """Guards against the recorded values and codes of three implementations (signs of zeros differ between them)."""
    unit = load_unit("quant")
    codes, scale, numbers, record = small(fmt, unit["x"])
    key = {"fp8": "qdq8_mxfp8", "fp4": "qdq4_mxfp4", "fp4_e4m3": "qdq4_kv_e4m3s16"}[fmt]
    np.testing.assert_array_equal(values(numbers), unit[key])
    np.testing.assert_array_equal(values(record), unit[key])
    if fmt == "fp8":
        assert_same_bits(codes, unit["act_quant_codes"], "activation codes")
        assert_same_bits(scale, unit["act_quant_scale"], "activation scales")


MX_INPUT = [6, 5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.26, 3.5]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fmt", "given_values", "expected", "scale"),
    [
        ("fp8", [448, -1, 0.3, 17, 240, 1e-3, 0, -0.0], [448, -1, 0.3125, 16, 240, 0.001953125, 0, -0.0], 1.0),
        ("fp4", MX_INPUT, [6, 4, 2, 2, 1, 1, 0, -0.5, 4], 1.0),
        ("fp4", [1.01 * v for v in MX_INPUT], [6, 6, 3, 2, 1, 1, 0, -0.0, 4], 2.0),
        ("fp4_e4m3", [10, 7, -3.3, 1, 0.4, 0.2], [9.75, 6.5, -3.25, 0.8125, 0, 0], 1.625),
        ("fp4_e4m3", [0.0], [0.0], 2.0**-9),
        ("fp8", [1, -0.3, 0.004, 0.1], [1, -0.3125, 0.00390625, 0.1015625], 2.0**-8),
        ("fp8", [450], [448], 2.0),
        ("fp8", [448], [448], 1.0),
        ("fp8", [0.0], [0.0], 2.0**-22),
        ("fp8", [5e-5], [13 * 2.0**-18], 2.0**-22),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_worked_numbers(fmt: q.CacheFormat, given_values: list[float], expected: list[float], scale: float) -> None:
    """Guards the worked examples of `attention.md` appendix B and `blocks.md` 4.5, signs of zeros included."""
    _, scale_byte, numbers, _ = small(fmt, np.array([given_values], BF16))
    wanted = np.array(expected)
    np.testing.assert_array_equal(values(numbers)[0, : len(wanted)], wanted)
    np.testing.assert_array_equal(np.signbit(values(numbers))[0, : len(wanted)], np.signbit(wanted))
    decoded = reference.decode_e4m3 if fmt == "fp4_e4m3" else reference.decode_e8m0
    assert decoded(scale_byte)[0, 0] == scale


@pytest.mark.fast
def test_worked_codes() -> None:
    """Guards the bytes of `blocks.md` 4.4 and 4.5, and the nibble order on an asymmetric byte."""
    codes, scale, _, _ = small("fp8", np.array([[1, -0.3, 0.004, 0.1], [5e-5, 0, 0, 0]], BF16))
    assert codes[0, :4].tolist() == [0x78, 0xEA, 0x38, 0x5D]
    assert scale[0, 0] == 127 - 8
    assert codes[1, 0] == 0x75
    table = {0x38: 1.0, 0x7E: 448.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0xC4: -3.0, 0x78: 256.0}
    bytes_, expected = np.array(list(table), np.uint8), np.array(list(table.values()))
    row = jnp.zeros((1, 32), jnp.uint8).at[0, : len(table)].set(bytes_)
    np.testing.assert_array_equal(q.dequantize_rows(row, jnp.full((1, 1), 127, jnp.uint8))[0, : len(table)], expected)
    assert q.dequantize_rows(row, jnp.full((1, 1), 0x7C, jnp.uint8))[0, 4] == -0.375
    for byte, pair in ((0xB7, (6.0, -1.5)), (0x1F, (-6.0, 0.5)), (0x29, (-0.5, 1.0))):
        nibbles = q.unpack_nibbles(jnp.array([byte], jnp.uint8))
        assert np.asarray(q.e2m1_to_float32(nibbles)).tolist() == list(pair)
    packed = jnp.full((1, 16), 0xB7, jnp.uint8)
    weight = q.QuantTensor(packed, jnp.array([[0x7A]], jnp.uint8), "fp4")
    assert np.asarray(q.dequantize(weight))[0, :2].tolist() == [0.1875, -0.046875]


@pytest.mark.fast
def test_decode_tables() -> None:
    """Guards every code of every element format against an independent implementation of the formats."""
    every = np.arange(256, dtype=np.uint8)
    device = jnp.asarray(every)
    e4m3 = q.dequantize_rows(device.reshape(8, 32), jnp.full((8, 1), 127, jnp.uint8))
    assert_same_bits(e4m3, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(8, 32), "e4m3")
    e2m1 = np.asarray(q.e2m1_to_float32(device[:16]))
    assert_same_bits(e2m1, every[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32), "e2m1")
    for compile_it in (lambda f: f, compilation.jit):
        e8m0 = np.asarray(compile_it(q.e8m0_to_float32)(every))
        assert_same_bits(e8m0[:255], every[:255].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), "e8m0")
        assert np.isnan(e8m0[255])
    codes = np.asarray(q.float32_to_e2m1(jnp.asarray(e2m1)))
    assert_same_bits(codes, every[:16], "e2m1 codes of e2m1 values")
    np.testing.assert_array_equal(q.unpack_nibbles(q.pack_nibbles(device & 15)), every & 15)


@pytest.mark.fast
def test_weights_decode_to_the_reference() -> None:
    """Guards the 32 x 32 blocks of FP8 weights (one element worked out), the rows of FP4, and leading axes."""
    rng = generator("weights")
    fp8, fp4 = fp8_weight(rng, 64, 96), fp4_weight(rng, 3, 32, 64)
    expected = reference.decode_fp8_blocks(np.asarray(fp8.data), np.asarray(fp8.scale))
    for dtype in (jnp.bfloat16, jnp.float32):
        blocks, rows, one = compilation.jit(
            lambda a, b, d=dtype: (q.dequantize(a, d), q.dequantize(b, d), q.dequantize(b[1], d))
        )(fp8, fp4)
        np.testing.assert_array_equal(values(blocks), expected)
        decoded = values(rows)
        np.testing.assert_array_equal(decoded, reference.decode_fp4_rows(np.asarray(fp4.data), np.asarray(fp4.scale)))
        np.testing.assert_array_equal(values(one), decoded[1])
    code = reference.decode_e4m3(np.asarray(fp8.data)[40, 10])
    assert expected[40, 10] == code * reference.decode_e8m0(np.asarray(fp8.scale)[1, 0])
    assert fp4.shape == (3, 32, 64)
    assert fp8.shape == (64, 96)


@pytest.mark.fast
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantising_twice_changes_nothing(fmt: q.CacheFormat) -> None:
    """Guards stored values that pass a quantiser again: equal values, for the e4m3 scales above a maximum of 0.02."""
    rng = generator("twice", fmt)
    x = bf16_normal(rng, 2000, 64, spread=20 if fmt != "fp4_e4m3" else 8)
    if fmt == "fp4_e4m3":  # subnormal scales are not idempotent
        groups = x.reshape(-1, 16)
        groups = groups[np.abs(groups.astype(np.float32)).max(axis=1) > 0.02]
        x = groups[: len(groups) // 4 * 4].reshape(-1, 64)
    if fmt == "fp8":
        x = x[np.abs(x.astype(np.float32)).reshape(-1, 2, 32).max(axis=2).min(axis=1) >= 1e-4]
    assert len(x) > 500
    x = x[: len(x) // SMALL_ROWS * SMALL_ROWS].reshape(-1, SMALL_ROWS, 64)
    for rows in x:
        once = small(fmt, rows)[2]
        assert_same_bits(small(fmt, once)[2], once, fmt)


@pytest.mark.fast
@pytest.mark.parametrize("fmt", FORMATS)
def test_not_finite_is_not_hidden(fmt: q.CacheFormat) -> None:
    """Guards against a NaN that turns into an ordinary number on its way through a cache."""
    x = np.full((3, 64), 6, BF16)
    x[0, 5], x[1, 5] = np.nan, np.inf
    numbers = small(fmt, x)[3]
    group = GROUPS[fmt]
    assert np.isnan(numbers[0, :group]).all()
    if fmt == "fp4_e4m3":
        assert numbers[1, 5] == 2688
    else:
        assert np.isnan(numbers[1, :group]).all()
    assert (numbers[:, group:] == 6).all()
    assert (numbers[2] == 6).all()


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), fmt=st.sampled_from(FORMATS), spread=st.sampled_from([0.0, 10.0, 60.0]))
def test_float32_values_follow_the_same_rules(seed: int, fmt: q.CacheFormat, spread: float) -> None:
    """Guards the float32 profiles: quantisers of unrounded activations, near and far from ties."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(SMALL_ROWS, 64)) * np.exp2(rng.uniform(-spread, spread, size=(SMALL_ROWS, 1)))).astype(
        np.float32
    )
    x[0] = np.round(x[0] * 4) / 4  # many ties
    codes, scale, numbers = expected_of(fmt, x)
    found = compiled(fmt)(x)
    assert_same_bits(found[0], codes, "codes")
    assert_same_bits(found[1], scale, "scales")
    assert_same_bits(found[2], numbers.astype(np.float32), "values")


@pytest.mark.fast
def test_record_layout() -> None:
    """Guards the bytes of cache records: codes first, then scales; widths of 890 bytes a token in all."""
    rng = generator("layout")
    x = bf16_normal(rng, 5, 512)
    records = compilation.jit(lambda v: [q.pack_cache(v, fmt) for fmt in ("fp8", "fp4_e4m3")])(x)
    for record, fmt, width in zip(records, ("fp8", "fp4_e4m3"), (528, 288), strict=True):
        assert record.shape == (5, width) == (5, q.cache_width(fmt, 512))
        assert record.dtype == q.cache_dtype(fmt)
        assert_same_bits(record, reference.cache_record(values(x), fmt), fmt)
    assert q.cache_width("fp4", 128) == 68
    assert 2.5 * (q.cache_width("fp4_e4m3", 512) + q.cache_width("fp4", 128)) == 890
    exact = q.pack_cache(jnp.asarray(x), "float32")
    assert exact.dtype == jnp.float32
    assert_same_bits(q.unpack_cache(exact, "float32", 512), x.astype(np.float32), "float32 record")
    assert as_bits(exact).shape == (5, 512)
