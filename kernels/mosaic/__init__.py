"""What the Mosaic-GPU implementations share: the target, interpretation, register layouts."""

from deepinfer_jax.kernels.mosaic.target import Architecture as Architecture
from deepinfer_jax.kernels.mosaic.target import architecture as architecture
from deepinfer_jax.kernels.mosaic.target import interpret as interpret
from deepinfer_jax.kernels.mosaic.target import interpreting as interpreting
