"""Dequantisation of FP8 weights in registers: e4m3 codes and e8m0 block scales to exact bfloat16.

A tile is 64 weight rows in `Layout.WGMMA`, so its result is the register operand of a warpgroup product. The
codes stay in the order in which the checkpoint stores them: a thread's two neighbouring codes are one 16-bit
load, and no repacking and no shuffle is needed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from deepinfer_jax.kernels.mosaic.target import interpreting
from deepinfer_jax.kernels.quantization import GROUP, e8m0_to_float32

ROWS = 64
"""Weight rows of a tile: the rows of one warpgroup product."""

MAX_SCALE_BYTE = 134
"""Largest e8m0 byte whose multiplier is a bfloat16: scales up to 2^7. Larger ones give NaN, never a wrong
number; the released weights stay below 2^0."""

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)

# A code s eeee mmm put at bits 15 and 10..4 of a bfloat16 has 2^-120 times its value (bias 7 against 127),
# subnormal codes included. prmt spreads two codes and fills the byte above each with copies of its sign
# (selector 0, 8|0, 1, 8|1); the mask keeps sign, exponent and mantissa of each half.
_UNPACK_PAIR = """{
    .reg .b32 t;
    prmt.b32 t, $1, 0, 0x9180;
    shl.b32 t, t, 4;
    and.b32 t, t, 0x87F087F0;
    mul.rn.bf16x2 $0, t, $2;
}"""

# The multiplier 2^(byte - 127 + 120) as two bfloat16; exponent field byte + 120. NaN above the largest byte.
_MULTIPLIER = f"""{{{{
    .reg .b32 m;
    .reg .pred p;
    bfe.u32 m, $1, {{bit}}, 8;
    setp.gt.u32 p, m, {MAX_SCALE_BYTE};
    mad.lo.u32 m, m, 0x00800080, 0x3C003C00;
    selp.b32 $0, 0x7FC07FC0, m, p;
}}}}"""


def load_block_scales(scales: jax.Array, row_block: jax.Array, first: jax.Array, blocks: int) -> jax.Array:
    """Scale bytes of a 64-row tile, from GMEM, one register per row.

    Args:
        scales: GMEM ref uint8 [N/32, K/32].
        row_block: first of the tile's two block rows; rows past the end repeat the last one.
        first: first block column, a multiple of `blocks`; K/32 must be one too.
        blocks: 2 or 4, block columns of the tile.
    Returns: int32 [64]: byte i of an element is the scale of the row's block column first + i.
    """
    height, width = scales.shape
    if blocks not in (2, 4) or width % blocks:
        raise ValueError(f"load_block_scales: {width} block columns do not split into aligned loads of {blocks}")
    if interpreting():
        rows = jnp.minimum(row_block + jnp.arange(2), height - 1)
        words = jnp.zeros((2,), jnp.int32)
        for i in range(blocks):
            column = jnp.stack([scales[rows[0], first + i], scales[rows[1], first + i]])
            words |= column.astype(jnp.int32) << (8 * i)
        return jnp.repeat(words, GROUP)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=_ROW_LAYOUT),  # type: ignore[arg-type]
    )
    def load(_, ref, block, column):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

        def constant(value: int) -> ir.Value:
            return arith.constant(i32, value)

        (block,), (column,) = block.registers.flat, column.registers.flat
        # A warp has 16 of the 64 rows, so both of a thread's rows are in block row (warp / 2).
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        half = arith.andi(arith.shrui(thread, constant(6)), constant(1))
        row = arith.minsi(arith.addi(block, half), constant(height - 1))
        offset = arith.addi(arith.muli(row, constant(width)), column)
        base = mgpu.utils.memref_ptr(ref)
        pointer = llvm.getelementptr(
            base.type,
            base,
            [arith.extui(i64, offset)],
            [-(1 << 31)],
            ir.IntegerType.get_signless(8),
            llvm.GEPNoWrapFlags.none,
        )
        word = llvm.load(ir.IntegerType.get_signless(8 * blocks), pointer, alignment=blocks)
        if blocks == 2:
            word = arith.extui(i32, word)
        layout = _ROW_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
        vector = mgpu.utils.bitcast(word, ir.VectorType.get((1,), i32))
        for index in np.ndindex(registers.shape):
            registers[index] = vector
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(scales, row_block, first)  # type: ignore[call-arg]


def dequantize_tile(codes: jax.Array, scale_words: jax.Array) -> jax.Array:
    """Exact bfloat16 values of a tile of FP8 weights.

    Args:
        codes: uint8 [64, k] e4m3 codes in `Layout.WGMMA`; k is 64 or 128.
        scale_words: of `load_block_scales`.
    Returns: bfloat16 [64, k] in `Layout.WGMMA`. Scales above 2^7 and the NaN byte give NaN.
    """
    rows, columns = codes.shape
    if interpreting():
        values = lax.bitcast_convert_type(codes & 0x7F, jnp.float8_e4m3fn).astype(jnp.float32)
        values = jnp.where(codes & 0x7F == 0x7F, jnp.float32(480), values)
        byte = (scale_words[:, None] >> (8 * jnp.arange(columns // GROUP))) & 255
        scale = jnp.where(byte > MAX_SCALE_BYTE, jnp.float32(jnp.nan), e8m0_to_float32(byte.astype(jnp.uint8)))
        values *= jnp.where(codes >= 0x80, jnp.float32(-1), jnp.float32(1)) * jnp.repeat(scale, GROUP, axis=1)
        return values.astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT, _ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.bfloat16, layout=_LAYOUT),  # type: ignore[arg-type]
    )
    def dequantize(_, array, words):
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        word = mgpu.utils.bitcast(words.registers.flat[0], i32)
        layout = _LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((rows, columns)), dtype=object)
        assert registers.shape == array.registers.shape
        assert registers.shape[1] == columns // 8  # so that index[1] tells the block column
        multipliers = [
            mgpu.utils.inline_ptx(_MULTIPLIER.format(bit=8 * block), word, result_types=i32)
            for block in range(columns // GROUP)
        ]
        for index in np.ndindex(registers.shape):
            source = arith.extui(i32, mgpu.utils.bitcast(array.registers[index], i16))
            multiplier = multipliers[index[1] // (GROUP // 8)]
            result = mgpu.utils.inline_ptx(_UNPACK_PAIR, source, multiplier, result_types=i32)
            registers[index] = mgpu.utils.bitcast(result, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return dequantize(codes, scale_words)  # type: ignore[call-arg]
