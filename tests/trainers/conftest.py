"""A service that trainers' own code asks, and their own code, in the environment that `make trainers` makes."""

import importlib.util

import pytest

from tests.serve_process import ServeProcess, two_replicas_of

for name in ("trl", "verl"):
    if importlib.util.find_spec(name) is None:
        raise pytest.UsageError(f"{name} is not installed here: these tests run by `make test-trainers`")


@pytest.fixture(scope="session")
def service(tiny_path, tmp_path_factory):
    """One replica of the tiny teacher, under two names. This process is connected to its Ray cluster."""
    teacher = two_replicas_of(tiny_path) | {"num_replicas": 1}
    settings = {"teachers": {"default": teacher}, "aliases": {"math": "default"}}
    service = ServeProcess(tmp_path_factory.mktemp("service"), settings)
    with service.connected():
        yield service
