"""What the drop-ins share: the client of this process, and what no score can be given for."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

from scoring.errors import InvalidRead
from scoring.http_client import HttpScoringClient
from scoring.reads import MatrixRead
from scoring.scores import MatrixScore

URL_VARIABLE = "TEACHER_SCORING_URL"


async def score(read: MatrixRead, url: str | None = None) -> MatrixScore:
    """The answer to one read. Reads asked within a few milliseconds, from any loop or thread, travel together.

    Args:
        read: what is asked.
        url: of the service; None takes that of the environment (`TEACHER_SCORING_URL`), or without one the service of
            the Ray cluster that this process is in, whose answers come straight from the replicas.
    """
    return await asyncio.wrap_future(_client(url or os.environ.get(URL_VARIABLE)).submit(read))


@functools.cache
def _client(url: str | None) -> Any:
    if url:
        return HttpScoringClient(url)
    from deployments.client import ScoringClient

    return ScoringClient()


def check_temperature(temperature: float, setting: str) -> None:
    """Raises unless the student's log-probabilities are at temperature 1, as the teacher's are.

    Trainers divide the student's logits by the temperature of the rollout, also where they score; a difference to a
    teacher at temperature 1 would then pull the student towards another distribution than the teacher's.
    """
    if temperature != 1:
        raise InvalidRead(
            f"is {temperature:g}; it scales the student's log-probabilities, and scores of this service are at "
            "temperature 1: set it to 1",
            field=setting,
        )


def check_text_only(inputs: Any, field: str) -> None:
    """Raises where a sample has more than tokens: the service would score it without what it was written about."""
    there = inputs if not isinstance(inputs, dict) else [name for name, part in inputs.items() if part is not None]
    if there:
        raise InvalidRead(f"holds {there}; this service scores tokens alone", field=field)
