"""Weights in the order in which GPU kernels read them: repacked once, when they are loaded.

An op whose kernel wants another order than the checkpoint's has `kernels/<op>/repack.py` with

    repack(weight: QuantTensor) -> QuantTensor      # same values, another format; ValueError: no such layout

Values never change: `quantization.dequantize` gives the same numbers of both forms, and the portable
implementations take both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import kernels as kernels_package
from deepinfer_jax.compile import jit
from deepinfer_jax.engine.implementations import chosen_ops
from deepinfer_jax.kernels.dispatch import OPS, Implementation
from deepinfer_jax.kernels.mosaic.target import Architecture, architecture
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.params import LayerParams, Params

PIECE_BYTES = 32 << 20
"""Packed bytes that are repacked at a time: the work takes several times that for a while."""

Repack = Callable[[QuantTensor], QuantTensor]


def op_of_weight(key: str, weight: QuantTensor) -> str | None:
    """The op that multiplies by a packed weight of this declaration; None for tables that are only looked up."""
    if weight.format == "fp8_row":
        return None
    return "expert_mlp" if key.startswith(("ffn.experts.", "ffn.shared_experts.")) else "row_dot"


@functools.cache
def repack_function(op: str) -> Repack | None:
    """What brings an op's weights into its kernel's order; None if it reads them as they are."""
    name = f"{kernels_package.__name__}.{op}.repack"
    return importlib.import_module(name).repack if importlib.util.find_spec(name) is not None else None


def _architecture() -> Architecture | None:
    """What kernels are built for here; None where there are none."""
    try:
        return architecture()
    except NotImplementedError:
        return None


@functools.lru_cache(maxsize=64)
def _one_repacked(
    op: str,
    target: Architecture | None,
    data: tuple[tuple[int, ...], str],
    scale: tuple[tuple[int, ...], str],
    fmt: Any,
) -> QuantTensor | None:
    """One repacked matrix of this op without values; None if there is no layout for it.

    Zeros are repacked for it, so that `repack` may look at values. target: which `repack` looks at too.
    """
    del target  # tells results apart
    repack = repack_function(op)
    if repack is None:
        return None
    zeros = QuantTensor(jnp.zeros(*data), jnp.zeros(*scale), fmt)
    try:
        result = repack(zeros)
    except ValueError:
        return None
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), result)


def repacked_form(key: str, weight: QuantTensor) -> QuantTensor | None:
    """ShapeDtypeStructs of the repacked weight [*lead, ...]; None if it stays as it is."""
    op = op_of_weight(key, weight)
    if op is None:
        return None
    parts = [(tuple(leaf.shape[-2:]), jnp.dtype(leaf.dtype).name) for leaf in (weight.data, weight.scale)]
    one = _one_repacked(op, _architecture(), parts[0], parts[1], weight.format)
    if one is None or one.format == weight.format:
        return None
    lead = tuple(weight.data.shape[:-2])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(lead + leaf.shape, leaf.dtype), one)


# Programs take places as arrays, so that they are compiled once; and no whole leaf is reshaped, which would copy it.


@functools.lru_cache(maxsize=64)
def _take_program(size: int) -> Callable[..., QuantTensor]:
    """(weight, first [lead axes]) -> [size, out, in]: matrices from `first` on along the last leading axis."""

    def take(weight: QuantTensor, first: jax.Array) -> QuantTensor:
        def part(leaf: jax.Array) -> jax.Array:
            axes = len(first)
            sizes = (*(1 for _ in range(axes - 1)), size, *leaf.shape[axes:])
            piece = lax.dynamic_slice(leaf, (*first, *(0 for _ in leaf.shape[axes:])), sizes)
            return piece.reshape(size, *leaf.shape[axes:])

        return jax.tree.map(part, weight)

    return jit(take)


@functools.lru_cache(maxsize=1)
def _put_program() -> Callable[..., QuantTensor]:
    """(whole, piece, first) -> whole with the piece where `_take_program` would take it; the whole is donated."""

    def put(whole: QuantTensor, piece: QuantTensor, first: jax.Array) -> QuantTensor:
        def part(target: jax.Array, value: jax.Array) -> jax.Array:
            axes = len(first)
            value = value.reshape(*(1 for _ in range(axes - 1)), *value.shape)
            return lax.dynamic_update_slice(target, value, (*first, *(0 for _ in target.shape[axes:])))

        return jax.tree.map(part, whole, piece)

    return jit(put, donate_argnums=0)


def _piece(weight: QuantTensor, first: tuple[int, ...], size: int) -> QuantTensor:
    if isinstance(weight.data, np.ndarray):
        place = (*first[:-1], slice(first[-1], first[-1] + size))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[place]), weight)
    return _take_program(size)(weight, np.array(first, np.int32))


def repack_weight(key: str, weight: QuantTensor) -> QuantTensor:
    """The weight in its kernel's order, on the default device; the same object if it stays as it is.

    Args:
        key: name of the declaration (`model/params.py`). weight: [*lead, out, in] of host or device arrays.

    Device memory peaks at the result and one piece (and the weight, if it is on the device). A weight with
    values that the layout cannot hold stays as it is, with a warning.
    """
    form, op = repacked_form(key, weight), op_of_weight(key, weight)
    repack = None if op is None else repack_function(op)
    if form is None or repack is None:
        return weight
    lead = tuple(weight.data.shape[:-2])
    try:
        if not lead:
            return repack(jax.tree.map(jnp.asarray, weight))
        one = weight.data.nbytes // math.prod(lead)
        size = next(n for n in range(min(lead[-1], max(1, PIECE_BYTES // one)), 0, -1) if lead[-1] % n == 0)
        whole = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
        for first in itertools.product(*map(range, lead[:-1]), range(0, lead[-1], size)):
            whole = _put_program()(whole, repack(_piece(weight, first, size)), np.array(first, np.int32))
    except ValueError as error:
        warnings.warn(f"{key}: stays in the checkpoint's order: {error}", stacklevel=2)
        return weight
    return whole


def _each_group(params: Params, change: Callable[[LayerParams], LayerParams]) -> Params:
    """Params with `change` applied to the weights of every run and draft stage."""
    segments = tuple(tuple(change(run) for run in segment) for segment in params.segments)
    return dataclasses.replace(params, segments=segments, draft=tuple(change(stage) for stage in params.draft))


def ops_to_repack(
    params: Params, profile: NumericsProfile, implementation: Implementation | None = None
) -> frozenset[str]:
    """Ops that would use GPU kernels if their weights were repacked, and have something to repack.

    params: weights or their ShapeDtypeStructs.
    """
    ops = [op for op in OPS if repack_function(op) is not None]
    if implementation == "xla" or not ops:
        return frozenset()

    def repacked(group: LayerParams) -> LayerParams:
        forms = {key: repacked_form(key, leaf) for key, leaf in group.items() if isinstance(leaf, QuantTensor)}
        return {key: forms.get(key) or leaf for key, leaf in group.items()}

    return chosen_ops(lambda: _each_group(params, repacked), profile) & frozenset(ops)


def repack_group(group: Mapping[str, Any], ops: Collection[str], *, consume: bool) -> LayerParams:
    """A run's weights with those of `ops` repacked, one after the other.

    consume: free each device array as soon as it has been repacked.
    """
    result = dict(group)
    for key, leaf in group.items():
        if not isinstance(leaf, QuantTensor) or op_of_weight(key, leaf) not in ops:
            continue
        result[key] = repack_weight(key, leaf)
        if consume and result[key] is not leaf:
            for array in jax.tree.leaves(jax.block_until_ready((result[key], leaf))[1]):
                array.delete()
    return result


def repack_params(params: Params, ops: Collection[str], *, consume: bool = False) -> Params:
    """The same weights, those of `ops` repacked; the same object if there is nothing to do."""
    if not ops:
        return params
    result = _each_group(params, lambda group: repack_group(group, ops, consume=consume))
    same = all(a is b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(result), strict=True))
    return params if same else result


def prepare_params(
    params: Params, profile: NumericsProfile, implementation: Implementation | None = None, *, consume: bool = False
) -> Params:
    """The same weights, those of GPU kernels in their order. `load_params` has done this already.

    For weights from elsewhere (`init_params`, training). Without it the engine still gives right results: an op
    whose kernel needs another order uses the portable implementation, and the line that the engine prints says so.

    Args:
        params: weights on the device. profile, implementation: as for `choose_kernels`.
        consume: free each array that was repacked, so that only one leaf exists twice; `params` is then unusable.
    """
    return repack_params(params, ops_to_repack(params, profile, implementation), consume=consume)
