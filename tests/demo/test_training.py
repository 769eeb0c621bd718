"""Training of the demo model: the differentiable forward passes are the model, every phase learns, export loads.

On a small configuration; figures of the demo model stand in docs/demo_model.md.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.batching import Chunk, make_batch
from deepinfer_jax.checkpoint.load import load_checkpoint
from deepinfer_jax.checkpoint.writer import save_checkpoint
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.profile import F32_NOQ
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.forward import Outputs, forward
from deepinfer_jax.model.init import init_params
from deepinfer_jax.model.params import Params, build_params
from deepinfer_jax.model.state import init_state

TOOLS = Path(__file__).parents[2] / "tools" / "demo"


def tool(name: str) -> Any:
    """A module of tools/demo, which is no package."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)


SMALL = dataclasses.replace(
    ModelConfig.micro(),
    num_hidden_layers=4,
    compress_ratios=(0, 2, 1, 1, 0),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=ModelConfig.micro().engram_num_embeddings[:1],
    dspark_target_layer_ids=(2, 3),
)
"""A window layer, two sources, and a layer that selects inside candidate blocks."""

TOKENS = 64


@functools.cache
def small_params() -> Params:
    return init_params(SMALL, jax.random.key(3))


def master_weights(params: Params) -> dict[str, np.ndarray]:
    """Float32 values of all weights, by the names that training uses."""
    found: dict[str, np.ndarray] = {}

    class Slot(tuple): ...

    def visit(slot: Any, leaf: Any) -> None:
        parameter, lead, prefixes = slot
        values = dequantize(leaf, jnp.float32) if isinstance(leaf, QuantTensor) else leaf
        values = np.asarray(values, np.float32)
        rows = values.reshape(len(prefixes), *values.shape[len(lead) :])
        found.update({prefix + parameter.key: row for prefix, row in zip(prefixes, rows, strict=True)})

    slots = build_params(params.config, lambda *facts: Slot(facts))
    leaves = dataclasses.replace(params, engram_token_map=None)
    jax.tree.map(visit, slots, leaves, is_leaf=lambda node: isinstance(node, Slot))
    return found


def token_map(params: Params) -> jax.Array:
    assert params.engram_token_map is not None
    return params.engram_token_map


def model_outputs(params: Params, ids: list[int]) -> Outputs:
    """The model's own forward pass, without any rounding."""
    state = init_state(params.config, F32_NOQ, slots=1, pages=1, row_block=16)
    batch = make_batch(
        params.config, [Chunk(0, 0, ids, len(ids), "all")], np.zeros((1, 1), np.int32), rows=len(ids), replay="none"
    )
    return jit(functools.partial(forward, config=params.config, profile=F32_NOQ))(params, state, batch)[0]


def test_training_forward_is_the_model() -> None:
    """Logits and taps on the paged state in tiles, against whole rows with real selections and candidate blocks.

    Guards against a training pass that differs from the model: then the exported weights would not work.
    """
    forward_module, weights_module = tool("training.forward"), tool("training.weights")
    params = small_params()
    ids = np.random.default_rng(0).integers(0, SMALL.vocab_size - 6, TOKENS).tolist()
    want = model_outputs(params, ids)
    setting = forward_module.setting_of(SMALL, F32_NOQ)

    def run(weights: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = weights_module.forward_values(SMALL, weights, None)
        hidden = forward_module.backbone(setting, values, token_map(params), tokens, attention="selected")
        logits = forward_module.head_logits(setting, values, values["norm"], hidden.streams, hidden.pre)[1]
        return logits, hidden.taps

    logits, taps = jax.jit(run)(master_weights(params), jnp.asarray([ids, ids[::-1]]))
    np.testing.assert_allclose(logits[:TOKENS], want.logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(taps[:TOKENS], want.taps, rtol=1e-4, atol=1e-3)
    assert np.ptp(np.asarray(want.logits), axis=1).min() > 1


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """A document behind another one gives the logits that it gives alone, as requests do.

    Guards against a look-up that finds the same key in the document before, which no request could.
    """
    forward_module, weights_module = tool("training.forward"), tool("training.weights")
    params = small_params()
    first = 32  # a multiple of the candidate blocks; n-grams go on, so the first document ends with padding tokens
    ids = np.random.default_rng(4).integers(0, SMALL.vocab_size - 6, TOKENS)
    ids[first - 3 : first] = SMALL.engram_pad_token_id
    setting = forward_module.setting_of(SMALL, F32_NOQ)

    def run(weights: dict[str, jax.Array], tokens: jax.Array, documents: jax.Array) -> jax.Array:
        values = weights_module.forward_values(SMALL, weights, None)
        hidden = forward_module.backbone(
            setting, values, token_map(params), tokens, attention="selected", documents=documents
        )
        logits = forward_module.head_logits(setting, values, values["norm"], hidden.streams, hidden.pre)[1]
        return logits.reshape(*tokens.shape, -1)

    alone = np.concatenate([ids[first:], np.zeros(first, ids.dtype)])
    documents = np.stack([np.arange(TOKENS) >= first, np.zeros(TOKENS)]).astype(np.int32)
    together = jax.jit(run)(master_weights(params), jnp.asarray(np.stack([ids, alone])), jnp.asarray(documents))
    np.testing.assert_allclose(together[0, first:], together[1, : TOKENS - first], rtol=0, atol=1e-4)
    assert np.ptp(np.asarray(together[0, first:]), axis=1).min() > 1


# ---- pieces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["fp8", "fp4", "fp8_row", "bf16", "f32"])
def test_stored_values_are_those_of_the_export(storage: str) -> None:
    """Weights in training are rounded to exactly what the checkpoint will hold, with the gradient of the identity."""
    ops, init = tool("training.ops"), importlib.import_module("deepinfer_jax.model.init")
    random = np.random.default_rng(1)
    w = (random.standard_normal((64, 96)) * np.exp(random.standard_normal((64, 1)))).astype(np.float32)
    got = ops.stored_values(jnp.asarray(w), storage, True)
    if storage == "f32":
        want = w
    else:
        want = np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32)
        if storage != "bf16":
            want = np.asarray(dequantize(init.quantize_weight(want, storage), jnp.float32))
    np.testing.assert_array_equal(got, want)
    slope = jax.grad(lambda x: jnp.sum(ops.stored_values(x, storage, True) * w))(jnp.asarray(w))
    np.testing.assert_array_equal(slope, w)


def test_sinkhorn_and_attention_gradients() -> None:
    """Hand-written backward passes against those that JAX derives from the forward pass."""
    ops, attention = tool("training.ops"), tool("training.attention")
    reference = importlib.import_module("deepinfer_jax.kernels.mhc_mix.xla").sinkhorn
    random = np.random.default_rng(2)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    logits, weight = normal(4, 4, 33) * 3, normal(4, 4, 33)
    own = jax.jit(jax.grad(lambda x: jnp.sum(ops.sinkhorn(x, 20, 1e-6) * weight)))(logits)
    plain = jax.grad(lambda x: jnp.sum(jnp.moveaxis(reference(jnp.moveaxis(x, -1, 0), 20, 1e-6), 0, -1) * weight))
    np.testing.assert_allclose(own, jax.jit(plain)(logits), rtol=0, atol=1e-5)

    arguments = (normal(2, 16, 3, 8), normal(2, 16, 8), normal(2, 8, 8))
    sink, cotangent = normal(3), normal(2, 16, 3, 8)
    documents = jnp.asarray([[0] * 16, [0] * 5 + [1] * 11])
    mask = attention.visible_entries(documents, 8, 2)
    reach = jnp.asarray([4, 2])

    def through(function: Any) -> Any:
        def output(queries: jax.Array, window: jax.Array, compressed: jax.Array, sink: jax.Array) -> jax.Array:
            return function(0.35, 4, queries, window, compressed, mask, sink, documents, reach)

        return jax.jit(lambda *a: jax.vjp(output, *a)[1](cotangent))(*arguments, sink)

    got = through(lambda *a: attention.attend(*a)[0])
    want = through(lambda *a: attention._attend_forward(*a)[0][0])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_selection_by_bisection() -> None:
    """The selection of bfloat16 scores, found by bisection, is that of the sorting op, ties included."""
    attention = tool("training.attention")
    random = np.random.default_rng(3)
    scores = jnp.asarray(np.round(random.standard_normal((2, 24, 40)) * 4) / 4, jnp.bfloat16)
    scores = jnp.where(random.random((2, 24, 40)) < 0.3, jnp.bfloat16(-0.0), scores)
    allowed = jnp.asarray(random.random((2, 24, 40)) < 0.7)
    got = attention.select_entries(scores, allowed, 7)
    np.testing.assert_array_equal(got, attention.select_entries(scores.astype(jnp.float32), allowed, 7))
    assert np.asarray(got).sum(axis=-1).max() == 7


def test_tasks_are_told_from_texts() -> None:
    """Losses are reported for the right tokens: documents that start with a prompt, up to the next document."""
    objectives = tool("training.objectives")
    weights = jnp.asarray([[0, 1, 1, 10, 10, 0, 10, 10], [0, 9, 9, 0, 1, 10, 0, 9]])
    want = [[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]]  # a start itself counts for nothing
    full = weights[:, 1:] >= 9
    np.testing.assert_array_equal(objectives.in_task(weights) & full, np.array(want, bool) & full)


# ---- phases ---------------------------------------------------------------------------------------------------


def repeating_block(config: ModelConfig, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Two batches of texts that repeat themselves, so that there is something to learn at once."""
    random = np.random.default_rng(4)
    period = random.integers(1, config.vocab_size - 6, (2, rows, 6))
    tokens = np.tile(period, (1, 1, length // 6 + 2))[:, :, : length + 1].astype(np.uint16)
    weights = np.full(tokens.shape, 10, np.uint8)
    tokens[:, :, 0], weights[:, :, 0] = 0, 0
    weights[:, 1, 1:10] = 1
    return tokens, weights


TINY = dataclasses.replace(
    SMALL,
    num_hidden_layers=3,
    compress_ratios=(0, 2, 2, 0),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=1,
    engram_layer_ids=(0,),
    dspark_target_layer_ids=(1, 2),
    hc_sinkhorn_iters=3,
)
"""Three layers that have between them every tensor a layer can have."""


@pytest.mark.parametrize("name", [pytest.param("p1", marks=pytest.mark.long), "p2", "p3"])
def test_each_phase_learns(name: str, tmp_path: Path) -> None:
    """The loss falls, and gradients reach every trained tensor; guards against a cut path or a dead term."""
    loop, files = tool("training.loop"), tool("training.weights")
    weights = files.initial_weights(TINY, 5)
    classes = np.arange(TINY.vocab_size) % TINY.engram_compressed_vocab_size
    phase = loop.Phase(TINY, name, weights, classes, None, 4)
    block = repeating_block(TINY, 2, 32)
    step = phase.compile_step(block[0].shape)
    log = loop.Log(tmp_path / "log.jsonl")
    steps = 12
    schedule = loop.Schedule(3e-3, warm_up=2, steps=steps)
    before = phase.weights()
    facts = phase.run(step, iter([block] * steps), schedule, log, deadline=float("inf"), every=2)
    lines = [loop.json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert facts["steps"] == steps
    assert len(lines) == steps // 2
    assert lines[-1]["loss"] < lines[0]["loss"] - (0.02 if name == "p3" else 0.5)
    moments = phase.moments()
    assert moments["step"] == steps
    assert not [key for key, value in moments["v"].items() if not value.any()]
    after = phase.weights()
    assert not [key for key in after if (after[key] == before[key]).all()]
    assert all(np.isfinite(value).all() for value in after.values())


def test_weight_files_and_export(tmp_path: Path) -> None:
    """Weights come back from their files in bfloat16, and the exported checkpoint holds what training computed with."""
    files, export = tool("training.weights"), tool("export")
    weights = files.initial_weights(SMALL, 6)
    files.save_weights(tmp_path / "w", SMALL, weights)
    loaded = files.load_weights(tmp_path / "w", SMALL)
    assert loaded.keys() == weights.keys()
    params = export.make_params(SMALL, export.with_image_biases(loaded), np.asarray(token_map(small_params())))
    save_checkpoint(tmp_path / "checkpoint", params)
    _, again = load_checkpoint(tmp_path / "checkpoint")
    stored = master_weights(again)
    some = {name: jnp.asarray(w) for name, w in weights.items() if name.startswith(("layers.1.", "mtp.", "head"))}
    for name, value in files.forward_values(SMALL, some, True).items():
        if not name.endswith("bias_vl"):
            np.testing.assert_array_equal(stored[name], value, err_msg=name)
    np.testing.assert_array_equal(stored["layers.0.ffn.gate.bias_vl"], stored["layers.0.ffn.gate.bias"])
