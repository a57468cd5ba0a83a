"""All clients over stand-ins: those of the cluster, and how those over HTTP meet what goes wrong on the way. More of
these: `test_http_api.py`. Real replicas: `test_application.py`."""

import asyncio
import contextlib
import email.utils
import inspect
import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ray
from ray.exceptions import AuthenticationError
from safetensors.numpy import load, save

from deployments.catalog import Catalog
from deployments.client import AsyncScoringClient, ScoringClient
from deployments.ingress import build_api
from scoring import LabelRead, MatrixRead, wire
from scoring.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    InvalidRead,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    WrongEngineAnswer,
)
from scoring.http_client import AsyncHttpScoringClient, HttpScoringClient, _pause
from tests.stand_in_replicas import StandInReplica, StandInReplicas
from tests.stand_in_router import BATCH_LIMITS, StandInRouter
from tests.test_http_api import served
from tests.test_router import CATALOG


@pytest.fixture
def made(monkeypatch):
    """Makes a client of a class."""
    replicas = StandInReplicas(a=StandInReplica(), b=StandInReplica())
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: replicas)
    monkeypatch.setattr("deployments.client._connect", lambda app_name: None)
    monkeypatch.setattr("deployments.router.Catalog", lambda app_name, known: Catalog(app_name, CATALOG))
    return lambda client: client("app")


LABELS = [LabelRead([1] * 100, [i]) for i in range(100)]
BAD = [*LABELS[:3], LabelRead([1], [9999])]


def test_label_reads_are_handed_out_as_they_finish(made):
    with made(ScoringClient) as client:
        seen = dict(client.iter_labels(LABELS))
        assert [seen[i].logprobs.tolist() for i in range(100)] == [[-i] for i in range(100)]
        with pytest.raises(InvalidRead, match="read 3"):
            dict(client.iter_labels(BAD))
        assert isinstance(dict(client.iter_labels(BAD, return_exceptions=True))[3], InvalidRead)


async def test_so_they_are_to_asynchronous_code(made):
    async with made(AsyncScoringClient) as client:
        seen = {i: score async for i, score in client.iter_labels(LABELS)}
        assert [seen[i].logprobs.tolist() for i in range(100)] == [[-i] for i in range(100)]
        seen = {i: score async for i, score in client.iter_labels(BAD, return_exceptions=True)}
        assert isinstance(seen[3], InvalidRead)
        assert (await client.submit(LABELS[7])).logprobs.tolist() == [-7]


def test_a_client_that_is_closed_says_so(made):
    client = made(ScoringClient)
    assert client.submit(LABELS[7]).result(10).logprobs.tolist() == [-7]
    client.close()
    for ask in (
        lambda: client.submit(LABELS[0]),
        lambda: client.read_labels(LABELS),
        lambda: next(client.iter_labels(LABELS)),
        lambda: next(client.iter_matrix([MatrixRead([1], [2])])),
    ):
        with pytest.raises(RuntimeError, match="this client is closed"):
            ask()


# ---------------------------------------------------------------- over HTTP: what the world does to an exchange


@pytest.fixture(params=[HttpScoringClient, AsyncHttpScoringClient], ids=["sync", "async"])
def read_labels(request):
    """Asks for label reads with a client of either kind: `read_labels(url, reads, timeout_s=...)`."""

    def call(url, reads, **options):
        if request.param is HttpScoringClient:
            with HttpScoringClient(url) as client:
                return client.read_labels(reads, **options)

        async def run():
            async with AsyncHttpScoringClient(url) as client:
                return await client.read_labels(reads, **options)

        return asyncio.run(run())

    return call


@contextlib.contextmanager
def listening(answer):
    """A server that hands each connection to `answer`, in a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def trickle(connection):
    """An answer that comes, and never ends."""
    with contextlib.suppress(OSError):
        connection.recv(65536)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.safetensors\r\ncontent-length: 9999\r\n\r\n"
        )
        while True:
            connection.sendall(b".")
            time.sleep(0.05)


def swallow_slowly(connection):
    """A request that is taken, a little at a time."""
    with contextlib.suppress(OSError):
        while connection.recv(32768):
            time.sleep(0.05)


@pytest.mark.parametrize("answer, tokens", [(trickle, 1), (swallow_slowly, 8_000_000)])
def test_bytes_that_come_or_go_slowly_do_not_outlast_the_deadline(read_labels, answer, tokens):
    reads = [LabelRead(np.zeros(tokens, np.int32), [1])]
    with listening(answer) as url:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="did not answer within the deadline"):
            read_labels(url, reads, timeout_s=0.6)
        assert time.monotonic() - started < 10  # a minute and more without a look at the clock


class Refusing:
    """An ASGI application that refuses the first request with `status`, and answers 404 from then on."""

    def refuse(self, status, retry_after=None):
        self.status, self.asked = status, []
        self.headers = [] if retry_after is None else [(b"retry-after", retry_after)]

    async def __call__(self, scope, receive, send):
        self.asked.append(time.time())
        first = len(self.asked) == 1
        headers = self.headers if first else []
        await send({"type": "http.response.start", "status": self.status if first else 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>no</html>"})


@pytest.fixture(scope="module")
def proxy():
    """A proxy that never lets anyone through, and its address."""
    app = Refusing()
    with served(app) as url:
        yield app, url


def test_a_retry_after_that_is_a_date_is_heeded(proxy):
    app, url = proxy
    date = email.utils.formatdate(time.time() + 1.5, usegmt=True)  # whole seconds
    app.refuse(503, date.encode())
    with HttpScoringClient(url) as client, pytest.raises(ScoringError, match="404"):
        client.read_labels(LABELS[:1])
    assert len(app.asked) == 2
    assert app.asked[1] >= email.utils.parsedate_to_datetime(date).timestamp()


@pytest.mark.parametrize("said", [b"never", b"", b"nan", b"-5", b"Thu, 01 Jan 1970 00:00:00 GMT"])
def test_a_retry_after_that_says_nothing_is_passed_over(proxy, said):
    app, url = proxy
    app.refuse(503, said)
    with HttpScoringClient(url) as client, pytest.raises(ScoringError, match="404"):
        client.read_labels(LABELS[:1], timeout_s=5)
    assert len(app.asked) == 2 and app.asked[1] - app.asked[0] < 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422, 501])
def test_a_refusal_that_another_attempt_cannot_change_is_asked_once(read_labels, proxy, status):
    app, url = proxy
    app.refuse(status)
    error = BatchTooLarge if status == 413 else ScoringError
    with pytest.raises(error, match=f"answered {status}: <html>no</html>"):
        read_labels(url, LABELS[:1])
    assert len(app.asked) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_refusal_of_a_proxy_that_may_pass_is_tried_again(read_labels, proxy, status):
    app, url = proxy
    app.refuse(status)
    with pytest.raises(ScoringError, match="answered 404"):
        read_labels(url, LABELS[:1])
    assert len(app.asked) == 2


def test_pauses_double_and_are_never_the_same_for_two_clients():
    error = TeacherUnavailable("gone")
    pauses = [[_pause(attempt, error) for _ in range(50)] for attempt in range(12)]
    for attempt, some in enumerate(pauses):
        middle = min(0.1 * 2**attempt, 5.0)
        assert all(0.5 * middle <= pause <= 1.5 * middle for pause in some)
        assert len(set(some)) > 40
    later = [_pause(0, Overloaded("full", retry_after_s=3)) for _ in range(50)]
    assert all(3 <= pause <= 3.75 for pause in later) and len(set(later)) > 40


# ---------------------------------------------------------------- over HTTP: what a proxy may have lost

MATRIX = [
    MatrixRead([1], [2, 3], [[5, 6], [7, 8]], top_k=2, extras=("tail", "entropy"), teacher="math"),
    MatrixRead([1], [2]),
]


def names_of(document, path=()):
    """The path to every name in a JSON document."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield (*path, name)
            yield from names_of(value, (*path, name))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from names_of(value, (*path, i))


@contextlib.contextmanager
def changing(api, change):
    """A server of `api` whose answers' bodies go through `change`."""

    async def app(scope, receive, send):
        async def changed(message):
            if message["type"] == "http.response.start":
                message["headers"] = [(k, v) for k, v in message["headers"] if k != b"content-length"]
            elif message.get("body"):
                message["body"] = change(message["body"])
            await send(message)

        await api(scope, receive, changed)

    with served(app) as url:
        yield url


@pytest.mark.parametrize("kind, reads", [("matrix", MATRIX), ("label", LABELS[:2])], ids=["matrix", "labels"])
def test_an_answer_in_json_that_lost_any_name_is_an_error_and_never_zeros(kind, reads):
    router, lost = StandInRouter(), [()]
    api = build_api(lambda: router, BATCH_LIMITS)
    answer = asyncio.run(router.read_matrix(reads) if kind == "matrix" else router.read_labels(reads))
    paths = list(names_of(wire.scores_to_json(answer)))
    assert len(paths) > 30

    def lose(body):
        document = json.loads(body)
        *parents, name = lost[-1]
        holder = document
        for step in parents:
            holder = holder[step]
        del holder[name]
        return json.dumps(document).encode()

    with changing(api, lose) as url, HttpScoringClient(url, binary=False) as client:
        for path in paths:
            lost.append(path)
            with pytest.raises(WrongEngineAnswer):
                client.read_matrix(reads) if kind == "matrix" else client.read_labels(reads)


@pytest.mark.parametrize("kind, reads", [("matrix", MATRIX), ("label", LABELS[:2])], ids=["matrix", "labels"])
def test_an_answer_in_safetensors_that_lost_any_array_or_name_is_an_error(kind, reads):
    router, lost = StandInRouter(), [("", "")]
    api = build_api(lambda: router, BATCH_LIMITS)
    answer = asyncio.run(router.read_matrix(reads) if kind == "matrix" else router.read_labels(reads))
    whole = wire.encode_scores(answer)
    names = [("array", name) for name in load(whole)]
    names += [
        ("metadata", name) for name in json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    ]
    assert len(names) > 10

    def lose(body):
        arrays = load(body)
        metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
        what, name = lost[-1]
        del (arrays if what == "array" else metadata)[name]
        return save(arrays, metadata)

    with changing(api, lose) as url, HttpScoringClient(url) as client:
        for name in names:
            lost.append(name)
            with pytest.raises(WrongEngineAnswer):
                client.read_matrix(reads) if kind == "matrix" else client.read_labels(reads)


def test_a_charset_that_a_proxy_adds_does_no_harm():
    router = StandInRouter()
    api = build_api(lambda: router, BATCH_LIMITS)

    async def app(scope, receive, send):
        async def changed(message):
            if message["type"] == "http.response.start":
                headers = [(k, v) for k, v in message["headers"] if k != b"content-type"]
                message["headers"] = [*headers, (b"content-type", b"application/json; charset=utf-8")]
            await send(message)

        await api(scope, receive, changed)

    with served(app) as url, HttpScoringClient(url, binary=False) as client:
        assert client.read_labels(LABELS[7:8])[0].logprobs.tolist() == [-7.0]


# ---------------------------------------------------------------- the same client everywhere


def public(cls):
    return {name for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def test_the_clients_have_the_same_methods_and_those_of_http_change_nothing():
    inside = public(ScoringClient)
    assert public(HttpScoringClient) == inside - {"add_adapter", "remove_adapter", "update_weights"}
    assert public(AsyncHttpScoringClient) == public(HttpScoringClient)
    assert inside <= public(AsyncScoringClient)
    for name in ("read_matrix", "read_labels", "iter_matrix", "iter_labels", "submit"):
        parameters = inspect.signature(getattr(ScoringClient, name)).parameters
        for cls in (AsyncScoringClient, HttpScoringClient, AsyncHttpScoringClient):
            theirs = inspect.signature(getattr(cls, name)).parameters
            assert [(p.name, p.kind) for p in theirs.values()] == [(p.name, p.kind) for p in parameters.values()]


def test_the_client_works_where_ray_torch_and_vllm_cannot_be_imported():
    router = StandInRouter()
    code = (
        "import sys\n"
        "for name in ('ray', 'torch', 'vllm', 'transformers', 'fastapi', 'psutil'): sys.modules[name] = None\n"
        "from scoring import LabelRead\n"
        "from scoring.http_client import HttpScoringClient\n"
        "print(HttpScoringClient(sys.argv[1]).read_labels([LabelRead([1], [7])])[0].logprobs.tolist())"
    )
    with served(build_api(lambda: router, BATCH_LIMITS)) as url:
        ended = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True)
    assert ended.stdout.strip() == "[-7.0]", ended.stderr


@pytest.mark.parametrize(("about_a_token", "said"), [(True, "set RAY_AUTH_MODE=token"), (False, "no Ray cluster is")])
def test_why_a_cluster_cannot_be_reached_is_said(monkeypatch, about_a_token, said):
    """As Ray fails: its check of tokens is what a connection error was raised for."""

    def init(**_):
        try:
            raise AuthenticationError("no token") if about_a_token else OSError("refused")
        except Exception as error:
            raise ConnectionError("could not connect") from error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(TeacherUnavailable, match=said):
        ScoringClient()
