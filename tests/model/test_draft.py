"""Invariants of the draft stages (`spec/dspark.md` 8.1, numbers D...); values are compared in `test_golden_draft.py`.

The state starts as poison, so whatever a draft reads besides its own context shows as NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import F32_NOQ, REFERENCE, NumericsProfile
from deepinfer_jax.kernels.rms_norm_quant import rms_norm
from deepinfer_jax.model.attention import window_record
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.dspark import Drafts, draft_block, draft_context, greedy_sample
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Setting
from deepinfer_jax.model.params import Params, abstract_params
from deepinfer_jax.model.state import State, init_state

from .harness import MAX_DRAFT, assert_same_arrays, micro_params, poison, raw, same, snapshot

CONFIG = ModelConfig.micro()
BLOCK = CONFIG.dspark_block_size
WINDOW = CONFIG.sliding_window
SLOTS = 8
ROWS = 48
TAPS = len(CONFIG.dspark_target_layer_ids) * CONFIG.hidden_size


@dataclasses.dataclass(frozen=True)
class Request:
    """One block to draft: anchor token at position `start`, lowest context position, tokens to force (-1 = greedy)."""

    slot: int
    anchor: int
    start: int
    first: int = 0
    forced: tuple[int, ...] = (-1,) * BLOCK


@functools.cache
def context_program(profile: NumericsProfile) -> Any:
    return jit(functools.partial(draft_context, config=CONFIG, profile=profile), donate_argnums=1)


@functools.cache
def block_program(profile: NumericsProfile) -> Any:
    def run(params: Params, state: State, facts: Any, forced: jax.Array) -> Any:
        def sample(logits: jax.Array, numbers: jax.Array, step: int) -> jax.Array:
            wanted = forced[jnp.minimum(numbers, SLOTS - 1), step]
            return jnp.where(wanted >= 0, wanted, greedy_sample(logits, numbers, step))

        return draft_block(params, state, *facts, config=CONFIG, profile=profile, sample=sample)

    return jit(run, donate_argnums=1)


class Drafter:
    """A state and the two programs of the draft."""

    def __init__(self, params: Params | None = None, profile: NumericsProfile = REFERENCE) -> None:
        self.params, self.profile = params or micro_params(), profile
        self.state = poison(init_state(CONFIG, profile, slots=SLOTS, pages=1, row_block=ROW_TILE, max_draft=MAX_DRAFT))

    def commit(self, slot: int, taps: np.ndarray, first: int = 0) -> np.ndarray:
        """Append taps [n, ...] at positions first, first + 1, ...; returns main_x [n, D]."""
        count, missing = len(taps), ROWS - len(taps)
        values = np.zeros((ROWS, TAPS), self.profile.dtype)
        values[:count] = taps
        positions = np.pad(np.arange(count, dtype=np.int32) + first, (0, missing))
        owner = np.pad(np.full(count, slot, np.int32), (0, missing), constant_values=-1)
        main, self.state = context_program(self.profile)(self.params, self.state, values, positions, owner)
        return np.asarray(main)[:count]

    def draft(self, *requests: Request | None) -> list[Drafts]:
        """Drafts of the requests, which stand at these places of the call; None leaves a place empty."""
        wanted = [*requests, *[None] * (SLOTS - len(requests))]
        rows = [(r.anchor, r.start, r.slot, r.first) if r else (0, 0, -1, 0) for r in wanted]
        facts = tuple(np.array(column, np.int32) for column in zip(*rows, strict=True))
        forced = np.array([r.forced if r else (-1,) * BLOCK for r in wanted], np.int32)
        drafts, self.state = block_program(self.profile)(self.params, self.state, facts, forced)
        return [jax.tree.map(lambda x, i=i: np.asarray(x)[i], drafts) for i, r in enumerate(wanted) if r]


@functools.cache
def taps_of(sequence: int) -> np.ndarray:
    """Random taps of 40 positions."""
    return np.random.default_rng(100 + sequence).standard_normal((40, TAPS)).astype(REFERENCE.dtype)


def draft_one(taps: np.ndarray, request: Request, params: Params | None = None, **settings: Any) -> Drafts:
    """One block after committing `taps` in a fresh state."""
    drafter = Drafter(params, **settings)
    drafter.commit(request.slot, taps[: request.start])
    return drafter.draft(request)[0]


def fields(drafts: Drafts) -> dict[str, np.ndarray]:
    return {field.name: getattr(drafts, field.name) for field in dataclasses.fields(drafts)}


def assert_same_drafts(got: Drafts, want: Drafts, what: str) -> None:
    assert np.isfinite(want.logits).all()
    assert np.isfinite(want.hidden.astype(np.float32)).all()
    assert_same_arrays(fields(got), fields(want), what)


def changed_rows(got: Drafts, want: Drafts) -> list[int]:
    """Rows of the block whose hidden state has other bits."""
    assert np.isfinite(got.hidden.astype(np.float32)).all()
    return np.flatnonzero((raw(got.hidden) != raw(want.hidden)).any(axis=1)).tolist()


EVERY_ROW = list(range(BLOCK))
STARTS = (1, 3, 8, 9, 20, 27, 40, 33)


# ---- what a draft writes, and on what it depends ----------------------------------------------------------------


def test_block_writes_only_its_own_keys() -> None:
    """Drafting on or off must be invisible to the backbone: only ring places beyond the committed rows change."""
    drafter = Drafter()
    for slot in (2, 5):
        drafter.commit(slot, taps_of(slot)[:20])
    before = snapshot(drafter.state)
    drafter.draft(Request(2, 7, 20), None, Request(5, 9, 20))
    after = snapshot(drafter.state)
    old, new = before.pop(".draft_window"), after.pop(".draft_window")
    assert_same_arrays(after, before, "state without the draft window")
    ring = new.shape[2]
    changed = (old != new).any(axis=(0, 3))
    assert [tuple(place) for place in np.argwhere(changed)] == [
        (slot, place) for slot in (2, 5) for place in sorted(p % ring for p in range(20, 20 + BLOCK))
    ]


def test_alone_among_others_and_in_any_slot() -> None:
    """A sequence's drafts may not depend on its place in the call, its slot or its neighbours."""
    everyone = Drafter()
    order = [3, 6, 0, 5, 1, 7, 2, 4]
    requests = []
    for place, sequence in enumerate(order):
        slot = (place * 3 + 1) % SLOTS
        everyone.commit(slot, taps_of(sequence)[: STARTS[sequence]])
        requests.append(Request(slot, 11 + sequence, STARTS[sequence]))
    together = everyone.draft(*requests)
    for place, sequence in enumerate(order):
        alone = draft_one(taps_of(sequence), Request(0, 11 + sequence, STARTS[sequence]))
        assert_same_drafts(together[place], alone, f"sequence {sequence}")
    assert len({tuple(d.token_ids.tolist()) for d in together}) > 4


def test_block_sees_itself_in_both_directions() -> None:
    """D4: the anchor moves every row, and a later row's embedding moves the first: no causal mask in a block."""
    plain = draft_one(taps_of(0), Request(0, 11, 20))
    assert changed_rows(draft_one(taps_of(0), Request(0, 12, 20)), plain) == EVERY_ROW
    embed = np.array(micro_params().embed)
    embed[CONFIG.dspark_noise_token_id] = embed[5]
    other_noise = dataclasses.replace(micro_params(), embed=embed)  # type: ignore[arg-type]
    assert changed_rows(draft_one(taps_of(0), Request(0, 11, 20), other_noise), plain) == EVERY_ROW
    assert len({row.tobytes() for row in plain.hidden}) == BLOCK  # rows of equal noise differ by position


@pytest.mark.parametrize("start", [20, 40, 9])
def test_context_is_the_window_before_the_anchor(start: int) -> None:
    """D4: the last `sliding_window` committed positions strictly before the anchor, the same for all rows."""
    request = Request(1, 11, start)
    plain = draft_one(taps_of(1), request)
    for position in (start - WINDOW - 1, start - WINDOW, start - 1):
        taps = taps_of(1).copy()
        taps[position] = -taps[position]
        rows = [] if position < start - WINDOW else EVERY_ROW
        assert changed_rows(draft_one(taps, request), plain) == rows, f"position {position}"


def test_first_hides_older_rows() -> None:
    """D12: rows below `first` may hold anything; with none left the block still sees itself."""
    start, first = 20, 16
    plain = draft_one(taps_of(1), Request(1, 11, start, first))
    for position in range(start - WINDOW, start):
        taps = taps_of(1).copy()
        taps[position] = -taps[position]
        rows = [] if position < first else EVERY_ROW
        assert changed_rows(draft_one(taps, Request(1, 11, start, first)), plain) == rows, f"position {position}"
    nothing = draft_one(taps_of(1), Request(1, 11, start, start))
    assert_same_drafts(Drafter().draft(Request(1, 11, start, start))[0], nothing, "no context at all")
    assert changed_rows(nothing, plain) == EVERY_ROW


@pytest.mark.parametrize("start", [0, 1, 3])
def test_short_history(start: int) -> None:
    """D10: before the window is full there are exactly `start` context rows; the rest of the ring is poison here."""
    drafts = draft_one(taps_of(2), Request(3, 11, start))
    assert np.isfinite(drafts.logits).all()
    for position in range(start):
        taps = taps_of(2).copy()
        taps[position] = -taps[position]
        assert changed_rows(draft_one(taps, Request(3, 11, start)), drafts) == EVERY_ROW


def test_sinks_that_take_everything_hide_the_context() -> None:
    """D10: the sink is in every stage's denominator; with it at its extreme, context and block rows are unseen."""
    stages = tuple(
        {**stage, "attn.attn_sink": np.full_like(stage["attn.attn_sink"], 1e4)} for stage in micro_params().draft
    )
    params = dataclasses.replace(micro_params(), draft=stages)
    drafts = draft_one(taps_of(0), Request(0, 11, 20), params)
    assert changed_rows(draft_one(taps_of(1), Request(0, 11, 20), params), drafts) == []
    assert changed_rows(draft_one(taps_of(0), Request(0, 12, 20), params), drafts) == [0]
    assert same(drafts.hidden[1], drafts.hidden[2])


def test_first_keys_are_those_of_the_normed_embedding() -> None:
    """D2: one-hot collapse of equal streams gives the embedding itself, bit for bit."""
    drafter = Drafter()
    drafter.commit(0, taps_of(0)[:20])
    drafter.draft(Request(0, 11, 20))
    stage, noise = micro_params().draft[0], CONFIG.dspark_noise_token_id
    setting = Setting(CONFIG, REFERENCE, Kernels(), LOCAL_EXCHANGE)

    @jit
    def keys(ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = rms_norm(micro_params().embed[ids], stage["attn_norm"], eps=CONFIG.rms_norm_eps)
        return window_record(setting, stage, x, positions, 0)

    count = ROW_TILE
    ids = np.full(count, noise, np.int32)
    ids[0] = 11
    want = np.asarray(keys(ids, np.arange(20, 20 + count, dtype=np.int32)))[:BLOCK]
    window = np.asarray(drafter.state.draft_window)
    assert same(window[0, 0, np.arange(20, 20 + BLOCK) % window.shape[2]], want)


# ---- ring ------------------------------------------------------------------------------------------------------


def ring_rows(state: State, slot: int, positions: Sequence[int]) -> np.ndarray:
    window = np.asarray(state.draft_window)
    return window[:, slot, np.asarray(positions) % window.shape[2]].copy()


@pytest.mark.parametrize("sizes", [(1,) * 40, (16, 24), (7, 30, 3)], ids=["one by one", "tiles", "odd"])
def test_commits_in_any_pieces(sizes: tuple[int, ...]) -> None:
    """D5, D6: the ring holds the newest committed rows at position modulo its length, however they came."""
    whole, pieces = Drafter(), Drafter()
    main = whole.commit(4, taps_of(3))
    start, parts = 0, []
    for size in sizes:
        parts.append(pieces.commit(4, taps_of(3)[start : start + size], start))
        start += size
    assert same(np.concatenate(parts), main)
    newest = range(40 - whole.state.draft_window.shape[2], 40)
    assert same(ring_rows(pieces.state, 4, newest), ring_rows(whole.state, 4, newest))
    other_slots = [slot for slot in range(SLOTS) if slot != 4]
    assert (np.asarray(whole.state.draft_window)[:, other_slots] == 255).all()


def test_rejected_drafts_leave_no_trace() -> None:
    """D5: blocks drafted on the way change nothing that a later block sees, whatever their tokens were."""
    taps = taps_of(5)
    plain = draft_one(taps, Request(6, 30, 31))
    for anchors in ((3, 4, 5), (50, 51, 52)):
        drafter = Drafter()
        start = 0
        for accepted, anchor in zip((10, 1, 20), anchors, strict=True):
            drafter.draft(Request(6, anchor, start))
            drafter.commit(6, taps[start : start + accepted], start)
            start += accepted
        assert_same_drafts(drafter.draft(Request(6, 30, 31))[0], plain, f"after drafts of {anchors}")
        assert_same_drafts(drafter.draft(Request(6, 30, 31))[0], plain, "drafted a second time")


# ---- tokens and confidence ---------------------------------------------------------------------------------------


def test_tokens_depend_on_earlier_tokens_only() -> None:
    """D7: a drafted token changes the next step's logits and confidence, and nothing of its own step or before."""
    plain = draft_one(taps_of(0), Request(0, 11, 20))
    assert plain.token_ids.tolist() == plain.logits.argmax(axis=1).tolist()
    for step in range(BLOCK):
        other = (int(plain.token_ids[step]) + 1) % CONFIG.vocab_size
        forced = tuple(other if i == step else int(token) for i, token in enumerate(plain.token_ids))
        drafts = draft_one(taps_of(0), Request(0, 11, 20, forced=forced))
        assert drafts.token_ids.tolist() == list(forced)
        assert same(drafts.hidden, plain.hidden)
        assert same(drafts.base_logits, plain.base_logits)
        assert np.flatnonzero(drafts.confidence != plain.confidence).tolist() == [step + 1][: BLOCK - step - 1]
        assert np.flatnonzero((drafts.logits != plain.logits).any(axis=1)).tolist() == [step + 1][: BLOCK - step - 1]


def last_stage(**leaves: Any) -> Params:
    """Micro weights with other leaves in the last stage; "__" in a name stands for "."."""
    *stages, last = micro_params().draft
    changed = {key.replace("__", "."): value for key, value in leaves.items()}
    assert changed.keys() <= last.keys()
    return dataclasses.replace(micro_params(), draft=(*stages, {**last, **changed}))


def test_confidence_of_the_first_step() -> None:
    """D7: it reads the anchor's Markov row and the hidden state; a weight of zero gives a raw value of zero."""
    last = micro_params().draft[-1]
    zero = np.zeros_like(last["confidence_head.proj"])
    silent = draft_one(taps_of(0), Request(0, 11, 20), last_stage(confidence_head__proj=zero))
    assert (silent.confidence == 0).all()
    plain = draft_one(taps_of(0), Request(0, 11, 20))
    assert (plain.confidence != 0).all()
    assert same(silent.logits, plain.logits)

    proj = np.asarray(last["confidence_head.proj"]).astype(np.float64)[0]
    embed = np.asarray(last["markov_head.embed"]).astype(np.float64)
    for step, previous in enumerate([11, *plain.token_ids[:-1].tolist()]):
        joined = np.concatenate([plain.hidden[step].astype(np.float64), embed[previous]])
        assert abs(plain.confidence[step] - joined @ proj) < 1e-4


def test_without_markov_head_tokens_are_independent() -> None:
    """D8: without its bias the logits are the base logits, and the tokens their maxima."""
    zero = np.zeros_like(micro_params().draft[-1]["markov_head.head"])
    drafts = draft_one(taps_of(0), Request(0, 11, 20), last_stage(markov_head__head=zero))
    plain = draft_one(taps_of(0), Request(0, 11, 20))
    assert same(drafts.logits, drafts.base_logits)
    assert same(drafts.base_logits, plain.base_logits)
    assert drafts.token_ids.tolist() == drafts.base_logits.argmax(axis=1).tolist()
    assert not same(plain.logits, plain.base_logits)


def test_positions_are_relative() -> None:
    """D9: without quantisers a shift of all positions moves results by rounding only."""
    taps = taps_of(7).astype(np.float32)[:21]
    results = []
    for shift in (0, 1000):
        drafter = Drafter(profile=F32_NOQ)
        drafter.commit(0, taps[:20], shift)
        results.append(drafter.draft(Request(0, 11, 20 + shift, first=shift))[0])
    scale = np.abs(results[0].hidden).max()
    assert np.abs(results[1].hidden - results[0].hidden).max() < 1e-3 * scale
    assert np.abs(results[1].base_logits - results[0].base_logits).max() < 1e-3
    # a shift of the context alone is another function
    drafter = Drafter(profile=F32_NOQ)
    drafter.commit(0, taps[1:])
    other = drafter.draft(Request(0, 11, 20))[0]
    assert np.abs(other.hidden - results[0].hidden).max() > 1e-2 * scale


# ---- limits ------------------------------------------------------------------------------------------------------


def abstract_block(config: ModelConfig, kernels: Kernels) -> Any:
    state = jax.eval_shape(lambda: init_state(config, REFERENCE, slots=2, pages=1, row_block=16))
    facts = [jax.ShapeDtypeStruct((2,), jnp.int32)] * 4
    function = functools.partial(draft_block, config=config, profile=REFERENCE, kernels=kernels)
    return jax.eval_shape(function, abstract_params(config), state, *facts)


def test_block_must_fit_the_row_tile() -> None:
    """A block in two tiles would not see itself whole."""
    with pytest.raises(NotImplementedError, match="blocks of 3 rows do not fit a row tile of 2"):
        abstract_block(CONFIG, Kernels(row_tile=2))
    drafts, _ = abstract_block(CONFIG, Kernels(row_tile=3))
    assert drafts.logits.shape == (2, BLOCK, CONFIG.vocab_size)
    assert drafts.confidence.shape == drafts.token_ids.shape == (2, BLOCK)


def test_configuration_without_draft() -> None:
    """Asking for drafts of a checkpoint without stages names the field."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0, compress_ratios=CONFIG.compress_ratios[:-1])
    with pytest.raises(ValueError, match=r"no draft stages.*num_nextn_predict_layers"):
        abstract_block(config, Kernels())
    state = jax.eval_shape(lambda: init_state(config, REFERENCE, slots=2, pages=1, row_block=16))
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    taps = jax.ShapeDtypeStruct((16, TAPS), REFERENCE.dtype)
    with pytest.raises(ValueError, match="no draft stages"):
        draft_context(abstract_params(config), state, taps, rows, rows, config=config, profile=REFERENCE)  # type: ignore[arg-type]
