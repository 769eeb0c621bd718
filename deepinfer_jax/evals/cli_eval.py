"""The command `eval`: evaluations by name; `eval demo` is the one that ships."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deepinfer_jax.cli_generate import add_model

_EPILOG = """\
examples:
  deepinfer-jax eval demo                               the embedded demo model, 200 problems a task
  deepinfer-jax eval demo --limit 20 --task sort        a quick look at one task
  deepinfer-jax eval demo --json report.json            the report for other programs; equal bytes every time
  deepinfer-jax eval demo --no-engram --task define     what the Engram tables are good for
  deepinfer-jax eval demo --random-selection --task recall

What is measured is explained in docs/evaluation.md.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser | None = None) -> None:
    """Register the command. common: parser of options that every command has."""
    parser = subparsers.add_parser(
        "eval",
        parents=[common] if common else [],
        help="measure a model on tasks",
        description="Measure a model: exact match on generated tasks, loss on held-out texts, accepted drafts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("evaluation", choices=["demo"], help="which evaluation")
    parser.add_argument("--limit", type=int, metavar="N", help="problems of each task; default 200")
    parser.add_argument("--task", action="append", metavar="NAME", help="only this task (may be repeated); no texts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report here")
    parser.add_argument("--no-engram", action="store_true", help="take the Engram tables out")
    parser.add_argument("--random-selection", action="store_true", help="select compressed entries at random")
    parser.add_argument("--no-drafts", action="store_true", help="do not measure accepted drafts")
    add_model(parser)
    parser.set_defaults(run=run_eval)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `evaluate`, those that differ from its defaults."""
    named = {"no_engram": arguments.no_engram, "random_selection": arguments.random_selection}
    chosen: dict[str, Any] = {}
    if arguments.limit is not None:
        chosen["limit"] = arguments.limit
    if arguments.task:
        chosen |= {"tasks": list(arguments.task), "heldout_rows": 0}
    if any(named.values()):
        chosen["ablations"] = [name for name, wanted in named.items() if wanted]
    if arguments.no_drafts:
        chosen["drafts"] = False
    return chosen


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate, print a table, write the report."""
    options = _options(arguments)
    if arguments.show_code:
        numerics = "" if arguments.numerics == "reference" else f", numerics={arguments.numerics!r}"
        keywords = "".join(f", {name}={value!r}" for name, value in options.items())
        print("import deepinfer_jax\nfrom deepinfer_jax.evals.demo import evaluate, report_lines\n")
        print(f"params = deepinfer_jax.load_params({arguments.model!r}{numerics})")
        print(f'print("\\n".join(report_lines(evaluate(params{keywords}))))')
        return 0
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ValueError(f"--json {arguments.json}: the folder does not exist")
    from deepinfer_jax.evals.demo import evaluate, report_lines
    from deepinfer_jax.load import load_params
    from deepinfer_jax.runtime import use_compile_cache

    use_compile_cache()
    params = load_params(arguments.model, numerics=arguments.numerics)
    report = evaluate(params, progress=lambda line: print(line, file=sys.stderr, flush=True), **options)
    for line in report_lines(report):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0
