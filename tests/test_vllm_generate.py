"""vLLM's scoring route over a Router that answers known numbers, beside vLLM's own classes where they say what is due.

The reference application below takes requests with vLLM's own request model and error handling. It has no engine, so
what only the engine refuses (rows, lengths) is held by values written down here.
"""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateRequest,
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.sampling_params import SamplingParams

from deployments.ingress import build_api
from deployments.vllm_http.generate import _NEUTRAL
from scoring.errors import DeadlineExceeded, Overloaded, TeacherUnavailable, WrongEngineAnswer
from tests.stand_in_router import BATCH_LIMITS, LIMITS, NEXT_TOKEN, StandInRouter

ROUTE = "/inference/v1/generate"
TOKENS = [11, 12, 13, 14]


@pytest.fixture
def router() -> StandInRouter:
    return StandInRouter()


@pytest.fixture
def api(router) -> TestClient:
    return TestClient(build_api(lambda: router, BATCH_LIMITS))


@pytest.fixture(scope="module")
def vllm_api() -> TestClient:
    """vLLM's own request model, sampling checks and error bodies, without an engine behind them."""
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    model = SimpleNamespace(max_logprobs=64, max_model_len=512, get_vocab_size=lambda: 2048)

    @app.post(ROUTE, dependencies=[Depends(validate_json_request)])
    async def generate(request: GenerateRequest, raw_request: Request):
        request.sampling_params._validate_logprobs(model)
        return "accepted"

    return TestClient(app, raise_server_exceptions=False)


def body(ids=((1, 2), (3, 4), (5, 6)), *, fields=None, **params) -> dict:
    rows = [list(row) for row in ids] if isinstance(ids, tuple) else ids
    return {
        "token_ids": TOKENS,
        "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": rows, **params},
        **(fields or {}),
    }


def without(name: str) -> dict:
    request = body()
    (request if name in request else request["sampling_params"]).pop(name)
    return request


def matrix(response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(base64.b64decode(response.json()["prompt_token_id_logprobs"])), allow_pickle=False)


# ---------------------------------------------------------------- answers


def test_row_r_scores_the_token_after_the_prompt_and_r_more(api, router):
    scores = matrix(api.post(ROUTE, json=body([[5, 6], [7, 8]], prompt_logprob_start=1)))
    assert scores.dtype == np.float32
    assert scores.tolist() == [[-5.0, -6.0], [-7.125, -8.125]]
    read = router.calls[0]["batch"][0]
    assert (read.prompt_ids.tolist(), read.response_ids.tolist()) == ([11, 12], [13, 14])


def test_every_row_is_scored_when_no_start_is_given(api):
    assert matrix(api.post(ROUTE, json=body())).shape == (3, 2)
    assert matrix(api.post(ROUTE, json=body(prompt_logprob_start=None))).shape == (3, 2)


def test_ragged_rows_are_padded_and_pads_score_minus_infinity(api):
    scores = matrix(api.post(ROUTE, json=body([[1, 2], [3], [5, -1]])))
    assert scores.tolist() == [[-1.0, -2.0], [-3.125, -np.inf], [-5.25, -np.inf]]


def test_one_flat_list_scores_every_row(api):
    scores = matrix(api.post(ROUTE, json=body([1, 2], prompt_logprob_start=1)))
    assert scores.tolist() == [[-1.0, -2.0], [-1.125, -2.125]]


def test_the_answer_has_vllms_fields_and_no_others(api):
    answer = api.post(ROUTE, json=body()).json()
    theirs = GenerateTokensResponse(choices=[GenerateTokensChoice(index=0)], usage={}).model_dump()
    assert answer.keys() == theirs.keys()
    assert answer["choices"][0].keys() == theirs["choices"][0].keys()
    assert answer["usage"].keys() == theirs["usage"].keys()
    GenerateTokensResponse.model_validate(answer)


def test_the_answer_says_who_answered_and_what_it_cost(api):
    answer = api.post(ROUTE, json=body()).json()
    assert answer["model"] == "default"
    assert {k: v for k, v in answer["usage"].items() if v is not None} == {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "total_tokens": 5,
    }
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["token_ids"] == [NEXT_TOKEN]
    assert answer["prompt_token_ids"] is None
    assert answer["prompt_logprobs"] is None


def test_the_prompt_comes_back_when_asked(api):
    assert api.post(ROUTE, json=body(fields={"return_token_ids": True})).json()["prompt_token_ids"] == TOKENS


def test_the_request_id_is_the_bodys_or_the_headers(api):
    headers = {"x-request-id": "from-header"}
    first = api.post(ROUTE, json=body(fields={"request_id": "from-body"}), headers=headers).json()["request_id"]
    second = api.post(ROUTE, json=body(), headers=headers).json()["request_id"]
    third, fourth = (api.post(ROUTE, json=body()).json()["request_id"] for _ in range(2))
    assert first == "generate-tokens-from-body"
    assert second == "generate-tokens-from-header"
    assert third != fourth


def test_max_tokens_left_out_means_one(api):
    assert matrix(api.post(ROUTE, json=without("max_tokens"))).shape == (3, 2)


def test_priority_and_trace_context_go_along(api, router):
    api.post(ROUTE, json=body(fields={"priority": -7}), headers={"traceparent": "00-ab-cd-01"})
    assert router.calls[0]["batch"][0].priority == -7
    assert router.calls[0]["trace_headers"] == {"traceparent": "00-ab-cd-01"}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 5},
        {"temperature": 0, "top_k": -1, "seed": None},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "detokenize": False},
        {"ignore_eos": True, "include_stop_str_in_output": True, "skip_reading_prefix_cache": True},
        {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0},
        {"stop": [], "stop_token_ids": None, "bad_words": [], "logit_bias": None, "logprobs": None},
        {"unheard_of": 5},
    ],
)
def test_what_cannot_change_a_score_is_accepted_and_changes_none(api, vllm_api, params):
    request = body(**params)
    assert vllm_api.post(ROUTE, json=request).status_code == 200
    assert matrix(api.post(ROUTE, json=request)).tolist() == matrix(api.post(ROUTE, json=body())).tolist()


def test_an_unknown_field_of_the_request_is_ignored_as_there(api, vllm_api):
    request = body(fields={"unheard_of": 5, "stream": False, "cache_salt": "abc", "output_mode": "tokens"})
    assert vllm_api.post(ROUTE, json=request).status_code == 200
    assert matrix(api.post(ROUTE, json=request)).shape == (3, 2)


@pytest.mark.parametrize(
    ("model", "teacher"),
    [(None, "default"), ("", "default"), ("default", "default"), ("math", "math"), ("checkpoints/math", "math")],
)
def test_model_is_a_teacher_or_its_checkpoint_or_nothing(api, model, teacher):
    assert api.post(ROUTE, json=body(fields={"model": model})).json()["model"] == teacher


# ---------------------------------------------------------------- refusals


def refusal(response) -> dict:
    """The error object, held to vLLM's four fields."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["message"]
    return error


REFUSED_AS_BY_VLLM = {
    "no token_ids": without("token_ids"),
    "no sampling_params": without("sampling_params"),
    "empty token_ids": body(fields={"token_ids": []}),
    "negative token id": body(fields={"token_ids": [11, -2, 13, 14]}),
    "fractional token id": body(fields={"token_ids": [11, 2.5, 13, 14]}),
    "null token id": body(fields={"token_ids": [11, None, 13, 14]}),
    "token_ids a string": body(fields={"token_ids": "abc"}),
    "token_ids null": body(fields={"token_ids": None}),
    "sampling_params a list": body(fields={"sampling_params": []}),
    "sampling_params null": body(fields={"sampling_params": None}),
    "model a number": body(fields={"model": 5}),
    "request_id a number": body(fields={"request_id": 5}),
    "stream a word": body(fields={"stream": "x"}),
    "return_token_ids a word": body(fields={"return_token_ids": "maybe"}),
    "priority a word": body(fields={"priority": "x"}),
    "cache_salt empty": body(fields={"cache_salt": ""}),
    "cache_salt a number": body(fields={"cache_salt": 5}),
    "output_mode unknown": body(fields={"output_mode": "x"}),
    "candidates a number": body(5),
    "candidates of floats": body([[1.0, 2], [3, 4], [5, 6]]),
    "candidates of booleans": body([[True, 2], [3, 4], [5, 6]]),
    "candidates of strings": body([["1", 2], [3, 4], [5, 6]]),
    "candidates with null": body([[None, 2], [3, 4], [5, 6]]),
    "candidates of floats in the last row": body([[1, 2], [3, 4], [5, 6.5]]),
    "no candidates": body([]),
    "rows without candidates": body([[], [], []]),
    "candidate beyond int32": body([[2**31, 2], [3, 4], [5, 6]]),
    "candidate beyond int64": body([[2**70, 2], [3, 4], [5, 6]]),
    "candidate beyond the vocabulary": body([[1, 2], [3, 2048], [5, 6]]),
    "candidate -2": body([[1, 2], [3, -2], [5, 6]]),
    "65 candidates of 64": body([list(range(65))] * 3),
    "start below zero": body(prompt_logprob_start=-1),
    "start fractional": body(prompt_logprob_start=1.5),
    "max_tokens 0": body(max_tokens=0),
    "temperature 3": body(temperature=3),
    "temperature -1": body(temperature=-1),
    "temperature a word": body(temperature="a"),
    "temperature null": body(temperature=None),
    "top_p 0": body(top_p=0),
}


@pytest.mark.parametrize("name", REFUSED_AS_BY_VLLM)
def test_a_refusal_is_that_of_vllm_in_status_type_param_and_code(api, vllm_api, router, name):
    theirs = vllm_api.post(ROUTE, json=REFUSED_AS_BY_VLLM[name])
    assert theirs.status_code == 400
    ours = refusal(api.post(ROUTE, json=REFUSED_AS_BY_VLLM[name]))
    expected = refusal(theirs)
    assert {**ours, "message": ""} == {**expected, "message": ""}


@pytest.mark.parametrize("content", [b"{", b"", b'{"token_ids": [1,]}', b"[1]", b"\xff\xfe"])
def test_a_body_that_is_no_request_is_refused_as_by_vllm(api, vllm_api, content):
    headers = {"content-type": "application/json"}
    theirs = refusal(vllm_api.post(ROUTE, content=content, headers=headers))
    ours = refusal(api.post(ROUTE, content=content, headers=headers))
    if content not in (b"", b"\xff\xfe"):  # where nothing can be read, they count from 0 or name the body
        assert ours["param"] == theirs["param"]
    assert (ours["type"], ours["code"]) == (theirs["type"], theirs["code"])


def test_another_content_type_is_refused_as_by_vllm(api, vllm_api):
    theirs, ours = (
        refusal(client.post(ROUTE, content=b"{}", headers={"content-type": "text/plain"})) for client in (vllm_api, api)
    )
    assert (ours["type"], ours["param"], ours["code"]) == (theirs["type"], theirs["param"], theirs["code"])


# vLLM takes these, and makes an answer of more or other tokens. Reads have nothing of it to give.
MORE_THAN_SCORES = {
    "max_tokens": 2,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "logprobs": 5,
    "logprob_token_ids": [5],
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5],
    "structured_outputs": {"regex": "a"},
    "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
    "thinking_token_budget": 5,
    "watermarking": True,
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [5],
    "extra_args": {"a": 1},
}


@pytest.mark.parametrize("name", MORE_THAN_SCORES)
def test_a_parameter_that_asks_for_more_is_refused_by_name_and_nothing_is_asked(api, router, name):
    error = refusal(api.post(ROUTE, json=body(**{name: MORE_THAN_SCORES[name]})))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", name, 400)
    assert name in error["message"]
    assert router.calls == []


def test_no_parameter_of_vllms_is_dropped_without_a_decision():
    decided = _NEUTRAL.keys() | {
        # what the read is made of
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "prompt_logprobs",
        # move only the token made at the end, or its text
        *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        # how vLLM hands over its output; its own route sets these or gives them no effect
        *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs"),
        # matrix reads never read it
        "skip_reading_prefix_cache",
    }
    assert {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} == decided
    assert MORE_THAN_SCORES.keys() == _NEUTRAL.keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, None),
        ({"output_mode": "text"}, None),
        ({"output_mode": "derender"}, None),
        ({"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_field_that_asks_for_more_is_refused(api, router, fields, param):
    error = refusal(api.post(ROUTE, json=body(fields=fields)))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert router.calls == []


def test_streaming_is_refused_in_vllms_words(api):
    message = refusal(api.post(ROUTE, json=body(fields={"stream": True})))["message"]
    assert message == "prompt_logprob_token_ids are not available when stream=true."


def test_a_request_without_candidates_is_told_what_is_answered_here(api):
    for request in (without("prompt_logprob_token_ids"), body(None), {"token_ids": [1], "sampling_params": {}}):
        error = refusal(api.post(ROUTE, json=request))
        assert (error["type"], error["param"]) == ("BadRequestError", "prompt_logprob_token_ids")
        assert "generates no text" in error["message"]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_that_do_not_match_the_prompt_are_refused_with_the_numbers(api, rows):
    error = refusal(api.post(ROUTE, json=body([[1]] * rows)))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "prompt_logprob_token_ids", 400)
    assert f"{rows} rows" in error["message"]
    assert "3 scored rows" in error["message"]


@pytest.mark.parametrize("start", [3, 4, 2**70])
@pytest.mark.parametrize("ids", [[1, 2], [[1, 2]]])
def test_a_start_that_leaves_no_row_is_refused(api, ids, start):
    error = refusal(api.post(ROUTE, json=body(ids, prompt_logprob_start=start)))
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "no row" in error["message"]


def test_a_pad_inside_a_row_is_refused(api):
    error = refusal(api.post(ROUTE, json=body([[5, -1, 7]] * 3)))
    assert (error["type"], error["param"]) == ("BadRequestError", "prompt_logprob_token_ids")
    assert "[0][1]" in error["message"]


@pytest.mark.parametrize(("at", "start"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, 0), (3, 0)])
def test_a_token_beyond_the_vocabulary_is_named_by_its_place_in_token_ids(api, at, start):
    tokens = list(TOKENS)
    tokens[at] = 2048
    request = body([1, 2], prompt_logprob_start=start, fields={"token_ids": tokens})
    error = refusal(api.post(ROUTE, json=request))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, 400)
    assert f"token_ids[{at}] is 2048" in error["message"]


def test_a_candidate_beyond_the_vocabulary_is_named_by_row_and_column(api):
    error = refusal(api.post(ROUTE, json=body([[1, 2], [3, 2048], [5, 6]])))
    assert "prompt_logprob_token_ids[1][1] is 2048" in error["message"]


def test_a_prompt_too_long_by_one_is_refused_with_the_numbers(api):
    fits = {"token_ids": [1] * (LIMITS.max_length - 1)}
    assert matrix(api.post(ROUTE, json=body([1], fields=fits))).shape == (510, 1)
    error = refusal(api.post(ROUTE, json=body([1], fields={"token_ids": [1] * LIMITS.max_length})))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, 400)
    assert "512+1 > 512" in error["message"]


def test_an_unknown_model_is_vllms_404(api, router):
    error = refusal(api.post(ROUTE, json=body(fields={"model": "nobody"})))
    assert error == {
        "message": "The model `nobody` does not exist. Valid aliases: default, math.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert router.calls == []


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("every replica refused", retry_after_s=2), 503, "Service Unavailable"),
        (TeacherUnavailable("no replica"), 503, "Service Unavailable"),
        (DeadlineExceeded("too late"), 504, "Gateway Timeout"),
        (WrongEngineAnswer("NaN at row 0"), 500, "InternalServerError"),
    ],
)
def test_a_failure_of_the_service_has_vllms_form(api, router, error, status, kind):
    def fail():
        raise error

    router.before = fail
    response = api.post(ROUTE, json=body())
    assert response.status_code == status
    assert (refusal(response)["type"], refusal(response)["param"]) == (kind, None)
    assert response.headers.get("retry-after") == ("2" if isinstance(error, Overloaded) else None)


def test_a_failure_nobody_foresaw_tells_nothing(api, router):
    def fail():
        raise RuntimeError("at /srv/secret.py")

    router.before = fail
    error = refusal(api.post(ROUTE, json=body()))
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "secret" not in error["message"]


# ---------------------------------------------------------------- the model list


def test_models_in_the_shape_of_vllm(api):
    answer = api.get("/v1/models").json()
    cards = ModelList.model_validate(answer).data
    assert [(card.id, card.root, card.max_model_len) for card in cards] == [
        ("default", "checkpoints/default", 512),
        ("math", "checkpoints/math", 512),
    ]
    assert answer["data"][0].keys() == cards[0].model_dump().keys()
    assert answer["data"][0]["permission"][0].keys() == cards[0].permission[0].model_dump().keys()
