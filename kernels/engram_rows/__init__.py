"""Engram: exact hash, table rows, and the gate that adds them to the streams."""

from deepinfer_jax.kernels.engram_rows.api import engram_gate as engram_gate
from deepinfer_jax.kernels.engram_rows.api import engram_hash as engram_hash
from deepinfer_jax.kernels.engram_rows.api import engram_rows as engram_rows
