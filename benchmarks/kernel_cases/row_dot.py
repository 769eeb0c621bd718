"""`row_dot` at the released shapes: FP8 linears, plain products, and the grouped output projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases import Case, Check, CompileCase
from deepinfer_jax.kernels.mosaic import architecture
from deepinfer_jax.kernels.mosaic.quantize import quantize_rows
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor, dequantize, quantize_dequantize_fp8
from deepinfer_jax.kernels.row_dot import mosaic_sm90, mosaic_sm100, row_dot, row_dot_grouped, shapes_sm100
from deepinfer_jax.kernels.row_dot.shapes import Schedule

OP = "row_dot"


@dataclasses.dataclass(frozen=True)
class Linear:
    """One weight of the released model. groups > 1: the grouped projection, whose rows are not quantised."""

    name: str
    outputs: int
    inputs: int
    packed: bool = True
    quantize: bool = True
    out_dtype: Any = jnp.bfloat16
    groups: int = 1
    column_tile: int | None = None

    def function(self, implementation: str, row_tile: int | None) -> Callable[..., Any]:
        """f(x, w) of the contract."""
        chosen: dict[str, Any] = {"implementation": implementation, "row_tile": row_tile}
        if self.groups > 1:
            return functools.partial(row_dot_grouped, **chosen)
        return functools.partial(
            row_dot,
            quantize_input=self.quantize,
            out_dtype=self.out_dtype,
            column_tile=self.column_tile,
            **chosen,
        )

    def rows_shape(self, rows: int) -> tuple[int, ...]:
        return (rows, self.inputs) if self.groups == 1 else (rows, self.groups, self.inputs)

    def bytes(self, rows: int) -> int:
        """Of one call: weight, rows and result once each."""
        weight = self.outputs * self.inputs * (1 if self.packed else 2)
        return weight + rows * (self.groups * self.inputs * 2 + self.outputs * jnp.dtype(self.out_dtype).itemsize)

    def flop(self, rows: int) -> int:
        return 2 * rows * self.outputs * self.inputs


LINEARS = (
    Linear("wq_a", 1280, 5120),
    Linear("wkv", 512, 5120),
    Linear("wq_b", 32768, 1280),
    Linear("wo_b", 5120, 8192),
    Linear("indexer.wq_b", 4096, 1280),
    Linear("engram.wkv", 25600, 6144),
    Linear("wo_a", 8192, 4096, quantize=False, groups=8),
    Linear("gate", 384, 5120, packed=False, quantize=False, out_dtype=jnp.float32),
    Linear("compressor.wkv", 512, 5120, packed=False, quantize=False, out_dtype=jnp.float32),
    Linear("weights_proj", 32, 5120, packed=False, quantize=False),
    Linear("head", 129280, 5120, packed=False, quantize=False, out_dtype=jnp.float32, column_tile=505),
)
SMALL = (
    Linear("one block of scales", 32, 32, quantize=False),
    Linear("micro quantised", 64, 64),
    Linear("odd scale rows", 96, 256, out_dtype=jnp.float32),
    Linear("one column", 1, 96, packed=False, quantize=False, out_dtype=jnp.float32),
    Linear("short copies", 4, 12, packed=False, quantize=False),
    Linear("columns past a tile", 72, 32, packed=False, quantize=False),
    Linear("odd columns", 27, 160, packed=False, quantize=False),
    Linear("demo head", 3072, 256, packed=False, quantize=False, out_dtype=jnp.float32, column_tile=384),
    Linear("micro wo_a", 64, 128, quantize=False, groups=2),
    Linear("groups of few columns", 16, 32, packed=False, quantize=False, groups=2),
)
"""Shapes of small models, which need zeros appended somewhere."""

QUICK = ("wq_a", "wq_b", "wo_b", "wo_a", "gate", "head")


def _rows(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _weight(linear: Linear, seed: int = 1) -> Any:
    shape = (linear.outputs, linear.inputs)
    if not linear.packed:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    codes = jax.random.bits(jax.random.key(seed), shape, jnp.uint8)
    codes = jnp.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # 0x7F and 0xFF are NaN
    scale = jax.random.randint(jax.random.key(seed + 1), (shape[0] // GROUP, shape[1] // GROUP), 114, 121)
    return QuantTensor(codes, scale.astype(jnp.uint8), "fp8")


def _make(linear: Linear, rows: int, implementation: str, row_tile: int | None) -> tuple[Callable[..., Any], Any]:
    arguments = _rows(linear.rows_shape(rows)), _weight(linear)
    return linear.function(implementation, row_tile), arguments


def _reference(linear: Linear, x: jax.Array, w: Any) -> jax.Array:
    """float32 products of the exact operands."""
    if linear.quantize:
        x = quantize_dequantize_fp8(x)
    values = (dequantize(w) if isinstance(w, QuantTensor) else w).astype(jnp.float32)
    rows = x.astype(jnp.float32)
    if linear.groups > 1:
        values = values.reshape(linear.groups, -1, linear.inputs)
        return jnp.einsum("tgk,gnk->tgn", rows, values, precision=lax.Precision.HIGHEST)
    return jnp.matmul(rows, values.T, precision=lax.Precision.HIGHEST)


def _counts(linear: Linear, quick: bool) -> Iterator[int]:
    counts = (8, 64, 4096) if quick else (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
    for rows in counts:
        if linear.name != "head" or rows <= 256:  # logits are asked for few rows
            yield rows


def cases(quick: bool) -> list[Case]:
    """Every linear at decode and prefill row counts, and what it may be compared with."""
    found = []
    for linear in LINEARS:
        if quick and linear.name not in QUICK:
            continue
        for rows in _counts(linear, quick):
            name = f"{linear.name} {rows} rows"
            size, flop = linear.bytes(rows), linear.flop(rows)
            reference = functools.partial(_reference, linear) if rows <= 64 and linear.name != "head" else None
            peers: list[tuple[str, int | None]] = [("row_tile=None", None)]
            if rows <= 64 and not quick:
                peers.append(("xla", 16))
            for implementation, row_tile in [("mosaic_gpu", 16), *peers]:
                module = "xla" if implementation == "row_tile=None" else implementation
                make = functools.partial(_make, linear, rows, module, row_tile)
                found.append(Case(name, OP, make, size, flop, reference, implementation))
    for rows in (64, 4096):
        for size in (1280, 5120):
            name = f"quantize_rows {rows} x {size}"
            make = functools.partial(lambda rows, size: (quantize_rows, (_rows((rows, size)),)), rows, size)
            found.append(Case(name, OP, make, 4 * rows * size, 0, quantize_dequantize_fp8))
    return found


# ---- what only the device can tell ------------------------------------------------------------------


def _bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def _rows_bitwise(linear: Linear, counts: tuple[int, ...]) -> dict[str, Any]:
    """A row's bits at every row count, at the front and further inside."""
    function = jax.jit(linear.function("mosaic_gpu", 16))
    x, w = _rows(linear.rows_shape(4096)), _weight(linear)
    whole = _bits(function(x, w))
    different = {}
    for rows in counts:
        for start in (0, 777):
            part = _bits(function(x[start : start + rows], w))
            count = int((part != whole[start : start + rows]).sum())
            if count:
                different[f"{rows} rows from {start}"] = count
    return {"passed": not different, "different": different}


def _repeats(linear: Linear, rows: int) -> dict[str, Any]:
    """100 calls with equal operands."""
    function = jax.jit(linear.function("mosaic_gpu", 16))
    x, w = _rows(linear.rows_shape(rows)), _weight(linear)
    first = function(x, w)
    equal = jax.jit(
        lambda a, b: jnp.all(lax.bitcast_convert_type(a, jnp.uint16) == lax.bitcast_convert_type(b, jnp.uint16))
    )
    different = sum(not bool(equal(function(x, w), first)) for _ in range(100))
    return {"passed": different == 0, "different_calls": different}


def _codes_exact() -> dict[str, Any]:
    """All codes with all scales up to 2^7: a one-hot row picks a column of the weight, bit for bit."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    codes = np.stack([np.roll(row, i) for i, row in enumerate(codes)])
    x = jnp.eye(256, dtype=jnp.bfloat16)
    function = jax.jit(functools.partial(row_dot, out_dtype=jnp.float32, implementation="mosaic_gpu"))
    with jax.default_device(jax.devices("cpu")[0]):
        decoded = np.asarray(lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)).astype(np.float64)
    wrong = 0
    # From 2^-120 on, every value is exact in bfloat16 (its smallest subnormal is 2^-133).
    for first in range(7, 135, 64):
        scale = np.minimum(first + np.arange(64), 134).astype(np.uint8).reshape(8, 8)
        for rows in (256, 64):
            y = np.asarray(function(x[:rows], QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8")))
            expected = decoded * np.exp2(np.repeat(np.repeat(scale.astype(np.float64) - 127, 32, 0), 32, 1))
            wrong += int((y.astype(np.float64) != expected.T[:rows]).sum())
    beyond = QuantTensor(jnp.asarray(codes[:, :64]), jnp.full((8, 2), 135, jnp.uint8), "fp8")
    poisoned = bool(np.isnan(np.asarray(function(x[:8, :64], beyond))).all())
    return {"passed": wrong == 0 and poisoned, "wrong": wrong, "large_scales_are_nan": poisoned}


PLANS = (
    Schedule(1, 8, 1, 64, 2, False),
    Schedule(1, 8, 1, 128, 4, False),
    Schedule(1, 64, 2, 128, 3, False),
    Schedule(1, 128, 2, 64, 4, False),
    Schedule(1, 160, 2, 64, 3, False),
    Schedule(1, 256, 2, 64, 3, False),
    Schedule(8, 8, 1, 128, 4, True),
    Schedule(8, 16, 1, 64, 2, True),
    Schedule(8, 64, 2, 128, 3, True),
    Schedule(8, 64, 1, 64, 4, False),
    Schedule(8, 192, 2, 64, 3, False),
    Schedule(1, 8, 4, 128, 3, False),
    Schedule(4, 8, 4, 128, 3, True),
    Schedule(4, 64, 4, 64, 3, True),
    Schedule(4, 192, 2, 64, 3, False),
    Schedule(6, 8, 4, 128, 2, True),
    Schedule(6, 64, 4, 64, 4, True),
    Schedule(6, 192, 2, 64, 3, False),
)
"""Tiles, pipelines and ways to add parts that must give the same bits for the same number of parts."""

PLANS_SM100 = (
    shapes_sm100.Schedule(1, 16, 64, 4, False, resident=2),
    shapes_sm100.Schedule(1, 16, 128, 2, False),
    shapes_sm100.Schedule(1, 32, 64, 2, False),
    shapes_sm100.Schedule(1, 64, 64, 4, False),
    shapes_sm100.Schedule(1, 128, 64, 3, False),
    shapes_sm100.Schedule(1, 192, 64, 2, False),
    shapes_sm100.Schedule(1, 256, 64, 2, False),
    shapes_sm100.Schedule(8, 16, 64, 4, True, resident=2),
    shapes_sm100.Schedule(8, 32, 128, 2, True),
    shapes_sm100.Schedule(8, 64, 64, 3, True),
    shapes_sm100.Schedule(8, 64, 64, 3, False),
    shapes_sm100.Schedule(8, 128, 64, 3, False),
)


def _schedules_equal(packed: bool) -> dict[str, Any]:
    """Bits of one product under every plan."""
    linear = Linear("", 512, 2048, packed=packed)
    x, w = _rows((300, linear.inputs)), _weight(linear)
    different: dict[str, int] = {}
    expected: dict[int, np.ndarray] = {}
    hopper = architecture() == "sm90"
    product: Callable[..., jax.Array] = mosaic_sm90.product if hopper else mosaic_sm100.product
    for plan in PLANS if hopper else PLANS_SM100:
        y = _bits(jax.jit(functools.partial(product, groups=1, out_dtype=jnp.float32, schedule=plan))(x, w))
        count = int((y != expected.setdefault(plan.parts, y)).sum())
        if count:
            different[str(plan)] = count
    changed = int((expected[1] != expected[8]).sum())
    return {"passed": not different, "different": different, "changed_by_parts": changed}


def _quantised(x: np.ndarray) -> np.ndarray:
    """Activation quantisation (`spec/blocks.md` 4.5) of rows [T, K], in NumPy."""
    groups = x.astype(np.float32).reshape(x.shape[0], -1, GROUP)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(1e-4))  # NaN if any is
    finite = np.isfinite(amax)
    bits = (np.where(finite, amax, 1).astype(np.float32) * np.float32(1 / 448)).view(np.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0) - 127
    with np.errstate(invalid="ignore"):
        quotient = np.clip(np.ldexp(groups.astype(np.float64), -exponent), -448, 448)
    codes = np.where(finite, quotient, 0).astype(np.float32).astype(jnp.float8_e4m3fn)
    values = np.where(finite, np.ldexp(codes.astype(np.float64), exponent), np.nan)
    return values.reshape(x.shape).astype(np.float32).astype(x.dtype)


def _quantise_equal() -> dict[str, Any]:
    """`quantize_rows` against NumPy, over the whole range of bfloat16; NaN for all of a group that is not finite.

    Not against the portable code on the CPU: XLA's maximum there can lose a NaN, and the rest of the group with it.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 5120)) * np.exp2(rng.integers(-130, 126, size=(512, 160)).repeat(32, axis=1))
    x[0, :32], x[1, 7], x[2, 40], x[3, :32], x[4, :64] = 0, np.inf, np.nan, 448, -0.0
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.float32)
    wrong = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        host = x.astype(dtype)
        expected, got = _quantised(host), np.asarray(jax.jit(quantize_rows)(jnp.asarray(host)))
        nan = np.isnan(expected.astype(np.float32))
        different = np.where(nan, ~np.isnan(got.astype(np.float32)), _bits(got) != _bits(expected))
        wrong[jnp.dtype(dtype).name] = int(different.sum())
    return {"passed": not any(wrong.values()), "wrong": wrong, "bad_groups": int(nan.sum()) // GROUP}


def checks(quick: bool) -> list[Check]:
    """Independence of rows, repeatability, exact decoding, equality of schedules, quantiser."""
    named = {linear.name: linear for linear in LINEARS}
    bitwise = ("wq_a", "wkv", "wo_b", "indexer.wq_b", "wo_a", "gate", "weights_proj")
    counts = (1, 2, 8, 12, 16, 40, 64, 65, 256, 1000, 1024)
    if quick:
        bitwise, counts = ("wq_a", "wo_b", "wo_a", "gate"), (1, 2, 8, 40, 64, 256, 1024)
    found = [Check(f"rows bitwise {name}", functools.partial(_rows_bitwise, named[name], counts)) for name in bitwise]
    for name, rows in (("wq_a", 8), ("wo_b", 64), ("wq_b", 1024)):
        found.append(Check(f"100 calls {name} {rows} rows", functools.partial(_repeats, named[name], rows)))
    found.append(Check("all codes and scales", _codes_exact))
    found += [Check(f"schedules packed={p}", functools.partial(_schedules_equal, p)) for p in (True, False)]
    found.append(Check("quantize_rows equals NumPy", _quantise_equal))
    return found


def compile_cases() -> list[CompileCase]:
    """All linears at row counts with different schedules."""
    found = []
    for linear in (*LINEARS, *SMALL):
        shape = (linear.outputs, linear.inputs)
        weight: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        if linear.packed:
            scale = jax.ShapeDtypeStruct((shape[0] // GROUP, shape[1] // GROUP), jnp.uint8)
            weight = QuantTensor(jax.ShapeDtypeStruct(shape, jnp.uint8), scale, "fp8")  # type: ignore[arg-type]
        for rows in (3, 70) if linear in SMALL else (1, 16, 64, 300, 4096):
            x = jax.ShapeDtypeStruct(linear.rows_shape(rows), jnp.bfloat16)
            function = linear.function("mosaic_gpu", 16)
            found.append(CompileCase(f"{linear.name} {rows} rows", OP, function, (x, weight)))
    return found
