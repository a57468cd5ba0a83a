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

from deployments.http_door import beside_the_loop, json_response, trace_headers
from deployments.vllm_http import dialect
from deployments.vllm_http.described import IDS, described
from deployments.vllm_http.dialect import FLAG, LIST, TEXT, WHOLE, Refusal, malformed, or_null
from deployments.vllm_http.served import Served
from scoring.batches import LabelBatch
from scoring.errors import InvalidRead, UnknownTeacher
from scoring.limits import MAX_LABELS, BatchLimits
from scoring.reads import LabelRead
from scoring.scores import LabelScores
from scoring.tokenizer import Tokenizer

_ITEM_BYTES = 4096  # what an item costs beside its ids, counted as bytes of JSON


def add(routes: APIRouter, served: Served) -> None:
    @routes.post("/generative_scoring", openapi_extra=_DESCRIPTION)
    async def generative_scoring(request: Request) -> Response:
        """vLLM's generative scoring: of each item the probability of the first label."""
        asked = await dialect.read_request(request, served.limits, _parse)
        teacher = await served.teacher(request, asked.model)
        info = await served.info(teacher)
        _check_labels(asked.labels, info["vocabulary"])
        query, items = asked.query, asked.items
        if len(items) > served.limits.max_batch_reads:
            raise served.limits.exceeded("max_batch_reads", len(items))
        if texts := asked.texts:
            query, items = await dialect.tokenise(served.limits, _tokenised, texts, asked, await served.tokenizer(info))
        tokens = _check_prompts(query, items, info["max_length"], served.limits)
        size = 16 * tokens + _ITEM_BYTES * len(items)
        batch = await beside_the_loop(size, _batch, asked, query, items, teacher)
        try:
            scores = await served.router().read_labels(batch, trace_headers=trace_headers(request))
        except InvalidRead as error:
            raise _in_their_words(error) from error
        request_id = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        return await beside_the_loop(size, _answer, asked, scores, tokens, request_id)


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
    """Refuse labels that no read takes; checked before every item's read gets its own copy of them."""
    for label in labels:
        if not 0 <= label < vocabulary:
            raise Refusal(
                f"label_token_id {label} is out of vocabulary range [0, {vocabulary}). Please provide valid token IDs."
            )
    if len(labels) > MAX_LABELS:
        raise Refusal(f"label_token_ids has {len(labels)} labels; at most {MAX_LABELS} are taken (vLLM's bound)")


def _tokenised(texts: list[str], asked: _Asked, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]]:
    """Query and items of a request with texts, as ids. Special tokens go around the query only."""
    query, items = asked.query, asked.items
    if isinstance(query, str):
        query = tokenizer.encode(query, asked.add_special_tokens)
    if isinstance(items[0], str):
        items = [tokenizer.encode(item, add_special_tokens=False) for item in items]
    return query, items


def _check_prompts(query: list[int], items: list[list[int]], most: int, limits: BatchLimits) -> int:
    """How many tokens the prompts are together; checked before any is made.

    Raises:
        Refusal: a prompt is empty or too long, or an id is negative.
        BatchTooLarge: they are more than one call may hold.
    """
    for i, item in enumerate(items):
        length = len(query) + len(item)
        if not length:
            raise Refusal(f"query and item {i} are empty together; a prompt has at least one token")
        if length >= most:
            raise Refusal(
                f"item {i}: query and item are {length} tokens, and 1 is always made: {length}+1 > {most} "
                "(max_model_len). Nothing is truncated here"
            )
    tokens = len(items) * len(query) + sum(map(len, items))
    if tokens > limits.max_batch_tokens:
        raise limits.exceeded("max_batch_tokens", tokens)
    if (lowest := min(chain(query, *items))) < 0:
        raise Refusal(f"Token id {lowest} is out of vocabulary")
    return tokens


def _batch(asked: _Asked, query: list[int], items: list[list[int]], teacher: str | None) -> LabelBatch:
    labels, options = list(asked.labels), {"teacher": teacher, "priority": asked.priority}
    prompts = ([*item, *query] if asked.item_first else [*query, *item] for item in items)
    return LabelBatch.from_reads([LabelRead(prompt, labels, **options) for prompt in prompts])


def _in_their_words(error: InvalidRead) -> Exception:
    """What a teacher refused of a read, said of the fields the caller knows."""
    if isinstance(error, UnknownTeacher) or not error.field:
        return error
    name, _, index = error.field.partition("[")
    what = "label_token_ids" if name == "label_ids" else f"query and item {error.read or 0} together"
    return Refusal(f"{what}{'[' + index if index else ''} {error.message}")


def _answer(asked: _Asked, scores: LabelScores, tokens: int, request_id: str) -> Response:
    """vLLM's answer, with every field it writes."""
    data = [
        {"index": i, "object": "score", "score": _probability(score.logprobs.tolist(), asked.apply_softmax)}
        for i, score in enumerate(scores)
    ]
    return json_response(
        {
            "id": f"generative-scoring-{request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": scores[0].meta.teacher,
            "data": data,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens + len(scores),
                "completion_tokens": len(scores),
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
        }
    )


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
