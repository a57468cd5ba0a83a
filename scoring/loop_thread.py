"""An event loop in a thread of its own: how ordinary code uses what is written for asynchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any


class LoopThread:
    """Runs coroutines for other threads. Close it when done; what is under way then is cancelled."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """The future result of `work`. Cancelling it cancels the work.

        Raises:
            RuntimeError: this is closed.
        """
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("this client is closed")

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which is cancelled when the wait for it is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        """The items, one by one. Left early, the iterator is closed."""

        async def step() -> Any:
            return await anext(items, _END)

        async def close() -> None:
            await items.aclose()

        try:
            while (item := self.run(step())) is not _END:
                yield item
        finally:
            with contextlib.suppress(RuntimeError):  # closed in the meantime, and with it the iterator
                closing = self.start(close())
                if threading.current_thread() is not self._thread:  # where the garbage collector may run this
                    closing.result()

    def close(self) -> None:
        """Cancel what is under way, close iterators that were left, and end the thread."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            self._thread.join()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_END = object()


async def _cancel_others() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
