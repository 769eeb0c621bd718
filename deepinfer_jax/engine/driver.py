"""A simple loop over the paged state: fill free slots, run a mixed step, sample, repeat.

It has no arithmetic of its own; what it decides (who shares a step) cannot change a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax.batching import Chunk, make_batch
from deepinfer_jax.engine.programs import forward_program, sample_program, score_program
from deepinfer_jax.engine.request import Request, Sample
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.kernels.sample_tokens import Controls
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE, init_state
from deepinfer_jax.outputs import TokenEvent

ROWS = 128
"""Rows of a step. Results do not depend on it."""

SLOTS = 8
"""Samples that are in work at once."""

_MIN_PAGES = 32


def context_pages(tokens: int) -> int:
    """Pages that a sequence's table holds: few sizes, so that few programs are compiled."""
    return max(_MIN_PAGES, 1 << (-(-tokens // PAGE) - 1).bit_length())


class Driver:
    """Runs requests to their end. Use once; the device state lives as long as `run` does."""

    def __init__(self, params: Params, requests: Sequence[Request], *, kernels: Kernels | None = None) -> None:
        self.params, self.config = params, params.config
        self.kernels = kernels or Kernels()
        self.profile = numerics_profile(params.numerics)
        context, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        self.samples = [
            Sample(request, i, context, self.config.eos_token_id, vocabulary)
            for request in requests
            for i in range(1 if request.score_only else request.sampling.n)
        ]
        longest = max((s.prompt_length + s.limit for s in self.samples), default=1)
        self.pages = context_pages(longest)
        self.page_table = np.arange(SLOTS * self.pages, dtype=np.int32).reshape(SLOTS, self.pages)
        tops = [t for s in self.samples for t in (s.request.sampling.logprobs, s.request.sampling.prompt_logprobs)]
        self.top = max((t for t in tops if t is not None), default=0)

    def run(self) -> Iterator[TokenEvent]:
        """Process everything; yields tokens as they appear. Samples hold their results."""
        self.state = init_state(
            self.config, self.profile, slots=SLOTS, pages=SLOTS * self.pages, row_block=self.kernels.row_tile or ROWS
        )
        waiting = deque(self.samples)
        active: list[Sample] = []
        free = list(range(SLOTS))
        while waiting or active:
            while waiting and free:
                sample = waiting.popleft()
                sample.slot = free.pop(0)
                active.append(sample)
            yield from self._step(active)
            for sample in [s for s in active if s.finished]:
                free.append(sample.slot)
                active.remove(sample)
        del self.state

    # ---- one step -----------------------------------------------------------------------------------

    def _step(self, active: list[Sample]) -> list[TokenEvent]:
        """Decode rows first, then prompt rows in the room that is left; oldest first."""
        room = ROWS
        chosen: list[tuple[Sample, Chunk]] = []
        for sample in sorted(active, key=lambda s: len(s.tokens) - s.done > 1):
            size = min(len(sample.tokens) - sample.done, room)
            if size == 0:
                continue
            chosen.append((sample, self._chunk(sample, size)))
            room -= size
        every = any(chunk.logits == "all" for _, chunk in chosen)
        batch = make_batch(
            self.config,
            [chunk for _, chunk in chosen],
            self.page_table,
            rows=ROWS,
            logit_rows=ROWS if every else ROW_TILE,
        )
        program = forward_program(self.config, self.profile, self.kernels)
        logits, self.state = program(self.params, self.state, batch)

        drawing: list[tuple[Sample, int]] = []
        place = 0
        targets = np.zeros(logits.shape[0], np.int32)
        scored: list[tuple[Sample, int]] = []
        for sample, chunk in chosen:
            end = chunk.start + len(chunk.token_ids)
            if chunk.logits == "all":
                for position in range(chunk.start, end):
                    if position + 1 < sample.prompt_length:
                        targets[place + position - chunk.start] = sample.tokens[position + 1]
                        scored.append((sample, place + position - chunk.start))
            if chunk.logits != "none":
                place += len(chunk.token_ids) if chunk.logits == "all" else 1
                if end == len(sample.tokens) and not sample.request.score_only:
                    drawing.append((sample, place - 1))
            sample.done = end
            if sample.request.score_only and end == sample.prompt_length:
                sample.finish_reason = "length"
        if scored:
            self._score(logits, targets, scored)
        return self._draw(logits, drawing) if drawing else []

    def _chunk(self, sample: Sample, size: int) -> Chunk:
        start = sample.done
        prompt = start < sample.prompt_length
        every = prompt and sample.wants_prompt_logprobs
        last = start + size == len(sample.tokens)
        return Chunk(
            sample.slot,
            start,
            sample.tokens[start : start + size],
            sample.prompt_length,
            "all" if every else "last" if last else "none",
            replay="none" if sample.wants_prompt_logprobs else None,
        )

    def _score(self, logits: object, targets: np.ndarray, rows: list[tuple[Sample, int]]) -> None:
        result = score_program(self.kernels, self.top)(logits, targets)
        logprobs, ids, values, valid = (
            np.asarray(x) for x in (result.logprobs, result.top_ids, result.top_logprobs, result.valid)
        )
        for sample, row in rows:
            if not valid[row]:
                sample.error = "the model's logits of a prompt position are not finite"
            top = sample.request.sampling.prompt_logprobs or 0
            sample.prompt_logs.add(logprobs[row], ids[row], values[row], top)

    def _draw(self, logits: object, drawing: list[tuple[Sample, int]]) -> list[TokenEvent]:
        rows = np.zeros(ROW_TILE, np.int32)
        rows[: len(drawing)] = [row for _, row in drawing]
        samples = [sample for sample, _ in drawing]
        result = sample_program(self.kernels, self.top)(logits, rows, make_controls(samples, self.config.vocab_size))
        tokens, logprobs, ids, values, valid = (
            np.asarray(x)
            for x in (result.token_ids, result.logprobs, result.top_ids, result.top_logprobs, result.valid)
        )
        events = []
        for i, sample in enumerate(samples):
            if not valid[i]:
                sample.error = f"the model's logits after {len(sample.tokens)} tokens are not finite or all masked"
                continue
            sampling = sample.request.sampling
            if sampling.logprobs is not None:
                sample.logs.add(logprobs[i], ids[i], values[i], sampling.logprobs)
            text = sample.accept(int(tokens[i]))
            logprob = None if sampling.logprobs is None else float(logprobs[i])
            reason = sample.finish_reason
            events.append(TokenEvent(sample.request.index, sample.index, int(tokens[i]), text, logprob, reason))
        return events


def make_controls(samples: Sequence[Sample], vocabulary: int, rows: int = ROW_TILE) -> Controls:
    """Sampling arrays of `rows` rows; rows beyond the samples are neutral and their result is not used."""

    def column(name: str, fill: float, dtype: type) -> np.ndarray:
        values = np.full(rows, fill, dtype)
        values[: len(samples)] = [getattr(s.request.sampling, name) for s in samples]
        return values

    seed = np.zeros((rows, 2), np.uint32)
    index, position = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    processed = np.zeros(rows, bool)
    for i, sample in enumerate(samples):
        number = sample.request.sampling.seed
        seed[i] = number >> 32, number & 0xFFFFFFFF
        index[i], position[i] = sample.index, len(sample.tokens)
        processed[i] = sample.request.sampling.logprobs_mode == "processed"
    controls = {
        "temperature": column("temperature", 0, np.float32),
        "top_k": column("top_k", 0, np.int32),
        "top_p": column("top_p", 1, np.float32),
        "min_p": column("min_p", 0, np.float32),
        "seed": seed,
        "sample_index": index,
        "position": position,
        "processed": processed,
        "repetition": column("repetition_penalty", 1, np.float32),
        "presence": column("presence_penalty", 0, np.float32),
        "frequency": column("frequency_penalty", 0, np.float32),
    }
    masks = [sample.allowed() for sample in samples]
    if any(mask is not None for mask in masks):
        allowed = np.ones((rows, -(-vocabulary // 32) * 32), bool)
        for i, mask in enumerate(masks):
            if mask is not None:
                allowed[i, :vocabulary] = mask
        words = np.packbits(allowed, axis=1, bitorder="little")
        controls["mask"] = words.view("<u4").astype(np.uint32)
    widest = max((len(s.request.sampling.logit_bias) for s in samples), default=0)
    if widest:
        size = 1 << (widest - 1).bit_length()
        ids, bias = np.full((rows, size), -1, np.int32), np.zeros((rows, size), np.float32)
        for i, sample in enumerate(samples):
            for j, (token, value) in enumerate(sample.request.sampling.logit_bias):
                ids[i, j], bias[i, j] = token, value
        controls["bias_ids"], controls["bias"] = ids, bias
    if any(sample.penalized for sample in samples):
        seen, counts = np.zeros((rows, vocabulary), bool), np.zeros((rows, vocabulary), np.int32)
        for i, sample in enumerate(samples):
            if sample.counts is not None:
                seen[i], counts[i] = sample.prompt_seen, sample.counts
        controls["prompt_seen"], controls["output_counts"] = seen, counts
    return Controls(**controls)  # type: ignore[arg-type]
