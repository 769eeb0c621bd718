"""Checks of `sample_tokens`: supports, probabilities, penalties, ties and noise against NumPy."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.sample_tokens import Controls, Sampled, sample_tokens, token_logprobs

from .base import Example, OpTests
from .cases import RowCase, generator

VOCABULARY = 200
DRAWS = 20_000


def controls(rows: int, **changes: Any) -> Controls:
    """Neutral controls of `rows` rows at positions 0, 1, ..., with changes (scalars or arrays)."""
    kinds: dict[str, tuple[Any, type]] = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "sample_index": (0, np.int32),
        "position": (np.arange(rows), np.int32),
        "processed": (False, bool),
        "repetition": (1.0, np.float32),
        "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32),
    }
    values: dict[str, Any] = {"seed": np.broadcast_to(np.array([0, 7], np.uint32), (rows, 2))}
    for name, (default, dtype) in kinds.items():
        values[name] = np.broadcast_to(np.asarray(changes.pop(name, default), dtype), (rows,))
    return Controls(**values | changes)


def softmax(x: np.ndarray) -> np.ndarray:
    """float64 probabilities of one row; -inf gives 0."""
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def kept_reference(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V]: the support by sorting, in float64; ties at a border stay."""
    kept = scaled > -np.inf
    if top_k:
        kept &= scaled >= np.sort(scaled)[-min(top_k, int(kept.sum()))]
    if top_p < 1:
        p = softmax(np.where(kept, scaled, -np.inf))
        order = np.argsort(-p, kind="stable")
        needed = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        kept &= scaled >= scaled[order[needed - 1]]
    if min_p > 0:
        kept &= np.exp(scaled - scaled.max()) >= min_p
    return kept


def _row_controls(position: jax.Array) -> Controls:
    """Filters that are the same in every row, as arrays of the program like the positions."""
    one = position * 0 + 1

    def column(value: float) -> jax.Array:
        return jnp.where(one > 0, jnp.float32(value), jnp.float32(0))

    return Controls(
        temperature=column(1.0),
        top_k=one * 40,
        top_p=column(0.9),
        min_p=column(0.01),
        seed=jnp.stack([one, one * 7], axis=1).astype(jnp.uint32),
        sample_index=one * 0,
        position=position,
        processed=one > 1,
        repetition=column(1.0),
        presence=column(0.0),
        frequency=column(0.0),
    )


CASES = (
    RowCase(
        "sampling with filters and top log-probabilities",
        lambda rng, t: (
            rng.normal(size=(t, VOCABULARY)).astype(np.float32) * 3,
            rng.integers(0, 1 << 20, t).astype(np.int32),
        ),
        lambda rng: (),
        lambda k, r, c: jax.tree.leaves(k(sample_tokens, r[0], _row_controls(r[1]), top=3)),
    ),
)


class SampleTokensTests(OpTests):
    """Every implementation of `sample_tokens`."""

    op: ClassVar[str] = "sample_tokens"
    row_cases: ClassVar[tuple[RowCase, ...]] = CASES

    def examples(self) -> list[Example]:
        logits = generator("sample examples").normal(size=(3, VOCABULARY)).astype(np.float32)
        return [
            (sample_tokens, (logits, controls(3, top_k=9)), {"top": 2}),
            (token_logprobs, (logits, np.array([1, 2, 3], np.int32)), {"top": 2}),
        ]

    def draw(self, logits: np.ndarray, draws: int, **changes: Any) -> Sampled:
        """`draws` draws from one row of logits, at positions 0, 1, ..."""
        rows = np.broadcast_to(logits.astype(np.float32), (draws, len(logits)))
        return self.run(sample_tokens, rows, controls(draws, **changes), row_tile=None)

    @pytest.mark.parametrize(
        "filters",
        [
            {},
            {"top_k": 5},
            {"top_p": 0.7},
            {"min_p": 0.05},
            {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
            {"top_p": 1e-6},
            {"top_k": 1000},
            {"temperature": 0.5, "top_p": 0.8},
            {"temperature": 3.0, "min_p": 0.2},
        ],
        ids=str,
    )
    def test_support_and_distribution(self, filters: dict[str, Any]) -> None:
        """A filter that is off by one token, or noise that is not Gumbel, fails the support or chi-square."""
        logits = generator("distribution").normal(size=VOCABULARY).astype(np.float32) * 2
        got = self.draw(logits, DRAWS, processed=True, **filters)
        scaled = logits.astype(np.float64) / filters.get("temperature", 1.0)
        kept = kept_reference(scaled, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0))
        want = softmax(np.where(kept, scaled, -np.inf))
        counts = np.bincount(got.token_ids, minlength=VOCABULARY)
        assert not counts[~kept].any()
        assert got.valid.all()
        np.testing.assert_allclose(np.exp(got.logprobs), want[got.token_ids], rtol=1e-5)
        common = want * DRAWS >= 5
        chi = ((counts[common] - want[common] * DRAWS) ** 2 / (want[common] * DRAWS)).sum()
        expected_rest = DRAWS - (want[common] * DRAWS).sum()
        if expected_rest > 5:
            chi += (DRAWS - counts[common].sum() - expected_rest) ** 2 / expected_rest
        degrees = max(int(common.sum()), 1)
        assert chi < degrees + 5 * np.sqrt(2 * degrees) + 5  # about five standard deviations

    def test_support_is_exact_on_many_rows(self) -> None:
        """Integer masses against float64 sums, at borders that are not tied."""
        rng, rows = generator("supports"), 256
        logits = rng.normal(size=(rows, VOCABULARY)).astype(np.float32) * 3
        top_k, top_p = rng.integers(0, 60, rows), rng.uniform(0.05, 1.0, rows).astype(np.float32)
        min_p = np.where(rng.random(rows) < 0.5, 0, rng.uniform(0, 0.3, rows)).astype(np.float32)
        given = controls(rows, processed=True, top_k=top_k, top_p=top_p, min_p=min_p)
        got = self.run(sample_tokens, logits, given, top=VOCABULARY)
        for row in range(rows):
            want = kept_reference(logits[row].astype(np.float64), int(top_k[row]), float(top_p[row]), float(min_p[row]))
            possible = np.zeros(VOCABULARY, bool)
            possible[got.top_ids[row][got.top_logprobs[row] > -np.inf]] = True
            assert (possible == want).all(), f"row {row}: {np.flatnonzero(possible != want)}"

    def test_support_with_ties_and_tiny_masses(self) -> None:
        """Ties at the border of top_k and top_p stay together; tokens below 2^-30 of the largest are possible
        without filters and never needed for a mass."""
        rng, rows = generator("tied supports"), 128
        logits = rng.integers(-2, 3, (rows, VOCABULARY)).astype(np.float32)
        logits[:, 150:] = -40.0
        top_k = np.where(rng.random(rows) < 0.5, 0, rng.integers(1, 180, rows))
        top_p = np.where(rng.random(rows) < 0.5, 1, rng.uniform(0.05, 0.99, rows)).astype(np.float32)
        got = self.run(sample_tokens, logits, controls(rows, processed=True, top_k=top_k, top_p=top_p), top=VOCABULARY)
        for row in range(rows):
            want = kept_reference(logits[row].astype(np.float64), int(top_k[row]), float(top_p[row]), 0.0)
            possible = np.zeros(VOCABULARY, bool)
            possible[got.top_ids[row][got.top_logprobs[row] > -np.inf]] = True
            assert (possible == want).all(), f"row {row}: {np.flatnonzero(possible != want)}"

    @pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
    @pytest.mark.parametrize("value", [0.5, 1.7, -0.6])
    def test_each_penalty_alone(self, name: str, value: float) -> None:
        """One penalty at a time, negative ones too, leaves tokens that it does not name as they are."""
        value = abs(value) if name == "repetition" else value
        logits = generator("one penalty").normal(size=(1, VOCABULARY)).astype(np.float32)
        counts = np.zeros((1, VOCABULARY), np.int32)
        counts[0, 5:20] = np.arange(15)
        prompt = np.zeros((1, VOCABULARY), bool)
        prompt[0, 30:40] = True
        got = self.run(
            sample_tokens,
            logits,
            controls(1, temperature=0, processed=True, prompt_seen=prompt, output_counts=counts, **{name: value}),
            top=VOCABULARY,
        )
        want = logits[0].astype(np.float64)
        touched = counts[0] > 0
        if name == "repetition":
            want = np.where(touched | prompt[0], np.where(want > 0, want / value, want * value), want)
        else:
            want = want - value * (touched if name == "presence" else counts[0])
        reported = np.empty(VOCABULARY)
        reported[got.top_ids[0]] = got.top_logprobs[0]
        np.testing.assert_allclose(reported, np.log(softmax(want)), rtol=1e-4, atol=1e-5)
        assert got.token_ids[0] == want.argmax()

    def test_greedy(self) -> None:
        """Temperature 0 is the argmax, ties to the lowest id, -0 equal to +0, whatever the filters say."""
        logits = np.full((4, VOCABULARY), -1, np.float32)
        logits[0, [17, 90]] = 2.5
        logits[1, 30], logits[1, 20] = 0.0, -0.0
        logits[2] = 4
        logits[3, 150] = 0
        got = self.run(sample_tokens, logits, controls(4, temperature=0, top_k=1, top_p=0.1))
        assert got.token_ids.tolist() == [17, 20, 0, 150]

    def test_noise_depends_on_its_address_only(self) -> None:
        """Both halves of the seed, the sample index and the position each change the draws; nothing else does."""
        logits = np.zeros((64, VOCABULARY), np.float32)
        base = self.run(sample_tokens, logits, controls(64)).token_ids
        again = self.run(sample_tokens, logits[:5], controls(5, position=np.arange(10, 15))).token_ids
        assert again.tolist() == base[10:15].tolist()
        high, low = (np.broadcast_to(np.array(seed, np.uint32), (64, 2)) for seed in ([1, 7], [0, 8]))
        for changes in ({"seed": high}, {"seed": low}, {"sample_index": 1}, {"position": np.arange(64) + 64}):
            other = self.run(sample_tokens, logits, controls(64, **changes)).token_ids
            assert (other != base).mean() > 0.9

    def test_penalties_mask_and_bias(self) -> None:
        """The formulas and their order, on greedy processed log-probabilities."""
        rng = generator("penalties")
        logits = rng.normal(size=(1, VOCABULARY)).astype(np.float32) * 2
        prompt = rng.random((1, VOCABULARY)) < 0.2
        counts = (rng.integers(0, 4, (1, VOCABULARY)) * (rng.random((1, VOCABULARY)) < 0.3)).astype(np.int32)
        allowed = rng.random(VOCABULARY) < 0.8
        words = np.zeros(-(-VOCABULARY // 32) * 32, np.uint64)
        words[:VOCABULARY] = allowed
        mask = (words.reshape(-1, 32) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)[None]
        given = controls(
            1,
            temperature=0,
            processed=True,
            repetition=1.3,
            presence=0.4,
            frequency=0.25,
            mask=mask,
            bias_ids=np.array([[3, 150, -1]], np.int32),
            bias=np.array([[1.5, -2.0, 99.0]], np.float32),
            prompt_seen=prompt,
            output_counts=counts,
        )
        got = self.run(sample_tokens, logits, given, top=VOCABULARY)
        want = np.where(allowed, logits[0].astype(np.float64), -np.inf)
        want[3], want[150] = want[3] + 1.5, want[150] - 2.0
        seen = prompt[0] | (counts[0] > 0)
        want = np.where(seen, np.where(want > 0, want / 1.3, want * 1.3), want)
        want = want - 0.25 * counts[0] - 0.4 * (counts[0] > 0)
        assert got.token_ids[0] == want.argmax()
        reported = np.full(VOCABULARY, np.nan)
        reported[got.top_ids[0]] = got.top_logprobs[0]
        p = softmax(want)
        np.testing.assert_allclose(reported[allowed], np.log(p[allowed]), rtol=1e-4, atol=1e-5)
        assert (reported[~allowed] == -np.inf).all()

    def test_neutral_extras_change_no_bit(self) -> None:
        """A neighbour that needs masks or penalties must not change a row that does not."""
        logits = generator("neutral").normal(size=(16, VOCABULARY)).astype(np.float32)
        plain = self.run(sample_tokens, logits, controls(16, top_p=0.9), top=5)
        extra = controls(
            16,
            top_p=0.9,
            mask=np.full((16, 7), 0xFFFFFFFF, np.uint32),
            bias_ids=np.full((16, 2), -1, np.int32),
            bias=np.ones((16, 2), np.float32),
            prompt_seen=np.ones((16, VOCABULARY), bool),
            output_counts=np.ones((16, VOCABULARY), np.int32),
        )
        other = self.run(sample_tokens, logits, extra, top=5)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            assert a.tobytes() == b.tobytes()

    def test_logprobs_are_those_of_scoring(self) -> None:
        """`score` must report the very bits that generation reported."""
        logits = generator("scoring").normal(size=(32, VOCABULARY)).astype(np.float32) * 4
        drawn = self.run(sample_tokens, logits, controls(32, top_k=3), top=4)
        scored = self.run(token_logprobs, logits, drawn.token_ids, top=4)
        assert drawn.logprobs.tobytes() == scored.logprobs.tobytes()
        assert drawn.top_logprobs.tobytes() == scored.top_logprobs.tobytes()
        want = np.log(softmax(logits[0]))[drawn.token_ids[0]]
        np.testing.assert_allclose(drawn.logprobs[0], want, rtol=1e-5)

    def test_broken_logits_are_reported(self) -> None:
        """NaN and +inf are errors of their own row; a row where nothing is allowed too."""
        logits = np.zeros((5, VOCABULARY), np.float32)
        logits[1, 3], logits[2, 4], logits[3] = np.nan, np.inf, -np.inf
        got = self.run(sample_tokens, logits, controls(5))
        assert got.valid.tolist() == [True, False, False, False, True]

    def test_contract_violations(self) -> None:
        """Shapes and dtypes outside the contract are named."""
        logits = np.zeros((2, VOCABULARY), np.float32)
        self.refuses(sample_tokens, logits, controls(3), match="do not fit")
        self.refuses(sample_tokens, logits.astype(np.float16), controls(2), match="float16")
        self.refuses(sample_tokens, logits, controls(2), top=VOCABULARY + 1, match="top=201")
        self.refuses(token_logprobs, logits, np.array([1], np.int32), match="do not fit")
