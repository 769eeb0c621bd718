"""Compiles the forward pass of the released configuration without weights and prints what it took, as JSON.

Run as a program in a process of its own, because peak memory is counted per process:

    python tests/model/released_program.py released
    python tests/model/released_program.py doubled
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time

import jax
import jax.numpy as jnp

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE
from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import Outputs, forward
from deepinfer_jax.model.params import Params, abstract_params
from deepinfer_jax.model.plan import layer_plan
from deepinfer_jax.model.state import Batch, State, init_state

ROWS, SLOTS, LOGIT_ROWS, PAGES_OF_A_SEQUENCE, PAGES = 64, 4, 16, 64, 256


def doubled() -> ModelConfig:
    """The released stack with twice the repeats of its repeated segments and the same kinds of layers."""
    released = ModelConfig.released()
    return dataclasses.replace(
        released,
        num_hidden_layers=68,
        compress_ratios=(0,) * 2 + (2,) * 30 + (1,) * 36 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20, 26, 32),
        index_source_layer_ids=(2, 8, 14, 20, 26, *range(32, 68, 4)),
        candidate_source_layer_id=32,
        dspark_target_layer_ids=(65, 66, 67),
        engram_layer_ids=(1, 26),
    )


CONFIGS = {"released": ModelConfig.released, "doubled": doubled}


def main(name: str) -> None:
    """Trace, lower and compile; print seconds, sizes and peak memory."""
    config = CONFIGS[name]()

    def ints(*shape: int) -> jax.Array:
        return jax.ShapeDtypeStruct(shape, jnp.int32)  # type: ignore[return-value]

    def step(params: Params, state: State, batch: Batch) -> tuple[Outputs, State]:
        return forward(params, state, batch, config=config, profile=REFERENCE)

    state = jax.eval_shape(lambda: init_state(config, REFERENCE, slots=SLOTS, pages=PAGES, row_block=ROW_TILE))
    batch = Batch(
        token_ids=ints(ROWS),
        positions=ints(ROWS),
        sequence=ints(ROWS),
        decoder_rows=ints(ROWS),
        logit_rows=ints(LOGIT_ROWS),
        page_table=ints(SLOTS, PAGES_OF_A_SEQUENCE),
        window_start=ints(SLOTS),
        encoder_start=ints(SLOTS),
        page_start=ints(SLOTS),
        image_mask=jax.ShapeDtypeStruct((ROWS,), jnp.bool_),  # type: ignore[arg-type]
    )
    start = time.perf_counter()
    lowered = jit(step, donate_argnums=1).lower(abstract_params(config), state, batch)
    lowered_at = time.perf_counter()
    text = lowered.as_text()
    printed_at = time.perf_counter()
    compiled = lowered.compile()
    finished = time.perf_counter()
    memory = compiled.memory_analysis()
    report = {
        "layers": config.num_hidden_layers,
        "segments": [[segment.repeats, len(segment.runs)] for segment in layer_plan(config)],
        "lower_s": round(lowered_at - start, 1),
        "compile_s": round(finished - printed_at, 1),
        "cpu_s": round(time.process_time(), 1),
        "text_bytes": len(text),
        "instructions": text.count(" = "),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "argument_gb": round(memory.argument_size_in_bytes / 1e9, 1),
        "temporary_gb": round(memory.temp_size_in_bytes / 1e9, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
