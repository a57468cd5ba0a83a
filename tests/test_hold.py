"""Reads of an engine and a change of its weights never overlap."""

import asyncio

import pytest

from scoring.hold import Hold


@pytest.fixture
def hold() -> Hold:
    return Hold()


async def test_where_it_is_open_nothing_is_awaited(hold):
    entering = hold.enter()
    with pytest.raises(StopIteration):
        entering.send(None)
    hold.leave()


async def test_it_closes_once_all_have_left_and_others_wait_until_it_is_opened(hold):
    await hold.enter()
    await hold.enter()
    closing = asyncio.create_task(hold.close())
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold.enter()) for _ in range(3)]
    hold.leave()
    await asyncio.sleep(0.01)
    assert hold.closed and not closing.done()
    hold.leave()
    await closing
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    hold.open()
    await asyncio.gather(*waiting)
    closing = asyncio.create_task(hold.close())
    await asyncio.sleep(0.01)
    assert not closing.done()  # the three are inside now


async def test_who_was_let_in_and_has_not_come_in_yet_waits_for_the_next_time(hold):
    await hold.close()
    waiting = asyncio.create_task(hold.enter())
    await asyncio.sleep(0)
    hold.open()
    await hold.close()  # at once, as nobody is inside
    await asyncio.sleep(0.01)
    assert not waiting.done()
    hold.open()
    await waiting


async def test_a_closing_that_is_given_up_and_a_wait_that_is_leave_nothing(hold):
    await hold.enter()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hold.close(), 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hold.enter(), 0.01)
    hold.open()
    hold.leave()
    await asyncio.wait_for(hold.close(), 1)
