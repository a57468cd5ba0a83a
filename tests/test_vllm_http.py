"""vLLM's routes over a Router that answers known numbers: who answers, what is refused by name, what is asked.

What vLLM's own server answers to the same requests is compared in `tests/parity/`.
"""

import json
import math
import threading

import pytest
from fastapi.testclient import TestClient
from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

from deployments.ingress import build_api
from deployments.vllm_http import completions, generative_scoring, tokenize
from scoring.checkpoint import tokenizer_hash
from scoring.errors import DeadlineExceeded, Overloaded, TeacherUnavailable
from scoring.limits import BatchLimits
from tests.stand_in_router import BATCH_LIMITS, NEXT_TOKEN, StandInRouter, rank, score
from tests.text_teacher import save_text_tokenizer

COMPLETE = {"prompt": [11, 12, 13], "max_tokens": 1, "prompt_logprobs": 2}
GENERATE = {"token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
LABEL = {"query": [11, 12], "items": [[13], [14, 15]], "label_token_ids": [20, 21]}
BODIES = {
    "/inference/v1/generate": GENERATE,
    "/v1/completions": COMPLETE,
    "/generative_scoring": LABEL,
    "/tokenize": {"prompt": "Yes"},
    "/detokenize": {"tokens": [40]},
}
READS = [route for route in BODIES if "tokenize" not in route]


class RouterWithAdapter(StandInRouter):
    """Also serves "polite", an adapter over "math"."""

    async def teachers(self) -> dict[str, dict]:
        polite = self.info("math") | {"teacher": "polite", "base": "math", "adapter": "adapters/polite"}
        return await super().teachers() | {"polite": polite}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_tokenizer(tmp_path_factory.mktemp("text"))


@pytest.fixture
def router(folder) -> StandInRouter:
    return StandInRouter(str(folder), tokenizer_hash(folder))


@pytest.fixture
def api(router) -> TestClient:
    return TestClient(build_api(lambda: router, BATCH_LIMITS))


def of(router, limits=BATCH_LIMITS) -> TestClient:
    return TestClient(build_api(lambda: router, limits))


def refusal(response) -> dict:
    """The error object, held to vLLM's four fields."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["message"]
    return error


def entries(own: int, row: int, count: int) -> dict:
    """What is due of one position: the token itself with its rank, and the likeliest ones."""
    tokens = {own: (score(own, row), rank(own, row))}
    tokens |= {own + 1 + k: (score(own + 1 + k, row), 1 + k) for k in range(count)}
    return {str(token): {"logprob": logprob, "rank": place} for token, (logprob, place) in tokens.items()}


def without_texts(position: dict) -> dict:
    return {token: {"logprob": e["logprob"], "rank": e["rank"]} for token, e in position.items()}


# ---------------------------------------------------------------- who answers


def test_every_route_is_served_for_the_default_teacher_and_for_each_by_name(api):
    for route, body in BODIES.items():
        for prefix, teacher in (("", "default"), ("/teachers/default", "default"), ("/teachers/math", "math")):
            answer = api.post(prefix + route, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", teacher) == teacher
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["default", "math"]
    assert [card["id"] for card in api.get("/teachers/math/v1/models").json()["data"]] == ["math"]
    assert api.get("/teachers/math/version").json() == api.get("/version").json()
    healthy = api.get("/teachers/math/health")
    assert (healthy.status_code, healthy.content) == (200, b"")  # as vLLM says it


@pytest.mark.parametrize("route", [*BODIES, "/v1/models", "/version", "/health"])
def test_a_path_of_nobody_is_a_404_in_vllms_form(api, router, route):
    path = f"/teachers/nobody{route}"
    answer = api.post(path, json=BODIES[route]) if route in BODIES else api.get(path)
    error = refusal(answer)
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", None, 404)
    assert "`nobody`" in error["message"] and "default, math" in error["message"]
    assert router.calls == []


@pytest.mark.parametrize("route", BODIES)
def test_a_model_that_a_server_of_the_paths_teacher_would_not_serve_is_its_404(api, router, route):
    for prefix, model in (("", "nobody"), ("/teachers/math", "default"), ("/teachers/math", "nobody")):
        error = refusal(api.post(prefix + route, json=BODIES[route] | {"model": model}))
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
        assert f"`{model}`" in error["message"]
    assert router.calls == []


def test_below_a_teachers_path_its_adapters_are_models_too():
    api = of(RouterWithAdapter())
    cards = api.get("/teachers/math/v1/models").json()["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        ("math", None, "checkpoints/math"),
        ("polite", "math", "adapters/polite"),
    ]
    names = {"polite": "polite", "adapters/polite": "polite", "checkpoints/math": "math", "math": "math", "": "math"}
    for model, answers in names.items():
        answer = api.post("/teachers/math/v1/completions", json=COMPLETE | {"model": model})
        assert answer.json()["model"] == answers
    assert [card["id"] for card in api.get("/teachers/polite/v1/models").json()["data"]] == ["polite"]


# ---------------------------------------------------------------- prompt_logprobs


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("route", ["/inference/v1/generate", "/v1/completions"])
def test_prompt_logprobs_are_the_tokens_own_and_the_likeliest_ones(api, route, count):
    body = COMPLETE | {"prompt_logprobs": count}
    if route != "/v1/completions":
        body = GENERATE | {"sampling_params": {"prompt_logprobs": count}}
    answer = api.post(route, json=body).json()
    positions = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    assert [without_texts(p) for p in positions[1:]] == [entries(12, 0, count), entries(13, 1, count)]
    assert [next(iter(p)) for p in positions[1:]] == ["12", "13"]  # the token itself comes first


def test_a_token_that_is_among_the_likeliest_has_its_place_there(api, router, monkeypatch):
    """vLLM writes the likeliest after the token itself, over it."""
    import tests.stand_in_router as stand_in

    monkeypatch.setattr(stand_in, "top", lambda token, row, count: [(token - 1, -1.0), (token, -2.0)][:count])
    positions = api.post("/v1/completions", json=COMPLETE).json()["choices"][0]["prompt_logprobs"]
    assert without_texts(positions[1]) == {"12": {"logprob": -2.0, "rank": 2}, "11": {"logprob": -1.0, "rank": 1}}


def test_an_impossible_token_has_vllms_number(api, monkeypatch):
    import tests.stand_in_router as stand_in

    monkeypatch.setattr(stand_in, "score", lambda token, row=0: -math.inf)
    positions = api.post("/v1/completions", json=COMPLETE).json()["choices"][0]["prompt_logprobs"]
    assert {entry["logprob"] for entry in positions[1].values()} == {-9999.0}


def test_all_prompts_of_a_request_are_one_call_of_the_router(api, router):
    answer = api.post("/v1/completions", json=COMPLETE | {"prompt": [[11, 12], [13, 14, 15], [16, 17]]}).json()
    assert len(router.calls) == 1
    batch = router.calls[0]["batch"]
    assert [(r.prompt_ids.tolist(), r.response_ids.tolist(), r.top_k, r.extras) for r in batch] == [
        ([11], [12], 2, ("rank",)),
        ([13], [14, 15], 2, ("rank",)),
        ([16], [17], 2, ("rank",)),
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_priority_and_trace_context_go_along(api, router):
    headers = {"traceparent": "00-ab-cd-01"}
    for route in ("/v1/completions", "/generative_scoring"):
        api.post(route, json=BODIES[route] | {"priority": -7}, headers=headers)
        assert router.calls[-1]["batch"][0].priority == -7
        assert router.calls[-1]["trace_headers"] == headers


def test_the_answer_has_vllms_fields_and_no_others(api):
    answer = api.post("/v1/completions", json=COMPLETE | {"return_token_ids": True}).json()
    theirs = CompletionResponse.model_validate(answer).model_dump()
    assert answer.keys() == theirs.keys()
    assert answer["choices"][0].keys() == theirs["choices"][0].keys()
    assert answer["system_fingerprint"] == "vllm-0.32.0-0123456789abcdef"
    assert (answer["choices"][0]["token_ids"], answer["choices"][0]["prompt_token_ids"]) == (
        [NEXT_TOKEN],
        [11, 12, 13],
    )


@pytest.mark.parametrize("route", ["/inference/v1/generate", "/v1/completions"])
def test_a_prompt_whose_answer_would_be_too_large_is_refused_before_it_is_asked(router, route):
    """Of three tokens with two likeliest each the JSON is bound by 3 x 3 x 80 bytes."""
    body = BODIES[route]
    fits, does_not = (of(router, BatchLimits(10, 1000, 1 << 20, most)) for most in (720, 719))
    error = refusal(does_not.post(route, json=body))
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "limits.max_answer_bytes" in error["message"]
    assert router.calls == []
    assert fits.post(route, json=body).status_code == 200


@pytest.mark.parametrize("rows, start", [(None, 0), (1, 1)], ids=["one list for all rows", "of the last row alone"])
def test_candidates_beside_prompt_logprobs_that_would_be_too_many_are_refused_before_they_are_spread(
    router, rows, start
):
    """A request of a megabyte would be an array of many gigabytes: both of three tokens' rows get every column."""
    api = of(router, BatchLimits(10, 1000, 1 << 20, 300))

    def ask(width):
        ids = list(range(width))
        params = {"prompt_logprob_token_ids": ids if rows is None else [ids] * rows, "prompt_logprob_start": start}
        return api.post("/inference/v1/generate", json=GENERATE | {"sampling_params": params | {"prompt_logprobs": 0}})

    error = refusal(ask(38))
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "304 bytes of scores" in error["message"] and "limits.max_answer_bytes" in error["message"]
    assert router.calls == []
    assert ask(37).status_code == 200


def test_a_teacher_that_takes_fewer_candidates_says_so_of_prompt_logprobs(api, router, monkeypatch):
    from dataclasses import replace

    import tests.stand_in_router as stand_in

    monkeypatch.setattr(stand_in, "LIMITS", replace(stand_in.LIMITS, max_candidates=1))
    for route in ("/inference/v1/generate", "/v1/completions"):
        error = refusal(api.post(route, json=BODIES[route]))
        assert (error["param"], error["code"]) == ("prompt_logprobs", 400)
        assert "max_candidates" in error["message"]


@pytest.mark.parametrize(("prompt", "place"), [([11, 2048, 13], 1), ([2048, 1], 0)])
def test_an_id_beyond_the_vocabulary_is_named_by_its_place(api, prompt, place):
    said = f"prompt 0[{place}] is 2048"
    error = refusal(api.post("/v1/completions", json=COMPLETE | {"prompt": prompt}))
    assert (error["type"], error["param"]) == ("BadRequestError", None)
    assert said in error["message"]
    error = refusal(api.post("/v1/completions", json=COMPLETE | {"prompt": [[1, 2], prompt]}))
    assert said.replace("prompt 0", "prompt 1") in error["message"]


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("apply_softmax", [True, False])
@pytest.mark.parametrize("item_first", [True, False])
def test_the_score_is_the_first_labels_probability_after_query_and_item(api, router, apply_softmax, item_first):
    body = LABEL | {"label_token_ids": [3, 1, 3], "apply_softmax": apply_softmax, "item_first": item_first}
    answer = api.post("/generative_scoring", json=body).json()
    first, other = math.exp(score(3)), math.exp(score(1))
    due = first / (first + other) if apply_softmax else first  # a label that is given twice counts once
    assert [item["score"] for item in answer["data"]] == pytest.approx([due, due], abs=1e-12)
    prompts = [read.prompt_ids.tolist() for read in router.calls[0]["batch"]]
    assert prompts == ([[13, 11, 12], [14, 15, 11, 12]] if item_first else [[11, 12, 13], [11, 12, 14, 15]])
    assert [read.label_ids.tolist() for read in router.calls[0]["batch"]] == [[3, 1]] * 2


def test_a_label_read_is_never_truncated(api, router):
    error = refusal(api.post("/generative_scoring", json=LABEL | {"items": [[1], [1] * 510]}))
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert "item 1" in error["message"] and "512+1 > 512" in error["message"]
    assert router.calls == []
    assert api.post("/generative_scoring", json=LABEL | {"items": [[1] * 509]}).status_code == 200


@pytest.mark.parametrize(
    ("length", "count", "limit"), [(1, 10_001, "max_batch_reads"), (500, 2001, "max_batch_tokens")]
)
def test_prompts_that_would_be_too_many_are_refused_before_they_are_made(api, router, length, count, limit):
    error = refusal(api.post("/generative_scoring", json=LABEL | {"query": [1] * length, "items": [[]] * count}))
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert f"limits.{limit}" in error["message"]
    assert router.calls == []


def test_more_labels_than_a_read_takes_are_refused_before_each_item_gets_them(api, router):
    error = refusal(api.post("/generative_scoring", json=LABEL | {"label_token_ids": list(range(129))}))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, 400)
    assert "label_token_ids has 129 labels" in error["message"] and "at most 128" in error["message"]
    assert router.calls == []
    answer = api.post("/generative_scoring", json=LABEL | {"label_token_ids": [*range(128), 5]})  # one of them twice
    assert answer.status_code == 200


# ---------------------------------------------------------------- text


def test_texts_are_tokenised_and_special_tokens_go_around_the_query_only(api, router):
    api.post("/v1/completions", json=COMPLETE | {"prompt": "Yes"})
    yes = [router.calls[0]["batch"][0].prompt_ids[0], *router.calls[0]["batch"][0].response_ids]
    assert yes == api.post("/tokenize", json={"prompt": "Yes"}).json()["tokens"]
    assert yes[0] == 0 and 0 not in yes[1:]
    api.post("/generative_scoring", json=LABEL | {"query": "Yes", "items": ["Yes"]})
    assert router.calls[-1]["batch"][0].prompt_ids.tolist() == [*yes, *yes[1:]]
    api.post("/generative_scoring", json=LABEL | {"query": "Yes", "items": ["Yes"], "add_special_tokens": False})
    assert router.calls[-1]["batch"][0].prompt_ids.tolist() == yes[1:] * 2


@pytest.mark.parametrize(
    ("model", "tokenizer", "said"),
    [
        (None, None, "has no tokenizer: send ids"),
        ("/nowhere/at-all", "0123", "folder is not on this machine"),
        ("here", "0123", "has another tokenizer than the teacher"),
    ],
)
def test_where_a_tokenizer_is_missing_text_is_refused_and_ids_are_answered(folder, model, tokenizer, said):
    api = of(StandInRouter(str(folder) if model == "here" else model, tokenizer))
    texts = {
        "/v1/completions": COMPLETE | {"prompt": "Yes"},
        "/generative_scoring": LABEL | {"query": "Yes"},
        "/tokenize": {"prompt": "Yes"},
        "/detokenize": {"tokens": [1]},
    }
    for route, body in texts.items():
        error = refusal(api.post(route, json=body))
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, 400)
        assert said in error["message"]
    for route in READS:
        assert api.post(route, json=BODIES[route]).status_code == 200
    choice = api.post("/v1/completions", json=COMPLETE).json()["choices"][0]
    assert {entry["decoded_token"] for entry in choice["prompt_logprobs"][1].values()} == {None}
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("route", ["/v1/completions", "/generative_scoring", "/tokenize"])
def test_more_text_than_a_call_may_hold_is_refused_before_it_is_tokenised(router, route):
    api = of(router, BatchLimits(10, 1000, 1 << 20, 1 << 20))
    field = {"/generative_scoring": "query"}.get(route, "prompt")
    fits, does_not = (api.post(route, json=BODIES[route] | {field: "x" * count}) for count in (1000, 1001))
    assert "1001 characters" in refusal(does_not)["message"]
    assert fits.status_code == 200 or "characters" not in refusal(fits)["message"]


def test_more_texts_than_a_call_may_hold_are_refused_before_they_are_tokenised(router, monkeypatch):
    """Empty ones too, which have no characters to be counted."""
    monkeypatch.setattr(generative_scoring, "_tokenised", None)
    error = refusal(of(router).post("/generative_scoring", json=LABEL | {"items": [""] * 10_001}))
    assert error["code"] == 400 and "limits.max_batch_reads" in error["message"]
    assert router.calls == []


@pytest.mark.parametrize(("count", "in_a_thread"), [(2, False), (1000, True)])
def test_many_texts_are_tokenised_beside_the_event_loop(api, monkeypatch, count, in_a_thread):
    threads, tokenised = [], generative_scoring._tokenised

    def note(*args):
        threads.append(threading.current_thread().name)
        return tokenised(*args)

    monkeypatch.setattr(generative_scoring, "_tokenised", note)
    assert api.post("/generative_scoring", json=LABEL | {"items": [""] * count}).status_code == 200
    (name,) = threads
    assert name.startswith("asyncio_") == in_a_thread, name


def test_more_ids_than_a_call_may_hold_are_not_written_as_text(router):
    api = of(router, BatchLimits(10, 1000, 1 << 20, 1 << 20))
    assert api.post("/detokenize", json={"tokens": [40] * 1000}).status_code == 200
    assert "limits.max_batch_tokens" in refusal(api.post("/detokenize", json={"tokens": [40] * 1001}))["message"]


# ---------------------------------------------------------------- refusals by name

# vLLM takes these, and makes an answer of more or other tokens, or of other scores.
MORE = {
    "max_tokens": 2,
    "min_tokens": 1,
    "n": 2,
    "echo": True,
    "logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "x",
    "stop": ["x"],
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "length_penalty": 2.0,
    "use_beam_search": True,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5],
    "logprob_token_ids": [5],
    "truncate_prompt_tokens": 2,
    "truncation_side": "left",
    "prompt_embeds": "abc",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
    "thinking_token_budget": 5,
    "watermarking": True,
    "routed_experts_prompt_start": 1,
}


@pytest.mark.parametrize("name", [*MORE, *completions._DROPPED])
def test_a_field_of_completions_that_asks_for_more_is_refused_by_name_and_nothing_is_asked(api, router, name):
    error = refusal(api.post("/v1/completions", json=COMPLETE | {name: MORE.get(name, "x")}))
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", name, 400)
    assert name in error["message"]
    assert router.calls == []


def test_no_field_of_vllms_is_dropped_without_a_decision():
    assert MORE.keys() == completions._NEUTRAL.keys()
    read = {"prompt", "prompt_logprobs", "model", "priority", "request_id", "cache_salt", "add_special_tokens"}
    of_the_token = {"temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "include_stop_str_in_output"}
    of_its_text = {"skip_special_tokens", "spaces_between_special_tokens", "return_tokens_as_token_ids"}
    # without effect where vLLM does not stream or render
    inert = {"user", "session_id", "stream_interval", "return_token_offsets", "mm_payload", "return_mm_kwargs"}
    decided = completions._NEUTRAL.keys() | read | of_the_token | of_its_text | inert | {"return_token_ids"}
    assert CompletionRequest.model_fields.keys() == decided
    assert GenerativeScoringRequest.model_fields.keys() == generative_scoring._TYPES.keys() | {"cache_salt"}
    assert TokenizeCompletionRequest.model_fields.keys() == tokenize._TYPES.keys() | {"prompt"}
    chat = tokenize._TYPES.keys() | tokenize._CHAT_TYPES.keys() | tokenize._NEUTRAL.keys() | {"chat_template"}
    assert TokenizeChatRequest.model_fields.keys() == chat


@pytest.mark.parametrize("name", ["conversation", "tokenize", "chat_template", "return_dict", "messages", "self"])
def test_a_variable_of_the_template_is_no_way_to_its_arguments(api, name):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: True}}
    error = refusal(api.post("/tokenize", json=body))
    assert (error["param"], error["code"]) == ("chat_template_kwargs", 400)
    assert name in error["message"]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("route", READS)
@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full", retry_after_s=2), 503), (TeacherUnavailable("none"), 503), (DeadlineExceeded("late"), 504)],
)
def test_a_failure_is_one_that_vllms_clients_try_again_after(api, router, route, error, status):
    def fail():
        raise error

    router.before = fail
    response = api.post(route, json=BODIES[route])
    assert refusal(response)["code"] == status
    assert response.headers.get("retry-after") == ("2" if isinstance(error, Overloaded) else None)


def test_a_teacher_without_a_replica_is_unavailable_and_not_listed(folder):
    class Gone(StandInRouter):
        def info(self, name: str) -> dict:
            return super().info(name) if name == "default" else {"teacher": name, "default": False, "replicas": 0}

    api = of(Gone(str(folder), tokenizer_hash(folder)))
    for route, body in BODIES.items():
        assert refusal(api.post(f"/teachers/math{route}", json=body))["code"] == 503
        assert api.post(route, json=body).status_code == 200
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["default"]
    assert refusal(api.get("/teachers/math/health"))["code"] == 503


# ---------------------------------------------------------------- what is said of them


def test_every_route_is_described_with_an_example_that_works(api):
    paths = api.get("/openapi.json").json()["paths"]
    for prefix in ("", "/teachers/{teacher}"):
        for route in BODIES:
            described = paths[prefix + route]["post"]
            content = described["requestBody"]["content"]["application/json"]
            example, schema = content["example"], content["schema"]
            assert set(schema["required"]) <= example.keys() <= schema["properties"].keys()
            assert described["description"]
            answer = api.post(prefix.format(teacher="math") + route, json=example)
            assert answer.status_code == 200, answer.text
        assert [parameter["name"] for parameter in described.get("parameters", [])] == ["teacher"] * bool(prefix)
        assert {f"{prefix}/v1/models", f"{prefix}/version"} <= paths.keys()
    json.dumps(paths)
