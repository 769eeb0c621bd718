"""Models with one part taken out, made by changing weights: the forward pass stays the one there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.model.params import Params

_SEED = 20261130


def _change_leaves(params: Params, name: str, change: Callable[[Any], Any]) -> Params:
    """The same parameters with `change` applied to every backbone leaf of a name; ValueError if there is none."""
    found = 0
    segments = []
    for segment in params.segments:
        runs = []
        for run in segment:
            found += name in run
            runs.append({key: change(leaf) if key == name else leaf for key, leaf in run.items()})
        segments.append(tuple(runs))
    if not found:
        raise ValueError(f"this model has no weights named {name}, so there is nothing to take out")
    return dataclasses.replace(params, segments=tuple(segments))


def without_engram(params: Params) -> Params:
    """Zero keys and values from every Engram table: what is added to the streams is zero.

    Raises ValueError for a model without Engram layers.
    """

    def zero(leaf: Any) -> Any:
        if isinstance(leaf, QuantTensor):
            return dataclasses.replace(leaf, data=jnp.zeros_like(leaf.data))
        return jnp.zeros_like(leaf)

    return _change_leaves(params, "engram.wkv", zero)


def with_random_selection(params: Params) -> Params:
    """Index queries from a fixed random permutation of their input features: entries are then chosen by scores of
    the usual size that say nothing about them. Sequences with at most index_topk entries are not affected.

    Raises ValueError for a model without index sources.
    """

    def permute(leaf: Any) -> Any:
        weight = dequantize(leaf) if isinstance(leaf, QuantTensor) else leaf
        order = np.random.Generator(np.random.PCG64(_SEED)).permutation(weight.shape[-1])
        return weight[..., order]

    return _change_leaves(params, "attn.indexer.wq_b", permute)


ABLATIONS: dict[str, Callable[[Params], Params]] = {
    "no_engram": without_engram,
    "random_selection": with_random_selection,
}
"""Name in reports -> what it does to the weights."""
