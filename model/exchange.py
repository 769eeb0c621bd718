"""The seam between one device and a mesh: where rows leave a device and come home."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from deepinfer_jax.kernels.expert_mlp import ExpertRows

Compute = Callable[[jax.Array, jax.Array, jax.Array], ExpertRows]


def _local_experts(compute: Compute, x: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> ExpertRows:
    return compute(x, expert_ids, weights)


def _local_rows(compute: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    return compute(rows)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Pure functions around the sharded parts of the model. `LOCAL_EXCHANGE` is the identity.

    experts(compute, x [T, D], expert_ids [T, k], weights [T, k]) -> rows of [T, k, D]: send rows to the
        devices that hold their experts, compute there, bring each output row home. Sums stay at home.
    engram_rows(gather, row_ids [T, columns]) -> [T, columns * width].
    logits(project, rows [T, D]) -> float32 [T, V]: whole rows, gathered at home.
    """

    experts: Callable[[Compute, jax.Array, jax.Array, jax.Array], ExpertRows] = _local_experts
    engram_rows: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array] = _local_rows
    logits: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array] = _local_rows


LOCAL_EXCHANGE = Exchange()
