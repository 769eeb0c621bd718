"""Whole programs under the shape comparison: what varies between calls is a loop count or a copy (design 2.1)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.dspark import draft_block, draft_context
from deepinfer_jax.model.flow import CAPTURES
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.params import abstract_params
from deepinfer_jax.model.state import Batch, State, init_state

from ..jaxpr_shapes import assert_same_float_shapes  # noqa: TID252 - tests are not an installed package
from .harness import MAX_DRAFT

CONFIG = ModelConfig.micro()


def ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def state_of(slots: int, pages: int) -> State:
    return jax.eval_shape(
        lambda: init_state(CONFIG, REFERENCE, slots=slots, pages=pages, row_block=16, max_draft=MAX_DRAFT)
    )


def call(
    rows: int, decoder_rows: int, logit_rows: int, *, slots: int = 3, columns: int = 4, pages: int = 13
) -> tuple[Any, State, Batch]:
    """Operands of one call without values. columns: pages of one sequence; pages: of the whole pool."""
    batch = Batch(
        token_ids=ints(rows),
        positions=ints(rows),
        sequence=ints(rows),
        decoder_rows=ints(decoder_rows),
        logit_rows=ints(logit_rows),
        page_table=ints(slots, columns),
        window_start=ints(slots),
        encoder_start=ints(slots),
        page_start=ints(slots),
        image_mask=jax.ShapeDtypeStruct((rows,), jnp.bool_),  # type: ignore[arg-type]
        embeddings=jax.ShapeDtypeStruct((rows, CONFIG.hidden_size), jnp.float32),  # type: ignore[arg-type]
    )
    return abstract_params(CONFIG), state_of(slots, pages), batch


BASE = call(48, 48, 48)
SINGLE_CHANGES = {
    "rows": call(64, 32, 16),
    "context capacity": call(48, 48, 48, columns=7),
    "slots and pages": call(48, 48, 48, slots=5, pages=40),
}
FORWARD = functools.partial(forward, config=CONFIG, profile=REFERENCE)


def test_forward() -> None:
    """No floating-point arithmetic has row counts, capacity, pool size or slots in its shapes; captures only copy.

    Everything changes at once here, because tracing takes a while.
    """
    watched = functools.partial(FORWARD, captures=CAPTURES)
    other = call(64, 32, 16, slots=5, columns=7, pages=40)
    ops = assert_same_float_shapes(FORWARD, BASE, other, other=watched, at_least=2000)
    assert {"dot_general", "exp", "rsqrt"} <= {op.name for op in ops}


@pytest.mark.long
@pytest.mark.parametrize("change", SINGLE_CHANGES)
def test_forward_one_change(change: str) -> None:
    """The same for each change by itself, to see which one it is."""
    assert_same_float_shapes(FORWARD, BASE, SINGLE_CHANGES[change], at_least=2000)


def test_draft_block() -> None:
    """Drafting for one sequence or for eleven computes with the same shapes; so do other slot counts."""
    function = functools.partial(draft_block, config=CONFIG, profile=REFERENCE)

    def operands(count: int, slots: int) -> tuple[Any, ...]:
        return abstract_params(CONFIG), state_of(slots, 1), *[ints(count)] * 4

    ops = assert_same_float_shapes(function, operands(1, 1), operands(11, 12), at_least=200)
    assert {"dot_general", "exp", "rsqrt"} <= {op.name for op in ops}


def test_draft_context() -> None:
    """Committing 5 rows or 48 computes with the same shapes."""
    function = functools.partial(draft_context, config=CONFIG, profile=REFERENCE)

    def operands(rows: int, slots: int) -> tuple[Any, ...]:
        taps = jax.ShapeDtypeStruct((rows, 3 * CONFIG.hidden_size), REFERENCE.dtype)
        return abstract_params(CONFIG), state_of(slots, 1), taps, ints(rows), ints(rows)

    assert_same_float_shapes(function, operands(5, 1), operands(48, 12), at_least=20)
