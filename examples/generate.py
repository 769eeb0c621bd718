"""Complete several prompts at once, each with sampling parameters of its own, and look at log-probabilities.

    python examples/generate.py [MODEL]

MODEL is what `load_params` takes; without it the small demo model runs.
"""

from __future__ import annotations

import math
import sys

import deepinfer_jax
from deepinfer_jax import SamplingParams


def main(model: str = "demo", max_tokens: int = 24) -> None:
    """Three prompts in one batch. Any of them alone would give the same tokens and the same bits."""
    params = deepinfer_jax.load_params(model)
    prompts = ["Once upon a time", "The capital of France is", "Three small words:"]
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=max_tokens, logprobs=3),
        SamplingParams(temperature=0, max_tokens=max_tokens, stop=("\n", "."), logprobs=3),
        SamplingParams(n=2, top_k=50, seed=7, max_tokens=max_tokens, logprobs=3),
    ]
    outputs = deepinfer_jax.generate(params, prompts, sampling)
    for output in outputs:
        for sample in output.outputs:
            print(f"{output.prompt!r} -> {sample.text!r}  [{sample.finish_reason}]")

    sample = outputs[0].outputs[0]
    if sample.logprobs is None or sample.top_ids is None or sample.top_logprobs is None:
        raise RuntimeError("log-probabilities were asked for above")
    print("\nfirst prompt: chosen token, its probability, the three most likely ones")
    for row, token in enumerate(sample.token_ids):
        pairs = zip(sample.top_ids[row].tolist(), sample.top_logprobs[row].tolist(), strict=True)
        best = "  ".join(f"{other}: {math.exp(value):.3f}" for other, value in pairs)
        print(f"{token:6d}  {math.exp(sample.logprobs[row]):.3f}   {best}")


if __name__ == "__main__":
    from deepinfer_jax.runtime import use_compile_cache

    use_compile_cache()  # the first run compiles, later ones start in seconds
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
