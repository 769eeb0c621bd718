"""The demo evaluation: its report, drafts measured offline, ablations, held-out data, command line."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.compile import jit
from deepinfer_jax.demo import load_tokenizer
from deepinfer_jax.evals.ablations import with_random_selection, without_engram
from deepinfer_jax.evals.cli_eval import add_parser
from deepinfer_jax.evals.demo import DRAFT_ANCHORS, evaluate, problems_of, report_lines, word_f1
from deepinfer_jax.evals.drafts import Anchor, Drafter
from deepinfer_jax.evals.heldout import HeldOut, heldout_losses, load_heldout
from deepinfer_jax.kernels.dispatch import ROW_TILE
from deepinfer_jax.kernels.quantization import QuantTensor, dequantize
from deepinfer_jax.load import load_params
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.dspark import draft_block, draft_context
from deepinfer_jax.model.init import init_params
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import init_state


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo checkpoint goes to a folder of the tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DEEPINFER_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@functools.cache
def demo() -> Params:
    return load_params("demo")


@functools.cache
def micro() -> Params:
    return init_params(ModelConfig.micro(), jax.random.key(7))


# ---- the whole ----------------------------------------------------------------------------------------------------


def test_report_is_a_function_of_the_weights() -> None:
    """Guards against times, random order or a broken table in the report."""
    settings: dict[str, Any] = {"limit": 2, "tasks": ["weekday", "effort"], "heldout_rows": 0}
    lines: list[str] = []
    report = evaluate(demo(), **settings, progress=lines.append)
    assert json.dumps(evaluate(demo(), **settings)) == json.dumps(report)
    assert [line.split(":")[0] for line in lines] == ["weekday", "effort"]
    assert list(report["tasks"]) == ["weekday", "effort"]
    for result in report["tasks"].values():
        assert result["items"] == 2
        assert 0 <= result["exact_match"] <= 1
        assert 0 <= result["drafts"]["mean_accepted"] <= result["drafts"]["mean_possible"] <= 5
        assert result["drafts"]["blocks"] <= 2 * DRAFT_ANCHORS
    assert report["mean_exact_match"] == np.mean([r["exact_match"] for r in report["tasks"].values()])
    assert {band["items"] for band in report["tasks"]["effort"]["bands"]} <= {1, 2}
    assert any(line.startswith("weekday ") for line in report_lines(report))


def test_held_out_loss_is_that_of_the_text() -> None:
    """Guards against scoring the wrong tokens, or BOS: the text is far likelier than chance, backwards it is not."""
    source = load_heldout()[1][0]
    short = HeldOut(source.source, (source.rows[0][:100],), source.ngram_nats)
    loss = heldout_losses(demo(), load_tokenizer(), short, None)
    assert loss["tokens"] == 99
    assert loss["nats_per_token"] < np.log(3072) - 3
    backwards = HeldOut(source.source, (np.append(short.rows[0][:1], short.rows[0][:0:-1]),), source.ngram_nats)
    assert heldout_losses(demo(), load_tokenizer(), backwards, None)["nats_per_token"] > loss["nats_per_token"] + 1
    text = load_tokenizer().decode(short.rows[0][1:].tolist())
    assert loss["bits_per_byte"] == pytest.approx(loss["nats_per_token"] * 99 / np.log(2) / len(text.encode()))


def test_bad_arguments() -> None:
    """Guards against an evaluation that silently leaves something out."""
    for settings, message in (
        ({"limit": 0}, "limit=0"),
        ({"tasks": ["sorting"]}, "task 'sorting' is not one of"),
        ({"tasks": ["talk"]}, "task 'talk' is not one of"),
        ({"ablations": ["engram"]}, "ablation 'engram' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(micro(), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this model has another one"):
        evaluate(micro())


@pytest.mark.fast
def test_problems_differ() -> None:
    """Guards against counting one problem many times; tasks with few problems give fewer."""
    for task, count in (("sort", 50), ("weekday", 100)):
        items = problems_of(task, count)
        assert len({item.problem for item in items}) == len(items)
        assert items[:5] == problems_of(task, 5)
    assert len(problems_of("sort", 50)) == 50
    assert 100 < len(problems_of("weekday", 1000)) < 1000


@pytest.mark.fast
def test_word_f1() -> None:
    """Guards against a score that ignores repeated or missing words."""
    assert word_f1("a b b", "b b a") == 1
    assert word_f1("a b", "b c d") == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert word_f1("", "b") == 0


@pytest.mark.fast
def test_shipped_texts() -> None:
    """Guards against held-out rows that belong to another tokenizer or do not fit a context."""
    digest, sources = load_heldout()
    assert digest == load_tokenizer().sha256
    assert len(sources) == 9
    for source in sources:
        assert 4000 <= sum(map(len, source.rows)) <= 16_000
        for row in source.rows:
            assert row[0] == load_tokenizer().bos_id
            assert len(row) <= 1024
        assert 2.5 < source.ngram_nats < 6


# ---- ablations ----------------------------------------------------------------------------------------------------


def leaves(params: Params) -> dict[tuple[int, int, str], Any]:
    return {
        (i, j, key): leaf
        for i, segment in enumerate(params.segments)
        for j, run in enumerate(segment)
        for key, leaf in run.items()
    }


@pytest.mark.parametrize(
    ("change", "name"), [(without_engram, "engram.wkv"), (with_random_selection, "attn.indexer.wq_b")]
)
def test_ablation_changes_only_its_weights(change: Any, name: str) -> None:
    """Guards against an ablation that takes out more than it says, or nothing."""
    before, after = leaves(micro()), leaves(change(micro()))
    assert before.keys() == after.keys()
    changed = {key for key in before if before[key] is not after[key]}
    assert changed == {key for key in before if key[2] == name}
    assert changed
    for key in changed:
        new, old = (dequantize(x) if isinstance(x, QuantTensor) else x for x in (after[key], before[key]))
        new, old = np.asarray(new, np.float32), np.asarray(old, np.float32)
        if change is without_engram:
            assert not new.any()
        else:
            assert (np.sort(new, axis=-1) == np.sort(old, axis=-1)).all()
            assert (new != old).mean() > 0.8


# ---- drafts -------------------------------------------------------------------------------------------------------


class MadeUpTaps(Drafter):
    """A drafter whose backbone is a hash of the tokens so far; compiling a real one would take most of the time."""

    def taps(self, ids: Sequence[int]) -> np.ndarray:
        width = len(self.config.dspark_target_layer_ids) * self.config.hidden_size
        seeds = [hash(tuple(ids[: i + 1])) & 0xFFFFFFFF for i in range(len(ids))]
        rows = [np.random.default_rng(seed).standard_normal(width) for seed in seeds]
        return np.stack(rows).astype(self.profile.dtype)


def one_by_one(params: Params, taps: np.ndarray, ids: Sequence[int], start: int) -> np.ndarray:
    """Drafts after committing every row before the anchor, in order, into one slot."""
    drafter = Drafter(params)
    fixed: dict[str, Any] = {"config": drafter.config, "profile": drafter.profile}
    state = init_state(drafter.config, drafter.profile, slots=1, pages=1, row_block=ROW_TILE)
    commit = jit(functools.partial(draft_context, **fixed))
    for begin in range(0, start, ROW_TILE):
        rows = np.arange(begin, begin + ROW_TILE, dtype=np.int32)
        values = taps[np.minimum(rows, len(taps) - 1)]
        _, state = commit(params, state, values, rows, np.where(rows < start, 0, -1).astype(np.int32))
    facts = (np.array([x], np.int32) for x in (ids[start], start, 0, 0))
    drafts, _ = jit(functools.partial(draft_block, **fixed))(params, state, *facts)
    return np.asarray(drafts.token_ids)[0]


def test_accepted_drafts_are_counted_from_the_models_own_drafts() -> None:
    """Guards against drafts from a wrong window or place: they equal those of a sequence committed in order, and
    exactly the tokens up to the first difference count."""
    drafter = MadeUpTaps(micro())
    block = drafter.config.dspark_block_size
    start = 41
    ids = np.random.default_rng(5).integers(3, drafter.config.vocab_size, start + 1).tolist()
    taps = drafter.taps(ids)
    drafts = drafter.draft([Anchor(ids, start)], [taps])[0].tolist()
    assert drafts == one_by_one(micro(), taps, ids, start).tolist()
    for right in range(block + 1):
        wrong = [(drafts[right] + 1) % drafter.config.vocab_size] if right < block else []
        sequence = [*ids, *drafts[:right], *wrong, 9, 9, 9, 9, 9]
        assert drafter.accepted([sequence], [[start]]) == [(right, block)]
    assert drafter.accepted([[*ids, drafts[0]]], [[start]]) == [(1, 1)]
    alone = drafter.accepted([ids], [[3, 20, 36]])
    other = list(reversed(ids))
    assert drafter.accepted([other, ids, other], [[8, 9, 10, 11, 12], [3, 20, 36], []])[5:] == alone


# ---- command line -------------------------------------------------------------------------------------------------


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["eval", "demo", *words])


@pytest.mark.fast
def test_show_code_is_the_same_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against printed code that does something else than the command."""
    arguments = parse("--limit", "3", "--task", "sort", "--no-engram", "--show-code")
    assert arguments.run(arguments) == 0
    code = capsys.readouterr().out
    compile(code, "shown", "exec")
    assert "evaluate(params, limit=3, tasks=['sort'], heldout_rows=0, ablations=['no_engram'])" in code


def test_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a report file that differs from the printed table, and a late failure for a bad folder."""
    path = tmp_path / "report.json"
    arguments = parse("--limit", "1", "--task", "weekday", "--no-drafts", "--json", str(path))
    assert arguments.run(arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(path.read_text())
    assert out.splitlines() == report_lines(report)
    assert err.startswith("weekday: exact match")
    bad = parse("--json", str(tmp_path / "none" / "report.json"))
    with pytest.raises(ValueError, match="the folder does not exist"):
        bad.run(bad)
