"""What the layers pass along: static choices, the rows of a block, and the values in motion."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.exchange import Exchange
from deepinfer_jax.model.state import Batch, State

CAPTURES = (
    "streams",
    "pre",
    "attention_input",
    "attention_output",
    "ffn_input",
    "ffn_output",
    "router_ids",
    "router_weights",
    "index_scores",
    "selection",
    "candidates",
    "engram_rows",
    "engram_gate",
)
"""Names that `forward(captures=...)` takes. Arrays are [layers, R, ...]; "streams" and "pre" have one
more layer: what leaves the last one. Rows that a layer did not process stay zero."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Static arguments of a forward pass."""

    config: ModelConfig
    profile: NumericsProfile
    kernels: Kernels
    exchange: Exchange
    captures: frozenset[str] = frozenset()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["number", "positions", "sequence", "image", "page_ids", "window_start", "encoder_start", "page_start"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Facts of some rows: number in the call (int32, out of range = padding), position, slot (-1 =
    padding), image flag, pages of the row's sequence [T, P], first valid window positions of decoder and
    encoder layers, first position that appends to pages."""

    number: jax.Array
    positions: jax.Array
    sequence: jax.Array
    image: jax.Array
    page_ids: jax.Array
    window_start: jax.Array
    encoder_start: jax.Array
    page_start: jax.Array

    @property
    def valid(self) -> jax.Array:
        return self.sequence >= 0

    @property
    def read_slot(self) -> jax.Array:
        """Slot to read; padding reads slot 0 and its result is never used."""
        return jnp.maximum(self.sequence, 0)

    def write_slot(self, slots: int) -> jax.Array:
        """Slot to write; padding gets an index that scatters drop."""
        return jnp.where(self.valid, self.sequence, slots)


def rows_of(batch: Batch, numbers: jax.Array) -> Rows:
    """Facts of the rows with the given numbers; a number < 0 is padding."""
    count = batch.token_ids.shape[0]
    safe = jnp.maximum(numbers, 0)
    sequence = jnp.where(numbers >= 0, batch.sequence[safe], -1)
    slot = jnp.maximum(sequence, 0)
    return Rows(
        number=jnp.where(sequence >= 0, safe, count),
        positions=batch.positions[safe],
        sequence=sequence,
        image=batch.image_mask[safe],
        page_ids=batch.page_table[slot],
        window_start=batch.window_start[slot],
        encoder_start=batch.encoder_start[slot],
        page_start=batch.page_start[slot],
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["streams", "pre", "selection", "candidates", "taps", "captured", "state"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Flow:
    """Values in motion over the rows of an encoder or decoder pass (T of them).

    streams: [T, C, D]. pre: float32 [T, C], collapse weights that the previous sublayer predicted.
    selection: int32 [T, K], entries chosen by the newest index source. candidates: bool [T, blocks].
    taps: [targets, T, D] for the draft. captured: name -> [layers, R, ...].
    """

    streams: jax.Array
    pre: jax.Array
    selection: jax.Array
    candidates: jax.Array
    taps: jax.Array
    captured: dict[str, jax.Array]
    state: State

    def capture(self, setting: Setting, name: str, layer: jax.Array, rows: Rows, value: jax.Array) -> Flow:
        """Record a value of these rows if it was asked for."""
        if name not in setting.captures:
            return self
        buffer = self.captured[name]
        wider = buffer.shape[-1] - value.shape[-1]  # index scores: room for the larger of two caches
        value = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, wider)])
        buffer = buffer.at[layer, rows.number].set(value, mode="drop")
        return dataclasses.replace(self, captured={**self.captured, name: buffer})
