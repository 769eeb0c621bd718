"""Number formats and quantisers in NumPy: the second opinion that the kernels are compared with.

Written from `spec/attention.md` 7.1-7.2 and `spec/blocks.md` 4.4-4.5, with float64 arithmetic and an own
round-half-even; nothing here imports the package. The one float32 operation is the product or quotient that
the rules themselves define in float32, for the scale.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 32
KV_GROUP = 16

Array = np.ndarray


def round_minifloat(x: Array, mantissa_bits: int, minimum_exponent: int) -> Array:
    """Round float64 values half-to-even to a binary format without overflow handling.

    mantissa_bits: stored bits. minimum_exponent: exponent of the smallest normal number; below it the
    spacing stays constant (subnormals).
    """
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, minimum_exponent) - mantissa_bits)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), np.rint(x / quantum) * quantum, x)


def bf16(x: Array) -> Array:
    """Nearest bfloat16 (as float64)."""
    return round_minifloat(x, 7, -126)


def float32(x: Array) -> Array:
    """Nearest float32 (as float64)."""
    return round_minifloat(x, 23, -126)


def e4m3(x: Array) -> Array:
    """Nearest e4m3 value of |x| <= 448."""
    return round_minifloat(x, 3, -6)


def e2m1(x: Array) -> Array:
    """Nearest e2m1 value of |x| <= 6."""
    return round_minifloat(x, 1, 0)


def power_of_two_above(x: Array) -> Array:
    """2^ceil(log2 x) of positive values, exact."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def _groups(x: Array, group: int) -> Array:
    x = np.asarray(x, np.float64)
    return x.reshape(*x.shape[:-1], -1, group)


def _microscaled(x: Array, floor: np.float32, maximum: float) -> tuple[Array, Array]:
    """(quotients clipped to the format's range [..., groups, 32], scales [..., groups])."""
    groups = _groups(x, GROUP)
    amax = np.maximum(np.abs(groups).max(-1).astype(np.float32), floor)
    scale = power_of_two_above(amax * np.float32(1.0 / maximum))
    return np.clip(groups / scale[..., None], -maximum, maximum), scale


def quantize_fp8(x: Array) -> tuple[Array, Array]:
    """(e4m3 values [..., n], scales [..., n/32]) of the activation and window format."""
    quotient, scale = _microscaled(x, np.float32(1e-4), 448.0)
    return e4m3(quotient).reshape(np.shape(x)), scale


def quantize_fp4(x: Array) -> tuple[Array, Array]:
    """(e2m1 values [..., n], scales [..., n/32]) of the index key format."""
    quotient, scale = _microscaled(x, np.float32(6 * 2.0**-126), 6.0)
    return e2m1(quotient).reshape(np.shape(x)), scale


def quantize_fp4_e4m3(x: Array) -> tuple[Array, Array]:
    """(e2m1 values [..., n], e4m3 scales [..., n/16]) of the compressed key-value format."""
    groups = _groups(x, KV_GROUP)
    amax = np.maximum(np.abs(groups).max(-1).astype(np.float32), np.float32(6 * 2.0**-9))
    scale = e4m3(np.minimum((amax / np.float32(6)).astype(np.float64), 448.0))
    return e2m1(np.clip(groups / scale[..., None], -6.0, 6.0)).reshape(np.shape(x)), scale


def scaled(values: Array, scale: Array) -> Array:
    """values [..., n] times their group's scale [..., groups]."""
    return (_groups(values, values.shape[-1] // scale.shape[-1]) * scale[..., None]).reshape(values.shape)


def qdq8(x: Array) -> Array:
    """Quantise and dequantise to MXFP8."""
    return scaled(*quantize_fp8(x))


def qdq4_mx(x: Array) -> Array:
    """Quantise and dequantise to MXFP4."""
    return scaled(*quantize_fp4(x))


def qdq4_kv(x: Array) -> Array:
    """Quantise and dequantise to the compressed key-value format."""
    return scaled(*quantize_fp4_e4m3(x))


# ---- stored codes ---------------------------------------------------------------------------------

_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_e8m0(scale: Array) -> Array:
    """Powers of two of e8m0 bytes."""
    return np.ldexp(1.0, np.asarray(scale, np.int64) - 127)


def decode_e4m3(codes: Array) -> Array:
    """float64 values of e4m3 bytes."""
    return np.asarray(codes, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def decode_nibbles(packed: Array) -> Array:
    """e2m1 values [..., 2n] of bytes [..., n], the low nibble first."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return _E2M1_VALUES[codes]


def encode_e4m3(values: Array) -> Array:
    """Bytes of values that lie on the e4m3 grid."""
    return np.asarray(values).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def encode_nibbles(values: Array) -> Array:
    """Packed bytes [..., n/2] of values [..., n] that lie on the e2m1 grid."""
    codes = np.argmax(np.abs(values)[..., None] == _E2M1_VALUES[:8], axis=-1) + 8 * np.signbit(values)
    codes = codes.astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def encode_e8m0(scale: Array) -> Array:
    """Bytes of powers of two."""
    return (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)


def cache_record(x: Array, fmt: str) -> Array:
    """Stored record of vectors [..., n]: codes, then scales (`spec/attention.md` 5); "float32" keeps the values."""
    if fmt == "float32":
        return np.asarray(x, np.float32)
    if fmt == "fp8":
        values, scale = quantize_fp8(x)
        return np.concatenate([encode_e4m3(values), encode_e8m0(scale)], axis=-1)
    if fmt == "fp4":
        values, scale = quantize_fp4(x)
        return np.concatenate([encode_nibbles(values), encode_e8m0(scale)], axis=-1)
    values, scale = quantize_fp4_e4m3(x)
    return np.concatenate([encode_nibbles(values), encode_e4m3(scale)], axis=-1)


def decode_fp8_blocks(codes: Array, scale: Array) -> Array:
    """Weight [out, in] of e4m3 bytes with one scale byte per 32 x 32 block."""
    factors = decode_e8m0(scale).repeat(GROUP, axis=0).repeat(GROUP, axis=1)
    return decode_e4m3(codes) * factors


def decode_fp4_rows(packed: Array, scale: Array) -> Array:
    """Weight [..., out, in] of packed e2m1 bytes with one scale byte per 1 x 32 elements."""
    return scaled(decode_nibbles(packed), decode_e8m0(scale))


def decode_record(record: Array, fmt: str, size: int) -> Array:
    """Vectors [..., size] of stored records."""
    if fmt == "float32":
        return np.asarray(record, np.float64)
    record = np.asarray(record, np.uint8)
    if fmt == "fp8":
        return scaled(decode_e4m3(record[..., :size]), decode_e8m0(record[..., size:]))
    scale = record[..., size // 2 :]
    return scaled(decode_nibbles(record[..., : size // 2]), decode_e8m0(scale) if fmt == "fp4" else decode_e4m3(scale))
