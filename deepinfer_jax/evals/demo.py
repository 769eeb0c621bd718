"""The demo evaluation: exact match of every task, loss on held-out texts, and accepted drafts.

The report is a function of the weights, the limit and the ablations: no times, no dates, and equal bytes for equal
input. Problems come from the test split (`tasks.py`), outputs are greedy.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from deepinfer_jax.api import generate
from deepinfer_jax.evals.ablations import ABLATIONS
from deepinfer_jax.evals.drafts import Drafter
from deepinfer_jax.evals.heldout import heldout_losses, load_heldout
from deepinfer_jax.evals.tasks import TASKS, Item, encode_item, is_correct, item_prompt, make_item
from deepinfer_jax.load import tokenizer_of
from deepinfer_jax.model.params import Params
from deepinfer_jax.prompt import ParsedOutput, Tokenizer, parse_output
from deepinfer_jax.prompt.control import END_THINK

LIMIT = 200
"""Problems of a task."""

SPARE_TOKENS = 32
"""An output is cut when it has this many tokens more than the expected one."""

DRAFT_ITEMS = 40
"""Outputs of a task in which blocks are drafted, at most."""

DRAFT_ANCHORS = 4
"""Places in each of them, at most."""

_BANDS = ((1, 33), (34, 66), (67, 100))
_DISTANCES = ((0, 64), (65, 256), (257, 1024))

Progress = Callable[[str], None]


def _rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([zlib.crc32(name.encode())])))


def problems_of(task: str, limit: int) -> list[Item]:
    """Up to `limit` different test problems of a task; fewer if the task has no more of them."""
    rng = _rng(task)
    found: dict[str, Item] = {}
    for _ in range(20 * limit):
        item = make_item(task, "test", rng)
        found.setdefault(item.problem, item)
        if len(found) == limit:
            break
    return list(found.values())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _proportion(correct: Sequence[bool]) -> dict[str, Any]:
    """Share and its standard error."""
    share = _mean([float(c) for c in correct])
    error = math.sqrt(share * (1 - share) / len(correct))
    return {"items": len(correct), "exact_match": share, "standard_error": error}


def word_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, 0 to 1."""
    got, want = Counter(answer.split()), Counter(expected.split())
    common = sum((got & want).values())
    return 2 * common / (got.total() + want.total()) if common else 0.0


def _by_band(items: Sequence[Item], reasoning: Sequence[int], correct: Sequence[bool]) -> dict[str, Any]:
    """Reasoning tokens and exact match by effort, and whether more effort means more reasoning."""
    bands, means = [], []
    for low, high in _BANDS:
        chosen = [i for i, item in enumerate(items) if low <= (item.effort or 0) <= high]
        if chosen:
            means.append(_mean([reasoning[i] for i in chosen]))
            share = _proportion([correct[i] for i in chosen])
            bands.append({"effort": [low, high], **share, "mean_reasoning_tokens": means[-1]})
    return {"bands": bands, "reasoning_grows_with_effort": all(a < b for a, b in pairwise(means))}


def _by_distance(items: Sequence[Item], correct: Sequence[bool]) -> list[dict[str, Any]]:
    """Exact match by how many tokens back the asked pair stands."""
    result = []
    for low, high in _DISTANCES:
        chosen = [i for i, item in enumerate(items) if low <= item.facts["distance"] <= high]
        if chosen:
            result.append({"distance": [low, high], **_proportion([correct[i] for i in chosen])})
    return result


def _reasoning_tokens(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    closing = tokenizer.control_id(END_THINK)
    return list(ids).index(closing) if closing in ids else len(ids)


def _drafts(drafter: Drafter, task: str, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Any:
    """Accepted drafts at random places of the first outputs; None if all outputs have one token."""
    rng = _rng(f"drafts {task}")
    sequences, anchors = [], []
    for prompt, output in list(zip(prompts, outputs, strict=True))[:DRAFT_ITEMS]:
        places = np.arange(len(prompt), len(prompt) + len(output) - 1)
        sequences.append([*prompt, *output])
        anchors.append(np.sort(rng.choice(places, min(DRAFT_ANCHORS, len(places)), replace=False)).tolist())
    found = drafter.accepted(sequences, anchors)
    if not found:
        return None
    return {
        "blocks": len(found),
        "mean_accepted": _mean([accepted for accepted, _ in found]),
        "mean_possible": _mean([possible for _, possible in found]),
    }


def evaluate_task(params: Params, tokenizer: Tokenizer, task: str, limit: int, drafter: Drafter | None) -> Any:
    """Results of one task, a JSON object."""
    items = problems_of(task, limit)
    encoded = [encode_item(item, tokenizer) for item in items]
    sampling = [{"temperature": 0.0, "max_tokens": len(answer) + SPARE_TOKENS} for _, answer in encoded]
    prompts = [prompt for prompt, _ in encoded]
    outputs = [list(o.outputs[0].token_ids) for o in generate(params, prompts, sampling, progress=False)]
    parsed: list[ParsedOutput] = []
    correct: list[bool] = []
    for item, ids in zip(items, outputs, strict=True):
        parsed.append(parse_output(ids, item_prompt(item, tokenizer).output, tokenizer=tokenizer))
        correct.append(tokenizer.eos_id in ids and is_correct(item, parsed[-1]))
    result: dict[str, Any] = _proportion(correct)
    if task == "define":
        result["word_f1"] = _mean([word_f1(p.content, i.content) for p, i in zip(parsed, items, strict=True)])
    if task == "effort":
        result |= _by_band(items, [_reasoning_tokens(ids, tokenizer) for ids in outputs], correct)
    if task == "recall":
        result["by_distance"] = _by_distance(items, correct)
    if drafter is not None:
        result["drafts"] = _drafts(drafter, task, prompts, outputs)
    return result


def evaluate(
    params: Params,
    *,
    limit: int = LIMIT,
    tasks: Sequence[str] | None = None,
    ablations: Sequence[str] = (),
    drafts: bool = True,
    heldout_rows: int | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Evaluate a model with the demo tokenizer.

    Args:
        params: from `load_params`.
        limit: problems of a task.
        tasks: names; None is all that are measured.
        ablations: names of ABLATIONS, applied to the weights first.
        drafts: whether to measure accepted drafts (models without draft stages have none).
        heldout_rows: rows of each held-out source; None is all, 0 leaves the texts out.
        progress: called with a line of text as the work goes on.
    Returns: a JSON object: `mean_exact_match`, `tasks`, `heldout`, and how they were measured.
    Raises: ValueError for a limit below 1, an unknown name, or a model with another tokenizer.
    """
    names = [task.name for task in TASKS.values() if task.measured] if tasks is None else list(tasks)
    measured = [task.name for task in TASKS.values() if task.measured]
    for name in names:
        if name not in measured:
            raise ValueError(f"task {name!r} is not one of {', '.join(measured)}")
    for name in ablations:
        if name not in ABLATIONS:
            raise ValueError(f"ablation {name!r} is unknown; choose from {', '.join(ABLATIONS)}")
    if limit < 1:
        raise ValueError(f"limit={limit}: at least one problem of a task is needed")
    expected, texts = load_heldout()
    tokenizer = tokenizer_of(params)
    if tokenizer is None or tokenizer.sha256 != expected:
        raise ValueError("the demo evaluation is for models with the demo tokenizer; this model has another one")
    for name in ablations:
        params = ABLATIONS[name](params)
    drafter = Drafter(params) if drafts and params.config.has_draft else None
    results: dict[str, Any] = {}
    for name in names:
        results[name] = evaluate_task(params, tokenizer, name, limit, drafter)
        progress(f"{name}: exact match {results[name]['exact_match']:.3f} of {results[name]['items']}")
    losses: dict[str, Any] = {}
    for text in texts if heldout_rows != 0 else ():
        losses[text.source] = heldout_losses(params, tokenizer, text, heldout_rows)
        progress(f"held-out {text.source}: {losses[text.source]['nats_per_token']:.3f} nats per token")
    return {
        "mean_exact_match": _mean([results[name]["exact_match"] for name in names]) if names else None,
        "limit": limit,
        "numerics": params.numerics,
        "ablations": list(ablations),
        "tasks": results,
        "heldout": losses,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """A report as a plain table, one string a line."""
    lines = [f"{'task':14} {'items':>5} {'exact match':>11} {'error':>6} {'drafts accepted':>16} {'possible':>8}"]
    for name, result in report["tasks"].items():
        drafts = result.get("drafts")
        shown = f"{drafts['mean_accepted']:16.2f} {drafts['mean_possible']:8.2f}" if drafts else f"{'-':>16} {'-':>8}"
        score = f"{result['exact_match']:11.3f} {result['standard_error']:6.3f}"
        lines.append(f"{name:14} {result['items']:5} {score} {shown}")
    if report["mean_exact_match"] is not None:
        lines.append(f"{'mean':14} {'':5} {report['mean_exact_match']:11.3f}")
    for result in report["tasks"].values():
        for band in result.get("bands", ()):
            low, high = band["effort"]
            tokens = band["mean_reasoning_tokens"]
            lines.append(f"effort {low}-{high}: {tokens:.1f} reasoning tokens, exact match {band['exact_match']:.3f}")
        for band in result.get("by_distance", ()):
            low, high = band["distance"]
            lines.append(f"recall {low}-{high} tokens back: {band['exact_match']:.3f} of {band['items']}")
        if "word_f1" in result:
            lines.append(f"define: word F1 {result['word_f1']:.3f}")
    if report["heldout"]:
        lines += ["", f"{'held-out text':14} {'tokens':>7} {'nats/token':>10} {'4-gram':>7} {'bits/byte':>9}"]
    for source, loss in report["heldout"].items():
        numbers = f"{loss['nats_per_token']:10.3f} {loss['ngram_nats_per_token']:7.3f} {loss['bits_per_byte']:9.3f}"
        lines.append(f"{source:14} {loss['tokens']:7} {numbers}")
    if report["ablations"]:
        lines.append(f"ablations: {', '.join(report['ablations'])}")
    return lines
