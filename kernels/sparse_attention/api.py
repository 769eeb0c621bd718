"""Contract of `sparse_attention`: one softmax over window rows and selected compressed entries."""

from __future__ import annotations

import jax

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, contract, implementation_module
from deepinfer_jax.kernels.quantization import CacheFormat, check_records


@contract("sparse_attention")
def sparse_attention(
    queries: jax.Array,
    window: jax.Array,
    window_rows: jax.Array,
    compressed: jax.Array | None,
    compressed_rows: jax.Array | None,
    sink: jax.Array,
    *,
    window_format: CacheFormat,
    compressed_format: CacheFormat,
    scale: float,
    implementation: Implementation | None = None,
    row_tile: int | None = ROW_TILE,
) -> jax.Array:
    """Attention of every head to the same records, which are key and value (`spec/attention.md` 3.8).

    Args:
        queries: [T, H, d], rotated. sink: float32 [H], a logit that enters the denominator only.
        window: records [rows, width]. window_rows: int32 [T, W] row numbers in ascending position,
            -1 = masked. compressed, compressed_rows: the same for selected entries [T, K], or None.
        scale: factor of the logits.
    Raises: ValueError for operands that do not fit each other or the formats.
    Returns: [T, H, d] in the queries' dtype. Probabilities are rounded to it before the value product,
        the denominator is not. Records behind masked slots may hold anything, NaN included.
    """
    if (compressed is None) != (compressed_rows is None):
        raise ValueError("sparse_attention: compressed and compressed_rows go together")
    lists = [window_rows.shape] if compressed_rows is None else [window_rows.shape, compressed_rows.shape]
    rows_fit = queries.ndim == 3 and all(len(shape) == 2 and shape[0] == queries.shape[0] for shape in lists)
    if not rows_fit or sink.shape != queries.shape[1:2]:
        raise ValueError(f"sparse_attention: queries {queries.shape}, rows {lists}, sink {sink.shape} do not fit")
    check_records("sparse_attention", window, window_format, queries.shape[2])
    if compressed is not None:
        check_records("sparse_attention", compressed, compressed_format, queries.shape[2])
    module = implementation_module("sparse_attention", implementation)
    return module.sparse_attention(
        queries,
        window,
        window_rows,
        compressed,
        compressed_rows,
        sink,
        window_format,
        compressed_format,
        scale,
        row_tile,
    )
