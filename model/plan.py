"""The layer plan: which kind each layer is, and which runs of layers are scanned.

Derived once from the configuration. A `Segment` is a sequence of runs that repeats; a `Run` is a
number of consecutive layers of one kind. The released model becomes

    [window] [window+Engram] 2 x [Full, 5 Reuse] [Full+Engram, 5 Reuse]
    [Full, 3 Reuse] 4 x [Reindex, 3 Reuse]

so that compile time depends on the number of kinds, not on the number of layers.
"""

from __future__ import annotations

import dataclasses
import functools

from deepinfer_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What a layer does. Layers of one kind share code; layer and source numbers are data."""

    compress_ratio: int  # 0 = window only
    kv_source: bool = False  # makes compressed keys-values and index keys
    index_source: bool = False  # makes its own selection
    candidate_source: bool = False  # publishes candidate blocks
    candidate_consumer: bool = False  # selects inside candidate blocks only
    engram: bool = False
    decoder: bool = False

    @property
    def mode(self) -> str:
        """Name of the report: window, full, reindex or reuse."""
        if self.compress_ratio == 0:
            return "window"
        if self.kv_source:
            return "full"
        return "reindex" if self.index_source else "reuse"


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` consecutive layers of one kind inside each repeat of a segment."""

    kind: LayerKind
    count: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` copies of `runs`, starting at layer `first_layer`."""

    first_layer: int
    repeats: int
    runs: tuple[Run, ...]

    @property
    def layers_per_repeat(self) -> int:
        return sum(run.count for run in self.runs)

    def layer_ids(self, run_index: int) -> tuple[tuple[int, ...], ...]:
        """Layer ids of one run, [repeats][count]."""
        start = self.first_layer + sum(run.count for run in self.runs[:run_index])
        step = self.layers_per_repeat
        count = self.runs[run_index].count
        return tuple(tuple(start + r * step + i for i in range(count)) for r in range(self.repeats))


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Kind of a backbone layer (`spec/attention.md` 2.1)."""
    return LayerKind(
        compress_ratio=config.compress_ratios[layer],
        kv_source=layer in config.kv_source_layer_ids,
        index_source=layer in config.index_source_layer_ids,
        candidate_source=config.has_candidates and layer == config.candidate_source_layer_id,
        candidate_consumer=config.is_candidate_consumer(layer),
        engram=layer in config.engram_layer_ids,
        decoder=layer >= config.decoder_start,
    )


@functools.cache
def layer_plan(config: ModelConfig) -> tuple[Segment, ...]:
    """Segments in layer order. Encoder and decoder never share a segment."""
    kinds = [layer_kind(config, layer) for layer in range(config.num_hidden_layers)]
    groups = _groups(kinds)
    segments: list[Segment] = []
    layer = 0
    for runs in groups:
        size = sum(run.count for run in runs)
        last = segments[-1] if segments else None
        if last is not None and last.runs == runs:
            segments[-1] = dataclasses.replace(last, repeats=last.repeats + 1)
        else:
            segments.append(Segment(layer, 1, runs))
        layer += size
    return tuple(segments)


def _groups(kinds: list[LayerKind]) -> list[tuple[Run, ...]]:
    """Split at every index source and at every window-only layer; a group is its run-length code."""
    groups: list[list[Run]] = []
    for kind in kinds:
        if not groups or kind.index_source or kind.mode == "window":
            groups.append([])
        runs = groups[-1]
        if runs and runs[-1].kind == kind:
            runs[-1] = Run(kind, runs[-1].count + 1)
        else:
            runs.append(Run(kind, 1))
    return [tuple(runs) for runs in groups]
