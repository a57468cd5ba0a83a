"""The self-test of an engine that has just come up: reads that must agree, asked before anybody else's.

Engines have come up and answered quietly wrong: rows of a prefill in two chunks that were off, a first step that
differed from all later ones. What one engine says twice must be the same, whatever the teacher:

- its very first answer, and the same read asked again;
- that read alone, and copies of it at once, of which the later ones begin where a step has room left, so that their
  chunks end elsewhere;
- that read, whose prompt is shorter than a block of the prefix cache, and the later half of its rows, for which what
  comes before them is taken from the cache;
- a row of the matrix, and the label read of the same position.

It costs a bounded number of tokens. Where one step takes too many, the reads are short and no chunk ends in them:
prefill in chunks is then not tested.

In float32 no score may differ by more than `FLOAT32_LIMIT`. In half precision the kernels that a batch's size chooses
round differently, and single scores may differ by tenths; what is due is that the mean difference over any `WINDOW`
rows is far below the mean difference of two neighbouring rows. That still finds rows that are shifted by one, and a
chunk that is not its own.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from scoring.batches import LabelBatch, MatrixBatch
from scoring.errors import SelfTestFailed
from scoring.limits import TeacherLimits
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScores, MatrixScore, MatrixScores

logger = logging.getLogger(__name__)

FLOAT32_LIMIT = 2e-4
HALF_LIMIT = 0.25
"""Of the mean difference of neighbouring rows; twice that for a row by itself."""
WINDOW = 16

_BEYOND_A_CHUNK = 64
_SHORT = 192
_CANDIDATES = 7
_PROMPT = 8
_TIMEOUT_S = 600


class Engine(Protocol):
    """What is tested: `TeacherEngine`."""

    limits: TeacherLimits

    async def read_matrix(self, batch: MatrixBatch, *, timeout_s: float) -> MatrixScores: ...

    async def read_labels(self, batch: LabelBatch, *, timeout_s: float) -> LabelScores: ...


@dataclass(frozen=True)
class Probe:
    """The read that is asked: its tokens, how many copies go at once, and whether a chunk ends inside the last."""

    length: int
    copies: int
    chunked: bool

    @property
    def tokens(self) -> int:
        """Prefilled in all, if nothing were cached: alone twice, the copies, its later half, and a label read."""
        return (4 + self.copies) * self.length


def plan_probe(chunk: int, max_length: int, budget: int) -> Probe:
    """The read for an engine that prefills at most `chunk` tokens of one read in a step.

    Args:
        chunk: tokens.
        max_length: tokens of the longest read, with the one that the engine makes.
        budget: tokens that the self-test may prefill.
    """
    longest = max_length - 1
    for length in range(min(chunk + min(_BEYOND_A_CHUNK, chunk // 2 or 1), longest), 1, -1):
        if length > chunk or chunk % length:  # else copies would begin where a step begins, and none be divided
            probe = Probe(length, 2 if length > chunk else chunk // length + 1, chunked=True)
            if probe.tokens <= budget:
                return probe
            break
    return Probe(min(longest, _SHORT), 2, chunked=False)


async def check_engine(engine: Engine, *, chunk: int, budget: int, float32: bool) -> float:
    """Ask the reads and compare them; `chunk` and `budget` as for `plan_probe`.

    Args:
        float32: whether the engine computes in float32.

    Returns:
        Seconds that the engine needs for a token of a read that is alone.

    Raises:
        SelfTestFailed: two answers that must agree differ. Says which, where, and by how much.
        ScoringError: a read failed.
    """
    limits = engine.limits
    probe = plan_probe(chunk, limits.max_length, budget)
    read = _read(probe.length, limits)
    half = len(read.response_ids) // 2
    later = replace(read, rows=slice(half, None))

    async def ask(*reads: MatrixRead) -> MatrixScores:
        scores = await engine.read_matrix(MatrixBatch.from_reads(reads), timeout_s=_TIMEOUT_S)
        return scores.raise_first()

    (first,) = map(_columns, await ask(read))
    started = time.monotonic()
    (alone,) = map(_columns, await ask(read))
    seconds_per_token = (time.monotonic() - started) / probe.length
    compare("the first answer of the engine", first, "the same read asked again", alone, float32)
    for i, copy in enumerate(map(_columns, await ask(*[read] * probe.copies))):
        compare(f"copy {i} of {probe.copies} of a read at once", copy, "the read alone", alone, float32)
    (warm,) = await ask(later)
    compare("the later half of a read after a cached beginning", _columns(warm), "its rows", alone[half:], float32)
    # Of the later half, the row that differs most from the one before: mistaken for it, it is found out.
    row = 1 + int(np.abs(np.diff(alone, axis=0)).mean(axis=1)[len(alone) // 2 :].argmax()) + len(alone) // 2
    label = LabelRead(
        np.concatenate([read.prompt_ids, read.response_ids[:row]]),
        np.concatenate([read.response_ids[row : row + 1], read.candidate_ids]),
    )
    (scores,) = (await engine.read_labels(LabelBatch.from_reads([label]), timeout_s=_TIMEOUT_S)).raise_first()
    with_label = alone.copy()
    with_label[row] = scores.logprobs
    compare("a label read", with_label, "its row of the matrix", alone, float32, rows=1)
    logger.info(
        "self-test passed: reads of %d tokens, %d of them cached%s",
        probe.length,
        warm.meta.cached_tokens,
        "" if probe.chunked else ", none prefilled in chunks",
    )
    return seconds_per_token


def compare(what: str, one: np.ndarray, what_else: str, other: np.ndarray, float32: bool, rows: int = WINDOW) -> None:
    """Raise `SelfTestFailed` unless two answers of an engine agree.

    Args:
        one, other: float32 [R, 1 + K].
        rows: over how many rows in a row the difference is averaged in half precision.
    """
    difference = np.abs(one - other)
    row, column = (int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
    largest = float(difference[row, column])
    if float32:
        right, due = largest <= FLOAT32_LIMIT, f"at most {FLOAT32_LIMIT:g} is due in float32"
    else:
        of_rows = difference.mean(axis=1, dtype=np.float64)
        width = min(rows, len(of_rows))
        mean = float(np.convolve(of_rows, np.full(width, 1 / width), mode="valid").max())
        neighbours = np.diff(other, axis=0) if len(other) > 1 else other
        limit = HALF_LIMIT * (2 if width == 1 else 1) * float(np.abs(neighbours).mean(dtype=np.float64))
        right = mean <= limit
        due = f"over {width} rows {mean:.4g} on average, where at most {limit:.4g} is due in half precision"
    if not right:
        raise SelfTestFailed(
            f"the engine contradicts itself: {what} and {what_else} differ by {largest:.4g} at row {row} "
            f"column {column}; {due}",
            difference=largest,
        )


def _columns(score: MatrixScore) -> np.ndarray:
    """float32 [R, 1 + K]: the response's own column first."""
    return np.column_stack([score.response_logprobs, score.logprobs])


def _read(length: int, limits: TeacherLimits) -> MatrixRead:
    """A read of so many tokens, of ids that the tokenizer knows, the same every time."""
    known = min(limits.vocabulary, limits.tokenizer_size or limits.vocabulary)
    ids = np.random.default_rng(0).integers(0, known, length)
    prompt = min(_PROMPT, length - 1)
    candidates = np.linspace(0, known - 1, min(_CANDIDATES, limits.max_candidates)).astype(np.int64)
    return MatrixRead(ids[:prompt], ids[prompt:], candidates)
