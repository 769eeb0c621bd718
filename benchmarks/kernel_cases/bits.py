"""Comparisons of bits that the device checks of several ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from deepinfer_jax.kernels.quantization import FP4_KV_GROUP, GROUP, CacheFormat

ROW_COUNTS = (1, 2, 8, 64, 65, 256, 1000, 1024)


def bits(x: Any) -> np.ndarray:
    """Bytes of an array as unsigned integers."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def all_bfloat16(size: int) -> np.ndarray:
    """Rows [n, size] of all 65,536 bfloat16 patterns: neighbours of a group in order, then shuffled, then each
    as the largest of a group of random smaller ones."""
    rng = np.random.default_rng(0)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ordered = np.concatenate([patterns, rng.permutation(patterns)])
    tops = np.zeros((1 << 15, 16), np.float32)
    tops[:, 0] = patterns[: 1 << 15].view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        tops[:, 1:] = tops[:, :1] * rng.uniform(-1, 1, size=(1 << 15, 15)).astype(np.float32)
        last = tops.astype(ml_dtypes.bfloat16).view(np.uint16).ravel()
    return np.concatenate([ordered, last]).view(ml_dtypes.bfloat16).reshape(-1, size)


def rows_bitwise(function: Callable[..., Any], operands: tuple[jax.Array, ...]) -> dict[str, Any]:
    """Whether rows of `operands` (all with the same leading axis) keep their bits at other counts and places."""
    call = jax.jit(function)
    whole = [bits(leaf) for leaf in jax.tree.leaves(call(*operands))]
    rows = operands[0].shape[0]
    different = {}
    for count in (*ROW_COUNTS, rows):
        for start in (0, min(777, rows - count)):
            part = call(*(x[start : start + count] for x in operands))
            wrong = [
                int((bits(leaf) != full[start : start + count]).sum())
                for leaf, full in zip(jax.tree.leaves(part), whole, strict=True)
            ]
            if any(wrong):
                different[f"{count} rows from {start}"] = wrong
    return {"passed": not different, "different": different}


def repeats(function: Callable[..., Any], operands: tuple[Any, ...], times: int = 100) -> dict[str, Any]:
    """Whether calls with equal operands give equal bits."""
    call = jax.jit(function)
    first = [bits(leaf) for leaf in jax.tree.leaves(call(*operands))]
    different = 0
    for _ in range(times):
        again = [bits(leaf) for leaf in jax.tree.leaves(call(*operands))]
        different += any((a != b).any() for a, b in zip(again, first, strict=True))
    return {"passed": different == 0, "different_calls": different}


def turned_by_nothing(rows: np.ndarray, rope: int) -> np.ndarray:
    """float32 rows [..., d] whose last `rope` elements are rotated at position 0, in IEEE arithmetic.

    A product with the sine 0 is not always without effect: it makes NaN of an infinite neighbour, and +0 of some -0.
    """
    turned = rows.astype(np.float32)
    even, odd = turned[..., -rope::2].copy(), turned[..., 1 - rope :: 2].copy()
    with np.errstate(invalid="ignore"):
        turned[..., -rope::2] = even - odd * np.float32(0)
        turned[..., 1 - rope :: 2] = even * np.float32(0) + odd
    return turned


def _nearest_even(x: np.ndarray, mantissa_bits: int, smallest_exponent: int) -> np.ndarray:
    """float64 rounded to nearest, ties to even, to a binary format without an upper end."""
    exponent = np.maximum(np.frexp(x)[1] - 1, smallest_exponent)
    step = np.ldexp(1.0, exponent - mantissa_bits)
    return np.rint(x / step) * step


def _e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Codes of float64, nearest, ties to even, saturating at 6."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rounded = _nearest_even(np.minimum(np.abs(x), 6.0), 1, 0)
    return np.searchsorted(values, rounded).astype(np.uint8) | np.signbit(x).astype(np.uint8) << 3


def expected_record(values: np.ndarray, fmt: CacheFormat) -> tuple[np.ndarray, np.ndarray]:
    """(record uint8 [T, width], whether each of its bytes may be any) of float32 [T, d], in IEEE arithmetic.

    XLA:CPU is no reference here: it takes subnormal numbers for zeros. What groups with a NaN or an infinity give
    is defined by `pack_cache`.
    """
    group = FP4_KV_GROUP if fmt == "fp4_e4m3" else GROUP
    groups = values.reshape(*values.shape[:-1], -1, group).astype(np.float32)
    floor = {"fp8": np.float32(1e-4), "fp4": np.float32(6 * 2.0**-126), "fp4_e4m3": np.float32(6 * 2.0**-9)}[fmt]
    largest = np.maximum(np.abs(groups).max(axis=-1), floor)  # NaN stays NaN
    nan = np.isnan(largest)
    bad = nan if fmt == "fp4_e4m3" else ~np.isfinite(largest)
    amax = np.where(bad, floor, largest)
    exact = np.where(bad[..., None], 0, groups).astype(np.float64)
    if fmt == "fp4_e4m3":
        with np.errstate(over="ignore"):
            scale = _nearest_even(np.minimum(amax / np.float32(6), np.float32(448)).astype(np.float64), 3, -6)
        scale_bytes = np.where(bad, 0x7F, scale.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    else:
        most = 448.0 if fmt == "fp8" else 6.0
        mantissa, exponent = np.frexp(amax * np.float32(1.0 / most))
        exponent = exponent - (mantissa == 0.5)
        scale = np.ldexp(1.0, exponent)
        scale_bytes = np.where(bad, 255, exponent + 127)
    quotient = exact / scale[..., None]
    if fmt == "fp8":
        codes = _nearest_even(np.clip(quotient, -448, 448), 3, -6).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        codes = _e2m1_codes(quotient)
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    free = np.broadcast_to(bad[..., None], codes.shape)
    flat = (*values.shape[:-1], -1)
    record = np.concatenate([codes.reshape(flat), scale_bytes.astype(np.uint8)], axis=-1)
    return record, np.concatenate([free.reshape(flat), np.zeros(scale_bytes.shape, bool)], axis=-1)


def expected_fp4(values: np.ndarray) -> np.ndarray:
    """float32 [..., d] quantised to MXFP4 and back; NaN for groups with a NaN or an infinity."""
    record, free = expected_record(values, "fp4")
    codes = record[..., : values.shape[-1] // 2]
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(values.shape)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
    scale = np.ldexp(np.float32(1), record[..., values.shape[-1] // 2 :].astype(int) - 127).repeat(GROUP, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.where(codes >= 8, -magnitude, magnitude) * scale
    return np.where(free[..., : values.shape[-1] // 2].repeat(2, axis=-1), np.float32(np.nan), product)


def differences(
    actual: np.ndarray, expected: np.ndarray, free: np.ndarray, inputs: np.ndarray, group: int
) -> dict[str, Any]:
    """Exact comparison of bits [T, n] outside `free`, with the first difference and the input that it comes from.

    inputs: [T, d]; n bytes or elements belong to d elements in order, or are scales behind them. group: elements
    that are shown of the input.
    """
    wrong = (bits(actual) != bits(expected)) & ~free
    report = {"passed": not wrong.any(), "rows": len(wrong), "wrong_rows": int(wrong.any(axis=1).sum())}
    if not wrong.any():
        return report
    width, size = actual.shape[1], inputs.shape[1]
    codes = size if width in (size, size + size // group) else size // 2
    row, place = (int(i) for i in np.argwhere(wrong)[0])
    scale = place >= codes
    element = (place - codes) * group if scale else place * (size // codes)
    first = element // group * group
    report["wrong"], report["wrong_scales"] = int(wrong.sum()), int(wrong[:, codes:].sum())
    report["first"] = {
        "row": row,
        "place": place,
        "scale": scale,
        "element": element,
        "actual": hex(int(bits(actual)[row, place])),
        "expected": hex(int(bits(expected)[row, place])),
        "group": [hex(int(x)) for x in bits(inputs)[row, first : first + group]],
    }
    return report
