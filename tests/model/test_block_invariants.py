"""Invariants of Engram, hyper-connections and routing in the whole model (`spec/blocks.md` 2.4 and 8.3).

Everything compares bits: weights are arguments of the compiled program, so a changed weight changes nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.mhc_mix import collapse_norm
from deepinfer_jax.kernels.rms_norm_quant import rms_norm
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import Params

from .harness import (
    assert_same_arrays,
    captured_run,
    change_layers,
    from_other,
    leaf_of,
    micro_params,
    raw,
    same,
    zeroed,
)

CONFIG = ModelConfig.micro()
EVERY = range(CONFIG.num_hidden_layers)
ENGRAM = CONFIG.engram_layer_ids
ENGRAM_KEYS = ["engram.embed", "engram.wkv", "engram.q_weight", "engram.k_weight"]
IDS = np.random.default_rng(83).integers(0, 92, 41).tolist()
IMAGE = [False] * 41
IMAGE[5:11] = [True] * 6
IMAGE[14:16] = [True] * 2

Captured = dict[str, np.ndarray]


@functools.cache
def base(with_image: bool = False) -> tuple[np.ndarray, Captured]:
    """(logits, captures) of the unchanged model."""
    return captured_run(IDS, image=IMAGE if with_image else ())[:2]


def different_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [T]: rows with other bytes."""
    return (raw(a) != raw(b)).any(axis=1)


def rows_of_16(count: int) -> int:
    return -(-count // 16) * 16


@functools.cache
def _norm_program() -> Any:
    return jit(lambda x, weight: rms_norm(x, weight, eps=CONFIG.rms_norm_eps))


def normed_embedding(params: Params, ids: list[int], layer: int = 0) -> np.ndarray:
    """RMSNorm of the embedding rows with the attention norm of a layer."""
    x = np.asarray(params.embed)[np.pad(ids, (0, rows_of_16(len(ids)) - len(ids)))]
    return np.asarray(_norm_program()(x, leaf_of(params, layer, "attn_norm")))[: len(ids)]


@functools.cache
def _collapse_program() -> Any:
    return jit(lambda streams, pre, weight: collapse_norm(streams, pre, weight, eps=CONFIG.rms_norm_eps))


def collapsed(streams: np.ndarray, pre: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Collapsed and normed streams of 41 rows."""
    missing = rows_of_16(len(streams)) - len(streams)
    padded = np.pad(streams.astype(np.float32), ((0, missing), (0, 0), (0, 0))).astype(streams.dtype)
    return np.asarray(_collapse_program()(padded, np.pad(pre, ((0, missing), (0, 0))), weight))[: len(streams)]


# ---- first layer and Engram -------------------------------------------------------------------------------


def test_first_attention_input_is_the_normed_embedding() -> None:
    """8.3.4: one-hot weights and equal streams collapse to the embedding itself; silent Engram adds exactly nothing."""
    silent = change_layers(micro_params(), ENGRAM, zeroed, ["engram.wkv"])
    captured = captured_run(IDS, silent)[1]
    assert same(captured["attention_input"][0], normed_embedding(silent, IDS))
    assert (captured["pre"][0] == np.eye(CONFIG.hc_mult, dtype=np.float32)[0]).all()
    for stream in range(CONFIG.hc_mult):
        assert same(captured["streams"][0, :, stream], np.asarray(silent.embed)[IDS])


def test_image_rows_pass_through_engram_unchanged() -> None:
    """8.3.3: at the first layer image rows keep the embedding's exact bits, all other rows do not."""
    captured = base(with_image=True)[1]
    image = np.array(IMAGE)
    want = normed_embedding(micro_params(), IDS)
    assert (different_rows(captured["attention_input"][0], want) == ~image).all()
    for layer in ENGRAM:
        assert (captured["engram_gate"][layer, image] == 0).all()
        assert (captured["engram_gate"][layer, ~image] > 0).all()


def test_a_sequence_of_image_rows_does_not_see_engram() -> None:
    """8.3.3: with images only, no Engram weight has any effect at any layer."""
    image = [True] * len(IDS)
    other = change_layers(micro_params(), ENGRAM, from_other, ENGRAM_KEYS)
    logits, captured, _ = captured_run(IDS, image=image)
    logits_other, captured_other, _ = captured_run(IDS, other, image)
    assert same(logits_other, logits)
    assert_same_arrays(captured_other, captured, "images only")
    assert different_rows(captured_run(IDS, other)[0], base()[0]).all()


def test_engram_comes_between_pre_and_its_use() -> None:
    """2.4: collapse weights of an Engram layer are predicted from the streams before it and applied to those after."""
    layer = ENGRAM[1]
    logits, captured = base()
    loud = change_layers(micro_params(), [layer], from_other, ENGRAM_KEYS)
    _, other, _ = captured_run(IDS, loud)
    assert same(other["pre"][layer], captured["pre"][layer])
    assert same(other["streams"][layer], captured["streams"][layer])
    assert different_rows(other["attention_input"][layer], captured["attention_input"][layer]).all()

    silent = change_layers(micro_params(), [layer], zeroed, ["engram.wkv"])
    _, quiet, _ = captured_run(IDS, silent)
    streams, pre = captured["streams"][layer], captured["pre"][layer]
    before = collapsed(streams, pre, leaf_of(silent, layer, "attn_norm"))
    assert same(quiet["attention_input"][layer], before)
    assert different_rows(captured["attention_input"][layer], before).all()
    assert np.isfinite(logits).all()


# ---- the lag of `pre` ---------------------------------------------------------------------------------------


def perturbed_pre(layer: int, which: str) -> Params:
    """Weights with another prediction of `pre` in one sublayer."""

    def change(_key: str, _layer: int, leaf: np.ndarray) -> np.ndarray:
        leaf[: CONFIG.hc_mult] += 0.25
        return leaf

    return change_layers(micro_params(), [layer], change, [f"hc_{which}_base"])


@pytest.mark.parametrize("layer", [2, 3, 7])
def test_ffn_pre_acts_in_the_next_attention(layer: int) -> None:
    """8.3.5: what the FFN sublayer of layer l predicts first shows in the attention of layer l+1."""
    _, captured = base()
    _, other, _ = captured_run(IDS, perturbed_pre(layer, "ffn"))
    for name in ("attention_input", "attention_output", "ffn_input", "ffn_output"):
        assert same(other[name][: layer + 1], captured[name][: layer + 1]), name
    assert same(other["streams"][: layer + 2], captured["streams"][: layer + 2])
    assert same(other["pre"][: layer + 1], captured["pre"][: layer + 1])
    assert different_rows(other["pre"][layer + 1], captured["pre"][layer + 1]).all()
    assert different_rows(other["attention_input"][layer + 1], captured["attention_input"][layer + 1]).all()


@pytest.mark.parametrize("layer", [0, 4])
def test_attention_pre_acts_in_the_ffn_of_its_layer(layer: int) -> None:
    """8.3.5: what the attention sublayer predicts collapses the streams for the FFN of the same layer."""
    _, captured = base()
    _, other, _ = captured_run(IDS, perturbed_pre(layer, "attn"))
    for name in ("attention_input", "attention_output"):
        assert same(other[name][: layer + 1], captured[name][: layer + 1]), name
    assert same(other["streams"][: layer + 1], captured["streams"][: layer + 1])
    assert different_rows(other["ffn_input"][layer], captured["ffn_input"][layer]).all()


def test_last_pre_acts_in_the_output() -> None:
    """8.3.5: the last layer's FFN weights collapse the final streams; there is no head of its own for that."""
    last = CONFIG.num_hidden_layers - 1
    logits, captured = base()
    changed, other, _ = captured_run(IDS, perturbed_pre(last, "ffn"))
    assert same(other["streams"], captured["streams"])
    assert different_rows(changed, logits).all()

    params = micro_params()
    normed = collapsed(captured["streams"][-1], captured["pre"][-1], np.asarray(params.norm)).astype(np.float64)
    want = normed @ np.asarray(params.head).astype(np.float64).T
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)


# ---- routing --------------------------------------------------------------------------------------------------


def test_routing_weights_add_up() -> None:
    """8.3.7: the chosen experts' weights sum to the routed scaling factor at every row of every layer."""
    captured = base()[1]
    total = captured["router_weights"].sum(axis=-1)
    np.testing.assert_allclose(total, CONFIG.routed_scaling_factor, rtol=1e-6)
    ids = captured["router_ids"]
    assert (np.diff(ids, axis=-1) > 0).all()
    assert (ids >= 0).all()
    assert (ids < CONFIG.n_routed_experts).all()
    assert all(len(np.unique(ids[layer])) == CONFIG.n_routed_experts for layer in EVERY)


def test_image_mask_matters_to_routing_through_its_bias_only() -> None:
    """8.3.7: with silent Engram and equal biases an image row is a text row; with its own bias it is not."""
    silent = change_layers(micro_params(), ENGRAM, zeroed, ["engram.wkv"])

    def text_bias(_key: str, layer: int, _leaf: Any) -> Any:
        return leaf_of(micro_params(), layer, "ffn.gate.bias")

    equal = change_layers(silent, EVERY, text_bias, ["ffn.gate.bias_vl"])
    keep = ("router_ids", "router_weights", "streams", "attention_output", "selection")
    logits, captured, _ = captured_run(IDS, equal)
    logits_image, captured_image, _ = captured_run(IDS, equal, IMAGE)
    assert same(logits_image, logits)
    assert_same_arrays({k: captured_image[k] for k in keep}, {k: captured[k] for k in keep}, "equal biases")

    def favour_one(_key: str, layer: int, leaf: np.ndarray) -> np.ndarray:
        leaf[layer % CONFIG.n_routed_experts] = 100.0
        return leaf

    # Images go to one expert, text as before; the first layer's rows can be told apart without doubt.
    biased = change_layers(equal, EVERY, favour_one, ["ffn.gate.bias_vl"])
    assert same(captured_run(IDS, biased)[0], logits)
    routed = captured_run(IDS, biased, IMAGE)[1]["router_ids"]
    image = np.array(IMAGE)
    for layer in EVERY:
        assert (routed[layer, image] == layer % CONFIG.n_routed_experts).any(axis=-1).all()
    assert same(routed[0, ~image], captured["router_ids"][0, ~image])


def test_constant_bias_changes_nothing() -> None:
    """8.3.7: a constant added to every bias moves no selection. Powers of two keep the sums exact."""

    def shifted(_key: str, _layer: int, leaf: np.ndarray) -> np.ndarray:
        return np.round(leaf * 64) / 64

    rounded = change_layers(micro_params(), EVERY, shifted, ["ffn.gate.bias"])
    moved = change_layers(rounded, EVERY, lambda _key, _layer, leaf: leaf + 0.5, ["ffn.gate.bias"])
    assert same(captured_run(IDS, moved)[0], captured_run(IDS, rounded)[0])


def test_dtype_of_streams() -> None:
    """2.5: streams and sublayer outputs are bfloat16 in the reference profile, collapse weights float32."""
    captured = base()[1]
    for name in ("streams", "attention_input", "attention_output", "ffn_input", "ffn_output"):
        assert captured[name].dtype == jnp.bfloat16, name
    for name in ("pre", "router_weights", "index_scores", "engram_gate"):
        assert captured[name].dtype == np.float32, name
