"""vime: `reward_func` and `post_process_rewards`, which are those of slime, whose interface it keeps.

    --use-opd --opd-type vllm --opd-kl-coef 1.0 --rollout-temperature 1
    --custom-rm-path deployments.trainers.vime.reward_func
    --custom-reward-post-process-path deployments.trainers.vime.post_process_rewards
    --rm-url http://127.0.0.1:8000

Without `--rm-url` (and `TEACHER_SCORING_URL`) the service of vime's own Ray cluster answers. vime's own functions
speak to this service as well, over vLLM's route, one request a sample, in JSON:

    --custom-rm-path vime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path vime.rollout.on_policy_distillation.post_process_rewards
    --opd-teacher-scoring per-position --rm-url http://127.0.0.1:8000/inference/v1/generate

Written against vllm-project/vime: `rollout/on_policy_distillation.py` at commit
1b03563221f94fe083e1fea85796b06563204b16.
"""

from deployments.trainers.slime import post_process_rewards, reward_func

__all__ = ["post_process_rewards", "reward_func"]
