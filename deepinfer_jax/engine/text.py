"""Text of one sample as its tokens arrive: characters, stop strings, the parse of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_jax.prompt import Detokenizer, OutputParser, OutputStart, ParsedOutput, Tokenizer


class TextStream:
    """Collects the text of one sample and finds stop strings.

    Text that may be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], start: OutputStart | None) -> None:
        """start: set for a conversation, whose answer is parsed."""
        self._detokenizer: Detokenizer | None = tokenizer.detokenizer() if tokenizer else None
        self._tokenizer, self._start = tokenizer, start
        self._ids: list[int] = []
        self._ends: list[int] = []  # length of the text after each token
        self._stop = tuple(stop)
        self._text = ""
        self._cut = False
        self._emitted = 0

    @property
    def text(self) -> str:
        return self._text

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; returns (text that became certain, stop string that was found and cut off).

        may_stop: False before min_tokens; a stop string that is complete by then stays in the text.
        """
        if self._detokenizer is None:
            return "", None
        result = self._append(self._detokenizer.push(token_id), may_stop)
        if self._start is not None:
            self._ids.append(token_id)
            self._ends.append(len(self._text))
        return result

    def _append(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        before = len(self._text)
        self._text += piece
        found = self._find(before) if may_stop else None
        if found is not None:
            place, stop = found
            self._text = self._text[:place]
            self._cut = True
            return self._emit(len(self._text)), stop
        return self._emit(len(self._text) - self._pending()), None

    def _find(self, before: int) -> tuple[int, str] | None:
        """The earliest stop string that ends in the new text; the longest of those at one place."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            place = self._text.find(stop, max(0, before - len(stop) + 1))
            if place >= 0 and (best is None or (place, -len(stop)) < best[:2]):
                best = (place, -len(stop), stop)
        return None if best is None else (best[0], best[2])

    def _pending(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _emit(self, end: int) -> str:
        piece = self._text[self._emitted : max(end, self._emitted)]
        self._emitted = max(end, self._emitted)
        return piece

    def finish(self) -> str:
        """The output ends here; returns the text that had been held back."""
        if self._detokenizer is None:
            return ""
        self._text += self._detokenizer.finish()
        return self._emit(len(self._text))

    def parse(self) -> ParsedOutput | None:
        """The parsed answer of a conversation: of its text, so a stop string ends the parse where it ends that."""
        if self._tokenizer is None or self._start is None:
            return None
        parser = OutputParser(self._start, tokenizer=self._tokenizer)
        if self._cut:
            # Whole tokens up to the cut, then what is left of the token that holds it.
            whole = next((i for i, end in enumerate(self._ends) if end == len(self._text)), len(self._ends) - 1)
            before = self._ends[whole - 1] if whole else 0
            parser.push(self._ids[:whole])
            parser.push_cut(self._text[before:])
        else:
            parser.push(self._ids)
        parser.finish()
        return parser.result
