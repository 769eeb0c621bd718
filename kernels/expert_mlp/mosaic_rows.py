"""Row kernels around the experts, the same code for every architecture: routing, shared expert's middle, sum."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels.expert_mlp.mosaic_middle import silu
from deepinfer_jax.kernels.mosaic import rows as mosaic_rows
from deepinfer_jax.kernels.mosaic.quantize import quantize_dequantize
from deepinfer_jax.kernels.mosaic.row_arithmetic import divide
from deepinfer_jax.kernels.mosaic.rows import Block
from deepinfer_jax.kernels.top_k.xla import LOWEST, order_key

LANES = 128
"""Threads of a block; a row of logits is padded to a multiple, and a token has at most so many experts."""


def combine(rows: jax.Array, position: jax.Array, shared: jax.Array) -> jax.Array:
    """round(((row[0] + row[1]) + ...) + shared) for every token.

    rows: [R, D]. position: int32 [T, k], the rows of a token, -1 = zeros. shared: [T, D].
    """
    count, choices = position.shape
    layout = mosaic_rows.row_layout(shared.shape[1])

    def kernel(rows_g: Any, position_g: Any, shared_g: Any, out_g: Any) -> None:
        token = lax.axis_index("token")
        only = Block(jnp.int32(0))  # a block of threads has one token; threads without a part of it repeat another's

        def part(ref: Any, row: jax.Array) -> jax.Array:
            return only.load(ref.at[pl.ds(row, 1)], layout.matrix, layout.shape).astype(jnp.float32)

        places = [position_g[token * choices + choice] for choice in range(choices)]

        def chosen(place: jax.Array) -> jax.Array:
            there = plgpu.layout_cast(jnp.full(layout.shape, place), layout.matrix) >= 0
            return jnp.where(there, part(rows_g, jnp.maximum(place, 0)), np.float32(0))

        total = functools.reduce(lambda a, b: a + b, map(chosen, places)) + part(shared_g, token)
        only.store(out_g.at[pl.ds(token, 1)], total.astype(shared.dtype), layout.matrix)

    return plgpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct(shared.shape, shared.dtype), grid=(count,), grid_names=("token",)
    )(rows, position.reshape(-1), shared)


def gated_rows(gate: jax.Array, up: jax.Array, limit: float, quantize: bool) -> jax.Array:
    """Clamped SwiGLU of bfloat16 rows [T, N], rounded to bfloat16, then quantised-dequantised."""
    count, size = gate.shape
    layout = mosaic_rows.row_layout(size)

    def kernel(gate_g: Any, up_g: Any, out_g: Any) -> None:
        block = Block(lax.axis_index("block") * layout.rows, count - 1)
        gates = jnp.minimum(block.load(gate_g, layout.matrix, layout.shape).astype(jnp.float32), np.float32(limit))
        ups = block.load(up_g, layout.matrix, layout.shape).astype(jnp.float32)
        ups = jnp.minimum(jnp.maximum(ups, np.float32(-limit)), np.float32(limit))
        hidden = (silu(gates, layout.matrix) * ups).astype(gate.dtype)
        if quantize:
            hidden = quantize_dequantize(hidden.astype(jnp.float32)).astype(gate.dtype)
        block.store(out_g, hidden, layout.matrix)

    return mosaic_rows.row_kernel(kernel, jax.ShapeDtypeStruct(gate.shape, gate.dtype), count, layout)(gate, up)


# ---- routing ---------------------------------------------------------------------------------------


def scores_of(logits: jax.Array, layout: Any) -> jax.Array:
    """sqrt(softplus(z)) of float32 in `layout`.

    softplus(z) = max(z, 0) + log(1 + u), u = exp(-|z|), and log(1 + u) = 2 atanh(s), s = u / (2 + u) <= 1/3: a
    series that keeps its relative accuracy for every u, so that very negative z give exp(z/2). (There is no
    log1p.) The part left out of the series is below 2^-27 of it.
    """
    u = jnp.exp(-jnp.abs(logits))
    s = divide(u, 2 + u, layout)
    square = s * s
    series = jnp.full_like(s, np.float32(1 / 17))
    for power in (15, 13, 11, 9, 7, 5, 3):
        series = series * square + np.float32(1 / power)
    softplus = jnp.maximum(logits, np.float32(0)) + 2 * (s + s * (square * series))
    return jnp.sqrt(softplus)


def _sorted_pairs(ids: list[jax.Array], values: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Scalars in ascending order of ids, which differ: a network of compare-exchanges."""
    ids, values = list(ids), list(values)
    for end in range(len(ids) - 1, 0, -1):
        for i in range(end):
            swap = ids[i] > ids[i + 1]
            low, high = jnp.minimum(ids[i], ids[i + 1]), jnp.maximum(ids[i], ids[i + 1])
            first, second = values[i], values[i + 1]
            ids[i], ids[i + 1] = low, high
            values[i], values[i + 1] = jnp.where(swap, second, first), jnp.where(swap, first, second)
    return ids, values


def _route_kernel(
    logits_g: Any,
    bias_g: Any,
    ids_g: Any,
    weights_g: Any,
    *,
    experts: int,
    chosen: int,
    normalize: bool,
    scale: float,
    temperature: float,
) -> None:
    row = lax.axis_index("row")
    width = logits_g.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
    lanes = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    logits = plgpu.load(logits_g.at[row], layout=layout, optimized=False)
    if temperature != 1:
        logits = divide(logits, float(temperature), layout)
    scores = scores_of(logits, layout)
    keys = order_key(scores + plgpu.load(bias_g.at[row], layout=layout, optimized=False))
    # Columns behind the experts can never win: no key of an expert is below the second lowest number.
    keys = jnp.where(index < experts, jnp.maximum(keys, LOWEST + 1), LOWEST)
    ids, values = [], []
    for _ in range(chosen):
        best = jnp.max(keys)
        first = jnp.min(jnp.where(keys == best, index, np.int32(width)))
        here = index == first
        ids.append(first)
        values.append(jnp.max(jnp.where(here, scores, np.float32(-1))))  # the one number: scores are not negative
        keys = jnp.where(here, LOWEST, keys)
    ids, values = _sorted_pairs(ids, values)
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=lanes)
    all_ids, weights = jnp.where(lane < chosen, ids[0], 0), jnp.where(lane < chosen, values[0], np.float32(0))
    for j in range(1, chosen):
        all_ids, weights = jnp.where(lane == j, ids[j], all_ids), jnp.where(lane == j, values[j], weights)
    if normalize and chosen > 1:
        total = functools.reduce(lambda sum_, value: sum_ + value, values) + np.float32(1e-20)
        weights = divide(weights, jnp.where(lane < chosen, total, np.float32(1)), lanes)
    ids_g[row] = all_ids
    weights_g[row] = weights * np.float32(scale)


def route(
    logits: jax.Array, bias: jax.Array, chosen: int, normalize: bool, scale: float, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Expert ids int32 [T, k] ascending and weights float32 [T, k] of float32 logits and bias [T, E].

    One block a row: scores, k maxima of integer keys with the lowest index of each, their sum in ascending order.
    """
    rows, experts = logits.shape
    padding = ((0, 0), (0, -experts % LANES))
    body = functools.partial(
        _route_kernel, experts=experts, chosen=chosen, normalize=normalize, scale=scale, temperature=temperature
    )
    ids, weights = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows, LANES), jnp.int32), jax.ShapeDtypeStruct((rows, LANES), jnp.float32)),
        grid=(rows,),
        grid_names=("row",),
    )(jnp.pad(logits, padding), jnp.pad(bias, padding))
    return ids[:, :chosen], weights[:, :chosen]
