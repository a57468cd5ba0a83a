"""Writes golden_jsd.json: what TRL's own `generalized_jsd_loss` says of a small batch, in value and in gradient.

    make trainers && .venv-trainers/bin/python -m tests.golden_jsd > tests/golden_jsd.json

`make test` holds `scoring.divergence.jsd` against these numbers without TRL; `make test-trainers` asks TRL again.
"""

import json
import sys
from importlib.metadata import version

import numpy as np
import torch

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def batch() -> dict[str, list]:
    """Logits [2, 3, 7] of either side, and labels [2, 3] with one padded position."""
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 2, (2, 2, 3, 7)).round(3).tolist()
    return {"student_logits": student, "teacher_logits": teacher, "labels": [[1, 4, 6], [0, 2, -100]]}


def trl_losses(batch: dict[str, list]) -> dict[str, dict]:
    """By beta, the loss and its gradient by the student's logits."""
    from trl.experimental.gkd import GKDTrainer

    losses = {}
    for beta in BETAS:
        student = torch.tensor(batch["student_logits"], dtype=torch.float64, requires_grad=True)
        teacher = torch.tensor(batch["teacher_logits"], dtype=torch.float64)
        loss = GKDTrainer.generalized_jsd_loss(student, teacher, torch.tensor(batch["labels"]), beta=beta)
        loss.backward()
        losses[str(beta)] = {"value": loss.item(), "gradient": student.grad.tolist()}
    return losses


if __name__ == "__main__":
    golden = batch()
    json.dump({"trl": version("trl"), **golden, "losses": trl_losses(golden)}, sys.stdout)
