"""The tools that compile and time kernels, as far as they work without a GPU and without its compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.dispatch import OPS

ROOT = Path(__file__).parents[2]

PTXAS = """ptxas /somewhere/tempfile-1, line 263; info    : Potential out of bound access
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for {name}_mosaic_gpu_kernel
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 65.020 ms
"""


def loaded(path: str) -> ModuleType:
    """A module of the tree that belongs to no package."""
    name = "tool_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded("tools/kernels/compile.py")


@pytest.fixture(scope="module")
def case_list() -> ModuleType:
    return loaded("tools/kernels/cases.py")


@pytest.fixture(scope="module")
def timing(case_list: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.kernel_timing")


# ---- what the compiler says -----------------------------------------------------------------------


def test_registers_and_spills_are_read(tool: ModuleType) -> None:
    """Guards against a spill that is not seen: both numbers count, of every kernel of a program."""
    text = PTXAS.format(name="product", stores=0, loads=0, registers=168)
    text += PTXAS.format(name="combine", stores=12, loads=8, registers=40)
    facts = tool.printed_facts(text)
    assert [(k.name, k.registers, k.spill_bytes) for k in facts] == [
        ("product_mosaic_gpu_kernel", 168, 0),
        ("combine_mosaic_gpu_kernel", 40, 20),
    ]
    assert tool.problem(facts[:1], 1, 232448) is None
    assert "20 bytes of registers spilled" in tool.problem(facts, 2, 232448)


def test_changed_compiler_output_is_an_error(tool: ModuleType) -> None:
    """Guards against a new ptxas whose words are not understood: no kernel must pass as one without spills."""
    with pytest.raises(ValueError, match="not as expected"):
        tool.printed_facts(PTXAS.format(name="a", stores=0, loads=0, registers=8).replace("spill loads", "reloads"))


def test_shared_memory_is_compared_with_the_device(tool: ModuleType, tmp_path: Path) -> None:
    """Guards against a kernel that only fits the machine on which it was tried."""
    (tmp_path / "a_0.ptxas").write_text(PTXAS.format(name="a", stores=0, loads=0, registers=8))
    (tmp_path / "a_0.resources.txt").write_text("Resources(smem_scratch_bytes=240000, tmem_scratch_cols=64)")
    facts = tool.dumped_facts(tmp_path)
    assert (facts[0].shared_bytes, facts[0].tensor_memory_columns) == (240000, 64)
    limit = tool.shared_memory_limit((tool.TARGETS / "h200.txtpb").read_text())
    assert limit == 227 * 1024
    assert "240000 bytes of shared memory" in tool.problem(facts, 1, limit)


def test_program_without_kernel_fails(tool: ModuleType) -> None:
    """Guards against an op that quietly hands its work to XLA."""
    assert tool.problem([], 0, 232448) == "no Mosaic kernel in the program"


def test_output_is_captured(tool: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the capture of what a compiler's own code prints, and that later output is seen again."""
    with tool.captured_output() as read:
        os.write(1, b"a call of the system\n")
        ctypes.CDLL(None).puts(b"a library of C")  # stays in its buffer, like what a compiler prints
        text = read()
    os.write(1, b"after\n")
    assert set(text.splitlines()) == {"a call of the system", "a library of C"}
    assert capfd.readouterr().out == "after\n"


def test_some_of_each_op(tool: ModuleType, case_list: ModuleType) -> None:
    """Guards the selection that CI compiles: the extremes of every op are in it."""
    cases = [case_list.CompileCase(str(i), op, len, ()) for op in ("row_dot", "top_k") for i in range(9)]
    chosen = [(case.op, case.name) for case in tool.some_of_each(cases, 3)]
    assert chosen == [(op, name) for op in ("row_dot", "top_k") for name in ("0", "4", "8")]
    assert tool.some_of_each(cases, None) == cases
    assert len(tool.some_of_each(cases, 100)) == len(cases)


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_targets_name_their_device(tool: ModuleType, target: str) -> None:
    """Guards against descriptions that were mixed up: the architecture follows from them alone."""
    text = (tool.TARGETS / f"{target}.txtpb").read_text()
    assert target.upper() in re.findall(r'device_description_str: "NVIDIA (\w+)', text)
    major = re.search(r"cuda_compute_capability \{\s*major: (\d+)", text)
    assert major is not None
    assert major[1] == {"h200": "9", "b200": "10"}[target]
    assert "ACCELERATED_FEATURES" in text


# ---- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_case_modules_keep_the_form(case_list: ModuleType, op: str) -> None:
    """Guards the tools against a list that they cannot use: names that collide, arrays in place of shapes."""
    module = case_list.case_module(op)
    if module is None:
        return  # an op without kernels
    compiled = module.compile_cases()
    names = [(target, case.name) for case in compiled for target in case.targets]
    assert len(set(names)) == len(names)
    for case in compiled:
        assert case.op == op
        assert set(case.targets) <= {"h200", "b200"}
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(case.arguments)), case.name
    for quick in (True, False):
        timed, checks = module.cases(quick), module.checks(quick) if hasattr(module, "checks") else []
        assert len({case.key for case in timed}) == len(timed)
        assert len({check.name for check in checks}) == len(checks)
        assert all(case.op == op and case.bytes > 0 and case.flop >= 0 for case in timed)


def test_unknown_op(case_list: ModuleType) -> None:
    """Guards against a misspelt --op that compiles nothing and passes."""
    with pytest.raises(ValueError, match="'row_dots' is unknown"):
        case_list.compile_cases("h200", ["row_dots"])


# ---- timing ---------------------------------------------------------------------------------------


def test_loop_calls_every_copy(timing: ModuleType) -> None:
    """Guards against a loop that mixes its copies up, or makes fewer than 100 calls."""
    copies = tuple((jnp.full((4,), float(i)), jnp.arange(4.0)) for i in range(3))
    results = timing.loop_program(lambda x, y: {"sum": x + y}, True)(copies)
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result["sum"], i + np.arange(4.0))
    for count in (1, 3, 8, 32):
        assert count * timing.loop_trips(count) >= 100


@pytest.mark.parametrize(("size", "least"), [(1, 32), (5 << 20, 21), (30 << 20, 8), (101 << 20, 8), (7 << 30, 1)])
def test_copies_do_not_fit_the_cache(timing: ModuleType, size: int, least: int) -> None:
    """Guards against timing a cache: copies exceed it, but for arguments so small that they do not count."""
    count = timing.copies_needed(size)
    assert count == least
    assert count == timing.MOST_COPIES or count * size > timing.CACHE_BYTES


def test_relative_error(timing: ModuleType) -> None:
    """Guards the error of a result: the worst of several arrays, and refusals of what cannot be compared."""
    good, bad = np.ones((2, 2)), np.ones((2, 2)) * [1, 1.5]
    assert timing.relative_error((good, bad), (good, good)) == pytest.approx(np.sqrt(0.5) / 2)
    with pytest.raises(ValueError, match="1 of 2 results are not finite"):
        timing.relative_error(np.array([1, np.nan]), np.ones(2))
    with pytest.raises(ValueError, match="the reference gives"):
        timing.relative_error(np.ones(3), np.ones(2))


CASES = """
import os
import jax
import numpy as np
from benchmarks.kernel_cases import Case, Check

def make():
    return (lambda x: x * 2), (jax.random.normal(jax.random.key(3), (8, 16)),)

def broken():
    raise RuntimeError("no room")

def cases(quick):
    def case(name, make=make, **more):
        return Case(name, "row_dot", make, 8 * 16 * 8, 8 * 16, **more)
    return [
        case("broken", broken),
        case("good", reference=lambda x: 2 * np.asarray(x, np.float64), implementation="xla"),
        case("dies", lambda: os._exit(3)),
        case("last"),
    ]

def checks(quick):
    return [Check("sound", lambda: {"passed": True, "runs": 3}), Check("unsound", lambda: {"passed": False})]
"""


def test_benchmark_survives_what_fails(tmp_path: Path) -> None:
    """Guards a run on rented hardware: a case that raises, or ends the process, costs only itself."""
    (tmp_path / "some_cases.py").write_text(CASES)
    command = [sys.executable, "benchmarks/kernels.py", "--module", "some_cases", "--allow-cpu"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "result.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert "RuntimeError: no room" in result["cases"]["row_dot/broken [mosaic_gpu]"]["error"]
    assert "exit code 3" in result["cases"]["row_dot/dies [mosaic_gpu]"]["error"]
    good = result["cases"]["row_dot/good [xla]"]
    assert good["relative_error"] == 0
    assert good["ms"] > 0
    assert good["calls_per_sample"] >= 100
    assert "error" not in result["cases"]["row_dot/last [mosaic_gpu]"]
    assert result["checks"]["some_cases/sound"] == {"passed": True, "runs": 3}
    assert "error" in result["checks"]["some_cases/unsound"]
    assert result["restarts"] == 1
    assert result["ceilings"]["copy_bytes_per_second"] > 0
    assert done.stdout.count("FAILED") == 6  # three failures, as they happen and in the table
