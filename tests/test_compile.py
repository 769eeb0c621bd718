"""Compiler options: the compiler knows them, they reach it, and they do what they are there for."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from deepinfer_jax import compile as compilation
from deepinfer_jax.kernels.tiling import tile_rows

pytestmark = pytest.mark.fast

BF16 = ml_dtypes.bfloat16


def bf16_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Normal bfloat16 numbers."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(BF16) for shape in shapes]


def rounded(x: np.ndarray) -> np.ndarray:
    """float64 values, each rounded to bfloat16 (products of two bfloat16 are exact in float32)."""
    return x.astype(np.float32).astype(BF16).astype(np.float64)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda"])
def test_compiler_knows_the_options(platform: str) -> None:
    """Guards against options that a new XLA has dropped or renamed: it refuses unknown names on every backend."""
    options = compilation.compiler_options(platform)
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options=options)
    for name, value in options.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}_not"):
            lowered.compile(compiler_options={f"{name}_not": value})


def test_stated_roundings_survive() -> None:
    """Guards every bfloat16 rounding: between fused operations the default would skip it."""
    x, y = bf16_arrays((16, 64), (16, 64))

    def product(a: Any, b: Any) -> Any:
        return (a * b).astype(jnp.float32)

    exact = rounded(x.astype(np.float64) * y.astype(np.float64))
    np.testing.assert_array_equal(compilation.jit(product)(x, y), exact)
    # The opposite option gives other bits, so the option above did reach the compiler.
    lax_options = {"xla_allow_excess_precision": True}
    other = jax.jit(product, compiler_options=lax_options)(x, y)
    assert (np.asarray(other) != exact).mean() > 0.5


FUNCTIONS = {
    "exp": lambda x: jnp.exp(-x),
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "sqrt softplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "log": lambda x: jnp.log(jnp.abs(x)),
    "softmax": jax.nn.softmax,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_one_row_and_of_many(name: str) -> None:
    """Guards rows alone against rows together: with other vectors, or approximations only in vectors, a few numbers
    would be computed by other instructions than many. On CPUs with 512-bit vectors XLA's own options fail this."""
    program = compilation.jit(lambda rows: tile_rows(FUNCTIONS[name], 16, rows))
    for width in (4, 7):
        x = 3 * np.random.default_rng(width).normal(size=(192, width)).astype(np.float32)
        together = np.asarray(program(x))
        alone = np.concatenate([np.asarray(program(x[t : t + 1])) for t in range(len(x))])
        np.testing.assert_array_equal(alone.view(np.uint32), together.view(np.uint32))


def test_round_trip_survives_in_the_program() -> None:
    """Guards the plainest rounding, there and back, in the text of the compiled program."""
    compiled = compilation.jit(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 2).lower(np.ones((16, 64)))
    assert "bf16[16,64]" in compiled.compile().as_text()


def test_products_keep_their_neighbours_out() -> None:
    """Guards roundings beside a product: a library that fused them with it would skip them."""
    q, k, w = bf16_arrays((16, 4, 32), (16, 64, 32), (16, 4))

    def score(queries: Any, keys: Any, weights: Any) -> Any:
        dots = lax.dot_general(
            queries,
            keys,
            (((2,), (2,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        relu = jnp.maximum(dots.astype(jnp.bfloat16), 0)
        return jnp.sum((relu * weights[:, :, None]).astype(jnp.float32), axis=1)

    dots = rounded(np.einsum("thd,tnd->thn", q.astype(np.float64), k.astype(np.float64)))
    products = rounded(np.maximum(dots, 0) * w.astype(np.float64)[:, :, None])
    # Sums of four such products are exact in float32 up to one last bit.
    np.testing.assert_allclose(compilation.jit(score)(q, k, w), products.sum(axis=1), rtol=1e-6, atol=1e-6)


def test_jit_passes_its_arguments_on() -> None:
    """Guards the wrapper: static and donated arguments, extra options, and the outermost jit only."""
    function = compilation.jit(
        lambda x, n: x * n,
        static_argnames="n",
        compiler_options={"xla_embed_ir_in_executable": False},
    )
    assert function(np.float32(2), n=3) == 6
    with pytest.raises(ValueError, match="compiler_options"):
        jax.jit(lambda x: function(x, n=3))(np.float32(2))
    with pytest.raises(ValueError, match="xla_allow_excess_precision=True contradicts False"):
        compilation.jit(jnp.sin, compiler_options={"xla_allow_excess_precision": True})


def test_unknown_platform_is_refused() -> None:
    """Guards against results without a promise on a platform that nobody has listed."""
    with pytest.raises(ValueError, match=r"'tpu' has no list.*cpu, gpu, cuda"):
        compilation.compiler_options("tpu")
    with pytest.raises(ValueError, match="'tpu' has no list"):
        compilation.jit(jnp.sin, platform="tpu")


def test_fingerprint_identifies_the_options() -> None:
    """Guards manifests: the fingerprint is that of the sorted options, the same in every process, per platform."""
    for platform in ("cpu", "gpu"):
        text = compilation.options_text(platform)
        assert json.loads(text) == compilation.compiler_options(platform)
        assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
        assert compilation.options_fingerprint(platform) == hashlib.sha256(text.encode()).hexdigest()
    assert compilation.options_fingerprint("cuda") == compilation.options_fingerprint("gpu")
    assert compilation.options_fingerprint("cpu") != compilation.options_fingerprint("gpu")


def test_options_are_a_fresh_copy() -> None:
    """Guards the lists against a caller who edits what it was given."""
    compilation.compiler_options("cpu").clear()
    assert compilation.compiler_options("cpu")["xla_allow_excess_precision"] is False
