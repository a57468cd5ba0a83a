"""Runs vLLM's own Triton kernels under Triton's interpreter, in a process of its own.

``python -m tests.kernel_oracle launches.pt answers.pt`` with TRITON_INTERPRET=1. The input is a list of
launches ``{"kernel", "grid", "args", "kwargs"}``; the output holds, launch by launch, the arguments as the
kernel left them. An argument ``{"tables": [tensor, ...]}`` reaches the kernel as a uint64 tensor of the
tables' addresses. The CPU replacements of this project take no part: nothing here loads vLLM's plugins.
"""

import importlib
import sys

import torch


def as_passed(argument: object) -> object:
    """What a kernel is handed for an argument of a launch: tables become their addresses."""
    if isinstance(argument, dict):
        return torch.tensor([table.data_ptr() for table in argument["tables"]], dtype=torch.uint64)
    return argument


def main(launches_path: str, answers_path: str) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    launches = torch.load(launches_path)
    for launch in launches:
        module, name = launch["kernel"].rsplit(".", 1)
        kernel = getattr(importlib.import_module(module), name)
        if not isinstance(kernel, InterpretedFunction):
            raise RuntimeError(f"{name} is not interpreted; set TRITON_INTERPRET=1 before the process starts")
        kernel[launch["grid"]](*(as_passed(argument) for argument in launch["args"]), **launch["kwargs"])
    torch.save([launch["args"] for launch in launches], answers_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
