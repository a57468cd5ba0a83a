"""A batch is the same reads in a few flat arrays, however it was made: the model is a plain list of reads."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead
from scoring.errors import InvalidRead, ScoringError
from scoring.reads import EXTRAS

IDS = st.integers(0, 2**31 - 1)
OPTIONS = {
    "teacher": st.sampled_from([None, "default", "math"]),
    "priority": st.integers(-5, 5),
    "expect_version": st.none() | st.integers(0, 3),
}


@st.composite
def matrix_reads(draw) -> dict:
    """The fields of a matrix read, in plain lists."""
    response = draw(st.lists(IDS, max_size=6))
    width = draw(st.integers(0, 4))
    row = st.lists(IDS, min_size=width, max_size=width)
    kinds = [st.none(), row]
    if response:
        kinds.append(st.lists(row, min_size=len(response), max_size=len(response)))
    return {
        "prompt_ids": draw(st.lists(IDS, min_size=1, max_size=6)),
        "response_ids": response,
        "candidate_ids": draw(st.one_of(kinds)),
        "rows": draw(st.none() | st.permutations(range(len(response))).map(lambda rows: rows[::2])),
        "top_k": draw(st.integers(0, 3)),
        "extras": draw(st.sampled_from([(), ("tail",), ("entropy",), ("tail", "entropy"), ("rank",), EXTRAS])),
        "unknown_candidates": draw(st.sampled_from(["raise", "-inf"])),
        **{name: draw(values) for name, values in OPTIONS.items()},
    }


@st.composite
def label_reads(draw) -> dict:
    ids = st.lists(IDS, min_size=1, max_size=6)
    return {"prompt_ids": draw(ids), "label_ids": draw(ids), **{name: draw(v) for name, v in OPTIONS.items()}}


@st.composite
def samples(draw) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """Prompt, response and candidates [R, K] of a training batch, the same K in all."""
    width = draw(st.integers(1, 3))
    row = st.lists(IDS, min_size=width, max_size=width)
    return [
        (prompt, response, draw(st.lists(row, min_size=len(response), max_size=len(response))))
        for prompt, response in draw(
            st.lists(
                st.tuples(st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, max_size=5)), min_size=1, max_size=5
            )
        )
    ]


def plain(read: MatrixRead | LabelRead) -> dict:
    """A read's fields as lists and builtins."""
    values = {name: getattr(read, name) for name in type(read).__dataclass_fields__ if name != "_"}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def check_same(batch: MatrixBatch | LabelBatch, reads: list[dict]) -> None:
    assert len(batch) == len(reads)
    assert [plain(read) for read in batch] == reads
    assert [plain(batch[i - len(reads)]) for i in range(len(reads))] == reads


@given(st.lists(matrix_reads(), max_size=6))
def test_a_batch_holds_the_matrix_reads_it_was_made_from(reads):
    batch = MatrixBatch.from_reads([MatrixRead(**read) for read in reads])
    check_same(batch, reads)
    assert batch.tokens().tolist() == [len(r["prompt_ids"]) + len(r["response_ids"]) for r in reads]
    rows = [list(range(len(r["response_ids"]))) if r["rows"] is None else r["rows"] for r in reads]
    assert batch.answered_rows().tolist() == [row for of_read in rows for row in of_read]
    widths = [1 + read.width + len(r["extras"]) + 2 * r["top_k"] for read, r in zip(batch, reads, strict=True)]
    spans = [max(n) - min(n) + 1 if n else 0 for n in rows]
    assert batch.answer_bytes().tolist() == [4 * span * width for span, width in zip(spans, widths, strict=True)]
    assert [read.columns.width for read in batch] == widths
    bits = {"tail": 1, "entropy": 2, "rank": 4}
    assert batch.extras().tolist() == [sum(bits[name] for name in r["extras"]) for r in reads]


@given(st.lists(label_reads(), max_size=6))
def test_a_batch_holds_the_label_reads_it_was_made_from(reads):
    batch = LabelBatch.from_reads([LabelRead(**read) for read in reads])
    check_same(batch, reads)
    assert batch.tokens().tolist() == [len(r["prompt_ids"]) for r in reads]


@given(st.data())
def test_a_selection_holds_the_reads_selected_in_their_order(data):
    reads = data.draw(st.lists(matrix_reads(), min_size=1, max_size=6))
    batch = MatrixBatch.from_reads([MatrixRead(**read) for read in reads])
    indices = data.draw(st.lists(st.integers(-len(reads), len(reads) - 1), max_size=8))
    check_same(batch.select(indices), [reads[i] for i in indices])
    check_same(batch.select(np.array(indices, dtype=np.int64)).select(range(len(indices))), [reads[i] for i in indices])
    with pytest.raises(IndexError):
        batch.select([len(reads)])


@given(st.lists(label_reads(), min_size=1, max_size=6))
def test_a_selection_of_label_reads_holds_them_in_its_order(reads):
    batch = LabelBatch.from_reads([LabelRead(**read) for read in reads])
    check_same(batch.select(range(len(reads))[::-1]), reads[::-1])
    check_same(batch.select([]), [])


@pytest.mark.parametrize("i", [2, -3])
def test_there_is_no_read_outside_the_batch(i):
    with pytest.raises(IndexError, match=f"read {i} of 2"):
        MatrixBatch.from_reads([MatrixRead([1], [2])] * 2)[i]
    with pytest.raises(IndexError, match=f"read {i} of 2"):
        LabelBatch.from_reads([LabelRead([1], [2])] * 2)[i]


@given(samples(), st.data())
def test_padded_tensors_hold_the_same_reads_whichever_side_is_padded(samples, data):
    longest = max(len(prompt) + len(response) for prompt, response, _ in samples) + data.draw(st.integers(0, 2))
    most_rows = max(len(response) for _, response, _ in samples) + data.draw(st.integers(0, 2))
    assume(most_rows != longest)  # that many rows look like one per input token, and are refused
    width = len(next((c[0] for _, _, c in samples if c), [0]))
    ids = np.full((len(samples), longest), 7, np.int64)  # the padding looks like tokens: only the mask tells
    mask = np.zeros_like(ids)
    candidates = np.full((len(samples), most_rows, width), -1)
    for i, (prompt, response, rows) in enumerate(samples):
        length = len(prompt) + len(response)
        start = data.draw(st.integers(0, longest - length))  # left, right, or some of both
        ids[i, start : start + length] = prompt + response
        mask[i, start : start + length] = 1
        candidates[i, : len(rows)] = np.array(rows).reshape(-1, width)
    lens = [len(prompt) for prompt, _, _ in samples]
    form = data.draw(st.sampled_from([lambda x: x, torch.from_numpy]))
    batch = MatrixBatch.from_padded(form(ids), form(mask), form(np.array(lens)), form(candidates), priority=4)
    reads = [
        plain(MatrixRead(prompt, response, np.array(rows).reshape(-1, width), priority=4))
        for prompt, response, rows in samples
    ]
    check_same(batch, reads)
    bare = MatrixBatch.from_padded(ids, mask.astype(bool), lens)
    check_same(bare, [plain(MatrixRead(prompt, response)) for prompt, response, _ in samples])


@given(samples())
def test_packed_tensors_hold_the_same_reads(samples):
    ids = [x for prompt, response, _ in samples for x in prompt + response]
    bounds = np.cumsum([0, *(len(prompt) + len(response) for prompt, response, _ in samples)])
    lens = [len(prompt) for prompt, _, _ in samples]
    width = len(next((c[0] for _, _, c in samples if c), [0]))
    candidates = np.array([row for _, _, rows in samples for row in rows], np.int64).reshape(-1, width)
    batch = MatrixBatch.from_packed(torch.tensor(ids), torch.from_numpy(bounds), lens, candidates, teacher="math")
    check_same(
        batch,
        [
            plain(MatrixRead(prompt, response, np.array(rows).reshape(-1, width), teacher="math"))
            for prompt, response, rows in samples
        ],
    )
    check_same(MatrixBatch.from_packed(ids, bounds, lens), [plain(MatrixRead(p, r)) for p, r, _ in samples])


def test_an_empty_training_batch_is_an_empty_batch():
    assert len(MatrixBatch.from_packed([], [0], [])) == 0
    assert len(MatrixBatch.from_padded(np.zeros((0, 3), int), np.zeros((0, 3)), [])) == 0
    assert len(MatrixBatch.from_reads([])) == len(LabelBatch.from_reads([])) == 0


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        (([[1, 2]], [[1]], [1]), "attention_mask", r"\[1, 1\]; input_ids has \[1, 2\]"),
        (([1, 2], [1, 1], [1]), "input_ids", r"shape \[2\]; allowed is \[B, T\]"),
        (([[1, 2, 3]], [[1, 0, 1]], [1]), "attention_mask", "has a gap"),
        (([[1, 2]], [[1, 1]], [1, 1]), "prompt_lens", "2 entries for 1 rows"),
        (([[1, 2]], [[1, 1]], [3]), r"prompt_lens[0]", "is 3; the sample has 2 tokens"),
        (([[1, 2], [1, 2]], [[1, 1], [1, 0]], [1, 0]), r"prompt_lens[1]", "is 0; the sample has 1 tokens"),
        (([[1, 2]], [[1, 1]], [-1]), r"prompt_lens[0]", "is -1"),
        (([[1, 2]], [[0, 0]], [1]), r"prompt_lens[0]", "is 1; the sample has 0 tokens"),
        (([[1.0, 2.0]], [[1, 1]], [1]), "ids", "float64"),
        (([[1, 2]], [[1, 1]], [1.0]), "prompt_lens[0]", "1.0"),
        (([[1, 2]], [[1, 1]], [1], [[5, 6]]), "candidate_ids", r"shape \[1, 2\]; allowed is \[1, max R, K\]"),
        (([[1, 2, 3]], [[1, 1, 1]], [1], [[[5]]]), "candidate_ids", "has 1 rows; the longest response has 2"),
        (([[1, 2]], [[1, 1]], [1], [[[-1, 5]]]), "candidate_ids[0][0]", "is -1"),
        (([[1, 2]], [[1, 1]], [1], [[[5.5]]]), "candidate_ids", "float64"),
    ],
)
def test_padded_tensors_that_do_not_fit_together_are_refused(arguments, field, message):
    with pytest.raises(InvalidRead, match=message) as caught:
        MatrixBatch.from_padded(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1, 2, 3], [0, 2], [1]), "cu_seqlens"),
        (([1, 2, 3], [1, 3], [1]), "cu_seqlens"),
        (([1, 2, 3], [0, 3], [1, 1]), "cu_seqlens"),
        (([1, 2, 3], [], []), "cu_seqlens"),
        (([1, 2, 3], [0, 2, 1, 3], [1, 1, 1]), "prompt_lens[1]"),
        (([1, 2, 3], [0, 2, 3], [1, 2]), "prompt_lens[1]"),
        (([1, 2, 3], [0, 3], [1], [[5]]), "candidate_ids"),
        (([1, 2, 3], [0, 3], [1], [5, 6]), "candidate_ids"),
        ((np.array([[1, 2, 3]]), [0, 3], [1]), "ids"),
    ],
)
def test_packed_tensors_that_do_not_fit_together_are_refused(arguments, field):
    with pytest.raises(InvalidRead) as caught:
        MatrixBatch.from_packed(*arguments)
    assert caught.value.field == field


def three_reads() -> MatrixBatch:
    return MatrixBatch.from_reads(
        [
            MatrixRead([1, 2], [3, 4], [[5, 6], [7, 8]], rows=[1], teacher="math"),
            MatrixRead([1], [2, 3, 4], [9], priority=2),
            MatrixRead([1, 2, 3], [4], expect_version=1),
        ]
    )


def changed(array: np.ndarray, at: int, value: int) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


ARRAYS = [f.name for f in fields(MatrixBatch) if f.name != "teachers"]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_dtype_or_shape_is_refused_by_name(name):
    batch = three_reads()
    array = getattr(batch, name)
    for wrong in (array.astype(np.float64), array.astype(np.uint64), array[:, None]):
        with pytest.raises(InvalidRead, match="one-dimensional") as caught:
            replace(batch, **{name: wrong})
        assert caught.value.field == name


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_is_too_short_or_too_long_is_refused(name):
    batch = three_reads()
    array = getattr(batch, name)
    for wrong in (array[:-1], np.append(array, array)):
        with pytest.raises(InvalidRead, match=r"reads need|must rise from 0 to"):
            replace(batch, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("offsets", 0, 1),
        ("offsets", -1, 99),
        ("offsets", 1, 9),
        ("candidate_offsets", 0, -1),
        ("candidate_offsets", 2, 3),
        ("row_offsets", -1, 0),
        ("prompt_lens", 0, -1),
        ("prompt_lens", 1, 5),
        ("widths", 0, -2),
        ("teacher_index", 0, 2),
        ("teacher_index", 2, -1),
    ],
)
def test_offsets_and_lengths_that_do_not_fit_are_refused_by_name(name, at, value):
    batch = three_reads()
    with pytest.raises(InvalidRead) as caught:
        replace(batch, **{name: changed(getattr(batch, name), at, value)})
    assert caught.value.field == name


def test_a_teacher_that_is_no_name_is_refused():
    with pytest.raises(InvalidRead, match="teachers: holds 7"):
        replace(three_reads(), teachers=("math", 7))


@pytest.mark.parametrize(
    ("name", "at", "value", "field"),
    [
        ("widths", 0, 3, "candidate_ids"),
        ("widths", 1, 2, "candidate_ids"),
        ("prompt_lens", 1, 0, "prompt_ids"),
        ("prompt_lens", 0, 3, "candidate_ids"),
        ("candidate_ids", 0, -1, "candidate_ids[0][0]"),
        ("candidate_ids", 1, -7, "candidate_ids[0][1]"),
        ("rows", 0, 2, "rows[0]"),
        ("rows", 0, -1, "rows[0]"),
        ("top_k", 0, -1, "top_k"),
        ("expect_version", 0, -2, "expect_version"),
    ],
)
def test_a_batch_from_outside_is_checked_read_by_read(name, at, value, field):
    batch = three_reads()
    tampered = replace(batch, **{name: changed(getattr(batch, name), at, value)})
    with pytest.raises(ScoringError) as caught:
        list(tampered)
    assert caught.value.field == field
    assert plain(tampered[2]) == plain(batch[2])  # the others can still be read


def test_a_width_whose_product_with_the_rows_wraps_in_64_bits_is_refused():
    batch = MatrixBatch.from_reads([MatrixRead([1], [2, 3, 4, 5], np.zeros((4, 0), np.int32))])
    tampered = replace(batch, widths=np.array([2**62], np.int64))  # 4 times that is 0 in int64, and 0 ids are there
    with pytest.raises(InvalidRead, match="candidate_ids: has 0 ids"):
        tampered[0]


def test_reads_of_a_batch_are_views_of_its_arrays():
    batch = three_reads()
    assert np.shares_memory(batch[0].prompt_ids, batch.ids)
    assert np.shares_memory(batch[0].response_ids, batch.ids)
    assert np.shares_memory(batch[0].candidate_ids, batch.candidate_ids)


def test_what_is_no_batch_and_no_list_of_reads_is_refused_with_a_sentence():
    read = MatrixRead([1], [2])
    assert len(MatrixBatch.of([read, read])) == 2
    batch = MatrixBatch.from_reads([read])
    assert MatrixBatch.of(batch) is batch
    assert len(MatrixBatch.of(r for r in (read,))) == 1
    for wrong, said in (
        (read, "reads: is a MatrixRead; allowed is a list of MatrixRead, or a MatrixBatch"),
        ("reads", "reads: is a str"),
        ({"prompt_ids": [1]}, "reads: is a dict"),
        ([read, LabelRead([1], [2])], "read 1: is a LabelRead"),
        (LabelBatch.from_reads([LabelRead([1], [2])]), "read 0: is a LabelRead"),
    ):
        with pytest.raises(InvalidRead, match=said):
            MatrixBatch.of(wrong)


def test_candidates_aligned_to_input_tokens_are_refused_since_rows_are_response_positions():
    ids, mask = np.array([[1, 2, 3, 4]]), np.ones((1, 4), int)
    with pytest.raises(InvalidRead, match="has 4 rows for inputs of 4 tokens; row r belongs to response position r"):
        MatrixBatch.from_padded(ids, mask, [2], np.zeros((1, 4, 5), int))
    assert len(MatrixBatch.from_padded(ids, mask, [2], np.zeros((1, 3, 5), int))) == 1


def test_a_batch_prints_as_a_line():
    assert repr(MatrixBatch.from_reads([MatrixRead([1, 2], [3])])) == "MatrixBatch(1 reads, 3 tokens)"
