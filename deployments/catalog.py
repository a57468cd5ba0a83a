"""Which teachers an application serves, and under which deployment: what the ingress knows, asked and remembered."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.replica_calls import now, result_of
from scoring.errors import ScoringError, TeacherUnavailable

_FRESH_S = 5.0
_PATIENCE_S = 0.5  # how long a known catalog waits for a fresher one,
_ANEW_PATIENCE_S = 5.0  # and when it is doubted
_TIMEOUT_S = 30.0


class Catalog:
    """The teachers of an application, and what it takes in one call. As a dict:

    - `default`: the teacher of reads that name none.
    - `deployments`: per name what serves it. Aliases and adapters share the deployment of their teacher.
    - `adapters`: per name of an adapter its `Adapter`.
    - `limits`: the fields of `BatchLimits`; and `admission_wait_s`.
    - `without_room`: per teacher, where the cluster has no room for it, the sentence that says so.

    Args:
        app_name: the Serve application.
        known: what is known for certain, as the ingress does. Left out, it is asked of the application's ingress, and
            asked again every few seconds, since a redeploy may change it.
    """

    def __init__(self, app_name: str, known: dict[str, Any] | None = None) -> None:
        self._app_name = app_name
        self._known = known
        self._asks = known is None
        self._fresh_until = 0.0 if known is None else float("inf")  # on the event loop's clock
        self._ingress: DeploymentHandle | None = None
        self._asking: asyncio.Task | None = None
        self._changes = 0  # by this process

    async def find(self, deadline: float, anew: bool = False) -> dict[str, Any]:
        """The catalog. A known one outlives the ingress: without an answer it stands.

        Args:
            deadline: on the event loop's clock.
            anew: ask, even if the last answer is fresh.

        Raises:
            TeacherUnavailable: none is known, and none came before the deadline.
        """
        if now() < self._fresh_until and not (anew and self._asks):
            return self._known
        if self._asking is None or self._asking.done():  # one call for all who wait
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        asking, patience = self._asking, max(deadline - now(), 0)
        if self._known is not None:
            patience = min(patience, _ANEW_PATIENCE_S if anew else _PATIENCE_S)
        await asyncio.wait({asking}, timeout=patience)
        if self._known is None:
            if asking.done() and isinstance(asking.exception(), TeacherUnavailable):
                raise asking.exception()
            raise TeacherUnavailable(f"the ingress of application {self._app_name!r} did not answer in time")
        self._fresh_until = max(self._fresh_until, now() + _FRESH_S)
        return self._known

    async def change(self, method: str, *args: Any, timeout_s: float) -> None:
        """Have the ingress change the catalog, and know it from now on; raises as `ask_ingress`."""
        changed = await self.ask_ingress(method, *args, timeout_s=timeout_s)
        self._changes += 1
        self._keep(changed)

    async def ask_ingress(self, method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
        """What a method of the ingress returns.

        Raises:
            ScoringError: what the ingress raised.
            TeacherUnavailable: it did not answer in time.
        """
        try:
            return await self._call(method, *args, timeout_s=timeout_s)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ScoringError) else error from None
        except (TimeoutError, RayError, RayServeException) as error:
            raise TeacherUnavailable(
                f"the ingress of {self._app_name!r} did not answer within {timeout_s:g} s ({error!r})"
            ) from error

    def why_none(self, teacher: str) -> str:
        """Why a teacher has no replica, where the ingress has found that the cluster has no room for it; else ""."""
        return ((self._known or {}).get("without_room") or {}).get(teacher, "")

    async def _ask(self) -> None:
        """Keep what the ingress knows, however late it comes; not when it may be from before a change of ours."""
        changes = self._changes
        catalog = await self._call("catalog", timeout_s=_TIMEOUT_S)
        if changes == self._changes:
            self._keep(catalog)

    def _keep(self, catalog: dict[str, Any]) -> None:
        self._known, self._fresh_until = catalog, now() + _FRESH_S

    async def _call(self, method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
        try:
            if self._ingress is None:  # asks the controller, which blocks
                self._ingress = await asyncio.to_thread(_app_handle, self._app_name)
            return await result_of(getattr(self._ingress, method).remote(*args), timeout_s)
        except BaseException:
            self._ingress = None  # its handle may listen to a controller that is no more
            raise


def _app_handle(app_name: str) -> DeploymentHandle:
    if not ray.is_initialized():
        raise TeacherUnavailable("this process is not connected to Ray: call ray.init(address='auto') first")
    try:
        return serve.get_app_handle(app_name)
    except RayServeException as error:
        raise TeacherUnavailable(
            f"no Serve application {app_name!r} runs in this Ray cluster (start it: serve run serve_config.yaml)"
        ) from error
