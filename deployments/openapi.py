"""What `/docs` and `/openapi.json` say: the fields of both reads and their answers with examples, and of every route
which errors it may give and that it needs a token.

What the fields mean is said once, in the docstrings of `MatrixRead`, `LabelRead` and `MatrixScore`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute

from deployments.guard import OPEN
from deployments.http_door import JSON
from scoring import wire
from scoring.reads import EXTRAS


def description_of(kind: wire.Kind) -> dict[str, Any]:
    """The request and the answer of the route of one kind of read, as OpenAPI 3.1 describes an operation."""
    needed = [f.name for f in fields(wire.READ[kind]) if f.default is MISSING and not f.kw_only]
    read = _object(_READ[kind], title=wire.READ[kind].__name__, required=needed, additionalProperties=False)
    options = {
        "timeout_s": {"type": ["number", "null"], "default": wire.DEFAULT_TIMEOUT_S, "maximum": wire.MAX_TIMEOUT_S},
        "return_exceptions": {"type": "boolean", "default": False},
    }
    request = _object({"reads": _list(read), **options}, required=["reads"], additionalProperties=False)
    result = _object(
        {**_RESULT[kind], "meta": {"type": "object"}, "error": {"type": "object"}},
        description="A score of -inf is null. The result of a failed read is its error and nothing else.",
    )
    answer = _object({"results": _list(result), "schema_version": _INTEGER}, required=["results", "schema_version"])
    binary = {"schema": {"type": "string", "format": "binary"}}
    asked = {
        JSON: {"schema": request, "example": _EXAMPLE[kind]},
        wire.SAFETENSORS: binary | {"example": _binary_example(kind)},
    }
    answers = {JSON: {"schema": answer}, wire.SAFETENSORS: binary}
    return {
        "requestBody": {"required": True, "content": asked},
        "responses": {"200": {"description": "One result a read, in order", "content": answers}},
    }


def describe_errors_and_tokens(api: FastAPI, own: Callable[[Exception], Response], tokens: bool) -> None:
    """Let `api` say of each route which errors it may give, and, where `tokens` are asked for, that it needs one.

    Args:
        own: what the routes of this project answer errors by (`respond`); those of others do it in vLLM's form.
    """
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is not None:
            return api.openapi_schema
        document = plain()
        components = document.setdefault("components", {})
        components["schemas"] = {"Error": _ERROR, "VllmError": _VLLM_ERROR}  # FastAPI has its own here, which none has
        if tokens:
            schemes = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
            components["securitySchemes"] = schemes
        for route in api.routes:
            if not isinstance(route, APIRoute) or not route.include_in_schema:
                continue
            ours, guarded = route.respond is own, tokens and route.path not in OPEN
            for method in route.methods:
                operation = document["paths"][route.path_format][method.lower()]
                if guarded:
                    operation["security"] = [{"bearer": []}, {"basic": []}]
                given = (
                    _STATUSES_OF_ALL | (_STATUSES if ours else _VLLM_STATUSES)[method] | ({401} if guarded else set())
                )
                schema = {"$ref": f"#/components/schemas/{'Error' if ours else 'VllmError'}"}
                answers = {status: answer for status, answer in operation["responses"].items() if status == "200"}
                for status in sorted(given - ({500, 503, 504} if route.path in OPEN else set())):
                    answers[str(status)] = {
                        "description": _STATUSES_IN_WORDS[status],
                        "content": {JSON: {"schema": schema}},
                    }
                operation["responses"] = answers
        return document

    api.openapi = openapi


def _binary_example(kind: wire.Kind) -> str:
    """The request of the JSON example in safetensors. In a document of text its bytes are characters (latin-1)."""
    reads = [wire.READ[kind](**read) for read in _EXAMPLE[kind]["reads"]]
    return wire.encode_batch(wire.BATCH[kind].from_reads(reads)).decode("latin-1")


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


_INTEGER, _SCORE, _NULL = {"type": "integer"}, {"type": ["number", "null"]}, {"type": "null"}
_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_OPTIONS = {
    "teacher": {"type": ["string", "null"], "default": None},
    "priority": {"type": "integer", "default": 0, "description": "smaller is served first"},
    "expect_version": {"type": ["integer", "null"], "minimum": 0, "default": None},
}
_READ = {
    "matrix": {
        "prompt_ids": _list(_ID, minItems=1),
        "response_ids": _list(_ID),
        "candidate_ids": {
            "anyOf": [_NULL, _list(_INTEGER), _list(_list(_INTEGER))],
            "default": None,
            "description": "[K], for every row, or [R][K]; -1 at the end of a row is an unused column",
        },
        "rows": {
            "oneOf": [_NULL, _list(_INTEGER), _list({"type": "boolean"}, minItems=1)],
            "default": None,
            "description": "which response positions are answered",
        },
        "top_k": {"type": "integer", "minimum": 0, "default": 0, "description": "the teacher's own likeliest tokens"},
        "extras": _list({"type": "string", "enum": list(EXTRAS)}, default=[]),
        **_OPTIONS,
        "unknown_candidates": {"type": "string", "enum": ["raise", "-inf"], "default": "raise"},
    },
    "label": {"prompt_ids": _list(_ID, minItems=1), "label_ids": _list(_ID, minItems=1), **_OPTIONS},
}
_RESULT = {
    "matrix": {
        "logprobs": _list(_list(_SCORE), description="[n][K]"),
        "response_logprobs": _list(_SCORE, description="[n]"),
        "rows": _list(_INTEGER, description="[n], the response positions answered"),
        "shape": _list(_INTEGER, description="n, K"),
        "top_k": _INTEGER | {"description": "with top_ids and top_logprobs, where it was asked for"},
        "top_ids": _list(_list(_ID), description="[n][top_k]"),
        "top_logprobs": _list(_list(_SCORE), description="[n][top_k]"),
        "tail_logprob": _list(_SCORE, description="[n], where it was asked for"),
        "entropy": _list(_SCORE, description="[n], where it was asked for"),
        "rank": _list(_INTEGER, description="[n], where it was asked for"),
    },
    "label": {"logprobs": _list(_SCORE, description="[L]")},
}
_EXAMPLE = {
    "matrix": {
        "reads": [
            {
                "prompt_ids": [1, 2, 3],
                "response_ids": [4, 5],
                "candidate_ids": [[4, 10], [5, 11]],
                "top_k": 2,
                "extras": ["tail", "entropy", "rank"],
            }
        ]
    },
    "label": {"reads": [{"prompt_ids": [1, 2, 3], "label_ids": [20, 21]}]},
}

_ERROR = _object(
    {
        "error": _object(
            {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "read": {"type": ["integer", "null"], "description": "which of the reads asked"},
                "field": {"type": ["string", "null"], "description": "which field of it"},
                "details": {"type": "object"},
                "code": {"type": "integer", "description": "the status"},
            },
            required=["type", "message", "read", "field", "details", "code"],
        )
    },
    required=["error"],
)
_VLLM_ERROR = _object(
    {
        "error": _object(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer", "description": "the status"},
            },
            required=["message", "type", "param", "code"],
        )
    },
    required=["error"],
)
_STATUSES_IN_WORDS = {
    400: "The request cannot be answered as it is",
    401: "No token came, or none that is known",
    404: "No such teacher",
    406: "The Accept header names neither form of answers",
    409: "The teacher has other weights than the read expects",
    414: "The URL is too long",
    415: "The body is compressed, or of another media type",
    422: "A read cannot be answered as it is, or the call holds too much",
    429: "Every replica has its fill; Retry-After says when to come back",
    431: "The headers are too many or too long",
    500: "The answer failed its check, or the service failed",
    503: "No replica can answer for now",
    504: "Not answered by the deadline",
}
_STATUSES_OF_ALL = {414, 415, 431}
_STATUSES = {"POST": {406, 409, 422, 429, 500, 503, 504}, "GET": {422, 500, 503, 504}}
_VLLM_STATUSES = {"POST": {400, 404, 409, 500, 503, 504}, "GET": {404, 500, 503, 504}}
