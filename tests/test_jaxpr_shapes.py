"""Self-tests of the shape comparison, and every operator under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deepinfer_jax.kernels.dispatch import OPS, Kernels
from deepinfer_jax.kernels.index_scores import index_scores
from deepinfer_jax.kernels.top_k import candidate_blocks, top_k

from .jaxpr_shapes import assert_same_float_shapes, float_ops
from .kernels import (
    base_engram_rows,
    base_expert_mlp,
    base_index_scores,
    base_mhc_mix,
    base_pool_pair,
    base_rms_norm_quant,
    base_row_dot,
    base_sample_tokens,
    base_sparse_attention,
    base_top_k,
)
from .kernels.cases import RowCase, generator

pytestmark = pytest.mark.fast

CASES = {
    "row_dot": base_row_dot.CASES,
    "expert_mlp": base_expert_mlp.CASES,
    "sparse_attention": base_sparse_attention.CASES,
    "index_scores": base_index_scores.CASES,
    "top_k": base_top_k.CASES,
    "rms_norm_quant": base_rms_norm_quant.CASES,
    "mhc_mix": base_mhc_mix.CASES,
    "engram_rows": base_engram_rows.CASES,
    "pool_pair": base_pool_pair.CASES,
    "sample_tokens": base_sample_tokens.CASES,
}
FLAT = [(op, case) for op, cases in CASES.items() for case in cases]


def names(function: Callable[..., Any], *args: Any) -> list[str]:
    """Names of the floating-point primitives."""
    return [op.name for op in float_ops(function, *args)]


X = jax.ShapeDtypeStruct((4,), jnp.float32)
Y = jax.ShapeDtypeStruct((6,), jnp.float32)


doubled = jax.custom_vjp(lambda x: x * 2)
doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jax.jit(jnp.sin)(x), ["sin"]),
        (lambda x: jax.checkpoint(jnp.sin)(x), ["sin"]),
        (lambda x: lax.map(jnp.exp, x), ["exp"]),
        (lambda x: lax.fori_loop(0, 3, lambda _, y: y * y, x), ["mul"]),
        (lambda x: lax.while_loop(lambda y: y[0] < 3, jnp.cos, x), ["lt", "cos"]),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), ["cos", "sin"]),
        (lambda x: jax.nn.relu(x), ["max"]),
        (lambda x: doubled(x), ["mul"]),
        (lambda x: jnp.sum(x), ["reduce_sum"]),
        (lambda x: x.at[0].add(1.0), ["scatter-add"]),
        (lambda x: jnp.sort(x), ["sort"]),
        (lambda x: jnp.cumsum(x), ["cumsum"]),
        (lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), ["dot_general"]),
        (lambda x: (x > 0).sum(), ["gt"]),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32) + 1, []),
        (lambda x: x.at[jnp.array([1])].set(x[:1]), []),
        (lambda x: jnp.where(jnp.arange(x.shape[0]) > 1, x[::-1], jnp.concatenate([x[1:], x[:1]])), []),
        (lambda x: jnp.pad(lax.stop_gradient(x).astype(jnp.bfloat16).reshape(2, -1).T, 1)[None], []),
        (lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (1,), (2,)), (0,)), []),
    ],
)  # fmt: skip
def test_walk_sees_what_computes(function: Callable[..., Any], expected: list[str]) -> None:
    """Guards against a kind of control flow that is not walked into, and against copies that are flagged."""
    assert names(function, X) == expected


def test_difference_is_found_and_named() -> None:
    """Guards against a comparison that cannot fail: shapes, dtypes, order and length all count."""
    with pytest.raises(
        AssertionError, match=r"primitive 2 of 3 and 3.*\n.*mul.float32.., float32.4.*\n.*mul.float32.., float32.6"
    ):
        assert_same_float_shapes(lambda x: jnp.sin(x[:2]).sum() * x, (X,), (Y,))
    half = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with pytest.raises(AssertionError, match=r"sin\(float32\[4\]\).*\n.*sin\(bfloat16\[4\]\)"):
        assert_same_float_shapes(jnp.sin, (X,), (half,))
    with pytest.raises(AssertionError, match=r"cos.*\n.*nothing more"):
        assert_same_float_shapes(lambda x: jnp.cos(jnp.sin(x)), (X,), (X,), other=jnp.sin)
    with pytest.raises(AssertionError, match="only 0 floating-point primitives"):
        assert_same_float_shapes(lambda x: x[::-1], (X,), (X,))
    with pytest.raises(AssertionError, match=r"my_scope.*test_jaxpr_shapes\.py"):
        assert_same_float_shapes(jax.named_scope("my_scope")(lambda x: x + 1), (X,), (Y,))


def test_loop_counts_may_differ() -> None:
    """Guards against false alarms: tiles of one size in loops of different length are the point of it all."""

    def tiled(x: jax.Array) -> jax.Array:
        return lax.map(lambda tile: jnp.sin(tile) + 1, x.reshape(-1, 2))

    ops = assert_same_float_shapes(tiled, (X,), (Y,))
    assert [op.inputs[0] for op in ops] == ["float32[2]", "float32[2]"]
    assert_same_float_shapes(lambda x: (x + 1.0)[:0], (X,), (Y,), copies=frozenset({"slice", "add"}), at_least=0)


# ---- operators ------------------------------------------------------------------------------------


def traced(case: RowCase, rows: int, kernels: Kernels) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, operands) of a case at a row count."""
    rng = generator("shapes", case.name)
    constants = case.constants(rng)
    return lambda r, c: case.call(kernels, r, c), (case.rows(rng, rows), constants)


def test_every_operator_is_here() -> None:
    """Guards against a new operator that nobody compares."""
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize(("op", "case"), FLAT, ids=[f"{op}: {case}" for op, case in FLAT])
def test_rows_are_a_loop_count_only(op: str, case: RowCase) -> None:
    """Guards constant shapes of every operator at one row, a whole tile, a started one, and many."""
    least = 0 if op == "top_k" else 1
    function, one = traced(case, 1, Kernels())
    for rows in (16, 17, 64):
        _, many = traced(case, rows, Kernels())
        ops = assert_same_float_shapes(function, one, many, at_least=least)
    assert op != "top_k" or not ops


@pytest.mark.parametrize(("op", "case"), FLAT, ids=[f"{op}: {case}" for op, case in FLAT])
def test_whole_arrays_are_noticed(op: str, case: RowCase) -> None:
    """Guards the comparison itself: without row tiles, every operator but the integer one must fail it."""
    function, few = traced(case, 17, Kernels(row_tile=None))
    _, many = traced(case, 64, Kernels(row_tile=None))
    if op == "top_k":
        assert float_ops(function, *few) == []
        return
    with pytest.raises(AssertionError, match="depends on what must not matter"):
        assert_same_float_shapes(function, few, many)


def test_capacity_is_a_loop_count_only() -> None:
    """Guards index scores against arithmetic over the whole context capacity, at two page capacities and pools."""

    def score(*operands: Any) -> jax.Array:
        return index_scores(*operands, scale=0.125, fmt="fp4", bf16_chain=True)

    def operands(capacity: int, pool: int) -> tuple[Any, ...]:
        shapes = ((20, 4, 32), "bfloat16"), ((20, 4), "bfloat16"), ((pool, 64, 17), "uint8"), ((20, capacity), "int32")
        return (*(jax.ShapeDtypeStruct(*shape) for shape in shapes), jax.ShapeDtypeStruct((20,), "int32"))

    assert_same_float_shapes(score, operands(4, 9), operands(11, 40))


def test_selection_has_no_arithmetic() -> None:
    """Guards selections: on integer keys only, so that no width, capacity or row count can matter."""
    scores, visible = np.zeros((5, 40), np.float32), np.zeros(5, np.int32)
    assert float_ops(lambda s: top_k(s, k=4), scores) == []
    assert float_ops(lambda s, v: candidate_blocks(s, v, block_size=8, blocks=2), scores, visible) == []
