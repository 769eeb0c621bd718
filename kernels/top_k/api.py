"""Contract of `top_k`: exact selection with fixed ties, on integer keys.

Scores are compared as integers that keep their order, so no result depends on the number of entries
that happen to be allocated. Ties choose the lowest position; -0 equals +0 (design 2.7).
"""

from __future__ import annotations

import jax

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module


@contract("top_k")
def top_k(
    scores: jax.Array,
    *,
    k: int,
    block_mask: jax.Array | None = None,
    block_size: int = 1,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Positions of the k largest scores, ascending, padded with -1 (`spec/attention.md` 3.7).

    Args:
        scores: float32 [T, N]; -inf marks an entry that must not be chosen.
        block_mask: bool [T, ceil(N / block_size)]: entries of other blocks must not be chosen.
    Returns: int32 [T, k].
    """
    if scores.ndim != 2 or k < 1 or block_size < 1:
        raise ValueError(f"top_k: scores {scores.shape}, k={k} and block_size={block_size} do not fit")
    if block_mask is not None and block_mask.shape != (scores.shape[0], -(-scores.shape[1] // block_size)):
        raise ValueError(f"top_k: mask {block_mask.shape} does not cover scores {scores.shape} by {block_size}")
    del row_tile  # integers only: no tile is needed
    return implementation_module("top_k", implementation).top_k(scores, k, block_mask, block_size)


@contract("top_k")
def candidate_blocks(
    scores: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    blocks: int,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Blocks that the candidate source publishes (`spec/attention.md` 3.6).

    Args:
        scores: float32 [T, N], -inf where not visible. visible: int32 [T] number of visible entries.
        blocks: how many blocks to keep, the pinned newest one included.
    Returns: bool [T, ceil(N / block_size)].
    """
    if scores.ndim != 2 or visible.shape != scores.shape[:1]:
        raise ValueError(f"candidate_blocks: scores {scores.shape} and visible {visible.shape} do not fit")
    if block_size < 1 or blocks < 1:
        raise ValueError(f"candidate_blocks: block_size={block_size} and blocks={blocks} must be positive")
    del row_tile
    return implementation_module("top_k", implementation).candidate_blocks(scores, visible, block_size, blocks)
