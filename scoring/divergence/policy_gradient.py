"""Reverse KL by policy gradient: the teacher's opinion of each sampled token is that token's advantage.

The gradient of KL(pi, nu) is E over y ~ pi of grad log pi(y) (log pi(y) - log nu(y)): a policy gradient with the
advantage -(log pi - log nu) held fixed. It needs one log-probability per token of either side, the response's own,
which every matrix read has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scoring.divergence.layout import as_mask, at_least_float32, constant, same_shape, same_temperature
from scoring.errors import InvalidLoss


def reverse_kl_advantages(
    old_logprobs: Tensor,
    teacher_logprobs: Any,
    mask: Any = None,
    *,
    coef: float | Tensor = 1.0,
    discount: float = 0.0,
    clip: float | None = None,
    cu_seqlens: Any = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """A_t = -coef (log pi_old(y_t) - log nu(y_t)), held fixed, plus discount A_(t+1).

    Thinking Machines, "On-policy distillation" (2025), where the discount is 0: a token answers for itself alone. With
    1 it answers for all that follow, and the sum is over the sequence's KL.

    Args:
        old_logprobs: [...], of the sampled tokens by the student as it sampled them.
        teacher_logprobs: [...], of the same tokens: `response_logprobs` of the service's answer.
        mask: bool [...]; where it is False (tool tokens, padding) the advantage of the token itself is 0.
        coef: of the whole, a number or a tensor over [...].
        discount: in [0, 1]; it counts positions, masked ones too.
        clip: a token's |log pi_old - log nu| counts as no more than this. The token goes on learning: what is clipped
            is held fixed anyway.
        cu_seqlens: int [N + 1], where sequences begin, and the end; needed of a packed batch [sum n] with a discount.
        temperature: at which `old_logprobs` were taken: the rollout's, where they come from there.
        teacher_temperature: at which the teacher's were.

    Returns:
        [...], without gradients.

    Raises:
        InvalidLoss: an advantage is not finite; temperatures or shapes differ.
    """
    same_temperature(temperature, teacher_temperature)
    old = at_least_float32(old_logprobs.detach())
    teacher = constant(teacher_logprobs, old, old.dtype)
    same_shape("teacher_logprobs", teacher, old)
    mask = as_mask(mask, old)
    advantages = torch.where(mask, teacher - old, 0.0)
    finite = advantages.isfinite()
    if not bool(finite.all()):
        raise InvalidLoss(
            f"and old_logprobs give {int((~finite).sum())} tokens an advantage that is not finite; tokens without "
            "scores belong under the mask",
            field="teacher_logprobs",
        )
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return _discounted(coef * advantages, discount, cu_seqlens)


def multi_teacher_advantages(
    old_logprobs: Tensor,
    teacher_logprobs: Mapping[str, Any],
    teachers: Sequence[str],
    mask: Any = None,
    *,
    coef: float | Mapping[str, float] = 1.0,
    cu_seqlens: Any = None,
    **options: Any,
) -> Tensor:
    """`reverse_kl_advantages` where each sequence learns from a teacher of its own.

    Multi-teacher on-policy distillation: MiMo-V2-Flash technical report (2026), arXiv 2601.02780. (A batch of the
    service may mix teachers too: reads that name theirs come back as one answer, and `reverse_kl_advantages` does.)

    Args:
        old_logprobs: [B, T], or packed [sum n] with `cu_seqlens`.
        teacher_logprobs: per teacher [B, T] or [sum n]; where a sequence is another teacher's, anything.
        teachers: the name of each sequence's teacher, B of them.
        mask: bool, as in `reverse_kl_advantages`.
        coef: one for all, or one per teacher.
        cu_seqlens: int [B + 1], of a packed batch.
        options: further ones of `reverse_kl_advantages`.

    Raises:
        InvalidLoss: a sequence names a teacher that has no scores or no coefficient; as `reverse_kl_advantages`.
    """
    coefs = coef if isinstance(coef, Mapping) else dict.fromkeys(teacher_logprobs, coef)
    for i, name in enumerate(teachers):
        if name not in teacher_logprobs or name not in coefs:
            lacks = "scores" if name not in teacher_logprobs else "coefficient"
            raise InvalidLoss(f"is {name!r}, which has no {lacks}; there are {sorted(coefs)}", field=f"teachers[{i}]")
    names = sorted(set(teachers))
    index = torch.tensor([names.index(name) for name in teachers], dtype=torch.int64, device=old_logprobs.device)
    if cu_seqlens is None:
        if len(index) != len(old_logprobs):
            raise InvalidLoss(f"has {len(index)} names for {len(old_logprobs)} sequences", field="teachers")
        index = index.reshape(-1, *[1] * (old_logprobs.ndim - 1)).expand(old_logprobs.shape)
    else:
        lengths = _bounds(cu_seqlens, old_logprobs).diff()
        if len(lengths) != len(index):
            raise InvalidLoss(f"has {len(index)} names for {len(lengths)} sequences", field="teachers")
        index = index.repeat_interleave(lengths)
    routed = torch.full_like(at_least_float32(old_logprobs.detach()), torch.nan)
    weights = torch.zeros_like(routed)
    for i, name in enumerate(names):
        scores = constant(teacher_logprobs[name], routed, routed.dtype)
        same_shape(f"teacher_logprobs[{name!r}]", scores, routed)
        routed = torch.where(index == i, scores, routed)
        weights = torch.where(index == i, coefs[name], weights)
    return reverse_kl_advantages(old_logprobs, routed, mask, coef=weights, cu_seqlens=cu_seqlens, **options)


def policy_gradient_loss(
    student_logprobs: Tensor,
    old_logprobs: Any,
    advantages: Any,
    mask: Any = None,
    *,
    ratio_bounds: tuple[float, float] | None = None,
) -> Tensor:
    """-w_t A_t with the importance ratio w_t = pi(y_t) / pi_old(y_t); its gradient is -w_t A_t grad log pi(y_t).

    Importance sampling corrects for a student that has moved since it sampled. With `ratio_bounds` w_t is clipped to
    them and held fixed, so that a clipped token learns with a bounded weight where PPO's clipping would drop it:
    CISPO, MiniMax-M1 (2025), arXiv 2506.13585.

    Args:
        student_logprobs: [...], of the sampled tokens by the student as it is, with gradients.
        old_logprobs: [...], by the student as it sampled them.
        advantages: [...], held fixed.
        mask: bool [...]; where it is False the loss is 0 and has no gradient. It may leave out more than the mean's
            mask does: see `ratio_gate`.
        ratio_bounds: (lowest, highest) w_t; None clips nothing.

    Returns:
        [...], per token. Its value is no divergence; look at `k3`, or at the mean of `-advantages`.
    """
    student = at_least_float32(student_logprobs)
    old, advantages = (constant(x, student, student.dtype) for x in (old_logprobs, advantages))
    same_shape("old_logprobs", old, student)
    same_shape("advantages", advantages, student)
    mask = as_mask(mask, student)
    student, old = torch.where(mask, student, 0.0), torch.where(mask, old, 0.0)
    weight = (student.detach() - old).exp()
    if ratio_bounds is not None:
        weight = weight.clamp(*ratio_bounds)
    moves = student - student.detach()  # 0, with the gradient of log pi
    return torch.where(mask, -weight * torch.where(mask, advantages, 0.0) * (1 + moves), 0.0)


def ratio_gate(train_logprobs: Tensor, inference_logprobs: Any, low: float, high: float) -> Tensor:
    """bool [...]: True where the ratio pi_train(y) / pi_inference(y) of the same weights lies within [low, high].

    Trainer and inference engine compute the same weights differently; a token on which they disagree that much was
    not sampled from what is trained. It is left out, as in MiMo-V2-Flash's multi-teacher distillation (2026), arXiv
    2601.02780, and in IcePop (2025), arXiv 2510.18855: its loss is 0, but it stays in the count of the mean.

        loss = policy_gradient_loss(student_logprobs, old_logprobs, advantages, mask & ratio_gate(...))
        token_mean(loss, mask, count)

    Args:
        train_logprobs: [...], of the sampled tokens by the trainer.
        inference_logprobs: [...], by the engine that sampled them.
        low, high: bounds of the ratio, around 1.
    """
    if not 0 <= low <= 1 <= high:
        raise InvalidLoss(f"are {low} and {high}; they lie around 1: 0 <= low <= 1 <= high", field="low, high")
    train = at_least_float32(train_logprobs.detach())
    inference = constant(inference_logprobs, train, train.dtype)
    same_shape("inference_logprobs", inference, train)
    ratio = (train - inference).exp()
    return (low <= ratio) & (ratio <= high)


def _discounted(values: Tensor, discount: float, cu_seqlens: Any) -> Tensor:
    """Over the last dimension, within each sequence: y_t = x_t + discount y_(t+1)."""
    if not 0 <= discount <= 1:
        raise InvalidLoss(f"is {discount}; allowed is [0, 1]", field="discount")
    length = values.shape[-1]
    if discount == 0 or length == 0:
        return values
    if cu_seqlens is not None:
        bounds = _bounds(cu_seqlens, values)
        ends = bounds[1:].repeat_interleave(bounds.diff())  # int64 [sum n]: where each token's sequence ends
    elif values.ndim == 1:
        raise InvalidLoss("is needed: with a discount a packed batch must say where sequences end", field="cu_seqlens")
    else:
        ends = torch.tensor(length, device=values.device)
    at = torch.arange(length, device=values.device)
    # After the step with shift s, y_t holds 2 s terms: log2 of the length steps instead of one per token.
    for shift in itertools.takewhile(lambda s: s < length, (1 << i for i in itertools.count())):
        later = torch.nn.functional.pad(values[..., shift:], (0, shift))
        values = values + discount**shift * torch.where(at + shift < ends, later, 0.0)
    return values


def _bounds(cu_seqlens: Any, packed: Tensor) -> Tensor:
    """int64 [N + 1], checked against what is packed."""
    bounds = constant(cu_seqlens, packed, torch.int64)
    if packed.ndim != 1 or bounds.ndim != 1 or not len(bounds) or bool((bounds.diff() < 0).any()):
        raise InvalidLoss(
            f"has shape {list(bounds.shape)} over values of {list(packed.shape)}; a packed batch is one-dimensional, "
            "and its bounds rise",
            field="cu_seqlens",
        )
    if int(bounds[0]) != 0 or int(bounds[-1]) != len(packed):
        raise InvalidLoss(
            f"goes from {int(bounds[0])} to {int(bounds[-1])}; {len(packed)} tokens are packed", field="cu_seqlens"
        )
    return bounds
