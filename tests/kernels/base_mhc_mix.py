"""Checks of `mhc_mix`: coefficients, collapse, expansion of the streams."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import numpy as np
import pytest

from deepinfer_jax.kernels.mhc_mix import collapse_norm, expand, mhc_mix, stream_mean
from deepinfer_jax.kernels.rms_norm_quant import rms_norm

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    MICRO,
    RELEASED,
    RowCase,
    Size,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    load_unit,
    normal,
    values,
)

SETTINGS = {"iterations": 20, "norm_eps": 1e-20, "hc_eps": 1e-6}


def parameters(rng: np.random.Generator, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 (fn [24, 4*hidden], base [24], scale [3]) of a sublayer with lively mixes."""
    fn = (rng.normal(size=(24, 4 * hidden)) / math.sqrt(4 * hidden)).astype(np.float32)
    return fn, rng.normal(size=24).astype(np.float32), np.array([1.5, 0.7, 2.0], np.float32)


def unit_rows(mixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(streams, fn) whose projection is `mixes` [T, C*(2+C)] itself: row t is the t-th unit vector of 256.

    The mean square of a unit vector is 2^-8, its inverse root 16, so fn holds mixes / 16 as columns.
    """
    rows, count = mixes.shape[0], math.isqrt(mixes.shape[1] + 1) - 1
    streams = np.zeros((rows, 256), np.float32)
    streams[np.arange(rows), np.arange(rows)] = 1
    fn = np.zeros((mixes.shape[1], 256), np.float32)
    fn[:, :rows] = mixes.T / 16
    return streams.reshape(rows, count, -1), fn


CASES = (
    RowCase(
        "coefficients, float32",
        lambda rng, t: (normal(rng, t, 4, 64),),
        lambda rng: parameters(rng, 64),
        lambda k, r, c: k(mhc_mix, r[0], *c, **SETTINGS),
        bad_rows(0),
    ),
    RowCase(
        "collapse, expand and mean, float32",
        lambda rng, t: (normal(rng, t, 4, 64), normal(rng, t, 4), normal(rng, t, 4, 4), normal(rng, t, 64)),
        lambda rng: (normal(rng, 64, spread=0),),
        lambda k, r, c: (
            k(collapse_norm, r[0], r[1], c[0], eps=1e-20),
            k(expand, r[3], r[0], r[1], r[2]),
            k(stream_mean, r[0]),
        ),
        bad_rows(0, 3),
    ),
)


class MhcMixTests(OpTests):
    """Every implementation of `mhc_mix`."""

    op: ClassVar[str] = "mhc_mix"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("mhc examples")
        streams, weight = bf16_normal(rng, 5, 4, 64), bf16_normal(rng, 64, spread=0)
        pre, comb = normal(rng, 5, 4), normal(rng, 5, 4, 4)
        return [
            (mhc_mix, (streams, *parameters(rng, 64)), SETTINGS),
            (collapse_norm, (streams, pre, weight), {"eps": 1e-20}),
            (collapse_norm, (streams, pre, None), {"eps": 1e-20}),
            (expand, (bf16_normal(rng, 5, 64), streams, pre, comb), {}),
            (stream_mean, (streams,), {}),
        ]

    def coefficients(
        self, mixes: np.ndarray, base: np.ndarray, scale: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Coefficients of given mixes [T, C*(2+C)], through the public operator."""
        streams, fn = unit_rows(mixes.astype(np.float32))
        return self.run(mhc_mix, streams, fn, base.astype(np.float32), scale.astype(np.float32), **SETTINGS)

    def matrix(self, logits: list[list[float]]) -> np.ndarray:
        """The doubly normalised matrix of one logit matrix."""
        flat = np.concatenate([np.zeros(2 * len(logits)), np.array(logits, np.float64).ravel()])
        return values(self.coefficients(flat[None], np.zeros(len(flat)), np.ones(3))[2][0])

    @pytest.mark.fast
    def test_golden(self) -> None:
        """Guards all coefficients on 64 recorded mixes, half of them with large logits."""
        unit = load_unit("mhc")
        result = self.coefficients(unit["m"], unit["base"], unit["scale"])
        for name, actual in zip(("pre", "post", "comb"), result, strict=True):
            np.testing.assert_allclose(values(actual), unit[f"{name}_f64"], rtol=3e-6, atol=1e-6, err_msg=name)
        pre, post, comb = (unit[f"{name}_f64"][:6].astype(np.float32) for name in ("pre", "post", "comb"))
        collapsed = self.run(collapse_norm, unit["streams"], pre, None, eps=1e-20)
        expanded = self.run(expand, unit["y"], unit["streams"], post, comb)
        for actual, name in ((collapsed, "collapse"), (expanded, "expand")):
            exact = values(unit[f"{name}_f32"])
            assert_within(actual, values(unit[f"{name}_bf16"]), bf16_ulp(exact), name)
            assert (values(actual) != values(unit[f"{name}_bf16"])).mean() < 1e-3
        streams, y = unit["streams"].astype(np.float32), unit["y"].astype(np.float32)
        assert_within(self.run(collapse_norm, streams, pre, None, eps=1e-20), values(unit["collapse_f32"]), 2e-6)
        assert_within(self.run(expand, y, streams, post, comb), values(unit["expand_f32"]), 2e-6)

    @pytest.mark.parametrize("size", [MICRO, DEMO, RELEASED], ids=lambda size: size.name)
    def test_against_float64(self, size: Size) -> None:
        """Guards the projection over all streams and its norm at every model's width (no bfloat16 in between)."""
        rng = generator("mhc", size.name)
        streams, fixed = bf16_normal(rng, 5, 4, size.hidden, spread=8), parameters(rng, size.hidden)
        result = self.run(mhc_mix, streams, *fixed, **SETTINGS)
        expected = reference.mhc_mix(values(streams), *fixed, iterations=20, norm_eps=1e-20, hc_eps=1e-6)
        for actual, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(values(actual), wanted, rtol=5e-6, atol=2e-6)

    @pytest.mark.fast
    def test_worked_coefficients(self) -> None:
        """Guards the three uses of hc_eps: beside pre, after the softmax, in every denominator."""
        pre, post, comb = self.coefficients(np.zeros((3, 24)), np.zeros(24), np.ones(3))
        np.testing.assert_allclose(pre, 0.500001, atol=6e-8)
        np.testing.assert_array_equal(post, 1.0)
        np.testing.assert_allclose(comb, 0.24999975, atol=3e-8)
        np.testing.assert_allclose(comb.sum(axis=1), 0.999999, atol=2e-7)

    @pytest.mark.fast
    def test_worked_matrices(self) -> None:
        """Guards the order of normalisations by the worked examples of `blocks.md` 2.6."""
        two = self.matrix([[0, math.log(3)], [0, 0]])
        np.testing.assert_allclose(two, [[0.366025, 0.633974], [0.633974, 0.366025]], atol=1e-6)
        diagonal = self.matrix((8 * np.eye(4)).tolist())
        np.testing.assert_allclose(np.diag(diagonal), 0.998991, atol=1e-6)
        np.testing.assert_allclose(diagonal[~np.eye(4, dtype=bool)], 3.361e-4, atol=1e-7)
        mixed = self.matrix([[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 0], [1, 1, 1, 1]])
        expected = [
            [0.511800, 0.126704, 0.083170, 0.278325],
            [0.126704, 0.630027, 0.055970, 0.187299],
            [0.083170, 0.055970, 0.737913, 0.122946],
            [0.278325, 0.187299, 0.122946, 0.411430],
        ]
        np.testing.assert_allclose(mixed, expected, atol=1e-6)

    @pytest.mark.fast
    def test_worked_iterations(self) -> None:
        """Guards the loop: one iteration is the softmax and a column step, each further one rows and columns."""
        flat = np.concatenate([np.zeros(4), [0, math.log(3), 0, 0]])[None]
        streams, fn = unit_rows(flat.astype(np.float32))
        steps = {
            1: [[0.333333, 0.599999], [0.666665, 0.400000]],
            2: [[0.363636, 0.631578], [0.636363, 0.368421]],
        }
        for iterations, expected in steps.items():
            settings = SETTINGS | {"iterations": iterations}
            _, _, comb = self.run(mhc_mix, streams, fn, np.zeros(8, np.float32), np.ones(3, np.float32), **settings)
            np.testing.assert_allclose(comb[0], expected, atol=1.5e-6)

    def test_matrix_invariants(self) -> None:
        """Guards positivity, column sums, near row sums, and the freedom of a constant per row of logits."""
        rng = generator("invariants")
        mixes = rng.normal(size=(40, 24))
        comb = values(self.coefficients(mixes, np.zeros(24), np.ones(3))[2])
        assert comb.min() > 0
        np.testing.assert_allclose(comb.sum(axis=1), 1 - 1e-6, rtol=0, atol=3e-7)
        np.testing.assert_allclose(comb.sum(axis=2), 1, rtol=0, atol=1e-3)
        moved = mixes.copy()
        moved[:, 8:12] += 3.0
        shifted = values(self.coefficients(moved, np.zeros(24), np.ones(3))[2])
        np.testing.assert_allclose(shifted, comb, atol=1e-6)

    def test_equivariance(self) -> None:
        """Guards the layout of fn, base and comb: permuting streams permutes every coefficient."""
        rng = generator("equivariance")
        order = np.array([2, 0, 3, 1])
        streams, (fn, base, scale) = normal(rng, 6, 4, 64), parameters(rng, 64)
        pre, post, comb = self.run(mhc_mix, streams, fn, base, scale, **SETTINGS)
        columns = fn.reshape(24, 4, 64)[:, order].reshape(24, 256)

        def rows_of(parts: np.ndarray) -> np.ndarray:
            square = parts[8:].reshape(4, 4, *parts.shape[1:])[order][:, order]
            return np.concatenate([parts[:4][order], parts[4:8][order], square.reshape(16, *parts.shape[1:])])

        other = self.run(mhc_mix, streams[:, order], rows_of(columns), rows_of(base), scale, **SETTINGS)
        for actual, wanted in zip(other, (pre[:, order], post[:, order], comb[:, order][:, :, order]), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=3e-6, atol=1e-6)

    @pytest.mark.fast
    def test_expand_worked_example(self) -> None:
        """Guards the direction of comb: the sum runs over its first index."""
        streams, y = np.array([[[1.0], [3.0]]], np.float32), np.array([[10.0]], np.float32)
        comb, post = np.array([[[0.2, 0.8], [0.9, 0.1]]], np.float32), np.array([[2.0, 0.5]], np.float32)
        np.testing.assert_allclose(self.run(expand, y, streams, post, comb)[0, :, 0], [22.9, 6.1], rtol=1e-6)

    @pytest.mark.fast
    def test_identities_are_exact(self) -> None:
        """Guards layer 0 and idle sublayers: one-hot collapse is the embedding, C = I keeps the streams' bits."""
        rng = generator("identities")
        embedding, weight = bf16_normal(rng, 18, 64, spread=6), bf16_normal(rng, 64, spread=0)
        streams = np.repeat(embedding[:, None], 4, axis=1)
        pre = np.tile(np.array([1, 0, 0, 0], np.float32), (18, 1))
        assert_same_bits(self.run(collapse_norm, streams, pre, None, eps=1e-20), embedding, "collapse")
        normed = np.asarray(rms_norm(embedding, weight, eps=1e-20))
        assert_same_bits(self.run(collapse_norm, streams, pre, weight, eps=1e-20), normed, "collapse and norm")
        streams = bf16_normal(rng, 18, 4, 64)
        identity = np.tile(np.eye(4, dtype=np.float32), (18, 1, 1))
        kept = self.run(expand, embedding, streams, np.zeros((18, 4), np.float32), identity)
        np.testing.assert_array_equal(values(kept), values(streams))

    @pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
    def test_streams_against_float64(self, dtype: type) -> None:
        """Guards collapse, expansion and mean against one rounding at the end."""
        rng = generator("streams")
        streams, y = normal(rng, 18, 4, 256).astype(dtype), normal(rng, 18, 256).astype(dtype)
        pre, post, comb = normal(rng, 18, 4), normal(rng, 18, 4), normal(rng, 18, 4, 4)
        size = np.abs(values(streams)).max()
        pairs = (
            (self.run(collapse_norm, streams, pre, None, eps=1e-20), reference.collapse(values(streams), pre)),
            (self.run(expand, y, streams, post, comb), reference.expand(values(y), values(streams), post, comb)),
            (self.run(stream_mean, streams), values(streams).mean(axis=1)),
        )
        for actual, expected in pairs:
            assert actual.dtype == dtype
            rounding = 0 if dtype is np.float32 else 0.5 * bf16_ulp(expected)
            assert_within(actual, expected, rounding + 2.0**-20 * size)

    def test_gradients(self) -> None:
        """Guards the training mode through the projection, the normalisations and the stream arithmetic."""
        rng = generator("mhc gradients")
        streams, y = normal(rng, 2, 4, 8, spread=0), normal(rng, 2, 8, spread=0)
        kernels = self.kernels(None)

        def block(x: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, out: jax.Array) -> jax.Array:
            pre, post, comb = kernels(mhc_mix, x, fn, base, scale, **SETTINGS)
            u = kernels(collapse_norm, x, pre, None, eps=1e-20)
            return kernels(stream_mean, kernels(expand, out * u, x, post, comb))

        operands = (streams, *parameters(rng, 8), y)
        check_gradients(block, *operands)

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast without a word."""
        streams, fn = np.zeros((3, 4, 64), np.float32), np.zeros((24, 256), np.float32)
        base, scale, four = np.zeros(24, np.float32), np.zeros(3, np.float32), np.zeros((3, 4), np.float32)
        y, comb, weight = np.zeros((3, 64), np.float32), np.zeros((3, 4, 4), np.float32), np.zeros(64, np.float32)
        self.refuses(mhc_mix, streams, fn[:20], base, scale, match="do not fit", **SETTINGS)
        self.refuses(mhc_mix, streams, fn[:, :64], base, scale, match="do not fit", **SETTINGS)
        self.refuses(mhc_mix, streams[:, 0], fn, base, scale, match="mhc_mix", **SETTINGS)
        self.refuses(mhc_mix, streams, fn, base[:3], scale, match="do not fit", **SETTINGS)
        self.refuses(mhc_mix, streams, fn, base, scale[:1], match="do not fit", **SETTINGS)
        self.refuses(collapse_norm, streams, four[:2], None, eps=1e-20, match="do not fit")
        self.refuses(collapse_norm, streams, four, weight[:1], eps=1e-20, match="do not fit")
        self.refuses(expand, y[:2], streams, four, comb, match="do(es)? not fit")
        self.refuses(expand, y, streams, four[:1], comb, match="do(es)? not fit")
        self.refuses(expand, y, streams, four, comb[:, :1], match="do(es)? not fit")
        self.refuses(stream_mean, y, match="stream_mean")
