"""Compiled steps. A step of the engine is two launches: forward, then sample."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.sample_tokens import Controls, Sampled, sample_tokens, token_logprobs
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import Outputs, forward
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, State

FROM_DEVICE = -1
"""In `Batch.token_ids` of `forward_program`: the newest token drawn for the row's slot."""


@functools.lru_cache(maxsize=16)
def forward_program(config: ModelConfig, profile: NumericsProfile, kernels: Kernels) -> Callable[..., Any]:
    """(params, state, batch, newest int32 [slots] or None) -> (Outputs, state); the state is donated.

    With `newest`, a token id of FROM_DEVICE stands for the newest token of the row's slot, so that a step can
    be launched before the host has read the tokens of the one before.
    """

    def step(params: Params, state: State, batch: Batch, newest: jax.Array | None = None) -> tuple[Outputs, State]:
        if newest is not None:
            drawn = newest[jnp.maximum(batch.sequence, 0)]
            known = jnp.where(batch.token_ids == FROM_DEVICE, drawn, batch.token_ids)
            batch = dataclasses.replace(batch, token_ids=known)
        return forward(params, state, batch, config=config, profile=profile, kernels=kernels)

    return jit(step, donate_argnums=1)


def _by_tiles(kernels: Kernels, body: Callable[..., Sampled], rows: int, used: jax.Array, *arrays: Any) -> Sampled:
    """`body` on tiles of ROW_TILE rows, as many as are used; rows beyond hold zeros.

    On a GPU all tiles: a loop whose length is data makes the host wait there, so the caller keeps `rows` small.
    """

    def piece(start: jax.Array) -> Sampled:
        parts = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, ROW_TILE), arrays)
        return body(*parts)

    shapes = jax.eval_shape(piece, jax.ShapeDtypeStruct((), jnp.int32))
    empty = jax.tree.map(lambda s: jnp.zeros((rows, *s.shape[1:]), s.dtype), shapes)

    def step(number: jax.Array, whole: Sampled) -> Sampled:
        start = number * ROW_TILE
        return jax.tree.map(
            lambda target, value: lax.dynamic_update_slice_in_dim(target, value, start, 0), whole, piece(start)
        )

    tiles = rows // ROW_TILE if kernels.row_block else (used + ROW_TILE - 1) // ROW_TILE
    return lax.fori_loop(0, tiles, step, empty)


@functools.lru_cache(maxsize=16)
def sample_program(kernels: Kernels, top: int) -> Callable[..., tuple[Sampled, jax.Array]]:
    """(logits [L, V], newest [slots], rows [T], slots [T], controls of T rows, used) -> (Sampled, newest).

    rows: places in `logits`. slots: whose newest token the row's is (out of range = none). used: rows that
    count; T is a multiple of ROW_TILE.
    """

    def sample(
        logits: jax.Array, newest: jax.Array, rows: jax.Array, slots: jax.Array, controls: Controls, used: jax.Array
    ) -> tuple[Sampled, jax.Array]:
        def tile(places: jax.Array, some: Controls) -> Sampled:
            return kernels(sample_tokens, logits[places], some, top=top)

        drawn = _by_tiles(kernels, tile, rows.shape[0], used, rows, controls)
        return drawn, newest.at[slots].set(drawn.token_ids, mode="drop")

    return jit(sample)


@functools.lru_cache(maxsize=16)
def score_program(kernels: Kernels, top: int) -> Callable[..., Sampled]:
    """(logits [L, V], token ids int32 [L], used) -> raw log-probabilities of the tokens."""

    def score(logits: jax.Array, token_ids: jax.Array, used: jax.Array) -> Sampled:
        def tile(rows: jax.Array, ids: jax.Array) -> Sampled:
            return kernels(token_logprobs, rows, ids, top=top)

        return _by_tiles(kernels, tile, token_ids.shape[0], used, logits, token_ids)

    return jit(score)


# ---- snapshots ------------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["window", "open_groups", "lookback", "draft_window"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Rings:
    """Ring buffers of K slots: the parts of `State` that belong to a slot, with its shapes and K for its slots."""

    window: jax.Array
    open_groups: jax.Array
    lookback: jax.Array
    draft_window: jax.Array


_SLOT_AXIS = {"window": 1, "open_groups": 1, "lookback": 0, "draft_window": 1}


def empty_rings(state: State, count: int) -> Rings:
    """Room for `count` snapshots of the state's slots."""

    def like(name: str) -> jax.Array:
        leaf, axis = getattr(state, name), _SLOT_AXIS[name]
        return jnp.zeros((*leaf.shape[:axis], count, *leaf.shape[axis + 1 :]), leaf.dtype)

    return Rings(**{name: like(name) for name in _SLOT_AXIS})


def _copied(source: Any, target: Any, from_slot: jax.Array, to_slot: jax.Array) -> dict[str, jax.Array]:
    result = {}
    for name, axis in _SLOT_AXIS.items():
        one = lax.dynamic_slice_in_dim(getattr(source, name), from_slot, 1, axis)
        result[name] = lax.dynamic_update_slice_in_dim(getattr(target, name), one, to_slot, axis)
    return result


@functools.lru_cache(maxsize=1)
def save_program() -> Callable[..., Rings]:
    """(rings, state, slot, number) -> rings with the slot copied to snapshot `number`; rings are donated."""
    return jit(lambda rings, state, slot, number: Rings(**_copied(state, rings, slot, number)), donate_argnums=0)


@functools.lru_cache(maxsize=1)
def restore_program() -> Callable[..., State]:
    """(state, rings, number, slot) -> state with the snapshot in the slot; the state is donated."""

    def restore(state: State, rings: Rings, number: jax.Array, slot: jax.Array) -> State:
        return dataclasses.replace(state, **_copied(rings, state, number, slot))

    return jit(restore, donate_argnums=0)
