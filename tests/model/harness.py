"""Runs schedules of chunks through `forward`, on a state whose every byte starts as poison."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batching import Chunk, Replay, make_batch
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.init import init_params
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE, State, init_state

MAX_DRAFT = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one compiled program: rows, slots, pages of a sequence, pages in all."""

    rows: int = 48
    slots: int = 3
    sequence_pages: int = 4
    pages: int = 13


@functools.cache
def micro_params() -> Params:
    """The micro configuration with random weights."""
    return init_params(ModelConfig.micro(), jax.random.key(7))


def poison(state: State) -> State:
    """Fill everything with NaN patterns (0xFF is NaN in e4m3 and in e8m0) and wild token ids."""

    def fill(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint8:
            return jnp.full(x.shape, 255, x.dtype)
        if x.dtype == jnp.int32:
            return jnp.full(x.shape, 5, x.dtype)
        return jnp.full(x.shape, jnp.nan, x.dtype)

    return jax.tree.map(fill, state)


@functools.cache
def program(config: ModelConfig, profile: NumericsProfile, captures: frozenset[str]) -> Callable[..., Any]:
    """The jitted step; shapes are taken from its arguments."""

    def step(params: Params, state: State, batch: Any) -> tuple[Any, State]:
        return forward(params, state, batch, config=config, profile=profile, captures=captures)

    return jit(step, donate_argnums=1)


class Runner:
    """One state and the host bookkeeping that goes with it."""

    def __init__(
        self,
        profile: NumericsProfile,
        shape: Shape,
        page_table: np.ndarray,
        params: Params | None = None,
        captures: Sequence[str] = (),
        replay: Replay = "none",
    ) -> None:
        self.params = params if params is not None else micro_params()
        self.config = self.params.config
        self.shape, self.page_table, self.replay = shape, page_table, replay
        self.step = program(self.config, profile, frozenset(captures))
        self.state = poison(
            init_state(
                self.config, profile, slots=shape.slots, pages=shape.pages, row_block=ROW_TILE, max_draft=MAX_DRAFT
            )
        )

    def run(self, chunks: Sequence[Chunk]) -> Any:
        """Process chunks in one call; returns Outputs with NumPy arrays."""
        batch = make_batch(self.config, chunks, self.page_table, rows=self.shape.rows, replay=self.replay)
        outputs, self.state = self.step(self.params, self.state, batch)
        return jax.tree.map(np.asarray, outputs)


def page_tables(shape: Shape, order: Sequence[int]) -> np.ndarray:
    """Page table [slots, sequence_pages] handing out pages in the given order."""
    count = shape.slots * shape.sequence_pages
    assert count <= len(order)
    return np.asarray(order[:count], np.int32).reshape(shape.slots, shape.sequence_pages)


def plain_tables(shape: Shape) -> np.ndarray:
    return page_tables(shape, range(shape.pages))


def one_shot(profile: NumericsProfile, ids: Sequence[int], image: Sequence[bool] = ()) -> np.ndarray:
    """Logits [T, V] of one sequence alone, in chunks as large as the program allows."""
    shape = Shape()
    runner = Runner(profile, shape, plain_tables(shape))
    parts = []
    for start in range(0, len(ids), shape.rows):
        piece = list(ids[start : start + shape.rows])
        mask = tuple(image[start : start + shape.rows])
        chunk = Chunk(0, start, piece, len(ids), "all", mask)
        parts.append(runner.run([chunk]).logits[: len(piece)])
    return np.concatenate(parts)


def bits(x: np.ndarray) -> np.ndarray:
    """Bit patterns, so that NaN and signed zero count."""
    return np.ascontiguousarray(x).view(np.uint32)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Fail with the first row that differs; poison that leaked shows up as NaN."""
    assert np.isfinite(want).all(), f"{what}: the reference itself is not finite"
    if got.shape == want.shape and (bits(got) == bits(want)).all():
        return
    rows = np.flatnonzero((bits(got) != bits(want)).reshape(len(got), -1).any(axis=1))
    raise AssertionError(f"{what}: rows {rows[:8].tolist()} of {len(got)} differ; got {got[rows[0]].ravel()[:4]}")


MAX_TOKENS = 4 * PAGE
