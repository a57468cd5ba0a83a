"""How a matrix read's answer is laid out: one float32 row per scored position, everything asked for side by side.

The engine's workers fill such rows, they travel as they are, and a caller gets views of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TAIL, ENTROPY, RANK = 1, 2, 4
"""Bits of an answer's `extras`."""

LARGEST_ID = 1 << 24
"""Ids, and ranks, up to here are exact in float32."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one read, in this order: the response's own token, K candidates, the tail (if asked), the
    entropy (if asked), the rank (if asked), the ids of the teacher's own `top_k` best tokens, their log-probabilities.

    Attributes:
        candidates: K.
        top_k: how many of the teacher's own best.
        tail, entropy, rank: whether they are asked for.
    """

    candidates: int
    top_k: int = 0
    tail: bool = False
    entropy: bool = False
    rank: bool = False

    @classmethod
    def of(cls, candidates: int, top_k: int, extras: int) -> Columns:
        """The columns by the three numbers that an answer carries of each read; `extras` has the bits above."""
        return cls(candidates, top_k, bool(extras & TAIL), bool(extras & ENTROPY), bool(extras & RANK))

    @property
    def extras(self) -> int:
        """Tail, entropy and rank in the bits above."""
        return TAIL * self.tail | ENTROPY * self.entropy | RANK * self.rank

    @property
    def width(self) -> int:
        """Columns of a row, all in all."""
        return self._top_at + 2 * self.top_k

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for but the response's own token and the candidates."""
        return not (self.top_k or self.extras)

    @property
    def response_at(self) -> int:
        return 0

    @property
    def candidates_at(self) -> slice:
        return slice(1, 1 + self.candidates)

    @property
    def tail_at(self) -> int | None:
        return 1 + self.candidates if self.tail else None

    @property
    def entropy_at(self) -> int | None:
        return 1 + self.candidates + self.tail if self.entropy else None

    @property
    def rank_at(self) -> int | None:
        return 1 + self.candidates + self.tail + self.entropy if self.rank else None

    @property
    def top_ids_at(self) -> slice:
        return slice(self._top_at, self._top_at + self.top_k)

    @property
    def top_logprobs_at(self) -> slice:
        return slice(self._top_at + self.top_k, self._top_at + 2 * self.top_k)

    def apart(self, block: np.ndarray) -> dict[str, np.ndarray | None]:
        """float32 [..., width] by the names of a `MatrixScore`: views, except ids and ranks; None what is not asked
        for."""
        return {
            "logprobs": block[..., self.candidates_at],
            "response_logprobs": block[..., self.response_at],
            "top_ids": block[..., self.top_ids_at].astype(np.int32) if self.top_k else None,
            "top_logprobs": block[..., self.top_logprobs_at] if self.top_k else None,
            "tail_logprob": block[..., self.tail_at] if self.tail else None,
            "entropy": block[..., self.entropy_at] if self.entropy else None,
            "rank": block[..., self.rank_at].astype(np.int32) if self.rank else None,
        }

    def name_of(self, column: int) -> str:
        """What stands in a column of a row, for errors."""
        if column == self.response_at:
            return "response_logprobs"
        if column <= self.candidates:
            return f"col {column - 1}"
        for at, name in ((self.tail_at, "tail_logprob"), (self.entropy_at, "entropy"), (self.rank_at, "rank")):
            if column == at:
                return name
        top, place = divmod(column - self._top_at, self.top_k)
        return f"{('top_ids', 'top_logprobs')[top]} col {place}"

    @property
    def _top_at(self) -> int:
        return 1 + self.candidates + self.tail + self.entropy + self.rank


def widths_of(candidates: np.ndarray, top_k: np.ndarray, extras: np.ndarray) -> np.ndarray:
    """int64 [N]: `Columns.of(...).width` of N reads."""
    asked = sum((extras & bit > 0).astype(np.int64) for bit in (TAIL, ENTROPY, RANK))
    return 1 + candidates + 2 * top_k.astype(np.int64) + asked
