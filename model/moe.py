"""Mixture of experts of one layer (`spec/blocks.md` 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.expert_mlp import ExpertRows, combine_experts, expert_mlp, route, shared_mlp
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.params import LayerParams


def mixture_of_experts(
    setting: Setting, p: LayerParams, x: jax.Array, image: jax.Array | None, experts_per_token: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [T, D], expert ids [T, k] ascending, routing weights [T, k].

    image: bool [T], rows routed with the image bias; None = all text (draft stages).
    """
    config, run = setting.config, setting.kernels
    quantize, limit = setting.profile.quantize_activations, config.swiglu_limit
    logits = run(row_dot, x, p["ffn.gate"], out_dtype=jnp.float32)
    bias = jnp.broadcast_to(p["ffn.gate.bias"], logits.shape)
    if image is not None:
        bias = jnp.where(image[:, None], p["ffn.gate.bias_vl"], bias)
    ids, weights = run(
        route,
        logits,
        bias,
        experts_per_token=experts_per_token,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        temperature=config.gate_temp,
    )

    def compute(rows: jax.Array, expert_ids: jax.Array, factors: jax.Array) -> ExpertRows:
        w1, w3, w2 = (p[f"ffn.experts.{{}}.{name}"] for name in ("w1", "w3", "w2"))
        return run(expert_mlp, rows, expert_ids, factors, w1, w3, w2, limit=limit, quantize_input=quantize)

    routed = setting.exchange.experts(compute, x, ids, weights)
    w1, w3, w2 = (p[f"ffn.shared_experts.{name}"] for name in ("w1", "w3", "w2"))
    shared = run(shared_mlp, x, w1, w3, w2, limit=limit, quantize_input=quantize)
    return run(combine_experts, routed, shared), ids, weights
