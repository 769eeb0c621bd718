"""Grouped FP4 products of the experts: the kernel around an architecture's tensor-core products.

One warpgroup streams tiles of weights and rows (`mosaic_stream.py`), the others multiply (`mosaic_sm90.py`,
`mosaic_sm100.py`) and finish what they multiplied: the middle of the experts, or the rounding of the second product
(`mosaic_middle.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.expert_mlp import mosaic_sm90, mosaic_sm100
from deepinfer_jax.kernels.expert_mlp.mosaic_middle import gated_hidden, store_columns
from deepinfer_jax.kernels.expert_mlp.mosaic_stream import (
    REDUCTION_NUMBERS,
    ROW_TRANSFORMS,
    Plan,
    for_each_item,
    plan,
    programs,
    smallest,
    stream,
)
from deepinfer_jax.kernels.expert_mlp.shapes import LARGEST_ROWS, ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE, TILE_WORDS
from deepinfer_jax.kernels.mosaic.target import architecture
from deepinfer_jax.kernels.quantization import QuantTensor

plgpu: Any = mosaic_gpu  # its types are not those of its functions


def tensor_cores() -> ModuleType:
    """The module with `multiply`, `scratch` and ORDERS_TENSOR_CORE for the architecture that is compiled for."""
    return mosaic_sm100 if architecture() == "sm100" else mosaic_sm90


def _kernel(*refs: Any, p: Plan, cores: ModuleType, limit: float, quantize: bool) -> None:
    weights: Sequence[tuple[Any, Any]]
    if p.gated:
        x, words1, scales1, words3, scales3, factors, tiles, count, out, *scratch = refs
        weights = ((words1, scales1), (words3, scales3))
    else:
        x, words2, scales2, tiles, count, out, *scratch = refs
        weights, factors = ((words2, scales2),), None
    ring, memory, (out_tiles, reduction) = scratch[:5], scratch[5:-2], scratch[-2:]
    warpgroup = lax.axis_index("warpgroup")
    registers = p.warpgroups == 2  # 384 threads share the registers evenly unless told otherwise

    @pl.when(warpgroup == p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(24, action="decrease")
        stream(p, x, weights, tiles, count, ring)

    @pl.when(warpgroup < p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(240, action="increase")

        def item(number: jax.Array, expert: Any, first: Any, rows: Any, column: Any) -> None:
            del expert

            def finish(sums: Sequence[jax.Array], start: int) -> None:
                """Store what comes of sums float32 [64, rows from `start` on] of each of this warpgroup's tiles."""
                own = pl.multiple_of(first + start, ROW_STEP) if start else first
                left = rows - start if start else rows
                store = functools.partial(store_columns, out, out_tiles.at[warpgroup], own, left)
                if p.gated:
                    gate, up = sums
                    hidden = gated_hidden(
                        gate, up, factors, own, limit=limit, quantize=quantize, scratch=reduction.at[warpgroup]
                    )
                    store(column * p.output_tiles + warpgroup, hidden)
                else:
                    for a, values in enumerate(sums):
                        store(column * p.output_tiles + a * p.warpgroups + warpgroup, values.astype(jnp.bfloat16))

            choices = [
                functools.partial(cores.multiply, p, size, number, warpgroup, ring, memory, finish)
                for size in p.row_choices
            ]
            lax.switch(smallest(p.row_choices, rows), choices)

        for_each_item(p, tiles, count, item)
        plgpu.wait_smem_to_gmem(0)


def _grouped_product(p: Plan, rows: int, limit: float, quantize: bool, *operands: jax.Array) -> jax.Array:
    cores = tensor_cores()
    depth = p.depth_tiles * TILE
    arrivals = 5 if p.gated else 3
    ring = [
        plgpu.SMEM((p.stages, LARGEST_ROWS, depth), jnp.bfloat16, transforms=ROW_TRANSFORMS),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, *TILE_WORDS), jnp.uint32),
        plgpu.SMEM((p.stages, p.weight_tiles, p.depth_tiles, TILE), jnp.uint16),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=p.stages, num_arrivals=p.warpgroups, orders_tensor_core=cores.ORDERS_TENSOR_CORE),
    ]
    return plgpu.kernel(
        functools.partial(_kernel, p=p, cores=cores, limit=limit, quantize=quantize),
        out_type=jax.ShapeDtypeStruct((rows, p.columns), jnp.bfloat16),
        grid=(programs(),),
        grid_names=("program",),
        num_threads=p.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *ring,
            *cores.scratch(p),
            plgpu.SMEM((p.warpgroups, TILE, TILE), jnp.bfloat16, transforms=ROW_TRANSFORMS),
            plgpu.SMEM((p.warpgroups, REDUCTION_NUMBERS), jnp.float32),
        ],
    )(*operands)


def gate_up(
    x: jax.Array,
    w1: QuantTensor,
    w3: QuantTensor,
    factors: jax.Array,
    tiles: jax.Array,
    count: jax.Array,
    *,
    limit: float,
    quantize: bool,
    row_choices: tuple[int, ...] | None = None,
) -> jax.Array:
    """Hidden rows of the experts, ready for `down`: both products, clamp, SiLU, routing weight, quantisation.

    Args:
        x: bfloat16 [R, D] rows sorted by expert, already quantised. w1, w3: "fp4_sm90" [E, N, D].
        factors: float32 [R]. tiles, count: of `shapes.group_rows`; rows outside tiles stay undefined.
        row_choices: for tests that the choice changes no bit; the last one has to be LARGEST_ROWS.
    Returns: bfloat16 [R, N].
    """
    p = plan(w1.shape[1], w1.shape[2], row_choices, gated=True)
    operands = (x, w1.data, w1.scale, w3.data, w3.scale, factors, tiles, count)
    return _grouped_product(p, x.shape[0], limit, quantize, *operands)


def down(
    hidden: jax.Array,
    w2: QuantTensor,
    tiles: jax.Array,
    count: jax.Array,
    *,
    row_choices: tuple[int, ...] | None = None,
) -> jax.Array:
    """hidden bfloat16 [R, N] times w2 "fp4_sm90" [E, D, N] -> bfloat16 [R, D]; rows outside tiles are undefined."""
    p = plan(w2.shape[1], w2.shape[2], row_choices, gated=False)
    return _grouped_product(p, hidden.shape[0], np.inf, False, hidden, w2.data, w2.scale, tiles, count)
