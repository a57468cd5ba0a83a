"""A service without teachers that is fast, counts what it is asked, and can be held up: for tests of the command."""

import asyncio

import numpy as np

from scoring import MatrixBatch, MatrixScores, ReadMeta
from scoring.batches import bounds_of
from tests.stand_in_router import CHECKPOINT, LIMITS, NEXT_TOKEN, StandInRouter


class FastRouter(StandInRouter):
    """As `StandInRouter`; reads of the response's own tokens, all in the vocabulary, are answered all at once.

    Attributes:
        asked: the prompts of all reads asked for, as tuples.
        checkpoint: what it says it is.
        delay_s: how long each call takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []
        self.checkpoint = CHECKPOINT
        self.delay_s = 0.0

    def info(self, name: str) -> dict:
        return super().info(name) | {"checkpoint": self.checkpoint}

    async def read_matrix(self, reads, **options):
        batch = MatrixBatch.of(reads)
        bounds = zip(batch.offsets[:-1].tolist(), batch.prompt_lens.tolist(), strict=True)
        self.asked += [tuple(batch.ids[begin : begin + length].tolist()) for begin, length in bounds]
        await asyncio.sleep(self.delay_s)
        plain = not batch.widths.any() and not batch.top_k.any() and not batch.extras().any()
        if not plain or (batch.ids >= LIMITS.vocabulary).any() or (batch.tokens() + 1 > LIMITS.max_length).any():
            return await super().read_matrix(batch, **options)
        return _own_scores(batch, self.checkpoint)


def _own_scores(batch: MatrixBatch, checkpoint: str) -> MatrixScores:
    counts, rows, count = batch.row_counts(), batch.answered_rows(), len(batch)
    tokens = batch.ids[np.repeat(batch.offsets[:-1] + batch.prompt_lens, counts) + rows]
    zeros = np.zeros(count, np.int32)
    return MatrixScores(
        values=(-(tokens + rows / 8)).astype(np.float32),
        offsets=bounds_of(counts),
        widths=zeros.astype(np.int64),
        top_k=zeros,
        extras=zeros,
        rows=rows,
        row_offsets=bounds_of(counts),
        prompt_tokens=batch.tokens().astype(np.int32),
        cached_tokens=zeros,
        ids_beyond_tokenizer=zeros,
        next_token=np.full(count, NEXT_TOKEN, np.int32),
        meta_index=batch.teacher_index,
        metas=tuple(
            ReadMeta(name or "default", 0, checkpoint, "vllm 0.32.0", "float32", "float32", "logprobs", 1)
            for name in batch.teachers
        ),
    )
