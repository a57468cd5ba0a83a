"""Files of scores: written whole, joined, and read by anything that reads safetensors."""

import asyncio
import itertools
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from scoring import LabelBatch, LabelRead, LabelScores, MatrixBatch, MatrixRead, MatrixScores, score_file
from scoring.errors import InvalidRead, ScoringError, WrongEngineAnswer
from scoring.score_file import ScoreFile
from tests.stand_in_router import StandInRouter

READS = [
    MatrixRead([1], [2, 3], [[5, 6], [7]], top_k=2, extras=("tail", "entropy")),
    MatrixRead([1, 1], [4, 5, 6], [8], rows=[2, 0], teacher="math"),
    MatrixRead([1], [9]),
    MatrixRead([1], [], [3, 4]),
    MatrixRead([1], [4000, 3]),
]
LABELS = [LabelRead([1], [9, 8, 9]), LabelRead([1], [4000, 1]), LabelRead([1, 2], [5], teacher="math")]


async def answers(reads):
    """The reads as a batch, and what the stand-in answers to them."""
    matrix = isinstance(reads, MatrixBatch) or (isinstance(reads, list) and isinstance(reads[0], MatrixRead))
    batch = (MatrixBatch if matrix else LabelBatch).of(reads)
    router = StandInRouter()
    return batch, await (router.read_matrix if matrix else router.read_labels)(batch, return_exceptions=True)


def assert_equal(scores, other):
    for f in fields(type(scores)):
        one, two = getattr(scores, f.name), getattr(other, f.name)
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype
    assert scores.metas == other.metas
    said = [{i: error.to_dict() for i, error in s.errors.items()} for s in (scores, other)]
    assert said[0] == said[1]


@pytest.mark.parametrize("reads", [READS, LABELS], ids=["matrix", "label"])
async def test_scores_come_back_as_they_were_saved(tmp_path, reads):
    batch, scores = await answers(reads)
    ids = score_file.ids_of(batch, scores)
    score_file.save(tmp_path / "a", ScoreFile(scores, ids, {"note": "é"}))
    file = score_file.load(tmp_path / "a")
    assert_equal(file.scores, scores)
    assert file.ids.tolist() == ids.tolist() and file.about == {"note": "é"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


async def test_each_row_has_the_id_of_its_token_and_each_label_its_own():
    assert score_file.ids_of(*await answers(READS)).tolist() == [2, 3, 6, 4, 9]
    assert score_file.ids_of(*await answers(LABELS)).tolist() == [9, 8, 9, 5]


@pytest.mark.parametrize("reads", [READS, LABELS], ids=["matrix", "label"])
async def test_the_file_is_plain_safetensors_and_every_array_is_aligned(tmp_path, reads):
    batch, scores = await answers(reads)
    score_file.save(tmp_path / "a", ScoreFile(scores, score_file.ids_of(batch, scores), {}))
    arrays = load_file(tmp_path / "a")
    for name in ("values", "offsets", "prompt_tokens", "meta_index"):
        np.testing.assert_array_equal(arrays[name], getattr(scores, name))
    for array in (getattr(score_file.load(tmp_path / "a").scores, name) for name in ("values", "offsets")):
        assert array.flags.aligned


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 12), max_size=4), seed=st.integers(0, 2**16))
def test_joined_files_hold_what_one_file_would(tmp_path_factory, cuts, seed):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("joined")
    kinds = READS if seed % 2 else LABELS
    reads = [kinds[i] for i in rng.integers(0, len(kinds), 12)]
    batch, whole = asyncio.run(answers(reads))
    bounds = [0, *sorted(cuts), 12]
    paths = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part, scores = asyncio.run(answers(batch.select(np.arange(begin, end))))
        paths.append(folder / str(number))
        score_file.save(paths[-1], ScoreFile(scores, score_file.ids_of(part, scores), {}))
    score_file.join(folder / "whole", lambda: paths, {"of": len(paths)})
    file = score_file.load(folder / "whole")
    assert_equal(file.scores, whole)
    np.testing.assert_array_equal(file.ids, score_file.ids_of(batch, whole))
    assert file.about == {"of": len(paths)}


async def test_what_is_no_file_of_scores_is_a_sentence(tmp_path):
    batch, scores = await answers(READS)
    path = tmp_path / "a"
    score_file.save(path, ScoreFile(scores, score_file.ids_of(batch, scores), {}))
    whole = path.read_bytes()
    for name, content in (("cut", whole[:-8]), ("short", whole[:20]), ("empty", b""), ("text", b"hello, world, hello")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ScoringError, match=str(tmp_path / name)):
            score_file.load(tmp_path / name)
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(ScoringError, match="matrix-score-file"):
        score_file.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        score_file.load(tmp_path / "none")


def test_answers_with_reads_that_were_not_asked_in_their_places():
    failed = {0: InvalidRead("a"), 3: WrongEngineAnswer("b")}
    for cls in (MatrixScores, LabelScores):
        whole = cls.failed(InvalidRead("asked"), 2).with_failed(failed)
        assert [(e.message, e.read) for e in whole] == [("a", 0), ("asked", 1), ("asked", 2), ("b", 3)]
