"""Portable sampling."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.kernels.sample_tokens.api import Controls, Sampled
from deepinfer_jax.kernels.tiling import tile_rows
from deepinfer_jax.kernels.top_k.xla import HIGHEST, LOWEST, MINUS_INFINITY_KEY, order_key

_STREAM = 0x70C  # the stream of target tokens; other uses of a request's seed fold in other numbers

Mass = tuple[jax.Array, jax.Array]
"""(high, low) with value high * 2^15 + low; exact for up to 2^17 tokens of 30 bits each."""


def masked_logits(logits: jax.Array, c: Controls) -> jax.Array:
    """Steps 1 and 2: mask and bias."""
    vocabulary = logits.shape[1]
    if c.mask is not None:
        token = jnp.arange(vocabulary, dtype=jnp.uint32)
        allowed = (c.mask[:, token // 32] >> (token % 32)) & 1
        logits = jnp.where(allowed != 0, logits, -jnp.inf)
    if c.bias_ids is not None and c.bias is not None:
        rows = jnp.arange(logits.shape[0])[:, None]
        ids = jnp.where(c.bias_ids >= 0, c.bias_ids, vocabulary)
        logits = logits.at[rows, ids].add(c.bias, mode="drop")
    return logits


def penalized_logits(logits: jax.Array, c: Controls) -> jax.Array:
    """Steps 3 to 5. Tokens that a penalty does not touch keep their bits."""
    if c.output_counts is None or c.prompt_seen is None:
        return logits
    counts = c.output_counts
    seen = c.prompt_seen | (counts > 0)
    factor = c.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(seen & (factor != 1), repeated, logits)
    frequency, presence = c.frequency[:, None], c.presence[:, None]
    touched = counts > 0
    logits = jnp.where(touched & (frequency != 0), logits - frequency * counts.astype(jnp.float32), logits)
    return jnp.where(touched & (presence != 0), logits - presence, logits)


def _total(mass: jax.Array) -> jax.Array:
    """Sum of integer masses [T, V] (30 bits) as float32 [T]: exact integer sums, one rounding."""
    high = jnp.sum(mass >> 15, axis=1, dtype=jnp.uint32)
    low = jnp.sum(mass & 0x7FFF, axis=1, dtype=jnp.uint32)
    high, low = high + (low >> 15), low & 0x7FFF
    return high.astype(jnp.float32) * np.float32(32768) + low.astype(jnp.float32)


def _threshold(keep_enough: jax.Array, keys: jax.Array) -> jax.Array:
    """Largest key t [T] for which `keep_enough(t)` holds; it must hold for the lowest key."""
    rows = keys.shape[0]

    def step(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # rounded up, no overflow
        enough = keep_enough(middle)  # type: ignore[operator]
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = (jnp.full((rows,), LOWEST + 1), jnp.full((rows,), HIGHEST))
    return lax.fori_loop(0, 32, step, start)[0]


def kept_tokens(scaled: jax.Array, c: Controls) -> jax.Array:
    """bool [T, V]: support after top_k, top_p and min_p of logits that are already divided."""
    keys = order_key(scaled)
    possible = keys > MINUS_INFINITY_KEY
    largest = jnp.max(scaled, axis=1, keepdims=True)
    weight = jnp.exp(scaled - largest)
    mass = jnp.where(possible, (weight * np.float32(2.0**30)).astype(jnp.uint32), 0)
    mass = jnp.minimum(mass, np.uint32((1 << 30) - 1))

    count = jnp.sum(possible, axis=1, dtype=jnp.int32)
    wanted = jnp.where(c.top_k > 0, jnp.minimum(c.top_k, count), count)

    def at_least_k(t: jax.Array) -> jax.Array:
        return jnp.sum(possible & (keys >= t[:, None]), axis=1, dtype=jnp.int32) >= wanted

    kept = possible & (keys >= _threshold(at_least_k, keys)[:, None])  # type: ignore[arg-type]
    target = _total(jnp.where(kept, mass, 0)) * c.top_p

    def enough_mass(t: jax.Array) -> jax.Array:
        return _total(jnp.where(kept & (keys >= t[:, None]), mass, 0)) >= target

    nucleus = kept & (keys >= _threshold(enough_mass, keys)[:, None])  # type: ignore[arg-type]
    kept = jnp.where(c.top_p[:, None] < 1, nucleus, kept)
    return kept & ((weight >= c.min_p[:, None]) | (c.min_p[:, None] <= 0))


def gumbel_noise(c: Controls, vocabulary: int) -> jax.Array:
    """float32 [T, V]. The large tail comes from numbers near 0, where float32 is dense."""

    def row(seed: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(_STREAM, impl="threefry2x32")
        for part in (seed[0], seed[1], index, position):
            key = jax.random.fold_in(key, part)
        return jax.random.bits(key, (vocabulary,), jnp.uint32)

    bits = jax.vmap(row)(c.seed, c.sample_index, c.position)
    uniform = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, np.float32(1 - 2.0**-24))))


def log_softmax(logits: jax.Array) -> jax.Array:
    """float32 [T, V]."""
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=1, keepdims=True))


def _report(logprobs: jax.Array, tokens: jax.Array, top: int, valid: jax.Array) -> Sampled:
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    _, ids = lax.top_k(order_key(logprobs), top)
    return Sampled(tokens, chosen, ids.astype(jnp.int32), jnp.take_along_axis(logprobs, ids, axis=1), valid)


def _first_largest(x: jax.Array) -> jax.Array:
    """int32 [T]: lowest id of the largest value, compared as integers."""
    return jnp.argmax(order_key(x), axis=1).astype(jnp.int32)


def _sample_tile(logits: jax.Array, c: Controls, top: int) -> Sampled:
    processed = penalized_logits(masked_logits(logits, c), c)
    sound = jnp.all(logits < jnp.inf, axis=1)  # false for NaN too
    valid = sound & jnp.any(processed > -jnp.inf, axis=1) & jnp.all(processed < jnp.inf, axis=1)
    greedy = c.temperature <= 0
    scaled = processed / jnp.where(greedy, 1.0, c.temperature)[:, None]
    kept = kept_tokens(scaled, c)
    filtered = jnp.where(kept, scaled, -jnp.inf)
    drawn = _first_largest(jnp.where(kept, scaled + gumbel_noise(c, logits.shape[1]), -jnp.inf))
    tokens = jnp.where(greedy, _first_largest(processed), drawn)
    source = jnp.where(c.processed[:, None], jnp.where(greedy[:, None], processed, filtered), logits)
    return _report(log_softmax(source), tokens, top, valid)


def sample_tokens(logits: jax.Array, controls: Controls, top: int, row_tile: int | None) -> Sampled:
    """See the contract in `api.py`."""
    given = {f.name: getattr(controls, f.name) for f in dataclasses.fields(controls)}
    names = [name for name, value in given.items() if value is not None]

    def tile(rows: jax.Array, *parts: jax.Array) -> Sampled:
        some = dict(zip(names, parts, strict=True))
        return _sample_tile(rows, Controls(**{name: some.get(name) for name in given}), top)  # type: ignore[arg-type]

    return tile_rows(tile, row_tile, logits, *(given[name] for name in names))


def token_logprobs(logits: jax.Array, token_ids: jax.Array, top: int, row_tile: int | None) -> Sampled:
    """See the contract in `api.py`."""

    def tile(rows: jax.Array, tokens: jax.Array) -> Sampled:
        return _report(log_softmax(rows), tokens, top, jnp.all(rows < jnp.inf, axis=1))

    return tile_rows(tile, row_tile, logits, token_ids)
