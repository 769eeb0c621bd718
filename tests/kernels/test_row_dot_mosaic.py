"""The Mosaic-GPU `row_dot`, interpreted on the CPU with race detection.

What only a device can tell (the order of sums inside an instruction, registers) is checked by
`benchmarks/kernel_cases/row_dot.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.mosaic.fp8 import MAX_SCALE_BYTE, dequantize_tile
from deepinfer_jax.kernels.mosaic.quantize import quantize_rows
from deepinfer_jax.kernels.quantization import QuantTensor, quantize_dequantize_fp8
from deepinfer_jax.kernels.row_dot import row_dot, row_dot_grouped
from deepinfer_jax.kernels.row_dot.mosaic_sm90 import product
from deepinfer_jax.kernels.row_dot.shapes import PART_STEP, SPLIT_ROWS, Schedule, parts_of, schedule

from .cases import (
    BF16,
    FLOAT32_SUM,
    assert_same_bits,
    assert_within,
    bf16_normal,
    bf16_ulp,
    fp4_weight,
    fp8_weight,
    generator,
    plain_weight,
    values,
    weight_values,
)
from .reference_formats import qdq8

pytestmark = pytest.mark.interpret


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> np.ndarray:
    """Call a contract function with the interpreted kernels."""
    with interpret("sm90", detect_races=True):
        return np.asarray(function(*map(_device, operands), implementation="mosaic_gpu", **settings))


def _device(operand: Any) -> Any:
    return operand if isinstance(operand, QuantTensor) else jnp.asarray(operand)


@dataclasses.dataclass(frozen=True)
class Product:
    """One call. The names say what is special about its shape."""

    name: str
    rows: int
    outputs: int
    inputs: int
    packed: bool
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


PRODUCTS = (
    Product("micro quantised linear", 3, 64, 64, True, {"quantize_input": True}),
    Product("quantised in the kernel", 9, 64, 384, True, {"quantize_input": True}),
    Product("one block of scales", 3, 32, 32, True, {"out_dtype": np.float32}),
    Product("odd number of scale rows", 9, 96, 256, True, {"out_dtype": np.float32}),
    Product("one column", 2, 1, 96, False, {"out_dtype": np.float32}),
    Product("copies of whole 16 bytes", 2, 4, 12, False),
    Product("columns past a tile", 17, 72, 32, False),
    Product("column pieces", 5, 96, 64, False, {"column_tile": 32, "out_dtype": np.float32}),
    Product("parts in a cluster", 3, 64, 640, True),
    Product("parts in turn, several tiles", SPLIT_ROWS + 3, 64, 640, True),
    Product("two warpgroups, no parts", SPLIT_ROWS + 3, 192, 96, False),
)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_against_float64(case: Product) -> None:
    """Guards decoding, edges of tiles, order of parts and the one rounding, at every kind of shape."""
    rng = generator("mosaic row_dot", case.name)
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
    rng = generator("mosaic grouped", groups, outputs, inputs)
    x = bf16_normal(rng, 3, groups, inputs)
    w = (fp8_weight if packed else plain_weight)(rng, groups * outputs, inputs)
    y = run(row_dot_grouped, x, w)
    weight = weight_values(w).reshape(groups, outputs, inputs)
    expected = np.einsum("tgk,gnk->tgn", values(x), weight)
    magnitude = np.einsum("tgk,gnk->tgn", np.abs(values(x)), np.abs(weight))
    assert_within(y, expected, FLOAT32_SUM * magnitude + 0.5 * bf16_ulp(expected))


def _whole_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-8, 9, size=shape).astype(BF16)


@pytest.mark.parametrize(
    ("packed", "places"),
    [(True, ((2, 3), (SPLIT_ROWS + 5, 0))), (False, ((1, 0), (SPLIT_ROWS, 1)))],
    ids=["fp8", "bfloat16"],
)
def test_rows_at_every_count(packed: bool, places: tuple[tuple[int, int], ...]) -> None:
    """Guards rows against their number and position. Sums of whole numbers are exact, so every bit is known:
    any product that is left out, doubled or taken from a neighbour shows."""
    rng = generator("mosaic rows", packed)
    size = 1152
    assert parts_of(64, size) == 5  # four of two units and one of one
    x = _whole_numbers(rng, SPLIT_ROWS + 5, size)
    if packed:
        codes = _whole_numbers(rng, 64, size).astype(jnp.float8_e4m3fn).view(np.uint8)
        scale = rng.integers(126, 129, (2, size // 32)).astype(np.uint8)
        w: Any = QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8")
    else:
        w = _whole_numbers(rng, 64, size)
    expected = (values(x) @ weight_values(w).T).astype(np.float32)
    for count, start in places:
        y = run(row_dot, x[start : start + count], w, out_dtype=jnp.float32)
        assert_same_bits(y, expected[start : start + count], f"{count} rows from {start}")


@pytest.mark.parametrize(
    "plan",
    [
        Schedule(2, 128, 2, 64, 2, False),
        Schedule(1, 16, 2, 128, 2, False),
        Schedule(3, 32, 2, 64, 2, True),
        Schedule(3, 80, 1, 64, 3, False),
    ],
    ids=["parts in turn, two chunks of rows", "no parts", "unequal parts in a cluster", "unequal parts in turn"],
)
def test_schedules(plan: Schedule) -> None:
    """Guards pipelines that are shorter than K, tiles of several chunks, and parts added in turn."""
    rng = generator("mosaic schedules")
    x, w = _whole_numbers(rng, 70, 512), _whole_numbers(rng, 128, 512)
    with interpret("sm90", detect_races=True):
        y = product(jnp.asarray(x), jnp.asarray(w), 1, jnp.float32, plan)
    assert_same_bits(np.asarray(y), (values(x) @ values(w).T).astype(np.float32), str(plan))


def test_fours_that_quantise() -> None:
    """Guards blocks of four warpgroups behind one that quantises: whole numbers stay exact."""
    rng = generator("mosaic fours")
    x = _whole_numbers(rng, 5, 256)
    codes = _whole_numbers(rng, 256, 256).astype(jnp.float8_e4m3fn).view(np.uint8)
    scale = rng.integers(126, 129, (8, 8)).astype(np.uint8)
    w = QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8")
    plan = Schedule(1, 8, 4, 128, 2, False, quantizing=True)
    with interpret("sm90", detect_races=True):
        y = product(jnp.asarray(x), w, 1, jnp.float32, plan)
    assert_same_bits(np.asarray(y), (values(x) @ weight_values(w).T).astype(np.float32), str(plan))


def test_bad_rows_stay_alone() -> None:
    """Guards the other rows of a tile against a row of NaN or infinities, and rows past the end against either."""
    rng = generator("mosaic bad rows")
    x, w = bf16_normal(rng, 5, 64), fp8_weight(rng, 64, 64)
    good = run(row_dot, x, w, quantize_input=True)
    x[1, 3], x[3, 40] = np.nan, np.inf
    y = run(row_dot, x, w, quantize_input=True)
    assert_same_bits(y[[0, 2, 4]], good[[0, 2, 4]], "rows beside bad ones")
    assert np.isnan(values(y)[[1, 3]]).all()


@pytest.mark.parametrize("size", [64, 320], ids=["several rows a block", "several warps a row"])
def test_quantiser_has_the_bits_of_the_portable_one(size: int) -> None:
    """Guards scales at powers of two, ties, subnormals, the amax floor, zeros of either sign, and bad groups."""
    rng = generator("mosaic quantiser", size)
    x = rng.normal(size=(9, size)) * np.exp2(rng.integers(-130, 120, size=(9, size // 32)).repeat(32, axis=1))
    x[0, :32], x[1, :32], x[2, :8] = 0.0, 448.0, [-0.0, 449, 1e-5, 0.0195, 0.0205, 1, 2.0**-9, 1.5 * 2.0**-9]
    x[3, 5], x[4, 37], x[5, :32] = np.inf, np.nan, 1e-5
    rows = jnp.asarray(x, jnp.bfloat16)
    with interpret("sm90", detect_races=True):
        y = np.asarray(quantize_rows(rows))
    expected = np.asarray(quantize_dequantize_fp8(rows))
    bad = np.isnan(values(expected))
    assert bad.sum() == 64
    assert_same_bits(np.where(bad, 0, y), np.where(bad, 0, expected), "quantised rows")
    assert np.isnan(values(y)[bad]).all()


@pytest.mark.fast
def test_dequantiser_knows_every_code_and_scale() -> None:
    """Guards subnormal codes, signs, and scales that are too large to be right: those must give NaN."""
    codes = jnp.asarray(np.arange(64 * 128, dtype=np.int64).reshape(64, 128) * 5 % 251, jnp.uint8)
    codes = jnp.where(codes & 0x7F == 0x7F, 0, codes)
    decoded = values(np.asarray(codes).view(jnp.float8_e4m3fn))
    with interpret("sm90"):
        for scale in (11, 100, 127, MAX_SCALE_BYTE):  # from 2^-125 on: the interpreter has no subnormals
            words = jnp.full((64,), scale * 0x01010101 - (1 << 32 if scale > 127 else 0), jnp.int32)
            tile = dequantize_tile(codes, words)
            assert_same_bits(tile, (decoded * 2.0 ** (scale - 127)).astype(BF16), f"scale {scale}")
        large = dequantize_tile(codes, jnp.full((64,), MAX_SCALE_BYTE + 1, jnp.int32))
    assert np.isnan(values(large)[:, :32]).all()
    assert not np.isnan(values(large)[:, 32:]).any()


@pytest.mark.fast
def test_parts_are_a_fact_of_the_weight() -> None:
    """Guards the order of a sum: it must follow from the weight's shape, be the same at every row count, and
    divide K into whole pipeline steps."""
    expected = {
        (1280, 5120): 8, (512, 5120): 8, (32768, 1280): 1, (5120, 8192): 5, (4096, 1280): 5, (25600, 6144): 1,
        (8192, 4096): 1, (384, 5120): 8, (2304, 5120): 8, (5120, 2304): 5, (129280, 5120): 1, (64, 96): 1,
    }  # fmt: skip
    for (outputs, inputs), parts in expected.items():
        assert parts_of(outputs, inputs) == parts
        for rows in (1, 8, 33, 64, 65, 500, 4096, 100_000):
            for packed in (True, False):
                blocks = -(-outputs // 64) * 64
                plan = schedule(rows, outputs, inputs, packed=packed, parts=parts, group_outputs=blocks)
                assert plan.parts == parts
                assert parts == 1 or (inputs % PART_STEP == 0 and PART_STEP % plan.step == 0)
                assert plan.stages >= 2
    for outputs, inputs, parts in ((32768, 1280, 1), (5120, 8192, 5), (25600, 6144, 1)):
        few, many = (
            schedule(rows, outputs, inputs, packed=True, parts=parts, group_outputs=outputs, quantize=True)
            for rows in (8, 64)
        )
        assert (few.warpgroups, few.quantizing, few.step, few.stages) == (4, True, 128, 3 if outputs != 25600 else 5)
        assert (many.warpgroups, many.quantizing, many.step, many.stages) == (
            4,
            False,
            128,
            3 if outputs != 25600 else 4,
        )


def test_what_there_is_no_kernel_for() -> None:
    """Guards against a silent fallback: each refusal says what is missing."""
    rng = generator("mosaic refusals")
    x, w = bf16_normal(rng, 2, 64), fp8_weight(rng, 32, 64)
    with pytest.raises(NotImplementedError, match=r"row_dot.*compute capability"):
        row_dot(jnp.asarray(x), w, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"row_dot: mosaic_gpu multiplies bfloat16 rows"):
        run(row_dot, x.astype(np.float32), w)
    with pytest.raises(NotImplementedError, match=r"no kernel for 'fp4' weights"):
        run(row_dot, x, fp4_weight(rng, 32, 64))
    with pytest.raises(NotImplementedError, match=r"fp8 or bfloat16 weights, not float32"):
        run(row_dot, x, np.zeros((4, 64), np.float32))
    with pytest.raises(NotImplementedError, match=r"not float16"):
        run(row_dot, x, w, out_dtype=jnp.float16)
    with interpret("sm90"), pytest.raises(NotImplementedError, match=r"row_dot_grouped: .* bfloat16 rows"):
        row_dot_grouped(jnp.zeros((2, 2, 64), jnp.float32), w, implementation="mosaic_gpu")
