"""The golden results notice a broken rule: one field of the configuration changed, the weights kept.

Each change moves the logits of the 64-token prompt as far as it moved them in another implementation, to the digits
that are recorded: the broken rules, too, are computed alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.model.config import ModelConfig

from .golden import Model, load_model, load_results, of_prompt, recorded_mutations

pytestmark = pytest.mark.long

NAME, MODE, PROMPT = "g1_attn", "f32_noq", "p64"
TOLERANCE = 1e-4  # of the tests in `test_golden_forward.py`


def without_yarn(config: ModelConfig) -> dict[str, Any]:
    return {"rope_scaling": dataclasses.replace(config.rope_scaling, factor=1.0)}


CHANGES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "window size +1": lambda c: {"sliding_window": c.sliding_window + 1},
    "window size -1": lambda c: {"sliding_window": c.sliding_window - 1},
    "YaRN off": without_yarn,
    "compress theta = rope_theta": lambda c: {"compress_rope_theta": c.rope_theta},
    "candidate mask off": lambda c: {"candidate_topk_blocks": 64 // c.candidate_block_size},
    "candidate blocks +1": lambda c: {"candidate_topk_blocks": c.candidate_topk_blocks + 1},
    "index_topk +1": lambda c: {"index_topk": c.index_topk + 1},
    "swiglu clamp off": lambda c: {"swiglu_limit": 1e30},
    "route_scale 1.0": lambda c: {"routed_scaling_factor": 1.0},
    "norm_topk_prob off": lambda c: {"norm_topk_prob": False},
    "sinkhorn 19 iters": lambda c: {"hc_sinkhorn_iters": 19},
    "sinkhorn 3 iters": lambda c: {"hc_sinkhorn_iters": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_broken_rule_changes_the_logits(name: str, golden_model: Callable[[str, str], Model]) -> None:
    """Guards the golden tests: a rule that could be broken without leaving TOLERANCE would not be tested at all."""
    ids = of_prompt(load_results(NAME, MODE), PROMPT)["input_ids"]
    right = golden_model(NAME, MODE).prefill(ids).logits
    broken = Model(NAME, MODE, **CHANGES[name](load_model(NAME)[0])).prefill(ids).logits
    change = float(np.abs(broken - right).max())
    assert change > 2 * TOLERANCE
    assert change == pytest.approx(recorded_mutations()[name], abs=3e-4)
