"""The Mosaic-GPU `expert_mlp`, interpreted on the CPU with race detection.

What only a device can tell (the order of sums inside an instruction, the machine code of the dequantisation) is
checked by `benchmarks/kernel_cases/expert_mlp.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import fp4_fragments
from deepinfer_jax.kernels.expert_mlp import (
    ExpertRows,
    combine_experts,
    expert_mlp,
    mosaic_stream,
    route,
    shapes,
    shared_mlp,
)
from deepinfer_jax.kernels.expert_mlp.repack import repack
from deepinfer_jax.kernels.mosaic import interpret
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize

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
    load_unit,
    normal,
    plain_weight,
    values,
    weight_values,
)
from .reference_formats import bf16

pytestmark = pytest.mark.interpret


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
    """Call a contract function with the interpreted kernels; results as NumPy arrays."""
    operands = tuple(x if isinstance(x, QuantTensor | ExpertRows) else jnp.asarray(x) for x in operands)
    with interpret("sm90", detect_races=True):
        result = function(*operands, implementation="mosaic_gpu", **settings)
        result = result.in_order if isinstance(result, ExpertRows) else result
        return jax.tree.map(np.asarray, result)


# ---- the packed format -----------------------------------------------------------------------------


@pytest.mark.fast
def test_fragments_hold_every_code_where_the_tensor_core_takes_it() -> None:
    """Guards the bit permutation against the register layout of `wgmma`, written out element by element."""
    rng = generator("fragments")
    codes = rng.integers(0, 16, size=(2, 128, 192)).astype(np.uint8)
    words = fp4_fragments.pack_codes(jnp.asarray(codes))
    np.testing.assert_array_equal(fp4_fragments.unpack_codes(words), codes)
    by_thread = np.asarray(words).reshape(2, 2, 3, 128, 2, 2)
    registers = np.asarray(fp4_fragments.words_to_registers(jnp.asarray(by_thread)))
    for _ in range(200):
        e, rows, columns, warp, g, t, q, i, j, h, b = (int(rng.integers(n)) for n in (2, 2, 3, 4, 8, 4, 2, 2, 2, 2, 2))
        half = int(registers[e, rows, columns, 32 * warp + 4 * g + t, q, i, 2 * j + h]) >> (16 * b) & 0xFFFF
        code = int(codes[e, 64 * rows + 16 * warp + g + 8 * i, 64 * columns + 32 * q + 16 * j + 8 * h + 2 * t + b])
        assert half == (code & 8) << 12 | (code & 7) << 6


@pytest.mark.fast
def test_registers_are_exact_after_the_scale() -> None:
    """Guards 'code times 2^-126, times scale times 2^126' for every code and scale, subnormal bfloat16 included."""
    code = np.arange(16)
    halves = ((code & 8) << 12 | (code & 7) << 6).astype(np.uint32) << 16
    tiny = halves.view(np.float32).astype(np.float64)
    for byte in range(fp4_fragments.LARGEST_SCALE + 1):
        multiplier = np.uint32((byte + fp4_fragments.SCALE_OFFSET) << 23).view(np.float32).astype(np.float64)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        expected = np.where(code & 8, -1.0, 1.0) * table[code & 7] * 2.0 ** (byte - 127)
        product = tiny * multiplier
        np.testing.assert_array_equal(product, expected)
        np.testing.assert_array_equal(product, bf16(product))


@pytest.mark.fast
def test_repack_keeps_values() -> None:
    """Guards the values and shapes of repacked experts, and the refusal of what the format cannot hold."""
    weight = fp4_weight(generator("repack"), 3, 128, 192)
    extremes = weight.scale.at[0, 5, :2].set(jnp.array([0, fp4_fragments.LARGEST_SCALE], jnp.uint8))
    weight = QuantTensor(weight.data, extremes, "fp4")
    packed = repack(weight)
    assert packed.shape == weight.shape == (3, 128, 192)
    assert packed.data.nbytes == weight.data.nbytes
    assert packed.scale.nbytes == weight.scale.nbytes
    decode = jax.jit(dequantize)
    np.testing.assert_array_equal(decode(packed), decode(weight))
    np.testing.assert_array_equal(fp4_fragments.unpack_scales(packed[1].scale), weight.scale[1])
    with pytest.raises(ValueError, match=r"scale byte 129 \(2\^2\)"):
        repack(QuantTensor(weight.data, weight.scale.at[2, 7, 1].set(129), "fp4"))
    with pytest.raises(ValueError, match="'fp8', not 'fp4'"):
        repack(fp8_weight(generator("repack"), 64, 64))
    with pytest.raises(ValueError, match="96 x 64 is not made of"):
        repack(fp4_weight(generator("repack"), 2, 96, 64))


# ---- grouping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "chosen", "experts"), [(1, 6, 384), (400, 2, 2)])
def test_grouping(rows: int, chosen: int, experts: int) -> None:
    """Guards the sort by expert: every pair has one row of its own in a tile of its expert, in the order of tokens."""
    rng = generator("grouping", rows)
    drawn = [rng.choice(experts + 2, chosen, replace=False) - 1 for _ in range(rows)]  # two ids are no expert's
    ids = np.sort(np.array(drawn, np.int32), axis=1)
    grouped = shapes.group_rows(jnp.asarray(ids), experts)
    valid, position, source = (np.asarray(x) for x in (grouped.position >= 0, grouped.position, grouped.source))
    np.testing.assert_array_equal(valid, (ids >= 0) & (ids < experts))
    owner = np.full(source.shape, -1)
    for expert, first, size in np.asarray(grouped.tiles)[: int(grouped.count[0])]:
        assert size % shapes.ROW_STEP == 0
        assert 0 < size <= shapes.LARGEST_ROWS
        assert (owner[first : first + size] == -1).all()
        owner[first : first + size] = expert
    np.testing.assert_array_equal(owner[position[valid]], ids[valid])
    np.testing.assert_array_equal(source[position[valid]], np.broadcast_to(np.arange(rows)[:, None], ids.shape)[valid])
    assert (source >= 0).sum() == valid.sum()
    assert (owner[-shapes.LARGEST_ROWS :] == -1).all()  # a tile's products may read so far behind it
    for expert in range(experts):
        assert (np.diff(position[valid & (ids == expert)]) > 0).all()


@pytest.mark.fast
def test_released_plans() -> None:
    """Guards the split of the released products: two warpgroups, two tiles each, 4 stages of 128 columns of K."""
    wide = mosaic_stream.plan(RELEASED.expert_width, RELEASED.hidden, gated=True, target="sm90")
    narrow = mosaic_stream.plan(RELEASED.hidden, RELEASED.expert_width, gated=False, target="sm90")
    for p, items, steps in ((wide, 18, 40), (narrow, 20, 18)):
        assert (p.warpgroups, p.accumulators, p.depth_tiles, p.stages) == (2, 2, 2, 4)
        assert (p.column_items, p.steps) == (items, steps)


# ---- experts ---------------------------------------------------------------------------------------


@functools.cache
def _demo_experts() -> tuple[tuple[QuantTensor, ...], tuple[QuantTensor, ...]]:
    """(packed as in a checkpoint, repacked)."""
    experts = fp4_experts(generator("mosaic experts"), DEMO, 3)
    return experts, tuple(repack(w) for w in experts)


def _demo_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """20 rows: all choose expert 0, 15 expert 1, 4 expert 2; one chooses none beside it."""
    rng = generator("mosaic rows")
    second = np.where(np.arange(20) < 15, 1, 2)
    second[19] = 3
    ids = np.stack([np.zeros(20), second], axis=1).astype(np.int32)
    weights = rng.uniform(0.1, 1, size=ids.shape).astype(np.float32)
    return bf16_normal(rng, 20, DEMO.hidden), ids, weights


def test_experts_and_their_rows() -> None:
    """Guards the whole expert path: values, tiles of several widths, and rows that do not see each other.

    A float32 sum may round an intermediate to the neighbouring bfloat16, and that to another FP8 code; so most
    elements agree to one rounding and a row to 1 %. Tiles of 24, 16 and 8 rows (products of 128 and 16) in the first
    call; in the second each row has another place, expert 0 a tile of 8 rows, and there are rows of NaN.
    """
    experts, packed = _demo_experts()
    x, ids, weights = _demo_rows()
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


def test_micro_experts_without_quantisation() -> None:
    """Guards matrices of one tile (one warpgroup, one accumulator), and products of unquantised rows."""
    rng = generator("mosaic micro")
    experts = fp4_experts(rng, MICRO, 4)
    x, ids, weights = bf16_normal(rng, 2, 64), choices(rng, 2, MICRO), routing_weights(rng, 2, MICRO)
    settings = {"limit": 10.0, "quantize_input": False}
    y = run(expert_mlp, x, ids, weights, *map(repack, experts), **settings)
    expected = np.asarray(expert_mlp(x, ids, weights, *experts, implementation="xla", **settings).in_order)
    error = np.abs(values(y) - values(expected))
    assert np.median(error / bf16_ulp(expected)) <= 1
    assert error.max() <= 0.01 * np.abs(values(expected)).max()


def test_shared_expert() -> None:
    """Guards the shared expert: products of `row_dot` with the same middle as the routed experts'."""
    rng = generator("mosaic shared")
    w1, w3, w2 = fp8_weight(rng, 64, 64), fp8_weight(rng, 64, 64), fp8_weight(rng, 64, 64)
    x = bf16_normal(rng, 3, 64)
    settings = {"limit": 1.5, "quantize_input": True}
    y = run(shared_mlp, x, w1, w3, w2, **settings)
    expected = np.asarray(shared_mlp(x, w1, w3, w2, implementation="xla", **settings))
    error = np.abs(values(y) - values(expected))
    assert np.median(error / bf16_ulp(expected)) <= 1
    assert error.max() <= 0.01 * np.abs(values(expected)).max()


# ---- routing and sum -------------------------------------------------------------------------------


def test_routing_against_float64() -> None:
    """Guards scores, choice, normalisation, scale and temperature, and rows that do not see each other."""
    unit = load_unit("router")
    bias = np.where(unit["image_mask"][:, None] != 0, unit["bias_vl"], unit["bias"])
    ids, weights = run(route, unit["logits"][:6], bias[:6], **ROUTING)
    np.testing.assert_array_equal(ids, unit["idx_sorted"][:6])
    np.testing.assert_allclose(weights, unit["weights_f64"][:6], rtol=1e-6)
    one = run(route, unit["logits"][4:5], bias[4:5], **ROUTING)
    assert_same_bits(one, (ids[4:5], weights[4:5]), "one row of six")

    rng = generator("mosaic routing")
    logits, bias = normal(rng, 5, 16), normal(rng, 5, 16)
    for k, normalize, scale, temperature in ((3, False, 2.5, 0.7), (1, True, 1.5, 2.0)):
        settings = {"experts_per_token": k, "normalize": normalize, "scale": scale, "temperature": temperature}
        ids, weights = run(route, logits, bias, **settings)
        expected_ids, expected = reference.route(logits, bias, k, normalize, scale, temperature)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(values(weights), expected, rtol=1e-6)


def test_routing_of_equals_and_very_negative_logits() -> None:
    """Guards ties (lowest ids, -0 as +0) and the accuracy of scores whose softplus is exp(z)."""
    plain = ROUTING | {"normalize": False, "scale": 1.0}
    logits = np.zeros((2, 8), np.float32)
    logits[1, ::2] = -0.0
    ids, _ = run(route, logits, np.zeros_like(logits), **plain | {"experts_per_token": 3})
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    negative = np.array([[-20.0, -30.0, -60.0, -64.0]], np.float32)
    ids, weights = run(route, negative, np.zeros_like(negative), **plain | {"experts_per_token": 4})
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])
    np.testing.assert_allclose(values(weights), np.exp(values(negative) / 2), rtol=1e-6)


def test_sum_is_that_of_xla() -> None:
    """Guards the order of a token's sum, bit for bit."""
    rng = generator("mosaic sum")
    rows, shared = bf16_normal(rng, 5, 6, 64), bf16_normal(rng, 5, 64)
    expected = reference.combine_experts(values(rows), values(shared), bf16).astype(rows.dtype)
    assert_same_bits(run(combine_experts, ExpertRows(jnp.asarray(rows)), shared), expected, "sum")

    # The same rows in another order, between rows of NaN, and two that are missing.
    rows[0, 5], rows[3, 0] = 0, 0
    expected = reference.combine_experts(values(rows), values(shared), bf16).astype(rows.dtype)
    position = rng.permutation(40)[:30].reshape(5, 6).astype(np.int32)
    spread = np.full((40, 64), np.nan, rows.dtype)
    spread[position.reshape(-1)] = rows.reshape(30, 64)
    spread[[position[0, 5], position[3, 0]]] = np.nan
    position[0, 5] = position[3, 0] = -1
    moved = ExpertRows(jnp.asarray(spread), jnp.asarray(position))
    assert_same_bits(run(combine_experts, moved, shared), expected, "rows where products left them")
    assert_same_bits(np.asarray(moved.in_order), rows, "rows in order")


# ---- what there is no kernel for -------------------------------------------------------------------


@pytest.mark.fast
def test_refusals_name_the_reason() -> None:
    """Guards against a silent fallback: what has no kernel is refused, and the message says what to do."""
    rng = generator("mosaic refusals")
    experts = fp4_experts(rng, MICRO, 4)
    packed = tuple(map(repack, experts))
    x, ids, weights = bf16_normal(rng, 2, 64), choices(rng, 2, MICRO), routing_weights(rng, 2, MICRO)
    settings: dict[str, Any] = {"limit": 10.0, "quantize_input": True}
    plain = tuple(jnp.asarray(plain_weight(rng, *w.shape)) for w in experts)
    with pytest.raises(NotImplementedError, match=r"expert_mlp.*float32 profiles"):
        run(expert_mlp, x.astype(np.float32), ids, weights, *packed, **settings)
    with pytest.raises(NotImplementedError, match=r"expert_mlp.*repack once when weights are loaded"):
        run(expert_mlp, x, ids, weights, *experts, **settings)
    with pytest.raises(NotImplementedError, match=r"expert_mlp.*not plain bfloat16"):
        run(expert_mlp, x, ids, weights, *plain, **settings)
    with pytest.raises(NotImplementedError, match=r"shared_mlp.*float32 profiles"):
        run(shared_mlp, x.astype(np.float32), *(w[0] for w in plain), **settings)
    with pytest.raises(NotImplementedError, match=r"combine_experts.*whole 32 columns"):
        run(combine_experts, ExpertRows(jnp.zeros((2, 3, 8))), np.zeros((2, 8), np.float32))
    with pytest.raises(NotImplementedError, match=r"route.*up to 128 experts"):
        run(
            route,
            np.zeros((1, 200), np.float32),
            np.zeros((1, 200), np.float32),
            **ROUTING | {"experts_per_token": 129},
        )
    with pytest.raises(NotImplementedError, match=r"expert_mlp.*compute capability"):
        expert_mlp(jnp.asarray(x), ids, weights, *packed, implementation="mosaic_gpu", **settings)
    with pytest.raises(NotImplementedError, match=r"route.*compute capability"):
        route(jnp.zeros((1, 8)), jnp.zeros((1, 8)), implementation="mosaic_gpu", **ROUTING)
