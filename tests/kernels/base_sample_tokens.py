"""Checks of `sample_tokens` as an operator: independent rows, optional operands, contract."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.sample_tokens import Controls, sample_tokens, token_logprobs

from .base import Example, OpTests
from .cases import RowCase, assert_same_bits, generator, normal

VOCABULARY = 100
FIELDS = tuple(field.name for field in dataclasses.fields(Controls))


def row_operands(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, ...]:
    """Logits, then every field of the controls; a third of the rows is greedy, filters and penalties are mixed."""
    t, v = rows, VOCABULARY
    mask = rng.integers(0, 2**32, size=(t, -(-v // 32)), dtype=np.uint32) | np.uint32(1)
    ids = np.array([rng.permutation(v)[:3] for _ in range(t)], np.int32)
    fields = {
        "temperature": np.where(rng.random(t) < 0.3, 0, rng.uniform(0.2, 2, t)).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 200], t).astype(np.int32),
        "top_p": rng.choice([1.0, 0.9, 0.3], t).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05], t).astype(np.float32),
        "seed": rng.integers(0, 2**32, size=(t, 2), dtype=np.uint32),
        "sample_index": rng.integers(0, 5, t).astype(np.int32),
        "position": rng.integers(0, 5000, t).astype(np.int32),
        "processed": rng.random(t) < 0.5,
        "repetition": rng.choice([1.0, 1.2], t).astype(np.float32),
        "presence": rng.choice([0.0, 0.5], t).astype(np.float32),
        "frequency": rng.choice([0.0, 0.3], t).astype(np.float32),
        "mask": mask,
        "bias_ids": np.where(rng.random((t, 3)) < 0.5, -1, ids).astype(np.int32),
        "bias": normal(rng, t, 3),
        "prompt_seen": rng.random((t, v)) < 0.2,
        "output_counts": rng.integers(0, 3, size=(t, v)).astype(np.int32),
    }
    return (2 * normal(rng, t, v), *(fields[name] for name in FIELDS))


def from_operands(rows: Any) -> Controls:
    """Controls of row operands without their logits."""
    return Controls(**dict(zip(FIELDS, rows, strict=True)))


def controls(rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Controls:
    """Controls of `rows` equal rows at temperature 1, neutral but for the given filters."""
    ones, zeros, integers = jnp.ones(rows), jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    return Controls(
        temperature=ones,
        top_k=jnp.full(rows, top_k, jnp.int32),
        top_p=jnp.full(rows, top_p, jnp.float32),
        min_p=jnp.full(rows, min_p, jnp.float32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        sample_index=integers,
        position=integers,
        processed=jnp.zeros(rows, bool),
        repetition=ones,
        presence=zeros,
        frequency=zeros,
    )


def _row_controls(position: jax.Array) -> Controls:
    neutral = controls(position.shape[0], top_k=40, top_p=0.9, min_p=0.01)
    return dataclasses.replace(neutral, position=position)


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
        logits, *rest = row_operands(generator("sample examples"), 5)
        tokens = np.zeros(5, np.int32)
        fields = from_operands([jnp.asarray(x) for x in rest])
        return [(sample_tokens, (logits, fields), {"top": 2}), (token_logprobs, (logits, tokens), {"top": 2})]

    def test_neutral_operands_may_be_left_out(self) -> None:
        """Guards batches: penalties and masks that one row needs must not change the bits of the others."""
        logits, *rest = row_operands(generator("neutral"), 18)
        given: dict[str, Any] = dict(zip(FIELDS, rest, strict=True))
        given |= {name: np.zeros_like(given[name]) for name in ("presence", "frequency", "bias")}
        given |= {"repetition": np.ones(18, np.float32), "mask": np.full_like(given["mask"], 2**32 - 1)}
        given["bias_ids"] = np.full_like(given["bias_ids"], -1)
        with_all = self.run(sample_tokens, logits, Controls(**given), top=3)
        without: dict[str, Any] = dict.fromkeys(("mask", "bias_ids", "bias", "prompt_seen", "output_counts"))
        assert_same_bits(with_all, self.run(sample_tokens, logits, Controls(**given | without), top=3), "left out")

    def test_reported_bits_are_those_of_given_tokens(self) -> None:
        """Guards scoring: the raw log-probability of a drawn token is the one that scoring it reports."""
        logits, *rest = row_operands(generator("score"), 18)
        given: dict[str, Any] = dict(zip(FIELDS, rest, strict=True)) | {"processed": np.zeros(18, bool)}
        drawn = self.run(sample_tokens, logits, Controls(**given), top=3)
        scored = self.run(token_logprobs, logits, drawn.token_ids, top=3)
        assert_same_bits(scored.logprobs, drawn.logprobs, "log-probabilities")
        assert_same_bits((scored.top_ids, scored.top_logprobs), (drawn.top_ids, drawn.top_logprobs), "largest")

    @pytest.mark.fast
    def test_contract(self) -> None:
        """Guards against logits and controls of different rows."""
        logits, *rest = row_operands(generator("contract"), 3)
        fields = from_operands(rest)
        self.refuses(sample_tokens, logits[:2], fields, match="do not fit the controls")
        self.refuses(sample_tokens, logits[0], fields, match="do not fit the controls")
        self.refuses(sample_tokens, logits.astype(np.float64), fields, match="do not fit the controls")
        self.refuses(sample_tokens, logits, fields, top=101, match="top=101")
        self.refuses(token_logprobs, logits, np.zeros(2, np.int32), match="do not fit")
