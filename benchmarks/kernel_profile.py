"""Run cases of benchmarks/kernel_cases once each, for a profiler that waits for its start.

    PYTHONPATH=. ncu --clock-control none --set full --profile-from-start off -o out \\
        python benchmarks/kernel_profile.py mhc_mix 'boundary 4096 rows' 'mhc_mix 64 rows'
    ncu -i out.ncu-rep --page details
    ncu -i out.ncu-rep --page source --csv      # stalls of every instruction

Programs are compiled, and run once, before the profiler starts. Nsight Compute runs a kernel some 40 times for a full
set of figures, with empty caches each time.
"""

from __future__ import annotations

import argparse
import ctypes

import jax

from benchmarks.kernel_cases import case_module
from deepinfer_jax.compile import jit


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("case", nargs="+", help="name of a mosaic_gpu case")
    arguments = parser.parse_args()
    module = case_module(arguments.op)
    if module is None:
        parser.error(f"{arguments.op}: no module in benchmarks/kernel_cases")
    cases = {case.name: case for case in module.cases(False) if case.implementation == "mosaic_gpu"}
    if unknown := [name for name in arguments.case if name not in cases]:
        parser.error(f"{arguments.op} has no case {unknown[0]!r}; it has: {', '.join(cases)}")
    ready = []
    for name in arguments.case:
        function, operands = cases[name].make()
        program = jit(function).lower(*operands).compile()
        jax.block_until_ready(program(*operands))
        ready.append((program, operands))
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    for program, operands in ready:
        jax.block_until_ready(program(*operands))
    driver.cuProfilerStop()


if __name__ == "__main__":
    main()
