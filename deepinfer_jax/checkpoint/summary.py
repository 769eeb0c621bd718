"""What a checkpoint of a configuration holds: bytes by category and dtype, parameter counts, layer plan."""

from __future__ import annotations

import collections
import dataclasses
import math

from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import all_parameters, checkpoint_table
from deepinfer_jax.model.plan import LayerKind, layer_plan

CATEGORIES = (
    "routed experts",
    "Engram tables",
    "draft routed experts",
    "attention+compressor+indexer",
    "shared experts",
    "embed / head",
    "draft other",
    "vision+aligner+delimiters",
    "Engram wkv,q,k",
    "gates",
    "mHC",
    "layer norms + norm",
)
"""Rows of the byte table, in the order of `spec/blocks.md` 4.2."""

PARAMETER_GROUPS = ("backbone", "Engram tables", "draft", "vision")

_LAYER_CATEGORIES = (
    ("ffn.experts.", "routed experts"),
    ("engram.embed.", "Engram tables"),
    ("engram.", "Engram wkv,q,k"),
    ("attn.", "attention+compressor+indexer"),
    ("ffn.shared_experts.", "shared experts"),
    ("ffn.gate.", "gates"),
    ("hc_", "mHC"),
    ("attn_norm.", "layer norms + norm"),
    ("ffn_norm.", "layer norms + norm"),
)


def category(name: str) -> str:
    """Row of CATEGORIES that a checkpoint tensor counts in."""
    first, _, rest = name.partition(".")
    if first == "mtp":
        return "draft routed experts" if ".ffn.experts." in name else "draft other"
    if first == "layers":
        inner = rest.partition(".")[2]
        return next(label for prefix, label in _LAYER_CATEGORIES if inner.startswith(prefix))
    if first in ("embed", "head"):
        return "embed / head"
    return "layer norms + norm" if first == "norm" else "vision+aligner+delimiters"


@dataclasses.dataclass(frozen=True)
class Amount:
    """A number of tensors and their bytes."""

    tensors: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Totals of a configuration's checkpoint; dicts keep the order of the report."""

    total: Amount
    categories: dict[str, Amount]
    dtypes: dict[str, Amount]
    parameters: dict[str, int]
    """Logical parameters per PARAMETER_GROUPS and in "total": an FP4 byte counts two, scales none."""


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Logical parameters per group of PARAMETER_GROUPS, then "total"."""
    counts = dict.fromkeys(PARAMETER_GROUPS, 0)
    for prefix, parameter in all_parameters(config):
        number = math.prod(parameter.shape) * (parameter.experts or 1)
        if parameter.storage == "fp8_row":
            counts["Engram tables"] += number
        elif prefix.startswith("mtp."):
            counts["draft"] += number
        elif not prefix and parameter.key not in ("embed", "norm", "head"):
            counts["vision"] += number
        else:
            counts["backbone"] += number
    return counts | {"total": sum(counts.values())}


def summarize(config: ModelConfig) -> Summary:
    """Count tensors, bytes and parameters of a configuration's checkpoint."""
    categories = {name: [0, 0] for name in CATEGORIES}
    dtypes: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for tensor in checkpoint_table(config):
        for row in (categories[category(tensor.name)], dtypes[tensor.dtype]):
            row[0] += 1
            row[1] += tensor.nbytes
    total = Amount(sum(n for n, _ in dtypes.values()), sum(size for _, size in dtypes.values()))
    return Summary(
        total,
        {name: Amount(*row) for name, row in categories.items()},
        {name: Amount(*row) for name, row in sorted(dtypes.items(), key=lambda item: -item[1][1])},
        parameter_counts(config),
    )


def _kind_text(kind: LayerKind, count: int) -> str:
    notes = [note for flag, note in ((kind.engram, "Engram"), (kind.candidate_source, "candidate source")) if flag]
    return f"{count} {kind.mode}" + (f" ({', '.join(notes)})" if notes else "")


def plan_lines(config: ModelConfig) -> list[str]:
    """One line per segment of the layer plan: layers, repeats, runs, compression ratio, side."""
    lines = []
    for segment in layer_plan(config):
        last = segment.first_layer + segment.repeats * segment.layers_per_repeat - 1
        layers = f"{segment.first_layer}" if last == segment.first_layer else f"{segment.first_layer}-{last}"
        runs = " + ".join(_kind_text(run.kind, run.count) for run in segment.runs)
        repeats = f"{segment.repeats} x [{runs}]" if segment.repeats > 1 else runs
        kind = segment.runs[0].kind
        ratio = f"ratio {kind.compress_ratio}" if kind.compress_ratio else "window only"
        lines.append(f"layers {layers:<7} {repeats}, {ratio}, {'decoder' if kind.decoder else 'encoder'}")
    return lines
