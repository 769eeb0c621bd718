"""Prefill and decode speed of the demo model on this machine, and what trimming decoder rows saves.

    python benchmarks/prefill.py --json benchmarks/results/prefill_cpu.json

One compiled program; every figure is the median of several runs after a warm-up. Prompts of
16 * (sliding_window - 1) * decoder_layers tokens, as in the row count of tests/model/test_replay.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib import version as jaxlib_version

from deepinfer_jax.batching import Chunk, Replay, make_batch
from deepinfer_jax.engine.programs import forward_program
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.load import load_params
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE, State, init_state

ROWS, SLOTS = 128, 8


class Bench:
    """The demo model, one state, one compiled program."""

    def __init__(self, params: Params) -> None:
        self.params, self.config = params, params.config
        pages = self.config.max_position_embeddings // PAGE
        self.table = np.arange(SLOTS * pages, dtype=np.int32).reshape(SLOTS, pages)
        kernels, profile = Kernels(), numerics_profile("reference")
        self.program = forward_program(self.config, profile, kernels)
        self.state: State = init_state(self.config, profile, slots=SLOTS, pages=SLOTS * pages, row_block=16)

    def step(self, chunks: list[Chunk], replay: Replay) -> float:
        """Seconds of one call, host work included."""
        start = time.perf_counter()
        batch = make_batch(self.config, chunks, self.table, rows=ROWS, logit_rows=16, replay=replay)
        outputs, self.state = self.program(self.params, self.state, batch)
        jax.block_until_ready(outputs.logits)
        return time.perf_counter() - start

    def prefill(self, length: int, replay: Replay) -> float:
        """Seconds to process a prompt of `length` tokens."""
        ids = np.random.default_rng(0).integers(3, 3000, length).tolist()
        total = 0.0
        for start in range(0, length, ROWS):
            piece = ids[start : start + ROWS]
            last = start + len(piece) == length
            total += self.step([Chunk(0, start, piece, length, "last" if last else "none")], replay)
        return total

    def decode(self, sequences: int, position: int) -> float:
        """Seconds of one decode step of several sequences at one position."""
        return self.step([Chunk(slot, position, [7], 1) for slot in range(sequences)], "none")


def measure(repeats: int) -> dict[str, Any]:
    """All figures, in seconds."""
    bench = Bench(load_params("demo"))
    config = bench.config
    length = 16 * (config.sliding_window - 1) * config.decoder_layers
    bench.prefill(2 * ROWS, "none")  # compiles
    rules: tuple[Replay, ...] = ("none", "exact_trim")
    prefill = {rule: statistics.median(bench.prefill(length, rule) for _ in range(repeats)) for rule in rules}
    decode = {}
    for count in (1, SLOTS):
        times = [bench.decode(count, 512 + i) for i in range(10 * repeats)]
        decode[f"{count} sequences"] = statistics.median(times)
    return {
        "prompt_tokens": length,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": {rule: length / seconds for rule, seconds in prefill.items()},
        "exact_trim_share_of_time": prefill["exact_trim"] / prefill["none"],
        "decode_step_seconds": decode,
        "decode_tokens_per_second": {name: int(name.split()[0]) / s for name, s in decode.items()},
    }


def main() -> None:
    """Measure and print or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "jax": jax.__version__,
        "jaxlib": jaxlib_version.__version__,
        **measure(arguments.repeats),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
