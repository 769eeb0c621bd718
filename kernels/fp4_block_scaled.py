"""FP4 weights in the order in which Blackwell's block-scaled products take them: a permutation, without loss.

A weight [N, K] is cut into tiles of 64 x 64. A warpgroup's thread feeds one row of a tile to the tensor core, as e4m3.
A word holds eight consecutive codes of a row: byte i's lower half code i, its upper half code 4 + i. So the
registers of four consecutive e4m3 codes are

    codes 0..3      sign from (word << 4), the rest from (word << 2)
    codes 4..7      sign from word, the rest from (word >> 2)

each with the sign at bit 7, exponent and mantissa at bits 4..2 of its byte: seven integer instructions for eight
codes. What stands there is the code's value times 2^-6, in e4m3's subnormals as well; the stored scales are 2^6
times the weight's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TILE = 64
"""Rows and columns of a tile."""

TILE_WORDS = (2, 256)
"""Words of a tile's codes, as an array: of each 32 columns, 64 rows times 4 words."""

SCALE_TILE = (16, 16)
"""Scale bytes of a tile's rows and 128 columns: [row % 16, 4 * (row // 16) + group]."""

GROUP = 32
"""Columns that share a scale."""

SCALE_COLUMNS = 4 * GROUP
"""Columns whose scales a tensor core reads together."""

SCALE_OFFSET = 6
"""Stored scale byte minus e8m0 byte: 2^6 undoes the codes' 2^-6."""

LARGEST_SCALE = 254 - SCALE_OFFSET
"""Largest e8m0 byte that can be stored; 255 is NaN."""

SIGN, REST = 0x80808080, 0x1C1C1C1C
"""Where the fields of a code lie in the bytes of a register: sign; exponent and mantissa."""

LOWER_SHIFTS, UPPER_SHIFTS = (4, 2), (0, -2)
"""Left shifts that bring (sign, rest) of codes 0..3 and of codes 4..7 of a word into place."""


def _shift_left(x: jax.Array, bits: int) -> jax.Array:
    return x << np.uint32(bits) if bits >= 0 else x >> np.uint32(-bits)


def words_to_e4m3(words: jax.Array) -> jax.Array:
    """uint32 [..., n] -> uint32 [..., n, 2]: registers of four e4m3 codes each, code values times 2^-6."""
    registers = [
        _shift_left(words, sign) & np.uint32(SIGN) | _shift_left(words, rest) & np.uint32(REST)
        for sign, rest in (LOWER_SHIFTS, UPPER_SHIFTS)
    ]
    return jnp.stack(registers, axis=-1)


def pack_codes(codes: jax.Array) -> jax.Array:
    """e2m1 codes uint8 [..., N, K] -> words uint32 [..., N/64, K/64, 2, 256]. N and K are multiples of 64."""
    *lead, n, k = codes.shape
    # [N/64, row, K/64, 32 columns, word, half, byte]
    split = codes.astype(jnp.uint32).reshape(*lead, n // TILE, TILE, k // TILE, 2, 4, 2, 4)
    shifts = np.arange(4, dtype=np.uint32) * 8 + np.arange(2, dtype=np.uint32)[:, None] * 4
    words = jnp.sum(split << shifts, axis=(-2, -1), dtype=jnp.uint32)
    base = len(lead)
    moved = words.transpose(*range(base), *(base + axis for axis in (0, 2, 3, 1, 4)))
    return moved.reshape(*lead, n // TILE, k // TILE, *TILE_WORDS)


def unpack_codes(words: jax.Array) -> jax.Array:
    """Inverse of `pack_codes`: e2m1 codes uint8 [..., N, K]."""
    *lead, rows, columns = words.shape[:-2]
    base = len(lead)
    split = words.reshape(*lead, rows, columns, 2, TILE, 4)
    moved = split.transpose(*range(base), *(base + axis for axis in (0, 3, 1, 2, 4)))
    shifts = np.arange(4, dtype=np.uint32) * 8 + np.arange(2, dtype=np.uint32)[:, None] * 4
    codes = moved[..., None, None] >> shifts & np.uint32(15)
    return codes.astype(jnp.uint8).reshape(*lead, rows * TILE, columns * TILE)


def pack_scales(scale: jax.Array) -> jax.Array:
    """e8m0 bytes uint8 [..., N, K/32] -> uint8 [..., N/64, ceil(K/128), 16, 16]; those behind K are padding.

    Bytes above LARGEST_SCALE cannot be stored: callers refuse them (`repack.py`).
    """
    *lead, n, groups = scale.shape
    steps = -(-groups // 4)
    padded = jnp.pad(scale, [(0, 0)] * (len(lead) + 1) + [(0, 4 * steps - groups)]) + np.uint8(SCALE_OFFSET)
    split = padded.reshape(*lead, n // TILE, 4, 16, steps, 4)
    base = len(lead)
    moved = split.transpose(*range(base), *(base + axis for axis in (0, 3, 2, 1, 4)))
    return moved.reshape(*lead, n // TILE, steps, *SCALE_TILE)


def unpack_scales(stored: jax.Array, columns: int) -> jax.Array:
    """Inverse of `pack_scales` for a weight of K = `columns`."""
    *lead, tiles, steps = stored.shape[:-2]
    base = len(lead)
    split = stored.reshape(*lead, tiles, steps, 16, 4, 4)
    moved = split.transpose(*range(base), *(base + axis for axis in (0, 3, 2, 1, 4)))
    return moved.reshape(*lead, tiles * TILE, 4 * steps)[..., : columns // GROUP] - np.uint8(SCALE_OFFSET)


def tile_row_scales(scale: jax.Array, first: jax.Array, most_rows: int = 128) -> jax.Array:
    """Scales of rows of tiles, as tensor cores read them.

    Args:
        scale: e8m0 bytes uint8 [R, K/32]. first: int32 [tiles], first row of each; rows behind R repeat the last.
    Returns: uint8 [tiles, ceil(K/128), 32, 16]: [row % 32, 4 * (row // 32) + group].
    """
    groups = scale.shape[1]
    steps = -(-groups // 4)
    rows = scale.at[first[:, None] + jnp.arange(most_rows)].get(mode="clip")
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, 4 * steps - groups)))
    return padded.reshape(-1, 4, 32, steps, 4).transpose(0, 3, 2, 1, 4).reshape(-1, steps, 32, 16)
