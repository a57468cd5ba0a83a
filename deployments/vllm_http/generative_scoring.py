"""`POST /generative_scoring`: how probable a label is as the next token, after a query and each of several items.

Beside what all routes here have in common:
- A prompt that is too long is refused; there it is cut off.
- Up to 128 labels; there as many as `--max-logprobs`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from reprlib import repr as short
from typing import Any

from fastapi import APIRouter, Request, Response

from deployments.http_door import json_response, trace_headers
from deployments.vllm_http import dialect
from deployments.vllm_http.described import IDS, described
from deployments.vllm_http.dialect import FLAG, LIST, TEXT, WHOLE, Refusal, malformed, or_null
from deployments.vllm_http.served import Served
from scoring.errors import InvalidRead, UnknownTeacher
from scoring.reads import LabelRead
from scoring.tokenizer import Tokenizer


def add(routes: APIRouter, served: Served) -> None:
    @routes.post("/generative_scoring", openapi_extra=_DESCRIPTION)
    async def generative_scoring(request: Request) -> Response:
        """vLLM's generative scoring: of each item the probability of the first label."""
        asked = await dialect.read_request(request, served.limits, _parse)
        teacher = await served.teacher(request, asked.model)
        info = await served.info(teacher)
        _check_labels(asked.labels, info["vocabulary"])
        prompts = _joined(asked, asked.query, asked.items)
        if texts := asked.texts:
            prompts = await dialect.tokenise(_tokenised, texts, asked, await served.tokenizer(info))
        _check_prompts(prompts, info["max_length"])
        options = {"teacher": teacher, "priority": asked.priority}
        try:
            scores = await served.router().read_labels(
                [LabelRead(prompt, list(asked.labels), **options) for prompt in prompts],
                trace_headers=trace_headers(request),
            )
        except InvalidRead as error:
            raise _in_their_words(error) from error
        tokens = sum(map(len, prompts))
        request_id = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        return json_response(
            {
                "id": f"generative-scoring-{request_id}",
                "object": "list",
                "created": int(time.time()),
                "model": scores[0].meta.teacher,
                "data": [
                    {"index": i, "object": "score", "score": _probability(score.logprobs.tolist(), asked.apply_softmax)}
                    for i, score in enumerate(scores)
                ],
                "usage": {
                    "prompt_tokens": tokens,
                    "total_tokens": tokens + len(prompts),
                    "completion_tokens": len(prompts),
                    "prompt_tokens_details": None,
                    "completion_tokens_details": None,
                },
            }
        )


@dataclass(frozen=True)
class _Asked:
    """What is left of a request that passed."""

    query: str | list[int]
    items: list[str] | list[list[int]]
    labels: dict[int, None]  # in their order, each once
    apply_softmax: bool
    item_first: bool
    add_special_tokens: bool
    model: str | None
    priority: int
    request_id: str | None

    @property
    def texts(self) -> list[str]:
        return [text for text in (self.query, *self.items) if isinstance(text, str)]


def _parse(body: Mapping[str, Any]) -> _Asked:
    """
    Raises:
        Refusal: as vLLM does.
    """
    dialect.check_common({"cache_salt": body.get("cache_salt")})
    dialect.require(body, "query", "items", "label_token_ids")
    dialect.check_types(body, _TYPES)
    dialect.check_common({"priority": body.get("priority", 0)})
    query, items, labels = body["query"], body["items"], body["label_token_ids"]
    # `param` of a wrong value is where it is no text, as it is there, where texts are tried first.
    if isinstance(query, list):
        _check_ids(query, "query", "body.query")
    first = next((i for i, item in enumerate(items) if not isinstance(item, str)), 0)
    if not set(map(type, items)) <= {type(items[first]) if items else None} & {str, list}:
        raise malformed(f"items is {short(items)}; they are all texts, or all lists of ids", f"body.items.{first}")
    for i, item in enumerate(items):
        if isinstance(item, list):
            _check_ids(item, f"items[{i}]", "body.items.0")
    _check_ids(labels, "label_token_ids", "body.label_token_ids.{}")
    if not labels:
        raise Refusal("label_token_ids must contain at least one token ID.")
    if not items:
        raise Refusal("items must contain at least one item.")
    return _Asked(
        query=query,
        items=items,
        labels=dict.fromkeys(labels),
        apply_softmax=body.get("apply_softmax", True),
        item_first=body.get("item_first", False),
        add_special_tokens=body.get("add_special_tokens", True),
        model=body.get("model") or None,
        priority=body.get("priority", 0),
        request_id=body.get("request_id"),
    )


_TYPES: dict[str, dialect.Types] = {
    "query": ((str, list), "a text or a list of ids"),
    "items": LIST,
    "label_token_ids": LIST,
    **dict.fromkeys(("apply_softmax", "item_first", "add_special_tokens"), FLAG),
    "model": or_null(TEXT),
    "priority": WHOLE,
    "request_id": TEXT,
}


def _check_ids(ids: list, name: str, param: str) -> None:
    if (wrong := dialect.first_no_integer(ids)) is not None:
        raise malformed(f"{name}[{wrong}] is {short(ids[wrong])}; ids are integers", param.format(wrong))


def _check_labels(labels: Mapping[int, None], vocabulary: int) -> None:
    for label in labels:
        if not 0 <= label < vocabulary:
            raise Refusal(
                f"label_token_id {label} is out of vocabulary range [0, {vocabulary}). Please provide valid token IDs."
            )


def _tokenised(texts: list[str], asked: _Asked, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a request with texts. Special tokens go around the query only."""
    query, items = asked.query, asked.items
    if isinstance(query, str):
        query = tokenizer.encode(query, asked.add_special_tokens)
    if isinstance(items[0], str):
        items = [tokenizer.encode(item, add_special_tokens=False) for item in items]
    return _joined(asked, query, items)


def _joined(asked: _Asked, query: Any, items: Any) -> list:
    return [[*item, *query] if asked.item_first else [*query, *item] for item in items]


def _check_prompts(prompts: list[list[int]], most: int) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise Refusal(f"query and item {i} are empty together; a prompt has at least one token")
        if len(prompt) >= most:
            raise Refusal(
                f"item {i}: query and item are {len(prompt)} tokens, and 1 is always made: {len(prompt)}+1 > {most} "
                "(max_model_len). Nothing is truncated here"
            )
    if (lowest := min(chain.from_iterable(prompts))) < 0:
        raise Refusal(f"Token id {lowest} is out of vocabulary")


def _in_their_words(error: InvalidRead) -> Exception:
    """What a teacher refused of a read, said of the fields the caller knows."""
    if isinstance(error, UnknownTeacher) or not error.field:
        return error
    name, _, index = error.field.partition("[")
    what = "label_token_ids" if name == "label_ids" else f"query and item {error.read or 0} together"
    return Refusal(f"{what}{'[' + index if index else ''} {error.message}")


def _probability(logprobs: list[float], apply_softmax: bool) -> float:
    """Of the first label: among the labels, or in the teacher's whole distribution."""
    if not apply_softmax:
        return math.exp(logprobs[0])
    most = max(logprobs)
    return math.exp(logprobs[0] - most) / sum(math.exp(logprob - most) for logprob in logprobs)


_DESCRIPTION = described(
    required=["query", "items", "label_token_ids"],
    properties={
        "query": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        "items": {
            "anyOf": [
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            ]
        },
        "label_token_ids": IDS,
        "apply_softmax": {"type": "boolean", "default": True, "description": "among the labels only"},
        "item_first": {"type": "boolean", "default": False},
        "add_special_tokens": {"type": "boolean", "default": True},
        "model": {"type": ["string", "null"], "description": "a teacher"},
    },
    example={"query": [1, 2], "items": [[3, 4], [5]], "label_token_ids": [20, 21]},
)
