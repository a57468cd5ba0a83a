"""What reads of an engine have in common with a change of its weights: they never overlap."""

from __future__ import annotations

import asyncio


class Hold:
    """Reads pass, many at once. When it is closed, it waits for those that have passed, and others wait for it.

    Use it from one event loop.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._empty.set()

    @property
    def closed(self) -> bool:
        return not self._opened.is_set()

    async def enter(self) -> None:
        """Pass, and `leave` in the end. Where it is open, nothing is awaited."""
        while self.closed:
            await self._opened.wait()
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def close(self) -> None:
        """Let nobody pass any more, and wait until those who have passed have left. `open` ends it, at any time."""
        self._opened.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._opened.set()
