"""`build_app`: the Serve application of a configuration. `serve run` imports it.

No `from __future__ import annotations` here: Serve validates `args:` with the class that annotates the parameter, and
takes a string for no class.
"""

import os

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments import pinning, placement
from deployments.config import AppConfig, TeacherConfig
from deployments.ingress import Ingress
from deployments.teacher import Teacher
from scoring.adapters import Adapter
from scoring.errors import RefusedSettings

# Admission is the replica's, by tokens; Serve's own count of calls must not come first.
_MAX_CALLS = 100_000


def build_app(config: AppConfig) -> Application:
    """The application: one Teacher deployment per teacher, and the ingress that holds a Router over them.

    Raises:
        RefusedSettings: an environment under which Serve cannot carry answers.
    """
    pinning.check_ray()
    if os.environ.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1":
        raise RefusedSettings(
            "RAY_SERVE_THROUGHPUT_OPTIMIZED=1 sends handle calls over gRPC, where answers above 4 MiB fail; unset it"
        )
    teachers = {name: _teacher(name, teacher) for name, teacher in config.teachers.items()}
    limits = config.limits.model_dump()
    served_by = {name: name for name in teachers} | config.aliases | {n: a.base for n, a in config.adapters.items()}
    catalog = {
        "default": config.default_teacher,
        "deployments": {name: deployment_name(teacher) for name, teacher in served_by.items()},
        "adapters": {name: Adapter(adapter.path, 0) for name, adapter in config.adapters.items()},  # numbered there
        "admission_wait_s": limits.pop("admission_wait_s"),
        "limits": limits,
    }
    return Ingress.bind(catalog, teachers, config.teachers, config.token_file)


def deployment_name(teacher: str) -> str:
    """Name of the deployment that serves a teacher."""
    return f"Teacher-{teacher}"


def _teacher(name: str, config: TeacherConfig) -> Application:
    deployment = serve.deployment(
        name=deployment_name(name),
        max_ongoing_requests=_MAX_CALLS,
        request_router_config=RequestRouterConfig(request_router_class=pinning.PinnedRequestRouter),
        health_check_period_s=2,
        health_check_timeout_s=10,  # it never waits for the engine; a replica that is silent for so long is stopped
        graceful_shutdown_timeout_s=20,
        logging_config={"enable_access_log": False},
        **placement.deployment_options(config),
    )(Teacher)
    return deployment.bind(name, config.model_dump(exclude_defaults=True))
