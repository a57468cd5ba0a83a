"""A read is checked when it is made (what needs no teacher) and against a teacher's limits (what does).

What is refused is refused with a sentence: the field, what was given, what is allowed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoring import LabelRead, MatrixRead
from scoring.errors import InvalidRead
from scoring.ids import candidate_matrix
from scoring.limits import MAX_LABELS, TeacherLimits
from scoring.reads import read_from_fields


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda x: range(x[0], x[-1] + 1),
        lambda x: [np.int64(i) for i in x],
        lambda x: np.array(x, dtype=np.int32),
        lambda x: np.array(x, dtype=np.uint16),
        lambda x: np.array(x, dtype=np.int64)[::1],
        lambda x: np.repeat(np.array(x, dtype=np.int64), 2)[::2],
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
    ],
    ids=["list", "tuple", "range", "numpy-ints", "int32", "uint16", "int64", "strided", "tensor", "int-tensor"],
)
def test_ids_come_as_lists_arrays_or_tensors_and_are_stored_as_int32(form):
    read = MatrixRead(form([5, 6, 7]), form([8, 9]), [form([1, 2]), form([3, 4])])
    label = LabelRead(form([5, 6, 7]), form([8, 9]))
    for array, ids in [
        (read.prompt_ids, [5, 6, 7]),
        (read.response_ids, [8, 9]),
        (read.candidate_ids, [[1, 2], [3, 4]]),
        (label.prompt_ids, [5, 6, 7]),
        (label.label_ids, [8, 9]),
    ]:
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert array.tolist() == ids


def test_int32_arrays_that_nobody_can_write_to_are_taken_without_a_copy():
    prompt, candidates = np.array([5, 6], np.int32), np.array([[1, 2]], np.int32)
    prompt.flags.writeable = candidates.flags.writeable = False
    read = MatrixRead(prompt, [7], candidates)
    assert np.shares_memory(read.prompt_ids, prompt)
    assert np.shares_memory(read.candidate_ids, candidates)


def test_candidates_are_per_position_shared_or_left_out():
    per_position = MatrixRead([5], [6, 7], [[1, 2, 3], [4, 5, 6]])
    shared = MatrixRead([5], [6, 7], [1, 2, 3])
    omitted = MatrixRead([5], [6, 7])
    assert [r.candidate_ids if r.candidate_ids is None else r.candidate_ids.shape for r in (per_position, shared)] == [
        (2, 3),
        (3,),
    ]
    assert omitted.candidate_ids is None
    assert [r.width for r in (per_position, shared, omitted)] == [3, 3, 0]
    assert [r.row_count for r in (per_position, shared, omitted)] == [2, 2, 2]


def test_short_rows_are_padded_on_the_right_with_minus_one():
    read = MatrixRead([5], [6, 7, 8], [[1, 2, 3], [4], np.array([], np.int32)])
    assert read.candidate_ids.tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("tail", [[7, 8, -1], [7, -1, -1], [-1, -1, -1], [7, 8, 9]])
def test_minus_one_is_allowed_as_a_trailing_run(tail):
    assert MatrixRead([5], [6], [tail]).candidate_ids.tolist() == [tail]
    assert MatrixRead([5], [6], tail).candidate_ids.tolist() == tail
    assert MatrixRead([5], [6], np.array([tail])).candidate_ids.tolist() == [tail]


def test_an_empty_response_keeps_the_width_of_its_candidates():
    assert MatrixRead([5], [], np.zeros((0, 9), np.int32)).width == 9
    assert MatrixRead([5], [], [1, 2, 3]).width == 3
    assert MatrixRead([5], []).width == 0
    assert MatrixRead([5], torch.tensor([])).row_count == 0


# Per bad value: what the message says was given.
NOT_IDS = [
    ([5, 1.0], "[1]", "1.0"),
    ([5, 1.5], "[1]", "1.5"),
    ([True, 5], "[0]", "True"),
    ([5, "7"], "[1]", "'7'"),
    ([5, None], "[1]", "None"),
    ([5, 2**31], "[1]", "2147483648"),
    ([5, 2**70], "[1]", str(2**70)),
    ([5, [6]], "[1]", "[6]"),
    ("567", "", "str"),
    (b"567", "", "bytes"),
    (7, "", "int"),
    (None, "", "NoneType"),
    ({5: 6}, "", "dict"),
    (np.array([5.0, 6.0]), "", "float64"),
    (np.array([True, False]), "", "bool"),
    (np.array(["5"]), "", "<U1"),
    (np.array([5, 2**31]), "[1]", "2147483648"),
    (np.array(5), "", "[]"),
    (np.array([[5]]), "", "[1, 1]"),
    (torch.tensor([5.0]), "", "float32"),
    (torch.tensor([5.0], dtype=torch.bfloat16), "", "bfloat16"),
    (torch.tensor([True]), "", "bool"),
]


@pytest.mark.parametrize(("value", "at", "given"), NOT_IDS, ids=[repr(value)[:30] for value, _, _ in NOT_IDS])
@pytest.mark.parametrize("field", ["prompt_ids", "response_ids", "label_ids"])
def test_what_is_no_vector_of_ids_is_refused_by_name_and_place(field, value, at, given):
    fields = {"prompt_ids": [5], "label_ids" if field == "label_ids" else "response_ids": [6], field: value}
    with pytest.raises(InvalidRead) as caught:
        (LabelRead if field == "label_ids" else MatrixRead)(**fields)
    assert caught.value.field == field + at
    assert given in caught.value.message
    assert "token id" in caught.value.message  # and what is allowed


@pytest.mark.parametrize(
    ("candidates", "at", "given"),
    [
        ([[5, -1, 7]], "[0][1]", "-1"),
        ([[5, -2, 7]], "[0][1]", "-2"),
        ([[5, 7, -2]], "[0][2]", "-2"),
        ([[-1, 5]], "[0][0]", "-1"),
        ([[5.0, 6, 7]], "[0][0]", "5.0"),
        ([[1.5]], "[0][0]", "1.5"),
        ([[True, 6, 7]], "[0][0]", "True"),
        ([["6"]], "[0][0]", "'6'"),
        ([[5, 2**31, 7]], "[0][1]", "2147483648"),
        ([[5, -(2**40)]], "[0][1]", "-1099511627776"),
        ([[[5]]], "[0][0]", "[5]"),
        ([5, -1, 7], "[1]", "-1"),
        ([5, 6.0], "[1]", "6.0"),
        (np.array([[5.0]]), "", "float64"),
        (np.array([[True]]), "", "bool"),
        (np.array([[5, -1, 7]]), "[0][1]", "-1"),
        (np.array([[5, 2**31]]), "[0][1]", "2147483648"),
        (np.array([[[5]]]), "", "[1, 1, 1]"),
        (torch.tensor([[0.5]]), "", "float32"),
        ("5", "", "str"),
        (5, "", "int"),
    ],
)
def test_bad_candidates_are_refused_by_row_and_column(candidates, at, given):
    with pytest.raises(InvalidRead) as caught:
        MatrixRead([5], [6], candidates)
    assert caught.value.field == "candidate_ids" + at
    assert given in caught.value.message


def test_bad_candidates_of_a_later_row_are_named_with_that_row():
    for candidates in ([[5], [6, 7], [8, -3]], np.array([[5, -1], [6, 7], [8, -3]])):
        with pytest.raises(InvalidRead) as caught:
            MatrixRead([5], [6, 7, 8], candidates)
        assert caught.value.field == "candidate_ids[2][1]"


def test_one_long_row_among_many_short_ones_is_not_padded_to_gigabytes():
    with pytest.raises(InvalidRead, match=r"has 9000 rows and one of 9000 ids, but 17999 ids in all") as caught:
        MatrixRead([5], [6] * 9000, [range(9000), *([[1]] * 8999)])
    assert caught.value.field == "candidate_ids"


@pytest.mark.parametrize("rows", [1, 3])
def test_candidates_need_one_row_per_response_token(rows):
    with pytest.raises(InvalidRead, match=rf"candidate_ids: has {rows} rows; the response has 2 tokens"):
        MatrixRead([5], [6, 7], [[1]] * rows)


def test_a_prompt_has_at_least_one_token_and_a_label_read_one_label():
    with pytest.raises(InvalidRead, match="prompt_ids: is empty; a prompt has at least one token"):
        MatrixRead([], [6])
    with pytest.raises(InvalidRead, match="prompt_ids: is empty"):
        LabelRead(np.array([], np.int32), [6])
    with pytest.raises(InvalidRead, match="label_ids: is empty; a label read needs at least one"):
        LabelRead([5], [])


@pytest.mark.parametrize(
    ("rows", "answered"),
    [
        (None, None),
        (slice(None), [0, 1, 2, 3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(np.int64(1), None), [1, 2, 3]),
        (slice(4, None), []),
        (slice(2, 1), []),
        ([3, 0], [3, 0]),
        ((2,), [2]),
        (range(1, 4), [1, 2, 3]),
        (np.array([1, 3], np.uint8), [1, 3]),
        (torch.tensor([2, 1]), [2, 1]),
        ([True, False, False, True], [0, 3]),
        ([np.True_, False, False, False], [0]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([False, False, False, True]), [3]),
        ([], []),
    ],
)
def test_rows_are_a_slice_indices_or_a_mask_in_the_order_given(rows, answered):
    read = MatrixRead([5], [6, 7, 8, 9], rows=rows)
    assert (read.rows if answered is None else read.rows.tolist()) == answered
    assert read.row_count == (4 if answered is None else len(answered))
    if answered is not None:
        assert read.rows.dtype == np.int64


@pytest.mark.parametrize(
    ("rows", "at", "given"),
    [
        ([0, -1], "[1]", "-1"),
        ([4], "[0]", "4"),
        (np.array([0, 1, 9]), "[2]", "9"),
        ([1, 2, 1], "", "row 1 more than once"),
        ([1.0], "[0]", "1.0"),
        ([True, 2], "[0]", "True"),
        ([True, False], "", "2 flags"),
        (np.ones(5, bool), "", "5 flags"),
        (np.array([1.0]), "", "float64"),
        ([[1]], "[0]", "[1]"),
        (np.array([[1]]), "", "[1, 1]"),
        (slice(-2, None), "", "slice(-2, None, None)"),
        (slice(0, -1), "", "slice(0, -1, None)"),
        (slice(0, 5), "", "slice(0, 5, None)"),
        (slice(5, None), "", "slice(5, None, None)"),
        (slice(None, None, -1), "", "slice(None, None, -1)"),
        (slice(None, None, 0), "", "slice(None, None, 0)"),
        (slice(0.0, 2), "", "slice(0.0, 2, None)"),
        (slice(True, 2), "", "slice(True, 2, None)"),
        (2, "", "int"),
        ("12", "", "str"),
    ],
)
def test_rows_outside_the_response_repeated_or_of_another_type_are_refused(rows, at, given):
    with pytest.raises(InvalidRead) as caught:
        MatrixRead([5], [6, 7, 8, 9], rows=rows)
    assert caught.value.field == "rows" + at
    assert given in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_k", True),
        ("extras", ("head",)),
        ("extras", {"tail": False}),
        ("extras", 7),
        ("teacher", 7),
        ("priority", 1.5),
        ("priority", 2**31),
        ("priority", True),
        ("expect_version", -1),
        ("expect_version", "3"),
        ("unknown_candidates", "ignore"),
    ],
)
def test_options_of_another_kind_are_refused_with_what_was_given(field, value):
    with pytest.raises(InvalidRead) as caught:
        MatrixRead([5], [6], **{field: value})
    assert caught.value.field == field
    assert (value[0] if isinstance(value, tuple) else repr(value)) in caught.value.message
    if field in ("teacher", "priority", "expect_version"):
        with pytest.raises(InvalidRead, match=field):
            LabelRead([5], [6], **{field: value})


def test_extras_come_as_one_name_or_several_in_any_order():
    assert MatrixRead([5], [6], extras="tail").extras == ("tail",)
    assert MatrixRead([5], [6], extras=["entropy", "tail", "tail"]).extras == ("tail", "entropy")


def test_a_read_is_made_from_a_json_object():
    read = read_from_fields(
        MatrixRead, {"prompt_ids": [5], "response_ids": [6, 7], "rows": [True, False], "priority": 3}
    )
    assert (read.prompt_ids.tolist(), read.rows.tolist(), read.priority) == ([5], [0], 3)
    assert read_from_fields(LabelRead, {"prompt_ids": [5], "label_ids": [1]}).label_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("cls", "fields", "field", "message"),
    [
        (MatrixRead, {"prompt_ids": [5], "response_ids": [6], "temperature": 0.7}, "temperature", "is not a field"),
        (MatrixRead, {"prompt_ids": [5], "response_ids": [6], "sampling_params": {}}, "sampling_params", "not a field"),
        (MatrixRead, {"prompt_ids": [5], "response_ids": [6], "_": 1}, "_", "is not a field"),
        (MatrixRead, {"prompt_ids": [5]}, "response_ids", "is missing"),
        (LabelRead, {"prompt_ids": [5], "label_ids": [6], "rows": [0]}, "rows", "is not a field"),
        (LabelRead, {"label_ids": [6]}, "prompt_ids", "is missing"),
        (LabelRead, [[5], [6]], None, "is a list"),
    ],
)
def test_unknown_and_missing_fields_of_a_json_object_are_refused(cls, fields, field, message):
    with pytest.raises(InvalidRead, match=message) as caught:
        read_from_fields(cls, fields)
    assert caught.value.field == field


# Against a teacher: 2048 ids, a tokenizer of 2000, 512 tokens at most, K up to 64.

LIMITS = TeacherLimits(vocabulary=2048, tokenizer_size=2000, max_length=512, max_candidates=64)


def refused(read: MatrixRead | LabelRead, limits: TeacherLimits = LIMITS) -> InvalidRead:
    with pytest.raises(InvalidRead) as caught:
        (limits.check_matrix if isinstance(read, MatrixRead) else limits.check_label)(read)
    return caught.value


@pytest.mark.parametrize("wrong", [2048, 2**31 - 1, -1])
def test_ids_beyond_the_vocabulary_are_refused_with_both_sizes(wrong):
    for read, field in [
        (MatrixRead([5, wrong], [6]), "prompt_ids[1]"),
        (MatrixRead([5], [6, 7, wrong]), "response_ids[2]"),
        (LabelRead([wrong], [6]), "prompt_ids[0]"),
        (LabelRead([5], [6, wrong]), "label_ids[1]"),
    ]:
        error = refused(read)
        assert error.field == field
        assert f"is {wrong};" in error.message
        assert "[0, 2048)" in error.message
        assert "its tokenizer has 2000" in error.message
    if wrong > 0:
        assert refused(MatrixRead([5], [6, 7], [[1, 2], [3, wrong]])).field == "candidate_ids[1][1]"
        assert refused(MatrixRead([5], [6, 7], [1, wrong])).field == "candidate_ids[1]"


def test_without_a_tokenizer_the_message_names_the_vocabulary_alone():
    error = refused(MatrixRead([2048], [6]), TeacherLimits(2048, None, 512, 64))
    assert error.message == "is 2048; this teacher's vocabulary is [0, 2048)"


def test_ids_between_the_tokenizer_and_the_vocabulary_are_legal_and_counted():
    LIMITS.check_matrix(MatrixRead([1999, 2000], [2047, 2047], [[2000, -1], [1999, 1]]))
    LIMITS.check_label(LabelRead([2000], [2047]))
    assert LIMITS.ids_beyond_tokenizer(np.array([1999, 2000, 2047]), np.array([[2000, -1], [5, 6]])) == 3
    # What the teacher does not know at all (let through as -inf) is not between the two.
    assert LIMITS.ids_beyond_tokenizer(np.array([2047, 2048, 5000])) == 1
    assert TeacherLimits(2048, None, 512, 64).ids_beyond_tokenizer(np.array([2047])) == 0
    assert TeacherLimits(2048, 2048, 512, 64).ids_beyond_tokenizer(np.array([2047])) == 0


def test_unknown_candidates_pass_when_asked_for_and_unknown_response_ids_never():
    LIMITS.check_matrix(MatrixRead([5], [6], [[1, 2048, 99_999]], unknown_candidates="-inf"))
    assert refused(MatrixRead([5], [2048], [[1]], unknown_candidates="-inf")).field == "response_ids[0]"
    assert '(unknown_candidates="-inf"' in refused(MatrixRead([5], [6], [[2048]])).message


def test_a_read_that_is_too_long_is_refused_with_the_three_numbers():
    LIMITS.check_matrix(MatrixRead([5] * 256, [6] * 255))
    LIMITS.check_matrix(MatrixRead([5] * 511, []))
    LIMITS.check_label(LabelRead([5] * 511, [1]))
    error = refused(MatrixRead([5] * 256, [6] * 256))
    assert error.field == "response_ids"
    assert "512+1 > 512" in error.message
    assert "256 prompt + 256 response tokens" in error.message
    assert "max_model_len" in error.message
    error = refused(LabelRead([5] * 512, [1]))
    assert error.field == "prompt_ids"
    assert "512+1 > 512" in error.message


def test_more_candidates_than_the_teacher_takes_are_refused_with_the_settings_name():
    LIMITS.check_matrix(MatrixRead([5], [6], [range(64)]))
    for candidates in ([range(65)], range(65)):
        error = refused(MatrixRead([5], [6], candidates))
        assert error.field == "candidate_ids"
        assert "K = 65" in error.message
        assert "at most 64" in error.message
        assert "max_candidates" in error.message


def test_more_labels_than_vllm_takes_are_refused():
    assert MAX_LABELS == 128
    LIMITS.check_label(LabelRead([5], range(128)))
    error = refused(LabelRead([5], range(129)))
    assert error.field == "label_ids"
    assert "129 labels" in error.message
    assert "at most 128" in error.message


def test_more_of_the_teachers_own_than_it_takes_or_has_is_refused_by_name():
    LIMITS.check_matrix(MatrixRead([5], [6], top_k=LIMITS.max_candidates, extras=("tail", "entropy")))
    error = refused(MatrixRead([5], [6], top_k=LIMITS.max_candidates + 1))
    assert (type(error), error.field) == (InvalidRead, "top_k")
    assert f"at most {LIMITS.max_candidates} (its setting max_candidates)" in error.message
    small = replace(LIMITS, vocabulary=8, tokenizer_size=8, max_candidates=10)
    small.check_matrix(MatrixRead([5], [6], top_k=8))
    with pytest.raises(InvalidRead, match="top_k: is 9; this teacher's vocabulary has 8 ids"):
        small.check_matrix(MatrixRead([5], [], top_k=9))


def test_ids_that_float32_does_not_hold_are_not_promised():
    replace(LIMITS, vocabulary=2**24).check_matrix(MatrixRead([5], [6], top_k=1))
    large = replace(LIMITS, vocabulary=2**24 + 1)
    large.check_matrix(MatrixRead([5], [6], [2**24]))
    with pytest.raises(
        InvalidRead, match=r"top_k: is 1; this teacher's vocabulary has 16777217 ids, .* up to 16777216"
    ):
        large.check_matrix(MatrixRead([5], [6], top_k=1))


def test_a_vocabulary_whose_ranks_float32_does_not_hold_gives_none():
    replace(LIMITS, vocabulary=2**24).check_matrix(MatrixRead([5], [6], extras="rank"))
    with pytest.raises(InvalidRead, match="extras: asks for rank; this teacher's vocabulary has 16777217 ids"):
        replace(LIMITS, vocabulary=2**24 + 1).check_matrix(MatrixRead([5], [6], extras="rank"))


def test_logits_have_no_tail_and_no_entropy():
    logits = replace(LIMITS, scores="logits")
    logits.check_matrix(MatrixRead([5], [6], [7], top_k=2, extras="rank"))
    with pytest.raises(InvalidRead, match="extras: asks for tail and entropy; this teacher answers with logits"):
        logits.check_matrix(MatrixRead([5], [6], [7], extras=("tail", "entropy")))


def test_a_read_keeps_its_ids_when_the_callers_buffer_is_used_again():
    buffer = np.array([[1, 2], [3, 4]], dtype=np.int32)
    read = MatrixRead(buffer[0], buffer[1], buffer)
    buffer[:] = 9
    assert read.prompt_ids.tolist() == [1, 2]
    assert read.response_ids.tolist() == [3, 4]
    assert read.candidate_ids.tolist() == [[1, 2], [3, 4]]


def outcome(rows):
    """The matrix that rows of candidates become, or what is said of them."""
    try:
        return candidate_matrix(rows, "candidate_ids").tolist()
    except InvalidRead as error:
        return str(error)


@given(st.lists(st.lists(st.integers(-3, 9) | st.sampled_from([-1, 2**31 - 1, 2**31, -(2**40), 10**30]))))
def test_rows_of_lists_become_what_rows_of_arrays_become(rows):
    """Lists, as JSON has them, are taken all at once; other rows one by one."""
    one_by_one = [tuple(row) for row in rows]
    assert outcome(rows) == outcome(one_by_one)


@pytest.mark.parametrize("other", [1.0, True, None, "1", [1]])
def test_one_wrong_element_among_many_rows_is_named(other):
    rows = [[1, 2], [3], [4, other, 5]]
    assert outcome(rows) == outcome([tuple(row) for row in rows])
    assert "candidate_ids[2]" in outcome(rows)


def test_rows_too_uneven_to_pad_are_refused_before_anything_is_allocated():
    long = [list(range(8192)), *([] for _ in range(8191))]
    with pytest.raises(InvalidRead, match="has 8192 rows and one of 8192 ids, but 8192 ids in all"):
        MatrixRead([1], [2] * 8192, long)
    with pytest.raises(InvalidRead, match="has 8192 rows; the response has 1 tokens"):
        MatrixRead([1], [2], long)


def test_an_empty_mask_of_a_response_that_is_not_empty_is_an_error():
    with pytest.raises(InvalidRead, match="is a mask of 0 flags; the response has 5 positions"):
        MatrixRead([1], [2] * 5, rows=np.zeros(0, bool))


def test_a_tokenizers_whole_output_is_refused_with_the_way_out():
    with pytest.raises(InvalidRead, match=r"is a dict .*: give its input_ids"):
        MatrixRead({"input_ids": [1, 2]}, [3])
