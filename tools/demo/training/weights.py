"""Float32 master weights by checkpoint name: initial values, values of a forward pass, files.

A weight is named by its layer prefix and declaration key ("layers.3.attn.wq_a"); experts are stacked under
their key with "{}". Files hold float32 for what a checkpoint stores in float32 and bfloat16 for the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import LayerParams, Parameter, all_parameters

from .ops import stored_values

Weights = dict[str, jax.Array]
"""Weight name -> float32 array."""

FILE_BYTES = 15 << 20
"""Largest size of one weight file."""

_STATE_FILE = "state.npz"


@functools.cache
def declarations(config: ModelConfig) -> dict[str, Parameter]:
    """Weight name -> declaration, in checkpoint order."""
    return {prefix + parameter.key: parameter for prefix, parameter in all_parameters(config)}


def full_shape(parameter: Parameter) -> tuple[int, ...]:
    """Shape of a weight; experts are its first axis."""
    return (parameter.experts, *parameter.shape) if parameter.experts else parameter.shape


def trained_names(config: ModelConfig, phase: str) -> tuple[str, ...]:
    """Weights that gradients change: the backbone ("p1", "p2") or the draft stages ("p3").

    The routing biases follow a rule of their own, and nothing trains the vision tower or image biases.
    """
    names = []
    for name in declarations(config):
        part = "p3" if name.startswith("mtp.") else "p1"
        vision = name.startswith(("vision.", "aligner.", "image_"))
        if part == ("p3" if phase == "p3" else "p1") and not vision and not name.endswith((".bias", ".bias_vl")):
            names.append(name)
    return tuple(names)


def bias_names(config: ModelConfig, phase: str) -> tuple[str, ...]:
    """Routing biases that a phase balances, in layer order."""
    if phase == "p3":
        return tuple(f"mtp.{i}.ffn.gate.bias" for i in range(config.num_nextn_predict_layers))
    return tuple(f"layers.{i}.ffn.gate.bias" for i in range(config.num_hidden_layers))


# ---- initial values ---------------------------------------------------------------------------------


def _hyper_connection_base(config: ModelConfig) -> np.ndarray:
    """Read the first stream, write to all, keep every stream to itself."""
    count = config.hc_mult
    read = np.full(count, -3.0)
    read[0] = 3.0
    return np.concatenate([read, np.zeros(count), 5.0 * np.eye(count).ravel()])


def _initial(config: ModelConfig, name: str, parameter: Parameter, random: np.random.Generator) -> np.ndarray:
    shape = full_shape(parameter)
    constant = {"ones": 1.0, "bias": 0.0, "sink": 0.0, "zeros": 0.0, "hc_scale": 0.01}
    if parameter.init in constant:
        return np.full(shape, constant[parameter.init])
    if parameter.init == "hc_base":
        return _hyper_connection_base(config)
    if name.endswith(("markov_head.head", "confidence_head.proj")):
        return np.zeros(shape)
    deviation = 0.02
    if name.endswith((".wo_b", ".w2")):
        deviation /= (2 * config.num_hidden_layers) ** 0.5
    return deviation * random.standard_normal(shape)


def initial_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights before training."""
    random = np.random.default_rng(seed)
    return {
        name: _initial(config, name, parameter, random).astype(np.float32)
        for name, parameter in declarations(config).items()
    }


# ---- values of a forward pass -----------------------------------------------------------------------


def forward_values(config: ModelConfig, weights: Mapping[str, jax.Array], quantize: bool | None) -> Weights:
    """Float32 values that products use: rounded to storage, with straight-through gradients.

    quantize: apply the released grids. None: no rounding at all.
    """
    table = declarations(config)
    if quantize is None:
        return dict(weights)
    return {name: stored_values(w, table[name].storage, quantize) for name, w in weights.items()}


def layer_values(values: Mapping[str, jax.Array], prefix: str) -> LayerParams:
    """The weights of one layer or stage by declaration key."""
    return {name.removeprefix(prefix): w for name, w in values.items() if name.startswith(prefix)}


# ---- files ------------------------------------------------------------------------------------------


def _groups(config: ModelConfig, names: Iterable[str]) -> list[list[str]]:
    table = declarations(config)
    groups: list[list[str]] = [[]]
    used = 0
    for name in names:
        parameter = table[name]
        size = int(np.prod(full_shape(parameter))) * (4 if parameter.storage == "f32" else 2) + 512
        if used + size > FILE_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def save_weights(folder: Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> list[Path]:
    """Write `weights-K.npz` files of at most FILE_BYTES; files of an earlier call are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights-*.npz"):
        old.unlink()
    table = declarations(config)
    paths = []
    for number, names in enumerate(_groups(config, weights), 1):
        arrays = {}
        for name in names:
            value = np.asarray(weights[name], np.float32)
            if table[name].storage != "f32":
                value = value.astype(jnp.bfloat16).view(np.uint16)
            arrays[name] = value
        path = folder / f"weights-{number}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        paths.append(path)
    return paths


def load_weights(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Float32 weights of `save_weights` by name: those that the files hold.

    Raises ValueError when there is no file or an array does not fit the configuration.
    """
    paths = sorted(folder.glob("weights-*.npz"))
    if not paths:
        raise ValueError(f"{folder}: holds no weights-*.npz file")
    result = {}
    table = declarations(config)
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                value = file[name]
                if name not in table or value.shape != full_shape(table[name]):
                    raise ValueError(f"{path}: {name} {value.shape} does not fit the configuration")
                result[name] = value.view(jnp.bfloat16).astype(np.float32) if value.dtype == np.uint16 else value
    return result


def save_state(folder: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]) -> None:
    """Everything that resuming without a loss of precision needs, in one large file."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / _STATE_FILE, **arrays)  # type: ignore[arg-type]
    (folder / "state.json").write_text(json.dumps(dict(facts)) + "\n")


def load_state(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, object]] | None:
    """What `save_state` wrote, None if the folder has none."""
    if not (folder / _STATE_FILE).exists():
        return None
    with np.load(folder / _STATE_FILE, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads((folder / "state.json").read_text())
