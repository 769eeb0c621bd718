"""Scores of compressed entries for the indexer."""

from deepinfer_jax.kernels.index_scores.api import index_scores as index_scores
