"""What is finished of an output, in a folder beside it: a file a piece, so that a run that was killed goes on.

A piece is found again when it asks the same of the same teacher: its file carries a key of all its ids and options, and
lies in a folder that is named by the checkpoint, with whatever else must agree for two scores to compare.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoring import score_file
from scoring.cli.ending import WrongInput
from scoring.cli.pieces import Piece
from scoring.errors import ScoringError
from scoring.score_file import ScoreFile
from scoring.scores import LabelScores, MatrixScores


class FinishedPieces:
    """The folder of an output. One run at a time holds it: use it in a `with` block.

    Args:
        output: the file that is to be.
        source: what the scores come from, with the `checkpoint`: all pieces of one output agree in it.

    Raises:
        WrongInput: another run is at work on this output.
    """

    def __init__(self, output: Path, source: Mapping[str, Any]) -> None:
        self._all = Path(f"{output}.pieces")
        others = {name: value for name, value in source.items() if name != "checkpoint"}
        suffix = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = self._all / f"{source['checkpoint']}-{suffix}"
        self._all.mkdir(exist_ok=True)
        self._lock = (self._all / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.folder.mkdir(exist_ok=True)  # gone where another run has just ended
        except (BlockingIOError, FileNotFoundError):
            self._lock.close()
            raise WrongInput(f"{output}: another run is at work on this output (it holds {self._lock.name})") from None

    def __enter__(self) -> FinishedPieces:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):  # nothing is finished, or something is
            self.folder.rmdir()
        if not any(entry.is_dir() for entry in self._all.iterdir()):
            shutil.rmtree(self._all)
        self._lock.close()

    def of_others(self) -> dict[str, int]:
        """Per other folder, which begins with its checkpoint, how many finished pieces it holds."""
        counts = {
            other.name: sum(1 for _ in other.glob("*.safetensors")) for other in self._all.iterdir() if other.is_dir()
        }
        return {name: count for name, count in counts.items() if count and name != self.folder.name}

    def state(self, piece: Piece) -> str:
        """Whether it is "finished", "missing", or "changed": then something else was finished in its place."""
        path = self._path(piece.number)
        if not path.exists():
            return "missing"
        try:
            return "finished" if score_file.about(path).get("key") == piece.key else "changed"
        except (ScoringError, OSError):  # half a file, as a power cut leaves one
            return "missing"

    def put(self, piece: Piece, scores: MatrixScores | LabelScores) -> dict[int, ScoringError]:
        """Keep the answers to the batch of a piece. Returns the errors of its rows, by place in the piece."""
        ids = score_file.ids_of(piece.batch, scores)
        whole = scores.with_failed(piece.bad)
        whole = replace(whole, errors={i: _placed(error, piece.places[i]) for i, error in whole.errors.items()})
        score_file.save(self._path(piece.number), ScoreFile(whole, ids, {"key": piece.key}))
        return whole.errors

    def paths(self, count: int) -> Iterator[Path]:
        """The files of the first pieces."""
        return map(self._path, range(count))

    def discard(self) -> None:
        """Remove what is finished: the output holds it all. What is of another checkpoint stays."""
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.safetensors"


def _placed(error: ScoringError, place: str) -> ScoringError:
    """The error with the place of its row in the input, in its details."""
    placed = error.at(error.read)
    placed.details = {**error.details, "place": place}
    return placed
