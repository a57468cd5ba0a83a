"""What must outlive the processes of an application: a small document per application, kept in Ray's own store.

It lives as long as the cluster's GCS does. This file leans on `ray.experimental.internal_kv`, which Serve's controller
keeps its own state in; `tests/test_record.py` fails when it moves.
"""

from __future__ import annotations

import json
from typing import Any

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_NAMESPACE = b"teacher-scoring"


def load(app_name: str) -> dict[str, Any]:
    """The application's document; empty when there is none. Blocks for a call to the GCS."""
    found = _internal_kv_get(app_name.encode(), namespace=_NAMESPACE)
    return json.loads(found) if found else {}


def save(app_name: str, document: dict[str, Any]) -> None:
    """Keep the application's document in place of what was kept. Blocks for a call to the GCS."""
    _internal_kv_put(app_name.encode(), json.dumps(document).encode(), overwrite=True, namespace=_NAMESPACE)


def forget_adapters(app_name: str) -> None:
    """Keep none of the adapters that were added to an application; it has been deleted. Their numbers stay used."""
    if (document := load(app_name)).get("adapters"):
        save(app_name, {**document, "adapters": {}})
