"""Two 64-row tiles in Hopper's register layout as the 128 rows of a Blackwell tensor-core operand.

Warp w of a warpgroup holds rows 16 w ... 16 w + 15 of a tile in `Layout.WGMMA`, and lanes 32 w ... 32 w + 31 of
tensor memory belong to it. So row 16 w + r of tile j is put in lane 32 w + 16 j + r, which moves nothing: the
same registers are named `Layout.TCGEN05`. Products come back the same way, each tile's in `Layout.WGMMA`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu

from deepinfer_jax.kernels.mosaic.target import interpreting

plgpu: Any = mosaic_gpu  # its types are not those of its functions

ROWS = 64
"""Rows of a tile."""

LANES = 128
"""Lanes of tensor memory: rows of two tiles."""

_WARPS, _WARP_ROWS = 4, 16


def stack_tiles(first: jax.Array, second: jax.Array) -> jax.Array:
    """(128, n) in layout TCGEN05, in lane order, of two arrays (64, n) in layout WGMMA."""
    shape = (LANES, first.shape[1])
    if interpreting():
        both = jnp.stack([first, second]).reshape(2, _WARPS, _WARP_ROWS, shape[1])
        return jnp.swapaxes(both, 0, 1).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * 2,
        return_type=plgpu.ShapeDtypeStruct(shape, first.dtype, layout=plgpu.Layout.TCGEN05),
    )
    def stack(_: Any, *tiles: Any) -> Any:
        layout = plgpu.Layout.TCGEN05.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        groups = registers.reshape(shape[1] // 8, 2, 2)  # 8 columns, tile, 8 rows of the warp's 16
        for j, tile in enumerate(tiles):
            groups[:, j] = tile.registers.reshape(shape[1] // 8, 2)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return stack(first, second)


def split_tiles(stacked: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse of `stack_tiles`, for floats: (128, n) in layout TCGEN05 -> two (64, n) in layout WGMMA."""
    shape = (ROWS, stacked.shape[1])
    if interpreting():
        tiles = jnp.swapaxes(stacked.reshape(_WARPS, 2, _WARP_ROWS, shape[1]), 0, 1)
        return tiles[0].reshape(shape), tiles[1].reshape(shape)
    tile_type = plgpu.ShapeDtypeStruct(shape, stacked.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.TCGEN05,), return_type=(tile_type, tile_type))
    def split(_: Any, array: Any) -> Any:
        layout = plgpu.Layout.WGMMA.to_mgpu()
        groups = array.registers.reshape(shape[1] // 8, 2, 2)
        tiles = []
        for j in range(2):
            registers = np.empty(layout.registers_shape(shape), dtype=object)
            registers.reshape(shape[1] // 8, 2)[...] = groups[:, j]
            tiles.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return tuple(tiles)

    return split(stacked)
