"""The default numerics, one layer at a time, against recorded results of the reference rounding in bfloat16.

Over many layers bfloat16 results of two correct implementations part: one value at a rounding border, then another
expert or another selected entry. So each layer gets its recorded input, and the selection and candidates in force
are the recorded ones. What remains is the arithmetic of one layer, and its rounding flips: another order of
accumulation moved the recorded results by the floors in `layerwise_noise.json`, most rows not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.kernels.profile import REFERENCE
from deepinfer_jax.model.plan import layer_kind

from .golden import (
    Arrays,
    Layers,
    Model,
    as_numpy,
    candidate_blocks_of,
    existing_blocks,
    load_model,
    load_results,
    noise_floors,
    of_prompt,
    padded_selection,
    page_records,
    window_records,
)
from .rounding_flip import one_code_apart

CASES = [
    ("g1_attn", "p33"),
    ("g1_attn", "p7"),
    # Compiling is the cost, and Engram layers in bfloat16 are also in g3_full.
    pytest.param(("g2_engram", "p7"), marks=pytest.mark.long),
    ("g3_full", "p33"),
    ("g3_full", "p7"),
]

WORST_ROW = 1e-2
"""Relative L2 error of a row with rounding flips. The floors' worst is 7.2e-3, one code of an activation; which rows
flip, and in which layer, is a matter of the order of sums, so the bound is the same for every layer."""

WORST_COLLAPSE_WEIGHT = 2e-3
"""Largest change of a collapse weight in such a row; the floors' worst is 9.1e-4."""

EXACT_ROWS = 0.7
"""Least share of rows whose streams are equal bit for bit. The floors' least is 0.86, one of 7 rows; another form of an
inverse root or another order of sums flips a rounding in a second one of 7 (errors of 1e-7 on a CPU, 1e-3 on a GPU)."""


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """Output of one layer, and what was recorded. Rows with a tied score at the border of a choice are left out."""

    layer: int
    streams: np.ndarray
    pre: np.ndarray
    want_streams: np.ndarray
    want_pre: np.ndarray
    router_ids: np.ndarray
    want_router_ids: np.ndarray
    selection: np.ndarray | None
    want_selection: np.ndarray | None
    candidates: np.ndarray | None
    want_candidates: np.ndarray | None

    @property
    def row_errors(self) -> np.ndarray:
        """Relative L2 error of every row's streams."""
        difference = (self.streams - self.want_streams).reshape(len(self.streams), -1)
        return np.linalg.norm(difference, axis=1) / np.linalg.norm(
            self.want_streams.reshape(len(self.streams), -1), axis=1
        )


@dataclasses.dataclass(frozen=True)
class Walk:
    """All layers of one prompt, and the state that they left."""

    layers: Layers
    want: Arrays
    results: list[LayerResult]
    state: Any


def untied(want: Arrays, layer: int, count: int) -> np.ndarray:
    """Rows whose choice at this layer is not tied: bfloat16 scores can be equal, then any choice is right."""
    kept = np.ones(count, bool)
    for key in (f"index_gap/{layer}", f"cand_gap/{layer}"):
        if key in want:
            kept &= want[key] != 0
    return kept


def walk(layers: Layers, want: Arrays) -> Walk:
    """Run every layer from its recorded input."""
    config, count = layers.config, len(want["input_ids"])
    prompt = layers.prompt(want["input_ids"], want.get("engram_hash"))
    state, results = layers.empty_state(), []
    selection = candidates = None
    for layer in range(config.num_hidden_layers):
        flow = layers.flow(prompt, state, want["streams"][layer], want["pre"][layer], selection, candidates)
        flow = layers.run(layer, prompt, flow)
        state = flow.state
        kept = untied(want, layer, count)
        chosen = published = None
        if f"index_topk/{layer}" in want:
            selection = padded_selection(config, want[f"index_topk/{layer}"])
            chosen = np.asarray(flow.selection)[:count]
        exists = None
        if layer_kind(config, layer).candidate_source:
            published = np.asarray(flow.candidates)[:count]
            candidates = candidate_blocks_of(config, want[f"cand_mask/{layer}"], published.shape[1])
            exists = existing_blocks(config, layer, *published.shape)
        results.append(
            LayerResult(
                layer=layer,
                streams=as_numpy(flow.streams)[:count][kept],
                pre=np.asarray(flow.pre)[:count][kept],
                want_streams=want["streams"][layer + 1][kept],
                want_pre=want["pre"][layer + 1][kept],
                router_ids=np.asarray(flow.captured["router_ids"])[layer, :count][kept],
                want_router_ids=want["router_idx"][layer][kept],
                selection=None if chosen is None else chosen[kept],
                want_selection=None if chosen is None or selection is None else selection[kept],
                candidates=None if published is None else (published & exists)[kept],
                want_candidates=None if published is None or candidates is None else (candidates & exists)[kept],
            )
        )
    return Walk(layers, want, results, state)


@pytest.fixture(scope="module")
def compiled_layers() -> dict[str, Layers]:
    """Models whose layers are compiled already."""
    return {}


def layers_of(name: str, compiled: dict[str, Layers]) -> Layers:
    """The layers of one model, compiled once."""
    if name not in compiled:
        compiled[name] = Layers(*load_model(name), REFERENCE)
    return compiled[name]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def walked(request: pytest.FixtureRequest, compiled_layers: dict[str, Layers]) -> Walk:
    """One prompt through the layers of one model."""
    name, prompt = request.param
    return walk(layers_of(name, compiled_layers), of_prompt(load_results(name, "ref_bf16"), prompt))


def test_streams(walked: Walk) -> None:
    """Guards every rounding of the default profile: one missing rounding leaves hardly a row exact."""
    for result in walked.results:
        errors = result.row_errors
        assert (errors == 0).mean() >= EXACT_ROWS, f"layer {result.layer}: rows with errors {np.flatnonzero(errors)}"
        assert errors.max() <= WORST_ROW, f"layer {result.layer}"


def test_collapse_weights(walked: Walk) -> None:
    """Guards the float32 hyper-connection mixes: 20 Sinkhorn rounds, sigmoids and their lag of one sublayer."""
    for result in walked.results:
        difference = np.abs(result.pre - result.want_pre).max(axis=1)
        exact = result.row_errors == 0
        assert difference.max() <= WORST_COLLAPSE_WEIGHT, f"layer {result.layer}"
        assert np.median(difference[exact]) <= 1e-6, f"layer {result.layer}"


def test_experts(walked: Walk) -> None:
    """Guards the router of each layer on exactly recorded inputs."""
    for result in walked.results:
        np.testing.assert_array_equal(result.router_ids, result.want_router_ids, err_msg=f"layer {result.layer}")


def test_selections_and_candidates(walked: Walk) -> None:
    """Guards the bfloat16 chain of index scores: each product and sum rounded where the reference rounds."""
    checked = 0
    for result in walked.results:
        if result.selection is not None:
            np.testing.assert_array_equal(result.selection, result.want_selection, err_msg=f"layer {result.layer}")
            checked += 1
        if result.candidates is not None:
            np.testing.assert_array_equal(result.candidates, result.want_candidates, err_msg=f"layer {result.layer}")
            checked += 1
    assert checked == len(walked.layers.config.index_source_layer_ids) + 1


def test_cache_contents(walked: Walk) -> None:
    """Guards the key paths: norm, rotation, bfloat16, then exact quantisation, on window, latent and index keys."""
    config, profile, want = walked.layers.config, walked.layers.profile, walked.want
    count = len(want["input_ids"])
    stored = [
        (
            f"window of layer {layer}",
            window_records(walked.state, layer, count, count)[1],
            values,
            profile.window_format,
        )
        for layer, values in enumerate(want["window_kv"])
    ]
    for source in config.kv_source_layer_ids:
        for key, which, fmt in (("ckv", "kv", profile.compressed_format), ("ik", "index", profile.index_format)):
            values = want[f"{key}/{source}"]
            records = page_records(config, walked.state, source, len(values), which)
            stored.append((f"{key} of layer {source}", records, values, fmt))
    for what, records, values, fmt in stored:
        differs, explained = one_code_apart(records, values, fmt)
        assert not (differs & ~explained).any(), f"{what}: elements differ by more than one code"
        assert differs.sum() <= 1 + differs.size // 1000, f"{what}: {differs.sum()} of {differs.size} codes differ"


def test_head(walked: Walk) -> None:
    """Guards the last collapse, norm and vocabulary product, which rounds once, to bfloat16, before the product."""
    want = walked.want
    prompt = walked.layers.prompt(want["input_ids"], want.get("engram_hash"))
    difference = np.abs(walked.layers.logits(prompt, want["streams"][-1], want["pre"][-1]) - want["logits"]).max(axis=1)
    assert np.median(difference) <= 1e-5
    assert difference.max() <= 2e-2  # one bfloat16 step of one normed value


@pytest.mark.long
@pytest.mark.parametrize("name", ["g1_attn", "g2_engram", "g3_full"])
def test_forward_is_its_layers(
    name: str, compiled_layers: dict[str, Layers], golden_model: Callable[[str, str], Model]
) -> None:
    """Guards what the layers above do not see: that the whole pass feeds each layer what the one before gave."""
    ids = of_prompt(load_results(name, "ref_bf16"), "p33")["input_ids"]
    run = golden_model(name, "ref_bf16").prefill(ids)
    layers = layers_of(name, compiled_layers)
    captured = run.captured
    inputs: Arrays = {"input_ids": ids, "streams": captured["streams"], "pre": captured["pre"]}
    inputs["router_idx"] = captured["router_ids"]
    if layers.config.engram_layer_ids:
        hashes = [captured["engram_rows"][layer] for layer in layers.config.engram_layer_ids]
        inputs["engram_hash"] = np.stack(hashes, axis=1)
    inputs |= {f"index_topk/{layer}": captured["selection"][layer] for layer in layers.config.index_source_layer_ids}
    publisher = layers.config.candidate_source_layer_id
    blocks = np.repeat(captured["candidates"][publisher], layers.config.candidate_block_size, axis=1)
    inputs[f"cand_mask/{publisher}"] = blocks
    for result in walk(layers, inputs).results:
        assert (result.row_errors == 0).mean() >= EXACT_ROWS, f"layer {result.layer}"
        assert result.row_errors.max() <= WORST_ROW, f"layer {result.layer}"
        np.testing.assert_array_equal(result.router_ids, result.want_router_ids)
        if result.selection is not None:
            np.testing.assert_array_equal(result.selection, result.want_selection)
        if result.candidates is not None:
            np.testing.assert_array_equal(result.candidates, result.want_candidates)
    final = layers.logits(layers.prompt(ids, inputs.get("engram_hash")), captured["streams"][-1], captured["pre"][-1])
    np.testing.assert_allclose(final, run.logits, rtol=0, atol=2e-2)


def test_recorded_floors_are_those_the_bounds_were_chosen_for() -> None:
    """Guards the bounds above: they stand on these floors, so new data needs new bounds."""
    floors = [floor for name in ("g1_attn", "g2_engram", "g3_full") for floor in noise_floors(name)]
    assert max(floor["rel_err_max_all"] for floor in floors) == pytest.approx(7.2e-3, rel=0.01)
    assert max(floor["pre_max"] for floor in floors) == pytest.approx(9.1e-4, rel=0.01)
    assert min(floor["exact_rows"] for floor in floors) == pytest.approx(0.857, abs=1e-3)
    assert all(floor["rel_err_median"] == 0 for floor in floors)
