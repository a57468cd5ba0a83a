"""The compiler half of the marker backend."""

from typing import NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


def refuse(what: str) -> NoReturn:
    """Raise RuntimeError: ``what`` reached the marker backend, which runs nothing."""
    raise RuntimeError(
        f"Triton was asked for {what} on a CPU, where it cannot run: a vLLM kernel was launched that "
        "scoring.vllm_extension.kernels does not replace. The traceback names it (the function before "
        "triton/runtime/jit.py); requests that need it are refused by scoring.vllm_extension.guard, or "
        "set TRITON_INTERPRET=1 to run every kernel slowly in Triton's interpreter."
    )


class CpuMarkerBackend(BaseBackend):
    """A compiler for the target ``cpu`` that refuses every kernel by name."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-marker"

    def parse_options(self, options: dict) -> NoReturn:
        refuse("a kernel")

    def add_stages(self, stages: dict, options: object, language: object = None) -> NoReturn:
        refuse("a kernel")

    def load_dialects(self, context: object) -> NoReturn:
        refuse("a kernel")

    def get_module_map(self) -> NoReturn:
        refuse("a kernel")
