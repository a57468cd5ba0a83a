"""Which teachers are measured, and what they are asked: random ids, fresh in every round, the same for both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scoring.batches import MatrixBatch
from scoring.demo_teacher import demo_teacher
from scoring.reads import MatrixRead
from scoring.scores import MatrixScores
from tests.tiny_teacher import make_tiny_teacher

if TYPE_CHECKING:
    from scoring.engine import EngineSettings


@dataclass(frozen=True)
class Measured:
    """A teacher under measurement.

    Attributes:
        model: folder of its checkpoint.
        limit: how far two ways to its scores may be apart, as mean absolute difference over one read. In bf16 a score
            depends on what it was batched with, on random ids by more than on text.
    """

    name: str
    model: str
    dtype: str
    vocabulary: int
    limit: float
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> EngineSettings:
        from scoring.engine import EngineSettings

        return EngineSettings(self.model, dtype=self.dtype, engine_args=self.engine_args)

    @property
    def config(self) -> dict[str, Any]:
        """As a teacher with one replica in the service's configuration."""
        return {"model": self.model, "dtype": self.dtype, "engine_args": dict(self.engine_args)}


def measured_teachers(folder: Path) -> dict[str, Measured]:
    """The tiny teacher, made in `folder`, and the demo's, each with what the service is started with by default."""
    tiny = str(make_tiny_teacher(folder / "tiny"))
    smollm2 = str(demo_teacher("bfloat16", progress=print))
    length = {"max_model_len": 2048}
    return {
        "tiny": Measured("tiny", tiny, "float32", 2048, limit=1e-4, engine_args=length),
        "smollm2": Measured("SmolLM2", smollm2, "bfloat16", 49_152, limit=0.3, engine_args=length),
    }


def as_array(scores: MatrixScores) -> np.ndarray:
    """Answers to reads of one shape, as float32 [N, rows, 1 + K]: the response's own tokens, then the candidates."""
    return np.stack([np.column_stack([s.response_logprobs, s.logprobs]) for s in scores])


@dataclass(frozen=True)
class Reads:
    """`count` reads of `prompt` + `response` random ids with `width` candidates a row, and their other forms."""

    vocabulary: int
    count: int
    prompt: int
    response: int
    width: int
    seed: int
    shared_prompt: bool = False

    @cached_property
    def ids(self) -> np.ndarray:
        """int32 [N, prompt + response]"""
        ids = self._random(0, (self.count, self.prompt + self.response))
        if self.shared_prompt:
            ids[:, : self.prompt] = ids[0, : self.prompt]
        return ids

    @cached_property
    def columns(self) -> np.ndarray:
        """int32 [N, response, 1 + K]: the response's own ids, then the candidates."""
        candidates = self._random(1, (self.count, self.response, self.width))
        return np.concatenate([self.ids[:, self.prompt :, None], candidates], axis=2)

    def batch(self, **options: Any) -> MatrixBatch:
        """As matrix reads, with `options` of `MatrixRead`."""
        return MatrixBatch.from_reads(self.reads(**options))

    def reads(self, **options: Any) -> list[MatrixRead]:
        return [
            MatrixRead(ids[: self.prompt], ids[self.prompt :], columns[:, 1:], **options)
            for ids, columns in zip(self.ids, self.columns, strict=True)
        ]

    def _random(self, what: int, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, what, self.count, self.prompt, self.response, self.width])
        return rng.integers(0, self.vocabulary, shape, dtype=np.int32)
