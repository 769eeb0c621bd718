"""The engine on an accelerator: equal bits in any arrangement, and whether the device waits for the host.

    PYTHONPATH=. python benchmarks/engine_device.py [--json FILE] [--seconds 150]

Requests of the demo model are run one by one without overlap and shared prefixes, then in random
arrangements; every result must have the same bits. Then steps are timed with and without overlap, and a
profile of some steps gives the share of the time in which the device has nothing to do between programs.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import gzip
import json
import random
import statistics
import tempfile
import time
from typing import Any

import jax
import jaxlib
import numpy as np

import deepinfer_jax
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.sampling_params import SamplingParams

SIZES: dict[str, Any] = {"slots": 16, "rows": (64,), "context": 1024}


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many lengths, some with a common beginning, greedy and sampled."""
    rng = random.Random(1)
    stem = [rng.randrange(3, 3000) for _ in range(512)]
    result = []
    for number in range(count):
        size = rng.choice([5, 60, 127, 128, 129, 254, 300, 400])
        kept = min(size, rng.choice([0, 100, 128, 256, 384]))
        prompt = stem[:kept] + [rng.randrange(3, 3000) for _ in range(size - kept)]
        temperature = rng.choice([0.0, 1.0])
        result.append((prompt, SamplingParams(max_tokens=16, temperature=temperature, seed=number, logprobs=0)))
    return result


def same_bits(params: Any, seconds: float) -> dict[str, Any]:
    """Schedules whose results were compared, and those that differed."""
    work = requests(24)
    with Engine(params, RuntimeConfig(**SIZES, prefix_sharing=False, overlap=False)) as engine:
        alone = [engine.generate([prompt], sampling)[0] for prompt, sampling in work]
    start, schedules, different, cached, preemptions = time.perf_counter(), 0, 0, 0, 0
    while time.perf_counter() - start < seconds:
        rng = random.Random(schedules)
        order = [rng.randrange(len(work)) for _ in range(rng.choice([2, 8, 20, 40]))]
        chunk = rng.choice([None, 7, 32])
        with Engine(params, RuntimeConfig(**SIZES, prefill_chunk=chunk)) as engine:
            call = engine.submit([work[i][0] for i in order], [work[i][1] for i in order])
            while not call.done:
                engine.step()
                if rng.random() < 0.03 and engine.scheduler.running:
                    engine.scheduler.preempt(rng.choice(engine.scheduler.running))
            different += sum(output != alone[i] for i, output in zip(order, call.outputs(), strict=True))
            cached, preemptions = cached + engine.stats.cached_rows, preemptions + engine.stats.preemptions
        schedules += 1
    return {"schedules": schedules, "different": different, "cached_rows": cached, "preemptions": preemptions}


def timed_steps(params: Any, overlap: bool, sequences: int, profile: bool) -> dict[str, Any]:
    """Median milliseconds of a decode step; with a profile the idle share of the device's busiest line."""
    figures: dict[str, Any] = {}
    with Engine(params, RuntimeConfig(**SIZES, overlap=overlap)) as engine:
        engine.submit([[5 + i] for i in range(sequences)], max_tokens=200, ignore_eos=True)
        for _ in range(10):
            engine.step()
        times = []
        for _ in range(40):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        figures["step_ms"] = statistics.median(times) * 1e3
        if profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(10):
                        engine.step()
                    jax.block_until_ready(engine._runner._newest)
                figures |= idle_share(folder)
    return figures


def idle_share(folder: str) -> dict[str, Any]:
    """Gaps of the device's stream, from the trace: total, and those between two compiled programs."""
    events = []
    for name in glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz"):
        with gzip.open(name) as file:
            events += json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    device = [e for e in events if e.get("ph") == "X" and "GPU" in names.get(e.get("pid"), "")]
    lines: dict[tuple[int, int], list[dict]] = {}
    for event in device:
        lines.setdefault((event["pid"], event["tid"]), []).append(event)
    if not lines:
        return {"trace": "no device events"}
    line = sorted(max(lines.values(), key=len), key=lambda e: e["ts"])
    begin, end = line[0]["ts"], max(e["ts"] + e["dur"] for e in line)
    busy, between, latest, module = 0.0, 0.0, line[0]["ts"], None
    for event in line:
        gap = max(0.0, event["ts"] - latest)
        name = event.get("args", {}).get("hlo_module")
        if gap and module is not None and name is not None and name != module:
            between += gap
        module = name or module
        busy += max(0.0, event["ts"] + event["dur"] - max(latest, event["ts"]))
        latest = max(latest, event["ts"] + event["dur"])
    span = end - begin
    return {
        "trace_ms": span / 1e3,
        "kernels": len(line),
        "busy_share": busy / span,
        "idle_between_programs_share": between / span,
        "modules": sorted({e.get("args", {}).get("hlo_module", "?") for e in line}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60, help="for the random arrangements")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    }

    def save() -> None:
        print(json.dumps(result), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(result, file, indent=1)

    start = time.perf_counter()
    params = deepinfer_jax.load_params("demo", unpack=True)
    with Engine(params, RuntimeConfig(**SIZES)) as engine:
        output = engine.generate("Once upon a time", max_tokens=8, temperature=0, logprobs=0)[0]
    assert output.outputs[0].logprobs is not None
    result["first_generate_seconds"] = time.perf_counter() - start
    result["text"], result["logprobs"] = output.text, np.round(output.outputs[0].logprobs, 4).tolist()
    save()
    for overlap in (True, False):
        for sequences in (1, 16):
            name = f"overlap {overlap}, {sequences} sequences"
            result[name] = timed_steps(params, overlap, sequences, profile=True)
            save()
    result["bits"] = same_bits(params, arguments.seconds)
    save()


if __name__ == "__main__":
    main()
