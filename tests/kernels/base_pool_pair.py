"""Checks of `pool_pair`: gated pooling of two tokens."""

from __future__ import annotations

from typing import ClassVar

import jax
import numpy as np
import pytest

from deepinfer_jax.kernels.pool_pair import pool_pair

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    RELEASED,
    RowCase,
    Size,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    normal,
    values,
)
from .reference_formats import bf16

EPS = 1e-20

CASES = (
    RowCase(
        "float32",
        lambda rng, t: (normal(rng, t, 2, 64), 3 * normal(rng, t, 2, 64)),
        lambda rng: (bf16_normal(rng, 64, spread=0),),
        lambda k, r, c: k(pool_pair, r[0], r[1], c[0], eps=EPS, out_dtype=np.float32),
        bad_rows(0, 1),
    ),
)


class PoolPairTests(OpTests):
    """Every implementation of `pool_pair`."""

    op: ClassVar[str] = "pool_pair"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("pool examples")
        operands = (normal(rng, 5, 2, 64), normal(rng, 5, 2, 64), bf16_normal(rng, 64, spread=0))
        return [(pool_pair, operands, {"eps": EPS, "out_dtype": BF16})]

    @pytest.mark.parametrize("size", [DEMO, RELEASED], ids=lambda size: size.name)
    def test_against_float64(self, size: Size) -> None:
        """Guards the softmax per channel, the weighted sum and both roundings.

        The rounding of the pooled value may fall to the other side of a border: one more step of the result.
        """
        rng = generator("pool", size.name)
        u, z = normal(rng, 18, 2, size.head_dim), 4 * normal(rng, 18, 2, size.head_dim)
        weight = bf16_normal(rng, size.head_dim, spread=0)
        y = self.run(pool_pair, u, z, weight, eps=EPS, out_dtype=np.float32)
        assert_within(y, reference.pool_pair(u, z, values(weight), EPS), 4e-6 * np.abs(values(weight)).max() * 4)
        y = self.run(pool_pair, u, z, weight, eps=EPS, out_dtype=BF16)
        expected = reference.pool_pair(u, z, values(weight), EPS, bf16)
        assert y.dtype == BF16
        assert_within(y, expected, 2 * bf16_ulp(expected))
        assert (values(y) == expected).mean() > 0.99

    def test_gates(self) -> None:
        """Guards the gate: equal ones give the mean, a difference of 40 picks one token, infinity is safe."""
        rng = generator("gates")
        u, weight = normal(rng, 3, 2, 64, spread=0), np.ones(64, np.float32)
        z = np.zeros((3, 2, 64), np.float32)
        z[1, 1], z[2, 0] = 40, 40
        u[:, :, 0], u[:, 0, 1], u[:, 1, 1] = 0, 1, 3

        def pooled(gates: np.ndarray) -> np.ndarray:
            return values(self.run(pool_pair, u, gates, weight, eps=EPS, out_dtype=np.float32))

        plain = [values(u).mean(axis=1)[0], values(u)[1, 1], values(u)[2, 0]]
        expected = [reference.rms_norm(row, values(weight), EPS) for row in plain]
        np.testing.assert_allclose(pooled(z), expected, atol=2e-6)
        np.testing.assert_allclose(pooled(z * 1e36)[1:], expected[1:], atol=2e-6)

    def test_gradients(self) -> None:
        """Guards the training mode."""
        rng = generator("pool gradients")
        u, z, weight = normal(rng, 3, 2, 8, spread=0), normal(rng, 3, 2, 8, spread=0), normal(rng, 8, spread=0)
        kernels = self.kernels(None)

        def pool(*operands: jax.Array) -> jax.Array:
            return kernels(pool_pair, *operands, eps=EPS, out_dtype=np.float32)

        check_gradients(pool, u, z, weight)

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast without a word."""
        u, weight, settings = np.zeros((3, 2, 8), np.float32), np.zeros(8, np.float32), {"eps": EPS, "out_dtype": BF16}
        self.refuses(pool_pair, u, u[:2], weight, match="must both be", **settings)
        self.refuses(pool_pair, u[:, :1], u[:, :1], weight, match="must both be", **settings)
        self.refuses(pool_pair, u[:, 0], u[:, 0], weight, match="must both be", **settings)
        self.refuses(pool_pair, u, u, weight[:1], match="weight", **settings)
