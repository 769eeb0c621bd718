"""Who runs in the next step: plain Python over integers, no arrays and no device.

Order and fairness. Sequences are served in order of arrival. A step first takes one row of every sequence
that generates, then prompt rows of the sequences admitted, oldest first, then admits new ones while there
are slots, rows and pages. Decode rows never wait for a prompt, and a long prompt takes only the rows that
are left, so neither blocks the other. A waiting sequence is passed over only while an older sequence is
computing the very pages it needs, or its last token is still on the device. If a generating sequence needs
a page and there is none, the newest sequence gives its pages back and is computed again later; the oldest
is never chosen, so the engine always finishes something.

What is decided here cannot change a result, only when it appears.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from deepinfer_jax.engine.pages import Node, PageStore, prefix_digests
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.state import PAGE

_LOOK_AHEAD = 64
"""Waiting sequences that are looked at in one step."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How far a row's influence reaches: one window per layer, and the n-grams of the Engram hash."""

    window: int
    encoder_layers: int
    decoder_layers: int
    lookback: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Geometry:
        """That of a model."""
        lookback = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
        return cls(config.sliding_window, config.decoder_start, config.decoder_layers, lookback)

    @property
    def encoder_shadow(self) -> int:
        """Rows after a restart whose encoder output is not exact yet."""
        return (self.window - 1) * self.encoder_layers + self.lookback

    @property
    def decoder_shadow(self) -> int:
        """Rows after the first decoder row whose decoder output is not exact yet."""
        return (self.window - 1) * self.decoder_layers


@dataclasses.dataclass(eq=False, slots=True)
class ScheduledSequence:
    """One sample's tokens and where they stand. The scheduler owns every field after `shares`.

    tokens: prompt, and what was generated; its owner appends tokens as they are read. limit: most tokens it
    may have.
    every_logit: logits of all prompt rows are wanted, so all rows run, from the start.
    shares: may use and publish cached prefixes.
    pending: tokens that are drawn, or will be in the step planned last, and are not read yet.
    computed: rows launched. prompt_end: rows that the running admission has to process before it generates.
    first_row: first row that it processes; cached: that of the first admission.
    nodes, private: its pages, shared ones first; capacity: tokens that fit them.
    decoder_from, window_start, encoder_start, page_start: see `Batch`. exact_from: first position whose
    decoder window keys are exact in every layer. snapshot_positions: page borders where a snapshot is wanted.
    """

    arrival: int
    tokens: list[int]
    limit: int
    every_logit: bool = False
    score_only: bool = False
    shares: bool = True
    slot: int = -1
    done: bool = False
    pending: int = 0
    computed: int = 0
    prompt_end: int = 0
    first_row: int = 0
    cached: int = -1
    digests: list[bytes] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)
    private: list[int] = dataclasses.field(default_factory=list)
    capacity: int = 0
    decoder_from: int = 0
    window_start: int = 0
    encoder_start: int = 0
    page_start: int = 0
    exact_from: int = 0
    snapshot_positions: list[int] = dataclasses.field(default_factory=list)
    snapshot_due: bool = False

    def pages(self) -> list[int]:
        """Numbers of its pages, in the order of its tokens."""
        return [node.page for node in self.nodes] + self.private


@dataclasses.dataclass(slots=True)
class PromptRows:
    """Prompt rows [start, start + count) of a sequence. draws: a token follows the last row."""

    sequence: ScheduledSequence
    start: int
    count: int
    draws: bool


@dataclasses.dataclass(slots=True)
class Plan:
    """One step. Order of work: snapshots (slot, number), restores (number, slot), then the rows.

    decode: sequences that run their newest token, row `computed - 1`; each draws the next one. prompt_rows: prompt
    rows. admitted: sequences whose page table is new. grown: sequences whose page table changed."""

    snapshots: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    restores: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    admitted: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    grown: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    decode: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    prompt_rows: list[PromptRows] = dataclasses.field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return len(self.decode) + sum(piece.count for piece in self.prompt_rows)


class Scheduler:
    """Slots, pages and rows of one engine. `plan` what to launch, `commit` what was read, `finish`."""

    def __init__(
        self,
        store: PageStore,
        geometry: Geometry,
        *,
        slots: int,
        rows: int,
        logit_rows: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """rows: rows of a step, at least `slots`. logit_rows: most rows whose logits are wanted in a step.
        chunk: most prompt rows of one sequence in a step."""
        self.logit_rows = rows if logit_rows is None else logit_rows
        if min(rows, self.logit_rows) < slots:
            raise ValueError(f"Scheduler: {rows} rows and {self.logit_rows} logits for {slots} slots; too few")
        self.store, self.geometry = store, geometry
        self.rows, self.chunk = rows, chunk or rows
        self.waiting: list[ScheduledSequence] = []  # by arrival, newest first: the end is the front of the queue
        self.running: list[ScheduledSequence] = []  # by arrival, oldest first
        self._free_slots = list(range(slots - 1, -1, -1))
        self._may_publish: dict[ScheduledSequence, None] = {}  # may have pages to publish
        self._other_pages: dict[ScheduledSequence, None] = {}  # own pages were replaced by equal published ones
        self._snapshots_to_take: list[tuple[int, int]] = []
        self._promised: dict[bytes, ScheduledSequence] = {}  # pages that a running sequence is going to publish
        self._logit_room = 0
        self.preemptions = 0

    # ---- requests ---------------------------------------------------------------------------------

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // PAGE)

    def check(self, sequence: ScheduledSequence) -> None:
        """ValueError if the sequence could never run."""
        needed = self.pages_of(sequence.limit)
        if needed > self.store.total:
            raise ValueError(
                f"{sequence.limit} tokens need {needed} pages of the cache, which has {self.store.total}; "
                "lower max_tokens or raise cache_bytes"
            )

    def add(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence that has passed `check`."""
        bisect.insort(self.waiting, sequence, key=lambda s: -s.arrival)

    def commit(self, sequence: ScheduledSequence) -> None:
        """The token under way was read; its owner appends it to `tokens` before the next plan."""
        sequence.pending -= 1

    def finish(self, sequence: ScheduledSequence, *, sound: bool = True) -> None:
        """The sequence is over (or cancelled): its slot and pages are free again. sound: its pages are."""
        sequence.done = True
        sequence.shares &= sound
        if sequence.slot >= 0:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.waiting or self.running)

    # ---- one step ---------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose the rows of the next step and account for them as launched."""
        for sequence in self._may_publish:
            if sequence.slot >= 0:
                self._settle(sequence)
        self._may_publish.clear()
        plan = Plan(grown=list(self._other_pages))
        self._other_pages.clear()
        room, self._logit_room = self.rows, self.logit_rows
        prefilling = False
        for sequence in list(self.running):  # the cost of a step grows with this loop
            if sequence.computed < sequence.prompt_end:
                prefilling = True
                continue
            if sequence.slot < 0 or len(sequence.tokens) + sequence.pending >= sequence.limit:
                continue
            if sequence.computed >= sequence.capacity and not self._reserve(sequence, plan):
                continue
            sequence.computed += 1
            sequence.pending += 1
            plan.decode.append(sequence)
            if not sequence.computed % PAGE:
                self._may_publish[sequence] = None
        room -= len(plan.decode)
        self._logit_room -= len(plan.decode)
        if prefilling:
            for sequence in self.running:
                if room and sequence.computed < sequence.prompt_end:
                    room -= self._prefill(plan, sequence, room)
        self._admit(plan, room)
        plan.snapshots, self._snapshots_to_take = self._snapshots_to_take, []
        return plan

    def _prefill(self, plan: Plan, sequence: ScheduledSequence, room: int) -> int:
        end = min(sequence.prompt_end, sequence.computed + min(room, self.chunk))
        mark = next((m for m in sequence.snapshot_positions if m > sequence.computed), end)
        end = min(end, mark)
        if sequence.every_logit:
            end = min(end, sequence.computed + self._logit_room)
        elif end == sequence.prompt_end and not self._logit_room:
            end -= 1
        count = end - sequence.computed
        if count == 0:
            return 0
        draws = end == sequence.prompt_end and not sequence.score_only
        plan.prompt_rows.append(PromptRows(sequence, sequence.computed, count, draws))
        self._logit_room -= count if sequence.every_logit else draws
        sequence.computed = end
        sequence.pending += draws
        sequence.snapshot_due = end in sequence.snapshot_positions
        self._may_publish[sequence] = None
        return count

    def _reserve(self, sequence: ScheduledSequence, plan: Plan) -> bool:
        """Give the sequence one more page; False: it had to give way itself."""
        while (pages := self.store.take(1)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.private += pages
        sequence.capacity += PAGE
        plan.grown.append(sequence)
        return True

    # ---- admission --------------------------------------------------------------------------------

    def _admit(self, plan: Plan, room: int) -> None:
        looked = 0
        place = len(self.waiting) - 1
        while place >= 0 and room > 0 and self._free_slots and looked < _LOOK_AHEAD:
            sequence = self.waiting[place]
            looked += 1
            if not sequence.pending and not self._promised_elsewhere(sequence):
                if not self._start(plan, sequence):
                    return  # no pages: nobody overtakes, or large sequences would wait for ever
                del self.waiting[place]
                room -= self._prefill(plan, sequence, room)
            place -= 1

    def _uses_cache(self, sequence: ScheduledSequence) -> bool:
        return sequence.shares and not sequence.every_logit

    def _promised_elsewhere(self, sequence: ScheduledSequence) -> bool:
        """An older sequence is computing the first page that this one would miss."""
        if not self._uses_cache(sequence) or not self._promised:
            return False
        sequence.digests = prefix_digests(sequence.tokens, sequence.digests)
        found = len(self.store.match(sequence.digests))
        return found < len(sequence.digests) and sequence.digests[found] in self._promised

    def _start(self, plan: Plan, sequence: ScheduledSequence) -> bool:
        """Give a slot and pages for all tokens known; False if pages are missing."""
        size = len(sequence.tokens)
        chain: list[Node] = []
        if sequence.shares:
            sequence.digests = prefix_digests(sequence.tokens, sequence.digests)
        if self._uses_cache(sequence):
            chain = self.store.match(sequence.digests)
        start, node = self._start_row(sequence, chain)
        for held in chain:
            self.store.hold(held)
        needed = self.pages_of(min(size + 1, sequence.limit)) - len(chain)
        spare = len(self.running)  # each of them may need a page soon
        pages = self.store.take(needed) if needed + spare <= self.store.available else None
        if pages is None:
            for held in reversed(chain):
                self.store.release(held)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.nodes, sequence.private = chain, pages
        sequence.capacity = (len(chain) + len(pages)) * PAGE
        sequence.prompt_end, sequence.computed, sequence.first_row = size, start, start
        self._set_rows(sequence, start, node)
        if sequence.cached < 0:
            sequence.cached = start
        if node is not None:
            self.store.touch_snapshot(node)
            plan.restores.append((node.snapshot, sequence.slot))
        bisect.insort(self.running, sequence, key=lambda s: s.arrival)
        if sequence.shares:
            for digest in sequence.digests[len(chain) :]:
                self._promised.setdefault(digest, sequence)
        plan.admitted.append(sequence)
        return True

    def _first_decoder_row(self, sequence: ScheduledSequence) -> int:
        if sequence.every_logit:
            return 0
        return max(0, len(sequence.tokens) - self.geometry.decoder_shadow - 1)

    def _start_row(self, sequence: ScheduledSequence, chain: Sequence[Node]) -> tuple[int, Node | None]:
        """Where to start: (first row to process, page whose snapshot is restored or None)."""
        size, first = len(sequence.tokens), self._first_decoder_row(sequence)
        best, best_node = 0, None
        for number, node in enumerate(chain, 1):
            border = number * PAGE
            if node.snapshot >= 0 and border < size and (node.full or border <= first):
                best, best_node = border, node
        restart = min(len(chain) * PAGE, first) - self.geometry.encoder_shadow
        restart -= restart % 2  # groups of two tokens start at even positions
        if restart > best:
            return restart, None
        return best, best_node

    def _set_rows(self, sequence: ScheduledSequence, start: int, node: Node | None) -> None:
        """Which rows run through which layers, and where snapshots are due (design 2.9)."""
        g = self.geometry
        first = self._first_decoder_row(sequence)
        shared = len(sequence.nodes) * PAGE
        last = (len(sequence.tokens) - 1) // PAGE * PAGE  # the last page border inside the prompt
        marks = {last, shared} if sequence.shares and self.store.keeps_snapshots else set()
        sequence.snapshot_positions = sorted(m for m in marks if start < m < len(sequence.tokens))
        sequence.snapshot_due = False
        sequence.page_start = shared
        sequence.encoder_start = start if node is None else 0
        exact = start if node is not None or start == 0 else start + g.encoder_shadow  # encoder output is, from here
        if last in sequence.snapshot_positions:  # a few rows more, and the snapshot serves any continuation
            first = max(exact, min(first, max(0, last - g.decoder_shadow)))
        sequence.decoder_from = sequence.window_start = first
        sequence.exact_from = first + g.decoder_shadow - (g.window - 1) if first else 0
        if node is not None and node.full and first <= start:
            sequence.decoder_from, sequence.window_start, sequence.exact_from = start, 0, 0

    # ---- leaving ----------------------------------------------------------------------------------

    def _settle(self, sequence: ScheduledSequence) -> None:
        """Publish pages that are computed and whose tokens are known; note a snapshot that is due."""
        if not sequence.shares:
            return
        known = min(sequence.computed, len(sequence.tokens)) // PAGE
        if known > len(sequence.nodes):
            sequence.digests = prefix_digests(sequence.tokens[: known * PAGE], sequence.digests)
        while len(sequence.nodes) < known:
            digest = sequence.digests[len(sequence.nodes)]
            parent = sequence.nodes[-1] if sequence.nodes else None
            page = sequence.private.pop(0)
            node = self.store.publish(parent, digest, page)
            sequence.nodes.append(node)
            if node.page != page:
                self._other_pages[sequence] = None
            self._unpromise(digest, sequence)
        if sequence.snapshot_due:
            sequence.snapshot_due = False
            border = sequence.computed
            full = border - self.geometry.window + 1 >= sequence.exact_from and border > sequence.decoder_from
            node = sequence.nodes[border // PAGE - 1]
            if node.snapshot < 0 or (full and not node.full):
                number = self.store.take_snapshot(node, full)
                if number is not None:
                    self._snapshots_to_take.append((sequence.slot, number))

    def _unpromise(self, digest: bytes, sequence: ScheduledSequence) -> None:
        if self._promised.get(digest) is sequence:
            del self._promised[digest]

    def _leave(self, sequence: ScheduledSequence) -> None:
        self._settle(sequence)
        for digest in sequence.digests[len(sequence.nodes) :]:
            self._unpromise(digest, sequence)
        for node in reversed(sequence.nodes):
            self.store.release(node)
        self.store.give(sequence.private)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.nodes, sequence.private = [], []
        sequence.slot, sequence.computed = -1, 0

    def preempt(self, sequence: ScheduledSequence) -> None:
        """Send a running sequence back to the queue; all its rows but cached ones are computed again later."""
        self._leave(sequence)
        self.preemptions += 1
        self.add(sequence)
