"""Compiler options, in one place: everything that is compiled goes through `jit` here (design 2.4).

The bits of a result are promised for given compiler options, so manifests record `options_fingerprint`.
Only options that can change bits belong here; speed settings do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax

Options = dict[str, bool | str | int]

_EVERYWHERE: Options = {
    # A bfloat16 rounding in the source is a rounding in the program. By default XLA deletes roundings between
    # fused operations and keeps the wider value, so results would depend on what happens to be fused.
    "xla_allow_excess_precision": False,
}

_CPU: Options = {
    # The library that XLA:CPU hands products to gets the product and nothing else. By default neighbouring
    # arithmetic goes with it, and there bfloat16 roundings inside such a group are skipped.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    # One form of every function. By default an inverse root is an approximation in vectors and exact elsewhere, and
    # on CPUs with 512-bit vectors half as wide ones are chosen, for which exponentials of a few numbers are compiled
    # differently from those of many: a row's bits would depend on how many rows come along (jax 0.12, AVX-512).
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_cpu_prefer_vector_width": 512,
}

_GPU: Options = {
    # No measured choice of tiles: timings differ between runs and machines, and so would the order of sums.
    "xla_gpu_autotune_level": 0,
    # One pass over K. Otherwise XLA splits a product's K by a number that depends on the row count
    # (16 parts at 16 to 256 rows of K=4096, none at 4096 rows).
    "xla_gpu_experimental_force_split_k": 1,
    # Never hand a product to cuBLAS, which picks its kernel from the shape of the whole problem.
    "xla_gpu_cublas_fallback": False,
}

_PLATFORMS: dict[str, Options] = {
    "cpu": _EVERYWHERE | _CPU,
    "gpu": _EVERYWHERE | _GPU,
}
_SAME_AS = {"cuda": "gpu"}


def compiler_options(platform: str) -> Options:
    """XLA options for a platform: "cpu", "gpu" or its other name "cuda".

    Returns a new dictionary for `compiler_options=` of `jax.jit` or of `Lowered.compile`.
    Raises ValueError for a platform without a list, because results there are promised nothing.
    """
    name = _SAME_AS.get(platform, platform)
    if name not in _PLATFORMS:
        known = ", ".join([*_PLATFORMS, *_SAME_AS])
        raise ValueError(f"platform {platform!r} has no list of compiler options; known: {known}")
    return dict(_PLATFORMS[name])


def options_text(platform: str) -> str:
    """The options as canonical JSON, sorted by name: equal options give equal text."""
    return json.dumps(compiler_options(platform), sort_keys=True, separators=(",", ":"))


def options_fingerprint(platform: str) -> str:
    """SHA-256 of `options_text` in hexadecimal, for manifests and names of compiled programs."""
    return hashlib.sha256(options_text(platform).encode()).hexdigest()


def jit(function: Callable[..., Any], *, platform: str | None = None, **jit_arguments: Any) -> Any:
    """`jax.jit` with this project's compiler options, for whole programs.

    JAX takes compiler options at the outermost jit only: a function jitted here raises ValueError when it is
    called while another one is traced. Functions that become part of a program stay plain functions.

    Args:
        function: what to compile.
        platform: where it will run; None means the default backend of this process.
        jit_arguments: passed on. `compiler_options` among them adds to the list, and may not change it.
    Returns: the jitted function, with `lower` and `trace`.
    Raises: ValueError for an unknown platform, or for an option that contradicts the list.
    """
    options = compiler_options(platform or jax.default_backend())
    extra = jit_arguments.pop("compiler_options", None) or {}
    for name, value in extra.items():
        if name in options and options[name] != value:
            raise ValueError(f"compiler option {name}={value!r} contradicts {options[name]!r}: results would change")
    return jax.jit(function, compiler_options=options | extra, **jit_arguments)
