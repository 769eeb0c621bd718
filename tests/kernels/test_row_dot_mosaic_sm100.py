"""The Mosaic-GPU `row_dot` for Blackwell, interpreted on the CPU with race detection.

The interpreter knows this kernel's products, tensor memory, barriers and copies. What only a device can tell (the
order of sums inside an instruction, registers) is checked by `benchmarks/kernel_cases/row_dot.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.kernels.row_dot import mosaic_sm100, row_dot, row_dot_grouped
from deepinfer_jax.kernels.row_dot.shapes import SPLIT_ROWS
from deepinfer_jax.kernels.row_dot.shapes_sm100 import RING, ROWS, Schedule, parts_of, schedule

from .cases import (
    BF16,
    FLOAT32_SUM,
    assert_same_bits,
    assert_within,
    bf16_normal,
    bf16_ulp,
    fp8_weight,
    generator,
    plain_weight,
    values,
    weight_values,
)
from .reference_formats import qdq8
from .test_row_dot_mosaic import Product

pytestmark = pytest.mark.interpret

PRODUCTS = (
    Product("quantised in the kernel", 9, 64, 384, True, {"quantize_input": True}),
    Product("quantised in a cluster", 9, 96, 256, True, {"quantize_input": True, "out_dtype": np.float32}),
    Product("quantised before", 3, 64, 64, True, {"quantize_input": True}),
    Product("one column", 2, 1, 96, False, {"out_dtype": np.float32}),
    Product("copies of whole 16 bytes", 2, 4, 12, False),
    Product("columns past a tile, in pieces", 17, 144, 32, False, {"column_tile": 48}),
    Product("parts in a cluster, several chunks", 40, 72, 256, False, {"out_dtype": np.float32}),
    Product("parts in turn, several tiles", SPLIT_ROWS + 3, 64, 512, True),
)


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> np.ndarray:
    """Call a contract function with the interpreted kernels."""
    device = [operand if isinstance(operand, QuantTensor) else jnp.asarray(operand) for operand in operands]
    with interpret("sm100", detect_races=True):
        return np.asarray(function(*device, implementation="mosaic_gpu", **settings))


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_against_float64(case: Product) -> None:
    """Guards decoding, edges of tiles, order of parts and the one rounding, at every kind of shape."""
    rng = generator("mosaic sm100 row_dot", case.name)
    x = bf16_normal(rng, case.rows, case.inputs)
    w = (fp8_weight if case.packed else plain_weight)(rng, case.outputs, case.inputs)
    y = run(row_dot, x, w, **case.settings)
    operand = qdq8(values(x)) if case.settings.get("quantize_input") else values(x)
    expected = operand @ weight_values(w).T
    bound = FLOAT32_SUM * (np.abs(operand) @ np.abs(weight_values(w)).T)
    assert y.dtype == case.settings.get("out_dtype", BF16)
    if y.dtype == BF16:
        bound = bound + 0.5 * bf16_ulp(expected)
    assert_within(y, expected, bound, case.name)


@pytest.mark.parametrize(
    ("groups", "outputs", "inputs", "packed"),
    [(2, 32, 128, True), (2, 8, 32, False)],
    ids=["micro", "K below a tile"],
)
def test_grouped_against_float64(groups: int, outputs: int, inputs: int, packed: bool) -> None:
    """Guards weight rows, scales and columns of x that belong to another group."""
    rng = generator("mosaic sm100 grouped", groups, outputs, inputs)
    x = bf16_normal(rng, 3, groups, inputs)
    w = (fp8_weight if packed else plain_weight)(rng, groups * outputs, inputs)
    y = run(row_dot_grouped, x, w)
    weight = weight_values(w).reshape(groups, outputs, inputs)
    expected = np.einsum("tgk,gnk->tgn", values(x), weight)
    magnitude = np.einsum("tgk,gnk->tgn", np.abs(values(x)), np.abs(weight))
    assert_within(y, expected, FLOAT32_SUM * magnitude + 0.5 * bf16_ulp(expected))


def _whole_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, size=shape).astype(BF16)


def _whole_weight(rng: np.random.Generator, outputs: int, inputs: int) -> QuantTensor:
    codes = _whole_numbers(rng, outputs, inputs).astype(jnp.float8_e4m3fn).view(np.uint8)
    scale = rng.integers(126, 129, (outputs // 32, inputs // 32)).astype(np.uint8)
    return QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8")


@pytest.mark.parametrize(
    ("packed", "places"),
    [(True, ((1, 3), (SPLIT_ROWS + 5, 0))), (False, ((2, 0), (SPLIT_ROWS, 1)))],
    ids=["fp8", "bfloat16"],
)
def test_rows_at_every_count(packed: bool, places: tuple[tuple[int, int], ...]) -> None:
    """Guards rows against their number and position. Sums of whole numbers are exact, so every bit is known:
    any product that is left out, doubled or taken from a neighbour shows."""
    rng = generator("mosaic sm100 rows", packed)
    x = _whole_numbers(rng, SPLIT_ROWS + 5, 256)
    w: Any = _whole_weight(rng, 64, 256) if packed else _whole_numbers(rng, 64, 256)
    expected = (values(x) @ weight_values(w).T).astype(np.float32)
    for count, start in places:
        y = run(row_dot, x[start : start + count], w, out_dtype=jnp.float32)
        assert_same_bits(y, expected[start : start + count], f"{count} rows from {start}")


@pytest.mark.parametrize(
    ("plan", "packed"),
    [
        (Schedule(1, 16, 128, 2, False, quantizing=True), True),
        (Schedule(2, 64, 64, 3, False), True),
        (Schedule(4, 64, 64, 2, False), False),
    ],
    ids=["quantising", "two parts", "four parts"],
)
def test_tiles_in_turn(plan: Schedule, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a block's second and third tile: pipeline slots, accumulators and results that are still in use."""
    monkeypatch.setattr(mosaic_sm100, "PROCESSORS", 1)
    rng = generator("mosaic sm100 turns", plan)
    rows, outputs = (41, 64) if plan.tokens == 16 else (67, 192)
    x = _whole_numbers(rng, rows, 256)
    w: Any = _whole_weight(rng, outputs, 256) if packed else _whole_numbers(rng, outputs, 256)
    with interpret("sm100", detect_races=True):
        y = mosaic_sm100.product(jnp.asarray(x), w if packed else jnp.asarray(w), 1, jnp.float32, plan)
    assert_same_bits(np.asarray(y), (values(x) @ weight_values(w).T).astype(np.float32), str(plan))


def test_bad_rows_stay_alone() -> None:
    """Guards the other rows of a tile against a row of NaN or infinities, and rows past the end against either."""
    rng = generator("mosaic sm100 bad rows")
    x, w = bf16_normal(rng, 5, 128), fp8_weight(rng, 64, 128)
    good = run(row_dot, x, w, quantize_input=True)
    x[1, 3], x[3, 40] = np.nan, np.inf
    y = run(row_dot, x, w, quantize_input=True)
    assert_same_bits(y[[0, 2, 4]], good[[0, 2, 4]], "rows beside bad ones")
    assert np.isnan(values(y)[[1, 3]]).all()


@pytest.mark.fast
def test_parts_are_a_fact_of_the_weight() -> None:
    """Guards the order of a sum, which must be the same at every row count, and the room in a processor."""
    shapes = (
        (1280, 5120), (512, 5120), (32768, 1280), (5120, 8192), (4096, 1280), (25600, 6144), (8192, 4096),
        (384, 5120), (32, 5120), (2304, 5120), (5120, 2304), (129280, 5120), (64, 128), (1, 64), (16384, 5120),
    )  # fmt: skip
    for outputs, inputs in shapes:
        for parts in {1, parts_of(outputs, inputs)}:
            for rows in (1, 8, 33, 64, 65, 300, 500, 4096, 100_000):
                for packed, out_size, quantize in (
                    (True, 2, True),
                    (True, 4, False),
                    (False, 2, True),
                    (False, 4, False),
                ):
                    plan = schedule(
                        rows, outputs, inputs, packed=packed, parts=parts, out_size=out_size, quantize=quantize
                    )
                    assert plan.parts == parts
                    assert inputs % (plan.step * parts) == 0
                    assert plan.stages >= 2
                    assert plan.tensor_columns * plan.resident <= 512
                    stage = ROWS * plan.step * (1 if packed else 2) + 2 * plan.step * plan.tokens
                    chunks = min(2, plan.tokens // plan.chunk) * plan.chunk * ROWS * out_size
                    used = plan.stages * stage + chunks + (RING * ROWS * plan.step * 2 if packed else 0)
                    # 228 KiB a processor and 227 a block; a block's own kibibyte, barriers and alignment.
                    assert plan.resident * (used + 4096) <= 228 * 1024, plan
    few, some = (
        schedule(8, outputs, inputs, packed=True, parts=parts_of(outputs, inputs), out_size=2, quantize=True)
        for outputs, inputs in ((1280, 5120), (5120, 8192))
    )
    assert (few.quantizing, few.step, few.clustered, few.resident) == (True, 128, True, 1)
    assert (some.quantizing, some.step, some.clustered, some.resident) == (False, 64, True, 2)
