"""`rms_norm_quant` at the released shapes: norms, rotary embedding, cache records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case, Check, CompileCase
from benchmarks.kernel_cases.bits import (
    all_bfloat16,
    differences,
    expected_fp4,
    expected_record,
    repeats,
    rows_bitwise,
    turned_by_nothing,
)
from deepinfer_jax.kernels.quantization import FP4_KV_GROUP, GROUP, CacheFormat, cache_width
from deepinfer_jax.kernels.rms_norm_quant import norm_rotary_pack, rms_norm, rotary

OP = "rms_norm_quant"
EPS = 1e-20
ROPE = 64
CHECK_ROPE = 16
"""Rotated elements of the records that are compared bit for bit."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One function of the op at one width.

    row: shape of a row of x. arguments: builds (x, ...) for T rows. bytes: of a row, read and written.
    """

    name: str
    row: tuple[int, ...]
    function: Callable[..., Any]
    others: Callable[[int], tuple[Any, ...]]
    bytes: int

    def arguments(self, rows: int) -> tuple[Any, ...]:
        x = jax.random.normal(jax.random.key(0), (rows, *self.row), jnp.bfloat16)
        return (x, *self.others(rows))

    def using(self, implementation: str, row_tile: int | None) -> Callable[..., Any]:
        return functools.partial(self.function, implementation=implementation, row_tile=row_tile)


def _weight(size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (size,), jnp.bfloat16)


def _positions(rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (rows,), 0, 1 << 20)


def _frequencies() -> jax.Array:
    return jnp.asarray(160000.0 ** (-np.arange(0, ROPE, 2) / ROPE), jnp.float32)


def _norm(size: int) -> Call:
    def function(x: jax.Array, weight: jax.Array, **chosen: Any) -> jax.Array:
        return rms_norm(x, weight, eps=EPS, **chosen)

    return Call(f"rms_norm {size}", (size,), function, lambda _: (_weight(size),), 4 * size)


def _pack(name: str, size: int, fmt: CacheFormat, normed: bool) -> Call:
    def function(x: jax.Array, positions: jax.Array, frequencies: jax.Array, *weight: jax.Array, **chosen: Any) -> Any:
        scale = weight[0] if weight else None
        return norm_rotary_pack(x, scale, positions, frequencies, fmt=fmt, eps=EPS, **chosen)

    def others(rows: int) -> tuple[Any, ...]:
        return (_positions(rows), _frequencies()[: size // 2], *((_weight(size),) if normed else ()))

    return Call(name, (size,), function, others, 2 * size + cache_width(fmt, size))


def _rotary(name: str, heads: int, size: int, times: int, bytes_of_row: int, **settings: Any) -> Call:
    def function(x: jax.Array, positions: jax.Array, frequencies: jax.Array, **chosen: Any) -> jax.Array:
        for _ in range(times):
            x = rotary(x, positions, frequencies, **settings, **chosen)
        return x

    return Call(name, (heads, size), function, lambda rows: (_positions(rows), _frequencies()), bytes_of_row)


CALLS = (
    _norm(5120),
    _norm(1280),
    _norm(512),
    _pack("window record", 512, "fp8", True),
    _pack("compressed record", 512, "fp4_e4m3", False),
    _pack("index key record", 128, "fp4", True),
    # The operands of a timed call live on, so that XLA copies x once before it is rotated in place; the difference
    # of these two is two rotations.
    _rotary("queries copied, rotated once", 64, 512, 1, 4 * 64 * 512 + 4 * 64 * ROPE),
    _rotary("queries copied, rotated three times", 64, 512, 3, 4 * 64 * 512 + 12 * 64 * ROPE),
    _rotary("index queries", 32, 128, 1, 4 * 32 * 128, quantize=True),
)


def cases(quick: bool) -> list[Case]:
    """Every call at decode and prefill row counts, and XLA's own way."""
    found = []
    for call in CALLS:
        for rows in (1, 64, 4096) if quick else (1, 2, 8, 64, 256, 1024, 4096):
            peers: list[tuple[str, int | None]] = [("mosaic_gpu", 16), ("row_tile=None", None)]
            if rows <= 64:
                peers.append(("xla", 16))
            for implementation, row_tile in peers:
                module = "xla" if implementation == "row_tile=None" else implementation

                def make(call: Call = call, rows: int = rows, module: str = module, tile: int | None = row_tile) -> Any:
                    return call.using(module, tile), call.arguments(rows)

                reference = call.using("xla", None) if rows <= 64 else None
                size = rows * call.bytes
                found.append(Case(f"{call.name} {rows} rows", OP, make, size, 0, reference, implementation))
    return found


# ---- what only the device can tell ------------------------------------------------------------------


def _split_rows(call: Call, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(operands that have rows, the others)."""
    number = 1 if call.name.startswith("rms_norm") else 2
    return arguments[:number], arguments[number:]


def _rows_bitwise(call: Call) -> dict[str, Any]:
    rows, others = _split_rows(call, call.arguments(4096))
    return rows_bitwise(lambda *given: call.using("mosaic_gpu", 16)(*given, *others), rows)


def _repeats(call: Call, rows: int) -> dict[str, Any]:
    return repeats(call.using("mosaic_gpu", 16), call.arguments(rows))


def _records_equal(fmt: CacheFormat, size: int) -> dict[str, Any]:
    """Records of rows that hold every bfloat16 pattern, at position 0, against NumPy."""
    rows = all_bfloat16(size)
    frequencies = jnp.ones(CHECK_ROPE // 2, jnp.float32)

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        positions = jnp.zeros(x.shape[0], jnp.int32)
        return norm_rotary_pack(x, None, positions, frequencies, fmt=fmt, eps=EPS, implementation="mosaic_gpu")

    expected, free = expected_record(turned_by_nothing(rows, CHECK_ROPE), fmt)
    group = FP4_KV_GROUP if fmt == "fp4_e4m3" else GROUP
    return differences(np.asarray(function(jnp.asarray(rows))), expected, free, rows, group)


def _heads_equal() -> dict[str, Any]:
    """Index queries of every bfloat16 pattern at position 0 against NumPy."""
    size = 128
    rows = all_bfloat16(size)

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        positions = jnp.zeros(x.shape[0], jnp.int32)
        return rotary(x, positions, _frequencies(), quantize=True, implementation="mosaic_gpu")

    actual = np.asarray(function(jnp.asarray(rows.reshape(-1, 32, size)))).reshape(rows.shape)
    with np.errstate(over="ignore"):
        expected = expected_fp4(turned_by_nothing(rows, ROPE)).astype(rows.dtype)
    # A NaN may have any sign and payload.
    both = np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    return differences(actual, expected, both, rows, GROUP)


def _angles() -> dict[str, Any]:
    """Cosines and sines of positions up to a million against float64 of the float32 angle; units of 2^-24."""
    positions = np.unique(np.concatenate([np.arange(4096), np.exp2(np.linspace(0, 20, 4096)).astype(np.int64) - 1]))
    frequencies = np.asarray(_frequencies())
    x = np.zeros((len(positions), 1, ROPE), np.float32)
    x[..., 0::2] = 1
    turned = jax.jit(functools.partial(rotary, implementation="mosaic_gpu"))(
        jnp.asarray(x), jnp.asarray(positions, jnp.int32), jnp.asarray(frequencies)
    )
    turned = np.asarray(turned, np.float64)[:, 0]
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    steps = 0.0
    for actual, exact in ((turned[:, 0::2], np.cos(angle)), (turned[:, 1::2], np.sin(angle))):
        unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        steps = max(steps, float((np.abs(actual - exact) / unit).max()))
    return {"passed": steps <= 2.5, "largest_error_in_last_places": steps}


def checks(quick: bool) -> list[Check]:
    """Independence of rows, repeatability, quantisers, angles."""
    del quick
    found = [Check(f"rows bitwise {call.name}", functools.partial(_rows_bitwise, call)) for call in CALLS]
    for call in CALLS:
        found.append(Check(f"100 calls {call.name}", functools.partial(_repeats, call, 64)))
    formats: tuple[tuple[CacheFormat, int], ...] = (("fp8", 512), ("fp4", 128), ("fp4_e4m3", 512), ("fp8", 64))
    for fmt, size in formats:
        found.append(Check(f"{fmt} records of {size} equal NumPy", functools.partial(_records_equal, fmt, size)))
    found.append(Check("quantised heads equal NumPy", _heads_equal))
    found.append(Check("angles", _angles))
    return found


def compile_cases() -> list[CompileCase]:
    """All calls at one and many rows; small models' widths."""
    found = []
    small = (
        _norm(64),
        _norm(256),
        _pack("demo record", 64, "fp8", True),
        _norm(32),
        _pack("demo index", 32, "fp4", True),
    )
    for call in (*CALLS, *small):
        for rows in (1, 4096):
            arguments = jax.eval_shape(functools.partial(call.arguments, rows))
            found.append(CompileCase(f"{call.name} {rows} rows", OP, call.using("mosaic_gpu", 16), arguments))
    return found
