"""The HTTP routes of this project over a Router that answers known numbers, and the HTTP clients against them."""

import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient
from ray.serve.config import HTTPOptions

from deployments.http_door import beside_the_loop
from deployments.ingress import Ingress, build_api
from deployments.router import Router
from scoring import LabelBatch, LabelRead, LabelScores, MatrixBatch, MatrixRead, wire
from scoring.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    InvalidRead,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    UnknownTeacher,
    VersionMismatch,
    WrongEngineAnswer,
)
from scoring.http_client import _LIMITS, AsyncHttpScoringClient, HttpScoringClient
from scoring.limits import BatchLimits
from tests.stand_in_replicas import StandInReplica, StandInReplicas
from tests.stand_in_router import BATCH_LIMITS, StandInRouter, score

BINARY = {"content-type": wire.SAFETENSORS}
MATRIX = {"prompt_ids": [1, 2], "response_ids": [3, 4], "candidate_ids": [[5, 6], [7]]}
LABEL = {"prompt_ids": [1, 2], "label_ids": [9, 8]}


@pytest.fixture
def router() -> StandInRouter:
    return StandInRouter()


@pytest.fixture
def api(router) -> TestClient:
    return TestClient(build_api(lambda: router, BATCH_LIMITS))


def raising(error: Exception):
    def raise_it():
        raise error

    return raise_it


# ---------------------------------------------------------------- reads


def test_a_matrix_read_in_json(api):
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX]})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    (result,) = response.json()["results"]
    assert result["logprobs"] == [[-5.0, -6.0], [-7.125, None]]
    assert result["response_logprobs"] == [-3.0, -4.125]
    assert result["rows"] == [0, 1]
    assert result["shape"] == [2, 2]
    assert result["meta"]["prompt_tokens"] == 4
    assert result["meta"].keys() >= {"engine", "dtype", "head_dtype", "tensor_parallel_size"}
    assert response.json()["schema_version"] == 1


def test_what_the_teacher_thinks_beside_the_candidates_in_json(api):
    asked = {"top_k": 2, "extras": ["rank", "entropy", "tail"], "rows": [1]}
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX | asked, MATRIX | {"extras": "tail"}, MATRIX]})
    everything, tail_only, plain = response.json()["results"]
    assert everything["logprobs"] == [[-7.125, None]]
    assert everything["response_logprobs"] == [-4.125]
    assert (everything["top_k"], everything["top_ids"]) == (2, [[5, 6]])
    assert everything["top_logprobs"] == [[-5.125, -6.125]]
    assert everything["tail_logprob"] == [-1001.0]
    assert everything["entropy"] == [1.5]
    assert everything["rank"] == [15]
    assert tail_only["tail_logprob"] == [-1000.0, -1001.0]
    assert tail_only.keys() - plain.keys() == {"tail_logprob"}
    assert plain.keys() == {"logprobs", "response_logprobs", "rows", "shape", "meta"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 65}, "is 65; this teacher takes at most 64 (its setting max_candidates)"),
        ({"top_k": -1}, "is -1; allowed are integers from 0"),
        ({"top_k": 2.0}, "is 2.0; allowed are integers from 0"),
        ({"extras": ["kl"]}, "names 'kl'; allowed are any of tail, entropy"),
    ],
)
def test_what_cannot_be_asked_beside_the_candidates_is_422_by_name(api, change, says):
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX, MATRIX | change]})
    error = response.json()["error"]
    assert (response.status_code, error["read"], error["field"]) == (422, 1, next(iter(change)))
    assert says in error["message"]


def test_rows_of_a_matrix_read_in_json(api):
    reads = [
        {**MATRIX, "rows": [1, 0]},
        {**MATRIX, "rows": [False, True]},
        {**MATRIX, "response_ids": [3, 4], "rows": []},
    ]
    results = api.post("/v1/matrix-reads", json={"reads": reads}).json()["results"]
    assert [result["rows"] for result in results] == [[1, 0], [1], []]
    assert [result["response_logprobs"] for result in results] == [[-4.125, -3.0], [-4.125], []]


def test_a_label_read_in_json(api):
    response = api.post("/v1/label-reads", json={"reads": [LABEL, {**LABEL, "teacher": "math"}]})
    first, second = response.json()["results"]
    assert first["logprobs"] == [-9.0, -8.0]
    assert first["meta"]["teacher"] == "default"
    assert second["meta"]["teacher"] == "math"


def test_no_reads_have_no_results(api):
    assert api.post("/v1/label-reads", json={"reads": []}).json() == {"results": [], "schema_version": 1}


def test_reads_in_safetensors(api):
    batch = MatrixBatch.from_reads([MatrixRead([1, 2], [3, 4], [[5, 6], [7]]), MatrixRead([1], [])])
    response = api.post("/v1/matrix-reads", content=wire.encode_batch(batch), headers=BINARY)
    assert response.headers["content-type"] == wire.SAFETENSORS
    scores = wire.decode_scores("matrix", response.content)
    assert scores[0].logprobs.tolist() == [[-5.0, -6.0], [-7.125, -np.inf]]
    assert scores[1].logprobs.shape == (0, 0)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("application/json", "application/json"),
        (wire.SAFETENSORS, wire.SAFETENSORS),
        (f"{wire.SAFETENSORS}, application/json;q=0.5", wire.SAFETENSORS),
        (f"application/json;q=0.1, {wire.SAFETENSORS};q=0.9", wire.SAFETENSORS),
        (f"{wire.SAFETENSORS};q=0, */*", "application/json"),
        ("text/html, application/json;q=0.9", "application/json"),
    ],
)
def test_the_answer_comes_in_the_form_that_accept_likes_best_and_else_in_the_requests(api, accept, form):
    response = api.post("/v1/label-reads", json={"reads": [LABEL]}, headers={"accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"] == form


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"accept": "text/html"}, 406), ({"accept": "*/*;q=much"}, 406), ({"content-type": "text/plain"}, 415)],
)
def test_another_media_type_is_refused(api, headers, status):
    response = api.post("/v1/label-reads", content=json.dumps({"reads": [LABEL]}), headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


def test_a_wrong_read_is_422_with_its_index_and_field_and_nothing_is_asked(api, router):
    wrong = {**MATRIX, "candidate_ids": [[5, -1, 7], [8]]}
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX, wrong]})
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["type"], error["read"], error["field"], error["code"]) == (
        "InvalidRead",
        1,
        "candidate_ids[0][1]",
        422,
    )
    assert "is -1" in error["message"]
    assert router.calls == []


def test_what_the_teacher_refuses_is_422_with_its_index(api):
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX, {**MATRIX, "candidate_ids": [[5], [2048]]}]})
    error = response.json()["error"]
    assert (response.status_code, error["read"], error["field"]) == (422, 1, "candidate_ids[1][0]")
    assert "2048" in error["message"]


def test_failed_reads_stay_in_their_places_when_asked(api):
    reads = [
        {"prompt_ids": [], "label_ids": [1]},  # refused by the door
        LABEL,
        {**LABEL, "label_ids": [2048]},  # refused by the teacher
        {**LABEL, "temperature": 0.7},  # refused by the door
        {**LABEL, "label_ids": [4]},
    ]
    response = api.post("/v1/label-reads", json={"reads": reads, "return_exceptions": True})
    assert response.status_code == 200
    results = response.json()["results"]
    assert results[1]["logprobs"] == [-9.0, -8.0]
    assert results[4]["logprobs"] == [-4.0]
    assert [(i, results[i]["error"]["read"], results[i]["error"]["field"]) for i in (0, 2, 3)] == [
        (0, 0, "prompt_ids"),
        (2, 2, "label_ids[0]"),
        (3, 3, "temperature"),
    ]


def test_reads_that_all_fail_in_the_door_ask_nobody(api, router):
    response = api.post("/v1/label-reads", json={"reads": [{}, 5], "return_exceptions": True})
    assert [result["error"]["read"] for result in response.json()["results"]] == [0, 1]
    assert router.calls == []


@pytest.mark.parametrize("field", ["temperature", "sampling_params", "max_tokens", "model", "stream"])
def test_an_unknown_field_of_a_request_is_422_by_name(api, router, field):
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX], field: {"prompt_logprobs": 20}})
    assert (response.status_code, response.json()["error"]["field"]) == (422, field)
    assert router.calls == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"reads": NaN}', b'{"reads": [], "reads": []}', b"\xff"])
@pytest.mark.parametrize("route", ["/v1/matrix-reads", "/v1/label-reads"])
def test_a_body_that_is_no_request_is_422(api, route, body):
    response = api.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "InvalidRead"


def test_garbage_in_safetensors_is_422(api):
    response = api.post("/v1/matrix-reads", content=b"\xff" * 64, headers=BINARY)
    assert response.status_code == 422
    assert "header" in response.json()["error"]["message"]


def test_labels_sent_to_the_matrix_route_are_422(api):
    data = wire.encode_batch(LabelBatch.from_reads([LabelRead([1], [2])]))
    response = api.post("/v1/matrix-reads", content=data, headers=BINARY)
    assert response.status_code == 422
    assert "matrix-reads" in response.json()["error"]["message"]


# ---------------------------------------------------------------- what reaches the Router


def test_the_deadline_is_600_s_unless_the_body_says_otherwise_and_counts_from_arrival(api, router):
    api.post("/v1/label-reads", json={"reads": [LABEL]})
    api.post("/v1/label-reads", json={"reads": [LABEL], "timeout_s": 2.5})
    batch = LabelBatch.from_reads([LabelRead([1], [2])])
    api.post("/v1/label-reads", content=wire.encode_batch(batch, timeout_s=7), headers=BINARY)
    given = [call["timeout_s"] for call in router.calls]
    for seconds, full in zip(given, [600, 2.5, 7], strict=True):
        assert full - 1 < seconds < full


def test_no_query_and_no_header_changes_what_is_asked(api, router):
    api.post(
        "/v1/label-reads?timeout_s=3000&max_candidates=9999&return_exceptions=true",
        json={"reads": [LABEL], "timeout_s": 5},
        headers={"x-request-timeout-seconds": "0", "timeout_s": "3000", "x-max-candidates": "9999"},
    )
    assert router.calls[0]["timeout_s"] < 5


def test_the_trace_context_goes_along_and_no_other_header(api, router):
    headers = {"traceparent": "00-ab-cd-01", "tracestate": "a=1", "x-other": "5"}
    api.post("/v1/label-reads", json={"reads": [LABEL]}, headers=headers)
    api.post("/v1/label-reads", json={"reads": [LABEL]})
    given = [call["trace_headers"] for call in router.calls]
    assert given == [{"traceparent": "00-ab-cd-01", "tracestate": "a=1"}, None]


async def test_a_client_that_leaves_cancels_the_work(router):
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def work():
        asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    router.before = work
    transport = httpx.ASGITransport(build_api(lambda: router, BATCH_LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        request = asyncio.create_task(client.post("/v1/label-reads", json={"reads": [LABEL]}))
        await asyncio.wait_for(asked.wait(), 10)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert cancelled.is_set()


async def test_a_big_body_is_parsed_beside_the_loop():
    assert await beside_the_loop(1000, threading.get_ident) == threading.get_ident()
    assert await beside_the_loop(1_000_000, threading.get_ident) != threading.get_ident()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRead("is wrong", read=2, field="rows"), 422),
        (UnknownTeacher("is 'x'"), 422),
        (VersionMismatch("expects 3"), 409),
        (Overloaded("every replica refused", retry_after_s=1.6), 429),
        (TeacherUnavailable("no replica"), 503),
        (DeadlineExceeded("too late"), 504),
        (WrongEngineAnswer("NaN"), 500),
    ],
)
def test_every_error_has_its_status_and_its_fields_in_the_body(api, router, error, status):
    router.before = raising(error)
    response = api.post("/v1/matrix-reads", json={"reads": [MATRIX]})
    assert response.status_code == status
    assert response.json() == {
        "error": {
            "type": type(error).__name__,
            "message": error.message,
            "read": error.read,
            "field": error.field,
            "details": error.details,
            "code": status,
        }
    }


def test_overload_says_when_to_come_back(api, router):
    router.before = raising(Overloaded("every replica refused", retry_after_s=1.6))
    assert api.post("/v1/matrix-reads", json={"reads": [MATRIX]}).headers["retry-after"] == "2"
    router.before = raising(Overloaded("every replica refused", retry_after_s=0.01))
    assert api.post("/v1/matrix-reads", json={"reads": [MATRIX]}).headers["retry-after"] == "1"


def test_a_failure_nobody_foresaw_is_a_plain_500_and_the_log_says_where_but_not_what_it_says(api, router, caplog):
    wrong = RuntimeError("at /srv/secret.py\nline 5")
    wrong.__cause__ = KeyError("secret")
    router.before = raising(wrong)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        response = api.post("/v1/matrix-reads", json={"reads": [MATRIX]})
        logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalError"
    assert "secret" not in response.text
    failed, asked = dict.fromkeys(record.getMessage() for record in caplog.records if record.name == "ray.serve")
    assert re.fullmatch(r"a request failed unexpectedly: RuntimeError at test_http_api\.py:\d+, from KeyError", failed)
    assert asked.startswith("POST /v1/matrix-reads 500 ")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/label-reads", 405)])
def test_what_no_route_answers_has_the_same_form_of_error(api, method, path, status):
    response = api.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert response.json()["error"]["message"]


# ---------------------------------------------------------------- the other routes


def test_teachers_and_what_one_call_may_hold(api):
    document = api.get("/v1/teachers").json()
    assert document["limits"] == dataclasses.asdict(BATCH_LIMITS)
    teachers = document["teachers"]
    assert teachers["math"]["replicas"] == 2
    assert [name for name, info in teachers.items() if info["default"]] == ["default"]


def test_version_is_that_of_vllm_and_ours_beside_it(api):
    assert api.get("/version").json() == {"version": "0.32.0", "teacher_scoring": "0.1.0", "schema_version": 1}


def test_alive_needs_no_teacher(api, router):
    router.before = raising(TeacherUnavailable("no replica"))
    assert api.get("/health").status_code == 200
    assert router.calls == []


@pytest.mark.parametrize("kind", ["matrix", "label"])
def test_docs_describe_both_forms_and_every_field_with_an_example_that_works(api, kind):
    assert api.get("/docs").status_code == 200
    route = f"/v1/{kind}-reads"
    described = api.get("/openapi.json").json()["paths"][route]["post"]
    request, answer = described["requestBody"]["content"], described["responses"]["200"]["content"]
    assert request.keys() == answer.keys() == {"application/json", wire.SAFETENSORS}
    read = request["application/json"]["schema"]["properties"]["reads"]["items"]
    assert read["properties"].keys() == {field.name for field in dataclasses.fields(wire.READ[kind])}
    assert read["required"] == ["prompt_ids", "response_ids" if kind == "matrix" else "label_ids"]
    example = request["application/json"]["example"]
    (result,) = api.post(route, json=example).raise_for_status().json()["results"]
    due = answer["application/json"]["schema"]["properties"]["results"]["items"]["properties"]
    assert result.keys() | {"error"} == due.keys()
    for name, schema in due.items():
        if name in result:
            jsonschema.Draft202012Validator(schema).validate(result[name])
    jsonschema.Draft202012Validator(request["application/json"]["schema"]).validate(example)


def test_ready_reads_one_token_from_every_teacher(api, router):
    response = api.get("/ready")
    assert response.status_code == 200
    assert response.json()["teachers"] == {"default": "ready", "math": "ready"}
    asked = [call["batch"][0] for call in router.calls]
    assert sorted((read.teacher, read.prompt_ids.tolist()) for read in asked) == [("default", [0]), ("math", [0])]


def test_ready_of_one_teacher(api, router):
    assert api.get("/ready?teacher=math").json()["teachers"] == {"math": "ready"}
    assert [call["batch"][0].teacher for call in router.calls] == ["math"]
    response = api.get("/ready?teacher=nobody")
    assert response.status_code == 422
    assert "nobody" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "error", [TeacherUnavailable("no replica"), DeadlineExceeded("hung"), WrongEngineAnswer("NaN")]
)
def test_a_teacher_that_cannot_answer_is_not_ready(api, router, error):
    router.before = raising(error)
    response = api.get("/ready?teacher=math")
    assert response.status_code == 503
    assert "'math'" in response.json()["error"]["message"]
    assert error.message in response.json()["error"]["message"]


def test_a_failure_nobody_foresaw_is_not_ready(api, router):
    router.before = raising(RuntimeError("at /srv/secret.py"))
    response = api.get("/ready")
    assert response.status_code == 503
    assert "secret" not in response.text


def test_an_overloaded_teacher_is_alive_and_ready(api, router):
    router.before = raising(Overloaded("every replica refused", retry_after_s=1))
    assert api.get("/ready").json()["teachers"] == {"default": "overloaded", "math": "overloaded"}


async def test_readiness_is_asked_once_a_second_for_all_callers_and_outlives_the_first(router):
    release = asyncio.Event()
    router.before = release.wait
    transport = httpx.ASGITransport(build_api(lambda: router, BATCH_LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        first = asyncio.create_task(client.get("/ready?teacher=math"))
        while not router.calls:
            await asyncio.sleep(0)
        others = [asyncio.create_task(client.get("/ready?teacher=math")) for _ in range(5)]
        await asyncio.sleep(0.05)
        first.cancel()
        release.set()
        assert [response.status_code for response in await asyncio.gather(*others)] == [200] * 5
        assert (await client.get("/ready?teacher=math")).status_code == 200
        assert len(router.calls) == 1
        await asyncio.sleep(1.1)
        assert (await client.get("/ready?teacher=math")).status_code == 200
        assert len(router.calls) == 2


async def test_readiness_is_asked_outside_the_context_of_its_caller(router):
    """Serve finds a request's calls by its context, and cancels them when that one client leaves."""
    caller = contextvars.ContextVar("caller", default=None)
    seen: list = []
    router.before = lambda: seen.append(caller.get())
    caller.set("the first")
    transport = httpx.ASGITransport(build_api(lambda: router, BATCH_LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.get("/ready?teacher=math")
        await client.post("/v1/label-reads", json={"reads": [LABEL]})
    assert seen == [None, "the first"]


def test_the_deployment_asks_for_no_cpu():
    assert Ingress.ray_actor_options["num_cpus"] == 0


# ---------------------------------------------------------------- the clients


@contextlib.contextmanager
def served(app):
    """The address of a real server of `app`, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def relay(url: str, closing: int):
    """A front of `url` that closes its first connections; gives its own address and the list of connections."""
    target = httpx.URL(url)
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                if len(connections) <= closing:
                    connection.recv(1)
                    connection.close()
                    continue
                behind = socket.create_connection((target.host, target.port))
                for pair in ((connection, behind), (behind, connection)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.fixture(scope="module")
def shared_server():
    """One server for the module, and the place of the Router it asks."""
    place: list[StandInRouter] = []
    with served(build_api(lambda: place[-1], BATCH_LIMITS)) as url:
        yield url, place


@pytest.fixture
def server(router, shared_server) -> str:
    url, place = shared_server
    place.append(router)
    return url


@pytest.fixture(params=[HttpScoringClient, AsyncHttpScoringClient], ids=["sync", "async"])
def ask(request):
    """Calls one method of a client of either kind: `ask(url, method, *args, **kwargs)`."""

    def call(url: str, method: str, *args, settings=None, **kwargs):
        if request.param is HttpScoringClient:
            with HttpScoringClient(url, **(settings or {})) as client:
                return getattr(client, method)(*args, **kwargs)

        async def run():
            async with AsyncHttpScoringClient(url, **(settings or {})) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(run())

    return call


@pytest.mark.parametrize("binary", [True, False])
def test_a_client_reads_a_matrix(server, ask, binary):
    reads = [
        MatrixRead([1, 2], [3, 4], [[5, 6], [7]]),
        MatrixRead([1], [2, 3, 4], [8], rows=[2, 0], teacher="math"),
        MatrixRead([1], [], np.zeros((0, 3), np.int32)),
        MatrixRead([1], [9]),
    ]
    scores = ask(server, "read_matrix", reads, settings={"binary": binary})
    assert scores[0].logprobs.tolist() == [[-5.0, -6.0], [-7.125, -np.inf]]
    assert scores[0].response_logprobs.tolist() == [-3.0, -4.125]
    assert scores[1].logprobs.tolist() == [[score(8, 2)], [score(8, 0)]]
    assert scores[1].rows.tolist() == [2, 0]
    assert scores[1].meta.teacher == "math"
    assert scores[2].logprobs.shape == (0, 3)
    assert scores[3].logprobs.shape == (1, 0)
    assert scores[0].logprobs.dtype == np.float32


@pytest.mark.parametrize("binary", [True, False])
def test_a_client_reads_what_the_teacher_thinks_beside_the_candidates(server, ask, binary):
    reads = [
        MatrixRead([1, 2], [3, 4], [[5, 6], [7]], top_k=2, extras=("tail", "entropy")),
        MatrixRead([1], [2, 3, 4], rows=[2, 0], top_k=3),  # the usual way to the teacher's own best
        MatrixRead([1], [], [8, 9], top_k=5, extras="entropy"),
        MatrixRead([1], [9], [8], extras="tail", teacher="math"),
        MatrixRead([1], [9]),
    ]
    scores = ask(server, "read_matrix", reads, settings={"binary": binary})
    first, best, none, tailed, plain = scores
    assert first.logprobs.tolist() == [[-5.0, -6.0], [-7.125, -np.inf]]
    assert first.top_ids.tolist() == [[4, 5], [5, 6]]
    assert first.top_logprobs.tolist() == [[-4.0, -5.0], [-5.125, -6.125]]
    assert first.tail_logprob.tolist() == [-1000.0, -1001.0]
    assert first.entropy.tolist() == [0.5, 1.5]
    assert [part.dtype for part in (first.top_ids, first.top_logprobs, first.tail_logprob, first.entropy)] == [
        np.int32,
        *[np.float32] * 3,
    ]
    assert best.logprobs.shape == (2, 0)
    assert best.top_ids.tolist() == [[5, 6, 7], [3, 4, 5]]
    assert best.top_logprobs.tolist() == [[-5.25, -6.25, -7.25], [-3.0, -4.0, -5.0]]
    assert (best.tail_logprob, best.entropy) == (None, None)
    assert (none.logprobs.shape, none.top_ids.shape, none.top_logprobs.shape) == ((0, 2), (0, 5), (0, 5))
    assert none.entropy.shape == (0,) and none.tail_logprob is None
    assert tailed.tail_logprob.tolist() == [-1000.0] and tailed.top_ids is None
    assert (plain.top_ids, plain.top_logprobs, plain.tail_logprob, plain.entropy) == (None,) * 4


def test_single_reads_keep_what_they_asked_for_when_they_travel_together(server, router):
    asked = [{"top_k": 2}, {"extras": "tail"}, {"extras": ("tail", "entropy"), "top_k": 1}, {}]
    with HttpScoringClient(server) as client:
        futures = [client.submit(MatrixRead([1], [5], [7], **more)) for more in asked]
        first, second, third, plain = (future.result() for future in futures)
        seen = dict(client.iter_matrix([MatrixRead([1], [5], [7], **more) for more in asked]))
    assert first.top_ids.tolist() == seen[0].top_ids.tolist() == [[6, 7]]
    assert second.tail_logprob.tolist() == seen[1].tail_logprob.tolist() == [-1000.0] and second.top_ids is None
    assert third.entropy.tolist() == seen[2].entropy.tolist() == [0.5]
    assert third.top_ids.tolist() == [[6]]
    assert plain.top_ids is plain.tail_logprob is plain.entropy is seen[3].entropy is None
    assert [score.logprobs.tolist() for score in (first, second, third, plain)] == [[[-7.0]]] * 4


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ({"top_k": 2}, {"top_k": 1}),
        ({"top_k": 2}, {}),
        ({}, {"top_k": 2}),
        ({"extras": "tail"}, {"extras": "entropy"}),
        ({"extras": "tail"}, {}),
        ({}, {"extras": ("tail", "entropy")}),
        ({"top_k": 1}, {"extras": ("tail", "entropy")}),  # as many columns
    ],
)
def test_an_answer_to_another_question_is_an_error_of_the_client(router, ask, binary, asked, answered):
    class Forgetful(StandInRouter):
        async def read_matrix(self, reads, **options):
            changed = [reads[0], MatrixRead(reads[1].prompt_ids, reads[1].response_ids, **answered)]
            return await super().read_matrix(changed, **options)

    router = Forgetful()
    name = "top_k" if "top_k" in asked or "top_k" in answered else "extras"
    with (
        served(build_api(lambda: router, BATCH_LIMITS)) as url,
        pytest.raises(WrongEngineAnswer, match=f"read 1: was answered with {name} .* is due"),
    ):
        ask(url, "read_matrix", [MatrixRead([1], [2]), MatrixRead([1], [2], **asked)], settings={"binary": binary})


@pytest.mark.parametrize("binary", [True, False])
def test_a_client_reads_labels_of_a_batch(server, ask, binary):
    batch = LabelBatch.from_reads([LabelRead([1], [9, 8, 9]), LabelRead([1, 2], [3])])
    scores = ask(server, "read_labels", batch, settings={"binary": binary})
    assert [s.logprobs.tolist() for s in scores] == [[-9.0, -8.0, -9.0], [-3.0]]


def test_a_client_lists_the_teachers(server, ask):
    assert ask(server, "teachers")["math"]["vocabulary"] == 2048


def test_no_reads_need_no_server(ask):
    assert len(ask("http://127.0.0.1:9", "read_matrix", [])) == 0


@pytest.mark.parametrize("binary", [True, False])
def test_a_failed_read_is_raised_as_its_own_error_after_one_attempt(server, router, ask, binary):
    reads = [LabelRead([1], [2]), LabelRead([1], [2048])]
    with pytest.raises(InvalidRead, match="2048") as caught:
        ask(server, "read_labels", reads, settings={"binary": binary})
    assert (caught.value.read, caught.value.field) == (1, "label_ids[0]")
    assert len(router.calls) == 1


@pytest.mark.parametrize("binary", [True, False])
def test_failed_reads_stay_in_their_places_for_a_client(server, ask, binary):
    reads = [LabelRead([1], [2]), LabelRead([1], [2048]), LabelRead([1], [3], teacher="nobody")]
    scores = ask(server, "read_labels", reads, return_exceptions=True, settings={"binary": binary})
    assert scores[0].logprobs.tolist() == [-2.0]
    assert isinstance(scores[1], InvalidRead)
    assert isinstance(scores[2], UnknownTeacher)
    assert scores[2].read == 2


def test_a_server_that_closes_two_connections_gives_one_answer_at_the_third_attempt(server, router, ask):
    with relay(server, closing=2) as (url, connections):
        scores = ask(url, "read_labels", [LabelRead([1], [5])])
    assert scores[0].logprobs.tolist() == [-5.0]
    assert len(connections) == 3
    assert len(router.calls) == 1


def test_calls_share_a_connection(server):
    with relay(server, closing=0) as (url, connections), HttpScoringClient(url) as client:
        for _ in range(3):
            client.read_labels([LabelRead([1], [5])])
    assert len(connections) == 1


@pytest.mark.parametrize(
    "error",
    [Overloaded("every replica refused", retry_after_s=0.2), TeacherUnavailable("no replica", retry_after_s=0.2)],
)
def test_overload_is_tried_again_after_the_time_it_names(server, router, ask, error):
    def refuse_twice():
        if len(router.calls) <= 2:
            raise error

    router.before = refuse_twice
    started = time.monotonic()
    scores = ask(server, "read_labels", [LabelRead([1], [5])])
    assert scores[0].logprobs.tolist() == [-5.0]
    assert len(router.calls) == 3
    assert time.monotonic() - started >= 2 * 0.2


def test_the_retry_after_of_a_proxy_is_heeded_too(ask):
    started: list[float] = []

    async def busy_once(scope, receive, send):
        started.append(time.monotonic())
        status = 429 if len(started) == 1 else 404
        headers = [(b"retry-after", b"1"), (b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>no</html>"})

    with served(busy_once) as url, pytest.raises(ScoringError, match="404: <html>no</html>"):
        ask(url, "teachers")
    assert len(started) == 2
    assert started[1] - started[0] >= 1


@pytest.mark.parametrize("error", [InvalidRead("is wrong"), VersionMismatch("expects 3"), WrongEngineAnswer("NaN")])
def test_what_another_attempt_cannot_change_is_asked_once(server, router, ask, error):
    router.before = raising(error)
    with pytest.raises(type(error), match=error.message):
        ask(server, "read_labels", [LabelRead([1], [5])])
    assert len(router.calls) == 1


def test_retries_end_with_the_deadline(server, router, ask):
    router.before = raising(TeacherUnavailable("no replica"))
    started = time.monotonic()
    # The deadline falls between two attempts (the last error is raised) or into one.
    with pytest.raises((TeacherUnavailable, DeadlineExceeded), match=r"no replica|timeout_s"):
        ask(server, "read_labels", [LabelRead([1], [5])], timeout_s=0.6)
    assert time.monotonic() - started < 3
    assert len(router.calls) >= 2
    assert all(call["timeout_s"] < 0.6 for call in router.calls)


def test_nobody_there_is_unavailable_within_the_deadline(ask):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(TeacherUnavailable, match="cannot be reached"):
        ask(f"http://127.0.0.1:{port}", "read_labels", [LabelRead([1], [5])], timeout_s=0.3)
    assert time.monotonic() - started < 3


def test_a_server_that_stays_silent_is_given_up_at_the_deadline(ask):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", "read_labels", [LabelRead([1], [5])], timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 20


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5", True])
def test_a_deadline_that_is_none_is_refused(ask, timeout_s):
    with pytest.raises(InvalidRead, match="seconds above 0"):
        ask("http://127.0.0.1:9", "read_labels", [LabelRead([1], [5])], timeout_s=timeout_s)


@contextlib.contextmanager
def tampering(router, change):
    """A server whose JSON answers are changed on their way, as by a proxy that knows better."""
    api = build_api(lambda: router, BATCH_LIMITS)

    async def app(scope, receive, send):
        async def changed(message):
            if message["type"] == "http.response.start":
                message["headers"] = [(k, v) for k, v in message["headers"] if k != b"content-length"]
            elif message.get("body"):
                body = json.loads(message["body"])
                change(body)
                message["body"] = json.dumps(body).encode()
            await send(message)

        await api(scope, receive, changed)

    with served(app) as url:
        yield url


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("schema_version"),
        lambda body: body.update(schema_version=2),
        lambda body: body["results"].pop(),
        lambda body: body["results"][0].pop("rows"),
        lambda body: body["results"][0].pop("logprobs"),
        lambda body: body["results"][0].update(rows=[1, 0]),
        lambda body: body["results"][0].update(shape=[2, 1], logprobs=[[-1], [-2]]),
        lambda body: body["results"][0].update(shape=[1, 2], logprobs=[[-1, -2]], rows=[0], response_logprobs=[-1]),
        lambda body: body["results"][0]["meta"].update(teacher="other"),
    ],
)
def test_an_answer_that_lost_something_on_the_way_is_an_error_and_never_zeros(router, ask, change):
    reads = [MatrixRead([1], [2, 3], [[5, 6], [7, 8]], teacher="math"), MatrixRead([1], [2])]
    with tampering(router, change) as url, pytest.raises(WrongEngineAnswer):
        ask(url, "read_matrix", reads, settings={"binary": False})


def test_labels_lost_on_the_way_are_an_error(router, ask):
    change = lambda body: body["results"][0]["logprobs"].pop()  # noqa: E731
    with tampering(router, change) as url, pytest.raises(WrongEngineAnswer, match="is due"):
        ask(url, "read_labels", [LabelRead([1], [2, 3])], settings={"binary": False})


def test_an_untampered_answer_passes_the_same_way(router, ask):
    with tampering(router, lambda body: None) as url:
        scores = ask(url, "read_labels", [LabelRead([1], [2, 3])], settings={"binary": False})
    assert scores[0].logprobs.tolist() == [-2.0, -3.0]


def test_the_token_is_sent_and_the_environment_has_no_say(router, ask, monkeypatch):
    seen: list[str | None] = []
    api = build_api(lambda: router, BATCH_LIMITS)

    async def app(scope, receive, send):
        seen.append(dict(scope["headers"]).get(b"authorization"))
        await api(scope, receive, send)

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with served(app) as url:
        ask(url, "teachers", settings={"token": "secret", "timeout_s": 3})
        ask(url, "teachers", settings={"timeout_s": 3})
    assert seen == [b"Bearer secret", None]


def test_a_client_drops_an_idle_connection_before_the_server_does():
    uvicorns = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert _LIMITS.keepalive_expiry < min(uvicorns, HTTPOptions().keep_alive_timeout_s)


def test_the_client_needs_no_ray_torch_or_vllm():
    code = (
        "import sys, scoring.http_client\n"
        "print([m for m in ('ray', 'torch', 'vllm', 'fastapi', 'pydantic', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---------------------------------------------------------------- many reads, one by one


class FullAtFirst(StandInRouter):
    """Refuses some reads of the first calls, as replicas that have their fill do."""

    refusals = 2

    async def read_labels(self, reads, **options):
        scores = await super().read_labels(reads, **options | {"return_exceptions": True})
        if self.refusals:
            self.refusals -= 1
            last, full = len(scores) - 1, LabelScores.failed(Overloaded("full", retry_after_s=0.01), 1)
            kept = np.arange(last)
            scores = LabelScores.assemble(last + 1, [(kept, scores, kept), (np.array([last]), full, np.array([0]))])
        return scores if options["return_exceptions"] else scores.raise_first()


@pytest.mark.parametrize("return_exceptions", [True, False])
def test_a_refused_read_is_asked_again_by_the_client(ask, return_exceptions):
    router = FullAtFirst()
    with served(build_api(lambda: router, BATCH_LIMITS)) as url:
        reads = [LabelRead([1], [i]) for i in range(4)]
        scores = ask(url, "read_labels", reads, return_exceptions=return_exceptions)
    assert [s.logprobs.tolist() for s in scores] == [[-0.0], [-1.0], [-2.0], [-3.0]]
    again = 1 if return_exceptions else 4  # the service answered the others, or failed the call
    assert [len(call["batch"]) for call in router.calls] == [4, again, again]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        (BatchLimits(3, 10**6, 10**6, 10**6), 4),
        (BatchLimits(100, 9, 10**6, 10**6), 4),
        (BatchLimits(100, 10**6, 10**6, 60), 2),
        (BatchLimits(100, 10**6, 9000, 10**6), None),
    ],
    ids=["reads", "tokens", "answer", "request"],
)
def test_a_client_cuts_what_is_too_big_for_one_call(router, ask, binary, limits, calls):
    class Limited(StandInRouter):
        async def read_matrix(self, reads, **options):
            limits.check(reads)
            return await super().read_matrix(reads, **options)

    router = Limited()
    reads = [MatrixRead([1, 2], [i], [[i + 1] * 10 if i > 8 else [i + 1]]) for i in range(10)]
    with served(build_api(lambda: router, limits)) as url:
        if calls is None:
            reads = [MatrixRead([1, 2], [i] * 10, [[i + 1] * 60] * 10) for i in range(10)]
        scores = ask(url, "read_matrix", reads, settings={"binary": binary})
    assert [s.response_logprobs[0] for s in scores] == [score(i) for i in range(10)]
    assert len(router.calls) == calls or (calls is None and len(router.calls) > 1)


async def test_calls_that_learn_the_limits_at_the_same_time_are_all_cut(router):
    limits = BatchLimits(3, 10**6, 10**6, 10**6)

    class Limited(StandInRouter):
        refused = 0

        async def read_matrix(self, reads, **options):
            if len(reads) > 3:  # the refusals leave together
                self.refused += 1
                while self.refused < 2:
                    await asyncio.sleep(0.001)
            limits.check(reads)
            return await super().read_matrix(reads, **options)

    router = Limited()
    reads = [MatrixRead([1, 2], [i]) for i in range(5)]
    with served(build_api(lambda: router, limits)) as url:
        async with AsyncHttpScoringClient(url) as client:
            answers = await asyncio.gather(client.read_matrix(reads), client.read_matrix(reads))
    assert [[s.response_logprobs[0] for s in scores] for scores in answers] == [[score(i) for i in range(5)]] * 2


@pytest.mark.parametrize("return_exceptions", [True, False])
def test_a_cut_batch_is_answered_by_one_version_of_the_weights(ask, return_exceptions):
    limits = BatchLimits(2, 10**6, 10**6, 10**6)

    class Changing(StandInRouter):
        async def read_labels(self, reads, **options):
            limits.check(reads)
            scores = await super().read_labels(reads, **options)
            version = {"default": 3 if len(self.calls) > 2 else 2, "math": 5}  # changed after two of four calls
            metas = [dataclasses.replace(meta, weight_version=version[meta.teacher]) for meta in scores.metas]
            return dataclasses.replace(scores, metas=tuple(metas))

    router = Changing()
    reads = [LabelRead([1], [i], teacher="math" if i == 1 else None) for i in range(7)]
    with served(build_api(lambda: router, limits)) as url:
        scores = ask(url, "read_labels", reads, return_exceptions=return_exceptions)
    assert [s.logprobs.tolist() for s in scores] == [[score(i)] for i in range(7)]
    assert [s.meta.weight_version for s in scores] == [3, 5, 3, 3, 3, 3, 3]
    assert [len(call["batch"]) for call in router.calls] == [2, 2, 2, 1, 1, 2]


def test_a_cut_batch_whose_weights_never_rest_ends_by_its_deadline(ask):
    limits = BatchLimits(2, 10**6, 10**6, 10**6)

    class Restless(StandInRouter):
        async def read_labels(self, reads, **options):
            limits.check(reads)
            scores = await super().read_labels(reads, **options)
            metas = [dataclasses.replace(meta, weight_version=len(self.calls)) for meta in scores.metas]
            return dataclasses.replace(scores, metas=tuple(metas))

    router = Restless()
    reads = [LabelRead([1], [i]) for i in range(3)]
    with served(build_api(lambda: router, limits)) as url:
        with pytest.raises(DeadlineExceeded, match="not asked before its deadline"):
            ask(url, "read_labels", reads, timeout_s=0.3)
        scores = ask(url, "read_labels", reads, timeout_s=0.3, return_exceptions=True)
    assert len({s.meta.weight_version for s in scores if not isinstance(s, DeadlineExceeded)}) == 1


@pytest.mark.parametrize("return_exceptions", [True, False])
def test_a_failing_read_of_a_cut_batch_is_named_by_its_place_in_the_whole(router, ask, return_exceptions):
    limits = BatchLimits(2, 10**6, 10**6, 10**6)

    class Limited(StandInRouter):
        async def read_labels(self, reads, **options):
            limits.check(reads)
            return await super().read_labels(reads, **options)

    router = Limited()
    reads = [LabelRead([1], [i if i != 5 else 4000]) for i in range(7)]
    with served(build_api(lambda: router, limits)) as url:
        if return_exceptions:
            error = ask(url, "read_labels", reads, return_exceptions=True)[5]
        else:
            with pytest.raises(InvalidRead) as caught:
                ask(url, "read_labels", reads)
            error = caught.value
    assert isinstance(error, InvalidRead) and error.read == 5


@pytest.mark.parametrize("failing", [{5}, {0, 5}, set(range(7))], ids=["last", "first", "all"])
def test_a_call_that_fails_leaves_the_answers_of_the_other_calls_of_a_cut_batch(ask, failing):
    limits = BatchLimits(2, 10**6, 10**6, 10**6)

    class Limited(StandInRouter):
        async def read_labels(self, reads, **options):
            limits.check(reads)
            for read in reads:
                if read.label_ids[0] in failing:
                    raise WrongEngineAnswer(f"no answer to {read.label_ids[0]}")
            return await super().read_labels(reads, **options)

    router = Limited()
    reads = [LabelRead([1], [i]) for i in range(7)]
    with served(build_api(lambda: router, limits)) as url:
        with pytest.raises(WrongEngineAnswer, match=f"no answer to {min(failing)}"):
            ask(url, "read_labels", reads)
        if len(failing) == 7:
            with pytest.raises(WrongEngineAnswer, match="no answer to 0"):  # as of a batch that was not cut
                ask(url, "read_labels", reads, return_exceptions=True)
            return
        scores = ask(url, "read_labels", reads, return_exceptions=True)
    lost = {i for i in range(7) if {i // 2 * 2, i // 2 * 2 + 1} & failing}
    for i, answer in enumerate(scores):
        if i in lost:
            assert isinstance(answer, WrongEngineAnswer) and answer.read == i
        else:
            assert answer.logprobs.tolist() == [score(i)]


def test_one_read_that_is_too_big_by_itself_is_an_error_with_the_limit(router, ask):
    limits = BatchLimits(10, 10**6, 10**7, 1_000_000)

    class Limited(StandInRouter):
        async def read_matrix(self, reads, **options):
            limits.check(reads)
            return await super().read_matrix(reads, **options)

    router = Limited()
    with served(build_api(lambda: router, limits)) as url:
        for read in (
            MatrixRead([1], [2] * 480, np.zeros((480, 1024), np.int32)),
            MatrixRead([1], [2] * 480, top_k=512, extras="tail"),
            MatrixRead([1], [2], top_k=2**31 - 1),
        ):
            with pytest.raises(BatchTooLarge, match=r"limits\.max_answer_bytes"):
                ask(url, "read_matrix", [read])
    assert router.calls == []


def test_reads_are_handed_out_as_they_finish_over_http(server, router):
    reads = [MatrixRead([1] * 300, [i], [[i + 1]]) for i in range(200)]
    with HttpScoringClient(server) as client:
        seen = dict(client.iter_matrix(reads))
        assert [seen[i].logprobs.tolist() for i in range(200)] == [[[score(i + 1)]] for i in range(200)]
        assert len(router.calls) > 2
        bad = [*reads[:3], MatrixRead([1], [2], [[4000]])]
        with pytest.raises(InvalidRead, match="read 3"):
            dict(client.iter_matrix(bad))
        assert isinstance(dict(client.iter_matrix(bad, return_exceptions=True))[3], InvalidRead)


def test_label_reads_are_handed_out_as_they_finish_over_http(server, router):
    reads = [LabelRead([1] * 300, [i]) for i in range(200)]
    with HttpScoringClient(server) as client:
        seen = dict(client.iter_labels(reads))
        assert [seen[i].logprobs.tolist() for i in range(200)] == [[score(i)] for i in range(200)]
        assert len(router.calls) > 2
        bad = [*reads[:3], LabelRead([1], [4000])]
        with pytest.raises(InvalidRead, match="read 3"):
            dict(client.iter_labels(bad))
        assert isinstance(dict(client.iter_labels(bad, return_exceptions=True))[3], InvalidRead)


async def test_an_iteration_that_is_left_leaves_nothing_behind(server, router):
    router.before = lambda: asyncio.sleep(0.05)
    reads = [MatrixRead([1] * 300, [i]) for i in range(200)]
    async with AsyncHttpScoringClient(server) as client:
        items = client.iter_matrix(reads)
        await anext(items)
        await items.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_closing_a_client_cancels_what_was_submitted(server, router):
    router.before = lambda: asyncio.sleep(0.3)
    client = HttpScoringClient(server)
    future = client.submit(LabelRead([1], [2]))
    while not router.calls:
        time.sleep(0.001)
    client.close()
    assert future.cancelled()


def test_a_client_that_is_closed_says_so(server):
    client = HttpScoringClient(server)
    client.submit(LabelRead([1], [2])).result(10)
    client.close()
    threads = threading.active_count()
    for ask in (client.submit, client.iter_labels, client.iter_matrix, client.read_labels):
        with pytest.raises(RuntimeError, match="closed"):
            ask([LabelRead([1], [2])] if ask != client.submit else LabelRead([1], [2]))
    assert threading.active_count() == threads


def test_submitted_reads_travel_together_over_http(server, router):
    with HttpScoringClient(server) as client:
        futures = [client.submit(LabelRead([1], [i])) for i in range(20)]
        assert [future.result(10).logprobs.tolist() for future in futures] == [[-float(i)] for i in range(20)]
        assert len(router.calls) < 5

    async def ask():
        async with AsyncHttpScoringClient(server) as client:
            return await asyncio.gather(*(client.submit(MatrixRead([1], [i], [[2]])) for i in range(5)))

    assert [s.response_logprobs.tolist() for s in asyncio.run(ask())] == [[score(i)] for i in range(5)]


# ---------------------------------------------------------------- admission, through a real Router


@pytest.fixture
def full_service(monkeypatch):
    """The service over one replica that takes a while for a read, and no more than the tokens of four."""
    replica = StandInReplica(step_tokens=10, step_s=0.3, max_outstanding_tokens=40)
    replicas = StandInReplicas(a=replica)
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: replicas)
    limits = BatchLimits(100, 10**6, 10**6, 10**6)
    catalog = {
        "default": "default",
        "deployments": {"default": "Teacher-default"},
        "adapters": {},
        "limits": dataclasses.asdict(limits),
        "admission_wait_s": 0.0,
    }
    router = Router("app", catalog, serves_many=True)
    with served(build_api(lambda: router, limits)) as url:
        yield url


def ask_ten_at_once(ask):
    with ThreadPoolExecutor(10) as threads:
        return list(threads.map(ask, range(10)))


def test_what_exceeds_the_replicas_fill_is_429_with_a_time_to_come_back(full_service):
    body = {"reads": [{"prompt_ids": [1] * 9, "response_ids": [7]}]}
    answers = ask_ten_at_once(lambda _: httpx.post(f"{full_service}/v1/matrix-reads", json=body, timeout=60))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers].count(200) == 4 and len(refused) == 6
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert "max_outstanding_tokens" in answer.json()["error"]["message"]


def test_on_the_route_of_vllm_it_is_503(full_service):
    body = {
        "token_ids": [1] * 9 + [7],
        "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": [[5]], "prompt_logprob_start": 8},
    }
    answers = ask_ten_at_once(lambda _: httpx.post(f"{full_service}/inference/v1/generate", json=body, timeout=60))
    assert sorted({answer.status_code for answer in answers}) == [200, 503]


def test_clients_come_back_until_all_are_answered(full_service):
    with HttpScoringClient(full_service) as client:
        scores = ask_ten_at_once(lambda _: client.read_matrix([MatrixRead([1] * 9, [7])])[0])
    assert [s.response_logprobs.tolist() for s in scores] == [[score(7)]] * 10
