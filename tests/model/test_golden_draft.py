"""The draft forward against recorded results of two independent implementations.

Every step drafts after `S + 1 + j` committed tokens: the context is built from the recorded taps, so one step's
result does not depend on another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.model.dspark import Drafts, draft_block, draft_context
from deepinfer_jax.model.state import State, init_state

from .golden import Model, load_model, load_results, of_prompt

TOLERANCE = 1e-4
STEPS = 23


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


class DraftModel:
    """Compiled context and draft steps of g3_full in one mode, on one slot."""

    def __init__(self, mode: str) -> None:
        config, params = load_model("g3_full")
        profile = numerics_profile(mode)
        self.params, self.window = params, config.sliding_window

        def context(params: Any, state: State, taps: jax.Array, positions: jax.Array, sequence: jax.Array) -> Any:
            return draft_context(params, state, taps, positions, sequence, config=config, profile=profile)

        def block(params: Any, state: State, anchor: jax.Array, start: jax.Array) -> Any:
            zero = ints(0)
            return draft_block(params, state, anchor, start, zero, zero, config=config, profile=profile)

        self._context, self._block = jit(context, donate_argnums=1), jit(block, donate_argnums=1)
        self.state = init_state(config, profile, slots=1, pages=1, row_block=ROW_TILE)

    def commit(self, taps: np.ndarray, first: int) -> np.ndarray:
        """Append taps [n, 3D] at positions first, first + 1, ...; returns main_x [n, D]."""
        parts = []
        for at in range(0, len(taps), ROW_TILE):
            piece = taps[at : at + ROW_TILE]
            missing = ROW_TILE - len(piece)
            positions = np.pad(np.arange(len(piece)) + first + at, (0, missing)).astype(np.int32)
            owner = np.pad(np.zeros(len(piece), np.int32), (0, missing), constant_values=-1)
            values = jnp.asarray(np.pad(piece, ((0, missing), (0, 0))))
            main, self.state = self._context(self.params, self.state, values, positions, owner)
            parts.append(np.asarray(main)[: len(piece)])
        return np.concatenate(parts)

    def draft(self, anchor: int, start: int) -> Drafts:
        """Drafts after the anchor at position start; arrays without the sequence axis."""
        drafts, self.state = self._block(self.params, self.state, ints(anchor), ints(start))
        return jax.tree.map(lambda x: np.asarray(x)[0], drafts)


@pytest.fixture(scope="module", params=["f32_noq", "f32_kvq"])
def draft_model(request: pytest.FixtureRequest) -> tuple[str, DraftModel]:
    return request.param, DraftModel(request.param)


@pytest.mark.parametrize("prompt", ["p7", "p33"])
def test_drafts(draft_model: tuple[str, DraftModel], prompt: str) -> None:
    """Anchor, window, rope position, Markov order and confidence input each fail here when off by one."""
    mode, model = draft_model
    want = of_prompt(of_prompt(load_results("g3_full", "dspark"), mode), prompt)
    length = len(want["taps"]) - STEPS
    model.commit(want["taps"][:length].astype(np.float32), 0)
    errors = []
    for step in range(STEPS):
        main = model.commit(want["taps"][length + step : length + step + 1].astype(np.float32), length + step)
        assert np.abs(main[0] - want["main_x"][step]).max() <= TOLERANCE
        start = int(want["anchor_pos"][step])
        assert start == length + 1 + step
        got = model.draft(int(want["greedy_ids"][step + 1]), start)
        assert got.token_ids.tolist() == want["draft_ids"][step, 1:].tolist(), f"drafts of step {step}"
        differences = [
            np.abs(got.hidden - want["hidden"][step]).max(),
            np.abs(got.confidence - want["confidence_raw"][step]).max(),
        ]
        if step < len(want["logits"]):
            differences.append(np.abs(got.logits - want["logits"][step]).max())
        if step < len(want.get("base_logits", ())):
            differences.append(np.abs(got.base_logits - want["base_logits"][step]).max())
        errors.append(float(max(differences)))
    beyond = [step for step, error in enumerate(errors) if error > TOLERANCE]
    if mode == "f32_noq":
        assert not beyond
    elif beyond:
        # An error of 1e-7 may move one FP8 code of a context key to its neighbour. The key stays in sight for one
        # window of steps, and one code changes little; anything else is a mistake.
        assert beyond[-1] - beyond[0] < model.window
        assert max(errors) < 0.02


def test_taps_of_the_backbone(golden_model: Callable[[str, str], Model]) -> None:
    """Taps are taken at the entry of the target layers, after Engram, for every decoder row."""
    want = of_prompt(of_prompt(load_results("g3_full", "dspark"), "f32_noq"), "p33")
    ids = of_prompt(load_results("g3_full", "f32_noq"), "p33")["input_ids"]
    run = golden_model("g3_full", "f32_noq").prefill(ids)
    assert np.abs(run.taps - want["taps"][: len(ids)]).max() <= TOLERANCE
