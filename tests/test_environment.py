"""What is set before vLLM is imported, in processes of their own."""

import os
import subprocess
import sys

import pytest

SHOW = (
    "from scoring.environment import prepare_engine_environment; import os; "
    "prepare_engine_environment([3, 5]); "
    "print(*(os.environ[n] for n in ('VLLM_USE_V2_MODEL_RUNNER', 'VLLM_CPU_OMP_THREADS_BIND', 'OMP_NUM_THREADS')))"
)


def run(code, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_", "OMP_"))}
    return subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)


def test_the_v2_runner_and_the_cores_are_set():
    assert run(SHOW).stdout.split() == ["1", "3,5", "2"]


def test_a_plugin_list_that_names_ours_is_accepted():
    assert run(SHOW, VLLM_PLUGINS="other,teacher_scoring").returncode == 0


@pytest.mark.parametrize(
    "name, value", [("VLLM_PLUGINS", "other"), ("TRITON_BACKENDS_IN_TREE", "1"), ("TRITON_DEFAULT_BACKEND", "nvidia")]
)
def test_what_keeps_our_entry_points_out_is_refused_by_name(name, value):
    refused = run(SHOW, **{name: value})
    assert refused.returncode == 1
    assert f"RefusedSettings: {name} is '{value}'" in refused.stderr


def test_a_package_that_is_not_installed_is_refused():
    missing = run("import importlib.metadata as m; m.entry_points = lambda **names: (); " + SHOW)
    assert "RefusedSettings: no installed package has the entry point teacher_scoring" in missing.stderr


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_the_v1_runner_is_refused(value):
    refused = run(SHOW, VLLM_USE_V2_MODEL_RUNNER=value)
    assert refused.returncode == 1
    assert f"RefusedSettings: VLLM_USE_V2_MODEL_RUNNER is '{value}'; unset it" in refused.stderr
    assert run(SHOW, VLLM_USE_V2_MODEL_RUNNER="1").returncode == 0


def test_a_setting_that_comes_after_vllm_is_an_error():
    late = run("import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); " + SHOW)
    assert "vLLM is imported before VLLM_USE_V2_MODEL_RUNNER" in late.stderr
