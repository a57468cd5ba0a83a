"""configs/nginx.conf in a real nginx, in front of the service over a Router that answers known numbers."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from deployments.auth import Tokens
from deployments.config import LimitsConfig
from deployments.ingress import build_api
from scoring import MatrixRead, wire
from scoring.errors import BatchTooLarge, DeadlineExceeded, TeacherUnavailable, Unauthorized
from scoring.http_client import _LIMITS, HttpScoringClient
from tests.serve_process import free_port
from tests.stand_in_router import BATCH_LIMITS, StandInRouter
from tests.test_http_api import served

CONFIG = (Path(__file__).parent.parent.parent / "configs" / "nginx.conf").read_text()
TOKEN = "a-token-of-many-letters"
READ = MatrixRead([1, 2], [3, 4], [[5], [6]])
BODY = {"reads": [{"prompt_ids": [1, 2], "label_ids": [9]}]}


class Recorder:
    """An ASGI application in front of another: which requests come through, and with which headers."""

    def __init__(self, app) -> None:
        self._app = app
        self.seen: list[tuple[str, dict[str, str]]] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            self.seen.append((scope["path"], headers))
        await self._app(scope, receive, send)


def nginx_binary() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    assert found, (
        "nginx is not installed, and configs/nginx.conf is untested: apt-get install nginx-light (.ci/run does)"
    )
    return found


def changed(changes: dict[str, str]) -> str:
    """The configuration with some of its text replaced; every piece must be there."""
    config = CONFIG
    for text, replacement in changes.items():
        assert text in config, text
        config = config.replace(text, replacement)
    return config


@contextlib.contextmanager
def running(folder: Path, changes: dict[str, str]):
    """nginx with the configuration, on a port of 127.0.0.1 with a certificate of its own."""
    port = free_port()
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", folder / "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", folder / "certificate.pem", "-days", "2", *names]
    subprocess.run(command, check=True, capture_output=True)
    places = {
        "/etc/teacher-scoring/tls/": f"{folder}/",
        "/var/log/nginx/": f"{folder}/",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "user www-data;": "user root;" if os.getuid() == 0 else "",  # the folder is this user's own
    }
    (folder / "nginx.conf").write_text(changed(places | changes))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text((folder / "nginx.conf").read_text().replace("http {", "http {" + paths, 1))
    options = ["-p", folder, "-c", folder / "nginx.conf", "-e", folder / "start.log"]
    process = subprocess.Popen([nginx_binary(), *options, "-g", f"daemon off; pid {folder}/nginx.pid;"])
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "start.log").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """nginx, with short times and few connections, before the service; `place` holds the Router it asks."""
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "tokens").write_text(f"trainer: {TOKEN}\n")
    (folder / "tokens").chmod(0o600)
    place: list[StandInRouter] = []
    recorder = Recorder(build_api(lambda: place[-1], BATCH_LIMITS, Tokens(str(folder / "tokens"))))
    with served(recorder) as url:
        changes = {
            "127.0.0.1:8000": url.removeprefix("http://"),
            "client_header_timeout 10s": "client_header_timeout 1s",
            "client_body_timeout 20s": "client_body_timeout 1s",
            "proxy_read_timeout 3660s": "proxy_read_timeout 1s",
            "client_max_body_size 257m": "client_max_body_size 1m",
            "limit_conn of_one_address 128": "limit_conn of_one_address 4",
        }
        with running(folder, changes) as port:
            tls = ssl.create_default_context(cafile=folder / "certificate.pem")
            url = f"https://127.0.0.1:{port}"
            yield SimpleNamespace(url=url, port=port, tls=tls, folder=folder, place=place, seen=recorder.seen)


@pytest.fixture
def router(front) -> StandInRouter:
    front.place.append(StandInRouter())
    front.seen.clear()
    return front.place[-1]


@pytest.fixture
def client(front, router):
    with HttpScoringClient(front.url, token=TOKEN, tls=front.tls, timeout_s=20) as client:
        yield client


def post(front, headers=None, **options) -> httpx.Response:
    headers = {"authorization": f"Bearer {TOKEN}"} | (headers or {})
    with httpx.Client(verify=front.tls, trust_env=False) as http:
        return http.post(f"{front.url}/v1/label-reads", headers=headers, timeout=20, **({"json": BODY} | options))


@contextlib.contextmanager
def connection(front):
    with (
        socket.create_connection(("127.0.0.1", front.port), timeout=10) as plain,
        front.tls.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        yield secure


def until_closed(connection: socket.socket) -> bytes:
    """What still comes; it must end within the connection's timeout."""
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer


def test_the_configuration_fits_the_service():
    def number(pattern: str) -> int:
        (found,) = re.findall(pattern, CONFIG)
        return int(found)

    assert LimitsConfig().max_request_bytes < number(r"client_max_body_size (\d+)m;") << 20 < 300 << 20
    assert number(r"proxy_read_timeout (\d+)s;") > wire.MAX_TIMEOUT_S
    assert number(r"\n    keepalive_timeout (\d+)s;") > _LIMITS.keepalive_expiry
    assert number(r"\n        keepalive_timeout (\d+)s;") < 90  # Serve's
    assert number(r"limit_conn of_one_address (\d+);") > _LIMITS.max_connections
    assert "server 127.0.0.1:8000;" in CONFIG


def test_a_read_comes_through_over_tls_with_a_token_in_either_place(front, client):
    assert client.read_matrix([READ])[0].logprobs.tolist() == [[-5.0], [-6.125]]
    url = front.url.replace("://", f"://any:{TOKEN}@")
    with HttpScoringClient(url, tls=front.tls, binary=False) as json_client:
        assert json_client.read_matrix([READ])[0].logprobs.tolist() == [[-5.0], [-6.125]]
    with HttpScoringClient(front.url, tls=front.tls) as stranger, pytest.raises(Unauthorized):
        stranger.read_matrix([READ])


def test_old_tls_and_plain_http_are_refused(front, router):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", front.port)) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)
    assert httpx.get(front.url.replace("https", "http") + "/health").status_code == 400
    assert front.seen == []


@pytest.mark.parametrize("megabytes", [2, 40])
@pytest.mark.parametrize("length_is_told", [True, False])
def test_an_upload_that_is_too_big_is_refused_before_the_service_hears_of_it(front, router, megabytes, length_is_told):
    content = bytes(megabytes << 20)
    response = post(front, json=None, content=content if length_is_told else iter([content]))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413
    assert front.seen == []


def test_the_client_says_that_a_batch_is_too_big_for_nginx(front, client):
    read = MatrixRead([1] * 100, [2] * 400)
    with pytest.raises(BatchTooLarge, match=r"more bytes than nginx takes here \(client_max_body_size\)"):
        client.read_matrix([read] * 1000)
    assert front.seen == []
    assert len(client.read_matrix([read])) == 1


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: a\r\nx-a: 1\r\n"])
def test_a_client_that_does_not_finish_its_headers_is_cut(front, router, begun):
    with connection(front) as slow:
        started = time.monotonic()
        slow.sendall(begun)
        until_closed(slow)
        assert time.monotonic() - started < 8
    assert front.seen == []


def test_a_client_that_sends_a_header_now_and_then_is_cut_too(front, router):
    with connection(front) as slow:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n")
            while time.monotonic() - started < 8:
                slow.sendall(b"x-a: 1\r\n")
                time.sleep(0.3)
        assert time.monotonic() - started < 8
    assert front.seen == []


def test_a_client_that_does_not_finish_its_body_is_cut_and_the_service_never_hears_of_it(front, router):
    head = f"POST /v1/label-reads HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 100\r\n\r\n"
    with connection(front) as slow:
        slow.sendall(head.encode() + b"{")
        started = time.monotonic()
        answer = until_closed(slow)
        assert time.monotonic() - started < 8
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408")
    assert front.seen == []


@pytest.mark.parametrize(
    ("headers", "status"), [({"x-long": "a" * 9000}, 400), ({f"x-{i}": "a" * 7000 for i in range(9)}, 400)]
)
def test_headers_without_end_are_refused_before_the_service_hears_of_them(front, router, headers, status):
    assert post(front, headers).status_code == status
    assert front.seen == []


def test_what_serve_would_obey_does_not_reach_it(front, router):
    names = ("x-request-timeout-seconds", "x-request-disconnect-disabled", "serve-multiplexed-model-id", "x-session-id")
    names += ("serve_multiplexed_model_id", "x_session_id")
    assert post(front, dict.fromkeys(names, "0") | {"x-request-id": "mine:1", "traceparent": "00-1"}).status_code == 200
    ((_, headers),) = front.seen
    assert not headers.keys() & set(names)
    assert (headers["x-request-id"], headers["traceparent"]) == ("mine:1", "00-1")
    assert headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("request_id", ["\xff", "a b", "a" * 129, '"'])
def test_a_request_id_that_could_do_harm_is_replaced(front, router, request_id):
    assert post(front, {"x-request-id": request_id.encode("latin-1")}).status_code == 200
    ((_, headers),) = front.seen
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz"])
def test_serves_own_pages_are_hidden(front, router, path):
    response = httpx.get(front.url + path, verify=front.tls)
    assert (response.status_code, response.json()["error"]["code"]) == (404, 404)
    assert front.seen == []


def waiting(seconds: float):
    """For a Router's `before`."""

    async def wait() -> None:
        await asyncio.sleep(seconds)

    return wait


def test_a_service_that_does_not_answer_in_time_is_a_typed_error(front, router, client):
    router.before = waiting(2.5)
    response = post(front)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "DeadlineExceeded")
    assert "did not answer in time (proxy_read_timeout)" in response.json()["error"]["message"]
    with pytest.raises(DeadlineExceeded):
        client.read_matrix([READ], timeout_s=1)


def test_more_connections_than_allowed_are_told_to_come_back_and_the_client_does(front, router, client):
    router.before = waiting(0.4)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: post(front), range(8)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and {answer.status_code for answer in refused} == {503}
    assert refused[0].json()["error"]["type"] == "Overloaded"
    assert refused[0].headers["retry-after"] == "1"
    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(lambda _: client.read_matrix([READ]), range(8)))) == 8


def test_no_service_behind_is_a_typed_error(tmp_path):
    changes = {"127.0.0.1:8000": f"127.0.0.1:{free_port()}"}
    with running(tmp_path, changes) as port:
        tls = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
        unreached = pytest.raises(TeacherUnavailable, match="the service behind nginx cannot be reached")
        with HttpScoringClient(f"https://127.0.0.1:{port}", tls=tls) as client, unreached:
            client.read_matrix([READ], timeout_s=1)


def test_nginx_writes_down_no_token_and_no_body(front, router):
    assert post(front).status_code == 200
    logs = [path.read_text() for path in front.folder.glob("*.log")]
    assert any("POST /v1/label-reads 200" in log for log in logs)
    assert not any(TOKEN in log or "prompt_ids" in log for log in logs)
