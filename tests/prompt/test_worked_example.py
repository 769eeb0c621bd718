"""The worked example of docs/prompts.md, computed again."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_jax import demo
from deepinfer_jax.prompt import encode_conversation, parse_output

PAGE = Path(__file__).parents[2] / "docs" / "prompts.md"


def assert_shortened(text: str, shown: str) -> None:
    """`shown` is `text`, or its end, with stretches left out where a line says "..."."""
    pieces = shown.split("\n...\n")
    position = text.index(pieces[0])
    for piece in pieces:
        position = text.index(piece, position) + len(piece)
    assert position == len(text)


def test_worked_example() -> None:
    """Guards the page: its code runs, and gives the prompts, the parse and the next prompt that it shows."""
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index("## A worked example") : page.index("## Where this differs")]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    shown = [block.removesuffix("\n") for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]
    tokenizer = demo.load_tokenizer()
    names = {"tokenizer": tokenizer, "encode_conversation": encode_conversation}
    exec(code[0], names)
    assert_shortened(names["prompt"].text, shown[0])  # type: ignore[union-attr]
    output = tokenizer.encode(shown[1], control_tokens=True)
    names["parsed"] = parsed = parse_output(output, names["prompt"].output, tokenizer=tokenizer)  # type: ignore[union-attr]
    for field in ("reasoning", "content"):
        assert f'`parsed.{field}` is `"{getattr(parsed, field)}"`' in section.replace("\n", " ")
    (call,) = parsed.tool_calls
    assert f"""(ToolCall("{call.name}", '{call.arguments}', "{call.id}"),)""" in section
    exec(code[1], names)
    following = encode_conversation(
        tokenizer,
        names["messages"],  # type: ignore[arg-type]
        tools=[names["add"]],  # type: ignore[list-item]
        reasoning_effort=30,
    )
    assert_shortened(following.text, shown[2])
