"""What a kernel's benchmark, device check and deviceless compilation are made of.

`benchmarks/kernel_cases/<op>.py` defines, for the op `kernels/<op>`:

    def cases(quick: bool) -> list[Case]       # timed by benchmarks/kernels.py
    def checks(quick: bool) -> list[Check]     # run by benchmarks/kernels.py: what only a GPU can tell
    def compile_cases() -> list[CompileCase]   # compiled by tools/kernels/compile.py on any machine

Importing such a module touches no device, and none of the three functions puts arrays on one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from deepinfer_jax.kernels.dispatch import OPS

Target = Literal["h200", "b200"]
"""A GPU model to compile for: h200 is sm_90a, b200 is sm_100a."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One timed call.

    make: gives the function and its arguments on the device, with fresh random values. Array leaves become
        operands; whatever is static is bound by `functools.partial`.
    bytes, flop: of one call, at least: each operand read once, each result written once; 2 per multiply-add.
    reference: float64 or float32 function of the same arguments, for the error; None = not compared.
    implementation: "mosaic_gpu" or "xla" (compiled with this project's options), "row_tile=None" or
        "ragged_dot" (baselines: XLA's own options), or the name of another library.
    timer: for another library: times (function, arguments) and returns `kernel_timing.figures` and the result.
    """

    name: str
    op: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    bytes: int
    flop: int
    reference: Callable[..., Any] | None = None
    implementation: str = "mosaic_gpu"
    timer: Callable[[Callable[..., Any], tuple[Any, ...]], tuple[dict[str, Any], Any]] | None = None

    @property
    def key(self) -> str:
        """Name that no other case has."""
        return f"{self.op}/{self.name} [{self.implementation}]"


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that only the device can tell. `run` returns JSON values, "passed" (bool) among them."""

    name: str
    run: Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One program to compile without a device.

    arguments: pytrees of `jax.ShapeDtypeStruct`, passed to `function` by position.
    targets: GPU models that the function has kernels for.
    """

    name: str
    op: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    targets: tuple[Target, ...] = ("h200", "b200")


def case_module(op: str) -> ModuleType | None:
    """The module of an op's cases, None if there is none. Errors inside the module are raised."""
    if op not in OPS:
        raise ValueError(f"op {op!r} is unknown; choose one of {', '.join(OPS)}")
    name = f"{__name__}.{op}"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
