"""Reproducible offline inference of DeepSeek-V4.1-Flash in JAX.

import deepinfer_jax

params = deepinfer_jax.load_params("demo")
print(deepinfer_jax.generate(params, "Once upon a time", max_tokens=50)[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # the names below are loaded when they are first used: `--help` must not wait for jax
    from deepinfer_jax.api import Engine as Engine
    from deepinfer_jax.api import GenerationError as GenerationError
    from deepinfer_jax.api import generate as generate
    from deepinfer_jax.api import score as score
    from deepinfer_jax.api import stream as stream
    from deepinfer_jax.engine.runtime_config import RuntimeConfig as RuntimeConfig
    from deepinfer_jax.load import load_params as load_params
    from deepinfer_jax.model.config import ModelConfig as ModelConfig
    from deepinfer_jax.model.init import init_params as init_params
    from deepinfer_jax.model.params import Params as Params
    from deepinfer_jax.outputs import Completion as Completion
    from deepinfer_jax.outputs import RequestOutput as RequestOutput
    from deepinfer_jax.outputs import TokenEvent as TokenEvent
    from deepinfer_jax.sampling_params import SamplingParams as SamplingParams
    from deepinfer_jax.sequence_logits import logits as logits

_MODULES = {
    "Engine": "api",
    "GenerationError": "api",
    "RuntimeConfig": "engine.runtime_config",
    "generate": "api",
    "score": "api",
    "stream": "api",
    "load_params": "load",
    "logits": "sequence_logits",
    "ModelConfig": "model.config",
    "init_params": "model.init",
    "Params": "model.params",
    "Completion": "outputs",
    "RequestOutput": "outputs",
    "TokenEvent": "outputs",
    "SamplingParams": "sampling_params",
}

__all__ = [
    "Completion",
    "Engine",
    "GenerationError",
    "ModelConfig",
    "Params",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "TokenEvent",
    "__version__",
    "generate",
    "init_params",
    "load_params",
    "logits",
    "score",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
