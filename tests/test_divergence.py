"""Divergences and advantages, held against sums over every token of a tiny vocabulary: in numpy, in float64.

The right gradients are written down, not differentiated: with respect to the student's logits z, of a function D of
the probabilities of a partition of the vocabulary, dD/dz_v = pi(v) (D'(bucket of v) - sum over w of pi(w) D'(...)).
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scoring.divergence import (
    clip_values,
    forward_kl,
    jsd,
    k1,
    k2,
    k3,
    multi_teacher_advantages,
    packed,
    policy_gradient_loss,
    ratio_gate,
    reverse_kl,
    reverse_kl_advantages,
    student_scores,
    token_mean,
    top_k_tail,
    unbiased_reverse_kl,
)
from scoring.errors import InvalidLoss
from scoring.scores import MatrixScores
from tests.test_scores import Answer, matrix_scores

V = 6
LOSSES = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jsd 0.3": lambda *args, **options: jsd(*args, beta=0.3, **options),
}
TAILS = ("bucket", "renormalise", "none")


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def draw(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits float64 [rows, V] of a student and a teacher that differ."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1.5, (rows, V)), rng.normal(0, 1.5, (rows, V))


def slope(kind: str, p: np.ndarray, t: np.ndarray) -> tuple[float, np.ndarray]:
    """A divergence of probabilities (or of parts of them), student p and teacher t, and its derivative by p."""
    if kind == "forward":
        return float((t * np.log(t / p)).sum()), -t / p
    if kind == "reverse":
        return float((p * np.log(p / t)).sum()), np.log(p / t) + 1
    beta = float(kind.split()[1])
    m = beta * t + (1 - beta) * p
    value = beta * (t * np.log(t / m)).sum() + (1 - beta) * (p * np.log(p / m)).sum()
    return float(value), (1 - beta) * np.log(p / m)


def by_enumeration(kind: str, tail: str, z: np.ndarray, teacher: np.ndarray, ids: list[int]):
    """Value, and gradient by the student's logits [V], at one position."""
    pi, nu = softmax(z), softmax(teacher)
    inside = np.isin(np.arange(V), ids)
    by_token = np.zeros(V)  # the divergence's derivative by pi(v)
    if tail == "bucket":
        p, t = np.append(pi[ids], pi[~inside].sum()), np.append(nu[ids], nu[~inside].sum())
        if inside.all():
            p, t = p[:-1], t[:-1]
        value, by_part = slope(kind, p, t)
        by_token[ids] = by_part[: len(ids)]
        by_token[~inside] = by_part[-1]
    elif tail == "none":
        value, by_token[ids] = slope(kind, pi[ids], nu[ids])
    else:
        total = pi[ids].sum()
        value, by_part = slope(kind, pi[ids] / total, nu[ids] / nu[ids].sum())
        by_token[ids] = (by_part - (by_part * pi[ids] / total).sum()) / total
    return value, pi * (by_token - (pi * by_token).sum())


def sides(z: np.ndarray, teacher: np.ndarray, ids) -> tuple[torch.Tensor, list, dict]:
    """The student's logits as a leaf; arguments and tails of a divergence, the teacher's by numpy."""
    leaf = torch.tensor(z, requires_grad=True)
    ids = np.broadcast_to(np.asarray(ids), (len(z), np.shape(ids)[-1]))
    student = student_scores(leaf, ids)
    nu = softmax(teacher)
    scored = np.where(ids >= 0, np.log(np.take_along_axis(nu, np.maximum(ids, 0), 1)), -np.inf)
    inside = np.stack([np.isin(np.arange(V), row) for row in ids])
    with np.errstate(divide="ignore"):
        rest = np.log(np.where(inside, 0, nu).sum(axis=1))
    return leaf, [student.logprobs, scored, ids], {"student_tail": student.tail_logprob, "teacher_tail": rest}


SETS = ([0], [3, 1], [5, 0, 2, 4], list(range(V)), [4, 2, 0, 5, 3, 1])


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("ids", SETS, ids=str)
def test_values_and_gradients_are_those_of_the_sums_over_the_vocabulary(kind, tail, ids):
    z, teacher = draw(4)
    leaf, args, tails = sides(z, teacher, ids)
    values = LOSSES[kind](*args, tail=tail, **tails)
    due = [by_enumeration(kind, tail, *rows, ids) for rows in zip(z, teacher, strict=True)]
    np.testing.assert_allclose(values.detach(), [value for value, _ in due], atol=1e-12)
    values.sum().backward()
    np.testing.assert_allclose(leaf.grad, [gradient for _, gradient in due], atol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_with_the_whole_vocabulary_as_candidates_every_tail_gives_the_full_divergence(kind, tail):
    z, teacher = draw(5, seed=1)
    due = [slope(kind, softmax(s), softmax(t))[0] for s, t in zip(z, teacher, strict=True)]
    leaf, args, tails = sides(z, teacher, np.random.default_rng(0).permutation(V))
    values = LOSSES[kind](*args, tail=tail, **tails)
    np.testing.assert_allclose(values.detach(), due, atol=1e-12)
    values.sum().backward()
    assert torch.isfinite(leaf.grad).all()  # the tail is empty


@pytest.mark.parametrize("kind", LOSSES)
def test_a_bucket_is_a_lower_bound_that_rises_with_nested_candidate_sets(kind):
    z, teacher = draw(50, seed=2)
    order = np.argsort(-z, axis=1)  # the student's likeliest first
    values = []
    for k in range(1, V + 1):
        _, args, tails = sides(z, teacher, order[:, :k])
        values.append(LOSSES[kind](*args, **tails).detach().numpy())
    assert (np.diff(values, axis=0) >= -1e-12).all() and (values[0] >= -1e-12).all()
    full = [slope(kind, softmax(s), softmax(t))[0] for s, t in zip(z, teacher, strict=True)]
    np.testing.assert_allclose(values[-1], full, atol=1e-12)
    # And the sets did differ; a bucket of one token alone is that token.
    assert (np.diff(values, axis=0)[:-1].max(axis=1) > 1e-3).all()


def test_without_a_bucket_there_is_no_bound():
    z, teacher = draw(200, seed=3)
    _, args, _tails = sides(z, teacher, [0, 1])
    full = np.array([slope("reverse", softmax(s), softmax(t))[0] for s, t in zip(z, teacher, strict=True)])
    for tail in ("renormalise", "none"):
        values = reverse_kl(*args, tail=tail).detach().numpy()
        assert (values > full + 0.1).any() and (values < full - 0.1).any()
    assert (values < -0.1).any()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind, tail):
    z, _ = draw(5)
    leaf, args, tails = sides(z, z, [1, 4, 2])
    values = LOSSES[kind](*args, tail=tail, **tails)
    assert values.abs().max() < 1e-14
    values.sum().backward()
    if tail != "none" or kind.startswith("jsd"):  # "none" pushes mass out of the candidates, or into them
        assert leaf.grad.abs().max() < 1e-14


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_agree_with_differences(kind, tail):
    z, teacher = draw(3, seed=4)
    ids = np.array([[0, 2, -1], [5, -1, -1], [3, 4, 1]])

    def loss(logits):
        student = student_scores(logits, ids)
        tails = {"student_tail": student.tail_logprob, "teacher_tail": rest}
        return LOSSES[kind](student.logprobs, scored, ids, tail=tail, **tails)

    leaf, (_, scored, _), tails = sides(z, teacher, ids)
    rest = tails["teacher_tail"]
    assert torch.autograd.gradcheck(loss, (leaf,))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jsd_is_that_of_trl(beta):
    """The numbers are TRL's: `generalized_jsd_loss` of its GKD trainer, written down by tests/golden_jsd.py."""
    golden = json.loads((Path(__file__).parent / "golden_jsd.json").read_text())
    student = torch.tensor(golden["student_logits"], dtype=torch.float64, requires_grad=True)  # [B, T, V]
    teacher = torch.tensor(golden["teacher_logits"], dtype=torch.float64)
    mask = torch.tensor(golden["labels"]) != -100
    every = torch.arange(student.shape[-1])
    due = golden["losses"][str(beta)]
    ours = student_scores(student, every)
    values = jsd(ours.logprobs, teacher.log_softmax(dim=-1), every, beta=beta, tail="none", mask=mask)
    loss = token_mean(values, mask, int(mask.sum()))
    loss.backward()
    np.testing.assert_allclose(loss.item(), due["value"], rtol=1e-12)
    np.testing.assert_allclose(student.grad, due["gradient"], atol=1e-12)


def test_the_ends_of_jsd_are_the_two_kls_and_its_limits_there():
    z, teacher = draw(4)
    _, args, tails = sides(z, teacher, [0, 3])
    assert torch.equal(jsd(*args, beta=0, **tails), forward_kl(*args, **tails))
    assert torch.equal(jsd(*args, beta=1, **tails), reverse_kl(*args, **tails))
    near = 1e-6
    torch.testing.assert_close(jsd(*args, beta=near, **tails) / near, forward_kl(*args, **tails), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        jsd(*args, beta=1 - near, **tails) / near, reverse_kl(*args, **tails), atol=1e-4, rtol=1e-4
    )
    with pytest.raises(InvalidLoss, match=r"beta: is 1\.5"):
        jsd(*args, beta=1.5, **tails)


# The unbiased form


@pytest.mark.parametrize("moved", [False, True], ids=["on-policy", "moved since it sampled"])
@pytest.mark.parametrize("ids", SETS, ids=str)
def test_candidates_and_a_sampled_token_give_the_full_reverse_kl_in_expectation(ids, moved):
    (z, old_z), (teacher, _) = draw(2, seed=5), draw(2, seed=6)[::-1]
    z, teacher = z[:1], teacher[:1]
    pi, old, nu = softmax(z)[0], softmax(old_z)[0] if moved else softmax(z)[0], softmax(teacher)[0]
    value, gradient = 0.0, np.zeros(V)
    for y in range(V):  # every token that can be sampled, with its probability
        leaf, args, _ = sides(z, teacher, ids)
        sampled = unbiased_reverse_kl(
            *args,
            response_ids=np.array([y]),
            student_response_logprobs=student_scores(leaf, [0], [y]).response_logprobs,
            teacher_response_logprobs=np.log(nu[[y]]),
            old_logprobs=np.log(old[[y]]) if moved else None,
        )
        sampled.sum().backward()
        value += old[y] * sampled.item()
        gradient += old[y] * leaf.grad.numpy()[0]
    due, by_pi = slope("reverse", pi, nu)
    np.testing.assert_allclose(value, due, atol=1e-12)
    np.testing.assert_allclose(gradient, pi * (by_pi - (pi * by_pi).sum()), atol=1e-12)


def test_a_sampled_token_among_the_candidates_adds_nothing():
    z, teacher = draw(1)
    leaf, args, _ = sides(z, teacher, [2, 3])
    theirs = np.log(softmax(teacher)[0])
    values = [
        unbiased_reverse_kl(
            *args,
            response_ids=[y],
            student_response_logprobs=student_scores(leaf, [0], [y]).response_logprobs,
            teacher_response_logprobs=theirs[[y]],
        ).item()
        for y in range(V)
    ]
    inner = reverse_kl(*args, tail="none").item()
    own = np.log(softmax(z)[0])
    due = [inner if y in (2, 3) else inner + own[y] - theirs[y] for y in range(V)]
    np.testing.assert_allclose(values, due, atol=1e-12)


# What is padded, masked or empty


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_padded_columns_drop_out_and_an_all_padded_row_has_no_gradient(kind, tail):
    z, teacher = draw(3)
    ids = np.array([[4, 1, -1, -1], [-1, -1, -1, -1], [0, 2, 3, -1]])
    leaf, args, tails = sides(z, teacher, ids)
    values = LOSSES[kind](*args, tail=tail, **tails)
    values.sum().backward()
    for row, some in ((0, [4, 1]), (2, [0, 2, 3])):
        value, gradient = by_enumeration(kind, tail, z[row], teacher[row], some)
        np.testing.assert_allclose(values[row].item(), value, atol=1e-12)
        np.testing.assert_allclose(leaf.grad[row], gradient, atol=1e-12)
    assert values[1] == 0 and not leaf.grad[1].any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 0.0, 7.0])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_masked_rows_are_zero_and_have_no_gradient_whatever_stands_there(kind, tail, garbage):
    z, teacher = draw(3)
    leaf, (logprobs, scored, ids), tails = sides(z, teacher, [4, 1, 2])
    keep = np.array([True, False, True])
    scored[1], tails["teacher_tail"][1] = garbage, garbage
    ids = ids.copy()
    ids[1] = 3  # not even candidates that differ
    values = LOSSES[kind](logprobs, scored, ids, tail=tail, mask=keep, **tails)
    values.sum().backward()
    assert values[1] == 0 and not leaf.grad[1].any()
    for row in (0, 2):
        value, gradient = by_enumeration(kind, tail, z[row], teacher[row], [4, 1, 2])
        np.testing.assert_allclose(values[row].item(), value, atol=1e-12)
        np.testing.assert_allclose(leaf.grad[row], gradient, atol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", LOSSES)
def test_an_empty_tail_and_pads_give_the_callers_own_numbers_no_nan(kind, tail):
    """Log-probabilities and tails that come from elsewhere than `student_scores`, which would mask a NaN itself."""
    z, teacher = draw(2)
    ids = np.tile([3, 1, 0, 5, 2, 4, -1], (2, 1))
    own = torch.tensor(z).log_softmax(-1)[:, ids[0]]
    own[:, -1] = -torch.inf
    own.requires_grad_()
    rest = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    scored = torch.tensor(teacher).log_softmax(-1)[:, ids[0]]
    scored[:, -1] = -torch.inf
    values = LOSSES[kind](own, scored, ids, tail=tail, student_tail=rest, teacher_tail=rest.detach())
    due = [slope(kind, softmax(s), softmax(t))[0] for s, t in zip(z, teacher, strict=True)]
    np.testing.assert_allclose(values.detach(), due, atol=1e-12)
    values.sum().backward()
    assert torch.isfinite(own.grad).all() and (rest.grad is None or torch.isfinite(rest.grad).all())


def test_tokens_that_a_student_cannot_say_have_no_gradient():
    """Logits of -inf, as of a head's padding: once as a candidate, once as all that is left outside."""
    z, teacher = draw(1)
    z[0, 2] = -np.inf
    for ids in ([0, 2], [0, 1, 3, 4, 5]):
        leaf, args, tails = sides(z, teacher, ids)
        values = [loss(*args, **tails) for loss in LOSSES.values() if loss is not forward_kl or 2 in ids]
        own = {"student_response_logprobs": student_scores(leaf, [0], [4]).response_logprobs, "response_ids": [4]}
        values.append(unbiased_reverse_kl(*args, **own, teacher_response_logprobs=[-2.0]))
        torch.stack(values).sum().backward()
        assert torch.isfinite(torch.stack(values)).all()
        assert torch.isfinite(leaf.grad).all() and leaf.grad[0, 2] == 0 and leaf.grad[0, 0] != 0
    with pytest.raises(InvalidLoss, match="teacher: has probability where the student has none"):
        forward_kl(*args, **tails)


def test_what_one_side_alone_knows_counts_as_tail():
    """A student with a wider head: the teacher scores its last two ids as -inf (`unknown_candidates`)."""
    z, teacher = draw(1, seed=8)
    teacher[:, 4:] = -1e9
    pi, nu = softmax(z)[0], softmax(teacher)[0]
    leaf = torch.tensor(z, requires_grad=True)
    ids = np.array([[0, 5, 2]])
    student = student_scores(leaf, ids)
    scored = np.array([[np.log(nu[0]), -np.inf, np.log(nu[2])]])
    tails = {"student_tail": student.tail_logprob, "teacher_tail": np.log(nu[[1, 3]].sum(keepdims=True))}
    p, t = np.array([pi[0], pi[2], pi[[1, 3, 4, 5]].sum()]), np.array([nu[0], nu[2], nu[[1, 3]].sum()])
    for kind, loss in LOSSES.items():
        values = loss(student.logprobs, scored, ids, **tails)
        np.testing.assert_allclose(values.item(), slope(kind, p, t)[0], atol=1e-12)
    values.sum().backward()
    assert torch.isfinite(leaf.grad).all()


def test_the_students_tail_is_exact_where_one_minus_a_sum_is_not():
    logits = torch.tensor([[30.0, 0.0, 0.0, -2.0]])
    student = student_scores(logits, [0])
    due = np.log(np.exp(np.float64([0, 0, -2])).sum()) - np.log(np.exp(np.float64([30, 0, 0, -2])).sum())
    assert 1 - student.logprobs.exp().sum() == 0
    np.testing.assert_allclose(student.tail_logprob.numpy(), [due], rtol=1e-6)


def test_log_probabilities_in_bfloat16_are_taken_and_summed_in_float32():
    z, teacher = draw(64)
    student = torch.tensor(z).bfloat16().log_softmax(dim=-1)
    exact = torch.tensor(teacher).log_softmax(dim=-1)
    tails = {"student_tail": student[:, 3:].logsumexp(dim=-1), "teacher_tail": exact[:, 3:].logsumexp(dim=-1)}
    values = reverse_kl(student[:, :3], exact[:, :3], [0, 1, 2], **tails)
    assert values.dtype == torch.float32
    _, args, tails = sides(z, teacher, [0, 1, 2])
    torch.testing.assert_close(values, reverse_kl(*args, **tails).detach().float(), atol=0.05, rtol=0.05)


# What raises


def test_duplicate_candidates_raise():
    z, teacher = draw(2)
    _, args, tails = sides(z, teacher, [4, 1, 2])
    ids = np.array([[4, 1, 2], [0, 3, 0]])
    with pytest.raises(InvalidLoss, match=r"candidate_ids: has 0 twice in row 1"):
        reverse_kl(*args[:2], ids, **tails)
    with pytest.raises(InvalidLoss, match=r"candidate_ids: has 0 twice in row 1"):
        student_scores(torch.tensor(z), ids)
    reverse_kl(*args[:2], [4, 1, 2], **tails)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_bucket_needs_both_tails(loss):
    _, args, tails = sides(*draw(2), [4, 1])
    for name in tails:
        with pytest.raises(InvalidLoss, match=r'extras=\("tail",\)'):
            loss(*args, **{name: tails[name]})
    with pytest.raises(InvalidLoss, match="'top'"):
        loss(*args, tail="top", **tails)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_numbers_that_are_no_log_probabilities_of_these_rows_raise(side):
    z, teacher = draw(3)
    _, (student, scored, ids), tails = sides(z, teacher, [4, 1])
    given = {"student": student, "teacher": torch.tensor(scored)}
    for wrong, of_tail in ((given[side] + 3, 0.0), (given[side], 1.0), (given[side] - 3, 0.0)):
        changed = given | {side: wrong}
        tails_changed = tails | {f"{side}_tail": torch.as_tensor(tails[f"{side}_tail"]) + of_tail}
        with pytest.raises(InvalidLoss, match=f"{side}: gives row 0 probabilities that add up to .* with its tail"):
            reverse_kl(changed["student"], changed["teacher"], ids, **tails_changed)
    with pytest.raises(InvalidLoss, match=f"{side}: gives row .* add up to"):
        changed = given | {side: given[side] + 3}
        reverse_kl(changed["student"], changed["teacher"], ids, tail="none")
    with pytest.raises(InvalidLoss, match=f"{side}_logprobs: holds NaN"):
        changed = given | {side: given[side] * torch.nan}
        reverse_kl(changed["student"], changed["teacher"], ids, tail="none")


def test_logits_are_taken_where_both_sides_are_renormalised():
    z, teacher = draw(3)
    _, args, _ = sides(z, teacher, [4, 1])
    values = reverse_kl(torch.tensor(z[:, [4, 1]]), teacher[:, [4, 1]], [4, 1], tail="renormalise")
    torch.testing.assert_close(values, reverse_kl(*args, tail="renormalise").detach())


def test_an_infinite_divergence_raises():
    z, teacher = draw(2)
    _, (student, scored, ids), tails = sides(z, teacher, [4, 1])
    everything = np.full(2, -np.inf)
    scored = scored - np.log(np.exp(scored).sum(axis=1, keepdims=True))
    with pytest.raises(InvalidLoss, match="student: has probability where the teacher has none"):
        reverse_kl(student, scored, ids, student_tail=tails["student_tail"], teacher_tail=everything)
    forward_kl(student, scored, ids, student_tail=tails["student_tail"], teacher_tail=everything)


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd 0.3", "advantages", "several", "k1", "k2", "k3"])
def test_a_temperature_other_than_one_raises_unless_both_sides_have_it(name):
    z, teacher = draw(2)
    _, args, tails = sides(z, teacher, [4, 1])
    own = args[0][:, 0].detach()
    calls = {
        **{kind: lambda loss=loss, **t: loss(*args, **tails, **t) for kind, loss in LOSSES.items()},
        "advantages": lambda **t: reverse_kl_advantages(own, own, **t),
        "several": lambda **t: multi_teacher_advantages(own, {"a": own}, ["a", "a"], **t),
        **{k.__name__: lambda k=k, **t: k(own, own, **t) for k in (k1, k2, k3)},
    }
    for given in ({"temperature": 0.7}, {"teacher_temperature": 0.7}, {"temperature": 2, "teacher_temperature": 0.7}):
        with pytest.raises(InvalidLoss, match=r"temperature: is .* scores of this service are at 1"):
            calls[name](**given)
    calls[name](temperature=0.7, teacher_temperature=0.7)
    calls[name]()


def test_at_another_temperature_the_students_side_is_that_of_its_divided_logits():
    z, _ = draw(3)
    hot, plain = student_scores(torch.tensor(z), [4, 1], temperature=2.0), student_scores(torch.tensor(z / 2), [4, 1])
    torch.testing.assert_close(hot.logprobs, plain.logprobs)
    torch.testing.assert_close(hot.tail_logprob, plain.tail_logprob)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"candidate_ids": [4, V]}, r"candidate_ids: goes from 4 to 6; allowed is \[-1, 6\)"),
        ({"candidate_ids": [4, -2]}, "candidate_ids: goes from -2 to 4"),
        ({"candidate_ids": [[4, 1]]}, r"candidate_ids: has shape \[1, 2\]"),
        ({"candidate_ids": [4], "response_ids": [0, -100]}, r"response_ids: goes from -100 to 0; allowed is \[0, 6\)"),
        ({"candidate_ids": [4], "response_ids": [0]}, r"response_ids: has shape \[1\]"),
    ],
)
def test_ids_that_do_not_fit_the_logits_raise(wrong, message):
    with pytest.raises(InvalidLoss, match=message):
        student_scores(torch.tensor(draw(2)[0]), **wrong)


def test_a_students_masked_rows_may_hold_any_ids():
    """Labels of -100, and candidates that only fill up."""
    leaf = torch.tensor(draw(2)[0], requires_grad=True)
    ids, labels, mask = [[4, 1], [0, 0]], [3, -100], [True, False]
    student = student_scores(leaf, ids, labels, mask=mask)
    own = torch.tensor(draw(2)[0]).log_softmax(-1)
    torch.testing.assert_close(student.logprobs[0].detach(), own[0, [4, 1]])
    torch.testing.assert_close(student.response_logprobs.detach(), torch.stack([own[0, 3], torch.tensor(0.0)]))
    student.response_logprobs.sum().backward()
    assert leaf.grad[0].any() and not leaf.grad[1].any()


def test_shapes_that_differ_raise():
    _, (student, scored, ids), tails = sides(*draw(3), [4, 1])
    with pytest.raises(InvalidLoss, match=r"teacher_logprobs: has shape \[2, 2\]; the student's is \[3, 2\]"):
        reverse_kl(student, scored[1:], ids, **tails)
    with pytest.raises(InvalidLoss, match=r"mask: has shape \[2\]; the student's is \[3\]"):
        reverse_kl(student, scored, ids, mask=[True, False], **tails)
    with pytest.raises(InvalidLoss, match=r"teacher_tail: has shape \[2\]"):
        reverse_kl(student, scored, ids, **tails | {"teacher_tail": tails["teacher_tail"][1:]})


# Sampled tokens alone


@pytest.mark.parametrize("moved", [False, True], ids=["on-policy", "moved since it sampled"])
def test_the_policy_gradient_is_in_expectation_that_of_the_reverse_kl(moved):
    (z, old_z), (teacher, _) = draw(2, seed=9)
    old_z = old_z if moved else z
    pi, old, nu = softmax(z), softmax(old_z), softmax(teacher)
    gradient = np.zeros(V)
    for y in range(V):
        leaf = torch.tensor(z, requires_grad=True)
        own, sampled_with, theirs = leaf.log_softmax(-1)[[y]], torch.tensor(np.log(old[[y]])), np.log(nu[[y]])
        advantages = reverse_kl_advantages(sampled_with, theirs, coef=0.5)
        policy_gradient_loss(own, sampled_with, advantages).sum().backward()
        gradient += old[y] * leaf.grad.numpy()
    against = np.log(old / nu)  # what the advantage holds fixed
    np.testing.assert_allclose(gradient, 0.5 * pi * (against - (pi * against).sum()), atol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 1.0, 0.5])
def test_discounts_credit_a_token_with_what_follows(discount):
    """Every response of three tokens over three ids, from a student and a teacher with a distribution per prefix.

    With discount 1 the expected gradient is that of the KL of whole responses; with 0 each position's KL counts at the
    prefixes as they come. By differences of the exact sum, with the weight of each prefix moving or held fixed.
    """
    ids, length = 3, 3
    prefixes = [p for n in range(length) for p in itertools.product(range(ids), repeat=n)]
    rng = np.random.default_rng(10)
    z, teacher = rng.normal(size=(2, len(prefixes), ids))
    responses = list(itertools.product(range(ids), repeat=length))
    at = np.array([[prefixes.index(r[:t]) for t in range(length)] for r in responses])

    def objective(moved: np.ndarray) -> float:
        """Sum over positions of E over responses of discounted KLs, as the advantage sees it."""
        now, then, nu = (softmax(x) for x in (moved, z, teacher))
        total = 0.0
        for r, rows in zip(responses, at, strict=True):
            a = [np.log(then[rows[t], r[t]] / nu[rows[t], r[t]]) for t in range(length)]
            weight = np.prod([then[rows[t], r[t]] for t in range(length)])
            for t in range(length):
                credit = sum(discount ** (s - t) * a[s] for s in range(t, length))
                total += weight * now[rows[t], r[t]] / then[rows[t], r[t]] * credit
        return total

    due = np.zeros_like(z)
    for i, j in np.ndindex(*z.shape):
        step = np.zeros_like(z)
        step[i, j] = 1e-6
        due[i, j] = (objective(z + step) - objective(z - step)) / 2e-6
    leaf = torch.tensor(z, requires_grad=True)
    rows, tokens = torch.tensor(at), torch.tensor(responses)
    own = leaf.log_softmax(-1)[rows, tokens]  # [27, 3]
    theirs = torch.tensor(teacher).log_softmax(-1)[rows, tokens]
    advantages = reverse_kl_advantages(own, theirs, discount=discount)
    loss = policy_gradient_loss(own, own.detach(), advantages)
    (loss.sum(dim=1) * own.detach().sum(dim=1).exp()).sum().backward()
    np.testing.assert_allclose(leaf.grad, due, atol=1e-8)
    if discount == 1:  # then it is the gradient of the KL between the distributions of whole responses

        def whole(moved):
            now, nu = (softmax(x)[at, np.array(responses)].prod(axis=1) for x in (moved, teacher))
            return (now * np.log(now / nu)).sum()

        i, j, step = 4, 1, np.zeros_like(z)
        step[i, j] = 1e-6
        assert abs((whole(z + step) - whole(z - step)) / 2e-6 - due[i, j]) < 1e-8


def test_a_packed_batch_discounts_as_its_sequences_alone():
    lengths, rng = [3, 1, 7, 0, 5], np.random.default_rng(0)
    old, theirs = (torch.tensor(rng.normal(size=sum(lengths))) for _ in range(2))
    mask = torch.tensor(rng.random(sum(lengths)) < 0.7)
    bounds = np.cumsum([0, *lengths])
    together = reverse_kl_advantages(old, theirs, mask, discount=0.9, cu_seqlens=bounds)
    for a, b in itertools.pairwise(bounds.tolist()):
        credit, due = 0.0, []
        for x in reversed(((theirs - old) * mask)[a:b].tolist()):
            credit = x + 0.9 * credit
            due.append(credit)
        np.testing.assert_allclose(together[a:b], due[::-1], atol=1e-12)
    with pytest.raises(InvalidLoss, match="cu_seqlens: is needed"):
        reverse_kl_advantages(old, theirs, discount=0.9)
    with pytest.raises(InvalidLoss, match="cu_seqlens: goes from 0 to 15; 16 tokens are packed"):
        reverse_kl_advantages(old, theirs, discount=0.9, cu_seqlens=[0, 15])


def test_advantages_are_clipped_in_value_and_their_tokens_go_on_learning():
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    theirs = np.array([-9.0, -1.5, -0.1])
    advantages = reverse_kl_advantages(old, theirs, coef=2.0, clip=2.0)
    np.testing.assert_allclose(advantages, [-4.0, -1.0, 1.8], rtol=1e-6)
    assert not advantages.requires_grad
    policy_gradient_loss(old, old.detach(), advantages).sum().backward()
    np.testing.assert_allclose(old.grad, [4.0, 1.0, -1.8], rtol=1e-6)


def test_ratios_are_clipped_in_value_and_their_tokens_go_on_learning():
    student = torch.tensor([0.0, -3.0, -1.0], requires_grad=True)
    old = np.array([-1.0, -1.0, -1.2])
    loss = policy_gradient_loss(student, old, [1.0, 1.0, -1.0], ratio_bounds=(0.5, 2.0))
    np.testing.assert_allclose(loss.detach(), [-2.0, -0.5, np.exp(0.2)], rtol=1e-6)
    loss.sum().backward()
    np.testing.assert_allclose(student.grad, [-2.0, -0.5, np.exp(0.2)], rtol=1e-6)


def test_clipped_values_keep_their_gradient():
    x = torch.tensor([-5.0, 0.5, 9.0], requires_grad=True)
    clipped = clip_values(x, 2.0)
    assert clipped.tolist() == [-2.0, 0.5, 2.0]
    (3 * clipped).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_masked_tokens_have_no_advantage_and_no_loss_whatever_stands_there():
    own = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    for garbage in (torch.nan, torch.inf, -torch.inf):
        theirs = torch.tensor([[-1.5, garbage, -2.5]])
        advantages = reverse_kl_advantages(own, theirs, mask, discount=1.0)
        np.testing.assert_allclose(advantages, [[0.0, 0.5, 0.5]])  # the second answers for the third
        own.grad = None
        policy_gradient_loss(own, torch.tensor([[-1.0, garbage, -3.0]]), advantages, mask).sum().backward()
        np.testing.assert_allclose(own.grad, [[0.0, 0.0, -0.5]])
        with pytest.raises(InvalidLoss, match="teacher_logprobs: and old_logprobs give 1 tokens"):
            reverse_kl_advantages(own, theirs)


def test_each_sequence_learns_from_its_own_teacher():
    rng = np.random.default_rng(0)
    old = torch.tensor(rng.normal(size=(3, 4)))
    math, code = rng.normal(size=(2, 3, 4))
    math[1], code[[0, 2]] = np.nan, np.nan  # what a teacher was not asked is anything
    teachers, coef = ["math", "code", "math"], {"math": 1.0, "code": 0.25}
    advantages = multi_teacher_advantages(old, {"math": math, "code": code}, teachers, coef=coef, discount=0.5)
    for row, (scores, weight) in enumerate([(math, 1.0), (code, 0.25), (math, 1.0)]):
        alone = reverse_kl_advantages(old[row : row + 1], scores[row : row + 1], coef=weight, discount=0.5)
        torch.testing.assert_close(advantages[row : row + 1], alone)
    flat = {"math": math.reshape(-1), "code": code.reshape(-1)}
    bounds = [0, 4, 8, 12]
    one = multi_teacher_advantages(old.reshape(-1), flat, teachers, coef=coef, discount=0.5, cu_seqlens=bounds)
    torch.testing.assert_close(one.reshape(3, 4), advantages)
    with pytest.raises(InvalidLoss, match=r"teachers\[1\]: is 'prose', which has no scores"):
        multi_teacher_advantages(old, {"math": math}, ["math", "prose", "math"])
    with pytest.raises(InvalidLoss, match="teachers: has 2 names for 3 sequences"):
        multi_teacher_advantages(old, {"math": math}, ["math", "math"])


def test_a_gate_shuts_out_tokens_whose_engines_disagree_and_they_still_count():
    train = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    inference = np.array([-1.0, -1.7, -0.3, -9.0])  # ratios 1, 2.01, 0.497, 2981
    gate = ratio_gate(train, inference, 0.5, 2.0)
    assert gate.tolist() == [True, False, False, False] and gate.dtype == torch.bool
    assert ratio_gate(train, inference, 0.4, 2.1).tolist() == [True, True, True, False]
    mask = torch.ones(4, dtype=torch.bool)
    loss = token_mean(policy_gradient_loss(train, inference, np.ones(4), mask & gate), mask, 4)
    loss.backward()
    assert train.grad.tolist() == [-0.25, 0.0, 0.0, 0.0]
    with pytest.raises(InvalidLoss, match="they lie around 1"):
        ratio_gate(train, inference, 1.5, 2.0)


# Measurements


def test_estimates_are_those_of_the_reverse_kl():
    z, teacher = (x[0] for x in draw(1))
    pi, nu = softmax(z), softmax(teacher)
    own, theirs = torch.tensor(np.log(pi)), np.log(nu)
    due = slope("reverse", pi, nu)[0]
    np.testing.assert_allclose((pi * k1(own, theirs).numpy()).sum(), due)
    np.testing.assert_allclose((pi * k3(own, theirs).numpy()).sum(), due)
    np.testing.assert_allclose((pi * k2(own, theirs).numpy()).sum(), (pi * np.log(pi / nu) ** 2).sum() / 2)
    assert (k2(own, theirs) >= 0).all() and (k3(own, theirs) >= 0).all() and (k1(own, theirs) < 0).any()


@pytest.mark.parametrize(("estimate", "gradient"), [(k1, "zero"), (k2, "only as long as"), (k3, "forward KL")])
def test_an_estimate_as_a_loss_raises(estimate, gradient):
    leaf = torch.tensor(draw(1)[0], requires_grad=True)
    own = leaf.log_softmax(-1)[:, 2]
    measured = estimate(own, [-1.0])
    other = reverse_kl_advantages(own, [-1.0])
    loss = policy_gradient_loss(own, own.detach(), other).sum()
    with pytest.raises(InvalidLoss, match=f"{estimate.__name__}: is a measurement.*{gradient}"):
        (loss + 0.1 * measured.mean()).backward()
    assert not estimate(own.detach(), [-1.0]).requires_grad
    with torch.no_grad():
        assert not estimate(own, [-1.0]).requires_grad


def test_the_expected_gradient_of_k1_is_zero_which_is_why():
    leaf = torch.tensor(draw(1)[0][0], requires_grad=True)
    own = leaf.log_softmax(-1)
    (own.exp().detach() * (own - torch.tensor(draw(1)[1][0]).log_softmax(-1))).sum().backward()
    assert leaf.grad.abs().max() < 1e-15


# Batches


def lengths_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 9, 8).tolist()


@pytest.mark.parametrize("loss", ["candidates", "sampled"])
def test_one_micro_batch_of_eight_and_eight_of_one_give_the_same_gradient(loss):
    """Ragged responses, padded to their longest: once all together, once one by one, once packed."""
    lengths, width = lengths_of(0), 9
    rng = np.random.default_rng(1)
    inputs, weights = torch.tensor(rng.normal(size=(8, width, 5))), rng.normal(size=(5, V))
    teacher = torch.tensor(rng.normal(size=(8, width, V))).log_softmax(-1)
    ids = torch.tensor(np.argsort(rng.normal(size=(8, width, V)), axis=-1)[..., :3])
    tokens = torch.tensor(rng.integers(0, V, (8, width)))
    old = torch.tensor(rng.normal(size=(8, width))) * 0.1 - 1.5
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    count = sum(lengths)
    rest = teacher.scatter(-1, ids, -torch.inf).logsumexp(-1)

    def step(leaf, pick, mask):
        logits = inputs[pick] @ leaf
        if loss == "candidates":
            student = student_scores(logits, ids[pick])
            scored = teacher[pick].gather(-1, ids[pick])
            tails = {"student_tail": student.tail_logprob, "teacher_tail": rest[pick]}
            return token_mean(reverse_kl(student.logprobs, scored, ids[pick], mask=mask, **tails), mask, count)
        own = student_scores(logits, [0], tokens[pick]).response_logprobs
        theirs = teacher[pick].gather(-1, tokens[pick][..., None]).squeeze(-1)
        advantages = reverse_kl_advantages(old[pick], theirs, mask)
        return token_mean(policy_gradient_loss(own, old[pick], advantages, mask), mask, count)

    gradients, values = [], []
    for pieces in ([slice(0, 8)], [slice(i, i + 1) for i in range(8)], [mask]):
        leaf = torch.tensor(weights, requires_grad=True)
        value = 0.0
        for piece in pieces:
            packed_rows = piece is mask
            share = step(leaf, piece, torch.ones(count, dtype=torch.bool) if packed_rows else mask[piece])
            share.backward()  # adds to what the micro-batches before have left
            value += share.item()
        gradients.append(leaf.grad)
        values.append(value)
    for other, value in zip(gradients[1:], values[1:], strict=True):
        torch.testing.assert_close(other, gradients[0], atol=1e-14, rtol=1e-12)
        assert abs(value - values[0]) < 1e-14
    assert gradients[0].abs().max() > 1e-3


def test_the_mean_is_over_tokens_of_the_whole_step():
    values = torch.tensor([[1.0, 2.0, torch.nan], [3.0, torch.nan, torch.nan]])
    mask = [[True, True, False], [True, False, False]]
    assert token_mean(values, mask, 12) == 0.5
    for count in (0, -1, float("nan")):
        with pytest.raises(InvalidLoss, match="count: is"):
            token_mean(values, mask, count)
    with pytest.raises(InvalidLoss, match=r"mask: has shape \[3\]"):
        token_mean(values, [True, True, False], 12)


def service_answer(lengths: list[int], seed: int = 0) -> tuple[MatrixScores, list[np.ndarray], list[np.ndarray]]:
    """An answer in the service's own form, with a tail; the ids and the distributions [n, V] it is of."""
    rng = np.random.default_rng(seed)
    model, ids, full = [], [], []
    for n in lengths:
        logprobs = np.log(softmax(rng.normal(size=(n, V))))
        some = np.argsort(rng.normal(size=(n, V)), axis=1)[:, :3]
        block = np.take_along_axis(logprobs, some, 1)
        rest = np.exp(logprobs)
        np.put_along_axis(rest, some, 0, axis=1)
        own = logprobs[:, :1]
        tail = np.log(rest.sum(axis=1)).astype(np.float32)
        model.append(Answer(np.hstack([own, block]).astype(np.float32), list(range(n)), 0, n + 1, tail=tail))
        ids.append(some)
        full.append(logprobs)
    return matrix_scores(model), ids, full


def test_the_services_answers_are_taken_one_by_one_padded_and_packed():
    lengths = [3, 1, 4]
    scores, ids, _ = service_answer(lengths)
    logits = [torch.tensor(np.random.default_rng(i).normal(size=(n, V))) for i, n in enumerate(lengths)]

    def loss(logits, ids, answer, mask=None):
        student = student_scores(logits, ids, mask=mask)
        tails = {"student_tail": student.tail_logprob, "teacher_tail": answer["tail_logprob"]}
        return reverse_kl(student.logprobs, answer["logprobs"], ids, mask=mask, **tails)

    alone = [loss(z, i, answer) for z, i, answer in zip(logits, ids, scores.torch(), strict=True)]
    as_arrays = [loss(z, i, vars(score)) for z, i, score in zip(logits, ids, scores, strict=True)]
    assert [x.tolist() for x in as_arrays] == [x.tolist() for x in alone]
    together = packed(scores)
    assert together["cu_seqlens"].tolist() == [0, 3, 4, 8]
    torch.testing.assert_close(loss(torch.cat(logits), np.concatenate(ids), together), torch.cat(alone))
    wide = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True)
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(i) for i in ids], batch_first=True)
    for fill in (0.0, float("-inf"), float("nan")):
        padded = scores.to_padded(width=4, fill=fill)
        values = loss(wide, rows, padded.torch(), padded.mask)
        torch.testing.assert_close(values[torch.tensor(padded.mask)], torch.cat(alone))
        assert not values[~torch.tensor(padded.mask)].any()


def test_answers_that_differ_in_what_was_asked_are_not_packed():
    scores, _, _ = service_answer([2, 2])
    one, other = scores.torch()
    del other["tail_logprob"]
    with pytest.raises(InvalidLoss, match="differ in K, top_k or extras"):
        packed([one, other])
    with pytest.raises(InvalidLoss, match="empty"):
        packed([])
    assert packed([one])["rows"].tolist() == [0, 1]


def test_scoring_is_imported_without_torch():
    script = "import sys, scoring, scoring.http_client; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("kind", LOSSES)
def test_a_student_learns_its_teacher_from_any_loss(kind):
    """Two hundred steps on all tails' worth of candidates bring the distributions together, not only the losses."""
    z, teacher = draw(4, seed=11)
    leaf = torch.tensor(z, requires_grad=True)
    optimizer = torch.optim.Adam([leaf], lr=0.1)
    for _ in range(200):
        ids = leaf.detach().topk(3).indices.numpy()  # the student's own likeliest, as they are now
        student = student_scores(leaf, ids)
        _, (_, scored, _), tails = sides(z, teacher, ids)
        values = LOSSES[kind](student.logprobs, scored, ids, **tails | {"student_tail": student.tail_logprob})
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
    left = [slope("reverse", *map(softmax, rows))[0] for rows in zip(leaf.detach().numpy(), teacher, strict=True)]
    before = [slope("reverse", *map(softmax, rows))[0] for rows in zip(z, teacher, strict=True)]
    assert sum(left) < 0.5 * sum(before)


def test_what_a_teachers_own_likeliest_tokens_leave_to_all_others():
    logits = np.random.default_rng(4).normal(0, 3, (3, 5, 50))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ordered = -np.sort(-p, axis=-1)
    top = np.log(ordered[..., :8]).astype(np.float32)
    top.flags.writeable = False  # as an answer's views are
    for given in (top, torch.from_numpy(top.copy())):
        tail = top_k_tail(given)
        assert tail.dtype == torch.float64 and tail.shape == (3, 5)
        np.testing.assert_allclose(tail.exp(), ordered[..., 8:].sum(-1), rtol=0, atol=1e-6)
    sure = torch.tensor([[0.0, -30.0], [1e-7, -20.0]])  # rounding may leave less than nothing
    np.testing.assert_allclose(top_k_tail(sure), [np.log(1e-6)] * 2)
    divergence = forward_kl(sure, sure, [3, 4], student_tail=top_k_tail(sure), teacher_tail=top_k_tail(sure))
    np.testing.assert_allclose(divergence, [0, 0], atol=1e-9)
