"""A steady load through every way in, whose answers are held against those of an undisturbed run."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scoring import MatrixBatch, MatrixRead, ScoringError
from tests.oracle import hf_logprobs

TIMEOUT_S = 90.0
GRACE_S = 5.0  # for an answer to travel after its deadline


class Load:
    """Threads that ask the same batches again and again until `stop`.

    Args:
        ways: per name, what answers a batch within `timeout_s`: a list of float32 [R, K], or an exception.
        batches: what is asked.
        truth: per batch the right answers.
        limit: how far a number may be off.
    """

    def __init__(
        self,
        ways: dict[str, Callable[..., Any]],
        batches: list[MatrixBatch],
        truth: list[list[np.ndarray]],
        limit: float,
    ) -> None:
        self._ways, self._batches, self._truth, self._limit = ways, batches, truth, limit
        self._stopping = threading.Event()
        self.answered = dict.fromkeys(ways, 0)  # batches, by way
        self.failed: list[tuple[str, float, str]] = []  # way, seconds it took, typed error
        self.wrong: list[str] = []  # what must never be: sentences
        self._threads = [threading.Thread(target=self._ask, args=way, daemon=True) for way in ways.items()]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the calls under way end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + 2 * GRACE_S)
            if thread.is_alive():
                self.wrong.append("a call did not come back by its deadline")

    def _ask(self, name: str, way: Callable[..., Any]) -> None:
        for number in itertools.cycle(range(len(self._batches))):
            if self._stopping.is_set():
                return
            started = time.monotonic()
            try:
                answers = way(self._batches[number], timeout_s=TIMEOUT_S)
            except ScoringError as error:
                self.failed.append((name, time.monotonic() - started, f"{type(error).__name__}: {error}"))
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__} is no error of this project: {error}")
            else:
                self._compare(name, answers, self._truth[number])
                self.answered[name] += 1
            if time.monotonic() - started > TIMEOUT_S + GRACE_S:
                self.wrong.append(f"{name}: came back after {time.monotonic() - started:.1f} s")

    def _compare(self, name: str, answers: list[np.ndarray], truth: list[np.ndarray]) -> None:
        if [a.shape for a in answers] != [t.shape for t in truth]:
            self.wrong.append(f"{name}: shapes {[a.shape for a in answers]}")
            return
        off = [float(np.abs(a - t).max()) for a, t in zip(answers, truth, strict=True)]
        if max(off) > self._limit:
            self.wrong.append(f"{name}: read {int(np.argmax(off))} is off by {max(off):.2e}")


def make_batches(count: int, vocabulary: int, seed: int) -> list[MatrixBatch]:
    """`count` batches of 16 reads of mixed lengths, up to 160 tokens."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        reads = []
        for _ in range(16):
            prompt, response, width = rng.integers(1, 80), rng.integers(1, 80), rng.integers(1, 40)
            ids = rng.integers(0, vocabulary, prompt + response)
            reads.append(MatrixRead(ids[:prompt], ids[prompt:], rng.integers(0, vocabulary, (response, width))))
        batches.append(MatrixBatch.from_reads(reads))
    return batches


def right_answers(model: Any, batch: MatrixBatch) -> list[np.ndarray]:
    """Hugging Face's float32 [R, K] for each read."""
    answers = []
    for read in batch:
        rows = hf_logprobs(model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()]).numpy()
        rows = rows[len(read.prompt_ids) - 1 : -1]
        answers.append(np.take_along_axis(rows, read.candidate_ids.astype(np.int64), 1))
    return answers
