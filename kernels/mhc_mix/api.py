"""Contract of `mhc_mix`: coefficients, collapse and expansion of the residual streams.

Single-pass hyper-connections (`spec/blocks.md` 2). Streams are [T, C, D].
"""

from __future__ import annotations

import jax

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import GROUP

Mix = tuple[jax.Array, jax.Array, jax.Array]
"""float32 (pre [T, C], post [T, C], comb [T, C, C]); comb[i, j] goes from stream i to stream j."""


@contract("mhc_mix")
def mhc_mix(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> Mix:
    """Coefficients of one sublayer (`spec/blocks.md` 2.2), all in float32.

    Args:
        streams: [T, C, D]. fn: float32 [C*(2+C), C*D]. base: float32 [C*(2+C)]. scale: float32 [3].
        iterations: column normalisations (20); the loop ends on one.
    Returns: Mix.
    """
    if streams.ndim != 3:
        raise ValueError(f"mhc_mix: streams have shape {streams.shape}; expected [T, C, D]")
    _, count, size = streams.shape
    mixes = count * (2 + count)
    if fn.shape != (mixes, count * size) or base.shape != (mixes,) or scale.shape != (3,):
        raise ValueError(
            f"mhc_mix: streams {streams.shape}, fn {fn.shape}, base {base.shape}, scale {scale.shape} do not fit"
        )
    module = implementation_module("mhc_mix", implementation)
    return module.mhc_mix(streams, fn, base, scale, iterations, norm_eps, hc_eps, row_tile)


@contract("mhc_mix")
def collapse_norm(
    streams: jax.Array,
    pre: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """RMS(round(sum_i pre[i] * stream[i])) [T, D] in the streams' dtype; no norm when weight is None."""
    if pre.shape != streams.shape[:2] or (weight is not None and weight.shape != streams.shape[2:]):
        raise ValueError(
            f"collapse_norm: streams {streams.shape}, pre {pre.shape} and weight "
            f"{None if weight is None else weight.shape} do not fit"
        )
    return implementation_module("mhc_mix", implementation).collapse_norm(streams, pre, weight, eps, row_tile)


@contract("mhc_mix")
def expand(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """round(post[j] * y + sum_i comb[i, j] * stream[i]) [T, C, D] (`spec/blocks.md` 2.3)."""
    rows, count, size = streams.shape
    if y.shape != (rows, size) or post.shape != (rows, count) or comb.shape != (rows, count, count):
        raise ValueError(
            f"expand: output {y.shape}, post {post.shape}, comb {comb.shape} do not fit streams {streams.shape}"
        )
    return implementation_module("mhc_mix", implementation).expand(y, streams, post, comb, row_tile)


Boundary = tuple[jax.Array, jax.Array, jax.Array | None, Mix]
"""Streams [T, C, D], sublayer input [T, D], the same quantised and dequantised (or None), Mix."""


@contract("mhc_mix")
def expand_collapse_norm_quant(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    weight: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
    quantize: bool = False,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> Boundary:
    """The boundary between two sublayers: one call that reads and writes the streams once.

    The same as `expand(y, streams, post, comb)`, then of the new streams `collapse_norm(pre, weight)`,
    `quantize_dequantize_fp8` of that, and `mhc_mix(fn, base, scale)`. `pre` is what the sublayer before the one
    that made y predicted, so it is known before the new streams are.

    Args:
        y: output [T, D] of a sublayer. streams, post, comb: as in `expand`.
        pre: float32 [T, C]. weight: [D], norm of the next sublayer. norm_eps: of that norm and of the mix.
        fn, base, scale, iterations, hc_eps: of the next sublayer, as in `mhc_mix`.
        quantize: also return the activation-quantised input (`row_dot` of it needs no quantize_input).
    Returns: Boundary.
    """
    rows, count, size = streams.shape
    mixes = count * (2 + count)
    if y.shape != (rows, size) or post.shape != (rows, count) or comb.shape != (rows, count, count):
        raise ValueError(
            f"expand_collapse_norm_quant: output {y.shape}, post {post.shape}, comb {comb.shape} do not fit "
            f"streams {streams.shape}"
        )
    if pre.shape != (rows, count) or weight.shape != (size,):
        raise ValueError(
            f"expand_collapse_norm_quant: pre {pre.shape}, weight {weight.shape} do not fit streams {streams.shape}"
        )
    if fn.shape != (mixes, count * size) or base.shape != (mixes,) or scale.shape != (3,):
        raise ValueError(
            f"expand_collapse_norm_quant: fn {fn.shape}, base {base.shape}, scale {scale.shape} do not fit "
            f"streams {streams.shape}"
        )
    if quantize and size % GROUP:
        raise ValueError(f"expand_collapse_norm_quant: cannot quantise {size} elements in groups of {GROUP}")
    return implementation_module("mhc_mix", implementation).expand_collapse_norm_quant(
        y, streams, post, comb, pre, weight, fn, base, scale, iterations, norm_eps, hc_eps, quantize, row_tile
    )


@contract("mhc_mix")
def stream_mean(
    streams: jax.Array,
    *,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Mean over the streams [T, D], one rounding: the draft's tap (`spec/dspark.md` 1.2)."""
    if streams.ndim != 3:
        raise ValueError(f"stream_mean: streams have shape {streams.shape}; expected [T, C, D]")
    return implementation_module("mhc_mix", implementation).stream_mean(streams, row_tile)
