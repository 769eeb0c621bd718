"""`mhc_mix` at the released shape: coefficients, stream arithmetic, and the boundary between two sublayers.

Predicted for one H200, from the instructions of the compiled loops (sm_90a) and bytes at 4.26 TB/s. A kernel's 120
blocks share 40,960 products of 64 rows and 32 columns at 4096 rows: 341 for each of a multiprocessor's schedulers, and
at 36 cycles for each of two instructions 25,000 cycles of its tensor cores, 14 us.

    split of fn                2 MB read, 3 MB written                                       about 3 us
    projection, 4096 rows      144 instructions a product: 28 us of issue; 168 MB and
                               21 MB of partial sums: 44 us                                  46-52 us
    expansion and projection   1063 instructions for 4 products: 52 us of issue;
                               420 MB and 21 MB: 103 us                                      108-120 us
    gates                      40 pieces a row                                               5 us
    norm, 4096 rows            84 MB                                                         20-26 us

So `mhc_mix` takes 54-61 us at 4096 rows and the boundary 136-154 us; at 1 row 11-14 and 14-18 us. With `mma.sync`,
for which every warp loaded the weights from the second-level cache, they took 124-127, 276, 20 and 26 us.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case, Check, CompileCase
from benchmarks.kernel_cases.bits import bits, repeats, rows_bitwise
from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand, expand_collapse_norm_quant, mhc_mix, stream_mean
from deepinfer_jax.kernels.mhc_mix.mosaic_gpu import projection
from deepinfer_jax.kernels.mhc_mix.mosaic_mix import PARTIAL
from deepinfer_jax.kernels.quantization import quantize_dequantize_fp8

OP = "mhc_mix"
SIZE, COUNT, MIXES = 5120, 4, 24
SETTINGS: dict[str, Any] = {"iterations": 20, "norm_eps": 1e-20, "hc_eps": 1e-6}

Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]
"""(operands that have rows, operands that all rows share)."""


def _normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _streams(rows: int) -> jax.Array:
    return _normal(0, (rows, COUNT, SIZE), jnp.bfloat16)


def _factors(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(pre, post, comb) of ordinary size."""
    pre, post = (jax.nn.sigmoid(_normal(seed, (rows, COUNT))) for seed in (1, 2))
    return pre, 2 * post, jax.nn.softmax(_normal(3, (rows, COUNT, COUNT)))


def _parameters() -> tuple[jax.Array, ...]:
    fn = _normal(4, (MIXES, COUNT * SIZE)) / math.sqrt(COUNT * SIZE)
    return fn, _normal(5, (MIXES,)), jnp.asarray([1.5, 0.7, 2.0], jnp.float32)


def _weight() -> jax.Array:
    return _normal(6, (SIZE,), jnp.bfloat16)


def _y(rows: int) -> jax.Array:
    return _normal(7, (rows, SIZE), jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of (operands that have rows, shared operands). bytes: of one row and of the shared operands."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[int], Arguments]
    bytes: tuple[int, int]
    flop: int = 0

    def using(self, implementation: str, row_tile: int | None) -> Callable[..., Any]:
        return functools.partial(self.function, implementation=implementation, row_tile=row_tile)


def _boundary(rows: tuple[Any, ...], shared: tuple[Any, ...], quantize: bool = False, **chosen: Any) -> Any:
    return expand_collapse_norm_quant(*rows, *shared, **SETTINGS, quantize=quantize, **chosen)


def _unfused(rows: tuple[Any, ...], shared: tuple[Any, ...], quantize: bool = False, **chosen: Any) -> Any:
    y, streams, post, comb, pre = rows
    weight, *parameters = shared
    new = expand(y, streams, post, comb, **chosen)
    x = collapse_norm(new, pre, weight, eps=SETTINGS["norm_eps"], **chosen)
    quantized = quantize_dequantize_fp8(x) if quantize else None
    return new, x, quantized, mhc_mix(new, *parameters, **SETTINGS, **chosen)


def _boundary_arguments(rows: int) -> Arguments:
    pre, post, comb = _factors(rows)
    return (_y(rows), _streams(rows), post, comb, pre), (_weight(), *_parameters())


STREAM, ROW = 2 * COUNT * SIZE, 2 * SIZE
FN = 4 * MIXES * COUNT * SIZE
PROJECTION = 2 * MIXES * COUNT * SIZE

CALLS = (
    Call(
        "mhc_mix",
        lambda rows, shared, **chosen: mhc_mix(*rows, *shared, **SETTINGS, **chosen),
        lambda rows: ((_streams(rows),), _parameters()),
        (STREAM + 96, FN),
        PROJECTION,
    ),
    Call(
        "collapse_norm",
        lambda rows, shared, **chosen: collapse_norm(*rows, *shared, eps=1e-20, **chosen),
        lambda rows: ((_streams(rows), _factors(rows)[0]), (_weight(),)),
        (STREAM + ROW + 16, ROW),
    ),
    Call(
        "expand",
        lambda rows, shared, **chosen: expand(*rows, **chosen),
        lambda rows: ((_y(rows), _streams(rows), *_factors(rows)[1:]), ()),
        (2 * STREAM + ROW + 80, 0),
    ),
    Call(
        "stream_mean",
        lambda rows, shared, **chosen: stream_mean(*rows, **chosen),
        lambda rows: ((_streams(rows),), ()),
        (STREAM + ROW, 0),
    ),
    Call("boundary", _boundary, _boundary_arguments, (2 * STREAM + 2 * ROW + 192, FN + ROW), PROJECTION),
    Call(
        "boundary quantised",
        functools.partial(_boundary, quantize=True),
        _boundary_arguments,
        (2 * STREAM + 3 * ROW + 192, FN + ROW),
        PROJECTION,
    ),
    Call("boundary in three calls", _unfused, _boundary_arguments, (2 * STREAM + 2 * ROW + 192, FN + ROW), PROJECTION),
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

                reference = call.using("xla", 16) if rows <= 64 else None
                size = rows * call.bytes[0] + call.bytes[1]
                name = f"{call.name} {rows} rows"
                found.append(Case(name, OP, make, size, rows * call.flop, reference, implementation))
    return found


# ---- what only the device can tell ------------------------------------------------------------------


def _rows_bitwise(call: Call) -> dict[str, Any]:
    rows, shared = call.arguments(4096)
    leaves, tree = jax.tree.flatten(rows)
    function = call.using("mosaic_gpu", 16)
    return rows_bitwise(lambda *given: function(jax.tree.unflatten(tree, given), shared), tuple(leaves))


def _repeats(call: Call, rows: int) -> dict[str, Any]:
    return repeats(call.using("mosaic_gpu", 16), call.arguments(rows))


def _whole_numbers() -> dict[str, Any]:
    """Partial sums whose every bit is known: few columns are not zero, and weights need all 24 bits."""
    rng = np.random.default_rng(0)
    rows = 130
    streams = np.zeros((rows, COUNT, SIZE), np.float32)
    shape = projection().shape_of(streams)
    owner = shape.pieces_of_columns
    own = [np.flatnonzero(owner == piece) for piece in range(shape.pieces)]
    for columns in own:
        for row in range(rows):
            streams[row, rng.integers(0, COUNT, size=4), rng.choice(columns, size=4)] = rng.choice([-1.0, 1.0, 2.0], 4)
    fn = rng.integers(-(1 << 20), 1 << 20, size=(MIXES, COUNT * SIZE)).astype(np.float32)
    partial = jax.jit(projection().project)(jnp.asarray(streams, jnp.bfloat16), jnp.asarray(fn))
    partial = np.asarray(partial).reshape(rows, shape.pieces, PARTIAL)
    parts = np.stack([streams[..., columns] for columns in own]).astype(np.float64)
    weights = np.stack([fn.reshape(MIXES, COUNT, SIZE)[..., columns] for columns in own]).astype(np.float64)
    expected = np.einsum("ptck,pnck->tpn", parts, weights)
    squares = np.einsum("ptck,ptck->tp", parts, parts)
    wrong = int((partial[..., :MIXES] != expected).sum())
    wrong_squares = int((partial[..., MIXES] != squares).sum())
    return {"passed": wrong + wrong_squares == 0, "wrong_sums": wrong, "wrong_squares": wrong_squares}


def _float64(rows: int) -> dict[str, Any]:
    """Largest relative error of the coefficients against float64.

    A logit may be off by 4 units in its last place: the sums (simulated with the tensor cores' cut-off sums of 32
    columns: at most 1e-6 at these inputs, 2 units), then half a unit each for the inverse norm, the products with it
    and with the scale, the base, and the argument of the exponential. A sigmoid passes a logit's error on at most
    once, a doubly normalised exponential here at most 5 times (errors of random sign in all logits: 4.7 times).
    XLA:CPU has 2.0e-6, 1.3e-6, 4.8e-6; the simulated sums alone give 0.8e-6, 0.4e-6, 1.7e-6.
    """
    (streams,), (fn, base, scale) = CALLS[0].arguments(rows)
    result = jax.jit(functools.partial(mhc_mix, implementation="mosaic_gpu", **SETTINGS))(streams, fn, base, scale)
    flat = np.asarray(streams).astype(np.float64).reshape(rows, -1)
    mixes = flat @ np.asarray(fn, np.float64).T / np.sqrt((flat**2).mean(axis=1, keepdims=True))
    shift, factor = np.asarray(base, np.float64), np.asarray(scale, np.float64)
    logits = mixes * np.repeat(factor, (4, 4, 16)) + shift
    pre = 1 / (1 + np.exp(-logits[:, :4])) + 1e-6
    post = 2 / (1 + np.exp(-logits[:, 4:8]))
    comb = np.exp(logits[:, 8:].reshape(rows, 4, 4))
    comb = comb / comb.sum(axis=2, keepdims=True) + 1e-6
    comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(axis=2, keepdims=True) + 1e-6)
        comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
    errors = [
        float(np.abs(np.asarray(a, np.float64) / b - 1).max()) for a, b in zip(result, (pre, post, comb), strict=True)
    ]
    largest = [np.abs(part).max() for part in np.split(logits, (4, 8), axis=1)]
    bounds = [4 * times * float(np.spacing(np.float32(logit))) for times, logit in zip((1, 1, 5), largest, strict=True)]
    passed = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    return {"passed": passed, "largest_relative_errors": errors, "bounds": bounds}


def _fused_equal(rows: int) -> dict[str, Any]:
    """The boundary in one call and in three, bit for bit."""
    given = _boundary_arguments(rows)
    chosen: dict[str, Any] = {"quantize": True, "implementation": "mosaic_gpu", "row_tile": 16}
    results = [jax.jit(functools.partial(function, **chosen))(*given) for function in (_boundary, _unfused)]
    pairs = zip(*map(jax.tree.leaves, results), strict=True)
    wrong = [int((bits(a) != bits(b)).sum()) for a, b in pairs]
    return {"passed": not any(wrong), "different": wrong}


def checks(quick: bool) -> list[Check]:
    """Independence of rows, repeatability, exact sums, accuracy, fused against unfused."""
    del quick
    found = [
        Check("projection of whole numbers", _whole_numbers),
        Check("coefficients against float64", functools.partial(_float64, 512)),
        Check("boundary equals its parts, 4096 rows", functools.partial(_fused_equal, 4096)),
        Check("boundary equals its parts, 3 rows", functools.partial(_fused_equal, 3)),
    ]
    found += [Check(f"rows bitwise {call.name}", functools.partial(_rows_bitwise, call)) for call in CALLS[:-1]]
    found += [Check(f"100 calls {call.name}", functools.partial(_repeats, call, 65)) for call in CALLS[:-1]]
    return found


def compile_cases() -> list[CompileCase]:
    """All calls at one and many rows."""
    found = []
    for call in CALLS[:-1]:
        for rows in (1, 4096):
            arguments = jax.eval_shape(functools.partial(call.arguments, rows))
            found.append(CompileCase(f"{call.name} {rows} rows", OP, call.using("mosaic_gpu", 16), arguments))
    return found
