"""The released configuration compiles on a small machine, and depth costs nothing (`docs/architecture.md`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("released_program.py")
HANGS_AFTER = 900
"""Seconds. Not a budget: seconds are reported, the figures that a machine's load cannot change are asserted."""


def report_of(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name], capture_output=True, text=True, check=False, timeout=HANGS_AFTER
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(name, done.stdout.strip())
    return json.loads(done.stdout)


@pytest.mark.long
def test_released_model_compiles_and_depth_is_free() -> None:
    """Scanned runs of layers: twice the repeats may add tables of layer numbers, but no second copy of a layer."""
    released, doubled = report_of("released"), report_of("doubled")
    assert released["layers"] == 40
    assert doubled["layers"] == 68
    assert released["peak_rss_gb"] <= 6
    assert released["argument_gb"] > 400
    for figure in ("text_bytes", "instructions"):
        assert doubled[figure] <= 1.25 * released[figure], figure
