"""The loop of one phase: compile, train until a deadline, evaluate, keep a log."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.config import ModelConfig

from .optimizer import learning_rate, start_moments
from .steps import TrainState, make_evaluation, make_step, split_weights

Batches = Iterator[tuple[np.ndarray, np.ndarray]]
"""Blocks of (tokens uint16 [S, B, T + 1], weights uint8 of the same shape)."""

_IN_FLIGHT = 6
"""Steps that may be queued on the device."""

_PLAN_EVERY = 40
"""Steps after which the number that fits the time is estimated again, from the newest ones."""

# Speed only; autotuning would cost a minute, and Triton products compile slowly.
_GPU_OPTIONS: dict[str, bool | str | int] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

# A CPU only tries the scripts out.
_CPU_OPTIONS: dict[str, bool | str | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate of a phase: the part from `start` to `end` of a cosine that falls to `floor` * peak.

    steps: planned number, None = as many as fit the time. warm_up: steps of linear increase.
    """

    peak: float
    start: float = 0.0
    end: float = 1.0
    warm_up: int = 100
    steps: int | None = None
    floor: float = 0.05

    def rate(self, step: int, planned: int | None) -> float:
        """Learning rate of a step; before a plan exists the schedule stands at its start."""
        if planned is None:
            done = self.start
        else:
            done = self.start + (self.end - self.start) * min(1.0, step / max(1, planned))
        ramp = min(1.0, (step + 1) / max(1, self.warm_up))
        return ramp * learning_rate(done, peak=self.peak, floor=self.floor)


class Log:
    """JSON lines in a file and on standard output."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.begin = time.perf_counter()

    def __call__(self, **facts: Any) -> None:
        """Write one line; numbers are rounded."""
        line = json.dumps({"t": round(time.perf_counter() - self.begin, 1), **{k: _plain(v) for k, v in facts.items()}})
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, (jax.Array, np.ndarray, np.floating)):
        return np.round(np.asarray(value, np.float64), 5).tolist()
    return round(value, 7) if isinstance(value, float) else value


def compile_program(function: Callable[..., Any], *examples: Any, donate: tuple[int, ...] = ()) -> Any:
    """Compile for the shapes of the examples on the default device."""
    options = _GPU_OPTIONS if jax.default_backend() == "gpu" else _CPU_OPTIONS
    return jax.jit(function, donate_argnums=donate).lower(*examples).compile(compiler_options=options)


def shapes_of(tree: Any) -> Any:
    """ShapeDtypeStructs of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def start_state(trained: Mapping[str, Any], biases: Mapping[str, Any], moments: Any = None) -> TrainState:
    """State on the device; moments of an earlier run, or none."""
    arrays = {name: jnp.asarray(w, jnp.float32) for name, w in trained.items()}
    step = jnp.int32(0 if moments is None else moments["step"])
    given = start_moments(arrays) if moments is None else {part: _arrays(moments[part], arrays) for part in ("m", "v")}
    return TrainState(arrays, {name: jnp.asarray(b, jnp.float32) for name, b in biases.items()}, given, step)


def _arrays(values: Mapping[str, np.ndarray], like: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(values[name], jnp.float32) for name in like}


class Phase:
    """One phase of training on one device."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        weights: Mapping[str, np.ndarray],
        token_map: np.ndarray,
        moments: Any = None,
        anchors: int = 64,
    ) -> None:
        """moments: {"m", "v", "step"} to go on with, None for zeros."""
        trained, biases, frozen = split_weights(config, weights, name)
        self.config, self.name, self.anchors = config, name, anchors
        self.token_map = jnp.asarray(token_map, jnp.int32)
        self.frozen = {key: jnp.asarray(w, jnp.float32) for key, w in frozen.items()}
        self.state = start_state(trained, biases, moments)
        self._evaluation: Any = None
        self._evaluation_thread: threading.Thread | None = None

    def compile_step(self, shape: tuple[int, int, int]) -> Any:
        """The compiled step for blocks [S, B, T + 1]."""
        block = (jax.ShapeDtypeStruct(shape, jnp.uint16), jax.ShapeDtypeStruct(shape, jnp.uint8))
        scalars = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))
        examples = (shapes_of(self.state), shapes_of(self.frozen), shapes_of(self.token_map), *block, *scalars)
        return compile_program(make_step(self.config, self.name, self.anchors), *examples, donate=(0,))

    def compile_evaluation(self, shape: tuple[int, int]) -> None:
        """Start compiling the evaluation of batches [B, T + 1] beside the training."""
        weights = shapes_of({**self.state.trained, **self.state.biases})
        batch = (jax.ShapeDtypeStruct(shape, jnp.uint16), jax.ShapeDtypeStruct(shape, jnp.uint8))
        function = make_evaluation(self.config, self.name, self.anchors)
        examples = (weights, shapes_of(self.frozen), shapes_of(self.token_map), *batch)

        def work() -> None:
            self._evaluation = compile_program(function, *examples)

        self._evaluation_thread = threading.Thread(target=work, daemon=True)
        self._evaluation_thread.start()

    @property
    def ready(self) -> bool:
        """Whether the evaluation is compiled."""
        return self._evaluation is not None

    def wait(self) -> None:
        """Until the evaluation is compiled."""
        if self._evaluation_thread is not None:
            self._evaluation_thread.join()

    def evaluate(self, batches: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, dict[str, Any]]:
        """Metrics of each held-out batch; needs `compile_evaluation`."""
        if self._evaluation_thread is None:
            raise ValueError("evaluate: call compile_evaluation first")
        self.wait()
        weights = {**self.state.trained, **self.state.biases}
        result = {
            name: self._evaluation(weights, self.frozen, self.token_map, jnp.asarray(tokens), jnp.asarray(counts))
            for name, (tokens, counts) in batches.items()
        }
        return jax.tree.map(np.asarray, result)

    def weights(self) -> dict[str, np.ndarray]:
        """Float32 weights and routing biases that this phase changes."""
        return jax.tree.map(np.asarray, {**self.state.trained, **self.state.biases})

    def moments(self) -> dict[str, Any]:
        """The optimiser's state, as the constructor takes it."""
        found = jax.tree.map(np.asarray, self.state.moments)
        return {**found, "step": int(self.state.step)}

    def run(
        self,
        step: Any,
        batches: Batches,
        schedule: Schedule,
        log: Log,
        *,
        deadline: float,
        every: int = 20,
        save: Callable[[], None] | None = None,
        save_seconds: float = 70.0,
    ) -> dict[str, Any]:
        """Train until the plan is done, the data ends or `time.perf_counter()` reaches the deadline.

        step: from `compile_step`. save: called every `save_seconds`. Returns facts about the run.
        """
        planned = schedule.steps
        queue: collections.deque[tuple[int, float, Any]] = collections.deque()
        times: dict[int, float] = {}
        recent: list[Any] = []
        done = tokens_seen = 0
        begin = saved = time.perf_counter()

        def finish_oldest() -> None:
            number, rate, metrics = queue.popleft()
            jax.block_until_ready(metrics["loss"])
            times[number] = time.perf_counter()
            recent.append(metrics)
            if (number + 1) % every == 0:
                speed = tokens_seen / (times[number] - begin)
                log(phase=self.name, step=number + 1, planned=planned, rate=rate, speed=round(speed), **_mean(recent))
                recent.clear()

        for tokens, counts in batches:
            block = (jax.device_put(tokens), jax.device_put(counts))
            for index in range(tokens.shape[0]):
                now = time.perf_counter()
                if now >= deadline or (planned is not None and done >= planned):
                    break
                rate = schedule.rate(done, planned)
                self.state, metrics = step(
                    self.state, self.frozen, self.token_map, *block, jnp.int32(index), jnp.float32(rate)
                )
                queue.append((done, rate, metrics))
                done, tokens_seen = done + 1, tokens_seen + tokens.shape[1] * (tokens.shape[2] - 1)
                while len(queue) > _IN_FLIGHT:
                    finish_oldest()
                if schedule.steps is None and done % _PLAN_EVERY == 0 and (planned is None or done < 0.9 * planned):
                    planned = _plan(done, times, deadline)
                if save is not None and now - saved > save_seconds:
                    save()
                    saved = time.perf_counter()
            else:
                continue
            break
        while queue:
            finish_oldest()
        seconds = time.perf_counter() - begin
        return {"steps": done, "planned": planned, "seconds": seconds, "speed": tokens_seen / max(seconds, 1e-9)}


def _plan(done: int, times: Mapping[int, float], deadline: float) -> int:
    """Steps in all that fit, with a little time to spare; times: when each step ended."""
    newest = max(times)
    first = max(min(times), newest - _PLAN_EVERY // 2)
    seconds = (times[newest] - times[first]) / max(1, newest - first)
    return done + max(1, int(0.99 * (deadline - time.perf_counter()) / max(seconds, 1e-6)) - _IN_FLIGHT)


def _mean(metrics: list[Any]) -> dict[str, Any]:
    """Mean of each metric over steps."""
    host = jax.device_get(metrics)
    return {name: np.mean([np.asarray(m[name], np.float64) for m in host], axis=0) for name in host[0]}
