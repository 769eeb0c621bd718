"""Texts that the demo model was not trained on, and its loss on them.

The rows ship with the package (`tools/demo/eval_data.py` writes them) together with what a 4-gram model counted on the
same training texts reaches on the same tokens.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from deepinfer_jax.api import score
from deepinfer_jax.model.params import Params
from deepinfer_jax.prompt import Tokenizer


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of one source.

    Attributes:
        source: name, as in the training corpus.
        rows: uint16 token ids, each row begins with BOS.
        ngram_nats: loss of the 4-gram, nats per token without BOS.
    """

    source: str
    rows: tuple[NDArray[np.uint16], ...]
    ngram_nats: float


def _data(name: str) -> bytes:
    return resources.files("deepinfer_jax.evals").joinpath(f"data/{name}").read_bytes()


@lru_cache(maxsize=1)
def load_heldout() -> tuple[str, tuple[HeldOut, ...]]:
    """(SHA-256 of the tokenizer file that the ids belong to, held-out rows of all sources)."""
    facts = json.loads(_data("heldout.json"))
    ids = np.frombuffer(lzma.decompress(_data("heldout.u16.xz")), "<u2").astype(np.uint16)
    found = []
    at = 0
    for source, known in facts["sources"].items():
        rows = []
        for length in known["rows"]:
            rows.append(ids[at : at + length])
            at += length
        found.append(HeldOut(source, tuple(rows), known["ngram_nats_per_token"]))
    if at != len(ids):
        raise ValueError(f"evals/data/heldout.u16.xz: has {len(ids)} ids, heldout.json describes {at}")
    return facts["tokenizer_sha256"], tuple(found)


def heldout_losses(params: Params, tokenizer: Tokenizer, source: HeldOut, rows: int | None) -> dict[str, float | int]:
    """Loss on the first `rows` rows of a source (None: all): tokens, nats per token, bits per byte.

    Documents that share a row are scored apart. The 4-gram's figure is always that of all rows.
    """
    begins = [np.flatnonzero(row == tokenizer.bos_id)[1:] for row in source.rows[:rows]]
    pieces = [piece for row, at in zip(source.rows, begins, strict=False) for piece in np.split(row, at)]
    chosen = [piece for piece in pieces if len(piece) > 1]
    results = score(params, [row.tolist() for row in chosen])
    total, count, size = 0.0, 0, 0
    for row, result in zip(chosen, results, strict=True):
        wanted = row[1:] != tokenizer.bos_id
        total -= float(result.token_logprobs.astype(np.float64)[wanted].sum())
        count += int(wanted.sum())
        control = set(tokenizer.control_ids.values())
        size += sum(len(tokenizer.token_bytes(int(i))) for i in row if int(i) not in control)
    return {
        "tokens": count,
        "nats_per_token": total / count,
        "bits_per_byte": total / np.log(2.0).item() / size,
        "ngram_nats_per_token": source.ngram_nats,
    }
