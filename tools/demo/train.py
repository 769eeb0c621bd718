"""Train one phase of the demo model, for a given time, on one device.

    PYTHONPATH=. python tools/demo/train.py --phase p1 --data DATA --seconds 540 --out OUT --keep KEEP
    PYTHONPATH=. python tools/demo/train.py --phase p2 --data DATA --seconds 330 --start KEEP --out OUT2
    PYTHONPATH=. python tools/demo/train.py --phase p3 --data DATA --seconds 200 --start OUT2 --out OUT3
    PYTHONPATH=. python tools/demo/train.py --rehearse --seconds 150 --out OUT

p1: bfloat16, attention to all visible compressed entries, index scores learn that attention. p2: the released
number formats with straight-through gradients, real selection. p3: the draft stages, backbone frozen. DATA is the
folder `tokens` of corpus.py. OUT gets `weights-K.npz` (bfloat16) and `log.jsonl`; KEEP a float32 state to go on from.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

BEGIN = time.perf_counter()

DEFAULT_STEPS = 25
"""Steps of one block of batches."""

EVALUATION_ROWS = 16
SCHEDULES: dict[str, dict[str, float]] = {
    "p1": {"peak": 1.5e-3, "start": 0.0, "end": 0.35, "warm_up": 100},
    "p2": {"peak": 1.5e-3, "start": 0.35, "end": 1.0, "warm_up": 20},
    "p3": {"peak": 1.5e-3, "start": 0.0, "end": 1.0, "warm_up": 40},
}
"""The first two phases share one cosine."""

ROWS = {"p1": 64, "p2": 64, "p3": 64}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=tuple(SCHEDULES), default="p1")
    parser.add_argument("--data", type=Path, help="folder with the token files; without it random tokens are used")
    parser.add_argument("--seconds", type=float, required=True, help="time of the whole command")
    parser.add_argument("--start", type=Path, nargs="+", default=[], help="weight folders; later ones override")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="folder for the float32 state")
    parser.add_argument("--steps", type=int, help="planned steps; default: as many as fit")
    parser.add_argument("--peak", type=float, help="peak learning rate")
    parser.add_argument("--warm-up", type=int, help="steps of linear increase")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--block-steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds kept for evaluation and saving")
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder of compiled programs")
    parser.add_argument("--also", nargs="*", default=[], choices=tuple(SCHEDULES), help="compile these for --cache")
    parser.add_argument(
        "--share", action="append", default=[], metavar="NAME=PERCENT", help="change the share of a text or task"
    )
    parser.add_argument("--rehearse", action="store_true", help="measure all phases on random tokens")
    return parser.parse_args()


def mix_of(changes: list[str]) -> dict[str, float]:
    """Shares of all texts and tasks, with changes "NAME=PERCENT"; what they add up to does not matter."""
    import data

    mix = dict(data.MIX)
    for change in changes:
        name, _, percent = change.partition("=")
        if name not in mix:
            raise ValueError(f"--share {change}: {name!r} is no text and no task; known: {', '.join(mix)}")
        mix[name] = float(percent)
    return mix


def random_blocks(steps: int, rows: int, length: int, vocab: int, seed: int) -> Iterator[Any]:
    """Endless blocks of random tokens in the shapes of real ones."""
    random = np.random.default_rng(seed)
    while True:
        tokens = random.integers(1, vocab, (steps, rows, length + 1)).astype(np.uint16)
        weights = np.where(random.random((steps, rows, 1)) < 0.5, 10, random.choice([1, 10], tokens.shape))
        tokens[:, :, 0], weights[:, :, 0] = 0, 0
        yield tokens, weights.astype(np.uint8)


def heldout_batches(folder: Path, phase: str, length: int) -> dict[str, Any]:
    """Held-out rows of every text; of every task too before the drafts are trained."""
    import data

    names = list(data.TEXTS)
    if phase != "p3":
        names += [name for name in data.TASKS if name != "continue"]
    return {name: data.heldout_block(folder, name, rows=EVALUATION_ROWS, length=length) for name in names}


def load_start(folders: list[Path], config: Any, seed: int, phase: str) -> tuple[dict[str, Any], Any]:
    """(weights, moments or None) from states and weight files."""
    from training import weights as files

    weights = files.initial_weights(config, seed)
    moments = None
    for folder in folders:
        state = files.load_state(folder)
        if state is None:
            weights |= files.load_weights(folder, config)
            continue
        arrays, facts = state
        parts: dict[str, dict[str, Any]] = {"w": {}, "m": {}, "v": {}}
        for name, value in arrays.items():
            part, _, key = name.partition("|")
            parts[part][key] = value
        weights |= parts["w"]
        if (facts["phase"] == "p3") == (phase == "p3"):
            moments = {"m": parts["m"], "v": parts["v"], "step": facts["step"]}
    return weights, moments


def train(arguments: argparse.Namespace) -> None:
    """One phase."""
    import jax
    from training import weights as files
    from training.loop import Log, Phase, Schedule

    from deepinfer_jax.checkpoint.engram_map import token_classes
    from deepinfer_jax.demo import tokenizer_json
    from deepinfer_jax.model.config import ModelConfig

    config = ModelConfig.demo()
    name, rows, length = arguments.phase, arguments.rows or ROWS[arguments.phase], arguments.length
    log = Log(arguments.out / "log.jsonl")
    log.begin = BEGIN
    weights, moments = load_start(arguments.start, config, arguments.seed, name)
    phase = Phase(config, name, weights, token_classes(tokenizer_json()), moments, arguments.anchors)
    log(event="start", phase=name, device=str(jax.devices()[0].device_kind), jax=jax.__version__, resumed=bool(moments))
    source = None
    blocks: Any = random_blocks(arguments.block_steps, rows, length, config.vocab_size, arguments.seed)
    if arguments.data is not None:
        import data

        first = {"p1": 0, "p2": 100_000, "p3": 200_000}[name]
        folder, steps, mix = arguments.data, arguments.block_steps, mix_of(arguments.share)
        source = blocks = data.Prefetch(
            folder, arguments.seed, first, 90_000, steps, rows, arguments.workers, length=length, mix=mix
        )
    try:
        step = phase.compile_step((arguments.block_steps, rows, length + 1))
        log(event="compiled", peak_bytes=memory_use(step))
        evaluate = arguments.data is not None and not arguments.no_evaluation
        heldout = None
        if evaluate and arguments.data is not None:
            phase.compile_evaluation((EVALUATION_ROWS, length + 1))
            heldout = ThreadPoolExecutor(1).submit(heldout_batches, arguments.data, name, length)
        others = [compile_beside(arguments, config, other, weights) for other in arguments.also]
        facts = SCHEDULES[name]
        warm_up = int(facts["warm_up"] if moments or name != "p2" else 3 * facts["warm_up"])
        warm_up = warm_up if arguments.warm_up is None else arguments.warm_up
        schedule = Schedule(arguments.peak or facts["peak"], facts["start"], facts["end"], warm_up, arguments.steps)
        save = functools.partial(save_phase, files, phase, config, arguments.out)

        def save_and_look() -> None:
            save()
            if heldout is not None and heldout.done() and phase.ready:
                report(log, phase, heldout.result(), ("loss", "accuracy", "recall"))

        result = phase.run(
            step, blocks, schedule, log, deadline=BEGIN + arguments.seconds - arguments.reserve, save=save_and_look
        )
        log(event="trained", **result)
        log(event="compiled beside", seconds=[other.result() if other.done() else None for other in others])
    finally:
        if source is not None:
            source.close()
    save()
    if arguments.keep is not None:
        save_state(files, phase, arguments.keep)
    log(event="saved")
    if heldout is not None:
        report(log, phase, heldout.result(), ())
    log(event="end")


def compile_beside(arguments: argparse.Namespace, config: Any, name: str, weights: Any) -> Future[float]:
    """Compile another phase's programs in a thread, for the folder of compiled programs; gives the seconds taken."""
    from training.loop import Phase

    def work() -> float:
        begin = time.perf_counter()
        phase = Phase(config, name, weights, np.zeros(config.vocab_size, np.int32), None, arguments.anchors)
        phase.compile_step((arguments.block_steps, arguments.rows or ROWS[name], arguments.length + 1))
        phase.compile_evaluation((EVALUATION_ROWS, arguments.length + 1))
        phase.wait()
        return time.perf_counter() - begin

    return ThreadPoolExecutor(1).submit(work)


def report(log: Any, phase: Any, batches: dict[str, Any], names: tuple[str, ...]) -> None:
    """Log held-out metrics, all of them or some."""
    for source, metrics in phase.evaluate(batches).items():
        chosen = {name: metrics[name] for name in names if name in metrics} if names else metrics
        log(event="heldout", step=int(phase.state.step), source=source, **chosen)


def memory_use(program: Any) -> int | None:
    """Bytes of temporary memory of a compiled program, if the backend tells."""
    facts = program.memory_analysis()
    return None if facts is None else int(facts.temp_size_in_bytes)


def save_phase(files: Any, phase: Any, config: Any, folder: Path) -> None:
    """Write what the phase trains."""
    files.save_weights(folder, config, phase.weights())


def save_state(files: Any, phase: Any, folder: Path) -> None:
    """Write weights and moments in float32."""
    moments = phase.moments()
    arrays = {f"w|{name}": value for name, value in phase.weights().items()}
    for part in ("m", "v"):
        arrays |= {f"{part}|{name}": value for name, value in moments[part].items()}
    files.save_state(folder, arrays, {"phase": phase.name, "step": moments["step"]})


# ---- rehearsal --------------------------------------------------------------------------------------


def rehearse(arguments: argparse.Namespace) -> None:
    """Compile all phases beside each other, then measure each on random tokens; prints steps that fit a time."""
    import jax
    import jax.numpy as jnp
    from training import weights as files
    from training.loop import Log, Phase

    from deepinfer_jax.checkpoint.engram_map import token_classes
    from deepinfer_jax.demo import tokenizer_json
    from deepinfer_jax.model.config import ModelConfig

    config = ModelConfig.demo()
    log = Log(arguments.out / "rehearsal.jsonl")
    log.begin = BEGIN
    weights = files.initial_weights(config, arguments.seed)
    token_map = token_classes(tokenizer_json())
    log(event="start", device=str(jax.devices()[0].device_kind), jax=jax.__version__)
    shapes = {name: (arguments.block_steps, arguments.rows or ROWS[name], arguments.length + 1) for name in SCHEDULES}

    def prepare(name: str) -> tuple[str, Any, Any]:
        phase = Phase(config, name, weights, token_map, None, arguments.anchors)
        begin = time.perf_counter()
        step = phase.compile_step(shapes[name])
        seconds = time.perf_counter() - begin
        log(event="compiled", phase=name, seconds=seconds, temporary_bytes=memory_use(step))
        return name, phase, step

    with ThreadPoolExecutor(3) as pool:
        programs = [job.result() for job in as_completed([pool.submit(prepare, name) for name in SCHEDULES])]
    for name, phase, step in programs:
        blocks = random_blocks(*shapes[name][:2], arguments.length, config.vocab_size, 0)
        tokens, counts = (jnp.asarray(x) for x in next(blocks))
        seconds: list[float] = []
        metrics: Any = {}
        for index in range(10):
            if time.perf_counter() > BEGIN + arguments.seconds - 5:
                break
            begin = time.perf_counter()
            phase.state, metrics = step(
                phase.state, phase.frozen, phase.token_map, tokens, counts, jnp.int32(index), jnp.float32(1e-4)
            )
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - begin)
        if len(seconds) > 3:
            typical = sorted(seconds[2:])[len(seconds[2:]) // 2]
            speed = shapes[name][1] * arguments.length / typical
            fits = {f"steps_in_{limit}_s": int(limit / typical) for limit in (180, 300, 480)}
            log(event="measured", phase=name, seconds_per_step=typical, tokens_per_second=round(speed), **fits)
            log(event="metrics", phase=name, **metrics)
    if arguments.data is not None:
        import data

        begin = time.perf_counter()
        rows = shapes["p1"][1]
        with data.Prefetch(
            arguments.data, 0, 0, 3, arguments.block_steps, rows, arguments.workers, length=arguments.length
        ) as source:
            next(source)
            first = time.perf_counter() - begin
            next(source)
        both = time.perf_counter() - begin
        count = arguments.block_steps * rows * arguments.length
        log(event="batches", first_block_seconds=first, tokens_per_second=round(count / (both - first)))
    stats = jax.devices()[0].memory_stats() or {}
    log(event="end", peak_bytes_in_use=stats.get("peak_bytes_in_use"))


def main() -> None:
    """Entry point."""
    arguments = parse()
    import jax

    if arguments.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    if arguments.rehearse:
        rehearse(arguments)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
