"""The report of `deepinfer-jax inspect`: gathered once, rendered as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint.engram_map import load_token_map
from deepinfer_jax.checkpoint.files import CheckpointError, exists
from deepinfer_jax.checkpoint.load import CONFIG_FILE, check_tensors, load_config
from deepinfer_jax.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint
from deepinfer_jax.checkpoint.summary import Amount, Summary, plan_lines, summarize
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.params import checkpoint_table

BUILT_IN = {"released": ModelConfig.released, "demo": ModelConfig.demo, "micro": ModelConfig.micro}


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known about one configuration or checkpoint folder."""

    source: str
    config: ModelConfig
    summary: Summary
    checked_files: int
    """Tensor files whose headers were checked; 0: only the configuration is known."""


def inspect(path: str) -> Report:
    """Report on a built-in name or a folder; a checkpoint folder is checked on the way.

    Raises CheckpointError when the path is neither, or the checkpoint has a defect.
    """
    if path in BUILT_IN:
        config = BUILT_IN[path]()
        return Report(f"built-in configuration {path!r}", config, summarize(config), 0)
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: is not a folder; PATH is a folder with a {CONFIG_FILE}, or one of {', '.join(BUILT_IN)}"
        )
    config = load_config(folder)
    files = 0
    if exists(folder, SINGLE_FILE) or exists(folder, INDEX_FILE):
        checkpoint = Checkpoint(folder)
        check_tensors(checkpoint, config)
        load_token_map(folder, config)
        files = len({entry.shard for entry in checkpoint.entries.values()})
    return Report(str(folder), config, summarize(config), files)


# ---- text -----------------------------------------------------------------------------------------


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _binary_size(size: int) -> str:
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _parameters_text(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:,.3f} {unit}"
    return f"{number:,}"


def _config_lines(c: ModelConfig) -> Iterator[str]:
    yield f"vocabulary      {c.vocab_size:,} tokens, context {c.max_position_embeddings:,}"
    yield f"layers          {c.num_hidden_layers}, hidden {c.hidden_size:,}, {c.hc_mult} residual streams"
    yield (
        f"attention       {c.num_attention_heads} heads x {c.head_dim} ({c.qk_rope_head_dim} rotated), "
        f"window {c.sliding_window}, {c.index_topk} selected entries"
    )
    experts = f"{c.num_experts_per_tok} of {c.n_routed_experts} plus 1 shared"
    yield f"experts         {experts}, width {c.moe_intermediate_size:,}"
    if c.engram_layer_ids:
        rows = " + ".join(f"{n:,}" for n in c.engram_num_embeddings)
        yield f"Engram          layers {', '.join(map(str, c.engram_layer_ids))}; {rows} rows x {c.engram_head_dim}"
    if c.has_draft:
        yield (
            f"draft           {_counted(c.num_nextn_predict_layers, 'stage')}, blocks of {c.dspark_block_size}, "
            f"{c.dspark_num_experts_per_tok} of {c.dspark_n_routed_experts} experts"
        )
    if c.vision is not None and c.vision.num_hidden_layers:
        yield f"vision          {c.vision.num_hidden_layers} layers, hidden {c.vision.hidden_size:,}"


def _table(title: str, rows: dict[str, Amount], total: Amount) -> Iterator[str]:
    yield f"{title:<30} {'tensors':>9} {'bytes':>20} {'share':>8}"
    for name, amount in rows.items():
        if amount.tensors:
            share = 100 * amount.nbytes / total.nbytes
            yield f"  {name:<28} {amount.tensors:>9,} {amount.nbytes:>20,} {share:>7.2f}%"
    yield f"  {'total':<28} {total.tensors:>9,} {total.nbytes:>20,} {_binary_size(total.nbytes):>12}"


def render_text(report: Report, tensors: bool = False) -> Iterator[str]:
    """Lines of the report for people; `tensors` adds one line per tensor."""
    config, summary = report.config, report.summary
    yield report.source
    if report.checked_files:
        yield (
            f"checked: the headers of {_counted(report.checked_files, 'file')} hold exactly the "
            f"{summary.total.tensors:,} tensors that config.json needs; values were not read"
        )
    else:
        yield "configuration only: what follows is what a checkpoint must hold; no tensor file was looked at"
    yield ""
    yield from _config_lines(config)
    yield ""
    yield "layer plan"
    for line in plan_lines(config):
        yield f"  {line}"
    yield ""
    yield from _table("category", summary.categories, summary.total)
    yield ""
    yield from _table("dtype", summary.dtypes, summary.total)
    yield ""
    yield "parameters (packed FP4 counts two per byte, scales do not count)"
    for name, number in summary.parameters.items():
        yield f"  {name:<28} {_parameters_text(number):>12}"
    if tensors:
        yield ""
        yield "tensors"
        for tensor in checkpoint_table(config):
            yield f"  {tensor.name:<52} {tensor.dtype:<8} {list(tensor.shape)}"


# ---- JSON -----------------------------------------------------------------------------------------


def _amounts(rows: dict[str, Amount]) -> dict[str, dict[str, int]]:
    return {name: {"tensors": amount.tensors, "bytes": amount.nbytes} for name, amount in rows.items()}


def render_json(report: Report, tensors: bool = False) -> Iterator[str]:
    """The report as one JSON document, in lines. Sizes in bytes; `tensors` adds the list of tensors."""
    summary = report.summary
    document: dict[str, Any] = {
        "source": report.source,
        "checked_files": report.checked_files,
        "config": report.config.to_dict(),
        "layer_plan": plan_lines(report.config),
        "total": {"tensors": summary.total.tensors, "bytes": summary.total.nbytes},
        "categories": _amounts(summary.categories),
        "dtypes": _amounts(summary.dtypes),
        "parameters": summary.parameters,
    }
    if tensors:
        document["tensors"] = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            for tensor in checkpoint_table(report.config)
        ]
    yield from json.dumps(document, indent=2).splitlines()
