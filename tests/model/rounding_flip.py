"""Is a difference between two results a rounding flip?

Two correct float32 implementations differ by about 1e-7 before a value is quantised. Where the value lies that close
to the border between two codes, they store neighbouring codes, and from there on their results differ by percents. That
is the only difference the golden tests accept, and they accept it when it is shown:

- `one_code_apart`: stored vectors differ in single elements by one code, the scale being equal;
- `first_difference`: everything before a layer agrees;
- `find_flip`: in that layer (or the one before, or the layer that wrote the cache) one value lies at a border, and
  moving this one value to the one side gives the one result, moving it to the other side the other result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from deepinfer_jax.compile import jit
from deepinfer_jax.kernels.dispatch import Kernels
from deepinfer_jax.kernels.expert_mlp import ExpertRows
from deepinfer_jax.kernels.expert_mlp.xla import activate
from deepinfer_jax.kernels.quantization import (
    FP4_KV_GROUP,
    GROUP,
    dequantize_fp4,
    pack_cache,
    quantize_dequantize_fp8,
    quantize_fp4,
    unpack_nibbles,
)
from deepinfer_jax.kernels.row_dot import row_dot
from deepinfer_jax.model.flow import Flow
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.state import Batch

from .golden import Layers, Prompt, cut_flow, join_flows, layer_numbers, layer_params, one_layer

AGREES = 2e-5
"""Largest difference of streams and collapse weights that counts as none (`f32` modes). Two float32 orders of the same
sums differ by up to 1.2e-5 at the end of the golden models."""

CLOSENESS = 3e-6
"""Largest distance of a value from a border, in units of the root mean square of its vector, that noise can bridge."""

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e4m3_magnitudes() -> np.ndarray:
    """Non-negative values of float8_e4m3fn, ascending."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


MAGNITUDES = {"fp8": _e4m3_magnitudes(), "fp4": _E2M1, "fp4_e4m3": _E2M1}
FLOORS = {"fp8": 1e-4, "fp4": 6 * 2.0**-126, "fp4_e4m3": 6 * 2.0**-9}
GROUPS = {"fp8": GROUP, "fp4": GROUP, "fp4_e4m3": FP4_KV_GROUP}


# ---- stored vectors -------------------------------------------------------------------------------


def record_codes(records: np.ndarray, fmt: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(signed places in the format's list of magnitudes [..., size], scales as float64 [..., groups])."""
    if fmt == "fp8":
        codes, scale = records[..., :size], records[..., size:]
        magnitude, sign = codes & 127, codes >> 7
    else:
        codes = np.asarray(unpack_nibbles(jnp.asarray(records[..., : size // 2])))
        scale = records[..., size // 2 :]
        magnitude, sign = codes & 7, codes >> 3
    places = magnitude.astype(np.int64) * np.where(sign == 1, -1, 1)
    if fmt == "fp4_e4m3":
        return places, MAGNITUDES["fp8"][scale & 127]
    return places, 2.0 ** (scale.astype(np.float64) - 127)


def one_code_apart(records: np.ndarray, want: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Compare cache records [..., width] with the values that they should hold [..., size].

    Returns (differs, explained), bool [..., size]: where the stored value is another one, and where it is that of
    a neighbouring code under the same scale. The two zeros are one code.
    """
    size = want.shape[-1]
    places, scale = record_codes(records, fmt, size)
    scale = np.repeat(scale, GROUPS[fmt], axis=-1)
    table = MAGNITUDES[fmt]

    def value(place: np.ndarray) -> np.ndarray:
        return np.sign(place) * table[np.minimum(np.abs(place), len(table) - 1)] * scale

    differs = value(places) != want
    return differs, differs & ((value(places + 1) == want) | (value(places - 1) == want))


# ---- the first layer that differs -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trace:
    """Values between layers: streams [L+1, R, C, D] of the rows `stream_rows`, pre [L+1, S, C] of all rows."""

    streams: np.ndarray
    stream_rows: np.ndarray
    pre: np.ndarray


def distance(want: Trace, streams: np.ndarray, pre: np.ndarray, layer: int) -> float:
    """Largest difference of what enters `layer`; streams [S, C, D] and pre [S, C] of all rows."""
    by_stream = np.abs(streams[want.stream_rows] - want.streams[layer]).max()
    return float(max(by_stream, np.abs(pre - want.pre[layer]).max()))


def first_difference(want: Trace, got: Trace, limit: float = AGREES) -> int | None:
    """The layer whose output differs first: everything that enters layers 0 .. it agrees within `limit`."""
    for layer in range(len(want.pre)):
        if distance(want, got.streams[layer], got.pre[layer], layer) > limit:
            return layer - 1
    return None


# ---- one layer under the microscope ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WatchingKernels(Kernels):
    """Portable kernels that note every value about to be quantised, and add a given change to it."""

    seen: dict[str, jax.Array] = dataclasses.field(default_factory=dict, compare=False)
    changes: dict[str, jax.Array] = dataclasses.field(default_factory=dict, compare=False)

    def watch(self, name: str, fmt: str, values: jax.Array) -> jax.Array:
        """Note `values` as the next site of this name and format; returns them with their change."""
        site = f"{len(self.seen)}:{name}:{fmt}"
        self.seen[site] = values
        return values + self.changes[site] if site in self.changes else values

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        call = super().__call__
        if name == "row_dot" and kwargs.get("quantize_input"):
            return call(function, self.watch(name, "fp8", args[0]), *args[1:], **kwargs)
        if name in ("expert_mlp", "shared_mlp") and kwargs.get("quantize_input"):
            return self._mlp(name, *args, limit=kwargs["limit"])
        if name == "rotary" and kwargs.get("quantize"):
            plain = self.watch(name, "fp4", call(function, *args, **(kwargs | {"quantize": False})))
            return dequantize_fp4(*quantize_fp4(plain)).astype(plain.dtype)
        if name == "norm_rotary_pack" and kwargs["fmt"] != "float32":
            plain = call(function, *args, **(kwargs | {"fmt": "float32"}))
            return pack_cache(self.watch(name, kwargs["fmt"], plain), kwargs["fmt"])
        return call(function, *args, **kwargs)

    def _mlp(self, name: str, x: jax.Array, *rest: Any, limit: float) -> jax.Array | ExpertRows:
        """`expert_mlp` and `shared_mlp` with both operands in sight; every expert computes every row."""
        call, dtype = super().__call__, x.dtype
        operand = quantize_dequantize_fp8(self.watch(name, "fp8", x))
        *routing, w1, w3, w2 = rest

        def hidden_of(first: Any, third: Any, factor: jax.Array | None) -> jax.Array:
            gate, up = call(row_dot, operand, first), call(row_dot, operand, third)
            return activate(gate, up, factor, limit, dtype)

        if not routing:
            hidden = self.watch(f"{name} hidden", "fp8", hidden_of(w1, w3, None))
            return call(row_dot, quantize_dequantize_fp8(hidden), w2)
        ids, weights = routing
        experts = jnp.arange(w1.shape[0])
        factors = jnp.max(jnp.where(ids[None] == experts[:, None, None], weights[None], 0.0), axis=2, keepdims=True)
        hidden = lax.map(lambda part: hidden_of(*part), (w1, w3, factors))
        hidden = quantize_dequantize_fp8(self.watch(f"{name} hidden", "fp8", jnp.swapaxes(hidden, 0, 1)))
        outputs = lax.map(lambda part: call(row_dot, *part), (jnp.swapaxes(hidden, 0, 1), w2))
        return ExpertRows(jnp.take_along_axis(jnp.swapaxes(outputs, 0, 1), ids[:, :, None], axis=1))


class WatchedLayers(Layers):
    """Layers that also return what was about to be quantised, and take a change to it."""

    def run_watched(
        self, layer: int, prompt: Prompt, flow: Flow, change: Change | None = None
    ) -> tuple[Flow, dict[str, np.ndarray]]:
        """(flow after the layer, values [rows, ...] at every site)."""

        def one(p: LayerParams, batch: Batch, hashes: jax.Array, flow: Flow, changes: dict[str, jax.Array]) -> Any:
            kernels = WatchingKernels(changes=changes)
            flow = one_layer(self.setting(kernels), layer, p, layer_numbers(self.config, layer), batch, hashes, flow)
            return flow, dict(kernels.seen)

        p = layer_params(self.config, self.params, layer)
        parts, seen = [], []
        for number, (batch, hashes) in enumerate(prompt.blocks):
            part = dataclasses.replace(cut_flow(flow, number * self.BLOCK, self.BLOCK), state=flow.state)
            if layer not in self._programs:
                sites = jax.eval_shape(functools.partial(one, changes={}), p, batch, hashes, part)[1]
                zeros = {site: np.zeros(values.shape, np.float32) for site, values in sites.items()}
                self._programs[layer] = jit(one), zeros
            program, zeros = self._programs[layer]
            changes = dict(zeros)
            if change is not None and change.element[0] // self.BLOCK == number:
                changes[change.site] = change.placed(zeros[change.site], number * self.BLOCK)
            done, values = program(p, batch, hashes, part, changes)
            flow = dataclasses.replace(flow, state=done.state)
            parts.append(done)
            seen.append(values)
        together = {site: np.concatenate([values[site] for values in seen]).astype(np.float64) for site in seen[0]}
        return join_flows(parts), together


@dataclasses.dataclass(frozen=True)
class Change:
    """What to add to one element (row first) of the values at a site."""

    site: str
    element: tuple[int, ...]
    amount: float

    def placed(self, zeros: np.ndarray, first_row: int) -> np.ndarray:
        """The change among the values of the rows from `first_row` on."""
        result = zeros.copy()
        result[(self.element[0] - first_row, *self.element[1:])] = self.amount
        return result


# ---- borders --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Border:
    """A value next to a border between two codes. `offset` is the distance in units of its vector's root mean
    square; `below` and `above` are changes that move the value to the two sides."""

    layer: int
    site: str
    element: tuple[int, ...]
    value: float
    offset: float
    below: float
    above: float


def quantizer_scales(values: np.ndarray, fmt: str) -> np.ndarray:
    """Scale of every element's group, as float64 (`spec/attention.md` 7.2, in NumPy)."""
    groups = np.abs(values.astype(np.float32)).reshape(*values.shape[:-1], -1, GROUPS[fmt])
    largest = np.maximum(groups.max(axis=-1), np.float32(FLOORS[fmt]))
    limit = MAGNITUDES[fmt][-1]
    if fmt == "fp4_e4m3":
        scale = np.minimum(largest / np.float32(limit), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        fraction, exponent = np.frexp(largest * np.float32(1 / limit))
        scale = np.exp2(exponent - (fraction == 0.5), dtype=np.float64)
    return np.repeat(scale, GROUPS[fmt], axis=-1)


def borders(layer: int, seen: dict[str, np.ndarray], rows: int, closeness: float = CLOSENESS) -> Iterator[Border]:
    """Values of the first `rows` rows that lie at a border, in no order."""
    for site, everything in seen.items():
        values, fmt = everything[:rows], site.rsplit(":", 1)[1]
        scales = quantizer_scales(values, fmt)
        middles = (MAGNITUDES[fmt][1:] + MAGNITUDES[fmt][:-1]) / 2
        quotient = np.abs(values) / scales
        after = np.searchsorted(middles, quotient).clip(1, len(middles) - 1)
        nearest = np.where(
            np.abs(quotient - middles[after - 1]) < np.abs(quotient - middles[after]),
            middles[after - 1],
            middles[after],
        )
        border = np.sign(values) * nearest * scales
        unit = np.sqrt(np.mean(values * values, axis=-1, keepdims=True)) + 1e-30
        offset = np.abs(values - border) / unit
        step = np.maximum(1e-6 * np.abs(border), 1e-30)
        for element in np.argwhere((offset <= closeness) & (values != 0)):
            place = tuple(int(i) for i in element)
            target, value = border[place], values[place]
            yield Border(
                layer,
                site,
                place,
                value,
                float(offset[place]),
                target - step[place] - value,
                target + step[place] - value,
            )


# ---- the proof ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Situation:
    """A finished prefill, as far as its layers can be run again: `got` of all rows, the selection and the candidates
    that each layer used [L, S, ...], and the pages afterwards."""

    layers: WatchedLayers
    prompt: Prompt
    got: Trace
    selection: np.ndarray
    candidates: np.ndarray
    pages: Any

    def entering(self, layer: int) -> Flow:
        """What entered a layer."""
        state = dataclasses.replace(self.layers.empty_state(), pages=self.pages)
        owner, publisher = self.index_owner(layer), self.layers.config.candidate_source_layer_id
        return self.layers.flow(
            self.prompt,
            state,
            self.got.streams[layer],
            self.got.pre[layer],
            None if owner is None else self.selection[owner],
            None if publisher is None or layer <= publisher else self.candidates[publisher],
        )

    def index_owner(self, layer: int) -> int | None:
        """The layer whose selection is in force when `layer` begins, None without one."""
        before = [source for source in self.layers.config.index_source_layer_ids if source < layer]
        return before[-1] if before else None

    def replay(self, first: int, last: int, change: Change | None = None) -> tuple[Trace, dict[str, np.ndarray]]:
        """Layers first .. last from what entered `first`, which gets the change; (what leaves `last` as the only
        layer of a trace, sites of `first`)."""
        flow, seen = self.layers.run_watched(first, self.prompt, self.entering(first), change)
        for layer in range(first + 1, last + 1):
            flow, _ = self.layers.run_watched(layer, self.prompt, flow)
        count = self.prompt.count
        streams = np.asarray(flow.streams, np.float32)[None, :count]
        return Trace(streams, np.arange(count), np.asarray(flow.pre)[None, :count]), seen


@dataclasses.dataclass(frozen=True)
class Flip:
    """The proof: with this value on one side the layer gives `want`, on the other side `got`."""

    border: Border
    last_layer: int
    to_want: float
    to_got: float


def find_flip(
    want: Trace, situation: Situation, *, limit: float = AGREES, closeness: float = CLOSENESS, trials: int = 12
) -> Flip | None:
    """Explain the first difference between `want` and `situation.got` by one rounding flip; None if none does."""
    last = first_difference(want, situation.got, limit)
    if last is None or last < 0:
        return None
    for first in _suspects(situation, last):
        _, seen = situation.replay(first, last)
        near = sorted(borders(first, seen, situation.prompt.count, closeness), key=lambda border: border.offset)
        for border in near[:trials]:
            flip = _try(want, situation, border, last, limit)
            if flip is not None:
                return flip
    return None


def _suspects(situation: Situation, last: int) -> Iterable[int]:
    """Layers where a flip may have happened that shows after layer `last`: itself, the one before (rows whose
    streams are not recorded show a layer later, in `pre`), and the owners of its caches and selection."""
    config = situation.layers.config
    owners = (config.kv_owner(last), situation.index_owner(last))
    found = [last, *([last - 1] if last else []), *(owner for owner in owners if owner is not None)]
    return dict.fromkeys(found)


def _try(want: Trace, situation: Situation, border: Border, last: int, limit: float) -> Flip | None:
    """The two sides of one border."""
    got = situation.got
    distances = []
    for amount in (border.below, border.above):
        after, _ = situation.replay(border.layer, last, Change(border.site, border.element, amount))
        streams, pre = after.streams[0], after.pre[0]
        to_got = max(np.abs(streams - got.streams[last + 1]).max(), np.abs(pre - got.pre[last + 1]).max())
        distances.append((distance(want, streams, pre, last + 1), float(to_got)))
    (want_below, got_below), (want_above, got_above) = distances
    for to_want, to_got, apart in ((want_below, got_above, want_above), (want_above, got_below, want_below)):
        # The wrong side must be clearly wrong, or noise at the limit would be "explained" by any value.
        if max(to_want, to_got) <= limit and apart > 1.5 * limit and apart > 2 * to_want:
            return Flip(border, last, to_want, to_got)
    return None
