"""Invariants of caches, selection and attention in the whole model (`spec/attention.md` 10.2).

Numbers in docstrings are those of the list there. Others of the list stand in `test_paths.py` (1, 2, 16),
`test_replay.py` (9), `test_whole_arrays.py` (12) and, per operator, in `tests/kernels/` (10, 11, 13, 14, 15).
Number 17 has nothing to test: the reference's stale index keys are not imitated.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batching import Chunk, Replay, make_batch
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Flow, Setting
from deepinfer_jax.model.state import PAGE

from .golden import layer_numbers, layer_params, one_layer
from .harness import (
    Runner,
    Shape,
    assert_same_arrays,
    captured_run,
    change_layers,
    from_other,
    leaf_of,
    micro_params,
    other_params,
    page_tables,
    plain_tables,
    raw,
    same,
    sequence_memory,
    snapshot,
)

CONFIG = ModelConfig.micro()
SHAPE = Shape()
IDS = np.random.default_rng(41).integers(0, 92, 41).tolist()
DECODER = range(CONFIG.decoder_start, CONFIG.num_hidden_layers)
TOP = CONFIG.index_topk

Captured = dict[str, np.ndarray]


@functools.cache
def base() -> tuple[np.ndarray, Captured, Runner]:
    """The unchanged model on IDS."""
    return captured_run(IDS)


def memory_after(
    calls: list[tuple[int, int]], slot: int = 0, params: Any = None, replay: Replay = "none", ids: list[int] = IDS
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(what the sequence owns, logits of the last row) after calls of (start, size) in a slot."""
    table = page_tables(SHAPE, range(12, -1, -1))
    runner = Runner(REFERENCE, SHAPE, table, params, replay=replay)
    logits = np.zeros(0)
    for start, size in calls:
        wanted = "last" if (start, size) == calls[-1] else "none"
        logits = runner.run([Chunk(slot, start, ids[start : start + size], len(ids), wanted)]).logits[0]
    return sequence_memory(runner.state, CONFIG, slot, table[slot], calls[-1][0] + calls[-1][1]), logits


def calls_of(*sizes: int) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return list(zip(starts, sizes, strict=True))


# ---- caches -------------------------------------------------------------------------------------------


@functools.cache
def whole_memory() -> tuple[dict[str, np.ndarray], np.ndarray]:
    return memory_after(calls_of(41))


@pytest.mark.parametrize(
    "sizes",
    [(1,) * 41, (28, 1, 12), (1, 28, 12), (9, 9, 9, 9, 5), (16, 16, 9), (23, 18)],
    ids=["one by one", "28+1", "1+28", "over the window", "row tiles", "odd start"],
)
def test_caches_do_not_depend_on_chunking(sizes: tuple[int, ...]) -> None:
    """3: every record of a sequence is the same however it came in; logits may hide a cache that later rows read."""
    memory, logits = memory_after(calls_of(*sizes), slot=len(sizes) % SHAPE.slots)
    want, last = whole_memory()
    assert len(want["kv 1"]) == 20
    assert len(want["index 5"]) == 41
    assert_same_arrays(memory, want, f"chunks {sizes[:4]}")
    assert same(logits, last)


def test_open_group_is_handed_over() -> None:
    """18: the token after an odd prompt pools with the stored half of its group, and with nothing else."""
    table = plain_tables(SHAPE)
    results = {}
    for disturbed in (None, "open_groups", "other places"):
        runner = Runner(REFERENCE, SHAPE, table)
        runner.run([Chunk(0, 0, IDS[:13], 13)])
        groups = np.array(runner.state.open_groups)
        place = 12 % groups.shape[2]
        if disturbed == "open_groups":
            groups[:, 0, place] += 1
        elif disturbed == "other places":
            groups[:, :, [i for i in range(groups.shape[2]) if i != place]] += 1
        runner.state = dataclasses.replace(runner.state, open_groups=jnp.asarray(groups))
        runner.run([Chunk(0, 13, IDS[13:14], 13)])
        results[disturbed] = sequence_memory(runner.state, CONFIG, 0, table[0], 14)
    whole = Runner(REFERENCE, SHAPE, table)
    whole.run([Chunk(0, 0, IDS[:14], 14)])
    want = sequence_memory(whole.state, CONFIG, 0, table[0], 14)
    assert_same_arrays(results[None], want, "prompt of 13 and one token")
    for source in (1, 3):
        newest = f"kv {source}"
        assert same(results["other places"][newest], want[newest])
        assert same(results["open_groups"][newest][:6], want[newest][:6])
        assert not same(results["open_groups"][newest][6], want[newest][6])


def test_encoder_does_not_depend_on_the_decoder() -> None:
    """8: all caches of the encoder half, and the decoder's compressed cache, are made without any decoder layer."""
    base_memory, base_logits = whole_memory()
    source = CONFIG.decoder_start
    makes_entries = {"attn.compressor.wkv", "attn.compressor.norm", "attn.indexer.wk", "attn.indexer.k_norm"}

    def all_but_source(key: str, layer: int, leaf: Any) -> Any:
        kept = layer == source and key in makes_entries | {"attn_norm"}
        return leaf if kept else from_other(key, layer, leaf)

    changed = change_layers(micro_params(), DECODER, all_but_source)
    changed = dataclasses.replace(changed, head=other_params().head, norm=other_params().norm)
    memory, logits = memory_after(calls_of(41), params=changed)
    unlike = {name for name in memory if not same(memory[name], base_memory[name])}
    assert unlike == {f"window {layer}" for layer in DECODER}
    assert not same(logits, base_logits)

    compressor = change_layers(micro_params(), [source], from_other, ["attn.compressor.wkv"])
    memory, _ = memory_after(calls_of(41), params=compressor)
    unlike = {name for name in memory if not same(memory[name], base_memory[name])}
    assert unlike == {f"kv {source}", f"index {source}"} | {f"window {layer}" for layer in DECODER if layer > source}

    keys = change_layers(micro_params(), [source], from_other, ["attn.indexer.wk"])
    memory, _ = memory_after(calls_of(41), params=keys)
    assert same(memory[f"kv {source}"], base_memory[f"kv {source}"])
    assert not same(memory[f"index {source}"], base_memory[f"index {source}"])


@pytest.mark.parametrize("replay", ["exact_trim", "bounded"])
def test_replay_keeps_what_the_encoder_made(replay: Replay) -> None:
    """9: trimming decoder rows changes no compressed entry, no index key and no encoder window."""
    memory, logits = memory_after(calls_of(20, 21), replay=replay)
    want, last = whole_memory()
    decoder = {f"window {layer}" for layer in DECODER}
    assert_same_arrays(
        {name: v for name, v in memory.items() if name not in decoder},
        {name: v for name, v in want.items() if name not in decoder},
        replay,
    )
    assert same(logits, last) == (replay == "exact_trim")


def test_padding_writes_nowhere() -> None:
    """16: rows of padding give finite numbers, and no byte outside a sequence's slot and pages changes."""
    table = page_tables(SHAPE, [3, 7, 5, 1, 0, 2, 4, 6, 8, 9, 10, 11])
    runner = Runner(REFERENCE, SHAPE, table)
    before = snapshot(runner.state)
    outputs = runner.run([Chunk(1, 0, IDS[:19], 19)])
    after = snapshot(runner.state)
    assert np.isfinite(outputs.logits).all()
    assert np.isfinite(outputs.taps.astype(np.float32)).all()
    owned = table[1][0]
    for name, old in before.items():
        new = after[name]
        if ".pages" in name:
            others = [page for page in range(SHAPE.pages) if page != owned]
            assert same(new[:, others], old[:, others]), name
            used = 19 // CONFIG.compress_ratios[1] if "[2]" in name else 19
            assert same(new[:, owned, used:], old[:, owned, used:]), name
            assert (raw(new[:, owned, :used]) != raw(old[:, owned, :used])).any(), name
        elif name == ".lookback":
            assert same(new[[0, 2]], old[[0, 2]])
        elif name == ".draft_window":
            assert same(new, old)
        else:  # [layers or sources, slots, ring, ...]
            assert same(new[:, [0, 2]], old[:, [0, 2]]), name
            unused = range(19, new.shape[2])
            assert same(new[:, 1, unused], old[:, 1, unused]), name


# ---- selection ------------------------------------------------------------------------------------------


def visible(layer: int, position: int) -> int:
    return (position + 1) // CONFIG.compress_ratios[layer]


def best_entries(scores: np.ndarray, allowed: np.ndarray | None = None) -> list[int]:
    """The TOP best finite scores, ties to the lower entry, in ascending order and padded with -1."""
    scores = scores.astype(np.float64)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    order = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > -np.inf]
    chosen = sorted(order[:TOP])
    return chosen + [-1] * (TOP - len(chosen))


def allowed_entries(blocks: np.ndarray) -> np.ndarray:
    return np.repeat(blocks, CONFIG.candidate_block_size)


def test_visibility() -> None:
    """7: a ratio-2 entry is visible from the token that closes it; scores of anything else are -inf."""
    captured = base()[1]
    assert [visible(1, p) for p in range(4)] == [0, 1, 1, 2]
    for layer in CONFIG.index_source_layer_ids:
        width = SHAPE.sequence_pages * PAGE // CONFIG.compress_ratios[layer]
        for p in range(len(IDS)):
            scores = captured["index_scores"][layer, p, :width]
            count = visible(layer, p)
            assert np.isfinite(scores[:count]).all()
            assert (scores[count:] == -np.inf).all(), f"layer {layer}, position {p}"
            assert (captured["selection"][layer, p] >= 0).sum() == min(count, TOP)


def test_selection_is_the_best_scores() -> None:
    """5: sources take their own best entries; the candidate source is not held to its own candidates."""
    captured = base()[1]
    outside = 0
    for layer in (1, 3, 5):
        width = SHAPE.sequence_pages * PAGE // CONFIG.compress_ratios[layer]
        for p in range(len(IDS)):
            chosen = captured["selection"][layer, p].tolist()
            assert chosen == best_entries(captured["index_scores"][layer, p, :width]), f"layer {layer}, position {p}"
            if layer == CONFIG.candidate_source_layer_id:
                outside += sum(not allowed_entries(captured["candidates"][5, p])[j] for j in chosen if j >= 0)
    assert outside > 0  # otherwise a restricted source would have passed


def test_candidates() -> None:
    """5: few blocks are all kept; more are cut to the best, with the newest always among them; layer 7 obeys."""
    captured = base()[1]
    size, limit = CONFIG.candidate_block_size, CONFIG.candidate_topk_blocks
    restricted = 0
    for p in range(len(IDS)):
        count = p + 1
        blocks = captured["candidates"][5, p]
        kept = np.flatnonzero(blocks).tolist()
        scores = captured["index_scores"][7, p]
        chosen = captured["selection"][7, p].tolist()
        assert (count - 1) // size in kept
        assert len(kept) == min(limit, -(-count // size))
        if -(-count // size) <= limit:
            assert chosen == best_entries(scores)
            continue
        source = np.pad(captured["index_scores"][5, p], (0, -len(scores) % size), constant_values=-np.inf)
        best = source.reshape(-1, size).max(axis=1)
        best[(count - 1) // size] = np.inf
        assert kept == sorted(np.argsort(-best, kind="stable")[:limit].tolist())
        assert chosen == best_entries(scores, allowed_entries(blocks))
        restricted += chosen != best_entries(scores)
    assert restricted > 5


def test_short_context_selects_everything() -> None:
    """4: with no more entries than index_topk the selection is all of them, whatever the indexer says."""
    captured = base()[1]
    for layer in CONFIG.index_source_layer_ids:
        for p in range(len(IDS)):
            count = visible(layer, p)
            if count <= TOP:
                assert captured["selection"][layer, p].tolist() == [*range(count)] + [-1] * (TOP - count)


def test_indexer_is_without_effect_in_short_context() -> None:
    """4: other index weights change nothing until something has to be left out, then they do."""
    keys = ["attn.indexer.wq_b", "attn.indexer.weights_proj", "attn.indexer.wk", "attn.indexer.k_norm"]
    changed = change_layers(micro_params(), range(CONFIG.num_hidden_layers), from_other, keys)
    logits = captured_run(IDS, changed)[0]
    assert same(logits[:TOP], base()[0][:TOP])
    assert (logits[TOP:] != base()[0][TOP:]).any(axis=1).mean() > 0.9


@functools.cache
def layer_program(layer: int) -> Any:
    """One layer of this layer's kind on one block of rows."""
    setting = Setting(CONFIG, REFERENCE, Kernels(), LOCAL_EXCHANGE)
    return jit(lambda *operands: one_layer(setting, layer, *operands))


@pytest.mark.parametrize(("layer", "owner", "program"), [(2, 1, 2), (4, 3, 2), (6, 5, 6), (8, 7, 6)])
def test_reuse_layers_take_the_selection_of_their_owner(layer: int, owner: int, program: int) -> None:
    """6: a Reuse layer, run by hand with its owner's rows of entries, gives the model's own result."""
    _, captured, runner = base()
    start = len(IDS) - ROW_TILE
    batch = make_batch(
        CONFIG, [Chunk(0, start, IDS[start:], len(IDS))], runner.page_table, rows=ROW_TILE, replay="none"
    )
    count = ROW_TILE

    def run_with(selection: np.ndarray) -> np.ndarray:
        flow = Flow(
            streams=jnp.asarray(captured["streams"][layer, start:]),
            pre=jnp.asarray(captured["pre"][layer, start:]),
            selection=jnp.asarray(selection),
            candidates=jnp.zeros((count, 0), bool),
            taps=jnp.zeros((len(CONFIG.dspark_target_layer_ids), count, CONFIG.hidden_size), REFERENCE.dtype),
            captured={},
            state=runner.state,
        )
        hashes = jnp.zeros((len(CONFIG.engram_layer_ids), count, CONFIG.engram_columns), jnp.int32)
        weights = layer_params(CONFIG, micro_params(), layer)
        result = layer_program(program)(weights, layer_numbers(CONFIG, layer), batch, hashes, flow)
        return np.asarray(result.streams)

    assert CONFIG.index_owner(layer) == owner
    chosen = captured["selection"][owner, start:]
    want = captured["streams"][layer + 1, start:]
    assert same(run_with(chosen), want)
    assert (raw(run_with(np.roll(chosen, 1, axis=0))) != raw(want)).any(axis=1).all()


# ---- attention -------------------------------------------------------------------------------------------


def with_sinks(heads: list[int], layers: range) -> Any:
    """Weights whose sinks of these heads take all probability."""

    def change(_key: str, _layer: int, leaf: np.ndarray) -> np.ndarray:
        leaf[heads] = 1e4
        return leaf

    return change_layers(micro_params(), layers, change, ["attn.attn_sink"])


def test_sinks_that_take_everything_leave_nothing() -> None:
    """10: the sink is in the denominator of every layer, and only there."""
    every = range(CONFIG.num_hidden_layers)
    logits, captured, _ = captured_run(IDS, with_sinks([*range(CONFIG.num_attention_heads)], every))
    assert (captured["attention_output"] == 0).all()
    assert np.isfinite(logits).all()
    assert (base()[1]["attention_output"] != 0).any(axis=-1).all()


def test_output_groups_see_their_own_heads() -> None:
    """14: without the heads of the second group, the second half of wo_a is not used; the first half is."""
    layer = 2
    half = CONFIG.num_attention_heads // CONFIG.o_groups
    silent = with_sinks([*range(half, CONFIG.num_attention_heads)], range(layer, layer + 1))
    rows = CONFIG.o_lora_rank
    outputs = []
    for changed in (None, slice(rows, None), slice(0, rows)):

        def change(key: str, number: int, leaf: Any, part: slice | None = changed) -> Any:
            if part is not None:
                leaf.data[part] = leaf_of(other_params(), number, key).data[part]
            return leaf

        params = change_layers(silent, [layer], change, ["attn.wo_a"])
        outputs.append(captured_run(IDS, params)[1]["attention_output"][layer])
    assert same(outputs[1], outputs[0])
    assert (raw(outputs[2]) != raw(outputs[0])).any(axis=1).all()


def test_window_is_a_span_of_positions() -> None:
    """The window of a row at position p holds p-7 .. p: an older key changes nothing, the oldest inside does."""
    table = plain_tables(SHAPE)
    start, size = 30, CONFIG.sliding_window
    outputs = {}
    for position in (None, start - size, start - size + 1):
        runner = Runner(REFERENCE, SHAPE, table)
        runner.run([Chunk(0, 0, IDS[:start], start)])
        window = np.array(runner.state.window)
        if position is not None:
            window[0, 0, position % window.shape[2], : CONFIG.head_dim] ^= 0x80  # the sign of every code
        runner.state = dataclasses.replace(runner.state, window=jnp.asarray(window))
        outputs[position] = runner.run([Chunk(0, start, IDS[start : start + 1], start)]).logits[0]
        assert np.isfinite(outputs[position]).all()
    assert same(outputs[start - size], outputs[None])
    assert not same(outputs[start - size + 1], outputs[None])
