"""Time and check the kernels on a GPU.

    PYTHONPATH=. python benchmarks/kernels.py [--quick] [--op OP ...] [--json FILE] [--seconds LIMIT]

Runs every op's checks and cases (benchmarks/kernel_cases/) and the ceilings of the device, and prints a table.
A case that fails is reported and the next one runs; one that breaks the device or hangs costs its process, and
a new process goes on after it. Exit status 1 if anything failed.

Times are medians of at least 5 samples of at least 100 calls inside one compiled loop, after a warm-up, over
copies of the arguments that together exceed the second-level cache. Percentages are of the larger of what this
device reached in the same run and, on an H200, `H200_BYTES_PER_SECOND` and `H200_BF16_FLOP_PER_SECOND`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# What a kernel may be compared with even if this run's own ceiling comes out lower.
H200_BYTES_PER_SECOND = 4.26e12
H200_BF16_FLOP_PER_SECOND = 775e12

PROJECT_IMPLEMENTATIONS = ("mosaic_gpu", "xla")
"""Compiled with the project's compiler options."""

BASELINES = ("row_tile=None", "ragged_dot")
"""Compiled with XLA's own options."""

STARTUP_SECONDS = 180
"""How long a worker may take to say anything at first: it loads jax and the device."""


# ---- the worker: everything that touches the device -----------------------------------------------


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]


def facts() -> dict[str, Any]:
    """Device, versions and date of this run."""
    import jax

    device = jax.devices()[0]
    installed = {item.name for item in importlib.metadata.distributions()}
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages if name in installed}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": driver_version(),
        "python": platform.python_version(),
        "versions": versions,
    }


def best(ceilings: dict[str, Any] | None, device: str) -> tuple[float, float]:
    """(bytes, bfloat16 FLOP) a second that percentages are of; 0 = unknown."""
    known = (H200_BYTES_PER_SECOND, H200_BF16_FLOP_PER_SECOND) if "H200" in device else (0.0, 0.0)
    if ceilings is None:
        return known
    return max(known[0], ceilings["copy_bytes_per_second"]), max(known[1], ceilings["bf16_flop_per_second"])


def shares(case: Any, figures: dict[str, Any], limits: tuple[float, float]) -> dict[str, Any]:
    """Figures with bytes, FLOP and their shares of what the device can do."""
    seconds = figures["ms"] * 1e-3
    found = figures | {"bytes": case.bytes, "flop": case.flop}
    for name, amount, limit in (("bytes", case.bytes, limits[0]), ("flop", case.flop, limits[1])):
        found[f"{name}_per_second"] = amount / seconds
        found[f"{name}_share"] = amount / seconds / limit if limit else None
    return found


def prepare_case(case: Any) -> tuple[Any, dict[str, Any]]:
    """A case of JAX ready to be measured, and its error."""
    from benchmarks.kernel_timing import prepare, relative_error

    if case.implementation not in (*PROJECT_IMPLEMENTATIONS, *BASELINES):
        raise ValueError(f"{case.key}: a case of another library needs a timer")
    function, arguments = case.make()
    prepared = prepare(function, arguments, case.implementation in PROJECT_IMPLEMENTATIONS)
    if case.reference is None:
        return prepared, {}
    return prepared, {"relative_error": relative_error(prepared.result, case.reference(*arguments))}


def run_case(case: Any, limits: tuple[float, float]) -> dict[str, Any]:
    """All figures of one case."""
    if case.timer is None:
        prepared, error = prepare_case(case)
        return shares(case, prepared.measure(), limits) | error
    from benchmarks.kernel_timing import relative_error

    function, arguments = case.make()
    figures, result = case.timer(function, arguments)
    found = shares(case, figures, limits)
    if case.reference is not None:
        found["relative_error"] = relative_error(result, case.reference(*arguments))
    return found


def run_check(check: Any) -> dict[str, Any]:
    """What a check found."""
    found = check.run()
    if not isinstance(found.get("passed"), bool):
        raise TypeError(f'check {check.name!r} returned no "passed": {found}')
    return found | ({} if found["passed"] else {"error": "the check did not pass"})


def work_list(
    ops: Sequence[str], modules: Sequence[str], quick: bool
) -> tuple[list[tuple[str, Callable[..., Any], Any]], dict[str, str]]:
    """(name, how to run it, what) of the checks, then of the cases; and ops that gave none, with the reason.

    modules: names of modules to take besides those of the ops.
    """
    from benchmarks.kernel_cases import case_module

    checks: dict[str, tuple[str, Callable[..., Any], Any]] = {}
    cases: dict[str, tuple[str, Callable[..., Any], Any]] = {}
    without: dict[str, str] = {}
    for source in (*ops, *modules):
        try:
            module = importlib.import_module(source) if source in modules else case_module(source)
            if module is None:
                without[source] = "no module in benchmarks/kernel_cases"
                continue
            for check in module.checks(quick) if hasattr(module, "checks") else []:
                name = f"check {source}/{check.name}"
                checks[_new(name, checks)] = (name, run_check, check)
            for case in module.cases(quick):
                cases[_new(case.key, cases)] = (case.key, run_case, case)
        except Exception:  # noqa: BLE001 - one op's broken module must not cost the others their run
            without[source] = traceback.format_exc()
    return [*checks.values(), *cases.values()], without


def _new(name: str, known: dict[str, Any]) -> str:
    if name in known:
        raise ValueError(f"two cases are called {name!r}")
    return name


def device_works() -> bool:
    """Whether the device still computes: some errors end the process's use of it."""
    import jax
    import jax.numpy as jnp

    try:
        return int(jax.block_until_ready(jnp.arange(4).sum())) == 6
    except Exception:  # noqa: BLE001 - whatever is raised here, this process can no longer measure
        return False


def worker(link: Connection, options: dict[str, Any], done: frozenset[str]) -> None:
    """Run what is not done, one message per event: ("facts" | "without" | "ceilings" | "start" | "result", value)."""
    import jax

    if jax.default_backend() == "cpu" and not options["allow_cpu"]:
        link.send(("fatal", "no GPU: jax runs on the CPU (--allow-cpu tries the program itself there)"))
        return
    from benchmarks.kernel_timing import ceilings
    from deepinfer_jax.kernels.dispatch import OPS

    about = facts()
    link.send(("facts", about))
    measured = options["ceilings"]
    if measured is None and "ceilings" not in done:
        link.send(("start", "ceilings"))
        sizes = {"elements": 1 << 16, "matrix": 64} if jax.default_backend() == "cpu" else {}
        measured = ceilings(**sizes)
        link.send(("ceilings", measured))
    limits = best(measured, about["device"])
    ops = options["ops"] or (() if options["modules"] else OPS)
    work, without = work_list(ops, options["modules"], options["quick"])
    link.send(("without", without))
    for name, run, what in work:
        if name in done:
            continue
        if time.time() > options["deadline"]:
            link.send(("result", (name, {"skipped": "no time left"})))
            continue
        link.send(("start", name))
        try:
            found = run(what, limits) if run is run_case else run(what)
        except Exception as failure:  # noqa: BLE001 - the failure is the result
            traceback.print_exc()
            found = {"error": f"{type(failure).__name__}: {failure}"[:4000]}
        gc.collect()  # arrays in reference cycles would stay on the device
        link.send(("result", (name, found)))
        if "error" in found and not device_works():
            link.send(("broken", name))
            return
    link.send(("end", None))


# ---- the supervisor: no device, so that nothing can stop it ----------------------------------------


class Supervisor:
    """Starts workers until everything is done, and writes what they find."""

    def __init__(self, options: dict[str, Any], file: Path | None, case_seconds: float) -> None:
        self.options, self.file, self.case_seconds = options, file, case_seconds
        self.result: dict[str, Any] = {"options": {k: options[k] for k in ("quick", "ops", "modules")}, "restarts": 0}
        self.result |= {"checks": {}, "cases": {}}

    def save(self) -> None:
        """Write everything found so far."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.result, indent=1) + "\n")

    def record(self, name: str, found: dict[str, Any]) -> None:
        """Keep and show one result."""
        kind = "checks" if name.startswith("check ") else "cases"
        self.result[kind][name.removeprefix("check ")] = found
        print(line(name, found), flush=True)
        self.save()

    def done(self) -> frozenset[str]:
        """Names that a worker need not run again."""
        ended = {f"check {name}" for name in self.result["checks"]} | set(self.result["cases"])
        return frozenset(ended | ({"ceilings"} if "ceilings_error" in self.result else set()))

    def run(self) -> int:
        """Run all; exit status."""
        ended = -1
        while not self._one_worker():
            if len(self.done()) == ended:
                self.result["fatal"] = "a new process got no further"
                break
            ended = len(self.done())
            self.result["restarts"] += 1
        self.save()
        print(summary(self.result))
        found = [*self.result["checks"].values(), *self.result["cases"].values()]
        failed = "fatal" in self.result or "ceilings_error" in self.result or any("error" in f for f in found)
        broken = any(reason.startswith("Traceback") for reason in self.result.get("without", {}).values())
        return int(failed or broken)

    def _one_worker(self) -> bool:
        """Whether nothing is left to do. A started piece that never ended gets an error as its result."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        options = self.options | {"ceilings": self.result.get("ceilings")}
        process = context.Process(target=worker, args=(theirs, options, self.done()))
        process.start()
        theirs.close()
        running, complete, limit = None, False, float(STARTUP_SECONDS)
        try:
            while ours.poll(limit):
                kind, value = ours.recv()
                if kind == "start":
                    running, limit = value, self.case_seconds
                elif kind == "result":
                    running = None
                    self.record(*value)
                elif kind in ("end", "fatal"):
                    complete = True
                    if kind == "fatal":
                        self.result["fatal"] = value
                elif kind != "broken":
                    running = None
                    self.result |= value if kind == "facts" else {kind: value}
            else:
                self._lost(running, f"nothing happened for {limit:.0f} s; the process was killed")
        except EOFError:
            process.join(10)
            if running is not None:
                self._lost(running, f"the process ended with exit code {process.exitcode}")
        finally:
            process.kill()
            process.join()
        return complete

    def _lost(self, running: str | None, reason: str) -> None:
        if running == "ceilings":
            self.result["ceilings_error"] = reason
        elif running is not None:
            self.record(running, {"error": reason})


def line(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in found:
        return f"{name:64} FAILED {found['error'].strip().splitlines()[0][:160]}"
    if "skipped" in found:
        return f"{name:64} not run: {found['skipped']}"
    if "ms" not in found:
        rest = {key: value for key, value in found.items() if key != "passed"}
        return f"{name:64} passed {json.dumps(rest)[:160]}"

    def share(value: float | None) -> str:
        return "    -" if value is None else f"{100 * value:4.0f}%"

    error = f"{found['relative_error']:.1e}" if "relative_error" in found else "-"
    return (
        f"{name:64} {found['ms']:9.4f} ms {found['bytes_per_second'] / 1e9:7.0f} GB/s {share(found['bytes_share'])}"
        f" {found['flop_per_second'] / 1e12:7.1f} TFLOP/s {share(found['flop_share'])} error {error}"
    )


def summary(result: dict[str, Any]) -> str:
    """The table of everything."""
    lines = ["", f"== {result.get('device')}, driver {result.get('driver')}, {result.get('versions')}"]
    if (ceilings := result.get("ceilings")) is not None:
        lines.append(
            f"ceilings: copy {ceilings['copy_bytes_per_second'] / 1e12:.3f} TB/s, "
            f"bfloat16 product {ceilings['bf16_flop_per_second'] / 1e12:.0f} TFLOP/s"
        )
    lines += [line(f"check {name}", found) for name, found in result["checks"].items()]
    lines += [line(name, found) for name, found in result["cases"].items()]
    lines += [f"{op}: {reason.strip().splitlines()[-1]}" for op, reason in result.get("without", {}).items()]
    lines += [f"{key}: {result[key]}" for key in ("fatal", "ceilings_error") if key in result]
    if result["restarts"]:
        lines.append(f"{result['restarts']} times a new process went on")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and checks")
    parser.add_argument("--op", nargs="+", action="extend", metavar="OP", help="only these ops")
    parser.add_argument("--module", action="append", help="a module of cases of your own; without --op only that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case starts after so many seconds")
    parser.add_argument("--case-seconds", type=float, default=120, help="a case that takes longer is given up")
    parser.add_argument("--allow-cpu", action="store_true", help="try this program itself, without a GPU")
    arguments = parser.parse_args(argv)
    # Other libraries may be compared in the same process: JAX takes memory as it needs it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = {
        "quick": arguments.quick,
        "ops": tuple(arguments.op or ()),
        "modules": tuple(arguments.module or ()),
        "allow_cpu": arguments.allow_cpu,
        "deadline": start + arguments.seconds,
    }
    return Supervisor(options, arguments.json, arguments.case_seconds).run()


if __name__ == "__main__":
    sys.exit(main())
