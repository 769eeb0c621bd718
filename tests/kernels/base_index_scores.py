"""Checks of `index_scores`: the score itself, pages, visibility."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from deepinfer_jax.kernels.index_scores import index_scores

from . import reference
from .base import Example, OpTests
from .cases import (
    BF16,
    DEMO,
    MICRO,
    RELEASED,
    RowCase,
    Size,
    assert_same_bits,
    assert_within,
    bad_rows,
    bf16_normal,
    bf16_ulp,
    check_gradients,
    generator,
    normal,
    values,
)
from .reference_formats import bf16, cache_record, decode_record, qdq4_mx

ENTRIES = 64
"""Entries of a page in these tests (a ratio-2 page of 128 tokens)."""


def pages_of(rng: np.random.Generator, count: int, size: int, fmt: str) -> np.ndarray:
    """Random records [count, ENTRIES, width]."""
    return cache_record(values(bf16_normal(rng, count * ENTRIES, size)), fmt).reshape(count, ENTRIES, -1)


def tables(rng: np.random.Generator, rows: int, capacity: int, pages: int, visible: np.ndarray) -> np.ndarray:
    """Page numbers [rows, capacity]: distinct within a row, -1 behind the visible entries."""
    table = np.array([rng.permutation(pages)[:capacity] for _ in range(rows)], np.int32)
    used = -(-visible // ENTRIES)
    return np.where(np.arange(capacity)[None] < used[:, None], table, -1).astype(np.int32)


def row_operands(rng: np.random.Generator, rows: int, size: Size, dtype: Any) -> tuple[Any, ...]:
    """(queries, head weights, page table of 4 out of 9 pages, visible)."""
    q = qdq4_mx(values(bf16_normal(rng, rows, size.index_heads, size.index_dim))).astype(dtype)
    weights = normal(rng, rows, size.index_heads).astype(dtype)
    visible = rng.integers(0, 4 * ENTRIES + 1, size=rows).astype(np.int32)
    return q, weights, tables(rng, rows, 4, 9, visible), visible


CASES = (
    RowCase(
        "float32",
        lambda rng, t: row_operands(rng, t, MICRO, np.float32),
        lambda rng: (pages_of(rng, 9, 32, "float32"),),
        lambda k, r, c: k(index_scores, r[0], r[1], c[0], r[2], r[3], fmt="float32", bf16_chain=False, scale=0.125),
        bad_rows(0, 1),
    ),
    RowCase(
        "demo, packed, bfloat16 steps",
        lambda rng, t: row_operands(rng, t, DEMO, BF16),
        lambda rng: (pages_of(rng, 9, 32, "fp4"),),
        lambda k, r, c: k(index_scores, r[0], r[1], c[0], r[2], r[3], fmt="fp4", bf16_chain=True, scale=0.125),
        bad_rows(0, 1),
    ),
)


class IndexScoresTests(OpTests):
    """Every implementation of `index_scores`."""

    op: ClassVar[str] = "index_scores"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        rng = generator("index examples")
        q, weights, table, visible = row_operands(rng, 5, MICRO, BF16)
        pages = pages_of(rng, 9, 32, "fp4")
        return [(index_scores, (q, weights, pages, table, visible), {"fmt": "fp4", "bf16_chain": True, "scale": 0.125})]

    @pytest.mark.parametrize("chain", [False, True], ids=["float32", "bfloat16 steps"])
    @pytest.mark.parametrize("size", [MICRO, DEMO, RELEASED], ids=lambda size: size.name)
    def test_against_float64(self, size: Size, chain: bool) -> None:
        """Guards ReLU per head, the head weight's sign and the rounding steps at every model's widths.

        With rounding, each of the H products may fall to the other side of a border: at most a step of the
        largest product each, then one step of the sum; most scores equal the reference.
        """
        rng = generator("index", size.name, chain)
        dtype = BF16 if chain else np.float32
        fmt = "fp4" if chain else "float32"
        scale = size.index_dim**-0.5 * size.index_heads**-0.5
        q, weights, table, visible = row_operands(rng, 18, size, dtype)
        pages = pages_of(rng, 9, size.index_dim, fmt)
        y = self.run(index_scores, q, weights, pages, table, visible, fmt=fmt, bf16_chain=chain, scale=scale)
        keys = decode_record(pages, fmt, size.index_dim)[table].reshape(18, -1, size.index_dim)
        factors = scale * values(weights)
        expected = reference.index_scores(values(q), bf16(factors) if chain else factors, keys, visible, chain)
        seen = np.arange(keys.shape[1])[None] < visible[:, None]
        assert (y[~seen] == -np.inf).all()
        parts = scale * np.abs(values(weights))[:, :, None] * np.abs(np.einsum("thd,tnd->thn", values(q), keys))
        if chain:
            bound = 2 * bf16_ulp(parts.max(axis=1)) + bf16_ulp(np.where(seen, expected, 0))
            assert (values(y)[seen] == expected[seen]).mean() > 0.95, (values(y)[seen] == expected[seen]).mean()
        else:
            bound = 2.0**-20 * parts.sum(axis=1) + 2.0**-20
        assert_within(np.where(seen, y, 0), np.where(seen, expected, 0), bound)

    def test_capacity_and_place_do_not_matter(self) -> None:
        """Guards context capacity and page placement: neither may change a bit of a visible score."""
        rng = generator("capacity")
        q, weights, table, visible = row_operands(rng, 18, MICRO, BF16)
        pages = pages_of(rng, 9, 32, "fp4")
        settings = {"fmt": "fp4", "bf16_chain": True, "scale": 0.125}
        first = self.run(index_scores, q, weights, pages, table, visible, **settings)
        wide = np.concatenate([table, np.full((18, 7), -1, np.int32)], axis=1)
        y = self.run(index_scores, q, weights, pages, wide, visible, **settings)
        assert_same_bits(y[:, : 4 * ENTRIES], first, "wider table")
        assert (y[:, 4 * ENTRIES :] == -np.inf).all()
        order = rng.permutation(20)[:9]
        moved = rng.integers(0, 256, size=(20, *pages.shape[1:])).astype(np.uint8)
        moved[order] = pages
        table = np.where(table < 0, -1, order[table]).astype(np.int32)
        assert_same_bits(self.run(index_scores, q, weights, moved, table, visible, **settings), first, "moved pages")

    def test_invisible_entries_may_hold_anything(self) -> None:
        """Guards against stale or foreign entries behind the visible ones."""
        rng = generator("stale")
        q, weights, table, visible = row_operands(rng, 18, MICRO, np.float32)
        pages = pages_of(rng, 18, 32, "float32")
        table = np.arange(18, dtype=np.int32)[:, None]  # one own page each
        visible = np.minimum(visible, ENTRIES)
        settings = {"fmt": "float32", "bf16_chain": False, "scale": 0.125}
        clean = self.run(index_scores, q, weights, pages, table, visible, **settings)
        pages[np.arange(ENTRIES)[None] >= visible[:, None]] = np.nan
        assert_same_bits(self.run(index_scores, q, weights, pages, table, visible, **settings), clean, "NaN behind")

    def test_zero_scores_are_equal(self) -> None:
        """Guards ties: entries that no head likes score exactly zero, whatever the head weights' signs."""
        q = np.full((2, 2, 32), -1, BF16)
        weights = np.array([[1, -1], [-0.5, -2]], BF16)
        pages = cache_record(np.abs(values(bf16_normal(generator("zeros"), ENTRIES, 32))), "fp4")[None]
        visible = np.array([ENTRIES, 5], np.int32)
        table = np.zeros((2, 1), np.int32)
        y = self.run(index_scores, q, weights, pages, table, visible, fmt="fp4", bf16_chain=True, scale=1.0)
        assert (y[0] == 0).all()
        assert (y[1, :5] == 0).all()
        assert (y[1, 5:] == -np.inf).all()

    def test_gradients(self) -> None:
        """Guards the training mode: gradients of queries, head weights and keys."""
        rng = generator("index gradients")
        q, weights, pages = (normal(rng, n, *s, spread=0) for n, s in ((3, (2, 8)), (3, (2,)), (2, (4, 8))))
        table, visible = np.array([[0, 1], [1, 0], [1, -1]], np.int32), np.array([8, 5, 3], np.int32)
        kernels = self.kernels(None)

        def score(queries: Any, factors: Any, keys: Any) -> Any:
            y = kernels(
                index_scores, queries, factors, keys, table, visible, fmt="float32", bf16_chain=False, scale=0.5
            )
            return jax.numpy.where(jax.numpy.isfinite(y), y, 0)

        check_gradients(score, q, weights, pages)

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against operands that would be broadcast without a word."""
        q, weights, pages = np.zeros((2, 4, 32), BF16), np.zeros((2, 4), BF16), np.zeros((3, 8, 17), np.uint8)
        table, visible = np.zeros((2, 5), np.int32), np.zeros(2, np.int32)
        settings = {"fmt": "fp4", "bf16_chain": True, "scale": 0.125}
        self.refuses(index_scores, q, weights[:, :2], pages, table, visible, match="do not fit", **settings)
        self.refuses(index_scores, q, weights, pages, table[:1], visible, match="do not fit", **settings)
        self.refuses(index_scores, q, weights, pages, table, visible[:1], match="do not fit", **settings)
        self.refuses(index_scores, q, weights, pages[..., :16], table, visible, match="records", **settings)
        self.refuses(index_scores, q, weights, pages[0], table, visible, match="records", **settings)
