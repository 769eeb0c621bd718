"""The Mosaic-GPU `mhc_mix`, interpreted on the CPU with race detection.

What only a device can tell (the tensor core's sums, exchange between threads, staged copies) is checked by
`benchmarks/kernel_cases/mhc_mix.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax import compile as compilation
from deepinfer_jax.kernels.dispatch import Implementation
from deepinfer_jax.kernels.mhc_mix import (
    collapse_norm,
    expand,
    expand_collapse_norm_quant,
    mhc_mix,
    mosaic_rows,
    mosaic_sm90,
    mosaic_sm90_product,
    stream_mean,
)
from deepinfer_jax.kernels.mhc_mix import mosaic_mix as mix
from deepinfer_jax.kernels.mosaic import Architecture, interpret
from deepinfer_jax.kernels.quantization import quantize_dequantize_fp8

from . import reference
from .base_mhc_mix import SETTINGS, parameters
from .cases import BF16, assert_same_bits, assert_within, bf16_normal, bf16_ulp, generator, normal, values

pytestmark = pytest.mark.interpret

Example = dict[str, np.ndarray]


def run(function: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
    """Call a contract function with the interpreted kernels; results as NumPy arrays."""
    arrays = jax.tree.map(jnp.asarray, operands)
    with interpret("sm90", detect_races=True):
        return jax.tree.map(np.asarray, function(*arrays, implementation="mosaic_gpu", **settings))


def example(rows: int, size: int, name: str = "mhc mosaic") -> Example:
    """Operands of every function of the op."""
    rng = generator(name, size)
    fn, base, scale = parameters(rng, size)
    return {
        "y": bf16_normal(rng, 80, size)[:rows],
        "streams": bf16_normal(rng, 80, 4, size)[:rows],
        "post": normal(rng, 80, 4)[:rows],
        "comb": normal(rng, 80, 4, 4)[:rows],
        "pre": normal(rng, 80, 4)[:rows],
        "weight": bf16_normal(rng, size, spread=0),
        "fn": fn,
        "base": base,
        "scale": scale,
    }


ARCHITECTURES = pytest.mark.parametrize("architecture", ["sm90", "sm100"])


def boundary(given: dict[str, Any], implementation: Implementation, quantize: bool = True) -> Any:
    """The boundary in one call."""
    names = ("y", "streams", "post", "comb", "pre", "weight", "fn", "base", "scale")
    operands = [jnp.asarray(given[name]) for name in names]
    return expand_collapse_norm_quant(*operands, quantize=quantize, implementation=implementation, **SETTINGS)


def parts(given: dict[str, Any], implementation: Implementation) -> Any:
    """The boundary in separate calls."""
    g = {name: jnp.asarray(x) for name, x in given.items()}
    new = expand(g["y"], g["streams"], g["post"], g["comb"], implementation=implementation)
    x = collapse_norm(new, g["pre"], g["weight"], eps=SETTINGS["norm_eps"], implementation=implementation)
    coefficients = mhc_mix(new, g["fn"], g["base"], g["scale"], implementation=implementation, **SETTINGS)
    return new, x, quantize_dequantize_fp8(x), coefficients


# ---- registers -------------------------------------------------------------------------------------


def elements_of_threads(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Flat element [thread, register, place in its vector] that each thread of a warpgroup holds."""
    layout = layout.to_mgpu()
    strides = layout.tiling.tile_strides(tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))

    def offset(number: int, dims: tuple[Any, ...]) -> int:
        total = 0
        for dim in reversed(dims):
            size = dim.times if isinstance(dim, plgpu.Replicated) else layout.tiled_tiling_shape[dim]
            if not isinstance(dim, plgpu.Replicated):
                total += number % size * strides[dim]
            number //= size
        return total

    registers = [
        sum(i * step for i, step in zip(index, strides, strict=True))
        for index in np.ndindex(layout.registers_shape(shape))
    ]
    vector = np.arange(layout.vector_length) * strides[layout.vector_dim]
    threads = np.array([offset(t // 32, layout.warp_dims) + offset(t % 32, layout.lane_dims) for t in range(128)])
    return threads[:, None, None] + np.array(registers)[None, :, None] + vector[None, None, :]


@pytest.mark.fast
def test_registers_meet_the_instruction() -> None:
    """Guards the order in which pairs are handed to `mma.m16n8k16`: its fragments, as the PTX manual defines
    them, are filled from the layouts that the kernel loads, and must give the product."""
    rng = generator("fragments")
    columns = 24
    a, b = rng.integers(-9, 9, size=(64, 32)), rng.integers(-9, 9, size=(columns, 32))
    rows = a.ravel()[elements_of_threads(mix.ROWS_LAYOUT, a.shape)].reshape(128, -1, 4, 2)
    weights = b.ravel()[elements_of_threads(mix.WEIGHTS_LAYOUT, b.shape)].reshape(128, -1, 4, 2)
    left = np.stack([rows[:, r, p] for r, p in mix.left_pairs()], axis=1).reshape(128, 2, 2, 2, 2)
    right = np.stack([weights[:, r, p] for r, p in mix.right_pairs(columns)], axis=1).reshape(
        128, 2, columns // 8, 2, 2
    )
    total = np.zeros((64, columns), int)
    for warp in range(4):
        for step in range(2):
            matrix = np.zeros((16, 16), int)
            for lane in range(32):
                row, pair = divmod(lane, 4)
                for half in range(2):
                    for below in range(2):
                        k = 8 * half + 2 * pair
                        matrix[row + 8 * below, k : k + 2] = left[32 * warp + lane, step, half, below]
            for n in range(columns // 8):
                other = np.zeros((16, 8), int)
                for lane in range(32):
                    column, pair = divmod(lane, 4)
                    for half in range(2):
                        k = 8 * half + 2 * pair
                        other[k : k + 2, column] = right[32 * warp + lane, step, n, half]
                total[16 * warp : 16 * warp + 16, 8 * n : 8 * n + 8] += matrix @ other
    np.testing.assert_array_equal(total, a @ b.T)
    # Results: rows of the tile and the sums that are stored for them.
    sums = elements_of_threads(mix.SUMS_LAYOUT, (64, columns))
    assert sorted(sums.ravel().tolist()) == list(range(64 * columns))
    for thread in (0, 5, 127):
        lane, warp = thread % 32, thread // 32
        row, column = divmod(lane, 4)
        expected = [(16 * warp + row + 8 * h) * columns + 8 * n + 2 * column for n in range(3) for h in range(2)]
        assert sums[thread, :, 0].tolist() == expected


@pytest.mark.fast
def test_registers_meet_the_warpgroup_instruction() -> None:
    """Guards the order of columns: where the instruction finds a column of a row in a thread (fragment A of `wgmma`,
    as the PTX manual defines it), it finds the same column of the weights in shared memory."""
    rows = elements_of_threads(mix.ROWS_LAYOUT, (64, 32)).reshape(128, 2, 4, 2)
    order = np.asarray(mosaic_sm90_product.in_order(jnp.arange(32)))
    assert sorted(order) == list(range(32))
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for pair in range(4):  # 8 columns of the instruction
            for half in range(2):
                place = 8 * pair + 2 * (lane % 4) + np.arange(2)
                row = 16 * warp + lane // 4 + 8 * half
                assert rows[thread, half, pair].tolist() == (32 * row + order[place]).tolist()


@pytest.mark.fast
def test_weights_split_exactly() -> None:
    """Guards the three bfloat16 parts: together they are the float32 weight, and each is the next 8 bits."""
    rng = generator("split")
    x = (rng.normal(size=4096) * np.exp2(rng.integers(-40, 40, size=4096))).astype(np.float32)
    parts_of_x = [values(part) for part in mix.split(jnp.asarray(x))]
    np.testing.assert_array_equal(sum(parts_of_x), values(x))
    assert all(np.abs(part).max() <= 2.0**-7 * np.abs(x).max() for part in parts_of_x[1:])


# ---- values ----------------------------------------------------------------------------------------


def partial_sums(rows: int, size: int, architecture: Architecture) -> None:
    """Sums of whole numbers are known to the last bit; the weights need all of their 24 bits."""
    module = mosaic_sm90 if architecture == "sm90" else mix
    rng = generator("partial", size)
    streams = np.zeros((rows, 4, size), np.float32)
    streams[:, :, :: size // 16] = rng.integers(-1, 2, size=(rows, 4, 16))
    fn = rng.integers(-(1 << 18), 1 << 18, size=(24, 4 * size)).astype(np.float32)
    with interpret(architecture, detect_races=True):
        partial = np.asarray(module.project(jnp.asarray(streams, BF16), jnp.asarray(fn)))
    shape = module.shape_of(jnp.asarray(streams))
    partial = partial.reshape(rows, shape.pieces, mix.PARTIAL)
    for piece in range(shape.pieces):
        own = shape.pieces_of_columns == piece
        expected = np.einsum("tck,nck->tn", streams[..., own], fn.reshape(24, 4, size)[..., own], dtype=np.float64)
        np.testing.assert_array_equal(partial[:, piece, :24], expected)
        np.testing.assert_array_equal(partial[:, piece, 24], (streams[..., own] ** 2).sum(axis=(1, 2)))


@pytest.mark.parametrize(
    ("rows", "size"), [(3, 64), (66, 96), (3, 320)], ids=["micro", "two tiles, three pieces", "long pieces"]
)
@ARCHITECTURES
def test_partial_sums_are_exact(rows: int, size: int, architecture: Architecture) -> None:
    """Guards tiles, pieces, stages and rows past the end."""
    partial_sums(rows, size, architecture)


@pytest.mark.parametrize("rows", [1, 64, 65, 130, 321])
def test_partial_sums_of_many_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the walk of one block over all tiles: warpgroups without a tile, with one and with two of them, and the
    loads that run ahead into the next tile and past the last."""
    monkeypatch.setattr(mosaic_sm90, "PROCESSORS", 1)
    partial_sums(rows, 64, "sm90")


@pytest.mark.parametrize(("warpgroups", "stages"), [(1, 2), (2, 3), (1, 9)], ids=str)
def test_partial_sums_at_any_depth(warpgroups: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sums that depend on how many warpgroups and stages there are, also more stages than steps."""
    monkeypatch.setattr(mosaic_sm90, "PROCESSORS", 1)
    monkeypatch.setattr(mosaic_sm90, "PROJECT", mosaic_sm90.Depth(warpgroups, stages, 1))
    partial_sums(130, 32, "sm90")


def test_coefficients_against_float64() -> None:
    """Guards norm, gates and 20 rounds, past a block of gates, and rows at other places."""
    given = example(35, 64)
    operands = [given[name] for name in ("fn", "base", "scale")]
    result = run(mhc_mix, given["streams"], *operands, **SETTINGS)
    fn, base, scale = map(values, operands)
    expected = reference.mhc_mix(values(given["streams"]), fn, base, scale, 20, 1e-20, 1e-6)
    for actual, exact in zip(result, expected, strict=True):
        np.testing.assert_allclose(values(actual), exact, rtol=6e-6, atol=1e-7)
    part = run(mhc_mix, given["streams"][30:35], *operands, **SETTINGS)
    for actual, other in zip(part, result, strict=True):
        # Not bit for bit: XLA:CPU computes the elements of one array with different instructions.
        np.testing.assert_allclose(actual, other[30:35], rtol=2e-6)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(64, BF16), (1280, np.float32)],
    ids=["bfloat16, several rows a block", "float32, several vectors a thread"],
)
def test_stream_kernels(size: int, dtype: type) -> None:
    """Guards collapse, expansion and mean against float64, with one rounding at the end, and their rows."""
    given = example(5, size)
    y, streams = (given[name].astype(dtype) for name in ("y", "streams"))
    pre, post, comb = given["pre"], given["post"], given["comb"]

    def everything(rows: slice) -> list[np.ndarray]:
        return [
            run(collapse_norm, streams[rows], pre[rows], None, eps=1e-20),
            run(expand, y[rows], streams[rows], post[rows], comb[rows]),
            run(stream_mean, streams[rows]),
        ]

    result = everything(slice(0, 5))
    exact = (
        reference.collapse(values(streams), pre),
        reference.expand(values(y), values(streams), post, comb),
        values(streams).mean(axis=1),
    )
    for actual, expected in zip(result, exact, strict=True):
        assert actual.dtype == dtype
        rounding = 0 if dtype is np.float32 else 0.5 * bf16_ulp(expected)
        assert_within(actual, expected, rounding + 2.0**-20 * np.abs(values(streams)).max())
    alone = everything(slice(3, 4))
    assert_same_bits(alone, [x[3:4] for x in result], "a row alone")


def test_collapse_norm_has_one_rounding_before_the_norm() -> None:
    """Guards the order: collapse, round, norm, round."""
    given = example(4, 256)
    actual = run(collapse_norm, given["streams"], given["pre"], given["weight"], eps=1e-20)
    rounded = reference.collapse(values(given["streams"]), given["pre"]).astype(BF16)
    expected = reference.rms_norm(values(rounded), values(given["weight"]), 1e-20)
    # A sum next to a rounding border may be rounded to the other side: that moves a result by one step.
    assert_within(actual, expected, 1.01 * bf16_ulp(expected))
    assert (np.abs(values(actual) - expected) > 0.51 * bf16_ulp(expected)).mean() < 0.01


# ---- the boundary ----------------------------------------------------------------------------------


def test_boundary_is_its_parts_in_xla() -> None:
    """Guards the portable boundary against anything but the separate calls, bit for bit."""
    given = example(18, 64)

    @compilation.jit
    def both(operands: Example) -> tuple[Any, Any]:
        return boundary(operands, "xla"), parts(operands, "xla")

    fused, separate = both(given)
    assert_same_bits(fused, separate, "boundary")


def test_boundary_is_its_parts_in_mosaic() -> None:
    """Guards the fused kernel against anything but the separate kernels, bit for bit, over two pieces."""
    given = example(2, 192)
    with interpret("sm90", detect_races=True):
        fused, separate = boundary(given, "mosaic_gpu"), parts(given, "mosaic_gpu")
    assert_same_bits(fused, separate, "boundary")


@pytest.mark.parametrize(("architecture", "rows"), [("sm90", 130), ("sm90", 1), ("sm100", 2)])
def test_expansion_and_projection(architecture: Architecture, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the fused kernel on its own, bit for bit: one warpgroup that goes through three tiles."""
    monkeypatch.setattr(mosaic_sm90, "PROCESSORS", 1)
    monkeypatch.setattr(mosaic_sm90, "BOUNDARY", mosaic_sm90.Depth(1, 3, 2))
    module = mosaic_sm90 if architecture == "sm90" else mix
    rng = generator("expansion")
    g = {name: jnp.asarray(x) for name, x in example(min(rows, 80), 32).items()}
    chosen = jnp.asarray(rng.integers(0, min(rows, 80), size=rows))
    y, streams, post, comb, pre = (g[name][chosen] for name in ("y", "streams", "post", "comb", "pre"))
    with interpret(architecture, detect_races=True):
        new, collapsed, partial = module.expand_project(y, streams, post, comb, pre, g["fn"])
        expected = mosaic_rows.expand(y, streams, post, comb)
        separate = mosaic_rows.collapse_norm(expected, pre, None, 0.0), module.project(expected, g["fn"])
    columns = slice(0, 25)  # nothing is stored to the others
    assert_same_bits(
        (new, collapsed, partial[:, columns]), (expected, separate[0], separate[1][:, columns]), "expansion"
    )


@pytest.mark.fast
def test_addresses_are_those_of_the_layout() -> None:
    """Guards the rows and columns that a thread of the Hopper kernels copies and stores."""
    elements = elements_of_threads(mix.ROWS_LAYOUT, (64, 32))
    for thread in range(128):
        four = thread >> 2
        above, place = four + (four & -8), (thread & 3) << 3
        expected = [[(above + half) * 32 + place + i for i in range(8)] for half in (0, 8)]
        assert elements[thread].tolist() == expected


def test_boundary_without_quantiser() -> None:
    """Guards the result that is not asked for, and the others against the portable version."""
    given = example(5, 32)
    with interpret("sm90", detect_races=True):
        new, x, quantized, coefficients = boundary(given, "mosaic_gpu", quantize=False)
    expected = boundary(given, "xla", quantize=False)
    assert quantized is None
    assert expected[2] is None
    for actual, other in ((new, expected[0]), (x, expected[1])):
        assert_within(actual, values(other), bf16_ulp(other))
        assert (np.asarray(actual) != np.asarray(other)).mean() < 0.005
    for actual, other in zip(coefficients, expected[3], strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-7)


@pytest.mark.fast
def test_boundary_contract() -> None:
    """Guards against operands that would be broadcast without a word."""
    given = example(3, 64)
    for name, wrong in (("y", 2), ("post", 2), ("comb", 1), ("pre", 2), ("weight", 32), ("fn", 20), ("base", 3)):
        broken = given | {name: given[name][:wrong]}
        with pytest.raises(ValueError, match=r"expand_collapse_norm_quant.*fit"):
            boundary(broken, "xla")
    small = {n: x[..., :16] if n in ("y", "streams", "weight") else x for n, x in given.items()}
    with pytest.raises(ValueError, match="groups of 32"):
        boundary(small | {"fn": given["fn"][:, :64]}, "xla")


@pytest.mark.fast
def test_unsupported_says_so() -> None:
    """Guards against a silent fallback: a device without these kernels, dtypes and shapes that they lack."""
    given = example(3, 64)
    operands = [given[name] for name in ("fn", "base", "scale")]
    with pytest.raises(NotImplementedError, match="mhc_mix: stream_mean: mosaic_gpu: cpu"):
        stream_mean(jnp.asarray(given["streams"]), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="not float32"):
        run(mhc_mix, given["streams"].astype(np.float32), *operands, **SETTINGS)
    with pytest.raises(NotImplementedError, match="not float16"):
        run(stream_mean, given["streams"].astype(np.float16))
    two = np.zeros((3, 2, 64), BF16)
    with pytest.raises(NotImplementedError, match="there are 2"):
        run(mhc_mix, two, np.zeros((8, 128), np.float32), np.zeros(8, np.float32), given["scale"], **SETTINGS)
    with pytest.raises(NotImplementedError, match="groups of 32"):
        run(stream_mean, np.zeros((3, 4, 40), BF16))
    with pytest.raises(NotImplementedError, match="steps of 32"):
        run(mhc_mix, np.zeros((3, 4, 40), BF16), np.zeros((24, 160), np.float32), *operands[1:], **SETTINGS)
