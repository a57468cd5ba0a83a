"""Other weights for the teachers of the tests, how an engine in a process of its own takes them, and a load of reads
whose answers are held against the version that each names."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from safetensors.torch import load_file, save_file

from scoring import MatrixRead
from scoring.weights import Weights

if TYPE_CHECKING:
    from scoring.engine import TeacherEngine


async def take_weights(engine: TeacherEngine, path: Path, version: int, self_test: bool = True) -> str:
    """Have an engine load the weights in a folder as this version; their hash."""
    checked = await engine.check_weights(str(path))
    whole = engine.self_test
    if not self_test:
        engine.self_test = _nothing
    try:
        await engine.hold()
        await engine.load_weights(Weights(version, str(path), checked.checkpoint), checked)
    finally:
        engine.release()
        engine.self_test = whole
    return checked.checkpoint


async def _nothing() -> None:
    pass


def changed_checkpoint(path: Path, of: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint, with `change` made to its tensors, in place."""
    shutil.copytree(of, path)
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


Answer = list[tuple[int, np.ndarray]]
"""Of each read of a batch the version that answered it, and its float32 [R, K]."""


def by_client(client: Any) -> Callable[[Sequence[MatrixRead]], Answer]:
    """The way in through a client."""
    return lambda reads: [(score.meta.weight_version, score.logprobs) for score in client.read_matrix(reads)]


def by_actor(actor: ray.actor.ActorHandle) -> Callable[[Sequence[MatrixRead]], Answer]:
    """The way in through the named actor."""

    def ask(reads: Sequence[MatrixRead]) -> Answer:
        plain = ray.get(actor.read_matrix.remote(reads))
        return list(zip([meta["weight_version"] for meta in plain["meta"]], plain["logprobs"], strict=True))

    return ask


class VersionedLoad:
    """The same batch asked again and again through every way in, while weights change, until `stop`.

    Args:
        ways: by name.
        reads: the batch.
    """

    def __init__(
        self, ways: Mapping[str, Callable[[Sequence[MatrixRead]], Answer]], reads: Sequence[MatrixRead]
    ) -> None:
        self.ways, self._reads = ways, reads
        self.answers: dict[str, list[Answer]] = {name: [] for name in ways}
        self.failed: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[name], daemon=True) for name in ways]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str) -> None:
        while not self._stopping.is_set():
            try:
                self.answers[name].append(self.ways[name](self._reads))
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}")
                return

    def wait_for(self, batches: int, timeout_s: float = 60) -> None:
        """So many more answers through each way in."""
        due = {name: len(answers) + batches for name, answers in self.answers.items()}
        deadline = time.monotonic() + timeout_s
        while any(len(self.answers[name]) < count for name, count in due.items()):
            assert time.monotonic() < deadline and not self.failed, self.failed
            time.sleep(0.01)

    def stop(self) -> None:
        """Let the calls under way end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def check(self, truth: Mapping[int, Sequence[np.ndarray]], limit: float) -> None:
        """Nothing has failed; every batch is of one version, and its scores are that version's; no version is older
        than that of the batch before; and every version has answered.

        Args:
            truth: by version the right answers.
            limit: how far a number may be off.
        """
        assert not self.failed
        for name, answers in self.answers.items():
            for answer in answers:
                assert len({version for version, _ in answer}) == 1, name
                for (version, logprobs), right in zip(answer, truth[answer[0][0]], strict=True):
                    assert np.abs(logprobs - right).max() <= limit, (name, version)
            versions = [answer[0][0] for answer in answers]
            assert versions == sorted(versions) and set(versions) == set(truth), name
