"""What an engine has done. Never part of a result or of its equality."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made.

    steps: forward launches. prompt_rows, decode_rows: rows launched. cached_rows: prompt rows that a cached
    prefix saved. generated_tokens: tokens read. preemptions: times a sequence was sent back to the queue.
    peak_pages: most pages held at once. plan_seconds: planning, arrays and launching of forward passes;
    sampling_seconds: controls and launching of sampling; read_seconds: waiting for tokens and accounting for
    them, most of it while the device works.
    """

    steps: int = 0
    prompt_rows: int = 0
    decode_rows: int = 0
    cached_rows: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    plan_seconds: float = 0.0
    read_seconds: float = 0.0
    sampling_seconds: float = 0.0
