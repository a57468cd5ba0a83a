"""What one teacher can answer, and what the service takes in one call: checked before an engine sees anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from scoring.batches import LabelBatch, MatrixBatch, bounds_of
from scoring.columns import LARGEST_ID
from scoring.errors import BatchTooLarge, InvalidRead
from scoring.reads import LabelRead, MatrixRead

MAX_LABELS = 128
"""vLLM's own bound on `logprob_token_ids` of one request (MAX_LOGPROB_TOKEN_IDS)."""


@dataclass(frozen=True)
class TeacherLimits:
    """The bounds of one teacher.

    Attributes:
        vocabulary: ids lie in [0, vocabulary): the width of the model's output, not the tokenizer's size.
        tokenizer_size: number of ids the tokenizer knows, or None without one. Ids between it and `vocabulary`
            are legal (padding of the embedding), and are counted in the answer's meta.
        max_length: tokens of prompt + response + 1; the engine always makes one token (`max_model_len`).
        max_candidates: largest K, and largest `top_k`.
        scores: "logprobs", or "logits", of which there is neither a tail nor an entropy.
    """

    vocabulary: int
    tokenizer_size: int | None
    max_length: int
    max_candidates: int
    scores: str = "logprobs"

    def check_matrix(self, read: MatrixRead) -> None:
        """Raise `InvalidRead` when this teacher cannot answer `read`."""
        self._check_ids(read.prompt_ids, "prompt_ids")
        self._check_ids(read.response_ids, "response_ids")
        self._check_length(len(read.prompt_ids), len(read.response_ids))
        if read.width > self.max_candidates:
            raise InvalidRead(
                f"has K = {read.width}; this teacher takes at most {self.max_candidates} (its setting max_candidates)",
                field="candidate_ids",
            )
        if read.candidate_ids is not None and read.unknown_candidates == "raise":
            self._check_ids(read.candidate_ids, "candidate_ids")
        self._check_top_k(read.top_k)
        none = [name for name in read.extras if name != "rank"]
        if none and self.scores != "logprobs":
            raise InvalidRead(
                f"asks for {' and '.join(none)}; this teacher answers with {self.scores}, of which there is "
                "none (its setting scores; logprobs has them)",
                field="extras",
            )
        if "rank" in read.extras and self.vocabulary > LARGEST_ID:
            raise InvalidRead(
                f"asks for rank; this teacher's vocabulary has {self.vocabulary} ids, and an answer's float32 holds "
                f"ranks exactly up to {LARGEST_ID} only",
                field="extras",
            )

    def check_label(self, read: LabelRead) -> None:
        """Raise `InvalidRead` when this teacher cannot answer `read`."""
        self._check_ids(read.prompt_ids, "prompt_ids")
        self._check_length(len(read.prompt_ids), 0)
        if len(read.label_ids) > MAX_LABELS:
            raise InvalidRead(
                f"has {len(read.label_ids)} labels; one label read takes at most {MAX_LABELS} (vLLM's bound)",
                field="label_ids",
            )
        self._check_ids(read.label_ids, "label_ids")

    def ids_beyond_tokenizer(self, *arrays: np.ndarray) -> int:
        """How many ids are legal for the model and unknown to its tokenizer. 0 when there is no tokenizer."""
        if self.tokenizer_size is None or self.tokenizer_size >= self.vocabulary:
            return 0
        return sum(int(((ids >= self.tokenizer_size) & (ids < self.vocabulary)).sum()) for ids in arrays)

    def _check_ids(self, ids: np.ndarray, field: str) -> None:
        if not ids.size:
            return
        lowest = -1 if field == "candidate_ids" else 0
        if ids.max() < self.vocabulary and ids.min() >= lowest:
            return
        at = tuple(int(i) for i in np.argwhere((ids >= self.vocabulary) | (ids < lowest))[0])
        tokenizer = "" if self.tokenizer_size is None else f"; its tokenizer has {self.tokenizer_size}"
        allowed = f"this teacher's vocabulary is [0, {self.vocabulary}){tokenizer}"
        hint = ' (unknown_candidates="-inf" scores such candidates as -inf)' if lowest else ""
        raise InvalidRead(f"is {int(ids[at])}; {allowed}{hint}", field=f"{field}[{']['.join(map(str, at))}]")

    def _check_top_k(self, top_k: int) -> None:
        if top_k > self.max_candidates:
            raise InvalidRead(
                f"is {top_k}; this teacher takes at most {self.max_candidates} (its setting max_candidates)",
                field="top_k",
            )
        if top_k > self.vocabulary:
            raise InvalidRead(f"is {top_k}; this teacher's vocabulary has {self.vocabulary} ids", field="top_k")
        if top_k and self.vocabulary > LARGEST_ID:
            raise InvalidRead(
                f"is {top_k}; this teacher's vocabulary has {self.vocabulary} ids, and an answer's float32 holds ids "
                f"exactly up to {LARGEST_ID} only: 0 is allowed here",
                field="top_k",
            )

    def _check_length(self, prompt: int, response: int) -> None:
        if prompt + response + 1 > self.max_length:
            what = f"{prompt} prompt + {response} response tokens" if response else f"{prompt} prompt tokens"
            raise InvalidRead(
                f"{what} + 1 that the engine always makes: {prompt + response}+1 > {self.max_length} "
                "(this teacher's max_model_len)",
                field="response_ids" if response else "prompt_ids",
            )


@dataclass(frozen=True)
class BatchLimits:
    """What the service takes in one call, whoever answers it. The clients cut what is bigger into several calls.

    Attributes:
        max_batch_reads: reads.
        max_batch_tokens: tokens of prompts and responses together.
        max_request_bytes: of the ids, at 4 bytes each; over HTTP also of the body, in whatever form it comes.
        max_answer_bytes: of float32 scores, summed over the reads: 4 x rows x (1 + K + 2 x top_k + one of each of
            the extras), with the rows between those asked for.
    """

    max_batch_reads: int
    max_batch_tokens: int
    max_request_bytes: int
    max_answer_bytes: int

    def check(self, batch: MatrixBatch | LabelBatch) -> None:
        """Raise `BatchTooLarge`, with the limits in its details, when the batch is more than one call may hold."""
        for name, sizes in _sizes(batch).items():
            if (size := int(sizes.sum())) > getattr(self, name):
                raise self.exceeded(name, size)

    def check_body(self, size: int) -> None:
        """Raise `BatchTooLarge` when a request's body has more than `max_request_bytes`."""
        if size > self.max_request_bytes:
            raise self.exceeded("max_request_bytes", size)

    def exceeded(self, name: str, size: int) -> BatchTooLarge:
        return BatchTooLarge(
            f"{size} {_UNITS[name]} in one call; at most {getattr(self, name)} are taken (the application's "
            f"limits.{name}): send several calls",
            **asdict(self),
        )

    def cut(self, batch: MatrixBatch | LabelBatch) -> list[np.ndarray]:
        """The reads of a batch (int64, rising) in pieces that each hold as many as one call may; a read that is too
        big by itself is a piece of its own."""
        ends = {name: bounds_of(sizes) for name, sizes in _sizes(batch).items()}
        pieces, start = [], 0
        while start < len(batch):
            fits = (np.searchsorted(end, end[start] + getattr(self, name), "right") - 1 for name, end in ends.items())
            stop = max(int(min(fits)), start + 1)
            pieces.append(np.arange(start, stop))
            start = stop
        return pieces


_UNITS = {
    "max_batch_reads": "reads",
    "max_batch_tokens": "tokens",
    "max_request_bytes": "bytes of ids",
    "max_answer_bytes": "bytes of scores",
}


def _sizes(batch: MatrixBatch | LabelBatch) -> dict[str, np.ndarray]:
    """Per limit what each read adds to it, int64 [N]."""
    return {
        "max_batch_reads": np.ones(len(batch), np.int64),
        "max_batch_tokens": batch.tokens(),
        "max_request_bytes": batch.request_bytes(),
        "max_answer_bytes": batch.answer_bytes(),
    }
