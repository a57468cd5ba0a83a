"""The whole application as `serve run` starts it: real replicas, real engines, both reads through all three ways in."""

import asyncio
import base64
import dataclasses
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
import torch
from pyarrow import parquet as pq
from ray import serve

from deployments import bulk, membership
from deployments.actor import NAMESPACE
from deployments.client import AsyncScoringClient, ScoringClient
from deployments.pinning import pinned
from deployments.router import APP_NAME
from deployments.trainers import service as trainers
from deployments.trainers import slime, trl, verl
from examples import label_reward
from examples.evaluation import checks
from examples.on_policy_distillation import Trainer
from examples.student import Student, sample
from examples.tasks import load, with_adapter
from examples.times import shares
from scoring import LabelRead, MatrixBatch, MatrixRead, score_file
from scoring.errors import (
    DeadlineExceeded,
    InvalidCheckpoint,
    InvalidRead,
    ScoringError,
    TeacherUnavailable,
    UnknownTeacher,
    VersionMismatch,
)
from scoring.http_client import HttpScoringClient
from scoring.reads import EXTRAS
from scoring.wire import encode_batch
from tests.oracle import hf_logprobs
from tests.serve_process import ServeProcess, outstanding_tokens, two_replicas_of
from tests.weights import VersionedLoad, by_actor, by_client, changed_checkpoint

VOCABULARY = 2048
LIMIT = 3e-5
README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def application(engines, tiny_path, tmp_path_factory):
    """The service with two replicas of the tiny teacher. This process is connected to its Ray cluster."""
    engines.close()
    service = ServeProcess(tmp_path_factory.mktemp("service"), {"teachers": {"default": two_replicas_of(tiny_path)}})
    with service.connected():
        service.wait_for_replicas(2)
        yield service


@pytest.fixture(scope="module")
def client(application):
    with ScoringClient() as client:
        yield client


@pytest.fixture(scope="module")
def http(application):
    with HttpScoringClient(application.url) as client:
        yield client


@pytest.fixture(scope="module")
def actor(application):
    return ray.get_actor(APP_NAME, namespace=NAMESPACE)


def make_reads(count=12, seed=0):
    rng = np.random.default_rng(seed)
    reads = []
    for _ in range(count):
        prompt, response, width = rng.integers(1, 80), rng.integers(1, 80), rng.integers(1, 40)
        ids = rng.integers(0, VOCABULARY, prompt + response)
        reads.append(MatrixRead(ids[:prompt], ids[prompt:], rng.integers(0, VOCABULARY, (response, width))))
    return reads


def expected(model, read):
    """float32 [R, K] and [R], by Hugging Face."""
    ids = [*read.prompt_ids.tolist(), *read.response_ids.tolist()]
    rows = hf_logprobs(model, ids).numpy()[len(read.prompt_ids) - 1 : -1]
    return np.take_along_axis(rows, read.candidate_ids.astype(np.int64), 1), rows[
        np.arange(len(rows)), read.response_ids
    ]


def who_is_off(client, model, read, served, computed):
    """How far the first answers of the service and of Hugging Face are from what each says when asked again."""
    again = [client.read_matrix([read])[0].logprobs for _ in range(4)]  # by either replica
    anew = expected(model, read)[0]
    answers = {"served first": served, "computed first": computed, "computed anew": anew}
    answers |= {f"served again ({i})": answer for i, answer in enumerate(again)}
    return {f"{a} - {b}": f"{np.abs(answers[a] - answers[b]).max():.1e}" for a, b in itertools.combinations(answers, 2)}


def test_the_client_answers_as_hugging_face_does(client, tiny_model):
    reads = make_reads()
    scores = client.read_matrix(reads)
    assert len(scores) == len(reads)
    for i, (read, score) in enumerate(zip(reads, scores, strict=True)):
        logprobs, own = expected(tiny_model, read)
        assert score.logprobs.shape == logprobs.shape and score.logprobs.dtype == np.float32
        if np.abs(score.logprobs - logprobs).max() > LIMIT:
            pytest.fail(f"read {i} is off: {who_is_off(client, tiny_model, read, score.logprobs, logprobs)}")
        assert np.abs(score.response_logprobs - own).max() <= LIMIT
        assert score.meta.prompt_tokens == len(read.prompt_ids) + len(read.response_ids)


def test_client_actor_and_http_agree_bit_for_bit(client, actor, http, application):
    reads = make_reads(seed=1)
    by_client = client.read_matrix(reads)
    by_actor = ray.get(actor.read_matrix.remote(reads))
    by_http = http.read_matrix(reads)
    with HttpScoringClient(application.url, binary=False) as json_client:
        by_json = json_client.read_matrix(reads)
    for i, score in enumerate(by_client):
        np.testing.assert_array_equal(score.logprobs, by_actor["logprobs"][i])
        np.testing.assert_array_equal(score.logprobs, by_http[i].logprobs)
        np.testing.assert_array_equal(score.logprobs, by_json[i].logprobs)
        np.testing.assert_array_equal(score.response_logprobs, by_actor["response_logprobs"][i])
        np.testing.assert_array_equal(score.response_logprobs, by_http[i].response_logprobs)


def check_asked(read, score, due):
    """Hold an answer against the whole distribution of each of its rows, float64 [n, V]."""
    if not read.top_k:
        assert score.top_ids is score.top_logprobs is None
    else:
        assert (score.top_ids.dtype, score.top_logprobs.dtype) == (np.int32, np.float32)
        assert score.top_ids.shape == score.top_logprobs.shape == (len(due), read.top_k)
        assert all(len(set(ids)) == read.top_k for ids in score.top_ids.tolist())
        best = -np.sort(-due, axis=1)[:, : read.top_k]
        assert np.abs(score.top_logprobs - best).max(initial=0) <= LIMIT
        assert np.abs(np.take_along_axis(due, score.top_ids.astype(int), 1) - best).max(initial=0) <= LIMIT
    outside, rows = np.exp(due), np.arange(len(read.response_ids)) if read.rows is None else read.rows
    if read.candidate_ids is not None:
        of_row = np.broadcast_to(read.candidate_ids, (len(read.response_ids), read.width))[rows]
        np.put_along_axis(outside, of_row.astype(int), 0, axis=1)
    expected = {"tail": np.log(outside.sum(axis=1)), "entropy": -(np.exp(due) * due).sum(axis=1)}
    for name, given in (("tail", score.tail_logprob), ("entropy", score.entropy)):
        if name not in read.extras:
            assert given is None
        else:
            assert (given.dtype, given.shape) == (np.float32, (len(due),))
            assert np.abs(given - expected[name]).max(initial=0) <= LIMIT
    assert (score.rank is not None) == ("rank" in read.extras)
    if score.rank is not None:  # two logits as near as rounding may count either way
        own = np.take_along_axis(due, read.response_ids[rows][:, None].astype(int), 1)
        assert (score.rank > (due > own + LIMIT).sum(axis=1)).all()
        assert (score.rank <= (due >= own - LIMIT).sum(axis=1)).all()


def test_what_is_asked_beside_the_candidates_comes_through_every_way_in(client, actor, http, application, tiny_model):
    asked = [{"top_k": 7, "extras": EXTRAS}, {"top_k": 3, "extras": "rank"}, {"extras": "tail"}, {"extras": "entropy"}]
    reads = [
        MatrixRead(read.prompt_ids, read.response_ids, read.candidate_ids, **more)
        for read, more in zip(make_reads(8, seed=4), asked * 2, strict=True)
    ]
    reads += [
        MatrixRead([1, 2], [3, 4, 5], rows=[2, 0], top_k=4),  # the usual way to the teacher's own best
        MatrixRead([1, 2], [], [8, 9], top_k=5, extras=EXTRAS),
        MatrixRead([1, 2], [3, 4], [[8, 9], [7, 6]]),
    ]
    plain = ray.get(actor.read_matrix.remote(reads))
    names = ("logprobs", "top_ids", "top_logprobs", "tail_logprob", "entropy", "rank")
    with HttpScoringClient(application.url, binary=False) as json_client:
        ways = {
            "client": client.read_matrix(reads),
            "one by one": dict(client.iter_matrix(reads)),
            "submitted": [future.result(60) for future in [client.submit(read) for read in reads]],
            "actor": [SimpleNamespace(**{name: plain[name][i] for name in names}) for i in range(len(reads))],
            "safetensors": http.read_matrix(reads),
            "JSON": json_client.read_matrix(reads),
        }
    for i, read in enumerate(reads):
        rows = np.arange(len(read.response_ids)) if read.rows is None else read.rows
        everything = hf_logprobs(tiny_model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()]).double().numpy()
        for scores in ways.values():
            check_asked(read, scores[i], everything[len(read.prompt_ids) - 1 + rows])
            np.testing.assert_allclose(scores[i].logprobs, ways["client"][i].logprobs, rtol=0, atol=LIMIT)


def test_label_reads_agree_with_hugging_face_through_every_way_in(client, actor, http, tiny_model):
    reads = [LabelRead([3, 1, 4, 1, 5], [9, 2, 6, 9]), LabelRead([2], [7])]
    truth = [hf_logprobs(tiny_model, r.prompt_ids.tolist()).numpy()[-1][r.label_ids] for r in reads]
    by_actor = ray.get(actor.read_labels.remote(reads))
    for answers in (
        [s.logprobs for s in client.read_labels(reads)],
        by_actor["logprobs"],
        [s.logprobs for s in http.read_labels(reads)],
    ):
        for answer, right in zip(answers, truth, strict=True):
            np.testing.assert_allclose(answer, right, atol=LIMIT, rtol=0)


def test_a_prompt_is_prefilled_once_and_found_again_by_the_next_call(client, tiny_model):
    rng, (prompts, samples, length) = np.random.default_rng(9), (8, 6, 200)
    starts = [rng.integers(0, VOCABULARY, length) for _ in range(prompts)]
    reads = [
        MatrixRead(start, rng.integers(0, VOCABULARY, 20), rng.integers(0, VOCABULARY, (20, 4)))
        for _ in range(samples)
        for start in starts
    ]
    block = client.teachers()["default"]["block_size"]
    first, again = client.read_matrix(reads), client.read_matrix(reads)
    held = (length - 1) // block * block
    assert sorted(score.meta.cached_tokens for score in first) == [0] * prompts + [held] * (samples - 1) * prompts
    assert {score.meta.cached_tokens for score in again} == {held}
    for read, one, other in zip(reads, first, again, strict=True):
        logprobs, _ = expected(tiny_model, read)
        for score in (one, other):
            np.testing.assert_allclose(score.logprobs, logprobs, atol=LIMIT, rtol=0)


def test_both_replicas_take_part_and_each_has_a_core_of_its_own(client):
    places = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("placement").results(timeout_s=30)
    assert len({place["pid"] for place in places}) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert len({place["cores"] for place in places}) == 2

    def used():
        return [
            sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in place["engine"] if psutil.pid_exists(pid))
            for place in places
        ]

    before = used()
    client.read_matrix(make_reads(200, seed=2))
    assert all(after - start > 0.05 for start, after in zip(before, used(), strict=True))


def test_a_replica_writes_its_log_after_its_engine_has_started(application):
    """Without that a controller that is started anew takes every replica for broken."""
    for replica in application.processes("ray::ServeReplica:teacher-scoring:Teacher"):
        (log,) = [Path(f.path) for f in replica.open_files() if "/replica_" in f.path and f.path.endswith(".log")]
        assert "is ready after" in log.read_text()


def test_a_pinned_call_reaches_the_replica_it_names(application):
    handle = serve.get_deployment_handle("Teacher-default", APP_NAME)
    deadline = time.monotonic() + 10
    while len(membership.members(handle)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    members = membership.members(handle)
    assert len(members) == 2
    calls = [(m, pinned(handle, m, "placement").remote()) for m in members * 12]
    assert [call.result(timeout_s=30)["replica"] for _, call in calls] == [m for m, _ in calls]
    with pytest.raises(membership.ReplicaGone):
        pinned(handle, "nobody", "placement").remote().result(timeout_s=30)


def test_a_batch_may_be_an_object_ref_and_the_answer_chains(actor):
    read = MatrixRead([1, 2], [3, 4], [[5, 6], [7, 8]])
    ref = actor.read_matrix.remote(ray.put(MatrixBatch.from_reads([read])))

    @ray.remote(num_cpus=0)
    def total(answer):
        return float(answer["logprobs"][0].sum())

    assert ray.get(total.remote(ref)) == pytest.approx(float(ray.get(ref)["logprobs"][0].sum()))


def test_a_trainer_actor_scores_with_both_clients(client):
    read = make_reads(1, seed=3)[0]

    @ray.remote
    class Trainer:
        def score(self, read):
            with ScoringClient() as client:
                return client.read_matrix([read])[0].logprobs

    @ray.remote
    class AsyncTrainer:
        async def score(self, read):
            client = AsyncScoringClient()
            one, two = await asyncio.gather(client.read_matrix([read]), client.read_matrix([read, read]))
            assert (one[0].logprobs == two[1].logprobs).all()
            return one[0].logprobs

    right = client.read_matrix([read])[0].logprobs
    for trainer in (Trainer.remote(), AsyncTrainer.remote()):
        np.testing.assert_array_equal(ray.get(trainer.score.remote(read), timeout=60), right)


def test_teachers_say_what_they_are_and_take(client, http, actor, tiny_path):
    teacher = client.teachers()["default"]
    assert teacher["vocabulary"] == VOCABULARY
    assert teacher["max_length"] == 512
    assert teacher["max_candidates"] == 1024
    assert teacher["dtype"] == teacher["head_dtype"] == "float32"
    assert teacher["replicas"] == 2
    assert teacher["weight_version"] == 0
    assert teacher["model"] == str(tiny_path)
    assert len(teacher["checkpoint"]) == 16
    assert http.teachers()["default"] == teacher == ray.get(actor.teachers.remote())["default"]


BAD_READS = [
    (lambda: MatrixRead([1], [2], [[5, VOCABULARY, 7]]), InvalidRead, r"candidate_ids\[0\]\[1\]: is 2048"),
    (lambda: MatrixRead([VOCABULARY], [2]), InvalidRead, r"prompt_ids\[0\]: is 2048"),
    (lambda: MatrixRead([1], [-1]), InvalidRead, r"response_ids\[0\]: is -1"),
    (lambda: MatrixRead([1] * 256, [2] * 256), InvalidRead, r"512\+1 > 512"),
    (lambda: MatrixRead([1], [2], np.zeros((1, 1025), int)), InvalidRead, "K = 1025.*1024.*max_candidates"),
    (lambda: MatrixRead([1], [2], teacher="nobody"), UnknownTeacher, "'nobody'; the teachers are default"),
    (lambda: MatrixRead([1], [2], expect_version=7), VersionMismatch, "version 7.*version 0"),
]


@pytest.mark.parametrize("make, error, message", BAD_READS)
def test_a_bad_read_gets_the_same_typed_error_through_every_way_in(client, http, actor, make, error, message):
    good, bad = MatrixRead([1, 2], [3]), make()
    for read_matrix in (
        client.read_matrix,
        http.read_matrix,
        lambda reads: ray.get(actor.read_matrix.remote(reads)),
    ):
        with pytest.raises(error, match=message) as caught:
            read_matrix([good, bad])
        error_of_actor = getattr(caught.value, "cause", caught.value)
        assert error_of_actor.read == 1
        read_matrix([good])


def test_one_bad_read_leaves_the_others_answered(client, http, tiny_model):
    reads = make_reads(3, seed=4)
    mixed = [reads[0], MatrixRead([1], [2], [[VOCABULARY]]), *reads[1:]]
    for scores in (
        client.read_matrix(mixed, return_exceptions=True),
        http.read_matrix(mixed, return_exceptions=True),
    ):
        assert isinstance(scores[1], InvalidRead) and scores[1].read == 1
        for i, read in ((0, reads[0]), (2, reads[1]), (3, reads[2])):
            assert np.abs(scores[i].logprobs - expected(tiny_model, read)[0]).max() <= LIMIT


def test_a_deadline_that_passes_is_a_typed_error_and_the_next_read_works(client, http):
    reads = make_reads(200, seed=5)
    with pytest.raises(DeadlineExceeded):
        client.read_matrix(reads, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        http.read_matrix(reads, timeout_s=0.05)
    client.read_matrix(reads[:1])


def leave_early_over_http(application, reads):
    with httpx.Client(timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
        http.post(f"{application.url}/v1/matrix-reads", content=encode_batch(MatrixBatch.from_reads(reads)),
                  headers={"content-type": "application/vnd.safetensors"})  # fmt: skip


def cancel_an_asynchronous_call(application, reads):
    async def ask():
        async with AsyncScoringClient() as client:
            await asyncio.wait_for(client.read_matrix(reads), 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())


def leave_an_iteration(application, reads):
    with ScoringClient() as client:
        for _ in client.iter_matrix(reads):
            break


@pytest.mark.parametrize("leave", [leave_early_over_http, cancel_an_asynchronous_call, leave_an_iteration])
def test_a_caller_that_leaves_frees_the_engines_within_a_second(client, application, leave):
    client.read_matrix(make_reads(2))
    leave(application, make_reads(2000, seed=9))
    time.sleep(1)
    assert outstanding_tokens() == [0, 0]


def test_reads_come_one_by_one_as_they_finish(client, http):
    reads = make_reads(40, seed=10)
    whole = client.read_matrix(reads)
    for by in (client, http):
        one_by_one = dict(by.iter_matrix(reads))
        submitted = [by.submit(read) for read in reads]
        for i, score in enumerate(whole):
            np.testing.assert_allclose(one_by_one[i].logprobs, score.logprobs, atol=LIMIT, rtol=0)
            np.testing.assert_allclose(submitted[i].result(60).logprobs, score.logprobs, atol=LIMIT, rtol=0)


def test_an_empty_list_of_reads_gets_an_empty_answer(client, http):
    assert len(client.read_matrix([])) == len(client.read_labels([])) == len(http.read_matrix([])) == 0


def test_a_missing_application_is_a_sentence(application):
    with ScoringClient("nothing-here") as client, pytest.raises(TeacherUnavailable, match="no Serve application"):
        client.read_matrix([MatrixRead([1], [2])])


def test_a_client_written_for_a_vllm_server_gets_its_matrix(application, tiny_model):
    read = make_reads(1, seed=6)[0]
    logprobs, _ = expected(tiny_model, read)
    body = {
        "token_ids": [*read.prompt_ids.tolist(), *read.response_ids.tolist()],
        "model": httpx.get(f"{application.url}/v1/models").json()["data"][0]["id"],
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0.7,
            "prompt_logprob_token_ids": read.candidate_ids.tolist(),
            "prompt_logprob_start": len(read.prompt_ids) - 1,
        },
    }
    per_row = httpx.post(f"{application.url}/inference/v1/generate", json=body, timeout=60)
    assert per_row.status_code == 200
    np.testing.assert_allclose(vllm_matrix(per_row), logprobs, atol=LIMIT, rtol=0)

    flat = read.candidate_ids[0].tolist()
    body["sampling_params"]["prompt_logprob_token_ids"] = flat
    older = httpx.post(f"{application.url}/inference/v1/generate", json=body, timeout=60)
    same = expected(tiny_model, MatrixRead(read.prompt_ids, read.response_ids, [flat] * len(read.response_ids)))[0]
    np.testing.assert_allclose(vllm_matrix(older), same, atol=LIMIT, rtol=0)


def test_what_trainers_call_for_their_teacher_is_what_hugging_face_says(application, client, tiny_model):
    """Responses of 3, 17, 1 and 2 tokens. A row written one position off would be off by more than rounding."""
    rng = np.random.default_rng(7)
    sequences = [(rng.integers(0, VOCABULARY, c).tolist(), rng.integers(0, VOCABULARY, r).tolist())
                 for c, r in ((3, 3), (5, 17), (1, 1), (9, 2))]  # fmt: skip
    due = [expected(tiny_model, MatrixRead(c, r, [[]] * len(r)))[1] for c, r in sequences]
    for (prompt, response), scores in zip(sequences, due, strict=True):
        table = hf_logprobs(tiny_model, prompt + response).numpy()
        for shift in (-1, 1):
            rows = np.arange(len(response)) + len(prompt) - 1 + shift
            there = (rows >= 0) & (rows < len(table))
            assert (np.abs(table[rows[there], np.array(response)[there]] - scores[there]) > 1e-3).all()

    def check(answers):
        for answer, scores in zip(answers, due, strict=True):
            np.testing.assert_allclose(answer, scores, atol=LIMIT, rtol=0)

    async def by_slime(url):
        args = SimpleNamespace(rm_url=url, rollout_temperature=1.0, reward_key=None)
        samples = [SimpleNamespace(tokens=c + r, response_length=len(r), metadata={}, multimodal_inputs=None,
                                   teacher_log_probs=None, get_reward_value=lambda _: 0.0)
                   for c, r in sequences]  # fmt: skip
        await asyncio.gather(*(slime.reward_func(args, sample) for sample in samples))
        slime.post_process_rewards(args, samples)
        return [sample.teacher_log_probs for sample in samples]

    async def by_verl():
        loss = SimpleNamespace(topk=None, loss_settings=SimpleNamespace(use_topk=False))
        manager = SimpleNamespace(
            distillation_loss_config=loss,
            teacher_model_configs={"default": SimpleNamespace(model_path="default")},
            _resolve_teacher_key=lambda _: "default",
        )
        worker = SimpleNamespace(distillation_enabled=True, rollout_config=SimpleNamespace(temperature=1.0),
                                 teacher_server_manager=manager, teacher_key="data_source")  # fmt: skip
        outputs = [SimpleNamespace(extra_fields={}, multi_modal_data=None) for _ in sequences]
        await asyncio.gather(
            *(
                verl.compute_teacher_logprobs(worker, o, c, r, False)
                for o, (c, r) in zip(outputs, sequences, strict=True)
            )
        )
        return [output.extra_fields["teacher_logprobs"][:, 0] for output in outputs]

    try:
        for url in (application.url, None):  # over HTTP, and from the replicas
            check(asyncio.run(by_slime(url)))
        rows = asyncio.run(by_verl())
        check([row[len(c) - 1 : -1] for row, (c, _) in zip(rows, sequences, strict=True)])
        assert not any(row[: len(c) - 1].any() or row[-1] for row, (c, _) in zip(rows, sequences, strict=True))
    finally:
        for url in (application.url, None):
            trainers._client(url).close()
        trainers._client.cache_clear()
    answer = trl.TeacherClient(application.url).get_sequence_logprobs(
        [c + r for c, r in sequences], [len(c) for c, _ in sequences], top_logprobs=3
    )
    check([np.array(scores)[:, 0] for scores in answer["actual_logprobs"]])
    for (c, r), best in zip(sequences, answer["logprobs"], strict=True):
        table = hf_logprobs(tiny_model, c + r)[len(c) - 1 : -1]
        np.testing.assert_allclose(best, table.topk(3).values, atol=LIMIT, rtol=0)
    by_vime = []  # what its own reward_func sends under --opd-teacher-scoring per-position
    for c, r in sequences:
        params = {"max_tokens": 1, "temperature": 1.0, "skip_special_tokens": False}
        params |= {"prompt_logprob_start": len(c) - 1, "prompt_logprob_token_ids": [[token] for token in r]}
        body = {"token_ids": c + r, "sampling_params": params}
        matrix = vllm_matrix(httpx.post(f"{application.url}/inference/v1/generate", json=body, timeout=60))
        assert matrix.dtype == np.float32 and matrix.shape == (len(r), 1)
        by_vime.append(matrix[:, 0])
    check(by_vime)


def run(trainer):
    """To the end. Returns the log."""
    log = trainer.begin()
    while len(log["steps"]) < log["all_steps"]:
        log = trainer.step()
    return log


@pytest.fixture(scope="module")
def distilled(application, tmp_path_factory):
    """A trainer of the tiny task that has run to its end."""
    trainer = Trainer("tiny", tmp_path_factory.mktemp("distilled"))
    run(trainer)
    return trainer


def whole_divergence(student, teacher, prompts, samples):
    """KL(student, teacher) over the whole vocabulary, per token of `samples`: by Hugging Face alone."""
    rows = []
    for i, prompt in enumerate(prompts):
        ours, theirs = (
            hf_logprobs(model, [*before, *samples.response(i)])[len(before) - 1 : -1]
            for model, before in ((student, prompt.student), (teacher, prompt.teacher))
        )
        rows.append((ours.exp() * (ours - theirs)).sum(dim=-1))
    return float(torch.cat(rows).mean())


def test_a_student_comes_halfway_to_its_teacher_at_least(distilled, tiny_model):
    prompts = [prompt for prompt in distilled.task.held_out for _ in range(3)]
    before, after = (
        whole_divergence(
            model,
            tiny_model,
            prompts,
            sample(model, [prompt.student for prompt in prompts], tokens=32, candidates=0, end=None, seed=99),
        )
        for model in (distilled.task.student(), distilled.student.model)
    )
    assert after < before / 2
    found = [look["reverse_kl"] for look in distilled.log["evaluations"]]
    assert found[0] == pytest.approx(before, rel=0.2) and found[-1] == pytest.approx(after, rel=0.4)
    *guards, _of_time = checks(distilled.log, distilled.task)
    assert all(holds for _, holds in guards), guards


def test_a_student_learns_nothing_from_a_shuffled_teacher(distilled, tmp_path):
    control = Trainer("tiny", tmp_path, shuffled=True)
    found = checks(run(control), control.task)
    assert [holds for _, holds in found] == [True], found


def test_the_teacher_scores_while_the_student_writes_the_next_batch(distilled, tmp_path, monkeypatch):
    """With writing made slow: a trainer that waits for its scores first has nothing left to do meanwhile."""
    trainer, writes = Trainer("tiny", tmp_path), Trainer.rollout

    def slowly(self, now):
        time.sleep(0.3)
        return writes(self, now)

    trainer.begin()
    monkeypatch.setattr(Trainer, "rollout", slowly)
    for _ in range(3):
        log = trainer.step()
    assert shares(log["steps"])["overlap"] > 0.9


def test_a_trainer_that_was_killed_goes_on_from_its_checkpoint(distilled, tmp_path):
    killed = ray.remote(Trainer).remote("tiny", tmp_path)
    ray.get(killed.begin.remote())
    for _ in range(9):
        log = ray.get(killed.step.remote())
    ray.kill(killed)

    kept = torch.load(tmp_path / "checkpoint.pt")
    trainer = Trainer("tiny", tmp_path)
    assert trainer.begin() == kept["log"]
    assert trainer.log["steps"] == log["steps"][:8] and trainer.log["evaluations"] == log["evaluations"]
    state, fresh = trainer.student.state(), Trainer("tiny", tmp_path).student.state()
    assert not state["weights"].keys() ^ kept["student"]["weights"].keys()
    for name, weight in state["weights"].items():
        assert torch.equal(weight, kept["student"]["weights"][name])
        assert not torch.equal(weight, fresh["weights"][name])
    for i, moments in state["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, kept["student"]["optimizer"]["state"][i][name])
        assert moments["step"] == 8
    for name, tensor in kept["next_rollout"].items():
        assert torch.equal(tensor, getattr(trainer.next_rollout, name))
    assert all(holds for _, holds in checks(run(trainer), trainer.task)[:-1])

    again = Trainer("tiny", tmp_path)  # of a run that is through
    assert again.begin() == trainer.log and len(again.log["steps"]) == again.log["all_steps"]


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused_by_name(distilled, tmp_path, monkeypatch):
    shutil.copy(distilled.file, tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint.pt is of a run with shuffled False, and this is True; --fresh"):
        Trainer("tiny", tmp_path, shuffled=True).begin()
    other = dataclasses.replace(distilled.task, learning_rate=1)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="of a run with settings"):
        patch.setattr("examples.on_policy_distillation.task", lambda *_: other)
        Trainer("tiny", tmp_path).begin()
    whole = distilled.file.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        (tmp_path / "checkpoint.pt").write_bytes(damage)
        with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read \(.*\); --fresh begins anew"):
            Trainer("tiny", tmp_path).begin()


def test_a_hint_ends_of_responses_and_a_warm_up(distilled, tiny_model, tmp_path, monkeypatch):
    """Prompts that differ by side, responses that end early, a LoRA adapter, the teacher's own text first."""
    rng = random.Random(5)
    hint = [rng.randrange(2000) for _ in range(9)]
    prompts = [dataclasses.replace(p, teacher=hint[: rng.randint(1, 9)] + p.teacher) for p in distilled.task.held_out]
    each = [prompt for prompt in prompts for _ in range(3)]
    plain = dict(tokens=16, candidates=1024, seed=7)
    texts = sample(tiny_model, [prompt.student for prompt in each], end=None, **plain).responses
    end = int(texts[:, 3:9].flatten().mode().values)  # for some it comes in the middle, for most never
    task = dataclasses.replace(
        distilled.task,
        student=lambda: with_adapter(load(distilled.teacher.model)),
        train=prompts,
        held_out=prompts,
        end=end,
        tokens=16,
        candidates=1024,
        warm_steps=2,
        warm_learning_rate=1e-2,
        steps=2,
    )
    monkeypatch.setattr("examples.on_policy_distillation.task", lambda *_: task)
    trainer = Trainer("tiny", tmp_path, shuffled=True)
    trainer.begin()
    samples = sample(trainer.student.model, [prompt.student for prompt in each], end=end, **plain)
    assert 16 in samples.mask.sum(dim=1) and not samples.mask.all()
    due = whole_divergence(tiny_model, tiny_model, each, samples)  # the adapter changes nothing yet
    (found,) = trainer.log["evaluations"]
    assert found["reverse_kl"] == pytest.approx(due, rel=0.01) and due > 0.1
    assert found["tokens"] == pytest.approx(float(samples.mask.sum()) / len(each))

    log = run(trainer)
    assert [look["step"] for look in log["evaluations"]] == [0, 2, 4]
    assert log["evaluations"][1]["forward_kl"] < found["forward_kl"]  # the warm-up is not shuffled
    trainer.save_student(tmp_path / "student")
    assert (tmp_path / "student" / "adapter_config.json").exists()


def test_label_reads_are_a_reward_to_learn_from(client, distilled, tiny_path, tiny_model):
    prompts = [prompt.student for prompt in distilled.task.train[:8]]
    yes, no = 7, 11
    student = Student(load(str(tiny_path)), learning_rate=3e-3)
    rounds = label_reward.train(
        client, student, prompts, rubric=lambda response: [*response, 5], labels=(yes, no), tokens=4, end=None
    )
    samples, first = next(rounds)
    for i, reward in enumerate(first):
        last = hf_logprobs(tiny_model, [*samples.response(i), 5])[-1]
        assert float(reward) == pytest.approx(float((last[yes] - torch.logaddexp(last[yes], last[no])).exp()), abs=1e-4)
    means = [float(reward.mean()) for _, reward in itertools.islice(rounds, 30)]
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.1


def vllm_matrix(answer):
    return np.load(io.BytesIO(base64.b64decode(answer.json()["prompt_token_id_logprobs"])), allow_pickle=False)


READ = {"prompt_ids": [1, 2], "response_ids": [3, 4], "candidate_ids": [[5, 6], [7, 8]]}


@pytest.mark.parametrize(
    "change, field, said",
    [
        ({"prompt_ids": [1.5, 2]}, "prompt_ids[0]", "1.5"),
        ({"prompt_ids": [True, 2]}, "prompt_ids[0]", "True"),
        ({"prompt_ids": ["1", 2]}, "prompt_ids[0]", "'1'"),
        ({"prompt_ids": []}, "prompt_ids", "empty"),
        ({"prompt_ids": "text"}, "prompt_ids", "str"),
        ({"response_ids": [3, VOCABULARY]}, "response_ids[1]", "2048"),
        ({"candidate_ids": [[5, 6]]}, "candidate_ids", "1 rows"),
        ({"candidate_ids": [[5, -1, 6], [7, 8, 9]]}, "candidate_ids[0][1]", "-1"),
        ({"candidate_ids": [[5, 2**31], [7, 8]]}, "candidate_ids[0][1]", str(2**31)),
        ({"candidate_ids": [[5, -2], [7, 8]]}, "candidate_ids[0][1]", "-2"),
        ({"candidate_ids": [[5, VOCABULARY], [7, 8]]}, "candidate_ids[0][1]", "2048"),
        ({"candidate_ids": [[5.0, 6], [7, 8]]}, "candidate_ids[0][0]", "5.0"),
        ({"candidate_ids": [[True, 6], [7, 8]]}, "candidate_ids[0][0]", "True"),
        ({"prompt_ids": [-35, -11378, 3392, 1873042417, 126]}, "prompt_ids[0]", "-35"),
        ({"rows": [0, 0]}, "rows", "more than once"),
        ({"rows": [2]}, "rows[0]", "[0, 2)"),
        ({"temperature": 0.7}, "temperature", "not a field"),
        ({"top_k": 1025}, "top_k", "at most 1024"),
        ({"extras": ["kl"]}, "extras", "tail, entropy"),
        ({"teacher": "nobody"}, "teacher", "default"),
    ],
)
def test_bad_json_is_a_422_that_names_read_and_field_and_the_next_read_works(application, change, field, said):
    url = f"{application.url}/v1/matrix-reads"
    answer = httpx.post(url, json={"reads": [READ, READ | change]}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["read"], error["field"]) == (422, 422, 1, field)
    assert said in error["message"]
    assert httpx.post(url, json={"reads": [READ]}, timeout=60).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"reads": 5}',
        json.dumps({"reads": [READ], "sampling_params": {"prompt_logprobs": 20}}).encode(),
        json.dumps({"reads": [READ], "temperature": 0.7}).encode(),
        b"\xff\x00",
    ],
)
def test_a_body_that_is_no_request_is_a_422_too(application, body):
    answer = httpx.post(
        f"{application.url}/v1/matrix-reads", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 422 and answer.json()["error"]["message"]
    assert httpx.post(f"{application.url}/v1/matrix-reads", json={"reads": [READ]}, timeout=60).status_code == 200


def test_short_rows_are_minus_infinity_in_binary_and_null_in_json(application, http, tiny_model):
    ragged = {"prompt_ids": [1, 2], "response_ids": [3, 4], "candidate_ids": [[5, 6, 7], [8]]}
    table = hf_logprobs(tiny_model, [1, 2, 3, 4]).numpy()
    due = np.array([table[1, [5, 6, 7]], [table[2, 8], -np.inf, -np.inf]], np.float32)
    (binary,) = http.read_matrix([MatrixRead(**ragged)])
    np.testing.assert_allclose(binary.logprobs, due, atol=LIMIT, rtol=0)
    answer = httpx.post(f"{application.url}/v1/matrix-reads", json={"reads": [ragged]}, timeout=60).json()
    assert answer["results"][0]["logprobs"][1] == [pytest.approx(due[1, 0], abs=LIMIT), None, None]


def test_vllms_likeliest_tokens_of_a_prompt_are_answered_within_the_limits(application, tiny_model):
    def ask(length):
        ids = np.random.default_rng(13).integers(0, VOCABULARY, length).tolist()
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 20}}
        return ids, httpx.post(f"{application.url}/inference/v1/generate", json=body, timeout=60)

    ids, answer = ask(511)
    given = answer.json()["prompt_logprobs"]
    best = hf_logprobs(tiny_model, ids[:-1]).topk(20).values.numpy()
    assert answer.status_code == 200 and given[0] is None and len(given) == 511
    for row, due in zip(given[1:], best, strict=True):
        found = sorted((entry["logprob"] for entry in row.values() if entry["rank"] <= 20), reverse=True)
        np.testing.assert_allclose(found, due, atol=LIMIT, rtol=0)
    _, refused = ask(6000)
    assert refused.status_code == 400 and "6000+1 > 512" in refused.json()["error"]["message"]


def test_nothing_that_was_asked_stands_in_any_log(application, client, http):
    """Neither ids nor text nor names, answered or not, in the logs of Serve, Ray and vLLM."""
    ids = MatrixRead([1371, 1372, 1373, 1374], [1471, 1472, 1473], [[1571, 1572]] * 3)
    for ask in (client, http):
        ask.read_matrix([ids])
        ask.read_labels([LabelRead([1371, 1372, 1373], [1571, 1572])])
        for bad in (
            MatrixRead([1371, 987654321], [1]),
            MatrixRead([1371, 1372] * 400, [1]),
            MatrixRead([1371, 1372], [1], expect_version=9),
            MatrixRead([1371, 1372], [1], teacher="marker-xyzzy"),
        ):
            with pytest.raises(ScoringError):
                ask.read_matrix([ids, bad])
        with pytest.raises(DeadlineExceeded):
            ask.read_matrix([ids] * 300, timeout_s=0.02)
    read = READ | {"prompt_ids": [1371, 1372, 1373]}
    bodies = [{"reads": [read | {"marker-xyzzy": 1}]}, {"reads": [read], "marker-xyzzy": 1}, {"reads": "marker-xyzzy"}]
    for content in [*map(json.dumps, bodies), '{"reads": [marker-xyzzy', "\xffmarker-xyzzy"]:
        answer = httpx.post(f"{application.url}/v1/matrix-reads?marker-xyzzy=1", content=content, timeout=60)
        assert answer.status_code == 422
    for path, body in (
        ("/v1/completions", {"prompt": "w1 marker-xyzzy w2", "max_tokens": 1, "prompt_logprobs": 0}),
        (
            "/v1/completions",
            {"prompt": "w1 marker-xyzzy w2", "max_tokens": 1, "stop": "marker-xyzzy", "model": "xyzzy"},
        ),
        ("/generative_scoring", {"query": "marker-xyzzy", "items": ["xyzzy"], "label_token_ids": [1371, 987654321]}),
        ("/tokenize", {"prompt": "marker-xyzzy"}),
        ("/detokenize", {"tokens": [1371, 1372, 987654321]}),
        ("/inference/v1/generate", {"token_ids": [1371, 1372], "sampling_params": {"max_tokens": 1, "xyzzy": 5}}),
    ):
        assert httpx.post(application.url + path, json=body, timeout=60).status_code in (200, 400, 404)
    assert httpx.get(f"{application.url}/marker-xyzzy", timeout=60).status_code == 404
    asked = time.monotonic()
    told = re.compile(r"GET - 404 [0-9.]+ ms, asked by anybody")
    while not any(told.search(path.read_text(errors="replace")) for path in application.log_files()):
        assert time.monotonic() - asked < 20
        time.sleep(0.2)
    marks = re.compile(rb"xyzzy|987654321|1371\D{1,4}1372|1471\D{1,4}1472|1571\D{1,4}1572")
    found = {path: marks.search(path.read_bytes()) for path in application.log_files()}
    assert len(found) > 10
    assert not {path: hit.string[hit.start() - 200 : hit.end() + 100] for path, hit in found.items() if hit}


def test_a_12_way_fan_out_inside_one_serve_request_completes(application):
    """Nested calls of one Serve request share an internal request id, over which other routers have hung for ever."""

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class FanOut:
        async def __call__(self):
            handle = serve.get_deployment_handle("Teacher-default", APP_NAME)
            while len(membership.members(handle)) < 2:
                await asyncio.sleep(0.05)
            targets = membership.members(handle) * 6
            calls = [pinned(handle, target, "placement").remote() for target in targets]
            return targets, [(await call)["replica"] for call in calls]

    try:
        targets, reached = serve.run(FanOut.bind(), name="fan-out", route_prefix=None).remote().result(timeout_s=60)
        assert len(targets) == 12 and reached == list(targets)
    finally:
        serve.delete("fan-out")


def test_a_file_is_scored_from_the_command_line_as_hugging_face_does(application, tiny_model, tmp_path):
    reads = make_reads(40, seed=11)
    names = ("prompt_ids", "response_ids", "candidate_ids")
    rows = [{name: getattr(read, name).tolist() for name in names} for read in reads]
    rows.insert(7, {"prompt_ids": [1], "response_ids": [VOCABULARY]})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "scoring.cli", "score", "in.jsonl", "-o", "out.safetensors"]
    run = subprocess.run([*command, "--url", application.url], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "in.jsonl:8: response_ids[0]: is 2048" in run.stderr
    scores = score_file.load(tmp_path / "out.safetensors").scores
    answers = [score for i, score in enumerate(scores) if i != 7]
    for read, score in zip(reads, answers, strict=True):
        logprobs, own = expected(tiny_model, read)
        assert np.abs(score.logprobs - logprobs).max() <= LIMIT
        assert np.abs(score.response_logprobs - own).max() <= LIMIT
    mean = np.concatenate([expected(tiny_model, read)[1] for read in reads]).mean()
    assert float(re.search(r"mean logprob +(\S+)", run.stdout)[1]) == pytest.approx(mean, abs=1e-3)


def test_the_command_line_checks_the_service(application):
    command = [sys.executable, "-m", "scoring.cli", "check", application.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and re.search(r"one read +\d+ ms for 2 tokens, logprob -\d", run.stdout)
    assert re.search(r"one call +max_batch_reads 65,536, ", run.stdout)


def test_the_pipeline_of_the_page_on_bulk_scoring_scores_as_hugging_face_does(application, tiny_model, tmp_path):
    reads = make_reads(60, seed=12)
    names = ("prompt_ids", "response_ids", "candidate_ids")
    rows = [{"own": i, **{name: getattr(read, name).tolist() for name in names}} for i, read in enumerate(reads)]
    rows[9]["response_ids"] = [VOCABULARY] * len(rows[9]["response_ids"])
    rows[10]["prompt_ids"] = []
    (tmp_path / "in").mkdir()
    for number in range(3):
        pq.write_table(
            pa.Table.from_pylist(rows[number * 20 : number * 20 + 20]), tmp_path / "in" / f"{number}.parquet"
        )
    page = (Path(__file__).parent.parent / "docs" / "bulk.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = code.replace('"/data', f'"{tmp_path}').replace(
        "concurrency=4, batch_size=256", "concurrency=1, batch_size=16"
    )
    exec(code, {})
    found = {row["own"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert sorted(found) == list(range(60))
    assert "is 2048" in found[9]["error"] and "prompt_ids: is empty" in found[10]["error"]
    for i, read in enumerate(reads):
        if i in (9, 10):
            assert found[i]["response_logprobs"] is found[i]["entropy"] is None
            continue
        everything = hf_logprobs(tiny_model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()]).double().numpy()
        everything = everything[len(read.prompt_ids) - 1 : -1]
        logprobs, own = expected(tiny_model, read)
        assert np.abs(np.array(found[i]["logprobs"]) - logprobs).max() <= LIMIT
        assert np.abs(np.array(found[i]["response_logprobs"]) - own).max() <= LIMIT
        assert np.abs(found[i]["entropy"] + (np.exp(everything) * everything).sum(axis=1)).max() <= LIMIT
        best = -np.sort(-everything, axis=1)[:, :4]
        assert np.abs(np.array(found[i]["top_logprobs"]) - best).max() <= LIMIT
        assert found[i]["error"] is None and found[i]["ids"] == read.response_ids.tolist()
    assert len({row["checkpoint"] for row in found.values() if row["checkpoint"]}) == 1


def test_a_pipeline_of_label_reads_scores_as_hugging_face_does(application, tiny_model):
    prompts = [[5], [5, 6, 7], [], list(range(40))]
    rows = ray.data.from_items([{"own": i, "prompt_ids": prompt} for i, prompt in enumerate(prompts)])
    scored = bulk.score_labels(rows, label_ids=[7, 8, 9], concurrency=1)
    found = {row["own"]: row for row in scored.take_all()}
    assert sorted(found) == [0, 1, 2, 3]
    assert "prompt_ids: is empty" in found[2]["error"] and found[2]["logprobs"] is None
    for i in (0, 1, 3):
        np.testing.assert_allclose(
            found[i]["logprobs"], hf_logprobs(tiny_model, prompts[i])[-1, [7, 8, 9]], atol=LIMIT, rtol=0
        )
        assert found[i]["error"] is None


def test_weights_change_under_load_and_every_batch_is_of_one_version(
    client, http, actor, application, tiny_model, other_tiny_model, tiny_path, other_tiny_path
):
    reads = make_reads(24, seed=20)
    models = {tiny_path: tiny_model, other_tiny_path: other_tiny_model}
    truth = {path: [expected(model, read)[0] for read in reads] for path, model in models.items()}
    with ScoringClient() as another:
        load = VersionedLoad(
            {
                "client": by_client(client),
                "another": by_client(another),
                "http": by_client(http),
                "actor": by_actor(actor),
            },
            reads,
        )
        try:
            load.wait_for(3)
            served = {client.teachers()["default"]["weight_version"]: tiny_path}
            for path in (other_tiny_path, tiny_path, other_tiny_path):
                version = client.update_weights("default", path)
                assert version == max(served) + 1
                served[version] = path
                for way in load.ways.values():
                    assert {found for found, _ in way(reads)} == {version}
                load.wait_for(2)
        finally:
            load.stop()
    load.check({version: truth[path] for version, path in served.items()}, LIMIT)


def test_who_expects_a_version_gets_that_or_an_error(client, http, actor, other_tiny_path):
    version = client.update_weights("default", other_tiny_path)
    said = client.teachers()["default"]
    assert (said["weight_version"], said["weights"]) == (version, str(other_tiny_path))
    for read_matrix in (client.read_matrix, http.read_matrix, lambda reads: ray.get(actor.read_matrix.remote(reads))):
        with pytest.raises(VersionMismatch, match=f"expects weight version {version - 1}.*version {version}"):
            read_matrix([MatrixRead([1], [2]), MatrixRead([1], [2], expect_version=version - 1)])
        read_matrix([MatrixRead([1], [2], expect_version=version)])
    label, score = client.read_labels([LabelRead([1], [2])])[0], http.read_matrix([MatrixRead([1], [2])])[0]
    for meta in (label.meta, score.meta):
        assert (meta.weight_version, meta.checkpoint) == (version, said["checkpoint"])


def test_a_folder_whose_files_were_changed_is_another_version(client, tiny_path, other_tiny_path, tmp_path, tiny_model):
    folder = shutil.copytree(other_tiny_path, tmp_path / "latest")
    first = client.update_weights("default", folder)
    shutil.copy(tiny_path / "model.safetensors", folder / "model.safetensors")
    read = make_reads(1, seed=21)[0]
    assert client.read_matrix([read])[0].meta.weight_version == first  # nothing looks at the folder meanwhile
    assert client.update_weights("default", folder) == first + 1
    score = client.read_matrix([read])[0]
    np.testing.assert_allclose(score.logprobs, expected(tiny_model, read)[0], atol=LIMIT, rtol=0)
    assert score.meta.weight_version == first + 1
    assert score.meta.checkpoint == client.teachers()["default"]["checkpoint"]


def test_changes_at_once_take_turns(client, actor, tiny_path, other_tiny_path):
    first = client.teachers()["default"]["weight_version"]

    async def by_async_client():
        async with AsyncScoringClient() as other:
            return await other.update_weights("default", tiny_path)

    with ThreadPoolExecutor() as threads:
        changes = [threads.submit(client.update_weights, "default", path) for path in (other_tiny_path, tiny_path)]
        changes.append(threads.submit(asyncio.run, by_async_client()))
        refs = [actor.update_weights.remote("default", str(other_tiny_path))]
        versions = [change.result() for change in changes] + ray.get(refs)
    assert sorted(versions) == [first + 1, first + 2, first + 3, first + 4]
    assert client.read_matrix([MatrixRead([1], [2])])[0].meta.weight_version == first + 4


def test_weights_that_do_not_fit_leave_the_old_ones_on_all_replicas(client, tiny_path, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:2000].contiguous()

    bad = changed_checkpoint(tmp_path / "bad", tiny_path, change)
    before = client.teachers()["default"]
    said = r"missing: model.layers.1.mlp.up_proj.weight; of another shape or dtype: lm_head.weight \(F32 \[2000, 128\]"
    with pytest.raises(InvalidCheckpoint, match=said) as caught:
        client.update_weights("default", bad)
    assert len(caught.value.details["differences"]) == 2
    with pytest.raises(UnknownTeacher, match="is 'nobody'; the weights of default can be changed"):
        client.update_weights("nobody", tiny_path)
    assert client.teachers()["default"] == before
    infos = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("info").results(timeout_s=30)
    assert {info["weight_version"] for info in infos} == {before["weight_version"]}


def test_an_engine_that_is_killed_under_load_loses_no_read_and_is_replaced(
    client, http, application, tiny_path, other_tiny_path, other_tiny_model
):
    reads = make_reads(300, seed=7)
    version = client.update_weights("default", other_tiny_path)
    before = client.read_matrix(reads)
    places = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("placement").results(timeout_s=30)
    victim = next(pid for pid, name in places[0]["engine"].items() if "EngineCore" in name)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(c.read_matrix, reads, timeout_s=120) for c in (client, http)]
        time.sleep(0.3)
        assert not any(answer.done() for answer in waiting)
        psutil.Process(victim).kill()
        for answer in waiting:
            for one, other in zip(before, answer.result(), strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
    assert not psutil.pid_exists(places[0]["pid"]) or psutil.Process(places[0]["pid"]).status() == "zombie"
    application.wait_for_replicas(2)
    left = [pid for pid in places[0]["engine"] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not left
    # The new one has started with the weights that are served now, not with those of the configuration.
    infos = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("info").results(timeout_s=30)
    assert [info["weight_version"] for info in infos] == [version, version]
    handle = serve.get_deployment_handle("Teacher-default", APP_NAME)
    for replica in membership.members(handle):
        call = pinned(handle, replica, "read_matrix").remote(MatrixBatch.from_reads(reads[:5]), 60)
        scores, _ = call.result(timeout_s=60)
        for read, score in zip(reads, scores, strict=False):
            np.testing.assert_allclose(score.logprobs, expected(other_tiny_model, read)[0], atol=LIMIT, rtol=0)
    client.update_weights("default", tiny_path)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n")[0])
def test_an_example_of_the_readme_runs_as_it_stands(application, code):
    """In a process of its own: another process of the same user, which finds the cluster by itself."""
    assert "127.0.0.1:8000" in README
    run = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8000", application.url)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr


def test_another_user_gets_in_with_the_token_that_the_readme_speaks_of(application, tmp_path):
    token = (application.home / ".ray" / "auth_token").read_text()
    stranger = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_TOKEN": token}
    run = subprocess.run([sys.executable, "-c", blocks("python")[0]], env=stranger, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()


def test_the_requests_of_the_readme_are_answered(application):
    shown = "".join(blocks("sh")[1:3])  # in this service's own form, and in vLLM's
    commands = re.findall(r"curl -s http://127.0.0.1:8000(\S+)(?: -H '\S+ \S+' -d '(.*?)')?", shown, re.DOTALL)
    assert len(commands) == 5
    for path, body in commands:
        request = {"method": "POST", "json": json.loads(body)} if body else {"method": "GET"}
        assert httpx.request(url=application.url + path, timeout=60, **request).status_code == 200
