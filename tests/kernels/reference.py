"""The operators in NumPy float64: the second opinion that every implementation is compared with.

Written from `spec/attention.md` 3 and 7 and `spec/blocks.md` 1-4; nothing here imports the package. Values are
float64 throughout; `act` rounds at the points where the numerics profile rounds activations (`bf16`, or the
identity for the float32 profiles), and `quantize` adds the exact activation quantiser in front of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .reference_formats import bf16, float32, qdq4_mx, qdq8

Array = np.ndarray
Round = Callable[[Array], Array]


def exact(x: Array) -> Array:
    """No rounding."""
    return np.asarray(x, np.float64)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    return np.where(x >= 0, 1.0, np.exp(-np.abs(x))) / (1.0 + np.exp(-np.abs(x)))


# ---- linears, norm, rotary -------------------------------------------------------------------------


def linear(x: Array, w: Array, act: Round = exact, quantize: bool = False) -> Array:
    """x [T, K] times w [N, K]^T."""
    return act((qdq8(x) if quantize else exact(x)) @ exact(w).T)


def linear_grouped(x: Array, w: Array, act: Round = exact) -> Array:
    """x [T, G, K], w [G*N, K] -> [T, G, N]."""
    groups = x.shape[1]
    parts = np.split(exact(w), groups)
    return act(np.stack([exact(x)[:, g] @ parts[g].T for g in range(groups)], axis=1))


def rms_norm(x: Array, weight: Array, eps: float, act: Round = exact) -> Array:
    """Root-mean-square norm of the last axis."""
    x = exact(x)
    return act(exact(weight) * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def inverse_frequencies(size: int, theta: float, yarn: tuple[float, float, float, float] | None) -> Array:
    """Rotary frequencies of `size` dims; yarn = (factor, beta_fast, beta_slow, original length)."""
    result = []
    for i in range(size // 2):
        plain = theta ** (-2 * i / size)
        if yarn is None:
            result.append(plain)
            continue
        factor, fast, slow, original = yarn

        def turns(n: float, length: float = original) -> float:
            return size * math.log(length / (2 * math.pi * n)) / (2 * math.log(theta))

        low, high = max(math.floor(turns(fast)), 0), min(math.ceil(turns(slow)), size - 1)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        result.append(plain / factor * ramp + plain * (1 - ramp))
    return np.array(result)


def rotary(x: Array, positions: Array, frequencies: Array, inverse: bool = False, act: Round = exact) -> Array:
    """Rotate interleaved pairs of the tail of [T, ..., d]; the angle is a float32 product by definition."""
    x = exact(x).copy()
    frequencies = np.asarray(frequencies, np.float32)
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    for i in range(len(frequencies)):
        turn = np.exp((-1j if inverse else 1j) * angle[:, i]).reshape(-1, *(1,) * (x.ndim - 2))
        even = x.shape[-1] - 2 * len(frequencies) + 2 * i
        pair = (x[..., even] + 1j * x[..., even + 1]) * turn
        x[..., even], x[..., even + 1] = act(pair.real), act(pair.imag)
    return x


def pool_pair(values: Array, gates: Array, weight: Array, eps: float, act: Round = exact) -> Array:
    """Gated pooling of two tokens [T, 2, d] and norm."""
    share = sigmoid(exact(gates)[:, 0] - exact(gates)[:, 1])
    pooled = act(share * exact(values)[:, 0] + (1 - share) * exact(values)[:, 1])
    return rms_norm(pooled, weight, eps, act)


# ---- attention ------------------------------------------------------------------------------------


def attention(queries: Array, keys: Array, valid: Array, sink: Array, scale: float, act: Round = exact) -> Array:
    """One query row at a time: queries [T, H, d], keys [T, M, d], valid [T, M], sink [H]."""
    out = np.zeros(queries.shape)
    for t in range(queries.shape[0]):
        rows = exact(keys)[t][valid[t]]
        if not len(rows):
            continue
        logits = exact(queries)[t] @ rows.T * scale
        largest = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - largest)
        with np.errstate(over="ignore"):
            total = weights.sum(axis=1) + np.exp(exact(sink) - largest[:, 0])
        out[t] = act((act(weights) @ rows) / total[:, None])
    return out


def index_scores(queries: Array, head_weights: Array, keys: Array, visible: Array, bf16_chain: bool) -> Array:
    """queries [T, H, d], head_weights [T, H], keys [T, N, d] -> [T, N], -inf from `visible` on."""
    act = bf16 if bf16_chain else exact
    out = np.full(keys.shape[:2], -np.inf)
    for t in range(queries.shape[0]):
        dots = np.maximum(act(exact(queries)[t] @ exact(keys)[t, : visible[t]].T), 0.0)
        out[t, : visible[t]] = act(act(exact(head_weights)[t][:, None] * dots).sum(axis=0))
    return out


# ---- selection ------------------------------------------------------------------------------------


def largest_positions(scores: Array, k: int) -> list[int]:
    """Positions of the k largest of one row, ties to the lower one; -inf is never taken."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return sorted(j for j in order[:k] if scores[j] > -np.inf)


def top_k(scores: Array, k: int, block_mask: Array | None = None, block_size: int = 1) -> Array:
    """Ascending positions [T, k], padded with -1."""
    out = np.full((scores.shape[0], k), -1, np.int32)
    for t, row in enumerate(scores):
        allowed = np.ones(len(row), bool) if block_mask is None else block_mask[t].repeat(block_size)[: len(row)]
        found = largest_positions(np.where(allowed, row, -np.inf), k)
        out[t, : len(found)] = found
    return out


def candidate_blocks(scores: Array, visible: Array, block_size: int, blocks: int) -> Array:
    """Mask [T, blocks of the row] of the best blocks, the newest one pinned."""
    count = -(-scores.shape[1] // block_size)
    mask = np.zeros((scores.shape[0], count), bool)
    for t, row in enumerate(scores):
        best = [row[b * block_size : (b + 1) * block_size].max() for b in range(count)]
        if visible[t] > 0:
            best[(visible[t] - 1) // block_size] = np.inf
        mask[t, largest_positions(np.array(best), blocks)] = True
    return mask


# ---- experts --------------------------------------------------------------------------------------


def route(
    logits: Array, bias: Array, k: int, normalize: bool, scale: float, temperature: float = 1.0
) -> tuple[Array, Array]:
    """(ids ascending [T, k], weights [T, k])."""
    z = exact(logits) / temperature
    scores = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    ids = np.array([largest_positions(row, k) for row in scores + exact(bias)], np.int32)
    weights = np.take_along_axis(scores, ids, axis=1)
    if normalize and k > 1:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return ids, weights * scale


def gated_mlp(
    x: Array,
    weight: Array | None,
    w1: Array,
    w3: Array,
    w2: Array,
    limit: float,
    act: Round = exact,
    quantize: bool = False,
) -> Array:
    """One expert on rows [T, D]; weight [T] multiplies before w2."""
    gate = np.minimum(linear(x, w1, act, quantize), limit)
    up = np.clip(linear(x, w3, act, quantize), -limit, limit)
    hidden = gate * sigmoid(gate) * up
    return linear(act(hidden if weight is None else weight[:, None] * hidden), w2, act, quantize)


def expert_mlp(
    x: Array,
    ids: Array,
    weights: Array,
    w1: Array,
    w3: Array,
    w2: Array,
    limit: float,
    act: Round = exact,
    quantize: bool = False,
) -> Array:
    """[T, k, D]: output of every chosen expert, a zero row for an id that is no expert."""
    out = np.zeros((*ids.shape, x.shape[1]))
    for t in range(ids.shape[0]):
        for choice, e in enumerate(ids[t]):
            if 0 <= e < w1.shape[0]:
                factor = exact(weights)[t, choice : choice + 1]
                out[t, choice] = gated_mlp(x[t : t + 1], factor, w1[e], w3[e], w2[e], limit, act, quantize)[0]
    return out


def combine_experts(rows: Array, shared: Array, act: Round = exact) -> Array:
    """Sum of a token's expert rows [T, k, D] and its shared row [T, D], in float32 steps when rounded."""
    step = exact if act is exact else float32
    total = exact(rows)[:, 0]
    for i in range(1, rows.shape[1]):
        total = step(total + exact(rows)[:, i])
    return act(step(total + exact(shared)))


# ---- hyper-connections ----------------------------------------------------------------------------


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Doubly normalised matrix of one token, [C, C]."""
    matrix = np.exp(logits - logits.max(axis=1, keepdims=True))
    matrix = matrix / matrix.sum(axis=1, keepdims=True) + eps
    matrix = matrix / (matrix.sum(axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(axis=1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(axis=0, keepdims=True) + eps)
    return matrix


def mhc_coefficients(
    mixes: Array, base: Array, scale: Array, count: int, iterations: int, eps: float
) -> tuple[Array, Array, Array]:
    """(pre [T, C], post [T, C], comb [T, C, C]) of the projection [T, C*(2+C)]."""
    mixes, base, scale = exact(mixes), exact(base), exact(scale)
    pre = sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = 2 * sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(-1, count, count)
    return pre, post, np.stack([sinkhorn(row, iterations, eps) for row in logits])


def mhc_mix(
    streams: Array, fn: Array, base: Array, scale: Array, iterations: int, norm_eps: float, hc_eps: float
) -> tuple[Array, Array, Array]:
    """Coefficients of streams [T, C, D]."""
    flat = exact(streams).reshape(streams.shape[0], -1)
    mixes = flat @ exact(fn).T / np.sqrt(np.mean(flat * flat, axis=1, keepdims=True) + norm_eps)
    return mhc_coefficients(mixes, base, scale, streams.shape[1], iterations, hc_eps)


def collapse(streams: Array, pre: Array, act: Round = exact) -> Array:
    """sum_i pre[i] * stream[i]."""
    return act(np.einsum("tc,tcd->td", exact(pre), exact(streams)))


def expand(y: Array, streams: Array, post: Array, comb: Array, act: Round = exact) -> Array:
    """post[j] * y + sum_i comb[i, j] * stream[i]."""
    mixed = np.einsum("tij,tid->tjd", exact(comb), exact(streams))
    return act(exact(post)[:, :, None] * exact(y)[:, None] + mixed)


# ---- Engram ---------------------------------------------------------------------------------------


def engram_hash(
    classes: Sequence[Sequence[int]],
    multipliers: Sequence[int] | Array,
    primes: Sequence[int] | Array,
    offsets: Sequence[int] | Array,
) -> Array:
    """Table rows by Python's unbounded integers; classes [T, n] newest first."""
    heads = len(primes) // (len(multipliers) - 1)
    out = []
    for window in classes:
        mixed, row = int(window[0]) * int(multipliers[0]), []
        for back in range(1, len(multipliers)):
            mixed ^= int(window[back]) * int(multipliers[back])
            for column in range((back - 1) * heads, back * heads):
                row.append(mixed % int(primes[column]) + int(offsets[column]))
        out.append(row)
    return np.array(out, np.int64)


def engram_windows(
    classes: Sequence[int] | Array, dead: Sequence[bool] | Array, size: int, pad: int
) -> list[list[int]]:
    """Class of each position and its predecessors, newest first; behind a dead position all is pad."""
    out = []
    for p in range(len(classes)):
        blocked, window = False, []
        for back in range(size):
            q = p - back
            blocked = blocked or q < 0 or bool(dead[q])
            window.append(pad if blocked else int(classes[q]))
        out.append(window)
    return out


def engram_gate(
    streams: Array, projected: Array, q_weight: Array, k_weight: Array, keep: Array, eps: float, act: Round = exact
) -> tuple[Array, Array]:
    """(streams with the gated value added, gate [T, C])."""
    rows, count, size = streams.shape
    out, gates = exact(streams).copy(), np.zeros((rows, count))
    for t in range(rows):
        if not keep[t]:
            continue
        value = exact(projected)[t, count * size :]
        for i in range(count):
            h, key = exact(streams)[t, i], exact(projected)[t, i * size : (i + 1) * size]
            norms = math.sqrt((np.mean(h * h) + eps) * (np.mean(key * key) + eps) * size)
            product = np.sum(h * exact(q_weight)[i] * exact(k_weight)[i] * key) / norms
            root = math.copysign(math.sqrt(max(abs(product), 1e-6)), product)
            gates[t, i] = sigmoid(np.array(root))
            out[t, i] = act(h + gates[t, i] * value)
    return out, gates


def index_query(x: Array, positions: Array, frequencies: Array, act: Round = exact) -> Array:
    """Rotate and quantise index queries [T, H, d]."""
    return qdq4_mx(rotary(x, positions, frequencies, act=act))
