"""The document that outlives an application's processes, and the private functions of Ray it is kept with."""

import inspect
import subprocess
import sys

from ray.experimental import internal_kv

from deployments import record


def test_rays_store_has_the_functions_it_is_used_by():
    """A cheap look, before the real one below says less plainly what has moved."""
    assert list(inspect.signature(internal_kv._internal_kv_get).parameters)[:1] == ["key"]
    assert {"key", "value", "overwrite", "namespace"} <= set(inspect.signature(internal_kv._internal_kv_put).parameters)
    assert "namespace" in inspect.signature(internal_kv._internal_kv_get).parameters
    assert {"key", "del_by_prefix", "namespace"} <= set(inspect.signature(internal_kv._internal_kv_del).parameters)
    assert record._NAMESPACE == b"teacher-scoring"


def test_a_document_is_found_by_other_processes_of_the_cluster_and_replaced_whole():
    code = """
import os
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
from deployments import record
from scoring.weights import Weights
ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)

@ray.remote(num_cpus=0)
def elsewhere():
    before = record.load("app")
    record.save("app", {"adapters": {"b": 2}})
    return before

assert record.load("app") == {}
record.save("app", {"adapters": {"a": 1}})
assert ray.get(elsewhere.remote()) == {"adapters": {"a": 1}}
assert record.load("app") == {"adapters": {"b": 2}} and record.load("other") == {}
record.save("app", {"adapters": {"b": 2}, "last_serial": 7})
first, second = Weights(1, "/one", "0123"), Weights(2, "/two", "4567")
assert record.load_weights("app", "Teacher-a") is None
record.save_weights("app", "Teacher-a", first, "/model")
record.save_weights("app", "Teacher-a", second, "/model")
record.save_weights("app", "Teacher-b", first, "/other")
record.save_weights("app-2", "Teacher-a", first, "/model")
assert record.load_weights("app", "Teacher-a") == (second, "/model")
assert record.load_weights("app", "Teacher-b") == (first, "/other")
record.forget("app")
record.forget("other")
assert record.load("app") == {"adapters": {}, "last_serial": 7} and record.load("other") == {}
assert record.load_weights("app", "Teacher-a") is record.load_weights("app", "Teacher-b") is None
assert record.load_weights("app-2", "Teacher-a") == (first, "/model")
ray.shutdown()
print("as it should be")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip().endswith("as it should be"), run.stderr
