"""A batch and its answer come through either form of the wire unchanged, and nothing else comes through."""

import json
import struct
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from scoring import (
    LabelBatch,
    LabelRead,
    LabelScores,
    MatrixBatch,
    MatrixRead,
    MatrixScores,
    ReadMeta,
    ScoringError,
)
from scoring.errors import InvalidRead, Overloaded, WrongEngineAnswer
from scoring.reads import EXTRAS
from scoring.wire import (
    batch_to_json,
    decode_batch,
    decode_scores,
    encode_batch,
    encode_json,
    encode_scores,
    loads,
    reads_from_json,
    scores_from_json,
    scores_to_json,
)

IDS = st.integers(0, 2**31 - 1)
OPTIONS = {
    "teacher": st.sampled_from([None, "math", "naïve \ud800"]),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "expect_version": st.none() | st.integers(0, 2**31 - 1),
}


@st.composite
def matrix_reads(draw) -> MatrixRead:
    response = draw(st.lists(IDS, max_size=5))
    width = draw(st.integers(0, 3))
    row = st.lists(IDS, min_size=width, max_size=width).map(lambda ids: ids[: draw(st.integers(0, width))])
    padded = row.map(lambda ids: ids + [-1] * (width - len(ids)))
    candidates = draw(
        st.none() | padded | st.lists(padded, min_size=len(response), max_size=len(response)).map(
            lambda rows: np.array(rows, np.int32).reshape(len(response), width)
        )
    )  # fmt: skip
    rows = draw(st.none() | st.permutations(range(len(response))).map(lambda p: p[: draw(st.integers(0, len(p)))]))
    return MatrixRead(
        draw(st.lists(IDS, min_size=1, max_size=5)),
        response,
        candidates,
        rows=rows,
        top_k=draw(st.integers(0, 5)),
        extras=draw(st.sampled_from([(), ("tail",), ("tail", "entropy"), ("rank",), EXTRAS])),
        unknown_candidates=draw(st.sampled_from(["raise", "-inf"])),
        **{name: draw(values) for name, values in OPTIONS.items()},
    )


@st.composite
def label_reads(draw) -> LabelRead:
    ids = st.lists(IDS, min_size=1, max_size=5)
    return LabelRead(draw(ids), draw(ids), **{name: draw(values) for name, values in OPTIONS.items()})


BATCHES = st.one_of(
    st.lists(matrix_reads(), max_size=4).map(lambda reads: ("matrix", MatrixBatch.from_reads(reads))),
    st.lists(label_reads(), max_size=4).map(lambda reads: ("label", LabelBatch.from_reads(reads))),
)
SCORE = st.floats(max_value=0, width=32, allow_nan=False)  # -inf included
ERRORS = st.builds(
    lambda kind, text, seconds: kind(text, field="candidate_ids[0][1]", retry_after_s=seconds),
    st.sampled_from([InvalidRead, Overloaded]),
    st.sampled_from(["", "is 7", "naïve \ud800\n"]),
    st.floats(0, 100),
)


@st.composite
def answers(draw) -> tuple[str, MatrixScores | LabelScores]:
    kind = draw(st.sampled_from(["matrix", "label"]))
    pieces, rows, asked, metas, errors = [], [], [], [], {}
    for i in range(draw(st.integers(0, 4))):
        n, k, top_k, extras = (draw(st.integers(0, most)) for most in (3, 3, 3, 7))
        error = draw(st.none() | ERRORS)
        if error is not None:
            errors[i], n, k, top_k, extras = error.at(i), 0, 0, 0, 0
        numbers = lambda count: draw(st.lists(SCORE, min_size=count, max_size=count))  # noqa: E731
        if kind == "matrix":
            ids = st.lists(st.integers(0, 2**24), min_size=top_k, max_size=top_k)
            row = st.tuples(
                *[SCORE] * (1 + k + (extras & 1)),
                *[st.floats(0, 99, width=32)] * (extras >> 1 & 1),
                *[st.integers(1, 2**24)] * (extras >> 2),
                ids,
                *[SCORE] * top_k,
            ).map(lambda row: [x for part in row for x in (part if isinstance(part, list) else [part])])
            piece = [x for _ in range(n) for x in draw(row)]
        else:
            piece = numbers(n)
        pieces.append(np.array(piece, np.float32))
        rows.append(np.array(draw(st.permutations(range(n))), np.int64))
        asked.append((k, top_k, extras))
        metas.append(
            ReadMeta("math", draw(st.integers(0, 9)), "ab", "vllm 0.32.0", "bfloat16", "float32", "logprobs", 1)
        )
    count = len(pieces)
    column = lambda: np.array(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)), np.int32)  # noqa: E731
    scores = {
        "values": np.concatenate([np.zeros(0, np.float32), *pieces]),
        "offsets": np.cumsum([0] + [len(p) for p in pieces]),
        "prompt_tokens": column(),
        "cached_tokens": column(),
        "ids_beyond_tokenizer": column(),
        "next_token": column(),
        "meta_index": np.array([-1 if i in errors else i for i in range(count)], np.int32),
        "metas": tuple(metas),
        "errors": errors,
    }
    if kind == "label":
        return kind, LabelScores(**scores)
    return kind, MatrixScores(
        **scores,
        widths=np.array([k for k, _, _ in asked], np.int64),
        top_k=np.array([top_k for _, top_k, _ in asked], np.int32),
        extras=np.array([extras for _, _, extras in asked], np.int32),
        rows=np.concatenate([np.zeros(0, np.int64), *rows]),
        row_offsets=np.cumsum([0] + [len(r) for r in rows]),
    )


def assert_same_arrays(left, right) -> None:
    """Every array has the same dtype and the same bits."""
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), field.name
        elif field.name != "errors":
            assert a == b, field.name


def assert_same_answers(left, right) -> None:
    """Read by read: the same scores bit for bit, or the same error."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, ScoringError):
            assert type(a) is type(b)
            assert a.to_dict() == b.to_dict()
            continue
        assert type(a) is type(b)
        assert a.meta == b.meta
        for name in {field.name for field in fields(a)} - {"meta"}:
            one, other = getattr(a, name), getattr(b, name)
            if one is None:
                assert other is None, name
            else:
                assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes()), name


def through_json(document) -> object:
    return loads(json.dumps(document, allow_nan=False).encode())


# ---------------------------------------------------------------- what comes through


@given(BATCHES, st.none() | st.floats(0.001, 3600), st.booleans())
def test_a_batch_comes_through_safetensors(batch, timeout_s, return_exceptions):
    kind, batch = batch
    data = encode_batch(batch, timeout_s=timeout_s, return_exceptions=return_exceptions)
    again, options = decode_batch(kind, data)
    assert_same_arrays(batch, again)
    assert (options.timeout_s, options.return_exceptions) == (timeout_s or 600, return_exceptions)


@given(BATCHES, st.booleans())
def test_a_batch_comes_through_json(batch, return_exceptions):
    kind, batch = batch
    reads, options = reads_from_json(kind, through_json(batch_to_json(batch, return_exceptions=return_exceptions)))
    for one, other in zip(batch, type(batch).from_reads(reads), strict=True):
        if kind == "matrix":
            assert (one.row_count, one.width) == (other.row_count, other.width)
        for name in type(one).__dataclass_fields__.keys() - {"_"}:
            a, b = getattr(one, name), getattr(other, name)
            # Candidates of no row have only a width.
            if not (name == "candidate_ids" and not len(one.response_ids)):
                assert np.array_equal(a, b), name
    assert options.return_exceptions == return_exceptions


@given(answers())
def test_an_answer_comes_through_safetensors(answer):
    kind, scores = answer
    again = decode_scores(kind, encode_scores(scores))
    assert_same_arrays(scores, again)
    assert_same_answers(scores, again)


@given(answers())
def test_an_answer_comes_through_json_bit_for_bit(answer):
    kind, scores = answer
    document = through_json(scores_to_json(scores))
    assert loads(encode_json(scores)) == document
    assert_same_answers(scores, scores_from_json(kind, document))


@given(answers(), st.data())
def test_pieces_of_an_answer_from_outside_are_put_together_again(answer, data):
    """Over HTTP a batch may come back in several answers, and each is a view of the bytes it came in."""
    kind, scores = answer
    cut = data.draw(st.integers(0, len(scores)))
    parts = []
    for places, piece in zip(
        np.split(np.arange(len(scores)), [cut]), scores.split([cut, len(scores) - cut]), strict=True
    ):
        parts.append((places, decode_scores(kind, encode_scores(piece)), np.arange(len(places))))
    assert_same_answers(scores, type(scores).assemble(len(scores), parts))


def test_what_was_asked_beside_the_candidates_in_json(one_answer):
    """One row: own token, two candidates, tail, entropy, rank, two ids, their numbers."""
    scores = one_answer(1, 2, top_k=2, extras=7, values=[-1, -2, -np.inf, -4, 0.5, 9, 2**24, 7, -0.25, -np.inf])
    result = through_json(scores_to_json(scores))["results"][0]
    assert result.pop("meta")["teacher"] == "default"
    assert result == {
        "logprobs": [[-2.0, None]],
        "response_logprobs": [-1.0],
        "rows": [0],
        "shape": [1, 2],
        "top_k": 2,
        "top_ids": [[2**24, 7]],
        "top_logprobs": [[-0.25, None]],
        "tail_logprob": [-4.0],
        "entropy": [0.5],
        "rank": [9],
    }
    assert all(type(x) is int for x in result["top_ids"][0] + result["rank"])


@pytest.mark.parametrize(
    "through",
    [
        lambda s: decode_scores("matrix", encode_scores(s)),
        lambda s: scores_from_json("matrix", through_json(scores_to_json(s))),
    ],
)
def test_what_was_asked_of_no_rows_keeps_its_widths(through, one_answer):
    (score,) = through(one_answer(0, 3, top_k=5, extras=7, values=[]))
    assert (score.logprobs.shape, score.response_logprobs.shape, score.rows.shape) == ((0, 3), (0,), (0,))
    assert (score.top_ids.shape, score.top_logprobs.shape) == ((0, 5), (0, 5))
    assert (score.tail_logprob.shape, score.entropy.shape, score.rank.shape) == ((0,), (0,), (0,))


@pytest.mark.parametrize("bad", [-np.inf, -1.0, 0.0, 1.5, 2**24 + 2])
@pytest.mark.parametrize("encode", [encode_scores, scores_to_json, encode_json])
def test_a_rank_that_is_no_rank_is_an_error_that_names_its_row(encode, bad, one_answer):
    with pytest.raises(WrongEngineAnswer, match=f"read 0: the rank at row 1 is {bad}"):
        encode(one_answer(2, 1, extras=4, values=[-1, -2, 2048, -1, -2, bad]))


@pytest.mark.parametrize("bad", [-np.inf, -1.0, 0.5, 2**24 + 2])
@pytest.mark.parametrize("encode", [encode_scores, scores_to_json, encode_json])
def test_a_top_id_that_is_no_id_is_an_error_that_names_its_place(encode, bad, one_answer):
    with pytest.raises(WrongEngineAnswer, match="read 0: the id at row 1 of top_ids col 0 is"):
        encode(one_answer(2, 1, top_k=1, values=[-1, -2, 5, -3, -1, -2, bad, -3]))


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (0, "row 0 response_logprobs"),
        (11, "row 1 col 0"),
        (12, "row 1 tail_logprob"),
        (13, "row 1 entropy"),
        (15, "row 1 top_ids col 1"),
        (17, "row 1 top_logprobs col 0"),
        (19, "row 1 top_logprobs col 2"),
    ],
)
def test_a_nan_is_named_by_what_it_should_have_been(place, where, one_answer):
    values = np.zeros(20)
    values[place] = np.nan
    with pytest.raises(WrongEngineAnswer, match=f"the score at {where} is nan"):
        encode_scores(one_answer(2, 1, top_k=3, extras=3, values=values))


def test_the_bytes_are_safetensors_as_its_own_library_reads_them():
    batch = MatrixBatch.from_reads([MatrixRead([1, 2], [3], [[4, 5]])])
    entries = dict(deserialize(encode_batch(batch)))
    assert entries["ids"]["dtype"] == "I32"
    assert np.frombuffer(entries["ids"]["data"], "<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(entries["candidate_ids"]["data"], "<i4").tolist() == [4, 5]


def test_a_decoded_batch_is_a_view_of_the_body():
    data = encode_batch(LabelBatch.from_reads([LabelRead([1, 2], [3])]))
    batch, _ = decode_batch("label", data)
    assert np.shares_memory(batch.ids, np.frombuffer(data, np.uint8))


def test_a_teacher_no_read_names_does_not_matter():
    batch = LabelBatch.from_reads([LabelRead([1], [2], teacher=None), LabelRead([1], [2], teacher="math")])
    assert [read.teacher for read in decode_batch("label", encode_batch(batch))[0]] == [None, "math"]


def test_an_answer_of_256_rows_and_16_candidates_is_little_more_than_its_numbers(one_answer):
    assert len(encode_scores(one_answer(256, 16))) <= 256 * (16 + 1) * 4 + 4096


# ---------------------------------------------------------------- JSON


def test_minus_infinity_is_null_in_json(one_answer):
    scores = one_answer(2, 3)
    scores.values[6:] = [-np.inf, -np.inf]  # row 1, columns 1 and 2: a row of one candidate, padded
    result = scores_to_json(scores)["results"][0]
    assert result["logprobs"] == [[-1.0, -2.0, -3.0], [-5.0, None, None]]
    assert result["response_logprobs"] == [0.0, -4.0]
    assert result["shape"] == [2, 3]


@pytest.mark.parametrize("encode", [encode_scores, scores_to_json])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_score_is_an_error_that_names_row_and_column(encode, value, one_answer):
    scores = one_answer(4, 2)
    scores.values[3 * 3 + 2] = value  # a row is the response's own token, then the candidates
    with pytest.raises(WrongEngineAnswer, match="row 3 col 1"):
        encode(scores)


def test_a_nan_in_bytes_from_outside_is_an_error(one_answer):
    data = bytearray(encode_scores(one_answer(1, 1)))
    at = bytes(data).rindex(struct.pack("<2f", 0.0, -1.0))
    data[at : at + 4] = struct.pack("<f", np.nan)
    with pytest.raises(WrongEngineAnswer, match="row 0 response_logprobs"):
        decode_scores("matrix", bytes(data))


def test_a_failed_read_is_its_error_in_json(one_answer):
    scores = MatrixScores.assemble(
        2,
        [
            (np.array([0]), MatrixScores.failed(InvalidRead("is 7", field="top_k"), 1), np.array([0])),
            (np.array([1]), one_answer(1, 1), np.array([0])),
        ],
    )
    first, second = scores_to_json(scores)["results"]
    assert first == {
        "error": {"type": "InvalidRead", "message": "is 7", "read": 0, "field": "top_k", "details": {}, "code": 422}
    }
    assert second["logprobs"] == [[-1.0]]


@pytest.mark.parametrize(
    ("read", "field", "says"),
    [
        ({"candidate_ids": [[5, -1, 7]]}, "candidate_ids[0][1]", "is -1"),
        ({"candidate_ids": [[5, -2, 7]]}, "candidate_ids[0][1]", "is -2"),
        ({"candidate_ids": [[5, 2**31, 7]]}, "candidate_ids[0][1]", "is 2147483648"),
        ({"candidate_ids": [[5.0, 6, 7]]}, "candidate_ids[0][0]", "is 5.0"),
        ({"candidate_ids": [[True, 6, 7]]}, "candidate_ids[0][0]", "is True"),
        ({"candidate_ids": [["5", 6, 7]]}, "candidate_ids[0][0]", "is '5'"),
        ({"candidate_ids": [[None, 6, 7]]}, "candidate_ids[0][0]", "is None"),
        ({"candidate_ids": "567"}, "candidate_ids", "is a str"),
        ({"prompt_ids": [1, 2.5]}, "prompt_ids[1]", "is 2.5"),
        ({"prompt_ids": []}, "prompt_ids", "is empty"),
        ({"response_ids": [False]}, "response_ids[0]", "is False"),
        ({"response_ids": [3, 4]}, "candidate_ids", "has 1 rows"),
        ({"rows": [1]}, "rows[0]", "is 1"),
        ({"temperature": 0.7}, "temperature", "is not a field of MatrixRead"),
        ({"teacher": 5}, "teacher", "is 5"),
    ],
)
def test_a_wrong_read_is_an_error_in_its_place_that_names_field_and_value(read, field, says):
    good = {"prompt_ids": [1], "response_ids": [2], "candidate_ids": [[5, 6, 7]]}
    (first, second), _ = reads_from_json("matrix", through_json({"reads": [good, {**good, **read}]}))
    assert isinstance(first, MatrixRead)
    assert isinstance(second, InvalidRead)
    assert (second.read, second.field) == (1, field)
    assert says in second.message


@pytest.mark.parametrize("read", [None, 5, [], "x", {}, {"prompt_ids": [1]}])
def test_what_is_no_read_is_an_error_in_its_place(read):
    ((error,), _) = reads_from_json("label", {"reads": [read]})
    assert isinstance(error, InvalidRead)
    assert error.read == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], None),
        ({}, "reads"),
        ({"reads": {}}, "reads"),
        ({"reads": [], "sampling_params": {"prompt_logprobs": 20}}, "sampling_params"),
        ({"reads": [], "temperature": 0.7}, "temperature"),
        ({"reads": [], "timeout_s": 0}, "timeout_s"),
        ({"reads": [], "timeout_s": -1}, "timeout_s"),
        ({"reads": [], "timeout_s": 3601}, "timeout_s"),
        ({"reads": [], "timeout_s": 10**400}, "timeout_s"),
        ({"reads": [], "timeout_s": "5"}, "timeout_s"),
        ({"reads": [], "timeout_s": True}, "timeout_s"),
        ({"reads": [], "return_exceptions": 1}, "return_exceptions"),
    ],
)
def test_a_request_with_anything_unknown_or_wrong_is_refused_by_name(body, field):
    with pytest.raises(InvalidRead) as caught:
        reads_from_json("matrix", body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 1}',
        b'{"reads": [{"prompt_ids": [1], "prompt_ids": [2]}]}',
        b"\xff\xfe{\x00}\x00",
        b'"\xff"',
        b"[" * 100_000,
        b"1" * 5000,
        b"{} {}",
    ],
)
def test_what_is_not_strict_json_is_refused(text):
    with pytest.raises(InvalidRead):
        loads(text)


def test_a_syntax_error_says_where():
    with pytest.raises(InvalidRead) as caught:
        loads(b'{"reads": [1,]}')
    assert caught.value.details["position"] == 13


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("rows"),
        lambda r: r.pop("shape"),
        lambda r: r.pop("meta"),
        lambda r: r.update(extra=1),
        lambda r: r["logprobs"].pop(),
        lambda r: r["logprobs"][0].pop(),
        lambda r: r["response_logprobs"].pop(),
        lambda r: r["rows"].pop(),
        lambda r: r.update(shape=[2, 3]),
        lambda r: r["logprobs"][0].__setitem__(0, "-1.0"),
        lambda r: r["logprobs"][0].__setitem__(0, True),
        lambda r: r["logprobs"][0].__setitem__(0, 1e300),
        lambda r: r["logprobs"][0].__setitem__(0, 10**400),
        lambda r: r["rows"].__setitem__(0, -1),
        lambda r: r["meta"].pop("engine"),
        lambda r: r["meta"].update(weight_version="0"),
        lambda r: r["meta"].update(prompt_tokens=2**40),
    ],
)
def test_a_json_answer_with_a_part_missing_or_changed_is_an_error_and_never_zeros(change, one_answer):
    document = scores_to_json(one_answer(2, 2))
    change(document["results"][0])
    with pytest.raises(WrongEngineAnswer):
        scores_from_json("matrix", document)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("top_k"),
        lambda r: r.pop("top_ids"),
        lambda r: r.pop("top_logprobs"),
        lambda r: r.update(top_k=1),
        lambda r: r.update(top_k=True),
        lambda r: r.update(top_k=-1),
        lambda r: r.update(top_k=None),
        lambda r: r["top_ids"].pop(),
        lambda r: r["top_ids"][1].pop(),
        lambda r: r["top_ids"][0].__setitem__(0, 5.0),
        lambda r: r["top_ids"][0].__setitem__(0, None),
        lambda r: r["top_ids"][0].__setitem__(0, True),
        lambda r: r["top_ids"][0].__setitem__(0, -1),
        lambda r: r["top_ids"][0].__setitem__(0, 2**24 + 1),  # as a float32 it would be another id
        lambda r: r["top_ids"][0].__setitem__(0, 10**400),
        lambda r: r.update(top_ids=[1, 2]),
        lambda r: r["top_logprobs"][0].__setitem__(0, "1"),
        lambda r: r["tail_logprob"].pop(),
        lambda r: r["tail_logprob"].append(None),
        lambda r: r.update(tail_logprob=None),
        lambda r: r["entropy"].pop(),
        lambda r: r.update(entropy=[[1.0], [1.0]]),
        lambda r: r["entropy"].__setitem__(1, None),
        lambda r: r.update(shape=[2, 2**30], top_k=2**30),
        lambda r: r["logprobs"][0].__setitem__(0, float("nan")),
    ],
)
def test_what_was_asked_beside_the_candidates_with_one_thing_wrong_is_an_error(change, one_answer):
    values = [-1, -np.inf, -4, 0.5, 3, 7, -0.25, -0.5]
    document = scores_to_json(one_answer(2, 1, top_k=2, extras=3, values=values * 2))
    assert len(scores_from_json("matrix", document)) == 1
    change(document["results"][0])
    with pytest.raises(WrongEngineAnswer):
        scores_from_json("matrix", document)


@pytest.mark.parametrize("version", [0, 2, None, "2", True])
def test_another_schema_version_is_refused_in_json(version, one_answer):
    with pytest.raises(WrongEngineAnswer, match="schema"):
        scores_from_json("matrix", {**scores_to_json(one_answer(1, 1)), "schema_version": version})


# ---------------------------------------------------------------- hostile bytes


@pytest.fixture
def one_answer():
    """The answer to one read of n rows and K candidates: `values`, or 0, -1, -2, ... through the rows."""

    def make(n: int, k: int, top_k: int = 0, extras: int = 0, values=None) -> MatrixScores:
        values = -np.arange(n * (1 + k)) + 0.0 if values is None else values
        size = len(values)
        return MatrixScores(
            values=np.array(values, np.float32),
            offsets=np.array([0, size]),
            prompt_tokens=np.array([5], np.int32),
            cached_tokens=np.zeros(1, np.int32),
            ids_beyond_tokenizer=np.zeros(1, np.int32),
            next_token=np.zeros(1, np.int32),
            meta_index=np.zeros(1, np.int32),
            metas=(ReadMeta("default", 0, "ab", "vllm 0.32.0", "float32", "float32", "logprobs", 1),),
            widths=np.array([k]),
            top_k=np.array([top_k], np.int32),
            extras=np.array([extras], np.int32),
            rows=np.arange(n),
            row_offsets=np.array([0, n]),
        )

    return make


def frame(header: object, body: bytes = b"") -> bytes:
    """A safetensors file of this header, in JSON or as bytes, and body."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def unframe(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.fixture
def label_request() -> bytes:
    return encode_batch(LabelBatch.from_reads([LabelRead([1, 2], [3, 4, 5]), LabelRead([6], [7])]))


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_body_is_refused(cut, label_request):
    with pytest.raises(InvalidRead):
        decode_batch("label", label_request[:cut])


def test_a_body_with_bytes_left_over_is_refused(label_request):
    with pytest.raises(InvalidRead, match="belong to none"):
        decode_batch("label", label_request + b"\0")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 2**21])
def test_a_header_longer_than_the_body_or_the_bound_is_refused_before_it_is_read(length):
    with pytest.raises(InvalidRead, match="header claims"):
        decode_batch("label", length.to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidRead, match="header claims"):
        decode_batch("label", frame(b" " * (1 << 21)))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("ids"),
        lambda h: h.pop("__metadata__"),
        lambda h: h.update(__metadata__=[]),
        lambda h: h.update(extra={"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}),
        lambda h: h["ids"].update(dtype="F32"),
        lambda h: h["ids"].update(dtype="I64"),
        lambda h: h["ids"].update(dtype="BF16"),
        lambda h: h["ids"].update(dtype=["I32"]),
        lambda h: h["ids"].update(shape=[1, 3]),
        lambda h: h["ids"].update(shape=[2**61]),
        lambda h: h["ids"].update(shape=[3.0]),
        lambda h: h["ids"].update(shape=[True]),
        lambda h: h["ids"].update(data_offsets=[0, 12, 12]),
        lambda h: h["ids"].update(data_offsets=[-12, 0]),
        lambda h: h["ids"].update(data_offsets=[10**6, 10**6 + 12]),
        lambda h: h["priority"].update(data_offsets=h["teacher_index"]["data_offsets"]),
        lambda h: h["teacher_index"].update(data_offsets=h["priority"]["data_offsets"]),
        lambda h: h["ids"].update(more=1),
        lambda h: h["__metadata__"].pop("options"),
        lambda h: h["__metadata__"].update(extra="1"),
        lambda h: h["__metadata__"].update(form="matrix-reads"),
        lambda h: h["__metadata__"].update(schema_version="2"),
        lambda h: h["__metadata__"].update(options='{"temperature": 1}'),
        lambda h: h["__metadata__"].update(options="[]"),
        lambda h: h["__metadata__"].update(options='{"timeout_s": -1}'),
        lambda h: h["__metadata__"].update(options="{"),
        lambda h: h["__metadata__"].update(teachers='{"a": 1}'),
        lambda h: h["__metadata__"].update(teachers="[5]"),
        lambda h: h["__metadata__"].update(teachers="[]"),
        lambda h: h["__metadata__"].update(teachers=5),
    ],
)
def test_a_header_with_one_thing_wrong_is_refused(change, label_request):
    header, body = unframe(label_request)
    change(header)
    with pytest.raises(InvalidRead):
        decode_batch("label", frame(header, body))


def test_bytes_before_the_first_array_are_refused(label_request):
    header, body = unframe(label_request)
    for name in header.keys() - {"__metadata__"}:
        header[name]["data_offsets"] = [bound + 8 for bound in header[name]["data_offsets"]]
    with pytest.raises(InvalidRead, match="gap"):
        decode_batch("label", frame(header, bytes(8) + body))


def test_the_unchanged_header_passes(label_request):
    assert len(decode_batch("label", frame(*unframe(label_request)))[0]) == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", [0, 2**63 - 1, -5, 8]),  # rises, if its differences are computed in 64 bits
        ("offsets", [0, 3, 2, 8]),
        ("offsets", [1, 2, 7, 8]),
        ("offsets", [0, 2, 7, 9]),
        ("prompt_lens", [2, -1, 0]),
        ("prompt_lens", [2, 2**62, 0]),
        ("widths", [2, 2**62, 0]),  # times 4 rows, it overflows to 0
        ("widths", [2, -1, 0]),
        ("modes", [128, 0, 0]),
        ("modes", [2, 0, 0]),  # says that candidates were left out; they are there
        ("teacher_index", [0, 0, 1]),
        ("teacher_index", [0, -1, 0]),
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(name, values):
    reads = [MatrixRead([1], [2], [[3, 4]]), MatrixRead([1], [2, 3, 4, 5], [[], [], [], []]), MatrixRead([1], [])]
    batch = MatrixBatch.from_reads(reads)
    header, body = unframe(encode_batch(batch))
    start, stop = header[name]["data_offsets"]
    dtype = {"I64": "<i8", "I32": "<i4", "U8": "u1"}[header[name]["dtype"]]
    new = np.array(values, dtype).tobytes()
    assert len(new) == stop - start
    with pytest.raises(InvalidRead):
        decode_batch("matrix", frame(header, body[:start] + new + body[stop:]))


@settings(max_examples=300)
@given(st.data())
def test_no_bytes_raise_anything_but_an_error_with_a_sentence(data):
    good = encode_batch(MatrixBatch.from_reads([MatrixRead([1, 2], [3], [[4]], rows=[0]), MatrixRead([1], [2])]))
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch, _ = decode_batch("matrix", bytes(changed))
        for i in range(len(batch)):
            assert isinstance(batch[i], MatrixRead)
    except InvalidRead as error:
        assert error.message


@settings(max_examples=300)
@given(st.data())
def test_no_bytes_of_an_answer_raise_anything_but_an_error_with_a_sentence(data):
    meta = ReadMeta("default", 0, "ab", "vllm 0.32.0", "float32", "float32", "logprobs", 1)
    good = encode_scores(
        LabelScores(
            values=np.array([-1, -2], np.float32),
            offsets=np.array([0, 2, 2]),
            prompt_tokens=np.zeros(2, np.int32),
            next_token=np.zeros(2, np.int32),
            cached_tokens=np.zeros(2, np.int32),
            ids_beyond_tokenizer=np.zeros(2, np.int32),
            meta_index=np.array([0, -1], np.int32),
            metas=(meta,),
            errors={1: InvalidRead("is wrong", read=1)},
        )
    )
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(list(decode_scores("label", bytes(changed)))) == 2
    except WrongEngineAnswer as error:
        assert error.message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", [0, 5]),
        ("row_offsets", [0, 1]),
        ("widths", [0]),
        ("widths", [2**62]),
        ("top_k", [1]),
        ("top_k", [-1]),
        ("extras", [1]),
        ("extras", [4]),
        ("extras", [-1]),
        ("meta_index", [-1]),
        ("meta_index", [1]),
        ("rows", [0]),
        ("prompt_tokens", [1, 2]),
    ],
)
def test_an_answer_whose_arrays_do_not_fit_is_an_error(name, values, one_answer):
    good = one_answer(2, 2)
    arrays = {field.name: getattr(good, field.name) for field in fields(good)}
    arrays[name] = np.array(values, arrays[name].dtype)
    with pytest.raises(WrongEngineAnswer):
        decode_scores("matrix", encode_scores(MatrixScores(**arrays)))


def test_an_answer_of_the_other_kind_is_an_error(one_answer):
    with pytest.raises(WrongEngineAnswer, match="label-scores"):
        decode_scores("label", encode_scores(one_answer(1, 1)))
