"""Paged state of all sequences, and the integer batch that one call processes (design 5).

Nothing is ever rolled back: lengths mask what is visible and later writes overwrite. Three of the
buffers are rings addressed by position (`position % ring`), so rows of rejected drafts need no care:
the true row of that position overwrites them before anything reads it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.quantization import cache_dtype, cache_width
from deepinfer_jax.model.config import ModelConfig

PAGE = 128
"""Tokens of one page. A page holds PAGE / compress_ratio entries of each source."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv", "index"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PagePool:
    """Compressed caches of all sources of one compress ratio.

    kv: records [sources, pages, PAGE/ratio, width]; index: index-key records, same leading axes.
    """

    kv: jax.Array
    index: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "window", "open_groups", "lookback", "draft_window"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that a later call reads. Donate it; never keep a reference to an old one.

    pages: compress ratio -> PagePool. Page numbers come from `Batch.page_table`.
    window: records [layers, slots, ring, width], ring = sliding_window + row_block + max_draft.
    open_groups: float32 [pooling sources, slots, ring, 2, head_dim]: (value, gate) of recent tokens.
    lookback: int32 [slots, ring]: recent token ids for the Engram hash, -1 = image.
    draft_window: records [stages, slots, ring, width].
    """

    pages: dict[int, PagePool]
    window: jax.Array
    open_groups: jax.Array
    lookback: jax.Array
    draft_window: jax.Array

    @property
    def slots(self) -> int:
        return self.lookback.shape[0]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "token_ids",
        "positions",
        "sequence",
        "decoder_rows",
        "logit_rows",
        "page_table",
        "window_start",
        "encoder_start",
        "page_start",
        "image_mask",
        "embeddings",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one call, chosen by the host. R, Rd and L are multiples of the row block.

    token_ids, positions, sequence: int32 [R]. sequence is the slot, -1 = padding (at the end). Rows
        of a sequence stand together, in ascending consecutive positions.
    decoder_rows: int32 [Rd], ascending row numbers that run through the decoder layers, -1 = padding
        at the end (`spec/attention.md` 2.4; all rows when replay is "none").
    logit_rows: int32 [L], places in decoder_rows whose logits are wanted, -1 = padding at the end.
    page_table: int32 [slots, P], pages of each sequence in order, -1 = none.
    window_start, encoder_start: int32 [slots], first position of the sequence whose window keys exist in
        the decoder and encoder layers; 0 when all rows were processed.
    page_start: int32 [slots], rows before this position append nothing to the pages (a row that is
        processed again only to rebuild its window keys).
    image_mask: bool [R], rows of an image span. embeddings: [R, D] in place of the table's rows
        where image_mask is set (everywhere with `embed_all` of `forward`), or None.
    """

    token_ids: jax.Array
    positions: jax.Array
    sequence: jax.Array
    decoder_rows: jax.Array
    logit_rows: jax.Array
    page_table: jax.Array
    window_start: jax.Array
    encoder_start: jax.Array
    page_start: jax.Array
    image_mask: jax.Array
    embeddings: jax.Array | None = None


def pooling_sources(config: ModelConfig) -> tuple[int, ...]:
    """Key-value sources that pool two tokens, in layer order."""
    return tuple(s for s in config.kv_source_layer_ids if config.compress_ratios[s] == 2)


def sources_by_ratio(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """Compress ratio -> key-value sources in layer order; the place is the source's number in its pool."""
    result: dict[int, tuple[int, ...]] = {}
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        result[ratio] = (*result.get(ratio, ()), source)
    return result


def ring_sizes(config: ModelConfig, row_block: int, max_draft: int) -> tuple[int, int, int, int]:
    """Ring lengths of (window, open groups, lookback, draft window)."""
    window = config.sliding_window + row_block + max_draft
    draft = config.sliding_window + config.dspark_block_size + row_block + max_draft
    return window, 2 + max_draft, config.engram_max_ngram_size + max_draft, draft


def init_state(
    config: ModelConfig,
    profile: NumericsProfile,
    *,
    slots: int,
    pages: int,
    row_block: int,
    max_draft: int = 0,
) -> State:
    """An empty state of zeros for `slots` sequences and `pages` pages of PAGE tokens.

    row_block: most rows of one sequence that are processed together (the `row_block` of `forward`).
    max_draft: most rows of a sequence that may be processed and then rejected.
    """
    if min(slots, pages, row_block) < 1 or max_draft < 0:
        raise ValueError(f"init_state: slots={slots}, pages={pages}, row_block={row_block}, max_draft={max_draft}")
    window, group, lookback, draft = ring_sizes(config, row_block, max_draft)
    width = cache_width(profile.window_format, config.head_dim)
    dtype = cache_dtype(profile.window_format)
    pools = {}
    for ratio, sources in sources_by_ratio(config).items():
        lead = (len(sources), pages, PAGE // ratio)
        kv = (*lead, cache_width(profile.compressed_format, config.head_dim))
        index = (*lead, cache_width(profile.index_format, config.index_head_dim))
        pools[ratio] = PagePool(
            jnp.zeros(kv, cache_dtype(profile.compressed_format)),
            jnp.zeros(index, cache_dtype(profile.index_format)),
        )
    return State(
        pages=pools,
        window=jnp.zeros((config.num_hidden_layers, slots, window, width), dtype),
        open_groups=jnp.zeros((len(pooling_sources(config)), slots, group, 2, config.head_dim), jnp.float32),
        lookback=jnp.full((slots, lookback), -1, jnp.int32),
        draft_window=jnp.zeros((config.num_nextn_predict_layers, slots, draft, width), dtype),
    )
