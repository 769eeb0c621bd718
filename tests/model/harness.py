"""Runs schedules of chunks through `forward`, on a state whose every byte starts as poison."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.batching import Chunk, Replay, make_batch
from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import ROW_TILE, Kernels
from deepinfer_jax.kernels.profile import REFERENCE, NumericsProfile
from deepinfer_jax.kernels.quantization import QuantTensor
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.flow import CAPTURES
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.init import init_params
from deepinfer_jax.model.params import LayerParams, Params
from deepinfer_jax.model.plan import layer_plan
from deepinfer_jax.model.state import PAGE, State, init_state, pooling_sources, sources_by_ratio

MAX_DRAFT = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one compiled program: rows, slots, pages of a sequence, pages in all."""

    rows: int = 48
    slots: int = 3
    sequence_pages: int = 4
    pages: int = 13


@functools.cache
def micro_params() -> Params:
    """The micro configuration with random weights."""
    return init_params(ModelConfig.micro(), jax.random.key(7))


def poison(state: State) -> State:
    """Fill everything with NaN patterns (0xFF is NaN in e4m3 and in e8m0) and wild token ids."""

    def fill(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint8:
            return jnp.full(x.shape, 255, x.dtype)
        if x.dtype == jnp.int32:
            return jnp.full(x.shape, 5, x.dtype)
        return jnp.full(x.shape, jnp.nan, x.dtype)

    return jax.tree.map(fill, state)


@functools.cache
def program(
    config: ModelConfig,
    profile: NumericsProfile,
    captures: frozenset[str],
    kernels: Kernels = Kernels(),  # noqa: B008 - frozen
) -> Callable[..., Any]:
    """The jitted step; shapes are taken from its arguments."""

    def step(params: Params, state: State, batch: Any) -> tuple[Any, State]:
        return forward(params, state, batch, config=config, profile=profile, kernels=kernels, captures=captures)

    return jit(step, donate_argnums=1)


class Runner:
    """One state and the host bookkeeping that goes with it."""

    def __init__(
        self,
        profile: NumericsProfile,
        shape: Shape,
        page_table: np.ndarray,
        params: Params | None = None,
        captures: Sequence[str] = (),
        replay: Replay = "none",
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> None:
        self.params = params if params is not None else micro_params()
        self.config = self.params.config
        self.shape, self.page_table = shape, page_table
        self.replay: Replay = replay
        self.step = program(self.config, profile, frozenset(captures), kernels)
        self.state = poison(
            init_state(
                self.config,
                profile,
                slots=shape.slots,
                pages=shape.pages,
                row_block=kernels.row_block or ROW_TILE,
                max_draft=MAX_DRAFT,
            )
        )

    def run(self, chunks: Sequence[Chunk]) -> Any:
        """Process chunks in one call; returns Outputs with NumPy arrays."""
        batch = make_batch(self.config, chunks, self.page_table, rows=self.shape.rows, replay=self.replay)
        outputs, self.state = self.step(self.params, self.state, batch)
        return jax.tree.map(np.asarray, outputs)


def page_tables(shape: Shape, order: Sequence[int]) -> np.ndarray:
    """Page table [slots, sequence_pages] handing out pages in the given order."""
    count = shape.slots * shape.sequence_pages
    assert count <= len(order)
    return np.asarray(order[:count], np.int32).reshape(shape.slots, shape.sequence_pages)


def plain_tables(shape: Shape) -> np.ndarray:
    return page_tables(shape, range(shape.pages))


def one_shot(profile: NumericsProfile, ids: Sequence[int], image: Sequence[bool] = ()) -> np.ndarray:
    """Logits [T, V] of one sequence alone, in chunks as large as the program allows."""
    shape = Shape()
    runner = Runner(profile, shape, plain_tables(shape))
    parts = []
    for start in range(0, len(ids), shape.rows):
        piece = list(ids[start : start + shape.rows])
        mask = tuple(image[start : start + shape.rows])
        chunk = Chunk(0, start, piece, len(ids), "all", mask)
        parts.append(runner.run([chunk]).logits[: len(piece)])
    return np.concatenate(parts)


def bits(x: np.ndarray) -> np.ndarray:
    """Bit patterns, so that NaN and signed zero count."""
    return np.ascontiguousarray(x).view(np.uint32)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Fail with the first row that differs; poison that leaked shows up as NaN."""
    assert np.isfinite(want).all(), f"{what}: the reference itself is not finite"
    if got.shape == want.shape and (bits(got) == bits(want)).all():
        return
    rows = np.flatnonzero((bits(got) != bits(want)).reshape(len(got), -1).any(axis=1))
    raise AssertionError(f"{what}: rows {rows[:8].tolist()} of {len(got)} differ; got {got[rows[0]].ravel()[:4]}")


MAX_TOKENS = 4 * PAGE


# ---- bytes ------------------------------------------------------------------------------------------


def raw(x: Any) -> np.ndarray:
    """The bytes of an array, one row of bytes per leading index."""
    array = np.ascontiguousarray(np.asarray(x))
    return array.reshape(len(array), -1).view(np.uint8) if array.size else np.zeros((len(array), 0), np.uint8)


def same(a: Any, b: Any) -> bool:
    """Equal dtype, shape and bytes: NaN patterns and signs of zero count."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_arrays(got: dict[str, Any], want: dict[str, Any], what: str) -> None:
    """Fail naming every array whose bytes differ."""
    assert got.keys() == want.keys()
    different = [name for name in want if not same(got[name], want[name])]
    assert not different, f"{what}: {different} differ"


def snapshot(state: State) -> dict[str, np.ndarray]:
    """Copies of every buffer of a state by name; the state itself may be donated afterwards."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


# ---- what one sequence owns of a state ---------------------------------------------------------------


def sequence_memory(
    state: State, config: ModelConfig, slot: int, pages: np.ndarray, length: int, *, unused: int = 0
) -> dict[str, np.ndarray]:
    """Everything that a state holds for one sequence of `length` tokens, by logical position.

    pages: int32 [P], pages of the sequence. unused: newest places of the rings to leave out, which rows of
    rejected drafts may have taken.
    """
    memory = {}
    for ratio, sources in sources_by_ratio(config).items():
        entries = np.arange(length // ratio)
        per_page = PAGE // ratio
        for number, source in enumerate(sources):
            for name in ("kv", "index"):
                pool = np.asarray(getattr(state.pages[ratio], name))
                memory[f"{name} {source}"] = pool[number, pages[entries // per_page], entries % per_page].copy()

    def newest(ring: int) -> np.ndarray:
        return np.arange(max(0, length - ring + unused), length)

    window = np.asarray(state.window)
    positions = newest(window.shape[2])
    for layer in range(config.num_hidden_layers):
        memory[f"window {layer}"] = window[layer, slot, positions % window.shape[2]].copy()
    groups = np.asarray(state.open_groups)
    positions = newest(groups.shape[2])
    for number, source in enumerate(pooling_sources(config)):
        memory[f"open {source}"] = groups[number, slot, positions % groups.shape[2]].copy()
    lookback = np.asarray(state.lookback)
    memory["lookback"] = lookback[slot, newest(lookback.shape[1]) % lookback.shape[1]].copy()
    return memory


# ---- runs with every intermediate value --------------------------------------------------------------


def captured_run(
    ids: Sequence[int],
    params: Params | None = None,
    image: Sequence[bool] = (),
    profile: NumericsProfile | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], Runner]:
    """(logits [T, V], captures [layers, T, ...], runner with the state after the call) of one sequence in one call."""
    shape = Shape()
    runner = Runner(profile or REFERENCE, shape, plain_tables(shape), params, captures=CAPTURES)
    outputs = runner.run([Chunk(0, 0, ids, len(ids), "all", tuple(image))])
    return outputs.logits[: len(ids)], {name: value[:, : len(ids)] for name, value in outputs.captured.items()}, runner


# ---- other weights -----------------------------------------------------------------------------------


@functools.cache
def other_params() -> Params:
    """Independent random weights for the micro configuration."""
    return init_params(ModelConfig.micro(), jax.random.key(8))


def change_layers(
    params: Params, layers: Collection[int], change: Callable[[str, int, Any], Any], keys: Collection[str] | None = None
) -> Params:
    """Params with other leaves in some layers.

    change: (declaration key, layer, NumPy leaf or QuantTensor of that layer) -> leaf of the same shapes.
    keys: declarations to change; None = all that the layer has.
    """
    segments = []
    for segment, runs in zip(layer_plan(params.config), params.segments, strict=True):
        changed = [dict(run) for run in runs]
        for index, run in enumerate(changed):
            for repeat, ids in enumerate(segment.layer_ids(index)):
                for place, layer in enumerate(ids):
                    if layer in layers:
                        _change_layer(run, (repeat, place), layer, change, keys)
        segments.append(tuple(changed))
    return dataclasses.replace(params, segments=tuple(segments))


def _change_layer(
    run: LayerParams,
    place: tuple[int, int],
    layer: int,
    change: Callable[[str, int, Any], Any],
    keys: Collection[str] | None,
) -> None:
    for key in run if keys is None else [key for key in keys if key in run]:
        whole = jax.tree.map(np.array, run[key])
        new = change(key, layer, jax.tree.map(lambda leaf: leaf[place].copy(), whole))

        def put(leaf: np.ndarray, value: Any) -> np.ndarray:
            assert value.shape == leaf[place].shape
            leaf[place] = value
            return leaf

        run[key] = jax.tree.map(put, whole, new)


def leaf_of(params: Params, layer: int, key: str) -> Any:
    """One layer's leaf as NumPy arrays."""
    found = []
    change_layers(params, [layer], lambda _, __, leaf: found.append(leaf) or leaf, [key])
    return found[0]


def zeroed(_key: str, _layer: int, leaf: Any) -> Any:
    """A change that sets every weight to zero; the scales of packed weights stay."""
    if isinstance(leaf, QuantTensor):
        return dataclasses.replace(leaf, data=np.zeros_like(leaf.data))  # type: ignore[arg-type]
    return np.zeros_like(leaf)


def from_other(key: str, layer: int, _leaf: Any) -> Any:
    """A change that takes the weights of `other_params`."""
    return leaf_of(other_params(), layer, key)
