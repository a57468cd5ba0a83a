"""What `/docs` and `/openapi.json` say of the routes of both reads: the fields of requests and answers, with examples.

What the fields mean is said once, in the docstrings of `MatrixRead`, `LabelRead` and `MatrixScore`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

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
    binary = {wire.SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
    return {
        "requestBody": {"required": True, "content": {JSON: {"schema": request, "example": _EXAMPLE[kind]}, **binary}},
        "responses": {
            "200": {"description": "One result a read, in order", "content": {JSON: {"schema": answer}, **binary}}
        },
    }


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
