"""The golden models, their recorded results, and the two ways in which the tests run them.

`Model` is the whole forward pass, compiled once with every capture. `Layers` runs one layer at a time, from any
input; it compiles each kind of layer once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.load import load_checkpoint
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.profile import NumericsProfile, numerics_profile
from deepinfer_jax.kernels.quantization import unpack_cache
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Flow, Setting, rows_of
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.layer import LayerNumbers, apply_layer, make_source
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.plan import layer_kind, layer_plan
from deepinfer_jax.model.state import PAGE, Batch, State, init_state, pooling_sources, sources_by_ratio

DATA = Path(__file__).parents[1] / "data" / "golden"
CAPTURED = (
    "streams",
    "pre",
    "router_ids",
    "router_weights",
    "selection",
    "candidates",
    "engram_rows",
    "engram_gate",
)
PAGES = (2, 0)
"""Pages of the one sequence, out of order, so that a page number cannot pass for a place in the sequence."""

Arrays = dict[str, np.ndarray]


# ---- recorded results -----------------------------------------------------------------------------


@functools.cache
def load_model(name: str) -> tuple[ModelConfig, Params]:
    """Configuration and weights of a golden model."""
    return load_checkpoint(DATA / name)


@functools.cache
def load_results(name: str, file: str) -> Arrays:
    """Arrays of one file; "<key>:bf16" becomes "<key>" in float32."""
    with np.load(DATA / name / f"{file}.npz") as stored:
        return dict(plain(key, stored[key]) for key in stored.files)


def plain(key: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """(key, values) with the upper halves of a ":bf16" array widened to float32."""
    if not key.endswith(":bf16"):
        return key, values
    return key.removesuffix(":bf16"), (values.astype(np.uint32) << 16).view(np.float32)


def of_prompt(results: Arrays, prompt: str) -> Arrays:
    """Results of one prompt, keys without the prompt."""
    return {key.removeprefix(f"{prompt}/"): v for key, v in results.items() if key.startswith(f"{prompt}/")}


def noise_floors(name: str) -> list[dict[str, float]]:
    """Per layer: how far another order of accumulation moved the results of one layer."""
    return json.loads((DATA / name / "layerwise_noise.json").read_text())


def recorded_mutations() -> dict[str, float]:
    """Largest change of a p64 logit of g1_attn when one rule is broken."""
    return json.loads((DATA / "mutations.json").read_text())


def padded_selection(config: ModelConfig, recorded: np.ndarray) -> np.ndarray:
    """Recorded entries [S, k] with the -1 of a selection that is shorter than index_topk."""
    missing = config.index_topk - recorded.shape[1]
    return np.pad(recorded, ((0, 0), (0, missing)), constant_values=-1).astype(np.int32)


def candidate_blocks_of(config: ModelConfig, recorded: np.ndarray, columns: int) -> np.ndarray:
    """Recorded mask over visible entries [S, n] as a mask over blocks [S, columns]."""
    size = config.candidate_block_size
    whole = np.zeros((len(recorded), columns * size), bool)
    whole[:, : recorded.shape[1]] = recorded != 0
    return whole.reshape(len(recorded), columns, size).any(axis=-1)


# ---- calls ----------------------------------------------------------------------------------------


def make_batch(token_ids: np.ndarray, first: int, rows: int, image: np.ndarray | None = None) -> Batch:
    """One sequence's tokens from position `first` on, padded to `rows` rows; logits of all of them."""
    count = len(token_ids)

    def padded(values: np.ndarray, fill: int) -> jax.Array:
        return jnp.asarray(np.pad(values, (0, rows - count), constant_values=fill), jnp.int32)

    number = np.arange(count)
    mask = np.zeros(rows, bool)
    if image is not None:
        mask[:count] = image
    return Batch(
        token_ids=padded(np.asarray(token_ids), 0),
        positions=padded(number + first, 0),
        sequence=padded(np.zeros(count), -1),
        decoder_rows=padded(number, -1),
        logit_rows=padded(number, -1),
        page_table=jnp.asarray([PAGES], jnp.int32),
        window_start=jnp.zeros(1, jnp.int32),
        image_mask=jnp.asarray(mask),
    )


def empty_state(config: ModelConfig, profile: NumericsProfile, row_block: int) -> State:
    return init_state(config, profile, slots=1, pages=max(PAGES) + 1, row_block=row_block)


def as_numpy(values: jax.Array) -> np.ndarray:
    """NumPy values; bfloat16 becomes float32."""
    result = np.asarray(values)
    return result.astype(np.float32) if values.dtype == jnp.bfloat16 else result


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call gave: logits [S, V] and captures [layers, S, ...] of its S rows, and the state after it."""

    logits: np.ndarray
    captured: Arrays
    state: State


class Model:
    """The forward pass of one golden model in one mode: a single compiled program of 64 rows."""

    ROWS = 64

    def __init__(self, name: str, mode: str, **changes: Any) -> None:
        """changes: fields of the configuration to replace (the weights stay)."""
        config, self.params = load_model(name)
        self.config = dataclasses.replace(config, **changes)
        self.profile = numerics_profile("reference" if mode == "ref_bf16" else mode)
        self._program: Any = None
        self._prefilled: dict[bytes, Run] = {}

    def _call(self, state: State, batch: Batch, count: int) -> Run:
        if self._program is None:

            def whole(params: Params, state: State, batch: Batch) -> Any:
                return forward(params, state, batch, config=self.config, profile=self.profile, captures=CAPTURED)

            self._program = jit(whole)
        outputs, state = self._program(self.params, state, batch)
        captured = {name: as_numpy(value)[:, :count] for name, value in outputs.captured.items()}
        return Run(as_numpy(outputs.logits)[:count], captured, state)

    def prefill(self, token_ids: np.ndarray, image: np.ndarray | None = None) -> Run:
        """The whole prompt in one call from an empty state; computed once."""
        key = token_ids.astype(np.int32).tobytes() + (b"" if image is None else image.astype(bool).tobytes())
        if key not in self._prefilled:
            state = empty_state(self.config, self.profile, 16)
            self._prefilled[key] = self._call(state, make_batch(token_ids, 0, self.ROWS, image), len(token_ids))
        return self._prefilled[key]

    def decode(self, state: State, token_id: int, position: int) -> Run:
        """One token in a call of its own."""
        return self._call(state, make_batch(np.array([token_id]), position, self.ROWS), 1)


# ---- one layer at a time --------------------------------------------------------------------------


def layer_params(config: ModelConfig, params: Params, layer: int) -> LayerParams:
    """Weights of one layer, out of the stacked ones."""
    for segment, runs in zip(layer_plan(config), params.segments, strict=True):
        for index, run in enumerate(runs):
            for repeat, ids in enumerate(segment.layer_ids(index)):
                if layer in ids:
                    place = ids.index(layer)
                    return jax.tree.map(lambda leaf, r=repeat, p=place: leaf[r, p], run)
    raise ValueError(f"layer {layer} does not exist")


def layer_numbers(config: ModelConfig, layer: int) -> LayerNumbers:
    """Where a layer finds its own part of shared arrays."""
    owner = config.kv_owner(layer)
    sources = sources_by_ratio(config).get(config.compress_ratios[layer], ())

    def place(values: tuple[int, ...]) -> jax.Array:
        return jnp.int32(values.index(layer) if layer in values else len(values))

    return LayerNumbers(
        layer=jnp.int32(layer),
        source_id=jnp.int32(0 if owner is None else sources.index(owner)),
        pool_id=place(pooling_sources(config)),
        engram_id=place(config.engram_layer_ids),
        tap_id=place(config.dspark_target_layer_ids),
    )


class Layers:
    """The layers of one model on all rows of a call, each from an input of the caller's choice."""

    LAYER_CAPTURES = ("router_ids", "engram_gate")

    def __init__(self, config: ModelConfig, params: Params, profile: NumericsProfile, rows: int) -> None:
        self.config, self.params, self.profile, self.rows = config, params, profile, rows
        self._programs: dict[Any, Any] = {}

    def setting(self, kernels: Kernels | None = None) -> Setting:
        """Static arguments of a layer."""
        kernels = Kernels() if kernels is None else kernels
        return Setting(self.config, self.profile, kernels, LOCAL_EXCHANGE, frozenset(self.LAYER_CAPTURES))

    def empty_state(self) -> State:
        """State whose rings take all rows of the call at once."""
        return empty_state(self.config, self.profile, self.rows)

    def candidate_columns(self, batch: Batch) -> int:
        """Width of `Flow.candidates`."""
        ratio = self.config.compress_ratios[self.config.kv_source_layer_ids[-1]]
        return -(-batch.page_table.shape[1] * (PAGE // ratio) // self.config.candidate_block_size)

    def flow(self, streams: np.ndarray, pre: np.ndarray, state: State, batch: Batch) -> Flow:
        """Values entering a layer: streams [S, C, D] and pre [S, C], padded to the rows of the call."""
        config, dtype = self.config, self.profile.dtype
        missing = self.rows - len(streams)
        layers = config.num_hidden_layers
        return Flow(
            streams=jnp.asarray(np.pad(streams, ((0, missing), (0, 0), (0, 0))), dtype),
            pre=jnp.asarray(np.pad(pre, ((0, missing), (0, 0))), jnp.float32),
            selection=jnp.full((self.rows, config.index_topk), -1, jnp.int32),
            candidates=jnp.zeros((self.rows, self.candidate_columns(batch)), bool),
            taps=jnp.zeros((len(config.dspark_target_layer_ids), self.rows, config.hidden_size), dtype),
            captured={
                "router_ids": jnp.zeros((layers, self.rows, config.num_experts_per_tok), jnp.int32),
                "engram_gate": jnp.zeros((layers, self.rows, config.hc_mult), jnp.float32),
            },
            state=state,
        )

    def pad_hashes(self, hashes: np.ndarray) -> jax.Array:
        """Table rows [S, Engram layers, columns] as `apply_layer` takes them."""
        return jnp.asarray(np.pad(hashes, ((0, self.rows - len(hashes)), (0, 0), (0, 0))), jnp.int32).swapaxes(0, 1)

    def run(self, layer: int, batch: Batch, hashes: jax.Array, flow: Flow) -> Flow:
        """Apply one layer; a decoder key-value source first makes its cache entries."""
        kind = layer_kind(self.config, layer)
        if kind not in self._programs:
            setting = self.setting()

            def one(p: LayerParams, numbers: LayerNumbers, batch: Batch, hashes: jax.Array, flow: Flow) -> Flow:
                return one_layer(setting, layer, p, numbers, batch, hashes, flow)

            self._programs[kind] = jit(one)
        p = layer_params(self.config, self.params, layer)
        return self._programs[kind](p, layer_numbers(self.config, layer), batch, hashes, flow)


def one_layer(
    setting: Setting,
    layer: int,
    p: LayerParams,
    numbers: LayerNumbers,
    batch: Batch,
    hashes: jax.Array,
    flow: Flow,
) -> Flow:
    """Everything of the layers of this kind, on all rows of the batch as one block."""
    kind = layer_kind(setting.config, layer)
    rows = rows_of(batch, jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32))
    if kind.kv_source and kind.decoder:
        flow = make_source(setting, kind, p, numbers, rows, flow)
    return apply_layer(setting, kind, p, numbers, hashes, rows, flow)


# ---- caches ---------------------------------------------------------------------------------------


def window_records(state: State, layer: int, count: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, their records) of the newest `window` positions of a sequence of `count` tokens."""
    positions = np.arange(max(0, count - window), count)
    return positions, np.asarray(state.window)[layer, 0, positions % state.window.shape[2]]


def page_records(config: ModelConfig, state: State, source: int, count: int, which: str) -> np.ndarray:
    """Records of the first `count` entries of a key-value source; which: "kv" or "index"."""
    ratio = config.compress_ratios[source]
    pool = np.asarray(getattr(state.pages[ratio], which))
    entries = np.arange(count)
    per_page = PAGE // ratio
    pages = np.array(PAGES)[entries // per_page]
    return pool[sources_by_ratio(config)[ratio].index(source), pages, entries % per_page]


def unpacked(records: np.ndarray, fmt: Any, size: int) -> np.ndarray:
    """float32 vectors of cache records."""
    return np.asarray(unpack_cache(jnp.asarray(records), fmt, size))
