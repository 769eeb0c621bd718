"""Model configuration: the released nested `config.json` as one frozen, hashable dataclass.

Key names are the released ones (`spec/attention.md` 1). A configuration that exists is consistent:
`ModelConfig` checks itself when it is made and every error names the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.model.engram_hash import bucket_primes

QUANT_BLOCK = 32
"""Quantisation block of FP8 weights (32x32), of FP4 expert weights (1x32) and of activations."""

MAX_LAYERS = 1024
MAX_DIMENSION = 1 << 31  # row ids and offsets are int32
MAX_NUMBER = 1 << 63  # of any number in a file


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers that read a compressed cache (`spec/attention.md` 3.3)."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Vision tower (`spec/attention.md` 1.4). `num_hidden_layers == 0` means: no vision tensors."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    downsample_ratio: int = 3
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that shapes the model. Sizes are in elements, ids are token ids, layer ids 0-based."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    # attention
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    # compressed caches; compress_ratios covers backbone and draft layers
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    # experts
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0
    swiglu_limit: float = 10.0
    # norms and hyper-connections
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # Engram
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    # DSpark draft
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    # special tokens
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check(self)

    # ---- derived facts -------------------------------------------------------------------------

    @property
    def nope_head_dim(self) -> int:
        """Unrotated dims of a head (they come first)."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the newest key-value source (`spec/attention.md` 2.3)."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def decoder_layers(self) -> int:
        """Number of layers from `decoder_start` on."""
        return self.num_hidden_layers - self.decoder_start

    @property
    def exact_trim_rows(self) -> int:
        """Rows at the end of a prompt that can influence anything after it (design 2.9)."""
        return (self.sliding_window - 1) * self.decoder_layers + 1

    @property
    def hc_mix_size(self) -> int:
        """Outputs of one hyper-connection projection: pre, post and comb."""
        return self.hc_mult * (2 + self.hc_mult)

    @property
    def engram_columns(self) -> int:
        """Hash columns (table rows read) per token and Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint has DSpark stages."""
        return self.num_nextn_predict_layers > 0

    def kv_owner(self, layer: int) -> int | None:
        """Layer whose compressed cache `layer` reads, None for window-only layers."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_owner(self, layer: int) -> int | None:
        """Layer whose selection `layer` uses, None for window-only layers."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(s for s in self.index_source_layer_ids if s <= layer)

    @property
    def has_candidates(self) -> bool:
        """Whether some layer selects inside candidate blocks."""
        return any(source > self.candidate_source_layer_id for source in self.index_source_layer_ids)

    def is_candidate_consumer(self, layer: int) -> bool:
        """Whether the layer's own selection is restricted to the candidate blocks."""
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id

    # ---- built-in configurations ---------------------------------------------------------------

    @classmethod
    def released(cls) -> ModelConfig:
        """DeepSeek-V4.1-Flash as released (`spec/attention.md` 1)."""
        return cls(
            vocab_size=129280, hidden_size=5120, num_hidden_layers=40, max_position_embeddings=1048576,
            num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1280, o_lora_rank=1024,
            o_groups=8, sliding_window=128,
            compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            kv_source_layer_ids=(2, 8, 14, 20), index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
            index_n_heads=32, index_head_dim=128, index_topk=512,
            candidate_source_layer_id=20, candidate_topk_blocks=2048, candidate_block_size=8,
            moe_intermediate_size=2304, n_routed_experts=384, num_experts_per_tok=6,
            engram_layer_ids=(1, 14), engram_num_embeddings=(384006168, 384016682),
            engram_vocab_size=16000000, engram_n_heads=8, engram_head_dim=256,
            engram_compressed_vocab_size=99092,
            num_nextn_predict_layers=3, dspark_block_size=5, dspark_noise_token_id=128799,
            dspark_target_layer_ids=(37, 38, 39), dspark_markov_rank=256,
            dspark_n_routed_experts=128, dspark_num_experts_per_tok=3,
            image_token_id=129264, vision=VisionConfig(),
        )  # fmt: skip

    @classmethod
    def demo(cls) -> ModelConfig:
        """The small embedded model: same architecture, 4,096 tokens of context."""
        return cls(
            vocab_size=3072, hidden_size=256, num_hidden_layers=8, max_position_embeddings=4096,
            num_attention_heads=8, head_dim=64, qk_rope_head_dim=16, q_lora_rank=128, o_lora_rank=64,
            o_groups=2, sliding_window=64, rope_scaling=RopeScaling(original_max_position_embeddings=4096),
            compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
            kv_source_layer_ids=(2, 4), index_source_layer_ids=(2, 4, 6),
            index_n_heads=4, index_head_dim=32, index_topk=64,
            candidate_source_layer_id=4, candidate_topk_blocks=16, candidate_block_size=8,
            moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4,
            engram_layer_ids=(1, 3), engram_num_embeddings=(22230, 23414),
            engram_vocab_size=1800, engram_n_heads=4, engram_head_dim=32, engram_compressed_vocab_size=2340,
            num_nextn_predict_layers=3, dspark_block_size=5, dspark_noise_token_id=3047,
            dspark_target_layer_ids=(5, 6, 7), dspark_markov_rank=32,
            dspark_n_routed_experts=8, dspark_num_experts_per_tok=2,
            image_token_id=3063,
        )  # fmt: skip

    @classmethod
    def micro(cls) -> ModelConfig:
        """Smallest stack with every layer kind, for property tests (after `spec/attention.md` 10.1).

        Candidate blocks bite from position 6 on, the window from 8, the selection from 4 entries;
        two ratio-2 owners, an owner change at equal ratio and one at a ratio change.
        """
        return cls(
            vocab_size=96, hidden_size=64, num_hidden_layers=9, max_position_embeddings=1024,
            num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, o_lora_rank=32,
            o_groups=2, sliding_window=8,
            compress_ratios=(0, 2, 2, 2, 2, 1, 1, 1, 1, 0),
            kv_source_layer_ids=(1, 3, 5), index_source_layer_ids=(1, 3, 5, 7),
            index_n_heads=2, index_head_dim=32, index_topk=4,
            candidate_source_layer_id=5, candidate_topk_blocks=3, candidate_block_size=2,
            moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2,
            engram_layer_ids=(0, 3), engram_num_embeddings=(434, 606),
            engram_vocab_size=60, engram_n_heads=2, engram_head_dim=32, engram_compressed_vocab_size=80,
            num_nextn_predict_layers=1, dspark_block_size=3, dspark_noise_token_id=93,
            dspark_target_layer_ids=(6, 7, 8), dspark_markov_rank=32,
            dspark_n_routed_experts=4, dspark_num_experts_per_tok=2,
            image_token_id=94,
        )  # fmt: skip

    # ---- the released file format --------------------------------------------------------------

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed released `config.json`.

        Raises ValueError, naming the field, for missing, mistyped, inconsistent or unsupported values.
        Keys that do not change the computation are ignored.
        """
        top = _section(document, "the document")
        _expect(top, "model_type", {"deepseek_v41"})
        text = _section(top.get("text_config"), "text_config")
        _reject_unsupported(top, text)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in ("vision", "rope_scaling"):
                continue
            source = top if field.name.endswith("_token_id") and field.name in _TOP_LEVEL else text
            if field.name in source:
                values[field.name] = _typed(field.name, source[field.name], str(field.type))
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"config.json: text_config.{field.name} is missing")
        values["rope_scaling"] = _read_rope_scaling(text)
        vision = top.get("vision_config")
        if vision is not None:
            values["vision"] = _read_flat(VisionConfig, _section(vision, "vision_config"), "vision_config")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The released nested form; `from_dict(c.to_dict()) == c`."""
        text: dict[str, Any] = {
            "model_type": "deepseek_v41_text", "num_key_value_heads": 1, "n_shared_experts": 1,
            "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
            "tie_word_embeddings": False, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        }  # fmt: skip
        top: dict[str, Any] = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8", "activation_scheme": "dynamic",
                "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
            },
        }  # fmt: skip
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _TOP_LEVEL:
                if value is not None:
                    top[field.name] = value
            elif field.name == "rope_scaling":
                text[field.name] = {"rope_type": "yarn", **dataclasses.asdict(value)}
            elif field.name != "vision":
                text[field.name] = list(value) if isinstance(value, tuple) else value
        top["text_config"] = text
        if self.vision is not None:
            top["vision_config"] = {"model_type": "deepseek_v41_vision", **dataclasses.asdict(self.vision)}
        return top


_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# Values that this implementation has exactly one form of. Missing is fine, other values are refused.
_TEXT_EXPECTED: dict[str, set[Any]] = {
    "hidden_act": {"silu"},
    "scoring_func": {"sqrtsoftplus"},
    "topk_method": {"noaux_tc"},
    "n_shared_experts": {1},
    "num_key_value_heads": {1},
    "tie_word_embeddings": {False},
    "attention_bias": {False},
    "attention_dropout": {0},
    "hc_shifted": {True},
    "use_fp4_sparse_kv": {True},
    "dspark_target_attn_input": {True},
}
_QUANTIZATION_EXPECTED: dict[str, set[Any]] = {
    "quant_method": {"fp8"},
    "activation_scheme": {"dynamic"},
    "scale_fmt": {"ue8m0"},
    "expert_dtype": {"fp4"},
}


def _section(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {name} is missing or is not an object")
    return value


def _expect(section: Mapping[str, Any], key: str, allowed: set[Any], prefix: str = "") -> None:
    if key not in section:
        return
    value = section[key]
    if not isinstance(value, str | int | float | bool) or value not in allowed:
        options = " or ".join(repr(a) for a in sorted(allowed, key=repr))
        raise ValueError(f"config.json: {prefix}{key} is {value!r}; only {options} is supported")


def _reject_unsupported(top: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for key, allowed in _TEXT_EXPECTED.items():
        _expect(text, key, allowed, "text_config.")
    index_sources = text.get("index_k_source_layer_ids")
    if index_sources is not None and index_sources != text.get("kv_source_layer_ids"):
        raise ValueError(
            "config.json: text_config.index_k_source_layer_ids differs from kv_source_layer_ids; "
            "index keys that are not made by the key-value sources are not supported"
        )
    if "quantization_config" in top:
        quantization = _section(top["quantization_config"], "quantization_config")
        for key, allowed in _QUANTIZATION_EXPECTED.items():
            _expect(quantization, key, allowed, "quantization_config.")
        block = quantization.get("weight_block_size", [QUANT_BLOCK] * 2)
        if block != [QUANT_BLOCK] * 2:
            raise ValueError(
                f"config.json: quantization_config.weight_block_size is {block!r}; only [32, 32] is supported"
            )


def _typed(name: str, value: Any, annotation: str) -> Any:
    """Convert a JSON value to the annotated field type or raise ValueError naming the field."""
    optional = annotation.endswith("| None")
    kind = annotation.removesuffix("| None").strip()
    if value is None and optional:
        return None
    if kind == "bool" and isinstance(value, bool):
        return value
    # without the bound some integers would not convert to float; NaN and infinities fail it too
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER:
        if kind == "int" and value == int(value):
            return int(value)
        if kind == "float":
            return float(value)
    if kind.startswith("tuple[int") and isinstance(value, list | tuple) and len(value) <= MAX_LAYERS:
        return tuple(_typed(f"{name}[{i}]", v, "int") for i, v in enumerate(value))
    raise ValueError(f"config.json: {name} is {value!r}; expected {kind}")


def _read_flat(cls: type, section: Mapping[str, Any], prefix: str) -> Any:
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in section:
            values[field.name] = _typed(f"{prefix}.{field.name}", section[field.name], str(field.type))
    return cls(**values)


def _read_rope_scaling(text: Mapping[str, Any]) -> RopeScaling:
    scaling = _section(text.get("rope_scaling"), "text_config.rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"config.json: rope_scaling.rope_type is {kind!r}; only 'yarn' is supported")
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        if scaling.get(key) not in (None, 0, 1):
            raise ValueError(f"config.json: rope_scaling.{key} is not supported: V4.1 has no YaRN magnitude term")
    return _read_flat(RopeScaling, scaling, "rope_scaling")


# ---- consistency ---------------------------------------------------------------------------------


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {message}")


def _check(c: ModelConfig) -> None:
    _check_sizes(c)
    _check_layers(c)
    _check_engram(c)
    _check_draft(c)
    if c.vision is not None:
        _check_vision(c.vision)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(c, name)
        _require(value is None or 0 <= value < c.vocab_size, name, f"{value} is outside the vocabulary")


def _check_sizes(c: ModelConfig) -> None:
    positive = (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads",
        "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size",
        "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters",
    )  # fmt: skip
    for name in positive:
        value = getattr(c, name)
        _require(0 < value < MAX_DIMENSION, name, f"{value} is not in 1..{MAX_DIMENSION - 1}")
    _require(c.num_hidden_layers <= MAX_LAYERS, "num_hidden_layers", f"more than {MAX_LAYERS}")
    blocked = (
        "hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "index_head_dim",
    )  # fmt: skip
    for name in blocked:
        value = getattr(c, name)
        _require(value % QUANT_BLOCK == 0, name, f"{value} is not a multiple of {QUANT_BLOCK}")
    rope = c.qk_rope_head_dim
    _require(rope % 2 == 0, "qk_rope_head_dim", f"{rope} is odd")
    smallest = min(c.head_dim, c.index_head_dim)
    _require(rope <= smallest, "qk_rope_head_dim", f"{rope} exceeds head_dim or index_head_dim")
    _require(c.num_attention_heads % c.o_groups == 0, "o_groups", "does not divide num_attention_heads")
    _require(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", "exceeds n_routed_experts")
    for name in ("rope_theta", "compress_rope_theta", "gate_temp", "swiglu_limit", "routed_scaling_factor"):
        _require(getattr(c, name) > 0, name, "must be positive")
    for name in ("rms_norm_eps", "hc_eps"):
        _require(0 <= getattr(c, name) < 1, name, "must be in [0, 1)")
    scaling = c.rope_scaling
    _require(scaling.factor >= 1, "rope_scaling.factor", "must be at least 1")
    _require(scaling.beta_fast > scaling.beta_slow > 0, "rope_scaling.beta_fast", "must exceed beta_slow > 0")
    _require(
        scaling.original_max_position_embeddings > 0, "rope_scaling.original_max_position_embeddings",
        "must be positive",
    )  # fmt: skip


def _check_ascending(name: str, ids: tuple[int, ...], limit: int) -> None:
    _require(list(ids) == sorted(set(ids)), name, f"{list(ids)} is not strictly ascending")
    _require(all(0 <= i < limit for i in ids), name, f"{list(ids)} has a layer outside 0..{limit - 1}")


def _check_layers(c: ModelConfig) -> None:
    layers = c.num_hidden_layers
    ratios = c.compress_ratios
    expected = layers + c.num_nextn_predict_layers
    _require(len(ratios) == expected, "compress_ratios", f"has {len(ratios)} entries, expected {expected}")
    _require(all(r in (0, 1, 2) for r in ratios), "compress_ratios", "only 0, 1 and 2 are defined")
    _require(all(r == 0 for r in ratios[layers:]), "compress_ratios", "draft layers must have ratio 0")
    _check_ascending("kv_source_layer_ids", c.kv_source_layer_ids, layers)
    _check_ascending("index_source_layer_ids", c.index_source_layer_ids, layers)
    missing = set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)
    _require(not missing, "index_source_layer_ids", f"lacks key-value sources {sorted(missing)}")
    first = c.kv_source_layer_ids[0] if c.kv_source_layer_ids else layers
    for layer in range(layers):
        if layer < first:
            _require(ratios[layer] == 0, "compress_ratios", f"layer {layer} reads a cache that no layer makes")
            continue
        owner = max(s for s in c.kv_source_layer_ids if s <= layer)
        _require(
            ratios[layer] == ratios[owner] != 0, "compress_ratios",
            f"layer {layer} has ratio {ratios[layer]} but its key-value source {owner} has {ratios[owner]}",
        )  # fmt: skip
    _require(
        all(i >= first for i in c.index_source_layer_ids), "index_source_layer_ids",
        "an index source stands before the first key-value source",
    )  # fmt: skip
    if c.has_candidates:
        source = c.candidate_source_layer_id
        _require(
            source in c.kv_source_layer_ids and source == c.kv_source_layer_ids[-1],
            "candidate_source_layer_id", f"{source} is not the newest key-value source",
        )  # fmt: skip
        reach = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
        _require(
            reach >= c.index_topk, "candidate_topk_blocks",
            f"{c.candidate_topk_blocks} blocks of {c.candidate_block_size} cannot hold index_topk "
            f"{c.index_topk} entries",
        )  # fmt: skip


def _check_engram(c: ModelConfig) -> None:
    _check_ascending("engram_layer_ids", c.engram_layer_ids, c.num_hidden_layers)
    _require(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids), "engram_num_embeddings",
        "needs one entry per engram_layer_ids",
    )  # fmt: skip
    if not c.engram_layer_ids:
        return
    _require(2 <= c.engram_max_ngram_size <= 8, "engram_max_ngram_size", "must be in 2..8")
    for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
        _require(0 < getattr(c, name) < MAX_DIMENSION, name, "must be positive")
    _require(c.engram_head_dim % QUANT_BLOCK == 0, "engram_head_dim", "is not a multiple of 32")
    limit = (1 << 24) - (1 << 16)
    _require(c.engram_vocab_size < limit, "engram_vocab_size", "hash moduli must stay below 2^24")
    _require(c.engram_n_heads <= 256, "engram_n_heads", "more than 256 hash columns")
    _require(len(c.engram_layer_ids) <= 64, "engram_layer_ids", "more than 64 Engram layers")
    columns = len(c.engram_layer_ids) * c.engram_columns  # the search for their primes takes time
    _require(columns <= 1024, "engram_n_heads", f"{columns} hash columns in all layers; at most 1024 are supported")
    primes = bucket_primes(len(c.engram_layer_ids), c.engram_max_ngram_size - 1, c.engram_n_heads, c.engram_vocab_size)
    sums = tuple(sum(row) for row in primes)
    _require(
        sums == c.engram_num_embeddings and max(sums) < MAX_DIMENSION, "engram_num_embeddings",
        f"is {list(c.engram_num_embeddings)}, but engram_vocab_size, heads and layers give {list(sums)}",
    )  # fmt: skip
    _require(0 <= c.engram_pad_token_id < c.vocab_size, "engram_pad_token_id", "is outside the vocabulary")
    _require(c.engram_compressed_vocab_size <= c.vocab_size, "engram_compressed_vocab_size", "exceeds vocab_size")
    _require(
        all(layer < c.decoder_start for layer in c.engram_layer_ids), "engram_layer_ids",
        f"an Engram layer at or after the first decoder layer {c.decoder_start} is not supported",
    )  # fmt: skip


def _check_draft(c: ModelConfig) -> None:
    stages = c.num_nextn_predict_layers
    _require(0 <= stages <= 16, "num_nextn_predict_layers", "must be in 0..16")
    if stages == 0:
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
        _require(0 < getattr(c, name) < MAX_DIMENSION, name, "must be positive")
    _require(c.dspark_block_size <= 64, "dspark_block_size", "must be at most 64")
    _require(
        0 < c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts, "dspark_num_experts_per_tok",
        "must be in 1..dspark_n_routed_experts",
    )  # fmt: skip
    _require(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids", "is empty")
    _check_ascending("dspark_target_layer_ids", c.dspark_target_layer_ids, c.num_hidden_layers)
    _require(
        c.dspark_target_layer_ids[0] >= c.decoder_start, "dspark_target_layer_ids",
        f"a layer before the first decoder layer {c.decoder_start} is not supported",
    )  # fmt: skip
    _require(0 <= c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id", "is outside the vocabulary")


def _check_vision(v: VisionConfig) -> None:
    _require(0 <= v.num_hidden_layers <= MAX_LAYERS, "vision_config.num_hidden_layers", "out of range")
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio",
                 "max_image_tokens", "min_pixels"):  # fmt: skip
        _require(0 < getattr(v, name) < MAX_DIMENSION, f"vision_config.{name}", "must be positive")
    _require(
        v.hidden_size % v.num_attention_heads == 0, "vision_config.num_attention_heads",
        "does not divide hidden_size",
    )  # fmt: skip
