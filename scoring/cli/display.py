"""What a run says of its progress: on a terminal one line that changes, elsewhere a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

_EVERY_S = {True: 0.2, False: 30.0}  # on a terminal, and elsewhere
_FAILURES_SHOWN = 10


class Display(logging.Handler):
    """Says how far a run is. In a `with` block it also shows what is logged meanwhile, as by a client that tries again.

    Args:
        total: size of the input, in the units of `advance`.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        super().__init__(logging.WARNING)
        stream = stream or sys.stderr
        self._total, self._stream, self._live = total, stream, stream.isatty()
        self._began = self._said = time.monotonic()
        self._known = self._scored = 0  # of the input: found finished, and scored by this run
        self.reads = self.failed = self.tokens = 0

    def __enter__(self) -> Display:
        logging.getLogger("scoring").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("scoring").removeHandler(self)
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def found(self, size: int) -> None:
        """So much of the input is finished since an earlier run."""
        self._known += size

    def advance(self, size: int, reads: int, tokens: int) -> None:
        """So much more is scored."""
        self._scored += size
        self.reads += reads
        self.tokens += tokens
        if time.monotonic() - self._said >= _EVERY_S[self._live]:
            self._said = time.monotonic()
            self._stream.write(f"\r\x1b[K{self.line()}" if self._live else f"{self.line()}\n")
            self._stream.flush()

    def failure(self, place: str, error: Exception) -> None:
        """A read has failed."""
        self.failed += 1
        if self.failed <= _FAILURES_SHOWN:
            self.say(f"{place}: {error}")
        elif self.failed == _FAILURES_SHOWN + 1:
            self.say("further failed reads are in the output only")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")
        self._stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def line(self) -> str:
        """How far it is, how fast, and how long it will take."""
        done = self._known + self._scored
        parts = [f"{self.reads:,} reads", f"{self.tokens / self.seconds:,.0f} tokens/s", f"{done / self._total:.0%}"]
        if self.failed:
            parts.insert(1, f"{self.failed:,} failed")
        if self._scored:
            parts.append(f"{_duration((self._total - done) * self.seconds / self._scored)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"
