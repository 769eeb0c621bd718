"""The scheduler against a model of a device: no deadlock, no page written twice, nobody starves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.pages import PageStore
from deepinfer_jax.engine.scheduler import Geometry, Plan, PromptRows, ScheduledSequence, Scheduler
from deepinfer_jax.model.state import PAGE

pytestmark = pytest.mark.fast

GEOMETRY = Geometry(window=8, encoder_layers=5, decoder_layers=4, lookback=3)


@dataclasses.dataclass(frozen=True)
class Request:
    """prompt: tokens. length: tokens after which it ends by itself. limit: most new tokens."""

    prompt: tuple[int, ...]
    length: int
    limit: int
    every_logit: bool


def generated(sequence: ScheduledSequence, position: int) -> int:
    """The token that the model device draws for a position."""
    return 1000 + position + sequence.tokens[0]


class Device:
    """Follows plans like the engine; what a page or ring holds is a hash of all tokens up to there."""

    def __init__(self, slots: int, pages: int, snapshots: int, rows: int, chunk: int | None, overlap: bool) -> None:
        self.store = PageStore(pages, snapshots)
        self.scheduler = Scheduler(self.store, GEOMETRY, slots=slots, rows=rows, chunk=chunk)
        self.slots, self.rows, self.overlap = slots, rows, overlap
        self.pages: dict[tuple[int, int], int] = {}  # (page, offset) -> hash
        self.rings: dict[int, int] = {}  # slot -> hash up to the newest row
        self.saved: dict[int, int] = {}
        self.hashes: dict[ScheduledSequence, list[int]] = {}
        self.ends: dict[ScheduledSequence, int] = {}
        self.unread: list[ScheduledSequence] = []
        self.steps = 0

    def add(self, number: int, request: Request) -> ScheduledSequence:
        sequence = ScheduledSequence(
            number, list(request.prompt), len(request.prompt) + request.limit, request.every_logit
        )
        self.scheduler.check(sequence)
        self.scheduler.add(sequence)
        self.ends[sequence] = len(request.prompt) + min(request.length, request.limit)
        return sequence

    def prefix(self, sequence: ScheduledSequence, size: int) -> int:
        """Hash of the first `size` tokens, those that are not read yet included."""
        hashes = self.hashes.setdefault(sequence, [0])
        while len(hashes) <= size:
            position = len(hashes) - 1
            known = position < len(sequence.tokens)
            hashes.append(hash((hashes[-1], sequence.tokens[position] if known else generated(sequence, position))))
        return hashes[size]

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.steps += 1
        self.launch(plan)
        drawn = plan.decode + [piece.sequence for piece in plan.prompt_rows if piece.draws]
        unread, self.unread = self.unread, drawn
        self.read(unread)
        if not self.overlap:
            unread, self.unread = self.unread, []
            self.read(unread)

    def read(self, unread: list[ScheduledSequence]) -> None:
        for sequence in unread:
            self.scheduler.commit(sequence)
            if sequence.done:
                continue
            sequence.tokens.append(generated(sequence, len(sequence.tokens)))
            if len(sequence.tokens) >= self.ends[sequence]:
                self.scheduler.finish(sequence)

    def launch(self, plan: Plan) -> None:
        assert plan.rows <= self.rows
        pieces = [PromptRows(s, s.computed - 1, 1, True) for s in plan.decode] + plan.prompt_rows
        assert len({piece.sequence.slot for piece in pieces}) == len(pieces)
        for slot, number in plan.snapshots:
            self.saved[number] = self.rings[slot]
        for number, slot in plan.restores:
            self.rings[slot] = self.saved[number]
        for piece in pieces:
            sequence, end = piece.sequence, piece.start + piece.count
            assert 0 <= sequence.slot < self.slots
            before = self.prefix(sequence, piece.start)
            if piece.start == sequence.first_row and sequence.first_row:
                restored = any(slot == sequence.slot for _, slot in plan.restores)
                assert restored == (sequence.encoder_start == 0)
                assert not restored or self.rings[sequence.slot] == before
            elif piece.start:
                assert self.rings[sequence.slot] == before
            pages = sequence.pages()
            assert len(pages) * PAGE >= end
            assert sequence.page_start % PAGE == 0
            for position in range(max(piece.start, sequence.page_start), end):
                self.pages[pages[position // PAGE], position % PAGE] = self.prefix(sequence, position + 1)
            for page in range(end // PAGE):  # what this step reads was written for these very tokens
                assert self.pages[pages[page], PAGE - 1] == self.prefix(sequence, (page + 1) * PAGE)
            self.rings[sequence.slot] = self.prefix(sequence, end)
        held: dict[int, int] = {}
        for sequence in self.scheduler.running:
            for page in sequence.private:
                held[page] = held.get(page, 0) + 1
        assert all(count == 1 for count in held.values())
        assert not set(held) & {node.page for node in self.store.nodes()}

    def run(self, limit: int) -> None:
        while self.scheduler.busy or self.unread:
            self.step()
            assert self.steps < limit, "no progress"


@st.composite
def requests(draw: Any) -> list[Request]:
    """Requests whose prompts share prefixes around page borders."""
    result = []
    for _ in range(draw(st.integers(1, 10))):
        stem = draw(st.sampled_from([0, 0, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE]))
        tail = draw(st.integers(1, 60))
        kind, other = draw(st.integers(0, 1)), draw(st.integers(2, 4))
        prompt = (kind,) * stem + (other,) * tail
        result.append(Request(prompt, draw(st.integers(1, 200)), draw(st.integers(1, 140)), draw(st.booleans())))
    return result


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    requests(),
    st.integers(1, 5),
    st.integers(5, 12),
    st.integers(0, 3),
    st.integers(5, 200),
    st.sampled_from([None, 1, 7, 64]),
    st.booleans(),
    st.data(),
)
def test_everything_ends_and_the_books_balance(
    work: list[Request],
    slots: int,
    pages: int,
    snapshots: int,
    rows: int,
    chunk: int | None,
    overlap: bool,
    data: Any,
) -> None:
    """Guards against deadlock, lost or doubly written pages, and reading what was never written."""
    device = Device(slots, pages, snapshots, rows, chunk, overlap)
    sequences = [device.add(i, request) for i, request in enumerate(work)]
    disturb = data.draw(st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(0, 9)), max_size=6))
    while device.scheduler.busy or device.unread:
        for at, cancel, which in disturb:
            if at != device.steps:
                continue
            sequence = sequences[which % len(sequences)]
            if cancel and not sequence.done:
                device.scheduler.finish(sequence)
            elif sequence.slot >= 0:
                device.scheduler.preempt(sequence)
        device.step()
        if device.steps % 16 == 0:
            device.store.check()
        assert device.steps < 60_000, "no progress"
    device.store.check()
    assert device.store.available == pages
    assert all(sequence.done for sequence in sequences)
    assert not device.scheduler._promised
    assert sorted(device.scheduler._free_slots) == list(range(slots))


def test_decode_rows_do_not_wait_for_a_long_prompt() -> None:
    """Guards against head-of-line blocking: a long prompt takes only the rows that are left."""
    device = Device(slots=4, pages=64, snapshots=0, rows=16, chunk=None, overlap=False)
    short = device.add(0, Request((1, 2, 3), 100, 100, False))
    device.step()
    device.add(1, Request((5,) * 2000, 1, 1, False))
    for _ in range(50):
        before = len(short.tokens)
        device.step()
        assert len(short.tokens) == before + 1


def test_short_requests_run_beside_a_long_prompt() -> None:
    """Guards fairness: later requests start as soon as there are a slot, rows and pages."""
    device = Device(slots=3, pages=64, snapshots=0, rows=32, chunk=16, overlap=True)
    device.add(0, Request((5,) * 2000, 1, 1, False))
    later = device.add(1, Request((7,) * 10, 5, 5, False))
    for _ in range(12):
        device.step()
    assert later.done


def test_the_oldest_is_never_sent_back() -> None:
    """Guards progress: whoever came first keeps its pages when memory runs out."""
    device = Device(slots=4, pages=4, snapshots=0, rows=8, chunk=None, overlap=True)
    first = device.add(0, Request((1,) * 100, 400, 400, False))
    for number in range(1, 4):
        device.add(number, Request((number + 1,) * 60, 300, 300, False))
    while not first.done:
        device.step()
        assert first.slot >= 0 or device.steps == 1 or first.done
    device.run(20_000)
    assert device.scheduler.preemptions > 0


def test_equal_prompts_are_computed_once() -> None:
    """Guards sharing in flight: followers wait for the leader's pages instead of computing them again."""
    device = Device(slots=4, pages=64, snapshots=8, rows=64, chunk=None, overlap=True)
    prompt = (1,) * 600
    sequences = [device.add(i, Request(prompt, 3, 3, False)) for i in range(4)]
    device.run(1000)
    assert [s.cached for s in sequences] == [0, 512, 512, 512]


def test_what_can_never_run_is_refused() -> None:
    """Guards the queue against a request that would wait for ever."""
    scheduler = Scheduler(PageStore(2, 0), GEOMETRY, slots=1, rows=8)
    with pytest.raises(ValueError, match="need 3 pages of the cache, which has 2; lower max_tokens or raise"):
        scheduler.check(ScheduledSequence(0, [1] * 10, 3 * PAGE))
    with pytest.raises(ValueError, match="too few"):
        Scheduler(PageStore(2, 0), GEOMETRY, slots=9, rows=8)


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_encoder_snapshot_serves_from_the_exact_distance(distance: int) -> None:
    """Guards exactness: N - h >= (window-1)*decoder_layers + 1, otherwise the start must be earlier."""
    device = Device(slots=2, pages=64, snapshots=8, rows=64, chunk=None, overlap=False)
    shared = (1,) * (2 * PAGE)
    # Diverge at 2 * PAGE, far from the end of either prompt: that snapshot holds encoder rings only.
    device.add(0, Request(shared + (2,) * 500, 1, 1, False))
    device.run(100)
    device.add(1, Request(shared + (3,) * 500, 1, 1, False))
    device.run(200)
    [node] = [n for n in device.store.nodes() if n.snapshot >= 0 and not n.full]
    tail = GEOMETRY.decoder_shadow + 1 + distance
    third = device.add(2, Request(shared + (4,) * tail, 1, 1, False))
    device.run(300)
    restart = 2 * PAGE + min(0, distance) - GEOMETRY.encoder_shadow
    assert third.cached == (2 * PAGE if distance >= 0 else restart - restart % 2)
    assert node.snapshot >= 0
