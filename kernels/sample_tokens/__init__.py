"""Sampling: processed logits, one draw per row, log-probabilities."""

from deepinfer_jax.kernels.sample_tokens.api import Controls as Controls
from deepinfer_jax.kernels.sample_tokens.api import Sampled as Sampled
from deepinfer_jax.kernels.sample_tokens.api import sample_tokens as sample_tokens
from deepinfer_jax.kernels.sample_tokens.api import token_logprobs as token_logprobs
