"""Which replicas of a deployment are running, as this process's pinned routers see it.

A file of its own because Serve ships the router class of `pinning.py` by value: what that class shares with this
process must lie in a module it imports.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle


class ReplicaGone(RayError):
    """The replica a call was pinned to is no longer among the running ones. Nothing was sent."""


_lock = threading.Lock()
_members: dict[tuple[str, str], tuple[str, ...]] = {}  # (application, deployment) -> replica ids


def publish(app_name: str, deployment: str, replicas: Iterable[str]) -> None:
    """What a pinned router says whenever its set of replicas changes."""
    with _lock:
        _members[app_name, deployment] = tuple(sorted(replicas))


def members(handle: DeploymentHandle) -> tuple[str, ...]:
    """Ids of the running replicas behind `handle`. Empty before this process's router knows of any.

    The set follows the Serve controller, and loses a replica the moment a call to it fails because it died.
    """
    if not handle.is_initialized:
        handle.options(method_name="info")  # starts the router, which then hears from the controller
    with _lock:
        return _members.get((handle.app_name, handle.deployment_name), ())
