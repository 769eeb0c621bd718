"""The engine: many requests at once, each one's results independent of all others."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from deepinfer_jax.engine.controls import ControlArrays
from deepinfer_jax.engine.implementations import choose_kernels
from deepinfer_jax.engine.pages import PageStore
from deepinfer_jax.engine.progress import Progress
from deepinfer_jax.engine.request import Request, Sample
from deepinfer_jax.engine.runner import TOPS, Launched, Runner
from deepinfer_jax.engine.runtime_config import RuntimeConfig, runtime_sizes
from deepinfer_jax.engine.scheduler import Geometry, Plan, ScheduledSequence, Scheduler
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.kernels.sample_tokens import Sampled
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGE
from deepinfer_jax.outputs import Logprobs, RequestOutput, TokenEvent, Usage
from deepinfer_jax.prompt import Tokenizer
from deepinfer_jax.requests import Options, Prompt, Sampling, make_requests, request_output
from deepinfer_jax.sampling_params import SamplingParams


class GenerationError(ValueError):
    """Some prompts failed. `outputs` holds every result, in input order; failed ones carry `error`."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclasses.dataclass(eq=False, slots=True)
class _Work:
    """One sample in the engine."""

    sample: Sample
    sequence: ScheduledSequence
    call: Call


@dataclasses.dataclass(slots=True)
class _Step:
    """A step whose results have not been read."""

    draws: list[_Work]
    drawn: Sampled | None
    scored: list[tuple[_Work, int, int, int]]
    scores: Sampled | None


class Call:
    """Requests that were submitted together. Iterate over it for events, or ask for `outputs()`.

    The engine works while you do either, on the requests of every call; results do not depend on it.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], errors: Mapping[int, str], count: int) -> None:
        self._engine = engine
        self._requests, self._errors, self._count = list(requests), dict(errors), count
        self.works: list[_Work] = []
        self.events: deque[TokenEvent] = deque()
        self.keeps_events = True
        self.open = 0

    @property
    def done(self) -> bool:
        return self.open == 0

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they appear, until every request has ended. Stopping early cancels nothing."""
        while True:
            while self.events:
                yield self.events.popleft()
            if self.done:
                return
            self._engine.step()

    def cancel(self, prompt_index: int | None = None) -> None:
        """End one request, or all, at once; what they have generated stays."""
        for work in self.works:
            if prompt_index is None or work.sample.request.index == prompt_index:
                self._engine._cancel(work)

    def outputs(self, *, errors: Literal["raise", "return"] = "raise") -> list[RequestOutput]:
        """Results in input order; runs the engine until there are all.

        Raises: GenerationError if a request failed and errors is "raise".
        """
        while not self.done:
            self._engine.step()
        groups: dict[int, list[Sample]] = {request.index: [] for request in self._requests}
        for work in self.works:
            groups[work.sample.request.index].append(work.sample)
        good = {request.index: request_output(request, groups[request.index]) for request in self._requests}
        empty = Usage(0, 0)
        results = [
            good[i] if i in good else RequestOutput(None, (), (), empty, None, self._errors[i])
            for i in range(self._count)
        ]
        failed = [output.error for output in results if output.error]
        if failed and errors == "raise":
            raise GenerationError("; ".join(failed[:3]), results)
        return results


class Engine:
    """Keeps a model's caches on the device and serves requests; use it as a context manager.

    One thread drives it: by iterating over a `Call`, by `generate`, or by `step`. Which requests run
    together changes speed only, never a token or a log-probability.

        with Engine(params) as engine:
            engine.warmup()
            outputs = engine.generate(["Hello", "Once upon a time"], temperature=0, max_tokens=50)
    """

    def __init__(
        self, params: Params, runtime: RuntimeConfig | None = None, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """params: from `load_params`. runtime: sizes. tokenizer: default: the one loaded with params."""
        self.params, self.config = params, params.config
        self.runtime = runtime or RuntimeConfig()
        self._tokenizer = tokenizer
        profile = numerics_profile(params.numerics)
        kernels = self.runtime.kernels or choose_kernels(params, profile, self.runtime.implementation)
        self.sizes = runtime_sizes(self.runtime, kernels, self.config, profile)
        self._runner = Runner(params, self.sizes, kernels)
        self.store = PageStore(self.sizes.pages, self.sizes.snapshots)
        self.scheduler = Scheduler(
            self.store,
            Geometry.of(self.config),
            slots=self.sizes.slots,
            rows=self.sizes.rows[-1],
            logit_rows=self.sizes.logit_rows,
            chunk=self.runtime.prefill_chunk,
        )
        self._controls = ControlArrays(self.config.vocab_size)
        self.stats = EngineStats()
        self._works: dict[ScheduledSequence, _Work] = {}
        self._arrivals = itertools.count()
        self._unread: _Step | None = None
        self._closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel everything and free the device memory of the caches."""
        if self._closed:
            return
        self.cancel_all()
        self._closed = True
        self._unread = None
        self._runner.close()

    def cancel_all(self) -> None:
        """Cancel every request of every call."""
        for work in list(self._works.values()):
            self._cancel(work)

    # ---- requests -----------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Sequence[Any] = (),
        thinking: bool | None = None,
        reasoning_effort: int | str | None = None,
        errors: Literal["raise", "return"] = "raise",
        **changes: Any,
    ) -> Call:
        """Queue requests; arguments as `deepinfer_jax.generate`. Nothing runs until the call is asked.

        Raises: TypeError for an unknown keyword; ValueError naming the prompts for bad input, unless
            errors is "return".
        """
        options = Options(tools, thinking, reasoning_effort)
        requests, bad, count = make_requests(self.params, prompts, sampling, self._tokenizer, options, changes)
        return self._submit(requests, bad, count, errors)

    def _submit(
        self, requests: Sequence[Request], bad: dict[int, str], count: int, errors: str, what: str = "prompt"
    ) -> Call:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if errors not in ("raise", "return"):
            raise ValueError(f"errors={errors!r} is unknown; choose 'raise' or 'return'")
        vocabulary, context = self.config.vocab_size, self.config.max_position_embeddings
        prepared: list[tuple[Request, list[tuple[Sample, ScheduledSequence]]]] = []
        for request in requests:
            samples = 1 if request.score_only else request.sampling.n
            made = [Sample(request, i, context, self.config.eos_token_id, vocabulary) for i in range(samples)]
            try:
                prepared.append((request, [(sample, self._sequence(sample)) for sample in made]))
            except ValueError as error:
                bad[request.index] = f"prompt {request.index}: {error}"
        if bad and errors == "raise":
            raise ValueError("; ".join(bad[i] for i in sorted(bad)[:3]).replace("prompt ", f"{what} "))
        call = Call(self, [request for request, _ in prepared], bad, count)
        for _, pairs in prepared:
            for sample, sequence in pairs:
                work = _Work(sample, sequence, call)
                call.works.append(work)
                call.open += 1
                self._works[sequence] = work
                self.scheduler.add(sequence)
        return call

    def _sequence(self, sample: Sample) -> ScheduledSequence:
        score_only = sample.request.score_only
        limit = sample.prompt_length if score_only else sample.prompt_length + sample.limit
        room = self.sizes.table_pages * PAGE
        if limit > room:
            raise ValueError(
                f"{sample.prompt_length} prompt tokens and max_tokens {sample.limit} exceed the engine's context of "
                f"{room}; lower max_tokens or raise RuntimeConfig.context"
            )
        sequence = ScheduledSequence(
            arrival=next(self._arrivals),
            tokens=sample.tokens,
            limit=limit,
            every_logit=sample.wants_prompt_logprobs,
            score_only=score_only,
            shares=self.runtime.prefix_sharing,
        )
        self.scheduler.check(sequence)
        return sequence

    def _cancel(self, work: _Work) -> None:
        if not work.sample.finished:
            work.sample.cancel()
            self._end(work)

    def _end(self, work: _Work) -> None:
        self.scheduler.finish(work.sequence, sound=work.sample.error is None)
        work.sample.cached_tokens = max(0, work.sequence.cached)
        del self._works[work.sequence]
        work.call.open -= 1

    # ---- the loop -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch one step and read the one before; False if there is nothing left to do.

        The forward pass is launched before the tokens of the step before are read: it takes them from
        the device. What depends on them (masks, penalties, ends) is worked out while it runs; only the
        sampling launch waits for that.
        """
        start = time.perf_counter()
        plan = self.scheduler.plan()
        launched = self._runner.forward(plan) if plan.decode or plan.prompt_rows else None
        planned = time.perf_counter()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read(unread)
        read = time.perf_counter()
        if launched is not None:
            self._unread = self._launch_sampling(launched)
            if not self.runtime.overlap:
                last, self._unread = self._unread, None
                self._read(last)
        self._count(plan, planned - start, read - planned, time.perf_counter() - read)
        return launched is not None or unread is not None

    def _launch_sampling(self, launched: Launched) -> _Step:
        # A sequence may have ended when the step before was read.
        places = [pair for pair in launched.draws if not pair[0].done]
        draws = [self._works[sequence] for sequence, _ in places]
        drawn = scores = None
        if draws:
            controls = self._controls.make([work.sample for work in draws], self._runner.sample_rows(launched))
            top = max(w.sample.request.sampling.logprobs or 0 for w in draws)
            drawn = self._runner.sample(launched, places, controls, top)
        scored = [(self._works[s], *rest) for s, *rest in launched.scored if s in self._works]
        if scored:
            targets = np.zeros(launched.logits.shape[0], np.int32)
            used = 0
            for work, first, place, count in scored:
                known = work.sample.tokens[first + 1 : first + 1 + count]
                targets[place : place + len(known)] = known
                used = max(used, place + count)
            top = max(w.sample.request.sampling.prompt_logprobs or 0 for w, *_ in scored)
            scores = self._runner.score(launched, targets, used, top)
        return _Step(draws, drawn, scored, scores)  # type: ignore[arg-type]

    def _read(self, step: _Step) -> None:
        """Wait for a step's tokens and account for them."""
        if step.scores is not None:
            self._read_scores(step)
        if step.drawn is None:
            return
        self.stats.generated_tokens += len(step.draws)
        tokens, valid = np.asarray(step.drawn.token_ids).tolist(), np.asarray(step.drawn.valid).tolist()
        logs: Any = None
        for i, work in enumerate(step.draws):
            sample = work.sample
            self.scheduler.commit(work.sequence)
            if sample.finish_reason is not None:  # cancelled
                self.stats.generated_tokens -= 1
                continue
            if not valid[i]:
                self.stats.generated_tokens -= 1
                sample.error = f"the model's logits after {len(sample.tokens)} tokens are not finite or all masked"
                self._end(work)
                continue
            token = tokens[i]
            logprob = None
            if sample.request.sampling.logprobs is not None:
                if logs is None:
                    logs = jax.device_get((step.drawn.logprobs, step.drawn.top_ids, step.drawn.top_logprobs))
                sample.logs.add(logs[0][i], logs[1][i], logs[2][i], sample.request.sampling.logprobs)
                logprob = float(logs[0][i])
            text = sample.accept(token)
            reason = sample.finish_reason
            if work.call.keeps_events:
                index = sample.request.index
                work.call.events.append(TokenEvent(index, sample.index, token, text, logprob, reason))
            if reason is not None:
                self._end(work)

    def _read_scores(self, step: _Step) -> None:
        assert step.scores is not None
        scores = step.scores
        logprobs, ids, values, valid = jax.device_get(
            (scores.logprobs, scores.top_ids, scores.top_logprobs, scores.valid)
        )
        for work, first, place, count in step.scored:
            sample = work.sample
            if sample.finished:
                continue
            for position in range(first, min(first + count, sample.prompt_length - 1)):
                if position != len(sample.prompt_logs):
                    continue  # known from before the sequence was sent back
                row = place + position - first
                if not valid[row]:
                    sample.error = f"the model's logits after {position + 1} tokens are not finite"
                    break
                sample.prompt_logs.add(
                    logprobs[row], ids[row], values[row], sample.request.sampling.prompt_logprobs or 0
                )
            if len(sample.prompt_logs) == sample.prompt_length - 1:
                work.sequence.every_logit = False  # if it has to start again, nothing of that is needed
                if sample.request.score_only and first + count >= sample.prompt_length:
                    sample.finish_reason = "length"
            if sample.finished:
                self._end(work)

    def _count(self, plan: Plan, planning: float, reading: float, sampling: float) -> None:
        s = self.stats
        s.steps += bool(plan.decode or plan.prompt_rows)
        s.decode_rows += len(plan.decode)
        s.prompt_rows += sum(piece.count for piece in plan.prompt_rows)
        for sequence in plan.admitted:
            s.cached_rows += sequence.first_row
        s.preemptions = self.scheduler.preemptions
        s.plan_seconds += planning
        s.read_seconds += reading
        s.sampling_seconds += sampling
        s.peak_pages = max(s.peak_pages, self.sizes.pages - self.store.available)

    # ---- whole calls --------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile everything that requests can need; afterwards nothing is compiled.

        Except: more than 32 biased tokens in a request.
        """
        for size in self.sizes.rows:
            launched = self._runner.forward_empty(size)
            rows = self._runner.sample_rows(launched)
            for top in TOPS:
                for shaped in (False, True):
                    self._runner.sample(launched, [], self._controls.neutral(shaped, rows), top)
                self._runner.score(launched, np.zeros(launched.logits.shape[0], np.int32), 0, top)
        self._runner.copy_nothing()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        progress: bool | None = None,
        errors: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[RequestOutput]:
        """As `deepinfer_jax.generate`, on this engine's caches."""
        call = self.submit(prompts, sampling, errors=errors, **options)
        return self._finish(call, on_token, progress, errors)

    def run(
        self,
        requests: Sequence[Request],
        bad: dict[int, str],
        count: int,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        progress: bool | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """`generate` for requests that are checked already (`requests.make_requests`)."""
        return self._finish(self._submit(requests, bad, count, errors), on_token, progress, errors)

    def events(self, requests: Sequence[Request], count: int) -> Iterator[TokenEvent]:
        """`stream` for requests that are checked already."""
        return self._events(self._submit(requests, {}, count, "raise"))

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None, **options: Any
    ) -> Iterator[TokenEvent]:
        """As `deepinfer_jax.stream`, on this engine's caches. Closing the iterator cancels what is left."""
        return self._events(self.submit(prompts, sampling, **options))

    def _events(self, call: Call) -> Iterator[TokenEvent]:
        try:
            yield from call
            call.outputs()  # raises what failed
        finally:
            call.cancel()

    def score(
        self,
        sequences: str | Sequence[int] | Sequence[str | Sequence[int]],
        top_k: int = 0,
        *,
        progress: bool | None = None,
    ) -> list[Logprobs]:
        """As `deepinfer_jax.score`, on this engine."""
        sampling = SamplingParams(prompt_logprobs=top_k, max_tokens=1)
        requests, bad, count = make_requests(
            self.params, sequences, sampling, self._tokenizer, Options(), {}, whole=True
        )
        requests = [dataclasses.replace(request, score_only=True) for request in requests]
        call = self._submit(requests, bad, count, "raise", "sequence")
        outputs = self._finish(call, None, progress, "raise")
        return [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]

    def _finish(
        self, call: Call, on_token: Callable[[TokenEvent], None] | None, progress: bool | None, errors: Any
    ) -> list[RequestOutput]:
        call.keeps_events = on_token is not None
        with Progress(progress, len(call.works)) as bar:
            try:
                while not call.done:
                    self.step()
                    while call.events:
                        event = call.events.popleft()
                        if on_token is not None:
                            on_token(event)
                    bar.show(len(call.works) - call.open, self.stats.generated_tokens)
            finally:
                call.cancel()  # an exception or a KeyboardInterrupt: give slots and pages back
        return call.outputs(errors=errors)
