"""What a request must pass before any route sees it, on every route there is."""

import ast
import asyncio
import gzip
import json
import logging
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from deployments.auth import Tokens
from deployments.ingress import build_api
from scoring import MatrixRead
from scoring.errors import Unauthorized
from scoring.http_client import AsyncHttpScoringClient, HttpScoringClient
from tests.stand_in_router import BATCH_LIMITS, StandInRouter
from tests.test_http_api import served

ROOT = Path(__file__).parent.parent.parent
TOKEN = "a-token-of-many-letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}
LABEL = {"prompt_ids": [1, 2], "label_ids": [9, 8]}
OPEN = {("GET", "/health")}


@pytest.fixture
def tokens(tmp_path) -> Tokens:
    path = tmp_path / "tokens"
    path.write_text(f"trainer: {TOKEN}\nother: {TOKEN[::-1]}\n")
    path.chmod(0o600)
    return Tokens(str(path))


@pytest.fixture
def router() -> StandInRouter:
    return StandInRouter()


@pytest.fixture
def guarded(router, tokens) -> TestClient:
    return TestClient(build_api(lambda: router, BATCH_LIMITS, tokens))


@pytest.fixture
def unguarded(router) -> TestClient:
    return TestClient(build_api(lambda: router, BATCH_LIMITS))


def every_route() -> list[tuple[str, str, bool]]:
    """(method, path, whether it speaks vLLM's dialect) of every route, and of some that are none."""
    api = build_api(StandInRouter, BATCH_LIMITS)
    own = [("GET", "/nope", False), ("DELETE", "/v1/label-reads", False), ("OPTIONS", "/v1/teachers", False)]
    for route in api.routes:
        path = route.path.replace("{teacher}", "math").replace("{name}", "math")
        theirs = getattr(getattr(route, "respond", None), "__module__", "").startswith("deployments.vllm")
        own += [(method, path, theirs) for method in sorted(route.methods - {"HEAD"})]
    return own


ROUTES = every_route()


def error_of(response: httpx.Response, theirs: bool) -> dict:
    """The error in a response, which must have the form of its route's dialect."""
    body = response.json()
    assert body.keys() == {"error"}
    names = {"message", "type", "param", "code"} if theirs else {"type", "message", "read", "field", "details", "code"}
    assert body["error"].keys() == names
    assert body["error"]["code"] == response.status_code
    return body["error"]


def test_there_are_routes_of_both_dialects():
    assert {theirs for _, _, theirs in ROUTES} == {True, False}
    assert {"/v1/matrix-reads", "/ready", "/openapi.json", "/docs", "/health"} <= {path for _, path, _ in ROUTES}


@pytest.mark.parametrize(("method", "path", "theirs"), ROUTES, ids=lambda value: str(value))
def test_every_route_but_health_needs_a_token(guarded, router, method, path, theirs):
    for headers in ({}, {"authorization": "Bearer wrong-token-of-many-letters"}, {"authorization": "Basic Og=="}):
        response = guarded.request(method, path, headers=headers, follow_redirects=False)
        if (method, path) in OPEN:
            assert response.status_code == 200
            continue
        assert response.status_code == 401
        assert "Authorization: Bearer" in error_of(response, theirs)["message"]
        challenge = response.headers["www-authenticate"]
        assert challenge == 'Bearer realm="teacher-scoring", Basic realm="teacher-scoring"'
    assert router.calls == []
    for credentials in ({"headers": BEARER}, {"auth": ("anybody", TOKEN)}):
        assert guarded.request(method, path, **credentials).status_code != 401


def test_what_is_open_tells_nothing(guarded):
    assert guarded.get("/health").json() == {"status": "alive"}


@pytest.mark.parametrize("path", ["/health/", "/health/x", "//health", "/health%2f..%2fready", "/HEALTH"])
def test_what_only_looks_like_health_needs_a_token(guarded, path):
    assert guarded.get(path, follow_redirects=False).status_code == 401


def test_without_a_token_file_nobody_is_asked(unguarded):
    assert unguarded.post("/v1/label-reads", json={"reads": [LABEL]}).status_code == 200


def test_a_websocket_is_refused(unguarded):
    with pytest.raises(WebSocketDisconnect), unguarded.websocket_connect("/v1/matrix-reads"):
        pass


@pytest.mark.parametrize(
    ("headers", "query", "status", "says"),
    [
        ({f"x-{i}": "1" for i in range(101)}, "", 431, "at most 100 of 65536 bytes are taken"),
        ({"x-long": "1" * 65536}, "", 431, "at most 100 of 65536 bytes are taken"),
        ({}, "?" + "q" * 8192, 414, "at most 8192 are taken"),
        ({"content-encoding": "gzip"}, "", 415, "the body is compressed (content-encoding)"),
        ({"content-encoding": "identity, br"}, "", 415, "the body is compressed (content-encoding)"),
    ],
    ids=["too many headers", "a header too long", "a URL too long", "gzip", "two encodings"],
)
def test_a_head_that_is_too_big_and_a_compressed_body_are_refused_by_every_route(
    unguarded, headers, query, status, says
):
    for method, path, theirs in ROUTES:
        response = unguarded.request(method, path + query, headers=headers)
        assert response.status_code == status
        assert says in error_of(response, theirs)["message"]


def test_a_bomb_of_zeros_is_refused_by_its_encoding(unguarded, router):
    bomb = gzip.compress(bytes(10 << 20))
    for name in ("gzip", "x-gzip", "deflate", "zstd"):
        headers = {"content-type": "application/json", "content-encoding": name}
        response = unguarded.post("/v1/label-reads", content=bomb, headers=headers)
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    headers["content-encoding"] = "identity"
    response = unguarded.post("/v1/label-reads", content=json.dumps({"reads": [LABEL]}), headers=headers)
    assert response.status_code == 200


async def test_serves_own_limit_holds_although_a_header_lifts_it_in_serves_proxy(router):
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    router.before = work
    transport = httpx.ASGITransport(build_api(lambda: router, BATCH_LIMITS, timeout_s=0.1))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"x-request-timeout-seconds": "0"}
        response = await client.post("/v1/label-reads", json={"reads": [LABEL]}, headers=headers)
    assert response.status_code == 504
    assert "within 0.1 s (Serve's http_options.request_timeout_s)" in error_of(response, theirs=False)["message"]
    assert cancelled.is_set()


@pytest.fixture
def lines(caplog):
    """The lines of the log of the service."""
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG, logger="ray.serve"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    logger.removeHandler(caplog.handler)


def test_the_log_says_who_asked_for_what_and_nothing_else(guarded, lines):
    guarded.post("/v1/label-reads?prompt=secret", json={"reads": [LABEL]}, headers=BEARER)
    guarded.get("/health")
    guarded.get("/nope-secret%0Aforged", headers=BEARER)
    guarded.post("/v1/label-reads", headers={"authorization": "Bearer secret-token-0123456789"})
    found = [line.split(" ms, asked by ") for line in lines()]
    assert [(line.rpartition(" ")[0], who) for line, who in found] == [
        ("POST /v1/label-reads 200", "trainer"),
        ("GET /health 200", "anybody"),
        ("GET - 404", "trainer"),
        ("POST - 401", "nobody"),
    ]


@pytest.mark.parametrize("client_class", [HttpScoringClient, AsyncHttpScoringClient])
def test_the_clients_bring_a_token_either_way_and_hear_when_it_is_wrong(router, tokens, client_class):
    def read(url: str, **settings):
        read = MatrixRead([1, 2], [3])
        if client_class is HttpScoringClient:
            with HttpScoringClient(url, **settings) as client:
                return client.read_matrix([read], timeout_s=5)

        async def asked():
            async with AsyncHttpScoringClient(url, **settings) as client:
                return await client.read_matrix([read], timeout_s=5)

        return asyncio.run(asked())

    with served(build_api(lambda: router, BATCH_LIMITS, tokens)) as url:
        assert len(read(url, token=TOKEN)) == 1
        assert len(read(url.replace("://", f"://me:{TOKEN}@"))) == 1
        for settings in ({"url": url}, {"url": url, "token": "x"}, {"url": url.replace("://", "://me:x@")}):
            with pytest.raises(Unauthorized, match="this service asks for a token"):
                read(**settings)
    assert len(router.calls) == 2
    with pytest.raises(ValueError, match="given twice"):
        read(url.replace("://", f"://me:{TOKEN}@"), token=TOKEN)


def test_no_error_of_a_client_shows_the_token_in_its_url():
    with HttpScoringClient(f"http://me:{TOKEN}@127.0.0.1:1") as client, pytest.raises(Exception) as failure:
        client.read_matrix([MatrixRead([1], [2])], timeout_s=0.3)
    assert "127.0.0.1" in str(failure.value)
    assert TOKEN not in str(failure.value)


# ---------------------------------------------------------------- nothing a request holds is ever run

FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"}


@pytest.mark.parametrize("path", [p for n in ("scoring", "deployments") for p in (ROOT / n).rglob("*.py")], ids=str)
def test_no_pickle_and_nothing_like_it(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not FORBIDDEN & {name.split(".")[0] for name in names}, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in CALLS, f"line {node.lineno}"
            if name in ("np.load", "np.save"):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("allow_pickle") == "False", f"line {node.lineno}"
