"""What is measured, with the environment that the Makefile gives to all that it starts."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "token"  # of the clusters that are started here; read when ray is imported
for _name, _value in (
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5"),
    ("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "2000"),
    ("RAY_max_direct_call_object_size", "1048576"),
):
    os.environ.setdefault(_name, _value)
