"""The GPU that a kernel is built for, and interpretation of kernels on a CPU."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

Architecture = Literal["sm90", "sm100"]

_ARCHITECTURES: dict[str, Architecture] = {"9.0": "sm90", "10.0": "sm100", "10.3": "sm100"}

_interpreted: contextvars.ContextVar[Architecture | None] = contextvars.ContextVar("interpreted", default=None)


@contextlib.contextmanager
def interpret(architecture: Architecture = "sm90", *, detect_races: bool = False) -> Iterator[None]:
    """Run Mosaic-GPU kernels on the CPU through Pallas' interpreter, as if for `architecture`.

    Kernels replace what the interpreter does not know (matrix products from registers, inline PTX) by
    plain array code; everything else is the code that is compiled.
    """
    token = _interpreted.set(architecture)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
    finally:
        _interpreted.reset(token)


def interpreting() -> bool:
    """Whether kernels are interpreted; read while tracing."""
    return _interpreted.get() is not None


def architecture() -> Architecture:
    """Architecture of the device that programs are compiled for.

    Raises NotImplementedError for a device without Mosaic-GPU kernels, naming it.
    """
    chosen = _interpreted.get()
    if chosen is not None:
        return chosen
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if str(capability) not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise NotImplementedError(
            f"mosaic_gpu: {device.device_kind} has compute capability {capability}; there are kernels for {known}"
        )
    return _ARCHITECTURES[str(capability)]
