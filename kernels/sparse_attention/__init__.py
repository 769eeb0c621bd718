"""Joint attention over window and selected compressed entries."""

from deepinfer_jax.kernels.sparse_attention.api import sparse_attention as sparse_attention
