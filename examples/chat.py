"""A conversation with reasoning and a tool: answer calls of the model until it has said everything.

    python examples/chat.py [MODEL]

The demo model does not know when to call a tool; the loop is the one that the released model needs.
"""

from __future__ import annotations

import sys
from typing import Any

import deepinfer_jax

NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}},
]


def run_tool(name: str, arguments: dict[str, Any] | None) -> str:
    """What the tool answers. Arguments come from the model: check them as any input; None = not valid JSON."""
    a, b = ((arguments or {}).get(key) for key in ("a", "b"))
    if name != "add" or not isinstance(a, int | float) or not isinstance(b, int | float):
        return "error: expected add with the numbers a and b"
    return str(a + b)


def main(model: str = "demo", max_tokens: int = 40) -> None:
    """Ask, think, call tools, answer; at most four turns."""
    params = deepinfer_jax.load_params(model)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17.5 + 4?"}]
    for _ in range(4):
        (output,) = deepinfer_jax.generate(
            params, messages, tools=TOOLS, thinking=True, reasoning_effort="low", temperature=0.6, max_tokens=max_tokens
        )
        answer = output.outputs[0]
        print("reasoning:", answer.reasoning)
        print("content:  ", answer.content, f"[{answer.finish_reason}]")
        if answer.finish_reason != "tool_calls":
            break
        calls = [call.to_dict() for call in answer.tool_calls]
        messages.append(
            {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning, "tool_calls": calls}
        )
        for call in answer.tool_calls:
            result = run_tool(call.name, call.arguments_object())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    from deepinfer_jax.runtime import use_compile_cache

    use_compile_cache()  # the first run compiles, later ones start in seconds
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
