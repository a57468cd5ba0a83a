"""The drop-ins for trainers on the interfaces that each one's sources show. TRL's and verl's own code runs them in
tests/trainers; slime and vime are on no package index."""

import asyncio
from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deployments.trainers import service, slime, trl, verl, vime
from scoring import MatrixRead
from scoring.errors import InvalidRead, Overloaded, UnknownTeacher, WrongEngineAnswer
from scoring.scores import MatrixScore
from tests.stand_in_router import score as says
from tests.stand_in_router import top


@pytest.fixture
def asked(monkeypatch):
    """(read, url) of everything the drop-ins ask; answered as the stand-in Router does."""
    asked: list[tuple[MatrixRead, str | None]] = []

    async def answer(read, url=None):
        asked.append((read, url))
        if read.teacher == "nobody":
            raise UnknownTeacher("is not served", field="teacher")
        own = [says(token, row) for row, token in enumerate(read.response_ids.tolist())]
        best = [top(token, row, read.top_k) for row, token in enumerate(read.response_ids.tolist())]
        best = np.array(best, dtype=np.float32).reshape(len(own), read.top_k, 2)
        return MatrixScore(
            logprobs=np.zeros((len(own), 0), np.float32),
            response_logprobs=np.array(own, np.float32),
            rows=np.arange(len(own)),
            meta=None,
            top_ids=best[..., 0].astype(np.int32) if read.top_k else None,
            top_logprobs=best[..., 1] if read.top_k else None,
        )

    for module in (slime, verl):
        monkeypatch.setattr(module, "score", answer)
    return asked


@dataclass
class Sample:
    """What of slime's and vime's `utils/types.py` a reward function and their trainers use."""

    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: Any = None
    metadata: dict | None = field(default_factory=dict)
    multimodal_inputs: dict | None = None
    teacher_log_probs: Any = None

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]


ARGS = Namespace(rm_url="http://teacher:8000", rollout_temperature=1.0, reward_key=None)
BOTH = pytest.mark.parametrize("trainer", [slime, vime], ids=["slime", "vime"])


@BOTH
async def test_slime_and_vime_get_one_score_per_response_token(asked, trainer):
    """As `async_rm` calls it, one sample at a time, and then `_post_process_rewards` all of them."""
    samples = [Sample([1, 2, 3, 40, 50], 2), Sample([7, 60], 1), Sample([5, 6, 7], 0), Sample([], 0)]
    samples[1].metadata = {"teacher": "math"}
    for sample in samples:
        sample.reward = await trainer.reward_func(ARGS, sample)
    raw, rewards = trainer.post_process_rewards(ARGS, samples)
    assert raw == rewards == [0.0] * 4
    assert all(round(r, 1) == 0.0 for r in raw)  # as slime's rollout metrics do with rewards
    assert samples[0].teacher_log_probs.tolist() == [says(40, 0), says(50, 1)]
    assert samples[1].teacher_log_probs.tolist() == [says(60, 0)]
    for sample in samples:
        assert sample.teacher_log_probs.dtype == torch.float32
        assert sample.teacher_log_probs.shape == (sample.response_length,)
    reads = [(r.prompt_ids.tolist(), r.response_ids.tolist(), r.teacher, url) for r, url in asked]
    assert reads == [([1, 2, 3], [40, 50], None, ARGS.rm_url), ([7], [60], "math", ARGS.rm_url)]


async def test_the_opd_penalty_of_slime_is_the_sampled_reverse_kl(asked):
    """`apply_opd_kl_to_advantages` subtracts coef (student - teacher) of what stands in the sample."""
    from scoring.divergence import reverse_kl_advantages

    sample = Sample([1, 2, 3, 40, 50], 2)
    await slime.reward_func(ARGS, sample)
    student = torch.tensor([-1.0, -2.0])
    by_slime = torch.zeros(2) - 0.5 * (student - sample.teacher_log_probs)
    torch.testing.assert_close(by_slime, reverse_kl_advantages(student, sample.teacher_log_probs, coef=0.5))


@BOTH
async def test_a_group_is_scored_at_once_in_its_order(asked, trainer):
    """As `batched_async_rm` calls it under --group-rm."""
    group = [Sample([1, 10 + i], 1) for i in range(5)]
    assert await trainer.reward_func(ARGS, group) == [0.0] * 5
    assert [s.teacher_log_probs.tolist() for s in group] == [[says(10 + i, 0)] for i in range(5)]


@BOTH
async def test_a_sample_without_its_scores_is_never_passed_on(asked, trainer):
    unknown = Sample([1, 2, 3], 1, metadata={"teacher": "nobody"})
    with pytest.raises(UnknownTeacher):
        await trainer.reward_func(ARGS, unknown)
    fine = Sample([1, 2, 3], 1)
    fine.reward = await trainer.reward_func(ARGS, fine)
    for wrong in (None, torch.zeros(2)):
        missing = Sample([1, 2, 3], 1, reward=0.0, teacher_log_probs=wrong)
        with pytest.raises(WrongEngineAnswer, match=r"read 1: has .* teacher_log_probs for 1 tokens"):
            trainer.post_process_rewards(ARGS, [fine, missing])
    own = Sample([1, 2, 3], 1, reward={"task": 0.5}, teacher_log_probs=torch.zeros(1))  # and another reward's function
    assert trainer.post_process_rewards(Namespace(reward_key="task"), [own]) == ([0.5], [0.5])


@BOTH
async def test_what_has_no_score_is_refused(asked, trainer):
    with pytest.raises(InvalidRead, match=r"--rollout-temperature: is 0\.7.*set it to 1"):
        await trainer.reward_func(Namespace(**vars(ARGS) | {"rollout_temperature": 0.7}), Sample([1, 2], 1))
    with pytest.raises(InvalidRead, match=r"multimodal_inputs: holds \['images'\]"):
        await trainer.reward_func(ARGS, Sample([1, 2], 1, multimodal_inputs={"images": ["an image"], "videos": None}))
    assert not asked


def worker(topk: int | None = None, temperature: float = 1.0) -> SimpleNamespace:
    """What of verl's AgentLoopWorker the method uses: with two teachers, "gsm8k" and "code"."""
    loss = SimpleNamespace(topk=topk, loss_settings=SimpleNamespace(use_topk=topk is not None))
    configs = {"gsm8k": SimpleNamespace(model_path="math"), "code": SimpleNamespace(model_path="nobody")}
    manager = SimpleNamespace(
        distillation_loss_config=loss, teacher_model_configs=configs, _resolve_teacher_key=lambda key: key
    )
    rollout = SimpleNamespace(temperature=temperature)
    return SimpleNamespace(
        distillation_enabled=True, rollout_config=rollout, teacher_server_manager=manager, teacher_key="data_source"
    )


async def scored(worker, prompt, response, validate=False):
    output = SimpleNamespace(extra_fields={}, multi_modal_data=None)
    await verl.compute_teacher_logprobs(worker, output, prompt, response, validate, {"data_source": np.array("gsm8k")})
    return output.extra_fields


async def test_verls_rows_are_those_of_the_token_after(asked):
    """S = 5 rows: those before the last of the prompt and the last of all are 0; int32 ids, float32 scores."""
    fields = await scored(worker(), [1, 2, 3], [40, 50])
    assert fields["teacher_ids"].dtype == torch.int32 and fields["teacher_logprobs"].dtype == torch.float32
    assert fields["teacher_ids"].tolist() == [[0], [0], [40], [50], [0]]
    assert fields["teacher_logprobs"].tolist() == [[0.0], [0.0], [says(40, 0)], [says(50, 1)], [0.0]]
    assert asked[0][0].teacher == "math"
    fields = await scored(worker(topk=3), [1], [40])
    assert fields["teacher_ids"].tolist() == [[41, 42, 43], [0, 0, 0]]
    assert fields["teacher_logprobs"].tolist() == [[says(41), says(42), says(43)], [0.0] * 3]
    fields = await scored(worker(), [1, 2], [])
    assert fields["teacher_ids"].shape == fields["teacher_logprobs"].shape == (2, 1)


async def test_verl_asks_nothing_where_it_does_not_distil(asked):
    assert await scored(worker(), [1], [40], validate=True) == {}
    off = worker()
    off.distillation_enabled = False
    assert await scored(off, [1], [40]) == {}
    with pytest.raises(InvalidRead, match=r"actor_rollout_ref\.rollout\.temperature: is 0\.7"):
        await scored(worker(temperature=0.7), [1], [40])
    assert not asked


def test_verl_is_left_alone_without_verl():
    with pytest.raises(ModuleNotFoundError, match="verl"):
        verl.install()


def test_the_client_for_trl_refuses_what_it_cannot_answer():
    client = trl.TeacherClient("http://127.0.0.1:9", timeout_s=0.1)
    with pytest.raises(InvalidRead, match=r"temperature: is 0\.9"):
        client.get_sequence_logprobs([[1, 2]], [1], temperature=0.9)
    with pytest.raises(InvalidRead, match="prompt_lengths: has 1 for 2 sequences"):
        client.get_sequence_logprobs([[1, 2], [3, 4]], [1])
    with pytest.raises(InvalidRead, match="prompt_ids: is empty"):
        client.get_sequence_logprobs([[1, 2]], [0])


@pytest.mark.parametrize(
    ("given", "variable"), [("http://a:1", None), (None, "http://a:1"), ("http://a:1", "http://b:2")]
)
async def test_a_url_given_comes_before_the_environments(monkeypatch, given, variable):
    made = []

    class Client:
        def __init__(self, url):
            made.append(url)

        def submit(self, read):
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Overloaded("full"))
            return future

    monkeypatch.setattr(service, "HttpScoringClient", Client)
    service._client.cache_clear()
    if variable:
        monkeypatch.setenv(service.URL_VARIABLE, variable)
    for _ in range(2):
        with pytest.raises(Overloaded):
            await service.score(MatrixRead([1], [2]), given)
    assert made == ["http://a:1"]  # one client for all reads
    service._client.cache_clear()
