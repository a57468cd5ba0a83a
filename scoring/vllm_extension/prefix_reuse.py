"""Scored reads that share a beginning compute it once: vLLM's prefix cache, read up to the first scored row.

vLLM caches keys and values, not hidden states. The first row of a matrix is the hidden state of the prompt token
`prompt_logprob_start`, so that many tokens of a request may come from the cache, and that token may not. vLLM by itself
does not read the cache for such requests; told to, it reads as far as it can, and drops the scores when that is past
the first row.

Its lookup never takes the last token of a request, whose hidden state gives the next token. Hence the one change made
here: to the lookup of a scored request, the request ends with its first scored token. How a hit of that length comes
about (whole blocks, sliding windows, several kinds of layers) stays vLLM's. A request that was preempted is looked up
again, in the same way. Label reads and all other requests are looked up as ever.

The seam is `Scheduler._get_local_prefix_cache_hit`, through which every local lookup goes, and that what it calls asks
the request for `num_tokens`. What a KV connector brings does not go through it: connectors are refused.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from scoring.errors import RefusedSettings


class BoundedScheduler(Scheduler):
    """vLLM's scheduler, with the cache lookup of scored requests bounded by their first scored row."""

    def _get_local_prefix_cache_hit(self, request: Request, *bound: int | None) -> tuple:
        """The cached blocks that `request` begins with, and how many tokens they hold.

        Args:
            bound: vLLM 0.33 gives one, the tokens that a hit may have for a reason of its own, or None.
        """
        start = first_scored_row(request)
        if start is not None:
            request = _Shortened(request, start + 1)
            bound = tuple(tokens if tokens is None else min(tokens, start) for tokens in bound)
        return super()._get_local_prefix_cache_hit(request, *bound)


class BoundedAsyncScheduler(BoundedScheduler, AsyncScheduler):
    """The same where the next step is scheduled while one is computed, as vLLM does on GPUs."""


class _Shortened:
    """A request, said to have fewer tokens."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self._request, self.num_tokens = request, num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def first_scored_row(request: Request) -> int | None:
    """The prompt token whose hidden state gives the first row of a request's matrix; None when it asks for none."""
    params = request.sampling_params
    if params is None or params.prompt_logprob_token_ids is None:
        return None
    return params.prompt_logprob_start or 0


def bound_prefix_reuse(config: VllmConfig) -> None:
    """Have the engine of this configuration run the scheduler above that takes the place of vLLM's own.

    Raises:
        RefusedSettings: another scheduler is chosen already.
    """
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is not None:
        raise RefusedSettings(
            f"scheduler_cls = {scheduler.scheduler_cls!r} (engine_args.scheduler_cls, or the model's) is refused: the "
            "reuse of prefixes has a scheduler of its own (the teacher's setting prefix_reuse turns it off)"
        )
    bounded = BoundedAsyncScheduler if scheduler.async_scheduling else BoundedScheduler
    # By its name: every process of the engine is sent the configuration, and one needs the class.
    scheduler.scheduler_cls = f"{bounded.__module__}.{bounded.__qualname__}"
