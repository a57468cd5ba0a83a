"""How vLLM's processes wait for each other on a CPU, where they wait on the cores that others compute on.

The engine's core and its worker exchange messages through shared memory. A reader spins for a second after each message
before it lets a socket wake it: on a GPU machine that saves microseconds and costs a core that has nothing else to do.
Here a step of the worker takes longer than that, and the spinning takes its time from it. The socket's wake-ups can be
lost when messages come fast, so a reader that sleeps also looks by itself now and then.
"""

from typing import Any

BUSY_S = 0.002
LONGEST_SLEEP_MS = 10


def wait_without_spinning() -> None:
    """Have readers of this process go to sleep after ``BUSY_S`` without a message. May be called repeatedly."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait
    if getattr(wait, "sleeps", False):
        return

    def sleeping_wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = BUSY_S
        wait(self, LONGEST_SLEEP_MS if timeout_ms is None else min(timeout_ms, LONGEST_SLEEP_MS))

    sleeping_wait.sleeps = True
    SpinCondition.wait = sleeping_wait
