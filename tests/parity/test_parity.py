"""The same requests, good and bad, to vLLM's own server and to this service, both running on the tiny teacher.

Values agree to 1e-5; shapes, texts, status codes and the fields of errors agree exactly. What is different on purpose
is in `differences.py`.
"""

import base64
import io
from typing import Any

import numpy as np
import pytest

from tests.parity.cases import ANSWERED, COMPLETIONS, REFUSED, ids
from tests.parity.differences import ELSEWHERE, REFUSED_HERE

CLOSE = 1e-5
OWN = {"id", "request_id", "created", "system_fingerprint"}
"""Fields that each server has values of its own for."""
SCORES = {"logprob", "score"}


@pytest.mark.parametrize("case", ANSWERED)
def test_an_answer_is_vllms(theirs, ours, case):
    route, body = ANSWERED[case]
    due, given = (server.post(route, json=body) for server in (theirs, ours))
    assert due.status_code == 200, due.text
    assert given.status_code == 200, given.text
    same(due.json(), given.json())


@pytest.mark.parametrize("path", ["/teachers/default", "/teachers/judge"])
def test_a_path_below_a_teacher_is_like_a_server_of_it(theirs, ours, path):
    for case in (
        "prompt_logprobs and candidates",
        "completions of a text",
        "labels of texts",
        "tokenize",
        "detokenize",
    ):
        route, body = ANSWERED[case]
        due, given = theirs.post(route, json=body).json(), ours.post(path + route, json=body).json()
        if "model" in due:
            assert given["model"] == path.rpartition("/")[2]
            due["model"] = given["model"]
        same(due, given)
    assert ours.get(f"{path}/health").content == theirs.get("/health").content == b""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_vllms(theirs, ours, case):
    route, body = REFUSED[case]
    due, given = (server.post(route, json=body) for server in (theirs, ours))
    assert 400 <= due.status_code < 500, due.text
    assert given.status_code == due.status_code, given.text
    due, given = due.json()["error"], given.json()["error"]
    assert given.keys() == due.keys()
    assert given["message"]
    assert (given["type"], given["param"], given["code"]) == (due["type"], due["param"], due["code"]), due


@pytest.mark.parametrize("case", REFUSED_HERE)
def test_what_vllm_answers_and_this_service_does_not_is_refused_by_name(theirs, ours, case):
    (route, body), param = REFUSED_HERE[case]
    assert theirs.post(route, json=body).status_code == 200
    given = ours.post(route, json=body)
    error = given.json()["error"]
    assert (given.status_code, error["type"], error["param"]) == (400, "BadRequestError", param)
    assert param is None or param in error["message"]


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_else_is_different_on_purpose(theirs, ours, case):
    (route, body), statuses = ELSEWHERE[case]
    assert (theirs.post(route, json=body).status_code, ours.post(route, json=body).status_code) == statuses


@pytest.mark.parametrize(
    "route", ["/inference/v1/generate", COMPLETIONS, "/generative_scoring", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize("content", [b"{", b'{"prompt": [1,]}', b"5", b'"x"'])
def test_a_body_that_is_no_request_is_refused_as_by_vllm(theirs, ours, route, content):
    headers = {"content-type": "application/json"}
    due, given = (server.post(route, content=content, headers=headers) for server in (theirs, ours))
    assert given.status_code == due.status_code == 400
    due, given = due.json()["error"], given.json()["error"]
    assert (given["type"], given["param"], given["code"]) == (due["type"], due["param"], due["code"])


@pytest.mark.parametrize(
    "route", ["/inference/v1/generate", COMPLETIONS, "/generative_scoring", "/tokenize", "/detokenize"]
)
def test_another_content_type_is_refused_as_by_vllm(theirs, ours, route):
    headers = {"content-type": "text/plain"}
    due, given = (server.post(route, content=b"{}", headers=headers) for server in (theirs, ours))
    assert given.status_code == due.status_code == 400
    due, given = due.json()["error"], given.json()["error"]
    assert (given["type"], given["param"], given["code"]) == (due["type"], due["param"], due["code"])


def test_the_models_are_listed_as_by_vllm(theirs, ours):
    due, given = theirs.get("/v1/models").json(), ours.get("/teachers/default/v1/models").json()
    assert given["data"][0].pop("permission")[0].keys() == due["data"][0].pop("permission")[0].keys()
    same(due | {"data": [card | {"created": 0} for card in due["data"]]}, given)


def test_the_version_is_vllms(theirs, ours):
    assert ours.get("/version").json()["version"] == theirs.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("PUT", "/tokenize"), ("POST", "/v1/models"), ("GET", "/nothing")]
)
def test_what_is_no_route_has_vllms_status(theirs, ours, method, path):
    assert ours.request(method, path).status_code == theirs.request(method, path).status_code


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"include_stop_str_in_output": True}])
def test_a_token_that_ends_the_text_is_told_as_by_vllm(theirs, ours, ending, fields):
    body = {"prompt": ending, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, **fields}
    due, given = (server.post(COMPLETIONS, json=body).json() for server in (theirs, ours))
    assert due["choices"][0]["finish_reason"] == ("length" if "ignore_eos" in fields else "stop")
    same(due, given)


@pytest.fixture(scope="module")
def ending(checkpoint) -> list[int]:
    """A prompt after which the likeliest token is the one that ends a text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    eos = AutoTokenizer.from_pretrained(checkpoint).eos_token_id
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for seed in range(20):
        prompts = torch.tensor([ids(3, seed * 1000 + i) for i in range(1000)])
        with torch.inference_mode():
            likeliest = model(prompts).logits[:, -1].topk(2)
        sure = likeliest.values[:, 0] - likeliest.values[:, 1] > 0.01
        found = ((likeliest.indices[:, 0] == eos) & sure).nonzero()
        if len(found):
            return prompts[found[0, 0]].tolist()
    raise AssertionError("no such prompt was found")


def same(due: Any, given: Any, where: str = "") -> None:
    """Hold `given` against `due`: what is different is named by its place."""
    name = where.rpartition(".")[2]
    assert type(given) is type(due), f"{where}: {given!r} is not {due!r}"
    if name in OWN:
        return
    if isinstance(due, dict):
        assert given.keys() == due.keys(), where
        for key in due:
            same(due[key], given[key], f"{where}.{key}")
    elif isinstance(due, list):
        assert len(given) == len(due), where
        for i, (one, other) in enumerate(zip(due, given, strict=True)):
            same(one, other, f"{where}.{i}")
    elif name == "prompt_token_id_logprobs" and due is not None:
        one, other = (np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) for text in (due, given))
        assert other.dtype == one.dtype
        np.testing.assert_allclose(other, one, rtol=0, atol=CLOSE, err_msg=where)
    elif isinstance(due, float):
        assert name in SCORES and abs(given - due) <= CLOSE, f"{where}: {given} is not {due}"
    else:
        assert given == due, f"{where}: {given!r} is not {due!r}"
