"""The differentiable mode (`row_tile=None`): gradients, agreement with the tiles, invariants up to rounding.

A small stack with every kind of source, no rounding (profile f32_noq) and no discrete choice: all experts are
chosen and the selection holds every entry. So results are smooth in every weight.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batching import Chunk, make_batch
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import F32_NOQ
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.engram_hash import bucket_primes
from deepinfer_jax.model.forward import Outputs, forward
from deepinfer_jax.model.init import init_params
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import Batch, init_state

from .harness import change_layers, leaf_of, same

ROWS = 32
CAPTURES = ("streams", "attention_output")
CONFIG = ModelConfig(
    vocab_size=48, hidden_size=64, num_hidden_layers=3, max_position_embeddings=64,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=2,
    sliding_window=8, compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
    index_n_heads=2, index_head_dim=32, index_topk=ROWS,
    candidate_source_layer_id=2, candidate_topk_blocks=1, candidate_block_size=1,
    moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=2,
    engram_layer_ids=(1,), engram_num_embeddings=(sum(bucket_primes(1, 2, 1, 20)[0]),), engram_max_ngram_size=3,
    engram_vocab_size=20, engram_n_heads=1, engram_head_dim=32, engram_compressed_vocab_size=40,
)  # fmt: skip
IDS = np.random.default_rng(3).integers(0, 48, ROWS).tolist()

Leaves = dict[str, Any]


@functools.cache
def params() -> Params:
    return init_params(CONFIG, jax.random.key(1))


def batch_of(ids: list[int], image: tuple[bool, ...] = ()) -> Batch:
    chunk = Chunk(0, 0, ids, len(ids), "all", image)
    return make_batch(CONFIG, [chunk], np.zeros((1, 1), np.int32), rows=ROWS, replay="none")


def start_leaves(weights: Params, ids: list[int]) -> Leaves:
    """What is differentiated, with the types that a trainer may give: float32 or bfloat16, packed weights unpacked."""
    embeddings = np.zeros((ROWS, CONFIG.hidden_size), np.float32)
    embeddings[: len(ids)] = np.asarray(weights.embed, np.float32)[ids]

    def unpacked(layer: int, key: str) -> np.ndarray:
        leaf = jax.tree.map(jnp.asarray, leaf_of(weights, layer, key))
        return np.asarray(dequantize(leaf, jnp.float32))

    return {
        "embeddings": embeddings,
        "head": np.asarray(weights.head, np.float32),
        "norm": np.asarray(weights.norm),
        "1 attn_norm": np.asarray(leaf_of(weights, 1, "attn_norm"), np.float32),
        "1 attn.compressor.wgate": leaf_of(weights, 1, "attn.compressor.wgate"),
        "0 hc_ffn_fn": leaf_of(weights, 0, "hc_ffn_fn"),
        "2 attn.wkv": unpacked(2, "attn.wkv"),
        "0 ffn.shared_experts.w2": unpacked(0, "ffn.shared_experts.w2"),
        "2 attn.attn_sink": leaf_of(weights, 2, "attn.attn_sink"),
    }


def with_leaves(weights: Params, leaves: Leaves) -> Params:
    """Put the leaves into the parameter tree; every run of this plan is one layer, stacked [1, 1, ...]."""
    segments = [[dict(run) for run in runs] for runs in weights.segments]
    for name, leaf in leaves.items():
        layer, _, key = name.partition(" ")
        if key:
            segments[int(layer)][0][key] = leaf[None, None]
    return dataclasses.replace(
        weights, head=leaves["head"], norm=leaves["norm"], segments=tuple(tuple(runs) for runs in segments)
    )


@functools.cache
def whole_program() -> Any:
    """(leaves, params, batch) -> ((sum of log-probabilities, Outputs), gradient)."""

    def likelihood(leaves: Leaves, weights: Params, batch: Batch) -> tuple[jax.Array, Outputs]:
        state = init_state(CONFIG, F32_NOQ, slots=1, pages=1, row_block=ROWS)
        outputs, _ = forward(
            with_leaves(weights, leaves),
            state,
            dataclasses.replace(batch, embeddings=leaves["embeddings"]),
            config=CONFIG,
            profile=F32_NOQ,
            kernels=Kernels(row_tile=None),
            captures=CAPTURES,
            embed_all=True,
        )
        chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs.logits[:-1]), batch.token_ids[1:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(batch.logit_rows[1:] >= 0, chosen, 0)), outputs

    return jit(jax.value_and_grad(likelihood, has_aux=True))


def whole(ids: list[int], weights: Params | None = None, leaves: Leaves | None = None) -> tuple[float, Any, Leaves]:
    """(sum of log-probabilities, Outputs, gradient) with NumPy arrays."""
    weights = weights or params()
    leaves = leaves or start_leaves(weights, ids)
    (value, outputs), gradient = whole_program()(leaves, weights, batch_of(ids))
    return float(value), jax.tree.map(np.asarray, outputs), jax.tree.map(np.asarray, gradient)


def tiled_logits(ids: list[int], embeddings: np.ndarray, image: tuple[bool, ...], leaves: Leaves) -> np.ndarray:
    """The same model in row tiles, with the given embeddings for image rows only."""
    batch = dataclasses.replace(batch_of(ids, image), embeddings=embeddings)
    state = init_state(CONFIG, F32_NOQ, slots=1, pages=1, row_block=ROW_TILE)
    outputs, _ = tiled_program()(with_leaves(params(), leaves), state, batch)
    return np.asarray(outputs.logits)


@functools.cache
def tiled_program() -> Any:
    return jit(functools.partial(forward, config=CONFIG, profile=F32_NOQ))


# ---- gradients ------------------------------------------------------------------------------------------------


@functools.cache
def gradient() -> Leaves:
    return whole(IDS)[2]


STEPS = {
    "embeddings": 3e-3,
    "head": 1e-2,
    "norm": 1e-2,
    "1 attn_norm": 1e-2,
    "1 attn.compressor.wgate": 3e-3,
    "0 hc_ffn_fn": 1e-2,
    "2 attn.wkv": 3e-3,
    "0 ffn.shared_experts.w2": 3e-3,
    "2 attn.attn_sink": 0.1,
}
"""Step of the differences relative to the leaf's norm: large against rounding, small against curvature."""


def likelihood_of(logits: np.ndarray) -> float:
    """The sum of log-probabilities in float64, without the rounding of a float32 sum."""
    values = logits[:-1].astype(np.float64)
    return float(np.sum(values[np.arange(ROWS - 1), IDS[1:]] - np.log(np.exp(values).sum(axis=1))))


@pytest.mark.parametrize("name", STEPS)
def test_gradients(name: str) -> None:
    """Directional derivatives by central differences: along the gradient, which checks its size, and at random."""
    leaves, found = start_leaves(params(), IDS), gradient()[name]
    assert leaves.keys() == STEPS.keys()
    assert found.dtype == leaves[name].dtype
    exact = found.astype(np.float64)
    assert np.isfinite(exact).all()
    center = leaves[name].astype(np.float64)
    rng = np.random.default_rng(len(name))
    directions = [exact, *(rng.standard_normal(exact.shape) for _ in range(3))]
    for number, direction in enumerate(directions):
        step = direction * (STEPS[name] * np.linalg.norm(center) / np.linalg.norm(direction))
        above, below = ((center + sign * step).astype(found.dtype) for sign in (1, -1))
        moved = above.astype(np.float64) - below.astype(np.float64)  # bfloat16 leaves move as far as they can
        high, low = (whole(IDS, leaves={**leaves, name: leaf})[1].logits for leaf in (above, below))
        change = likelihood_of(high) - likelihood_of(low)
        predicted = float(np.sum(exact * moved))
        error = abs(change - predicted) / (np.linalg.norm(exact) * np.linalg.norm(moved))
        assert error < (1e-2 if number == 0 else 1e-3), f"direction {number}: {change} instead of {predicted}"


def test_padding_rows_have_no_gradient() -> None:
    """Rows of padding take no part: their embeddings have gradient zero and no leaf becomes NaN through them."""
    _, outputs, found = whole(IDS[:24])
    assert np.isfinite(outputs.logits).all()
    assert not [name for name, leaf in found.items() if not np.isfinite(leaf.astype(np.float32)).all()]
    assert (found["embeddings"][24:] == 0).all()
    assert (found["embeddings"][:23] != 0).any(axis=1).all()


# ---- the same model as in tiles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [range(0), range(9, 15), range(ROWS)], ids=["text", "an image", "images only"])
def test_tiles_give_the_same_numbers(span: range) -> None:
    """Both modes compute one function; embeddings replace the table's rows at image rows, or everywhere if asked."""
    image = tuple(p in span for p in range(ROWS))
    leaves = start_leaves(params(), IDS)
    own = np.random.default_rng(9).standard_normal(leaves["embeddings"].shape).astype(np.float32)
    leaves["embeddings"] = np.where(np.array(image)[:, None], own, leaves["embeddings"])
    (_, outputs), _ = whole_program()(leaves, params(), batch_of(IDS, image))
    tiled = tiled_logits(IDS, own, image, leaves)
    np.testing.assert_allclose(tiled, np.asarray(outputs.logits), rtol=0, atol=1e-4)
    assert np.ptp(tiled, axis=1).min() > 1


# ---- invariants of real-number functions --------------------------------------------------------------------------


def test_window_layers_depend_on_relative_positions() -> None:
    """attention.md 10.2.12: moving a text changes nothing in a window-only layer once the window is full."""
    shared, window = IDS[:14], CONFIG.sliding_window
    early = whole([*IDS[20:22], *shared])[1].captured
    late = whole([*IDS[14:32], *shared])[1].captured
    for name, layer in (("attention_output", 0), ("streams", 1)):
        a = early[name][layer, 2 + window - 1 : 16]
        b = late[name][layer, 18 + window - 1 : 32]
        assert np.abs(a - b).max() < 1e-3, name
        assert np.abs(a).max() > 0.1
    # before the window is full, and in a layer that reads everything, earlier text does matter
    assert np.abs(early["streams"][1, 2:9] - late["streams"][1, 18:25]).max(axis=(1, 2)).min() > 1e-2
    assert np.abs(early["streams"][2, 9:16] - late["streams"][2, 25:32]).max(axis=(1, 2)).min() > 1e-2


ORDER = [0, 3, 1, 2]  # the first stream stays: the collapse starts with it alone


def permute_streams(key: str, _layer: int, leaf: Any) -> Any:
    """Weights of the same model with its residual streams in another order."""
    size = CONFIG.hidden_size
    count = CONFIG.hc_mult
    rows = [*ORDER, *(count + i for i in ORDER), *(2 * count + count * i + j for i in ORDER for j in ORDER)]
    columns = np.concatenate([np.arange(size) + size * stream for stream in ORDER])
    if key in ("hc_attn_fn", "hc_ffn_fn"):
        return leaf[rows][:, columns]
    if key in ("hc_attn_base", "hc_ffn_base"):
        return leaf[rows]
    if key in ("engram.q_weight", "engram.k_weight"):
        return leaf[ORDER]
    if key == "engram.wkv":
        keys_then_value = [*ORDER, count]

        def blocks(values: np.ndarray) -> np.ndarray:
            return values.reshape(count + 1, -1, values.shape[1])[keys_then_value].reshape(values.shape)

        return QuantTensor(blocks(leaf.data), blocks(leaf.scale), leaf.format)  # type: ignore[arg-type]
    return leaf


def test_streams_may_be_in_any_order() -> None:
    """blocks.md 8.3.6: permuted streams with consistently permuted weights are permuted results and equal logits."""
    plain = whole(IDS)[1]
    moved = whole(IDS, change_layers(params(), range(CONFIG.num_hidden_layers), permute_streams))[1]
    np.testing.assert_allclose(moved.logits, plain.logits, rtol=0, atol=1e-4)
    want = plain.captured["streams"]
    np.testing.assert_allclose(moved.captured["streams"], want[:, :, ORDER], rtol=0, atol=1e-4)
    assert np.abs(want[1:] - want[1:, :, ORDER]).max(axis=(1, 2, 3)).min() > 0.1
    assert same(want[0], want[0][:, ORDER])
