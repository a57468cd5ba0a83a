"""One run of something for all who ask for it meanwhile."""

import asyncio

import pytest

from deployments.shared import Shared


async def test_all_who_ask_meanwhile_get_the_result_of_one_run():
    runs = 0

    async def ask():
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.01)
        return runs

    shared = Shared(ask)
    assert await asyncio.gather(*(shared.result() for _ in range(5))) == [1] * 5
    assert await shared.result() == 2


async def test_who_comes_in_the_instant_in_which_the_last_one_leaves_gets_a_run_of_its_own():
    async def ask():
        await asyncio.sleep(0.05)
        return "answered"

    shared = Shared(ask)
    first = asyncio.create_task(shared.result())
    await asyncio.sleep(0.01)
    for turns in range(4):
        first.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(shared.result())
        assert await asyncio.wait_for(second, 2) == "answered"
        first = asyncio.create_task(shared.result())
        await asyncio.sleep(0.01)
    first.cancel()


async def test_a_failure_reaches_all_and_the_next_one_asks_anew():
    async def ask():
        raise ValueError("no")

    shared = Shared(ask)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await shared.result()
