"""Programs that `compile.py` compiles: those of every op's module in benchmarks/kernel_cases/."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.kernel_cases import CompileCase, Target, case_module  # noqa: E402
from deepinfer_jax.kernels.dispatch import OPS  # noqa: E402


def compile_cases(
    target: Target, ops: Sequence[str] | None = None, name: str | None = None, modules: Sequence[str] = ()
) -> tuple[list[CompileCase], list[str]]:
    """Cases for a target, and ops that have none.

    ops: only these; None: all, or none if there are modules. name: only cases whose name contains this text.
    modules: names of modules to take besides those of the ops.
    """
    if ops is None:
        ops = () if modules else OPS
    found: list[CompileCase] = []
    without: list[str] = []
    for source in (*ops, *modules):
        module = importlib.import_module(source) if source in modules else case_module(source)
        listed = module.compile_cases() if module is not None and hasattr(module, "compile_cases") else []
        wrong = [case.name for case in listed if source in OPS and case.op != source]
        if wrong:
            raise ValueError(f"{source}: compile_cases() lists cases of another op: {', '.join(wrong)}")
        here = [case for case in listed if target in case.targets]
        if not here:
            without.append(source)
        found += [case for case in here if name is None or name in case.name]
    return found, without
