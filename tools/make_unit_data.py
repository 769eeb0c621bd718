"""Cut the golden unit vectors to the compressed arrays in `tests/data/units/`.

    python tools/make_unit_data.py FOLDER

FOLDER holds the nine `.safetensors` files of numbers that independent implementations of the published formulas
computed (see `PROVENANCE.md`). Kept as they are: names, shapes, order. Changed:

- storage: bfloat16 becomes uint16 under the name "<key>:bf16"; FP8 codes, e8m0 scales and packed FP4 become uint8;
- `sparse_attn_real`: the float64 result keeps every 4th head, the key-value rows and both queries stay whole;
- `candidate_real`: ranks keep the visible entries only ("ranks_<row>"), so widths are 20000 .. 9 as in the source;
- `mhc`: the float64 copies of coefficients and the unrounded results stay, the float32 coefficients go;
- `rope_real`: the unrounded rotated vectors keep the rotated tail;
- `rmsnorm_eps`: the doubly rounded result of another implementation goes, it is not this project's rule.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "units"
FILES = (
    "quant",
    "gemm",
    "mhc",
    "router",
    "rope_real",
    "engram_hash_real",
    "sparse_attn_real",
    "candidate_real",
    "rmsnorm_eps",
)
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "u1",
    "I8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "BF16": "<u2",
}

Arrays = dict[str, np.ndarray]


def read(path: Path) -> Arrays:
    """All tensors of a safetensors file as plain NumPy arrays; bfloat16 as uint16 under "<key>:bf16"."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        body = file.read()
    arrays = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        name = f"{key}:bf16" if entry["dtype"] == "BF16" else key
        arrays[name] = np.frombuffer(body[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def cut(name: str, arrays: Arrays) -> Arrays:
    """The parts of one file that the tests use."""
    if name == "sparse_attn_real":
        return arrays | {"out_f64_as_f32": arrays["out_f64_as_f32"][:, ::4]}
    if name == "candidate_real":
        rows = {}
        for i, count in enumerate(arrays["visible"]):
            for source in ("rank_source", "rank_consumer"):
                rows[f"{source}_{i}"] = arrays[source][i, :count]
        return rows | {key: arrays[key] for key in ("visible", "topk_consumer", "mask_packed")}
    if name == "rope_real":
        return arrays | {"rope_compress_f32": arrays["rope_compress_f32"][..., -64:]}
    dropped = {"mhc": ("pre", "post", "comb"), "rmsnorm_eps": ("hf_bf16_double_rounded:bf16",)}
    return {key: value for key, value in arrays.items() if key not in dropped.get(name, ())}


def main(arguments: list[str]) -> int:
    """Write one .npz per file; prints the sizes."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    OUTPUT.mkdir(parents=True, exist_ok=True)
    total = 0
    for name in FILES:
        target = OUTPUT / f"{name}.npz"
        arrays: dict[str, Any] = cut(name, read(Path(arguments[0]) / f"{name}.safetensors"))
        np.savez_compressed(target, **arrays)
        total += target.stat().st_size
        print(f"{target.name:24} {target.stat().st_size:9} bytes")
    print(f"{'all':24} {total:9} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
