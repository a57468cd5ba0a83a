"""How a matrix read's answer is laid out: one float32 row per scored position, everything asked for side by side.

The engine's workers fill such rows, they travel as they are, and a caller gets views of them.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_ID = 1 << 24
"""Ids up to here are exact in float32."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one read, in this order: the response's own token, K candidates, the tail (if asked), the
    entropy (if asked), the ids of the teacher's own `top_k` best tokens, their log-probabilities.

    Attributes:
        candidates: K.
        top_k: how many of the teacher's own best.
        tail, entropy: whether they are asked for.
    """

    candidates: int
    top_k: int = 0
    tail: bool = False
    entropy: bool = False

    @property
    def width(self) -> int:
        """Columns of a row, all in all."""
        return self._top_at + 2 * self.top_k

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for but the response's own token and the candidates."""
        return not (self.top_k or self.tail or self.entropy)

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
    def top_ids_at(self) -> slice:
        return slice(self._top_at, self._top_at + self.top_k)

    @property
    def top_logprobs_at(self) -> slice:
        return slice(self._top_at + self.top_k, self._top_at + 2 * self.top_k)

    @property
    def _top_at(self) -> int:
        return 1 + self.candidates + self.tail + self.entropy
