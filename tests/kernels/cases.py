"""Model sizes, random operands and bit comparisons shared by the operator tests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from deepinfer_jax import compile as compilation
from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, Kernels
from deepinfer_jax.kernels.quantization import QuantTensor

from .reference_formats import decode_fp4_rows, decode_fp8_blocks

BF16 = ml_dtypes.bfloat16
UNITS = Path(__file__).parents[1] / "data" / "units"

ROW_COUNTS = (1, 2, 17, 64, 256, 512)
"""One row; a pair; a partial second tile; whole tiles in growing number."""

DISTINCT_ROWS = 80
"""Different rows of a case; larger counts repeat them, each then at several positions."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Widths of one model."""

    name: str
    hidden: int
    heads: int
    head_dim: int
    rope: int
    q_lora: int
    o_groups: int
    o_lora: int
    window: int
    topk: int
    index_heads: int
    index_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    streams: int = 4


MICRO = Size("micro", 64, 4, 64, 16, 64, 2, 32, 8, 4, 2, 32, 4, 2, 64)
DEMO = Size("demo", 256, 8, 64, 16, 128, 2, 64, 64, 64, 4, 32, 16, 4, 64)
RELEASED = Size("released", 5120, 64, 512, 64, 1280, 8, 1024, 128, 512, 32, 128, 384, 6, 2304)


def generator(*name: object) -> np.random.Generator:
    """Random numbers that depend on the given names only."""
    return np.random.default_rng(zlib.crc32(repr(name).encode()))


def normal(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> np.ndarray:
    """float32 normal numbers whose rows differ in magnitude by up to 2^spread either way."""
    values = rng.normal(size=shape)
    magnitude = np.exp2(rng.uniform(-spread, spread, size=(shape[0], *(1,) * (len(shape) - 1))))
    return (values * magnitude).astype(np.float32)


def bf16_normal(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> np.ndarray:
    """As `normal`, rounded to bfloat16."""
    return normal(rng, *shape, spread=spread).astype(BF16)


def plain_weight(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bfloat16 weight whose products with unit rows have unit size."""
    return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(BF16)


def _scale_bytes(rng: np.random.Generator, shape: tuple[int, ...], columns: int, largest: float) -> np.ndarray:
    """e8m0 bytes that bring codes of up to `largest` to about unit products over `columns`."""
    middle = 127 - int(np.log2(largest * np.sqrt(columns) / 4))
    return rng.integers(middle - 1, middle + 2, size=shape).astype(np.uint8)


def fp8_weight(rng: np.random.Generator, rows: int, columns: int) -> QuantTensor:
    """Random FP8 weight with 32 x 32 scales; codes cover the whole finite format."""
    codes = rng.integers(0, 256, size=(rows, columns)).astype(np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # 0x7F and 0xFF are NaN
    scale = _scale_bytes(rng, (rows // 32, columns // 32), columns, 128.0)
    return QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8")


def fp4_weight(rng: np.random.Generator, *shape: int) -> QuantTensor:
    """Random packed FP4 weight [..., out, in] with 1 x 32 scales."""
    *lead, columns = shape
    data = rng.integers(0, 256, size=(*lead, columns // 2)).astype(np.uint8)
    scale = _scale_bytes(rng, (*lead, columns // 32), columns, 3.0)
    return QuantTensor(jnp.asarray(data), jnp.asarray(scale), "fp4")


def weight_values(w: Any) -> np.ndarray:
    """float64 values of a plain or packed weight, decoded by the reference."""
    if not isinstance(w, QuantTensor):
        return values(w)
    data, scale = np.asarray(w.data), np.asarray(w.scale)
    return decode_fp8_blocks(data, scale) if w.format == "fp8" else decode_fp4_rows(data, scale)


def kernels_of(op: str, implementation: Implementation | None, row_tile: int | None = ROW_TILE) -> Kernels:
    """Bundle that uses one implementation for one op."""
    return Kernels(row_tile, () if implementation is None else ((op, implementation),))


def load_unit(name: str) -> dict[str, np.ndarray]:
    """Golden unit data as written by `tools/make_unit_data.py`; bfloat16 arrays are viewed as such."""
    with np.load(UNITS / f"{name}.npz") as file:
        return {
            key.removesuffix(":bf16"): file[key].view(BF16) if key.endswith(":bf16") else file[key]
            for key in file.files
        }


def values(x: Any) -> np.ndarray:
    """float64 values of an array of any float type."""
    return np.asarray(x).astype(np.float64)


# ---- comparisons ----------------------------------------------------------------------------------


def as_bits(x: Any) -> np.ndarray:
    """The array's bytes as unsigned integers of its item size."""
    array = np.asarray(x)
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") if array.dtype != bool else array


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    """Every leaf has the same dtype, shape and bits; -0 differs from +0 and NaN equals the same NaN."""
    for number, (a, b) in enumerate(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, f"{what}: result {number} is {a.dtype}, expected {b.dtype}"
        assert a.shape == b.shape, f"{what}: result {number} is {a.shape}, expected {b.shape}"
        different = as_bits(a) != as_bits(b)
        if different.any():
            rows = np.unique(np.argwhere(different)[:, 0]) if different.ndim else np.array([0])
            first = tuple(np.argwhere(different)[0])
            raise AssertionError(
                f"{what}: result {number} differs in {int(different.sum())} of {different.size} elements, "
                f"rows {rows[:8].tolist()}; first {first}: {a[first]!r} against {b[first]!r}"
            )


def assert_within(actual: Any, expected: np.ndarray, bound: np.ndarray | float, what: str = "") -> None:
    """|actual - expected| <= bound everywhere; reports the worst excess. No NaN passes."""
    error = np.abs(values(actual) - expected)
    excess = error - np.broadcast_to(bound, error.shape)
    if not (excess <= 0).all():
        worst = np.unravel_index(np.nanargmax(np.where(np.isnan(excess), np.inf, excess)), error.shape)
        raise AssertionError(
            f"{what}: {int((~(excess <= 0)).sum())} of {error.size} elements out of tolerance; worst at {worst}: "
            f"{values(actual)[worst]} against {expected[worst]}, bound {np.broadcast_to(bound, error.shape)[worst]}"
        )


FLOAT32_SUM = 2.0**-22
"""Bound of a float32 sum's error, relative to the sum of the terms' magnitudes.

K roundings of at most 2^-24 of partial sums that grow like sqrt(K) have a root mean square below 2^-24 times the
sum of magnitudes; four times that is generous for a correct float32 product, and 100 times below what TF32 or a
bfloat16 accumulator would leave at K = 5120.
"""


def bf16_ulp(x: np.ndarray) -> np.ndarray:
    """Distance between neighbouring bfloat16 numbers at x."""
    _, exponent = np.frexp(np.abs(values(x)))
    return np.ldexp(1.0, np.maximum(exponent, -125) - 8)


# ---- independence of rows --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowCase:
    """A call whose results are rows that must not see each other.

    rows: draws T rows of every row operand. constants: draws the other operands.
    call: call(kernels, rows, constants) -> pytree of [T, ...].
    poison: turns rows into ones that hold NaN, infinities or zeros, as far as the contract allows them.
    """

    name: str
    rows: Callable[[np.random.Generator, int], tuple[Any, ...]]
    constants: Callable[[np.random.Generator], tuple[Any, ...]]
    call: Callable[[Kernels, tuple[Any, ...], tuple[Any, ...]], Any]
    poison: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]] | None = None

    def __str__(self) -> str:
        return self.name


def bad_rows(*operands: int) -> Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]]:
    """Poison for float operands with these numbers: rows of NaN, +inf, -inf, zero and huge values in turn."""
    fill = (np.nan, np.inf, -np.inf, 0.0, 1e30)

    def poison(rows: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        result = [np.array(x) for x in rows]
        for operand in operands:
            for t in range(len(result[operand])):
                result[operand][t] = fill[t % len(fill)]
        return tuple(result)

    return poison


def _take(rows: tuple[np.ndarray, ...], index: Any) -> tuple[np.ndarray, ...]:
    return tuple(x[index] for x in rows)


def _rows_of(result: Any, index: Any) -> Any:
    return jax.tree.map(lambda y: np.asarray(y)[index], result)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Operands of a case, its programs by row count, and every distinct row's result when computed alone."""

    rows: tuple[np.ndarray, ...]
    constants: tuple[Any, ...]
    programs: dict[int, Callable[..., Any]]
    alone: Any

    def call(self, index: np.ndarray) -> Any:
        """The rows of these numbers, computed together."""
        return self.programs[len(index)](_take(self.rows, index), self.constants)


def compile_all(lowered: Sequence[Any]) -> list[Any]:
    """Compile several lowered programs, as many at a time as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


@functools.lru_cache(maxsize=1)
def _prepared(case: RowCase, kernels: Kernels) -> _Prepared:
    rng = generator("rows", case.name)
    rows = tuple(np.asarray(x) for x in case.rows(rng, DISTINCT_ROWS))
    constants = jax.tree.map(jnp.asarray, case.constants(rng))
    jitted = compilation.jit(lambda r, c: case.call(kernels, r, c))
    lowered = [jitted.lower(_take(rows, np.arange(count) % DISTINCT_ROWS), constants) for count in ROW_COUNTS]
    programs: dict[int, Callable[..., Any]] = {}
    programs.update(zip(ROW_COUNTS, compile_all(lowered), strict=True))
    given = _Prepared(rows, constants, programs, None)
    alone = [jax.tree.map(np.asarray, given.call(np.array([t]))) for t in range(DISTINCT_ROWS)]
    return dataclasses.replace(given, alone=jax.tree.map(lambda *parts: np.concatenate(parts), *alone))


def check_rows_are_independent(case: RowCase, kernels: Kernels) -> None:
    """A row's bits are those it has alone, at every row count, at every position, beside any other row."""
    given = _prepared(case, kernels)
    rng = generator("order", case.name)
    for count in ROW_COUNTS:
        for index in (np.arange(count) % DISTINCT_ROWS, rng.integers(0, DISTINCT_ROWS, size=count)):
            assert_same_bits(given.call(index), _rows_of(given.alone, index), f"{case}, {count} rows {index[:8]}")
    if case.poison is not None:
        clean = _take(given.rows, np.arange(17))
        good = np.arange(17) % 3 != 0
        mixed = case.poison(clean)
        for operand, original in zip(mixed, clean, strict=True):
            operand[good] = original[good]
        beside = given.programs[17](mixed, given.constants)
        assert_same_bits(_rows_of(beside, good), _rows_of(given.alone, np.arange(17)[good]), f"{case}, beside bad rows")


def check_rows_inside_larger_program(case: RowCase, kernels: Kernels) -> None:
    """The bits survive surrounding arithmetic that a compiler could merge with the op, and a scan over calls."""
    given = _prepared(case, kernels)
    first = np.arange(17)
    operands = _take(given.rows, first)

    def larger(r: tuple[Any, ...], c: tuple[Any, ...]) -> Any:
        def step(carry: Any, slices: tuple[Any, ...]) -> tuple[Any, Any]:
            result = case.call(kernels, slices, c)
            return jax.tree.map(lambda total, y: total * 0.5 + y, carry, result), result

        result = case.call(kernels, r, c)
        other = case.call(kernels, tuple(jnp.roll(x, 5, axis=0) for x in r), c)
        used = jax.tree.map(lambda a, b: (a * 3 + 1) * (b + 2.5), result, other)
        stack = tuple(jnp.stack([x, x[::-1]]) for x in r)
        return result, other, jax.lax.scan(step, used, stack)

    inside, rolled, (_, steps) = compilation.jit(larger)(operands, given.constants)
    assert_same_bits(inside, _rows_of(given.alone, first), f"{case}, inside a larger program")
    assert_same_bits(rolled, _rows_of(given.alone, np.roll(first, 5)), f"{case}, second call of a program")
    expected = jax.tree.map(lambda y: np.stack([y[first], y[first[::-1]]]), given.alone)
    assert_same_bits(steps, expected, f"{case}, inside a scan")


# ---- gradients -------------------------------------------------------------------------------------


def check_gradients(function: Callable[..., Any], *operands: Any, step: float = 1e-2, tolerance: float = 1e-2) -> None:
    """The reverse-mode derivative along a random direction is the central difference of a random functional.

    One direction at a time for each operand, so that a wrong gradient of one cannot hide behind the others.
    step: relative to unit directions in float32, where it balances curvature against rounding.
    """
    rng = generator("gradients", *(np.shape(x) for x in operands))
    operands = tuple(jnp.asarray(x, jnp.float32) for x in operands)
    directions = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) / np.sqrt(max(x.size, 1)) for x in operands]
    shapes = jax.eval_shape(function, *operands)
    weights = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape), jnp.float32), shapes)

    def functional(*xs: jax.Array) -> jax.Array:
        return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, weights, function(*xs)))

    value = compilation.jit(functional)
    slopes = compilation.jit(jax.grad(functional, argnums=tuple(range(len(operands)))))(*operands)
    for number, (slope, direction) in enumerate(zip(slopes, directions, strict=True)):
        before, x, after = operands[:number], operands[number], operands[number + 1 :]
        ahead, behind = (float(value(*before, x + s * direction, *after)) for s in (step, -step))
        exact, numeric = float(jnp.vdot(slope, direction)), (ahead - behind) / (2 * step)
        assert np.isfinite(exact), f"gradient of operand {number} is {exact}"
        assert abs(exact - numeric) <= tolerance * max(1.0, abs(numeric)), f"operand {number}: {exact}, {numeric}"
