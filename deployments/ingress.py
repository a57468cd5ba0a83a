"""The HTTP door: the routes of this project, and the `Ingress` deployment that serves them.

A route parses, asks its Router, and answers; it knows neither vLLM nor which replica answered. Tokens, not text. The
routes of vLLM's server, in its own dialect, are in `vllm_http/`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from ray import serve
from ray.serve.schema import ApplicationStatus
from starlette.exceptions import HTTPException

from deployments import placement, record
from deployments.actor import ensure_actor
from deployments.auth import Tokens
from deployments.config import TeacherConfig
from deployments.guard import Guard
from deployments.http_door import (
    JSON,
    beside_the_loop,
    json_response,
    log_unexpected,
    read_body,
    retry_after,
    route_answering_errors,
    trace_headers,
)
from deployments.http_settings import require_tokens_beyond_loopback, running_http_settings
from deployments.openapi import describe_errors_and_tokens, description_of
from deployments.replica_calls import Replicas, now
from deployments.router import Router
from deployments.vllm_http import vllm_routes
from deployments.weight_change import change_weights
from scoring import wire
from scoring.adapters import Adapter
from scoring.batches import SCHEMA_VERSION
from scoring.errors import (
    DeadlineExceeded,
    InvalidAdapter,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    UnknownTeacher,
)
from scoring.limits import BatchLimits
from scoring.reads import LabelRead
from scoring.weights import Weights

logger = logging.getLogger("ray.serve")

_ACTOR_CHECK_S = 10.0
_ROOM_CHECK_S = 30.0
_READY_FOR_S = 1.0  # how long the answer of /ready stands
_READY_TIMEOUT_S = 5.0
_ADAPTER_TIMEOUT_S = 60.0
_DELETED_CHECK_S = 5.0
_READY_READ_S = 4.0  # the sooner, so that a read's own error is heard
_RESULT_BYTES = 400  # of an answer, for each read beside its scores
_FIRST = -(2**31)  # priority of the readiness read: before everything that waits


@serve.deployment(
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=10_000,
    logging_config={"enable_access_log": False},  # the guard's line says more
)
@serve.ingress()
class Ingress:
    """Serves `build_api` over a Router of its own, and sees to the named actor.

    Args:
        catalog: teachers and their deployments, as for `Router`.
        teachers: the Teacher deployments. Not used: binding them here makes them part of the application.
        configs: the teachers' configurations.
        token_file: whose tokens a request needs (see `deployments.auth`); None asks for none.

    Raises:
        RefusedSettings: the file is wrong; or there is none, and other machines reach Serve's HTTP.
    """

    async def __init__(
        self,
        catalog: dict[str, Any],
        teachers: Mapping[str, Any],
        configs: Mapping[str, TeacherConfig],
        token_file: str | None = None,
    ) -> None:
        self._http = await asyncio.to_thread(running_http_settings)
        require_tokens_beyond_loopback(self._http, token_file)
        self._tokens = None if token_file is None else Tokens(token_file)
        app_name = serve.get_replica_context().app_name
        self._app_name = app_name
        self._catalog = catalog
        self._router = Router(app_name, catalog, serves_many=True)
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task] = set()
        self._restore_adapters(await asyncio.to_thread(record.load, app_name))
        await self._record_adapters()
        await asyncio.to_thread(ensure_actor, app_name)
        self._keeping = asyncio.create_task(self._keep_actor(app_name))
        self._watching = asyncio.create_task(self._watch_room(configs))

    def __del__(self) -> None:
        # Serve calls it when this process ends in good order, and the application may be deleted or only deployed anew.
        if hasattr(self, "_watching"):
            asking = threading.Thread(target=_forget_if_deleted, args=(self._app_name,), daemon=True)
            asking.start()
            asking.join(_DELETED_CHECK_S)

    async def _keep_actor(self, app_name: str) -> None:
        """An actor that has left (it took a restart of Serve for the end, say) is created again."""
        while True:
            await asyncio.sleep(_ACTOR_CHECK_S)
            try:
                await asyncio.to_thread(ensure_actor, app_name, replace=False)
            except Exception as error:
                logger.warning("the named actor could not be created, it is tried again: %s", error)

    async def _watch_room(self, configs: Mapping[str, TeacherConfig]) -> None:
        """Which teachers the cluster has no room for: into the log, and into the catalog, from which Routers say it."""
        while True:
            try:
                nodes = await asyncio.to_thread(placement.cluster_nodes)
                self._catalog["without_room"] = placement.without_room(configs, nodes)
            except Exception as error:
                logger.warning("the cluster's nodes could not be listed, it is tried again: %s", error)
            for sentence in set(self._catalog.get("without_room", {}).values()):
                logger.warning("%s", sentence)
            await asyncio.sleep(_ROOM_CHECK_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        limits = BatchLimits(**self._catalog["limits"])
        return build_api(lambda: self._router, limits, self._tokens, self._http.request_timeout_s)

    async def catalog(self) -> dict[str, Any]:
        """For Routers elsewhere, over a handle: see `deployments.catalog`."""
        return self._catalog

    async def add_adapter(self, name: str, base: str, path: str) -> dict[str, Any]:
        """See `Router.add_adapter`. Returns the catalog."""
        deployments, adapters = self._catalog["deployments"], self._catalog["adapters"]
        async with self._changing:
            if base not in deployments or base in adapters:
                known = ", ".join(name for name in deployments if name not in adapters)
                raise UnknownTeacher(f"is {base!r}; an adapter goes over one of {known}", field="base")
            if name in deployments and name not in adapters:
                raise InvalidAdapter(
                    f"{name!r} is the name of a teacher; an adapter needs one of its own", field="name"
                )
            self._last_serial += 1
            await self._record_adapters()  # a replica may know the serial from now on, whatever becomes of this
            adapter = Adapter(path, self._last_serial)
            tried = {
                **self._catalog,
                "deployments": {**deployments, name: deployments[base]},
                "adapters": {**adapters, name: adapter},
            }
            # A replica loads it, before anybody else asks for it.
            router = self._router.with_catalog(tried)
            await router.read_labels([LabelRead([0], [0], teacher=name)], timeout_s=_ADAPTER_TIMEOUT_S)
            await self._record_adapters(tried)
            deployments[name], adapters[name] = deployments[base], adapter
        return self._catalog

    async def remove_adapter(self, name: str) -> dict[str, Any]:
        """See `Router.remove_adapter`. Returns the catalog."""
        async with self._changing:
            if name not in self._catalog["adapters"]:
                known = ", ".join(self._catalog["adapters"]) or "none"
                raise UnknownTeacher(f"is {name!r}; the adapters are {known}", field="name")
            adapters = {other: adapter for other, adapter in self._catalog["adapters"].items() if other != name}
            await self._record_adapters({**self._catalog, "adapters": adapters})
            del self._catalog["adapters"][name], self._catalog["deployments"][name]
        return self._catalog

    async def update_weights(self, teacher: str, path: str, timeout_s: float) -> dict[str, Any]:
        """See `Router.update_weights`. Once begun, it ends by itself, whether or not its caller is still there.

        Returns:
            The teacher's `deployment`, its `weight_version` and `checkpoint`, and `replicas`: which version each
            serves.
        """
        deadline = now() + timeout_s
        change = asyncio.create_task(self._update_weights(teacher, path, deadline), context=contextvars.Context())
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        change.add_done_callback(lambda change: change.cancelled() or change.exception())
        return await asyncio.shield(change)

    async def _update_weights(self, teacher: str, path: str, deadline: float) -> dict[str, Any]:
        deployments, adapters = self._catalog["deployments"], self._catalog["adapters"]
        if teacher not in deployments or teacher in adapters:
            known = ", ".join(name for name in deployments if name not in adapters)
            raise UnknownTeacher(f"is {teacher!r}; the weights of {known} can be changed", field="teacher")
        deployment = deployments[teacher]

        async def commit(weights: Weights, model: str) -> None:
            try:
                await asyncio.to_thread(record.save_weights, self._app_name, deployment, weights, model)
            except Exception as error:
                raise TeacherUnavailable(f"the weights of {teacher!r} could not be recorded: {error}") from error

        try:
            async with asyncio.timeout_at(deadline):
                await self._changing.acquire()
        except TimeoutError:
            raise DeadlineExceeded("other changes were under way until the deadline (timeout_s)") from None
        try:
            recorded = await asyncio.to_thread(record.load_weights, self._app_name, deployment)
            last = recorded[0].version if recorded else 0
            replicas = Replicas(self._app_name, teacher, deployment, self._router.why_none)
            weights, served = await change_weights(replicas, path, last, commit, deadline)
        finally:
            self._changing.release()
        logger.info("teacher %s serves version %d of its weights, from %s", teacher, weights.version, path)
        return {
            "deployment": deployment,
            "weight_version": weights.version,
            "checkpoint": weights.checkpoint,
            "replicas": served,
        }

    def _restore_adapters(self, recorded: Mapping[str, Any]) -> None:
        """Serve again what was added before this process began, where its base is still served.

        Adapters of the configuration get serials above every one that replicas may still know under another path.
        """
        self._configured = set(self._catalog["adapters"])
        self._last_serial = recorded.get("last_serial", 0)
        for name, adapter in self._catalog["adapters"].items():
            self._last_serial += 1
            self._catalog["adapters"][name] = Adapter(adapter.path, self._last_serial)
        for name, added in recorded.get("adapters", {}).items():
            if (
                added["deployment"] in self._catalog["deployments"].values()
                and name not in self._catalog["deployments"]
            ):
                self._catalog["deployments"][name] = added["deployment"]
                self._catalog["adapters"][name] = Adapter(added["path"], added["serial"])

    async def _record_adapters(self, catalog: Mapping[str, Any] | None = None) -> None:
        """Record the adapters of a catalog, before anybody goes by it; of this one, where none is given.

        Raises:
            TeacherUnavailable: they could not be recorded.
        """
        catalog = catalog or self._catalog
        added = {
            name: adapter.to_dict() | {"deployment": catalog["deployments"][name]}
            for name, adapter in catalog["adapters"].items()
            if name not in self._configured
        }
        document = {"adapters": added, "last_serial": self._last_serial}
        try:
            await asyncio.to_thread(record.save, self._app_name, document)
        except Exception as error:
            raise TeacherUnavailable(f"the adapters could not be recorded, nothing was changed: {error}") from error


def _forget_if_deleted(app_name: str) -> None:
    """Forget what was added to an application or changed of it, where Serve is deleting it."""
    try:
        found = serve.status().applications.get(app_name)
        if found is not None and found.status == ApplicationStatus.DELETING:
            record.forget(app_name)
    except Exception as error:
        logger.warning("whether the application is deleted could not be asked: %s", error)


def build_api(
    router: Callable[[], Router], limits: BatchLimits, tokens: Tokens | None = None, timeout_s: float | None = None
) -> FastAPI:
    """The HTTP application over a Router.

    Args:
        router: gives the Router; called once per request, in the event loop that serves it.
        limits: what one request may hold; the Router keeps them too, except the size of a body.
        tokens: who may ask; None lets everybody.
        timeout_s: Serve's own limit on a request, where it has one.

    `/docs` loads its scripts from a public CDN, as FastAPI's page does: without internet use `/openapi.json`.
    """
    api = FastAPI(
        title="teacher-scoring",
        version=version("teacher-scoring"),
        description="A teacher's log-probabilities of chosen tokens. Ids in, numbers out.",
    )
    api.include_router(_own_routes(router, limits))
    api.include_router(vllm_routes(router, limits))
    # What no route answered (404, 405) comes in this project's form too.
    api.add_exception_handler(HTTPException, lambda _, error: error_response(error))
    describe_errors_and_tokens(api, own=error_response, tokens=tokens is not None)
    api.add_middleware(Guard, routes=api.routes, respond=error_response, tokens=tokens, timeout_s=timeout_s)
    return api


def error_response(error: Exception) -> Response:
    """`{"error": {"type", "message", "read", "field", "details", "code"}}` with the status as `code`.

    Of an exception that is none of ours only a plain sentence goes out: no trace, no path.
    """
    headers = None
    if isinstance(error, ScoringError):
        document, headers = wire.error_to_json(error), retry_after(error)
    elif isinstance(error, HTTPException):
        kind = HTTPStatus(error.status_code).phrase.title().replace(" ", "")
        document = {"type": kind, "message": error.detail, "code": error.status_code}
        headers = error.headers
    else:
        log_unexpected(error)
        document = {"type": "InternalError", "message": "the service failed on this request; its log says why"}
    document = {"read": None, "field": None, "details": {}, "code": 500} | document
    return json_response({"error": document}, document["code"], headers)


def _own_routes(router: Callable[[], Router], limits: BatchLimits) -> APIRouter:
    routes = APIRouter(route_class=route_answering_errors(error_response))
    readiness = _Readiness(router)

    @routes.post("/v1/matrix-reads", openapi_extra=description_of("matrix"))
    async def matrix_reads(request: Request) -> Response:
        """Log-probabilities of candidates at every response position."""
        return await _answer_reads("matrix", request, router(), limits)

    @routes.post("/v1/label-reads", openapi_extra=description_of("label"))
    async def label_reads(request: Request) -> Response:
        """Log-probabilities of label ids as the next token after a prompt."""
        return await _answer_reads("label", request, router(), limits)

    @routes.get("/v1/teachers")
    async def teachers() -> Response:
        """What every teacher is and takes, and what one call may hold."""
        known = await router().teachers()
        return json_response({"teachers": known, "limits": asdict(limits), "schema_version": SCHEMA_VERSION})

    @routes.get("/health")
    async def health() -> Response:
        """This process is alive. Says nothing of the teachers: see /ready."""
        return json_response({"status": "alive"})

    @routes.get("/ready")
    async def ready(teacher: str | None = None) -> Response:
        """Every teacher (or the one named) answered a read within the last second; of aliases and adapters, which share
        the replicas of a teacher, that teacher did."""
        return json_response({"status": "ready", "teachers": await readiness.check(teacher)})

    return routes


async def _answer_reads(kind: wire.Kind, request: Request, router: Router, limits: BatchLimits) -> Response:
    """One batch in, one answer out, each in JSON or safetensors."""
    arrived = time.monotonic()
    given = _request_form(request)
    answer_in = _answer_form(request, given)
    data = await read_body(request, limits)
    parse = _parse_safetensors if given == wire.SAFETENSORS else _parse_json
    batch, failed, options = await beside_the_loop(len(data), parse, kind, data)
    if failed and not options.return_exceptions:
        raise failed[min(failed)]
    scores = wire.SCORES[kind].assemble(0, [])
    if len(batch):
        left = options.timeout_s - (time.monotonic() - arrived)
        if left <= 0:
            raise DeadlineExceeded(f"the request took longer to read than its timeout_s of {options.timeout_s:g} s")
        ask = router.read_matrix if kind == "matrix" else router.read_labels
        scores = await ask(
            batch, timeout_s=left, return_exceptions=options.return_exceptions, trace_headers=trace_headers(request)
        )
    encode, size = wire.encode_scores, scores.values.nbytes + _RESULT_BYTES * (len(scores) + len(failed))
    if answer_in == JSON:
        encode, size = wire.encode_json, size + 4 * scores.values.nbytes  # a float32 is some 20 characters
    content = await beside_the_loop(size, lambda: encode(scores.with_failed(failed)))
    return Response(content, media_type=answer_in)


def _parse_safetensors(kind: wire.Kind, data: bytes) -> tuple[Any, dict[int, ScoringError], wire.ReadOptions]:
    batch, options = wire.decode_batch(kind, data)
    return batch, {}, options


def _parse_json(kind: wire.Kind, data: bytes) -> tuple[Any, dict[int, ScoringError], wire.ReadOptions]:
    """The good reads of a request as a batch, and the errors of the others by their place in the request."""
    reads, options = wire.reads_from_json(kind, wire.loads(data))
    failed = {i: read for i, read in enumerate(reads) if isinstance(read, ScoringError)}
    good = [read for read in reads if not isinstance(read, ScoringError)]
    return wire.BATCH[kind].from_reads(good), failed, options


def _request_form(request: Request) -> str:
    given = request.headers.get("content-type", JSON).split(";")[0].strip().lower()
    if given not in (JSON, wire.SAFETENSORS):
        raise HTTPException(415, f"content-type is {given[:80]!r}; allowed are {JSON} and {wire.SAFETENSORS}")
    return given


def _answer_form(request: Request, given: str) -> str:
    """The form the Accept header likes best; that of the request where it leaves the choice."""
    wanted = []
    for entry in request.headers.get("accept", "*/*").split(","):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        try:
            wanted.append((-float(quality), name))
        except ValueError:
            raise HTTPException(406, f"accept has a quality that is no number: {quality[:20]!r}") from None
    forms = {JSON: JSON, wire.SAFETENSORS: wire.SAFETENSORS, "*/*": given, "application/*": given}
    for quality, name in sorted(wanted, key=lambda entry: entry[0]):
        if name in forms and quality < 0:
            return forms[name]
    raise HTTPException(406, f"accept names neither {JSON} nor {wire.SAFETENSORS}")


class _Readiness:
    """Whether teachers answer, asked with a real read, at most once a second and once at a time."""

    def __init__(self, router: Callable[[], Router]) -> None:
        self._router = router
        self._asked: dict[str | None, tuple[float, asyncio.Task]] = {}  # by ?teacher=, with the time

    async def check(self, teacher: str | None) -> dict[str, str]:
        """Per teacher "ready", or "overloaded" when its replicas refuse more for now, which only the living do.

        Raises:
            ScoringError: a teacher cannot answer.
        """
        now = time.monotonic()
        self._asked = {
            name: (asked, task)
            for name, (asked, task) in self._asked.items()
            if not task.done() or now - asked < _READY_FOR_S
        }
        if teacher not in self._asked:
            # In a context of its own: the caller who happens to be first may leave, and must not take it along.
            task = asyncio.create_task(self._ask(teacher), context=contextvars.Context())
            self._asked[teacher] = now, task
        found = await asyncio.shield(self._asked[teacher][1])
        if isinstance(found, ScoringError):
            raise found
        return found

    async def _ask(self, teacher: str | None) -> dict[str, str] | ScoringError:
        """What `check` returns or raises, as a value: nobody may be left to see an exception."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                served = await self._router().served_by()
                if teacher is not None and teacher not in served:
                    return UnknownTeacher(f"is {teacher!r}; the teachers are {', '.join(served)}", field="teacher")
                names = list(served) if teacher is None else [teacher]
                # One read for all that share replicas, of the first: a teacher comes before its adapters.
                asked = {served[name]: name for name in reversed(names)}
                answers = await asyncio.gather(*(self._ask_one(name) for name in asked.values()))
                by_deployment = dict(zip(asked, answers, strict=True))
                return {name: by_deployment[served[name]] for name in names}
        except TimeoutError:
            return TeacherUnavailable(f"no answer to a one-token read within {_READY_TIMEOUT_S:g} s")
        except ScoringError as error:
            return TeacherUnavailable(error.message, **error.details)
        except Exception as error:
            log_unexpected(error)
            return TeacherUnavailable("a one-token read failed; the service's log says why")

    async def _ask_one(self, name: str) -> str:
        read = LabelRead(prompt_ids=[0], label_ids=[0], teacher=name, priority=_FIRST)
        try:
            await self._router().read_labels([read], timeout_s=_READY_READ_S)
        except Overloaded:
            return "overloaded"
        except ScoringError as error:
            raise TeacherUnavailable(f"teacher {name!r} did not answer a one-token read: {error.message}") from error
        return "ready"
