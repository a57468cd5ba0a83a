"""How vLLM's processes wait for each other on a CPU, where they wait on the cores that others compute on.

The engine's core and its worker exchange messages through shared memory. A reader spins for a second after each message
before it lets a socket wake it: on a GPU machine that saves microseconds and costs a core that has nothing else to do.
Here a step of the worker takes longer than that, and the spinning takes its time from it.
"""

import inspect

BUSY_S = 0.002


def wait_without_spinning() -> None:
    """Have readers of this process go to sleep after ``BUSY_S`` without a message. May be called repeatedly.

    Raises:
        RuntimeError: vLLM's class for this has changed.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    with_defaults = list(inspect.signature(SpinCondition.__init__).parameters.values())[-1:]
    if [parameter.name for parameter in with_defaults] != ["busy_loop_s"]:
        raise RuntimeError("vLLM's SpinCondition has changed: scoring/vllm_extension/waiting.py sets its busy_loop_s")
    SpinCondition.__init__.__defaults__ = (BUSY_S,)
