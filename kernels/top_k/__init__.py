"""Exact selection of entries and candidate blocks."""

from deepinfer_jax.kernels.top_k.api import candidate_blocks as candidate_blocks
from deepinfer_jax.kernels.top_k.api import top_k as top_k
