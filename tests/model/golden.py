"""The golden models, their recorded results, and the two ways in which the tests run them.

`Model` is the whole forward pass, compiled once with every capture. `Layers` runs one layer at a time, from any
input; it compiles each kind of layer once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.load import load_checkpoint
from deepinfer_jax.compile import jit
from deepinfer_jax.engine.implementations import choose_kernels
from deepinfer_jax.engine.repack import prepare_params
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import NumericsProfile, numerics_profile
from deepinfer_jax.kernels.quantization import unpack_cache
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL_EXCHANGE
from deepinfer_jax.model.flow import Flow, Setting, rows_of
from deepinfer_jax.model.forward import forward, project_logits
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


def existing_blocks(config: ModelConfig, layer: int, count: int, columns: int) -> np.ndarray:
    """bool [S, columns]: blocks that hold an entry which the row sees; the mask of other blocks means nothing."""
    entries = (np.arange(count) + 1) // config.compress_ratios[layer]
    return np.arange(columns)[None] * config.candidate_block_size < entries[:, None]


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
        encoder_start=jnp.zeros(1, jnp.int32),
        page_start=jnp.zeros(1, jnp.int32),
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
    """What one call gave of its S rows: logits [S, V], captures [layers, S, ...], taps; and the state after it."""

    logits: np.ndarray
    captured: Arrays
    state: State
    taps: np.ndarray


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

    def compile(self) -> None:
        """Compile the program, unless that is done."""
        if self._program is not None:
            return

        def whole(params: Params, state: State, batch: Batch) -> Any:
            return forward(params, state, batch, config=self.config, profile=self.profile, captures=CAPTURED)

        state, batch = empty_state(self.config, self.profile, 16), make_batch(np.zeros(1, np.int32), 0, self.ROWS)
        self._program = jit(whole).lower(self.params, state, batch).compile()

    def _call(self, state: State, batch: Batch, count: int) -> Run:
        self.compile()
        outputs, state = self._program(self.params, state, batch)
        captured = {name: as_numpy(value)[:, :count] for name, value in outputs.captured.items()}
        return Run(as_numpy(outputs.logits)[:count], captured, state, as_numpy(outputs.taps)[:count])

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


def in_parallel(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of the jobs, two at a time: compiling leaves the interpreter free and mostly uses one core."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


# ---- one layer at a time --------------------------------------------------------------------------


def layer_params(config: ModelConfig, params: Params, layer: int) -> LayerParams:
    """Weights of one layer, out of the stacked ones."""
    for segment, runs in zip(layer_plan(config), params.segments, strict=True):
        for index, run in enumerate(runs):
            for repeat, ids in enumerate(segment.layer_ids(index)):
                if layer in ids:
                    place = ids.index(layer)
                    # NumPy's indexing, because every indexing of a JAX array is a program to compile.
                    return jax.tree.map(lambda leaf, r=repeat, p=place: np.asarray(leaf)[r, p], run)
    raise ValueError(f"layer {layer} does not exist")


def layer_numbers(config: ModelConfig, layer: int) -> LayerNumbers:
    """Where a layer finds its own part of shared arrays."""
    owner = config.kv_owner(layer)
    sources = sources_by_ratio(config).get(config.compress_ratios[layer], ())

    def place(values: tuple[int, ...]) -> Any:
        return np.int32(values.index(layer) if layer in values else len(values))

    numbers: dict[str, Any] = {
        "layer": np.int32(layer),
        "source_id": np.int32(0 if owner is None else sources.index(owner)),
        "pool_id": place(pooling_sources(config)),
        "engram_id": place(config.engram_layer_ids),
        "tap_id": place(config.dspark_target_layer_ids),
    }
    return LayerNumbers(**numbers)


class Layers:
    """The layers of one model on all rows of a prompt, block by block, each from an input of the caller's choice.

    Values outside the compiled programs are NumPy arrays of `Prompt.rows` rows, a multiple of BLOCK.
    """

    BLOCK = ROW_TILE
    LONGEST = 64  # rows of a prompt
    CAPTURED = ("router_ids",)

    def __init__(self, config: ModelConfig, params: Params, profile: NumericsProfile) -> None:
        self.config, self.profile = config, profile
        self.params = prepare_params(params, profile)
        self._programs: dict[Any, Any] = {}

    def setting(self, kernels: Kernels | None = None) -> Setting:
        """Static arguments of a layer. Kernels: by default those that the engine would use on this device."""
        kernels = choose_kernels(self.params, self.profile) if kernels is None else kernels
        return Setting(self.config, self.profile, kernels, LOCAL_EXCHANGE, frozenset(self.CAPTURED))

    def prompt(self, token_ids: np.ndarray, hashes: np.ndarray | None) -> Prompt:
        """The rows of a prompt; hashes: Engram table rows [S, Engram layers, columns]."""
        count = len(token_ids)
        if hashes is None:
            hashes = np.zeros((count, 0, 0), np.int32)
        blocks = []
        for start in range(0, count, self.BLOCK):
            ids = make_batch(token_ids[start : start + self.BLOCK], start, self.BLOCK)
            blocks.append(
                (ids, pad_rows(hashes[start : start + self.BLOCK], self.BLOCK).swapaxes(0, 1).astype(np.int32))
            )
        return Prompt(count, blocks)

    def empty_state(self) -> State:
        """State whose window rings hold a whole prompt."""
        return empty_state(self.config, self.profile, self.LONGEST)

    def candidate_columns(self) -> int:
        """Width of `Flow.candidates`."""
        ratio = self.config.compress_ratios[self.config.kv_source_layer_ids[-1]]
        return -(-len(PAGES) * (PAGE // ratio) // self.config.candidate_block_size)

    def flow(
        self,
        prompt: Prompt,
        state: State,
        streams: np.ndarray,
        pre: np.ndarray,
        selection: np.ndarray | None = None,
        candidates: np.ndarray | None = None,
    ) -> Flow:
        """What enters a layer: streams [S, C, D], pre [S, C], selection [S, K], candidates [S, blocks]."""
        config, dtype, rows = self.config, jnp.dtype(self.profile.dtype), prompt.rows
        if selection is None:
            selection = np.full((0, config.index_topk), -1)
        if candidates is None:
            candidates = np.zeros((0, self.candidate_columns()), bool)
        routed = np.zeros((config.num_hidden_layers, rows, config.num_experts_per_tok), np.int32)
        host: dict[str, Any] = {
            "streams": pad_rows(streams, rows).astype(dtype),
            "pre": pad_rows(pre, rows).astype(np.float32),
            "selection": pad_rows(selection, rows, -1).astype(np.int32),
            "candidates": pad_rows(candidates, rows).astype(bool),
            "taps": np.zeros((len(config.dspark_target_layer_ids), rows, config.hidden_size), dtype),
            "captured": {"router_ids": routed},
        }
        return Flow(**host, state=state)

    def compile(self) -> None:
        """Compile every kind of layer, unless that is done."""
        columns = (1, len(self.config.engram_layer_ids), self.config.engram_columns)
        prompt = self.prompt(np.zeros(1, np.int32), np.zeros(columns, np.int32) if columns[1] else None)
        streams = np.zeros((1, self.config.hc_mult, self.config.hidden_size), np.float32)
        flow = self.flow(prompt, self.empty_state(), streams, streams[:, :, 0])
        setting, (batch, hashes) = self.setting(), prompt.blocks[0]

        def one_kind(layer: int) -> Any:
            def one(p: LayerParams, numbers: LayerNumbers, batch: Batch, hashes: jax.Array, flow: Flow) -> Flow:
                return one_layer(setting, layer, p, numbers, batch, hashes, flow)

            return jit(one).lower(*self._own(layer), batch, hashes, flow).compile()

        kinds = {layer_kind(self.config, layer): layer for layer in reversed(range(self.config.num_hidden_layers))}
        missing = [(kind, layer) for kind, layer in kinds.items() if kind not in self._programs]
        made = in_parallel([functools.partial(one_kind, layer) for _, layer in missing])
        self._programs |= {kind: program for (kind, _), program in zip(missing, made, strict=True)}

    def _own(self, layer: int) -> tuple[LayerParams, LayerNumbers]:
        """What only this layer has."""
        return layer_params(self.config, self.params, layer), layer_numbers(self.config, layer)

    def run(self, layer: int, prompt: Prompt, flow: Flow) -> Flow:
        """Apply one layer; a decoder key-value source first makes its cache entries."""
        self.compile()
        program = self._programs[layer_kind(self.config, layer)]
        p, numbers = self._own(layer)
        parts = []
        for number, (batch, hashes) in enumerate(prompt.blocks):
            part = dataclasses.replace(cut_flow(flow, number * self.BLOCK, self.BLOCK), state=flow.state)
            flow = dataclasses.replace(flow, state=(done := program(p, numbers, batch, hashes, part)).state)
            parts.append(done)
        return join_flows(parts)

    def logits(self, prompt: Prompt, streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
        """Logits [S, V] of what left the last layer."""
        flow = self.flow(prompt, self.empty_state(), streams, pre)
        if "head" not in self._programs:
            setting = self.setting()

            def head(params: Params, streams: jax.Array, pre: jax.Array) -> jax.Array:
                return project_logits(setting, params, params.norm, streams, pre)[1]

            self._programs["head"] = jit(head)
        parts = [cut_flow(flow, number * self.BLOCK, self.BLOCK) for number in range(len(prompt.blocks))]
        logits = [np.asarray(self._programs["head"](self.params, part.streams, part.pre)) for part in parts]
        return np.concatenate(logits)[: prompt.count]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in blocks: (batch, Engram table rows [Engram layers, T, columns])."""

    count: int
    blocks: list[tuple[Batch, np.ndarray]]

    @property
    def rows(self) -> int:
        return len(self.blocks) * Layers.BLOCK


def pad_rows(values: np.ndarray, rows: int, fill: int = 0) -> np.ndarray:
    """Append rows of `fill`."""
    return np.pad(values, [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1), constant_values=fill)


ROW_AXES = {"streams": 0, "pre": 0, "selection": 0, "candidates": 0, "taps": 1}


def cut_flow(flow: Flow, start: int, rows: int) -> Flow:
    """Some rows of a flow of NumPy arrays."""
    parts = {
        name: np.asarray(getattr(flow, name)).take(range(start, start + rows), axis) for name, axis in ROW_AXES.items()
    }
    captured = {name: np.asarray(value)[:, start : start + rows] for name, value in flow.captured.items()}
    return dataclasses.replace(flow, **parts, captured=captured)  # type: ignore[arg-type]


def join_flows(parts: list[Flow]) -> Flow:
    """Flows of consecutive rows as one flow of NumPy arrays, with the state of the last."""
    whole = {name: np.concatenate([getattr(part, name) for part in parts], axis) for name, axis in ROW_AXES.items()}
    captured = {name: np.concatenate([part.captured[name] for part in parts], axis=1) for name in parts[0].captured}
    return dataclasses.replace(parts[-1], **whole, captured=captured)  # type: ignore[arg-type]


def one_layer(
    setting: Setting,
    layer: int,
    p: LayerParams,
    numbers: LayerNumbers,
    batch: Batch,
    hashes: jax.Array,
    flow: Flow,
) -> Flow:
    """Everything that the layers of one kind do, on all rows of the batch as one block."""
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
