"""torch's products at the shapes of our kernels, for comparison on the same GPU and day; needs torch with CUDA.

    python benchmarks/torch_peers.py [--json FILE]

Grouped and dense products: bfloat16, and FP8 with one scale a row and a weight row, which is less exact than one
scale for 32 values and reads twice the bytes of FP4 experts. A time is the median of 5 samples of at least 100 calls
in a replayed CUDA graph, over copies of the operands that exceed the second-level cache, as in `kernel_timing.py`.
Nothing of the project imports torch; this script loads it by name.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

EXPERTS, CHOSEN, HIDDEN, WIDTH = 384, 6, 5120, 2304
TOKENS = (1, 64, 256, 1024, 8192)
DENSE = {"wq_a": (1280, 5120), "wq_b": (32768, 1280), "wo_b": (5120, 8192), "engram.wkv": (25600, 6144)}
ROWS = (8, 64, 4096)
CALLS, SAMPLES = 100, 5
CACHE_BYTES = 100 << 20


def microseconds(torch: Any, calls: list[Callable[[], Any]]) -> dict[str, Any]:
    """Median time of a call; `calls` go through the copies of the operands in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    count = -(-CALLS // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            calls[number % len(calls)]()
    graph.replay()
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / count)
    return {"us": round(statistics.median(samples), 2), "us_samples": [round(sample, 2) for sample in samples]}


def ends_of_groups(torch: Any, tokens: int, seed: int) -> Any:
    """Where each expert's rows end, for tokens that choose at random as in kernel_cases/expert_mlp.py."""
    drawn = np.random.default_rng(seed).random((tokens, EXPERTS)).argpartition(CHOSEN, axis=1)[:, :CHOSEN]
    counts = np.bincount(drawn.ravel(), minlength=EXPERTS)
    return torch.tensor(np.cumsum(counts), dtype=torch.int32, device="cuda")


def grouped(torch: Any, fp8: bool) -> dict[str, Any]:
    """Products of w1 and w3 together, [384, 4608, 5120]."""
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=kind, device="cuda")
    for expert in weight:  # one by one: values of all would need four times the memory
        expert.copy_(torch.randn(expert.shape, dtype=torch.bfloat16, device="cuda"))
    factors = torch.ones(EXPERTS, 2 * WIDTH, dtype=torch.float32, device="cuda")
    found = {}
    for tokens in TOKENS:
        rows = torch.randn(tokens * CHOSEN, HIDDEN, dtype=torch.bfloat16, device="cuda").to(kind)
        ones = torch.ones(len(rows), dtype=torch.float32, device="cuda")
        # With few experts hit, their weights would stay in the cache: another choice in every call.
        ends = [ends_of_groups(torch, tokens, tokens + seed) for seed in range(8)]

        def call(end: Any, rows: Any = rows, ones: Any = ones) -> Any:
            turned = weight.transpose(-2, -1)
            if fp8:
                return torch._scaled_grouped_mm(
                    rows, turned, ones, factors, offs=end, out_dtype=torch.bfloat16, use_fast_accum=True
                )
            return torch._grouped_mm(rows, turned, offs=end)

        found[f"grouped {tokens} tokens"] = microseconds(torch, [lambda end=end, call=call: call(end) for end in ends])
    return found


def dense(torch: Any, fp8: bool) -> dict[str, Any]:
    """Products of rows with one weight [N, K]."""
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    found = {}
    for name, (outputs, inputs) in DENSE.items():
        for count in ROWS:
            if fp8 and count % 16:
                continue  # not taken by torch._scaled_mm
            size = (outputs * inputs + count * inputs) * (1 if fp8 else 2)
            operands = []
            for _ in range(min(32, CACHE_BYTES // size + 1)):
                weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda").to(kind)
                rows = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda").to(kind)
                operands.append((rows, weight))
            one = torch.ones((), dtype=torch.float32, device="cuda")

            def call(rows: Any, weight: Any, one: Any = one) -> Any:
                if fp8:
                    return torch._scaled_mm(rows, weight.t(), one, one, out_dtype=torch.bfloat16)
                return torch.mm(rows, weight.t())

            calls = [lambda pair=pair, call=call: call(*pair) for pair in operands]
            found[f"{name} {count} rows"] = microseconds(torch, calls)
    return found


def ceilings(torch: Any) -> dict[str, float]:
    """What a copy and a bfloat16 product reach: bytes read and written, and FLOP, a second."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = microseconds(torch, [lambda: torch.mul(source, 1, out=target)])["us"] * 1e-6
    source = target = None
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = microseconds(torch, [lambda: torch.mm(a, b)])["us"] * 1e-6
    return {"copy_bytes_per_second": (4 << 30) / copy, "bf16_flop_per_second": 2 * 8192**3 / product}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        parser.error("torch is not installed here")
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
    }
    parts: dict[str, Callable[[], Any]] = {
        "ceilings": lambda: ceilings(torch),
        "dense bfloat16": lambda: dense(torch, False),
        "dense fp8": lambda: dense(torch, True),
        "grouped bfloat16": lambda: grouped(torch, False),
        "grouped fp8": lambda: grouped(torch, True),
    }
    for name, part in parts.items():
        result[name] = part()
        torch.cuda.empty_cache()
        print(json.dumps({name: result[name]}), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
