"""What must outlive the processes of an application: small documents, kept in Ray's own store.

One per application says which adapters were added. One per teacher's deployment says which weights it serves, where
that is no longer what it was configured with; it is apart, since whoever writes one knows nothing new of the other.

They live as long as the cluster's GCS does. This file leans on `ray.experimental.internal_kv`, which Serve's controller
keeps its own state in; `tests/test_record.py` fails when it moves.
"""

from __future__ import annotations

import json
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from scoring.weights import Weights

_NAMESPACE = b"teacher-scoring"


def load(app_name: str) -> dict[str, Any]:
    """The application's document; empty when there is none. Blocks for a call to the GCS."""
    return _get(app_name) or {}


def save(app_name: str, document: dict[str, Any]) -> None:
    """Keep the application's document in place of what was kept. Blocks for a call to the GCS."""
    _put(app_name, document)


def load_weights(app_name: str, deployment: str) -> tuple[Weights, str] | None:
    """The weights that a teacher's deployment serves, and the `model` of the configuration that they took the place of;
    None where none have ever. Blocks for a call to the GCS."""
    found = _get(_weights_key(app_name, deployment))
    return (Weights(**found["weights"]), found["model"]) if found else None


def save_weights(app_name: str, deployment: str, weights: Weights, model: str) -> None:
    """Keep this in place of what was kept. Blocks for a call to the GCS."""
    _put(_weights_key(app_name, deployment), {"weights": weights.to_dict(), "model": model})


def forget(app_name: str) -> None:
    """Keep nothing that was added to an application or changed of it; it has been deleted. Numbers of adapters stay
    used."""
    if (document := load(app_name)).get("adapters"):
        save(app_name, {**document, "adapters": {}})
    _internal_kv_del(_weights_key(app_name, "").encode(), del_by_prefix=True, namespace=_NAMESPACE)


def _weights_key(app_name: str, deployment: str) -> str:
    return f"weights/{app_name}/{deployment}"


def _get(key: str) -> dict[str, Any] | None:
    found = _internal_kv_get(key.encode(), namespace=_NAMESPACE)
    return json.loads(found) if found else None


def _put(key: str, document: dict[str, Any]) -> None:
    _internal_kv_put(key.encode(), json.dumps(document).encode(), overwrite=True, namespace=_NAMESPACE)
