"""One request, many ways through the state: every way must give the same bits (design 1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.batching import Chunk
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.profile import F32_ALLQ, F32_KVQ, F32_NOQ, REFERENCE, NumericsProfile
from deepinfer_jax.model.config import ModelConfig

from .harness import MAX_DRAFT, Runner, Shape, assert_same_bits, one_shot, page_tables, plain_tables

CONFIG = ModelConfig.micro()
RNG = np.random.default_rng(20261130)
SEQUENCES = [RNG.integers(0, 92, n).tolist() for n in (1, 8, 41, 133)]
IMAGE = [False] * 133
IMAGE[5:11] = [True] * 6
IMAGE[14:16] = [True] * 2

# Every profile compiles two programs. The default tier takes the default profile and the plainest one.
PROFILES = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(F32_NOQ, id="f32_noq"),
    pytest.param(F32_KVQ, id="f32_kvq", marks=pytest.mark.long),
    pytest.param(F32_ALLQ, id="f32_allq", marks=pytest.mark.long),
]

_cache: dict[tuple[str, int], np.ndarray] = {}


def reference_logits(profile: NumericsProfile, number: int) -> np.ndarray:
    """One-shot logits of SEQUENCES[number]; the last one holds image spans."""
    key = (profile.name, number)
    if key not in _cache:
        image = IMAGE if number == 3 else ()
        _cache[key] = one_shot(profile, SEQUENCES[number], image)
    return _cache[key]


def image_of(number: int, start: int, size: int) -> tuple[bool, ...]:
    return tuple(IMAGE[start : start + size]) if number == 3 else ()


def test_reference_is_finite_and_alive() -> None:
    """A reference that is constant or saturated would make every comparison below empty."""
    logits = reference_logits(REFERENCE, 3)
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=1).tolist())) > 20


@pytest.mark.parametrize("profile", PROFILES)
def test_token_by_token(profile: NumericsProfile) -> None:
    """Decode must equal prefill: open groups, ring order and look-back cross every call border here."""
    shape = Shape()
    runner = Runner(profile, shape, plain_tables(shape))
    ids = SEQUENCES[3]
    rows = [runner.run([Chunk(2, i, [ids[i]], len(ids), "all", image_of(3, i, 1))]).logits[0] for i in range(len(ids))]
    assert_same_bits(np.stack(rows), reference_logits(profile, 3), "token by token")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[tuple[int, int]]]]:
    """(slot of each sequence, page order, calls); a call is a list of (sequence, rows)."""
    which = draw(st.permutations(range(4)))[:3]
    pages = draw(st.permutations(range(13)))
    done = dict.fromkeys(which, 0)
    calls = []
    while any(done[s] < len(SEQUENCES[s]) for s in which):
        room = 48
        call = []
        for sequence in draw(st.permutations(which)):
            left = min(len(SEQUENCES[sequence]) - done[sequence], room)
            size = draw(st.integers(0, left)) if left else 0
            size = size if draw(st.booleans()) else min(left, size % 4 + 1)
            if size:
                call.append((sequence, size))
                done[sequence] += size
                room -= size
        if call:
            calls.append(call)
    return list(which), list(pages), calls


def run_schedule(profile: NumericsProfile, schedule: tuple, shape: Shape, kernels: Kernels = Kernels()) -> None:  # noqa: B008 - frozen
    which, pages, calls = schedule
    order = pages + [p for p in range(shape.pages) if p not in pages]
    runner = Runner(profile, shape, page_tables(shape, order), kernels=kernels)
    slot = {sequence: i for i, sequence in enumerate(which)}
    done = dict.fromkeys(which, 0)
    got: dict[int, list[np.ndarray]] = {sequence: [] for sequence in which}
    for call in calls:
        chunks = []
        for sequence, size in call:
            start, ids = done[sequence], SEQUENCES[sequence]
            piece = ids[start : start + size]
            image = image_of(sequence, start, size)
            chunks.append(Chunk(slot[sequence], start, piece, len(ids), "all", image))
            done[sequence] += size
        logits = runner.run(chunks).logits
        at = 0
        for sequence, size in call:
            got[sequence].append(logits[at : at + size])
            at += size
    for sequence in which:
        what = f"sequence {sequence} of {len(SEQUENCES[sequence])} tokens"
        assert_same_bits(np.concatenate(got[sequence]), reference_logits(profile, sequence), what)


@pytest.mark.parametrize("profile", PROFILES)
@settings(max_examples=15)
@given(schedule=schedules())
def test_mixed_chunks_any_slot_any_page(profile: NumericsProfile, schedule: tuple) -> None:
    """Neighbours, chunk borders, slots and page placement must not show; unowned memory is NaN."""
    run_schedule(profile, schedule, Shape())


@settings(max_examples=3)
@given(schedule=schedules())
def test_row_blocks(schedule: tuple) -> None:
    """Rows that a layer takes together must not show: ring slots, open pairs and pages are written block by block."""
    run_schedule(REFERENCE, schedule, Shape(), Kernels(row_block=48))


@settings(max_examples=5)
@given(schedule=schedules())
def test_other_capacity(schedule: tuple) -> None:
    """More slots, rows and context capacity than needed must not change a bit (padded widths did)."""
    run_schedule(REFERENCE, schedule, Shape(rows=64, slots=5, sequence_pages=7, pages=36))


def test_rejected_rows_leave_no_trace() -> None:
    """Rows of rejected drafts are overwritten before anything reads them; nothing is rolled back."""
    shape = Shape()
    runner = Runner(REFERENCE, shape, plain_tables(shape))
    ids, at, rows = SEQUENCES[3], 0, []
    rng = np.random.default_rng(3)
    while at < len(ids):
        size = int(rng.integers(1, 4))
        piece = ids[at : at + size]
        junk = rng.integers(0, 92, MAX_DRAFT).tolist()
        image = image_of(3, at, len(piece)) + (False,) * MAX_DRAFT
        chunk = Chunk(1, at, piece + junk, len(ids), "all", image)
        rows.append(runner.run([chunk]).logits[: len(piece)])
        at += len(piece)
    assert_same_bits(np.concatenate(rows), reference_logits(REFERENCE, 3), "with rejected rows")


def test_causality() -> None:
    """Changing a token must change nothing before it, and something after it."""
    ids = list(SEQUENCES[3])
    ids[60] = (ids[60] + 1) % 92
    changed, same = one_shot(REFERENCE, ids, IMAGE), reference_logits(REFERENCE, 3)
    assert_same_bits(changed[:60], same[:60], "rows before the change")
    assert (changed[60:] != same[60:]).any(axis=1).mean() > 0.5
