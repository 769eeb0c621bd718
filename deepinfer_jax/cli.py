"""The command `deepinfer-jax`. Subcommands import what they need when they run, so that help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deepinfer_jax import __version__

_EPILOG = """\
examples:
  deepinfer-jax inspect released            what the released checkpoint holds: sizes, layers, parameters
  deepinfer-jax inspect ~/checkpoint        check a downloaded folder: every name, dtype, shape and offset
  deepinfer-jax inspect demo --json         the same report for other programs

`deepinfer-jax COMMAND --help` explains one command.
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

    generate = commands.add_parser(
        "generate",
        parents=[common],
        help="generate text (not in this version)",
        description="Generate text. This version has no model yet and only says so.",
    )
    generate.set_defaults(run=_generate)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    from deepinfer_jax.inspect_checkpoint import inspect, render_json, render_text

    report = inspect(arguments.path)
    for line in (render_json if arguments.json else render_text)(report, arguments.tensors):
        print(line)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    print(
        f"deepinfer-jax generate: not available in version {__version__}: the model arrives with a later version",
        file=sys.stderr,
    )
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status.

    0: done. 1: an error, told in one line on stderr; with --debug it is raised instead. 2: a command
    that does not exist or is not available. As usual with argparse, --help, --version and wrong usage
    raise SystemExit.
    """
    parser = _build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and arguments.run is not _generate:  # whose options come with the model
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if arguments.debug:
            raise
        print(f"deepinfer-jax {arguments.command}: error: {error}", file=sys.stderr)
        return 1
    return status
