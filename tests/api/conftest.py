"""The tiny model, loaded once, and one mixed batch whose results many tests compare with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import deepinfer_jax
from deepinfer_jax import Params, RequestOutput
from deepinfer_jax.prompt import Tokenizer

from .tiny import PROMPTS, SAMPLING, write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of the tiny model."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def params(folder: Path) -> Params:
    """The tiny model."""
    return deepinfer_jax.load_params(folder)


@pytest.fixture(scope="session")
def bare(folder: Path) -> Params:
    """The tiny model with its FP8 and FP4 weights as they are stored, and without a tokenizer."""
    return dataclasses.replace(deepinfer_jax.load_params(folder, unpack=False), tokenizer_id=None)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.from_file(folder)


@pytest.fixture(scope="session")
def batch(params: Params) -> dict[str, RequestOutput]:
    """All of PROMPTS in one call."""
    outputs = deepinfer_jax.generate(params, list(PROMPTS.values()), list(SAMPLING.values()))
    return dict(zip(PROMPTS, outputs, strict=True))
