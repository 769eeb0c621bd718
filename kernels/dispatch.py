"""Choice of an op's implementation, and the bundle of choices that the model carries."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.core import Tracer

Implementation = Literal["xla", "mosaic_gpu", "cann"]

ROW_TILE = 16
"""Rows of one tile of the portable implementation: every floating-point shape is built from it."""

_AVAILABLE: dict[str, tuple[str, ...]] = {
    "row_dot": ("xla", "mosaic_gpu"),
    "expert_mlp": ("xla", "mosaic_gpu"),
    "sparse_attention": ("xla",),
    "index_scores": ("xla",),
    "top_k": ("xla",),
    "rms_norm_quant": ("xla", "mosaic_gpu"),
    "mhc_mix": ("xla", "mosaic_gpu"),
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


@functools.lru_cache(maxsize=1024)
def _traced_once(
    function: Callable[..., Any],
    implementation: Implementation | None,
    row_tile: int | None,
    fixed: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """A jit inside the program that is being traced: equal calls are traced and lowered once, which halves
    both. It is no program of its own: XLA inlines it, and the options of the outer `compile.jit` hold."""
    return jax.jit(functools.partial(function, implementation=implementation, row_tile=row_tile, **dict(fixed)))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Implementations used by one program: chosen once from configuration and device, hashable.

    row_tile: rows per tile of the portable implementation. None computes on whole arrays: that is
        differentiable, and makes no promise about equal bits at different row counts.
    choices: (op, implementation) pairs; ops that are not named use the portable implementation.
    row_block: most rows that a layer takes at once, a multiple of row_tile, which is the default. GPU kernels read
        weights once per block; portable ops go through a block tile by tile. No bit depends on it.
    """

    row_tile: int | None = ROW_TILE
    choices: tuple[tuple[str, Implementation], ...] = ()
    row_block: int | None = None

    def __post_init__(self) -> None:
        if self.row_block is not None and (self.row_tile is None or self.row_block % self.row_tile):
            raise ValueError(f"Kernels: row_block={self.row_block} is no multiple of row_tile={self.row_tile}")
        for op, _ in self.choices:
            if op not in _AVAILABLE:
                raise ValueError(f"Kernels: unknown op {op!r}; known: {', '.join(OPS)}")

    def block_of(self, rows: int) -> int | None:
        """Rows of one block when there are `rows`, whole tiles: the most, up to row_block, that divide them.

        None: all at once. Raises ValueError for a row count that is no multiple of row_tile.
        """
        tile = self.row_tile
        if tile is None:
            return None
        if rows % tile:
            raise ValueError(f"{rows} rows are not a multiple of the row tile {tile}")
        most = min(self.row_block or tile, rows)
        return next((size for size in range(most, tile, -tile) if rows % size == 0), tile)

    def one_block(self, rows: int) -> bool:
        """Whether GPU kernels take all `rows` as one block, which is then computed without a loop: the host waits for
        the device in every turn of a loop whose length is data."""
        return self.row_block is not None and self.block_of(rows) == rows

    def most_rows(self, without_tiles: int) -> int:
        """Most rows of one block at any row count; `without_tiles` where there is no tile to go by."""
        return self.row_block or self.row_tile or without_tiles

    def implementation(self, op: str) -> Implementation | None:
        """The chosen implementation of `op`."""
        return dict(self.choices).get(op)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a contract function with this bundle's implementation and row tile."""
        op = function.op  # type: ignore[attr-defined]
        arrays = {name: value for name, value in kwargs.items() if isinstance(value, jax.Array | np.ndarray)}
        fixed = {name: value for name, value in kwargs.items() if name not in arrays}
        choice = self.implementation(op)
        with jax.named_scope(f"{op}.{function.__name__}"):
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, arrays))):
                return _traced_once(function, choice, self.row_tile, tuple(sorted(fixed.items())))(*args, **arrays)
            return function(*args, implementation=choice, row_tile=self.row_tile, **kwargs)
