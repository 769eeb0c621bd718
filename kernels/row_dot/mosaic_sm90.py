"""`row_dot` for SM90 (Hopper): weight rows are the rows of the warpgroup product, tokens its columns.

One warpgroup streams weights and rows through shared memory, the others multiply. FP8 weights become bfloat16 in
registers (`kernels/mosaic/fp8.py`); products of bfloat16 are exact, and the accumulator is float32. The order of
a sum is in `shapes.py`. Tile sizes do not change it: an instruction adds 16 products to each accumulator whatever
the number of its columns is, which `benchmarks/kernel_cases/row_dot.py` checks on the device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from deepinfer_jax.kernels.mosaic.fp8 import dequantize_tile, load_block_scales
from deepinfer_jax.kernels.mosaic.quantize import TILE_COLUMNS, quantize_tile
from deepinfer_jax.kernels.mosaic.shared_memory import swizzled
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor
from deepinfer_jax.kernels.row_dot.shapes import BLOCK, PART_STEP, PROCESSORS, RESIDENT, Schedule
from deepinfer_jax.kernels.tiling import pad_rows

_WGMMA = plgpu.Layout.WGMMA


def product(
    x: jax.Array, w: jax.Array | QuantTensor, groups: int, out_dtype: DTypeLike, schedule: Schedule
) -> jax.Array:
    """Products of rows with a weight, group by group. A schedule that quantises does so with the rows first.

    Args:
        x: bfloat16 [T, groups * K], K a multiple of 64.
        w: bfloat16 [groups * N, K] or FP8 of that shape; N is a multiple of 8, or N < 8; with several groups it is
            a multiple of the tile's rows.
        out_dtype: bfloat16 or float32.
    Returns: [T, groups * N].
    """
    return _Product(x, w, groups, out_dtype, schedule).run()


def _whole_tiles(length: int, tile: int, unit: int) -> int:
    """The next multiple of the tile, or of the unit for what fits in one tile."""
    step = tile if length > tile else unit
    return -(-length // step) * step


class _Product:
    """Shapes and stages of one kernel; its methods are the kernel's code."""

    def __init__(
        self, x: jax.Array, w: jax.Array | QuantTensor, groups: int, out_dtype: DTypeLike, schedule: Schedule
    ) -> None:
        self.x, self.w, self.out_dtype, self.schedule = x, w, out_dtype, schedule
        self.packed = isinstance(w, QuantTensor)
        self.rows = x.shape[0]
        self.outputs, self.inputs = w.shape
        self.group_tiles = -(-self.outputs // (groups * schedule.weight_rows))  # weight tiles of a group
        self.tiles = (groups * self.group_tiles, -(-self.rows // schedule.tokens))  # along outputs, along rows
        # Steps of all of K; (units of K in every part, parts with one more), steps of a unit.
        self.steps = self.inputs // schedule.step
        self.unit_steps = 1 if schedule.parts == 1 else PART_STEP // schedule.step
        self.units = divmod(self.steps // self.unit_steps, schedule.parts)
        self.ranks = schedule.parts if schedule.clustered else 1
        self.local_parts = 1 if schedule.clustered else schedule.parts
        tiles = self.tiles[0] * self.tiles[1]
        # Two small blocks share a processor. A cluster has one tile: its partial sums are written and read once.
        resident = RESIDENT if schedule.warpgroups == 1 else PROCESSORS
        self.blocks = tiles if self.ranks > 1 else min(tiles, resident)
        if self.inputs % (schedule.step * self.unit_steps) or not self.units[0]:
            raise ValueError(f"row_dot: {schedule} does not fit a weight {w.shape}")
        if schedule.quantizing and schedule.step != TILE_COLUMNS:
            raise ValueError(f"row_dot: {schedule} quantises in steps of {TILE_COLUMNS}")
        # A matrix that is longer than a tile of shared memory has to be whole tiles (compiler), and copies of its
        # rows whole 16 bytes (hardware). What is shorter than a tile reads as zero and is not written beyond.
        size = jnp.dtype(out_dtype).itemsize
        self.columns = _whole_tiles(self.outputs, 128 // size, 16 // size)
        self.padded_rows = _whole_tiles(self.rows, 8, 1)

    # ---- the launch -------------------------------------------------------------------------------------

    def run(self) -> jax.Array:
        s = self.schedule
        weight_dtype = jnp.uint8 if self.packed else jnp.bfloat16
        scratch = {
            "x_s": plgpu.SMEM((s.stages, s.tokens, s.step), jnp.bfloat16, transforms=swizzled(s.step, jnp.bfloat16)),
            "w_s": plgpu.SMEM(
                (s.stages, s.weight_rows, s.step), weight_dtype, transforms=swizzled(s.step, weight_dtype)
            ),
            "o_s": plgpu.SMEM(
                (s.warpgroups, min(2, s.tokens // s.chunk), s.chunk, BLOCK),
                self.out_dtype,
                transforms=swizzled(BLOCK, self.out_dtype),
            ),
            "full": plgpu.Barrier(num_arrivals=1 if s.quantizing else 2, num_barriers=s.stages),
            "empty": plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=s.stages),
        }
        if s.quantizing:
            scratch["raw"] = plgpu.Barrier(num_barriers=s.stages)
            scratch["ready"] = plgpu.Barrier(num_barriers=s.stages)
        if interpreting() and self.packed:  # where the interpreter's products find the decoded weights
            scratch["a_s"] = plgpu.SMEM(
                (s.warpgroups, BLOCK, s.step), jnp.bfloat16, transforms=swizzled(s.step, jnp.bfloat16)
            )
        if self.ranks > 1:
            scratch["together"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=s.warpgroups)
        tiles = self.tiles[0] * self.tiles[1]
        result = jax.ShapeDtypeStruct((self.padded_rows, self.columns), self.out_dtype)
        partial = jax.ShapeDtypeStruct((tiles, self.ranks, s.weight_rows, s.tokens), jnp.float32)
        call = plgpu.kernel(
            self.kernel,
            out_type=(result, partial) if self.ranks > 1 else result,
            grid=(self.blocks,),
            grid_names=("cta",),
            cluster=(self.ranks,) if self.ranks > 1 else (),
            cluster_names=("part",) if self.ranks > 1 else (),
            num_threads=s.warpgroups + (2 if s.quantizing else 1),
            thread_name="wg",
            scratch_types=scratch,
        )
        operands = (self.w.data, self.w.scale) if isinstance(self.w, QuantTensor) else (self.w,)
        y = call(pad_rows(self.x, self.padded_rows), *operands)
        return (y[0] if self.ranks > 1 else y)[: self.rows, : self.outputs]

    def kernel(self, x_g: Any, w_g: Any, *refs: Any, **scratch: Any) -> None:
        scales = refs[0] if self.packed else None
        out_g, partial_g = refs[-2:] if self.ranks > 1 else (refs[-1], None)
        warpgroup = lax.axis_index("wg")
        multiplying = warpgroup < self.schedule.warpgroups
        # Large tiles keep most of the 64 Ki registers in accumulators: the fetching warpgroup gives away its own.
        budget = (232, 40) if self.schedule.warpgroups == 2 and self.schedule.tokens > 64 else None

        @pl.when(multiplying)
        def _() -> None:
            if budget is not None:
                plgpu.set_max_registers(budget[0], action="increase")
            self.multiply(warpgroup, scales, out_g, partial_g, **scratch)

        @pl.when(warpgroup == self.schedule.warpgroups)
        def _() -> None:
            if budget is not None:
                plgpu.set_max_registers(budget[1], action="decrease")
            self.fetch(x_g, w_g, **scratch)

        if self.schedule.quantizing:

            @pl.when(warpgroup == self.schedule.warpgroups + 1)
            def _() -> None:
                self.quantize(scratch["x_s"], scratch["raw"], scratch["ready"])

    # ---- the walk over tiles and over K, the same for all kinds of warpgroups ---------------------------

    def walk(self, visit: Any) -> None:
        """Call visit(n-th tile of this block, weight tile, token tile) for all tiles of this block."""
        weight_tiles, token_tiles = self.tiles
        total, blocks = weight_tiles * token_tiles, self.blocks

        def body(n: Any, carry: None) -> None:
            tile = lax.axis_index("cta") + n * blocks
            if token_tiles == 1:
                weight_tile, token_tile = tile, jnp.int32(0)
            else:  # blocks that run at the same time share weights and rows in the second-level cache
                weight_tile, token_tile = plgpu.planar_snake(tile, self.tiles, 1, 8)
            visit(n, weight_tile, token_tile)
            return carry

        count = lax.div(total - lax.axis_index("cta") + blocks - 1, jnp.int32(blocks))
        lax.fori_loop(0, count, body, None)

    def part_start(self, part: Any) -> Any:
        """First pipeline step of K of a part."""
        each, more = self.units
        start = part * each + jnp.minimum(part, more) if more else part * each
        return start * self.unit_steps

    def part_steps(self, part: Any) -> Any:
        """Pipeline steps of a part: the first parts may have a unit more."""
        each, more = self.units
        return (each + (part < more).astype(jnp.int32) if more else each) * self.unit_steps

    def slot(self, done: Any) -> Any:
        """Stage of the pipeline of a block's step number `done`."""
        return lax.rem(done, jnp.int32(self.schedule.stages))

    def next_slot(self, slot: Any) -> Any:
        """The stage behind a stage: a remainder in every step took 32 of 278 instructions."""
        return jnp.where(slot == self.schedule.stages - 1, 0, slot + 1)

    def first_step(self) -> Any:
        """First pipeline step of K that this block adds up."""
        return self.part_start(lax.axis_index("part")) if self.ranks > 1 else jnp.int32(0)

    def block_steps(self) -> Any:
        """Pipeline steps that this block adds up for a tile."""
        return self.part_steps(lax.axis_index("part")) if self.ranks > 1 else self.steps

    def fetch(self, x_g: Any, w_g: Any, *, x_s: Any, w_s: Any, full: Any, empty: Any, **other: Any) -> None:
        """Keep the pipeline filled."""
        s = self.schedule
        x_full = other["raw"] if s.quantizing else full
        steps = self.block_steps()

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            group_column = lax.div(weight_tile, jnp.int32(self.group_tiles)) * self.inputs

            def body(k: Any, slot: Any) -> Any:
                @pl.when(n * steps + k >= s.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                column = (self.first_step() + k) * s.step
                tokens = pl.ds(token_tile * s.tokens, s.tokens)
                weights = pl.ds(weight_tile * s.weight_rows, s.weight_rows)
                plgpu.copy_gmem_to_smem(
                    x_g.at[tokens, pl.ds(group_column + column, s.step)], x_s.at[slot], x_full.at[slot]
                )
                plgpu.copy_gmem_to_smem(w_g.at[weights, pl.ds(column, s.step)], w_s.at[slot], full.at[slot])
                return self.next_slot(slot)

            lax.fori_loop(0, steps, body, self.slot(n * steps))

        self.walk(tile)

    def quantize(self, x_s: Any, raw: Any, ready: Any) -> None:
        """Quantise rows between their arrival and the products, step by step."""
        steps = self.block_steps()

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            def body(k: Any, slot: Any) -> Any:
                plgpu.barrier_wait(raw.at[slot])
                quantize_tile(x_s.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])
                return self.next_slot(slot)

            lax.fori_loop(0, steps, body, self.slot(n * steps))

        self.walk(tile)

    # ---- products ----------------------------------------------------------------------------------------

    def multiply(self, warpgroup: Any, scales: Any, out_g: Any, partial_g: Any, **scratch: Any) -> None:
        s = self.schedule
        steps = self.block_steps()

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            row = weight_tile * s.weight_rows + warpgroup * BLOCK

            def part(p: Any) -> jax.Array:
                first = self.part_start(p)
                return self.partial_sum(n * steps + first, first, self.part_steps(p), row, warpgroup, scales, **scratch)

            if self.ranks > 1:
                total = self.partial_sum(n * steps, self.first_step(), steps, row, warpgroup, scales, **scratch)
            elif self.local_parts == 1:
                total = part(jnp.int32(0))
            else:
                zero = plgpu.layout_cast(jnp.zeros((BLOCK, s.tokens), jnp.float32), _WGMMA)
                total = lax.fori_loop(0, self.local_parts, lambda p, sum_: sum_ + part(p), zero)
            if self.ranks > 1:
                self.combine(total, weight_tile, token_tile, row, warpgroup, out_g, partial_g, **scratch)
            else:
                self.store(total, token_tile * s.tokens, row, warpgroup, out_g, scratch["o_s"])

        self.walk(tile)
        plgpu.wait_smem_to_gmem(0)

    def partial_sum(
        self,
        done: Any,
        first: Any,
        steps: Any,
        row: Any,
        warpgroup: Any,
        scales: Any,
        *,
        x_s: Any,
        w_s: Any,
        full: Any,
        empty: Any,
        **other: Any,
    ) -> jax.Array:
        """float32 [64, tokens]: one accumulator over steps of K.

        done: steps of this block before these. first, steps: where in K the part begins, and its length.
        """
        s = self.schedule
        lanes = pl.ds(warpgroup * BLOCK, BLOCK)
        blocks = s.step // GROUP

        def words(k: Any) -> jax.Array:
            step = first + jnp.minimum(k, steps - 1)
            return load_block_scales(scales, lax.div(row, jnp.int32(GROUP)), step * blocks, blocks)

        def accumulate(accumulator: Any) -> jax.Array:
            def body(k: Any, carry: Any) -> Any:
                slot, scale_words = carry
                # The next step's scales are on their way while this one waits for its codes.
                following = words(k + 1) if self.packed else None
                plgpu.barrier_wait(full.at[slot])
                if s.quantizing:
                    plgpu.barrier_wait(other["ready"].at[slot])
                if not self.packed:
                    plgpu.wgmma(accumulator, w_s.at[slot, lanes], x_s.at[slot].transpose((1, 0)))
                else:
                    codes = plgpu.load(w_s.at[slot, lanes], layout=_WGMMA)
                    weights = dequantize_tile(codes, scale_words)
                    if interpreting():  # the interpreter multiplies from shared memory only
                        a_s = other["a_s"]
                        a_s[warpgroup] = weights
                        plgpu.commit_smem()
                        weights = a_s.at[warpgroup]
                    plgpu.wgmma(accumulator, weights, x_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot])
                return self.next_slot(slot), following

            lax.fori_loop(0, steps, body, (self.slot(done), words(jnp.int32(0)) if self.packed else None))
            return accumulator[...]

        return pl.run_scoped(accumulate, plgpu.ACC((BLOCK, s.tokens), jnp.float32))  # type: ignore[attr-defined]

    # ---- results -----------------------------------------------------------------------------------------

    def combine(
        self,
        part: Any,
        weight_tile: Any,
        token_tile: Any,
        row: Any,
        warpgroup: Any,
        out_g: Any,
        partial_g: Any,
        *,
        together: Any,
        o_s: Any,
        **_: Any,
    ) -> None:
        """Add the parts of a cluster's blocks in ascending order; each block finishes some of the tokens."""
        s = self.schedule
        rank = lax.axis_index("part")
        tile = weight_tile * self.tiles[1] + token_tile
        lanes = pl.ds(warpgroup * BLOCK, BLOCK)
        partial_g.at[tile, rank, lanes][...] = part
        _cluster_fence()
        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)
        _cluster_fence()
        share = 8 * -(-s.tokens // (8 * self.ranks))

        @pl.when(rank * share < s.tokens)
        def _() -> None:
            tokens = pl.ds(rank * share, share)
            total = plgpu.layout_cast(jnp.zeros((BLOCK, share), jnp.float32), _WGMMA)
            for p in range(self.ranks):
                total += plgpu.load(partial_g.at[tile, p, lanes, tokens], layout=_WGMMA, optimized=False)
            self.store(total, token_tile * s.tokens + rank * share, row, warpgroup, out_g, o_s)

    def store(self, total: Any, token: Any, row: Any, warpgroup: Any, out_g: Any, o_s: Any) -> None:
        """Round once, transpose to rows of x, and write; rows and columns past the end are dropped."""
        slots, chunk = o_s.shape[1:3]
        tokens = total.shape[1]
        for i, start in enumerate(range(0, tokens, chunk)):
            size = min(chunk, tokens - start)
            ref = o_s.at[warpgroup, i % slots]
            if size < chunk:
                ref = ref.at[pl.ds(0, size)]
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            values = total[:, start : start + size].astype(self.out_dtype)
            values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
            ref.transpose((1, 0))[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ref, out_g.at[pl.ds(token + start, size), pl.ds(row, BLOCK)])


def _cluster_fence() -> None:
    """Make a block's writes to global memory visible to the other blocks of its cluster, and theirs to it."""
    if interpreting():  # its memory is coherent
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()  # type: ignore[call-arg]
