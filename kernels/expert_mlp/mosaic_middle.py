"""What stands between an expert's products: clamped SiLU, routing weight, quantisation, and stores of columns."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp.shapes import ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE
from deepinfer_jax.kernels.mosaic.row_arithmetic import divide
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP, round_to_e4m3

plgpu: Any = mosaic_gpu  # its types are not those of its functions

WGMMA = plgpu.Layout.WGMMA
ACROSS = WGMMA.reduce(0)
"""One number for each row of the batch, which is a column of a swapped product."""

_SMALLEST_AMAX = np.float32(1e-4)
_E4M3_MAX = np.float32(448)


def quantized(values: jax.Array, amax: jax.Array) -> jax.Array:
    """`quantize_dequantize_fp8` of float32 values whose group's largest magnitude is `amax` (same shape).

    The same integer arithmetic on the same numbers; the quotient by a power of two is a product by its inverse.
    """
    floored = jnp.maximum(amax, _SMALLEST_AMAX)
    bits = lax.bitcast_convert_type(floored * np.float32(1.0 / _E4M3_MAX), jnp.int32) & np.int32(0x7FFFFFFF)
    byte = (bits >> 23) + jnp.where((bits & np.int32(0x7FFFFF)) != 0, np.int32(1), np.int32(0))
    special = byte >= 255  # infinite or NaN: the group becomes NaN
    byte = jnp.minimum(byte, np.int32(253))
    inverse = lax.bitcast_convert_type((np.int32(254) - byte) << 23, jnp.float32)
    scale = lax.bitcast_convert_type(jnp.where(special, np.int32(0x7FC00000), byte << 23), jnp.float32)
    scaled = jnp.minimum(jnp.maximum(values * inverse, -_E4M3_MAX), _E4M3_MAX)
    return round_to_e4m3(scaled) * scale


def silu(x: jax.Array, layout: Any) -> jax.Array:
    """x / (1 + exp(-x)) of float32 in `layout`: exp and two roundings, at most 4 units in the last place."""
    return divide(x, 1 + jnp.exp(-x), layout)


def _largest_of_columns(values: jax.Array, scratch: Any) -> jax.Array:
    """Maximum over axis 0 of float32 (64, n) in WGMMA layout -> (n,) in layout ACROSS."""
    if interpreting():
        return jnp.max(values, axis=0)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(values.shape[1:], jnp.float32, layout=ACROSS),
    )
    def body(_: Any, array: Any, buffer: Any) -> Any:
        return array.reduce("max", 0, buffer)

    return body(values, scratch)


def gated_hidden(
    gate: jax.Array,
    up: jax.Array,
    factors: Any,
    first: jax.Array,
    *,
    limit: float,
    quantize: bool,
    scratch: Any,
) -> jax.Array:
    """bfloat16 (64, n) hidden values, transposed: 64 columns of the experts' rows `first`, `first` + 1, ...

    Args:
        gate, up: float32 (64, n) products. factors: float32 [R] in global memory, None for the shared expert.
        scratch: float32 shared memory of this warpgroup, 4 n numbers.
    """
    shape = gate.shape
    gate = jnp.minimum(gate.astype(jnp.bfloat16).astype(jnp.float32), np.float32(limit))
    up = up.astype(jnp.bfloat16).astype(jnp.float32)
    hidden = silu(gate, WGMMA) * jnp.minimum(jnp.maximum(up, np.float32(-limit)), np.float32(limit))
    if factors is not None:
        factor = plgpu.load(factors.at[pl.ds(first, shape[1])], layout=ACROSS, optimized=False)
        hidden = lax.broadcast_in_dim(factor, shape, [1]) * hidden
    hidden = hidden.astype(jnp.bfloat16)
    if not quantize:
        return hidden
    values = hidden.astype(jnp.float32)
    upper = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) < GROUP
    magnitude = jnp.abs(values)
    nothing = jnp.zeros_like(magnitude)
    largest = [
        lax.broadcast_in_dim(_largest_of_columns(part, scratch), shape, [1])
        for part in (jnp.where(upper, magnitude, nothing), jnp.where(upper, nothing, magnitude))
    ]
    return quantized(values, jnp.where(upper, *largest)).astype(jnp.bfloat16)


def store_columns(out: Any, buffer: Any, first: jax.Array, rows: jax.Array, tile: jax.Array, values: jax.Array) -> None:
    """Store bfloat16 (64, n), transposed, to `rows` rows from `first` on and the 64 columns of `tile`.

    buffer: bfloat16 (64, 64) in shared memory, of this warpgroup. Only the rows of the tile are written: rows
    behind them belong to other tiles.
    """
    for start in range(0, values.shape[1], TILE):
        size = min(TILE, values.shape[1] - start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = values[:, start : start + size]
        target = buffer.at[pl.ds(0, size)].transpose((1, 0))
        target[...] = part if interpreting() else plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        for row in range(start, start + size, ROW_STEP):
            place = out.at[pl.ds(first + row, ROW_STEP), pl.ds(tile * TILE, TILE)]
            copy = functools.partial(plgpu.copy_smem_to_gmem, buffer.at[pl.ds(row - start, ROW_STEP)], place)
            pl.when(row < rows)(copy)
