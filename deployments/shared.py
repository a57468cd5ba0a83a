"""One run of something for all who ask for it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Shared:
    """Runs `ask` when somebody wants its result, once for all who do; called off when nobody does any longer.

    Use it from one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asking: asyncio.Future | None = None
        self._waiting = 0

    async def result(self) -> Any:
        """What `ask` returns or raises."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
            self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        asking = self._asking
        self._waiting += 1
        try:
            return await asyncio.shield(asking)
        finally:
            self._waiting -= 1
            if not self._waiting:
                asking.cancel()
                self._asking = None  # whoever comes before it has ended must not wait for it
