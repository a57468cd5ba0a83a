"""What a student learns from a teacher's scores: divergences and advantages, in PyTorch, with gradients.

Everything is per token, over any leading shape: a padded batch [B, T], a packed one [sum of lengths], a single
response [R]; a teacher's numbers are taken as `MatrixScores` gives them, by `to_padded`, `torch()` or `packed`. Sums
are in float32 at least, and what a mask leaves out is 0 and has no gradient, whatever stands there.

A step on candidates, here the student's own top 64 (`extras=("tail",)` in the reads):

    teacher = scores.to_padded(width=T, fill=0.0).torch()                       # the service's answer
    mask = teacher["mask"]                                                      # [B, T]
    student = student_scores(logits, candidate_ids, mask=mask)                  # logits [B, T, V] of the response rows
    loss = reverse_kl(
        student.logprobs, teacher["logprobs"], candidate_ids, mask=mask,        # [B, T, 64] three times
        student_tail=student.tail_logprob, teacher_tail=teacher["tail_logprob"],
    )                                                                           # [B, T], nats
    token_mean(loss, mask, count).backward()                                    # count: tokens of the whole batch

A step on the sampled tokens alone:

    advantages = reverse_kl_advantages(old_logprobs, teacher["response_logprobs"], mask)
    loss = policy_gradient_loss(student_logprobs, old_logprobs, advantages, mask)
    token_mean(loss, mask, count).backward()

| function | what, of student pi and teacher nu | kind |
|---|---|---|
| `forward_kl` | KL(nu, pi) on candidates | loss |
| `reverse_kl` | KL(pi, nu) on candidates | loss |
| `jsd` | generalised Jensen-Shannon divergence on candidates | loss |
| `unbiased_reverse_kl` | KL(pi, nu) in expectation: candidates, and the sampled token | loss |
| `reverse_kl_advantages`, `policy_gradient_loss` | KL(pi, nu) by policy gradient, of sampled tokens alone | loss |
| `k1`, `k2`, `k3` | estimates of KL(pi, nu) by sampled tokens | measurement |

`student_scores` gives the student's side of a read, and `top_k_tail` what a teacher's own `top_k` leave to others.

The rest of `scoring` imports without PyTorch, and without this.
"""

from scoring.divergence.candidates import forward_kl, jsd, reverse_kl, top_k_tail, unbiased_reverse_kl
from scoring.divergence.estimators import k1, k2, k3
from scoring.divergence.layout import clip_values, packed, token_mean
from scoring.divergence.policy_gradient import (
    multi_teacher_advantages,
    policy_gradient_loss,
    ratio_gate,
    reverse_kl_advantages,
)
from scoring.divergence.student import StudentScores, student_scores

__all__ = [
    "StudentScores",
    "clip_values",
    "forward_kl",
    "jsd",
    "k1",
    "k2",
    "k3",
    "multi_teacher_advantages",
    "packed",
    "policy_gradient_loss",
    "ratio_gate",
    "reverse_kl",
    "reverse_kl_advantages",
    "student_scores",
    "token_mean",
    "top_k_tail",
    "unbiased_reverse_kl",
]
