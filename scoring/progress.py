"""Whether an engine makes progress: the work it has taken, the steps it makes, and for how long it has been silent.

An engine that hangs looks healthy from outside: its processes live and take requests. What tells is that work is
outstanding and no step comes. `ProgressMeter` counts both. It knows nothing of vLLM and has no clock of its own to
wait on: its owner reports steps and reads, and looks at it regularly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LEAST_PATIENCE_S = 10.0
_STEPS_OF_PATIENCE = 5


@dataclass(frozen=True)
class Progress:
    """What an engine has done and has yet to do, at one moment."""

    steps: int
    """Since the engine came up."""
    since_last_step_s: float
    """Seconds; before the first step, since the engine came up."""
    longest_step_s: float
    """Seconds of the longest step seen (or expected), as this process sees steps: from the one before, or from the read
    that ended an idle time, to its report."""
    outstanding_reads: int
    outstanding_tokens: int
    """Of the outstanding reads: prompt and response."""


class ProgressMeter:
    """Counts an engine's steps and its outstanding work. Use it from one thread; any thread may read it.

    Args:
        patience_s: seconds without a step, while work is outstanding, after which the engine counts as stalled, at
            least; it is five times the longest step seen where that is more.
        clock: seconds that only rise.
    """

    def __init__(self, patience_s: float = LEAST_PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self._clock = clock
        self._steps = 0
        self._longest_step_s = 0.0
        self._reads = 0
        self._tokens = 0
        self._last_step = self._step_began = self._looked = clock()
        self._silent_s = 0.0
        self._suspended = False

    def step(self) -> None:
        """The engine has made a step."""
        now = self._clock()
        # What it makes with nothing to do, or after weights were loaded, is no measure of work.
        if self._reads and not self._suspended:
            self._longest_step_s = max(self._longest_step_s, now - self._step_began)
        self._steps += 1
        self._last_step = self._step_began = now
        self._silent_s = 0.0

    def expect_step(self, seconds: float) -> None:
        """A step may well take so long, though none of that length was seen yet."""
        self._longest_step_s = max(self._longest_step_s, seconds)

    def suspend(self) -> None:
        """Work waits, and no step is due, until `resume`: weights are loaded."""
        self._suspended = True
        self._silent_s = 0.0

    def resume(self) -> None:
        """Steps are due again."""
        if self._suspended:
            self._suspended = False
            self._step_began = self._clock()

    def take(self, tokens: int) -> Callable[..., None]:
        """A read of so many tokens is outstanding from now on, until the function returned is called, once.

        What it is called with is not looked at, so that it may be a task's callback.
        """
        if not self._reads:
            self._step_began = self._clock()
            self._silent_s = 0.0
        self._reads += 1
        self._tokens += tokens

        def settle(*_: object) -> None:
            self._reads -= 1
            self._tokens -= tokens

        return settle

    def look(self, longest_s: float) -> None:
        """Count the time since the last look as silent, if it was.

        Args:
            longest_s: seconds that one look counts at most. Without that bound, a process that was stopped or busy for
                a while would blame its engine for steps that it has only not read yet.
        """
        now = self._clock()
        silent = min(now - max(self._looked, self._step_began), longest_s)
        self._silent_s = self._silent_s + silent if self._reads and not self._suspended else 0.0
        self._looked = now

    @property
    def stalled(self) -> bool:
        """Whether work is outstanding and, as far as was looked, no step has come for too long."""
        return self._reads > 0 and self._silent_s > self.bound_s

    @property
    def bound_s(self) -> float:
        """Seconds of silence that are too many."""
        return max(self.patience_s, _STEPS_OF_PATIENCE * self._longest_step_s)

    @property
    def silent_s(self) -> float:
        """Seconds without a step, as far as was looked, while work is outstanding."""
        return self._silent_s

    def now(self) -> Progress:
        return Progress(
            steps=self._steps,
            since_last_step_s=self._clock() - self._last_step,
            longest_step_s=self._longest_step_s,
            outstanding_reads=self._reads,
            outstanding_tokens=self._tokens,
        )
