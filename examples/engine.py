"""One engine, several calls: shared prefixes, events as they appear, one request cancelled.

python examples/engine.py
"""

from __future__ import annotations

import deepinfer_jax


def main(source: str = "demo", max_tokens: int = 24) -> None:
    """source: what `load_params` takes."""
    params = deepinfer_jax.load_params(source)
    with deepinfer_jax.Engine(params) as engine:
        story = "Once upon a time there was a small engine that gave the same answer every time. " * 12
        first = engine.generate(story + "It began", max_tokens=max_tokens)[0]
        second = engine.generate(story + "It ended", max_tokens=max_tokens)[0]
        print(f"second prompt: {second.usage.prompt_tokens} tokens, {second.usage.cached_tokens} of them cached")
        print(repr(first.text), repr(second.text), sep="\n")

        call = engine.submit(["One", "Two", "Three"], max_tokens=max_tokens)
        for number, event in enumerate(call):
            print(event.prompt_index, repr(event.text))
            if number == 2:
                call.cancel(2)
        print([output.outputs[0].finish_reason for output in call.outputs()])
        print(engine.stats)


if __name__ == "__main__":
    main()
