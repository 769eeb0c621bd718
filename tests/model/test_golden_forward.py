"""The forward pass in float32 against recorded results of independent implementations.

Modes: `f32_noq` without quantised caches and activations, `f32_kvq` with quantised caches, `f32_allq` with both. Every
prompt is one prefill of an empty paged state, then 24 greedy tokens, one row per call. Integers must be equal; floats
agree within TOLERANCE. Where values are quantised, the one accepted difference is a proven rounding flip
(`rounding_flip.py`); results of the layers after it are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.model.state import pooling_sources

from .golden import (
    Arrays,
    Model,
    Run,
    candidate_blocks_of,
    existing_blocks,
    in_parallel,
    load_results,
    of_prompt,
    padded_selection,
    page_records,
    unpacked,
    window_records,
)
from .rounding_flip import Situation, Trace, WatchedLayers, find_flip, first_difference, one_code_apart

TOLERANCE = 1e-4
LONG = pytest.mark.long
PROMPTS = {"f32_noq": ("p1", "p7", "p33", "p64"), "f32_kvq": ("p1", "p7", "p33", "p64"), "f32_allq": ("p1", "p7")}
MODELS = (
    ("g1_attn", "f32_noq", ()),
    ("g2_engram", "f32_noq", ()),
    ("g3_full", "f32_noq", ()),
    ("g1_attn", "f32_kvq", ()),
    ("g3_full", "f32_kvq", ()),
    ("g2_engram", "f32_kvq", (LONG,)),
    ("g1_attn", "f32_allq", (LONG,)),
    ("g3_full", "f32_allq", (LONG,)),
)


def cases(*, models: tuple[str, ...] = (), prompts: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> list:
    """Parameters of `case`: all, or those of the named models and prompts; without some modes or "model-mode"s."""
    return [
        pytest.param((name, mode, prompt), marks=marks, id=f"{name}-{mode}-{prompt}")
        for name, mode, marks in MODELS
        for prompt in PROMPTS[mode]
        if (not models or name in models)
        and (not prompts or prompt in prompts)
        and mode not in without
        and f"{name}-{mode}" not in without
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt: what the model gave, what was recorded, and how many layers must agree."""

    model: Model
    mode: str
    run: Run
    want: Arrays
    depth: int

    @property
    def whole(self) -> bool:
        """No rounding flip: everything must agree."""
        return self.depth == self.model.config.num_hidden_layers

    def sources(self, key: str) -> Iterator[tuple[int, np.ndarray]]:
        """(layer, recorded array) of "<key>/<layer>", of the layers that must agree."""
        for layer in range(self.depth):
            if f"{key}/{layer}" in self.want:
                yield layer, self.want[f"{key}/{layer}"]


def traces(run: Run, want: Arrays) -> tuple[Trace, Trace]:
    """Recorded and own values between layers; without recorded streams only the collapse weights count."""
    count = run.logits.shape[0]
    rows = want.get("stream_rows", np.zeros(0, int)).astype(int)
    streams = run.captured["streams"]
    recorded = want.get("streams", streams[:, :0])
    return Trace(recorded, rows, want["pre"]), Trace(streams, np.arange(count), run.captured["pre"])


def largest_difference(run: Run, want: Arrays) -> float:
    """Of logits, streams and collapse weights."""
    rows = np.asarray(want.get("logit_rows", np.arange(run.logits.shape[0])), int)
    differences = [np.abs(run.logits[rows] - want["logits"]).max()]
    if "pre" in want:
        recorded, got = traces(run, want)
        differences.append(np.abs(got.pre - recorded.pre).max())
        differences.append(np.abs(got.streams[:, recorded.stream_rows] - recorded.streams).max(initial=0.0))
    return float(max(differences))


def agreeing_layers(model: Model, run: Run, want: Arrays) -> int:
    """All layers, or those before a proven rounding flip. Fails for any other difference."""
    layers = model.config.num_hidden_layers
    if largest_difference(run, want) <= TOLERANCE or not model.profile.quantize_cache:
        return layers
    assert "pre" in want, "logits differ, and nothing is recorded that could show a rounding flip"
    recorded, got = traces(run, want)
    last = first_difference(recorded, got)
    assert last is not None, "logits differ although everything that enters the head agrees"
    assert last >= 0, "the embedded rows differ"
    layers = WatchedLayers(model.config, model.params, model.profile)
    situation = Situation(
        layers=layers,
        prompt=layers.prompt(want["input_ids"], want.get("engram_hash")),
        got=got,
        selection=run.captured["selection"],
        candidates=run.captured["candidates"],
        pages=run.state.pages,
    )
    flip = find_flip(recorded, situation)
    assert flip is not None, f"layer {last} is the first that differs, and no rounding flip explains it"
    return min(flip.border.layer, last)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, golden_model: Callable[[str, str], Model]) -> None:
    """Compiles the programs of all selected tests, two at a time."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = dict.fromkeys(item.callspec.params["case"][:2] for item in items)
    in_parallel([golden_model(name, mode).compile for name, mode in chosen])


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, golden_model: Callable[[str, str], Model], compiled: None) -> Case:
    """One prompt's prefill."""
    name, mode, prompt = request.param
    model = golden_model(name, mode)
    want = of_prompt(load_results(name, mode), prompt)
    run = model.prefill(want["input_ids"])
    return Case(model, mode, run, want, agreeing_layers(model, run, want))


def test_logits_streams_and_collapse_weights(case: Case) -> None:
    """Guards the whole chain: any wrong rule in any layer moves logits by percents of their spread."""
    if case.whole:
        assert largest_difference(case.run, case.want) <= TOLERANCE
    elif "pre" in case.want:
        recorded, got = traces(case.run, case.want)
        difference = first_difference(recorded, got)
        assert difference is not None
        assert difference >= case.depth


def test_experts(case: Case) -> None:
    """Guards the router: scores, bias, ties, normalisation, scale, order of experts."""
    layers = slice(0, case.depth)
    np.testing.assert_array_equal(case.run.captured["router_ids"][layers], case.want["router_idx"][layers])
    weights = case.run.captured["router_weights"][layers]
    np.testing.assert_allclose(weights, case.want["router_w"][layers], rtol=0, atol=TOLERANCE)


def test_selection(case: Case) -> None:
    """Guards index scores, visibility and top-k: entries ascending, -1 at the end."""
    for layer, recorded in case.sources("index_topk"):
        got = case.run.captured["selection"][layer]
        np.testing.assert_array_equal(got, padded_selection(case.model.config, recorded), err_msg=f"layer {layer}")


def test_candidate_blocks(case: Case) -> None:
    """Guards the candidate source: which blocks it keeps, and that the newest block is among them."""
    for layer, recorded in case.sources("cand_mask"):
        got = case.run.captured["candidates"][layer]
        exists = existing_blocks(case.model.config, layer, *got.shape)
        want = candidate_blocks_of(case.model.config, recorded, got.shape[1])
        np.testing.assert_array_equal(got & exists, want, err_msg=f"layer {layer}")


@pytest.mark.parametrize("case", cases(models=("g2_engram", "g3_full")), indirect=True)
def test_engram(case: Case) -> None:
    """Guards n-gram classes, multipliers, moduli and the gate of every Engram layer."""
    for place, layer in enumerate(case.model.config.engram_layer_ids):
        rows = case.run.captured["engram_rows"][layer]
        np.testing.assert_array_equal(rows, case.want["engram_hash"][:, place], err_msg=f"layer {layer}")
        if layer < case.depth and f"engram_gate/{layer}" in case.want:
            gate = case.run.captured["engram_gate"][layer]
            np.testing.assert_allclose(gate, case.want[f"engram_gate/{layer}"], rtol=0, atol=TOLERANCE)


def assert_same_cache(records: np.ndarray, want: np.ndarray, fmt: str, what: str) -> None:
    """Stored vectors are those recorded; a quantised vector may hold one neighbouring code."""
    if fmt == "float32":
        np.testing.assert_allclose(unpacked(records, fmt, want.shape[-1]), want, rtol=0, atol=TOLERANCE, err_msg=what)
        return
    differs, explained = one_code_apart(records, want, fmt)
    assert not (differs & ~explained).any(), f"{what}: elements differ by more than one code"
    assert differs.sum(axis=-1).max() <= 1, f"{what}: more than one element of a vector differs"
    assert differs.sum() <= 1 + differs.size // 2000, f"{what}: {differs.sum()} of {differs.size} codes differ"


@pytest.mark.parametrize("case", cases(prompts=("p7", "p33"), without=("g2_engram-f32_noq",)), indirect=True)
def test_cache_contents(case: Case) -> None:
    """Guards what later tokens read: rotation, quantisation, packing, and the place of every record."""
    config, profile, state = case.model.config, case.model.profile, case.run.state
    count = case.run.logits.shape[0]
    if "window_kv" in case.want:
        for layer in range(case.depth):
            positions, records = window_records(state, layer, count, state.window.shape[2])
            want = case.want["window_kv"][layer, positions]
            assert_same_cache(records, want, profile.window_format, f"window of layer {layer}")
    for key, which, fmt in (("ckv", "kv", profile.compressed_format), ("ik", "index", profile.index_format)):
        for source, want in case.sources(key):
            records = page_records(config, state, source, len(want), which)
            assert_same_cache(records, want, fmt, f"{key} of layer {source}")


@pytest.mark.parametrize("case", cases(prompts=("p7", "p33"), without=("f32_allq", "g2_engram-f32_noq")), indirect=True)
def test_open_group(case: Case) -> None:
    """Guards the token that waits for its partner when a prompt of odd length ends: its value and gate."""
    newest = case.run.logits.shape[0] - 1
    for place, (key, name) in enumerate((("open_kv", "value"), ("open_gate", "gate"))):
        for source, want in case.sources(key):
            groups = np.asarray(case.run.state.open_groups)
            got = groups[pooling_sources(case.model.config).index(source), 0, newest % groups.shape[2], place]
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=f"{name} of layer {source}")


def test_greedy_tokens(case: Case) -> None:
    """Guards decoding from the state: rings, pages, open groups and look-back after the prompt, row by row."""
    if not case.whole:
        pytest.skip("after a rounding flip the recorded continuation belongs to slightly different caches")
    first = case.run.logits.shape[0]
    want = case.want["greedy_ids"].astype(int)
    rows = case.want.get("greedy_rows", np.zeros(0, int))
    kept = {int(row): case.want["greedy_logits"][place] for place, row in enumerate(rows)}
    state, logits = case.run.state, case.run.logits[-1]
    for step, token in enumerate(want):
        assert int(np.argmax(logits)) == token, f"greedy token {step}"
        if step in kept:
            np.testing.assert_allclose(logits, kept[step], rtol=0, atol=TOLERANCE, err_msg=f"greedy step {step}")
        if step + 1 < len(want):
            after = case.model.decode(state, token, first + step)
            state, logits = after.state, after.logits[0]
