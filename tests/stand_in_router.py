"""A Router without teachers: its scores are numbers that anyone can compute."""

import asyncio
from collections.abc import Callable

import numpy as np

from scoring import LabelBatch, LabelScores, MatrixBatch, MatrixScores, ReadMeta, ScoringError
from scoring.errors import UnknownTeacher
from scoring.limits import BatchLimits, TeacherLimits
from scoring.reads import EXTRAS

NEXT_TOKEN = 77
CHECKPOINT = "0123456789abcdef"
BATCH_LIMITS = BatchLimits(10_000, 1_000_000, 64 << 20, 64 << 20)
LIMITS = TeacherLimits(vocabulary=2048, tokenizer_size=2000, max_length=512, max_candidates=64)


def score(token: int, row: int = 0) -> float:
    """What the stand-in answers for a token at a row. Exact in float32; another token or row is another number."""
    return float("-inf") if token == -1 else -(token + row / 8)


def top(token: int, row: int, count: int) -> list[tuple[int, float]]:
    """The ids that the stand-in likes best at a row whose own token is `token`, with their scores."""
    return [(token + 1 + k, score(token + 1 + k, row)) for k in range(count)]


def tail(row: int) -> float:
    return -1000.0 - row


def entropy(row: int) -> float:
    return row + 0.5


def rank(token: int, row: int) -> int:
    return token + 10 * row + 1


class StandInRouter:
    """Serves the teachers "default" and "math" with the interface of `deployments.router.Router`.

    Set `before` to a function that is called (and awaited, where it is a coroutine) before each read call: it may
    raise. `calls` holds what each read call was given.

    Args:
        model: the folder of both teachers' checkpoint, where it matters.
        tokenizer: the hash of its tokenizer.
    """

    def __init__(self, model: str | None = None, tokenizer: str | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.calls: list[dict] = []
        self.before: Callable = lambda: None

    async def served_by(self) -> dict[str, str]:
        return {name: f"Teacher-{name}" for name in await self.teachers()}

    async def teachers(self) -> dict[str, dict]:
        return {name: self.info(name) for name in ("default", "math")}

    def info(self, name: str) -> dict:
        return {
            "teacher": name,
            "model": self.model or f"checkpoints/{name}",
            "vocabulary": LIMITS.vocabulary,
            "tokenizer_size": LIMITS.tokenizer_size,
            "max_length": LIMITS.max_length,
            "max_candidates": LIMITS.max_candidates,
            "dtype": "float32",
            "head_dtype": "float32",
            "scores": "logprobs",
            "engine": "vllm 0.32.0",
            "tensor_parallel_size": 1,
            "checkpoint": CHECKPOINT,
            "tokenizer": self.tokenizer,
            "weight_version": 0,
            "replicas": 2,
            "default": name == "default",
        }

    async def read_matrix(self, reads, **options):
        batch = reads if isinstance(reads, MatrixBatch) else MatrixBatch.from_reads(reads)
        return await self._answer(batch, LIMITS.check_matrix, _matrix_scores, MatrixScores, **options)

    async def read_labels(self, reads, **options):
        batch = reads if isinstance(reads, LabelBatch) else LabelBatch.from_reads(reads)
        return await self._answer(batch, LIMITS.check_label, _label_scores, LabelScores, **options)

    async def _answer(
        self, batch, check, scores_of, answer, *, timeout_s=600, return_exceptions=False, trace_headers=None
    ):
        self.calls.append({"batch": batch, "timeout_s": timeout_s, "trace_headers": trace_headers})
        waited = self.before()
        if asyncio.iscoroutine(waited):
            await waited
        known, parts = await self.teachers(), []
        for i in range(len(batch)):
            try:
                read = batch[i]
                if read.teacher not in (None, *known):
                    raise UnknownTeacher(f"is {read.teacher!r}; the teachers are {', '.join(known)}", field="teacher")
                check(read)
                one = scores_of(read)
            except ScoringError as error:
                one = answer.failed(error, 1)
            parts.append((np.array([i]), one, np.array([0])))
        scores = answer.assemble(len(batch), parts)
        return scores if return_exceptions else scores.raise_first()


def _matrix_scores(read) -> MatrixScores:
    rows = np.arange(len(read.response_ids)) if read.rows is None else read.rows
    lines = []
    for row in rows.tolist():
        own = int(read.response_ids[row])
        candidates = [] if read.candidate_ids is None else np.broadcast_to(
            read.candidate_ids, (len(read.response_ids), read.width)
        )[row].tolist()  # fmt: skip
        best = top(own, row, read.top_k)
        lines.append(
            [score(token, row) for token in (own, *candidates)]
            + ([tail(row)] if "tail" in read.extras else [])
            + ([entropy(row)] if "entropy" in read.extras else [])
            + ([rank(own, row)] if "rank" in read.extras else [])
            + [token for token, _ in best]
            + [logprob for _, logprob in best]
        )
    values = np.array(lines, np.float32).reshape(-1)
    return MatrixScores(
        values=values,
        offsets=np.array([0, len(values)]),
        widths=np.array([read.width]),
        top_k=np.array([read.top_k], np.int32),
        extras=np.array([sum(1 << i for i, name in enumerate(EXTRAS) if name in read.extras)], np.int32),
        rows=rows,
        row_offsets=np.array([0, len(rows)]),
        **_columns(read, len(read.prompt_ids) + len(read.response_ids)),
    )


def _label_scores(read) -> LabelScores:
    values = np.array([score(label) for label in read.label_ids], np.float32)
    return LabelScores(values=values, offsets=np.array([0, len(values)]), **_columns(read, len(read.prompt_ids)))


def _columns(read, prompt_tokens: int) -> dict:
    meta = ReadMeta(read.teacher or "default", 0, CHECKPOINT, "vllm 0.32.0", "float32", "float32", "logprobs", 1)
    return {
        "prompt_tokens": np.array([prompt_tokens], np.int32),
        "cached_tokens": np.zeros(1, np.int32),
        "ids_beyond_tokenizer": np.zeros(1, np.int32),
        "next_token": np.array([NEXT_TOKEN], np.int32),
        "meta_index": np.zeros(1, np.int32),
        "metas": (meta,),
    }
