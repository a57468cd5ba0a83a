"""verl: the teacher of its on-policy distillation, answered by this service instead of by engines of verl's own.

    VERL_USE_EXTERNAL_MODULES=deployments.trainers.verl    # in the environment of the driver and of all Ray workers
    actor_rollout_ref.rollout.temperature=1
    distillation.enabled=true distillation.nnodes=1 distillation.n_gpus_per_node=1
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1
    distillation.teacher_models.teacher_model.model_path=default

`model_path` is the teacher's name in the service; with several teachers each entry has its own, and `key` and
`distillation.teacher_key` route samples to them as ever. The service is that of verl's own Ray cluster, or of
`TEACHER_SCORING_URL`. verl insists on a pool of at least one GPU for its teachers and checks that the cluster has it;
no engine starts there, and the GPU is not taken.

Written against verl 0.9.1 (the same in verl-project/verl at commit 1dda039b9c6311889a9c9a26040677e1254814f9):
`AgentLoopWorker._compute_teacher_logprobs`, and `MultiTeacherModelManager`, whose engines are not wanted. verl imports
this module at the end of its own import, in every process; with a verl whose seams have moved that import fails.
Imported without verl it changes nothing.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from deployments.trainers.service import check_temperature, check_text_only, score
from scoring.reads import MatrixRead


async def compute_teacher_logprobs(
    self: Any,
    output: Any,
    prompt_ids: list[int],
    response_ids: list[int],
    validate: bool,
    sample_kwargs: dict[str, Any] | None = None,
) -> None:
    """`AgentLoopWorker._compute_teacher_logprobs`: one sample's teacher log-probabilities, into `output.extra_fields`.

    With S = len(prompt_ids) + len(response_ids) they are `teacher_ids`, int32 [S, K], and `teacher_logprobs`, float32
    [S, K]; K is 1, the response's own token, or `distillation_loss.topk`, the teacher's likeliest. As in vLLM's prompt
    logprobs without their first, row s is of token s + 1: response token r lies in row len(prompt_ids) - 1 + r, where
    verl's `no_padding_2_padding` takes it from. The rows before, and the last, are 0 and 0.0; verl masks them.

    Raises:
        ScoringError: the teacher could not answer.
    """
    import torch

    if not self.distillation_enabled or validate:
        return
    check_temperature(self.rollout_config.temperature, "actor_rollout_ref.rollout.temperature")
    check_text_only(output.multi_modal_data, "multi_modal_data")
    manager = self.teacher_server_manager
    route = (sample_kwargs or {}).get(self.teacher_key)
    key = manager._resolve_teacher_key(route.item() if hasattr(route, "item") else route)
    loss = manager.distillation_loss_config
    top_k = loss.topk if loss.loss_settings.use_topk else 0
    teacher = manager.teacher_model_configs[key].model_path
    answer = await score(MatrixRead(prompt_ids, response_ids, top_k=top_k, teacher=teacher))
    if top_k:
        ids, logprobs = torch.tensor(answer.top_ids), torch.tensor(answer.top_logprobs)
    else:
        ids, logprobs = torch.tensor(response_ids)[:, None], torch.tensor(answer.response_logprobs)[:, None]
    rows = slice(len(prompt_ids) - 1, len(prompt_ids) - 1 + len(response_ids))
    shape = (len(prompt_ids) + len(response_ids), max(top_k, 1))
    output.extra_fields["teacher_ids"] = torch.zeros(shape, dtype=torch.int32)
    output.extra_fields["teacher_ids"][rows] = ids.to(torch.int32)
    output.extra_fields["teacher_logprobs"] = torch.zeros(shape)
    output.extra_fields["teacher_logprobs"][rows] = logprobs


class TeachersElsewhere:
    """In the place of `MultiTeacherModelManager`: starts no engines."""

    def __init__(self, config: Any, resource_pool: Any) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        self._keys = list(omega_conf_to_dataclass(config.distillation).teacher_models)

    def get_client(self) -> dict[str, None]:
        """A client per teacher, which nobody asks anything."""
        return dict.fromkeys(self._keys)


def install() -> None:
    """Put both into verl.

    Raises:
        ImportError: verl is another than this was written for.
    """
    from verl.experimental import teacher_loop
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    seam = AgentLoopWorker._compute_teacher_logprobs
    theirs, ours = (list(inspect.signature(f).parameters) for f in (seam, compute_teacher_logprobs))
    if theirs != ours or not hasattr(teacher_loop, "MultiTeacherModelManager"):
        raise ImportError(
            f"AgentLoopWorker._compute_teacher_logprobs takes {theirs} in this verl; {__name__} is written for {ours} "
            "(verl 0.9.1)"
        )
    AgentLoopWorker._compute_teacher_logprobs = compute_teacher_logprobs
    teacher_loop.MultiTeacherModelManager = TeachersElsewhere


if "verl" in sys.modules:  # it is verl that imports this
    install()
