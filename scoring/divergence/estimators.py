"""Estimates of KL(pi, nu) from sampled tokens alone, with y ~ pi and r = nu(y) / pi(y): to look at, not to train on.

From Schulman, "Approximating KL divergence" (2020). All three raise in a backward pass, because what the gradient of
an estimate is in expectation is not the gradient of what it estimates (Tang and Munos 2025, arXiv 2506.09477):
`reverse_kl_advantages` with `policy_gradient_loss` have that one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scoring.divergence.layout import at_least_float32, constant, same_shape, same_temperature
from scoring.errors import InvalidLoss


def k1(student_logprobs: Tensor, teacher_logprobs: Any, *, temperature: float = 1.0, teacher_temperature: float = 1.0):
    """-log r: unbiased, often negative, of high variance. As a loss its expected gradient is zero, whatever nu is.

    Args:
        student_logprobs: [...], of the sampled tokens by the student that sampled them.
        teacher_logprobs: [...], of the same tokens: `response_logprobs` of the service's answer.
        temperature, teacher_temperature: at which either were taken.

    Returns:
        [...], in nats. Masked rows hold whatever they are given; `token_mean` leaves them out.

    Raises:
        InvalidLoss: shapes or temperatures differ; in a backward pass, always.
    """
    log_ratio = _log_ratio(student_logprobs, teacher_logprobs, temperature, teacher_temperature)
    return _measurement(-log_ratio, student_logprobs, "k1", "zero, whatever the teacher says")


def k2(student_logprobs: Tensor, teacher_logprobs: Any, *, temperature: float = 1.0, teacher_temperature: float = 1.0):
    """(log r)^2 / 2: never negative, of low variance, biased. Arguments, result and errors are those of `k1`."""
    log_ratio = _log_ratio(student_logprobs, teacher_logprobs, temperature, teacher_temperature)
    return _measurement(log_ratio**2 / 2, student_logprobs, "k2", "the reverse KL's only as long as the student that "
                        "learns is the one that sampled")  # fmt: skip


def k3(student_logprobs: Tensor, teacher_logprobs: Any, *, temperature: float = 1.0, teacher_temperature: float = 1.0):
    """r - 1 - log r: never negative, unbiased. Arguments, result and errors are those of `k1`."""
    log_ratio = _log_ratio(student_logprobs, teacher_logprobs, temperature, teacher_temperature)
    return _measurement(torch.expm1(log_ratio) - log_ratio, student_logprobs, "k3", "the forward KL's, not the reverse")


def _log_ratio(student_logprobs: Tensor, teacher_logprobs: Any, temperature: float, teacher_temperature: float):
    same_temperature(temperature, teacher_temperature)
    student = at_least_float32(student_logprobs.detach())
    teacher = constant(teacher_logprobs, student, student.dtype)
    same_shape("teacher_logprobs", teacher, student)
    return teacher - student


def _measurement(value: Tensor, student_logprobs: Tensor, name: str, gradient: str) -> Tensor:
    """`value`, which raises in a backward pass where `student_logprobs` would have been trained by it.

    It holds on to nothing of the student's graph, so that keeping it for a log costs no memory.
    """
    if not (student_logprobs.requires_grad and torch.is_grad_enabled()):
        return value
    return _Measurement.apply(torch.zeros((), device=value.device, requires_grad=True), value, name, gradient)


class _Measurement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Tensor, value: Tensor, name: str, gradient: str) -> Tensor:
        ctx.name, ctx.gradient = name, gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any):
        raise InvalidLoss(
            f"is a measurement: as a loss its expected gradient is {ctx.gradient}. Train on reverse_kl_advantages with "
            "policy_gradient_loss, or on a divergence of candidates",
            field=ctx.name,
        )
