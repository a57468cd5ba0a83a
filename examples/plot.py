"""The picture of a run beside its control: what was learned, at what cost to the rest, and where the time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.evaluation import baseline

COLOURS = {"sample": "tab:blue", "score": "tab:orange", "learn": "tab:green"}
STEPS_SHOWN = 3


def draw(files: list[Path], path: Path) -> None:
    """Three panels as a PNG.

    Args:
        files: logs of finished runs, the run itself and its control; of those that are not there, or are of other
            settings than the first, nothing is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    logs = [log for log in map(read_log, files) if log]
    logs = [log for log in logs if all(log.get(what) == logs[0].get(what) for what in ("settings", "teacher"))]
    figure, (curve, guards, time) = pyplot.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    for log in logs:
        _curve(curve, log)
    curve.set(title="reverse KL on held-out samples, nats per token", xlabel="step", yscale="log")
    curve.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    curve.yaxis.set_major_formatter("{x:g}")
    curve.yaxis.set_minor_formatter(ticker.NullFormatter())
    curve.legend()
    _guards(guards, logs[0])
    _strip(time, logs[0])
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def read_log(file: Path) -> dict[str, Any] | None:
    """The log of a finished run; None where there is none that can be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _curve(panel: Any, log: dict[str, Any]) -> None:
    found = _after_warm_up(log)
    panel.errorbar(
        [e["step"] for e in found],
        [e["reverse_kl"] for e in found],
        yerr=[e["reverse_kl_error"] for e in found],
        marker="o",
        capsize=3,
        color="tab:red" if log["shuffled"] else "tab:blue",
        label="control: shuffled scores" if log["shuffled"] else "the student (bars: standard error)",
    )


def _guards(panel: Any, log: dict[str, Any]) -> None:
    first, found = baseline(log), _after_warm_up(log)
    names = {"forward_kl": "forward KL on text of the teacher", "distinct_2": "distinct-2", "tokens": "length"}
    for name, what in names.items():
        panel.plot([e["step"] for e in found], [e[name] / first[name] for e in found], marker="o", label=what)
    panel.set(title="held out, as a share of the first", xlabel="step", ylim=(0, 1.6))
    panel.legend(loc="upper right")


def _strip(panel: Any, log: dict[str, Any]) -> None:
    """Some steps in the middle as bars over time, and the share of each in the whole."""
    steps = log["steps"][log["warm_steps"] :]
    middle = steps[len(steps) // 2 :][:STEPS_SHOWN]
    ends = [sum(step["learn"][1] for step in middle[:i]) for i in range(len(middle))]
    for row, (name, colour) in enumerate(COLOURS.items()):
        bars = [(end + step[name][0], step[name][1] - step[name][0]) for end, step in zip(ends, middle, strict=True)]
        panel.broken_barh(bars, (row - 0.4, 0.8), color=colour)
    panel.set_yticks(range(3), [f"{name} {log['time'][name]:.0%}" for name in COLOURS])
    panel.invert_yaxis()
    panel.set(title=f"{log['time']['overlap']:.0%} of the scoring while sampling", xlabel="seconds")


def _after_warm_up(log: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in log["evaluations"] if e["step"] >= log["warm_steps"]]
