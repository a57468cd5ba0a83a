"""Answers are sequences over flat arrays: put together from pieces, cut into pieces, padded, always the same scores.

The model is a plain list with one entry per read: a block of numbers with its rows, or an error.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoring.errors import InvalidRead, Overloaded, ScoringError, WrongEngineAnswer
from scoring.scores import LabelScore, LabelScores, MatrixScore, MatrixScores, ReadMeta


def meta(version: int) -> ReadMeta:
    return ReadMeta(
        teacher="math",
        weight_version=version,
        checkpoint="0123456789abcdef",
        engine="vllm 0.32.0",
        dtype="bfloat16",
        head_dtype="float32",
        scores="logprobs",
        tensor_parallel_size=1,
    )


@dataclass
class Answer:
    """What one read is answered with: `block` float32 [n, 1 + K], the response's own token first; and where it was
    asked for, `top` (ids and numbers, [n, top_k] each), `tail`, `entropy` and `rank`, [n]."""

    block: np.ndarray
    rows: list[int]
    version: int
    prompt_tokens: int
    top: tuple[np.ndarray, np.ndarray] | None = None
    tail: np.ndarray | None = None
    entropy: np.ndarray | None = None
    rank: np.ndarray | None = None

    def row(self, r: int) -> list[float]:
        """Everything of one row, in the order in which it travels."""
        ids, logprobs = ([], []) if self.top is None else (part[r] for part in self.top)
        extras = (part[r] for part in (self.tail, self.entropy, self.rank) if part is not None)
        return [*self.block[r], *extras, *ids, *logprobs]

    def named(self) -> dict[str, np.ndarray | None]:
        ids, logprobs = self.top or (None, None)
        return {
            "logprobs": self.block[:, 1:],
            "response_logprobs": self.block[:, 0],
            "top_ids": ids,
            "top_logprobs": logprobs,
            "tail_logprob": self.tail,
            "entropy": self.entropy,
            "rank": self.rank,
        }


def numbers(rows: int, columns: int, seed: int) -> np.ndarray:
    block = -np.random.default_rng(seed).exponential(5, (rows, columns)).astype(np.float32)
    block[block < -15] = -np.inf
    return block


@st.composite
def answers(draw, asked: tuple[int, int, bool, bool, bool] | None = None) -> Answer:
    """`asked`: K, top_k, whether there is a tail, an entropy, and a rank; None for any."""
    rows = draw(st.integers(0, 4))
    k, top_k, tail, entropy, rank = asked or draw(ASKED)
    seed = draw(st.integers(0, 10**6))
    ids = np.random.default_rng(seed).integers(0, 2**24, (rows, top_k), dtype=np.int32, endpoint=True)
    return Answer(
        numbers(rows, 1 + k, seed),
        draw(st.permutations(range(7)))[:rows],
        draw(st.integers(0, 2)),
        draw(st.integers(1, 99)),
        top=(ids, numbers(rows, top_k, seed + 1)) if top_k else None,
        tail=numbers(rows, 1, seed + 2)[:, 0] if tail else None,
        entropy=-numbers(rows, 1, seed + 3)[:, 0].clip(-15) if entropy else None,
        rank=np.random.default_rng(seed).integers(1, 2**24, rows, dtype=np.int32, endpoint=True) if rank else None,
    )


ASKED = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans())


def failures() -> st.SearchStrategy[ScoringError]:
    return st.sampled_from([Overloaded("full", retry_after_s=1.0), InvalidRead("is wrong", field="rows")])


def matrix_scores(model: list[Answer | ScoringError]) -> MatrixScores:
    """The model's flat form, laid out by hand."""
    alive = [a if isinstance(a, Answer) else Answer(np.zeros((0, 1), np.float32), [], -1, 0) for a in model]
    versions = sorted({a.version for a in alive} - {-1})
    return MatrixScores(
        values=np.array([x for a in alive for r in range(len(a.rows)) for x in a.row(r)], np.float32),
        offsets=np.cumsum([0, *(sum(len(a.row(r)) for r in range(len(a.rows))) for a in alive)]),
        widths=np.array([a.block.shape[1] - 1 for a in alive], np.int64),
        top_k=np.array([0 if a.top is None else a.top[0].shape[1] for a in alive], np.int32),
        extras=np.array(
            [(a.tail is not None) + 2 * (a.entropy is not None) + 4 * (a.rank is not None) for a in alive], np.int32
        ),
        rows=np.array([r for a in alive for r in a.rows], np.int64),
        row_offsets=np.cumsum([0, *(len(a.rows) for a in alive)]),
        prompt_tokens=np.array([a.prompt_tokens for a in alive], np.int32),
        cached_tokens=np.array([a.prompt_tokens // 2 for a in alive], np.int32),
        ids_beyond_tokenizer=np.array([a.prompt_tokens % 3 for a in alive], np.int32),
        next_token=np.array([a.prompt_tokens % 7 for a in alive], np.int32),
        meta_index=np.array([versions.index(a.version) if a.version >= 0 else -1 for a in alive], np.int32),
        metas=tuple(meta(v) for v in versions),
        errors={i: e.at(i) for i, e in enumerate(model) if isinstance(e, ScoringError)},
    )


def check_same(scores: MatrixScores, model: list[Answer | ScoringError]) -> None:
    assert len(scores) == len(model)
    for i, (score, due) in enumerate(zip(scores, model, strict=True)):
        if isinstance(due, ScoringError):
            assert (type(score), score.message, score.read) == (type(due), due.message, i)
            continue
        assert isinstance(score, MatrixScore)
        for name, part in due.named().items():
            given = getattr(score, name)
            if part is None:
                assert given is None, name
            else:
                assert (given.dtype, given.shape) == (part.dtype, part.shape), name
                assert given.tolist() == part.tolist(), name
        assert score.rows.tolist() == due.rows
        assert score.meta.weight_version == due.version
        assert score.meta.prompt_tokens == due.prompt_tokens
        assert score.meta.cached_tokens == due.prompt_tokens // 2
        assert score.meta.ids_beyond_tokenizer == due.prompt_tokens % 3


@given(st.lists(answers() | failures(), max_size=6))
def test_scores_are_a_sequence_of_answers_with_exceptions_in_the_place_of_failed_reads(model):
    check_same(matrix_scores(model), model)


@given(st.data())
def test_pieces_in_any_order_are_put_together_in_the_order_of_the_reads(data):
    model = data.draw(st.lists(answers() | failures(), max_size=8))
    order = data.draw(st.permutations(range(len(model))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(model)), max_size=3)))
    parts = []
    for a, b in zip([0, *cuts], [*cuts, len(model)], strict=True):
        part = order[a:b]
        within = data.draw(st.permutations(range(len(part))))  # and each piece holds its reads in an order of its own
        parts.append(
            (np.array([part[j] for j in within], int), matrix_scores([model[part[j]] for j in within]), within)
        )
    parts = [(target, scores, np.arange(len(target))) for target, scores, _ in parts]
    whole = MatrixScores.assemble(len(model), parts)
    check_same(whole, model)
    assert len(set(whole.metas)) == len(whole.metas)


def test_a_read_answered_twice_or_not_at_all_is_an_error_that_names_it():
    two = matrix_scores([Answer(numbers(1, 2, s), [0], 0, 5) for s in (1, 2)])
    with pytest.raises(WrongEngineAnswer, match="read 1: was answered twice"):
        MatrixScores.assemble(3, [(np.array([0, 1]), two, np.arange(2)), (np.array([1, 2]), two, np.arange(2))])
    with pytest.raises(WrongEngineAnswer, match="read 1: 2 of 4 reads have no answer"):
        MatrixScores.assemble(4, [(np.array([0, 3]), two, np.arange(2))])
    with pytest.raises(WrongEngineAnswer, match="read 0: 1 of 1 reads have no answer"):
        LabelScores.assemble(1, [])


@given(st.data())
def test_scores_split_into_consecutive_pieces(data):
    model = data.draw(st.lists(answers() | failures(), max_size=8))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(model)), max_size=3))), len(model)]
    pieces = matrix_scores(model).split([b - a for a, b in pairwise(cuts)])
    for (a, b), piece in zip(pairwise(cuts), pieces, strict=True):
        check_same(piece, model[a:b])


@pytest.mark.parametrize("sizes", [[1], [1, 2], [], [3, -1]])
def test_sizes_that_do_not_add_up_are_refused(sizes):
    with pytest.raises(ValueError, match="there are 2 reads"):
        matrix_scores([Answer(numbers(1, 1, 0), [0], 0, 5)] * 2).split(sizes)


def test_scores_are_indexed_by_one_integer_from_either_end():
    model = [Answer(numbers(2, 3, s), [0, 1], 0, 5) for s in range(3)]
    scores = matrix_scores(model)
    assert scores[-1].logprobs.tolist() == scores[np.int64(2)].logprobs.tolist() == model[2].block[:, 1:].tolist()
    for outside in (3, -4):
        with pytest.raises(IndexError, match=f"read {outside} of 3"):
            scores[outside]
    for other in (slice(0, 2), 1.0, "0"):
        with pytest.raises(TypeError, match="one integer"):
            scores[other]


def test_the_first_failure_is_raised_and_names_its_read():
    answer = Answer(numbers(1, 2, 0), [0], 0, 5)
    failed = matrix_scores([answer, InvalidRead("is wrong", field="rows"), answer, Overloaded("full")])
    with pytest.raises(InvalidRead, match="read 1, rows: is wrong"):
        failed.raise_first()
    fine = matrix_scores([answer, answer])
    assert fine.raise_first() is fine


@given(st.data(), ASKED)
def test_padded_scores_hold_every_row_and_the_fill_elsewhere(data, asked):
    model = data.draw(st.lists(answers(asked), min_size=1, max_size=6))
    width = max(len(a.rows) for a in model) + data.draw(st.integers(0, 3))
    padded = matrix_scores(model).to_padded(width, fill=-7.5)
    assert padded.mask.shape == (len(model), width)
    tensors = padded.torch()
    assert tensors["mask"].dtype == torch.bool
    for i, answer in enumerate(model):
        n = len(answer.rows)
        assert padded.mask[i].tolist() == [True] * n + [False] * (width - n)
        for name, part in answer.named().items():
            rectangle = getattr(padded, name)
            if part is None:
                assert rectangle is None and name not in tensors
                continue
            assert rectangle.dtype == part.dtype
            assert rectangle.shape == (len(model), width, *part.shape[1:])
            assert rectangle[i, :n].tolist() == part.tolist()
            assert (rectangle[i, n:] == (-1 if name in ("top_ids", "rank") else -7.5)).all()
            assert tensors[name].numpy().tobytes() == rectangle.tobytes()
            assert str(tensors[name].dtype) == f"torch.{part.dtype}"


def test_beyond_a_reads_rows_the_ids_are_no_ids():
    short, long = (
        Answer(numbers(n, 1, 0), list(range(n)), 0, 5, top=(np.full((n, 2), 7, np.int32), numbers(n, 2, 1)))
        for n in (1, 2)
    )
    padded = matrix_scores([short, long]).to_padded(2, fill=0.0)
    assert padded.top_ids.tolist() == [[[7, 7], [-1, -1]], [[7, 7], [7, 7]]]
    assert padded.top_logprobs[0, 1].tolist() == [0.0, 0.0]


def test_no_scores_are_padded_to_no_rectangle():
    padded = matrix_scores([]).to_padded(3, fill=0.0)
    assert (padded.logprobs.shape, padded.response_logprobs.shape, padded.mask.shape) == ((0, 3, 0), (0, 3), (0, 3))


def test_padding_never_cuts_mixes_widths_or_hides_a_failure():
    short, long = Answer(numbers(1, 3, 0), [0], 0, 5), Answer(numbers(3, 3, 1), [0, 1, 2], 0, 5)
    with pytest.raises(InvalidRead, match="read 1: has 3 rows; they do not fit a width of 2"):
        matrix_scores([short, long]).to_padded(2, 0.0)
    with pytest.raises(InvalidRead, match=r"K of \[1, 2\]"):
        matrix_scores([short, Answer(numbers(1, 2, 2), [0], 0, 5)]).to_padded(3, 0.0)
    with pytest.raises(Overloaded, match="read 1: full"):
        matrix_scores([short, Overloaded("full")]).to_padded(3, 0.0)
    more = replace(short, top=(np.array([[5]], np.int32), numbers(1, 1, 3)))
    with pytest.raises(InvalidRead, match=r"top_k of \[0, 1\]; one rectangle needs the same top_k in all"):
        matrix_scores([short, more]).to_padded(3, 0.0)
    with pytest.raises(InvalidRead, match=r"extras of \[0, 2\]"):
        matrix_scores([short, replace(short, entropy=numbers(1, 1, 4)[:, 0])]).to_padded(3, 0.0)


@given(st.lists(answers(), max_size=5))
def test_scores_become_tensors_of_their_own(model):
    scores = matrix_scores(model)
    tensors = scores.torch()
    for tensor, answer in zip(tensors, model, strict=True):
        asked = {name: part for name, part in answer.named().items() if part is not None}
        assert tensor.keys() == {*asked, "rows"}
        assert tensor["rows"].tolist() == answer.rows
        assert tensor["rows"].dtype == torch.int64
        for name, part in asked.items():
            assert str(tensor[name].dtype) == f"torch.{part.dtype}"
            assert tensor[name].tolist() == part.tolist()
            tensor[name].fill_(1)
    check_same(scores, model)  # writing into a tensor leaves the scores alone
    with pytest.raises(Overloaded, match="read 0"):
        matrix_scores([Overloaded("full")]).torch()


@given(st.lists(answers() | failures(), max_size=5))
def test_the_plain_form_holds_the_same_answers_and_none_where_a_read_failed(model):
    plain = matrix_scores(model).to_dict()
    names = {*(field.name for field in fields(MatrixScore))}
    assert {"logprobs", "response_logprobs", "rows", "meta"} < names
    assert set(plain) == {*names, "errors", "schema_version"}
    assert plain["schema_version"] == 1
    for i, due in enumerate(model):
        if isinstance(due, ScoringError):
            assert [plain[name][i] for name in names] == [None] * len(names)
            assert plain["errors"][i] == due.at(i).to_dict()
        else:
            assert i not in plain["errors"]
            for name, part in due.named().items():
                given = plain[name][i]
                assert part is given is None or (given.tolist() == part.tolist() and given.flags.c_contiguous), name
            assert plain["rows"][i].tolist() == due.rows
            assert plain["meta"][i]["weight_version"] == due.version
            assert plain["meta"][i]["prompt_tokens"] == due.prompt_tokens
    json.dumps([plain["meta"], plain["errors"]])


@pytest.mark.parametrize("cls", [MatrixScores, LabelScores])
def test_reads_that_failed_together_each_carry_the_error(cls):
    scores = cls.failed(Overloaded("full", retry_after_s=0.5), 3)
    assert len(scores) == 3
    assert [(type(e), e.read, e.details) for e in scores] == [(Overloaded, i, {"retry_after_s": 0.5}) for i in range(3)]
    assert len(cls.failed(Overloaded("full"), 0)) == 0


def label_scores(values: list[list[float]]) -> LabelScores:
    count = len(values)
    return LabelScores(
        values=np.array([x for piece in values for x in piece], np.float32),
        offsets=np.cumsum([0, *map(len, values)]),
        prompt_tokens=np.arange(count, dtype=np.int32),
        cached_tokens=np.zeros(count, np.int32),
        ids_beyond_tokenizer=np.zeros(count, np.int32),
        next_token=np.zeros(count, np.int32),
        meta_index=np.zeros(count, np.int32),
        metas=(meta(3),),
    )


def test_label_scores_are_put_together_split_and_made_tensors_alike():
    values = [[-1.0, -2.5], [-0.5], [-3.0, -4.0, -np.inf]]
    scores = label_scores(values)
    for same in (
        scores,
        LabelScores.assemble(3, [(np.array([2, 0, 1]), label_scores([values[i] for i in (2, 0, 1)]), np.arange(3))]),
    ):
        assert [score.logprobs.tolist() for score in same] == values
        assert all(isinstance(score, LabelScore) and score.logprobs.dtype == np.float32 for score in same)
        assert [score.meta.weight_version for score in same] == [3, 3, 3]
    first, second = scores.split([1, 2])
    assert [score.logprobs.tolist() for piece in (first, second) for score in piece] == values
    assert [tensors["logprobs"].tolist() for tensors in scores.torch()] == values
    assert [list(x) for x in scores.to_dict()["logprobs"]] == values


def test_nowhere_does_a_missing_score_become_a_number():
    """A score that is missing must be an error: 0 would be probability 1."""
    root = Path(__file__).parent.parent
    sources = [path for folder in ("scoring", "deployments") for path in (root / folder).rglob("*.py")]
    assert len(sources) > 30
    made_up = re.compile(r"or 0\.0|nan_to_num|nansum|nanmean|fillna|\.get\([^)]*, 0\.0\)")
    assert [path.name for path in sources if made_up.search(path.read_text())] == []
