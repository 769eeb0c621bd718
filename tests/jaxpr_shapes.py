"""Floating-point shapes of a traced program: may they depend on what they must not depend on?

A compiler chooses arithmetic by array shape, elementwise code included. So bits stay the same across batch sizes,
context capacities and meshes if every floating-point primitive that computes has the same shapes for all of them
(design 2.1). `assert_same_float_shapes` traces a function twice and compares the sequences:

    assert_same_float_shapes(step, (params, batch_of_8), (params, batch_of_64))

Not compared are copies (`COPIES`), which move or re-type bits without arithmetic, integer primitives, and the
control flow around them (`CONTROL`): loop counts may differ, loop bodies are walked into.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.extend.source_info_util import summarize

COPIES = frozenset(
    {
        # parts and arrangements of an array
        "slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "concatenate", "pad", "split",
        "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "copy", "copy_p", "iota",
        # choices between arrays
        "select_n",
        # the same number in another type, rounded once per element whatever the shape
        "convert_element_type", "bitcast_convert_type", "reduce_precision",
        # marks for transformations and the compiler
        "stop_gradient", "optimization_barrier", "sharding_constraint", "device_put", "name", "pvary",
        # moves between devices
        "all_gather", "all_to_all", "ragged_all_to_all", "ppermute",
    }
)  # fmt: skip
"""Primitives that leave every bit pattern as it is, or round single elements exactly."""

CONTROL = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map",
        "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
        "custom_lin", "run_state", "named_call",
    }
)  # fmt: skip
"""Primitives that only run their inner programs."""


@dataclasses.dataclass(frozen=True)
class FloatOp:
    """One floating-point primitive. `where` (scopes and source line) does not take part in comparisons."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    where: str = dataclasses.field(compare=False, default="")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}  [{self.where}]"


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _text(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else str(aval)


def _inner(value: Any) -> Iterator[Jaxpr]:
    """Programs in a primitive's parameter, tuples and lists included."""
    program = getattr(value, "jaxpr", value)  # closed over constants or not
    if isinstance(program, Jaxpr):
        yield program
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)


def _walk(jaxpr: Jaxpr, copies: frozenset[str], scope: str) -> Iterator[FloatOp]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        here = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
        if name in CONTROL:
            for value in eqn.params.values():
                for inner in _inner(value):
                    yield from _walk(inner, copies, here)
            continue
        inputs, outputs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        if name in copies or not any(_is_float(aval) for aval in (*inputs, *outputs)):
            continue
        where = f"{here or 'top'}, {summarize(eqn.source_info)}"
        yield FloatOp(name, tuple(map(_text, inputs)), tuple(map(_text, outputs)), where)
        # A computation inside an arithmetic primitive (a scatter's or reduction's) belongs to it.


def float_ops(function: Callable[..., Any], *args: Any, copies: frozenset[str] = COPIES) -> list[FloatOp]:
    """Floating-point primitives of the traced function, in program order; loop bodies count once.

    args: arrays, or pytrees of arrays and `jax.ShapeDtypeStruct`.
    copies: names of primitives to leave out; extend it where a primitive is known to be exact at any shape.
    """
    return list(_walk(jax.make_jaxpr(function)(*args).jaxpr, copies, ""))


def assert_same_float_shapes(
    function: Callable[..., Any],
    args_a: tuple[Any, ...],
    args_b: tuple[Any, ...],
    *,
    other: Callable[..., Any] | None = None,
    copies: frozenset[str] = COPIES,
    at_least: int = 1,
) -> list[FloatOp]:
    """Fail, naming the first difference, unless both traces compute with the same floating-point shapes.

    other: function for `args_b` where the two programs differ in more than their operands, such as the mesh.
    at_least: how many primitives there must be, so that a test cannot pass on an empty program.
    Returns: the common sequence.
    """
    ops_a = float_ops(function, *args_a, copies=copies)
    ops_b = float_ops(other or function, *args_b, copies=copies)
    for number, (a, b) in enumerate(itertools.zip_longest(ops_a, ops_b)):
        if a != b:
            raise AssertionError(
                f"floating-point primitive {number} of {len(ops_a)} and {len(ops_b)} depends on what must not matter:"
                f"\n  {a or 'nothing more'}\n  {b or 'nothing more'}"
            )
    assert len(ops_a) >= at_least, f"only {len(ops_a)} floating-point primitives found, expected {at_least} or more"
    return ops_a
