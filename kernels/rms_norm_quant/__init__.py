"""Norms, rotary embedding and cache packing."""

from deepinfer_jax.kernels.rms_norm_quant.api import norm_rotary_pack as norm_rotary_pack
from deepinfer_jax.kernels.rms_norm_quant.api import rms_norm as rms_norm
from deepinfer_jax.kernels.rms_norm_quant.api import rotary as rotary
