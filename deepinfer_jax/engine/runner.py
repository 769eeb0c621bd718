"""The device side of an engine: state, compiled programs, and the arrays of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.engine.programs import (
    FROM_DEVICE,
    empty_rings,
    forward_program,
    restore_program,
    sample_program,
    save_program,
    score_program,
)
from deepinfer_jax.engine.runtime_config import Sizes
from deepinfer_jax.engine.scheduler import Plan, ScheduledSequence
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.kernels.sample_tokens import Controls, Sampled
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, init_state

TOPS = (0, 8, 64)
"""How many most likely tokens the compiled programs report; a step uses the smallest that is enough."""


@dataclasses.dataclass(slots=True)
class Launched:
    """A forward step under way. draws: (sequence, place of its logits). scored: (sequence, first position,
    place of its logits, count) of prompt rows whose logits are wanted."""

    logits: jax.Array
    draws: list[tuple[ScheduledSequence, int]]
    scored: list[tuple[ScheduledSequence, int, int, int]]


class Runner:
    """Launches programs in order. Everything is asynchronous except reading results."""

    def __init__(self, params: Params, sizes: Sizes, kernels: Kernels) -> None:
        self.params, self.config, self.sizes, self.kernels = params, params.config, sizes, kernels
        self._profile = numerics_profile(params.numerics)
        self._step = forward_program(self.config, self._profile, kernels)
        self._sample_rows = -(-sizes.slots // ROW_TILE) * ROW_TILE
        self._state = init_state(
            self.config,
            self._profile,
            slots=sizes.slots,
            pages=sizes.pages,
            row_block=kernels.most_rows(sizes.rows[-1]),
        )
        self._rings = empty_rings(self._state, sizes.snapshots) if sizes.snapshots else None
        self._newest = jnp.zeros(sizes.slots, jnp.int32)
        self._page_table = np.full((sizes.slots, sizes.table_pages), -1, np.int32)
        self._starts = np.zeros((3, sizes.slots), np.int32)  # window_start, encoder_start, page_start
        # What the last steps were given, on the device, while it still holds: handing over an array costs the host
        # more than a kernel.
        self._tables: list[jax.Array] | None = None
        self._places: tuple[Any, tuple[jax.Array, ...]] = (None, ())  # of the rows that drew: what, and its arrays
        self._repeated: list[ScheduledSequence] = []  # the last step's sequences, if each ran a token from the device
        self._repeated_batch: Batch | None = None
        self._row_is_used = np.zeros(0, np.int32)

    def close(self) -> None:
        """Free the device memory of the state."""
        for leaf in jax.tree.leaves((self._state, self._rings, self._newest)):
            if not leaf.is_deleted():
                leaf.delete()

    # ---- launches -----------------------------------------------------------------------------------

    def forward(self, plan: Plan) -> Launched:
        """Launch snapshots, restores and the rows of a plan."""
        for slot, number in plan.snapshots:
            assert self._rings is not None
            self._rings = save_program()(self._rings, self._state, np.int32(slot), np.int32(number))
        for number, slot in plan.restores:
            assert self._rings is not None
            self._state = restore_program()(self._state, self._rings, np.int32(number), np.int32(slot))
        self._update_tables(plan)
        batch, draws, scored = self._batch(plan)
        outputs, self._state = self._step(self.params, self._state, batch, self._newest)
        return Launched(outputs.logits, draws, scored)

    def forward_empty(self, rows: int) -> Launched:
        """Launch a step of `rows` rows without a valid one: compiles it and changes nothing."""
        self._update_tables(Plan())
        batch, draws, scored = self._batch(Plan(), rows)
        outputs, self._state = self._step(self.params, self._state, batch, self._newest)
        return Launched(outputs.logits, draws, scored)

    def copy_nothing(self) -> None:
        """Compile the snapshot programs: a slot is saved and restored unchanged."""
        if self._rings is not None:
            zero = np.int32(0)
            self._rings = save_program()(self._rings, self._state, zero, zero)
            self._state = restore_program()(self._state, self._rings, zero, zero)

    def sample(
        self, launched: Launched, draws: Sequence[tuple[ScheduledSequence, int]], controls: Controls, top: int
    ) -> Sampled:
        """Draw the tokens of some of a step's rows; they become the newest ones of their slots.

        controls: of `sample_rows(launched)` rows.
        """
        count, size = len(draws), self.sample_rows(launched)
        key = size, [(place, sequence.slot) for sequence, place in draws]
        if self._places[0] != key:
            rows = np.zeros(size, np.int32)
            slots = np.full(size, self.sizes.slots, np.int32)
            rows[:count] = [place for place, _ in key[1]]
            slots[:count] = [slot if slot >= 0 else self.sizes.slots for _, slot in key[1]]
            self._places = key, jax.device_put((rows, slots, np.int32(count)))
        rows, slots, used = self._places[1]
        program = sample_program(self.kernels, self._top(top))
        drawn, self._newest = program(launched.logits, self._newest, rows, slots, controls, used)
        for result in (drawn.token_ids, drawn.valid):
            result.copy_to_host_async()  # on its way while the next step is launched
        return drawn

    def score(self, launched: Launched, targets: np.ndarray, used: int, top: int) -> Sampled:
        """Log-probabilities of given tokens at the first `used` rows of a step's logits."""
        return score_program(self.kernels, self._top(top))(launched.logits, targets, np.int32(used))

    def sample_rows(self, launched: Launched) -> int:
        """Rows of the arrays of `sample`: no more can draw than there are slots, or logits."""
        return min(self._sample_rows, launched.logits.shape[0])

    def _top(self, wanted: int) -> int:
        enough = next((top for top in TOPS if top >= wanted), wanted)
        return min(enough, self.config.vocab_size)

    # ---- arrays -------------------------------------------------------------------------------------

    def _update_tables(self, plan: Plan) -> None:
        if plan.admitted or plan.grown:
            self._tables = None
        for sequence in plan.admitted:
            self._starts[:, sequence.slot] = sequence.window_start, sequence.encoder_start, sequence.page_start
        for sequence in (*plan.admitted, *plan.grown):
            if sequence.slot >= 0:
                pages = sequence.pages()
                self._page_table[sequence.slot, : len(pages)] = pages
                self._page_table[sequence.slot, len(pages) :] = -1
        if self._tables is None:
            # Copies: a step under way must not see the next one's changes.
            self._tables = jax.device_put([self._page_table.copy(), *(row.copy() for row in self._starts)])

    def _batch(
        self, plan: Plan, rows: int = 0
    ) -> tuple[Batch, list[tuple[ScheduledSequence, int]], list[tuple[ScheduledSequence, int, int, int]]]:
        decode = plan.decode
        if not plan.prompt_rows and decode and decode == self._repeated and decode[0].computed > len(decode[0].tokens):
            # The sequences of the step before once more, each with the token that step draws: only positions move.
            assert self._repeated_batch is not None
            self._repeated_batch = dataclasses.replace(
                self._repeated_batch, positions=self._repeated_batch.positions + self._row_is_used
            )
            return self._with_tables(self._repeated_batch), list(zip(decode, range(len(decode)), strict=True)), []
        ids = [FROM_DEVICE if s.computed > len(s.tokens) else s.tokens[s.computed - 1] for s in decode]
        positions = [s.computed - 1 for s in decode]
        slots = [s.slot for s in decode]
        kept, wanted = list(range(len(decode))), list(range(len(decode)))
        draws = list(zip(decode, wanted, strict=True))
        scored: list[tuple[ScheduledSequence, int, int, int]] = []
        for piece in plan.prompt_rows:
            sequence, start, count, row = piece.sequence, piece.start, piece.count, len(ids)
            ids.extend(sequence.tokens[start : start + count])
            positions.extend(range(start, start + count))
            slots.extend([sequence.slot] * count)
            dropped = min(count, max(0, sequence.decoder_from - start))
            if sequence.every_logit:
                scored.append((sequence, start, len(wanted), count))
                wanted.extend(range(len(kept), len(kept) + count))
            elif piece.draws:
                wanted.append(len(kept) + count - dropped - 1)
            kept.extend(range(row + dropped, row + count))
            if piece.draws:
                draws.append((sequence, len(wanted) - 1))
        size = rows or next(count for count in self.sizes.rows if count >= len(ids))
        batch = Batch(
            token_ids=_padded(ids, size, 0),
            positions=_padded(positions, size, 0),
            sequence=_padded(slots, size, -1),
            decoder_rows=_padded(kept, size, -1),
            logit_rows=_padded(wanted, min(size, self.sizes.logit_rows), -1),
            page_table=self._page_table,  # type: ignore[arg-type]
            window_start=self._starts[0],  # type: ignore[arg-type]
            encoder_start=self._starts[1],  # type: ignore[arg-type]
            page_start=self._starts[2],  # type: ignore[arg-type]
            image_mask=np.zeros(size, bool),  # type: ignore[arg-type]
        )
        repeats = bool(decode) and not plan.prompt_rows and all(token == FROM_DEVICE for token in ids)
        if repeats:
            self._row_is_used = (batch.sequence >= 0).astype(np.int32)  # type: ignore[union-attr]
            same = ("token_ids", "sequence", "decoder_rows", "logit_rows", "image_mask")
            kept_arrays = jax.device_put({name: getattr(batch, name) for name in same})
            batch = dataclasses.replace(batch, **kept_arrays)
        self._repeated, self._repeated_batch = (list(decode), batch) if repeats else ([], None)
        return self._with_tables(batch), draws, scored

    def _with_tables(self, batch: Batch) -> Batch:
        """The batch with the tables that hold now; copies, since a step under way must not see later changes."""
        assert self._tables is not None
        page_table, window_start, encoder_start, page_start = self._tables
        return dataclasses.replace(
            batch,
            page_table=page_table,
            window_start=window_start,
            encoder_start=encoder_start,
            page_start=page_start,
        )


def _padded(values: list[int], size: int, fill: int) -> Any:
    result = np.full(size, fill, np.int32)
    result[: len(values)] = values
    return result
