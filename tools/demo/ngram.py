"""Witten-Bell 4-gram baseline on the corpus of `corpus.py`: what counting alone reaches on held-out text.

    python tools/demo/ngram.py DIR

One model is counted over the training tokens of all sources, and one over each source alone; the better of the two is
the baseline of that source. Prints nats per token and bits per byte of the held-out tokens (BOS is not predicted).

P(w | h) = (c(h, w) + t(h) P(w | h')) / (c(h) + t(h)), t(h) = number of different words after h, h' = h without its
oldest token, and the uniform distribution below the unigrams.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ORDER = 4
VOCABULARY = 3072
BOS = 0


def _keys(ids: NDArray[np.uint16], length: int) -> NDArray[np.int64]:
    """One number for the `length` tokens that end at each place; BOS pads the beginning."""
    padded = np.concatenate([np.full(length - 1, BOS, np.int64), ids.astype(np.int64)])
    key = np.zeros(len(ids), np.int64)
    for i in range(length):
        key = key * VOCABULARY + padded[i : i + len(ids)]
    return key


def _look_up(values: NDArray[np.int64], counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts of the wanted keys, 0 for the unseen; `values` ascend."""
    place = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[place] == wanted, counts[place], 0)


class NgramModel:
    """Counts of 1 to ORDER tokens."""

    def __init__(self, ids: NDArray[np.uint16]) -> None:
        self._tables = []
        for length in range(1, ORDER + 1):
            grams, counts = np.unique(_keys(ids, length), return_counts=True)
            contexts, first = np.unique(grams // VOCABULARY, return_index=True)
            kinds = np.diff(np.append(first, len(grams)))
            totals = np.add.reduceat(counts, first)
            self._tables.append((grams, counts, contexts, totals, kinds))

    def log_probabilities(self, ids: NDArray[np.uint16]) -> NDArray[np.float64]:
        """Natural logarithm of the probability of each token given those before it."""
        probability = np.full(len(ids), 1.0 / VOCABULARY)
        for length, (grams, counts, contexts, totals, kinds) in enumerate(self._tables, start=1):
            keys = _keys(ids, length)
            history = keys // VOCABULARY
            count = _look_up(grams, counts, keys)
            total = _look_up(contexts, totals, history)
            kind = _look_up(contexts, kinds, history)
            mixed = (count + kind * probability) / np.maximum(total + kind, 1)
            probability = np.where(total > 0, mixed, probability)
        return np.log(probability)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out of corpus.py")
    folder = parser.parse_args().folder
    tokens = folder / "tokens"
    sources = json.loads((tokens / "manifest.json").read_text())["sources"]
    train = {name: np.load(tokens / f"{name}.train.npy") for name in sources}
    everything = NgramModel(np.concatenate(list(train.values())))
    print(f"{'source':12} {'tokens':>8} {'own':>7} {'all':>7} {'best':>7} {'bits/byte':>9}")
    for name, facts in sources.items():
        held = np.load(tokens / f"{name}.heldout.npy")
        predicted = held != BOS
        losses = [-model.log_probabilities(held)[predicted].mean() for model in (NgramModel(train[name]), everything)]
        best = min(losses)
        bits = best * predicted.sum() / math.log(2) / facts["heldout_bytes"]
        count = int(predicted.sum())
        print(f"{name:12} {count:8} {losses[0]:7.3f} {losses[1]:7.3f} {best:7.3f} {bits:9.3f}")


if __name__ == "__main__":
    main()
