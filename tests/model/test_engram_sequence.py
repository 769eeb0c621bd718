"""Engram hashing along a sequence: look-back over call borders and image spans (`spec/blocks.md` 1.5, 1.8).

The released constants are checked in `tests/kernels/test_golden_tables.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.batching import Chunk, make_batch
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram import hash_rows, remember_tokens
from deepinfer_jax.model.engram_hash import bucket_primes, multipliers
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, State, init_state

from ..kernels import reference  # noqa: TID252 - tests are not an installed package
from .harness import MAX_DRAFT, captured_run, poison

CONFIG = ModelConfig.micro()
LAYERS = CONFIG.engram_layer_ids
SIZE = CONFIG.engram_max_ngram_size
ROWS, SLOTS = 32, 3
TABLE = np.zeros((SLOTS, 1), np.int32)
CLASSES = np.random.default_rng(2).integers(0, CONFIG.engram_compressed_vocab_size, CONFIG.vocab_size)
"""Class of each token id; several ids share one."""


def expected_rows(ids: list[int], image: list[bool], classes: np.ndarray = CLASSES) -> np.ndarray:
    """Table rows [T, layers, columns] in unbounded integers."""
    windows = reference.engram_windows(classes[ids].tolist(), image, SIZE, int(classes[CONFIG.engram_pad_token_id]))
    layers = []
    for which, layer in enumerate(LAYERS):
        primes = primes_of(which)
        factors = multipliers(layer, SIZE, CONFIG.engram_compressed_vocab_size)
        layers.append(reference.engram_hash(windows, factors, primes, np.concatenate([[0], np.cumsum(primes)[:-1]])))
    return np.stack(layers, axis=1)


def primes_of(which: int) -> tuple[int, ...]:
    return bucket_primes(len(LAYERS), SIZE - 1, CONFIG.engram_n_heads, CONFIG.engram_vocab_size)[which]


@functools.cache
def program() -> Any:
    """(state, batch) -> (table rows [layers, R, columns], new state)."""
    setting = Setting(CONFIG, REFERENCE, Kernels(), LOCAL_EXCHANGE)

    def step(token_map: jax.Array, state: State, batch: Batch) -> tuple[jax.Array, State]:
        nothing: Any = None
        params = Params(CONFIG, nothing, nothing, nothing, (), token_map, (), {})
        return hash_rows(setting, params, batch, state), remember_tokens(batch, state)

    return jit(step)


class Hasher:
    """A state whose look-back starts with wild token ids."""

    def __init__(self) -> None:
        state = init_state(CONFIG, REFERENCE, slots=SLOTS, pages=1, row_block=ROW_TILE, max_draft=MAX_DRAFT)
        self.state = poison(state)

    def run(self, chunks: list[Chunk]) -> np.ndarray:
        """Table rows [R, layers, columns] of one call."""
        batch = make_batch(CONFIG, chunks, TABLE, rows=ROWS, replay="none")
        rows, self.state = program()(CLASSES.astype(np.int32), self.state, batch)
        return np.asarray(rows).swapaxes(0, 1)


TOKENS = st.integers(0, CONFIG.vocab_size - 1)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    ids = draw(st.lists(TOKENS, min_size=1, max_size=24))
    image = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    text_only = draw(st.booleans())
    return ids, [False] * len(ids) if text_only else image


@settings(max_examples=150)
@given(data=st.data(), both=st.tuples(sequences(), sequences()), slots=st.permutations(list(range(SLOTS))))
def test_any_schedule(data: st.DataObject, both: tuple, slots: list[int]) -> None:
    """Splits, neighbours, slots, image spans and rejected rows must not show in any row's table rows."""
    hasher = Hasher()
    done = [0, 0]
    found: list[list[np.ndarray]] = [[], []]
    while any(done[i] < len(both[i][0]) for i in range(2)):
        chunks, taken = [], []
        left = [i for i in range(2) if done[i] < len(both[i][0])]
        for i in data.draw(st.sampled_from([left, left[::-1], left[:1], left[-1:]])):
            ids, image = both[i]
            size = data.draw(st.integers(1, min(len(ids) - done[i], 12)))
            junk = data.draw(st.lists(TOKENS, max_size=MAX_DRAFT))
            stop = done[i] + size
            piece, mask = [*ids[done[i] : stop], *junk], [*image[done[i] : stop], *[False] * len(junk)]
            chunks.append(Chunk(slots[i], done[i], piece, len(ids), "none", mask))
            taken.append((i, size, len(junk)))
            done[i] = stop
        rows = hasher.run(chunks)
        at = 0
        for i, size, extra in taken:
            found[i].append(rows[at : at + size])
            at += size + extra
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate(found[i]), expected_rows(*both[i]))


def test_every_split_of_a_sequence() -> None:
    """8.3.1: chunked equals unchunked at each of the places where a look-back of three tokens crosses the border."""
    rng = np.random.default_rng(12)
    ids = rng.integers(0, 92, 12).tolist()
    image = [i in (4, 8, 9) for i in range(12)]
    want = expected_rows(ids, image)
    for split in range(1, 12):
        hasher = Hasher()
        first = hasher.run([Chunk(1, 0, ids[:split], 12, "none", image[:split])])[:split]
        second = hasher.run([Chunk(1, split, ids[split:], 12, "none", image[split:])])[: 12 - split]
        np.testing.assert_array_equal(np.concatenate([first, second]), want, err_msg=f"split at {split}")


def test_equal_windows_give_equal_rows() -> None:
    """8.3.1: equal last four tokens, or tokens of equal classes, read the same memory, each in its column's bucket."""
    twin = {int(c): np.flatnonzero(c == CLASSES) for c in CLASSES}
    pairs = [ids for ids in twin.values() if len(ids) > 1]
    first = [int(ids[0]) for ids in pairs[:4]]
    second = [int(ids[1]) for ids in pairs[:4]]
    ids = [7, 9, *first, 30, *second, 41, 50, *first]
    rows = Hasher().run([Chunk(0, 0, ids, len(ids), "none")])[: len(ids)]
    ends = (5, 10, 16)
    assert (rows[ends[0]] == rows[ends[1]]).all()
    assert (rows[ends[0]] == rows[ends[2]]).all()
    orders = rows.reshape(len(ids), len(LAYERS), SIZE - 1, -1)
    assert (orders[4, :, :2] == orders[9, :, :2]).all()  # three equal tokens: 2-grams and 3-grams
    assert (orders[4, :, 2] != orders[9, :, 2]).any()
    for which in range(len(LAYERS)):
        primes = np.array(primes_of(which))
        offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
        assert (rows[:, which] >= offsets).all()
        assert (rows[:, which] < offsets + primes).all()


@pytest.mark.parametrize("image", [(), range(5, 11)], ids=["text", "image"])
def test_model_reads_these_rows(image: Any) -> None:
    """The whole model hands each Engram layer its own table rows (default map: id modulo classes)."""
    ids = np.random.default_rng(6).integers(0, 92, 30).tolist()
    mask = [p in image for p in range(30)]
    rows = captured_run(ids, image=mask)[1]["engram_rows"]
    classes = np.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
    want = expected_rows(ids, mask, classes)
    for which, layer in enumerate(LAYERS):
        np.testing.assert_array_equal(rows[layer], want[:, which])
