"""The examples run, on the tiny model, and print what they say they print."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer_jax.prompt import ToolCall, encode_conversation
from deepinfer_jax.prompt.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("generate", "chat", "score", "engine")


def load(name: str) -> ModuleType:
    """The module of one example; its `main` is not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.fast
def test_examples_are_short() -> None:
    """Guards against an example that nobody reads to its end, and against one that no test runs."""
    files = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in EXAMPLES.glob("*.py")}
    assert sorted(files) == sorted(NAMES)
    assert {name: len(lines) for name, lines in files.items() if len(lines) >= 60} == {}


def test_generate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the batch example: a line per sample, then a line per token with its alternatives."""
    load("generate").main(str(folder), max_tokens=3)
    samples, tokens = capsys.readouterr().out.split("\n\n")
    assert [line.partition(" -> ")[0] for line in samples.splitlines()] == [
        "'Once upon a time'",
        "'The capital of France is'",
        "'Three small words:'",
        "'Three small words:'",
    ]
    assert [len(line.split()) for line in tokens.splitlines()[1:]] == [8, 8, 8]


def test_chat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the conversation example: it ends, and shows reasoning and content apart."""
    load("chat").main(str(folder), max_tokens=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reasoning: ")
    assert any(line.endswith("[length]") for line in lines)


def test_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the engine example: the second prompt goes on from the first one's cache, a request is cancelled."""
    load("engine").main(str(folder), max_tokens=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("of them cached")
    assert " 0 of them cached" not in lines[0]
    assert "'cancelled'" in lines[-2]


@pytest.mark.fast
def test_chat_answers_tools() -> None:
    """Guards the tool loop, which random weights never enter: its messages are accepted and its tool is careful."""
    from deepinfer_jax import demo

    chat = load("chat")
    call = ToolCall("add", '{"a": 17.5, "b": 4}', "call_0")
    assert chat.run_tool(call.name, call.arguments_object()) == "21.5"
    for arguments in (None, {}, {"a": 1}, {"a": 1, "b": "2"}):
        assert chat.run_tool("add", arguments).startswith("error")
    assert chat.run_tool("remove", {"a": 1, "b": 2}).startswith("error")
    tokenizer: Tokenizer = demo.load_tokenizer()
    messages = [
        {"role": "user", "content": "What is 17.5 + 4?"},
        {"role": "assistant", "content": "", "reasoning_content": "Add.", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "21.5"},
    ]
    text = encode_conversation(tokenizer, messages, tools=chat.TOOLS, thinking=True).text
    assert "Add two numbers." in text
    assert "21.5" in text


def test_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the scoring example: three continuations, most likely first, sums over their own tokens only."""
    load("score").main(str(folder))
    lines = capsys.readouterr().out.splitlines()
    totals = [float(line.split()[0]) for line in lines]
    assert totals == sorted(totals, reverse=True)
    assert {line.partition("'")[2] for line in lines} == {
        f"The cat sat on the {rest}'" for rest in ("mat", "roof of the house", "xylophone")
    }
