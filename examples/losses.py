"""The two losses of a run, token by token, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from examples.student import Ids, Samples, Student
from scoring.divergence import forward_kl, student_scores, top_k_tail, unbiased_reverse_kl

MICRO_BATCH = 8
"""Samples whose logits over the whole vocabulary are in memory at a time."""

Loss = Callable[[Tensor, Samples, dict[str, Tensor]], Tensor]
"""Of logits [n, V], packed samples and the teacher's scores of them: [n], in nats."""


def micro_batches(
    loss: Loss, student: Student, prompts: Sequence[Ids], samples: Samples, scores: dict[str, Tensor]
) -> Iterator[Tensor]:
    """`loss` of micro-batch after micro-batch, with gradients. `scores` are end to end, of all samples."""
    at = 0
    for i in range(0, len(prompts), MICRO_BATCH):
        piece = samples[i : i + MICRO_BATCH]
        logits = student.logits(prompts[i : i + MICRO_BATCH], piece)
        part = {name: rows[at : at + len(logits)] for name, rows in scores.items()}
        at += len(logits)
        yield loss(logits, piece.packed(), part)


def reverse_kl_loss(logits: Tensor, samples: Samples, scores: dict[str, Tensor]) -> Tensor:
    """KL(student, teacher) in expectation over the sampled token: the candidates' part is summed, that of all other
    tokens sampled, and weighted by how much likelier the student finds its token now than when it wrote it. The text
    before is taken as it is, a step old."""
    student = student_scores(logits, samples.candidates, samples.responses)
    return unbiased_reverse_kl(
        student.logprobs,
        scores["logprobs"],
        samples.candidates,
        response_ids=samples.responses,
        student_response_logprobs=student.response_logprobs,
        teacher_response_logprobs=scores["response_logprobs"],
        old_logprobs=samples.logprobs,
    )


def forward_kl_loss(logits: Tensor, samples: Samples, scores: dict[str, Tensor]) -> Tensor:
    """KL(teacher, student) on the teacher's own likeliest tokens, and all others as one: a lower bound."""
    student = student_scores(logits, scores["top_ids"])
    return forward_kl(
        student.logprobs,
        scores["top_logprobs"],
        scores["top_ids"],
        student_tail=student.tail_logprob,
        teacher_tail=top_k_tail(scores["top_logprobs"]),
    )
