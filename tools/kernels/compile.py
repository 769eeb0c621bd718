"""Compile every kernel to machine code on a machine without a GPU.

    python tools/kernels/compile.py --target h200 [--target b200] [--op OP] [--case TEXT] [--sass] [--json FILE]
    python tools/kernels/compile.py --target h200 --fast [--most N]

Needs jax with its CUDA 13 plugin and a ptxas (package nvidia-cuda-nvcc, or a CUDA toolkit); --sass needs
nvdisasm too. Prints registers, spills and shared memory of each kernel. Exit status 1 if a program does not
compile, spills registers, needs more shared memory than a block may have, or holds no Mosaic kernel.
With --fast nothing is written to disk, which large kernels feel, and shared memory is not reported (a kernel that
needs too much does not compile). A case whose kernels were all compiled for an earlier one shows none.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).resolve().parent / "targets"

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class KernelFacts:
    """What ptxas says of one kernel. spill_bytes: stores and loads; shared_bytes, tensor_memory_columns: scratch
    asked for, None if not known."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int | None = None
    tensor_memory_columns: int | None = None


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """Outcome of one program; error is None if it may be used. reused: kernels that an earlier case compiled."""

    op: str
    name: str
    seconds: float
    kernels: tuple[KernelFacts, ...] = ()
    reused: int = 0
    error: str | None = None


def tool_folder() -> Path | None:
    """Folder of ptxas and nvdisasm in this environment's packages, None if it has none."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/ptxas"))
    return found[-1].parent if found else None


def printed_facts(text: str) -> list[KernelFacts]:
    """Facts of all kernels in ptxas' output."""
    found = [
        KernelFacts(match["name"], int(match["registers"]), int(match["stores"]) + int(match["loads"]))
        for match in _KERNEL.finditer(text)
    ]
    if len(found) != text.count("Compiling entry function"):
        raise ValueError(f"ptxas' output is not as expected: {text[-2000:]}")
    return found


def dumped_facts(folder: Path) -> list[KernelFacts]:
    """Facts of all kernels that were dumped into `folder`."""
    facts = []
    for file in sorted(folder.glob("*.ptxas")):
        (kernel,) = printed_facts(file.read_text())
        resources = file.with_suffix(".resources.txt")
        used = resources.read_text() if resources.exists() else ""

        def amount(name: str, used: str = used) -> int:
            number = re.search(rf"\b{name}=(\d+)", used)
            return int(number.group(1)) if number else 0

        columns = amount("tmem_scratch_cols") + amount("tmem_collective_scratch_cols")
        shared = amount("smem_scratch_bytes")
        facts.append(dataclasses.replace(kernel, shared_bytes=shared, tensor_memory_columns=columns))
    return facts


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], str]]:
    """Collect what this process prints to its standard output, compilers' C++ included; yields a reader of it."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", errors="replace") as file:

        def read() -> str:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
            file.seek(0)
            return file.read()

        os.dup2(file.fileno(), 1)
        try:
            yield read
        finally:
            read()
            os.dup2(kept, 1)
            os.close(kept)


def problem(kernels: Sequence[KernelFacts], calls: int, shared_limit: int) -> str | None:
    """Why a compiled program may not be used: `calls` is how many Mosaic kernels it calls."""
    if calls == 0:
        return "no Mosaic kernel in the program"
    for kernel in kernels:
        if kernel.spill_bytes:
            return f"{kernel.name}: {kernel.spill_bytes} bytes of registers spilled"
        if kernel.shared_bytes is not None and kernel.shared_bytes > shared_limit:
            return f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory; a block has {shared_limit}"
    return None


def shared_memory_limit(description: str) -> int:
    """Shared memory that a block of the described GPU may ask for, in bytes."""
    found = re.search(r"shared_memory_per_block_optin: (\d+)", description)
    if found is None:
        raise ValueError("the target's description does not name shared_memory_per_block_optin")
    return int(found.group(1))


class Compiler:
    """Compiles programs for one target. One per process: XLA keeps the first architecture it meets."""

    def __init__(self, target: str, *, fast: bool = False, sass: bool = False) -> None:
        """fast: read ptxas' output only. sass: print the machine code."""
        self._folder = tempfile.TemporaryDirectory(prefix="kernels-")
        # Mosaic reads these at each compilation. With a folder it dumps everything it has.
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        if not fast:
            os.environ["MOSAIC_GPU_DUMP_TO"] = self._folder.name
        if (tools := tool_folder()) is not None:
            os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"

        import jax
        from jax.experimental import topologies
        from jax.sharding import SingleDeviceSharding

        description = (TARGETS / f"{target}.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=target, target_config=description, topology="1x1x1"
        )
        self._jax, self._fast, self._sass = jax, fast, sass
        self._device = topology.devices[0]
        self._sharding = SingleDeviceSharding(self._device)
        self._shared_limit = shared_memory_limit(description)

    def compile(self, case: Any) -> CaseResult:
        """Compile one case and read what was dumped; the dump is deleted."""
        from deepinfer_jax.compile import jit

        jax, folder = self._jax, Path(self._folder.name)
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding), case.arguments
        )
        start = time.perf_counter()
        try:
            # The default device is what tells kernels their architecture and number of cores.
            with jax.default_device(self._device), captured_output() as printed:
                lowered = jit(case.function, platform="cuda").trace(*arguments).lower(lowering_platforms=("cuda",))
                program = lowered.compile().as_text()
                kernels = printed_facts(printed()) if self._fast else dumped_facts(folder)
            calls = program.count('custom_call_target="mosaic_gpu')
            error = problem(kernels, calls, self._shared_limit)
        except Exception as failure:  # noqa: BLE001 - whatever stops a compilation is this case's result
            traceback.print_exc()
            kernels, calls, error = [], 0, f"{type(failure).__name__}: {failure}"
        seconds = time.perf_counter() - start
        for file in sorted(folder.iterdir()):
            if self._sass and file.suffix in (".sass", ".sass_ctrl"):
                print(f"---- {case.op} {case.name}: {file.name}\n{file.read_text()}")
            file.unlink()
        return CaseResult(case.op, case.name, seconds, tuple(kernels), max(0, calls - len(kernels)), error)


def table(results: Sequence[CaseResult]) -> str:
    """One line per kernel, one more per failure."""
    lines = [f"{'case':48} {'kernel':32} {'regs':>5} {'spill':>6} {'smem':>7} {'tmem':>5} {'s':>6}"]
    for result in results:
        case = f"{result.op} {result.name}"
        if not result.kernels and result.error is None:
            lines.append(f"{case:48} {'(kernels of an earlier case)':32} {'':26} {result.seconds:6.1f}")
        for number, k in enumerate(result.kernels):
            seconds = f"{result.seconds:6.1f}" if number == 0 else ""
            name = k.name.removesuffix("_mosaic_gpu_kernel")
            shared, columns = ("-" if x is None else x for x in (k.shared_bytes, k.tensor_memory_columns))
            lines.append(
                f"{case if number == 0 else '':48} {name:32} {k.registers:5} {k.spill_bytes:6} {shared:>7}"
                f" {columns:>5} {seconds}"
            )
        if result.error is not None:
            lines.append(f"FAILED {case}: {result.error}")
    return "\n".join(lines)


def some_of_each(cases: Sequence[Any], most: int | None) -> list[Any]:
    """At most `most` cases of each op (None: all): the first, the last and evenly spaced ones between."""
    if most is None:
        return list(cases)
    by_op: dict[str, list[Any]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    chosen = []
    for some in by_op.values():
        count = min(most, len(some))
        chosen += [some[round(i * (len(some) - 1) / max(1, count - 1))] for i in range(count)]
    return chosen


def compile_target(target: Any, arguments: argparse.Namespace) -> int:
    """Compile the wanted cases for one target in this process; returns the exit status."""
    from cases import compile_cases

    cases, without = compile_cases(target, arguments.op, arguments.case, arguments.module or ())
    listed = len(cases)
    cases = some_of_each(cases, arguments.most)
    compiler = Compiler(target, fast=arguments.fast, sass=arguments.sass)
    results = []
    for case in cases:
        print(f"{target}: {case.op} {case.name}", file=sys.stderr, flush=True)
        results.append(compiler.compile(case))
    print(f"== {target}\n{table(results)}")
    if without:
        print(f"no cases for {target}: {', '.join(without)}")
    failed = sum(result.error is not None for result in results)
    print(f"{target}: {len(results) - failed} of {len(results)} programs good; {listed - len(results)} not tried")
    if arguments.json:
        document = {"target": target, "without": without, "results": [dataclasses.asdict(r) for r in results]}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return int(failed > 0 or not results)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    known = sorted(file.stem for file in TARGETS.glob("*.txtpb"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=known, required=True, help="may be given twice")
    parser.add_argument("--op", action="append", help="only this op; may be given several times")
    parser.add_argument("--case", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--module", action="append", help="a module of cases of your own; without --op only that")
    parser.add_argument("--most", type=int, metavar="N", help="at most N cases of each op, evenly spaced")
    parser.add_argument("--fast", action="store_true", help="registers and spills only, nothing written to disk")
    parser.add_argument("--sass", action="store_true", help="print the machine code; not with --fast")
    parser.add_argument("--json", metavar="FILE", help="write the results; one target only")
    arguments = parser.parse_args(argv)
    if arguments.fast and arguments.sass:
        parser.error("--sass does not go with --fast")
    if arguments.most is not None and arguments.most < 1:
        parser.error("--most takes 1 or more")
    # Read when jax and its plugin are loaded: a topology needs no driver, and the CPU backend asks for none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    targets = list(dict.fromkeys(arguments.target))
    if len(targets) == 1:
        return compile_target(targets[0], arguments)
    if arguments.json:
        parser.error("--json takes one --target")
    rest = [f"--op={op}" for op in arguments.op or ()]
    rest += [f"--module={module}" for module in arguments.module or ()]
    rest += [f"--case={arguments.case}"] if arguments.case else []
    rest += [f"--most={arguments.most}"] if arguments.most else []
    rest += [f"--{name}" for name in ("fast", "sass") if getattr(arguments, name)]
    running = [  # one process each
        subprocess.Popen([sys.executable, __file__, f"--target={target}", *rest], stdout=subprocess.PIPE, text=True)
        for target in targets
    ]
    status = 0
    for process in running:
        text, _ = process.communicate()
        print(text, end="", flush=True)
        status |= int(process.returncode != 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
