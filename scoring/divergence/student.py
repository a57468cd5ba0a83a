"""The student's side of a matrix read: the same numbers, of the same candidates, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoring.divergence.layout import as_mask, at_least_float32, constant, same_shape
from scoring.errors import InvalidLoss


@dataclass(frozen=True, eq=False)
class StudentScores:
    """What a student says where the teacher was asked; the names are those of the teacher's `MatrixScore`.

    Attributes:
        logprobs: [..., K]; -inf in padded columns.
        tail_logprob: [...], the logarithm of the probability outside the candidates; -inf where nothing is outside.
        response_logprobs: [...], of the response's own tokens; None unless `response_ids` were given.
    """

    logprobs: Tensor
    tail_logprob: Tensor
    response_logprobs: Tensor | None = None


def student_scores(
    logits: Tensor, candidate_ids: Any, response_ids: Any = None, *, mask: Any = None, temperature: float = 1.0
) -> StudentScores:
    """Log-probabilities of candidates, and of everything else together, from a student's logits.

    The tail is summed over the logits outside the candidates, not taken from one minus a sum: it is as exact where the
    candidates have nearly everything. That costs two tensors of the size of `logits` in float32; call it on pieces of
    rows, under `torch.utils.checkpoint`, where that is too much.

    Args:
        logits: [..., V], row r those that predict response token r.
        candidate_ids: int [..., K], or [K] for all rows alike; -1 marks unused columns.
        response_ids: int [...].
        mask: bool [...]; where it is False the ids are not looked at, and the scores are those of no candidates.
        temperature: the logits are divided by it.

    Raises:
        InvalidLoss: an id is outside the vocabulary, or twice in a row; the shapes do not fit.
    """
    vocabulary = logits.shape[-1]
    logits = at_least_float32(logits) / temperature
    total = logits.logsumexp(dim=-1)  # [...]
    mask = as_mask(mask, total)
    ids = torch.where(mask[..., None], candidate_rows(candidate_ids, logits), -1)
    _check_range(ids, -1, vocabulary, "candidate_ids")
    used = ids >= 0
    check_unique(ids, used)
    logprobs = torch.where(used, logits.gather(-1, ids.clamp(min=0)) - total[..., None], -torch.inf)
    # One column more than the vocabulary takes the unused ids in.
    inside = torch.zeros((*total.shape, vocabulary + 1), dtype=torch.bool, device=logits.device)
    inside = inside.scatter(-1, torch.where(used, ids, vocabulary), True)[..., :vocabulary]
    # Where nothing is outside there is no sum, and the sum of nothing has NaN for a gradient.
    nothing = (inside | (logits == -torch.inf)).all(dim=-1)
    outside = torch.where(nothing[..., None], 0.0, logits.masked_fill(inside, -torch.inf))
    tail = torch.where(nothing, -torch.inf, outside.logsumexp(dim=-1) - total)
    response = None
    if response_ids is not None:
        at = constant(response_ids, logits, torch.int64)
        same_shape("response_ids", at, total)
        at = torch.where(mask, at, 0)
        _check_range(at, 0, vocabulary, "response_ids")
        response = torch.where(mask, logits.gather(-1, at[..., None]).squeeze(-1) - total, 0.0)
    return StudentScores(logprobs, tail, response)


def _check_range(ids: Tensor, lowest: int, vocabulary: int, name: str) -> None:
    if ids.numel() and bool(((ids < lowest) | (ids >= vocabulary)).any()):
        raise InvalidLoss(
            f"goes from {int(ids.min())} to {int(ids.max())}; allowed is [{lowest}, {vocabulary})", field=name
        )


def candidate_rows(candidate_ids: Any, like: Tensor) -> Tensor:
    """int64 [..., K], of the rows of `like` [..., anything]."""
    ids = constant(candidate_ids, like, torch.int64)
    rows = like.shape[:-1]
    if ids.ndim == 1:
        return ids.expand(*rows, -1)
    if ids.shape[:-1] != rows:
        raise InvalidLoss(
            f"has shape {list(ids.shape)}; allowed are [K] and {[*rows, 'K']}, of the rows of the student's",
            field="candidate_ids",
        )
    return ids


def check_unique(ids: Tensor, used: Tensor) -> None:
    """Raises where a row of `ids` [..., K] has an id twice among the `used` ones: its probability would count twice."""
    if ids.shape[-1] < 2:
        return
    # Unused columns become numbers of their own, below every id.
    apart = torch.where(used, ids, -1 - torch.arange(ids.shape[-1], device=ids.device))
    ordered = apart.sort(dim=-1).values
    twice = ordered[..., 1:] == ordered[..., :-1]
    if bool(twice.any()):
        row, column = twice.reshape(-1, twice.shape[-1]).nonzero()[0].tolist()
        given = int(ordered.reshape(-1, ordered.shape[-1])[row, column])
        raise InvalidLoss(
            f"has {given} twice in row {row}; candidates of a row differ (was a sampled token added that its "
            "top-K had? response_logprobs are there without), and rows that only fill up belong under the mask",
            field="candidate_ids",
        )
