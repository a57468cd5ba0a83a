"""Divergences between student pi and teacher nu on a set S of candidates per position.

What the full divergence has outside S is treated in one of three ways (`tail`):

- "bucket": everything outside S is one more token, of the exact probability of both tails (the read's
  `extras=("tail",)`, and `student_scores`). **A lower bound** of the full divergence, which rises with S and is the
  full one where S is the vocabulary: merging tokens never raises an f-divergence (log-sum inequality; Cover and
  Thomas, Elements of Information Theory, 2nd edition, theorem 2.7.1).
- "renormalise": both are renormalised over S. **No bound**: the divergence of two other distributions, blind to how
  much either has outside S. It takes logits as well.
- "none": the terms of S alone. **No bound**: it can be negative, and a KL's gradient then pushes mass out of S or
  into it whatever the teacher says.

Unused columns (id -1) drop out. So does a candidate that one side gives no probability at all, as the teacher does to
ids beyond its vocabulary (`unknown_candidates="-inf"`); in a bucket, what the other side gives it counts as tail.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from scoring.divergence.layout import as_mask, at_least_float32, constant, same_shape, same_temperature
from scoring.divergence.student import candidate_rows, check_unique
from scoring.errors import InvalidLoss

Tail = Literal["bucket", "renormalise", "none"]

_LEAST_TAIL = 1e-6
"""What is left of one below this is rounding."""

_MASS_OFF = 0.01
"""By how much probabilities may fail to add up to one; bfloat16 log-probabilities are off by a few thousandths."""


def forward_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Any,
    candidate_ids: Any,
    *,
    tail: Tail = "bucket",
    student_tail: Tensor | None = None,
    teacher_tail: Any = None,
    mask: Any = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """KL(nu, pi) = sum over v of nu(v) (log nu(v) - log pi(v)), per position, in nats (Kullback and Leibler 1951).

    The loss of distillation on a teacher's likeliest tokens (Hinton et al. 2015, arXiv 1503.02531): with
    `candidate_ids=top_ids` and `teacher_logprobs=top_logprobs` of a read with `top_k`.

    Args:
        student_logprobs: [..., K], with gradients; of the whole vocabulary's softmax, as `student_scores` gives.
        teacher_logprobs: [..., K], as the service gives them.
        candidate_ids: int [..., K] or [K], the ids that were scored; -1 marks unused columns.
        tail: what to do about everything else; see above.
        student_tail, teacher_tail: [...], the logarithm of the probability outside the candidates; needed by "bucket",
            and not looked at otherwise.
        mask: bool [...]; where it is False the divergence is 0 and has no gradient. None is all True.
        temperature, teacher_temperature: at which the log-probabilities of either side were taken.

    Returns:
        [...], float32 at least.

    Raises:
        InvalidLoss: a candidate is twice in a row; the numbers are no log-probabilities, or not of one distribution
            (with their tail they do not add up to one); the divergence is infinite; temperatures or shapes differ.
    """
    student, teacher = _two_sides(
        student_logprobs, teacher_logprobs, candidate_ids, tail, student_tail, teacher_tail, mask,
        temperature, teacher_temperature,
    )  # fmt: skip
    return _kl(teacher, student, "teacher", "student")


def reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Any,
    candidate_ids: Any,
    *,
    tail: Tail = "bucket",
    student_tail: Tensor | None = None,
    teacher_tail: Any = None,
    mask: Any = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """KL(pi, nu) = sum over v of pi(v) (log pi(v) - log nu(v)), per position, in nats.

    The loss of on-policy distillation on the student's own likeliest tokens (Gu et al. 2023, arXiv 2306.08543; Agarwal
    et al. 2023, arXiv 2306.13649). Arguments, result and errors are those of `forward_kl`.
    """
    student, teacher = _two_sides(
        student_logprobs, teacher_logprobs, candidate_ids, tail, student_tail, teacher_tail, mask,
        temperature, teacher_temperature,
    )  # fmt: skip
    return _kl(student, teacher, "student", "teacher")


def jsd(
    student_logprobs: Tensor,
    teacher_logprobs: Any,
    candidate_ids: Any,
    *,
    beta: float = 0.5,
    tail: Tail = "bucket",
    student_tail: Tensor | None = None,
    teacher_tail: Any = None,
    mask: Any = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """The generalised Jensen-Shannon divergence, per position, in nats: beta KL(nu, m) + (1 - beta) KL(pi, m) with the
    mixture m = beta nu + (1 - beta) pi (Agarwal et al. 2023, arXiv 2306.13649, equation 1).

    As in TRL, `beta=0` is `forward_kl` and `beta=1` is `reverse_kl`: the limits of the divergence over beta, and over
    1 - beta, which itself is 0 at both ends. Other arguments, result and errors are those of `forward_kl`; between the
    ends it is always finite.
    """
    if not 0 <= beta <= 1:
        raise InvalidLoss(f"is {beta}; allowed is [0, 1]: 0 is the forward KL, 1 the reverse", field="beta")
    student, teacher = _two_sides(
        student_logprobs, teacher_logprobs, candidate_ids, tail, student_tail, teacher_tail, mask,
        temperature, teacher_temperature,
    )  # fmt: skip
    if beta == 0:
        return _kl(teacher, student, "teacher", "student")
    if beta == 1:
        return _kl(student, teacher, "student", "teacher")
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture, "teacher", "mixture") + (1 - beta) * _kl(student, mixture, "student", "mixture")


def unbiased_reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Any,
    candidate_ids: Any,
    *,
    response_ids: Any,
    student_response_logprobs: Tensor,
    teacher_response_logprobs: Any,
    old_logprobs: Any = None,
    mask: Any = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """KL(pi, nu) in expectation over the sampled token y, in value and in gradient, from candidates and y alone:

        sum over v in S of pi(v) r(v)  +  [y not in S] w r(y),    r = log pi - log nu,    w = pi(y) / pi_old(y)

    The candidates' part is summed, the rest sampled (Liu et al. 2019, "Rao-Blackwellized stochastic gradients for
    discrete distributions", arXiv 1810.04777). Its gradient is that of pi(v) and w with r held fixed: what r adds,
    the sum over all tokens of the gradient of pi, is zero, and left out has no variance.

    **S must not depend on y**: the student's or the teacher's likeliest tokens, not those with the sampled one added.
    One token's value may be negative; the mean is what converges.

    Args:
        student_logprobs, teacher_logprobs, candidate_ids, mask, temperature, teacher_temperature: as in `forward_kl`.
        response_ids: int [...], the sampled tokens.
        student_response_logprobs: [...], theirs by the student, with gradients.
        teacher_response_logprobs: [...], theirs by the teacher.
        old_logprobs: [...], theirs by the student as it sampled them; None where that is the student as it is.

    Returns:
        [...].

    Raises:
        InvalidLoss: as in `forward_kl`.
    """
    student, teacher = _two_sides(
        student_logprobs, teacher_logprobs, candidate_ids, "none", None, None, mask, temperature, teacher_temperature,
        unite=False,
    )  # fmt: skip
    own = at_least_float32(student_response_logprobs)
    same_shape("student_response_logprobs", own, _rows(student))
    ids = candidate_rows(candidate_ids, student)
    mask = as_mask(mask, own)
    drawn = constant(response_ids, own, torch.int64)
    same_shape("response_ids", drawn, own)
    theirs = constant(teacher_response_logprobs, own, own.dtype)
    same_shape("teacher_response_logprobs", theirs, own)
    old = own.detach() if old_logprobs is None else constant(old_logprobs, own, own.dtype)
    same_shape("old_logprobs", old, own)
    outside = mask & (ids != drawn[..., None]).all(dim=-1)
    own, theirs, old = (torch.where(outside, x, 0.0) for x in (own, theirs, old))
    ratio = own.detach() - theirs
    if not bool(torch.isfinite(ratio).all()):
        raise InvalidLoss("gives a sampled token no probability: the divergence is infinite there", field="teacher")
    sampled = torch.where(outside, (own - old).exp() * ratio, 0.0)
    return _kl(student, teacher, "student", "teacher", fixed=True) + sampled


def top_k_tail(top_logprobs: Any) -> Tensor:
    """The logarithm of the probability outside a teacher's own `top_k` likeliest tokens: what they leave of one.

    That is the `teacher_tail` of a divergence on `top_ids`; a read's `extras=("tail",)` is about its candidates. Being
    a difference it is as exact as float32 numbers add up, to about 1e-6 of probability, and no smaller tail is given.

    Args:
        top_logprobs: [..., top_k], as the service gives them.

    Returns:
        [...], float64.
    """
    if isinstance(top_logprobs, np.ndarray):
        top_logprobs = torch.from_numpy(np.array(top_logprobs))  # a copy: views of an answer cannot be written to
    inside = torch.as_tensor(top_logprobs).detach().double().exp().sum(dim=-1)
    return (1 - inside).clamp(min=_LEAST_TAIL).log()


def _two_sides(
    student_logprobs: Tensor,
    teacher_logprobs: Any,
    candidate_ids: Any,
    tail: Tail,
    student_tail: Tensor | None,
    teacher_tail: Any,
    mask: Any,
    temperature: float,
    teacher_temperature: float,
    unite: bool = True,
) -> tuple[Tensor, Tensor]:
    """Both sides' log-probabilities [..., K], and in a bucket [..., K + 1]; -inf where there is nothing to compare. It
    is put there by `torch.where`, which stops whatever gradient an infinity makes of itself further on.

    `unite` drops a candidate that only one side knows; otherwise it stays, with -inf on the other side.
    """
    same_temperature(temperature, teacher_temperature)
    student = at_least_float32(student_logprobs)
    teacher = constant(teacher_logprobs, student, student.dtype)
    same_shape("teacher_logprobs", teacher, student)
    ids = candidate_rows(candidate_ids, student)
    if ids.shape != student.shape:
        raise InvalidLoss(f"has {ids.shape[-1]} columns; the student's has {student.shape[-1]}", field="candidate_ids")
    mask = as_mask(mask, _rows(student))
    used = (ids >= 0) & mask[..., None]
    mask = used.any(dim=-1)  # where there are no candidates there is nothing to compare
    check_unique(ids, used)
    student, teacher = torch.where(used, student, -torch.inf), torch.where(used, teacher, -torch.inf)
    if bool((student.detach().isnan() | teacher.isnan()).any()):
        raise InvalidLoss("holds NaN", field="student_logprobs" if student.isnan().any() else "teacher_logprobs")
    known = (student > -torch.inf) & (teacher > -torch.inf)
    if tail == "bucket":
        if student_tail is None or teacher_tail is None:
            raise InvalidLoss(
                'needs student_tail and teacher_tail: ask the read for extras=("tail",), and take the student\'s from '
                'student_scores; or choose "renormalise" or "none", which are no bounds',
                field="tail",
            )
        rest = []
        for name, logprobs, given in (
            ("student_tail", student, at_least_float32(student_tail)),
            ("teacher_tail", teacher, constant(teacher_tail, student, student.dtype)),
        ):
            same_shape(name, given, mask)
            given = torch.where(mask, given, -torch.inf)
            outside = torch.cat([torch.where(known, -torch.inf, logprobs), given[..., None]], dim=-1)
            rest.append(_log_sum(outside))
        student, teacher = (
            torch.cat([torch.where(known, side, -torch.inf), more[..., None]], dim=-1)
            for side, more in zip((student, teacher), rest, strict=True)
        )
        for name, side in (("student", student), ("teacher", teacher)):
            _check_mass(name, _log_sum(side.detach()), mask, exactly=True)
        return student, teacher
    if tail == "renormalise":
        student, teacher = (torch.where(known, side, -torch.inf) for side in (student, teacher))
        return _normalised(student), _normalised(teacher)
    if tail == "none":
        for name, side in (("student", student), ("teacher", teacher)):
            _check_mass(name, _log_sum(side.detach()), mask, exactly=False)
        if unite:
            student, teacher = (torch.where(known, side, -torch.inf) for side in (student, teacher))
        return student, teacher
    raise InvalidLoss(f'is {tail!r}; allowed are "bucket", "renormalise" and "none"', field="tail")


def _rows(logprobs: Tensor) -> Tensor:
    """Something of the shape [...] of [..., K]."""
    return logprobs.new_empty(logprobs.shape[:-1])


def _kl(p: Tensor, q: Tensor, name_p: str, name_q: str, fixed: bool = False) -> Tensor:
    """[...]: sum of p (log p - log q) over [..., M]; 0 log 0 is 0. `fixed`: no gradient through the logarithms."""
    counts = p > -torch.inf
    if bool((counts & (q == -torch.inf)).any()):
        raise InvalidLoss(
            f"has probability where the {name_q} has none: the divergence is infinite there", field=name_p
        )
    p, q = torch.where(counts, p, 0.0), torch.where(counts, q, 0.0)  # where a product with 0 would be NaN
    ratio = (p - q).detach() if fixed else p - q
    return torch.where(counts, p.exp() * ratio, 0.0).sum(dim=-1)


def _log_sum(logprobs: Tensor) -> Tensor:
    """[...]: log of the sum over [..., M]; of nothing it is -inf, and has no gradient (`logsumexp` has NaN)."""
    some = (logprobs > -torch.inf).any(dim=-1)
    return torch.where(some, torch.where(some[..., None], logprobs, 0.0).logsumexp(dim=-1), -torch.inf)


def _normalised(logprobs: Tensor) -> Tensor:
    there = logprobs > -torch.inf
    return torch.where(there, logprobs - torch.where(there, _log_sum(logprobs)[..., None], 0.0), -torch.inf)


def _check_mass(name: str, log_mass: Tensor, mask: Tensor, exactly: bool) -> None:
    """Raises where probabilities add up to anything but one (or to more than one)."""
    mass = log_mass.exp()
    wrong = mask & ((mass > 1 + _MASS_OFF) | (exactly & (mass < 1 - _MASS_OFF)))
    if bool(wrong.any()):
        row = int(wrong.reshape(-1).nonzero()[0])
        raise InvalidLoss(
            f"gives row {row} probabilities that add up to {float(mass.reshape(-1)[row]):.4g}"
            + (" with its tail" if exactly else "")
            + "; log-probabilities are wanted, of the whole vocabulary, on the same rows as the candidates (rows that "
            "are only there to fill up belong under the mask)",
            field=name,
        )
