"""The environment an engine needs, set in its host process before vLLM is imported.

vLLM reads most of these once, at import, and its engine processes inherit them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from scoring.errors import RefusedSettings

_PLUGIN = "teacher_scoring"  # this project's entry point in the group vllm.general_plugins


def prepare_engine_environment(cpu_cores: Sequence[int] = ()) -> None:
    """Set what `TeacherEngine` relies on. Call it before anything imports vLLM.

    Args:
        cpu_cores: the logical cores of a CPU engine, one thread on each. Empty leaves the choice to vLLM (on a
            GPU machine it has no meaning).

    Raises:
        RefusedSettings: the environment keeps this project's entry points out of vLLM's processes, or asks for its
            V1 model runner.
        RuntimeError: vLLM is imported already, so that a setting would come too late.
    """
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _PLUGIN not in plugins.split(","):
        raise RefusedSettings(f"VLLM_PLUGINS is {plugins!r}; name {_PLUGIN} in it too, or unset it")
    if not entry_points(group="vllm.general_plugins", name=_PLUGIN):
        raise RefusedSettings(
            f"no installed package has the entry point {_PLUGIN}, by which vLLM's processes find this project: install "
            "it (pip install -e .), its folder on the path is not enough"
        )
    runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if runner not in (None, "1"):
        raise RefusedSettings(
            f"VLLM_USE_V2_MODEL_RUNNER is {runner!r}; unset it or set it to 1: only vLLM's V2 model runner has the "
            "matrix read"
        )
    if cpu_cores:
        for name in ("TRITON_BACKENDS_IN_TREE", "TRITON_DEFAULT_BACKEND"):
            if os.environ.get(name):
                raise RefusedSettings(
                    f"{name} is {os.environ[name]!r}; unset it: it hides the backend by which vLLM's V2 model runner "
                    "starts on a CPU"
                )
    wanted = {
        # The matrix read exists only there; with it set, vLLM fails at start instead of falling back to V1.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu_cores:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cpu_cores)
        wanted["OMP_NUM_THREADS"] = str(len(cpu_cores))
    late = [name for name, value in wanted.items() if os.environ.get(name) != value]
    if late and "vllm" in sys.modules:
        raise RuntimeError(
            f"vLLM is imported before {', '.join(late)} was set: an engine's environment is prepared first "
            "(scoring.environment), and one process hosts one engine"
        )
    os.environ.update(wanted)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
