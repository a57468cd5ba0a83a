"""Scores are Hugging Face's scores: float32 engines to rounding, bfloat16 ones no further off than Hugging Face.

Expected values come from a Hugging Face forward pass over the whole sequence (`tests/oracle.py`), never from the
code under test.
"""

import asyncio
import dataclasses
import doctest
import json
import math
import time

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from scoring import LabelBatch, LabelRead, MatrixRead, MatrixScores
from scoring.batches import MatrixBatch
from scoring.divergence import forward_kl, jsd, k1, reverse_kl, student_scores
from scoring.engine import TeacherEngine
from scoring.errors import SelfTestFailed
from scoring.reads import EXTRAS
from tests import golden_read
from tests.engine_process import EngineProcess
from tests.memory import read_and_weigh
from tests.oracle import hf_logprobs
from tests.shared_prompts import (
    check_every_start,
    check_kinds,
    check_preemption,
    check_with_and_without,
    counter,
)
from tests.weights import changed_checkpoint, take_weights

V = 2048
TINY = 3e-5  # float32 on the tiny teacher, nats
SMOLLM2 = 5e-4  # float32 on SmolLM2: 30 layers, and logits ten times as large

PROSE = (
    "My grandmother kept a notebook in the drawer of the kitchen table, and every evening she wrote down what the "
    "weather had been, what had been picked in the garden and who had come to the door. She never wrote more than "
    "three lines. When she died, we found forty of these notebooks in the attic, the oldest of them from the year "
    "she was married. My brother wanted to throw them away, because nothing ever happens in them, but I took them "
    "home and read them in a single winter. It is true that nothing happens. The apples are early, then they are "
    "late. A man comes to repair the roof and does not finish. The dog is ill, the dog is better, the dog is not "
    "mentioned again. But after a few hundred pages I began to notice the small changes: how a name appears once a "
    "month, then every week, then every day, and how one morning in March the lines are written in another hand, "
    "and for eleven days the weather is not mentioned at all."
)


def ids(count: int, seed: int = 0, vocabulary: int = V) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def candidates_of(rows: int, width: int, seed: int = 1) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, V, (rows, width)).tolist()


def expected(table: torch.Tensor, read: dict, rows: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What a read's answer is, from the oracle's table [T, V]: float32 [n, K] and [n].

    Row r is position C - 1 + r of the table; a pad and a column that a short row lacks are -inf.
    """
    first, response, candidates = len(read["prompt_ids"]) - 1, read["response_ids"], read.get("candidate_ids")
    rows = list(range(len(response))) if rows is None else rows
    per_row = [[]] * len(response) if candidates is None else candidates
    if per_row and not isinstance(per_row[0], list):
        per_row = [candidates] * len(response)
    width = max(map(len, per_row), default=0)
    scores = np.full((len(rows), width), -np.inf, np.float32)
    for i, r in enumerate(rows):
        for k, candidate in enumerate(per_row[r]):
            if candidate >= 0:
                scores[i, k] = table[first + r, candidate]
    own = np.array([table[first + r, response[r]] for r in rows], np.float32)
    return scores, own


def assert_scores(score, wanted: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    for found, due in zip((score.logprobs, score.response_logprobs), wanted, strict=True):
        assert found.dtype == np.float32
        assert found.shape == due.shape
        np.testing.assert_allclose(found, due, rtol=0, atol=tolerance)


def check_read(engine, model, tolerance: float, **read) -> None:
    table = hf_logprobs(model, [*read["prompt_ids"], *read["response_ids"]])
    assert_scores(engine.read_matrix([MatrixRead(**read)])[0], expected(table, read), tolerance)


def assert_asked(score, table: torch.Tensor, read: dict, tolerance: float) -> None:
    """The columns beside the candidates: against the whole distribution of each row, in float64."""
    for r, row in enumerate(score.rows):
        logprobs = table[len(read["prompt_ids"]) - 1 + row].double().numpy()
        if score.tail_logprob is not None:
            candidates = [c for c in read["candidate_ids"][row] if c >= 0]
            tail = np.log(np.exp(np.delete(logprobs, candidates)).sum())
            assert score.tail_logprob[r] == pytest.approx(tail, abs=tolerance)
        if score.entropy is not None:
            assert score.entropy[r] == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=tolerance)
        if score.rank is not None:  # two logits as near as rounding may count either way
            own = logprobs[read["response_ids"][row]]
            assert (logprobs > own + tolerance).sum() < score.rank[r] <= (logprobs >= own - tolerance).sum()
        if score.top_ids is not None:
            # Two logits as near as rounding may come in either order, so ids are held to what they score.
            top_ids = score.top_ids[r]
            assert len(set(top_ids.tolist())) == len(top_ids) == read["top_k"]
            np.testing.assert_allclose(score.top_logprobs[r], logprobs[top_ids], rtol=0, atol=tolerance)
            best = -np.sort(-logprobs)[: len(top_ids)]
            np.testing.assert_allclose(score.top_logprobs[r], best, rtol=0, atol=tolerance)
    for name in EXTRAS:
        found = score.tail_logprob if name == "tail" else getattr(score, name)
        assert (found is not None) == (name in read.get("extras", ()))
    assert (score.top_ids is not None) == bool(read.get("top_k"))


# What runs in the engine's process.


async def read_both(engine, matrices, labels) -> tuple:
    """The answers to matrix reads and label reads that are asked at the same time."""
    return await asyncio.gather(engine.read_matrix(matrices), engine.read_labels(labels))


async def read_by_products(engine, batch, *, share_head: bool):
    """The answer to a batch by an engine with this setting."""
    settings = engine.settings
    engine.settings = dataclasses.replace(settings, share_head=share_head)
    try:
        return await engine.read_matrix(batch)
    finally:
        engine.settings = settings


async def steps_of(engine, batch) -> tuple:
    """The answer to a batch of one read, and in how many steps it was prefilled.

    The engine reports after every step what is still running.
    """
    loggers = engine._llm.logger_manager
    record, running = loggers.record, []

    def watched(*, scheduler_stats, **report):
        running.append(scheduler_stats is not None and scheduler_stats.num_running_reqs > 0)
        record(scheduler_stats=scheduler_stats, **report)

    loggers.record = watched
    try:
        scores = await engine.read_matrix(batch)
    finally:
        del loggers.record
    return scores, sum(running) + 1  # it runs on after every step but the last


# The tiny teacher in float32.


@pytest.mark.parametrize("width", [1, 7, 64, 1024])
def test_candidates_per_position_score_what_hugging_face_says(tiny, tiny_model, width):
    read = {"prompt_ids": ids(37), "response_ids": ids(90, 1), "candidate_ids": candidates_of(90, width)}
    check_read(tiny, tiny_model, TINY, **read)


@pytest.mark.parametrize("width", [1, 7, 64, 1024])
def test_shared_candidates_score_what_hugging_face_says(tiny, tiny_model, width):
    check_read(tiny, tiny_model, TINY, prompt_ids=ids(37), response_ids=ids(90, 1), candidate_ids=ids(width, 2))


def test_without_candidates_the_response_itself_is_scored(tiny, tiny_model):
    check_read(tiny, tiny_model, TINY, prompt_ids=ids(37), response_ids=ids(90, 1))
    (score,) = tiny.read_matrix([MatrixRead(ids(37), ids(90, 1))])
    assert score.logprobs.shape == (90, 0)


def test_short_rows_score_minus_infinity_in_the_columns_they_lack(tiny, tiny_model):
    ragged = [ids(width, seed=width) for width in (5, 0, 1, 9, 3)]
    check_read(tiny, tiny_model, TINY, prompt_ids=ids(20), response_ids=ids(5, 1), candidate_ids=ragged)
    (score,) = tiny.read_matrix([MatrixRead(ids(20), ids(5, 1), [[5, 6, 7], [8], [-1], [9, -1], [4, 4]])])
    assert np.isneginf(score.logprobs).tolist() == [
        [False, False, False],
        [False, True, True],
        [True, True, True],
        [False, True, True],
        [False, False, True],
    ]


def test_a_repeated_candidate_scores_the_same_in_each_column(tiny, tiny_model):
    repeated = [[3, 3, 9, 3], [7, 7, 7, 7], [1, 2, 1, 2]]
    check_read(tiny, tiny_model, TINY, prompt_ids=ids(20), response_ids=[3, 7, 7], candidate_ids=repeated)


def test_row_r_predicts_response_token_r(tiny, tiny_model):
    table = hf_logprobs(tiny_model, [11, 12, 13, 77, 78])
    (one,) = tiny.read_matrix([MatrixRead([11, 12, 13], [77], [[77]])])
    assert one.logprobs.shape == (1, 1)
    assert one.logprobs[0, 0] == pytest.approx(table[2, 77].item(), abs=TINY)
    (two,) = tiny.read_matrix([MatrixRead([11, 12, 13], [77, 78], [[77], [78]])])
    assert two.logprobs[:, 0] == pytest.approx([table[2, 77].item(), table[3, 78].item()], abs=TINY)
    assert two.response_logprobs.tolist() == two.logprobs[:, 0].tolist()
    for neighbour in (table[1, 77].item(), table[3, 77].item()):  # one position early, one late
        assert abs(one.logprobs[0, 0] - neighbour) > 1e-3


def test_the_example_of_a_matrix_read_comes_out_as_it_says(tiny, tiny_model):
    def log_p(prefix: list[int]) -> torch.Tensor:
        return hf_logprobs(tiny_model, prefix)[-1]

    names = {"read_matrix": tiny.read_matrix, "log_p": log_p, "MatrixRead": MatrixRead, "np": np}
    (example,) = doctest.DocTestFinder(recurse=False).find(MatrixRead, "MatrixRead", globs=names)
    assert doctest.DocTestRunner().run(example) == doctest.TestResults(failed=0, attempted=2)


@pytest.mark.parametrize(("prompt", "response"), [(1, 1), (1, 2), (1, 64), (40, 1), (256, 255), (1, 510), (510, 1)])
def test_the_shortest_and_the_longest_reads_are_exact(tiny, tiny_model, prompt, response):
    read = {"prompt_ids": ids(prompt), "response_ids": ids(response, 1), "candidate_ids": candidates_of(response, 7)}
    check_read(tiny, tiny_model, TINY, **read)


@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 511])
def test_labels_score_what_hugging_face_says(tiny, tiny_model, prompt):
    labels = [7, 7, 2047, 0, *ids(124, 3)]  # 128, the most there may be; in the caller's order
    (score,) = tiny.read_labels([LabelRead(ids(prompt), labels)])
    wanted = hf_logprobs(tiny_model, ids(prompt))[-1, labels].numpy()
    assert score.logprobs.dtype == np.float32
    np.testing.assert_allclose(score.logprobs, wanted, rtol=0, atol=TINY)


def test_a_matrix_read_and_a_label_read_of_one_position_agree(tiny):
    prompt, response, labels = ids(50), ids(30, 1), ids(64, 2)
    (matrix,) = tiny.read_matrix([MatrixRead(prompt, response, labels)])
    answers = tiny.read_labels([LabelRead(prompt + response[:r], labels) for r in range(30)])
    np.testing.assert_allclose(matrix.logprobs, [a.logprobs for a in answers], rtol=0, atol=1e-5)


def test_probabilities_over_the_whole_vocabulary_add_up_to_one(tiny):
    prompt, response = ids(50), ids(70, 1)
    low, high = tiny.read_matrix(
        [MatrixRead(prompt, response, range(1024)), MatrixRead(prompt, response, range(1024, 2048))]
    )
    whole = np.concatenate([low.logprobs, high.logprobs], axis=1).astype(np.float64)
    np.testing.assert_allclose(np.exp(whole).sum(axis=1), 1, rtol=0, atol=1e-5)
    assert low.response_logprobs.tolist() == high.response_logprobs.tolist()
    assert whole[range(70), response].tolist() == low.response_logprobs.tolist()


@pytest.mark.parametrize("width", [32, 128])
def test_what_the_likeliest_tokens_leave_is_the_tail(tiny, tiny_model, width):
    prompt, response = ids(50), ids(70, 1)
    table = hf_logprobs(tiny_model, prompt + response)[49:-1].double()
    best = table.topk(width).indices
    (score,) = tiny.read_matrix([MatrixRead(prompt, response, best, extras="tail")])
    due = table.exp().scatter(1, best, 0).sum(dim=1)
    assert 0.01 < due.mean() < 0.9
    for left in (1 - np.exp(score.logprobs.astype(np.float64)).sum(axis=1), np.exp(score.tail_logprob)):
        assert (left >= -1e-5).all()
        np.testing.assert_allclose(left, due, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("candidates", "width"),
    [(np.zeros((0, 5), np.int32), 5), ([3, 4, 5], 3), (None, 0)],
    ids=["rows", "shared", "none"],
)
def test_an_empty_response_has_no_rows_and_keeps_the_width(tiny, candidates, width):
    (score,) = tiny.read_matrix([MatrixRead([5, 6], [], candidates)])
    assert score.logprobs.shape == (0, width)
    assert score.response_logprobs.shape == (0,)
    assert score.rows.tolist() == []


def test_a_batch_of_64_reads_of_mixed_lengths_is_exact(tiny, tiny_model):
    rng = np.random.default_rng(5)
    reads = []
    for i in range(64):
        prompt, response = (int(n) for n in rng.integers(1, 120, 2))
        kinds = [candidates_of(response, i + 1, seed=i), ids(i + 1, seed=i), None]
        reads.append(
            {"prompt_ids": ids(prompt, i), "response_ids": ids(response, 99 - i), "candidate_ids": kinds[i % 3]}
        )
    scores = tiny.read_matrix([MatrixRead(**read) for read in reads])
    assert len(scores) == 64
    assert not scores.errors
    for read, score in zip(reads, scores, strict=True):
        table = hf_logprobs(tiny_model, read["prompt_ids"] + read["response_ids"])
        assert_scores(score, expected(table, read), TINY)


ASKED = [
    {},
    {"extras": ("tail",)},
    {"extras": ("entropy",)},
    {"top_k": 5},
    {"extras": ("tail", "entropy"), "top_k": 1},
    {"extras": EXTRAS, "top_k": 200},
    {"extras": ("rank",), "top_k": 3},
]


def asking_reads(count: int) -> list[dict]:
    """Reads that ask for different things, shorter and longer than a chunk, some for single rows."""
    rng, reads = np.random.default_rng(6), []
    for i in range(count):
        prompt, response = (int(n) for n in rng.integers(1, 110, 2))
        candidates = candidates_of(response, 3 + i, seed=i)
        candidates[0] = [7, 7, 7]  # short, and the same thrice
        rows = sorted(rng.choice(response, 1 + response // 3, replace=False).tolist()) if i % 4 == 3 else None
        read = {"prompt_ids": ids(prompt, i), "response_ids": ids(response, 60 + i), "candidate_ids": candidates}
        reads.append(read | ASKED[i % len(ASKED)] | ({} if rows is None else {"rows": rows}))
    return reads


def test_reads_that_ask_for_different_things_beside_each_other_and_label_reads_are_exact(tiny, tiny_model):
    reads = asking_reads(24)
    labels = LabelBatch.from_reads([LabelRead(ids(50, i), ids(20, i)) for i in range(6)])
    scores, labelled = tiny.call(read_both, MatrixBatch.from_reads([MatrixRead(**read) for read in reads]), labels)
    for read, score in zip(reads, scores, strict=True):
        table = hf_logprobs(tiny_model, read["prompt_ids"] + read["response_ids"])
        assert_scores(score, expected(table, read, read.get("rows")), TINY)
        assert_asked(score, table, read, TINY)
    for i, label in enumerate(labelled):
        wanted = hf_logprobs(tiny_model, ids(50, i))[-1, ids(20, i)]
        np.testing.assert_allclose(label.logprobs, wanted, rtol=0, atol=TINY)


@pytest.mark.parametrize("share_head", [True, False])
def test_rows_score_the_same_with_a_product_of_the_head_for_all_and_with_one_for_each(tiny, tiny_model, share_head):
    reads = asking_reads(12)
    batch = MatrixBatch.from_reads([MatrixRead(**read) for read in reads])
    for read, score in zip(reads, tiny.call(read_by_products, batch, share_head=share_head), strict=True):
        table = hf_logprobs(tiny_model, read["prompt_ids"] + read["response_ids"])
        assert_scores(score, expected(table, read, read.get("rows")), TINY)
        assert_asked(score, table, read, TINY)


def test_what_else_is_asked_for_does_not_change_a_candidates_bits(tiny):
    read = {"prompt_ids": ids(40), "response_ids": ids(50, 1), "candidate_ids": candidates_of(50, 6)}
    (plain,) = tiny.read_matrix([MatrixRead(**read)])
    (more,) = tiny.read_matrix([MatrixRead(**read, top_k=8, extras=EXTRAS)])
    assert more.logprobs.tolist() == plain.logprobs.tolist()
    assert more.response_logprobs.tolist() == plain.response_logprobs.tolist()
    (best,) = tiny.read_matrix([MatrixRead(ids(40), ids(50, 1), more.top_ids)])
    assert best.logprobs.tolist() == more.top_logprobs.tolist()


def test_divergences_from_an_answer_are_those_of_hugging_faces_whole_distributions(tiny, tiny_model):
    """A student's own 64 likeliest tokens at every position, and the tail: in float64 over all 2048 tokens."""
    prompt, response = ids(20), ids(50, 1)
    teacher = hf_logprobs(tiny_model, prompt + response)[19:-1]  # [50, V]
    logits = 0.8 * teacher + torch.tensor(np.random.default_rng(2).normal(0, 0.5, teacher.shape), dtype=torch.float32)
    candidates = logits.topk(64).indices
    score = tiny.read_matrix([MatrixRead(prompt, response, candidates, extras=("tail",))])[0]
    student = student_scores(logits, candidates, response)
    tails = {"student_tail": student.tail_logprob, "teacher_tail": score.tail_logprob}
    pi, nu = logits.double().softmax(-1).numpy(), np.exp(teacher.double().numpy())
    parts = []
    for side in (pi, nu):
        inside = np.take_along_axis(side, candidates.numpy(), 1)
        outside = side.copy()
        np.put_along_axis(outside, candidates.numpy(), 0, axis=1)
        parts.append(np.hstack([inside, outside.sum(axis=1, keepdims=True)]))
    p, t = parts
    m = (p + t) / 2
    due = {
        forward_kl: (t * np.log(t / p)).sum(1),
        reverse_kl: (p * np.log(p / t)).sum(1),
        jsd: ((t * np.log(t / m)).sum(1) + (p * np.log(p / m)).sum(1)) / 2,
    }
    for loss, values in due.items():
        found = loss(student.logprobs, score.logprobs, candidates, **tails)
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-4)
        assert values.min() > 0.01
    own = np.take_along_axis(np.log(pi / nu), np.array(response)[:, None], 1)[:, 0]
    np.testing.assert_allclose(k1(student.response_logprobs, score.response_logprobs), own, rtol=0, atol=1e-4)


def test_without_rows_there_is_nothing_of_what_is_asked_for(tiny):
    (score,) = tiny.read_matrix([MatrixRead([5], [], top_k=3, extras=("tail",))])
    assert score.top_ids.shape == score.top_logprobs.shape == (0, 3)
    assert score.tail_logprob.shape == (0,)
    assert score.entropy is None


def test_neighbours_and_order_do_not_change_a_score(tiny):
    reads = [MatrixRead(ids(20 + 7 * i, i), ids(60 - 3 * i, 50 + i), ids(16, i)) for i in range(16)]
    alone = [tiny.read_matrix([read])[0] for read in reads]
    for order in (range(16), reversed(range(16)), np.random.default_rng(3).permutation(16).tolist()):
        order = list(order)
        together = tiny.read_matrix([reads[i] for i in order])
        for i, score in zip(order, together, strict=True):
            np.testing.assert_allclose(score.logprobs, alone[i].logprobs, rtol=0, atol=1e-5)
            np.testing.assert_allclose(score.response_logprobs, alone[i].response_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "answered"),
    [
        (slice(5, 9), [5, 6, 7, 8]),
        (slice(None, None, 5), [0, 5, 10]),
        ([5, 9], [5, 9]),
        ([9, 0, 5], [9, 0, 5]),
        (np.array([11]), [11]),
        ([r in (0, 3, 11) for r in range(12)], [0, 3, 11]),
        (np.arange(12) > 9, [10, 11]),
        ([], []),
        ([False] * 12, []),
    ],
    ids=["slice", "stride", "list", "order", "array", "flags", "mask", "none", "no-flags"],
)
@pytest.mark.parametrize("kind", ["rows", "shared", "omitted"])
def test_chosen_rows_are_those_of_the_full_answer_bit_for_bit(tiny, kind, rows, answered):
    candidates = {"rows": candidates_of(12, 5), "shared": ids(5), "omitted": None}[kind]
    prompt, response = ids(60), ids(12, 1)  # the border of the first chunk lies inside the response
    (full,) = tiny.read_matrix([MatrixRead(prompt, response, candidates)])
    (part,) = tiny.read_matrix([MatrixRead(prompt, response, candidates, rows=rows)])
    assert part.rows.tolist() == answered
    assert part.logprobs.tolist() == full.logprobs[answered].tolist()
    assert part.response_logprobs.tolist() == full.response_logprobs[answered].tolist()
    assert part.logprobs.shape == (len(answered), 0 if kind == "omitted" else 5)


def test_two_slices_laid_end_to_end_are_the_full_answer_bit_for_bit(tiny):
    prompt, response, candidates = ids(31), ids(480, 1), candidates_of(480, 16)
    full, first, second = tiny.read_matrix(
        [MatrixRead(prompt, response, candidates, rows=rows) for rows in (None, slice(0, 240), slice(240, 480))]
    )
    assert np.concatenate([first.logprobs, second.logprobs]).tolist() == full.logprobs.tolist()
    assert (
        np.concatenate([first.response_logprobs, second.response_logprobs]).tolist() == full.response_logprobs.tolist()
    )


def test_sampling_defaults_of_the_checkpoint_change_nothing(tiny, tiny_path, tiny_model):
    assert json.loads((tiny_path / "generation_config.json").read_text())["top_k"] == 20
    # Far more than 20 candidates, most of them outside the 20 best: none is -inf and none is scaled.
    read = {"prompt_ids": ids(10), "response_ids": ids(10, 1), "candidate_ids": ids(500, 2)}
    check_read(tiny, tiny_model, TINY, **read)
    (labels,) = tiny.read_labels([LabelRead(ids(10), ids(128, 2))])
    np.testing.assert_allclose(labels.logprobs, hf_logprobs(tiny_model, ids(10))[-1, ids(128, 2)], rtol=0, atol=TINY)


@pytest.mark.parametrize("length", [65, 63])
def test_the_same_read_twice_gives_the_same_answer(tiny, tiny_model, length):
    read = {"prompt_ids": ids(length - 20), "response_ids": ids(20, 1), "candidate_ids": candidates_of(20, 8)}
    check_read(tiny, tiny_model, TINY, **read)
    first, second = (tiny.read_matrix([MatrixRead(**read)])[0] for _ in range(2))
    assert second.logprobs.shape == (20, 8)
    assert second.logprobs.tolist() == first.logprobs.tolist()


def test_a_label_read_after_a_matrix_read_of_the_same_tokens_is_exact(tiny, tiny_model):
    prompt = ids(200, 77)
    tiny.read_matrix([MatrixRead(prompt[:100], prompt[100:])])
    (score,) = tiny.read_labels([LabelRead(prompt, [1, 2, 3])])
    assert score.meta.cached_tokens == 192  # whole blocks of 32, the last token never
    np.testing.assert_allclose(score.logprobs, hf_logprobs(tiny_model, prompt)[-1, [1, 2, 3]], rtol=0, atol=TINY)


def test_the_golden_numbers_are_still_those_of_hugging_face():
    record = json.loads(golden_read.FILE.read_text())
    made_with = f"made with torch {record['torch']} and transformers {record['transformers']}"
    np.testing.assert_allclose(golden_read.compute(), record["logprobs"], rtol=0, atol=5e-5, err_msg=made_with)


def test_the_golden_read_gives_its_golden_numbers(tiny):
    record = json.loads(golden_read.FILE.read_text())
    (score,) = tiny.read_matrix([MatrixRead(record["prompt_ids"], record["response_ids"], record["candidate_ids"])])
    assert score.logprobs.size == 60
    np.testing.assert_allclose(score.logprobs, record["logprobs"], rtol=0, atol=5e-5)


# How the engine cuts the work.


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200])
def test_chunked_prefill_scores_as_one_prefill_does(tiny, tiny_cramped, tiny_model, length):
    read = {"prompt_ids": ids(20, length), "response_ids": ids(length - 20, 1), "candidate_ids": ids(16, 2)}
    batch = MatrixBatch.from_reads([MatrixRead(**read)])
    (in_chunks,), chunks = tiny.call(steps_of, batch)
    (at_once,), one = tiny_cramped.call(steps_of, batch)
    assert (chunks, one) == (math.ceil(length / 64), 1)
    np.testing.assert_allclose(in_chunks.logprobs, at_once.logprobs, rtol=0, atol=1e-5)
    assert_scores(at_once, expected(hf_logprobs(tiny_model, read["prompt_ids"] + read["response_ids"]), read), TINY)


def test_reads_that_were_preempted_are_exact(tiny_cramped, tiny_model):
    reads = [
        {"prompt_ids": ids(60, i), "response_ids": ids(340, 20 + i), "candidate_ids": candidates_of(340, 8, seed=i)}
        | ASKED[i % 4]
        for i in range(8)
    ]
    before = tiny_cramped.call(counter, "vllm:num_preemptions")
    scores = tiny_cramped.read_matrix([MatrixRead(**read) for read in reads])
    assert tiny_cramped.call(counter, "vllm:num_preemptions") - before >= 4
    for read, score in zip(reads, scores, strict=True):
        table = hf_logprobs(tiny_model, read["prompt_ids"] + read["response_ids"])
        assert_scores(score, expected(table, read), TINY)
        assert_asked(score, table, read, TINY)


# The prefix cache, read up to the first scored row.


def test_reads_of_one_prompt_score_the_same_with_and_without_the_cache(tiny, tiny_model):
    check_with_and_without(tiny, tiny_model, 6, seed=510)


def test_a_read_that_begins_in_the_cache_is_exact_wherever_its_first_row_is(tiny, tiny_model):
    check_every_start(tiny, tiny_model, seed=520)


def test_both_kinds_of_reads_of_one_prompt_are_exact(tiny, tiny_model):
    check_kinds(tiny, tiny_model, seed=530)


def test_reads_of_one_prompt_that_preempt_each_other_are_exact(tiny_cramped, tiny_model):
    check_preemption(tiny_cramped, tiny_model, seed=540)


# The self-test of a new engine, asked of engines that are as exact as this file says, and of one made to be wrong.


async def time_of_self_test(engine: TeacherEngine) -> tuple[float, float]:
    """Seconds that the self-test takes, and how long a full step may take after it."""
    started = time.monotonic()
    await engine.self_test()
    return time.monotonic() - started, engine.progress().longest_step_s


async def cached_in_self_test(engine: TeacherEngine) -> list[list[int]]:
    """How many tokens were cached, per read of each of the self-test's batches of matrix reads."""
    read_matrix, cached = engine._read_matrix, []

    async def watched(batch, **options):
        scores = await read_matrix(batch, **options)
        cached.append(scores.cached_tokens.tolist())
        return scores

    engine._read_matrix = watched
    try:
        await engine.self_test()
    finally:
        del engine._read_matrix
    return cached


async def self_test_with_a_stale_row(engine: TeacherEngine) -> None:
    """The self-test of an engine that answers a row of the last of several reads with the row after it."""
    read_matrix = engine._read_matrix

    async def wrong(batch: MatrixBatch, **options) -> MatrixScores:
        scores = await read_matrix(batch, **options)
        values = scores.values.copy()
        values[-5 * 8 : -4 * 8] = values[-4 * 8 : -3 * 8]
        return scores if len(batch) == 1 else dataclasses.replace(scores, values=values)

    engine._read_matrix = wrong
    try:
        await engine.self_test()
    finally:
        del engine._read_matrix


def check_self_test(engine: EngineProcess) -> None:
    seconds, step = engine.call(time_of_self_test)
    assert seconds < 30
    assert 0 < step < 60


def test_exact_engines_pass_their_self_test_in_seconds_and_say_how_long_a_step_may_take(tiny, tiny_cramped):
    check_self_test(tiny)
    check_self_test(tiny_cramped)


def test_the_self_test_reads_cold_and_from_the_cache(tiny):
    assert tiny.call(cached_in_self_test) == [[0], [0], [0, 0], [32]]


def test_an_engine_with_one_stale_row_in_a_second_chunk_fails_its_self_test(tiny):
    with pytest.raises(SelfTestFailed, match="copy 1 of 2 of a read at once and the read alone differ"):
        tiny.call(self_test_with_a_stale_row)


def test_logits_are_hugging_faces_logits(tiny_logits, tiny_model):
    read = {"prompt_ids": ids(37), "response_ids": ids(90, 1), "candidate_ids": candidates_of(90, 64)}
    with torch.inference_mode():
        logits = tiny_model(torch.tensor([read["prompt_ids"] + read["response_ids"]])).logits[0]  # float32 [T, V]
    (matrix,) = tiny_logits.read_matrix([MatrixRead(**read)])
    assert_scores(matrix, expected(logits, read), TINY)
    (labels,) = tiny_logits.read_labels([LabelRead(read["prompt_ids"], ids(100, 2))])
    np.testing.assert_allclose(labels.logprobs, logits[36, ids(100, 2)], rtol=0, atol=TINY)
    assert matrix.meta.scores == labels.meta.scores == "logits"
    (padded,) = tiny_logits.read_matrix([MatrixRead([5], [6], [[7, -1]])])
    assert np.isneginf(padded.logprobs).tolist() == [[False, True]]
    (best,) = tiny_logits.read_matrix([MatrixRead(**read, top_k=9)])
    wanted = logits[36:-1].topk(9)
    np.testing.assert_allclose(best.top_logprobs, wanted.values, rtol=0, atol=TINY)
    np.testing.assert_array_equal(best.logprobs, matrix.logprobs)


def test_an_engine_of_logits_passes_its_self_test(tiny_logits):
    check_self_test(tiny_logits)


def test_more_rows_than_vllm_scores_at_once_are_exact(tiny_logits, tiny_model):
    # vLLM takes 1024 rows of logits at a time.
    read = {"prompt_ids": ids(100), "response_ids": ids(1900, 1), "candidate_ids": candidates_of(1900, 3)}
    with torch.inference_mode():
        logits = tiny_model(torch.tensor([read["prompt_ids"] + read["response_ids"]])).logits[0]  # float32 [T, V]
    (scores,), steps = tiny_logits.call(steps_of, MatrixBatch.from_reads([MatrixRead(**read)]))
    assert steps == 1
    assert_scores(scores, expected(logits, read), TINY)


# SmolLM2 on prose.


@pytest.fixture(scope="module")
def prose(smollm2_path) -> list[int]:
    return AutoTokenizer.from_pretrained(smollm2_path)(PROSE)["input_ids"]


@pytest.fixture(scope="module")
def prose_f32(smollm2_path, prose) -> torch.Tensor:
    """What Hugging Face says in float32: log-probabilities [T, 49152]."""
    return hf_logprobs(smollm2_path, prose)


@pytest.fixture(scope="module")
def prose_read(prose, prose_f32) -> dict:
    """Most of the prose as a response, with what is likely at each position and some of what is not, K = 64."""
    likely = prose_f32[39:-1].topk(32).indices.tolist()
    unlikely = np.random.default_rng(0).integers(0, 49_152, (len(likely), 32)).tolist()
    candidates = [a + b for a, b in zip(likely, unlikely, strict=True)]
    return {"prompt_ids": prose[:40], "response_ids": prose[40:], "candidate_ids": candidates}


def mean_error(score, wanted: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.abs(np.column_stack([score.logprobs, score.response_logprobs]) - np.column_stack(wanted)).mean())


def test_smollm2_scores_prose_as_hugging_face_does(smollm2_f32, prose, prose_f32, prose_read):
    assert 200 < len(prose) < 400
    assert_scores(smollm2_f32.read_matrix([MatrixRead(**prose_read)])[0], expected(prose_f32, prose_read), SMOLLM2)
    reads = [
        {"prompt_ids": prose[:1], "response_ids": prose[1:]},
        {"prompt_ids": prose[:1], "response_ids": prose[1:2], "candidate_ids": list(range(0, 49_152, 48))},
        {"prompt_ids": prose[:100], "response_ids": prose[100:150], "candidate_ids": list(range(0, 49_152, 48))},
        {
            "prompt_ids": prose[:100],
            "response_ids": prose[100:117],
            "candidate_ids": [p[: 1 + i] for i, p in enumerate(prose_read["candidate_ids"][60:77])],
        },
    ]
    for read, score in zip(reads, smollm2_f32.read_matrix([MatrixRead(**read) for read in reads]), strict=True):
        assert_scores(score, expected(prose_f32, read), SMOLLM2)
    (labels,) = smollm2_f32.read_labels([LabelRead(prose[:200], [0, 49_151, prose[200]])])
    np.testing.assert_allclose(labels.logprobs, prose_f32[199, [0, 49_151, prose[200]]], rtol=0, atol=SMOLLM2)


@pytest.fixture(scope="module")
def changed_smollm2(smollm2_path, tmp_path_factory):
    """The folder of other weights for SmolLM2, whose head is tied to its embedding."""

    def change(tensors):
        assert "lm_head.weight" not in tensors
        for name, tensor in tensors.items():
            tensor *= 0.8 if "embed_tokens" in name else 1.05 if "down_proj" in name else 1.0

    return changed_checkpoint(tmp_path_factory.mktemp("changed") / "smollm2", smollm2_path, change)


@pytest.fixture(scope="module")
def changed_prose_f32(changed_smollm2, prose, prose_f32) -> torch.Tensor:
    changed = hf_logprobs(changed_smollm2, prose)
    assert (changed - prose_f32).abs().mean() > 1
    return changed


def test_weights_that_smollm2_takes_in_place_score_as_hugging_face_says(
    smollm2_f32, smollm2_path, prose_read, changed_smollm2, changed_prose_f32
):
    smollm2_f32.call(take_weights, changed_smollm2, 1, self_test=False)
    (score,) = smollm2_f32.read_matrix([MatrixRead(**prose_read)])
    smollm2_f32.call(take_weights, smollm2_path, 0, self_test=False)
    assert_scores(score, expected(changed_prose_f32, prose_read), SMOLLM2)


def test_rows_of_a_large_vocabulary_are_never_held_all_at_once(smollm2_f32):
    prompt, response = ids(100, vocabulary=49_152), ids(400, 1, vocabulary=49_152)
    read = {"prompt_ids": prompt, "response_ids": response, "candidate_ids": ids(8, 2, vocabulary=49_152)}
    smollm2_f32.read_matrix([MatrixRead(**read, rows=[0, 399])])  # all but the rows in between
    (score,), here, there = smollm2_f32.call(read_and_weigh, MatrixBatch.from_reads([MatrixRead(**read)]))
    assert score.logprobs.shape == (400, 8)
    assert here < 400 * 8 * 16 + (32 << 20)
    assert there < 256 * 49_152 * 4 + (16 << 20)  # the worker has 256 rows of logits at a time


def test_in_bfloat16_scores_are_no_further_off_than_hugging_faces(
    smollm2_bf16, smollm2_path, prose, prose_f32, prose_read
):
    (score,) = smollm2_bf16.read_matrix([MatrixRead(**prose_read)])
    theirs = expected(hf_logprobs(smollm2_path, prose, torch.bfloat16), prose_read)
    truth = expected(prose_f32, prose_read)
    their_error = float(np.abs(np.column_stack(theirs) - np.column_stack(truth)).mean())
    assert 0.01 < their_error < 0.2
    assert mean_error(score, truth) <= their_error


def test_a_float32_head_brings_a_bfloat16_body_closer_to_the_truth(
    smollm2_bf16, smollm2_bf16_head_f32, prose_f32, prose_read
):
    (plain,) = smollm2_bf16.read_matrix([MatrixRead(**prose_read)])
    (with_head,) = smollm2_bf16_head_f32.read_matrix([MatrixRead(**prose_read)])
    truth = expected(prose_f32, prose_read)
    assert mean_error(with_head, truth) < mean_error(plain, truth)
    assert (plain.meta.dtype, plain.meta.head_dtype) == ("bfloat16", "bfloat16")
    assert (with_head.meta.dtype, with_head.meta.head_dtype) == ("bfloat16", "float32")


def test_a_bfloat16_engine_passes_its_self_test(smollm2_bf16):
    check_self_test(smollm2_bf16)


def test_weights_that_are_taken_in_place_in_bfloat16_are_all_taken(
    smollm2_bf16, smollm2_path, prose_read, changed_smollm2, changed_prose_f32
):
    smollm2_bf16.call(take_weights, changed_smollm2, 1, self_test=False)
    (score,) = smollm2_bf16.read_matrix([MatrixRead(**prose_read)])
    smollm2_bf16.call(take_weights, smollm2_path, 0, self_test=False)
    assert mean_error(score, expected(changed_prose_f32, prose_read)) < 0.2
