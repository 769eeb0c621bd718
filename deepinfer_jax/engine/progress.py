"""A progress bar on a terminal, or nothing."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Samples done and tokens so far. wanted None: on a terminal, for more than one sample."""

    def __init__(self, wanted: bool | None, count: int) -> None:
        self._shown = sys.stderr.isatty() and count > 1 if wanted is None else wanted
        self._count = count
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(total=self._count, unit="sample", desc="generating")
        return self

    def show(self, done: int, tokens: int) -> None:
        if self._bar is not None:
            if done != self._bar.n:
                self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(f"{tokens} tokens", refresh=False)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
