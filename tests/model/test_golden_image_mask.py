"""Rows of an image span inside a prompt: routing bias, Engram look-back and gate (embeddings are plain table rows)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from .golden import Arrays, Model, Run, load_results, of_prompt, padded_selection

TOLERANCE = 1e-4
MODES = ["f32_noq", "f32_kvq", pytest.param("ref_bf16", marks=pytest.mark.long)]


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """Twenty tokens with image spans 5..10 and 14..15: the model's run and the recorded results."""

    model: Model
    run: Run
    want: Arrays
    image: np.ndarray

    @property
    def exact(self) -> bool:
        """Modes without bfloat16 agree through all layers."""
        return not self.model.profile.bf16_activations


@pytest.fixture(scope="session", params=MODES)
def image_prompt(request: pytest.FixtureRequest, golden_model: Callable[[str, str], Model]) -> ImagePrompt:
    """The prompt in one mode."""
    stored = load_results("g3_full", "image_mask")
    image = stored["image_mask"].astype(bool)
    model = golden_model("g3_full", request.param)
    return ImagePrompt(model, model.prefill(stored["input_ids"], image), of_prompt(stored, request.param), image)


def test_engram_stops_at_an_image(image_prompt: ImagePrompt) -> None:
    """Guards the look-back: behind an image token everything is the pad class, and image rows get no memory."""
    captured, want = image_prompt.run.captured, image_prompt.want
    for place, layer in enumerate(image_prompt.model.config.engram_layer_ids):
        np.testing.assert_array_equal(captured["engram_rows"][layer], want["engram_hash"][:, place])
        gate = captured["engram_gate"][layer]
        assert not gate[image_prompt.image].any(), f"layer {layer}: an image row has a gate"
        if image_prompt.exact:
            np.testing.assert_allclose(gate, want[f"engram_gate/{layer}"], rtol=0, atol=TOLERANCE)


def test_experts_of_image_rows(image_prompt: ImagePrompt) -> None:
    """Guards the second routing bias, `bias_vl`, on exactly the image rows."""
    layers = slice(None) if image_prompt.exact else slice(0, 1)  # bfloat16: see `test_golden_layers.py`
    captured, want = image_prompt.run.captured, image_prompt.want
    np.testing.assert_array_equal(captured["router_ids"][layers], want["router_idx"][layers])
    weights = captured["router_weights"][layers]
    np.testing.assert_allclose(
        weights, want["router_w"][layers], rtol=0, atol=TOLERANCE if image_prompt.exact else 1e-2
    )


def test_results(image_prompt: ImagePrompt) -> None:
    """Guards the whole pass with a mask; in bfloat16 most rows agree, single rows may take another expert."""
    run, want = image_prompt.run, image_prompt.want
    streams = run.captured["streams"][-1]
    if image_prompt.exact:
        for layer in image_prompt.model.config.index_source_layer_ids:
            selected = padded_selection(image_prompt.model.config, want[f"index_topk/{layer}"])
            np.testing.assert_array_equal(run.captured["selection"][layer], selected, err_msg=f"layer {layer}")
        np.testing.assert_allclose(run.logits, want["logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(streams, want["final_streams"], rtol=0, atol=TOLERANCE)
        return
    error = np.linalg.norm((streams - want["final_streams"]).reshape(len(streams), -1), axis=1)
    error /= np.linalg.norm(want["final_streams"].reshape(len(streams), -1), axis=1)
    assert np.median(error) <= 2e-2
    assert (run.logits.argmax(-1) == want["logits"].argmax(-1)).mean() >= 0.9


def test_the_mask_matters(image_prompt: ImagePrompt) -> None:
    """Guards against a mask that is dropped on the way: the same ids as text give other logits."""
    stored = load_results("g3_full", "image_mask")
    text = image_prompt.model.prefill(stored["input_ids"])
    assert np.abs(text.logits - image_prompt.run.logits).max() > 5
