"""The HTTP door of a real Serve that other machines reach: who gets in, and what no header may change."""

import asyncio
import json
import re
import socket
import time

import httpx
import pytest
from ray import serve

from deployments import app, http_settings
from deployments.config import AppConfig
from deployments.http_settings import HttpSettings, require_tokens_beyond_loopback, running_http_settings
from scoring import MatrixRead
from scoring.errors import RefusedSettings, Unauthorized
from scoring.http_client import HttpScoringClient
from tests.serve_process import ServeProcess
from tests.stand_in_application import SLOW

TOKEN = "a-token-of-many-letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}
READ = {"prompt_ids": [1, 2], "label_ids": [9, 8]}
TIMEOUT_S = 2.0
TEACHERS = {"teachers": {"default": {"model": "none"}}}


@pytest.fixture(scope="module")
def door(engines, tmp_path_factory):
    """The application without engines, bound to every address of this machine; Serve gives a request two seconds."""
    folder = tmp_path_factory.mktemp("door")
    tokens = folder / "tokens"
    tokens.write_text(f"trainer: {TOKEN}\n")
    tokens.chmod(0o600)
    service = ServeProcess(
        folder,
        TEACHERS | {"token_file": str(tokens)},
        import_path="tests.stand_in_application:build_app",
        http_options={"host": "0.0.0.0", "request_timeout_s": TIMEOUT_S},
        headers=BEARER,
    )
    with service.connected():
        yield service


def post(door, headers=None, read=READ, **more) -> httpx.Response:
    url = f"{door.url}/v1/label-reads"
    return httpx.post(url, json={"reads": [read]} | more, headers=BEARER | (headers or {}), timeout=30)


def test_what_serve_was_started_with_is_found_out(door):
    assert running_http_settings() == HttpSettings(host="0.0.0.0", request_timeout_s=TIMEOUT_S)


def test_an_open_door_beyond_loopback_does_not_start_and_says_which_setting_closes_it(door):
    with pytest.raises(RuntimeError, match="Deploying application open failed"):
        serve.run(app.Ingress.bind({"limits": {}}, {}, {}), name="open", route_prefix="/open")
    said = serve.status().applications["open"].deployments["Ingress"].message
    serve.delete("open")
    assert "Serve's HTTP host is 0.0.0.0 (http_options.host), which other machines reach" in said
    assert "token_file in the application's args" in said


@pytest.mark.parametrize(
    ("host", "refused"),
    [
        ("127.0.0.1", False),
        ("127.8.9.1", False),
        ("::1", False),
        ("localhost", False),
        (None, False),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("", True),
        ("example.org", True),
        ("localhost.example.org", True),
        ("::ffff:10.0.0.1", True),
    ],
)
def test_which_addresses_ask_for_tokens(host, refused):
    settings = HttpSettings(host, None)
    require_tokens_beyond_loopback(settings, "/a/file")
    if refused:
        with pytest.raises(RefusedSettings, match="token_file"):
            require_tokens_beyond_loopback(settings, None)
    else:
        require_tokens_beyond_loopback(settings, None)


def test_a_token_file_is_named_by_its_whole_path():
    with pytest.raises(ValueError, match="token_file is 'tokens'; it is a whole path"):
        AppConfig(**TEACHERS, token_file="tokens")


def test_only_who_has_a_token_gets_in(door):
    assert post(door).status_code == 200
    assert httpx.get(f"{door.url}/health").status_code == 200
    for path in ("/ready", "/docs", "/openapi.json", "/v1/models", "/nope"):
        assert httpx.get(door.url + path).status_code == 401
    with HttpScoringClient(door.url.replace("://", f"://any:{TOKEN}@")) as client:
        assert client.read_matrix([MatrixRead([1, 2], [3], [[5]])])[0].logprobs.tolist() == [[-5.0]]
    with HttpScoringClient(door.url, token="a-token-of-other-letters") as client, pytest.raises(Unauthorized):
        client.read_matrix([MatrixRead([1, 2], [3])])


def test_the_tokens_stand_nowhere_but_in_their_file(door):
    assert post(door).status_code == 200
    assert post(door, {"authorization": "Bearer wrong-but-nearly-0123"}).status_code == 401
    for path in door.log_files():
        content = path.read_bytes()
        assert TOKEN.encode() not in content and b"wrong-but-nearly" not in content, path
    details = json.dumps(serve.status().__dict__, default=str)
    assert TOKEN not in details


def test_the_log_names_who_asked(door):
    post(door)
    deadline = time.monotonic() + 20
    wanted = re.compile(r"POST /v1/label-reads 200 [0-9.]+ ms, asked by trainer")
    while not any(wanted.search(path.read_text(errors="replace")) for path in door.log_files()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


# Every header that Serve's proxy reads (ray/serve/_private/proxy.py), with values that could matter to it.
OBEYED = [
    {"x-request-timeout-seconds": value} for value in ("0", "-1", "1e999", "nan", "inf", "3600", "x", "", "9" * 400)
]
OBEYED += [{"x-request-disconnect-disabled": value} for value in ("?1", "?0", "x")]
OBEYED += [{name: "pin:none"} for name in ("x-session-id", "x_session_id", "X-Session-ID")]
OBEYED += [{name: "math"} for name in ("serve_multiplexed_model_id", "serve-multiplexed-model-id")]
OBEYED += [{"x-request-id": value} for value in ("1", "a" * 8000, "a b", '{"a": 1}', "../../x", "%s%n")]
OBEYED += [{"x-serve-router-x": "1"}, {"traceparent": "00-x"}, {"tracestate": "=,=;" * 200}, {"x-forwarded-host": "a"}]


@pytest.mark.parametrize("headers", OBEYED, ids=lambda headers: str(headers)[:60])
def test_a_header_that_serve_obeys_changes_no_answer(door, headers):
    response = post(door, headers)
    assert response.status_code == 200
    assert response.json()["results"][0]["logprobs"] == [-9.0, -8.0]


@pytest.mark.parametrize("name", ["x-request-timeout-seconds", "x-request-disconnect-disabled", "x-request-id"])
def test_a_header_that_serve_fails_on_harms_its_own_request_only(door, name):
    """Serve's proxy fails before this project hears of it; a server in front (configs/nginx.conf) drops them."""
    assert post(door, {name: b"\xff"}).status_code == 500
    assert post(door).status_code == 200


def test_a_websocket_is_refused(door):
    head = "GET /v1/matrix-reads HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    head += f"sec-websocket-version: 13\r\nsec-websocket-key: {'A' * 22}==\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    assert raw(door, head.encode(), and_no_more=False).startswith(b"HTTP/1.1 403")
    assert post(door).status_code == 200


@pytest.mark.parametrize("value", ["0", "-5", "3600", "1e9"])
def test_no_header_lifts_serves_own_limit(door, value):
    started = time.monotonic()
    response = post(door, {"x-request-timeout-seconds": value}, READ | {"prompt_ids": [SLOW]})
    assert response.status_code == 504
    assert "within 2 s (Serve's http_options.request_timeout_s)" in response.json()["error"]["message"]
    assert time.monotonic() - started < 10


def test_no_header_lifts_the_deadline_of_a_read(door):
    response = post(door, {"x-request-timeout-seconds": "0"}, READ | {"prompt_ids": [SLOW]}, timeout_s=0.5)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "DeadlineExceeded")


def test_who_leaves_and_forbids_to_notice_it_is_worked_for_until_the_limit_only(door):
    headers = {"x-request-disconnect-disabled": "?1", "x-request-timeout-seconds": "0"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{door.url}/v1/label-reads",
            json={"reads": [READ | {"prompt_ids": [SLOW]}]},
            headers=BEARER | headers,
            timeout=0.5,
        )
    deadline = time.monotonic() + 20
    while not any(
        b"504" in path.read_bytes() for path in door.log_files() if "replica_teacher-scoring_Ingress" in path.name
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def raw(door, data: bytes, and_no_more: bool = True) -> bytes:
    """What the proxy answers to these bytes until it closes the connection."""
    url = httpx.URL(door.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(data)
        if and_no_more:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/label-reads HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/label-reads HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\nhello",
        b"POST /v1/label-reads HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\nhello",
        b"POST /v1/label-reads HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx y: 1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET " + b"/" * 70000,
    ],
    ids=lambda head: repr(head[:90]),
)
def test_what_is_no_http_is_no_request(door, head):
    answer = raw(door, head)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert post(door).status_code == 200


@pytest.mark.parametrize("count, size", [(101, 1), (3, 40_000), (5000, 10)])
def test_headers_without_end_are_refused(door, count, size):
    headers = {f"x-{i}": "a" * size for i in range(count)}
    response = post(door, headers)
    assert response.status_code == 431
    assert "at most 100 of 65536 bytes are taken" in response.json()["error"]["message"]


async def test_many_bad_requests_at_once_leave_the_next_good_one_alone(door):
    bodies = [b"", b"{", b"[" * 100_000, b"\xff" * 1000, b'{"reads": [' + b"9" * 10_000 + b"]}", b'{"reads": 1e999}']
    async with httpx.AsyncClient(headers=BEARER, timeout=60) as client:
        asked = [client.post(f"{door.url}/v1/matrix-reads", content=body) for body in bodies * 10]
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {422}
    assert post(door).status_code == 200


def test_another_ray_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(http_settings.pinning, "_SUPPORTED", "2.59.")
    with pytest.raises(RuntimeError, match=r"was written against 2\.59\.x"):
        running_http_settings()
