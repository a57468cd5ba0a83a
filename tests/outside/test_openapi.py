"""What `/openapi.json` says is so: every example is answered, every route's errors and tokens are declared."""

import json

import httpx
import jsonschema
import pytest
from fastapi.testclient import TestClient

from deployments.auth import Tokens
from deployments.ingress import build_api
from scoring import wire
from scoring.checkpoint import tokenizer_hash
from tests.stand_in_router import BATCH_LIMITS, StandInRouter
from tests.text_teacher import save_text_tokenizer

JSON = "application/json"


def operations(document: dict) -> list[tuple[str, str, dict]]:
    return [(path, method, what) for path, methods in document["paths"].items() for method, what in methods.items()]


def examples(operation: dict) -> list[tuple[str, bytes]]:
    """(content type, body) of every example of a request."""
    content = operation.get("requestBody", {}).get("content", {})
    assert all("example" in form for form in content.values())
    written = {
        JSON: lambda example: json.dumps(example).encode(),
        wire.SAFETENSORS: lambda text: text.encode("latin-1"),
    }
    return [(kind, written[kind](form["example"])) for kind, form in content.items()]


def filled(path: str) -> str:
    return path.replace("{teacher}", "default")


def every_request(document: dict) -> list[tuple[str, str, str | None, bytes | None]]:
    """(method, path, content type, body) of everything that the document says can be asked."""
    found = []
    for path, method, operation in operations(document):
        found += [(method, path, kind, body) for kind, body in examples(operation)]
        if "requestBody" not in operation:
            found.append((method, path, None, None))
    return found


def ask(http: httpx.Client, method: str, path: str, kind: str | None, body: bytes | None) -> httpx.Response:
    return http.request(method, path, content=body, headers={"content-type": kind} if kind else None)


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> TestClient:
    folder = save_text_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    router = StandInRouter(str(folder), tokenizer_hash(folder))
    return TestClient(build_api(lambda: router, BATCH_LIMITS))


@pytest.fixture(scope="module")
def document(api) -> dict:
    return api.get("/openapi.json").raise_for_status().json()


def test_every_example_of_a_request_is_answered_and_every_plain_route_too(api, document):
    requests = every_request(document)
    assert {kind for _, _, kind, _ in requests} == {JSON, wire.SAFETENSORS, None}
    for method, path, kind, body in requests:
        response = ask(api, method, filled(path), kind, body)
        assert response.status_code == 200, (method, path, kind, response.text)
        declared = document["paths"][path][method]["responses"]["200"].get("content", {})
        given = response.headers.get("content-type")
        assert given in declared if declared else response.content == b"", (method, path, kind)
        if given == JSON and "schema" in declared[JSON]:
            jsonschema.Draft202012Validator(declared[JSON]["schema"]).validate(response.json())


# In the place of any value of a request: what a parser, a conversion or a log might stumble over.
NASTY = [
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 10_000,
    "-" + "9" * 4_000,
    "0." + "9" * 10_000,
    "1e-999",
    "-0",
    "18446744073709551616",
    "-9223372036854775809",
    '"\\ud800"',
    '"\\u0000"',
    '"%s%n{}"',
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 900 + "]" * 900,
    '{"a": 1, "a": 1}',
    "[[[]]]",
    "[null]",
    "{}",
    "[]",
    '""',
    "null",
    "true",
]


def bodies_with(nasty: str, example: object) -> list[str]:
    """The example with `nasty` in the place of one of its values, for each of them, and in one name more."""

    def places(value: object) -> list[list]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [[], *([key, *rest] for key, inner in items for rest in places(inner))]

    def replaced(value: object, place: list) -> object:
        if not place:
            return "@@"
        copy = value.copy()
        copy[place[0]] = replaced(value[place[0]], place[1:])
        return copy

    bodies = [json.dumps(replaced(example, place)).replace('"@@"', nasty) for place in places(example)]
    return [*bodies, json.dumps(example | {"more": "@@"}).replace('"@@"', nasty)]


def test_no_value_in_any_place_of_a_request_breaks_a_route(api, document):
    asked = 0
    for path, method, operation in operations(document):
        example = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
        nasties = [(value, body) for value in NASTY for body in bodies_with(value, example)] if example else []
        for nasty, body in nasties:
            response = ask(api, method, filled(path), JSON, body.encode())
            assert response.status_code < 500, (path, body[:300], response.text[:300])
            assert str(response.status_code) in operation["responses"], (path, body[:300], response.text[:300])
            if nasty in NASTY[:6]:  # no JSON numbers
                assert response.status_code in (400, 422), (path, body[:300])
            asked += 1
    assert asked > 1000


def test_both_examples_of_a_route_ask_the_same(api, document):
    for kind in ("matrix", "label"):
        content = document["paths"][f"/v1/{kind}-reads"]["post"]["requestBody"]["content"]
        reads, _ = wire.reads_from_json(kind, content[JSON]["example"])
        batch, _ = wire.decode_batch(kind, content[wire.SAFETENSORS]["example"].encode("latin-1"))
        assert wire.batch_to_json(batch) == wire.batch_to_json(wire.BATCH[kind].from_reads(reads))


def test_every_route_says_its_errors_in_the_form_they_have(api, document):
    schemas = document["components"]["schemas"]
    for path, method, operation in operations(document):
        assert {"200", "414", "415", "431"} <= operation["responses"].keys()
        response = api.request(method, filled(path), headers={"content-encoding": "gzip"})
        (form,) = operation["responses"]["415"]["content"].values()
        jsonschema.Draft202012Validator(schemas[form["schema"]["$ref"].split("/")[-1]]).validate(response.json())


def test_the_document_says_which_routes_need_a_token(document, tmp_path):
    assert "securitySchemes" not in document["components"]
    assert not any("security" in what or "401" in what["responses"] for _, _, what in operations(document))
    path = tmp_path / "tokens"
    path.write_text("a: 0123456789abcdef\n")
    path.chmod(0o600)
    guarded = TestClient(build_api(StandInRouter, BATCH_LIMITS, Tokens(str(path))))
    secured = guarded.get("/openapi.json", auth=("", "0123456789abcdef")).raise_for_status().json()
    assert secured["components"]["securitySchemes"].keys() == {"bearer", "basic"}
    for path, method, operation in operations(secured):
        asks = guarded.request(method, filled(path)).status_code == 401
        assert ("401" in operation["responses"]) == ("security" in operation) == asks, path
