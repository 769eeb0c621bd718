"""Contract of `engram_rows` (`spec/blocks.md` 1)."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import QuantTensor


@contract("engram_rows")
def engram_hash(
    classes: jax.Array,
    products: jax.Array,
    moduli: jax.Array,
    offsets: jax.Array,
    *,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Table rows of the n-grams that end at each token, exact in 32-bit integers.

    Args:
        classes: int32 [T, n], class of the token and of its n-1 predecessors (newest first).
        products: uint32 [n, classes, 2], halves (high, low) of class * multiplier < 2^63.
        moduli: uint32 [columns], all below 2^24; columns ordered by n-gram order, then head.
        offsets: int32 [columns].
    Returns: int32 [T, columns].
    """
    ngram = products.shape[0]
    if classes.shape[1:] != (ngram,) or moduli.shape[0] % (ngram - 1) or offsets.shape != moduli.shape:
        raise ValueError(
            f"engram_hash: classes {classes.shape}, products {products.shape}, moduli {moduli.shape}, "
            f"offsets {offsets.shape} do not fit"
        )
    del row_tile  # integers only
    return implementation_module("engram_rows", implementation).engram_hash(classes, products, moduli, offsets)


@contract("engram_rows")
def engram_rows(
    table: QuantTensor,
    row_ids: jax.Array,
    *,
    dtype: DTypeLike,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Gather and dequantise table rows: int32 [T, columns] -> [T, columns * width] (exact)."""
    if table.format != "fp8_row" or row_ids.ndim != 2:
        raise ValueError(f"engram_rows: table {table.format!r} must be 'fp8_row', ids {row_ids.shape} [T, columns]")
    return implementation_module("engram_rows", implementation).engram_rows(table, row_ids, dtype, row_tile)


@contract("engram_rows")
def engram_gate(
    streams: jax.Array,
    projected: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    keep: jax.Array,
    *,
    eps: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> tuple[jax.Array, jax.Array]:
    """Add the gated memory value to every stream (`spec/blocks.md` 1.7).

    Args:
        streams: [T, C, D]. projected: [T, (C+1)*D], one key per stream, then the value.
        q_weight, k_weight: [C, D]. keep: bool [T]; rows that are not kept pass through unchanged.
    Returns: (streams [T, C, D], gate float32 [T, C]).
    """
    if streams.ndim != 3:
        raise ValueError(f"engram_gate: streams have shape {streams.shape}; expected [T, C, D]")
    rows, count, size = streams.shape
    weights_fit = q_weight.shape == k_weight.shape == (count, size)
    if projected.shape != (rows, (count + 1) * size) or not weights_fit or keep.shape != (rows,):
        raise ValueError(
            f"engram_gate: streams {streams.shape}, projected {projected.shape}, weights {q_weight.shape} and "
            f"{k_weight.shape}, keep {keep.shape} do not fit"
        )
    module = implementation_module("engram_rows", implementation)
    return module.engram_gate(streams, projected, q_weight, k_weight, keep, eps, row_tile)
