"""Mosaic-GPU norms, rotary embedding and cache records, the same code for sm_90a and sm_100a."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.mosaic.row_arithmetic import normalize
from deepinfer_jax.kernels.mosaic.rows import SHARED, Block, row_kernel, row_layout
from deepinfer_jax.kernels.mosaic.target import architecture
from deepinfer_jax.kernels.quantization import CacheFormat
from deepinfer_jax.kernels.rms_norm_quant import mosaic_rows


def _check(function: str, x: jax.Array) -> None:
    """NotImplementedError, with the reason, for what there is no kernel for."""
    try:
        architecture()
    except NotImplementedError as error:
        raise NotImplementedError(f"rms_norm_quant: {function}: {error}") from None
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"rms_norm_quant: {function}: mosaic_gpu works on bfloat16 or float32 rows, not {x.dtype}"
        )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""
    _check("rms_norm", x)
    layout = row_layout(x.shape[1])

    def rms_norm_kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows)
        values = block.load(x_ref, layout.matrix, layout.shape).astype(jnp.float32)
        scale = SHARED.load(weight_ref, layout.matrix, layout.shape).astype(jnp.float32)
        block.store(out_ref, normalize(values, scale, eps, layout).astype(x.dtype), layout.matrix)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return row_kernel(rms_norm_kernel, out, x.shape[0], layout)(x, weight.reshape(1, -1))


def rotary(
    x: jax.Array,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    inverse: bool,
    quantize: bool,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""
    _check("rotary", x)
    function = mosaic_rows.rotary_quantized if quantize else mosaic_rows.rotary_in_place
    return function(x, positions, inverse_frequencies, inverse)


def norm_rotary_pack(
    x: jax.Array,
    weight: jax.Array | None,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    fmt: CacheFormat,
    eps: float,
    row_tile: int | None,
) -> jax.Array:
    """See the contract in `api.py`."""
    _check("norm_rotary_pack", x)
    return mosaic_rows.norm_rotary_pack(x, weight, positions, inverse_frequencies, fmt, eps)
