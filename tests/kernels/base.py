"""What every implementation of an operator has to pass; `base_<op>.py` adds the operator's own checks.

An implementation is tested by a subclass that names it:

    class TestRowDotXla(RowDotTests):
        implementation = "xla"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import compile as compilation
from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, Kernels, implementation_module

from .cases import RowCase, check_rows_are_independent, check_rows_inside_larger_program, kernels_of

Example = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A contract function with small valid operands."""


@functools.cache
def _compiled(function: Callable[..., Any], kernels: Kernels, settings: tuple[tuple[str, Any], ...]) -> Any:
    """One jitted function per contract function and settings, so that equal shapes compile once."""
    return compilation.jit(lambda *operands, **arrays: kernels(function, *operands, **dict(settings), **arrays))


class OpTests:
    """Shared by all operators. Subclasses set `op`, `examples` and, last, `implementation`."""

    op: ClassVar[str]
    implementation: ClassVar[Implementation | None]
    unsupported: ClassVar[tuple[str, ...]] = ("mosaic_gpu", "cann")
    """Implementations that this operator does not have; shrinks as they are written."""

    row_cases: ClassVar[tuple[RowCase, ...]]
    """Calls whose rows must be independent; empty for an operator that mixes rows."""

    def examples(self) -> list[Example]:
        """One small valid call of every contract function of the operator."""
        raise NotImplementedError

    def kernels(self, row_tile: int | None = ROW_TILE) -> Kernels:
        """Bundle that chooses the implementation under test."""
        return kernels_of(self.op, self.implementation, row_tile)

    def run(
        self, function: Callable[..., Any], *operands: Any, row_tile: int | None = ROW_TILE, **settings: Any
    ) -> Any:
        """Compile and call a contract function; results as NumPy arrays."""
        arrays = {name: value for name, value in settings.items() if isinstance(value, np.ndarray | jax.Array)}
        fixed = tuple((name, value) for name, value in settings.items() if name not in arrays)
        return jax.tree.map(np.asarray, _compiled(function, self.kernels(row_tile), fixed)(*operands, **arrays))

    @pytest.mark.fast
    def test_missing_implementations_say_so(self) -> None:
        """Guards against a silent fallback to another implementation, and against a misspelt name."""
        for function, operands, settings in self.examples():
            for name in self.unsupported:
                with pytest.raises(NotImplementedError, match=f"{self.op}.*{name}"):
                    function(*operands, implementation=cast(Implementation, name), **settings)
            with pytest.raises(ValueError, match=r"'tpu' is unknown.*xla.*mosaic_gpu.*cann"):
                function(*operands, implementation=cast(Implementation, "tpu"), **settings)

    @pytest.mark.fast
    def test_choice_by_name_is_used(self) -> None:
        """Guards against an implementation under test that is not the one that runs."""
        module = implementation_module(self.op, self.implementation)
        assert module.__name__.endswith(f"kernels.{self.op}.{self.implementation or 'xla'}")

    def test_whole_array_mode_gives_the_same_numbers(self) -> None:
        """Guards the differentiable mode (row_tile=None) against computing something else than the tiles."""
        examples = self.examples()

        @compilation.jit
        def every(all_operands: list[Any]) -> list[tuple[Any, Any]]:
            return [
                (self.kernels()(function, *given, **settings), self.kernels(None)(function, *given, **settings))
                for (function, _, settings), given in zip(examples, all_operands, strict=True)
            ]

        results = every([operands for _, operands, _ in examples])
        for (function, _, _), (tiled, whole) in zip(examples, results, strict=True):
            for a, b in zip(
                map(np.asarray, jax.tree.leaves(tiled)), map(np.asarray, jax.tree.leaves(whole)), strict=True
            ):
                assert a.dtype == b.dtype
                if not jnp.issubdtype(a.dtype, jnp.floating):
                    np.testing.assert_array_equal(a, b, err_msg=function.__name__)
                    continue
                step = float(jnp.finfo(a.dtype).eps)
                a, b = a.astype(np.float64), b.astype(np.float64)
                scale = np.abs(np.where(np.isfinite(a), a, 0)).max(initial=0.0)
                np.testing.assert_allclose(a, b, rtol=8 * step, atol=8 * step * scale, err_msg=function.__name__)

    def test_rows_are_independent(self, row_case: RowCase) -> None:
        """Guards the promise itself: a row's bits must not depend on how many or which rows come along."""
        check_rows_are_independent(row_case, self.kernels())

    def test_rows_inside_larger_program(self, row_case: RowCase) -> None:
        """Guards against fusions with the surroundings that change a row's bits."""
        check_rows_inside_larger_program(row_case, self.kernels())

    def refuses(self, function: Callable[..., Any], *operands: Any, match: str, **settings: Any) -> None:
        """The call breaks the contract and says which operand is wrong."""
        with pytest.raises(ValueError, match=match):
            function(*operands, implementation=self.implementation, **settings)
