"""The promise: a request's tokens and log-probabilities do not depend on anything else in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deepinfer_jax.engine.engine import Engine

from .conftest import Known

SCHEDULES = 200
LONG_SCHEDULES = 5000
MOST_FORCED = 50
"""Preemptions that a schedule forces, at most: with small chunks a long prompt would never get to its end."""


def run_schedule(seed: int, known: list[Known], make_engine: Callable[..., Engine]) -> dict[str, int]:
    """One random arrangement of random requests; every result must equal the one alone."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 5, 8, 8, 12, 20, 63])
    chosen = [rng.choice(known) for _ in range(count)]
    engine = make_engine(
        rng=rng,
        pages=rng.choice([12, 16, 24, 64]),
        context=rng.choice([1024, 640]),
        prefix_sharing=rng.random() < 0.8,
        snapshot_bytes=rng.choice([0, 1 << 16, 1 << 22]),
        prefill_chunk=rng.choice([None, None, 1 + rng.randrange(64)]),
        overlap=rng.random() < 0.9,
    )
    rng.shuffle(engine.scheduler._free_slots)
    preempting, cancelling = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.0, 0.05])
    cancelled: set[int] = set()
    calls = []
    waiting = list(enumerate(chosen))
    forced = 0
    while waiting or not all(call.done for _, call in calls):
        for _ in range(min(len(waiting), rng.choice([0, 1, 4, 63]))):
            i, item = waiting.pop(0)
            calls.append((i, engine.submit([item.prompt], item.sampling)))
        engine.step()
        if rng.random() < preempting and engine.scheduler.running and forced < MOST_FORCED:
            forced += 1
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < cancelling and count > 1 and calls:
            i, call = rng.choice(calls)
            if not call.done:
                call.cancel()
                cancelled.add(i)
    for i, call in calls:
        output = call.outputs()[0]
        if i not in cancelled:
            assert output == chosen[i].alone, f"schedule {seed}, request {i}: {chosen[i]}"
        else:
            for mine, alone in zip(output.outputs, chosen[i].alone.outputs, strict=True):
                assert mine.token_ids == alone.token_ids[: len(mine.token_ids)]
    engine.store.check()
    assert engine.store.available == engine.store.total
    assert len(engine.scheduler._free_slots) == engine.sizes.slots
    stats = engine.stats
    engine.close()
    return {"cached": stats.cached_rows, "preemptions": stats.preemptions, "steps": stats.steps}


def run_schedules(seeds: range, known: list[Known], make_engine: Callable[..., Engine]) -> None:
    """Many schedules, which must not all be harmless."""
    totals = {"cached": 0, "preemptions": 0, "steps": 0}
    for seed in seeds:
        for name, value in run_schedule(seed, known, make_engine).items():
            totals[name] += value
    assert totals["cached"] > 1000, "the schedules shared no prefixes"
    assert totals["preemptions"] > 20, "the schedules preempted nobody"


@pytest.mark.parametrize("part", range(4))
def test_schedules_change_nothing(part: int, known: list[Known], make_engine: Callable[..., Engine]) -> None:
    """Guards the promise over batches, slots, order, chunks, preemption, sharing, cancelling, capacity."""
    per_part = SCHEDULES // 4
    run_schedules(range(part * per_part, (part + 1) * per_part), known, make_engine)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_many_more_schedules(part: int, known: list[Known], make_engine: Callable[..., Engine]) -> None:
    """The same over 5,000 schedules, in parts that can be run apart (-k "more and 17").

    Meant for an otherwise idle machine: beside other work XLA's threads mostly wait for each other, unless the test
    has a core of its own (taskset -c 0).
    """
    per_part = LONG_SCHEDULES // 20
    first = 1_000_000 + part * per_part
    run_schedules(range(first, first + per_part), known, make_engine)
