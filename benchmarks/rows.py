"""Comparisons: how two ways to the same scores take turns, and the table, the JSON and the picture of what came out.

A row is one ratio. Its two sides get the same reads in the same round of one run, so that what else the machine does,
and how fast it is, falls out. Reported are the median of the rounds' ratios and their range.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Way = Callable[[int], tuple[float, np.ndarray | None]]
"""Answers the reads of a round (0 is not counted): the seconds it took, and the scores, for a look at whether they are
the same as the others' (None where there is nothing to compare)."""


@dataclass(frozen=True)
class Row:
    """What is compared.

    Attributes:
        name: by which it is chosen.
        level: "a" an engine in a process of its own, "b" vLLM's AsyncLLM, "c" through the service, "-" none.
        what, against: the two sides.
        workload: what both are asked.
        due: least ratio, of the other side's seconds (or bytes) to this side's.
    """

    name: str
    level: str
    what: str
    against: str
    workload: str
    due: float


def rows_of(level: str, kinds: Mapping[str, tuple[str, str, str]], teacher: str, due: Mapping[str, float]) -> dict:
    """By kind, the rows of one teacher that something is due of. A kind is (what, against, workload)."""
    return {
        kind: Row(f"{kind}-{teacher}", level, what, against, f"{workload}, {teacher}", due[kind])
        if teacher
        else Row(kind, level, what, against, workload, due[kind])
        for kind, (what, against, workload) in kinds.items()
        if kind in due
    }


@dataclass(frozen=True)
class Result:
    """What came out of a row.

    Attributes:
        ours, theirs: seconds (or what `unit` says) of the two sides, one entry a round.
        notes: whatever else belongs to it.
    """

    row: Row
    ours: list[float]
    theirs: list[float]
    unit: str = "s"
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool:
        return self.ratio >= self.row.due

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.row),
            "ratio": self.ratio,
            "least": min(self.ratios),
            "most": max(self.ratios),
            "holds": self.holds,
            "unit": self.unit,
            "ours": self.ours,
            "theirs": self.theirs,
            **self.notes,
        }


@dataclass(frozen=True)
class Turns:
    """What came out of `take_turns`.

    Attributes:
        seconds: per way, of each round.
        apart: per way, the largest mean difference over one read from the first way's scores.
    """

    seconds: dict[str, list[float]]
    apart: dict[str, float]

    def result(self, row: Row, ours: str, theirs: str, **notes: Any) -> Result:
        apart = {name: self.apart[name] for name in (ours, theirs) if name in self.apart}
        return Result(row, self.seconds[ours], self.seconds[theirs], notes={"apart": apart, **notes})


def say(line: str) -> None:
    """A line of progress."""
    print(f"  {line}", flush=True)


def take_turns(ways: Mapping[str, Way], rounds: int, limit: float) -> Turns:
    """Let all ways answer the reads of a round, one after the other, round after round.

    Args:
        limit: how far a way's scores may be from the first one's, as mean absolute difference over one read.

    Raises:
        AssertionError: a way's scores are others than the first one's: its speed means nothing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    apart: dict[str, float] = {}
    for number in range(rounds + 1):
        due = None
        for name, way in ways.items():
            took, scores = way(number)
            if number:
                seconds[name].append(took)
            if scores is None:
                continue
            due = scores if due is None else due
            apart[name] = max(apart.get(name, 0.0), distance(due, scores))
            assert apart[name] <= limit, (
                f"{name!r} answers other scores than {next(iter(ways))!r}: over one read they are {apart[name]:.3g} "
                f"apart on average; at most {limit} is allowed"
            )
        if number:
            say("   ".join(f"{name} {values[-1]:.3f} s" for name, values in seconds.items()))
    return Turns(seconds, apart)


def distance(due: np.ndarray, scores: np.ndarray) -> float:
    """Largest mean absolute difference over one read, in the leading columns that both have.

    Args:
        due, scores: float32 [N, rows, columns].
    """
    columns = min(due.shape[-1], scores.shape[-1])
    assert due.shape[:-1] == scores.shape[:-1], f"{list(due.shape)} and {list(scores.shape)} scores"
    return float(np.abs(due[..., :columns] - scores[..., :columns]).mean(axis=(1, 2)).max())


def table(results: list[Result]) -> str:
    """One line a row."""
    lines = [f"{'row':<18}{'lv':<4}{'median':>8}{'least':>8}{'most':>8}{'due':>7}        {'what, against what'}"]
    for result in results:
        row = result.row
        lines.append(
            f"{row.name:<18}{row.level:<4}{result.ratio:>8.2f}{min(result.ratios):>8.2f}{max(result.ratios):>8.2f}"
            f"{row.due:>7.2f}  {'ok' if result.holds else 'short':<6}{row.what}, against {row.against}: {row.workload}"
        )
    return "\n".join(lines)


def write_json(path: Path, results: list[Result], conditions: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**conditions, "rows": [r.to_dict() for r in results]}, indent=1) + "\n")


def draw(path: Path, results: list[Result], title: str) -> None:
    """Each row's median and range over the rounds, beside what is due."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(11, 1.6 + 0.36 * len(results)), constrained_layout=True)
    for y, result in enumerate(results):
        colour = "tab:blue" if result.holds else "tab:red"
        panel.plot([min(result.ratios), max(result.ratios)], [y, y], color=colour, linewidth=3, alpha=0.4)
        panel.plot(result.ratio, y, "o", color=colour)
        panel.plot(result.row.due, y, "|", color="black", markersize=14)
        panel.annotate(f"{result.ratio:.2f}", (result.ratio, y), (0, 7), textcoords="offset points", ha="center")
    panel.set_yticks(
        range(len(results)), [f"{r.row.name}: {r.row.what}\nagainst {r.row.against}" for r in results], fontsize=7
    )
    panel.invert_yaxis()
    panel.set_xscale("log")
    ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= 2 * max(r.ratio for r in results)]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.grid(axis="x", alpha=0.3)
    panel.set_xlabel("times as fast; a dot is the median of the rounds, a bar their range, a tick what is due")
    figure.suptitle(title.replace("; ", "\n"), fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
