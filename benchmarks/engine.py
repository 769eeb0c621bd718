"""Throughput of the engine: one request, many requests, shared prefixes, time to the first token.

    python benchmarks/engine.py [--requests 32] [--tokens 64] [--json FILE]

Medians of --repeats runs after a warm-up. Every request's tokens are compared with those it gives alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from typing import Any

import jax
import jaxlib

import deepinfer_jax
from deepinfer_jax.runtime import use_compile_cache


def timed(function: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measure(requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Figures of the demo model with default sizes."""
    use_compile_cache()
    params = deepinfer_jax.load_params("demo")
    prompts = [f"Story number {i} begins" for i in range(requests)]
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    figures: dict[str, Any] = {}
    with deepinfer_jax.Engine(params) as engine:
        figures["warmup_seconds"] = timed(engine.warmup)[0]
        alone = [engine.generate(prompt, sampling)[0] for prompt in prompts[:3]]
        single = [timed(lambda: engine.generate(prompts[0], sampling))[0] for _ in range(repeats)]
        many, first = [], []
        for _ in range(repeats):
            seconds, outputs = timed(lambda: engine.generate(prompts, sampling))
            assert outputs[:3] == alone, "a result depends on its neighbours"
            many.append(seconds)
            stream = engine.stream(prompts[0], sampling)
            first.append(timed(lambda stream=stream: next(stream))[0])
            stream.close()  # type: ignore[attr-defined]
        figures["one_request_tokens_per_second"] = tokens / statistics.median(single)
        figures["many_requests"] = requests
        figures["many_requests_tokens_per_second"] = requests * tokens / statistics.median(many)
        figures["many_over_one"] = figures["many_requests_tokens_per_second"] / figures["one_request_tokens_per_second"]
        figures["first_token_seconds"] = statistics.median(first)
        prefix = "It was a long day. " * 120
        cold, answer = timed(lambda: engine.generate(prefix + "One", max_tokens=1))
        warm, again = timed(lambda: engine.generate(prefix + "Two", max_tokens=1))
        figures["prefix"] = {
            "prompt_tokens": answer[0].usage.prompt_tokens,
            "cached_tokens": again[0].usage.cached_tokens,
            "cold_seconds": cold,
            "cached_seconds": warm,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "python": platform.python_version()},
        "load_average": os.getloadavg()[0],
        "settings": {"tokens": arguments.tokens, "repeats": arguments.repeats, "model": "demo, default sizes"},
        **measure(arguments.requests, arguments.tokens, arguments.repeats),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
