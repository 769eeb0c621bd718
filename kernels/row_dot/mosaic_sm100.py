"""`row_dot` for SM100 (Blackwell): weight rows are the lanes of tensor memory, rows of x its columns.

One warp streams weights and rows through shared memory, another one issues the products (tcgen05), and a warpgroup
reads the sums from tensor memory, adds parts, rounds and writes. FP8 weights become bfloat16 (`mosaic/fp8.py`) in the
registers of two more warpgroups and go back to shared memory; products of bfloat16 are exact, and the accumulator is
float32. This serves quantised rows too, whose values are bfloat16: the block-scaled instructions, which would take
the codes as they are, are not used.

The order of a sum is in `shapes_sm100.py`. A row's bits do not depend on the number of rows: the columns of an
instruction are dot products of their own over 16 elements of K, added to accumulators of their own; more rows give
an instruction more columns, and K is walked in the same order. That an instruction adds its 16 products in the same
way whatever its number of columns is, only a device can tell (`benchmarks/kernel_cases/row_dot.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from deepinfer_jax.kernels.mosaic.fp8 import ROWS as DECODED_ROWS
from deepinfer_jax.kernels.mosaic.fp8 import dequantize_tile, load_block_scales
from deepinfer_jax.kernels.mosaic.quantize import TILE_COLUMNS, quantize_tile
from deepinfer_jax.kernels.mosaic.shared_memory import swizzled
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP, QuantTensor
from deepinfer_jax.kernels.row_dot.shapes_sm100 import PROCESSORS, RING, ROWS, Schedule
from deepinfer_jax.kernels.tiling import pad_rows

_SUMS = plgpu.Layout.TCGEN05

# Warpgroups, and warps of the first one.
_ISSUE, _EPILOGUE, _DECODE = 0, 1, 2
_DECODERS = ROWS // DECODED_ROWS
_FETCH_WARP, _PRODUCT_WARP = 0, 1


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


class _Product:
    """Shapes and stages of one kernel; its methods are the kernel's code."""

    def __init__(
        self, x: jax.Array, w: jax.Array | QuantTensor, groups: int, out_dtype: DTypeLike, schedule: Schedule
    ) -> None:
        self.x, self.w, self.out_dtype, self.schedule = x, w, out_dtype, schedule
        self.packed = isinstance(w, QuantTensor)
        self.rows = x.shape[0]
        self.outputs, self.inputs = w.shape
        self.group_tiles = -(-self.outputs // (groups * ROWS))  # weight tiles of a group
        self.tiles = (groups * self.group_tiles, -(-self.rows // schedule.tokens))  # along outputs, along rows
        self.part_steps = self.inputs // (schedule.step * schedule.parts)
        self.ranks = schedule.parts if schedule.clustered else 1
        self.local_parts = schedule.local_parts
        tiles = self.tiles[0] * self.tiles[1]
        # A cluster has one tile: its partial sums are written and read once.
        self.blocks = tiles if self.ranks > 1 else min(tiles, PROCESSORS * schedule.resident)
        if self.inputs % (schedule.step * schedule.parts):
            raise ValueError(f"row_dot: {schedule} does not fit a weight {w.shape}")
        if schedule.quantizing and schedule.step != TILE_COLUMNS:
            raise ValueError(f"row_dot: {schedule} quantises in steps of {TILE_COLUMNS}")
        # A matrix that is longer than a tile of shared memory has to be whole tiles (compiler).
        self.columns = self.tiles[0] * ROWS
        self.padded_rows = self.rows if self.rows <= 8 else -(-self.rows // 8) * 8

    # ---- the launch -------------------------------------------------------------------------------------

    def run(self) -> jax.Array:
        s = self.schedule
        weight_dtype = jnp.uint8 if self.packed else jnp.bfloat16
        scratch = {
            "x_s": plgpu.SMEM((s.stages, s.tokens, s.step), jnp.bfloat16, transforms=swizzled(s.step, jnp.bfloat16)),
            "w_s": plgpu.SMEM((s.stages, ROWS, s.step), weight_dtype, transforms=swizzled(s.step, weight_dtype)),
            "o_s": plgpu.SMEM(
                (min(2, s.tokens // s.chunk), s.chunk, ROWS),
                self.out_dtype,
                transforms=swizzled(ROWS, self.out_dtype),
            ),
            "sums": plgpu.TMEM((ROWS, s.tensor_columns), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            "empty": plgpu.Barrier(num_barriers=s.stages, orders_tensor_core=True),
            "complete": plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
            "drained": plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        }
        if s.quantizing:
            scratch["ready"] = plgpu.Barrier(num_barriers=s.stages)
        if self.packed:
            scratch["a_s"] = plgpu.SMEM((RING, ROWS, s.step), jnp.bfloat16, transforms=swizzled(s.step, jnp.bfloat16))
            scratch["decoded"] = plgpu.Barrier(num_arrivals=_DECODERS, num_barriers=RING)
            scratch["multiplied"] = plgpu.Barrier(num_barriers=RING, orders_tensor_core=True)
        if self.ranks > 1:
            scratch["together"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=1)
        tiles = self.tiles[0] * self.tiles[1]
        result = jax.ShapeDtypeStruct((self.padded_rows, self.columns), self.out_dtype)
        partial = jax.ShapeDtypeStruct((tiles, self.ranks, ROWS, s.tokens), jnp.float32)
        call = plgpu.kernel(
            self.kernel,
            out_type=(result, partial) if self.ranks > 1 else result,
            grid=(self.blocks,),
            grid_names=("cta",),
            cluster=(self.ranks,) if self.ranks > 1 else (),
            cluster_names=("part",) if self.ranks > 1 else (),
            num_threads=_DECODE + (_DECODERS if self.packed else 0),
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

        @pl.when(warpgroup == _ISSUE)
        def _() -> None:
            @plgpu.warp_map
            def per_warp(warp: Any) -> None:
                @pl.when(warp == _FETCH_WARP)
                def _() -> None:
                    self.fetch(x_g, w_g, **scratch)

                @pl.when(warp == _PRODUCT_WARP)
                def _() -> None:
                    self.multiply(**scratch)

        @pl.when(warpgroup == _EPILOGUE)
        def _() -> None:
            self.finish(out_g, partial_g, **scratch)

        if self.packed:

            @pl.when(warpgroup >= _DECODE)
            def _() -> None:
                self.decode(warpgroup - _DECODE, scales, **scratch)

    # ---- the walk over tiles and over K, the same for all kinds of warps --------------------------------

    def walk(self, visit: Callable[[Any, Any, Any], None]) -> None:
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

    def walk_steps(self, visit: Callable[[Any, Any, Any, Any], None]) -> None:
        """Call visit(pipeline steps of this block before, step of K, weight tile, token tile) for all steps."""
        steps = self.part_steps * self.local_parts

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            def body(k: Any, carry: None) -> None:
                visit(n * steps + k, self.first_step() + k, weight_tile, token_tile)
                return carry

            lax.fori_loop(0, steps, body, None)

        self.walk(tile)

    def first_step(self) -> Any:
        """First pipeline step of K that this block adds up."""
        return lax.axis_index("part") * self.part_steps if self.ranks > 1 else jnp.int32(0)

    def slot(self, done: Any) -> Any:
        """Place of a step in the pipeline."""
        return lax.rem(done, jnp.int32(self.schedule.stages))

    # ---- operands ----------------------------------------------------------------------------------------

    def fetch(self, x_g: Any, w_g: Any, *, x_s: Any, w_s: Any, full: Any, empty: Any, **_: Any) -> None:
        """Keep the pipeline filled; one warp."""
        s = self.schedule

        def step(done: Any, k: Any, weight_tile: Any, token_tile: Any) -> None:
            slot = self.slot(done)

            @pl.when(done >= s.stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            group_column = lax.div(weight_tile, jnp.int32(self.group_tiles)) * self.inputs
            tokens, weights = pl.ds(token_tile * s.tokens, s.tokens), pl.ds(weight_tile * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                x_g.at[tokens, pl.ds(group_column + k * s.step, s.step)], x_s.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(w_g.at[weights, pl.ds(k * s.step, s.step)], w_s.at[slot], full.at[slot])

        self.walk_steps(step)

    def decode(
        self,
        decoder: Any,
        scales: Any,
        *,
        w_s: Any,
        a_s: Any,
        full: Any,
        decoded: Any,
        multiplied: Any,
        **_: Any,
    ) -> None:
        """Turn half the rows of every tile of FP8 weights into bfloat16; one warpgroup."""
        blocks = self.schedule.step // GROUP
        lanes = pl.ds(decoder * DECODED_ROWS, DECODED_ROWS)

        def step(done: Any, k: Any, weight_tile: Any, token_tile: Any) -> None:
            del token_tile
            slot, place = self.slot(done), lax.rem(done, jnp.int32(RING))
            row_block = weight_tile * (ROWS // GROUP) + decoder * (DECODED_ROWS // GROUP)
            words = load_block_scales(scales, row_block, k * blocks, blocks)  # on its way during the wait
            plgpu.barrier_wait(full.at[slot])
            codes = plgpu.load(w_s.at[slot, lanes], layout=plgpu.Layout.WGMMA)

            @pl.when(done >= RING)
            def _() -> None:
                plgpu.barrier_wait(multiplied.at[place])

            a_s.at[place, lanes][...] = dequantize_tile(codes, words)
            plgpu.commit_smem()
            plgpu.barrier_arrive(decoded.at[place])

        self.walk_steps(step)

    # ---- products ----------------------------------------------------------------------------------------

    def accumulator(self, sums: Any, part: Any) -> Any:
        """Columns of tensor memory of the block's part-th partial sum; two take turns."""
        tokens = self.schedule.tokens
        return sums.at[:, pl.ds(lax.rem(part, jnp.int32(2)) * tokens, tokens)]

    def multiply(
        self, *, x_s: Any, w_s: Any, sums: Any, full: Any, empty: Any, complete: Any, drained: Any, **other: Any
    ) -> None:
        """Issue all products; one warp. A step's barrier tells when its place in the pipeline is free."""
        parts = self.local_parts

        def one_part(part: Any) -> None:
            turn = lax.rem(part, jnp.int32(2))
            accumulator = self.accumulator(sums, part)

            @pl.when(part >= 2)
            def _() -> None:
                plgpu.barrier_wait(drained.at[turn])

            def body(k: Any, carry: None) -> None:
                done = part * self.part_steps + k
                slot, place = self.slot(done), lax.rem(done, jnp.int32(RING))
                plgpu.barrier_wait(full.at[slot])
                if self.schedule.quantizing:
                    plgpu.barrier_wait(other["ready"].at[slot])
                if self.packed:
                    plgpu.barrier_wait(other["decoded"].at[place])
                weights = other["a_s"].at[place] if self.packed else w_s.at[slot]
                rows = x_s.at[slot].transpose((1, 0))
                plgpu.tcgen05_mma(accumulator, weights, rows, empty.at[slot], accumulate=k > 0)
                if self.packed:
                    plgpu.tcgen05_commit_arrive(other["multiplied"].at[place])
                return carry

            lax.fori_loop(0, self.part_steps, body, None)
            plgpu.tcgen05_commit_arrive(complete.at[turn])

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            del weight_tile, token_tile
            if parts == 1:
                one_part(n)
            else:
                lax.fori_loop(0, parts, lambda p, _: one_part(n * parts + p), None)

        self.walk(tile)

    # ---- results -----------------------------------------------------------------------------------------

    def finish(self, out_g: Any, partial_g: Any, *, sums: Any, o_s: Any, **barriers: Any) -> None:
        """Quantise the rows where the schedule says so, and make results of the accumulators; one warpgroup."""
        s = self.schedule
        parts = self.local_parts

        def tile(n: Any, weight_tile: Any, token_tile: Any) -> None:
            if s.quantizing:
                self.quantize(n, **barriers)
            row, token = weight_tile * ROWS, token_tile * s.tokens
            if self.ranks > 1:
                index = weight_tile * self.tiles[1] + token_tile
                self.combine(n, index, token, row, out_g, partial_g, sums, o_s, **barriers)
                return

            def write(i: int, total: jax.Array) -> None:
                self.store(i, total, token, row, out_g, o_s)

            if parts == 1:
                self.drain(n, sums, write, **barriers)
                return

            def total(i: int) -> Any:
                return sums.at[:, pl.ds(2 * s.tokens + i * s.chunk, s.chunk)]

            def add(i: int, part: jax.Array) -> None:
                before = plgpu.async_load_tmem(total(i), layout=_SUMS)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(total(i), before + part)

            first = n * parts
            self.drain(first, sums, lambda i, part: plgpu.async_store_tmem(total(i), part), **barriers)
            plgpu.commit_tmem()

            def between(p: Any, carry: None) -> None:
                self.drain(first + p, sums, add, **barriers)
                plgpu.commit_tmem()
                return carry

            lax.fori_loop(1, parts - 1, between, None)
            last = lambda i, part: write(i, plgpu.async_load_tmem(total(i), layout=_SUMS) + part)  # noqa: E731
            self.drain(first + parts - 1, sums, last, **barriers)
            plgpu.wait_load_tmem()

        self.walk(tile)
        plgpu.wait_smem_to_gmem(0)

    def quantize(self, n: Any, *, x_s: Any, full: Any, ready: Any, **_: Any) -> None:
        """Quantise the rows of the n-th tile between their arrival and the products, step by step."""
        steps = self.part_steps * self.local_parts

        def body(k: Any, carry: None) -> None:
            slot = self.slot(n * steps + k)
            plgpu.barrier_wait(full.at[slot])
            quantize_tile(x_s.at[slot])
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])
            return carry

        lax.fori_loop(0, steps, body, None)

    def drain(
        self, part: Any, sums: Any, use: Callable[[int, jax.Array], None], *, complete: Any, drained: Any, **_: Any
    ) -> None:
        """Call use(i, float32 [128, chunk]) for all chunks of a partial sum, then give its accumulator back."""
        s = self.schedule
        turn = lax.rem(part, jnp.int32(2))
        plgpu.barrier_wait(complete.at[turn])
        for i in range(s.tokens // s.chunk):
            columns = pl.ds(turn * s.tokens + i * s.chunk, s.chunk)
            use(i, plgpu.async_load_tmem(sums.at[:, columns], layout=_SUMS))
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(drained.at[turn])

    def combine(
        self,
        n: Any,
        index: Any,
        token: Any,
        row: Any,
        out_g: Any,
        partial_g: Any,
        sums: Any,
        o_s: Any,
        *,
        together: Any,
        **barriers: Any,
    ) -> None:
        """Add the parts of a cluster's blocks in ascending order; each block finishes some of the tokens."""
        s = self.schedule
        rank = lax.axis_index("part")

        def publish(i: int, part: jax.Array) -> None:
            _store_part(partial_g.at[index, rank, :, pl.ds(i * s.chunk, s.chunk)], part)

        self.drain(n, sums, publish, **barriers)
        _cluster_fence()
        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)
        _cluster_fence()
        share = max(8, s.tokens // self.ranks)

        @pl.when(rank * share < s.tokens)
        def _() -> None:
            for i, start in enumerate(range(0, share, s.chunk)):
                tokens = pl.ds(rank * share + start, min(share, s.chunk))
                total = None
                for p in range(self.ranks):
                    part = plgpu.load(partial_g.at[index, p, :, tokens], layout=_SUMS, optimized=False)
                    total = part if total is None else total + part
                self.store(i, total, token + rank * share, row, out_g, o_s)

    def store(self, i: int, total: Any, token: Any, row: Any, out_g: Any, o_s: Any) -> None:
        """Round once, transpose to rows of x, and write the i-th chunk; rows past the end are dropped."""
        slots, chunk = o_s.shape[:2]
        size = total.shape[1]
        ref = o_s.at[i % slots]
        if size < chunk:
            ref = ref.at[pl.ds(0, size)]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        values = plgpu.layout_cast(total.astype(self.out_dtype), plgpu.Layout.TCGEN05_TRANSPOSED)
        ref.transpose((1, 0))[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref, out_g.at[pl.ds(token + i * chunk, size), pl.ds(row, ROWS)])


def _store_part(ref: Any, part: jax.Array) -> None:
    """Write a chunk of a partial sum, whose rows may be shorter than the cache lines that newer jax asks for."""
    if interpreting() or not hasattr(plgpu, "store"):
        ref[...] = part
    else:
        plgpu.store(ref, part, optimized=False)


def _cluster_fence() -> None:
    """Make a block's writes to global memory visible to the other blocks of its cluster, and theirs to it."""
    if interpreting():  # its memory is coherent
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()  # type: ignore[call-arg]
