"""The compiler half of the marker backend."""

from typing import NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


def refuse(what: str) -> NoReturn:
    """Raise RuntimeError: ``what`` was asked of the marker backend, which compiles and runs nothing."""
    raise RuntimeError(
        f"Triton was asked for {what} on a CPU, where nothing compiles: a kernel was launched that "
        "scoring.vllm_extension.kernels does not replace. Leave out the option or the sampling parameter "
        "that launches it, or set TRITON_INTERPRET=1 to have Triton interpret every kernel, slowly."
    )


class CpuMarkerBackend(BaseBackend):
    """A compiler for the target ``cpu`` that refuses every kernel."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-marker"

    def parse_options(self, options: dict) -> NoReturn:
        refuse("a compiled kernel")

    def add_stages(self, stages: dict, options: object, language: object) -> NoReturn:
        refuse("a compiled kernel")

    def load_dialects(self, context: object) -> NoReturn:
        refuse("a compiled kernel")

    def get_module_map(self) -> NoReturn:
        refuse("a compiled kernel")
