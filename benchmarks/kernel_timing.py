"""Timing of one call on a device: many calls in one compiled loop, over inputs that no cache holds.

A loop's body calls the function once for each of several copies of its arguments. An optimisation barrier
makes each call wait for the one before; it does no arithmetic, and costs no launch. The loop carries every
result, so that no call can be dropped.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.compile import jit

CALLS = 100
"""Calls in one loop, at least."""

REPEATS = 5
"""Timed samples, of which the median counts."""

SAMPLE_SECONDS = 0.02
"""A sample is as many loops, launched one after another, as take this long."""

CACHE_BYTES = 100 << 20
"""All copies of the arguments together exceed this, twice the second-level cache of an H200."""

MOST_COPIES = 32
"""Tiny arguments are not copied more often: what they take is not memory traffic."""


def argument_bytes(arguments: Any) -> int:
    """Bytes of all array leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "nbytes"))


def copies_needed(size: int) -> int:
    """How many copies of arguments of `size` bytes a loop goes through.

    Enough to exceed the cache, and at least 8 where that is cheap, so that the loop's own work is spread.
    """
    enough = CACHE_BYTES // max(1, size) + 1
    return min(MOST_COPIES, max(enough, 8 if size < 1 << 29 else 1))


def loop_program(function: Callable[..., Any], options: bool) -> Any:
    """Jitted (copies: tuple of argument tuples) -> results of the last call with each copy, after >= CALLS calls.

    options: compile with this project's compiler options instead of XLA's own.
    """
    inner = jax.jit(function)  # traced once; inlined by XLA

    def program(copies: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        shapes = jax.eval_shape(inner, *copies[0])
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def body(_: jax.Array, results: tuple[Any, ...]) -> tuple[Any, ...]:
            previous, new = results[-1], []
            for arguments in copies:
                arguments, _ = lax.optimization_barrier((arguments, previous))
                previous = inner(*arguments)
                new.append(previous)
            return tuple(new)

        return lax.fori_loop(0, loop_trips(len(copies)), body, (empty,) * len(copies))

    return jit(program) if options else jax.jit(program)


def loop_trips(copies: int) -> int:
    """Trips of a loop of at least CALLS calls."""
    return -(-CALLS // copies)


def _seconds(run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A compiled loop that has run once, and the copies of the arguments that it goes through."""

    compiled: Callable[..., Any]
    copies: tuple[tuple[Any, ...], ...]
    compile_seconds: float
    result: Any

    def measure(self) -> dict[str, Any]:
        """Figures of one call. Nothing else may run on the device meanwhile."""
        count = len(self.copies)
        once = _seconds(lambda: self.compiled(self.copies), 1)
        loops = max(1, round(SAMPLE_SECONDS / max(once, 1e-6)))
        calls = loops * count * loop_trips(count)
        samples = [_seconds(lambda: self.compiled(self.copies), loops) / calls for _ in range(REPEATS)]
        return figures(samples, calls, count, argument_bytes(self.copies), self.compile_seconds)


def prepare(function: Callable[..., Any], arguments: tuple[Any, ...], options: bool) -> Prepared:
    """Compile the loop, copy the arguments, run once: modules are loaded then, and memory is there."""
    count = copies_needed(argument_bytes(arguments))
    copies = (arguments, *(jax.tree.map(jnp.copy, arguments) for _ in range(count - 1)))
    program = loop_program(function, options)
    start = time.perf_counter()
    compiled = program.lower(copies).compile()
    compile_seconds = time.perf_counter() - start
    return Prepared(compiled, copies, compile_seconds, jax.block_until_ready(compiled(copies))[0])


def time_jax(function: Callable[..., Any], arguments: tuple[Any, ...], options: bool) -> tuple[dict[str, Any], Any]:
    """Figures of one call, and its result for `arguments`."""
    prepared = prepare(function, arguments, options)
    return prepared.measure(), prepared.result


def figures(samples: list[float], calls: int, copies: int, size: int, compile_seconds: float) -> dict[str, Any]:
    """Figures of one case from samples of seconds a call; for timers of other libraries too."""
    return {
        "ms": statistics.median(samples) * 1e3,
        "ms_samples": [sample * 1e3 for sample in samples],
        "calls_per_sample": calls,
        "copies": copies,
        "argument_bytes": size,
        "compile_seconds": compile_seconds,
    }


def _numbers(leaf: Any) -> np.ndarray:
    """Values of an array as float64."""
    return np.asarray(leaf).astype(np.float64)


def relative_error(result: Any, expected: Any) -> float:
    """Largest Frobenius error of a result's arrays, relative to the expected one; absolute where that is zero.

    Raises ValueError for other shapes, and for values that are not finite.
    """
    got, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    if len(got) != len(wanted):
        raise ValueError(f"{len(got)} results; the reference gives {len(wanted)}")
    worst = 0.0
    for some, other in zip(got, wanted, strict=True):
        a, b = _numbers(some), _numbers(other)
        if a.shape != b.shape:
            raise ValueError(f"result {a.shape}; the reference gives {b.shape}")
        if not np.isfinite(a).all():
            raise ValueError(f"{np.count_nonzero(~np.isfinite(a))} of {a.size} results are not finite")
        size = float(np.linalg.norm(b.ravel()))
        worst = max(worst, float(np.linalg.norm((a - b).ravel())) / (size or 1.0))
    return worst


# ---- ceilings -------------------------------------------------------------------------------------


def ceilings(*, elements: int = 1 << 28, matrix: int = 8192) -> dict[str, Any]:
    """What the device does at best: bytes a second of a large copy, FLOP a second of a bfloat16 product.

    Both with XLA's own options, which let it hand the product to cuBLAS and try several of its kernels.
    """
    # The sign bit is flipped, so that the copy cannot be left out.
    copy, _ = time_jax(lambda x: x ^ jnp.uint32(1 << 31), (jnp.ones(elements, jnp.uint32),), False)
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (matrix, matrix), jnp.bfloat16) for key in keys)
    product, _ = time_jax(lambda x, y: x @ y, (a, b), False)
    return {
        "copy_bytes_per_second": 2 * 4 * elements / (copy["ms"] * 1e-3),
        "bf16_flop_per_second": 2 * matrix**3 / (product["ms"] * 1e-3),
    }
