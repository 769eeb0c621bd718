"""Layouts of tiles in shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike


def swizzled(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Transforms of a tile whose rows have at least `columns` elements, as tensor cores and the copy engine want it."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, columns * size)
    tiling = plgpu.TilingTransform((8, swizzle // size))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
