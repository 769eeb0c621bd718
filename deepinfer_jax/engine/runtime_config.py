"""Sizes of an engine. None of them can change a result."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np

from deepinfer_jax.kernels.dispatch import ROW_TILE, Implementation, Kernels
from deepinfer_jax.kernels.profile import NumericsProfile
from deepinfer_jax.kernels.quantization import CacheFormat, cache_dtype, cache_width
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.state import PAGE, pooling_sources, ring_sizes, sources_by_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How much an engine holds and does at once. Results never depend on it; speed and memory do.

    slots: sequences in work at once; others wait.
    rows: rows of a step, ascending sizes of which each step takes the smallest that fits; one program is
        compiled per size. None: (128,) on a CPU, whose program costs what its used rows cost, and
        (16, 64, 256, 1024) elsewhere. The largest must hold one row per slot.
    context: longest sequence in tokens, prompt and output. None: the model's.
    cache_bytes: memory of the pages. None: what `slots` sequences of `context` need, but at most a quarter
        of the machine's (a half of the accelerator's) memory.
    snapshot_bytes: memory of the snapshots from which shared prefixes go on.
    prefix_sharing: keep the caches of prefixes and use them for later requests.
    prefill_chunk: most prompt rows of one sequence in a step. None: no limit.
    overlap: prepare and launch a step before the tokens of the one before are read.
    implementation: of all operators: "xla" (portable), "mosaic_gpu" (GPU kernels, NotImplementedError where one
        is missing) or None: GPU kernels where they exist for this model, the portable ones elsewhere.
    kernels: implementation of each operator by name, in place of `implementation`.
    """

    slots: int = 32
    rows: tuple[int, ...] | None = None
    context: int | None = None
    cache_bytes: int | None = None
    snapshot_bytes: int = 1 << 28
    prefix_sharing: bool = True
    prefill_chunk: int | None = None
    overlap: bool = True
    implementation: Implementation | None = None
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "context", "cache_bytes", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"RuntimeConfig.{name} is {value}; expected at least 1")
        if self.snapshot_bytes < 0:
            raise ValueError(f"RuntimeConfig.snapshot_bytes is {self.snapshot_bytes}; expected 0 or more")
        if self.kernels is not None and self.implementation is not None:
            raise ValueError("RuntimeConfig: give kernels or implementation, not both")
        if self.rows is not None:
            tile = self.row_tile or 1
            if not self.rows or list(self.rows) != sorted(set(self.rows)) or any(r < 1 or r % tile for r in self.rows):
                raise ValueError(f"RuntimeConfig.rows is {self.rows}; expected ascending multiples of {tile}")
            if self.rows[-1] < self.slots:
                raise ValueError(f"RuntimeConfig.rows ends at {self.rows[-1]}, fewer than {self.slots} slots")

    @property
    def row_tile(self) -> int | None:
        """Rows of a tile of the portable operators; None: whole arrays."""
        return ROW_TILE if self.kernels is None else self.kernels.row_tile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a RuntimeConfig comes to for one model and machine.

    slots; rows: ascending rows of a step; logit_rows: most rows whose logits a step gives; table_pages: pages a
    sequence may have; pages, snapshots: how many exist; page_bytes, snapshot_bytes: bytes of one.
    """

    slots: int
    rows: tuple[int, ...]
    logit_rows: int
    table_pages: int
    pages: int
    snapshots: int
    page_bytes: int
    snapshot_bytes: int


def _record_bytes(fmt: CacheFormat, size: int) -> int:
    return cache_width(fmt, size) * np.dtype(cache_dtype(fmt)).itemsize


def page_bytes(config: ModelConfig, profile: NumericsProfile) -> int:
    """Bytes of one page over all key-value sources."""
    kv = _record_bytes(profile.compressed_format, config.head_dim)
    index = _record_bytes(profile.index_format, config.index_head_dim)
    return sum(len(sources) * (PAGE // ratio) * (kv + index) for ratio, sources in sources_by_ratio(config).items())


def slot_bytes(config: ModelConfig, profile: NumericsProfile, row_block: int, max_draft: int = 0) -> int:
    """Bytes of one slot's rings, which are also those of a snapshot."""
    window, group, lookback, draft = ring_sizes(config, row_block, max_draft)
    width = _record_bytes(profile.window_format, config.head_dim)
    layers = config.num_hidden_layers * window + config.num_nextn_predict_layers * draft
    return layers * width + len(pooling_sources(config)) * group * 2 * config.head_dim * 4 + lookback * 4


def device_memory() -> int:
    """Bytes that the pages may take by default."""
    device = jax.devices()[0]
    facts = device.memory_stats() if device.platform != "cpu" else None
    if facts and "bytes_limit" in facts:
        return (facts["bytes_limit"] - facts.get("bytes_in_use", 0)) // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def runtime_sizes(runtime: RuntimeConfig, kernels: Kernels, config: ModelConfig, profile: NumericsProfile) -> Sizes:
    """Array sizes of an engine that runs with `kernels`. ValueError where the budget holds nothing."""
    tile = kernels.row_tile or 128
    block = kernels.most_rows(tile)
    most_logits = _multiple(max(128, runtime.slots + 1), 128 if kernels.row_block else tile)
    cpu = jax.default_backend() == "cpu"
    rows = runtime.rows or ((_multiple(max(128, runtime.slots), tile),) if cpu else _gpu_rows(runtime.slots, tile))
    context = runtime.context or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ValueError(
            f"RuntimeConfig.context is {context}; the model has {config.max_position_embeddings} positions"
        )
    table = -(-context // PAGE)
    size = page_bytes(config, profile)
    if runtime.cache_bytes is None:
        pages = min(runtime.slots * table, max(1, device_memory() // max(1, size)))
    else:
        pages = runtime.cache_bytes // max(1, size)
    if pages < 1:
        raise ValueError(f"RuntimeConfig.cache_bytes is {runtime.cache_bytes}; one page of this model takes {size}")
    snapshot = slot_bytes(config, profile, block)
    snapshots = min(2 * runtime.slots, runtime.snapshot_bytes // snapshot) if runtime.prefix_sharing else 0
    return Sizes(runtime.slots, rows, min(rows[-1], most_logits), table, pages, snapshots, size, snapshot)


def _multiple(value: int, block: int) -> int:
    return -(-value // block) * block


def _gpu_rows(slots: int, block: int) -> tuple[int, ...]:
    sizes = {_multiple(size, block) for size in (ROW_TILE, 64, 256, 1024)}
    return tuple(sorted(sizes | ({_multiple(slots, block)} if slots > 1024 else set())))
