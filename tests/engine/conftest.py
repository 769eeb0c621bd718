"""A tiny model, and requests whose results alone are known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import deepinfer_jax
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.runtime_config import RuntimeConfig, page_bytes
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.model.params import Params
from deepinfer_jax.outputs import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams

SLOTS = 16
ROWS = 64
PAGES = 64
POOL = 48


@pytest.fixture(scope="session")
def params() -> Params:
    return deepinfer_jax.init_params(deepinfer_jax.ModelConfig.micro(), jax.random.key(1))


@pytest.fixture(scope="session")
def one_page(params: Params) -> int:
    """Bytes of one page."""
    return page_bytes(params.config, numerics_profile(params.numerics))


def poison(engine: Engine) -> None:
    """Fill every page, slot and snapshot with values that would be seen in any result."""

    def worst(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.full_like(leaf, jnp.nan)
        return jnp.full_like(leaf, 0xFF if leaf.dtype == jnp.uint8 else 7)

    runner = engine._runner
    runner._state = jax.tree.map(worst, runner._state)
    if runner._rings is not None:
        runner._rings = jax.tree.map(worst, runner._rings)


@pytest.fixture(scope="session")
def make_engine(params: Params, one_page: int) -> Callable[..., Engine]:
    """Engines of the same few shapes, poisoned, with random pages in random order."""

    def make(*, pages: int = PAGES, rng: random.Random | None = None, **changes: Any) -> Engine:
        settings = {"slots": SLOTS, "rows": (ROWS,), "cache_bytes": PAGES * one_page} | changes
        engine = Engine(params, RuntimeConfig(**settings))
        poison(engine)
        # A smaller budget without another array shape, so that nothing is compiled for it.
        engine.store._free = (rng or random.Random(0)).sample(engine.store._free, pages)
        engine.store.total = pages
        return engine

    return make


@dataclasses.dataclass(frozen=True)
class Known:
    """A request and what it gives when nothing else runs."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    alone: RequestOutput


def random_prompt(rng: random.Random, stems: list[list[int]]) -> tuple[int, ...]:
    """Lengths around page borders and around the reach of the decoder; shared beginnings."""
    stem = rng.choice(stems)
    size = rng.choice([rng.randrange(1, 40), rng.randrange(90, 200), 127, 128, 129, 157, 158, 256, 257, 285, 286, 287])
    kept = min(size, rng.choice([0, 100, 128, 128, 200, 256, 256, size, size]))
    return (*stem[:kept], *(rng.randrange(3, 96) for _ in range(size - kept)))


def random_sampling(rng: random.Random) -> SamplingParams:
    changes: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 3, 5, 9, 17]),
        "temperature": rng.choice([0, 0, 0.7, 1, 1.5]),
        "seed": rng.randrange(1 << 64),
        "logprobs": rng.choice([0, 0, 3]),
        "ignore_eos": rng.random() < 0.5,
    }
    extras: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.05, "logprobs_mode": "processed"},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"repetition_penalty": 1.3, "min_tokens": 2, "ignore_eos": False},
        {"logit_bias": {5: 3.0, 17: -4.0}},
        {"prompt_logprobs": 2},
        {"n": 3, "temperature": 1},
        {"stop_token_ids": tuple(range(3, 40))},
    ]
    if rng.random() < 0.5:
        changes |= rng.choice(extras)
    return SamplingParams(**changes)


@pytest.fixture(scope="session")
def known(make_engine: Callable[..., Engine]) -> list[Known]:
    """Requests of many kinds, each run alone, without overlap and without shared prefixes."""
    rng = random.Random(20261130)
    stems = [[rng.randrange(3, 96) for _ in range(300)] for _ in range(2)]
    result = []
    with make_engine(prefix_sharing=False, overlap=False) as engine:
        for _ in range(POOL):
            prompt, sampling = random_prompt(rng, stems), random_sampling(rng)
            result.append(Known(prompt, sampling, engine.generate([prompt], sampling)[0]))
    return result
