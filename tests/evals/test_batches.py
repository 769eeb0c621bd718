"""Training batches: a pure function of seed and block, rows and weights as the training expects them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.demo import load_tokenizer
from deepinfer_jax.evals.words import WORDS
from deepinfer_jax.outputs import Logprobs

from .demo_tools import FOLDER, tool

data = tool("data")

ROWS, LENGTH = 6, 256
STOP = load_tokenizer().encode(".", control_tokens=False)[0]


def word_of(number: int, split: str) -> int:
    """The token that fills the documents of a source."""
    word = WORDS[number + 20 * (split == "train")]
    return load_tokenizer().encode(f" {word}", control_tokens=False)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of every source: documents of 100 tokens, one word of the source and some full stops."""
    path = tmp_path_factory.mktemp("tokens")
    for number, name in enumerate(data.TEXTS):
        for split in ("train", "heldout"):
            document = np.full(100, word_of(number, split), np.uint16)
            document[10::10] = STOP
            document[0] = data.BOS
            np.save(path / f"{name}.{split}.npy", np.tile(document, 40))
            starts = np.arange(0, 4000, 50)
            np.save(path / f"{name}.{split}.starts.npy", starts.astype(np.int32))
    return path


def test_pure_function_of_seed_block_and_step(folder: Path) -> None:
    """Guards against batches that change when a training goes on after an interruption."""
    first = data.batch_block(folder, 3, 2, 2, ROWS, LENGTH)
    again = data.batch_block(str(folder), 3, 2, 2, ROWS, LENGTH)
    assert first[0].shape == first[1].shape == (2, ROWS, LENGTH + 1)
    assert (first[0].dtype, first[1].dtype) == (np.uint16, np.uint8)
    for got, want in zip(again, first, strict=True):
        assert (got == want).all()
    step = data.batch_step(folder, 3, 2, 1, ROWS, LENGTH)
    assert (step[0] == first[0][1]).all()
    for seed, block in ((4, 2), (3, 1)):
        assert (data.batch_step(folder, seed, block, 1, ROWS, LENGTH)[0] != step[0]).any()
    assert (first[0][0] != first[0][1]).any()


def test_rows_and_weights(folder: Path) -> None:
    """Guards against loss on the start of a document, on nothing, or in full on what a user says."""
    tokens, weights = data.batch_block(folder, 0, 0, 4, ROWS, LENGTH)
    assert (tokens[..., 0] == data.BOS).all()
    assert (weights[tokens == data.BOS] == 0).all()
    assert (weights[tokens == load_tokenizer().eos_id] == 10).all()
    assert set(np.unique(weights)) == {0, 1, 9, 10}
    user, assistant = (load_tokenizer().control_id(f"<｜{name}｜>") for name in ("User", "Assistant"))
    assert (weights[(tokens == user) | (tokens == assistant)] == 1).all()


def test_held_out_texts_are_never_trained(folder: Path) -> None:
    """Guards against mixing up the files of the two splits."""
    tokens, _ = data.batch_block(folder, 0, 0, 4, ROWS, LENGTH, data.TEXTS)
    assert set(np.unique(tokens)) <= {data.BOS, STOP, *(word_of(i, "train") for i in range(9))}
    for number, source in enumerate(data.TEXTS):
        tokens, weights = data.heldout_block(folder, source, rows=2, length=LENGTH)
        assert set(np.unique(tokens)) == {data.BOS, STOP, word_of(number, "heldout")}
        assert ((weights == (10 if source in data.SEEN_ONCE else 9)) == (tokens != data.BOS)).all()


def test_held_out_items(folder: Path) -> None:
    """Guards against counting prompts in the loss on answers."""
    tokens, weights = data.heldout_block(folder, "sort", rows=2, length=LENGTH)
    assert set(np.unique(weights)) == {0, 10}
    text = load_tokenizer().decode(int(i) for i in tokens[0][weights[0] == 10])
    for answer in text.split("<｜end▁of▁sentence｜>")[:-1]:
        numbers = list(map(int, answer.split()))
        assert numbers == sorted(numbers)
        assert numbers


def test_mix(folder: Path) -> None:
    """Guards against shares that are not followed: of tokens, not of items."""
    mix = {"austen": 50.0, "sort": 25.0, "tool_call": 25.0}
    tokens, _ = data.batch_block(folder, 0, 0, 8, 16, 1024, mix)
    assert 0.35 < np.mean(tokens == word_of(0, "train")) < 0.55  # a tenth of the text is full stops
    decoded = [load_tokenizer().decode(row.tolist()) for row in tokens.reshape(-1, 1025)]
    sorts, calls = (sum(row.count(word) for row in decoded) for word in ("Sort:", "## Tools"))
    assert 5 < sorts / calls < 20, "a sort item is about a tenth of a tool call"


def test_bad_arguments(folder: Path, tmp_path: Path) -> None:
    """Guards against silently training on something else."""
    with pytest.raises(ValueError, match="'shakespere' is no source and no task"):
        data.batch_step(folder, 0, 0, 0, ROWS, LENGTH, {"shakespere": 1.0})
    with pytest.raises(ValueError, match=r"holds no \*.train.npy"):
        data.batch_step(tmp_path, 0, 0, 0)


def test_workers_make_the_same_batches(folder: Path) -> None:
    """Guards against an order of blocks, or of steps inside a block, that depends on which worker is faster."""
    with data.Prefetch(folder, 1, 5, 3, 3, ROWS, 2, length=LENGTH, ahead=1) as prefetch:
        blocks = list(prefetch)
        processes = prefetch._processes
    assert len(blocks) == 3
    for number, (tokens, weights) in enumerate(blocks):
        want_tokens, want_weights = data.batch_block(folder, 1, 5 + number, 3, ROWS, LENGTH)
        assert (tokens == want_tokens).all()
        assert (weights == want_weights).all()
    assert all(process.poll() is not None for process in processes), "workers outlive the training"


def test_failing_workers_are_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a training that waits forever for a worker that has died."""
    with (
        data.Prefetch(tmp_path, 0, 0, 1, 1, workers=1) as prefetch,
        pytest.raises(RuntimeError, match="batches failed"),
    ):
        next(prefetch)
    assert "holds no *.train.npy" in capfd.readouterr().err


def test_import_brings_no_jax() -> None:
    """Guards against a data process that takes the accelerator's memory before the training does."""
    code = "import sys, data; sys.exit('jax' in sys.modules or 'deepinfer_jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=False).returncode == 0


def test_comparison_counts_weighted_tokens_of_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison of exported weights that counts prompts or padding, or joins documents."""
    compare = tool("compare")
    scored: list[list[int]] = []

    def score(_: object, documents: list[list[int]], top_k: int, progress: bool) -> list[Logprobs]:
        assert top_k == 1
        assert not progress
        scored.extend(documents)
        results = []
        for document in documents:
            token = np.array([-float(i) for i in document[1:]], np.float32)
            best = np.where(np.array(document[1:]) % 2 == 0, token, 0).astype(np.float32)
            results.append(Logprobs(token, np.zeros((len(token), 1), np.int32), best[:, None]))
        return results

    monkeypatch.setattr("deepinfer_jax.score", score, raising=False)
    tokens = np.array([[0, 3, 4, 1, 0, 5, 6, 0, 0]], np.uint16)
    weights = np.array([[0, 0, 10, 10, 0, 0, 10, 0, 0]], np.uint8)
    loss, right = compare.exported_figures(None, tokens, weights)
    assert scored == [[0, 3, 4, 1], [0, 5, 6]]
    assert loss == pytest.approx((4 + 1 + 6) / 3)
    assert right == pytest.approx(2 / 3)  # of 4, 1 and 6 the even ones
