"""Constants that the operators are given for the released model: rotary frequencies and Engram hash tables."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax.kernels.engram_rows import engram_hash
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram_hash import bucket_primes, engram_tables, multipliers
from deepinfer_jax.model.rope import inverse_frequencies

from . import reference
from .cases import assert_same_bits, load_unit

pytestmark = pytest.mark.fast

LAYERS = (1, 14)
CLASSES = 99092

WORKED_CLASSES = (0, 237, 5095, 251, 7208, 242)
"""Classes of "The capital of France is" behind the start token (`blocks.md` 1.5)."""

WORKED_ROWS = (
    # columns 0, 8, 16 of the first layer, then of the second, by position
    (5702652, 131476717, 257520185, 14361964, 132225184, 261362261),
    (13754019, 130858473, 271974609, 6110045, 134596473, 268519322),
    (9883351, 128163438, 259450978, 12607348, 132944524, 256093947),
    (15949760, 130625909, 263812750, 2974204, 135150544, 271703236),
    (4463097, 143421909, 258599778, 1850933, 128508451, 271454662),
    (8434518, 130425857, 265625474, 15511642, 139053356, 257015096),
)
LAST_ROW = (
    *(8434518, 28335418, 33056762, 54845833, 79590735, 82522014, 107990915, 114522034),
    *(130425857, 150965795, 160866148, 176873966, 204352630, 218104334, 238747352, 249482421),
    *(265625474, 283863772, 292296123, 304668435, 328974802, 341520388, 359388308, 379106837),
)

APPENDIX_A = (
    *(1.0, 0.687656045, 0.472870797, 0.325172424, 0.223606795, 0.153764561, 0.105737135, 0.0727107748),
    *(0.0500000007, 0.0343828015, 0.0236435384, 0.0162586235, 0.0111803403, 7.68822804e-3, 5.28685609e-3),
    *(3.63553851e-3, 2.26562493e-3, 1.39680132e-3, 8.49689706e-4, 5.08081983e-4, 2.96977785e-4, 1.68179977e-4),
    *(9.08678412e-5, 4.54442270e-5, 1.95312532e-5, 5.37231244e-6, 3.69430336e-6, 2.54040970e-6, 1.74692798e-6),
    *(1.20128561e-6, 8.26071300e-7, 5.68052940e-7),
)


def hashed(classes: list[int], dead: list[bool]) -> np.ndarray:
    """Rows [T, 2, 24] of the released tables."""
    windows = np.array(reference.engram_windows(classes, dead, 4, 2), np.int32)
    rows = []
    for which in range(2):
        tables = engram_tables(LAYERS, which, 4, 8, 16_000_000, CLASSES)
        rows.append(np.asarray(engram_hash(windows, tables.products, tables.moduli, tables.offsets)))
    return np.stack(rows, axis=1)


def test_rotary_frequencies() -> None:
    """Guards theta, YaRN and the float32 table of both kinds of layers against recorded bits and appendix A."""
    unit, config = load_unit("rope_real"), ModelConfig.released()
    plain, compressed = inverse_frequencies(config, 0), inverse_frequencies(config, 2)
    assert_same_bits(plain, unit["inv_freq_main"], "theta 10000")
    assert_same_bits(compressed, unit["inv_freq_compress"], "theta 160000 with YaRN")
    assert_same_bits(inverse_frequencies(config, 1), compressed, "ratio 1")
    np.testing.assert_allclose(compressed, APPENDIX_A, rtol=2e-7)  # another float32 computation
    np.testing.assert_allclose(plain[31], 1.33352150e-4, rtol=2e-7)
    np.testing.assert_allclose(compressed, reference.inverse_frequencies(64, 160000.0, (16, 32, 1, 65536)), rtol=3e-7)


def test_released_hash_constants() -> None:
    """Guards primes, offsets and multipliers of the released tables against recorded numbers and their sums."""
    unit = load_unit("engram_hash_real")
    primes = np.array(bucket_primes(2, 3, 8, 16_000_000))
    np.testing.assert_array_equal(primes, unit["primes"].reshape(2, 24))
    assert primes.sum(axis=1).tolist() == [384006168, 384016682]
    for which, layer in enumerate(LAYERS):
        assert list(multipliers(layer, 4, CLASSES)) == unit["multipliers"][which].tolist()
        tables = engram_tables(LAYERS, which, 4, 8, 16_000_000, CLASSES)
        np.testing.assert_array_equal(tables.moduli, primes[which])
        np.testing.assert_array_equal(tables.offsets, unit["offsets"][which])
        for back in range(4):
            for cls in (0, 1, 5095, CLASSES - 1):
                product = cls * int(unit["multipliers"][which][back])
                assert tables.products[back, cls].tolist() == [product >> 32, product & 0xFFFFFFFF]


def test_released_hash_golden() -> None:
    """Guards the whole released hash, tables and operator together, with and without an image span."""
    unit = load_unit("engram_hash_real")
    for key, dead in (("hash_text", np.zeros(64, bool)), ("hash_image", unit["image_mask"] != 0)):
        np.testing.assert_array_equal(hashed(unit["classes"].tolist(), dead.tolist()), unit[key])


def test_released_hash_worked_example() -> None:
    """Guards the worked vectors of `blocks.md` 1.5, its image case included."""
    rows = hashed(list(WORKED_CLASSES), [False] * 6)
    np.testing.assert_array_equal(rows[:, :, [0, 8, 16]].reshape(6, 6), WORKED_ROWS)
    np.testing.assert_array_equal(rows[5, 0], LAST_ROW)
    table = engram_tables(LAYERS, 0, 4, 8, 16_000_000, CLASSES).products.astype(np.uint64)
    products = [int(table[back, cls, 0] << np.uint64(32) | table[back, cls, 1]) for back, cls in enumerate((5095, 237))]
    assert products == [390440529355618275, 1147050634115181]
    assert products[0] ^ products[1] == 391545622454194062
    image = hashed([0, 237, 0, 0, 237, 4923], [False, False, True, True, False, False])
    np.testing.assert_array_equal(image[4, 0, [0, 8, 16]], [5184683, 136968925, 268680887])
    np.testing.assert_array_equal(image[5, 0, [0, 8, 16]], [12003737, 131273538, 269348013])


def test_tiny_hash_constants() -> None:
    """Guards the rule behind the constants on the small layout of `blocks.md` 8.1."""
    assert bucket_primes(2, 3, 2, 60) == ((61, 67, 71, 73, 79, 83), (89, 97, 101, 103, 107, 109))
    assert multipliers(1, 4, 300) == (25312092204715445, 1598643339462077, 11877719498229879, 24438510811423417)
    assert multipliers(3, 4, 300) == (9092343702097867, 26972591774836393, 3593053192103867, 23219549187966981)
    assert engram_tables((1, 3), 0, 4, 2, 60, 300).offsets.tolist() == [0, 61, 128, 199, 272, 351]
    assert engram_tables((1, 3), 1, 4, 2, 60, 300).offsets.tolist() == [0, 89, 186, 287, 390, 497]


def test_hash_is_local_and_windowed() -> None:
    """Guards chunking: equal last four classes give equal rows, whatever came before or comes after."""
    classes = [7, 8, 9, 10, 11, 7, 8, 9, 10, 12]
    rows = hashed(classes, [False] * 10)
    np.testing.assert_array_equal(rows[8], rows[3])
    assert (rows[7] != rows[2]).any()
    np.testing.assert_array_equal(hashed(classes[:6], [False] * 6), rows[:6])
