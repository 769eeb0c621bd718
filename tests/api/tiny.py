"""A tiny model with the demo tokenizer, and small helpers of the API tests.

Compiling is most of the cost of these tests. They therefore share one configuration, `TOP` as the only number of
reported tokens, and sampling parameters that use either none of the optional sampling arrays or all of them.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax
from deepinfer_jax import Completion, ModelConfig, Params, RequestOutput, SamplingParams, TokenEvent, demo
from deepinfer_jax.checkpoint import save_checkpoint, token_classes
from deepinfer_jax.prompt import Tokenizer

TOP = 16

CONFIG = dataclasses.replace(
    ModelConfig.micro(),
    vocab_size=3072, max_position_embeddings=8192, image_token_id=3063,
    num_hidden_layers=3, compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
    candidate_source_layer_id=2, engram_layer_ids=(0,), engram_num_embeddings=(434,),
    engram_compressed_vocab_size=2340, num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip
"""One layer of each kind that matters here: window with Engram, pooled cache, candidates in the decoder."""


def write_checkpoint(folder: Path) -> None:
    """The tiny model with random weights and the demo tokenizer, as a checkpoint folder."""
    classes = jnp.asarray(token_classes(demo.tokenizer_json()))
    folder.mkdir(parents=True)
    save_checkpoint(folder, deepinfer_jax.init_params(CONFIG, jax.random.key(11), classes))
    (folder / "tokenizer.json").write_bytes(demo.tokenizer_json())


def generate(params: Params, prompts: Any, sampling: Any = None, **options: Any) -> list[RequestOutput]:
    """`deepinfer_jax.generate` with TOP log-probabilities a token."""
    settings: dict[str, Any] = {"logprobs": TOP} | options
    return deepinfer_jax.generate(params, prompts, sampling, **settings)


def first(params: Params, prompt: Any, **options: Any) -> Completion:
    """The only sample of one prompt."""
    (output,) = generate(params, prompt, **options)
    (completion,) = output.outputs
    return completion


def texts_as_they_grow(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text after 0, 1, ... tokens, without characters that are not complete: Python's own decoder."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [""]
    for token in ids:
        texts.append(texts[-1] + decoder.decode(tokenizer.token_bytes(token)))
    return texts


def by_sample(events: Sequence[TokenEvent]) -> dict[tuple[int, int], list[TokenEvent]]:
    """Events of every (prompt, sample), in the order of arrival."""
    found: dict[tuple[int, int], list[TokenEvent]] = {}
    for event in events:
        found.setdefault((event.prompt_index, event.sample_index), []).append(event)
    return found


def some_ids(seed: int, count: int) -> list[int]:
    """Ordinary token ids, no control tokens."""
    return np.random.default_rng(seed).integers(3, 3000, count).tolist()


def everything(ids: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Sampling parameters that use all optional arrays: allowed ids, bias, penalties."""
    neutral = {"allowed_token_ids": tuple(ids), "logit_bias": {ids[0]: 0.5, ids[1]: -0.25}, "presence_penalty": 0.125}
    return neutral | changes


PROMPTS: dict[str, Any] = {
    "text": "Once upon a time",
    "ids": some_ids(1, 40),
    "conversation": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi \U0001f642"}],
    "two pages": some_ids(2, 200),
    "greedy": "Greedy, please.",
    "filters": "The quick brown fox",
    "everything": some_ids(3, 9),
    "one token": [77],
    "samples": "Several of it",
    "prompt logprobs": some_ids(4, 150),
}
"""More prompts than there are slots in the simplest engine; among them one that spans pages and chunks."""

SAMPLING: dict[str, SamplingParams] = {
    name: SamplingParams(**{"max_tokens": 12, "logprobs": TOP, "seed": number} | changes)
    for number, (name, changes) in enumerate(
        {
            "text": {"temperature": 0.8},
            "ids": {"logprobs": 3},
            "conversation": {"max_tokens": 20},
            "two pages": {},
            "greedy": {"temperature": 0},
            "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs_mode": "processed"},
            "everything": everything(some_ids(5, 30), frequency_penalty=0.5, repetition_penalty=1.25),
            "one token": {"max_tokens": 30, "ignore_eos": True},
            "samples": {"n": 3, "max_tokens": 8},
            "prompt logprobs": {"prompt_logprobs": TOP},
        }.items()
    )
}
