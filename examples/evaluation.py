"""How far a student is from its teacher, on prompts that it never learned on; and what a run has shown in the end."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import torch
from torch import Tensor

from examples.losses import Loss, forward_kl_loss, micro_batches, reverse_kl_loss
from examples.student import Ids, Samples, Student, sample
from examples.tasks import Task
from examples.teacher import Teacher
from examples.times import shares, steady

SEED = 7
SAMPLES = 3  # per held-out prompt
PAIRS = 512  # of which distinct-2 is taken, however much a student writes
FORWARD_KL_MAY_RISE = 0.05
DISTINCT_2_MAY_FALL = 0.2
OVERLAP_DUE = 0.5


class Evaluator:
    """The same measures before, while and after a student learns.

    Args:
        task: its held-out prompts are used.
        teacher: scores through the service.
        fixed: `fixed` of an earlier evaluator, to go on with the same text.

    Attributes:
        fixed: continuations that the teacher's own model wrote, as fields of `Samples`, and their scores.
    """

    def __init__(self, task: Task, teacher: Teacher, fixed: dict[str, dict[str, Tensor]] | None = None) -> None:
        self._task, self._teacher = task, teacher
        self._prompts = [prompt for prompt in task.held_out for _ in range(SAMPLES)]
        self._with_hint = [prompt.teacher for prompt in self._prompts]
        if fixed is None:
            samples = self._written_by(task.teacher(), self._with_hint)
            scores = teacher.ask(self._with_hint, samples, top_k=task.candidates).result()
            fixed = {"samples": vars(samples), "scores": scores}
        self.fixed = fixed

    def __call__(self, student: Student) -> dict[str, Any]:
        """Divergences are in nats per token.

        - reverse_kl: KL(student, teacher) on what the student writes now; in expectation the whole of it, of the
          student's likeliest tokens summed and of the others sampled. Its standard error goes by prompts.
        - reverse_kl_response: the same summed over a response, so that a student gains nothing by being brief.
        - forward_kl: KL(teacher, student) on the fixed continuations, on the teacher's likeliest tokens and all others
          as one: a lower bound.
        - distinct_2: of 512 pairs of neighbouring tokens that the student writes, the share of different ones
          (Li et al. 2016, arXiv 1510.03055). A student that says one thing only, or next to nothing, loses it.
        - tokens: of a response, on average.
        - answer: what it writes first.
        """
        samples = self._written_by(student.model, [prompt.student for prompt in self._prompts])
        scores = self._teacher.ask(self._with_hint, samples).result()
        reverse = self._by_response(reverse_kl_loss, student, samples, scores)
        fixed = Samples(**self.fixed["samples"])
        forward = self._by_response(forward_kl_loss, student, fixed, self.fixed["scores"])
        lengths = samples.mask.sum(dim=1)
        return {
            "reverse_kl": float(reverse.sum() / lengths.sum()),
            "reverse_kl_error": standard_error(reverse, lengths, SAMPLES),
            "reverse_kl_response": float(reverse.mean()),
            "forward_kl": float(forward.sum() / fixed.mask.sum()),
            "distinct_2": distinct_2([samples.response(i) for i in range(len(lengths))]),
            "tokens": float(lengths.float().mean()),
            "answer": self._task.text(samples.response(0)),
        }

    def _written_by(self, model: Any, prompts: list[Ids]) -> Samples:
        task = self._task
        return sample(model, prompts, tokens=task.tokens, candidates=task.candidates, end=task.end, seed=SEED)

    def _by_response(self, loss: Loss, student: Student, samples: Samples, scores: dict[str, Tensor]) -> Tensor:
        """float64 [B]: `loss` summed over the tokens of each response."""
        prompts = [prompt.student for prompt in self._prompts]
        with torch.no_grad():
            per_token = torch.cat(list(micro_batches(loss, student, prompts, samples, scores))).double()
        return torch.stack([part.sum() for part in per_token.split(samples.mask.sum(dim=1).tolist())])


def standard_error(sums: Tensor, lengths: Tensor, samples: int) -> float:
    """Of the mean over tokens, sum(sums) / sum(lengths), where responses to one prompt are no independent ones: the
    ratio estimator's, by prompts (Cochran, Sampling Techniques, 3rd edition, equation 6.13).

    Args:
        sums, lengths: [B], of a response each; those to a prompt are neighbours.
        samples: responses to a prompt.
    """
    sums, lengths = (x.double().reshape(-1, samples).sum(dim=1) for x in (sums, lengths))
    off = sums - lengths * (sums.sum() / lengths.sum())
    return float((len(off) / (len(off) - 1) * off.square().sum()).sqrt() / lengths.sum())


def distinct_2(responses: list[Ids]) -> float:
    """Of `PAIRS` neighbouring tokens, drawn from all, the share of different ones; missing pairs count as repeated."""
    pairs = [pair for response in responses for pair in itertools.pairwise(response)]
    drawn = random.Random(SEED).sample(pairs, min(PAIRS, len(pairs)))
    return len(set(drawn)) / PAIRS


def checks(log: dict[str, Any], task: Task) -> list[tuple[str, bool]]:
    """Sentences about a finished run, each with whether it is as it should be."""
    first = baseline(log)
    last = log["evaluations"][-1]

    def change(name: str) -> float:
        return last[name] / first[name] - 1

    def said(what: str, name: str) -> str:
        return f"{what} {first[name]:.3f} -> {last[name]:.3f} ({change(name):+.0%})"

    reverse = said("reverse KL on held-out samples", "reverse_kl")
    if log["shuffled"]:
        noise = 2 * math.hypot(first["reverse_kl_error"], last["reverse_kl_error"])
        sentence = f"{reverse}: a shuffled teacher must not lower it by more than noise ({noise:.3f})"
        return [(sentence, last["reverse_kl"] > first["reverse_kl"] - noise)]
    there = steady(log["steps"])
    overlap, away = shares(there)["overlap"], len(log["steps"]) - len(there)
    return [
        (f"{reverse}: due {-task.due:+.0%}", change("reverse_kl") <= -task.due),
        (
            f"{said('forward KL on text of the teacher', 'forward_kl')}: at most {FORWARD_KL_MAY_RISE:+.0%}",
            change("forward_kl") <= FORWARD_KL_MAY_RISE,
        ),
        (
            f"{said('distinct-2 of held-out samples', 'distinct_2')}: at least {-DISTINCT_2_MAY_FALL:+.0%}",
            change("distinct_2") >= -DISTINCT_2_MAY_FALL,
        ),
        (
            f"{overlap:.0%} of the scoring was done while the next batch was sampled: at least {OVERLAP_DUE:.0%}"
            + (f" ({away} steps without their teacher left out)" if away else ""),
            overlap >= OVERLAP_DUE,
        ),
    ]


def baseline(log: dict[str, Any]) -> dict[str, Any]:
    """The evaluation that a run is compared with: the last one before the student learned from its own text."""
    return next(e for e in log["evaluations"] if e["step"] == log["warm_steps"])
