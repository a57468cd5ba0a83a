"""slime: `reward_func` and `post_process_rewards`, for the paths that its on-policy distillation takes.

    --use-opd --opd-type sglang --opd-kl-coef 1.0 --rollout-temperature 1
    --custom-rm-path deployments.trainers.slime.reward_func
    --custom-reward-post-process-path deployments.trainers.slime.post_process_rewards
    --rm-url http://127.0.0.1:8000

Without `--rm-url` (and `TEACHER_SCORING_URL`) the service of slime's own Ray cluster answers. A sample whose metadata
has "teacher" is scored by the teacher of that name, others by the default one.

Written against THUDM/slime at commit 624b824a898ab0ec1fcb4d373004c7f3852bf515 (2026-08-21): what its
`rollout/on_policy_distillation.py` gives to `apply_opd_kl_to_advantages` of `backends/megatron_utils/loss.py`, which is
`sample.teacher_log_probs`, float32 [response_length], row r of the r-th response token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.trainers.service import check_temperature, check_text_only, score
from scoring.errors import WrongEngineAnswer
from scoring.reads import MatrixRead


async def reward_func(args: Any, sample: Any, **_: Any) -> float | list[float]:
    """Asks the teacher about one sample, or, under `--group-rm`, about a list of them.

    The scores are put into the sample at once, and the reward is 0.0: a number, as whatever else looks at rewards
    expects. A reward function of yours may await this one and return the reward of its task.

    Raises:
        ScoringError: the teacher could not answer; a sample without scores is never passed on.
    """
    check_temperature(args.rollout_temperature, "--rollout-temperature")
    if isinstance(sample, list):
        return list(await asyncio.gather(*(_score(args, each) for each in sample)))
    return await _score(args, sample)


def post_process_rewards(args: Any, samples: list[Any], **_: Any) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards) of samples that have been scored, both as `reward_func` left them.

    Raises:
        WrongEngineAnswer: a sample has no scores, or not one for each response token.
    """
    for i, sample in enumerate(samples):
        scores = sample.teacher_log_probs
        if scores is None or len(scores) != sample.response_length:
            given = "none" if scores is None else len(scores)
            raise WrongEngineAnswer(f"has {given} teacher_log_probs for {sample.response_length} tokens", read=i)
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    return rewards, rewards


async def _score(args: Any, sample: Any) -> float:
    import torch

    check_text_only(sample.multimodal_inputs, "multimodal_inputs")
    if not sample.response_length:  # nothing was generated, and there may be no prompt either
        sample.teacher_log_probs = torch.zeros(0)
        return 0.0
    start = len(sample.tokens) - sample.response_length
    teacher = (sample.metadata or {}).get("teacher")
    answer = await score(MatrixRead(sample.tokens[:start], sample.tokens[start:], teacher=teacher), args.rm_url)
    sample.teacher_log_probs = torch.tensor(answer.response_logprobs)
    return 0.0
