"""Contract of `rms_norm_quant`: RMS norm, rotary embedding, and packing into cache records."""

from __future__ import annotations

import jax

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import GROUP, CacheFormat


@contract("rms_norm_quant")
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """RMS norm in float32 with one rounding at the end (`spec/attention.md` 7.4).

    Args:
        x: [T, D]. weight: [D]. eps: added to the mean square; 1e-20 makes a zero row zero.
    Returns: [T, D] in x's dtype.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm: rows {x.shape} and weight {weight.shape} do not fit")
    return implementation_module("rms_norm_quant", implementation).rms_norm(x, weight, eps, row_tile)


@contract("rms_norm_quant")
def rotary(
    x: jax.Array,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    *,
    inverse: bool = False,
    quantize: bool = False,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Rotate interleaved pairs of the last dims (`spec/attention.md` 3.3).

    Args:
        x: [T, H, d]; the last 2 * len(inverse_frequencies) dims of each head are rotated.
        positions: int32 [T]; the angle is float32(position) * inverse frequency, in float32.
        inverse_frequencies: float32 [rope/2].
        inverse: rotate back.
        quantize: MXFP4 quantise-dequantise each head afterwards (index queries, section 3.5).
    Returns: [T, H, d] in x's dtype; the untouched dims keep their bits unless quantised. A quantised group that
        holds a NaN or an infinity is NaN throughout.
    """
    if x.ndim != 3 or positions.shape != x.shape[:1] or 2 * inverse_frequencies.shape[0] > x.shape[2]:
        raise ValueError(
            f"rotary: x {x.shape}, positions {positions.shape}, frequencies {inverse_frequencies.shape} do not fit"
        )
    if quantize and x.shape[2] % GROUP:
        raise ValueError(f"rotary: cannot quantise heads of {x.shape[2]} elements in groups of {GROUP}")
    module = implementation_module("rms_norm_quant", implementation)
    return module.rotary(x, positions, inverse_frequencies, inverse, quantize, row_tile)


@contract("rms_norm_quant")
def norm_rotary_pack(
    x: jax.Array,
    weight: jax.Array | None,
    positions: jax.Array,
    inverse_frequencies: jax.Array,
    *,
    fmt: CacheFormat,
    eps: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Make cache records: norm (unless weight is None), rotary on the tail, quantise, pack.

    Args:
        x: [T, d]. weight: [d] or None. positions, inverse_frequencies: as in `rotary`.
        fmt: cache format of the record (`kernels/quantization.py`).
    Returns: [T, cache_width(fmt, d)] uint8, or float32 for the "float32" format. Groups with a NaN or an infinity
        are marked by their scale, see `pack_cache`. Subnormal numbers count as such or as zeros, which depends on
        the device.
    """
    rows_fit = x.ndim == 2 and positions.shape == x.shape[:1] and 2 * inverse_frequencies.shape[0] <= x.shape[1]
    if not rows_fit or (weight is not None and weight.shape != x.shape[1:]):
        raise ValueError(
            f"norm_rotary_pack: rows {x.shape}, weight {None if weight is None else weight.shape}, positions "
            f"{positions.shape}, frequencies {inverse_frequencies.shape} do not fit"
        )
    if fmt != "float32" and x.shape[1] % GROUP:
        raise ValueError(f"norm_rotary_pack: cannot quantise {x.shape[1]} elements in groups of {GROUP}")
    module = implementation_module("rms_norm_quant", implementation)
    return module.norm_rotary_pack(x, weight, positions, inverse_frequencies, fmt, eps, row_tile)
