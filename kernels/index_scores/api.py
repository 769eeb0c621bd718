"""Contract of `index_scores`: one score per compressed entry, computed page by page."""

from __future__ import annotations

import jax

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import CacheFormat, check_records


@contract("index_scores")
def index_scores(
    queries: jax.Array,
    head_weights: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    fmt: CacheFormat,
    bf16_chain: bool,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """sum_h w[h] * max(0, <q[h], key>) for every visible entry (`spec/attention.md` 3.5).

    Args:
        queries: [T, H, d], rotated and quantised. head_weights: [T, H], multiplied by `scale`.
        pages: records [pages, entries, width] of the owner. page_ids: int32 [T, P] of each row's
            sequence in order, -1 = none. visible: int32 [T] entries that each row sees.
        bf16_chain: round after the dot, the product and the head sum, as the reference does.
    Returns: float32 [T, P * entries], -inf from `visible` on.
    """
    rows = queries.shape[:1]
    if queries.shape[:2] != head_weights.shape or page_ids.shape[:1] != rows or visible.shape != rows:
        raise ValueError(
            f"index_scores: queries {queries.shape}, weights {head_weights.shape}, page_ids {page_ids.shape}, "
            f"visible {visible.shape} do not fit"
        )
    if pages.ndim != 3:
        raise ValueError(f"index_scores: records have shape {pages.shape}; expected [pages, entries, width]")
    check_records("index_scores", pages, fmt, queries.shape[2])
    module = implementation_module("index_scores", implementation)
    return module.index_scores(queries, head_weights, pages, page_ids, visible, scale, fmt, bf16_chain, row_tile)
