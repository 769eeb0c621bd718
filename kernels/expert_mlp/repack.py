"""Expert weights in the order of an architecture's tensor cores, once, when they are loaded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels import fp4_block_scaled, fp4_fragments
from deepinfer_jax.kernels.mosaic.target import Architecture, architecture
from deepinfer_jax.kernels.quantization import QuantTensor, WeightFormat, unpack_nibbles

TILE = fp4_fragments.TILE

_FORMATS: dict[Architecture, WeightFormat] = {"sm90": "fp4_sm90", "sm100": "fp4_sm100"}


def kernel_format(target: Architecture | None = None) -> WeightFormat:
    """Format of the experts that kernels of an architecture read; None: that of the default device.

    Weights for a device without kernels are only repacked in order to be looked at: as for "sm90".
    """
    if target is None:
        try:
            target = architecture()
        except NotImplementedError:
            target = "sm90"
    return _FORMATS[target]


@jax.jit
def _pack_sm90(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return fp4_fragments.pack_codes(unpack_nibbles(data)), fp4_fragments.pack_scales(scale)


@jax.jit
def _pack_sm100(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return fp4_block_scaled.pack_codes(unpack_nibbles(data)), fp4_block_scaled.pack_scales(scale)


def check_scales(scale: jax.Array | np.ndarray, largest: int) -> None:
    """ValueError if a scale is above the byte `largest` (or NaN)."""
    found = int(jnp.max(jnp.asarray(scale), initial=0))
    if found > largest:
        raise ValueError(f"repack: scale byte {found} (2^{found - 127}); the largest is 2^{largest - 127}")


def repack(weight: QuantTensor, target: Architecture | None = None) -> QuantTensor:
    """FP4 weights [..., N, K] as kernels read them: the same bits, permuted ("fp4_sm90" or "fp4_sm100").

    target: architecture of the kernels; None: that of the default device (`kernel_format`).

    N and K have to be multiples of 64. The work is integer shifts on the weight's device and needs about ten
    times the weight's memory for a while, so pass one expert, or a few, at a time; the results of a layer's
    experts are stacked along the leading axis. `quantization.dequantize` gives the same values of all forms.

    Raises ValueError for other formats and sizes and for scales that the order cannot hold: above 2 for
    "fp4_sm90", whose powers of two are bfloat16, and above 2^121 for "fp4_sm100" (no released weight has one).
    """
    if weight.format != "fp4":
        raise ValueError(f"repack: the weight is {weight.format!r}, not 'fp4'")
    *_, rows, columns = weight.shape
    if rows % TILE or columns % TILE:
        raise ValueError(f"repack: {rows} x {columns} is not made of {TILE} x {TILE} tiles")
    form = kernel_format(target)
    if form == "fp4_sm90":
        check_scales(weight.scale, fp4_fragments.LARGEST_SCALE)
        data, scale = _pack_sm90(weight.data, weight.scale)
    else:
        check_scales(weight.scale, fp4_block_scaled.LARGEST_SCALE)
        data, scale = _pack_sm100(weight.data, weight.scale)
    return QuantTensor(data, scale, form)
