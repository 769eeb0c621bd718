"""FP4 weights in the order in which Hopper's tensor cores take them: a permutation of bits, without loss.

A weight [N, K] is cut into tiles of 64 x 64. Thread `32 w + 4 g + t` of a warpgroup feeds rows `16 w + g` (i = 0)
and `16 w + g + 8` (i = 1) and columns `32 q + 16 j + 8 h + 2 t + b` of a tile to the tensor core: two groups q of
32 columns that share a scale, in each four pairs `p = 2 j + h` a row, b = 0 the lower half of a register of two
bfloat16. It reads four consecutive words: A and B of group 0, A and B of group 1.

A code's four bits have to arrive at bits 15 (sign) and 8..6 (exponent, exponent, mantissa) of its half: there
they are a bfloat16 that is the code's value times 2^-126. Two pairs of words hold 16 codes so that one shift and
one mask do that for six of the eight pairs, and two of each for the others:

    pair            fields in                 brought into place by
    row 0, p 0..2   A                         A << 0, 3, 6
    row 1, p 0..2   B                         B rotated left by 0, 4, 10
    row 0, p 3      exponent A, the rest B    A >> 3, B << 5
    row 1, p 3      exponent A, the rest B    A >> 6, B << 6

18 integer instructions for 8 pairs. (No arrangement needs one shift and mask for all: with {6, 7, 8, 15} in both
halves, no four rotations of a word are disjoint.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TILE = 64
"""Rows and columns of a tile."""

TILE_WORDS = (4, 128)
"""Words of a tile's codes, as an array: 128 threads times 4 words."""

GROUP = 32
"""Columns that share a scale."""

SCALE_OFFSET = 126
"""Stored scale byte minus e8m0 byte: the biased exponent of scale * 2^126, which undoes the codes' 2^-126."""

LARGEST_SCALE = 128
"""Largest e8m0 byte that can be stored (scale 2): scale * 2^126 has to be a bfloat16."""

SIGN, EXPONENT, MANTISSA = 0x80008000, 0x01800180, 0x00400040
"""Where the fields of a code lie in both halves of a register."""

WHOLE = SIGN | EXPONENT | MANTISSA

PIECES: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...] = (
    (((0, 0, WHOLE),), ((0, 3, WHOLE),), ((0, 6, WHOLE),), ((0, -3, EXPONENT), (1, 5, SIGN | MANTISSA))),
    (((1, 0, WHOLE),), ((1, 4, WHOLE),), ((1, 10, WHOLE),), ((0, -6, EXPONENT), (1, 6, SIGN | MANTISSA))),
)
"""Of row i and pair p: (word, left rotation, mask of what arrives) of the pieces that make up its register."""


def _rotate_left(x: jax.Array, bits: int) -> jax.Array:
    bits %= 32
    return x if bits == 0 else (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def words_to_registers(words: jax.Array) -> jax.Array:
    """uint32 [..., 2 words] -> uint32 [..., 2 rows, 4 pairs]: two bfloat16, code values times 2^-126."""
    rows = []
    for pieces_of_row in PIECES:
        pairs = []
        for pieces in pieces_of_row:
            register = jnp.zeros(words.shape[:-1], jnp.uint32)
            for word, rotation, mask in pieces:
                register |= _rotate_left(words[..., word], rotation) & np.uint32(mask)
            pairs.append(register)
        rows.append(jnp.stack(pairs, axis=-1))
    return jnp.stack(rows, axis=-2)


def registers_to_words(registers: jax.Array) -> jax.Array:
    """Inverse of `words_to_registers`."""
    words = [jnp.zeros(registers.shape[:-2], jnp.uint32) for _ in range(2)]
    for i, pieces_of_row in enumerate(PIECES):
        for p, pieces in enumerate(pieces_of_row):
            for word, rotation, mask in pieces:
                words[word] |= _rotate_left(registers[..., i, p] & np.uint32(mask), -rotation)
    return jnp.stack(words, axis=-1)


def pack_codes(codes: jax.Array) -> jax.Array:
    """e2m1 codes uint8 [..., N, K] -> words uint32 [..., N/64, K/64, 4, 128]. N and K are multiples of 64."""
    *lead, n, k = codes.shape
    wide = codes.astype(jnp.uint32)
    halves = (wide & 8) << 12 | (wide & 7) << 6
    # [N/64, warp, i, g, K/64, q, j, h, t, b]
    split = halves.reshape(*lead, n // TILE, 4, 2, 8, k // TILE, 2, 2, 2, 4, 2)
    pairs = split[..., 0] | split[..., 1] << 16
    base = len(lead)
    order = (0, 4, 1, 3, 8, 5, 2, 6, 7)  # N/64, K/64, warp, g, t, q, i, j, h
    moved = pairs.transpose(*range(base), *(base + axis for axis in order))
    registers = moved.reshape(*lead, n // TILE, k // TILE, 128, 2, 2, 4)
    return registers_to_words(registers).reshape(*lead, n // TILE, k // TILE, *TILE_WORDS)


def tile_registers(words: jax.Array) -> jax.Array:
    """words [..., N/64, K/64, 4, 128] -> uint16 [..., N, K]: bfloat16 patterns of code values times 2^-126."""
    *lead, rows, columns = words.shape[:-2]
    registers = words_to_registers(words.reshape(*lead, rows, columns, 4, 8, 4, 2, 2))
    # [N/64, K/64, warp, g, t, q, i, p] -> [N/64, warp, i, g, K/64, q, p, t, b]
    base = len(lead)
    order = (0, 2, 6, 3, 1, 5, 7, 4)
    moved = registers.transpose(*range(base), *(base + axis for axis in order))
    halves = jnp.stack([moved & 0xFFFF, moved >> 16], axis=-1)
    return halves.reshape(*lead, rows * TILE, columns * TILE).astype(jnp.uint16)


def unpack_codes(words: jax.Array) -> jax.Array:
    """Inverse of `pack_codes`: e2m1 codes uint8 [..., N, K]."""
    halves = tile_registers(words)
    return (halves >> 12 & 8 | halves >> 6 & 7).astype(jnp.uint8)


def pack_scales(scale: jax.Array) -> jax.Array:
    """e8m0 bytes uint8 [..., N, K/32] -> uint16 [..., N/64, K/64, 64]: a row's two scales in a tile, the first low.

    Bytes above LARGEST_SCALE cannot be stored: callers refuse them (`repack.py`).
    """
    *lead, n, groups = scale.shape
    stored = (scale + np.uint8(SCALE_OFFSET)).astype(jnp.uint16).reshape(*lead, n // TILE, TILE, groups // 2, 2)
    pair = stored[..., 0] | stored[..., 1] << 8
    return jnp.swapaxes(pair, -1, -2)


def unpack_scales(stored: jax.Array) -> jax.Array:
    """Inverse of `pack_scales`."""
    pair = jnp.swapaxes(stored, -1, -2)
    both = jnp.stack([pair & 0xFF, pair >> 8], axis=-1).astype(jnp.uint8) - np.uint8(SCALE_OFFSET)
    *lead, tiles, rows, columns, _ = both.shape
    return both.reshape(*lead, tiles * rows, columns * 2)
