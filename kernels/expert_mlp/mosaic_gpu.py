"""Mosaic-GPU mixture of experts: FP4 experts, FP8 shared expert, bfloat16 rows, profile `reference`.

Experts have to be in the order of the architecture's kernels (`repack.py`), which the engine sees to when it loads
weights: repacking inside a program would cost more than the products. Few rows are sorted by
expert by a kernel (`mosaic_grouping.py`), many by XLA (`shapes.py`): integers and copies. Their outputs stay where the
products left them until they are added.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.expert_mlp import mosaic_grouping, mosaic_products, mosaic_rows
from deepinfer_jax.kernels.expert_mlp.api import ExpertRows
from deepinfer_jax.kernels.expert_mlp.shapes import group_rows, sort_weights
from deepinfer_jax.kernels.mosaic.quantize import quantize_rows
from deepinfer_jax.kernels.mosaic.target import Architecture, architecture
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor
from deepinfer_jax.kernels.row_dot import mosaic_gpu as row_dot

Weight = jax.Array | QuantTensor


def _target(function: str) -> Architecture:
    """The architecture that programs are compiled for; NotImplementedError if it has no kernels."""
    try:
        return architecture()
    except NotImplementedError as error:
        raise NotImplementedError(f"{function}: {error}") from None


def _check_rows(function: str, x: jax.Array) -> None:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"{function}: mosaic_gpu multiplies bfloat16 rows, whose products are exact in float32; true {x.dtype} "
            "products have no tensor core instruction. Use the xla implementation for float32 profiles"
        )
    if x.shape[-1] % GROUP:
        raise NotImplementedError(f"{function}: mosaic_gpu works on groups of {GROUP} columns, not {x.shape[-1]}")


def _experts(weight: Weight) -> QuantTensor:
    """The weight, if it is one of experts in the kernel's order."""
    if not isinstance(weight, QuantTensor):
        raise NotImplementedError(
            f"expert_mlp: mosaic_gpu reads FP4 experts only, not plain {weight.dtype}; use the xla implementation"
        )
    wanted = mosaic_products.tensor_cores().FORMAT
    if weight.format != wanted:
        raise NotImplementedError(
            f"expert_mlp: mosaic_gpu reads experts in the order of its kernel, {wanted!r}, not {weight.format!r}; "
            "call expert_mlp.repack.repack once when weights are loaded (matrices of 64 x 64 tiles, scales <= 2)"
        )
    return weight


def route(
    logits: jax.Array,
    bias: jax.Array,
    experts_per_token: int,
    normalize: bool,
    scale: float,
    temperature: float,
    row_tile: int | None,
) -> tuple[jax.Array, jax.Array]:
    """See the contract in `api.py`. row_tile is not used.

    A score is within 6 units in the last place of sqrt(softplus(z)) for every z >= -87 (`mosaic_rows.scores_of`).
    """
    _target("expert_mlp.route")
    if logits.dtype != jnp.float32 or bias.dtype != jnp.float32:
        raise NotImplementedError(
            f"expert_mlp.route: mosaic_gpu has a float32 kernel, not {logits.dtype} and {bias.dtype}"
        )
    if experts_per_token > mosaic_rows.LANES:
        raise NotImplementedError(
            f"expert_mlp.route: mosaic_gpu chooses up to {mosaic_rows.LANES} experts, {experts_per_token=}"
        )
    return mosaic_rows.route(logits, bias, experts_per_token, normalize, scale, temperature)


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    quantize_input: bool,
    row_tile: int | None,
) -> ExpertRows:
    """See the contract in `api.py`. row_tile is not used.

    Weights: QuantTensor "fp4_sm90" or "fp4_sm100" (`repack.py`). Blackwell's products take quantised rows only.
    """
    target = _target("expert_mlp")
    _check_rows("expert_mlp", x)
    if target == "sm100" and not quantize_input:
        raise NotImplementedError(
            "expert_mlp: mosaic_gpu multiplies FP8 rows on sm100, whose block-scaled products take no bfloat16 rows; "
            "use the xla implementation for profiles without quantised activations"
        )
    w1, w3, w2 = map(_experts, (w1, w3, w2))
    experts = w1.shape[0]

    def products(rows: jax.Array, factors: jax.Array, tiles: jax.Array, count: jax.Array) -> jax.Array:
        hidden = mosaic_products.gate_up(rows, w1, w3, factors, tiles, count, limit=limit, quantize=quantize_input)
        return mosaic_products.down(hidden, w2, tiles, count)

    if expert_ids.size <= mosaic_grouping.MOST_PAIRS:
        few = mosaic_grouping.sort_rows(x, expert_ids, weights, experts, quantize=quantize_input)
        y = products(few.rows, few.factors, few.tiles, few.count)
        return ExpertRows(y, few.position)
    grouped = group_rows(expert_ids, experts)
    operand = quantize_rows(x) if quantize_input else x
    # Padding rows copy token 0: what they compute is not read.
    rows = operand[jnp.maximum(grouped.source, 0)]
    y = products(rows, sort_weights(weights, grouped), grouped.tiles, grouped.count)
    return ExpertRows(y, grouped.position)


def shared_mlp(
    x: jax.Array, w1: Weight, w3: Weight, w2: Weight, limit: float, quantize_input: bool, row_tile: int | None
) -> jax.Array:
    """See the contract in `api.py`. row_tile is not used. Weights: what `row_dot` takes."""
    _target("expert_mlp.shared_mlp")
    _check_rows("expert_mlp.shared_mlp", x)
    operand = quantize_rows(x) if quantize_input else x
    gate, up = (row_dot.row_dot(operand, w, False, x.dtype, None, row_tile) for w in (w1, w3))
    if gate.shape[1] % GROUP:
        raise NotImplementedError(
            f"expert_mlp.shared_mlp: mosaic_gpu works on groups of {GROUP} columns, not {gate.shape[1]}"
        )
    hidden = mosaic_rows.gated_rows(gate, up, limit, quantize_input)
    return row_dot.row_dot(hidden, w2, False, x.dtype, None, row_tile)


def combine_experts(rows: ExpertRows, shared: jax.Array, row_tile: int | None) -> jax.Array:
    """See the contract in `api.py`. row_tile is not used."""
    _target("expert_mlp.combine_experts")
    if shared.shape[1] % GROUP:
        raise NotImplementedError(
            f"expert_mlp.combine_experts: mosaic_gpu adds rows of whole {GROUP} columns, {shared.shape}"
        )
    tokens, choices, size = rows.shape
    position = rows.position
    if position is None:
        position = jnp.arange(tokens * choices, dtype=jnp.int32).reshape(tokens, choices)
    return mosaic_rows.combine(rows.rows.reshape(-1, size), position, shared)
