"""What Serve's HTTP proxies were started with. It stands in no public answer of Serve's, so its controller is asked.

The options of the first start hold for as long as Serve runs, whatever a file that is deployed later says.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import ProxyLocation

from deployments import pinning
from scoring.errors import RefusedSettings

_ASK_S = 30


@dataclass(frozen=True)
class HttpSettings:
    """
    Attributes:
        host: the address that the proxies of all nodes bind; None where there are no proxies.
        request_timeout_s: Serve's own limit on a request, None without one.
    """

    host: str | None
    request_timeout_s: float | None


def running_http_settings() -> HttpSettings:
    """The settings of the Serve that runs in this process's cluster. Blocks.

    Raises:
        RuntimeError: a Ray this was not written against.
    """
    pinning.check_ray()
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    options, location = ray.get(
        [controller.get_http_config.remote(), controller.get_proxy_location.remote()], timeout=_ASK_S
    )
    return HttpSettings(
        host=None if location == ProxyLocation.Disabled else options.host,
        request_timeout_s=options.request_timeout_s or None,
    )


def require_tokens_beyond_loopback(settings: HttpSettings, token_file: str | None) -> None:
    """Raise `RefusedSettings` where anybody on the network could ask, and no token would be asked for."""
    if token_file is None and settings.host is not None and not _is_loopback(settings.host):
        raise RefusedSettings(
            f"Serve's HTTP host is {settings.host} (http_options.host), which other machines reach, and no token is "
            "asked for: name a file with tokens (token_file in the application's args), or bind 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
