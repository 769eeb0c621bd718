"""Checks of `top_k`: exact selection, ties, padding, candidate blocks."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_jax.kernels.top_k import candidate_blocks, top_k

from . import reference
from .base import Example, OpTests
from .cases import RowCase, assert_same_bits, generator, load_unit, normal


def tied_scores(rng: np.random.Generator, rows: int, width: int, levels: int, hidden: float) -> np.ndarray:
    """float32 scores with few distinct values, both zeros, and -inf holes."""
    scores = rng.integers(-levels, levels + 1, size=(rows, width)).astype(np.float32)
    scores = np.where((scores == 0) & (rng.random(scores.shape) < 0.5), np.float32(-0.0), scores)
    return np.where(rng.random(scores.shape) < hidden, np.float32(-np.inf), scores).astype(np.float32)


def visible_scores(rng: np.random.Generator, rows: int, width: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """(tied scores, visible): -inf from each row's visible count on."""
    visible = rng.integers(0, width + 1, size=rows).astype(np.int32)
    scores = tied_scores(rng, rows, width, levels, 0)
    return np.where(np.arange(width)[None] < visible[:, None], scores, np.float32(-np.inf)), visible


CASES = (
    RowCase(
        "top-k behind candidate blocks",
        lambda rng, t: visible_scores(rng, t, 100, 20),
        lambda rng: (),
        lambda k, r, c: k(
            top_k, r[0], k=16, block_mask=k(candidate_blocks, r[0], r[1], block_size=8, blocks=4), block_size=8
        ),
    ),
)


class TopKTests(OpTests):
    """Every implementation of `top_k`."""

    op: ClassVar[str] = "top_k"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        scores, visible = visible_scores(generator("top-k examples"), 4, 20, 3)
        return [
            (top_k, (scores,), {"k": 4}),
            (candidate_blocks, (scores, visible), {"block_size": 8, "blocks": 2}),
        ]

    # The sizes are few, so that the compiled programs are few; the contents are what varies.
    @settings(max_examples=60)
    @example(seed=0, sizes=(7, 9), levels=0, hidden=0.0, block_size=0)
    @given(
        seed=st.integers(0, 2**32 - 1),
        sizes=st.sampled_from([(1, 1), (7, 9), (33, 4)]),
        levels=st.sampled_from([0, 1, 3, 50]),
        hidden=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        block_size=st.sampled_from([0, 4]),
    )
    def test_against_stable_sort(
        self, seed: int, sizes: tuple[int, int], levels: int, hidden: float, block_size: int
    ) -> None:
        """Guards ties, both zeros, rows of one value, rows of -inf, k above the width, masks with a partial block."""
        width, k = sizes
        rng = np.random.default_rng(seed)
        scores = tied_scores(rng, 6, width, levels, hidden)
        if not block_size:
            np.testing.assert_array_equal(self.run(top_k, scores, k=k), reference.top_k(scores, k))
            return
        mask = rng.random((6, -(-width // block_size))) < 0.6
        found = self.run(top_k, scores, k=k, block_mask=mask, block_size=block_size)
        np.testing.assert_array_equal(found, reference.top_k(scores, k, mask, block_size))

    @settings(max_examples=60)
    @given(
        seed=st.integers(0, 2**32 - 1),
        sizes=st.sampled_from([(1, 1), (8, 2), (29, 2), (29, 9)]),
        levels=st.sampled_from([0, 1, 50]),
    )
    def test_candidates_against_stable_sort(self, seed: int, sizes: tuple[int, int], levels: int) -> None:
        """Guards the block maxima, the pinned newest block and blocks beyond the visible entries."""
        width, blocks = sizes
        scores, visible = visible_scores(np.random.default_rng(seed), 6, width, levels)
        mask = self.run(candidate_blocks, scores, visible, block_size=8, blocks=blocks)
        np.testing.assert_array_equal(mask, reference.candidate_blocks(scores, visible, 8, blocks))

    @pytest.mark.fast
    def test_selection_is_ascending_and_padded(self) -> None:
        """Guards the form of the list on cases that can be read off."""
        inf = np.float32(-np.inf)
        scores = np.array(
            [
                [3, 1, 2, 3, 0],  # plain, with a tie for first place
                [0, -0.0, 0, -0.0, 0],  # zeros of both signs are one tie
                [inf, inf, inf, inf, inf],  # nothing to choose
                [inf, 5, inf, -3e38, inf],  # fewer than k
                [np.inf, 1, np.inf, 2, -1],  # +inf is a score like others
            ],
            np.float32,
        )
        expected = [[0, 2, 3], [0, 1, 2], [-1, -1, -1], [1, 3, -1], [0, 2, 3]]
        np.testing.assert_array_equal(self.run(top_k, scores, k=3), expected)
        wide = self.run(top_k, scores, k=8)
        np.testing.assert_array_equal(wide[0], [0, 1, 2, 3, 4, -1, -1, -1])
        assert (wide[2] == -1).all()

    def test_every_float_keeps_its_order(self) -> None:
        """Guards the order of extreme, subnormal and negative scores."""
        tiny = np.float32(1e-45)
        ladder = np.array([-np.inf, -3e38, -1, -tiny, 0, tiny, 1e-38, 1, 3e38, np.inf], np.float32)
        order = generator("ladder").permutation(len(ladder))
        shuffled = ladder[order]
        for k in (1, 4, 6, 9):
            found = self.run(top_k, shuffled[None], k=k)[0]
            assert set(found) == set(np.argsort(-shuffled, kind="stable")[:k])

    @pytest.mark.fast
    def test_golden_candidates_beyond_16384(self) -> None:
        """Guards the released candidate filter where it bites: 2,048 blocks of 8 among up to 20,000 entries."""
        unit = load_unit("candidate_real")
        for row, count in enumerate(unit["visible"]):
            width = 20000
            scores = np.full((2, 1, width), -np.inf, np.float32)
            for which, source in enumerate(("rank_source", "rank_consumer")):
                ranks = unit[f"{source}_{row}"].astype(np.float32)
                scores[which, 0, :count] = np.where(ranks < 0, -np.inf, ranks / 1000 - 10)
            visible = np.array([count], np.int32)
            mask = self.run(candidate_blocks, scores[0], visible, block_size=8, blocks=2048)
            entries = mask[0].repeat(8)[:width] & (np.arange(width) < count)
            np.testing.assert_array_equal(entries, np.unpackbits(unit["mask_packed"][row]).astype(bool))
            assert mask[0, (count - 1) // 8]
            found = self.run(top_k, scores[1], k=512, block_mask=mask, block_size=8)
            np.testing.assert_array_equal(found[0], unit["topk_consumer"][row])

    @pytest.mark.parametrize("width", [16390, 20003])
    def test_wide_rows_with_ties(self, width: int) -> None:
        """Guards selection over wide rows whose width is no multiple of the block, full of ties."""
        rng = generator("wide", width)
        scores, visible = visible_scores(rng, 3, width, 40)
        visible[0] = width
        scores[0] = tied_scores(rng, 1, width, 40, 0)[0]
        mask = self.run(candidate_blocks, scores, visible, block_size=8, blocks=2048)
        np.testing.assert_array_equal(mask, reference.candidate_blocks(scores, visible, 8, 2048))
        assert mask[0].sum() == 2048 < mask.shape[1]
        found = self.run(top_k, scores, k=512, block_mask=mask, block_size=8)
        np.testing.assert_array_equal(found, reference.top_k(scores, 512, mask, 8))

    def test_mask_without_effect(self) -> None:
        """Guards the promise that candidates change nothing while all blocks fit."""
        scores, visible = visible_scores(generator("no-op"), 9, 29, 50)
        mask = self.run(candidate_blocks, scores, visible, block_size=8, blocks=4)
        masked = self.run(top_k, scores, k=9, block_mask=mask, block_size=8)
        np.testing.assert_array_equal(masked, self.run(top_k, scores, k=9))

    def test_newest_block_is_pinned(self) -> None:
        """Guards the newest block: kept however low it scores, and counted among the kept ones."""
        scores = np.arange(24, 0, -1, dtype=np.float32)[None] * np.ones((3, 1), np.float32)
        visible = np.array([24, 17, 0], np.int32)
        scores[np.arange(24)[None] >= visible[:, None]] = -np.inf
        mask = self.run(candidate_blocks, scores, visible, block_size=8, blocks=2)
        np.testing.assert_array_equal(mask, [[True, False, True], [True, False, True], [False] * 3])

    def test_width_does_not_matter(self) -> None:
        """Guards context capacity: more unseen entries must not change a selection."""
        scores, visible = visible_scores(generator("width"), 9, 40, 5)
        wide = np.concatenate([scores, np.full((9, 57), -np.inf, np.float32)], axis=1)
        assert_same_bits(self.run(top_k, wide, k=16), self.run(top_k, scores, k=16), "wider rows")
        mask = self.run(candidate_blocks, wide, visible, block_size=8, blocks=3)
        narrow = self.run(candidate_blocks, scores, visible, block_size=8, blocks=3)
        assert_same_bits(mask[:, :5], narrow, "candidates of wider rows")
        assert not mask[:, 5:].any()

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against masks that do not cover the scores."""
        scores, visible = normal(generator("contract"), 3, 20), np.zeros(3, np.int32)
        self.refuses(top_k, scores[0], k=2, match="do not fit")
        self.refuses(top_k, scores, k=0, match="k=0")
        mask = np.ones((3, 3), bool)
        self.refuses(top_k, scores, k=2, block_mask=mask[:, :2], block_size=8, match="does not cover")
        self.refuses(top_k, scores, k=2, block_mask=mask[:2], block_size=8, match="does not cover")
        self.refuses(candidate_blocks, scores, visible[:2], block_size=8, blocks=2, match="do not fit")
        self.refuses(candidate_blocks, scores, visible, block_size=0, blocks=2, match="block_size=0")
        self.refuses(candidate_blocks, scores, visible, block_size=8, blocks=0, match="blocks=0")
