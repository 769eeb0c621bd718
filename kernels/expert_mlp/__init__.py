"""Mixture of experts: routing, gated MLP of routed and shared experts, combination."""

from deepinfer_jax.kernels.expert_mlp.api import ExpertRows as ExpertRows
from deepinfer_jax.kernels.expert_mlp.api import combine_experts as combine_experts
from deepinfer_jax.kernels.expert_mlp.api import expert_mlp as expert_mlp
from deepinfer_jax.kernels.expert_mlp.api import route as route
from deepinfer_jax.kernels.expert_mlp.api import shared_mlp as shared_mlp
