"""Contract of `expert_mlp` (`spec/blocks.md` 3).

Every routed expert's output stays a row of its own until `combine_experts` adds a token's rows in
ascending expert id; so moving rows between devices cannot change a sum.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import QuantTensor

Weight = jax.Array | QuantTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Outputs of experts, one row per (token, choice), where the products left them.

    rows: [T, k, D], or [R, D] with position int32 [T, k]: the row of each pair, -1 = a row of zeros.
    """

    rows: jax.Array
    position: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, k, D)."""
        tokens, choices = (self.rows if self.position is None else self.position).shape[:2]
        return tokens, choices, self.rows.shape[-1]

    @property
    def in_order(self) -> jax.Array:
        """[T, k, D]: integers and copies."""
        if self.position is None:
            return self.rows
        found = self.rows[jnp.maximum(self.position, 0)]
        return jnp.where((self.position >= 0)[:, :, None], found, jnp.zeros((), found.dtype))


@contract("expert_mlp")
def route(
    logits: jax.Array,
    bias: jax.Array,
    *,
    experts_per_token: int,
    normalize: bool,
    scale: float,
    temperature: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> tuple[jax.Array, jax.Array]:
    """Choose experts by sqrt(softplus(logit)) + bias; weights without the bias (`blocks.md` 3.2).

    Args:
        logits: float32 [T, E]. bias: float32 [T, E], the row's own bias vector (text or image).
    Returns: expert_ids int32 [T, k] ascending, weights float32 [T, k] in that order. Ties choose the
        lowest id; -0 equals +0.
    """
    if logits.shape != bias.shape or not 0 < experts_per_token <= logits.shape[1]:
        raise ValueError(f"route: logits {logits.shape}, bias {bias.shape}, {experts_per_token} experts do not fit")
    module = implementation_module("expert_mlp", implementation)
    return module.route(logits, bias, experts_per_token, normalize, scale, temperature, row_tile)


@contract("expert_mlp")
def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    quantize_input: bool,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> ExpertRows:
    """Outputs of the chosen experts, one row per (token, choice).

    silu(min(w1 x, limit)) * clip(w3 x, +-limit) * weight, rounded to x's dtype, then w2; the routing
    weight multiplies before w2 and before its activation quantisation (`blocks.md` 3.3).

    Args:
        x: [T, D]. expert_ids: int32 [T, k] ascending, ids outside 0..E-1 give a zero row.
        weights: float32 [T, k]. w1, w3: [E, N, D]. w2: [E, D, N]; packed or plain.
        quantize_input: FP8 quantise-dequantise in front of each product.
    Returns: rows in x's dtype.
    """
    if expert_ids.shape != weights.shape or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_mlp: x {x.shape}, ids {expert_ids.shape}, weights {weights.shape} do not fit")
    if w1.shape != w3.shape or w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1]) or w1.shape[2] != x.shape[1]:
        raise ValueError(f"expert_mlp: weights {w1.shape}, {w3.shape}, {w2.shape} do not fit rows {x.shape}")
    module = implementation_module("expert_mlp", implementation)
    return module.expert_mlp(x, expert_ids, weights, w1, w3, w2, limit, quantize_input, row_tile)


@contract("expert_mlp")
def shared_mlp(
    x: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    quantize_input: bool,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """The shared expert [T, D]: as `expert_mlp` without a routing weight. w1, w3: [N, D], w2: [D, N]."""
    if w1.shape != w3.shape or w2.shape != w1.shape[::-1] or w1.shape[1] != x.shape[1]:
        raise ValueError(f"shared_mlp: weights {w1.shape}, {w3.shape}, {w2.shape} do not fit rows {x.shape}")
    module = implementation_module("expert_mlp", implementation)
    return module.shared_mlp(x, w1, w3, w2, limit, quantize_input, row_tile)


@contract("expert_mlp")
def combine_experts(
    rows: ExpertRows,
    shared: jax.Array,
    *,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """round(((rows[0] + rows[1]) + ...) + shared) in float32; rows of each token by ascending expert id."""
    if (rows.shape[0], rows.shape[2]) != shared.shape:
        raise ValueError(f"combine_experts: rows {rows.shape} and shared {shared.shape} do not fit")
    return implementation_module("expert_mlp", implementation).combine_experts(rows, shared, row_tile)
