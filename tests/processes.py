"""The processes of an engine, found by who started whom: vLLM gives them titles, but not every process takes one."""

from __future__ import annotations

import contextlib

import psutil


def engine_cores(host: psutil.Process) -> list[psutil.Process]:
    """The living engine core that `host` (a replica, or a process of the tests) has started, if there is one."""
    return _spawned_by(host)


def workers(host: psutil.Process) -> list[psutil.Process]:
    """The living workers of the engine that `host` has started."""
    return [worker for core in engine_cores(host) for worker in _spawned_by(core)]


def _spawned_by(parent: psutil.Process) -> list[psutil.Process]:
    """Its living children, but for Python's own resource tracker."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                    found.append(child)
    return found
