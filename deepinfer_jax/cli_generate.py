"""The commands that run the model: generate, chat, score."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

DEFAULT_MAX_TOKENS = 200
"""Of `generate` and `chat`: a command should end by itself soon. The Python functions have no such limit."""

SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, f"generated tokens at most; default {DEFAULT_MAX_TOKENS}"),
    ("temperature", float, "0 = greedy; default 1"),
    ("top_p", float, "smallest set of tokens with this mass; default 1 = off"),
    ("top_k", int, "this many most likely tokens; default 0 = off"),
    ("min_p", float, "at least this share of the largest probability; default 0 = off"),
    ("seed", int, "0 .. 2^64-1; default 0: the same text every time"),
    ("n", int, "samples per prompt"),
    ("min_tokens", int, "no end before this many tokens"),
    ("presence_penalty", float, "subtracted for tokens of the output"),
    ("frequency_penalty", float, "subtracted per occurrence in the output"),
    ("repetition_penalty", float, "divides logits of tokens seen so far"),
    ("logprobs", int, "report log-probabilities, and this many of the most likely tokens"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags of `SamplingParams`, spelled --like-this."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in SAMPLING_FLAGS:
        group.add_argument(
            "--" + name.replace("_", "-"), dest=name, type=kind, metavar=kind.__name__.upper(), help=text
        )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text (may be repeated)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end token")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Flags that choose the model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="demo",
        metavar="SOURCE",
        help="demo (default), a checkpoint folder, released, or owner/name of the hub",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository of the hub")
    group.add_argument("--yes", action="store_true", help="download without asking")
    group.add_argument("--numerics", default="reference", metavar="NAME", help="rounding profile; default reference")
    group.add_argument("--show-code", action="store_true", help="print the equivalent Python and exit")


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """The flag that chooses operators."""
    parser.add_argument(
        "--implementation",
        choices=("xla", "mosaic_gpu"),
        help="of all operators: portable, or GPU kernels; default: kernels where this device and model have them",
    )


def sampling_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given on the command line, and the limit of length."""
    names = [name for name, _, _ in SAMPLING_FLAGS] + ["stop", "ignore_eos"]
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    return {"max_tokens": DEFAULT_MAX_TOKENS, **given}


def _implementation(arguments: argparse.Namespace) -> dict[str, Any]:
    """`implementation=` of the Python functions, if it was given."""
    return {} if arguments.implementation is None else {"implementation": arguments.implementation}


def _code(arguments: argparse.Namespace, call: str) -> str:
    options = "" if arguments.numerics == "reference" else f", numerics={arguments.numerics!r}"
    options += "" if arguments.revision is None else f", revision={arguments.revision!r}"
    options += _keywords(_implementation(arguments))
    options += ", yes=True" if arguments.yes else ""
    return f"import deepinfer_jax\n\nparams = deepinfer_jax.load_params({arguments.model!r}{options})\n{call}"


def _keywords(changes: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in changes.items())


def _load(arguments: argparse.Namespace) -> Any:
    from deepinfer_jax.load import load_params
    from deepinfer_jax.runtime import use_compile_cache

    use_compile_cache()
    return load_params(
        arguments.model,
        numerics=arguments.numerics,
        revision=arguments.revision,
        yes=arguments.yes,
        **_implementation(arguments),
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """Complete one or more texts; one text is printed as it appears."""
    changes = sampling_changes(arguments) | _implementation(arguments)
    prompts = arguments.prompt[0] if len(arguments.prompt) == 1 else arguments.prompt
    if arguments.show_code:
        call = f"for output in deepinfer_jax.generate(params, {prompts!r}{_keywords(changes)}):\n    print(output.text)"
        print(_code(arguments, call))
        return 0
    from deepinfer_jax.api import generate, stream

    params = _load(arguments)
    if len(arguments.prompt) == 1 and changes.get("n", 1) == 1 and not arguments.json:
        for event in stream(params, prompts, **changes):
            print(event.text, end="", flush=True)
        print()
        return 0
    outputs = generate(params, arguments.prompt, **changes)
    for output in outputs:
        for completion in output.outputs:
            print(_json_line(output, completion) if arguments.json else completion.text)
    return 0


def _json_line(output: Any, completion: Any) -> str:
    import json

    from deepinfer_jax.outputs import Completion

    assert isinstance(completion, Completion)
    fields = {field.name: getattr(completion, field.name) for field in dataclasses.fields(completion)}
    fields = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()}
    fields["tool_calls"] = [dataclasses.asdict(call) for call in completion.tool_calls]
    return json.dumps({"prompt": output.prompt, **fields}, ensure_ascii=False)


def run_chat(arguments: argparse.Namespace) -> int:
    """Read messages from the terminal (or lines from a pipe) and answer each."""
    changes = sampling_changes(arguments)
    if arguments.show_code:
        call = (
            'messages = [{"role": "user", "content": "Hello"}]\n'
            f"for event in deepinfer_jax.stream(params, messages{_keywords(changes | _implementation(arguments))}):\n"
            '    print(event.text, end="", flush=True)'
        )
        print(_code(arguments, call))
        return 0
    from deepinfer_jax.api import Engine
    from deepinfer_jax.engine.runtime_config import RuntimeConfig

    runtime = RuntimeConfig(**_implementation(arguments))
    with Engine(_load(arguments), runtime) as engine:  # kept: each turn goes on from the last one's caches
        return _converse(engine, arguments, changes)


def _converse(engine: Any, arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    messages: list[dict[str, Any]] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    terminal = sys.stdin.isatty()
    if terminal:
        print("One message a line; an empty line or Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        print("> " if terminal else "", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        output = engine.generate(
            messages,
            thinking=not arguments.no_thinking,
            reasoning_effort=arguments.effort,
            on_token=lambda event: print(event.text, end="", flush=True),
            **changes,
        )[0]
        print()
        messages.append({"role": "assistant", "content": output.outputs[0].content})


def run_score(arguments: argparse.Namespace) -> int:
    """Print the log-probability of every token of a text, and their sum."""
    if arguments.show_code:
        options = f"top_k={arguments.top}{_keywords(_implementation(arguments))}"
        call = f"print(deepinfer_jax.score(params, {arguments.text!r}, {options})[0].token_logprobs)"
        print(_code(arguments, call))
        return 0
    from deepinfer_jax.api import score
    from deepinfer_jax.load import tokenizer_of
    from deepinfer_jax.prompt import encode_completion

    params = _load(arguments)
    result = score(params, arguments.text, arguments.top, **_implementation(arguments))[0]
    tokenizer = tokenizer_of(params)
    assert tokenizer is not None  # `score` has encoded the text with it
    ids = encode_completion(tokenizer, arguments.text).token_ids[1:]
    for row, token in enumerate(ids):
        best = "".join(
            f"  {tokenizer.decode([int(i)])!r} {value:.4f}"
            for i, value in zip(result.top_ids[row], result.top_logprobs[row], strict=True)
        )
        print(f"{result.token_logprobs[row]:10.4f}  {token:6d}  {tokenizer.decode([token])!r}{best}")
    total = float(result.token_logprobs.astype("float64").sum())
    print(f"{total:10.4f}  sum over {len(ids)} tokens, {-total / len(ids):.4f} nats per token")
    return 0
