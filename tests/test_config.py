"""The configuration: released values, the file format, and the refusal of everything inconsistent."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.model.config import ModelConfig, RopeScaling, VisionConfig

from .checkpoint_files import DATA

pytestmark = pytest.mark.fast

RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "max_position_embeddings": 1048576, "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "compress_rope_theta": 160000, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
        "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3,
        "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024,
        "num_attention_heads": 16, "intermediate_size": 2816, "patch_size": 14, "downsample_ratio": 3,
        "rope_theta": 10000, "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None,
    },
}  # fmt: skip
"""The released config.json (spec/attention.md 1), typed here a second time."""

BUILT_IN = {
    "released": ModelConfig.released(),
    "demo": ModelConfig.demo(),
    "micro": ModelConfig.micro(),
}


def edited(path: str, value: Any) -> dict[str, Any]:
    """The released document with the value at a dotted path replaced."""
    document = copy.deepcopy(RELEASED)
    *parents, last = path.split(".")
    section = document
    for key in parents:
        section = section[key]
    section[last] = value
    return document


def test_released_file_gives_released_config() -> None:
    """Guards against a typing error in the built-in released configuration, or in a key name."""
    assert ModelConfig.from_dict(RELEASED) == ModelConfig.released()


def test_released_file_is_written_back() -> None:
    """Guards against `to_dict` losing or renaming a key of the released file."""
    assert ModelConfig.released().to_dict() == RELEASED | {
        "text_config": RELEASED["text_config"] | {"gate_temp": 1.0}  # the reference's default, not in the file
    }


def test_derived_facts_of_the_released_model() -> None:
    """Guards the derived sizes that state, masks and trimming are computed from."""
    c = ModelConfig.released()
    assert (c.nope_head_dim, c.hc_mix_size, c.engram_columns) == (448, 24, 24)
    assert (c.decoder_start, c.decoder_layers, c.exact_trim_rows) == (20, 20, 127 * 20 + 1)
    assert [c.kv_owner(layer) for layer in (0, 1, 2, 7, 8, 19, 20, 39)] == [None, None, 2, 2, 8, 14, 20, 20]
    assert [c.index_owner(layer) for layer in (1, 2, 23, 24, 39)] == [None, 2, 20, 24, 36]
    assert [layer for layer in range(40) if c.is_candidate_consumer(layer)] == [24, 28, 32, 36]


@pytest.mark.parametrize("name", BUILT_IN)
def test_round_trip(name: str) -> None:
    """Guards against a field that a saved checkpoint forgets, also through JSON text."""
    config = BUILT_IN[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(ModelConfig.from_dict(config.to_dict())) == hash(config)


def test_golden_config_is_read() -> None:
    """Guards against refusing a file that an independent implementation wrote and used."""
    config = ModelConfig.from_dict(json.loads((DATA / "golden_config.json").read_text(encoding="utf-8")))
    assert (config.num_hidden_layers, config.vocab_size, config.engram_num_embeddings) == (7, 352, (1067, 1511))
    assert config.rope_scaling == RopeScaling(original_max_position_embeddings=1024)
    assert config.vision is not None
    assert config.vision.num_hidden_layers == 0


def test_vision_is_optional() -> None:
    """Guards against demanding a vision tower from text-only checkpoints."""
    document = {key: value for key, value in RELEASED.items() if key not in ("vision_config", "image_token_id")}
    config = ModelConfig.from_dict(document)
    assert config.vision is None
    assert config.image_token_id is None
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_unknown_keys_are_ignored() -> None:
    """Guards against refusing a file for bookkeeping keys that do not change the computation."""
    assert ModelConfig.from_dict(RELEASED | {"transformers_version": "9", "use_cache": True}) == ModelConfig.released()


@pytest.mark.parametrize(
    ("key", "supported", "refused"),
    [
        ("index_k_source_layer_ids", [2, 8, 14, 20], [2, 8, 14]),
        ("hc_shifted", True, False),
        ("use_fp4_sparse_kv", True, False),
        ("dspark_target_attn_input", True, False),
        ("hidden_act", "silu", "gelu"),
        ("scoring_func", "sqrtsoftplus", "sigmoid"),
        ("topk_method", "noaux_tc", "greedy"),
        ("n_shared_experts", 1, 2),
        ("num_key_value_heads", 1, 8),
        ("tie_word_embeddings", False, True),
        ("attention_bias", False, True),
        ("attention_dropout", 0.0, 0.1),
    ],
)
def test_switches(key: str, supported: Any, refused: Any) -> None:
    """Guards against silently computing something else than a switch in the file asks for."""
    assert ModelConfig.from_dict(edited(f"text_config.{key}", supported)) == ModelConfig.released()
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(edited(f"text_config.{key}", refused))
    absent = copy.deepcopy(RELEASED)
    absent["text_config"].pop(key, None)
    assert ModelConfig.from_dict(absent) == ModelConfig.released()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "llama"),
        ("text_config", None),
        ("text_config", [1]),
        ("vision_config", "none"),
        ("quantization_config", []),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", None),
        ("quantization_config.expert_dtype", "fp8"),
        ("text_config.rope_scaling", None),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.rope_scaling.mscale", 0.7),
        ("text_config.rope_scaling.factor", "16"),
        ("text_config.rope_scaling.factor", 0.5),
        ("text_config.rope_scaling.beta_fast", 1),
        ("text_config.rope_scaling.original_max_position_embeddings", 0),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", 5120.5),
        ("text_config.hidden_size", None),
        ("text_config.hidden_size", math.nan),
        ("text_config.hidden_size", math.inf),
        ("text_config.hidden_size", 10**400),
        ("text_config.rope_theta", 10**400),
        ("text_config.rope_theta", -1.0),
        ("text_config.norm_topk_prob", 1),
        ("text_config.compress_ratios", "0"),
        ("text_config.kv_source_layer_ids", [2, "8"]),
        ("vision_config.hidden_size", 0),
        ("vision_config.num_attention_heads", 7),
        ("vision_config.num_hidden_layers", -1),
        ("vision_config.max_wh_ratio", "wide"),
        ("image_token_id", 129280),
        ("bos_token_id", -1),
        ("eos_token_id", 1 << 40),
        ("pad_token_id", 129280),
    ],
)
def test_bad_file_value_is_named(path: str, value: Any) -> None:
    """Guards against an error that does not say which key of the file to look at."""
    with pytest.raises(ValueError, match=path.rpartition(".")[2]):
        ModelConfig.from_dict(edited(path, value))


REQUIRED = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    """Guards against a size that silently falls back to a default."""
    document = copy.deepcopy(RELEASED)
    del document["text_config"][key]
    with pytest.raises(ValueError, match=rf"text_config\.{key} is missing"):
        ModelConfig.from_dict(document)


def _inconsistent() -> list[tuple[str, dict[str, Any]]]:
    """(field that the error names, change to the released configuration)."""
    ratios = list(ModelConfig.released().compress_ratios)
    positive = (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "index_n_heads",
        "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size", "moe_intermediate_size",
        "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters", "engram_n_heads",
        "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size", "dspark_block_size",
        "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
    )  # fmt: skip
    blocked = (
        "hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "index_head_dim",
        "engram_head_dim",
    )  # fmt: skip
    cases: list[tuple[str, dict[str, Any]]] = [(name, {name: value}) for name in positive for value in (0, -1)]
    cases += [(name, {name: 1 << 31}) for name in positive if name != "dspark_num_experts_per_tok"]
    cases += [(name, {name: getattr(ModelConfig.released(), name) + 16}) for name in blocked]
    single = {
        "num_hidden_layers": 1025, "qk_rope_head_dim": 63, "o_groups": 7, "num_experts_per_tok": 385,
        "rope_theta": 0.0, "compress_rope_theta": -1.0, "gate_temp": 0.0, "swiglu_limit": 0.0,
        "routed_scaling_factor": 0.0, "rms_norm_eps": 1.0, "hc_eps": -1e-6,
        "kv_source_layer_ids": (2, 14, 8, 20), "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 40),
        "candidate_source_layer_id": 14, "candidate_topk_blocks": 64,
        "engram_layer_ids": (14, 1), "engram_num_embeddings": (384006168,), "engram_max_ngram_size": 9,
        "engram_vocab_size": 1 << 24, "engram_n_heads": 257, "engram_pad_token_id": 129280,
        "engram_compressed_vocab_size": 129281, "dspark_block_size": 65,
        "dspark_noise_token_id": 129280, "dspark_target_layer_ids": (), "dspark_num_experts_per_tok": 129,
    }  # fmt: skip
    cases += [(name, {name: value}) for name, value in single.items()]
    cases += [
        ("num_nextn_predict_layers", {"num_nextn_predict_layers": 17, "compress_ratios": (*ratios, *[0] * 14)}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 256}),
        ("compress_ratios", {"compress_ratios": tuple(ratios[:-1])}),
        ("compress_ratios", {"compress_ratios": (0, 0, 3, *ratios[3:])}),
        ("compress_ratios", {"compress_ratios": (0, 2, *ratios[2:])}),
        ("compress_ratios", {"compress_ratios": (0, 0, 2, 1, *ratios[4:])}),
        ("compress_ratios", {"compress_ratios": (0, 0, 2, 0, *ratios[4:])}),
        ("compress_ratios", {"compress_ratios": (*ratios[:-1], 1)}),
        ("compress_ratios", {"kv_source_layer_ids": (), "index_source_layer_ids": ()}),
        ("index_source_layer_ids", {"index_source_layer_ids": (2, 8, 20, 24)}),
        ("index_source_layer_ids", {"index_source_layer_ids": (1, 2, 8, 14, 20, 24, 28, 32, 36)}),
        ("engram_num_embeddings", {"engram_num_embeddings": (384006168, 384016683)}),
        ("engram_n_heads", {"engram_n_heads": 256}),
        ("engram_layer_ids", {"engram_layer_ids": (1, 20)}),
        ("engram_layer_ids", {"engram_layer_ids": (1, 40)}),
        ("dspark_target_layer_ids", {"dspark_target_layer_ids": (19, 38, 39)}),
        ("dspark_target_layer_ids", {"dspark_target_layer_ids": (37, 39, 38)}),
        ("dspark_target_layer_ids", {"dspark_target_layer_ids": (38, 39, 40)}),
        ("rope_scaling.factor", {"rope_scaling": RopeScaling(factor=0.0)}),
        ("vision_config.patch_size", {"vision": VisionConfig(patch_size=0)}),
    ]
    return cases


@pytest.mark.parametrize(("field", "change"), _inconsistent(), ids=lambda value: str(value)[:60])
def test_inconsistent_value_names_the_field(field: str, change: dict[str, Any]) -> None:
    """Guards against a configuration that fails later, inside a kernel or an index computation."""
    with pytest.raises(ValueError, match=rf"^{re.escape(field)}: "):
        dataclasses.replace(ModelConfig.released(), **change)


# ---- any document ---------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 300), st.integers(), st.sampled_from([1 << 31, 1 << 62, 10**400]), st.floats(), st.booleans()
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 12), NUMBERS, st.text(max_size=2)), max_size=12),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), st.one_of(NUMBERS, st.just("yarn")), max_size=3),
)


@st.composite
def mutated_documents(draw: st.DrawFn) -> dict[str, Any]:
    """A built-in configuration's file with a few values replaced, removed or nudged."""
    document = copy.deepcopy(BUILT_IN[draw(st.sampled_from(["released", "micro"]))].to_dict())
    for _ in range(draw(st.integers(1, 4))):
        section = document
        key = draw(st.sampled_from(sorted(section)))
        while isinstance(section[key], dict) and section[key] and draw(st.integers(0, 20)):
            section = section[key]
            key = draw(st.sampled_from(sorted(section)))
        action = draw(st.sampled_from(["replace", "remove", "nudge", "element"]))
        value = section[key]
        if action == "remove":
            del section[key]
        elif action == "nudge" and isinstance(value, int | float):
            section[key] = value + draw(st.integers(-2, 2)) if abs(value) < 1 << 70 else value
        elif action == "element" and isinstance(value, list) and value:
            value[draw(st.integers(0, len(value) - 1))] = draw(VALUES)
        else:
            section[key] = draw(VALUES)
        if not document:
            break
    return document


@given(mutated_documents())
@settings(max_examples=300)
def test_any_document_gives_a_config_or_value_error(document: dict[str, Any]) -> None:
    """Guards against another exception, or a configuration that does not survive its own file format."""
    try:
        config = ModelConfig.from_dict(document)
    except ValueError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
