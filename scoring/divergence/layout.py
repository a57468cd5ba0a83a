"""How tokens lie in tensors: packing, masks, the mean over them; and the checks that all divergences share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoring.errors import InvalidLoss
from scoring.scores import MatrixScores


def packed(scores: MatrixScores | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The answers end to end, as a packed batch has its tokens.

    Args:
        scores: the answers, or what their `torch()` gives.

    Returns:
        By the names of a `MatrixScore`: [sum n, K], [sum n], ...; and `cu_seqlens`, int64 [N + 1], where each answer
        begins, and the end.

    Raises:
        ScoringError: a read failed.
        InvalidLoss: there are none, or they differ in K, `top_k` or `extras`.
    """
    answers = scores.torch() if isinstance(scores, MatrixScores) else list(scores)
    if not answers:
        raise InvalidLoss("are empty: there is nothing to pack", field="scores")
    kinds = {tuple((name, part.shape[1:]) for name, part in sorted(answer.items())) for answer in answers}
    if len(kinds) > 1:
        raise InvalidLoss(
            "differ in K, top_k or extras; answers that are packed together agree in them", field="scores"
        )
    counts = [len(answer["response_logprobs"]) for answer in answers]
    parts = {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}
    return parts | {"cu_seqlens": torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64)}


def token_mean(values: Tensor, mask: Tensor, count: float) -> Tensor:
    """Sum of `values` where `mask` is True, over `count`: a micro-batch's share of the mean over all tokens.

    With `count` the same for all micro-batches of a step, their gradients add up to that of the whole batch, however
    it was cut: every token weighs the same, in long responses and in short ones.

    Args:
        values: [...], per token.
        mask: bool [...].
        count: tokens under the mask in the whole step, all micro-batches and all ranks. Where gradients are averaged
            over ranks and not added (DDP, FSDP), give count / ranks.

    Raises:
        InvalidLoss: `count` is not positive, or the shapes differ.
    """
    if not count > 0:
        raise InvalidLoss(f"is {count}; it is the number of tokens of the whole step, at least 1", field="count")
    mask = as_mask(mask, values)
    return torch.where(mask, values, 0).sum() / count


def clip_values(values: Tensor, bound: float) -> Tensor:
    """`values` within [-bound, bound], with the gradient they had before.

    A clamp takes a token out of training exactly where student and teacher differ most; this limits only how much it
    shows in the value: the straight-through estimator (Bengio et al. 2013, arXiv 1308.3432).
    """
    return values + (values.clamp(-bound, bound) - values).detach()


def as_mask(mask: Any, like: Tensor) -> Tensor:
    """bool, of the shape [...] of `like`; None is all True."""
    if mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    mask = constant(mask, like, torch.bool)
    same_shape("mask", mask, like)
    return mask


def constant(value: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor or an array as a tensor beside `like`, of which no gradient is wanted."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))  # a copy: views of an answer cannot be written to
    return torch.as_tensor(value).detach().to(like.device, dtype)


def at_least_float32(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def same_shape(name: str, value: Tensor, like: Tensor) -> None:
    if value.shape != like.shape:
        raise InvalidLoss(f"has shape {list(value.shape)}; the student's is {list(like.shape)}", field=name)


def same_temperature(temperature: float, teacher_temperature: float) -> None:
    """Scores of the service are at temperature 1, and a distribution at one temperature has no divergence worth
    having from one at another."""
    if temperature != teacher_temperature:
        raise InvalidLoss(
            f"is {temperature:g} on the student's side and {teacher_temperature:g} on the teacher's "
            "(teacher_temperature); a divergence needs the same on both, and scores of this service are at 1",
            field="temperature",
        )
