"""Process-wide settings that a command line or a script may switch on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import warnings
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

from deepinfer_jax.compile import options_text
from deepinfer_jax.load import cache_folder


def _cpu_features() -> str:
    """Model and instruction sets of this CPU: compiled code is only good for the same ones."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def compile_cache_folder(platform_name: str) -> Path:
    """Folder of compiled programs for this jaxlib, CPU and set of compiler options."""
    facts = [
        jax.__version__,
        jaxlib_version.__version__,
        platform.machine(),
        _cpu_features(),
        options_text(platform_name),
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "compiled" / digest


def use_compile_cache() -> Path | None:
    """Keep compiled programs on disk, so that the next process starts in seconds.

    The folder holds machine code that later processes run: it is created for this user only (mode 0700),
    and one that others may write to is not used. A cache folder that JAX has already been given stays.
    Returns: the folder in use, None if there is none.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = compile_cache_folder(jax.default_backend())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
        facts = folder.stat()
    except OSError as error:
        warnings.warn(f"no compile cache: {error}; every process will compile anew", stacklevel=2)
        return None
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        warnings.warn(f"no compile cache: {folder} is not this user's alone", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
