"""Kernel checks and timings with compilation spread over processes, for a GPU machine that is held for minutes.

    PYTHONPATH=. python benchmarks/kernels_parallel.py PLAN.json OUT.json --seconds 300 [--wait-for FILE]

PLAN.json is a list of jobs, one process each: ["check", OP, "PART|PART"] runs the checks whose names hold one of the
parts ("*": all); ["time", OP, "CASE@IMPLEMENTATION|..."] times cases of benchmarks/kernel_cases. Checks run at once.
Timings start when every process has made the arguments of all its cases, compiled and run them once, no check is left,
and FILE exists if one is named; then one case at a time has the device for itself. Results are as those of
benchmarks/kernels.py. All processes share the device's memory, which is not preallocated.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def job_checks(op: str, wanted: str, write: Any) -> None:
    """Run an op's checks."""
    from benchmarks.kernel_cases import case_module
    from benchmarks.kernels import run_check

    module = case_module(op)
    if module is None:
        raise ValueError(f"{op}: no module in benchmarks/kernel_cases")
    for check in module.checks(True):
        if wanted == "*" or any(part in check.name for part in wanted.split("|")):
            begin = time.time()
            try:
                found = run_check(check)
            except Exception as failure:  # noqa: BLE001 - the failure is the result
                found = {"error": f"{type(failure).__name__}: {failure}"[:600]}
            write({"op": op, "check": check.name, "seconds": round(time.time() - begin, 1), **found})


def job_times(op: str, wanted: str, folder: Path, number: str, write: Any) -> None:
    """Time cases, one at a time among all processes."""
    from benchmarks.kernel_cases import case_module
    from benchmarks.kernels import H200_BF16_FLOP_PER_SECOND, H200_BYTES_PER_SECOND, prepare_case, shares

    module = case_module(op)
    if module is None:
        raise ValueError(f"{op}: no module in benchmarks/kernel_cases")
    cases = {f"{case.name}@{case.implementation}": case for case in module.cases(False)}
    ready: dict[str, Any] = {}
    for name in wanted.split("|"):
        try:
            ready[name] = prepare_case(cases[name])
        except Exception as failure:  # noqa: BLE001 - the failure is the result
            write({"op": op, "case": name, "error": f"{type(failure).__name__}: {failure}"[:600]})
    (folder / f"{number}.ready").touch()
    while not (folder / "start").exists():
        time.sleep(0.2)
    for name, (prepared, error) in ready.items():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            figures = prepared.measure()
        row = shares(cases[name], figures, (H200_BYTES_PER_SECOND, H200_BF16_FLOP_PER_SECOND))
        write({"op": op, "case": name, **row, **error})


def child(kind: str, op: str, wanted: str, folder: str, number: str) -> None:
    """One job; its results go to a file of its own, a line each."""
    path = Path(folder) / f"{number}.jsonl"

    def write(row: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "ms_samples"})[:400], flush=True)

    if kind == "check":
        job_checks(op, wanted, write)
    else:
        job_times(op, wanted, Path(folder), number, write)


def main() -> None:
    """Start all jobs, wait, gather."""
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="then everything is stopped")
    parser.add_argument("--wait-for", default="", metavar="FILE", help="timings start when it exists")
    arguments = parser.parse_args()
    jobs = json.loads(arguments.plan.read_text())
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child"]
        processes = [
            subprocess.Popen([*command, *job, folder, str(number)], env=environment) for number, job in enumerate(jobs)
        ]
        end = time.time() + arguments.seconds
        while time.time() < end and any(process.poll() is None for process in processes):
            waiting = (
                process.poll() is None and not (Path(folder) / f"{number}.ready").exists()
                for number, process in enumerate(processes)
            )
            if not any(waiting) and (not arguments.wait_for or Path(arguments.wait_for).exists()):
                (Path(folder) / "start").touch()
            time.sleep(0.2)
        for process in processes:
            process.kill()
            process.wait()
        files = sorted(Path(folder).glob("*.jsonl"), key=lambda path: int(path.stem))
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
