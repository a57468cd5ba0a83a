"""The start-up self-test finds the faults that engines have had. `test_exactness.py` asks it of real engines."""

import asyncio

import numpy as np
import pytest

from scoring import LabelBatch, LabelScores, MatrixBatch, MatrixScores, ReadMeta
from scoring.errors import SelfTestFailed, TeacherUnavailable
from scoring.limits import TeacherLimits
from scoring.self_test import WINDOW, Probe, check_engine, plan_probe

# The read that is asked.


@pytest.mark.parametrize(
    ("chunk", "max_length", "budget", "probe"),
    [
        (64, 512, 2048, Probe(96, 2, True)),
        (256, 4096, 2048, Probe(320, 2, True)),
        (8192, 40960, 1 << 17, Probe(8256, 2, True)),
        (2048, 2048, 2048, Probe(192, 2, False)),  # its chunks would cost more
        (64, 40, 2048, Probe(39, 2, True)),  # no read is longer than a step; the second of two is divided
        (64, 33, 2048, Probe(31, 3, True)),  # two of 32 would fill a step: none is divided
        (64, 17, 2048, Probe(15, 5, True)),
        (8192, 100, 2048, Probe(99, 2, False)),
    ],
)
def test_the_read_is_longer_than_a_chunk_where_that_is_cheap(chunk, max_length, budget, probe):
    assert plan_probe(chunk, max_length, budget) == probe


def test_a_plan_keeps_to_its_bounds_and_a_chunk_ends_inside_the_last_copy():
    for chunk in range(1, 300):
        for max_length in (3, 17, 33, 65, 129, 512, 4096):
            probe = plan_probe(chunk, max_length, 2048)
            assert 1 < probe.length < max_length
            assert probe.tokens <= 2048
            if probe.chunked:
                last = (probe.copies - 1) * probe.length, probe.copies * probe.length
                ends = range(chunk, last[1], chunk)
                assert any(last[0] < end < last[1] for end in ends), (chunk, max_length, probe)


# What it finds. A stand-in engine, whose right answer is a table.

TABLE = np.random.default_rng(7).normal(-8, 3, (88, 8)).astype(np.float32)  # what eight tokens are followed by
META = ReadMeta("stand-in", 0, "0123456789abcdef", "none", "float32", "float32", "logprobs", 1)


class StandIn:
    """Answers with `TABLE`. `wrong(answer, call, copy)` changes the matrix that it answers with.

    Args:
        noise: standard deviation of what is added to every answer.
    """

    limits = TeacherLimits(vocabulary=2048, tokenizer_size=None, max_length=512, max_candidates=64)

    def __init__(self, wrong=lambda answer, call, copy: answer, wrong_label=lambda row: row, noise=0.0) -> None:
        self.wrong, self.wrong_label, self.noise = wrong, wrong_label, noise
        self.calls = 0
        self.random = np.random.default_rng(3)

    def table(self) -> np.ndarray:
        return TABLE + self.random.normal(0, self.noise, TABLE.shape).astype(np.float32)

    async def read_matrix(self, batch: MatrixBatch, *, timeout_s: float) -> MatrixScores:
        answers = [self.wrong(self.table(), self.calls, copy).astype(np.float32) for copy in range(len(batch))]
        self.calls += 1
        rows = np.arange(len(TABLE)) if batch[0].rows is None else batch[0].rows  # of every read the same
        return MatrixScores(
            values=np.concatenate([answer[rows] for answer in answers]).reshape(-1),
            offsets=np.arange(len(batch) + 1) * len(rows) * TABLE.shape[1],
            widths=np.full(len(batch), TABLE.shape[1] - 1),
            top_k=np.zeros(len(batch), np.int32),
            extras=np.zeros(len(batch), np.int32),
            rows=np.tile(rows, len(batch)),
            row_offsets=np.arange(len(batch) + 1) * len(rows),
            **self.columns(len(batch)),
        )

    async def read_labels(self, batch: LabelBatch, *, timeout_s: float) -> LabelScores:
        (read,) = (batch[i] for i in range(len(batch)))
        values = self.table()[self.wrong_label(len(read.prompt_ids) - 8)]
        return LabelScores(values=values, offsets=np.array([0, len(values)]), **self.columns(1))

    def columns(self, count: int) -> dict:
        zeros = np.zeros(count, np.int32)
        return {
            "prompt_tokens": zeros,
            "cached_tokens": zeros,
            "ids_beyond_tokenizer": zeros,
            "next_token": zeros,
            "meta_index": zeros,
            "metas": (META,),
        }


def check(engine: StandIn, float32: bool) -> None:
    asyncio.run(check_engine(engine, chunk=64, budget=2048, float32=float32))


def shifted(answer: np.ndarray, call: int, copy: int) -> np.ndarray:
    """In copies at once, every row is the one before."""
    return np.roll(answer, 1, axis=0) if call == 2 else answer


def stale(answer: np.ndarray, call: int, copy: int) -> np.ndarray:
    """The second chunk of the later copy is that of other tokens."""
    if (call, copy) == (2, 1):
        answer = answer.copy()
        answer[-WINDOW:] = answer[-WINDOW:][::-1]
    return answer


def unbounded(answer: np.ndarray, call: int, copy: int) -> np.ndarray:
    """After a cached beginning, the rows are those of the next tokens."""
    return np.roll(answer, -1, axis=0) if call == 3 else answer


def first_step(answer: np.ndarray, call: int, copy: int) -> np.ndarray:
    """The first answer has one score that is off by a thousandth."""
    if call == 0:
        answer = answer.copy()
        answer[17, 3] += 1e-3
    return answer


@pytest.mark.parametrize(("float32", "noise"), [(True, 0.0), (True, 1e-5), (False, 0.0), (False, 0.3)])
def test_an_engine_that_is_right_passes(float32, noise):
    check(StandIn(noise=noise), float32)


@pytest.mark.parametrize(("float32", "noise"), [(True, 0.0), (False, 0.3)])
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"wrong": shifted}, "copy 0 of 2 of a read at once and the read alone differ"),
        ({"wrong": stale}, "copy 1 of 2 of a read at once and the read alone differ"),
        ({"wrong": unbounded}, "the later half of a read after a cached beginning and its rows differ"),
        ({"wrong_label": lambda row: row - 1}, "a label read and its row of the matrix differ"),
        ({"wrong": lambda answer, call, copy: -answer if call == 0 else answer}, "the first answer of the engine and"),
    ],
    ids=["shifted", "stale", "cached", "label", "first"],
)
def test_an_engine_that_contradicts_itself_fails_with_the_numbers(engine, words, float32, noise):
    with pytest.raises(SelfTestFailed, match=words) as caught:
        check(StandIn(**engine, noise=noise * float32 or noise), float32)
    assert caught.value.details["difference"] > 1
    assert "is due in" in str(caught.value)


def test_in_float32_a_first_step_that_is_off_by_a_thousandth_is_found():
    with pytest.raises(SelfTestFailed, match=r"differ by 0\.001 at row 17 column 3; at most 0\.0002 is due in float32"):
        check(StandIn(first_step), float32=True)


def test_a_read_that_fails_is_raised():
    class Failing(StandIn):
        async def read_matrix(self, batch, *, timeout_s):
            return MatrixScores.failed(TeacherUnavailable("is not there"), len(batch))

    with pytest.raises(TeacherUnavailable, match="is not there"):
        check(Failing(), float32=True)
