"""Gated pooling of two tokens into one compressed entry."""

from deepinfer_jax.kernels.pool_pair.api import pool_pair as pool_pair
