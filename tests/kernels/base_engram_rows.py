"""Checks of `engram_rows`: hash, table rows, gate."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.engram_rows import engram_gate, engram_hash, engram_rows
from deepinfer_jax.kernels.quantization import QuantTensor

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    RowCase,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    load_unit,
    normal,
    values,
)
from .reference_formats import decode_e4m3, decode_e8m0, scaled

EPS = 1e-20
TINY_PRIMES = (61, 67, 71, 73, 79, 83)
TINY_OFFSETS = (0, 61, 128, 199, 272, 351)
TINY_CLASSES = 300


def product_table(multipliers: Any, classes: int) -> np.ndarray:
    """uint32 [n, classes, 2]: high and low halves of class * multiplier."""
    products = [[int(m) * c for c in range(classes)] for m in multipliers]
    return np.array([[[p >> 32, p & 0xFFFFFFFF] for p in row] for row in products], np.uint32)


def random_table(rng: np.random.Generator, rows: int, width: int) -> QuantTensor:
    """Random Engram table with one scale per 32 columns of a row."""
    codes = rng.integers(0, 256, size=(rows, width)).astype(np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    scale = rng.integers(110, 130, size=(rows, width // 32)).astype(np.uint8)
    return QuantTensor(jnp.asarray(codes), jnp.asarray(scale), "fp8_row")


def hash_constants(multipliers: Any = (3, 5, 7, 9)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(products, moduli, offsets) of the tiny layout."""
    return (
        product_table(multipliers, TINY_CLASSES),
        np.array(TINY_PRIMES, np.uint32),
        np.array(TINY_OFFSETS, np.int32),
    )


def gate_operands(rng: np.random.Generator, rows: int, size: int, dtype: Any) -> tuple[np.ndarray, ...]:
    """(streams, projected, keep)."""
    streams = normal(rng, rows, 4, size, spread=3).astype(dtype)
    projected = normal(rng, rows, 5 * size, spread=3).astype(dtype)
    return streams, projected, rng.random(rows) < 0.8


CASES = (
    RowCase(
        "hash and table rows",
        lambda rng, t: (rng.integers(0, TINY_CLASSES, size=(t, 4)).astype(np.int32),),
        lambda rng: (random_table(rng, 434, 32), *hash_constants()),
        lambda k, r, c: k(engram_rows, c[0], k(engram_hash, r[0], *c[1:]), dtype=np.float32),
    ),
    RowCase(
        "gate, float32",
        lambda rng, t: gate_operands(rng, t, 64, np.float32),
        lambda rng: (bf16_normal(rng, 4, 64), bf16_normal(rng, 4, 64)),
        lambda k, r, c: k(engram_gate, r[0], r[1], c[0], c[1], r[2], eps=EPS),
        bad_rows(0, 1),
    ),
)


class EngramRowsTests(OpTests):
    """Every implementation of `engram_rows`."""

    op: ClassVar[str] = "engram_rows"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("engram examples")
        streams, projected, keep = gate_operands(rng, 5, 64, BF16)
        weights = (bf16_normal(rng, 4, 64), bf16_normal(rng, 4, 64))
        classes = rng.integers(0, TINY_CLASSES, size=(5, 4)).astype(np.int32)
        ids = rng.integers(0, 434, size=(5, 6)).astype(np.int32)
        return [
            (engram_hash, (classes, *hash_constants()), {}),
            (engram_rows, (random_table(rng, 434, 32), ids), {"dtype": BF16}),
            (engram_gate, (streams, projected, *weights, keep), {"eps": EPS}),
        ]

    # ---- hash ------------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_hash_worked_example(self) -> None:
        """Guards order, sticky padding and offsets on a hash that can be done by hand (`blocks.md` 8.2)."""
        classes = [0, 7, 10, 45, 45]
        expected = {
            (): [
                [10, 71, 132, 203, 294, 373],
                [21, 82, 155, 226, 281, 360],
                [0, 122, 189, 260, 319, 398],
                [59, 108, 189, 258, 325, 400],
                [41, 96, 160, 231, 303, 382],
            ],
            (2,): [
                [10, 71, 132, 203, 294, 373],
                [21, 82, 155, 226, 281, 360],
                [12, 73, 130, 201, 288, 367],
                [19, 68, 188, 257, 338, 413],
                [41, 96, 161, 230, 315, 390],
            ],
        }
        for dead, rows in expected.items():
            windows = reference.engram_windows(classes, [p in dead for p in range(5)], 4, 2)
            found = self.run(engram_hash, np.array(windows, np.int32), *hash_constants())
            np.testing.assert_array_equal(found, rows)

    def test_hash_with_63_bit_products(self) -> None:
        """Guards the 32-bit remainder where products need 63 bits (`blocks.md` 8.1 and 8.2)."""
        layers = {
            "first": (
                (25312092204715445, 1598643339462077, 11877719498229879, 24438510811423417),
                TINY_PRIMES,
                TINY_OFFSETS,
                {0: [6, 95, 144, 208, 277, 394], 3: [44, 76, 153, 237, 305, 353], 4: [54, 66, 183, 264, 350, 402]},
            ),
            "second": (
                (9092343702097867, 26972591774836393, 3593053192103867, 23219549187966981),
                (89, 97, 101, 103, 107, 109),
                (0, 89, 186, 287, 390, 497),
                {0: [87, 147, 263, 386, 445, 517], 3: [76, 122, 272, 344, 478, 565], 4: [73, 96, 249, 363, 426, 585]},
            ),
        }
        windows = np.array(reference.engram_windows([0, 7, 10, 45, 45], [False] * 5, 4, 2), np.int32)
        for multipliers, primes, offsets, expected in layers.values():
            table = product_table(multipliers, TINY_CLASSES)
            found = self.run(engram_hash, windows, table, np.array(primes, np.uint32), np.array(offsets, np.int32))
            for position, row in expected.items():
                np.testing.assert_array_equal(found[position], row)

    @pytest.mark.fast
    def test_hash_golden(self) -> None:
        """Guards the released hash on 64 tokens, with and without an image span."""
        unit = load_unit("engram_hash_real")
        present = np.unique(np.append(unit["classes"], 2))  # the pad class comes too
        place = {int(c): i for i, c in enumerate(present)}
        for key, dead in (("hash_text", np.zeros(64, bool)), ("hash_image", unit["image_mask"] != 0)):
            windows = reference.engram_windows(unit["classes"], dead, 4, 2)
            compact = np.array([[place[c] for c in window] for window in windows], np.int32)
            for layer in range(2):
                multipliers = [int(m) for m in unit["multipliers"][layer]]
                products = [[int(c) * m for c in present] for m in multipliers]
                table = np.array([[[p >> 32, p & 0xFFFFFFFF] for p in row] for row in products], np.uint32)
                moduli, offsets = unit["primes"][layer].ravel().astype(np.uint32), unit["offsets"][layer]
                found = self.run(engram_hash, compact, table, moduli, offsets)
                np.testing.assert_array_equal(found, unit[key][:, layer])

    def test_hash_against_unbounded_integers(self) -> None:
        """Guards the remainder over random windows; every row id stays within its column's bucket."""
        rng = generator("hash")
        multipliers = [2 * int(v) + 1 for v in rng.integers(0, (2**63 - 1) // TINY_CLASSES // 2, size=4)]
        windows = rng.integers(0, TINY_CLASSES, size=(400, 4)).astype(np.int32)
        primes = (16000057, 16000079, 16000463, 16777213, 61, 2)
        offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
        constants = (product_table(multipliers, TINY_CLASSES), np.array(primes, np.uint32), offsets.astype(np.int32))
        found = self.run(engram_hash, windows, *constants)
        np.testing.assert_array_equal(found, reference.engram_hash(windows.tolist(), multipliers, primes, offsets))
        assert (found >= offsets).all()
        assert (found < offsets + np.array(primes)).all()

    # ---- rows ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
    def test_rows_are_decoded_exactly(self, dtype: Any) -> None:
        """Guards the scale per 32 columns of one row (not 32 x 32 blocks) and the column order."""
        rng = generator("rows")
        table = random_table(rng, 97, 64)
        ids = rng.integers(0, 97, size=(18, 6)).astype(np.int32)
        y = self.run(engram_rows, table, ids, dtype=dtype)
        decoded = scaled(decode_e4m3(np.asarray(table.data)), decode_e8m0(np.asarray(table.scale)))
        assert y.dtype == dtype
        np.testing.assert_array_equal(values(y), decoded[ids].reshape(18, -1))

    # ---- gate ------------------------------------------------------------------------------------

    def one_gate(self, h: float, key: float, size: int = 4) -> float:
        """Gate of constant vectors with unit weights."""
        streams = np.full((1, 1, size), h, np.float32)
        projected = np.concatenate([np.full((1, size), key), np.ones((1, size))], axis=1).astype(np.float32)
        ones, keep = np.ones((1, size), np.float32), np.ones(1, bool)
        return float(self.run(engram_gate, streams, projected, ones, ones, keep, eps=EPS)[1].item())

    @pytest.mark.fast
    def test_gate_worked_example(self) -> None:
        """Guards the signed root, the scale invariance that eps = 1e-20 leaves, and the floor at zero."""
        np.testing.assert_allclose(self.one_gate(2.0, 1.0), 0.8044297, atol=1e-6)
        np.testing.assert_allclose(self.one_gate(2.0, -1.0), 0.1955703, atol=1e-6)
        for h, key in ((2e-6, 1.0), (2.0, 1e-7), (3e5, 4e6)):
            np.testing.assert_allclose(self.one_gate(h, key), 0.8044297, atol=1e-6)
        np.testing.assert_allclose(self.one_gate(0.0, 1.0), 1 / (1 + math.exp(-1e-3)), atol=1e-7)

    @pytest.mark.parametrize(("size", "dtype"), [(64, np.float32), (64, BF16), (5120, BF16)], ids=str)
    def test_gate_against_float64(self, size: int, dtype: Any) -> None:
        """Guards statistics per stream, one key per stream with a shared value, and the single rounding."""
        rng = generator("gate", size, dtype)
        streams, projected, keep = gate_operands(rng, 5, size, dtype)
        q, k = bf16_normal(rng, 4, size), bf16_normal(rng, 4, size)
        out, gate = self.run(engram_gate, streams, projected, q, k, keep, eps=EPS)
        operands = values(streams), values(projected), values(q), values(k)
        expected, gates = reference.engram_gate(*operands, keep, EPS)
        assert out.dtype == dtype
        np.testing.assert_allclose(gate, gates, atol=2e-6)
        rounding = 0.5 * bf16_ulp(expected) if dtype is BF16 else 0
        assert_within(out, expected, rounding + 4e-6 * np.abs(values(projected)).max())

    def test_masked_rows_keep_their_bits(self) -> None:
        """Guards image rows: no bit of their streams may change, whatever the memory holds, NaN included."""
        rng = generator("masked")
        streams, projected, _ = gate_operands(rng, 18, 64, BF16)
        streams[0, 0, :2] = -0.0
        keep = np.arange(18) % 2 == 1
        projected[~keep] = np.nan
        out, gate = self.run(
            engram_gate, streams, projected, bf16_normal(rng, 4, 64), bf16_normal(rng, 4, 64), keep, eps=EPS
        )
        assert_same_bits(out[~keep], streams[~keep], "masked rows")
        assert not gate[~keep].any()
        assert np.isfinite(values(out)).all()
        projected[:, 4 * 64 :] = 0
        out, _ = self.run(
            engram_gate, streams, projected, bf16_normal(rng, 4, 64), bf16_normal(rng, 4, 64), keep, eps=EPS
        )
        np.testing.assert_array_equal(values(out), values(streams))  # value zero changes nothing

    def test_gradients(self) -> None:
        """Guards the training mode of the gate."""
        rng = generator("gate gradients")
        streams, projected = normal(rng, 2, 2, 8, spread=0), normal(rng, 2, 24, spread=0)
        q, k = normal(rng, 2, 8, spread=0), normal(rng, 2, 8, spread=0)
        kernels, keep = self.kernels(None), np.array([True, False])

        def gated(*operands: jax.Array) -> jax.Array:
            return kernels(engram_gate, *operands, keep, eps=EPS)[0]

        check_gradients(gated, streams, projected, q, k)

    # ---- contract --------------------------------------------------------------------------------

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against tables and operands that do not belong together."""
        products, moduli, offsets = hash_constants()
        classes = np.zeros((3, 4), np.int32)
        self.refuses(engram_hash, classes[:, :3], products, moduli, offsets, match="do not fit")
        self.refuses(engram_hash, classes, products, moduli[:5], offsets, match="do not fit")
        self.refuses(engram_hash, classes, products, moduli, offsets[:3], match="do not fit")
        self.refuses(engram_hash, classes[:, 0], products, moduli, offsets, match="do not fit")
        table, ids = random_table(generator("contract"), 9, 32), np.zeros((3, 2), np.int32)
        self.refuses(engram_rows, table, ids[0], dtype=BF16, match="engram_rows")
        square = QuantTensor(table.data, table.scale, "fp8")
        self.refuses(engram_rows, square, ids, dtype=BF16, match="fp8_row")
        streams, projected, keep = gate_operands(generator("contract"), 3, 64, np.float32)
        q = np.zeros((4, 64), np.float32)
        self.refuses(engram_gate, streams, projected[:, :256], q, q, keep, eps=EPS, match="do not fit")
        self.refuses(engram_gate, streams, projected, q[:1], q, keep, eps=EPS, match="do not fit")
        self.refuses(engram_gate, streams, projected, q, q[:1], keep, eps=EPS, match="do not fit")
        self.refuses(engram_gate, streams, projected, q, q, keep[:1], eps=EPS, match="do not fit")
        self.refuses(engram_gate, streams[:, 0], projected, q, q, keep, eps=EPS, match="engram_gate")
