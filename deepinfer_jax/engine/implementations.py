"""Which implementation each op uses: chosen once from the weights' formats, the configuration and the device.

Every op's GPU implementation is asked by tracing the model's programs without values: what it cannot do for
this model it refuses with NotImplementedError while it is traced. The choice never depends on row counts.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.dispatch import OPS, ROW_TILE, Implementation, Kernels, implementation_module
from deepinfer_jax.kernels.mosaic import architecture, interpreting
from deepinfer_jax.kernels.profile import REFERENCE, NumericsProfile
from deepinfer_jax.kernels.sample_tokens import Controls, sample_tokens, token_logprobs
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.dspark import draft_block, draft_context
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, init_state

GPU_ROW_BLOCK = 256
"""Rows that a layer takes at once where GPU kernels run: decode steps and prompt chunks read each weight once."""

NO_KERNEL = "no kernel"
"""Why an op is portable that has no GPU implementation at all."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """kernels: the bundle. device: its name. reason: why no op uses GPU kernels here, None if they may.
    portable: (op, why it does not use its GPU implementation)."""

    kernels: Kernels
    device: str
    reason: str | None = None
    portable: tuple[tuple[str, str], ...] = ()

    def report(self) -> str:
        """One line for the user."""
        if self.reason is not None:
            return f"deepinfer_jax: on {self.device}: portable ({self.reason})"
        chosen = ", ".join(f"{op} {implementation}" for op, implementation in self.kernels.choices) or "nothing"
        missing = [op for op, why in self.portable if why == NO_KERNEL]
        refused = [f"{op} ({why})" for op, why in self.portable if why != NO_KERNEL]
        parts = [f"{', '.join(missing)} ({NO_KERNEL})"] if missing else []
        rest = f"; portable: {', '.join([*parts, *refused])}" if self.portable else ""
        return f"deepinfer_jax: on {self.device}: {chosen}{rest}"


def choose_kernels(params: Params, profile: NumericsProfile, implementation: Implementation | None = None) -> Kernels:
    """Implementations for one model on the default device.

    Args:
        params: weights, or the ShapeDtypeStructs of them.
        implementation: "xla": the portable one for every op. "mosaic_gpu": the GPU kernels for every op. None:
            on a GPU with kernels and the reference profile those of every op that can do this model, which is
            printed once to stderr; elsewhere the portable ones.
    Raises: ValueError for an unknown name. NotImplementedError for "mosaic_gpu" if the device has no kernels or
        an op refuses this model, with every op's reason.
    """
    if implementation == "xla":
        return Kernels()
    if implementation not in (None, "mosaic_gpu"):
        implementation_module(OPS[0], implementation)  # names what exists
        raise NotImplementedError(f"implementation={implementation!r}: choose None, 'xla' or 'mosaic_gpu'")
    if implementation is None and not _may_have_kernels():
        return Kernels()
    choice = _choice(_facts(params), profile)
    if implementation is None:
        _print_once(choice.report())
        return choice.kernels
    reasons = [choice.reason] if choice.reason is not None else [f"{op}: {why}" for op, why in choice.portable]
    if reasons:
        raise NotImplementedError(f"implementation='mosaic_gpu' on {choice.device}: {'; '.join(reasons)}")
    return choice.kernels


def chosen_ops(params: Callable[[], Params], profile: NumericsProfile) -> frozenset[str]:
    """Ops that would use GPU kernels by default with such weights; `params` is asked only where there are any."""
    if not _may_have_kernels():
        return frozenset()
    return frozenset(op for op, _ in _choice(_facts(params()), profile).kernels.choices)


def _may_have_kernels() -> bool:
    return jax.default_backend() != "cpu" or interpreting()


@functools.lru_cache(maxsize=64)
def _print_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the choice may depend on, hashable: the weights' tree, shapes and dtypes, and the device."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]
    device: str
    architecture: str | None
    refusal: str | None

    @property
    def params(self) -> Params:
        """The weights without values."""
        return jax.tree.unflatten(self.tree, [jax.ShapeDtypeStruct(*leaf) for leaf in self.leaves])


def _facts(params: Params) -> _Facts:
    # Names that a model carries along choose nothing: weights while they are loaded and after are the same.
    leaves, tree = jax.tree.flatten(dataclasses.replace(params, numerics=REFERENCE.name, tokenizer_id=None))
    device = jax.config.jax_default_device or jax.devices()[0]
    name = getattr(device, "device_kind", str(device))
    try:
        found, refusal = architecture(), None
    except NotImplementedError as error:
        found, refusal = None, str(error).removeprefix("mosaic_gpu: ")
    return _Facts(tree, tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves), name, found, refusal)


@functools.lru_cache(maxsize=16)
def _choice(facts: _Facts, profile: NumericsProfile) -> Choice:
    if facts.refusal is not None:
        return Choice(Kernels(), facts.device, facts.refusal)
    if profile != REFERENCE:
        reason = f"the kernels round as profile {REFERENCE.name!r} does, not {profile.name!r}"
        return Choice(Kernels(), facts.device, reason)
    probe = _Probe()
    _trace(facts.params, profile, probe)
    portable = tuple((op, probe.refused[op]) for op in OPS if op in probe.refused)
    chosen: tuple[tuple[str, Implementation], ...] = tuple(
        (op, "mosaic_gpu") for op in OPS if op in probe.used and op not in probe.refused
    )
    block = GPU_ROW_BLOCK if chosen else None
    return Choice(Kernels(ROW_TILE, chosen, block), facts.device, None, portable)


# ---- asking the ops -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Probe(Kernels):
    """Uses every op's GPU implementation, and notes which ops refuse: those go on with the portable one."""

    refused: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    used: set[str] = dataclasses.field(default_factory=set, compare=False)

    def implementation(self, op: str) -> Implementation | None:
        return None if op in self.refused else "mosaic_gpu"

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        op: str = function.op  # type: ignore[attr-defined]
        self.used.add(op)
        if op not in self.refused:
            try:
                implementation_module(op, "mosaic_gpu")
            except NotImplementedError:
                self.refused[op] = NO_KERNEL
        if op not in self.refused:
            try:
                return super().__call__(function, *args, **kwargs)
            except NotImplementedError as error:
                self.refused[op] = str(error).removeprefix(f"{op}: ")
        return super().__call__(function, *args, **kwargs)


def _trace(params: Params, profile: NumericsProfile, kernels: Kernels) -> None:
    """Trace everything that may run with one bundle: forward, drafting, sampling. Nothing is computed."""
    config = params.config
    count, slots, pages = ROW_TILE, 1, 2

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    state = jax.eval_shape(lambda: init_state(config, profile, slots=slots, pages=pages, row_block=ROW_TILE))
    rows, per_slot = ints(count), ints(slots)
    image = jax.ShapeDtypeStruct((count,), jnp.bool_)
    batch: Any = Batch(rows, rows, rows, rows, rows, ints(slots, pages), per_slot, per_slot, per_slot, image)  # type: ignore[arg-type]
    fixed: dict[str, Any] = {"config": config, "profile": profile, "kernels": kernels}
    outputs, state = jax.eval_shape(functools.partial(forward, **fixed), params, state, batch)
    if config.has_draft:
        _, state = jax.eval_shape(functools.partial(draft_context, **fixed), params, state, outputs.taps, rows, rows)
        anchors = ints(1)
        jax.eval_shape(functools.partial(draft_block, **fixed), params, state, anchors, anchors, anchors, anchors)
    jax.eval_shape(functools.partial(kernels, sample_tokens), outputs.logits, _controls(config, count))
    jax.eval_shape(functools.partial(kernels, token_logprobs), outputs.logits, rows)


def _controls(config: ModelConfig, count: int) -> Controls:
    """Controls of `count` rows without values, all optional ones among them."""

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((count, *shape), dtype)

    floats, ints, vocabulary = array(jnp.float32), array(jnp.int32), config.vocab_size
    return Controls(
        temperature=floats,
        top_k=ints,
        top_p=floats,
        min_p=floats,
        seed=array(jnp.uint32, 2),
        sample_index=ints,
        position=ints,
        processed=array(jnp.bool_),
        repetition=floats,
        presence=floats,
        frequency=floats,
        mask=array(jnp.uint32, -(-vocabulary // 32)),
        bias_ids=array(jnp.int32, 32),
        bias=array(jnp.float32, 32),
        prompt_seen=array(jnp.bool_, vocabulary),
        output_counts=array(jnp.int32, vocabulary),
    )
