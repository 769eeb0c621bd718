"""Collapse, expansion and mean of the residual streams, one block of rows at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.kernels.mosaic.quantize import quantize_dequantize
from deepinfer_jax.kernels.mosaic.row_arithmetic import divide, normalize, rounded
from deepinfer_jax.kernels.mosaic.rows import SHARED, Block, RowLayout, row_kernel, row_layout

Array = jax.Array


def load_streams(block: Block, ref: Any, layout: RowLayout) -> list[Array]:
    """The streams of matrix [T, C*D] as they are stored. Loaded before anything is computed: the loads overlap."""
    columns = range(0, ref.shape[1], layout.size)
    return [block.load(ref, layout.matrix, layout.shape, column=column) for column in columns]


def load_factors(block: Block, ref: Any, layout: Any, shape: tuple[int, ...]) -> list[Array]:
    """The columns of float32 [T, n], each number repeated along its row of `shape`."""
    return [block.load(ref, layout, shape, column=i, same=True) for i in range(ref.shape[1])]


def weighted_sum(factors: list[Array], values: list[Array]) -> Array:
    """Sum of factor * value, first to last, in float32."""
    total = factors[0] * values[0].astype(jnp.float32)
    for factor, value in zip(factors[1:], values[1:], strict=True):
        total = total + factor * value.astype(jnp.float32)
    return total


def expanded_stream(y: Array, streams: list[Array], post: Array, comb: list[Array], layout: Any) -> Array:
    """One new stream (`spec/blocks.md` 2.3) in `layout`; comb[i] comes from stream i."""
    return rounded(post * y.astype(jnp.float32) + weighted_sum(comb, streams), streams[0].dtype, layout)


def expanded(y: Array, streams: list[Array], post: list[Array], comb: list[Array], layout: Any) -> list[Array]:
    """The new streams (`spec/blocks.md` 2.3) in `layout`; comb[i * C + j] goes from stream i to stream j."""
    count = len(streams)
    return [expanded_stream(y, streams, post[j], comb[j::count], layout) for j in range(count)]


def collapse_norm(streams: Array, pre: Array, weight: Array | None, eps: float) -> Array:
    """Streams [T, C, D], pre float32 [T, C], weight [D] or None -> [T, D]."""
    rows, _, size = streams.shape
    layout = row_layout(size)

    def collapse_norm_kernel(streams_ref: Any, pre_ref: Any, *refs: Any) -> None:
        *weight_ref, out_ref = refs
        block = Block(lax.axis_index("block") * layout.rows)
        values = load_streams(block, streams_ref, layout)
        factors = load_factors(block, pre_ref, layout.matrix, layout.shape)
        scale = [SHARED.load(ref, layout.matrix, layout.shape) for ref in weight_ref]
        collapsed = weighted_sum(factors, values).astype(out_ref.dtype)
        if scale:
            normed = normalize(collapsed.astype(jnp.float32), scale[0].astype(jnp.float32), eps, layout)
            collapsed = normed.astype(out_ref.dtype)
        block.store(out_ref, collapsed, layout.matrix)

    out = jax.ShapeDtypeStruct((rows, size), streams.dtype)
    weights = () if weight is None else (weight.reshape(1, -1),)
    return row_kernel(collapse_norm_kernel, out, rows, layout)(streams.reshape(rows, -1), pre, *weights)


def expand(y: Array, streams: Array, post: Array, comb: Array) -> Array:
    """y [T, D], streams [T, C, D], post float32 [T, C], comb float32 [T, C, C] -> [T, C, D]."""
    rows, count, size = streams.shape
    layout = row_layout(size)

    def expand_kernel(y_ref: Any, streams_ref: Any, post_ref: Any, comb_ref: Any, out_ref: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows)
        sublayer = block.load(y_ref, layout.matrix, layout.shape)
        values = load_streams(block, streams_ref, layout)
        post_factors = load_factors(block, post_ref, layout.matrix, layout.shape)
        comb_factors = load_factors(block, comb_ref, layout.matrix, layout.shape)
        for j, value in enumerate(expanded(sublayer, values, post_factors, comb_factors, layout.matrix)):
            block.store(out_ref, value, layout.matrix, column=j * size)

    out = jax.ShapeDtypeStruct((rows, count * size), streams.dtype)
    result = row_kernel(expand_kernel, out, rows, layout)(y, streams.reshape(rows, -1), post, comb.reshape(rows, -1))
    return result.reshape(streams.shape)


def stream_mean(streams: Array) -> Array:
    """Streams [T, C, D] -> mean [T, D]."""
    rows, count, size = streams.shape
    layout = row_layout(size)

    def stream_mean_kernel(streams_ref: Any, out_ref: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows)
        first, *others = load_streams(block, streams_ref, layout)
        total = first.astype(jnp.float32)
        for value in others:
            total = total + value.astype(jnp.float32)
        if count & (count - 1):
            total = divide(total, float(count), layout.matrix)
        else:
            total = total * np.float32(1.0 / count)  # exact
        block.store(out_ref, total.astype(out_ref.dtype), layout.matrix)

    out = jax.ShapeDtypeStruct((rows, size), streams.dtype)
    return row_kernel(stream_mean_kernel, out, rows, layout)(streams.reshape(rows, -1))


def norm_quantize(x: Array, weight: Array, eps: float, quantize: bool) -> tuple[Array, Array | None]:
    """(RMS norm of rows [T, D], the same quantised and dequantised or None)."""
    rows, size = x.shape
    layout = row_layout(size)

    def norm_quantize_kernel(x_ref: Any, weight_ref: Any, *out_refs: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows)
        values = block.load(x_ref, layout.matrix, layout.shape).astype(jnp.float32)
        scale = SHARED.load(weight_ref, layout.matrix, layout.shape).astype(jnp.float32)
        normed = normalize(values, scale, eps, layout).astype(x.dtype)
        block.store(out_refs[0], normed, layout.matrix)
        if quantize:
            quantized = quantize_dequantize(normed.astype(jnp.float32)).astype(x.dtype)
            block.store(out_refs[1], quantized, layout.matrix)

    out = (jax.ShapeDtypeStruct(x.shape, x.dtype),) * (2 if quantize else 1)
    normed, *quantized = row_kernel(norm_quantize_kernel, out, rows, layout)(x, weight.reshape(1, -1))
    return normed, quantized[0] if quantized else None
