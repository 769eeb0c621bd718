"""Losses of the three phases on one batch of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.profile import REFERENCE, NumericsProfile
from deepinfer_jax.model.config import ModelConfig

from .draft import draft_blocks
from .forward import TRAINING_BF16, Attention, Dropout, Hidden, backbone, head_logits, setting_of
from .weights import forward_values

FULL_WEIGHT, REPEATED_WEIGHT = 10, 9
"""Loss weights, in tenths, of what is to be learned: answers and large texts, texts seen many times. Prompts of tasks
have less (`data.py`)."""

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a phase computes. quantize: released grids on weights, activations and caches. narrow_rows: share of rows
    whose window is narrow in layers with compressed entries: what the window can do too, the entries learn late."""

    name: str
    profile: NumericsProfile
    quantize: bool
    attention: Attention
    narrow_rows: float = 0.0


PHASES = {
    "p1": Phase("p1", TRAINING_BF16, False, "dense", narrow_rows=0.5),
    "p2": Phase("p2", REFERENCE, True, "selected"),
    "p3": Phase("p3", REFERENCE, True, "selected"),
}

INDEX_WEIGHT, BALANCE_WEIGHT = 1.0, 1e-4
DRAFT_DECAY = 4.0

TEXT_DROPOUT, TEXT_NOISE, TEXT_FORGET = 0.15, 0.06, 0.4
"""In repeated texts: rate of dropout of sublayer outputs, share of hidden input tokens, of tokens without Engram."""

NARROW_REACH = 4
"""Positions of a narrow window."""


def _weighted_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1e-6)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(loss, whether the label is the most likely token) of each row.

    Labels are compared with every id: the gradient of an indexed read would be a scatter.
    """
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    chosen = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    best = lax.stop_gradient(chosen >= jnp.max(logits, axis=-1))
    return jax.nn.logsumexp(logits, axis=-1) - chosen, best


def _second_weight(weights: jax.Array) -> jax.Array:
    """[B, T + 1]: weight of the second token of the document that a token belongs to.

    A document starts where the weight is 0; its second token has at least REPEATED_WEIGHT in a text and less in a
    prompt.
    """
    places = jnp.arange(weights.shape[1])
    start = lax.cummax(jnp.where(weights == 0, places, 0), axis=1)
    return jnp.take_along_axis(weights, jnp.minimum(start + 1, places[-1]), axis=1)


def documents_of(config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """int32 [B, T]: which document of its row an input token belongs to; each begins with BOS. tokens: [B, T + 1]."""
    return jnp.cumsum(tokens[:, :-1] == config.bos_token_id, axis=1, dtype=jnp.int32)


def in_task(weights: jax.Array) -> jax.Array:
    """bool [B, T]: tokens of documents that start with a prompt, from weights [B, T + 1] of all tokens."""
    second = _second_weight(weights)
    return ((second > 0) & (second < REPEATED_WEIGHT))[:, 1:]


def text_metrics(loss: jax.Array, right: jax.Array, weights: jax.Array) -> Metrics:
    """Losses of texts and of task answers. loss, right: [B, T]; weights: tenths, of all tokens [B, T + 1]."""
    full, task = weights[:, 1:] >= REPEATED_WEIGHT, in_task(weights)
    text, answer = ((full & part).astype(jnp.float32) for part in (~task, task))
    return {
        "text_loss": _weighted_mean(loss, text),
        "answer_loss": _weighted_mean(loss, answer),
        "accuracy": _weighted_mean(right.astype(jnp.float32), full.astype(jnp.float32)),
        "answer_accuracy": _weighted_mean(right.astype(jnp.float32), answer),
        "answer_share": jnp.mean(answer),
    }


def regularized(
    config: ModelConfig, inputs: jax.Array, weights: jax.Array, key: jax.Array
) -> tuple[jax.Array, Dropout]:
    """Inputs [B, T] with some tokens of repeated texts replaced by the noise token, and the dropout of those texts.

    weights: tenths [B, T + 1].
    """
    text = (_second_weight(weights) == REPEATED_WEIGHT)[:, :-1]
    hidden = text & (jax.random.uniform(jax.random.fold_in(key, 1001), inputs.shape) < TEXT_NOISE)
    flat = text.reshape(-1).astype(jnp.float32)
    noise = config.dspark_noise_token_id
    return jnp.where(hidden & (inputs != 0), noise, inputs), Dropout(key, flat * TEXT_DROPOUT, flat * TEXT_FORGET)


def backbone_loss(
    config: ModelConfig,
    phase: Phase,
    weights: Mapping[str, jax.Array],
    token_map: jax.Array,
    tokens: jax.Array,
    label_weights: jax.Array,
    measure: bool = False,
    key: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """(loss, (metrics, expert load [layers, E])) of tokens int32 [B, T + 1] with weights in tenths.

    key: of a training step, whose texts are made harder to know by heart; None: none of that.
    """
    setting = setting_of(config, phase.profile)
    values = forward_values(config, weights, phase.quantize)
    inputs, dropout, reach = tokens[:, :-1], None, None
    if key is not None:
        inputs, dropout = regularized(config, inputs, label_weights, key)
        narrow = jax.random.uniform(jax.random.fold_in(key, 1002), tokens.shape[:1]) < phase.narrow_rows
        reach = jnp.where(narrow, NARROW_REACH, config.sliding_window)
    hidden = backbone(
        setting,
        values,
        token_map,
        inputs,
        attention=phase.attention,
        documents=documents_of(config, tokens),
        reach=reach,
        measure=measure,
        dropout=dropout,
    )
    labels = tokens[:, 1:]

    def head(streams: jax.Array, pre: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head_logits(setting, values, values["norm"], streams, pre)[1]
        entropy, best = _cross_entropy(logits, labels.reshape(-1))
        return entropy.reshape(labels.shape), best.reshape(labels.shape)

    entropy, best = jax.checkpoint(head)(hidden.streams, hidden.pre)
    loss = _weighted_mean(entropy, label_weights[:, 1:].astype(jnp.float32))
    metrics = {"loss": loss, **text_metrics(lax.stop_gradient(entropy), best, label_weights)}
    total = loss
    for name, values_by_layer in hidden.losses.items():
        mean = jnp.mean(values_by_layer)
        metrics[name] = mean
        if name == "index_loss":
            total += INDEX_WEIGHT * mean
        elif name == "balance_loss":
            total += BALANCE_WEIGHT * mean
        elif name == "recall":
            metrics["recall_by_layer"] = values_by_layer
    metrics["largest_load"] = jnp.max(hidden.load) * config.n_routed_experts / config.num_experts_per_tok
    return total, (metrics, hidden.load)


def choose_anchors(key: jax.Array, label_weights: jax.Array, count: int, block: int) -> jax.Array:
    """int32 [B, count] different positions whose whole block has labels; tokens of full weight come more often."""
    length = label_weights.shape[1] - 1
    usable = length - block
    weight = label_weights[:, 1 : usable + 1].astype(jnp.float32) / FULL_WEIGHT
    score = jnp.log(weight + 0.2) + jax.random.gumbel(key, weight.shape)
    return jnp.sort(lax.top_k(score, count)[1], axis=1).astype(jnp.int32)


def draft_loss(
    config: ModelConfig,
    phase: Phase,
    weights: Mapping[str, jax.Array],
    frozen: Mapping[str, jax.Array],
    hidden: Hidden,
    tokens: jax.Array,
    label_weights: jax.Array,
    anchors: jax.Array,
) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Loss of the draft stages `weights`; frozen: backbone values, hidden: what the backbone computed.

    Per block position, with weights falling by exp(-1/4): divergence from the backbone's distribution, its total
    variation, a little cross entropy, and the confidence's cross entropy with the true acceptance.
    """
    setting = setting_of(config, phase.profile)
    values = {**frozen, **forward_values(config, weights, phase.quantize)}
    batch, block = tokens.shape[0], config.dspark_block_size
    outputs = draft_blocks(setting, values, hidden.taps, tokens, anchors)
    row = jnp.arange(batch)[:, None, None]
    places = anchors[:, :, None] + jnp.arange(block)  # position of a predecessor; its label is one later
    labels = tokens[row, places + 1].reshape(-1, block)
    flat = (row * (tokens.shape[1] - 1) + places).reshape(-1)
    target = head_logits(setting, frozen, frozen["norm"], hidden.streams[flat], hidden.pre[flat])[1]
    target = lax.stop_gradient(target.reshape(outputs.logits.shape))
    log_q = jax.nn.log_softmax(outputs.logits)
    log_p = jax.nn.log_softmax(target)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    divergence = jnp.sum(p * (log_p - log_q), axis=-1)
    distance = jnp.sum(jnp.abs(p - q), axis=-1)
    accepted = lax.stop_gradient(1 - distance / 2)
    entropy, _ = _cross_entropy(outputs.logits, labels)
    sure = outputs.confidence
    confidence = jnp.maximum(sure, 0) - sure * accepted + jnp.log1p(jnp.exp(-jnp.abs(sure)))
    valid = (label_weights[row, places + 1].reshape(-1, block) > 0).astype(jnp.float32)
    valid = jnp.cumprod(valid, axis=1)
    weight = valid * jnp.exp(-jnp.arange(block) / DRAFT_DECAY)
    parts = {"divergence": divergence, "distance": distance, "entropy": entropy, "confidence": confidence}
    means = {name: _weighted_mean(value, weight) for name, value in parts.items()}
    balance = jnp.mean(outputs.balance_loss)
    loss = 0.5 * means["divergence"] + 0.5 * means["distance"] + 0.1 * means["entropy"] + means["confidence"]
    agree = (jnp.argmax(outputs.logits, -1) == jnp.argmax(target, -1)).astype(jnp.float32)
    per_position = jnp.sum(accepted * valid, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1e-6)
    metrics = {
        "loss": loss,
        **means,
        "accepted_by_position": per_position,
        "accepted_length": 1 + jnp.mean(jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)),
        "greedy_length": 1 + jnp.mean(jnp.sum(jnp.cumprod(agree, axis=1), axis=1)),
        "largest_load": jnp.max(outputs.load) * config.dspark_n_routed_experts / config.dspark_num_experts_per_tok,
    }
    return loss + BALANCE_WEIGHT * balance, (metrics, outputs.load)
