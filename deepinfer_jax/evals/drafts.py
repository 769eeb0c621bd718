"""How many drafts of DSpark the model's own greedy text would accept, measured offline.

A block is drafted at a place of a finished greedy output, from the context before that place; accepted are its first
tokens up to the one that differs from the output. Verification accepts exactly these (`spec/dspark.md` 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from deepinfer_jax.compile import jit
from deepinfer_jax.engine.implementations import choose_kernels
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import NumericsProfile, numerics_profile
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.dspark import draft_block, draft_context
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.sequence_logits import whole_sequence

ROWS = 128
"""Rows of a step."""

ANCHORS = 8
"""Blocks that are drafted together, each in a slot of its own."""


@dataclass(frozen=True)
class Anchor:
    """A place to draft at: `start` is the position of the newest token of `sequence`, a list of token ids."""

    sequence: Sequence[int]
    start: int


@functools.lru_cache(maxsize=4)
def _draft_program(config: ModelConfig, profile: NumericsProfile, kernels: Kernels) -> Callable[..., Any]:
    """(params, state, taps [T, ...], positions [T], slots [T], anchors, starts, owners, first [ANCHORS]) -> ids."""

    def run(params: Params, state: State, taps: Any, positions: Any, slots: Any, *facts: Any) -> jax.Array:
        fixed = {"config": config, "profile": profile, "kernels": kernels}
        _, state = draft_context(params, state, taps, positions, slots, **fixed)
        drafts, _ = draft_block(params, state, *facts, **fixed)
        return drafts.token_ids

    return jit(run)


class Drafter:
    """Drafts blocks for one model; compiled once for each capacity of the context."""

    def __init__(self, params: Params, kernels: Kernels | None = None) -> None:
        """Raises ValueError for a model without draft stages."""
        self.params, self.config = params, params.config
        if not self.config.has_draft:
            raise ValueError("this model has no draft stages (num_nextn_predict_layers is 0)")
        self.profile = numerics_profile(params.numerics)
        self.kernels = kernels or choose_kernels(params, self.profile)

    def taps(self, ids: Sequence[int]) -> np.ndarray:
        """What the draft stages read of every position of a sequence: [T, targets * hidden_size]."""
        calls = whole_sequence(
            self.params, np.asarray(ids, np.int32), self.profile, self.kernels, logits=False, least_pages=8
        )
        return np.concatenate([np.asarray(outputs.taps)[:count] for outputs, count in calls])

    def draft(self, anchors: Sequence[Anchor], taps: Sequence[np.ndarray]) -> np.ndarray:
        """Greedy drafts int32 [len(anchors), block] at up to ANCHORS places, from the taps of their sequences."""
        window = self.config.sliding_window
        rows = np.zeros((ANCHORS * window, taps[0].shape[1]), taps[0].dtype)
        positions, slots = np.zeros(len(rows), np.int32), np.full(len(rows), -1, np.int32)
        facts = np.zeros((4, ANCHORS), np.int32)  # anchor, start, slot, first
        facts[2] = -1
        for slot, (anchor, known) in enumerate(zip(anchors, taps, strict=True)):
            first = max(0, anchor.start - window)
            count = anchor.start - first
            place = slice(slot * window, slot * window + count)
            rows[place], positions[place], slots[place] = known[first : anchor.start], range(first, anchor.start), slot
            facts[:, slot] = anchor.sequence[anchor.start], anchor.start, slot, first
        state = init_state(self.config, self.profile, slots=ANCHORS, pages=1, row_block=ROW_TILE)
        program = _draft_program(self.config, self.profile, self.kernels)
        return np.asarray(program(self.params, state, rows, positions, slots, *facts))[: len(anchors)]

    def accepted(self, sequences: Sequence[Sequence[int]], anchors: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """(accepted drafts, drafts that could be accepted before the sequence ends) of every anchor.

        Args:
            sequences: prompts with their greedy outputs. anchors: for each, places inside the output; the token
                after an anchor is the first that a draft must equal.
        """
        block = self.config.dspark_block_size
        waiting: list[tuple[Anchor, np.ndarray]] = []
        result: list[tuple[int, int]] = []
        work = list(zip(sequences, anchors, strict=True))
        for number, (ids, places) in enumerate(work):
            taps = self.taps(ids) if len(places) else None
            waiting += [(Anchor(ids, int(place)), taps) for place in places if taps is not None]
            while len(waiting) >= ANCHORS or (waiting and number == len(work) - 1):
                now, waiting = waiting[:ANCHORS], waiting[ANCHORS:]
                drafts = self.draft([anchor for anchor, _ in now], [taps for _, taps in now])
                for (anchor, _), draft in zip(now, drafts, strict=True):
                    true = list(anchor.sequence[anchor.start + 1 : anchor.start + 1 + block])
                    equal = [int(d) == t for d, t in zip(draft, true, strict=False)]
                    result.append((equal.index(False) if False in equal else len(equal), len(true)))
        return result
