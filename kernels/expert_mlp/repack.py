"""Expert weights in the order of the tensor cores, once, when they are loaded: one for Hopper and Blackwell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels import fp4_fragments
from deepinfer_jax.kernels.quantization import QuantTensor, unpack_nibbles


@jax.jit
def _pack(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return fp4_fragments.pack_codes(unpack_nibbles(data)), fp4_fragments.pack_scales(scale)


def check_scales(scale: jax.Array | np.ndarray) -> None:
    """ValueError if a scale is above 2 (or NaN), which the kernel's bfloat16 powers of two cannot hold."""
    largest = int(jnp.max(jnp.asarray(scale), initial=0))
    if largest > fp4_fragments.LARGEST_SCALE:
        raise ValueError(f"repack: scale byte {largest} (2^{largest - 127}); the largest is 2^1")


def repack(weight: QuantTensor) -> QuantTensor:
    """FP4 weights [..., N, K] as the kernels of SM90 and SM100 read them: the same bits, permuted ("fp4_sm90").

    N and K have to be multiples of 64. The work is integer shifts on the weight's device and needs about ten
    times the weight's memory for a while, so pass one expert, or a few, at a time; the results of a layer's
    experts are stacked along the leading axis. `quantization.dequantize` gives the same values of both forms.

    Raises ValueError for other formats and sizes and for scales above 2 (no released weight has one).
    """
    if weight.format != "fp4":
        raise ValueError(f"repack: the weight is {weight.format!r}, not 'fp4'")
    *_, rows, columns = weight.shape
    if rows % fp4_fragments.TILE or columns % fp4_fragments.TILE:
        raise ValueError(f"repack: {rows} x {columns} is not made of {fp4_fragments.TILE} x {fp4_fragments.TILE} tiles")
    check_scales(weight.scale)
    data, scale = _pack(weight.data, weight.scale)
    return QuantTensor(data, scale, "fp4_sm90")
