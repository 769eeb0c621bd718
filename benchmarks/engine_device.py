"""The engine on an accelerator: equal bits in any arrangement, and whether the device waits for the host.

    PYTHONPATH=. python benchmarks/engine_device.py [--json FILE] [--only steps|bits] [--schedules 1000]
    PYTHONPATH=. python benchmarks/engine_device.py --only released [--json FILE]

Steps are timed with and without overlap, and a profile of some steps gives the share of the time in which the device
has nothing to do between programs: decode steps of a few rows, whose launches take longer than their work, and steps
of long prompts. Then requests of the demo model are run one by one without overlap and shared prefixes, and in random
arrangements; every result must have the same bits. (Several processes are no faster together than one.)

With `released` the steps are those of a model of released sizes with fewer experts and smaller Engram tables, 39 GB of
random weights: its kernels take longer than their launches, as those of the demo model do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import glob
import gzip
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import deepinfer_jax
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.repack import repacked_form
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.kernels import fp4_fragments
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram_hash import bucket_primes
from deepinfer_jax.model.params import Parameter, Params, build_params
from deepinfer_jax.sampling_params import SamplingParams

SIZES: dict[str, Any] = {"slots": 16, "rows": (64,), "context": 1024}

PROFILED = 4
"""Steps of a profile: one of prompts has some 15,000 events."""

STEPS: dict[str, dict[str, int]] = {
    "decode, 1 sequence": {"sequences": 1},
    "decode, 16 sequences": {"sequences": 16},
    "decode, 16 sequences, 16 rows": {"sequences": 16, "rows": 16},
    "prompts, 1024 rows": {"sequences": 16, "rows": 1024, "prompt": 3800},
}

RELEASED_STEPS: dict[str, dict[str, int]] = {
    "released sizes, decode, 16 sequences": {"sequences": 16, "rows": 16},
    "released sizes, prompts, 256 rows": {"sequences": 16, "rows": 256, "prompt": 3800},
}


def released_model() -> Params:
    """Random weights of the released configuration with 32 experts and Engram tables of 160,000 buckets."""
    released = ModelConfig.released()
    buckets = 160_000
    orders = released.engram_max_ngram_size - 1
    primes = bucket_primes(len(released.engram_layer_ids), orders, released.engram_n_heads, buckets)
    config = dataclasses.replace(
        released,
        n_routed_experts=32,
        dspark_n_routed_experts=32,
        engram_vocab_size=buckets,
        engram_num_embeddings=tuple(int(np.sum(layer)) for layer in primes),
    )
    keys = (jax.random.key(number, impl="rbg") for number in itertools.count())
    scale_bytes = {"fp8": 114, "fp4": 119, "fp8_row": 114}  # results of deviation one, about

    def place(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        shapes = parameter.abstract(lead)
        if isinstance(shapes, QuantTensor):
            fmt = shapes.format
            form = repacked_form(parameter.key, shapes) or shapes
            dtype = form.data.dtype
            codes = jax.random.bits(next(keys), form.data.shape, dtype)
            if fmt != "fp4":
                codes &= jnp.asarray(0x77, dtype)  # no NaN
            byte = scale_bytes[fmt]
            if form.format != fmt:  # two scales together
                byte = (byte + int(fp4_fragments.SCALE_OFFSET)) % 256 * 257
            return QuantTensor(codes, jnp.full(form.scale.shape, byte, form.scale.dtype), form.format)
        if parameter.init in ("ones", "hc_scale"):
            return jnp.ones(shapes.shape, shapes.dtype)
        if parameter.init in ("zeros", "bias", "hc_base"):
            return jnp.zeros(shapes.shape, shapes.dtype)
        values = jax.random.normal(next(keys), shapes.shape, jnp.bfloat16) * shapes.shape[-1] ** -0.5
        return values.astype(shapes.dtype)

    classes = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_compressed_vocab_size
    return build_params(config, place, classes)


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


def same_bits(params: Any, first: int, count: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Random schedules from `first` on, `count` of them: after each, how many results were compared and differed.

    No schedule begins after so many seconds.
    """
    work = requests(24)
    sizes = SIZES | {"slots": 32, "rows": (16, 64)}  # programs of two sizes take turns
    with Engine(params, RuntimeConfig(**sizes, prefix_sharing=False, overlap=False)) as engine:
        alone = [engine.generate([prompt], sampling)[0] for prompt, sampling in work]
    found = {"schedules": 0, "results": 0, "different": 0, "cached_rows": 0, "preemptions": 0}
    start = time.perf_counter()
    for seed in range(first, first + count):
        if time.perf_counter() - start > seconds:
            return
        rng = random.Random(seed)
        order = [rng.randrange(len(work)) for _ in range(rng.choice([2, 8, 20, 40]))]
        chunk = rng.choice([None, 7, 32])
        with Engine(params, RuntimeConfig(**sizes, prefill_chunk=chunk)) as engine:
            call = engine.submit([work[i][0] for i in order], [work[i][1] for i in order])
            while not call.done:
                engine.step()
                if rng.random() < 0.03 and engine.scheduler.running:
                    engine.scheduler.preempt(rng.choice(engine.scheduler.running))
            found["different"] += sum(output != alone[i] for i, output in zip(order, call.outputs(), strict=True))
            found["cached_rows"] += engine.stats.cached_rows
            found["preemptions"] += engine.stats.preemptions
        found["schedules"] += 1
        found["results"] += len(order)
        yield found | {"seconds": time.perf_counter() - start}


def timed_steps(params: Any, overlap: bool, sequences: int, rows: int = 64, prompt: int = 1) -> dict[str, Any]:
    """Median milliseconds of a step, and the idle share of the device's busiest line in a profile of some steps.

    prompt: tokens of each prompt; long enough, and the steps are those of prompts, of `rows` rows each.
    """
    figures: dict[str, Any] = {}
    sizes = SIZES | {"rows": (rows,), "context": max(SIZES["context"], prompt + 200), "cache_bytes": 1 << 30}
    with Engine(params, RuntimeConfig(**sizes, overlap=overlap, prefix_sharing=False)) as engine:
        rng = random.Random(1)
        prompts = [[5 + i] + [rng.randrange(3, 3000) for _ in range(prompt - 1)] for i in range(sequences)]
        engine.submit(prompts, max_tokens=200, ignore_eos=True)
        for _ in range(10):
            engine.step()
        times = []
        for _ in range(30):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        figures["step_ms"] = statistics.median(times) * 1e3
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(PROFILED):
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
    parser.add_argument("--only", choices=("steps", "bits", "released"), help="one of the parts")
    parser.add_argument("--schedules", type=int, default=100, help="random arrangements")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no arrangement begins later")
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

    if arguments.only == "released":
        params = released_model()
        for name, sizes in RELEASED_STEPS.items():
            for overlap in (True, False):
                result[f"{name}, overlap {overlap}"] = timed_steps(params, overlap, **sizes)
                save()
        return
    start = time.perf_counter()
    params = deepinfer_jax.load_params("demo", unpack=False)
    with Engine(params, RuntimeConfig(**SIZES)) as engine:
        output = engine.generate("Once upon a time", max_tokens=8, temperature=0, logprobs=0)[0]
    assert output.outputs[0].logprobs is not None
    result["first_generate_seconds"] = time.perf_counter() - start
    result["text"], result["logprobs"] = output.text, np.round(output.outputs[0].logprobs, 4).tolist()
    save()
    for overlap in (True, False) if arguments.only != "bits" else ():
        for name, sizes in STEPS.items():
            result[f"{name}, overlap {overlap}"] = timed_steps(params, overlap, **sizes)
            save()
    if arguments.only == "steps":
        return
    for found in same_bits(params, arguments.first, arguments.schedules, arguments.seconds):
        result["bits"] = found | {"first": arguments.first}
        if found["schedules"] % 25 == 0 or found["schedules"] == arguments.schedules:
            save()
    save()


if __name__ == "__main__":
    main()
