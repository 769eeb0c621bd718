"""Norm, rotation, quantisation and packing of rows in registers.

Angles are float32(position) * frequency in float32 as in the portable version; cosine and sine are CUDA's
(at most 2 units in the last place for every float32 angle), computed once for each row or token and handed to
the other threads through shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels.mosaic.row_arithmetic import divide, normalize, pack_pairs, spread, swap_pairs
from deepinfer_jax.kernels.mosaic.rows import SHARED, VECTOR, Block, RowLayout, plane_layout, row_kernel, row_layout
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import FP4_KV_GROUP, GROUP, CacheFormat, cache_dtype, cache_width

Array = jax.Array

_E4M3_MAX = np.float32(448)
_E2M1_MAX = np.float32(6)
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between e2m1 magnitudes; every second one rounds up, to the even code."""


# ---- quantisers: float32 [rows, groups, group] ------------------------------------------------------


def _amax(values: Array, smallest: float) -> Array:
    """Largest magnitude of every group. As integers, in which NaN is the largest."""
    magnitude = lax.bitcast_convert_type(values, jnp.int32) & np.int32(0x7FFFFFFF)
    largest = jnp.maximum(jnp.max(magnitude, axis=2), np.float32(smallest).view(np.int32))
    return lax.bitcast_convert_type(largest, jnp.float32)


def _power_of_two(amax: Array, format_max: np.float32) -> tuple[Array, Array, Array]:
    """(e8m0 byte as int32, scale, 1 / scale) of each group; byte 255 and NaN for an infinite or NaN amax."""
    bits = lax.bitcast_convert_type(amax * np.float32(1.0 / format_max), jnp.int32) & np.int32(0x7FFFFFFF)
    byte = (bits >> 23) + jnp.where((bits & np.int32(0x7FFFFF)) != 0, np.int32(1), np.int32(0))
    byte = jnp.minimum(byte, np.int32(255))
    special = byte == np.int32(255)  # a finite amax gives 1 to 253
    nan = np.int32(0x7FC00000)
    scale = lax.bitcast_convert_type(jnp.where(special, nan, byte << 23), jnp.float32)
    inverse = lax.bitcast_convert_type(jnp.where(special, nan, (np.int32(254) - byte) << 23), jnp.float32)
    return byte, scale, inverse


def _e2m1(values: Array, scale: Array) -> Array:
    """e2m1 codes (int32) of values / scale, ties to even; 0 for NaN."""
    magnitude = jnp.abs(values)
    code = jnp.zeros(values.shape, jnp.int32)
    for number, border in enumerate(_BORDERS):
        limit = scale * np.float32(border)
        above = magnitude >= limit if number % 2 else magnitude > limit
        code = code + jnp.where(above, np.int32(1), np.int32(0))
    return code | ((lax.bitcast_convert_type(values, jnp.int32) >> 28) & np.int32(8))


def _e2m1_values(codes: Array) -> Array:
    """float32 of e2m1 codes (int32)."""
    magnitude = codes & np.int32(7)
    normal = (((magnitude >> 1) + np.int32(126)) << 23) | ((magnitude & np.int32(1)) << 22)
    small = jnp.where(magnitude == np.int32(1), np.int32(126 << 23), np.int32(0))
    bits = jnp.where(magnitude >= np.int32(2), normal, small) | ((codes & np.int32(8)) << 28)
    return lax.bitcast_convert_type(bits, jnp.float32)


def quantize_dequantize_fp4(values: Array) -> Array:
    """MXFP4 quantise-dequantise of groups of 32 (`quantize_fp4` and its inverse)."""
    _, scale, inverse = _power_of_two(_amax(values, 6 * 2.0**-126), _E2M1_MAX)
    scaled = values * spread(inverse, values.shape, (0, 1))
    return _e2m1_values(_e2m1(scaled, jnp.ones(values.shape, jnp.float32))) * spread(scale, values.shape, (0, 1))


def store_record(block: Block, ref: Any, values: Array, fmt: CacheFormat, layout: RowLayout) -> None:
    """Quantise float32 rows and store their records (`pack_cache`): codes, then scales."""
    if fmt == "float32":
        block.store(ref, values, layout.matrix)
        return
    if fmt == "fp8":
        byte, _, inverse = _power_of_two(_amax(values, 1e-4), _E4M3_MAX)
        scaled = values * spread(inverse, values.shape, (0, 1))
        codes = jnp.minimum(jnp.maximum(scaled, -_E4M3_MAX), _E4M3_MAX).astype(jnp.float8_e4m3fn)
        block.store(ref, codes, layout.matrix)
        block.store(ref, byte.astype(jnp.uint8), layout.scales, column=layout.size)
        return
    if fmt == "fp4":
        byte, _, inverse = _power_of_two(_amax(values, 6 * 2.0**-126), _E2M1_MAX)
        codes = _e2m1(values * spread(inverse, values.shape, (0, 1)), jnp.ones(values.shape, jnp.float32))
        scales = byte.astype(jnp.uint8)
    else:
        quotient = jnp.minimum(divide(_amax(values, 6 * 2.0**-9), float(_E2M1_MAX), layout.scales), _E4M3_MAX)
        scales = quotient.astype(jnp.float8_e4m3fn)
        # Back by way of float16: there is an instruction for that.
        exact = scales.astype(jnp.float16).astype(jnp.float32)
        codes = _e2m1(values, spread(exact, values.shape, (0, 1)))
    block.store(ref, pack_pairs(codes, layout), layout.packed)
    block.store(ref, scales, layout.scales, column=layout.size // 2)


# ---- rotation --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Turn:
    """Static facts of a rotation. rope: rotated elements at the end of a row. rows: of the tables in shared
    memory. size: elements of a table's row; the last `rope` of them are filled."""

    rope: int
    rows: int
    size: int

    @property
    def tables(self) -> list[Any]:
        """Cosines and signed sines."""
        return [plgpu.SMEM((self.rows, self.size), jnp.float32) for _ in range(2)]


def turn_operands(positions: Array, inverse_frequencies: Array, inverse: bool) -> tuple[Array, Array]:
    """(positions [T, 1], [2, rope]: the frequency of every element and the sign of its sine)."""
    half = inverse_frequencies.shape[0]
    frequencies = jnp.repeat(inverse_frequencies.astype(jnp.float32), 2)
    signs = np.tile(np.array([1, -1] if inverse else [-1, 1], np.float32), half)
    return positions.astype(jnp.int32).reshape(-1, 1), jnp.stack([frequencies, jnp.asarray(signs)])


def fill_tables(block: Block, positions_ref: Any, turn_ref: Any, tables: Any, turn: Turn) -> None:
    """Cosines and signed sines of the positions from `block` on, into the tables in shared memory."""
    shape = (turn.rows, turn.rope)
    _, layout = plane_layout(turn.rows, turn.rope, 1)
    position = block.load(positions_ref, layout, shape, same=True).astype(jnp.float32)
    angle = position * Block(0, last=0).load(turn_ref, layout, shape)
    values = jnp.cos(angle), jnp.sin(angle) * Block(1).load(turn_ref, layout, shape)
    for table, value in zip(tables, values, strict=True):
        Block(0).store(table, value, layout, column=turn.size - turn.rope)
    if not interpreting():
        _wait_for_warpgroup()


@plgpu.inline_mgpu()
def _wait_for_warpgroup(*_: Any) -> None:
    mgpu.utils.warpgroup_barrier()


def rotated(x: Array, tables: list[Array], layout: Any, dtype: Any) -> Array:
    """Pairs of float32 x turned by tables of its shape, rounded to dtype, as float32."""
    cos, sin = tables
    return (x * cos + swap_pairs(x, layout) * sin).astype(dtype).astype(jnp.float32)


def rotated_tail(x: Array, tables: Any, layout: RowLayout, turn: Turn, dtype: Any) -> Array:
    """Rotate the last elements of float32 rows [rows, groups, group]."""
    turned = rotated(x, [Block(0).load(table, layout.matrix, x.shape) for table in tables], layout.matrix, dtype)
    if turn.rope == layout.size:
        return turned
    place = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=layout.matrix) * np.int32(layout.group)
    place = place + plgpu.broadcasted_iota(jnp.int32, x.shape, 2, layout=layout.matrix)
    return jnp.where(place >= np.int32(layout.size - turn.rope), turned, x)


# ---- kernels ---------------------------------------------------------------------------------------


def norm_rotary_pack(
    x: Array, weight: Array | None, positions: Array, inverse_frequencies: Array, fmt: CacheFormat, eps: float
) -> Array:
    """Records [T, cache_width(fmt, d)] of rows [T, d]."""
    rows, size = x.shape
    layout = row_layout(size, FP4_KV_GROUP if fmt == "fp4_e4m3" else GROUP)
    turn = Turn(2 * inverse_frequencies.shape[0], layout.rows, size)

    def norm_rotary_pack_kernel(x_ref: Any, positions_ref: Any, turn_ref: Any, *refs: Any) -> None:
        *weight_ref, out_ref, cos_table, sin_table = refs
        block = Block(lax.axis_index("block") * layout.rows)
        values = block.load(x_ref, layout.matrix, layout.shape).astype(jnp.float32)
        if weight_ref:
            scale = SHARED.load(weight_ref[0], layout.matrix, layout.shape).astype(jnp.float32)
            values = normalize(values, scale, eps, layout).astype(x.dtype).astype(jnp.float32)
        fill_tables(block, positions_ref, turn_ref, (cos_table, sin_table), turn)
        values = rotated_tail(values, (cos_table, sin_table), layout, turn, x.dtype)
        store_record(block, out_ref, values, fmt, layout)

    out = jax.ShapeDtypeStruct((rows, cache_width(fmt, size)), cache_dtype(fmt))
    weights = () if weight is None else (weight.reshape(1, -1),)
    kernel = row_kernel(norm_rotary_pack_kernel, out, rows, layout, scratch_types=turn.tables)
    return kernel(x, *turn_operands(positions, inverse_frequencies, False), *weights)


def rotary_quantized(x: Array, positions: Array, inverse_frequencies: Array, inverse: bool) -> Array:
    """Heads [T, H, d] rotated, then MXFP4 quantised and dequantised."""
    tokens, heads, size = x.shape
    layout = row_layout(size)
    by_token = heads % layout.rows == 0  # one table a token; otherwise one a head
    rows = heads if by_token else layout.rows
    layout = dataclasses.replace(layout, rows=rows)
    turn = Turn(2 * inverse_frequencies.shape[0], 1 if by_token else rows, size)

    def rotary_quantized_kernel(
        x_ref: Any, positions_ref: Any, turn_ref: Any, out_ref: Any, cos_table: Any, sin_table: Any
    ) -> None:
        number = lax.axis_index("block")
        block = Block(number * rows)
        values = block.load(x_ref, layout.matrix, layout.shape).astype(jnp.float32)
        tables = (cos_table, sin_table)
        fill_tables(Block(number) if by_token else block, positions_ref, turn_ref, tables, turn)
        values = rotated_tail(values, tables, layout, turn, x.dtype)
        block.store(out_ref, quantize_dequantize_fp4(values).astype(x.dtype), layout.matrix)

    flat = jax.ShapeDtypeStruct((tokens * heads, size), x.dtype)
    where = positions if by_token else jnp.repeat(positions, heads)
    kernel = row_kernel(rotary_quantized_kernel, flat, flat.shape[0], layout, scratch_types=turn.tables)
    return kernel(x.reshape(flat.shape), *turn_operands(where, inverse_frequencies, inverse)).reshape(x.shape)


def rotary_in_place(x: Array, positions: Array, inverse_frequencies: Array, inverse: bool) -> Array:
    """Heads [T, H, d] with their tails rotated. Only the tails are read and written: XLA lets the result use x's
    memory, or copies x where it is needed later."""
    tokens, heads, size = x.shape
    turn = Turn(2 * inverse_frequencies.shape[0], 1, 2 * inverse_frequencies.shape[0])
    if turn.rope % VECTOR:
        raise NotImplementedError(f"mosaic_gpu: cannot rotate {turn.rope} elements, no multiple of {VECTOR}")
    _, layout = plane_layout(math.gcd(heads, 1 << 10), turn.rope, VECTOR)
    shape = (heads, turn.rope)

    def rotary_kernel(positions_ref: Any, turn_ref: Any, x_ref: Any, cos_table: Any, sin_table: Any) -> None:
        token = lax.axis_index("token")
        block = Block(token * heads)
        values = block.load(x_ref, layout, shape, column=size - turn.rope).astype(jnp.float32)
        fill_tables(Block(token), positions_ref, turn_ref, (cos_table, sin_table), turn)
        tables = [Block(0).load(table, layout, shape) for table in (cos_table, sin_table)]
        block.store(x_ref, rotated(values, tables, layout, x.dtype).astype(x.dtype), layout, column=size - turn.rope)

    heads_ref = jax.new_ref(x.reshape(tokens * heads, size))
    kernel = plgpu.kernel(rotary_kernel, grid=(tokens,), grid_names=("token",), scratch_types=turn.tables)
    kernel(*turn_operands(positions, inverse_frequencies, inverse), heads_ref)
    return jax.freeze(heads_ref).reshape(x.shape)
