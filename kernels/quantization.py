"""Number formats of the released model: exact quantisers, packings and dequantisers.

All rules are those of `spec/attention.md` 7.1-7.2 and `spec/blocks.md` 4.4-4.5. Scale bytes are e8m0
(value 2^(byte-127)) except in the "fp4_e4m3" cache format, whose scales are e4m3. Every dequantised
value is exact in bfloat16. Functions work on the last axis and any leading shape.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels import fp4_block_scaled, fp4_fragments

GROUP = 32
"""Elements that share a scale, in activations, FP4 weights, window keys and index keys."""

FP4_KV_GROUP = 16
"""Elements that share an e4m3 scale in the compressed key-value cache."""

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0

WeightFormat = Literal["fp8", "fp4", "fp8_row", "fp4_sm90", "fp4_sm100"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=["format"])
@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """A packed weight. Leading axes (layers, experts) are free; shapes below are the last two axes.

    format "fp8":     data uint8 e4m3 bytes [out, in], scale uint8 e8m0 [out/32, in/32]
    format "fp4":     data uint8 [out, in/2] (low nibble = even column), scale uint8 [out, in/32]
    format "fp8_row": data uint8 e4m3 bytes [rows, in], scale uint8 [rows, in/32]
    format "fp4_sm90": the bits of "fp4" in the order of Hopper's tensor cores (`fp4_fragments.py`):
        data uint32 [out/64, in/64, 4, 128], scale uint16 [out/64, in/64, 64]
    format "fp4_sm100": the same in the order of Blackwell's block-scaled products (`fp4_block_scaled.py`):
        data uint32 [out/64, in/64, 2, 256], scale uint8 [out/64, ceil(in/128), 16, 16]

    Bytes, not float8: XLA:CPU widens a whole float8 array before it slices or gathers from it.
    """

    data: jax.Array
    scale: jax.Array
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, ending in [out, in]."""
        if self.format == "fp4":
            return (*self.data.shape[:-1], self.data.shape[-1] * 2)
        if self.format == "fp4_sm90":
            *lead, rows, columns = self.scale.shape[:-1]
            return (*lead, rows * fp4_fragments.TILE, columns * fp4_fragments.TILE)
        if self.format == "fp4_sm100":
            *lead, rows, columns = self.data.shape[:-2]
            return (*lead, rows * fp4_block_scaled.TILE, columns * fp4_block_scaled.TILE)
        return tuple(self.data.shape)

    def __getitem__(self, index: object) -> QuantTensor:
        """Index leading axes (layer, expert) of data and scale alike."""
        return QuantTensor(self.data[index], self.scale[index], self.format)


# ---- element formats ------------------------------------------------------------------------------


def e8m0_to_float32(scale: jax.Array) -> jax.Array:
    """Decode e8m0 bytes to float32 powers of two; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = scale.astype(jnp.uint32) << 23
    bits = jnp.where(scale == 0, jnp.uint32(1 << 22), bits)
    bits = jnp.where(scale == 255, jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def e2m1_to_float32(codes: jax.Array) -> jax.Array:
    """Decode e2m1 codes 0..15 (uint8) to float32 by bit arithmetic."""
    magnitude = (codes & 7).astype(jnp.uint32)
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    bits = jnp.where(magnitude >= 2, normal, jnp.where(magnitude == 1, jnp.uint32(126 << 23), 0))
    sign = (codes >> 3).astype(jnp.uint32) << 31
    return lax.bitcast_convert_type(bits | sign, jnp.float32)


_E2M1_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between e2m1 magnitudes, and whether the midpoint itself rounds up (to the even code)."""


def float32_to_e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Encode float32 x / scale to e2m1 codes (uint8): nearest, ties to the even code, saturating at 6.

    Compares |x| with border * scale, which is exact for normal scales of few bits. A quotient would not do
    unless the scale is a power of two: XLA rewrites x / broadcast(scale) to x * (1 / scale), whose error
    moves ties (`spec/attention.md` 7.2).
    """
    a = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for border, upwards in _E2M1_BORDERS:
        limit = scale * np.float32(border)
        code += (a >= limit if upwards else a > limit).astype(jnp.uint8)
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> 31
    return code | (sign << 3).astype(jnp.uint8)


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Pack 4-bit codes [..., n] (uint8) into bytes [..., n/2], even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Inverse of `pack_nibbles`."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def power_of_two_scale_byte(amax: jax.Array, format_max: float) -> jax.Array:
    """e8m0 byte of 2^ceil(log2(amax / format_max)), computed on the float32 bits.

    amax is float32 and must already carry the format's floor. `amax * float32(1/format_max)` is the
    reference's own product: it makes an amax of exactly format_max * 2^k use the scale 2^k. An amax that
    is infinite or NaN gives byte 255, NaN, so that the group cannot pass for numbers.
    """
    bits = lax.bitcast_convert_type(amax * np.float32(1.0 / format_max), jnp.uint32) & 0x7FFFFFFF
    return jnp.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0), 255).astype(jnp.uint8)


def _grouped(x: jax.Array, group: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _clip(x: jax.Array, limit: float) -> jax.Array:
    return jnp.clip(x, -limit, limit)


# ---- quantisers: float [..., n] -> (codes [..., n], scale bytes [..., n/group]) --------------------


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """MXFP8: e4m3 codes (float8_e4m3fn) and e8m0 bytes per 32; amax floor 1e-4."""
    groups = _grouped(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(1e-4))
    scale = power_of_two_scale_byte(amax, _E4M3_MAX)
    quotient = groups / e8m0_to_float32(scale)[..., None]  # by a power of two: exact, also as a product
    return _clip(quotient, _E4M3_MAX).astype(jnp.float8_e4m3fn).reshape(x.shape), scale


def quantize_fp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """MXFP4: e2m1 codes (uint8, unpacked) and e8m0 bytes per 32; amax floor 6 * 2^-126."""
    groups = _grouped(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(6 * 2.0**-126))
    scale = power_of_two_scale_byte(amax, _E2M1_MAX)
    quotient = groups / e8m0_to_float32(scale)[..., None]
    return float32_to_e2m1(quotient).reshape(x.shape), scale


def quantize_fp4_e4m3(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compressed key-values: e2m1 codes (uint8, unpacked), float8_e4m3fn scales per 16.

    The scale amax/6 is rounded to nearest, so it may round down and clip the largest element.
    """
    groups = _grouped(x, FP4_KV_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(6 * 2.0**-9))
    scale = jnp.minimum(amax / np.float32(_E2M1_MAX), _E4M3_MAX).astype(jnp.float8_e4m3fn)
    return float32_to_e2m1(groups, scale.astype(jnp.float32)[..., None]).reshape(x.shape), scale


# ---- dequantisers ---------------------------------------------------------------------------------


def _apply_group_scale(values: jax.Array, scale: jax.Array, group: int) -> jax.Array:
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // group, group)
    return (groups * scale[..., None]).reshape(values.shape)


def dequantize_fp8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 values of MXFP8 codes [..., n] with e8m0 bytes [..., n/32]."""
    return _apply_group_scale(codes.astype(jnp.float32), e8m0_to_float32(scale), GROUP)


def dequantize_fp4(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 values of unpacked e2m1 codes [..., n] with e8m0 bytes [..., n/32]."""
    return _apply_group_scale(e2m1_to_float32(codes), e8m0_to_float32(scale), GROUP)


def dequantize_fp4_e4m3(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 values of unpacked e2m1 codes [..., n] with e4m3 scales [..., n/16]."""
    return _apply_group_scale(e2m1_to_float32(codes), scale.astype(jnp.float32), FP4_KV_GROUP)


def round_to_e4m3(x: jax.Array) -> jax.Array:
    """Nearest e4m3 value of float32 |x| <= 448, ties to even, without a float8 conversion.

    The same values as `x.astype(float8_e4m3fn)`, in a few integer operations instead of a long
    sequence that XLA:CPU would emit (and compile) at every use.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits & np.uint32(0x80000000), bits & np.uint32(0x7FFFFFFF)
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & np.uint32(0xFFF00000)  # 3 bits of mantissa
    # Below 2^-6 the steps are 2^-9. An explicit rounding: compilers may fold (x + c) - c back to x.
    steps = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(2.0**9)
    small = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2.0**-9)
    subnormal = magnitude < np.uint32(0x3C800000)  # 2^-6
    rounded = jnp.where(subnormal, lax.bitcast_convert_type(small, jnp.uint32), rounded)
    return lax.bitcast_convert_type(rounded | sign, jnp.float32)


def quantize_dequantize_fp8(x: jax.Array) -> jax.Array:
    """Activation quantisation as the reference rounds it; result in x's dtype (exact)."""
    groups = _grouped(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(1e-4))
    scale = e8m0_to_float32(power_of_two_scale_byte(amax, _E4M3_MAX))[..., None]
    values = round_to_e4m3(_clip(groups / scale, _E4M3_MAX)) * scale
    return values.reshape(x.shape).astype(x.dtype)


def e4m3_bytes(codes: jax.Array) -> jax.Array:
    """uint8 view of float8_e4m3fn codes."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def dequantize_rows(data: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 values of e4m3 bytes [..., n] with e8m0 bytes [..., n/32]."""
    return dequantize_fp8(lax.bitcast_convert_type(data, jnp.float8_e4m3fn), scale)


def dequantize(weight: QuantTensor, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """All values of a packed weight [..., out, in]; exact in bfloat16 and float32."""
    if weight.format == "fp8":
        *lead, rows, columns = weight.data.shape
        codes = lax.bitcast_convert_type(weight.data, jnp.float8_e4m3fn)
        blocks = codes.astype(jnp.float32).reshape(*lead, rows // GROUP, GROUP, columns // GROUP, GROUP)
        scale = e8m0_to_float32(weight.scale)[..., :, None, :, None]
        return (blocks * scale).astype(dtype).reshape(*lead, rows, columns)
    if weight.format == "fp4":
        return dequantize_fp4(unpack_nibbles(weight.data), weight.scale).astype(dtype)
    if weight.format == "fp4_sm90":
        codes, scale = fp4_fragments.unpack_codes(weight.data), fp4_fragments.unpack_scales(weight.scale)
        return dequantize_fp4(codes, scale).astype(dtype)
    if weight.format == "fp4_sm100":
        scale = fp4_block_scaled.unpack_scales(weight.scale, weight.shape[-1])
        return dequantize_fp4(fp4_block_scaled.unpack_codes(weight.data), scale).astype(dtype)
    return dequantize_rows(weight.data, weight.scale).astype(dtype)


# ---- cache rows: one uint8 record per entry -------------------------------------------------------

CacheFormat = Literal["fp8", "fp4", "fp4_e4m3", "float32"]
"""Storage of a cache entry; "float32" keeps exact values (profiles without cache quantisation)."""


def cache_width(fmt: CacheFormat, size: int) -> int:
    """Elements of the stored record of a vector of `size`: bytes, or floats for "float32"."""
    if fmt == "fp8":
        return size + size // GROUP
    if fmt == "fp4":
        return size // 2 + size // GROUP
    if fmt == "fp4_e4m3":
        return size // 2 + size // FP4_KV_GROUP
    return size


def cache_dtype(fmt: CacheFormat) -> DTypeLike:
    """dtype of a stored record."""
    return jnp.float32 if fmt == "float32" else jnp.uint8


def check_records(op: str, records: jax.Array, fmt: CacheFormat, size: int) -> None:
    """ValueError unless the last axis and dtype of `records` are those of vectors of `size` in `fmt`."""
    if records.shape[-1] != cache_width(fmt, size) or records.dtype != cache_dtype(fmt):
        raise ValueError(
            f"{op}: {records.dtype} records {records.shape} do not hold {size} elements in {fmt!r}; "
            f"expected {jnp.dtype(cache_dtype(fmt)).name} [..., {cache_width(fmt, size)}]"
        )


def _bytes(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)


def pack_cache(x: jax.Array, fmt: CacheFormat) -> jax.Array:
    """Quantise vectors [..., n] to records [..., cache_width(fmt, n)]: codes, then scales.

    A group of "fp8" or "fp4" that holds a NaN or an infinity has the scale byte 255, NaN, and any codes. A group of
    "fp4_e4m3" that holds a NaN has the scale byte 0x7F, NaN, and any codes; an infinity is clipped like any number
    over 6 * 448.
    """
    if fmt == "float32":
        return x.astype(jnp.float32)
    if fmt == "fp8":
        codes, scale = quantize_fp8(x)
        return jnp.concatenate([_bytes(codes), scale], axis=-1)
    codes, scale = quantize_fp4(x) if fmt == "fp4" else quantize_fp4_e4m3(x)
    return jnp.concatenate([pack_nibbles(codes), _bytes(scale)], axis=-1)


def unpack_cache(record: jax.Array, fmt: CacheFormat, size: int) -> jax.Array:
    """float32 vectors [..., size] of records written by `pack_cache`."""
    if fmt == "float32":
        return record
    if fmt == "fp8":
        codes = lax.bitcast_convert_type(record[..., :size], jnp.float8_e4m3fn)
        return dequantize_fp8(codes, record[..., size:])
    codes = unpack_nibbles(record[..., : size // 2])
    scale = record[..., size // 2 :]
    if fmt == "fp4":
        return dequantize_fp4(codes, scale)
    return dequantize_fp4_e4m3(codes, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn))
