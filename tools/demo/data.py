"""Training batches of the demo model: a deterministic mix of texts (`corpus.py`) and tasks (`deepinfer_jax.evals`).

    for tokens, weights in Prefetch(data_dir, seed=0, first_block=0, blocks=40, steps=50, workers=14):
        ...  # uint16 and uint8 [50, 128, 1025]

`batch_block` is a pure function of its arguments, and `Prefetch` gives exactly its blocks, made by worker processes.
Row layout: BOS of a document, documents one after the other, cut at the end of the row. weights[..., i] is ten times
the loss weight of token i as a *target*: 10 for answers with their EOS and for texts of which there is enough, 9 for
texts that are seen many times, 1 for prompts, 0 for BOS.

Importing this module imports neither jax nor the package; the workers import both, with jax held to the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16]
Weights = NDArray[np.uint8]
Rng = np.random.Generator

ROOT = Path(__file__).resolve().parents[2]
BOS = 0
FULL, REPEATED, PROMPT, SKIP = 10, 9, 1, 0

TEXTS: Mapping[str, float] = {
    "austen": 7.5, "shakespeare": 7.5, "mobydick": 2.0, "milton": 1.3, "devil": 0.8,
    "sqlite": 4.0, "pydoc": 5.5, "postgres": 4.0, "wordnet": 10.0,
}  # fmt: skip
"""Share of all tokens, in percent, of each source of text."""

SEEN_ONCE = frozenset({"wordnet"})
"""Texts that are large enough for their share: their tokens weigh as much as answers, others a little less, by which
training knows which texts have to be made harder to learn by heart."""

TASKS: Mapping[str, float] = {
    "continue": 2.5, "define": 6.0, "recall": 12.0, "record": 4.0, "tool_call": 5.0, "talk": 0.3,
    "add": 6.0, "add_thinking": 4.0, "effort": 4.1, "multiply": 2.5,
    "copy": 2.2, "reverse": 2.8, "sort": 2.0, "count": 1.3, "extreme": 1.0, "weekday": 1.7,
}  # fmt: skip
"""Share of all tokens, in percent, of each task, prompts included."""

MIX: Mapping[str, float] = {**TEXTS, **TASKS}

_SHORT_DOCUMENTS = ("wordnet", "devil")
_STYLES = {"austen": "Austen", "shakespeare": "Shakespeare", "mobydick": "Melville", "milton": "Milton"}
_FILL = 0.15
"""Share of a row of tasks that a text fills up, since the next item did not fit."""


class Texts:
    """Token files of the texts of one split. Read once, used by every batch."""

    def __init__(self, data_dir: Path, split: str) -> None:
        found = sorted(data_dir.glob(f"*.{split}.npy"))
        if not found:
            raise ValueError(f"{data_dir}: holds no *.{split}.npy; give the folder `tokens` that corpus.py wrote")
        self.ids: dict[str, Tokens] = {path.name.split(".")[0]: np.load(path) for path in found}
        self.starts = {name: np.load(data_dir / f"{name}.{split}.starts.npy") for name in self.ids}

    def slice(self, source: str, rng: Rng, length: int) -> Tokens:
        """BOS and the text from a random start on, `length` tokens together, documents one after the other."""
        ids, starts = self.ids[source], self.starts[source]
        if source in _SHORT_DOCUMENTS:
            pieces, missing = [], length
            while missing > 0:
                number = int(rng.integers(len(starts)))
                begin = int(starts[number])
                end = int(starts[number + 1]) if number + 1 < len(starts) else len(ids)
                piece = ids[begin:end] if ids[begin] == BOS else np.append(np.uint16(BOS), ids[begin:end])
                pieces.append(piece[:missing])
                missing -= len(pieces[-1])
            return np.concatenate(pieces)
        begin = int(starts[rng.integers(len(starts))])
        begin = min(begin, max(len(ids) - length, 0))
        piece = ids[begin : begin + length]
        if piece[0] != BOS:
            piece = np.append(np.uint16(BOS), piece[: length - 1])
        if len(piece) < length:  # a source shorter than a row
            piece = np.append(piece, self.slice(source, rng, length - len(piece)))
        return piece


@lru_cache(maxsize=4)
def _texts(data_dir: str, split: str) -> Texts:
    return Texts(Path(data_dir), split)


def _weights_of_text(source: str, ids: Tokens) -> Weights:
    return np.where(ids == BOS, SKIP, FULL if source in SEEN_ONCE else REPEATED).astype(np.uint8)


def _continuation(texts: Texts, rng: Rng) -> tuple[list[int], list[int]]:
    """A conversation that asks for the next sentences of a passage."""
    from deepinfer_jax.demo import load_tokenizer
    from deepinfer_jax.prompt import encode_conversation

    tokenizer = load_tokenizer()
    source = list(_STYLES)[int(rng.integers(len(_STYLES)))]
    for _ in range(1000):
        ids = texts.slice(source, rng, int(rng.integers(100, 240)))
        text = tokenizer.decode(int(i) for i in ids[1:] if i != BOS).replace("\ufffd", "").strip()
        words = text.split(" ")
        head = " ".join(words[: int(rng.integers(8, 25))])
        tail = text[len(head) :].strip()
        end = max(tail.rfind(mark) for mark in (".", "!", "?"))
        if end > 40:
            message = {"role": "user", "content": f"Continue in the style of {_STYLES[source]}: {head}"}
            prompt = encode_conversation(tokenizer, [message], thinking=False).token_ids
            answer = tokenizer.encode(tail[: end + 1], control_tokens=False)
            return list(prompt), [*answer, tokenizer.eos_id]
    raise ValueError(f"{source}: found no passage with whole sentences")


def _item(texts: Texts, name: str, split: str, rng: Rng) -> tuple[list[int], list[int]]:
    if name == "continue":
        return _continuation(texts, rng)
    from deepinfer_jax.evals.tasks import encode_item, make_item

    return encode_item(make_item(name, split, rng))  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _mean_lengths(data_dir: str) -> dict[str, float]:
    """Mean tokens of an item of each task, from a fixed sample."""
    rng = np.random.Generator(np.random.PCG64(20261130))
    texts = _texts(data_dir, "train")
    return {
        name: float(np.mean([sum(map(len, _item(texts, name, "train", rng))) for _ in range(60)])) for name in TASKS
    }


class _Writer:
    """Fills rows one after the other."""

    def __init__(self, texts: Texts, mix: Mapping[str, float], lengths: Mapping[str, float], rng: Rng) -> None:
        unknown = sorted(set(mix) - set(MIX))
        if unknown:
            raise ValueError(f"mix: {unknown[0]!r} is no source and no task; known: {', '.join(MIX)}")
        self._texts, self._rng = texts, rng
        sources = np.array([mix.get(name, 0.0) for name in TEXTS])
        tasks = np.array([mix.get(name, 0.0) for name in TASKS])
        whole = sources.sum() + tasks.sum()
        text_share = sources.sum() / whole
        items = tasks / np.array([lengths[name] for name in TASKS])
        self._sources = np.cumsum(sources / sources.sum()) if sources.sum() else None
        self._tasks = np.cumsum(items / items.sum()) if items.sum() else None
        fill = _FILL if self._sources is not None else 0.0
        self._text_rows = max(0.0, (text_share - fill) / (1 - fill)) if self._tasks is not None else 1.0
        self._pending: tuple[list[int], list[int]] | None = None

    def _text(self, length: int) -> tuple[Tokens, Weights]:
        if self._sources is None:
            return np.full(length, BOS, np.uint16), np.zeros(length, np.uint8)
        source = list(TEXTS)[min(int(np.searchsorted(self._sources, self._rng.random())), len(TEXTS) - 1)]
        ids = self._texts.slice(source, self._rng, length)
        return ids, _weights_of_text(source, ids)

    def row(self, length: int) -> tuple[Tokens, Weights]:
        """One row of `length` tokens."""
        if self._rng.random() < self._text_rows:
            return self._text(length)
        ids: list[int] = []
        weights: list[int] = []
        while True:
            assert self._tasks is not None
            if self._pending is None:
                name = list(TASKS)[min(int(np.searchsorted(self._tasks, self._rng.random())), len(TASKS) - 1)]
                self._pending = _item(self._texts, name, "train", self._rng)
            prompt, answer = self._pending
            if len(ids) + len(prompt) + len(answer) > length and ids:
                break
            self._pending = None
            ids += [*prompt, *answer]
            weights += [SKIP, *[PROMPT] * (len(prompt) - 1), *[FULL] * len(answer)]
            if len(ids) >= length:
                break
        row, row_weights = np.array(ids[:length], np.uint16), np.array(weights[:length], np.uint8)
        if len(row) < length:
            more, more_weights = self._text(length - len(row))
            row, row_weights = np.append(row, more), np.append(row_weights, more_weights)
        return row, row_weights


def batch_step(
    data_dir: str | Path,
    seed: int,
    block: int,
    step: int,
    rows: int = 128,
    length: int = 1024,
    mix: Mapping[str, float] = MIX,
) -> tuple[Tokens, Weights]:
    """One step of `batch_block`: (tokens uint16 [rows, length + 1], weights uint8 [rows, length + 1])."""
    folder = str(data_dir)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, block, step])))
    writer = _Writer(_texts(folder, "train"), mix, _mean_lengths(folder), rng)
    made = [writer.row(length + 1) for _ in range(rows)]
    return np.stack([row for row, _ in made]), np.stack([weights for _, weights in made])


def batch_block(
    data_dir: str | Path,
    seed: int,
    block: int,
    steps: int,
    rows: int = 128,
    length: int = 1024,
    mix: Mapping[str, float] = MIX,
) -> tuple[Tokens, Weights]:
    """Batches of `steps` consecutive steps, a pure function of the arguments.

    Args:
        data_dir: the folder `tokens` of `corpus.py`.
        seed, block: which part of the endless stream of batches.
        mix: share of all tokens of each text and task (any unit); what is left out is not used.
    Returns: (tokens uint16 [steps, rows, length + 1], weights uint8 of the same shape, in tenths).
    Raises: ValueError for a folder without tokens or an unknown name in the mix.
    """
    made = [batch_step(data_dir, seed, block, step, rows, length, mix) for step in range(steps)]
    return np.stack([tokens for tokens, _ in made]), np.stack([weights for _, weights in made])


def heldout_block(
    data_dir: str | Path, source: str, seed: int = 0, rows: int = 16, length: int = 1024
) -> tuple[Tokens, Weights]:
    """Rows that are never trained: held-out text of a source, or items of a task's test split, packed.

    Args:
        source: a key of TEXTS, or a task other than "continue". Weights of prompts are 0 here.
    Returns: (tokens uint16 [rows, length + 1], weights uint8 [rows, length + 1]).
    """
    texts = _texts(str(data_dir), "heldout")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1 << 30])))
    tokens = np.zeros((rows, length + 1), np.uint16)
    weights = np.zeros((rows, length + 1), np.uint8)
    for row in range(rows):
        if source in TEXTS:
            tokens[row] = texts.slice(source, rng, length + 1)
            weights[row] = _weights_of_text(source, tokens[row])
            continue
        at = 0
        while True:
            prompt, answer = _item(texts, source, "test", rng)
            end = at + len(prompt) + len(answer)
            if end > length + 1:
                break
            tokens[row, at:end] = [*prompt, *answer]
            weights[row, at + len(prompt) : end] = FULL
            at = end
    return tokens, weights


class Prefetch:
    """Iterator over (tokens, weights) of `batch_block` for consecutive blocks, made by worker processes.

    A worker makes one step at a time, so a block is ready soon even if it is the first. At most `ahead` blocks are
    held. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        data_dir: str | Path,
        seed: int,
        first_block: int,
        blocks: int,
        steps: int,
        rows: int = 128,
        workers: int = 14,
        *,
        length: int = 1024,
        mix: Mapping[str, float] = MIX,
        ahead: int = 4,
    ) -> None:
        self._shape = (steps, rows, length + 1)
        self._next, self._end, self._ahead = first_block, first_block + blocks, ahead
        self._job = (first_block, 0)  # the next one that a worker takes
        self._done: dict[int, tuple[Tokens, Weights, list[int]]] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        facts = {"data_dir": str(data_dir), "seed": seed, "rows": rows, "length": length, "mix": dict(mix)}
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(facts)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(workers)
        ]
        self._threads = [threading.Thread(target=self._serve, args=(p,), daemon=True) for p in self._processes]
        for thread in self._threads:
            thread.start()

    def _take(self) -> tuple[int, int] | None:
        """The next (block, step) once it may be made, None at the end."""
        with self._changed:
            while self._job[0] < self._end and self._job[0] >= self._next + self._ahead and self._error is None:
                self._changed.wait()
            block, step = self._job
            if block >= self._end or self._error is not None:
                return None
            self._job = (block, step + 1) if step + 1 < self._shape[0] else (block + 1, 0)
            if block not in self._done:
                self._done[block] = (np.empty(self._shape, np.uint16), np.empty(self._shape, np.uint8), [])
            return block, step

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            while (job := self._take()) is not None:
                block, step = job
                process.stdin.write(f"{block} {step}\n".encode())
                process.stdin.flush()
                tokens, weights, finished = self._done[block]
                for target in (tokens[step], weights[step]):
                    data = process.stdout.read(target.nbytes)
                    if len(data) != target.nbytes:
                        raise RuntimeError(f"a data worker ended in block {block}, step {step}; its message is above")
                    target[...] = np.frombuffer(data, target.dtype).reshape(target.shape)
                with self._changed:
                    finished.append(step)
                    self._changed.notify_all()
        except (OSError, RuntimeError, ValueError) as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[Tokens, Weights]]:
        return self

    def __next__(self) -> tuple[Tokens, Weights]:
        if self._next >= self._end:
            self.close()
            raise StopIteration
        with self._changed:
            while self._error is None and (
                self._next not in self._done or len(self._done[self._next][2]) < self._shape[0]
            ):
                self._changed.wait()
            if self._error is not None:
                raise RuntimeError("the workers that make batches failed") from self._error
            tokens, weights, _ = self._done.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        return tokens, weights

    def close(self) -> None:
        """End the workers."""
        with self._changed:
            self._error = self._error or RuntimeError("closed")
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # a job that was not sent
                    pipe.close()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _work(facts: dict[str, Any]) -> None:
    """A worker process: reads "block step" lines and writes the bytes of tokens, then of weights."""
    for line in sys.stdin:
        block, step = map(int, line.split())
        tokens, weights = batch_step(
            facts["data_dir"], facts["seed"], block, step, facts["rows"], facts["length"], facts["mix"]
        )
        sys.stdout.buffer.write(tokens.tobytes() + weights.tobytes())
        sys.stdout.buffer.flush()


def main() -> None:
    """Command line: --worker is used by Prefetch; otherwise measures one process and shows what a mix consists of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder tokens of corpus.py")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(json.loads(arguments.worker))
        return
    import time

    batch_step(arguments.folder, 0, 0, 0, rows=1)  # reads the files
    begin = time.perf_counter()
    tokens, weights = batch_step(arguments.folder, 0, 0, 1)
    seconds = time.perf_counter() - begin
    print(f"{tokens.size / seconds:.0f} tokens/s in one process")
    for weight in (SKIP, PROMPT, REPEATED, FULL):
        print(f"weight {weight:2}: {np.mean(weights == weight):.3f} of the tokens")


if __name__ == "__main__":
    main()
