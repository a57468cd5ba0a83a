"""The driver half of the marker backend."""

from typing import NoReturn

from triton.backends.driver import DriverBase

from scoring.vllm_extension.triton_marker.compiler import refuse


class CpuMarkerDriver(DriverBase):
    """A driver that is never the active one.

    Triton wants exactly one active driver; on a GPU machine that is the GPU's, so this one always says no.
    Everything else would only be asked of an active driver, and raises.
    """

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        refuse(f"an argument of type {ty}")

    def get_current_target(self) -> NoReturn:
        refuse("a kernel")

    def get_active_torch_device(self) -> NoReturn:
        refuse("a kernel")

    def get_benchmarker(self) -> NoReturn:
        refuse("a kernel's benchmark")
