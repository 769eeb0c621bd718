"""The model: pure functions over pytrees. No jit, no mesh, no input or output.

Letters used in shape comments everywhere in this package:

    R rows (tokens of one call)    S sequence slots          V vocabulary
    D hidden_size                  H attention heads         d head_dim
    N entries of a cache           K selected entries        E routed experts
    C residual streams (hc_mult)   P pages of a sequence     L rows with logits
"""

if not __name__.startswith("deepinfer_jax."):  # a second copy would have second class identities
    raise ImportError("import deepinfer_jax.model instead of the bare folder name 'model'")
