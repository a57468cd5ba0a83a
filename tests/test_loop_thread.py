"""Asynchronous code behind ordinary methods: what is left early, and what is closed meanwhile."""

import asyncio
import concurrent.futures
import threading

import pytest

from scoring.loop_thread import LoopThread


async def counting(closed: threading.Event):
    try:
        i = 0
        while True:
            yield i
            i += 1
            await asyncio.sleep(0)
    finally:
        await asyncio.sleep(0.02)
        closed.set()


def test_an_iteration_left_early_is_closed():
    thread, closed = LoopThread("test"), threading.Event()
    for i in thread.iterate(counting(closed)):
        if i == 3:
            break
    assert closed.wait(5)
    thread.close()


def test_an_iteration_may_be_left_in_the_thread_of_the_loop_itself():
    """As happens when Python collects garbage there."""
    thread, closed = LoopThread("test"), threading.Event()
    items = thread.iterate(counting(closed))
    assert next(items) == 0

    async def collect() -> None:
        items.close()

    thread.start(collect())
    assert closed.wait(5)
    thread.close()


def test_closing_ends_an_iteration_that_waits_for_its_caller():
    thread, closed = LoopThread("test"), threading.Event()
    items = thread.iterate(counting(closed))
    assert next(items) == 0
    thread.close()
    assert closed.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        next(items)


def test_whatever_is_under_way_in_other_threads_ends_when_it_is_closed():
    for _ in range(20):
        thread, closed = LoopThread("test"), threading.Event()

        def iterate(thread=thread, closed=closed) -> None:
            for _ in thread.iterate(counting(closed)):
                pass

        def run(thread=thread) -> None:
            while True:
                thread.run(asyncio.sleep(0))

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            callers = [pool.submit(work) for work in (iterate, run, iterate, run)]
            for close in [pool.submit(thread.close), pool.submit(thread.close)]:
                close.result(5)
            for caller in callers:
                assert isinstance(caller.exception(5), RuntimeError | concurrent.futures.CancelledError)
