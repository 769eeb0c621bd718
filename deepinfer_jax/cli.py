"""The command `deepinfer-jax`. Subcommands import what they need when they run, so that help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepinfer_jax import __version__
from deepinfer_jax.cli_generate import add_implementation, add_model, add_sampling, run_chat, run_generate, run_score
from deepinfer_jax.evals import cli_eval

_EPILOG = """\
examples:
  deepinfer-jax generate "Once upon a time" complete a text with the embedded demo model
  deepinfer-jax chat                        talk to it
  deepinfer-jax inspect released            what the released checkpoint holds: sizes, layers, parameters
  deepinfer-jax inspect ~/checkpoint        check a downloaded folder: every name, dtype, shape and offset
  deepinfer-jax inspect demo --json         the same report for other programs

`deepinfer-jax COMMAND --help` explains one command.
"""

_GENERATE_EPILOG = """\
examples:
  deepinfer-jax generate "Once upon a time"
  deepinfer-jax generate "Once upon a time" --temperature 0 --max-tokens 50
  deepinfer-jax generate "First prompt" "Second prompt" --json --logprobs 3
  deepinfer-jax generate "Once" --model ./checkpoint --show-code
"""

_INSPECT_EPILOG = """\
PATH is one of
  a checkpoint folder     config.json with model.safetensors, or with model.safetensors.index.json and
                          its shards. The headers of all files are checked against config.json: missing,
                          left over, mistyped, misshaped or truncated tensors are errors (status 1).
                          So is an Engram token map that does not fit. Tensor values are not read.
  a folder with only      config.json. The report then says what a checkpoint of this configuration must
                          hold; nothing is checked.
  released, demo, micro   a built-in configuration: DeepSeek-V4.1-Flash, the embedded demo model, the
                          smallest test model. Write ./demo for a folder of that name.

examples:
  deepinfer-jax inspect released
  deepinfer-jax inspect ./my-checkpoint --tensors | less
  deepinfer-jax inspect ./my-checkpoint --json > report.json
"""


def _build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    parser = argparse.ArgumentParser(
        prog="deepinfer-jax",
        description="Reproducible offline inference of DeepSeek-V4.1-Flash in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect",
        parents=[common],
        help="report on a configuration and check a checkpoint folder",
        description="Show configuration, layer plan, sizes and parameter counts; check a checkpoint folder.",
        epilog=_INSPECT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("path", metavar="PATH", help="folder, or one of: released, demo, micro")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor with dtype and shape")
    inspect.add_argument("--json", action="store_true", help="print the report as JSON")
    inspect.set_defaults(run=_inspect)

    _add_generate(commands, common)
    _add_chat(commands, common)
    _add_score(commands, common)
    cli_eval.add_parser(commands, common)
    return parser


def _add_generate(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "generate",
        parents=[common],
        help="complete texts",
        description="Complete one or more texts. The same command prints the same text every time.",
        epilog=_GENERATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="text to complete; several make one batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")
    add_model(parser)
    add_implementation(parser)
    add_sampling(parser)
    parser.set_defaults(run=run_generate)


def _add_chat(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk to the model",
        description="Answer one message a line, with the V4.1 conversation protocol.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    parser.add_argument("--effort", metavar="N", type=_effort, help="reasoning effort: 1-100, low, high or max")
    add_model(parser)
    add_implementation(parser)
    add_sampling(parser)
    parser.set_defaults(run=run_chat)


def _effort(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _add_score(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "score",
        parents=[common],
        help="log-probabilities of a text",
        description="Print the log-probability of every token of a text: the bits that generation reports.",
    )
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--top", type=int, default=0, metavar="K", help="also print the K most likely tokens")
    add_model(parser)
    add_implementation(parser)
    parser.set_defaults(run=run_score)


def _inspect(arguments: argparse.Namespace) -> int:
    from deepinfer_jax.inspect_checkpoint import inspect, render_json, render_text

    report = inspect(arguments.path)
    for line in (render_json if arguments.json else render_text)(report, arguments.tensors):
        print(line)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status.

    0: done. 1: an error, told in one line on stderr; with --debug it is raised instead. As usual with
    argparse, --help, --version and wrong usage raise SystemExit.
    """
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, OSError) as error:
        if arguments.debug:
            raise
        print(f"deepinfer-jax {arguments.command}: error: {error}", file=sys.stderr)
        return 1
    return status
