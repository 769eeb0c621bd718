"""The demo model that ships with the package: a small trained V4.1-Flash (docs/demo_model.md)."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path

from deepinfer_jax.prompt.tokenizer import TOKENIZER_FILE, Tokenizer


def demo_folder() -> Path:
    """The checkpoint folder of the demo model, in the released format."""
    return Path(__file__).parent


def tokenizer_json() -> bytes:
    """Content of the demo model's `tokenizer.json`."""
    return resources.files(__name__).joinpath(TOKENIZER_FILE).read_bytes()


@lru_cache(maxsize=1)
def load_tokenizer() -> Tokenizer:
    """The demo model's tokenizer: 3,072 tokens, the control tokens of V4.1 under other ids."""
    return Tokenizer(tokenizer_json(), f"deepinfer_jax/demo/{TOKENIZER_FILE}")
