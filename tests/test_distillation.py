"""What the distillation example is made of, beside Hugging Face and by hand; whole runs of it are in
test_application.py."""

import json

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from examples.evaluation import PAIRS, checks, distinct_2, standard_error
from examples.losses import MICRO_BATCH, forward_kl_loss, micro_batches, reverse_kl_loss
from examples.student import Samples, Student, sample
from examples.tasks import Prompt, Task, load, with_adapter
from examples.times import shares, steady
from tests.oracle import hf_logprobs

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 2000, n).tolist() for n in (3, 9, 1, 6, 2, 8, 5, 4, 7, 3)]
ASKED = {"tokens": 12, "candidates": 6, "seed": 5}


@pytest.fixture(scope="module")
def ending(tiny_model):
    """An id that ends some responses early, and the responses."""
    free = sample(tiny_model, PROMPTS, end=None, **ASKED)
    end = int(free.responses[2, 4])
    return end, sample(tiny_model, PROMPTS, end=end, **ASKED)


def test_samples_are_a_models_own_and_end_where_it_ends_them(tiny_model, ending):
    end, samples = ending
    assert samples.responses.shape == samples.mask.shape == (10, 12)
    lengths = samples.mask.sum(dim=1)
    assert lengths.max() == 12 and lengths[2] <= 5
    for i, prompt in enumerate(PROMPTS):
        response = samples.response(i)
        assert len(response) == lengths[i] and end not in response[:-1]
        assert response[-1] == end or len(response) == 12
        table = hf_logprobs(tiny_model, prompt + response)[len(prompt) - 1 : -1]
        own = table.gather(1, torch.tensor(response)[:, None])[:, 0]
        np.testing.assert_allclose(samples.logprobs[i][samples.mask[i]], own, atol=1e-4)
        np.testing.assert_array_equal(samples.candidates[i][samples.mask[i]], table.topk(6).indices)


def test_samples_are_drawn_from_the_whole_distribution(tiny_model):
    """Of 4,000 first tokens, the likeliest by their shares."""
    samples = sample(tiny_model, [PROMPTS[0]] * 4000, tokens=1, candidates=1, end=None, seed=1)
    shares = torch.bincount(samples.responses[:, 0], minlength=2048) / 4000
    due = hf_logprobs(tiny_model, PROMPTS[0])[-1].exp()
    assert ((shares - due).abs() < 5 * (due * (1 - due) / 4000).sqrt() + 1e-3).all()


def test_a_checkpoints_own_sampling_habits_change_nothing(tiny_path, ending):
    model = load(str(tiny_path))
    habits = dict(top_k=1, min_p=0.9, no_repeat_ngram_size=1, repetition_penalty=3.0, eos_token_id=7, typical_p=0.2)
    model.generation_config = GenerationConfig(**habits, suppress_tokens=list(range(1000)))
    for student in (model, with_adapter(model)):
        same = sample(student, PROMPTS, end=ending[0], **ASKED)
        assert torch.equal(same.responses, ending[1].responses)
        assert model.generation_config.min_p == 0.9


def test_a_students_logits_are_those_of_each_sequence_by_itself(tiny_path, tiny_model, ending):
    _, samples = ending
    logits = Student(load(str(tiny_path)), learning_rate=1e-3).logits(PROMPTS, samples)
    due = [
        hf_logprobs(tiny_model, prompt + samples.response(i))[len(prompt) - 1 : -1] for i, prompt in enumerate(PROMPTS)
    ]
    np.testing.assert_allclose(logits.log_softmax(dim=-1).detach(), torch.cat(due), atol=1e-4)


def test_micro_batches_give_what_one_batch_gives(tiny_path, tiny_model, ending):
    """Values and gradients, with scores that differ by token: one that is a row off is seen."""
    _, samples = ending
    assert len(PROMPTS) > MICRO_BATCH
    student = Student(load(str(tiny_path)), learning_rate=1e-3)
    rows = int(samples.mask.sum())
    candidates = samples.packed().candidates
    noise = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0))
    theirs = (student.logits(PROMPTS, samples).detach() + noise).log_softmax(dim=-1)
    best = theirs.topk(6)
    scores = {
        "logprobs": theirs.gather(1, candidates),
        "response_logprobs": theirs.gather(1, samples.packed().responses[:, None])[:, 0],
        "top_ids": best.indices,
        "top_logprobs": best.values,
    }
    for loss in (reverse_kl_loss, forward_kl_loss):
        student.model.zero_grad()
        whole = loss(student.logits(PROMPTS, samples), samples.packed(), scores)
        whole.sum().backward()
        due = {name: p.grad.clone() for name, p in student.model.named_parameters()}
        student.model.zero_grad()
        parts = list(micro_batches(loss, student, PROMPTS, samples, scores))
        assert len(parts) == 2
        torch.cat(parts).sum().backward()
        np.testing.assert_allclose(torch.cat(parts).detach(), whole.detach(), atol=1e-4)
        for name, p in student.model.named_parameters():
            assert torch.allclose(p.grad, due[name], rtol=1e-3, atol=1e-4), name


def test_a_student_is_restored_bit_for_bit(tiny_path, ending, tmp_path):
    _, samples = ending

    def student():
        return Student(with_adapter(load(str(tiny_path))), learning_rate=1e-2)

    def learn(one):
        one.logits(PROMPTS, samples).square().mean().backward()
        return one.step()

    first = student()
    assert learn(first) > 0
    torch.save(first.state(), tmp_path / "state.pt")
    second = student()
    second.restore(torch.load(tmp_path / "state.pt"))
    for one in (first, second):
        learn(one)
    assert all("lora" in name for name in first.state()["weights"])
    for name, weight in first.state()["weights"].items():
        assert torch.equal(weight, second.state()["weights"][name]), name


def test_a_gradient_that_is_no_number_moves_nothing(tiny_path):
    student = Student(load(str(tiny_path)), learning_rate=1e-2)
    before = {name: weight.clone() for name, weight in student.state()["weights"].items()}
    for weight in student.model.parameters():
        weight.grad = torch.full_like(weight, torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        student.step()
    assert all(torch.equal(weight, before[name]) for name, weight in student.state()["weights"].items())


def test_the_standard_error_is_the_spread_of_means_over_prompts():
    """Beside 2,000 draws of 16 prompts each, whose three responses have much in common."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(2000):
        lengths = rng.integers(5, 30, (16, 3))
        sums = lengths * (rng.normal(1, 0.4, (16, 1)) + rng.normal(0, 0.1, (16, 3)))
        means.append(sums.sum() / lengths.sum())
        errors.append(standard_error(torch.tensor(sums).flatten(), torch.tensor(lengths).flatten(), 3))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_distinct_2_of_what_repeats_itself_and_of_what_is_brief():
    various = [list(range(i, i + 30)) for i in range(0, 900, 30)]
    assert distinct_2(various) == 1
    assert distinct_2([[1, 2] * 15] * 30) == 2 / PAIRS
    assert distinct_2([[1, 2, 3]]) == 2 / PAIRS  # whatever there is little of
    assert distinct_2([]) == 0


def step_log(score, sample, wait, learn):
    return {"score": score, "sample": sample, "wait": wait, "learn": learn}


def test_shares_of_the_time_by_hand():
    steps = [
        step_log((0, 2), (0, 1), (1, 2), (2, 4)),  # half of the scoring while sampling
        step_log((0, 1), (0, 3), (3, 3), (3, 6)),  # all of it
    ]
    assert shares(steps) == pytest.approx(
        {"sample": 4 / 10, "score": 3 / 10, "wait": 1 / 10, "learn": 5 / 10, "overlap": 2 / 3}
    )


def test_steps_whose_teacher_was_away_are_left_out_of_the_overlap():
    usual, away = step_log((0, 1), (0, 2), (2, 2), (2, 3)), step_log((0, 30), (0, 2), (2, 30), (30, 31))
    assert steady([usual, away, usual]) == [usual, usual]
    assert steady([usual, usual]) == [usual, usual]


def test_each_check_can_fail():
    task = Task(load, load, [Prompt([1], [1])], [Prompt([1], [1])], end=None, steps=1, learning_rate=1, due=0.2)
    start = {"step": 0, "reverse_kl": 1.0, "reverse_kl_error": 0.03, "forward_kl": 1.0, "distinct_2": 0.8}
    good = {"reverse_kl": 0.7, "reverse_kl_error": 0.04, "forward_kl": 1.04, "distinct_2": 0.7}

    def found(shuffled=False, sample=(0, 2), **end):
        steps = [step_log((0, 2), sample, (2, 2), (2, 4))]
        log = {"shuffled": shuffled, "warm_steps": 0, "steps": steps, "evaluations": [start, {**good, **end}]}
        return [holds for _, holds in checks(log, task)]

    assert found() == [True] * 4
    assert found(reverse_kl=0.81) == [False, True, True, True]
    assert found(forward_kl=1.06) == [True, False, True, True]
    assert found(distinct_2=0.63) == [True, True, False, True]
    assert found(sample=(1.1, 2)) == [True, True, True, False]
    assert found(shuffled=True, reverse_kl=0.95) == [True]
    assert found(shuffled=True, reverse_kl=0.85) == [False]


def test_settings_tell_runs_apart():
    def task(**other):
        settings = dict(train=[Prompt([1], [1])], held_out=[Prompt([2], [2])], end=None, steps=1, learning_rate=1)
        return Task(load, load, **{**settings, **other})

    fingerprints = {
        task(**other).fingerprint
        for other in ({}, {"learning_rate": 2}, {"train": [Prompt([1], [3])]}, {"end": 0}, {"tokens": 33})
    }
    assert len(fingerprints) == 5 and task().fingerprint in fingerprints
    assert json.dumps(task().fingerprint)


def test_samples_are_cut_and_packed_alike():
    samples = Samples(
        responses=torch.tensor([[1, 2], [3, 0]]),
        mask=torch.tensor([[True, True], [True, False]]),
        candidates=torch.tensor([[[1], [2]], [[3], [0]]]),
        logprobs=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
    )
    assert samples.packed().responses.tolist() == [1, 2, 3] and samples.packed().logprobs.tolist() == [-1, -2, -3]
    assert samples[1:].response(0) == [3]
