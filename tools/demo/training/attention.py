"""Attention over whole rows of tokens: a blocked local window, and compressed entries under a mask.

Same scale, sink, softmax and roundings as `kernels/sparse_attention`; positions of a row are 0 .. T-1.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from deepinfer_jax.kernels.top_k import top_k
from deepinfer_jax.kernels.top_k.xla import order_key

from .ops import SAVED, matmul, product


def _window_mask(blocks: int, size: int) -> np.ndarray:
    """bool [blocks, size, 2 size]: query i of a block sees size positions up to itself; keys start a block earlier."""
    query, key = np.arange(size)[:, None], np.arange(2 * size)[None]
    near = (key > query) & (key <= query + size)
    mask = np.repeat(near[None], blocks, axis=0)
    mask[0] &= key >= size
    return mask


def _near_keys(window: jax.Array, size: int) -> jax.Array:
    """[B * blocks, 2 size, d]: the keys that the queries of each block may see."""
    batch, tokens, width = window.shape
    own = window.reshape(batch, tokens // size, size, width)
    earlier = jnp.pad(own[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([earlier, own], axis=2).reshape(-1, 2 * size, width)


def _near_documents(documents: jax.Array, size: int) -> jax.Array:
    """bool [B, blocks, size, 2 size]: whether a query and a key of its block are of one document."""
    own = documents.reshape(documents.shape[0], -1, size)
    earlier = jnp.pad(own[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=-1)
    return own[..., None] == jnp.concatenate([earlier, own], axis=2)[:, :, None]


def _near_seen(documents: jax.Array, reach: jax.Array, size: int) -> jax.Array:
    """bool [B, blocks, size, 2 size]: the keys of its block that a query sees."""
    blocks = documents.shape[1] // size
    back = np.arange(size)[:, None] + size - np.arange(2 * size)[None]
    near = _near_documents(documents, size) & (back < reach[:, None, None, None])
    return near & _window_mask(blocks, size)[None]


def _near_logits(
    queries: jax.Array, keys: jax.Array, documents: jax.Array, reach: jax.Array, scale: float, size: int
) -> jax.Array:
    """float32 [B, blocks, size, H, 2 size]; -inf outside the window and the document.

    Products have one batch index and one of each other kind: others would be transposed in memory.
    """
    batch, tokens, heads, width = queries.shape
    blocks = tokens // size
    logits = matmul("bmd,bsd->bms", queries.reshape(batch * blocks, size * heads, width), keys, jnp.float32)
    logits = logits.reshape(batch, blocks, size, heads, 2 * size) * scale
    return jnp.where(_near_seen(documents, reach, size)[:, :, :, None], logits, -jnp.inf)


def _far_logits(queries: jax.Array, compressed: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """float32 [B, T, H, S]; -inf where masked."""
    batch, tokens, heads, width = queries.shape
    logits = matmul("bmd,bsd->bms", queries.reshape(batch, tokens * heads, width), compressed, jnp.float32)
    return jnp.where(mask[:, :, None], logits.reshape(batch, tokens, heads, -1) * scale, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    scale: float,
    size: int,
    queries: jax.Array,
    window: jax.Array,
    compressed: jax.Array | None,
    mask: jax.Array | None,
    sink: jax.Array,
    documents: jax.Array,
    reach: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of every token of a row.

    Args:
        scale: factor of the logits. size: window positions.
        queries: [B, T, H, d]. window: [B, T, d], key and value of each position.
        compressed: [B, S, d] entries. mask: bool [B or 1, T, S], entries that a token sees.
        sink: [H], added to the softmax denominator.
        documents: int32 [B, T], which document of the row a token belongs to: the window ends where it begins.
        reach: int32 [B], positions of the window that a row sees, at most size.
    Returns: (output [B, T, H, d], mean over heads of the probability of each entry, [B, T, S] or None;
        the second has no gradient).
    """
    return _attend_forward(scale, size, queries, window, compressed, mask, sink, documents, reach)[0]


def _attend_forward(
    scale: float,
    size: int,
    queries: jax.Array,
    window: jax.Array,
    compressed: jax.Array | None,
    mask: jax.Array | None,
    sink: jax.Array,
    documents: jax.Array,
    reach: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array | None], Any]:
    batch, tokens, heads, _ = queries.shape
    dtype = queries.dtype
    if tokens % size:
        raise ValueError(f"attend: {tokens} tokens are not a multiple of the window of {size}")
    keys = _near_keys(window, size)
    near = _near_logits(queries, keys, documents, reach, scale, size)
    largest = jnp.max(near, axis=-1).reshape(batch, tokens, heads)
    far = None
    if compressed is not None and mask is not None:
        far = _far_logits(queries, compressed, mask, scale)
        largest = jnp.maximum(largest, jnp.max(far, axis=-1))
    near_weights = jnp.exp(near - largest.reshape(*near.shape[:-1], 1))
    total = jnp.sum(near_weights, axis=-1).reshape(largest.shape) + jnp.exp(sink - largest)
    flat = near_weights.astype(dtype).reshape(keys.shape[0], -1, 2 * size)
    output = matmul("bms,bsd->bmd", flat, keys, jnp.float32).reshape(queries.shape)
    share = None
    if far is not None and compressed is not None:
        far_weights = jnp.exp(far - largest[..., None])
        total = total + jnp.sum(far_weights, axis=-1)
        flat = far_weights.astype(dtype).reshape(batch, tokens * heads, -1)
        output = output + matmul("bms,bsd->bmd", flat, compressed, jnp.float32).reshape(queries.shape)
        share = checkpoint_name(jnp.mean(far_weights / total[..., None], axis=2).astype(dtype), SAVED)
    output = checkpoint_name((output / total[..., None]).astype(dtype), SAVED)
    log_total = checkpoint_name(largest + jnp.log(total), SAVED)
    return (output, share), (queries, window, compressed, mask, sink, documents, reach, output, log_total)


def _attend_backward(scale: float, size: int, kept: Any, gradients: tuple[jax.Array, Any]) -> tuple[Any, ...]:
    queries, window, compressed, mask, sink, documents, reach, output, log_total = kept
    batch, width = queries.shape[0], queries.shape[-1]
    dtype = queries.dtype
    g = gradients[0].astype(dtype)
    inner = jnp.sum(g.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)  # [B, T, H]

    def part(logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gradients of the queries and of keys [b, s, d] (also values) of one group of logits."""
        b, s, _ = keys.shape
        q, cotangent = queries.reshape(b, -1, width), g.reshape(b, -1, width)
        probability = jnp.exp(logits - log_total.reshape(*logits.shape[:-1], 1))
        towards = matmul("bmd,bsd->bms", cotangent, keys, dtype).reshape(logits.shape)
        change = towards.astype(jnp.float32) - inner.reshape(*logits.shape[:-1], 1)
        change = (probability * change * scale).astype(dtype).reshape(b, -1, s)
        rounded = probability.astype(dtype).reshape(b, -1, s)
        dq = matmul("bms,bsd->bmd", change, keys, jnp.float32).reshape(queries.shape)
        dk = matmul("bms,bmd->bsd", change, q, jnp.float32) + matmul("bms,bmd->bsd", rounded, cotangent, jnp.float32)
        return dq, dk

    near_keys = _near_keys(window, size)
    dq, dk = part(_near_logits(queries, near_keys, documents, reach, scale, size), near_keys)
    dk = dk.reshape(batch, -1, 2, size, width)
    d_window = dk[:, :, 1] + jnp.pad(dk[:, 1:, 0], ((0, 0), (0, 1), (0, 0), (0, 0)))
    d_compressed = None
    if compressed is not None and mask is not None:
        more, d_compressed = part(_far_logits(queries, compressed, mask, scale), compressed)
        dq, d_compressed = dq + more, d_compressed.astype(dtype)
    d_sink = -jnp.sum(jnp.exp(sink - log_total) * inner, axis=(0, 1))
    return dq.astype(dtype), d_window.reshape(window.shape).astype(dtype), d_compressed, None, d_sink, None, None


attend.defvjp(_attend_forward, _attend_backward)


# ---- index scores and selection ---------------------------------------------------------------------


def visible_entries(documents: jax.Array, entries: int, ratio: int) -> jax.Array:
    """bool [B, T, S]: entries whose group is closed at each position, and begins in its document [B, T]."""
    tokens = documents.shape[1]
    closed = np.arange(entries)[None, None] < ((np.arange(tokens) + 1) // ratio)[None, :, None]
    same = documents[:, None, : entries * ratio : ratio] == documents[:, :, None]
    return jnp.asarray(closed) & same


def index_scores(
    queries: jax.Array, head_weights: jax.Array, keys: jax.Array, *, scale: float, bf16_chain: bool
) -> jax.Array:
    """Scores [B, T, S] in the dtype of `queries`, with the roundings of `kernels/index_scores`.

    queries: [B, T, H, d]. head_weights: [B, T, H]. keys: [B, S, d].
    """
    weights = (head_weights.astype(jnp.float32) * scale).astype(head_weights.dtype)
    batch, tokens, heads, width = queries.shape
    flat = queries.reshape(batch, tokens * heads, width)
    if not bf16_chain:
        dots = product("bmd,bsd->bms", flat, keys, jnp.float32).reshape(batch, tokens, heads, -1)
        return jnp.sum(weights.astype(jnp.float32)[..., None] * jnp.maximum(dots, 0), axis=2)
    dots = product("bmd,bsd->bms", flat, keys, jnp.bfloat16).reshape(batch, tokens, heads, -1)
    weighted = jnp.maximum(dots, 0) * weights.astype(jnp.bfloat16)[..., None]
    return jnp.sum(weighted.astype(jnp.float32), axis=2).astype(jnp.bfloat16)


def _largest(keys: jax.Array, count: int, bits: int) -> jax.Array:
    """Mask of the `count` largest of distinct int32 keys [..., n] in 0 .. 2^bits - 1; keys < 0 never."""
    shape = keys.shape[:-1]

    def step(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at least `count` keys reach low, or low is 0; fewer reach high
        middle = (low + high) >> 1
        enough = jnp.sum(keys >= middle[..., None], axis=-1, dtype=jnp.int32) >= count
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = (jnp.zeros(shape, jnp.int32), jnp.full(shape, 1 << bits, jnp.int32))
    return keys >= lax.fori_loop(0, bits, step, start)[0][..., None]


def _distinct_keys(scores: jax.Array, allowed: jax.Array) -> tuple[jax.Array, int]:
    """int32 keys in the order of bfloat16 scores, ties by the lower place; -1 where not allowed."""
    places = scores.shape[-1]
    bits = (places - 1).bit_length()
    order = (order_key(scores.astype(jnp.float32)) >> 16) + (1 << 15)
    keys = (order << bits) | (places - 1 - jnp.arange(places, dtype=jnp.int32))
    return jnp.where(allowed, keys, -1), 16 + bits


def select_entries(scores: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """bool [B, T, S]: the `count` best allowed entries of each token; ties go to the lower entry."""
    scores = lax.stop_gradient(scores)
    if scores.dtype == jnp.bfloat16:
        keys, bits = _distinct_keys(scores, allowed)
        return _largest(keys, count, bits)
    batch, tokens, entries = scores.shape
    flat = jnp.where(allowed, scores, -jnp.inf).reshape(-1, entries)
    chosen = top_k(flat, k=count, row_tile=None)
    rows = jnp.arange(flat.shape[0])[:, None]
    mask = jnp.zeros(flat.shape, bool).at[rows, jnp.where(chosen >= 0, chosen, entries)].set(True, mode="drop")
    return mask.reshape(batch, tokens, entries)


def candidate_entries(scores: jax.Array, visible: jax.Array, *, ratio: int, block_size: int, blocks: int) -> jax.Array:
    """bool [B, T, S]: entries of the `blocks` best blocks by their largest score; the newest block is in."""
    batch, tokens, entries = scores.shape
    count = -(-entries // block_size)
    padding = ((0, 0), (0, 0), (0, count * block_size - entries))
    masked = jnp.pad(jnp.where(visible, lax.stop_gradient(scores), -jnp.inf), padding, constant_values=-jnp.inf)
    best = jnp.max(masked.reshape(batch, tokens, count, block_size), axis=-1)
    newest = ((jnp.arange(tokens) + 1) // ratio - 1) // block_size
    is_newest = jnp.arange(count)[None, None] == newest[None, :, None]
    kept = select_entries(jnp.where(is_newest, jnp.inf, best), (best > -jnp.inf) | is_newest, min(blocks, count))
    return jnp.repeat(kept, block_size, axis=-1)[..., :entries]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What index sources publish for later layers; all over the entries of one source.

    scores: [B, T, S], of the newest index source. mask: bool, entries that its layers see.
    candidates: bool, entries of the candidate blocks, None before the candidate source.
    candidate_scores: scores of the candidate source.
    """

    scores: jax.Array
    mask: jax.Array
    candidates: jax.Array | None = None
    candidate_scores: jax.Array | None = None


jax.tree_util.register_dataclass(
    Selection, data_fields=["scores", "mask", "candidates", "candidate_scores"], meta_fields=[]
)
