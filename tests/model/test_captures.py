"""Captures and the shapes that `forward` accepts: watching changes nothing, what does not fit is an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batching import Chunk
from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.flow import CAPTURES
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.params import abstract_params
from deepinfer_jax.model.state import Batch, init_state

from .harness import MAX_DRAFT, Runner, Shape, assert_same_arrays, plain_tables, same, snapshot

CONFIG = ModelConfig.micro()
RNG = np.random.default_rng(13)
IDS = [RNG.integers(0, 92, n).tolist() for n in (41, 20)]
IMAGE = (False,) * 6 + (True,) * 5 + (False,) * 9
CALLS = (
    [Chunk(2, 0, IDS[0][:31], 41), Chunk(0, 0, IDS[1][:15], 20, "all", IMAGE[:15])],
    [Chunk(0, 15, IDS[1][15:], 20, "last", IMAGE[15:]), Chunk(2, 31, IDS[0][31:], 41, "all")],
    [Chunk(2, 41, [7, 8], 41, "all")],
)


def test_captures_change_no_bit() -> None:
    """An analysis that perturbs what it watches is worth nothing: logits, taps and the whole state are compared."""
    shape = Shape()
    plain = Runner(REFERENCE, shape, plain_tables(shape), replay="exact_trim")
    watched = Runner(REFERENCE, shape, plain_tables(shape), captures=CAPTURES, replay="exact_trim")
    for number, chunks in enumerate(CALLS):
        without, with_all = plain.run(chunks), watched.run(chunks)
        assert without.captured == {}
        assert sorted(with_all.captured) == sorted(CAPTURES)
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        assert np.isfinite(without.logits).all()
        assert same(with_all.logits, without.logits), f"logits of call {number}"
        assert same(with_all.taps, without.taps), f"taps of call {number}"
        assert_same_arrays(snapshot(watched.state), snapshot(plain.state), f"state after call {number}")
        encoder = with_all.captured["ffn_output"][: CONFIG.decoder_start]
        assert (encoder[:, :rows] != 0).any(axis=-1).all()
        assert (encoder[:, rows:] == 0).all()


def abstract_call(rows: int = 48, decoder_rows: int = 48, logit_rows: int = 48) -> tuple[Any, Any, Batch]:
    """(params, state, batch) without values."""

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    state = jax.eval_shape(lambda: init_state(CONFIG, REFERENCE, slots=3, pages=13, row_block=16, max_draft=MAX_DRAFT))
    batch = Batch(
        token_ids=ints(rows),
        positions=ints(rows),
        sequence=ints(rows),
        decoder_rows=ints(decoder_rows),
        logit_rows=ints(logit_rows),
        page_table=ints(3, 4),
        window_start=ints(3),
        encoder_start=ints(3),
        page_start=ints(3),
        image_mask=jax.ShapeDtypeStruct((rows,), jnp.bool_),  # type: ignore[arg-type]
    )
    return abstract_params(CONFIG), state, batch


def shapes_of(batch_sizes: dict[str, int], **settings: Any) -> Any:
    return jax.eval_shape(
        lambda p, s, b: forward(p, s, b, config=CONFIG, profile=REFERENCE, **settings), *abstract_call(**batch_sizes)
    )


def test_unknown_capture_is_refused() -> None:
    """A misspelt name must not come back as a missing array after an hour of work."""
    with pytest.raises(ValueError, match=r"'atention_input'.*unknown.*attention_input"):
        shapes_of({}, captures=("streams", "atention_input"))


@pytest.mark.parametrize("field", ["token_ids", "decoder_rows", "logit_rows"])
def test_rows_must_fill_blocks(field: str) -> None:
    """Rows beyond the last whole block would never be computed."""
    sizes = {"token_ids": "rows"}.get(field, field)
    with pytest.raises(ValueError, match=rf"batch\.{field}: 40 rows are not a multiple of the row tile 16"):
        shapes_of({sizes: 40})


def test_shapes_of_outputs() -> None:
    """Outputs have the shapes that `Outputs` declares, also with three different row counts."""
    outputs, state = shapes_of({"rows": 64, "decoder_rows": 32, "logit_rows": 16}, captures=("streams", "selection"))
    assert outputs.logits.shape == (16, CONFIG.vocab_size)
    assert outputs.logits.dtype == jnp.float32
    assert outputs.taps.shape == (32, 3 * CONFIG.hidden_size)
    assert outputs.captured["streams"].shape == (CONFIG.num_hidden_layers + 1, 64, CONFIG.hc_mult, CONFIG.hidden_size)
    assert outputs.captured["selection"].shape == (CONFIG.num_hidden_layers, 64, CONFIG.index_topk)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_call()[1]
    )
