"""The teacher as a trainer sees it: the handle of the service's named actor, and scores that are on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import ray
import torch
from torch import Tensor

from deployments.actor import NAMESPACE
from deployments.router import APP_NAME
from examples.student import Ids, Samples
from scoring import MatrixBatch, MatrixRead


class Teacher:
    """The application's default teacher.

    Attributes:
        model: folder of its checkpoint.
        checkpoint: that one's hash.
    """

    def __init__(self) -> None:
        self._actor = ray.get_actor(APP_NAME, namespace=NAMESPACE)
        known = next(t for t in ray.get(self._actor.teachers.remote()).values() if t["default"])
        self.model, self.checkpoint, self._version = known["model"], known["checkpoint"], known["weight_version"]

    def ask(self, prompts: Sequence[Ids], samples: Samples, *, top_k: int = 0, timeout_s: float = 600) -> PendingScores:
        """Have it score the responses to `prompts`: the sampled tokens, and of every position the samples' candidates,
        or with `top_k` as many of the teacher's own likeliest tokens.

        A teacher whose weights have changed meanwhile is another teacher, and refuses (`VersionMismatch`).
        """
        reads = [
            MatrixRead(
                prompt,
                samples.response(i),
                None if top_k else samples.candidates[i][samples.mask[i]],
                top_k=top_k,
                expect_version=self._version,
            )
            for i, prompt in enumerate(prompts)
        ]
        return PendingScores(self._actor.read_matrix.remote(MatrixBatch.from_reads(reads), timeout_s=timeout_s))


class PendingScores:
    """Scores that are on their way.

    Attributes:
        came: when they were here, whoever looked, in seconds of the monotonic clock; None before.
    """

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.came: float | None = None
        self._future = ref.future()
        self._future.add_done_callback(lambda _: self._stamp())

    def result(self) -> dict[str, Tensor]:
        """Waits. By the names of a `MatrixScore`, end to end over all responses: [sum n, K], [sum n], ...

        Raises:
            ScoringError: as in `ScoringClient.read_matrix`.
        """
        scores = self._future.result()
        self._stamp()  # callbacks may come after those who wait
        names = ("logprobs", "response_logprobs", "top_ids", "top_logprobs")
        return {name: torch.from_numpy(np.concatenate(scores[name])) for name in names if scores[name][0] is not None}

    def _stamp(self) -> None:
        if self.came is None:
            self.came = time.monotonic()
