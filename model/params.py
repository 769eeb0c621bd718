"""Parameters: one declaration per tensor, and the pytree that the forward functions take.

A `Parameter` says once what a tensor is called in the checkpoint, its shape, storage, logical axes
and how random initialisation draws it. From these declarations come the checkpoint table, loading,
initialisation, abstract arrays for compilation, and (later) sharding. Source: `spec/blocks.md` 4.2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.quantization import GROUP, QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.plan import layer_plan

Storage = Literal["fp8", "fp4", "fp8_row", "bf16", "f32"]
"""fp8: 32x32 blocks; fp4: packed nibbles, 1x32; fp8_row: Engram rows, 1x32; bf16, f32: plain."""

Initializer = Literal["linear", "embedding", "ones", "bias", "sink", "hc_fn", "hc_base", "hc_scale", "zeros"]


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of the checkpoint: name, safetensors dtype tag and stored shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = {"F32": 4, "BF16": 2}.get(self.dtype, 1)
        for n in self.shape:
            size *= n
        return size


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Declaration of one parameter (of all experts together when `experts` > 0).

    key: checkpoint name without the layer prefix and without ".weight"; experts' number is "{}".
    shape: logical shape, [out, in] for matrices, without the expert axis.
    axes: logical axis name per axis of `shape` (None = never sharded).
    """

    key: str
    storage: Storage
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer = "linear"
    experts: int = 0
    has_suffix: bool = True  # checkpoint name ends in ".weight"

    @property
    def quantized(self) -> bool:
        return self.storage in ("fp8", "fp4", "fp8_row")

    def stored(self) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]] | None]:
        """(dtype tag, shape) of the data and, for quantised storage, of the scale tensor."""
        if self.storage == "bf16":
            return ("BF16", self.shape), None
        if self.storage == "f32":
            return ("F32", self.shape), None
        rows, columns = self.shape
        if self.storage == "fp8":
            return ("F8_E4M3", self.shape), ("F8_E8M0", (rows // GROUP, columns // GROUP))
        scale = ("F8_E8M0", (rows, columns // GROUP))
        if self.storage == "fp4":
            return ("I8", (rows, columns // 2)), scale
        return ("F8_E4M3", self.shape), scale

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """Checkpoint tensors of this parameter under `prefix`; experts in ascending order."""
        (dtype, shape), scale = self.stored()
        for expert in range(self.experts or 1):
            name = prefix + (self.key.format(expert) if self.experts else self.key)
            yield CheckpointTensor(name + ".weight" if self.has_suffix else name, dtype, shape)
            if scale is not None:
                yield CheckpointTensor(name + ".scale", *scale)

    def abstract(self, lead: tuple[int, ...] = ()) -> Any:
        """ShapeDtypeStruct leaf (or QuantTensor of them) with leading axes `lead`, then experts."""
        lead = lead + ((self.experts,) if self.experts else ())
        (_, shape), scale = self.stored()
        if scale is None:
            dtype = jnp.bfloat16 if self.storage == "bf16" else jnp.float32
            return jax.ShapeDtypeStruct(lead + shape, dtype)
        data = jax.ShapeDtypeStruct(lead + shape, jnp.uint8)
        return QuantTensor(data, jax.ShapeDtypeStruct(lead + scale[1], jnp.uint8), self.storage)  # type: ignore[arg-type]


# ---- declarations ---------------------------------------------------------------------------------


def _vector(key: str, size: int, axis: str | None = None) -> Parameter:
    return Parameter(key, "bf16", (size,), (axis,), "ones")


def _block_parameters(c: ModelConfig, experts: int) -> tuple[Parameter, ...]:
    """Parameters that every backbone layer and every draft stage has."""
    d, heads, head_dim, inter = c.hidden_size, c.num_attention_heads, c.head_dim, c.moe_intermediate_size
    group_in = heads * head_dim // c.o_groups
    result = [
        _vector("attn_norm", d), _vector("ffn_norm", d),
        Parameter("attn.wq_a", "fp8", (c.q_lora_rank, d), ("q_lora", "embed")),
        _vector("attn.q_norm", c.q_lora_rank),
        Parameter("attn.wq_b", "fp8", (heads * head_dim, c.q_lora_rank), ("heads", "q_lora")),
        Parameter("attn.wkv", "fp8", (head_dim, d), ("head_dim", "embed")),
        _vector("attn.kv_norm", head_dim),
        Parameter("attn.wo_a", "fp8", (c.o_groups * c.o_lora_rank, group_in), ("o_groups", "heads")),
        Parameter("attn.wo_b", "fp8", (d, c.o_groups * c.o_lora_rank), ("embed", "o_groups")),
        Parameter("attn.attn_sink", "f32", (heads,), ("heads",), "sink", has_suffix=False),
        Parameter("ffn.gate", "bf16", (experts, d), ("experts", "embed")),
        Parameter("ffn.gate.bias", "f32", (experts,), ("experts",), "bias", has_suffix=False),
        Parameter("ffn.gate.bias_vl", "f32", (experts,), ("experts",), "bias", has_suffix=False),
        Parameter("ffn.shared_experts.w1", "fp8", (inter, d), ("expert_mlp", "embed")),
        Parameter("ffn.shared_experts.w2", "fp8", (d, inter), ("embed", "expert_mlp")),
        Parameter("ffn.shared_experts.w3", "fp8", (inter, d), ("expert_mlp", "embed")),
        Parameter("ffn.experts.{}.w1", "fp4", (inter, d), ("expert_mlp", "embed"), experts=experts),
        Parameter("ffn.experts.{}.w2", "fp4", (d, inter), ("embed", "expert_mlp"), experts=experts),
        Parameter("ffn.experts.{}.w3", "fp4", (inter, d), ("expert_mlp", "embed"), experts=experts),
    ]  # fmt: skip
    for name in ("attn", "ffn"):
        flat = c.hc_mult * d
        result += [
            Parameter(f"hc_{name}_fn", "f32", (c.hc_mix_size, flat), (None, "embed"), "hc_fn", has_suffix=False),
            Parameter(f"hc_{name}_base", "f32", (c.hc_mix_size,), (None,), "hc_base", has_suffix=False),
            Parameter(f"hc_{name}_scale", "f32", (3,), (None,), "hc_scale", has_suffix=False),
        ]
    return tuple(result)


@functools.cache
def layer_parameters(c: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    """Declarations of backbone layer `layer`; checkpoint prefix "layers.{layer}."."""
    result = list(_block_parameters(c, c.n_routed_experts))
    d = c.hidden_size
    if layer in c.kv_source_layer_ids:
        result += [
            Parameter("attn.compressor.wkv", "bf16", (c.head_dim, d), ("head_dim", "embed")),
            _vector("attn.compressor.norm", c.head_dim),
            Parameter("attn.indexer.wk", "bf16", (c.index_head_dim, c.head_dim), ("index_head_dim", "head_dim")),
            _vector("attn.indexer.k_norm", c.index_head_dim),
        ]
        if c.compress_ratios[layer] == 2:
            result.append(Parameter("attn.compressor.wgate", "bf16", (c.head_dim, d), ("head_dim", "embed")))
    if layer in c.index_source_layer_ids:
        rows = c.index_n_heads * c.index_head_dim
        result += [
            Parameter("attn.indexer.wq_b", "fp8", (rows, c.q_lora_rank), ("index_heads", "q_lora")),
            Parameter("attn.indexer.weights_proj", "bf16", (c.index_n_heads, d), ("index_heads", "embed")),
        ]
    if layer in c.engram_layer_ids:
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        width = c.engram_columns * c.engram_head_dim
        result += [
            Parameter("engram.embed", "fp8_row", (rows, c.engram_head_dim), ("engram_rows", None), "embedding"),
            Parameter("engram.wkv", "fp8", ((c.hc_mult + 1) * d, width), ("embed", None)),
            Parameter("engram.q_weight", "bf16", (c.hc_mult, d), (None, "embed"), "ones", has_suffix=False),
            Parameter("engram.k_weight", "bf16", (c.hc_mult, d), (None, "embed"), "ones", has_suffix=False),
        ]
    return tuple(result)


@functools.cache
def draft_parameters(c: ModelConfig, stage: int) -> tuple[Parameter, ...]:
    """Declarations of DSpark stage `stage`; checkpoint prefix "mtp.{stage}."."""
    result = list(_block_parameters(c, c.dspark_n_routed_experts))
    d, rank = c.hidden_size, c.dspark_markov_rank
    if stage == 0:
        taps = d * len(c.dspark_target_layer_ids)
        result += [Parameter("main_proj", "fp8", (d, taps), ("embed", None)), _vector("main_norm", d)]
    if stage == c.num_nextn_predict_layers - 1:
        result += [
            _vector("norm", d),
            Parameter("markov_head.embed", "bf16", (c.vocab_size, rank), ("vocab", None), "embedding"),
            Parameter("markov_head.head", "bf16", (c.vocab_size, rank), ("vocab", None)),
            Parameter("confidence_head.proj", "bf16", (1, d + rank), (None, None)),
        ]
    return tuple(result)


@functools.cache
def global_parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    """Declarations without a prefix: embedding, final norm, head."""
    return (
        Parameter("embed", "bf16", (c.vocab_size, c.hidden_size), ("vocab", "embed"), "embedding"),
        Parameter("norm", "bf16", (c.hidden_size,), ("embed",), "ones"),
        Parameter("head", "bf16", (c.vocab_size, c.hidden_size), ("vocab", "embed")),
    )


@functools.cache
def vision_parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    """Declarations of the vision tower and aligner (no prefix); empty without vision layers."""
    v = c.vision
    if v is None or v.num_hidden_layers == 0:
        return ()
    hidden, inter, d = v.hidden_size, v.intermediate_size, c.hidden_size
    merged = hidden * v.downsample_ratio**2

    def linear(key: str, out: int, size: int, bias: bool = True) -> list[Parameter]:
        both = [Parameter(key, "bf16", (out, size), (None, None))]
        if bias:
            both.append(Parameter(f"{key}.bias", "bf16", (out,), (None,), "zeros", has_suffix=False))
        return both

    result = linear("vision.patch_embed.proj", hidden, 3 * v.patch_size**2)
    for i in range(v.num_hidden_layers):
        block = f"vision.blocks.{i}."
        result += [_vector(block + "norm1", hidden), _vector(block + "norm2", hidden)]
        result += linear(block + "attn.wqkv", 3 * hidden, hidden) + linear(block + "attn.wo", hidden, hidden)
        result += linear(block + "mlp.w1", 2 * inter, hidden, False) + linear(block + "mlp.w2", hidden, inter, False)
    result.append(_vector("vision.norm", hidden))
    result += linear("aligner.w1", d, merged) + linear("aligner.w2", d, d)
    for name in ("image_start", "image_end", "image_newline"):
        result.append(Parameter(name, "bf16", (d,), (None,), "embedding", has_suffix=False))
    return tuple(result)


def all_parameters(c: ModelConfig) -> Iterator[tuple[str, Parameter]]:
    """(checkpoint prefix, declaration) of every parameter of the model."""
    for parameter in (*global_parameters(c), *vision_parameters(c)):
        yield "", parameter
    for layer in range(c.num_hidden_layers):
        for parameter in layer_parameters(c, layer):
            yield f"layers.{layer}.", parameter
    for stage in range(c.num_nextn_predict_layers):
        for parameter in draft_parameters(c, stage):
            yield f"mtp.{stage}.", parameter


def checkpoint_table(c: ModelConfig) -> Iterator[CheckpointTensor]:
    """Every tensor that a checkpoint of this configuration holds."""
    return itertools.chain.from_iterable(p.checkpoint_tensors(prefix) for prefix, p in all_parameters(c))


# ---- the pytree -----------------------------------------------------------------------------------

LayerParams = dict[str, Any]
"""key of the declaration -> array or QuantTensor."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["embed", "norm", "head", "segments", "engram_token_map", "draft", "vision"],
    meta_fields=["config", "numerics", "tokenizer_id"],
)
@dataclasses.dataclass(frozen=True)
class Params:
    """All weights. `segments[i][j]` holds run j of plan segment i, leaves stacked [repeats, count, ...].

    engram_token_map: int32 [vocab_size] class of each token id, None without Engram layers.
    draft: one dict per DSpark stage. vision: dict by declaration key, empty without a tower.
    numerics: name of the profile that generation uses. tokenizer_id: digest of the model's tokenizer file.
    """

    config: ModelConfig
    embed: jax.Array
    norm: jax.Array
    head: jax.Array
    segments: tuple[tuple[LayerParams, ...], ...]
    engram_token_map: jax.Array | None
    draft: tuple[LayerParams, ...]
    vision: LayerParams
    numerics: str = "reference"
    tokenizer_id: str | None = None


PlaceFn = Callable[[Parameter, tuple[int, ...], tuple[str, ...]], Any]
"""(declaration, leading axes, checkpoint prefixes in row-major order) -> leaf."""


def build_params(c: ModelConfig, place: PlaceFn, engram_token_map: Any = None) -> Params:
    """Assemble the pytree; `place` makes each leaf (from a checkpoint, a key, or nothing)."""
    segments = []
    for segment in layer_plan(c):
        runs = []
        for index in range(len(segment.runs)):
            ids = segment.layer_ids(index)
            lead = (len(ids), len(ids[0]))
            prefixes = tuple(f"layers.{layer}." for row in ids for layer in row)
            runs.append({p.key: place(p, lead, prefixes) for p in layer_parameters(c, ids[0][0])})
        segments.append(tuple(runs))
    top = {p.key: place(p, (), ("",)) for p in global_parameters(c)}
    draft = tuple(
        {p.key: place(p, (), (f"mtp.{stage}.",)) for p in draft_parameters(c, stage)}
        for stage in range(c.num_nextn_predict_layers)
    )
    vision = {p.key: place(p, (), ("",)) for p in vision_parameters(c)}
    return Params(c, top["embed"], top["norm"], top["head"], tuple(segments), engram_token_map, draft, vision)


def abstract_params(c: ModelConfig) -> Params:
    """The pytree of ShapeDtypeStructs, for lowering without weights."""
    token_map = jax.ShapeDtypeStruct((c.vocab_size,), jnp.int32) if c.engram_layer_ids else None
    return build_params(c, lambda parameter, lead, _: parameter.abstract(lead), token_map)
