"""What Schemathesis is told of this service; it imports the file (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import strategies as st

from scoring import wire
from tests.fuzz.seeds import seeds


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    """A request in safetensors, perhaps with other bytes somewhere; for either route."""
    data = bytearray(draw(st.sampled_from([data for _, data in seeds()])))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


schemathesis.openapi.media_type(wire.SAFETENSORS, _requests() | st.binary(max_size=200))


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """In a document of text the example has a character for a byte."""
    for path in raw_schema["paths"].values():
        for operation in path.values():
            for form, content in operation.get("requestBody", {}).get("content", {}).items():
                if form == wire.SAFETENSORS:
                    content["example"] = content["example"].encode("latin-1")


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Most of the teachers in paths are there, or nothing behind the path would ever be asked."""
    name = (path_parameters or {}).get("teacher")
    if isinstance(name, str) and sum(map(ord, name)) % 4:
        return path_parameters | {"teacher": "default"}
    return path_parameters


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: schemathesis.Case, response: schemathesis.Response) -> bool:
    """A deadline that nobody could keep is answered 504, as it should be: no failure of the service."""
    if response.status_code != 504:
        return True
    timeout = case.body.get("timeout_s") if isinstance(case.body, dict) else None
    return not (isinstance(timeout, int | float) and timeout < 1)
