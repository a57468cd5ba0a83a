"""verl's own agent loop worker, its padding and its losses, on this service's scores."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import deployments.trainers.verl as drop_in
from scoring.divergence import forward_kl, student_scores
from scoring.errors import InvalidRead, UnknownTeacher
from tests.oracle import hf_logprobs

PROMPT, RESPONSE, V = 6, 8, 2048
LOSS = "distillation.distillation_loss"


@pytest.fixture(autouse=True)
def installed():
    """As after `VERL_USE_EXTERNAL_MODULES=deployments.trainers.verl`."""
    drop_in.install()


class FillUp:
    """What of a tokenizer verl's padding needs."""

    pad_token_id, padding_side = 0, "right"

    def pad(self, encoded, *, max_length, return_attention_mask, **_):
        ids = encoded["input_ids"]
        fill, ones = [0] * (max_length - len(ids)), [1] * len(ids)
        rows = [fill + ids, fill + ones] if self.padding_side == "left" else [ids + fill, ones + fill]
        names = ["input_ids", "attention_mask"][: 1 + return_attention_mask]
        return {name: torch.tensor([row]) for name, row in zip(names, rows, strict=False)}


def configuration(loss_mode, **teachers):
    """verl's own defaults with the lines of the drop-in; `teachers` by routing key, where there are several."""
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/distillation/distillation.yaml")
    del defaults["defaults"]
    rollout = {"name": "vllm", "dtype": "bfloat16", "prompt_length": PROMPT, "response_length": RESPONSE}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "distillation": defaults})
    lines = re.findall(r"([\w.]+)=(\w+)(?=\s)", drop_in.__doc__.partition("`model_path`")[0])
    assert len(lines) == 6 and lines[-1] == ("distillation.teacher_models.teacher_model.model_path", "default")
    lines = [*lines, (f"{LOSS}.loss_mode", loss_mode)]
    lines += [(f"{LOSS}.use_policy_gradient", str(loss_mode == "k1")), (f"{LOSS}.topk", "5")]
    for key, name in teachers.items():
        entry = f"distillation.teacher_models.of_{key}"
        lines += [(f"{entry}.key", key), (f"{entry}.model_path", name), (f"{entry}.num_replicas", "1")]
        lines += [(f"{entry}.inference.{name}", str(value)) for name, value in rollout.items()]
        lines += [(f"{entry}.inference.tensor_model_parallel_size", "1")]
    lines += [("distillation.n_gpus_per_node", str(max(len(teachers), 1)))]
    config = OmegaConf.merge(config, OmegaConf.from_dotlist([f"{name}={value}" for name, value in lines]))
    assert config.actor_rollout_ref.rollout.temperature == 1
    return config


def worker(config, temperature=1):
    """verl's AgentLoopWorker without the models it would load."""
    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.tokenizer, worker.processor, worker.mm_processor_kwargs = FillUp(), None, {}
    worker.rollout_config = SimpleNamespace(prompt_length=PROMPT, response_length=RESPONSE, temperature=temperature)
    worker.reward_loop_worker_handles = None
    worker.distillation_enabled, worker.teacher_key = True, config.distillation.teacher_key
    clients = drop_in.TeachersElsewhere(config, None).get_client()
    worker.teacher_server_manager = AsyncTeacherLLMServerManager(config, clients)
    return worker


def sample(prompt, response, **fields):
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=[1] * len(response),
        metrics=AgentLoopMetrics(),
        extra_fields={},
        **fields,
    )


def samples():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, V, c).tolist(), rng.integers(0, V, r).tolist()) for c, r in ((2, 5), (6, 1), (1, 8))]


async def as_verl_trains(worker, some, validate=False, **kwargs):
    """The batch of the samples as verl's losses get it: padded by its worker, then unpadded."""
    rows = []
    for prompt, response in some:
        row = await worker._agent_loop_postprocess(sample(prompt, response), validate, raw_prompt=[], **kwargs)
        rows.append(row)
    names = ["prompt_ids", "response_ids", "response_mask", "input_ids", "attention_mask", "position_ids"]
    batch = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    batch["prompts"], batch["responses"] = batch.pop("prompt_ids"), batch.pop("response_ids")
    for name in ("teacher_ids", "teacher_logprobs"):
        batch[name] = torch.cat([getattr(row, name) for row in rows])
    return left_right_2_no_padding(TensorDict(batch, batch_size=len(rows)))


async def test_the_responses_own_tokens_lie_where_verl_looks_for_them(service, tiny_model):
    data = await as_verl_trains(worker(configuration("k1")), samples())
    logprobs = no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1)  # as its k1, k2 and k3 do
    ids = no_padding_2_padding(data["teacher_ids"], data).squeeze(-1)
    assert logprobs.dtype == torch.float32 and data["teacher_ids"].dtype == torch.int32
    for i, (prompt, response) in enumerate(samples()):
        due = hf_logprobs(tiny_model, prompt + response)[len(prompt) - 1 : -1]
        own = due.gather(1, torch.tensor(response)[:, None]).squeeze(1)
        np.testing.assert_allclose(logprobs[i, : len(response)], own, atol=3e-5)
        assert ids[i, : len(response)].tolist() == response
    total = sum(len(response) for _, response in samples())
    assert (data["teacher_logprobs"].values() != 0).sum() == total  # the rows of prompts are 0.0


async def test_verls_forward_kl_on_these_scores_is_that_of_the_teachers_best(service, tiny_model):
    config = configuration("forward_kl_topk")
    data = await as_verl_trains(worker(config), samples())
    lengths = [len(prompt) + len(response) for prompt, response in samples()]
    logits = torch.tensor(np.random.default_rng(1).normal(size=(1, sum(lengths), V)), dtype=torch.float32)
    out = compute_forward_kl_topk(
        logits, data["teacher_logprobs"], data["teacher_ids"].to(torch.int64),
        omega_conf_to_dataclass(config.distillation), "thd",
    )  # fmt: skip
    losses = no_padding_2_padding(out["distillation_losses"].squeeze(0), data)
    start = 0
    for i, (prompt, response) in enumerate(samples()):
        rows = slice(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
        best = hf_logprobs(tiny_model, prompt + response)[len(prompt) - 1 : -1].topk(5)
        student = student_scores(logits[0, rows], best.indices)
        due = forward_kl(student.logprobs, best.values, best.indices, tail="none")
        np.testing.assert_allclose(losses[i, : len(response)], due, atol=1e-3)
        start += len(prompt) + len(response)


async def test_samples_are_routed_to_their_teachers(service):
    config = configuration("k1", gsm8k="math", code="nobody")
    two = worker(config)
    asked = sample([1, 2], [3, 4])
    await two._compute_teacher_logprobs(asked, [1, 2], [3, 4], False, {"data_source": np.array("gsm8k")})
    assert asked.extra_fields["teacher_logprobs"].shape == (4, 1)
    with pytest.raises(UnknownTeacher, match="nobody"):
        await two._compute_teacher_logprobs(asked, [1, 2], [3, 4], False, {"data_source": "code"})
    with pytest.raises(ValueError, match="No teacher configured for routing key"):
        await two._compute_teacher_logprobs(asked, [1, 2], [3, 4], False, {"data_source": "prose"})


async def test_what_has_no_score_is_refused_and_validation_needs_none(service):
    config = configuration("k1")
    asked = sample([1, 2], [3, 4], multi_modal_data={"images": ["an image"]})
    with pytest.raises(InvalidRead, match="multi_modal_data: holds"):
        await worker(config)._compute_teacher_logprobs(asked, [1, 2], [3, 4], False)
    with pytest.raises(InvalidRead, match=r"rollout\.temperature: is 0\.7"):
        await worker(config, 0.7)._compute_teacher_logprobs(sample([1, 2], [3, 4]), [1, 2], [3, 4], False)
    await worker(config)._compute_teacher_logprobs(asked, [1, 2], [3, 4], validate=True)
    assert asked.extra_fields == {}


def test_verl_takes_it_as_an_external_module_before_its_trainers_take_what_it_replaces():
    script = (
        "import sys, verl; early = [m for m in sys.modules if m.startswith('verl.trainer.ppo')];"
        "import verl.experimental.agent_loop.agent_loop as loop;"
        "import verl.experimental.teacher_loop as teachers;"
        "print(loop.AgentLoopWorker._compute_teacher_logprobs.__module__);"
        "print(teachers.MultiTeacherModelManager.__module__);"
        "print([m for m in early if hasattr(sys.modules[m], 'MultiTeacherModelManager')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "deployments.trainers.verl"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-3:] == [*["deployments.trainers.verl"] * 2, "[]"], done.stderr[-2000:]


def test_a_verl_whose_seam_has_moved_is_refused(monkeypatch):
    async def moved(self, output, sequence_ids): ...

    monkeypatch.setattr(AgentLoopWorker, "_compute_teacher_logprobs", moved)
    with pytest.raises(ImportError, match=r"takes \['self', 'output', 'sequence_ids'\].*verl 0\.9\.1"):
        drop_in.install()
    assert verl.__version__
