"""Meshes, sharding rules and the mesh version of the model's exchange (empty so far)."""

if not __name__.startswith("deepinfer_jax."):
    raise ImportError("import deepinfer_jax.sharding instead of the bare folder name 'sharding'")
