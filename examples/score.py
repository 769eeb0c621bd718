"""Which continuation does the model find most likely? Compare log-probabilities, as evaluations do.

python examples/score.py [MODEL]
"""

from __future__ import annotations

import sys

import numpy as np

import deepinfer_jax
from deepinfer_jax.load import tokenizer_of


def main(model: str = "demo") -> None:
    """Score each continuation after the same beginning; print sums and means over its own tokens."""
    params = deepinfer_jax.load_params(model)
    tokenizer = tokenizer_of(params)
    if tokenizer is None:
        raise ValueError(f"{model}: has no tokenizer.json, so texts cannot be scored")
    beginning = "The cat sat on the"
    continuations = [" mat", " roof of the house", " xylophone"]

    # Beginning and continuation are encoded apart, so that the border between them is a border of tokens.
    start = [tokenizer.bos_id, *tokenizer.encode(beginning, control_tokens=False)]
    endings = [tokenizer.encode(text, control_tokens=False) for text in continuations]
    scores = deepinfer_jax.score(params, [start + ending for ending in endings])

    rows = []
    for text, ending, score in zip(continuations, endings, scores, strict=True):
        own = score.token_logprobs[-len(ending) :].astype(np.float64)
        rows.append((float(own.sum()), float(own.mean()), text))
    for total, mean, text in sorted(rows, reverse=True):
        print(f"{total:9.3f} total  {mean:8.3f} per token  {beginning + text!r}")


if __name__ == "__main__":
    from deepinfer_jax.runtime import use_compile_cache

    use_compile_cache()  # the first run compiles, later ones start in seconds
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
