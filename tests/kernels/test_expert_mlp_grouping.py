"""The kernels that group few rows by expert, interpreted on the CPU with race detection, against `shapes.py`.

Memory that no kernel has written holds NaN when interpreted, so that a row of padding that reaches a result shows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.kernels.expert_mlp import ExpertRows, expert_mlp, mosaic_grouping, shapes
from deepinfer_jax.kernels.expert_mlp.repack import repack
from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.quantization import quantize_dequantize_fp8

from .base_expert_mlp import fp4_experts
from .cases import MICRO, assert_same_bits, bf16_normal, generator, values

pytestmark = pytest.mark.interpret


@functools.partial(jax.jit, static_argnums=(3, 4))
def _sort(x: Any, ids: Any, weights: Any, experts: int, quantize: bool) -> tuple[Any, Any]:
    """(what is sorted, its rows brought back to the pairs)."""
    found = mosaic_grouping.sort_rows(x, ids, weights, experts, quantize=quantize)
    return (found.rows, found.factors, found.tiles, found.count, found.position), ExpertRows(
        found.rows, found.position
    ).in_order


def check(ids: np.ndarray, experts: int, width: int, quantize: bool = True) -> None:
    """Sort random rows by `ids` and compare with the portable grouping, bit for bit."""
    rng = generator("few", *ids.shape, experts, width)
    x, weights = bf16_normal(rng, ids.shape[0], width), rng.uniform(0.1, 1, size=ids.shape).astype(np.float32)
    grouped = shapes.group_rows(jnp.asarray(ids), experts)
    operand = quantize_dequantize_fp8(jnp.asarray(x)) if quantize else jnp.asarray(x)
    expected = operand[jnp.maximum(grouped.source, 0)], shapes.sort_weights(jnp.asarray(weights), grouped)
    count = int(grouped.count[0])

    with interpret(detect_races=True):
        (rows, factors, tiles, number, position), back = jax.tree.map(
            np.asarray, _sort(x, ids, weights, experts, quantize)
        )
    assert rows.shape == expected[0].shape
    used = np.asarray(grouped.source) >= 0
    assert_same_bits((rows[used], factors[used]), tuple(np.asarray(part)[used] for part in expected), "rows")
    assert_same_bits((position, number), (grouped.position, grouped.count), "places")
    assert tiles.shape == grouped.tiles.shape
    assert_same_bits(tiles[:count], grouped.tiles[:count], "tiles")
    assert_same_bits(back, ExpertRows(expected[0], grouped.position).in_order, "rows of pairs")
    assert np.isfinite(values(back)).all()


def drawn(rows: int, choices: int, experts: int) -> np.ndarray:
    """Ascending ids of which some are no expert's and some may repeat."""
    return np.sort(generator("ids", rows, choices).integers(-1, experts + 1, (rows, choices)), axis=1).astype(np.int32)


def test_one_token() -> None:
    """Guards the released choice: six experts, each with a tile of its own."""
    check(np.array([[3, 17, 18, 200, 382, 383]], np.int32), 384, 1024)


@pytest.mark.parametrize(
    ("ids", "experts", "width", "quantize"),
    [
        (drawn(64, 2, 7), 7, 288, False),
        (np.zeros((128, 1), np.int32), 2, 64, True),
        (np.full((1, 2), 4, np.int32), 4, 32, False),
    ],
    ids=["128 pairs", "one expert", "no expert"],
)
def test_many_pairs(ids: np.ndarray, experts: int, width: int, quantize: bool) -> None:
    """Guards the most pairs, full tiles, ids without an expert, and rows that fill a part of a block or all of it."""
    check(ids, experts, width, quantize)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(-2, 4), min_size=20, max_size=20))
def test_any_ids(ids: list[int]) -> None:
    """Guards the counting: tiles of 8, 16 and 24 rows, experts without rows, ids on either side of the experts'."""
    check(np.array(ids, np.int32).reshape(10, 2), 3, 32)


def test_experts_of_few_and_of_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that a row's bits do not depend on which grouping sorted it, and that padding reaches no result."""
    rng = generator("few experts")
    packed = tuple(map(repack, fp4_experts(rng, MICRO, 3)))
    x, weights = bf16_normal(rng, 4, MICRO.hidden), rng.uniform(0.1, 1, size=(4, 2)).astype(np.float32)
    ids = np.array([[0, 2], [0, 3], [-1, 0], [0, 2]], np.int32)

    def run() -> np.ndarray:
        operands = map(jnp.asarray, (x, ids, weights))
        with interpret(detect_races=True):
            y = expert_mlp(*operands, *packed, limit=2.5, quantize_input=True, implementation="mosaic_gpu")
            return np.asarray(y.in_order)

    few = run()
    monkeypatch.setattr(mosaic_grouping, "MOST_PAIRS", 0)
    assert_same_bits(few, run(), "experts")
    assert np.isfinite(values(few)).all()
    assert not few[1, 1].any()
    assert not few[2, 0].any()


@pytest.mark.fast
def test_more_pairs_are_refused() -> None:
    """Guards against more pairs than a block has threads."""
    with pytest.raises(ValueError, match="130 pairs are more than 128"):
        mosaic_grouping.sort_rows(jnp.zeros((65, 32)), jnp.zeros((65, 2), int), jnp.zeros((65, 2)), 4, quantize=False)
