"""Compare the exported model with the training forward pass that its weights came from.

    PYTHONPATH=. python tools/demo/compare.py OUT2/log.jsonl --data DATA [--model FOLDER] [--source NAME ...]

log.jsonl is phase 2's: its last measurement of every source was made with fake-quantised float32 weights on the rows
of `data.heldout_block`. The exported model is scored on the same rows, each document by itself, and the two losses and
shares of right tokens are printed side by side.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import data
import numpy as np

import deepinfer_jax
from deepinfer_jax.model.params import Params

TRAINED_ROWS = 16


def trained_figures(log: Path) -> dict[str, dict[str, Any]]:
    """The last measurement of each source."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["source"]: line for line in lines if line.get("event") == "heldout"}


def exported_figures(params: Params, tokens: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """(loss, share of right tokens) over all tokens with a weight; rows [R, T] hold documents that begin with BOS.

    Padding after a row's last document has no weight.
    """
    documents, counted = [], []
    for row, weight in zip(tokens, weights, strict=True):
        begins = np.flatnonzero(row == data.BOS)
        for piece, wanted in zip(np.split(row, begins)[1:], np.split(weight > 0, begins)[1:], strict=True):
            if wanted.any():
                documents.append(piece.tolist())
                counted.append(wanted[1:])
    results = deepinfer_jax.score(params, documents, top_k=1, progress=False)
    chosen = np.concatenate(counted)
    logprobs = np.concatenate([result.token_logprobs for result in results]).astype(np.float64)
    best = np.concatenate([result.top_logprobs[:, 0] for result in results])
    return float(-logprobs[chosen].mean()), float((logprobs[chosen] >= best[chosen]).mean())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder `tokens` of corpus.py")
    parser.add_argument("--model", default="demo", help="checkpoint folder; default: the one that ships")
    parser.add_argument("--source", action="append", help="only these texts or tasks")
    arguments = parser.parse_args()
    params = deepinfer_jax.load_params(arguments.model)
    print(f"{'source':14}{'trained':>10}{'exported':>10}{'right':>9}{'exported':>10}{'points':>8}")
    for source, figures in trained_figures(arguments.log).items():
        if arguments.source and source not in arguments.source:
            continue
        loss, right = exported_figures(params, *data.heldout_block(arguments.data, source, rows=TRAINED_ROWS))
        points = 100 * (right - figures["accuracy"])
        print(
            f"{source:14}{figures['loss']:10.4f}{loss:10.4f}{figures['accuracy']:9.4f}{right:10.4f}{points:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
