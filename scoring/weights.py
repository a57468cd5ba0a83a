"""Which weights an engine has: a version, and the checkpoint that they come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Weights:
    """
    Attributes:
        version: 0 are those that a teacher was configured with; every change has a higher one.
        path: folder of the checkpoint, the same on every node, kept as it is for as long as it is served.
        checkpoint: its hash (`checkpoint_hash`): files that were changed since are other weights, and not taken for
            these.
    """

    version: int
    path: str
    checkpoint: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
