"""Manifold-constrained hyper-connections."""

from deepinfer_jax.kernels.mhc_mix.api import collapse_norm as collapse_norm
from deepinfer_jax.kernels.mhc_mix.api import expand as expand
from deepinfer_jax.kernels.mhc_mix.api import expand_collapse_norm_quant as expand_collapse_norm_quant
from deepinfer_jax.kernels.mhc_mix.api import mhc_mix as mhc_mix
from deepinfer_jax.kernels.mhc_mix.api import stream_mean as stream_mean
