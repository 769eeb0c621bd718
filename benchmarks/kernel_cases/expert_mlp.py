"""`expert_mlp` at the released shapes: both grouped products alone, the whole op, its row kernels, `ragged_dot`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_cases import Case, Check, CompileCase, Target
from deepinfer_jax.kernels import fp4_block_scaled, fp4_fragments
from deepinfer_jax.kernels.expert_mlp import (
    ExpertRows,
    combine_experts,
    expert_mlp,
    mosaic_products,
    route,
    shapes,
    shared_mlp,
)
from deepinfer_jax.kernels.expert_mlp.repack import kernel_format, repack
from deepinfer_jax.kernels.mosaic.target import Architecture
from deepinfer_jax.kernels.quantization import (
    GROUP,
    QuantTensor,
    WeightFormat,
    dequantize,
    pack_nibbles,
    quantize_dequantize_fp8,
)

OP = "expert_mlp"
HIDDEN, WIDTH, EXPERTS, CHOSEN, LIMIT = 5120, 2304, 384, 6, 10.0
ROUTING: dict[str, Any] = {"experts_per_token": CHOSEN, "normalize": True, "scale": 1.5, "temperature": 1.0}

ARCHITECTURES: dict[Target, Architecture] = {"h200": "sm90", "b200": "sm100"}

WEIGHT_BYTES = (WIDTH * HIDDEN * 17) // 32
"""Of one matrix of one expert: half a byte a code, a byte for 32."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens that each choose CHOSEN of `experts` experts at random."""

    tokens: int
    experts: int = EXPERTS

    def ids(self) -> np.ndarray:
        rng = np.random.default_rng(self.tokens)
        drawn = rng.random((self.tokens, self.experts)).argpartition(CHOSEN, axis=1)[:, :CHOSEN]
        return np.sort(drawn, axis=1).astype(np.int32)

    @property
    def hit(self) -> int:
        """Experts that any token chose."""
        return len(np.unique(self.ids()))

    def bytes(self, matrices: int) -> int:
        """Weights of the chosen experts, rows in and rows out."""
        return self.hit * matrices * WEIGHT_BYTES + 2 * self.tokens * (HIDDEN + (WIDTH if matrices == 2 else HIDDEN))

    def flop(self, matrices: int) -> int:
        return 2 * self.tokens * CHOSEN * matrices * WIDTH * HIDDEN

    def rows(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(x [T, D], ids [T, k], weights [T, k])."""
        x = jax.random.normal(jax.random.key(0), (self.tokens, HIDDEN), jnp.bfloat16)
        weights = jax.random.uniform(jax.random.key(1), (self.tokens, CHOSEN), jnp.float32, 0.1, 0.5)
        return x, jnp.asarray(self.ids()), weights


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _random(experts: int, rows: int, columns: int, seed: int, form: WeightFormat) -> QuantTensor:
    shape = _packed_shape(experts, rows, columns, form)
    data = jax.random.bits(jax.random.key(seed), shape.data.shape, jnp.uint32)
    middle = 127 - int(np.log2(3 * np.sqrt(columns)))
    key = jax.random.key(seed + 100)
    if form == "fp4_sm100":
        middle += fp4_block_scaled.SCALE_OFFSET
        scale = jax.random.randint(key, shape.scale.shape, middle - 1, middle + 2, jnp.int32).astype(jnp.uint8)
        return QuantTensor(data, scale, form)
    middle += fp4_fragments.SCALE_OFFSET
    low, high = jax.random.randint(key, (2, *shape.scale.shape), middle - 1, middle + 2, jnp.int32)
    return QuantTensor(data, (low | high << 8).astype(jnp.uint16), form)


def _packed(experts: int, rows: int, columns: int, seed: int) -> QuantTensor:
    """Random experts in the kernel's order; products of unit rows have about unit size."""
    return _random(experts, rows, columns, seed, kernel_format())


def _gate_up_experts(experts: int) -> tuple[QuantTensor, QuantTensor]:
    return _packed(experts, WIDTH, HIDDEN, 2), _packed(experts, WIDTH, HIDDEN, 3)


def _down_experts(experts: int) -> QuantTensor:
    return _packed(experts, HIDDEN, WIDTH, 4)


def _experts(experts: int) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
    return (*_gate_up_experts(experts), _down_experts(experts))


def _rows(x: Any, ids: Any, weights: Any, w1: Any, w3: Any, w2: Any, implementation: Any = "mosaic_gpu") -> ExpertRows:
    return expert_mlp(x, ids, weights, w1, w3, w2, limit=LIMIT, quantize_input=True, implementation=implementation)


def _rows_in_order(*operands: Any) -> jax.Array:
    return _rows(*operands).in_order


def _whole(x: Any, *operands: Any, implementation: Any = "mosaic_gpu") -> Any:
    """Experts and the sum of a token's rows; x stands for the shared expert's."""
    return combine_experts(_rows(x, *operands, implementation), x, implementation=implementation)


def _gate_up(x: Any, factors: Any, tiles: Any, count: Any, w1: Any, w3: Any, quantize: bool = True, **more: Any) -> Any:
    return mosaic_products.gate_up(x, w1, w3, factors, tiles, count, limit=LIMIT, quantize=quantize, **more)


def _down(hidden: Any, tiles: Any, count: Any, w2: Any, **more: Any) -> Any:
    return mosaic_products.down(hidden, w2, tiles, count, **more)


@functools.partial(jax.jit, static_argnums=3)
def _sorted(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: int) -> Any:
    grouped = shapes.group_rows(ids, experts)
    rows = quantize_dequantize_fp8(x)[jnp.maximum(grouped.source, 0)]
    return rows, shapes.sort_weights(weights, grouped), grouped


def _make_gate_up(batch: Batch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rows, factors, grouped = _sorted(*batch.rows(), batch.experts)
    w1, w3 = _gate_up_experts(batch.experts)  # not the third: 2.4 GB with all experts
    return _gate_up, (rows, factors, grouped.tiles, grouped.count, w1, w3)


def _make_down(batch: Batch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rows, _, grouped = _sorted(*batch.rows(), batch.experts)
    return _down, (rows[:, :WIDTH], grouped.tiles, grouped.count, _down_experts(batch.experts))


def _make_whole(batch: Batch, implementation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return functools.partial(_whole, implementation=implementation), (*batch.rows(), *_experts(batch.experts))


def _make_grouping(batch: Batch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def group(ids: jax.Array) -> Any:
        grouped = shapes.group_rows(ids, batch.experts)
        return grouped.source, grouped.position, grouped.tiles, grouped.count

    return group, (jnp.asarray(batch.ids()),)


def _make_route(tokens: int, implementation: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    keys = jax.random.key(5), jax.random.key(6)
    arrays = tuple(jax.random.normal(key, (tokens, EXPERTS), jnp.float32) for key in keys)
    return functools.partial(route, implementation=implementation, **ROUTING), arrays


def _make_combine(tokens: int, implementation: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rows = jax.random.normal(jax.random.key(7), (tokens, CHOSEN, HIDDEN), jnp.bfloat16)
    return functools.partial(combine_experts, implementation=implementation), (ExpertRows(rows), rows[:, 0])


def _fp8(rows: int, columns: int, seed: int) -> QuantTensor:
    codes = jax.random.bits(jax.random.key(seed), (rows, columns), jnp.uint8)
    codes = jnp.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # 0x7F and 0xFF are NaN
    return QuantTensor(codes, jnp.full((rows // GROUP, columns // GROUP), 114, jnp.uint8), "fp8")


def _make_shared(tokens: int, implementation: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = _fp8(WIDTH, HIDDEN, 8), _fp8(WIDTH, HIDDEN, 9), _fp8(HIDDEN, WIDTH, 10)
    x = jax.random.normal(jax.random.key(0), (tokens, HIDDEN), jnp.bfloat16)
    settings: dict[str, Any] = {"limit": LIMIT, "quantize_input": True, "implementation": implementation}
    return functools.partial(shared_mlp, **settings), (x, *weights)


# ---- peers -----------------------------------------------------------------------------------------


def _make_ragged(batch: Batch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`lax.ragged_dot` of the rows sorted by expert with one bfloat16 weight [E, D, 2 N]."""
    rows = jax.random.normal(jax.random.key(0), (batch.tokens * CHOSEN, HIDDEN), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (batch.experts, HIDDEN, 2 * WIDTH), jnp.bfloat16)
    sizes = np.bincount(batch.ids().reshape(-1), minlength=batch.experts).astype(np.int32)
    multiply = functools.partial(lax.ragged_dot, preferred_element_type=jnp.bfloat16)
    return multiply, (rows, weight, jnp.asarray(sizes))


def cases(quick: bool) -> list[Case]:
    """Both products, the whole op and its parts at decode and prefill counts, and what they may be compared with."""
    found, ours = [], "mosaic_gpu"
    for tokens in (1, 64, 256, 1024, 8192) if quick else (1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        batch = Batch(tokens)
        name = f"{tokens} tokens"
        found += [
            Case(f"gate_up {name}", OP, functools.partial(_make_gate_up, batch), batch.bytes(2), batch.flop(2)),
            Case(f"whole {name}", OP, functools.partial(_make_whole, batch, ours), batch.bytes(3), batch.flop(3)),
        ]
        if not quick:  # every program compiles its kernels anew, which takes seconds
            found.append(Case(f"down {name}", OP, functools.partial(_make_down, batch), batch.bytes(1), batch.flop(1)))
        if quick and tokens not in (1, 64, 8192):
            continue
        found += [
            Case(f"grouping {name}", OP, functools.partial(_make_grouping, batch), 4 * tokens * CHOSEN, 0),
            Case(f"route {name}", OP, functools.partial(_make_route, tokens, "mosaic_gpu"), 8 * tokens * EXPERTS, 0),
            Case(
                f"combine {name}",
                OP,
                functools.partial(_make_combine, tokens, "mosaic_gpu"),
                2 * tokens * (CHOSEN + 2) * HIDDEN,
                0,
            ),
            Case(
                f"shared {name}",
                OP,
                functools.partial(_make_shared, tokens, "mosaic_gpu"),
                3 * WIDTH * HIDDEN + 4 * tokens * HIDDEN,
                6 * tokens * WIDTH * HIDDEN,
            ),
        ]
    few = Batch(512, 8)
    size = few.experts * 2 * WIDTH * HIDDEN * 2
    make = functools.partial(_make_gate_up, few)
    found.append(Case("gate_up 512 tokens 8 experts", OP, make, few.bytes(2), few.flop(2)))
    make = functools.partial(_make_ragged, few)
    found.append(Case("gate_up 512 tokens 8 experts", OP, make, size, few.flop(2), None, "ragged_dot"))
    if not quick:
        batch = Batch(16, 8)
        make = functools.partial(_make_whole, batch, "xla")
        found.append(Case("whole 16 tokens 8 experts", OP, make, batch.bytes(3), batch.flop(3), None, "xla"))
        make = functools.partial(_make_whole, batch, "mosaic_gpu")
        found.append(Case("whole 16 tokens 8 experts", OP, make, batch.bytes(3), batch.flop(3)))
    return found


# ---- what only the device can tell ------------------------------------------------------------------


def _bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def _rows_bitwise(experts: int) -> dict[str, Any]:
    """A token's rows at every count, at the front and further inside."""
    function = jax.jit(_rows_in_order)
    (x, ids, factors), weights = Batch(4096, experts).rows(), _experts(experts)
    whole = _bits(function(x, ids, factors, *weights))
    different = {}
    for tokens in (1, 2, 8, 64, 256, 1024):
        for start in (0, 777):
            part = slice(start, start + tokens)
            count = int((_bits(function(x[part], ids[part], factors[part], *weights)) != whole[part]).sum())
            if count:
                different[f"{tokens} tokens from {start}"] = count
    finite = bool(np.isfinite(whole.view(jnp.bfloat16).astype(np.float32)).all())
    return {"passed": not different and finite, "different": different, "finite": finite}


def _row_choices_equal() -> dict[str, Any]:
    """Bits of both products under every choice of a product's rows."""
    batch = Batch(200, 8)
    rows, factors, grouped = _sorted(*batch.rows(), batch.experts)
    w1, w3, w2 = _experts(batch.experts)
    used = np.asarray(grouped.source) >= 0
    expected, different = None, {}
    for choices in (shapes.ROW_CHOICES, (128,), (8, 128), (64, 128), (16, 96, 128)):
        work = grouped.tiles, grouped.count
        hidden = jax.jit(functools.partial(_gate_up, row_choices=choices))(rows, factors, *work, w1, w3)
        y = jax.jit(functools.partial(_down, row_choices=choices))(hidden, *work, w2)
        found = _bits(hidden)[used], _bits(y)[used]
        expected = found if expected is None else expected
        for name, a, b in zip(("gate_up", "down"), found, expected, strict=True):
            if (a != b).any():
                different[f"{name} {choices}"] = int((a != b).sum())
    return {"passed": not different, "different": different}


def _repeats(tokens: int) -> dict[str, Any]:
    """100 calls with equal operands."""
    function = jax.jit(_whole)
    operands = *Batch(tokens, 64).rows(), *_experts(64)
    first = function(*operands)
    equal = jax.jit(
        lambda a, b: jnp.all(lax.bitcast_convert_type(a, jnp.uint16) == lax.bitcast_convert_type(b, jnp.uint16))
    )
    different = sum(not bool(equal(function(*operands), first)) for _ in range(100))
    return {"passed": different == 0, "different_calls": different}


def _errors(tokens: int) -> dict[str, Any]:
    """Sampled tokens against float64 on the host, from the products' exact operands."""
    batch = Batch(tokens, 24)
    (x, ids, factors), weights = batch.rows(), _experts(24)
    y = np.asarray(jax.jit(_rows_in_order)(x, ids, factors, *weights)).astype(np.float64)
    decode = jax.jit(lambda w, e: dequantize(w[e]))
    quantize = jax.jit(quantize_dequantize_fp8)

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).astype(jnp.bfloat16)

    worst, median = 0.0, []
    for t in sorted({0, tokens // 2, tokens - 1}):
        operand = np.asarray(quantize(x[t : t + 1]))[0].astype(np.float64)
        for j, e in enumerate(np.asarray(ids[t])):
            w1, w3, w2 = (np.asarray(decode(w, int(e))).astype(np.float64) for w in weights)
            gate, up = (rounded(w @ operand).astype(np.float64) for w in (w1, w3))
            gate = np.minimum(gate, LIMIT)
            hidden = float(factors[t, j]) * gate / (1 + np.exp(-gate)) * np.clip(up, -LIMIT, LIMIT)
            hidden = np.asarray(quantize(jnp.asarray(rounded(hidden))[None]))[0].astype(np.float64)
            expected = w2 @ hidden
            error = np.linalg.norm(y[t, j] - expected) / np.linalg.norm(expected)
            worst, median = max(worst, float(error)), [*median, float(error)]
    # A rounding to bfloat16 is worth 2^-9.6 of a row; an FP8 code that fell to its neighbour a little more.
    return {"passed": worst < 0.01, "worst": worst, "median": float(np.median(median))}


def _codes_exact() -> dict[str, Any]:
    """All codes with all scales: a one-hot row picks a column of the weight, bit for bit."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, size=(1, 512, 128)).astype(np.uint8)
    scale = np.resize(np.arange(fp4_fragments.LARGEST_SCALE + 1), (1, 512, 4)).astype(np.uint8)
    weight = repack(QuantTensor(pack_nibbles(jnp.asarray(codes)), jnp.asarray(scale), "fp4"))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = np.where(codes & 8, -1.0, 1.0) * table[codes & 7] * np.exp2(scale.astype(float) - 127).repeat(32, 2)
    rows = jnp.concatenate([jnp.eye(128, dtype=jnp.bfloat16), jnp.zeros((128, 128), jnp.bfloat16)])
    tiles, count = jnp.array([[0, 0, 128]], jnp.int32), jnp.ones(1, jnp.int32)
    y = np.asarray(jax.jit(_down)(rows, tiles, count, weight))[:128].astype(np.float64)
    wrong = y != expected[0].T
    normal = np.broadcast_to((scale[0] >= 2).repeat(32, 1).T, wrong.shape)  # the rest are subnormal float32
    return {"passed": not wrong[normal].any(), "wrong": int(wrong[normal].sum()), "subnormal": int(wrong.sum())}


def _quantised_middle() -> dict[str, Any]:
    """The fused quantiser against the portable one on the CPU."""
    batch = Batch(300, 16)
    rows, factors, grouped = _sorted(*batch.rows(), batch.experts)
    w1, w3 = _gate_up_experts(batch.experts)
    work = rows, factors, grouped.tiles, grouped.count, w1, w3
    used = np.asarray(grouped.source) >= 0
    plain = np.asarray(jax.jit(functools.partial(_gate_up, quantize=False))(*work))[used]
    fused = np.asarray(jax.jit(_gate_up)(*work))[used]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(jax.jit(quantize_dequantize_fp8)(jnp.asarray(plain)))
    wrong = int((_bits(fused) != _bits(expected)).sum())
    return {"passed": wrong == 0, "wrong": wrong}


def _routing() -> dict[str, Any]:
    """Ids and weights against float64, and a row's bits at other counts."""
    function, (logits, bias) = _make_route(1024, "mosaic_gpu")
    function = jax.jit(function)
    logits = logits * 4
    ids, weights = (np.asarray(part) for part in function(logits, bias))
    z = np.asarray(logits).astype(np.float64)
    scores = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    order = np.argsort(-(scores + np.asarray(bias)), axis=1, kind="stable")[:, :CHOSEN]
    expected_ids = np.sort(order, axis=1)
    expected = np.take_along_axis(scores, expected_ids, axis=1)
    expected *= 1.5 / expected.sum(axis=1, keepdims=True)
    same = (ids == expected_ids).all(axis=1)
    error = float(np.abs(weights / expected - 1)[same].max())
    one = [np.asarray(part) for part in function(logits[77:78], bias[77:78])]
    equal = bool((one[0] == ids[77]).all() and (_bits(one[1]) == _bits(weights)[77]).all())
    passed = bool(same.mean() > 0.99) and error < 1e-6 and equal
    return {"passed": passed, "same_choice": float(same.mean()), "relative_error": error, "row_bitwise": equal}


def _sum_equal() -> dict[str, Any]:
    """The sum of a token's rows against the portable one on the CPU, bit for bit."""
    function, arguments = _make_combine(100, "mosaic_gpu")
    got = _bits(jax.jit(function)(*arguments))
    host = jax.tree.map(np.asarray, arguments)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = _bits(
            jax.jit(functools.partial(combine_experts, implementation="xla"))(*jax.tree.map(jnp.asarray, host))
        )
    wrong = int((got != expected).sum())
    return {"passed": wrong == 0, "wrong": wrong}


def checks(quick: bool) -> list[Check]:
    """Exact decoding, equality over row choices and counts, repeatability, error, the row kernels."""
    del quick
    return [
        Check("all codes and scales", _codes_exact),
        Check("row choices", _row_choices_equal),
        Check("rows bitwise 32 experts", functools.partial(_rows_bitwise, 32)),
        Check("100 calls 64 tokens", functools.partial(_repeats, 64)),
        Check("error 1 token", functools.partial(_errors, 1)),
        Check("error 1024 tokens", functools.partial(_errors, 1024)),
        Check("fused quantiser", _quantised_middle),
        Check("routing", _routing),
        Check("sum equals the CPU", _sum_equal),
    ]


# ---- compilation without a device -------------------------------------------------------------------


def _shape(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _packed_shape(experts: int, rows: int, columns: int, form: WeightFormat) -> QuantTensor:
    order = fp4_block_scaled if form == "fp4_sm100" else fp4_fragments
    tiles = (experts, rows // order.TILE, columns // order.TILE)
    data = _shape(*tiles, *order.TILE_WORDS, dtype=jnp.uint32)
    if form == "fp4_sm90":
        return QuantTensor(data, _shape(*tiles, order.TILE, dtype=jnp.uint16), form)
    steps = -(-columns // fp4_block_scaled.SCALE_COLUMNS)
    return QuantTensor(data, _shape(*tiles[:2], steps, *fp4_block_scaled.SCALE_TILE, dtype=jnp.uint8), form)


def _fp8_shape(rows: int, columns: int) -> QuantTensor:
    scale = _shape(rows // GROUP, columns // GROUP, dtype=jnp.uint8)
    return QuantTensor(_shape(rows, columns, dtype=jnp.uint8), scale, "fp8")


def compile_cases() -> list[CompileCase]:
    """The whole op at the released, demo and test sizes, and the row kernels."""
    found = []
    for name, tokens, experts, hidden, width, chosen in (
        ("released 64 tokens", 64, EXPERTS, HIDDEN, WIDTH, CHOSEN),
        ("demo", 5, 16, 256, 64, 4),
        ("micro", 5, 4, 64, 64, 2),
    ):
        operands = (
            _shape(tokens, hidden, dtype=jnp.bfloat16),
            _shape(tokens, chosen, dtype=jnp.int32),
            _shape(tokens, chosen, dtype=jnp.float32),
        )
        for target, architecture in ARCHITECTURES.items():
            form = kernel_format(architecture)
            wide, narrow = (_packed_shape(experts, *size, form) for size in ((width, hidden), (hidden, width)))
            found.append(CompileCase(name, OP, _whole, (*operands, wide, wide, narrow), (target,)))
    tokens = 64
    settings: dict[str, Any] = {"implementation": "mosaic_gpu"}
    logits = _shape(tokens, EXPERTS, dtype=jnp.float32)
    function: Callable[..., Any] = functools.partial(route, **settings, **ROUTING)
    found.append(CompileCase("route", OP, function, (logits, logits)))
    rows = ExpertRows(_shape(tokens, CHOSEN, HIDDEN, dtype=jnp.bfloat16)), _shape(tokens, HIDDEN, dtype=jnp.bfloat16)
    found.append(CompileCase("combine", OP, functools.partial(combine_experts, **settings), rows))
    wide, narrow = _fp8_shape(WIDTH, HIDDEN), _fp8_shape(HIDDEN, WIDTH)
    function = functools.partial(shared_mlp, limit=LIMIT, quantize_input=True, **settings)
    return [*found, CompileCase("shared", OP, function, (rows[1], wide, wide, narrow))]
