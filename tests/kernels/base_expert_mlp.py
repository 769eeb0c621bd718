"""Checks of `expert_mlp`: routing, gated MLPs, combination."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.expert_mlp import ExpertRows, combine_experts, expert_mlp, route, shared_mlp

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

ROUTING = {"experts_per_token": 6, "normalize": True, "scale": 1.5, "temperature": 1.0}
WIDE = dataclasses.replace(RELEASED, name="wide", expert_width=384)
"""The released hidden size with narrow experts: w1 and w3 at full K (w2's is among the products of `row_dot`)."""

WORKED_LOGITS = (0.541325, 3.981515, -1.258692, 2.138622)
"""Logits whose sqrt(softplus) is 1, 2, 0.5, 1.5 (`blocks.md` 3.2)."""


def choices(rng: np.random.Generator, rows: int, size: Size) -> np.ndarray:
    """Ascending random expert ids [rows, k]."""
    drawn = [rng.choice(size.experts, size.experts_per_token, replace=False) for _ in range(rows)]
    return np.sort(np.array(drawn, np.int32), axis=1)


def routing_weights(rng: np.random.Generator, rows: int, size: Size) -> np.ndarray:
    """Positive float32 weights [rows, k] with sum 1.5."""
    w = rng.uniform(0.1, 1, size=(rows, size.experts_per_token))
    return (1.5 * w / w.sum(axis=1, keepdims=True)).astype(np.float32)


def fp4_experts(rng: np.random.Generator, size: Size, experts: int) -> tuple[Any, Any, Any]:
    """Packed (w1, w3, w2)."""
    wide, narrow = (experts, size.expert_width, size.hidden), (experts, size.hidden, size.expert_width)
    return fp4_weight(rng, *wide), fp4_weight(rng, *wide), fp4_weight(rng, *narrow)


def plain_experts(rng: np.random.Generator, size: Size, experts: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Plain (w1, w3, w2)."""
    wide, narrow = (experts, size.expert_width, size.hidden), (experts, size.hidden, size.expert_width)
    return tuple(plain_weight(rng, *shape).astype(dtype) for shape in (wide, wide, narrow))  # type: ignore[return-value]


def rows_of(rows: np.ndarray) -> ExpertRows:
    """Rows [T, k, D] as experts give them."""
    return ExpertRows(jnp.asarray(rows))


CASES = (
    RowCase(
        "routing",
        lambda rng, t: (4 * normal(rng, t, 16), normal(rng, t, 16)),
        lambda rng: (),
        lambda k, r, c: k(route, r[0], r[1], experts_per_token=4, normalize=True, scale=1.5, temperature=1.0),
        bad_rows(0),
    ),
    RowCase(
        "demo experts, FP4, quantised",
        lambda rng, t: (bf16_normal(rng, t, 256), choices(rng, t, DEMO), routing_weights(rng, t, DEMO)),
        lambda rng: fp4_experts(rng, DEMO, DEMO.experts),
        lambda k, r, c: k(expert_mlp, *r, *c, limit=2.5, quantize_input=True).in_order,
        bad_rows(0),
    ),
    RowCase(
        "micro experts, float32",
        lambda rng, t: (normal(rng, t, 64), choices(rng, t, MICRO), routing_weights(rng, t, MICRO)),
        lambda rng: plain_experts(rng, MICRO, MICRO.experts, np.float32),
        lambda k, r, c: k(expert_mlp, *r, *c, limit=10.0, quantize_input=False).in_order,
        bad_rows(0),
    ),
    RowCase(
        "shared expert and sum, float32",
        lambda rng, t: (normal(rng, t, 64), normal(rng, t, 3, 64)),
        lambda rng: tuple(w[0] for w in plain_experts(rng, MICRO, 1, np.float32)),
        lambda k, r, c: k(combine_experts, ExpertRows(r[1]), k(shared_mlp, r[0], *c, limit=10.0, quantize_input=False)),
        bad_rows(0, 1),
    ),
)


class ExpertMlpTests(OpTests):
    """Every implementation of `expert_mlp`."""

    op: ClassVar[str] = "expert_mlp"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("expert examples")
        experts = fp4_experts(rng, MICRO, 4)
        x, ids, weights = bf16_normal(rng, 5, 64), choices(rng, 5, MICRO), routing_weights(rng, 5, MICRO)
        shared = tuple(fp8_weight(rng, 64, 64) for _ in range(3))
        settings = {"limit": 10.0, "quantize_input": True}
        return [
            (route, (normal(rng, 5, 16), normal(rng, 5, 16)), ROUTING),
            (expert_mlp, (x, ids, weights, *experts), settings),
            (shared_mlp, (x, *shared), settings),
            (combine_experts, (rows_of(bf16_normal(rng, 5, 2, 64)), x), {}),
        ]

    # ---- routing ---------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_routing_worked_example(self) -> None:
        """Guards the two roles of the bias: it takes part in the choice, never in the weight."""
        logits = np.array([WORKED_LOGITS], np.float32)
        bias = np.array([[0.9, 0, 0, 0]], np.float32)
        ids, weights = self.run(route, logits, bias, **ROUTING | {"experts_per_token": 2})
        np.testing.assert_array_equal(ids, [[0, 1]])
        np.testing.assert_allclose(weights, [[0.5, 1.0]], rtol=2e-6)

    @pytest.mark.fast
    def test_routing_golden(self) -> None:
        """Guards routing at the released size: 384 experts, both biases, logits down to softplus underflow."""
        unit = load_unit("router")
        bias = np.where(unit["image_mask"][:, None] != 0, unit["bias_vl"], unit["bias"])
        ids, weights = self.run(route, unit["logits"], bias, **ROUTING)
        np.testing.assert_array_equal(ids, unit["idx_sorted"])
        np.testing.assert_allclose(weights, unit["weights_f64"], rtol=1e-6)
        np.testing.assert_allclose(values(weights).sum(axis=1), 1.5, rtol=1e-6)

    def test_routing_of_very_negative_logits(self) -> None:
        """Guards the log1p form: sqrt(softplus(z)) is exp(z/2), not 0, where exp(z) vanishes beside 1."""
        logits = np.array([[-20.0, -30.0, -60.0, -64.0]], np.float32)
        settings = ROUTING | {"experts_per_token": 4, "normalize": False, "scale": 1.0}
        ids, weights = self.run(route, logits, np.zeros_like(logits), **settings)
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])
        np.testing.assert_allclose(values(weights), np.exp(values(logits) / 2), rtol=2e-6)

    def test_routing_ignores_a_constant_bias(self) -> None:
        """Guards against a bias that leaks into the weights."""
        rng = generator("constant bias")
        logits, bias = normal(rng, 9, 16), normal(rng, 9, 16)
        plain = self.run(route, logits, bias, **ROUTING)
        assert_same_bits(self.run(route, logits, bias + np.float32(4), **ROUTING), plain, "bias + 4")

    def test_routing_ties(self) -> None:
        """Guards the order of equals: the lowest ids win, and -0 counts as +0."""
        logits = np.zeros((3, 8), np.float32)
        bias = np.zeros((3, 8), np.float32)
        score = np.sqrt(np.log1p(np.float32(1.0)))  # of logit zero
        logits[1, ::2] = -0.0
        bias[2] = -score  # score + bias is +0 everywhere
        bias[2, 6] = np.nextafter(-score, np.float32(0))
        ids, _ = self.run(route, logits, bias, **ROUTING | {"experts_per_token": 3})
        np.testing.assert_array_equal(ids[:2], [[0, 1, 2], [0, 1, 2]])
        np.testing.assert_array_equal(ids[2], [0, 1, 6])

    def test_routing_settings(self) -> None:
        """Guards temperature, scale and the optional normalisation against float64."""
        rng = generator("routing settings")
        logits, bias = normal(rng, 20, 16), normal(rng, 20, 16)
        for k, normalize, scale, temperature in ((4, True, 1.5, 1.0), (3, False, 2.5, 0.7), (1, True, 1.5, 2.0)):
            ids, weights = self.run(
                route, logits, bias, experts_per_token=k, normalize=normalize, scale=scale, temperature=temperature
            )
            expected_ids, expected = reference.route(logits, bias, k, normalize, scale, temperature)
            np.testing.assert_array_equal(ids, expected_ids)
            np.testing.assert_allclose(values(weights), expected, rtol=2e-6)

    # ---- experts ---------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_clamps_worked_example(self) -> None:
        """Guards the clamps: the gate has an upper one only and before silu, the other factor has both."""
        one = np.ones((1, 1), np.float32)
        for gate, up, expected in ((12.0, -15.0, -99.99546), (-12.0, 1.0, -7.373e-5), (12.0, 15.0, 99.99546)):
            y = self.run(shared_mlp, one, gate * one, up * one, one, limit=10.0, quantize_input=False)
            np.testing.assert_allclose(y.item(), expected, rtol=1e-4)

    @pytest.mark.parametrize(
        ("size", "experts", "rows", "limit"),
        [(MICRO, 4, 9, 0.5), (DEMO, 16, 19, 10.0), (WIDE, 2, 2, 10.0)],
        ids=["micro", "demo", "released hidden size"],
    )
    def test_against_float64_reference_profile(self, size: Size, experts: int, rows: int, limit: float) -> None:
        """Guards the rounding points and the place of the routing weight at every model's widths.

        A float32 sum may round an intermediate to the neighbouring bfloat16 and that to another FP8 code; so
        most elements agree to one rounding, and a row stays within 1 % (an activation code is worth 2^-4 of one
        of many terms). A misplaced routing weight or clamp changes rows by far more.
        """
        rng = generator("expert", size.name)
        few = dataclasses.replace(size, experts=experts, experts_per_token=min(experts, size.experts_per_token))
        experts_of = fp4_experts(rng, size, experts)
        x, ids, weights = bf16_normal(rng, rows, size.hidden), choices(rng, rows, few), routing_weights(rng, rows, few)
        y = values(self.run(expert_mlp, x, ids, weights, *experts_of, limit=limit, quantize_input=True).in_order)
        w1, w3, w2 = (weight_values(part) for part in experts_of)
        expected = reference.expert_mlp(values(x), ids, weights, w1, w3, w2, limit, bf16, True)
        error = np.abs(y - expected)
        assert np.median(error / bf16_ulp(expected)) <= 1
        norms = np.linalg.norm(error, axis=2) / np.linalg.norm(expected, axis=2)
        assert norms.max() < 0.01, norms.max()

    def test_against_float64_float32_profile(self) -> None:
        """Guards the unrounded arithmetic to float32 accuracy, shared expert included."""
        rng = generator("expert float32")
        experts = plain_experts(rng, DEMO, DEMO.experts, np.float32)
        x, ids, weights = normal(rng, 18, 256), choices(rng, 18, DEMO), routing_weights(rng, 18, DEMO)
        y = self.run(expert_mlp, x, ids, weights, *experts, limit=1.0, quantize_input=False).in_order
        w1, w3, w2 = experts
        expected = reference.expert_mlp(x, ids, weights, w1, w3, w2, 1.0)
        assert_within(y, expected, 2e-6 * np.abs(expected).max(axis=2, keepdims=True))
        parts = [w[0] for w in experts]
        shared = self.run(shared_mlp, x, *parts, limit=1.0, quantize_input=False)
        expected = reference.gated_mlp(x, None, parts[0], parts[1], parts[2], 1.0)
        assert_within(shared, expected, 2e-6 * np.abs(expected).max(axis=1, keepdims=True))

    def test_routing_weight_comes_before_the_last_quantiser(self) -> None:
        """Guards the place of the weight: powers of two scale a row exactly, other weights only nearly."""
        rng = generator("routing weight")
        experts = fp4_experts(rng, MICRO, 4)
        x, ids = bf16_normal(rng, 6, 64), choices(rng, 6, MICRO)
        settings = {"limit": 10.0, "quantize_input": True}

        def run(factor: float) -> np.ndarray:
            factors = np.full(ids.shape, factor, np.float32)
            return values(self.run(expert_mlp, x, ids, factors, *experts, **settings).in_order)

        outputs = {factor: run(factor) for factor in (1.0, 0.25, 2.0, 0.3)}
        np.testing.assert_array_equal(outputs[0.25], 0.25 * outputs[1.0])
        np.testing.assert_array_equal(outputs[2.0], 2 * outputs[1.0])
        relative = np.abs(outputs[0.3] - 0.3 * outputs[1.0]).max() / np.abs(outputs[1.0]).max()
        assert 0 < relative < 0.05

    def test_rows_of_absent_experts_are_zero(self) -> None:
        """Guards expert parallelism: ids of other devices' experts, shifted out of range, must add nothing."""
        rng = generator("absent experts")
        experts = plain_experts(rng, MICRO, 4, np.float32)
        x, ids, weights = normal(rng, 20, 64), choices(rng, 20, MICRO), routing_weights(rng, 20, MICRO)
        settings = {"limit": 10.0, "quantize_input": False}
        whole = self.run(expert_mlp, x, ids, weights, *experts, **settings).in_order
        halves = []
        for first in (0, 2):
            part = [w[first : first + 2] for w in experts]
            y = self.run(expert_mlp, x, ids - first, weights, *part, **settings).in_order
            local = (ids >= first) & (ids < first + 2)
            assert not y[~local].any()
            halves.append(np.where(local[:, :, None], y, 0))
        assert_same_bits(np.where((ids < 2)[:, :, None], *halves), whole, "two halves of the experts")

    @pytest.mark.fast
    def test_sum_is_sequential_float32(self) -> None:
        """Guards the order of a token's sum: ascending expert, then shared, one rounding at the end."""
        rows = np.array([[[2.0**24], [1.0], [1.0], [-(2.0**24)]]], np.float32)
        y = self.run(combine_experts, rows_of(rows), np.array([[0.5]], np.float32))
        assert y.item() == 0.5  # each 1 is lost against 2^24
        y = self.run(combine_experts, rows_of(rows[:, [1, 2, 0, 3]]), np.array([[0.5]], np.float32))
        assert y.item() == 2.5
        rng = generator("sum")
        outputs, shared = bf16_normal(rng, 20, 6, 64), bf16_normal(rng, 20, 64)
        expected = reference.combine_experts(values(outputs), values(shared), bf16)
        assert_same_bits(self.run(combine_experts, rows_of(outputs), shared), expected.astype(BF16), "bfloat16 sum")

    def test_gradients(self) -> None:
        """Guards the training mode: gradients of weights, rows and routing weights."""
        rng = generator("expert gradients")
        size = dataclasses.replace(MICRO, hidden=6, expert_width=5, experts=3)
        x, ids, weights = normal(rng, 4, 6, spread=0), choices(rng, 4, size), routing_weights(rng, 4, size)
        experts = plain_experts(rng, size, 3, np.float32)
        kernels = self.kernels(None)

        def experts_of(rows: Any, factors: Any, *parts: Any) -> Any:
            y = kernels(expert_mlp, rows, ids, factors, *parts, limit=10.0, quantize_input=False)
            return kernels(combine_experts, y, rows)

        check_gradients(experts_of, x, weights, *experts)

        def routed(logits: Any) -> Any:
            return kernels(route, logits, 0 * x, experts_per_token=2, normalize=True, scale=1.5, temperature=1.0)[1]

        check_gradients(routed, x)

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast or cut without a word."""
        x, ids, w = np.zeros((2, 32), np.float32), np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)
        w1, w2 = np.zeros((4, 64, 32), np.float32), np.zeros((4, 32, 64), np.float32)
        settings = {"limit": 10.0, "quantize_input": False}
        self.refuses(expert_mlp, x, ids, w[:, :1], w1, w1, w2, match="do not fit", **settings)
        self.refuses(expert_mlp, x[:1], ids, w, w1, w1, w2, match="do not fit", **settings)
        self.refuses(expert_mlp, x, ids, w, w1, w1[:2], w2, match="do not fit", **settings)
        self.refuses(expert_mlp, x, ids, w, w1, w1, w1, match="do not fit", **settings)
        self.refuses(expert_mlp, x[:, :16], ids, w, w1, w1, w2, match="do not fit", **settings)
        self.refuses(shared_mlp, x, w1[0], w1[0], w1[0], match="shared_mlp.*do not fit", **settings)
        self.refuses(shared_mlp, x[:, :16], w1[0], w1[0], w2[0], match="shared_mlp.*do not fit", **settings)
        self.refuses(combine_experts, rows_of(np.zeros((2, 3, 8), np.float32)), x, match="do not fit")
        self.refuses(route, x, x[:1], match="do not fit", **ROUTING)
        self.refuses(route, x, x, match="do not fit", **ROUTING | {"experts_per_token": 33})
        self.refuses(route, x, x, match="do not fit", **ROUTING | {"experts_per_token": 0})
