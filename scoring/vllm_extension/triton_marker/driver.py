"""The driver half of the marker backend."""

import inspect
from typing import NoReturn

from triton.backends.driver import DriverBase

from scoring.vllm_extension.triton_marker.compiler import refuse


class CpuMarkerDriver(DriverBase):
    """A driver that runs no kernel.

    ``is_active`` is how Triton chooses a driver by itself, and it wants exactly one: on a GPU machine that
    is the GPU's, so this one says no. The plugin makes it the active one by hand in CPU workers, where its
    only task is to refuse a launch with a sentence that names the kernel.
    """

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_device(self) -> NoReturn:
        """The first thing a launch asks for; the kernel is the ``self`` of the method that asks."""
        kernel = inspect.currentframe().f_back.f_locals.get("self")
        refuse(f"the kernel {getattr(kernel, '__name__', '(unnamed)')}")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        refuse(f"an argument of type {ty}")

    def get_current_target(self) -> NoReturn:
        refuse("a compilation target")

    def get_active_torch_device(self) -> NoReturn:
        refuse("a torch device")

    def get_benchmarker(self) -> NoReturn:
        refuse("a benchmark of kernels")
