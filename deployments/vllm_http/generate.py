"""`POST /inference/v1/generate`, for candidates (`prompt_logprob_token_ids`) and `prompt_logprobs`, and one token.

Beside what all routes here have in common:
- `max_tokens` left out means 1 here, and the rest of the context there.
- The older form, one flat list of candidates for every row, is taken too.
- The pad -1 only ends a row.
- `choices[0].token_ids` is the likeliest token, whatever the temperature: reads are made at temperature 0. Its
  `finish_reason` is always "length".
- The body's `request_id` comes before the X-Request-Id header, not after it: Serve gives every request that header.
- Overload is 503, as there; a deadline that passed is 504, which vLLM has not.
"""

from __future__ import annotations

import base64
import io
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from deployments.http_door import JSON, beside_the_loop, trace_headers
from deployments.vllm_http import dialect, prompt_logprobs
from deployments.vllm_http.described import IDS, described
from deployments.vllm_http.dialect import Refusal, malformed
from deployments.vllm_http.served import Served
from scoring.errors import InvalidRead, UnknownTeacher
from scoring.ids import PAD, candidate_matrix
from scoring.reads import MatrixRead
from scoring.scores import MatrixScore
from scoring.tokenizer import Tokenizer

_CANDIDATES = "prompt_logprob_token_ids"


def add(routes: APIRouter, served: Served) -> None:
    @routes.post("/inference/v1/generate", openapi_extra=_DESCRIPTION)
    async def generate(request: Request) -> Response:
        """vLLM's tokens-in route, for requests whose `sampling_params` have `prompt_logprob_token_ids`, the candidates
        of each position, or `prompt_logprobs`, how many of the likeliest tokens."""
        asked = await dialect.read_request(request, served.limits, _parse)
        teacher = await served.teacher(request, asked.model)
        size, tokenizer = 0, None
        if asked.count is not None:
            prompt_logprobs.check_size(len(asked.token_ids), asked.count, served.limits)
            if asked.spread_bytes > served.limits.max_answer_bytes:
                raise served.limits.exceeded("max_answer_bytes", asked.spread_bytes)
            size = prompt_logprobs.json_bytes(len(asked.token_ids), asked.count)
            tokenizer = await served.tokenizer_if_any(await served.info(teacher))
        try:
            scores, (token,) = await prompt_logprobs.ask(served.router(), [asked.read(teacher)], trace_headers(request))
        except InvalidRead as error:
            raise _in_their_words(error, asked) from error
        request_id = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        return await beside_the_loop(
            size + scores.values.nbytes, _answer, asked, scores[0], token, request_id, tokenizer
        )


def _in_their_words(error: InvalidRead, asked: _Asked) -> Exception:
    """What a teacher refused of the read, said of the fields the caller knows."""
    if isinstance(error, UnknownTeacher) or not error.field:
        return error
    name, _, index = error.field.partition("[")
    index = "[" + index if index else ""
    if name == "candidate_ids":
        return Refusal(f"{_CANDIDATES}{index} {error.message}", _CANDIDATES)
    if name == "top_k":
        return Refusal(f"prompt_logprobs {error.message}", "prompt_logprobs")
    if name == "response_ids" and index:
        index = f"[{int(index[1:-1]) + asked.first + 1}]"
    return Refusal(f"token_ids{index} {error.message}")


@dataclass(frozen=True)
class _Asked:
    """What is left of a request that passed."""

    token_ids: np.ndarray  # int32 [T]
    candidates: np.ndarray | None  # int32 [T - 1 - start, K] or [K]
    start: int
    count: int | None  # of `prompt_logprobs`
    model: str | None
    priority: int
    request_id: str | None
    return_token_ids: bool

    @property
    def first(self) -> int:
        """The position of the read's first row."""
        return self.start if self.count is None else 0

    @property
    def spread_bytes(self) -> int:
        """What the candidates take where `read` gives every row its own; as much as their scores."""
        if self.count is None or self.candidates is None:
            return 0
        return 4 * (len(self.token_ids) - 1) * self.candidates.shape[-1]

    def read(self, teacher: str | None) -> MatrixRead:
        """The read that answers both."""
        options = {"teacher": teacher, "priority": self.priority}
        if self.count is None:
            prompt, response = np.split(self.token_ids, [self.start + 1])
            return MatrixRead(prompt, response, self.candidates, **options)
        candidates = None
        if self.candidates is not None:  # rows before the first that has candidates hold pads
            candidates = np.full((len(self.token_ids) - 1, self.candidates.shape[-1]), PAD, np.int32)
            candidates[self.start :] = self.candidates
        return prompt_logprobs.read_of(self.token_ids, self.count, candidates, **options)


def _parse(body: Mapping[str, Any]) -> _Asked:
    """
    Raises:
        Refusal: as vLLM does, or for a field that would change the answer.
    """
    dialect.require(body, "token_ids", "sampling_params")
    token_ids = _token_ids(body["token_ids"])
    dialect.check_types(body, _FIELDS)
    params = body["sampling_params"]
    if not isinstance(params, dict):
        raise malformed(f"sampling_params is {short(params)}; it is an object", "body.sampling_params")
    _check_fields(body)
    dialect.refuse_more(params, _NEUTRAL)
    dialect.check_sampling(params, "body.sampling_params")
    count, candidates, start = params.get("prompt_logprobs"), params.get(_CANDIDATES), _start(params)
    if candidates is None and count is None:
        raise Refusal(
            f"sampling_params.{_CANDIDATES} is missing, and prompt_logprobs too: this service answers "
            "log-probabilities of given tokens, and generates no text",
            _CANDIDATES,
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise malformed(f"prompt_logprobs is {short(count)}; it is an integer", "body.sampling_params")
    prompt_logprobs.check_count(count)
    if body.get("stream"):
        what = _CANDIDATES if candidates is not None else "prompt_logprobs"
        raise Refusal(f"{what} are not available when stream=true.")
    return _Asked(
        token_ids=token_ids,
        candidates=None if candidates is None else _candidates(candidates, len(token_ids), start),
        start=start,
        count=count,
        model=body.get("model") or None,
        priority=body.get("priority", 0),
        request_id=body.get("request_id"),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _token_ids(value: Any) -> np.ndarray:
    """int32 [T]"""
    if not isinstance(value, list) or not value:
        raise malformed(f"token_ids is {short(value)}; it is a list of at least one integer", "body.token_ids")
    if (wrong := dialect.first_no_integer(value)) is not None:
        raise malformed(f"token_ids[{wrong}] is {short(value[wrong])}; ids are integers", f"body.token_ids.{wrong}")
    if min(value) < 0:
        raise malformed("token_ids must not contain negative values", "body.token_ids")
    return dialect.token_ids(value, "token_ids")


_FIELDS: dict[str, dialect.Types] = {
    "request_id": dialect.TEXT,
    "model": dialect.or_null(dialect.TEXT),
    "stream": dialect.or_null(dialect.FLAG),
    "return_token_ids": dialect.or_null(dialect.FLAG),
    "priority": dialect.WHOLE,
}


def _check_fields(body: Mapping[str, Any]) -> None:
    dialect.check_common(body)
    mode = body.get("output_mode", "tokens")
    if mode in ("text", "derender"):
        raise Refusal(f"output_mode={mode!r} asks for text, and this service generates none; use output_mode='tokens'.")
    if mode != "tokens":
        raise malformed(f"output_mode is {short(mode)}; allowed is 'tokens'", "body.output_mode")
    for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params"):
        if body.get(name):
            raise Refusal(f"{name} is given; this service scores tokens, without media and KV transfer", name)


# Parameters of sampling that change the answer, or ask for more of it: the values that ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "max_tokens": (1,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "logprobs": (None,),
    "logprob_token_ids": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "extra_args": (None, {}),
}


def _candidates(value: Any, length: int, start: int) -> np.ndarray:
    """int32 [rows, K], or int32 [K] where one flat list stands for all rows."""
    flat = isinstance(value, list) and bool(value) and not any(isinstance(row, list) for row in value)
    rows = [value] if flat else value
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise malformed(f"{_CANDIDATES} is {short(value)}; it is a list of lists of integers", "body.sampling_params")
    for r, row in enumerate(rows):
        wrong = dialect.first_no_integer(row)
        if wrong is not None:
            where = f"[{wrong}]" if flat else f"[{r}][{wrong}]"
            raise malformed(f"{_CANDIDATES}{where} is {short(row[wrong])}; ids are integers", "body.sampling_params")
    due = max(length - 1 - start, 0)
    if not any(rows):
        raise Refusal(f"{_CANDIDATES} holds no id; it is a non-empty list of rows of ids", _CANDIDATES)
    if due == 0:
        raise Refusal(f"prompt_logprob_start is {start} with {length} token_ids: there is no row to score", _CANDIDATES)
    if not flat and len(rows) != due:
        raise Refusal(
            f"{_CANDIDATES} has {len(rows)} rows, but the prompt has {due} scored rows "
            f"({length} token_ids - 1 - prompt_logprob_start of {start})",
            _CANDIDATES,
        )
    try:
        return candidate_matrix(value, _CANDIDATES)
    except InvalidRead as error:
        raise Refusal(str(error), _CANDIDATES) from None


def _start(params: Mapping[str, Any]) -> int:
    value = params.get("prompt_logprob_start")
    if value is None:
        return 0
    if type(value) is not int:
        raise malformed(f"prompt_logprob_start is {short(value)}; it is an integer", "body.sampling_params")
    if params.get(_CANDIDATES) is None and params.get("prompt_logprobs") is not None:
        raise Refusal(f"prompt_logprob_start requires {_CANDIDATES}.", "prompt_logprob_start")
    if value < 0:
        raise Refusal(f"prompt_logprob_start is {value}; it must be non-negative", "prompt_logprob_start")
    return value


def _answer(asked: _Asked, score: MatrixScore, token: int, request_id: str, tokenizer: Tokenizer | None) -> Response:
    """vLLM's answer, with every field it writes.

    Args:
        token: the one that follows the prompt.
    """
    tokens = len(asked.token_ids)
    matrix = None
    if asked.candidates is not None:
        npy = io.BytesIO()
        rows = score.logprobs[asked.start - asked.first :]  # float32 [T - 1 - start, K]
        np.save(npy, np.ascontiguousarray(rows), allow_pickle=False)
        matrix = base64.b64encode(npy.getbuffer()).decode("ascii")
    document = {
        "request_id": f"generate-tokens-{request_id}",
        "model": score.meta.teacher,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_token_id_logprobs": matrix,
        "prompt_token_ids": asked.token_ids.tolist() if asked.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [token],
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [{"version": str(score.meta.weight_version or "default"), "start": 0, "end": 1}],
                "logprobs": None,
            }
        ],
    }
    likeliest = "null" if asked.count is None else prompt_logprobs.as_json(score, asked.token_ids, tokenizer)
    return Response(dialect.written(document, prompt_logprobs=likeliest), media_type=JSON)


_DESCRIPTION = described(
    required=["token_ids", "sampling_params"],
    properties={
        "token_ids": IDS,
        "sampling_params": {
            "type": "object",
            "properties": {
                _CANDIDATES: {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "prompt_logprob_start": {"type": "integer", "minimum": 0, "default": 0},
                "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": prompt_logprobs.MOST},
                "max_tokens": {"const": 1, "default": 1},
            },
        },
        "model": {"type": ["string", "null"], "description": "a teacher"},
        "return_token_ids": {"type": ["boolean", "null"]},
        "request_id": {"type": "string"},
    },
    example={
        "token_ids": [1, 2, 3, 4],
        "sampling_params": {
            "max_tokens": 1,
            _CANDIDATES: [[3, 10], [4, 11]],
            "prompt_logprob_start": 1,
            "prompt_logprobs": 2,
        },
    },
)
