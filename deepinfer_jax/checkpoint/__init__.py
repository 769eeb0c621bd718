"""Checkpoints of the released format: read, check, load, write, summarise (`spec/blocks.md` 4)."""

from deepinfer_jax.checkpoint.engram_map import load_token_map, token_classes
from deepinfer_jax.checkpoint.files import CheckpointError
from deepinfer_jax.checkpoint.load import check_tensors, load_checkpoint, load_config, read_leaf
from deepinfer_jax.checkpoint.reader import Checkpoint, TensorEntry
from deepinfer_jax.checkpoint.summary import Summary, plan_lines, summarize
from deepinfer_jax.checkpoint.writer import save_checkpoint, shard_layout

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Summary",
    "TensorEntry",
    "check_tensors",
    "load_checkpoint",
    "load_config",
    "load_token_map",
    "plan_lines",
    "read_leaf",
    "save_checkpoint",
    "shard_layout",
    "summarize",
    "token_classes",
]
