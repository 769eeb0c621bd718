"""Mosaic-GPU hyper-connections. Only the projection of the streams depends on the architecture."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.mhc_mix import mosaic_mix, mosaic_rows, mosaic_sm90
from deepinfer_jax.kernels.mosaic.target import architecture


def collapse_norm(
    streams: jax.Array, pre: jax.Array, weight: jax.Array | None, eps: float, row_tile: int | None
) -> jax.Array:
    """See the contract in `api.py`."""
    _check_rows("collapse_norm", streams)
    return mosaic_rows.collapse_norm(streams, pre, weight, eps)


def expand(y: jax.Array, streams: jax.Array, post: jax.Array, comb: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""
    _check_rows("expand", streams)
    return mosaic_rows.expand(y, streams, post, comb)


def stream_mean(streams: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`."""
    _check_rows("stream_mean", streams)
    return mosaic_rows.stream_mean(streams)


def _check_rows(function: str, streams: jax.Array) -> None:
    """NotImplementedError, with the reason, for what there is no kernel for."""
    try:
        architecture()
    except NotImplementedError as error:
        raise NotImplementedError(f"mhc_mix: {function}: {error}") from None
    if streams.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"mhc_mix: {function}: mosaic_gpu works on bfloat16 or float32 streams, not {streams.dtype}"
        )


def projection() -> Any:
    """The module with `shape_of`, `project` and `expand_project` for the architecture that is compiled for."""
    return mosaic_sm90 if architecture() == "sm90" else mosaic_mix


def _check_mix(function: str, streams: jax.Array) -> mosaic_mix.Shape:
    """Shape of the streams; NotImplementedError, with the reason, for what the projection cannot do."""
    _check_rows(function, streams)
    op = f"mhc_mix: {function}"
    shape = projection().shape_of(streams)
    if streams.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f'{op}: mosaic_gpu projects bfloat16 streams on the tensor cores, not {streams.dtype}; use "xla"'
        )
    if shape.count != mosaic_mix.COUNT:
        raise NotImplementedError(
            f"{op}: mosaic_gpu keeps the coefficients of {mosaic_mix.COUNT} streams in neighbouring threads; "
            f"there are {shape.count}"
        )
    if shape.size % mosaic_mix.STEP:
        raise NotImplementedError(
            f"{op}: mosaic_gpu projects streams in steps of {mosaic_mix.STEP} elements; they have {shape.size}"
        )
    return shape


def mhc_mix(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the contract in `api.py`."""
    shape = _check_mix("mhc_mix", streams)
    partial = projection().project(streams, fn)
    return mosaic_mix.coefficients(partial, base, scale, shape, iterations, norm_eps, hc_eps)


def expand_collapse_norm_quant(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    quantize: bool,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, jax.Array, jax.Array]]:
    """See the contract in `api.py`."""
    shape = _check_mix("expand_collapse_norm_quant", streams)
    new, collapsed, partial = projection().expand_project(y, streams, post, comb, pre, fn)
    x, quantized = mosaic_rows.norm_quantize(collapsed, weight, norm_eps, quantize)
    mix = mosaic_mix.coefficients(partial, base, scale, shape, iterations, norm_eps, hc_eps)
    return new, x, quantized, mix
