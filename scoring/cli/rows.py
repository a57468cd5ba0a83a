"""A row of an input file, with its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from scoring.errors import InvalidRead


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        place: file and line, for people.
        size: how far it brings one through the file, in the units of `Rows.total`.
        fields: its columns by name; or why it is no row.
    """

    place: str
    size: int
    fields: dict[str, Any] | InvalidRead


class Rows(Protocol):
    """A file of rows: how much there is of it, and the rows in order."""

    total: int

    def __iter__(self) -> Iterator[Row]: ...
