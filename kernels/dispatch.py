"""Choice of an op's implementation, and the bundle of choices that the model carries."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import jax

Implementation = Literal["xla", "mosaic_gpu", "cann"]

ROW_TILE = 16
"""Rows of one tile of the portable implementation: every floating-point shape is built from it."""

_AVAILABLE: dict[str, tuple[str, ...]] = {
    "row_dot": ("xla",),
    "expert_mlp": ("xla",),
    "sparse_attention": ("xla",),
    "index_scores": ("xla",),
    "top_k": ("xla",),
    "rms_norm_quant": ("xla",),
    "mhc_mix": ("xla",),
    "engram_rows": ("xla",),
    "pool_pair": ("xla",),
    "sample_tokens": ("xla",),
}
"""Implementations that exist, per op (folder of this package)."""

OPS = tuple(_AVAILABLE)


def implementation_module(op: str, implementation: Implementation | None) -> ModuleType:
    """Module of `op` that holds the wanted implementation; None means the portable one.

    Raises ValueError for an unknown name and NotImplementedError for one that does not exist.
    """
    name = "xla" if implementation is None else implementation
    if name not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is unknown; choose None or one of {known}")
    if name not in _AVAILABLE[op]:
        raise NotImplementedError(f"{op}: there is no {name!r} implementation; available: {', '.join(_AVAILABLE[op])}")
    return importlib.import_module(f"{__package__}.{op}.{name}")


def contract(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a public function as part of `op`, so that `Kernels` knows which choice applies to it."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.op = op  # type: ignore[attr-defined]
        return function

    return mark


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementations used by one program: chosen once from configuration and device, hashable.

    row_tile: rows per tile of the portable implementation. None computes on whole arrays: that is
        differentiable, and makes no promise about equal bits at different row counts.
    choices: (op, implementation) pairs; ops that are not named use the portable implementation.
    """

    row_tile: int | None = ROW_TILE
    choices: tuple[tuple[str, Implementation], ...] = ()

    def __post_init__(self) -> None:
        for op, _ in self.choices:
            if op not in _AVAILABLE:
                raise ValueError(f"Kernels: unknown op {op!r}; known: {', '.join(OPS)}")

    def implementation(self, op: str) -> Implementation | None:
        """The chosen implementation of `op`."""
        return dict(self.choices).get(op)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a contract function with this bundle's implementation and row tile."""
        op = function.op  # type: ignore[attr-defined]
        with jax.named_scope(f"{op}.{function.__name__}"):
            return function(*args, implementation=self.implementation(op), row_tile=self.row_tile, **kwargs)
