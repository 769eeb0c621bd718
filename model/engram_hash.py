"""Engram hashing constants and the exact n-gram hash in 32-bit integers (`spec/blocks.md` 1.3-1.5).

The constants are functions of the configuration only. The multipliers of the released model are
written out because NumPy does not guarantee its random streams for ever.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

_RELEASED_CLASSES = 99092
_RELEASED_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


@functools.cache
def bucket_primes(layers: int, orders: int, heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Moduli per layer, columns ordered by n-gram order, then head: consecutive primes >= vocab_size.

    (The rule restarts its search at `vocab_size - 1` for every order and skips primes already taken,
    which comes to the same.)
    """
    result: list[tuple[int, ...]] = []
    current = vocab_size - 1
    for _ in range(layers):
        row: list[int] = []
        for _ in range(orders * heads):
            current += 1
            while not _is_prime(current):
                current += 1
            row.append(current)
        result.append(tuple(row))
    return tuple(result)


def multipliers(layer_id: int, ngram_size: int, classes: int) -> tuple[int, ...]:
    """Odd 63-bit-safe multipliers, one per look-back distance (0 = the token itself)."""
    if classes == _RELEASED_CLASSES and ngram_size == 4 and layer_id in _RELEASED_MULTIPLIERS:
        return _RELEASED_MULTIPLIERS[layer_id]
    bound = (2**63 - 1) // classes // 2
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, size=ngram_size, dtype=np.int64)
    return tuple(2 * int(v) + 1 for v in draws)


@dataclasses.dataclass(frozen=True)
class EngramTables:
    """Hash constants of one Engram layer, as NumPy arrays of integers.

    products: uint32 [ngram_size, classes, 2], high and low half of class * multiplier (< 2^63);
    moduli, offsets: uint32 and int32 [columns].
    """

    products: np.ndarray
    moduli: np.ndarray
    offsets: np.ndarray


@functools.cache
def engram_tables(
    layer_ids: tuple[int, ...], which: int, ngram_size: int, heads: int, vocab_size: int, classes: int
) -> EngramTables:
    """Constants of Engram layer number `which` of `layer_ids`."""
    primes = bucket_primes(len(layer_ids), ngram_size - 1, heads, vocab_size)[which]
    factors = multipliers(layer_ids[which], ngram_size, classes)
    ids = np.arange(classes, dtype=np.uint64)
    products = np.stack([ids * np.uint64(m) for m in factors])
    halves = np.stack([products >> np.uint64(32), products & np.uint64(0xFFFFFFFF)], axis=-1)
    offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
    return EngramTables(halves.astype(np.uint32), np.array(primes, np.uint32), offsets.astype(np.int32))
