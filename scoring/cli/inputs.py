"""Input files, of the kind their suffix names, row by row. JSON lines here; `parquet.py` has the other kind."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from scoring import wire
from scoring.cli.ending import WrongInput
from scoring.cli.rows import Row, Rows
from scoring.errors import InvalidRead

_LONGEST_LINE = 256 << 20  # bytes: more than one call over HTTP may hold


def open_rows(path: Path, columns: Collection[str]) -> Rows:
    """The rows of a file, of the kind its suffix names.

    Args:
        columns: those that will be looked at.

    Raises:
        WrongInput: there is no such file, or it is of another kind.
    """
    if not path.is_file():
        raise WrongInput(f"{path}: there is no such file")
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if path.suffix == ".parquet":
        from scoring.cli.parquet import ParquetRows

        return ParquetRows(path, columns)
    raise WrongInput(f"{path}: ends in {path.suffix or 'no suffix'!r}; input is .jsonl or .parquet")


class JsonLines:
    """A file with one JSON object a line. Empty lines are passed over, and counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.total = os.path.getsize(path)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as stream:
            number = 0
            while line := stream.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE:
                    raise WrongInput(f"{self._path}:{number}: has {len(line)} bytes and more; is this JSON lines?")
                if not line.isspace():
                    yield Row(f"{self._path}:{number}", len(line), _fields(line))


def _fields(line: bytes) -> dict[str, Any] | InvalidRead:
    try:
        fields = json.loads(str(line, "utf-8-sig"))  # given bytes, it would read what is no UTF-8 too
        if wire.holds_half_a_pair(fields, line):
            raise ValueError("a text in it holds half of a surrogate pair")
    except (ValueError, RecursionError) as wrong:
        return InvalidRead(f"is not JSON: {wrong}")
    if not isinstance(fields, dict):
        return InvalidRead(f"is a {type(fields).__name__}; a row is an object with the columns by name")
    return fields
