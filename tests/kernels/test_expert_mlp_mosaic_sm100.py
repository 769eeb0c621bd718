"""The Mosaic-GPU `expert_mlp` for Blackwell, interpreted on the CPU with race detection.

Tensor memory, copies and barriers are the code that is compiled; block-scaled products and their scales in tensor
memory, the widening of codes in registers (its arithmetic is checked here), the renaming of registers and the store of
transposed columns are replaced, as for Hopper (`test_expert_mlp_mosaic.py`). No Blackwell GPU has run these kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels import fp4_block_scaled
from deepinfer_jax.kernels.expert_mlp import (
    ExpertRows,
    combine_experts,
    expert_mlp,
    mosaic_products,
    mosaic_sm90,
    mosaic_sm100,
    mosaic_stream,
    route,
    shapes,
    shared_mlp,
)
from deepinfer_jax.kernels.expert_mlp.repack import repack
from deepinfer_jax.kernels.mosaic import block_scaled, interpret
from deepinfer_jax.kernels.mosaic.stacked_tiles import split_tiles, stack_tiles
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize, dequantize_fp8, quantize_dequantize_fp8

from . import reference
from .base_expert_mlp import ROUTING, choices, fp4_experts, routing_weights
from .cases import (
    DEMO,
    MICRO,
    RELEASED,
    assert_same_bits,
    bf16_normal,
    bf16_ulp,
    fp4_weight,
    fp8_weight,
    generator,
    normal,
    values,
    weight_values,
)
from .reference_formats import bf16

pytestmark = pytest.mark.interpret


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
    """Call a contract function with the interpreted kernels; results as NumPy arrays."""
    operands = tuple(x if isinstance(x, QuantTensor | ExpertRows) else jnp.asarray(x) for x in operands)
    with interpret("sm100", detect_races=True):
        result = function(*operands, implementation="mosaic_gpu", **settings)
        result = result.in_order if isinstance(result, ExpertRows) else result
        return jax.tree.map(np.asarray, result)


def tiled_places(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """(row, column) of every element of an array, in the order of the axes of its layout's tiling."""
    tiling = layout.to_mgpu().tiling
    split = np.indices(shape).transpose(1, 2, 0)
    for tile in tiling.tiles:  # each tile splits the trailing axes in two
        lead = split.shape[: -1 - len(tile)]
        trailing = split.shape[-1 - len(tile) : -1]
        parts = [n for size, part in zip(trailing, tile, strict=True) for n in (size // part, part)]
        split = split.reshape(*lead, *parts, 2)
        first = len(lead)
        outer = [first + 2 * i for i in range(len(tile))]
        inner = [first + 2 * i + 1 for i in range(len(tile))]
        split = split.transpose(*range(first), *outer, *inner, first + 2 * len(tile))
    assert split.shape[:-1] == tiling.tile_shape(shape)
    return split


@pytest.mark.fast
def test_lanes_of_stacked_tiles() -> None:
    """Guards the order of weight rows in tensor memory: each warp's 32 lanes are its 16 rows of both tiles."""
    rows = np.arange(2 * 64, dtype=np.float32).reshape(2, 64, 1).repeat(8, 2)
    with interpret("sm100"):
        stacked = stack_tiles(*map(jnp.asarray, rows))
        back = split_tiles(stacked)
    for tile in range(2):
        for row in range(64):
            warp, inside = divmod(row, 16)
            assert stacked[32 * warp + 16 * tile + inside, 0] == 64 * tile + row
        np.testing.assert_array_equal(back[tile], rows[tile])


@pytest.mark.fast
def test_stacked_registers_are_the_tiles_registers() -> None:
    """Guards the renaming of registers, which is not interpreted, against both layouts, thread by thread.

    A register of a layout is addressed by the axes of its tiling that belong to no warp and no lane.
    """

    def places(layout: Any, shape: tuple[int, int]) -> np.ndarray:
        """[column group, row group, warp, lane, element, 2] -> (row, column) in the array."""
        # [rows 1, columns/8, warp 4, 1, row groups, 1, 8 rows, 4 pairs, 2 elements]
        split = tiled_places(layout, shape)
        return split[0, :, :, 0, :, 0].transpose(0, 2, 1, 3, 4, 5, 6).reshape(shape[1] // 8, -1, 4, 32, 2, 2)

    of_tile = places(plgpu.Layout.WGMMA, (64, 64))
    stacked = places(plgpu.Layout.TCGEN05, (128, 64))
    assert of_tile.shape[:2] == (8, 2)
    for tile in range(2):
        lane = stacked[:, 2 * tile : 2 * tile + 2]
        warp, inside = np.divmod(of_tile[..., 0], 16)
        np.testing.assert_array_equal(lane[..., 0], 32 * warp + 16 * tile + inside)
        np.testing.assert_array_equal(lane[..., 1], of_tile[..., 1])


@pytest.mark.fast
def test_registers_of_an_operand() -> None:
    """Guards the order in which widened registers are handed over: of each lane's row, four columns after the other."""
    layout = block_scaled.OPERAND.to_mgpu()
    split = tiled_places(block_scaled.OPERAND, (128, 128))
    assert split.shape == (1, 32, 4, 1, 32, 4, 2)  # columns/4, warp, lane, element
    assert (layout.warp_dims, layout.lane_dims, layout.vector_dim) == ((-4,), (-2,), -1)
    assert layout.registers_shape((128, 128)) == (1, 32, 1, 1, 1, 1)
    for register in range(32):
        for warp in range(4):
            lanes = split[0, register, warp, 0]
            np.testing.assert_array_equal(lanes[..., 0], 32 * warp + np.arange(32)[:, None].repeat(4, 1))
            np.testing.assert_array_equal(lanes[..., 1], 4 * register + np.arange(4)[None].repeat(32, 0))


# ---- the packed format -----------------------------------------------------------------------------


@pytest.mark.fast
def test_words_hold_every_code_where_its_lane_takes_it() -> None:
    """Guards the order of codes in memory and in registers, written out element by element."""
    rng = generator("block-scaled words")
    codes = rng.integers(0, 16, size=(2, 128, 192)).astype(np.uint8)
    words = fp4_block_scaled.pack_codes(jnp.asarray(codes))
    assert words.shape == (2, 2, 3, 2, 256)
    np.testing.assert_array_equal(fp4_block_scaled.unpack_codes(words), codes)
    registers = np.asarray(fp4_block_scaled.words_to_e4m3(words)).reshape(2, 2, 3, 2, 64, 4, 2)
    for _ in range(200):
        e, rows, columns, group, row, word, half, byte = (int(rng.integers(n)) for n in (2, 2, 3, 2, 64, 4, 2, 4))
        register = int(registers[e, rows, columns, group, row, word, half])
        code = int(codes[e, 64 * rows + row, 64 * columns + 32 * group + 8 * word + 4 * half + byte])
        assert register >> (8 * byte) & 0xFF == (code & 8) << 4 | (code & 7) << 2


@pytest.mark.fast
def test_widened_codes_are_exact_after_the_scale() -> None:
    """Guards 'e4m3 code times 2^-6, times scale times 2^6' for every code, subnormal e4m3 included."""
    code = np.arange(16, dtype=np.uint8)
    widened = ((code & 8) << 4 | (code & 7) << 2).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = np.where(code & 8, -1.0, 1.0) * table[code & 7]
    np.testing.assert_array_equal(widened * 2.0**fp4_block_scaled.SCALE_OFFSET, expected)


@pytest.mark.fast
def test_repack_keeps_values() -> None:
    """Guards the values and shapes of repacked experts, K that is no multiple of 128, and refused scales."""
    weight = fp4_weight(generator("repack for Blackwell"), 3, 128, 192)
    extremes = weight.scale.at[0, 5, :2].set(jnp.array([0, fp4_block_scaled.LARGEST_SCALE], jnp.uint8))
    weight = QuantTensor(weight.data, extremes, "fp4")
    packed = repack(weight, "sm100")
    assert packed.format == "fp4_sm100"
    assert packed.shape == weight.shape == (3, 128, 192)
    assert packed.data.nbytes == weight.data.nbytes
    assert packed.scale.shape == (3, 2, 2, 16, 16)
    np.testing.assert_array_equal(fp4_block_scaled.unpack_scales(packed[1].scale, 192), weight.scale[1])
    decode = jax.jit(dequantize)
    np.testing.assert_array_equal(decode(packed), decode(weight))
    with pytest.raises(ValueError, match=r"scale byte 249 \(2\^122\)"):
        repack(QuantTensor(weight.data, weight.scale.at[2, 7, 1].set(249), "fp4"), "sm100")
    with interpret("sm100"):
        assert repack(weight).format == "fp4_sm100"


@pytest.mark.fast
def test_scales_where_the_tensor_core_takes_them() -> None:
    """Guards the order of scales of weights (by lane of two stacked tiles) and of rows, element by element."""
    rng = generator("block-scaled scales")
    scale = rng.integers(0, 200, size=(128, 8)).astype(np.uint8)
    stored = np.asarray(fp4_block_scaled.pack_scales(jnp.asarray(scale)))
    for step in range(2):
        both = np.concatenate([stored[0, step], stored[1, step]])  # as `bring` puts two tiles of a stage
        for lane in range(128):
            warp, inside = divmod(lane, 32)
            tile, row = divmod(inside, 16)
            expected = scale[64 * tile + 16 * warp + row, 4 * step : 4 * step + 4] + fp4_block_scaled.SCALE_OFFSET
            np.testing.assert_array_equal(both[lane % 32, 4 * (lane // 32) : 4 * (lane // 32) + 4], expected)
    rows = rng.integers(0, 200, size=(160, 6)).astype(np.uint8)  # 192 columns: half of the second step is padding
    tiles = np.asarray(fp4_block_scaled.tile_row_scales(jnp.asarray(rows), jnp.array([0, 8], jnp.int32)))
    assert tiles.shape == (2, 2, 32, 16)
    for tile, first in enumerate((0, 8)):
        for row in range(128):
            place = slice(4 * (row // 32), 4 * (row // 32) + 4)
            np.testing.assert_array_equal(tiles[tile, 0, row % 32, place], rows[first + row, :4])
            np.testing.assert_array_equal(tiles[tile, 1, row % 32, place][:2], rows[first + row, 4:])


@pytest.mark.fast
def test_rows_are_taken_apart_exactly() -> None:
    """Guards that quantised rows hold the values of their codes: the scale may be half the quantiser's."""
    rng = generator("block-scaled rows")
    x = bf16_normal(rng, 40, 192)
    x[3, :32] = 0
    x[4, 0], x[4, 1:32] = 449.0, 0.0137  # rounded down to 448: a group of half the scale
    x[5, 40] = np.nan
    rows = quantize_dequantize_fp8(jnp.asarray(x))
    tiles = jnp.array([[0, 0, 40]], jnp.int32)
    codes, scales = mosaic_sm100.row_operands(rows, tiles)
    assert codes.shape == (40, 256)
    assert not np.asarray(codes)[:, 192:].astype(np.float32).any()
    octets = np.asarray(jax.lax.bitcast_convert_type(scales, jnp.uint8)).reshape(2, 32, 4, 4)
    by_row = octets.transpose(2, 1, 0, 3).reshape(128, 8)[:40, :6]
    again = dequantize_fp8(codes[:, :192], jnp.asarray(by_row))
    np.testing.assert_array_equal(np.asarray(again), values(np.asarray(rows)))


@pytest.mark.fast
def test_memory_of_released_products() -> None:
    """Guards the 512 columns of tensor memory: sums, two operands a warpgroup of four codes a column, and scales."""
    for columns, depth, gated in (
        (RELEASED.expert_width, RELEASED.hidden, True),
        (RELEASED.hidden, RELEASED.expert_width, False),
    ):
        p = mosaic_stream.plan(columns, depth, gated=gated, target="sm100")
        assert (p.warpgroups, p.accumulators, p.depth_tiles, p.stages, p.missing_tiles) == (2, 2, 2, 5, 0)
        assert p.warpgroups * (shapes.LARGEST_ROWS + mosaic_sm100.BUFFERS * 128 // 4 + 2 * 4) == 400
    assert mosaic_stream.plan(64, 192, gated=False, target="sm100").missing_tiles == 1


# ---- the kernels -----------------------------------------------------------------------------------


def test_experts_and_their_rows() -> None:
    """Guards the whole expert path: values, tiles of several widths, and rows that do not see each other.

    Tolerances and the second call as in Hopper's test: there each row has another place, expert 0 a tile of 8 rows,
    and there are rows of NaN. The first call has tiles of 24, 16 and 8 rows (products of 128 and 16).
    """
    experts = fp4_experts(generator("mosaic experts"), DEMO, 3)
    packed = tuple(repack(weight, "sm100") for weight in experts)
    rng = generator("mosaic rows")
    second = np.where(np.arange(20) < 15, 1, 2)
    second[19] = 3  # none
    ids = np.stack([np.zeros(20), second], axis=1).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=ids.shape).astype(np.float32)
    x = bf16_normal(rng, 20, DEMO.hidden)
    settings: dict[str, Any] = {"limit": 2.5, "quantize_input": True}

    y = run(expert_mlp, x, ids, weights, *packed, **settings)
    w1, w3, w2 = map(weight_values, experts)
    expected = reference.expert_mlp(values(x), ids, weights, w1, w3, w2, 2.5, bf16, True)
    error = np.abs(values(y) - expected)
    some = expected != 0
    assert np.median(error[some] / bf16_ulp(expected)[some]) <= 1
    norms = np.linalg.norm(error, axis=2) / np.maximum(np.linalg.norm(expected, axis=2), 1e-30)
    assert norms.max() < 0.01, norms.max()
    assert not y[19, 1].any()
    xla = np.asarray(expert_mlp(x, ids, weights, *packed, implementation="xla", **settings).in_order)
    assert (y == xla).mean() > 0.99  # sums of another order round differently, rarely

    kept = np.array([17, 3, 11])
    x2, ids2, weights2 = np.full_like(x, np.nan), np.full_like(ids, 2), weights[::-1].copy()
    ids2[:, 0] = 1
    x2[5:8], ids2[5:8], weights2[5:8] = x[kept], ids[kept], weights[kept]
    moved = run(expert_mlp, x2, ids2, weights2, *packed, **settings)
    assert_same_bits(moved[5:8], y[kept], "rows in other places")
    assert np.isnan(np.delete(moved, np.s_[5:8], axis=0).astype(np.float32)).all()


def test_long_product() -> None:
    """Guards the reuse of operand buffers and ring stages: 3 items a block, of 5 steps each, in 2 buffers.

    The number of steps is odd, so that the two buffers' barriers do not go through the same number of phases, and the
    last step is half a one: the weights that it multiplies by zeros are those of the step before in that stage.
    """
    rng = generator("mosaic long product")
    weight = fp4_weight(rng, 2, 192, 576)
    rows = np.zeros((shapes.row_capacity(20, 2), 576), np.float32)
    rows[:32] = values(np.asarray(quantize_dequantize_fp8(jnp.asarray(bf16_normal(rng, 32, 576)))))
    tiles, count = jnp.array([[1, 0, 8], [0, 8, 24]], jnp.int32), jnp.array([2], jnp.int32)
    p = mosaic_stream.plan(192, 576, gated=False, target="sm100")
    assert (p.steps, p.column_items, p.accumulators, p.missing_tiles) == (5, 3, 1, 1)
    packed = repack(weight, "sm100")
    with interpret("sm100", detect_races=True):
        y = mosaic_products.down(jnp.asarray(rows, jnp.bfloat16), packed, tiles, count, row_choices=(32, 128))
    exact = weight_values(weight)
    expected = np.concatenate([rows[:8] @ exact[1].T, rows[8:32] @ exact[0].T])
    error = np.abs(values(np.asarray(y))[:32] - expected)
    assert error.max() <= 2.0**-8 * np.abs(expected).max()
    assert np.median(error / bf16_ulp(expected)) <= 0.5


def test_micro_experts() -> None:
    """Guards matrices of one tile: half a step of K, and a tile that `down` puts in both halves of tensor memory."""
    rng = generator("mosaic micro")
    experts = fp4_experts(rng, MICRO, 4)
    x, ids, weights = bf16_normal(rng, 2, 64), choices(rng, 2, MICRO), routing_weights(rng, 2, MICRO)
    settings = {"limit": 10.0, "quantize_input": True}
    y = run(expert_mlp, x, ids, weights, *(repack(weight, "sm100") for weight in experts), **settings)
    expected = np.asarray(expert_mlp(x, ids, weights, *experts, implementation="xla", **settings).in_order)
    error = np.abs(values(y) - values(expected))
    assert np.median(error / bf16_ulp(expected)) <= 1
    assert error.max() <= 0.01 * np.abs(values(expected)).max()


@pytest.mark.fast
def test_what_the_products_refuse() -> None:
    """Guards the reasons for which the portable implementation is chosen: unquantised rows, and Hopper's order."""
    rng = generator("mosaic refusals")
    experts = fp4_experts(rng, MICRO, 4)
    x, ids, weights = bf16_normal(rng, 2, 64), choices(rng, 2, MICRO), routing_weights(rng, 2, MICRO)
    packed = tuple(repack(weight, "sm100") for weight in experts)
    with pytest.raises(NotImplementedError, match="take no bfloat16 rows"):
        run(expert_mlp, x, ids, weights, *packed, limit=10.0, quantize_input=False)
    hopper = tuple(repack(weight, "sm90") for weight in experts)
    with pytest.raises(NotImplementedError, match="'fp4_sm100', not 'fp4_sm90'"):
        run(expert_mlp, x, ids, weights, *hopper, limit=10.0, quantize_input=True)


def test_shared_expert() -> None:
    """Guards the shared expert: Blackwell's products of `row_dot` around the middle of `mosaic_rows.py`."""
    rng = generator("mosaic shared")
    w1, w3, w2 = fp8_weight(rng, 64, 64), fp8_weight(rng, 64, 64), fp8_weight(rng, 64, 64)
    x = bf16_normal(rng, 3, 64)
    settings = {"limit": 1.5, "quantize_input": True}
    y = run(shared_mlp, x, w1, w3, w2, **settings)
    expected = np.asarray(shared_mlp(x, w1, w3, w2, implementation="xla", **settings))
    error = np.abs(values(y) - values(expected))
    assert np.median(error / bf16_ulp(expected)) <= 1
    assert error.max() <= 0.01 * np.abs(values(expected)).max()


def test_routing_and_sum() -> None:
    """Guards that the row kernels are chosen for Blackwell too, with the results of the portable ones."""
    rng = generator("mosaic row kernels")
    logits, bias = normal(rng, 2, 16), normal(rng, 2, 16)
    ids, weights = run(route, logits, bias, **ROUTING | {"experts_per_token": 3})
    expected_ids, expected = reference.route(logits, bias, 3, True, 1.5, 1.0)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(values(weights), expected, rtol=1e-6)
    rows, shared = bf16_normal(rng, 3, 2, 64), bf16_normal(rng, 3, 64)
    total = reference.combine_experts(values(rows), values(shared), bf16).astype(rows.dtype)
    assert_same_bits(run(combine_experts, ExpertRows(jnp.asarray(rows)), shared), total, "sum")


@pytest.mark.fast
def test_architectures_have_products_of_their_own() -> None:
    """Guards the choice of the kernels: Hopper's instructions do not exist on Blackwell."""
    with interpret("sm90"):
        assert mosaic_products.tensor_cores() is mosaic_sm90
    with interpret("sm100"):
        assert mosaic_products.tensor_cores() is mosaic_sm100
