"""What the two forms of the wire cost: one batch and its answer through JSON, and through safetensors.

    python -m benchmarks.wire

Counted is the processor time of everything that is done to the bytes of one call of 64 matrix reads of 4,096 rows and
64 candidates: the request is written, read, and each of its reads checked against a teacher's limits; the answer is
written, read, and held against what was asked. No network and no engine. The forms take turns. Printed are medians with
their range, the ratio within each round, and the memory that each form needs beside the batch and its answer, measured
in a process of its own. Takes about two minutes and 4 GB; `--reads` makes it smaller.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from scoring import MatrixBatch, MatrixRead, MatrixScores, ReadMeta, wire
from scoring.errors import WrongEngineAnswer
from scoring.limits import TeacherLimits

READS, PROMPT, ROWS, CANDIDATES, VOCABULARY = 64, 128, 4096, 64, 151_936
LIMITS = TeacherLimits(VOCABULARY, VOCABULARY, max_length=PROMPT + ROWS + 1, max_candidates=CANDIDATES)
LEAST_RATIO = 50.0


def make_batch(reads: int, rng: np.random.Generator) -> MatrixBatch:
    ids = rng.integers(0, VOCABULARY, (reads, PROMPT + ROWS), dtype=np.int32)
    candidates = rng.integers(0, VOCABULARY, (reads, ROWS, CANDIDATES), dtype=np.int32)
    return MatrixBatch.from_reads([MatrixRead(ids[i, :PROMPT], ids[i, PROMPT:], candidates[i]) for i in range(reads)])


def make_scores(batch: MatrixBatch, rng: np.random.Generator) -> MatrixScores:
    """Random numbers, as many as the batch asks for."""
    count, rows, sizes = len(batch), batch.row_counts(), batch.row_counts() * batch.answer_widths()
    zeros = np.zeros(count, np.int32)
    return MatrixScores(
        values=-rng.standard_exponential(int(sizes.sum()), dtype=np.float32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        widths=batch.widths,
        top_k=batch.top_k,
        extras=batch.extras(),
        rows=batch.answered_rows(),
        row_offsets=np.concatenate([[0], np.cumsum(rows)]),
        prompt_tokens=batch.tokens().astype(np.int32),
        cached_tokens=zeros,
        ids_beyond_tokenizer=zeros,
        next_token=zeros,
        meta_index=zeros,
        metas=(ReadMeta("default", 0, "0123456789abcdef", "vllm", "bfloat16", "float32", "logprobs", 1),),
    )


def through_safetensors(batch: MatrixBatch, scores: MatrixScores) -> tuple[MatrixScores, int]:
    """The answer as the caller gets it, and the bytes of request and answer."""
    request = wire.encode_batch(batch)
    asked, _ = wire.decode_batch("matrix", request)
    check_reads(asked)
    answer = wire.encode_scores(scores)
    answered = wire.decode_scores("matrix", answer)
    wire.check_answer(batch, answered)
    return answered, len(request) + len(answer)


def through_json(batch: MatrixBatch, scores: MatrixScores) -> tuple[MatrixScores, int]:
    """The same in JSON."""
    request = json.dumps(wire.batch_to_json(batch), allow_nan=False).encode()
    reads, _ = wire.reads_from_json("matrix", wire.loads(request))
    check_reads(MatrixBatch.from_reads(reads))
    answer = wire.encode_json(scores)
    answered = wire.scores_from_json("matrix", wire.loads(answer, WrongEngineAnswer))
    wire.check_answer(batch, answered)
    return answered, len(request) + len(answer)


FORMS = {"JSON": through_json, "safetensors": through_safetensors}


def check_reads(batch: MatrixBatch) -> None:
    for read in batch:
        LIMITS.check_matrix(read)


def measure(rounds: int = 5, reads: int = READS) -> list[dict[str, Any]]:
    """Rows of figures: `name`, `unit`, `values` (one a round), `due` (what the median is held to, or None).

    Raises:
        WrongEngineAnswer: an answer did not come through unchanged.
    """
    rng = np.random.default_rng(0)
    batch = make_batch(reads, rng)
    scores = make_scores(batch, rng)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    sizes: dict[str, int] = {}
    for turn in range(rounds):
        for form in list(FORMS)[:: 1 if turn % 2 else -1]:
            started = time.process_time()
            answered, sizes[form] = FORMS[form](batch, scores)
            seconds[form].append(time.process_time() - started)
            if not np.array_equal(answered.values, scores.values):
                raise WrongEngineAnswer(f"the scores came out of {form} changed")
            del answered
    ratios = [slow / quick for slow, quick in zip(seconds["JSON"], seconds["safetensors"], strict=True)]
    what = f"{reads} reads of {ROWS} rows x {CANDIDATES}"
    return [
        _row(f"{what}: JSON to safetensors, processor time", "x", ratios, f">= {LEAST_RATIO:g} x"),
        *(_row(f"{what} through {form}, processor time", "s", values) for form, values in seconds.items()),
        *(_row(f"{what} through {form}, bytes of request and answer", "MB", [n / 1e6]) for form, n in sizes.items()),
    ]


def peaks(reads: int = READS) -> list[dict[str, Any]]:
    """Rows of figures as of `measure`: the memory that each form needs."""
    what = f"{reads} reads of {ROWS} rows x {CANDIDATES}"
    return [_row(f"{what} through {form}, memory at its peak", "MB", [_in_own_process(form, reads)]) for form in FORMS]


def _row(name: str, unit: str, values: list[float], due: str | None = None) -> dict[str, Any]:
    return {"name": name, "unit": unit, "values": values, "due": due}


def _in_own_process(form: str, reads: int) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_megabytes, form, reads).result()


def peak_megabytes(form: str, reads: int) -> float:
    """What one call takes of memory at its peak, beside the batch and its answer. Linux only."""
    rng = np.random.default_rng(0)
    batch = make_batch(reads, rng)
    scores = make_scores(batch, rng)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    FORMS[form](batch, scores)
    return (_status("VmHWM") - before) / 1e3


def _status(name: str) -> int:
    """A number of kilobytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def line(row: dict[str, Any]) -> str:
    """A row of figures in words: the median, its range, what is due."""
    values, shown = row["values"], _shown(row["unit"])
    spread = f" ({shown(min(values))} to {shown(max(values))})" if len(values) > 1 else ""
    due = f"; {row['due']} is due" if row["due"] else ""
    return f"{row['name']}: {shown(statistics.median(values))} {row['unit']}{spread}{due}"


def _shown(unit: str) -> Callable[[float], str]:
    return {"s": "{:.3g}", "x": "{:.0f}", "MB": "{:,.0f}"}[unit].format


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each form is taken (default 5)")
    parser.add_argument("--reads", type=int, default=READS, help=f"reads of the batch (default {READS})")
    options = parser.parse_args()
    for row in [*measure(options.rounds, options.reads), *peaks(options.reads)]:
        print(line(row))


if __name__ == "__main__":
    main()
