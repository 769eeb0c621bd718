"""Differentiable replacements of a few ops, and rounding with straight-through gradients.

The functions of `deepinfer_jax.model` call their ops through a `Kernels` bundle. `TrainingKernels` is such a
bundle: products get a backward pass in the operands' dtype (JAX would make float32 products of it), and
quantisers pass gradients straight through. Values are those of the portable ops up to the order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.mhc_mix import mhc_mix
from deepinfer_jax.kernels.quantization import (
    GROUP,
    dequantize_fp4,
    dequantize_fp4_e4m3,
    e8m0_to_float32,
    power_of_two_scale_byte,
    quantize_dequantize_fp8,
    quantize_fp4,
    quantize_fp4_e4m3,
    round_to_e4m3,
)
from deepinfer_jax.kernels.rms_norm_quant import rotary
from deepinfer_jax.kernels.rms_norm_quant.xla import rotate
from deepinfer_jax.kernels.row_dot import row_dot, row_dot_grouped

SAVED = "saved"
"""Name of the intermediate values that the backward pass keeps; all others are computed again."""


# ---- products -------------------------------------------------------------------------------------


def widens_operands() -> bool:
    """Whether bfloat16 operands become float32 (the same products): XLA:CPU lacks some bfloat16 products."""
    return jax.default_backend() == "cpu"


def matmul(spec: str, a: jax.Array, b: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Einsum without gradient rules: float32 accumulation, one rounding; float32 operands in true float32."""
    if widens_operands():
        wide = (x.astype(jnp.float32) for x in (a, b))
        return jnp.einsum(spec, *wide, precision=lax.Precision.HIGHEST).astype(out_dtype)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(spec: str, a: jax.Array, b: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """`einsum(spec, a, b)` of two arrays of one dtype, rounded once to `out_dtype`.

    Every index must occur in at least two of the three terms. The backward pass rounds the cotangent to the
    operands' dtype and multiplies in it.
    """
    return matmul(spec, a, b, out_dtype)


def _product_forward(spec: str, a: jax.Array, b: jax.Array, out_dtype: DTypeLike) -> tuple[jax.Array, Any]:
    return product(spec, a, b, out_dtype), (a, b)


def _product_backward(
    spec: str, _: DTypeLike, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    terms, out = spec.split("->")
    left, right = terms.split(",")
    g = cotangent.astype(a.dtype)
    return matmul(f"{out},{right}->{left}", g, b, a.dtype), matmul(f"{out},{left}->{right}", g, a, b.dtype)


product.defvjp(_product_forward, _product_backward)


# ---- straight-through rounding --------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`function(x)`, of x's shape and dtype, with the gradient of the identity."""
    return function(x)


straight_through.defvjp(lambda function, x: (function(x), None), lambda _function, _, g: (g,))


def _fp8_blocks(w: jax.Array) -> jax.Array:
    *lead, rows, columns = w.shape
    blocks = w.reshape(*lead, rows // GROUP, GROUP, columns // GROUP, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True), np.float32(1e-4))
    scale = e8m0_to_float32(power_of_two_scale_byte(amax, 448.0))
    return (round_to_e4m3(jnp.clip(blocks / scale, -448, 448)) * scale).reshape(w.shape)


def _round_fp4(x: jax.Array) -> jax.Array:
    return dequantize_fp4(*quantize_fp4(x)).astype(x.dtype)


def _round_fp4_e4m3(x: jax.Array) -> jax.Array:
    return dequantize_fp4_e4m3(*quantize_fp4_e4m3(x)).astype(x.dtype)


def _round_bf16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, 8, 7)  # a pair of conversions would be optimised away


_WEIGHT_ROUNDING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fp8": _fp8_blocks,
    "fp4": _round_fp4,
    "fp8_row": quantize_dequantize_fp8,
}


def stored_values(w: jax.Array, storage: str, quantize: bool) -> jax.Array:
    """Float32 weights rounded to what a checkpoint stores, gradients straight through.

    w is rounded to bfloat16 first, since exported weights come from bfloat16 files. quantize: also apply the
    grid of "fp8", "fp4" or "fp8_row" storage. "f32" weights stay.
    """
    if storage == "f32":
        return w
    w = straight_through(_round_bf16, w)
    if quantize and storage in _WEIGHT_ROUNDING:
        return straight_through(_WEIGHT_ROUNDING[storage], w)
    return w


def round_activation(x: jax.Array, enabled: bool = True) -> jax.Array:
    """FP8 per 32 elements: activations in front of products, and window key-values."""
    return straight_through(quantize_dequantize_fp8, x) if enabled else x


def round_index(x: jax.Array, enabled: bool = True) -> jax.Array:
    """FP4 per 32 elements: index queries and keys."""
    return straight_through(_round_fp4, x) if enabled else x


def round_compressed(x: jax.Array, enabled: bool = True) -> jax.Array:
    """FP4 with e4m3 scales per 16 elements: compressed key-values."""
    return straight_through(_round_fp4_e4m3, x) if enabled else x


# ---- the bundle -----------------------------------------------------------------------------------


def _row_dot(
    x: jax.Array,
    w: jax.Array,
    *,
    quantize_input: bool = False,
    out_dtype: DTypeLike | None = None,
    column_tile: int | None = None,
) -> jax.Array:
    del column_tile
    y = product("tk,nk->tn", round_activation(x, quantize_input), w.astype(x.dtype), out_dtype or x.dtype)
    return checkpoint_name(y, SAVED)


def _row_dot_grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    weights = w.astype(x.dtype).reshape(x.shape[1], -1, x.shape[2])
    return checkpoint_name(product("tgk,gnk->tgn", x, weights, x.dtype), SAVED)


def _rotary(
    x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array, *, inverse: bool = False, quantize: bool = False
) -> jax.Array:
    return round_index(rotate(x, positions, inverse_frequencies, inverse), quantize)


@jax.custom_vjp
def _mix_product(flat: jax.Array, fn: jax.Array) -> jax.Array:
    """Float32 [T, N] of bfloat16 rows and a float32 weight, which is split in two bfloat16 parts.

    That keeps 16 bits of the weight and reads the rows once, in bfloat16.
    """
    high = fn.astype(jnp.bfloat16)
    low = (fn - _round_bf16(fn)).astype(jnp.bfloat16)
    both = matmul("tk,nk->tn", flat, jnp.concatenate([high, low]), jnp.float32)
    return both[:, : fn.shape[0]] + both[:, fn.shape[0] :]


def _mix_product_backward(operands: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    flat, fn = operands
    rounded = g.astype(flat.dtype)
    return (
        matmul("tn,nk->tk", rounded, fn.astype(flat.dtype), flat.dtype),
        matmul("tn,tk->nk", rounded, flat, jnp.float32),
    )


_mix_product.defvjp(lambda flat, fn: (_mix_product(flat, fn), (flat, fn)), _mix_product_backward)


def _normalize(x: jax.Array, axis: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """x / (sum over `axis` of [source, destination, T] + eps), and the divisor; sums are written out."""
    parts = [lax.index_in_dim(x, i, axis, keepdims=True) for i in range(x.shape[axis])]
    divisor = functools.reduce(jnp.add, parts) + eps
    return x / divisor, jnp.squeeze(divisor, axis)


def _normalize_backward(y: jax.Array, divisor: jax.Array, axis: int, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, gradient of x) from the result y."""
    weighted = g * y
    parts = [lax.index_in_dim(weighted, i, axis, keepdims=True) for i in range(y.shape[axis])]
    wide = jnp.expand_dims(divisor, axis)
    return y * wide, (g - functools.reduce(jnp.add, parts)) / wide


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Doubly normalised [C, C, T] of logits, as `mhc_mix.xla.sinkhorn`.

    The backward pass keeps the divisors and runs the iteration backwards: iterates are products of them.
    """
    return _sinkhorn_forward(logits, iterations, eps)[0]


def _sinkhorn_forward(logits: jax.Array, iterations: int, eps: float) -> tuple[jax.Array, Any]:
    soft = jax.nn.softmax(logits, axis=1)
    matrix, first = _normalize(soft + eps, 0, eps)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, rows = _normalize(x, 1, eps)
        x, columns = _normalize(x, 0, eps)
        return x, (rows, columns)

    matrix, divisors = lax.scan(step, matrix, None, length=iterations - 1)
    return matrix, jax.tree.map(lambda x: checkpoint_name(x, SAVED), (matrix, first, divisors, soft))


def _sinkhorn_backward(_iterations: int, eps: float, kept: Any, g: jax.Array) -> tuple[jax.Array]:
    matrix, first, divisors, soft = kept

    def step(carry: tuple[jax.Array, jax.Array], kept: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (x, g), (rows, columns) = carry, kept
        x, g = _normalize_backward(x, columns, 0, g)
        return _normalize_backward(x, rows, 1, g), None

    (matrix, g), _ = lax.scan(step, (matrix, g), divisors, reverse=True)
    _, g = _normalize_backward(matrix, first, 0, g)
    return (soft * (g - jnp.sum(soft * g, axis=1, keepdims=True)),)


sinkhorn.defvjp(_sinkhorn_forward, _sinkhorn_backward)


def _mhc_mix(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    flat = streams.reshape(streams.shape[0], -1)
    values = flat.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + norm_eps)
    mixed = _mix_product(flat, fn) if flat.dtype == jnp.bfloat16 else product("tk,nk->tn", flat, fn, jnp.float32)
    mixes = checkpoint_name(mixed * inverse, SAVED)
    count = streams.shape[1]
    pre = jax.nn.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + hc_eps
    post = 2 * jax.nn.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(-1, count, count)
    matrix = checkpoint_name(sinkhorn(jnp.moveaxis(logits, 0, -1), iterations, hc_eps), SAVED)
    return pre, post, jnp.moveaxis(matrix, -1, 0)


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    row_dot: _row_dot,
    row_dot_grouped: _row_dot_grouped,
    rotary: _rotary,
    mhc_mix: _mhc_mix,
}


@dataclasses.dataclass(frozen=True)
class TrainingKernels(Kernels):
    """Whole arrays; products and quantisers as in this module, everything else portable."""

    row_tile: int | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the replacement of a contract function, or the function itself."""
        if function in _REPLACED:
            return _REPLACED[function](*args, **kwargs)
        return super().__call__(function, *args, **kwargs)
