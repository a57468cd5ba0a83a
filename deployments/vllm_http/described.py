"""How OpenAPI describes a request of vLLM's routes: the fields that matter here, and an example."""

from __future__ import annotations

from typing import Any

from deployments.http_door import JSON

IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}


def described(required: list[str], properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """The `requestBody` of an operation. Other fields of vLLM's are taken or refused as each route says."""
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema, "example": example}}}}
