"""How many replicas a teacher gets: by the tokens that its replicas have outstanding.

Serve's own policy counts calls, and a call is a shard of any size. A file of its own because Serve ships the policy's
module by value to its controller.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from deployments.config import AutoscalingConfig

OUTSTANDING_TOKENS = "outstanding_tokens"
"""What a replica reports of itself (`Teacher.record_autoscaling_stats`)."""


class OutstandingTokens:
    """The policy. Serve holds its answer to the bounds and the delays of the configuration.

    Args:
        target: outstanding tokens of one replica.
    """

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Replicas for the tokens that all replicas have outstanding together. Where none has reported: no change."""
        reported = (context.aggregated_metrics or {}).get(OUTSTANDING_TOKENS)
        if not reported:
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(reported.values()) / self._target)), {}


def autoscaling_options(config: AutoscalingConfig) -> ServeAutoscaling:
    """The option `autoscaling_config` of `serve.deployment`."""
    return ServeAutoscaling(
        **config.model_dump(exclude={"target_outstanding_tokens"}),
        metrics_interval_s=config.look_back_period_s / 3,  # as with Serve's own defaults: replicas report this often
        policy=AutoscalingPolicy(
            policy_function=OutstandingTokens, policy_kwargs={"target": config.target_outstanding_tokens}
        ),
    )
