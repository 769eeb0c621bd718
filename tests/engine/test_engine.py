"""The engine as its users see it: calls, cancelling, errors, warm-up, statistics."""

from __future__ import annotations

import dataclasses
import gc
import logging
import tracemalloc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax.engine.engine import Engine, GenerationError
from deepinfer_jax.engine.runtime_config import RuntimeConfig
from deepinfer_jax.model.params import Params
from deepinfer_jax.sampling_params import SamplingParams

from .conftest import Known, poison

MakeEngine = Callable[..., Engine]


def test_nothing_is_compiled_after_warmup(
    make_engine: MakeEngine, known: list[Known], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the first request against a compilation in the middle of serving."""
    with make_engine() as engine:
        engine.warmup()
        jax.config.update("jax_log_compiles", True)
        try:
            with caplog.at_level(logging.WARNING, logger="jax"):
                jax.jit(lambda x: x * 3.25 + 1)(jnp.ones(7))  # what a compilation looks like in the log
                noticed = len(caplog.records)
                outputs = [engine.generate([item.prompt], item.sampling)[0] for item in known]
        finally:
            jax.config.update("jax_log_compiles", False)
    assert outputs == [item.alone for item in known]
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("Compiling") for message in messages[:noticed])
    assert [message for message in messages[noticed:] if message.startswith("Compiling")] == []


def test_warmup_changes_nothing(make_engine: MakeEngine, known: list[Known]) -> None:
    """Guards a running engine: warming up in the middle leaves its caches as they are."""
    item = known[0]
    with make_engine() as engine:
        call = engine.submit([item.prompt], item.sampling)
        engine.step()
        engine.warmup()
        assert call.outputs()[0] == item.alone


def test_score_gives_the_bits_of_generate(make_engine: MakeEngine, known: list[Known]) -> None:
    """Guards `score`: a generated sequence scored later has the log-probabilities reported at the time."""
    chosen = [item for item in known if item.sampling.n == 1 and item.sampling.logprobs_mode == "raw"][:12]
    with make_engine() as engine:
        sequences = [[*item.prompt, *item.alone.outputs[0].token_ids] for item in chosen]
        scores = engine.score(sequences, top_k=3)
    for item, scored in zip(chosen, scores, strict=True):
        reported = item.alone.outputs[0].logprobs
        assert reported is not None
        np.testing.assert_array_equal(scored.token_logprobs[len(item.prompt) - 1 :], reported)
        assert len(scored) == len(item.prompt) + len(reported) - 1


def test_later_turns_reuse_the_cache(make_engine: MakeEngine) -> None:
    """Guards multi-turn use: the second turn starts where the first prompt's snapshot ends, with equal bits."""
    prompt = [3 + i % 90 for i in range(300)]
    with make_engine() as engine:
        first = engine.generate([prompt], max_tokens=5, ignore_eos=True)[0]
        longer = [*prompt, *first.outputs[0].token_ids, 4, 5, 6]
        second = engine.generate([longer], max_tokens=5, logprobs=0)[0]
        assert second.usage.cached_tokens == 256
        assert engine.stats.cached_rows == 256
    with make_engine(prefix_sharing=False) as engine:
        alone = engine.generate([longer], max_tokens=5, logprobs=0)[0]
    assert alone.usage.cached_tokens == 0
    assert second == alone


def test_cancelling_keeps_what_was_generated(make_engine: MakeEngine) -> None:
    """Guards cancellation: one request ends, the others do not notice."""
    prompts = [[5, 6, 7], [8, 9]]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
    with make_engine() as engine:
        whole = engine.generate(prompts, sampling)
        call = engine.submit(prompts, sampling)
        events = iter(call)
        for _ in range(8):
            next(events)
        call.cancel(1)
        outputs = call.outputs()
        assert outputs[0] == whole[0]
        cut = outputs[1].outputs[0]
        assert cut.finish_reason == "cancelled"
        assert 0 < len(cut.token_ids) < 30
        assert cut.token_ids == whole[1].outputs[0].token_ids[: len(cut.token_ids)]
        call.cancel()
        assert call.outputs() == outputs


def test_closing_a_stream_frees_its_slot(make_engine: MakeEngine) -> None:
    """Guards long-lived engines: an abandoned stream must not hold a slot or pages."""
    with make_engine() as engine:
        stream = engine.stream([[5, 6, 7]], max_tokens=50, ignore_eos=True)
        assert next(stream).token_id >= 0
        assert engine.scheduler.running
        stream.close()  # type: ignore[attr-defined]
        engine.step()
        assert not engine.scheduler.busy
        assert engine.store.available == engine.store.total


def test_an_interrupt_frees_everything(make_engine: MakeEngine) -> None:
    """Guards Ctrl-C in a notebook: slots and pages come back, and closing frees the device memory."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    engine = make_engine()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6, 7]] * 20, max_tokens=9, ignore_eos=True, on_token=interrupt)
    assert not engine.scheduler.busy
    assert engine.store.available == engine.store.total
    assert len(engine.generate([[5, 6, 7]], max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids) == 3
    leaves = jax.tree.leaves((engine._runner._state, engine._runner._rings))
    engine.close()
    engine.close()
    assert all(leaf.is_deleted() for leaf in leaves)
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[5]])


def test_a_request_that_fails_ends_alone(params: Params, make_engine: MakeEngine) -> None:
    """Guards neighbours: a prompt whose numbers are not finite gives an error result and nothing else."""
    bad_token = 40
    broken = dataclasses.replace(params, embed=params.embed.at[bad_token].set(jnp.nan))
    good = make_engine()
    engine = Engine(broken, good.runtime)
    poison(engine)
    prompts = [[5, 6, 7], [5, bad_token, 7], [8, 9, 10, 11]]
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, allowed_token_ids=tuple(range(3, 30)))
    want = good.generate(prompts, settings)
    call = engine.submit(prompts, settings)
    with pytest.raises(GenerationError, match=r"prompt 1: .*not finite"):
        call.outputs()
    got = call.outputs(errors="return")
    assert (got[0], got[2]) == (want[0], want[2])
    assert got[1].error is not None
    assert got[1].outputs == ()
    with pytest.raises(GenerationError, match="prompt 1"):
        engine.score(prompts)
    assert engine.store.available == engine.store.total
    good.close()
    engine.close()


def test_calls_share_the_engine(make_engine: MakeEngine) -> None:
    """Guards interleaved use: two calls driven in turn give what each gives alone."""
    with make_engine() as engine:
        alone = [engine.generate([[t, t + 1]], max_tokens=12, seed=t)[0] for t in (5, 50)]
        calls = [engine.submit([[t, t + 1]], max_tokens=12, seed=t) for t in (5, 50)]
        iterators = [iter(call) for call in calls]
        tokens: list[list[int]] = [[], []]
        while iterators[0] or iterators[1]:
            for i, iterator in enumerate(iterators):
                event = next(iterator, None)
                if event is None:
                    iterators[i] = iter(())
                else:
                    tokens[i].append(event.token_id)
            if all(call.done and not call.events for call in calls):
                break
        assert [call.outputs()[0] for call in calls] == alone
    assert tokens == [list(output.outputs[0].token_ids) for output in alone]


def test_ten_thousand_requests_leave_nothing_behind(make_engine: MakeEngine) -> None:
    """Guards long runs: host memory stays flat and every page and slot is free at the end."""
    sampling = SamplingParams(max_tokens=1, temperature=0)
    with make_engine() as engine:

        def batch() -> None:
            call = engine.submit([[3 + i % 90, 3 + i // 90 % 90] for i in range(2000)], sampling)
            while not call.done:
                engine.step()
                call.events.clear()

        batch()
        gc.collect()
        tracemalloc.start()
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            batch()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
        tracemalloc.stop()
        engine.step()
        engine.store.check()
        assert engine.store.available == engine.store.total
        assert len(engine.scheduler._free_slots) == engine.sizes.slots
        assert engine.stats.generated_tokens == 10_000
    assert grown < 1 << 20


def test_thousands_wait_while_few_run(make_engine: MakeEngine) -> None:
    """Guards the queue: everything is accepted at once and served in order of arrival."""
    with make_engine() as engine:
        call = engine.submit([[3 + i % 90] for i in range(3000)], max_tokens=1, temperature=0)
        assert len(engine.scheduler.waiting) == 3000
        order = []
        for event in call:
            order.append(event.prompt_index)
            if len(order) == 100:
                call.cancel()
        assert sorted(order) == list(range(len(order)))


def test_statistics(make_engine: MakeEngine) -> None:
    """Guards the counts that people plan with."""
    with make_engine(prefix_sharing=False) as engine:
        engine.generate([[5, 6, 7], [8, 9]], max_tokens=4, ignore_eos=True)
        stats = engine.stats
        assert (stats.prompt_rows, stats.decode_rows, stats.generated_tokens) == (5, 6, 8)
        assert stats.steps == 4
        assert stats.preemptions == stats.cached_rows == 0
        assert stats.peak_pages == 2


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"context": 1 << 20}, "the model has 1024 positions"),
        ({"cache_bytes": 10}, "one page of this model takes"),
        ({"rows": (24,)}, "ascending multiples of 16"),
        ({"rows": (64, 32)}, "ascending multiples of 16"),
        ({"rows": (16,), "slots": 17}, "fewer than 17 slots"),
        ({"snapshot_bytes": -1}, "snapshot_bytes is -1"),
    ],
)
def test_impossible_sizes_are_refused(params: Params, changes: dict, message: str) -> None:
    """Guards against sizes that would fail deep inside a compiled program."""
    with pytest.raises(ValueError, match=message):
        Engine(params, RuntimeConfig(**changes))


def test_requests_beyond_the_engine_are_refused(make_engine: MakeEngine) -> None:
    """Guards against silently shorter output: what cannot fit is an error that says what to change."""
    with make_engine(context=640, pages=3) as engine:
        with pytest.raises(ValueError, match=r"prompt 0: .*exceed the engine's context of 640"):
            engine.submit([[5] * 600], max_tokens=41)
        with pytest.raises(ValueError, match=r"prompt 1: .*raise cache_bytes"):
            engine.submit([[5], [5] * 400], max_tokens=20)
        outputs = engine.generate([[5], [5] * 400], max_tokens=2, errors="return", ignore_eos=True)
        assert len(outputs[0].outputs[0].token_ids) == 2
        assert outputs[1].error is not None
        assert "raise cache_bytes" in outputs[1].error


def test_public_names() -> None:
    """Guards the front door."""
    assert deepinfer_jax.Engine is Engine
    assert deepinfer_jax.RuntimeConfig is RuntimeConfig
