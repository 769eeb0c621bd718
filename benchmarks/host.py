"""Host cost of an engine step: scheduling, arrays, sampling controls, reading tokens. No device work.

    python benchmarks/host.py [--sequences 256] [--steps 400] [--json FILE]

The launches are replaced by functions that return at once, so what is left is Python.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import deepinfer_jax
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.runner import Launched
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.kernels.sample_tokens import Sampled


class Clock:
    """Seconds per step of wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            return result

        return timed


def measure(sequences: int, steps: int) -> dict[str, float]:
    """Median microseconds per step with `sequences` generating requests."""
    params = deepinfer_jax.init_params(deepinfer_jax.ModelConfig.micro(), jax.random.key(0))
    engine = Engine(params, RuntimeConfig(slots=sequences, rows=(max(sequences, 64),)))
    runner, clock = engine._runner, Clock()
    logits = np.zeros((engine.sizes.logit_rows, 1), np.float32)
    rows = runner.sample_rows(Launched(logits, [], []))  # type: ignore[arg-type]
    drawn = Sampled(np.full(rows, 7, np.int32), *(np.zeros(rows, np.float32),) * 3, np.ones(rows, bool))  # type: ignore[arg-type]

    def forward(plan: Any) -> Launched:
        runner._update_tables(plan)
        _, draws, scored = runner._batch(plan)
        return Launched(logits, draws, scored)  # type: ignore[arg-type]

    def sample(*_: Any) -> Sampled:
        return drawn

    engine.scheduler.plan = clock.wrap("plan", engine.scheduler.plan)  # type: ignore[method-assign]
    runner.forward = clock.wrap("arrays", forward)  # type: ignore[method-assign]
    runner.sample = sample  # type: ignore[method-assign]
    engine._launch_sampling = clock.wrap("controls", engine._launch_sampling)  # type: ignore[method-assign]
    engine._read = clock.wrap("read", engine._read)  # type: ignore[method-assign]
    call = engine.submit([[3, 4, 5]] * sequences, max_tokens=steps + 50, temperature=1, ignore_eos=True)
    call.keeps_events = False
    while engine.scheduler.waiting or len(clock.seconds["plan"]) < 20:
        engine.step()
    clock.seconds.clear()
    whole = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
    result = {name: statistics.median(values) * 1e6 for name, values in clock.seconds.items()}
    return result | {"step": statistics.median(whole) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "unit": "microseconds per step, median",
        "sequences": {},
    }
    for count in arguments.sequences:
        parts = measure(count, arguments.steps)
        result["sequences"][str(count)] = {name: round(value, 1) for name, value in parts.items()}
        print(count, result["sequences"][str(count)])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
