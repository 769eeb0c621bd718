"""Matrix products of rows with a weight."""

from deepinfer_jax.kernels.row_dot.api import row_dot as row_dot
from deepinfer_jax.kernels.row_dot.api import row_dot_grouped as row_dot_grouped
