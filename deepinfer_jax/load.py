"""`load_params`: weights and tokenizer of the demo model, of a checkpoint folder, or of the hub."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import hub
from deepinfer_jax.checkpoint.load import PlaceHook, load_checkpoint, load_config, read_leaf
from deepinfer_jax.checkpoint.reader import Checkpoint
from deepinfer_jax.checkpoint.unpack import unpack_weight
from deepinfer_jax.demo import demo_folder
from deepinfer_jax.engine.repack import op_of_weight, ops_to_repack, repack_weight
from deepinfer_jax.kernels.dispatch import Implementation
from deepinfer_jax.kernels.profile import numerics_profile
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.model.params import Parameter, Params, abstract_params
from deepinfer_jax.prompt import Tokenizer
from deepinfer_jax.prompt.tokenizer import TOKENIZER_FILE

DEMO = "demo"

UNPACK_BYTES = 1 << 30
"""A model whose unpacked bfloat16 weights are smaller is unpacked once when it is loaded for a CPU."""

_tokenizers: dict[str, Tokenizer] = {}


def cache_folder() -> Path:
    """Where this package keeps files of its own: DEEPINFER_JAX_CACHE, else the user's cache folder."""
    chosen = os.environ.get("DEEPINFER_JAX_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepinfer_jax"


def remember_tokenizer(tokenizer: Tokenizer) -> str:
    """Keep a tokenizer for `tokenizer_of`; returns its id."""
    _tokenizers[tokenizer.sha256] = tokenizer
    return tokenizer.sha256


def tokenizer_of(params: Params) -> Tokenizer | None:
    """The tokenizer that was loaded with the parameters, None if there was none."""
    return None if params.tokenizer_id is None else _tokenizers.get(params.tokenizer_id)


def unpack_params(params: Params) -> Params:
    """The same weights with FP8 and FP4 matrices as bfloat16 arrays (exact; Engram tables stay packed)."""

    def unpack(leaf: Any) -> Any:
        if not isinstance(leaf, QuantTensor) or leaf.format == "fp8_row":
            return leaf
        if leaf.format == "fp8" or leaf.format == "fp4":
            return jax.numpy.asarray(unpack_weight(np.asarray(leaf.data), np.asarray(leaf.scale), leaf.format))
        return dequantize(leaf)

    return jax.tree.map(unpack, params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))


def _unpacked_bytes(params: Params) -> int:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    return 2 * sum(math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, QuantTensor))


def _source_folder(name: str, *, hub_allowed: bool, revision: str | None, yes: bool) -> Path:
    """Folder of a source: the demo, a folder that exists, or a download. ValueError if it is none of these."""
    on_hub = hub_allowed and (name == hub.RELEASED or (hub.is_hub_name(name) and not Path(name).is_dir()))
    if on_hub:
        return hub.download(name, revision=revision, yes=yes, cache=cache_folder()).folder
    if revision is not None:
        raise ValueError(f"revision: {name} is not a repository of the hub, so it has no revisions")
    folder = demo_folder() if name == DEMO else Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"{name}: no such folder; pass {DEMO!r}, a checkpoint folder, {hub.RELEASED!r} or owner/name of the hub"
        )
    return folder


def _repacking(folder: Path, numerics: str, implementation: Implementation | None) -> PlaceHook | None:
    """What brings packed weights into the order of GPU kernels, leaf by leaf; None if nothing does."""
    abstract = abstract_params(load_config(folder))
    ops = ops_to_repack(abstract, numerics_profile(numerics), implementation)
    if not ops:
        return None

    def place(checkpoint: Checkpoint, parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        form = parameter.abstract(lead)
        if not isinstance(form, QuantTensor) or op_of_weight(parameter.key, form) not in ops:
            return None
        leaf = read_leaf(checkpoint, parameter, lead, prefixes, device_put=lambda array: array)
        return jax.tree.map(jax.numpy.asarray, repack_weight(parameter.key, leaf))

    return place


def load_params(
    source: str | os.PathLike[str] = DEMO,
    *,
    numerics: str = "reference",
    mesh: jax.sharding.Mesh | None = None,
    unpack: bool | None = None,
    implementation: Implementation | None = None,
    revision: str | None = None,
    yes: bool = False,
) -> Params:
    """Load a model.

    Args:
        source: "demo" (the embedded small model), a checkpoint folder, "released" (the published weights),
            or "owner/name" of a repository on the hub, downloaded at first use (docs/loading.md).
        numerics: profile that generation uses (`kernels/profile.py`).
        mesh: not supported yet.
        unpack: unpack FP8 and FP4 weights to bfloat16 once: faster on a CPU, more memory, the same
            results. None: on a CPU, if they take less than 1 GiB.
        implementation: that will be asked of `generate`: weights that its GPU kernels read in another order are
            brought into it (the same values). None: as the device and the model would have it.
        revision: branch, tag or commit of a repository; default "main".
        yes: download without asking.
    Returns: Params; the tokenizer beside the weights is remembered for `generate`.
    Raises: ValueError for an unknown source or profile; CheckpointError for a bad folder; HubError.
    """
    numerics_profile(numerics)
    if mesh is not None:
        raise NotImplementedError("load_params: mesh is not supported yet; leave it None for one device")
    name = os.fspath(source)
    folder = _source_folder(name, hub_allowed=isinstance(source, str), revision=revision, yes=yes)
    _, params = load_checkpoint(folder, place=_repacking(folder, numerics, implementation) if not unpack else None)
    tokenizer_id = None
    if (folder / TOKENIZER_FILE).exists():
        tokenizer = Tokenizer.from_file(folder)
        tokenizer.check_config(params.config)
        tokenizer_id = remember_tokenizer(tokenizer)
    if unpack is None:
        unpack = jax.default_backend() == "cpu" and _unpacked_bytes(params) < UNPACK_BYTES
    if unpack:
        params = unpack_params(params)
    return dataclasses.replace(params, numerics=numerics, tokenizer_id=tokenizer_id)
