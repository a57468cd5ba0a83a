"""Where the time of a run went: who worked while whom.

A step's log has an interval (beginning, end) in seconds since the step began for `sample`, `score`, `wait` and `learn`;
a step ends with its learning.
"""

from __future__ import annotations

import statistics
from typing import Any


def shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of the time of all steps, what was spent sampling, scoring (beside the others), waiting for scores and learning;
    and `overlap`, the share of the scoring during which the next batch was being sampled."""
    whole = sum(step["learn"][1] for step in steps)
    scoring = sum(_length(step["score"]) for step in steps)
    both = sum(
        _length((max(step["score"][0], step["sample"][0]), min(step["score"][1], step["sample"][1]))) for step in steps
    )
    names = ("sample", "score", "wait", "learn")
    return {name: sum(_length(step[name]) for step in steps) / whole for name in names} | {"overlap": both / scoring}


def steady(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps without those whose scoring took more than ten times as long as usual: there the teacher was away."""
    usual = statistics.median(_length(step["score"]) for step in steps)
    return [step for step in steps if _length(step["score"]) <= 10 * usual]


def _length(interval: tuple[float, float]) -> float:
    return max(interval[1] - interval[0], 0.0)
