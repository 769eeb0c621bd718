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
    Item,
    Plan,
    for_each_item,
    plan,
    programs,
    smallest,
    stream,
)
from deepinfer_jax.kernels.expert_mlp.shapes import ROW_STEP
from deepinfer_jax.kernels.fp4_fragments import TILE
from deepinfer_jax.kernels.mosaic.target import architecture
from deepinfer_jax.kernels.quantization import QuantTensor

plgpu: Any = mosaic_gpu  # its types are not those of its functions


def tensor_cores() -> ModuleType:
    """The module with the products of the architecture that is compiled for."""
    return mosaic_sm100 if architecture() == "sm100" else mosaic_sm90


def _kernel(*refs: Any, p: Plan, cores: ModuleType, row_operands: int, limit: float, quantize: bool) -> None:
    rows, refs = refs[:row_operands], refs[row_operands:]
    weights: Sequence[tuple[Any, Any]]
    if p.gated:
        words1, scales1, words3, scales3, factors, tiles, count, out, *scratch = refs
        weights = ((words1, scales1), (words3, scales3))
    else:
        words2, scales2, tiles, count, out, *scratch = refs
        weights, factors = ((words2, scales2),), None
    of_ring = len(cores.ring(p))
    ring, memory, (out_tiles, reduction) = scratch[:of_ring], scratch[of_ring:-2], scratch[-2:]
    warpgroup = lax.axis_index("warpgroup")
    registers = p.warpgroups == 2  # 384 threads share the registers evenly unless told otherwise

    @pl.when(warpgroup == p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(24, action="decrease")
        stream(p, tiles, count, ring[-1], functools.partial(cores.bring, p, rows, weights, ring))

    @pl.when(warpgroup < p.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(240, action="increase")

        def of_item(number: jax.Array, item: Item) -> None:
            def finish(sums: Sequence[jax.Array], start: int) -> None:
                """Store what comes of sums float32 [64, rows from `start` on] of each of this warpgroup's tiles."""
                own = pl.multiple_of(item.first + start, ROW_STEP) if start else item.first
                left = item.rows - start if start else item.rows
                store = functools.partial(store_columns, out, out_tiles.at[warpgroup], own, left)
                if p.gated:
                    gate, up = sums
                    hidden = gated_hidden(
                        gate, up, factors, own, limit=limit, quantize=quantize, scratch=reduction.at[warpgroup]
                    )
                    store(item.column * p.output_tiles + warpgroup, hidden)
                else:
                    for a, values in enumerate(sums):
                        store(item.column * p.output_tiles + a * p.warpgroups + warpgroup, values.astype(jnp.bfloat16))

            choices = [
                functools.partial(cores.multiply, p, size, number, warpgroup, ring, memory, finish)
                for size in p.row_choices
            ]
            lax.switch(smallest(p.row_choices, item.rows), choices)

        for_each_item(p, tiles, count, of_item)
        plgpu.wait_smem_to_gmem(0)


def _grouped_product(
    weights: Sequence[QuantTensor],
    x: jax.Array,
    operands: Sequence[jax.Array],
    row_choices: tuple[int, ...] | None,
    limit: float = np.inf,
    quantize: bool = False,
) -> jax.Array:
    """operands: (factors of gated rows,) tiles, count."""
    cores = tensor_cores()
    for weight in weights:
        if weight.format != cores.FORMAT:
            raise ValueError(f"mosaic_gpu: this architecture's products read {cores.FORMAT!r}, not {weight.format!r}")
    _, columns, depth = weights[0].shape
    p = plan(columns, depth, row_choices, gated=len(weights) == 2, target=architecture())
    rows = cores.row_operands(x, operands[-2])
    settings = {"p": p, "cores": cores, "row_operands": len(rows), "limit": limit, "quantize": quantize}
    return plgpu.kernel(
        functools.partial(_kernel, **settings),
        out_type=jax.ShapeDtypeStruct((x.shape[0], p.columns), jnp.bfloat16),
        grid=(programs(),),
        grid_names=("program",),
        num_threads=p.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *cores.ring(p),
            *cores.scratch(p),
            plgpu.SMEM((p.warpgroups, TILE, TILE), jnp.bfloat16, transforms=ROW_TRANSFORMS),
            plgpu.SMEM((p.warpgroups, REDUCTION_NUMBERS), jnp.float32),
        ],
    )(*rows, *(array for weight in weights for array in cores.weight_operands(weight)), *operands)


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
        x: bfloat16 [R, D] rows sorted by expert, already quantised (Blackwell multiplies nothing else).
        w1, w3: [E, N, D] in the architecture's order (`repack.py`). factors: float32 [R].
        tiles, count: of `shapes.group_rows`; rows outside tiles stay undefined.
        row_choices: for tests that the choice changes no bit; the last one has to be LARGEST_ROWS.
    Returns: bfloat16 [R, N].
    """
    return _grouped_product((w1, w3), x, (factors, tiles, count), row_choices, limit, quantize)


def down(
    hidden: jax.Array,
    w2: QuantTensor,
    tiles: jax.Array,
    count: jax.Array,
    *,
    row_choices: tuple[int, ...] | None = None,
) -> jax.Array:
    """hidden bfloat16 [R, N] times w2 [E, D, N] -> bfloat16 [R, D]; the rest as for `gate_up`."""
    return _grouped_product((w2,), hidden, (tiles, count), row_choices)
