"""Dequantisation of FP4 tiles in registers, straight into the operand of Hopper's tensor cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from deepinfer_jax.kernels.fp4_fragments import PIECES, TILE, TILE_WORDS, unpack_codes, unpack_scales
from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import e2m1_to_float32, e8m0_to_float32

plgpu: Any = mosaic_gpu  # its types are not those of its functions

WORDS = plgpu.Layout.WG_STRIDED(TILE_WORDS, vec_size=4)
"""Layout in which a tile's words are loaded: four consecutive ones a thread."""

SCALES = plgpu.Layout.WGMMA.reduce(1)
"""Layout in which a tile's scales are loaded: those of the two rows that a thread holds."""


def _shift(source: str, target: str, rotation: int) -> str:
    """Instruction that brings a word's fields into place; plain shifts where no wanted bit wraps around."""
    if rotation in (3, 4, 5, 6):
        return f"shl.b32 {target}, {source}, {rotation};"
    if rotation < 0:
        return f"shr.u32 {target}, {source}, {-rotation};"
    return f"shf.l.wrap.b32 {target}, {source}, {source}, {rotation};"


def _group_program() -> str:
    """PTX for 32 columns: words $8 (A) and $9 (B), two rows' scales $10 and $11 -> $0..$3 row 0, $4..$7 row 1."""
    lines = ["{", ".reg .b32 moved, value, scale0, scale1;"]
    for row in range(2):
        # A byte of the biased exponent, at bits 14..7 of both halves: a pair of bfloat16 powers of two.
        lines.append(f"mul.lo.u32 scale{row}, ${10 + row}, 0x00800080;")
    for row, pieces_of_row in enumerate(PIECES):
        for pair, pieces in enumerate(pieces_of_row):
            for number, (word, rotation, mask) in enumerate(pieces):
                source = f"${8 + word}"
                if rotation:
                    lines.append(_shift(source, "moved", rotation))
                    source = "moved"
                if number == 0:
                    lines.append(f"and.b32 value, {source}, {mask:#010x};")
                else:  # 0xEA: (a & b) | c
                    lines.append(f"lop3.b32 value, {source}, {mask:#010x}, value, 0xEA;")
            lines.append(f"mul.bf16x2 ${4 * row + pair}, value, scale{row};")
    return "\n".join([*lines, "}"])


_GROUP_PROGRAM = _group_program()


def _dequantize_registers(words: Any, scales: Any) -> Any:
    """Body for the compiler: FragmentedArrays in the layouts above -> (64, 64) bfloat16 in WGMMA layout."""
    i32 = ir.IntegerType.get_signless(32)
    pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
    (register,) = words.registers.flat

    def constant(value: int) -> ir.Value:
        return arith.constant(i32, value)

    def element(array: ir.Value, index: int) -> ir.Value:
        return vector.extract(array, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))

    both = [arith.extui(i32, element(scale, 0)) for scale in scales.registers.flat]
    layout = plgpu.Layout.WGMMA.to_mgpu()
    shape = (TILE, TILE)
    out = np.empty(layout.registers_shape(shape), dtype=object)
    columns, rows = TILE // 8, 2
    assert out.size == columns * rows
    flat = out.reshape(columns, rows)
    for q in range(2):
        stored = [arith.andi(scale, constant(0xFF)) if q == 0 else arith.shrui(scale, constant(8)) for scale in both]
        operands = [element(register, 2 * q), element(register, 2 * q + 1), *stored]
        results = mgpu.utils.inline_ptx(_GROUP_PROGRAM, *operands, result_types=(i32,) * 8)
        for row in range(rows):
            for pair in range(4):
                flat[4 * q + pair, row] = mgpu.utils.bitcast(results[4 * row + pair], pair_type)
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def dequantize_tile(words: jax.Array, scales: jax.Array) -> jax.Array:
    """bfloat16 (64, 64) weights of one tile, exact: 22 integer instructions and 8 products for 8 pairs.

    Args:
        words: uint32 (4, 128) in layout WORDS. scales: uint16 (64,) in layout SCALES (`fp4_fragments.py`).
    """
    if interpreting():
        values = e2m1_to_float32(unpack_codes(words[None, None])).reshape(TILE, 2, TILE // 2)
        powers = e8m0_to_float32(unpack_scales(scales[None, None]))
        return (values * powers[:, :, None]).reshape(TILE, TILE).astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(WORDS, SCALES),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def dequantize(_: Any, words: Any, scales: Any) -> Any:
        return _dequantize_registers(words, scales)

    return dequantize(words, scales)
