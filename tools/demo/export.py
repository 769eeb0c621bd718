"""Write trained weights as a checkpoint folder of the released format.

    PYTHONPATH=. python tools/demo/export.py OUT2 OUT3 --out FOLDER

The weight folders are those of train.py; later ones override, and what none of them holds has its initial values.
Weights are rounded to bfloat16, then to their storage: FP8 with 32x32 blocks, FP4 for experts, FP8 rows for Engram
tables. Images are routed with the bias of text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from training.weights import full_shape, initial_weights, load_weights

from deepinfer_jax.checkpoint.engram_map import token_classes
from deepinfer_jax.checkpoint.writer import save_checkpoint
from deepinfer_jax.demo import tokenizer_json
from deepinfer_jax.model.config import ModelConfig
from deepinfer_jax.model.init import quantize_weight
from deepinfer_jax.model.params import Parameter, Params, build_params

SEED = 20261130
LIMIT_BYTES = 16_000_000
"""Largest size of the weight file."""

_NOTICE = """Weights of the demo model of deepinfer_jax
==========================================

The weights in this folder were trained for deepinfer_jax from random initial values, and are available under the
Apache License 2.0 like the rest of the project. Texts that they learned from:

- in the public domain: novels of Jane Austen; Moby-Dick; plays and poems of Shakespeare; poems of Milton; The Devil's
  Dictionary; the documentation of SQLite;
- under their own terms, which follow: WordNet 3.0, the documentation of Python 3.11, the documentation of
  PostgreSQL 15;
- exercises made by the generator in deepinfer_jax.

The names of control tokens follow DeepSeek's tokenizer. The project is not affiliated with the owners of these names.

"""


def make_params(config: ModelConfig, weights: Mapping[str, np.ndarray], token_map: np.ndarray | None) -> Params:
    """The stored form of float32 weights by name."""

    def place(parameter: Parameter, lead: tuple[int, ...], prefixes: tuple[str, ...]) -> Any:
        values = np.stack([np.asarray(weights[prefix + parameter.key], np.float32) for prefix in prefixes])
        values = values.reshape(*lead, *full_shape(parameter))
        if parameter.storage == "f32":
            return jnp.asarray(values)
        rounded = jnp.asarray(values, jnp.bfloat16)
        if parameter.quantized:
            return quantize_weight(np.asarray(rounded, np.float32), parameter.storage)
        return rounded

    return build_params(config, place, None if token_map is None else jnp.asarray(token_map))


def with_image_biases(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights with each image bias set to the text bias, since images were not trained."""
    result = dict(weights)
    for name in weights:
        if name.endswith(".bias_vl"):
            result[name] = weights[name.removesuffix("_vl")]
    return result


def tokenizer_config(config: ModelConfig, tokenizer: bytes) -> dict[str, Any]:
    """Content of `tokenizer_config.json`."""
    spelling = {entry["id"]: entry["content"] for entry in json.loads(tokenizer)["added_tokens"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": spelling[0],
        "eos_token": spelling[1],
        "pad_token": spelling[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def licences() -> str:
    """Terms of the texts that are not in the public domain."""
    text = (resources.files("deepinfer_jax.evals") / "data" / "LICENSES.txt").read_text(encoding="utf-8")
    return text[text.index("\n1. WordNet") + 1 :]


def export(folders: list[Path], out: Path, *, overwrite: bool = False) -> int:
    """Write the checkpoint folder; returns the size of the weight file in bytes."""
    config = ModelConfig.demo()
    weights: dict[str, np.ndarray] = initial_weights(config, SEED)
    for folder in folders:
        weights |= load_weights(folder, config)
    bad = [name for name, value in weights.items() if not np.isfinite(value).all()]
    if bad:
        raise ValueError(f"{bad[0]}: holds values that are not finite")
    tokenizer = tokenizer_json()
    save_checkpoint(out, make_params(config, with_image_biases(weights), token_classes(tokenizer)), overwrite=overwrite)
    (out / "tokenizer.json").write_bytes(tokenizer)
    text = json.dumps(tokenizer_config(config, tokenizer), indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (out / "NOTICE").write_text(_NOTICE + licences(), encoding="utf-8")
    size = (out / "model.safetensors").stat().st_size
    if size > LIMIT_BYTES:
        raise ValueError(f"{out / 'model.safetensors'}: has {size} bytes; at most {LIMIT_BYTES} are wanted")
    return size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="+", help="weight folders of train.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args()
    size = export(arguments.weights, arguments.out, overwrite=arguments.overwrite)
    print(f"{arguments.out}: {size} bytes of weights")


if __name__ == "__main__":
    main()
