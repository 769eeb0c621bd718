"""The tensor table of the released checkpoint, and the pytree built from the same declarations."""

from __future__ import annotations

import collections
import gzip
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint import plan_lines, summarize
from deepinfer_jax.checkpoint.summary import Amount, category
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import (
    CheckpointTensor,
    Parameter,
    abstract_params,
    all_parameters,
    build_params,
    checkpoint_table,
    draft_parameters,
    global_parameters,
    layer_parameters,
    vision_parameters,
)

from .checkpoint_files import DATA

pytestmark = pytest.mark.fast

CONFIGS = {"released": ModelConfig.released(), "demo": ModelConfig.demo(), "micro": ModelConfig.micro()}
RELEASED = CONFIGS["released"]
TABLE = {tensor.name: tensor for tensor in checkpoint_table(RELEASED)}


# ---- the released checkpoint (spec/blocks.md 4.2) -------------------------------------------------


def test_totals() -> None:
    """Guards the two numbers that identify the released checkpoint."""
    assert len(TABLE) == len(list(checkpoint_table(RELEASED))) == 96_085
    assert sum(tensor.nbytes for tensor in TABLE.values()) == 510_286_023_000


def test_bytes_by_dtype() -> None:
    """Guards against a parameter stored in another format at the same total."""
    assert {name: amount.nbytes for name, amount in summarize(RELEASED).dtypes.items()} == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }


VISION_ATTENTION = Amount(128, 268_697_600)
"""The tensors vision.blocks.*.attn.*, which the specification's table counts as attention."""


def test_amounts_by_category() -> None:
    """Guards every row of the byte table, and that the rows add up."""
    rows = {
        "routed experts": Amount(92_160, 288_777_830_400),
        "Engram tables": Amount(4, 202_758_032_400),
        "draft routed experts": Amount(2_304, 7_219_445_760),
        "attention+compressor+indexer": Amount(
            691 - VISION_ATTENTION.tensors, 5_420_254_208 - VISION_ATTENTION.nbytes
        ),
        "shared experts": Amount(240, 1_416_960_000),
        "embed / head": Amount(2, 2 * 1_323_827_200),
        "draft other": Amount(97, 713_428_872),
        "vision+aligner+delimiters": Amount(
            138 + VISION_ATTENTION.tensors, 701_839_360 + VISION_ATTENTION.nbytes
        ),
        "Engram wkv,q,k": Amount(8, 315_043_840),
        "gates": Amount(120, 157_409_280),
        "mHC": Amount(240, 157_295_040),
        "layer norms + norm": Amount(81, 829_440),
    }  # fmt: skip
    summary = summarize(RELEASED)
    assert summary.categories == rows
    assert summary.total == Amount(96_085, 510_286_023_000)
    moved = [tensor for name, tensor in TABLE.items() if name.startswith("vision.") and ".attn." in name]
    assert Amount(len(moved), sum(tensor.nbytes for tensor in moved)) == VISION_ATTENTION
    assert {category(tensor.name) for tensor in moved} == {"vision+aligner+delimiters"}


def test_parameter_counts() -> None:
    """Guards the published sizes: 552 B backbone, 196.6 B Engram, 763 B in all.

    The specification counts the attention of the vision tower (0.134 B) with the backbone.
    """
    counts = summarize(RELEASED).parameters
    vision_attention = VISION_ATTENTION.nbytes // 2
    assert round((counts["backbone"] + vision_attention) / 1e9, 3) == 552.015
    assert round((counts["vision"] - vision_attention) / 1e9, 3) == 0.351
    assert round(counts["Engram tables"] / 1e9, 3) == 196.614
    assert round(counts["draft"] / 1e9, 2) == 14.23
    assert round(counts["total"] / 1e9, 1) == 763.2
    assert counts["total"] == sum(count for group, count in counts.items() if group != "total")


def test_shard_counts() -> None:
    """Guards the draft stages, which differ from each other, and the plain layers, which do not."""
    draft = collections.Counter(name.split(".")[1] for name in TABLE if name.startswith("mtp."))
    assert draft == {"0": 801, "1": 798, "2": 802}
    plain = [tensor for name, tensor in TABLE.items() if name.startswith("layers.3.")]
    assert (len(plain), sum(tensor.nbytes for tensor in plain)) == (2_334, 7_389_500_888)
    expert = [tensor for name, tensor in TABLE.items() if name.startswith("layers.0.ffn.experts.383.")]
    assert (len(expert), sum(tensor.nbytes for tensor in expert)) == (6, 18_800_640)


def test_layer_dependent_tensors() -> None:
    """Guards which layers have a compressor, a gate, an indexer and an Engram table."""
    layers = collections.defaultdict(list)
    for name in TABLE:
        if name.startswith("layers."):
            layers[name.split(".", 2)[2]].append(int(name.split(".")[1]))
    assert layers["attn.compressor.wkv.weight"] == layers["attn.indexer.wk.weight"] == [2, 8, 14, 20]
    assert layers["attn.compressor.wgate.weight"] == [2, 8, 14]
    assert layers["attn.indexer.wq_b.scale"] == layers["attn.indexer.weights_proj.weight"]
    assert layers["attn.indexer.wq_b.weight"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers["engram.embed.scale"] == layers["engram.q_weight"] == [1, 14]
    assert layers["attn.wq_a.weight"] == list(range(40))


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.attn_sink", "F32", (64,)),
        ("layers.39.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.39.hc_attn_scale", "F32", (3,)),
        ("layers.5.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.5.ffn.experts.0.w1.weight", "I8", (2304, 2560)),
        ("layers.5.ffn.experts.0.w1.scale", "F8_E8M0", (2304, 160)),
        ("layers.5.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.1.engram.embed.weight", "F8_E4M3", (384006168, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.1.engram.k_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.bias", "BF16", (5120,)),
        ("image_newline", "BF16", (5120,)),
    ],
)
def test_single_tensors(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Guards names, dtypes and orientations that a total cannot see."""
    assert TABLE[name] == CheckpointTensor(name, dtype, shape)


def test_layer_plan_lines() -> None:
    """Guards the plan that decides what is scanned, as the report shows it."""
    assert [" ".join(line.split()) for line in plan_lines(RELEASED)] == [
        "layers 0 1 window, window only, encoder",
        "layers 1 1 window (Engram), window only, encoder",
        "layers 2-13 2 x [1 full + 5 reuse], ratio 2, encoder",
        "layers 14-19 1 full (Engram) + 5 reuse, ratio 2, encoder",
        "layers 20-23 1 full (candidate source) + 3 reuse, ratio 1, decoder",
        "layers 24-39 4 x [1 reindex + 3 reuse], ratio 1, decoder",
    ]


def test_table_equals_an_independent_checkpoint() -> None:
    """Guards against a table that is only consistent with itself.

    The data are name, dtype and shape of every tensor of a small checkpoint that other code wrote.
    """
    config = ModelConfig.from_dict(json.loads((DATA / "golden_config.json").read_text(encoding="utf-8")))
    rows = json.loads(gzip.decompress((DATA / "golden_tensors.json.gz").read_bytes()))
    expected = {name: (dtype, tuple(shape)) for name, dtype, shape in rows}
    assert {t.name: (t.dtype, t.shape) for t in checkpoint_table(config)} == expected


# ---- declarations and pytree ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_unique(name: str) -> None:
    """Guards against two parameters that would be read from one tensor."""
    names = [tensor.name for tensor in checkpoint_table(CONFIGS[name])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", CONFIGS)
def test_declarations_are_complete(name: str) -> None:
    """Guards against a declaration that sharding or initialisation could not use."""
    for _, parameter in all_parameters(CONFIGS[name]):
        assert len(parameter.axes) == len(parameter.shape)
        assert all(size > 0 for size in parameter.shape)
        assert parameter.quantized == (parameter.stored()[1] is not None)
        assert ("{}" in parameter.key) == (parameter.experts > 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_pytree_holds_every_tensor_once(name: str) -> None:
    """Guards against a layer that is stacked twice, or never, or in the wrong place of its run."""
    config = CONFIGS[name]
    seen: list[str] = []

    def place(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> object:
        assert math.prod(lead) == len(prefixes)
        assert len(lead) in (0, 2)
        seen.extend(t.name for prefix in prefixes for t in parameter.checkpoint_tensors(prefix))
        return parameter.abstract(lead)

    params = build_params(config, place)
    assert sorted(seen) == sorted(tensor.name for tensor in checkpoint_table(config))
    layers = [
        tuple(int(prefix.split(".")[1]) for prefix in prefixes)
        for segment in build_params(config, lambda _parameter, _lead, prefixes: prefixes).segments
        for run in segment
        for key, prefixes in run.items()
        if key == "attn_norm"
    ]
    assert sorted(layer for run in layers for layer in run) == list(range(config.num_hidden_layers))
    assert len(params.draft) == config.num_nextn_predict_layers


@pytest.mark.parametrize("name", CONFIGS)
def test_abstract_bytes_equal_stored_bytes(name: str) -> None:
    """Guards against device arrays that are larger than the packed checkpoint."""
    config = CONFIGS[name]
    leaves = jax.tree.leaves(abstract_params(config))
    nbytes = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    stored = sum(tensor.nbytes for tensor in checkpoint_table(config))
    assert nbytes == stored + 4 * config.vocab_size  # the Engram token map is no tensor of the file


def test_abstract_leaves() -> None:
    """Guards dtype, format and stacking of each storage kind."""
    config = CONFIGS["micro"]
    by_key = {p.key: p for p in (*layer_parameters(config, 3), *global_parameters(config))}
    expert = by_key["ffn.experts.{}.w2"].abstract((2, 3))
    assert isinstance(expert, QuantTensor)
    assert (expert.format, expert.shape, expert.data.dtype) == ("fp4", (2, 3, 4, 64, 64), jnp.uint8)
    assert expert.scale.shape == (2, 3, 4, 64, 2)
    dense = by_key["attn.wq_b"].abstract((2, 3))
    assert (dense.format, dense.data.shape, dense.data.dtype) == ("fp8", (2, 3, 256, 64), jnp.uint8)
    assert dense.scale.shape == (2, 3, 8, 2)
    table = by_key["engram.embed"].abstract((1, 1))
    assert (table.format, table.data.shape, table.scale.shape) == ("fp8_row", (1, 1, 606, 32), (1, 1, 606, 1))
    assert by_key["embed"].abstract() == jax.ShapeDtypeStruct((96, 64), jnp.bfloat16)
    assert by_key["ffn.gate.bias"].abstract((1, 2)) == jax.ShapeDtypeStruct((1, 2, 4), jnp.float32)


def test_params_is_a_pytree() -> None:
    """Guards against leaves lost by flattening, and a configuration taken for data."""
    params = abstract_params(CONFIGS["micro"])
    leaves, structure = jax.tree.flatten(params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert rebuilt.config == CONFIGS["micro"]
    assert jax.tree.structure(rebuilt) == structure


def test_small_draft_has_both_ends() -> None:
    """Guards a draft of one stage, which is first and last at once."""
    keys = {p.key for p in draft_parameters(CONFIGS["micro"], 0)}
    assert {"main_proj", "main_norm", "norm", "markov_head.embed", "confidence_head.proj"} <= keys
    assert vision_parameters(CONFIGS["micro"]) == ()
