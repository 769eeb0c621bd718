"""Cut the golden models and results to `tests/data/golden/`.

    python tools/make_golden_data.py FOLDER

FOLDER holds one folder per tiny random model with its checkpoint and `golden_<mode>.safetensors`: results that
independent implementations of the published description computed (see `PROVENANCE.md`). Checkpoints are copied as
they are. Of the results the tests keep, under the names of the source:

- all integer decisions of the prompts p1, p7, p33 and p64: experts, selections, candidates, Engram rows, greedy ids;
- logits of every position of p1, p7 and p33; of p64 every 4th position and the last ("p64/logit_rows");
- greedy logits of three steps ("<prompt>/greedy_rows");
- residual streams of the rows named in "<prompt>/stream_rows", collapse weights `pre` of all rows;
- cache contents of p7 and p33 (`f32_noq`: window keys of p7 only);
- mode `f32_allq`: p1 and p7; mode `ref_bf16`: p1, p7 and p33, the latter two with the streams of every row where the
  source has them, so that each layer can be run from its recorded input.

bfloat16 is stored as uint16 under "<key>:bf16"; so are quantised cache contents, which bfloat16 holds exactly.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from make_unit_data import Arrays, read

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "golden"
MODELS = ("g1_attn", "g2_engram", "g3_full")
MODES = ("f32_noq", "f32_kvq", "f32_allq", "ref_bf16")
PROMPTS = ("p1", "p7", "p33", "p64")
GREEDY_ROWS = (0, 11, 23)
LIMIT = 14_500_000

KEPT = (
    "input_ids",
    "router_idx",
    "router_w",
    "index_topk",
    "cand_mask",
    "engram_hash",
    "engram_gate",
    "pre",
    "greedy_ids",
)
GAPS = ("index_gap", "cand_gap")
CACHES = ("window_kv", "ckv", "ik")
DRAFT = ("draft_ids", "anchor_pos", "greedy_ids", "confidence_raw", "hidden", "main_x", "taps", "logits", "base_logits")


def exact_bfloat16(values: np.ndarray) -> np.ndarray:
    """Upper halves of float32 values that bfloat16 holds exactly."""
    bits = values.view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError("values do not fit bfloat16")
    return (bits >> 16).astype(np.uint16)


def small(values: np.ndarray) -> np.ndarray:
    """Integers in the narrowest type that holds them."""
    if values.dtype.kind not in "iu" or values.size == 0:
        return values
    for dtype in (np.int8, np.int16):
        if values.min() >= np.iinfo(dtype).min and values.max() <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values


def some_rows(mode: str, prompt: str, rows: np.ndarray) -> np.ndarray:
    """Places in `stream_rows` that stay."""
    if mode == "ref_bf16" or prompt == "p1" or (mode, prompt) == ("f32_allq", "p7"):
        return np.arange(len(rows))
    return np.array([len(rows) // 3, 2 * len(rows) // 3, len(rows) - 1])


def cut_prompt(mode: str, prompt: str, arrays: Arrays) -> Arrays:
    """The kept results of one prompt, keys without the prompt."""
    kept: Arrays = {}
    # A layer can be run from its recorded input when the input of every row is recorded.
    by_layer = len(arrays.get("stream_rows", ())) == len(arrays["input_ids"]) and prompt != "p1"
    for key, values in arrays.items():
        stem = key.split("/")[0].removesuffix(":bf16")
        if stem in KEPT or stem.startswith("open_") or (mode == "ref_bf16" and stem in GAPS):
            kept[key] = values
        elif stem == "streams" and (mode != "ref_bf16" or by_layer):
            places = some_rows(mode, prompt, arrays["stream_rows"])
            kept |= {key: values[:, places], "stream_rows": arrays["stream_rows"][places]}
        elif stem in CACHES and mode == "f32_noq":
            if stem != "window_kv" or prompt == "p7":
                kept[key] = values
        elif stem in CACHES and (mode != "ref_bf16" or by_layer):
            kept |= {key: values} if key.endswith(":bf16") else {f"{key}:bf16": exact_bfloat16(values)}
        elif stem == "logits" and prompt == "p64":
            rows = np.unique([*range(0, len(values), 4), len(values) - 1])
            kept |= {"logits": values[rows], "logit_rows": rows}
        elif stem == "greedy_logits" and mode in ("f32_noq", "f32_kvq"):
            kept |= {"greedy_logits": values[list(GREEDY_ROWS)], "greedy_rows": np.array(GREEDY_ROWS)}
        elif stem == "logits":
            kept[key] = values
    return kept


def cut_mode(mode: str, arrays: Arrays) -> Arrays:
    """The kept results of one mode."""
    prompts = {"ref_bf16": ("p1", "p7", "p33"), "f32_allq": ("p1", "p7")}.get(mode, PROMPTS)
    result: Arrays = {}
    for prompt in prompts:
        inside = {
            key.removeprefix(f"{prompt}/"): value for key, value in arrays.items() if key.startswith(f"{prompt}/")
        }
        result |= {f"{prompt}/{key}": small(value) for key, value in cut_prompt(mode, prompt, inside).items()}
    return result


def cut_draft(arrays: Arrays) -> Arrays:
    """Draft results: modes `f32_noq` and `f32_kvq` with logits of the first two steps, and bfloat16 p7."""
    result: Arrays = {}
    for key, values in arrays.items():
        mode, *rest = key.split("/")
        if rest == ["input_ids"]:
            result[key] = small(values)
        elif mode in ("f32_noq", "f32_kvq") and rest[-1] in DRAFT:
            result[key] = small(values[:2] if "logits" in rest[-1] else values)
        elif mode == "ref_bf16" and rest[0] == "p7" and rest[1].split(":")[0] in ("draft_ids", "hidden"):
            result[key] = small(values)
    return result


def write(target: Path, arrays: Arrays) -> None:
    np.savez_compressed(target, **arrays)  # type: ignore[arg-type]


def cut_model(source: Path, target: Path) -> None:
    """Checkpoint, results and noise floors of one model."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "engram_token_map.npy"):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    for mode in MODES:
        path = source / f"golden_{mode}.safetensors"
        if path.exists():
            write(target / f"{mode}.npz", cut_mode(mode, read(path)))
    for name, cut in (("dspark", cut_draft), ("image_mask", lambda arrays: {k: small(v) for k, v in arrays.items()})):
        path = source / f"golden_{name}.safetensors"
        if path.exists():
            write(target / f"{name}.npz", cut(read(path)))
    floors = json.loads((source / "layerwise_noise.json").read_text())["ref_bf16"]
    fields = ("layer", "rel_err_median", "rel_err_max_all", "exact_rows", "pre_max")
    kept = [{field: floor[field] for field in fields} for floor in floors]
    (target / "layerwise_noise.json").write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Write everything; prints the sizes. Fails when the result is larger than the repository should carry."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    source = Path(arguments[0])
    for model in MODELS:
        cut_model(source / model, OUTPUT / model)
    mutations = json.loads((source / "mutations.json").read_text())["g1_attn"]
    changes = {name: change["max"] for name, change in mutations.items()}
    (OUTPUT / "mutations.json").write_text(json.dumps(changes, indent=1) + "\n")
    total = 0
    for path in sorted(OUTPUT.rglob("*")):
        if path.is_file():
            total += path.stat().st_size
            print(f"{path.relative_to(OUTPUT)!s:34} {path.stat().st_size:9} bytes")
    print(f"{'all':34} {total:9} bytes")
    return 0 if total <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
