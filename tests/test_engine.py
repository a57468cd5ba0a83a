"""What an engine refuses, what it answers with, and that reads that end early leave nothing behind in it."""

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from vllm import AsyncEngineArgs

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead
from scoring import engine as engine_module
from scoring.columns import Columns
from scoring.engine import (
    EngineSettings,
    TeacherEngine,
    check_config,
    check_label_answer,
    check_matrix_answer,
    engine_arguments,
)
from scoring.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidCheckpoint,
    InvalidRead,
    Overloaded,
    RefusedSettings,
    TeacherUnavailable,
    VersionMismatch,
    WrongEngineAnswer,
)
from tests.memory import read_and_weigh
from tests.oracle import hf_logprobs
from tests.processes import engine_cores, workers
from tests.weights import take_weights

TINY = 3e-5


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2048, count).tolist()


GOOD = {"prompt_ids": ids(20, 1), "response_ids": ids(10, 2), "candidate_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def good_scores(tiny_model) -> np.ndarray:
    """float32 [10, 3]: what Hugging Face says about `GOOD`."""
    table = hf_logprobs(tiny_model, GOOD["prompt_ids"] + GOOD["response_ids"])
    return table[19:-1, GOOD["candidate_ids"]].numpy()


def check_good(score, good_scores: np.ndarray) -> None:
    np.testing.assert_allclose(score.logprobs, good_scores, rtol=0, atol=TINY)


# Settings.

REFUSED = [
    ("model", "/elsewhere", "the teacher's own setting model"),
    ("dtype", "float16", "the teacher's own setting dtype"),
    ("max_logprobs", 20, "follows from the teacher's setting max_candidates"),
    ("logprobs_mode", "processed_logprobs", r"the teacher's setting scores \(logprobs or logits\)"),
    ("logprobs_mode", "raw_logits", r"the teacher's setting scores \(logprobs or logits\)"),
    ("generation_config", "auto", "sampling defaults must not touch scores"),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}, "breaks label reads"),
    ("kv_transfer_config", {"kv_connector": "NixlConnector"}, "KV connectors"),
    ("kv_sharing_fast_prefill", True, "makes the scores of prompt tokens wrong"),
    ("worker_extension_cls", "module.Class", "how this project's workers load other weights"),
    ("data_parallel_size", 2, r"replicas are Ray Serve's \(the teacher's setting num_replicas\)"),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED)
def test_engine_arguments_that_make_scores_wrong_are_refused_with_a_sentence(name, value, why):
    with pytest.raises(RefusedSettings, match=why) as caught:
        engine_arguments(EngineSettings("model", engine_args={name: value}))
    assert f"engine_args.{name} = {value!r} is refused" in str(caught.value)


def test_settings_without_candidates_or_with_overrides_that_cannot_be_merged_are_refused():
    with pytest.raises(RefusedSettings, match="max_candidates is 0; at least 1"):
        engine_arguments(EngineSettings("model", max_candidates=0))
    with pytest.raises(RefusedSettings, match="hf_overrides must be a mapping beside head_dtype"):
        engine_arguments(EngineSettings("model", head_dtype="float32", engine_args={"hf_overrides": "a function"}))


@pytest.fixture(scope="module")
def make_config(tiny_path):
    """vLLM's own configuration of a tiny engine with these engine arguments."""

    def make(**engine_args):
        settings = EngineSettings(str(tiny_path), engine_args={"kv_cache_memory_bytes": 64 << 20, **engine_args})
        return AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()

    return make


def test_a_configuration_that_vllm_made_of_good_arguments_is_not_refused(make_config):
    check_config(make_config())


def test_a_kv_connector_that_another_argument_implies_is_refused(make_config):
    with pytest.raises(RefusedSettings, match=r"kv_transfer_config \(kv_offloading_size sets it\): KV connectors"):
        check_config(make_config(kv_offloading_size=0.1))


def test_the_v1_runner_is_refused_when_the_environment_asks_for_it(make_config, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(
        RefusedSettings, match=r"the V1 model runner \(VLLM_USE_V2_MODEL_RUNNER\): the matrix read exists"
    ):
        check_config(make_config())


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        (
            "parallel_config",
            "data_parallel_size",
            2,
            r"data_parallel_size = 2 \(VLLM_DP_SIZE\): replicas are Ray Serve's",
        ),
        (
            "model_config",
            "logprobs_mode",
            "processed_logprobs",
            "logprobs_mode = 'processed_logprobs': it follows from",
        ),
    ],
)
def test_what_changed_on_the_way_to_the_configuration_is_refused(make_config, part, name, value, words):
    config = make_config()
    setattr(getattr(config, part), name, value)
    with pytest.raises(RefusedSettings, match=words):
        check_config(config)


def test_every_other_engine_argument_passes_through():
    given = {"max_model_len": 777, "enforce_eager": False, "block_size": 64, "hf_overrides": {"rope_theta": 5.0}}
    arguments = engine_arguments(EngineSettings("model", head_dtype="float32", engine_args=given))
    assert {name: arguments[name] for name in given} == {
        **given,
        "hf_overrides": {"rope_theta": 5.0, "head_dtype": "float32"},
    }
    assert set(arguments) <= {f.name for f in dataclasses.fields(AsyncEngineArgs)}  # vLLM knows all their names


@pytest.mark.parametrize(("scores", "mode"), [("logprobs", "raw_logprobs"), ("logits", "raw_logits")])
def test_what_scores_depend_on_is_fixed(scores, mode):
    arguments = engine_arguments(EngineSettings("model", dtype="bfloat16", scores=scores, max_candidates=64))
    assert arguments["logprobs_mode"] == mode
    assert arguments["generation_config"] == "vllm"
    assert arguments["max_logprobs"] == 1 + 64  # the response's own token, and the candidates
    assert arguments["model"] == "model"
    assert arguments["dtype"] == "bfloat16"


def test_without_a_dtype_a_checkpoint_runs_in_its_own(tiny_path, smollm2_path):
    assert engine_arguments(EngineSettings(str(tiny_path)))["dtype"] == "float32"
    assert engine_arguments(EngineSettings(str(smollm2_path)))["dtype"] == "bfloat16"
    assert engine_arguments(EngineSettings(str(smollm2_path), dtype="float32"))["dtype"] == "float32"


# What the engine's answer must be.

IDS = np.array([[5, 6, 7], [8, 9, -1]], np.int32)
RIGHT = np.array([[-1, -2, -3], [-1, -2, -np.inf]], np.float32)


def with_nan(row: int, column: int) -> np.ndarray:
    values = RIGHT.copy()
    values[row, column] = np.nan
    return values


def test_the_engines_answer_is_passed_on_as_it_is():
    assert check_matrix_answer(RIGHT, IDS, Columns(2)) is RIGHT


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "no scores, also without its prefix cache"),
        (RIGHT.astype(np.float64), "float64 scores; float32 is due"),
        (RIGHT.astype(np.float16), "float16 scores; float32 is due"),
        (RIGHT.tolist(), "list scores; float32 is due"),
        (RIGHT[:, :2], r"shape \[2, 2\]; \[2, 3\] is due"),
        (RIGHT[:1], r"shape \[1, 3\]; \[2, 3\] is due"),
        (np.vstack([RIGHT, RIGHT]), r"shape \[4, 3\]; \[2, 3\] is due"),
        (RIGHT.reshape(-1), r"shape \[6\]; \[2, 3\] is due"),
        (with_nan(1, 2), "NaN at row 1 col 1"),
        (with_nan(0, 1), "NaN at row 0 col 0"),
        (with_nan(1, 0), "NaN at row 1 response_logprobs"),
    ],
    ids=["none", "float64", "float16", "list", "narrow", "short", "long", "flat", "nan", "first-nan", "own-nan"],
)
def test_an_answer_of_another_kind_is_an_error_that_says_how_it_is_wrong(values, message):
    with pytest.raises(WrongEngineAnswer, match=message):
        check_matrix_answer(values, IDS, Columns(2))


ALL = Columns(1, top_k=2, tail=True, entropy=True, rank=True)
ALL_IDS = np.array([[5, 6], [-1, -1], [7, 8]], np.int32)
ALL_RIGHT = np.array(
    [[-1, -2, -0.5, 1.5, 3, 6, 9, -2, -3], [-np.inf] * 9, [-1, -2, -np.inf, 0, 2, 8, 0, 0, -9]], np.float32
)


def test_an_answer_of_all_columns_is_passed_on_with_rows_that_were_not_asked_for_in_between():
    assert check_matrix_answer(ALL_RIGHT, ALL_IDS, ALL) is ALL_RIGHT


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (ALL.tail_at, np.nan, "NaN at row 2 tail_logprob"),
        (ALL.entropy_at, np.nan, "NaN at row 2 entropy"),
        (ALL.rank_at, np.nan, "NaN at row 2 rank"),
        (ALL.top_ids_at.start, np.nan, "NaN at row 2 top_ids col 0"),
        (ALL.width - 1, np.nan, "NaN at row 2 top_logprobs col 1"),
    ],
)
def test_a_nan_in_any_column_is_an_error_that_names_it(column, value, message):
    values = ALL_RIGHT.copy()
    values[2, column] = value
    with pytest.raises(WrongEngineAnswer, match=message):
        check_matrix_answer(values, ALL_IDS, ALL)


def test_an_answer_of_vllms_own_gather_where_more_was_asked_for_is_an_error_that_says_so():
    with pytest.raises(WrongEngineAnswer, match=r"shape \[3, 2\]; \[3, 9\] is due \(vLLM's own gather has answered"):
        check_matrix_answer(ALL_RIGHT[:, :2], ALL_IDS, ALL)


def test_a_nan_among_labels_is_an_error_that_names_the_label():
    assert check_label_answer([-1.0, -np.inf]).tolist() == [-1.0, -np.inf]
    assert check_label_answer([-1.0]).dtype == np.float32
    with pytest.raises(WrongEngineAnswer, match="NaN for label 1"):
        check_label_answer([-1.0, float("nan"), -2.0])


def nan_at(values: np.ndarray, row: int, column: int) -> np.ndarray:
    values = values.copy()
    values[row, column] = np.nan
    return values


# By name: what of vLLM's output is another than it was, and what is said of it.
SPOILT = {
    "a row less": (
        lambda output: {"prompt_token_id_logprobs": output.prompt_token_id_logprobs[:-1]},
        r"shape \[9, 4\]; \[10, 4\] is due",
    ),
    "a column less": (
        lambda output: {"prompt_token_id_logprobs": output.prompt_token_id_logprobs[:, :-1]},
        r"shape \[10, 3\]; \[10, 4\] is due",
    ),
    "float64": (
        lambda output: {"prompt_token_id_logprobs": output.prompt_token_id_logprobs.astype(np.float64)},
        "float64 scores; float32 is due",
    ),
    "NaN": (  # of four columns the first is the response's own token
        lambda output: {"prompt_token_id_logprobs": nan_at(output.prompt_token_id_logprobs, 3, 2)},
        "NaN at row 3 col 1",
    ),
    "a token more": (
        lambda output: {"prompt_token_ids": [*output.prompt_token_ids, 1]},
        "the engine saw 31 prompt tokens; 30 were sent",
    ),
}


async def read_spoilt(engine: TeacherEngine, batch: MatrixBatch, name: str):
    """The answer to a batch when what vLLM says of it is spoilt on its way."""
    generate, change = engine._llm.generate, SPOILT[name][0]

    async def spoilt(*args, **options):
        async for output in generate(*args, **options):
            for field, value in change(output).items():
                setattr(output, field, value)
            yield output

    engine._llm.generate = spoilt
    try:
        return await engine.read_matrix(batch)
    finally:
        del engine._llm.generate


@pytest.mark.parametrize("name", SPOILT)
def test_a_read_whose_answer_is_spoilt_fails_and_is_never_mended(tiny, good_scores, name):
    (error,) = tiny.call(read_spoilt, MatrixBatch.from_reads([MatrixRead(**GOOD)]), name)
    assert type(error) is WrongEngineAnswer
    assert error.read == 0
    assert re.search(SPOILT[name][1], str(error))
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


# What a teacher says of itself.


def test_a_teacher_says_what_it_is_and_what_it_takes(tiny, tiny_path):
    info = tiny.call(TeacherEngine.info).to_dict()
    checkpoint, tokenizer = info.pop("checkpoint"), info.pop("tokenizer")
    assert len(checkpoint) == len(tokenizer) == 16
    assert checkpoint != tokenizer
    assert info.pop("engine").startswith("vllm 0.")
    assert info == {
        "teacher": "tiny",
        "model": str(tiny_path),
        "weights": str(tiny_path),
        "vocabulary": 2048,
        "tokenizer_size": 2000,
        "max_length": 512,
        "max_candidates": 1024,
        "max_batched_tokens": 64,
        "prefix_reuse": True,
        "block_size": 32,
        "dtype": "float32",
        "head_dtype": "float32",
        "scores": "logprobs",
        "tensor_parallel_size": 1,
        "weight_version": 0,
    }


def test_an_answer_says_where_it_comes_from(tiny):
    info = tiny.call(TeacherEngine.info)
    (matrix,) = tiny.read_matrix([MatrixRead(**GOOD)])
    (labels,) = tiny.read_labels([LabelRead(ids(20), [1, 2])])
    assert (matrix.meta.prompt_tokens, labels.meta.prompt_tokens) == (30, 20)
    for meta in (matrix.meta.to_dict(), labels.meta.to_dict()):
        del meta["prompt_tokens"], meta["cached_tokens"], meta["next_token"]
        assert meta == {
            "teacher": "tiny",
            "weight_version": 0,
            "checkpoint": info.checkpoint,
            "engine": info.engine,
            "dtype": "float32",
            "head_dtype": "float32",
            "scores": "logprobs",
            "tensor_parallel_size": 1,
            "ids_beyond_tokenizer": 0,
            "schema_version": 1,
        }


def test_the_likeliest_next_token_comes_with_every_read(tiny, tiny_model):
    likeliest = hf_logprobs(tiny_model, [3, 1, 4, 1, 5]).argmax(dim=-1).tolist()
    matrix = tiny.read_matrix([MatrixRead([3, 1], [4, 1, 5]), MatrixRead([3, 1], [4, 1, 5], rows=[1, 0])])
    assert [score.meta.next_token for score in matrix] == [likeliest[4], likeliest[3]]
    (label,) = tiny.read_labels([LabelRead([3, 1, 4], [9])])
    assert label.meta.next_token == likeliest[2]
    assert tiny.read_matrix([MatrixRead([3], [])])[0].meta.next_token == -1


def test_ids_the_tokenizer_does_not_know_are_scored_and_counted(tiny, tiny_model):
    read = {
        "prompt_ids": [1999, 2000],
        "response_ids": [2047, 5, 2046],
        "candidate_ids": [[2001, 1], [2, 3], [2040, 2041]],
    }
    (score,) = tiny.read_matrix([MatrixRead(**read)])
    assert score.meta.ids_beyond_tokenizer == 1 + 2 + 3
    table = hf_logprobs(tiny_model, [1999, 2000, 2047, 5, 2046])
    wanted = [[table[1, 2001], table[1, 1]], [table[2, 2], table[2, 3]], [table[3, 2040], table[3, 2041]]]
    np.testing.assert_allclose(score.logprobs, wanted, rtol=0, atol=TINY)
    (labels,) = tiny.read_labels([LabelRead([2000, 5], [2047, 6])])
    assert labels.meta.ids_beyond_tokenizer == 2


def tokenizer_of(engine: TeacherEngine) -> object:
    return engine._llm.tokenizer


def test_ids_are_scored_as_they_come_without_a_tokenizer(tiny, tiny_model):
    assert tiny.call(tokenizer_of) is None
    (score,) = tiny.read_matrix([MatrixRead([5, 6], [7, 7, 7, 1999], [7, 1999])])
    wanted = hf_logprobs(tiny_model, [5, 6, 7, 7, 7, 1999])[1:-1, [7, 1999]].numpy()
    np.testing.assert_allclose(score.logprobs, wanted, rtol=0, atol=TINY)
    own = [*wanted[:3, 0], wanted[3, 1]]
    np.testing.assert_allclose(score.response_logprobs, own, rtol=0, atol=TINY)


def test_many_long_reads_at_once_take_little_more_memory_than_their_answers(tiny, tiny_model):
    rng = np.random.default_rng(0)
    reads = [MatrixRead(ids(8, i), ids(500, 50 + i), rng.integers(0, 2048, (500, 64))) for i in range(32)]
    scores, here, there = tiny.call(read_and_weigh, MatrixBatch.from_reads(reads))
    assert [score.logprobs.shape for score in scores] == [(500, 64)] * 32
    for read, score in zip(reads, scores, strict=True):
        table = hf_logprobs(tiny_model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()])[7:-1].numpy()
        np.testing.assert_allclose(score.logprobs, np.take_along_axis(table, read.candidate_ids, 1), rtol=0, atol=TINY)
    assert max(here, there) < 32 << 20  # the answers are 4 MiB, and all rows of logits would be 125


# Reads that cannot be answered.

TOO_WIDE = list(range(1025))
BAD_MATRIX_READS = [
    (MatrixRead([5, 2048], [6]), "prompt_ids[1]", ["2048", "[0, 2048)", "tokenizer has 2000"]),
    (MatrixRead([-1], [6]), "prompt_ids[0]", ["is -1", "[0, 2048)"]),
    (MatrixRead([5], [6, -11_378]), "response_ids[1]", ["is -11378", "[0, 2048)"]),
    (MatrixRead([5], [2048]), "response_ids[0]", ["is 2048", "[0, 2048)"]),
    (MatrixRead([5], [1_873_042_417]), "response_ids[0]", ["is 1873042417", "[0, 2048)"]),
    (MatrixRead([5], [6], [[5, 2048, 7]]), "candidate_ids[0][1]", ["is 2048", "[0, 2048)"]),
    (MatrixRead([5], [6], [5, 2**31 - 1]), "candidate_ids[1]", ["is 2147483647", "[0, 2048)"]),
    (MatrixRead([5] * 256, [6] * 256), "response_ids", ["512+1 > 512", "max_model_len"]),
    (MatrixRead([5] * 512, []), "prompt_ids", ["512+1 > 512", "max_model_len"]),
    (MatrixRead([5], [6], [TOO_WIDE]), "candidate_ids", ["K = 1025", "at most 1024", "max_candidates"]),
    (MatrixRead([5], [6], TOO_WIDE), "candidate_ids", ["K = 1025", "at most 1024", "max_candidates"]),
]
BAD_LABEL_READS = [
    (LabelRead([2048], [6]), "prompt_ids[0]", ["is 2048", "[0, 2048)"]),
    (LabelRead([5], [6, -2]), "label_ids[1]", ["is -2", "[0, 2048)"]),
    (LabelRead([5], [2048]), "label_ids[0]", ["is 2048", "[0, 2048)"]),
    (LabelRead([5] * 512, [6]), "prompt_ids", ["512+1 > 512", "max_model_len"]),
    (LabelRead([5], ids(129)), "label_ids", ["129 labels", "at most 128"]),
]


@pytest.mark.parametrize(("bad", "field", "words"), BAD_MATRIX_READS, ids=[f for _, f, _ in BAD_MATRIX_READS])
def test_a_bad_read_fails_alone_with_its_index_field_and_reason(tiny, good_scores, bad, field, words):
    scores = tiny.read_matrix([MatrixRead(**GOOD), bad, MatrixRead(**GOOD)])
    assert set(scores.errors) == {1}
    error = scores[1]
    assert type(error) is InvalidRead
    assert (error.read, error.field) == (1, field)
    assert all(word in str(error) for word in words)
    check_good(scores[0], good_scores)
    check_good(scores[2], good_scores)
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


@pytest.mark.parametrize(("bad", "field", "words"), BAD_LABEL_READS, ids=[f for _, f, _ in BAD_LABEL_READS])
def test_a_bad_label_read_fails_alone_with_its_index_field_and_reason(tiny, tiny_model, bad, field, words):
    good = LabelRead(ids(20), [7, 3])
    scores = tiny.read_labels([bad, good])
    assert set(scores.errors) == {0}
    assert type(scores[0]) is InvalidRead
    assert (scores[0].read, scores[0].field) == (0, field)
    assert all(word in str(scores[0]) for word in words)
    np.testing.assert_allclose(scores[1].logprobs, hf_logprobs(tiny_model, ids(20))[-1, [7, 3]], rtol=0, atol=TINY)


@pytest.mark.parametrize(
    ("name", "value", "field"), [("prompt_lens", 0, "prompt_ids"), ("widths", 2, "candidate_ids"), ("modes", 5, "rows")]
)
def test_a_damaged_batch_fails_where_it_is_damaged(tiny, good_scores, name, value, field):
    batch = MatrixBatch.from_reads([MatrixRead(**GOOD), MatrixRead(**GOOD, rows=[9])])
    damaged = getattr(batch, name).copy()
    damaged[1] = value
    changes = {name: damaged} | ({"rows": np.array([10])} if name == "modes" else {})
    batch = dataclasses.replace(batch, **changes)
    scores = tiny.read_matrix(batch)
    assert set(scores.errors) == {1}
    assert type(scores[1]) is InvalidRead
    assert scores[1].read == 1
    assert scores[1].field.startswith(field)
    check_good(scores[0], good_scores)


def test_a_batch_of_nothing_is_answered_with_nothing(tiny):
    assert len(tiny.read_matrix([])) == 0
    assert len(tiny.read_labels([])) == 0


def test_candidates_the_teacher_does_not_know_score_minus_infinity_when_asked_for(tiny, good_scores):
    wide = {**GOOD, "candidate_ids": [1, 2048, 2, 151_935, 3]}
    (score,) = tiny.read_matrix([MatrixRead(**wide, unknown_candidates="-inf")])
    assert np.isneginf(score.logprobs[:, [1, 3]]).all()
    np.testing.assert_allclose(score.logprobs[:, [0, 2, 4]], good_scores, rtol=0, atol=TINY)
    assert score.meta.ids_beyond_tokenizer == 0
    refused = tiny.read_matrix([MatrixRead([5], [2048], [1], unknown_candidates="-inf")])
    assert refused[0].field == "response_ids[0]"


def test_another_weight_version_than_expected_is_refused(tiny, good_scores):
    scores = tiny.read_matrix([MatrixRead(**GOOD, expect_version=1), MatrixRead(**GOOD, expect_version=0)])
    assert type(scores[0]) is VersionMismatch
    assert "expects weight version 1" in str(scores[0])
    assert "serves version 0" in str(scores[0])
    check_good(scores[1], good_scores)
    labels = tiny.read_labels([LabelRead([5], [6], expect_version=7), LabelRead([5], [6], expect_version=0)])
    assert type(labels[0]) is VersionMismatch
    assert labels[1].logprobs.shape == (1,)


def test_trace_headers_are_taken(tiny, good_scores):
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    check_good(tiny.read_matrix([MatrixRead(**GOOD)], trace_headers=headers)[0], good_scores)
    assert not tiny.read_labels([LabelRead([5], [6])], trace_headers=headers).errors


async def what_vllm_is_given(engine: TeacherEngine, headers: dict[str, str]) -> list[dict]:
    """The keywords of vLLM's `generate` for a matrix read of priority 3 and a label read of priority 4."""
    generate, given = engine._llm.generate, []

    def spy(*args, **options):
        given.append(options)
        return generate(*args, **options)

    engine._llm.generate = spy
    try:
        matrix = MatrixBatch.from_reads([MatrixRead([5], [6], priority=3)])
        await engine.read_matrix(matrix, trace_headers=headers)
        labels = LabelBatch.from_reads([LabelRead([5], [6], priority=4)])
        await engine.read_labels(labels, trace_headers=headers)
    finally:
        del engine._llm.generate
    return [{name: options[name] for name in ("priority", "trace_headers")} for options in given]


def test_priority_and_trace_headers_reach_vllm(tiny):
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert tiny.call(what_vllm_is_given, headers) == [
        {"priority": 3, "trace_headers": headers},
        {"priority": 4, "trace_headers": headers},
    ]


def test_a_living_engine_is_healthy(tiny):
    assert tiny.call(TeacherEngine.check_health) is None


async def health_while_reads_wait(engine: TeacherEngine) -> tuple[int, float]:
    """Reads that wait, and seconds that health takes meanwhile."""
    batch = MatrixBatch.from_reads([MatrixRead([1] * 200, [2] * 200)] * 200)
    task = asyncio.create_task(engine.read_matrix(batch))
    await asyncio.sleep(0.2)
    waiting, started = engine.progress().outstanding_reads, time.monotonic()
    await engine.check_health()
    took = time.monotonic() - started
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return waiting, took


def test_health_does_not_queue_behind_reads(tiny):
    waiting, took = tiny.call(health_while_reads_wait)
    assert waiting > 100 and took < 1.0


# Order, deadlines, cancelling. The functions run in the engine's process.


async def finishing_order(engine: TeacherEngine, reads: dict[str, MatrixRead]) -> list[str]:
    """The names of the reads as they finish. All are sent in the order given, before the first is done."""
    order = []

    async def one(name: str, read: MatrixRead) -> None:
        scores = await engine.read_matrix(MatrixBatch.from_reads([read]))
        assert not scores.errors
        order.append(name)

    await asyncio.gather(*(one(name, read) for name, read in reads.items()))
    return order


async def left_in_engine(engine: TeacherEngine) -> int:
    """Requests that are still alive, here or in the engine's process.

    A read that goes before all others makes the engine report: what it still has then is left over.
    """
    loggers = engine._llm.logger_manager
    record, reports = loggers.record, []

    def watched(*, scheduler_stats, **report):
        if scheduler_stats is not None:
            reports.append(scheduler_stats)
        record(scheduler_stats=scheduler_stats, **report)

    loggers.record = watched
    try:
        scores = await engine.read_matrix(MatrixBatch.from_reads([MatrixRead([5], [6], priority=-(2**31))]))
    finally:
        del loggers.record
    assert not scores.errors
    last = reports[-1]
    here = engine._llm.get_num_unfinished_requests()
    return here + last.num_running_reqs + last.num_waiting_reqs + last.num_skipped_waiting_reqs


async def read_while_paused(engine: TeacherEngine, method: str, batch: MatrixBatch | LabelBatch) -> tuple:
    """The answer of an engine that makes no progress, after how many seconds, and what is left in it."""
    await engine._llm.pause_generation(mode="keep")
    try:
        started = time.monotonic()
        scores = await getattr(engine, method)(batch, timeout_s=0.5)
        waited = time.monotonic() - started
    finally:
        await engine._llm.resume_generation()
    return scores, waited, await left_in_engine(engine)


async def cancel_reads(engine: TeacherEngine, method: str, batch: MatrixBatch | LabelBatch, paused: bool) -> int:
    """What is left in the engine of reads cancelled at every stage: after 0, 1, 2, ... turns of the event loop, and
    later, when they wait or run."""
    if paused:
        await engine._llm.pause_generation(mode="keep")
    try:
        for stage in range(12):
            task = asyncio.create_task(getattr(engine, method)(batch))
            for _ in range(stage):
                await asyncio.sleep(0 if stage < 9 else 0.01)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    finally:
        await engine._llm.resume_generation()
    return await left_in_engine(engine)


async def abort_reads(engine: TeacherEngine, method: str, batch: MatrixBatch | LabelBatch) -> tuple:
    """The answer to reads that vLLM aborts while they run and wait, and what is left of them."""
    task = asyncio.create_task(getattr(engine, method)(batch))
    while not engine._llm.get_num_unfinished_requests():
        await asyncio.sleep(0.001)
    await engine._llm.pause_generation(mode="abort")
    await engine._llm.resume_generation()
    return await task, await left_in_engine(engine)


async def read_with_a_full_queue(engine: TeacherEngine, method: str, batch: MatrixBatch | LabelBatch) -> tuple:
    """The answer to a batch when vLLM takes four requests at a time."""
    engine._llm.scheduler_config.max_num_queued_reqs = 4
    try:
        return await getattr(engine, method)(batch)
    finally:
        engine._llm.scheduler_config.max_num_queued_reqs = None


LONG = [MatrixRead(ids(100, i), ids(400, i + 50), [1, 2]) for i in range(32)]
MANY_MATRIX_READS = MatrixBatch.from_reads(LONG)
MANY_LABEL_READS = LabelBatch.from_reads([LabelRead(ids(500, i), [1, 2]) for i in range(32)])


def test_reads_that_wait_are_served_by_priority(tiny):
    reads = {
        "patient": MatrixRead(ids(100, 1), ids(400, 2), priority=1),
        **{f"usual {i}": MatrixRead(ids(100, i), ids(400, i + 50)) for i in range(12)},
        "urgent": MatrixRead(ids(100, 3), ids(400, 4), priority=-1),
    }
    # One that came early is prefilled already when the urgent one arrives: a running read keeps its place.
    order = tiny.call(finishing_order, {"first": MatrixRead(ids(50), ids(20)), **reads})
    usual = [name for name in order if name.startswith("usual")]
    assert usual == [f"usual {i}" for i in range(12)]
    assert order.index("urgent") <= order.index("usual 2")
    assert order[-1] == "patient"


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.001, 0.1])
def test_what_is_late_fails_with_the_deadline_and_is_aborted(tiny, good_scores, timeout_s):
    scores = tiny.read_matrix(LONG, timeout_s=timeout_s)
    assert len(scores.errors) > len(LONG) // 2  # all of them take seconds
    for i, error in scores.errors.items():
        assert type(error) is DeadlineExceeded
        assert error.read == i
        assert "timeout_s" in str(error)
    assert tiny.call(left_in_engine) == 0
    check_good(tiny.read_matrix([MatrixRead(**GOOD)], timeout_s=60)[0], good_scores)


@pytest.mark.parametrize(
    ("method", "batch"),
    [
        ("read_matrix", MatrixBatch.from_reads(LONG[:3])),
        ("read_labels", LabelBatch.from_reads([LabelRead(ids(400), [1, 2])] * 3)),
    ],
)
def test_an_engine_that_makes_no_progress_does_not_hold_a_read_beyond_its_deadline(tiny, good_scores, method, batch):
    scores, waited, left = tiny.call(read_while_paused, method, batch)
    assert 0.5 <= waited < 1.0
    assert [type(error) for error in scores] == [DeadlineExceeded] * 3
    assert left == 0
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


@pytest.mark.parametrize("paused", [True, False], ids=["waiting", "running"])
@pytest.mark.parametrize(("method", "batch"), [("read_matrix", MANY_MATRIX_READS), ("read_labels", MANY_LABEL_READS)])
def test_cancelled_reads_are_aborted_in_the_engine(tiny, good_scores, method, batch, paused):
    assert tiny.call(cancel_reads, method, batch, paused) == 0
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


@pytest.mark.parametrize(("method", "batch"), [("read_matrix", MANY_MATRIX_READS), ("read_labels", MANY_LABEL_READS)])
def test_reads_that_vllm_aborts_could_not_be_answered_now_and_are_not_at_fault(tiny, good_scores, method, batch):
    scores, left = tiny.call(abort_reads, method, batch)
    assert len(scores.errors) > 16
    assert {type(error) for error in scores.errors.values()} == {TeacherUnavailable}
    assert left == 0
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


@pytest.mark.parametrize(("method", "batch"), [("read_matrix", MANY_MATRIX_READS), ("read_labels", MANY_LABEL_READS)])
def test_what_vllms_own_queue_does_not_take_may_be_sent_again(tiny, method, batch):
    scores = tiny.call(read_with_a_full_queue, method, batch)
    assert {type(error) for error in scores.errors.values()} == {Overloaded}
    assert len(scores.errors) == 28
    assert all(error.details["retry_after_s"] > 0 for error in scores.errors.values())


# Progress and health. The functions run in the engine's process.


async def stop_a_process(engine: TeacherEngine, which: Callable, idle: bool) -> tuple:
    """Stop a process of the engine until it counts as dead, with reads under way or with none but a canary.

    Returns what health said then, after how many seconds, and what the reads ended with once it ran again.
    """
    (victim,) = which(psutil.Process())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_CANARY_AFTER_S", 0.1 if idle else 3600)
        patch.setattr(engine._meter, "patience_s", 2.0)
        patch.setattr(engine._meter, "_longest_step_s", 0.0)
        engine.watch()
        task = asyncio.create_task(engine.read_matrix(MANY_MATRIX_READS if not idle else MatrixBatch.from_reads([])))
        await asyncio.sleep(0.05)
        await engine.check_health()
        victim.suspend()
        started, verdict = time.monotonic(), None
        try:
            while verdict is None and time.monotonic() < started + 10:
                await asyncio.sleep(0.05)
                try:
                    await engine.check_health()
                except EngineDead as error:
                    verdict = error
        finally:
            waited = time.monotonic() - started
            victim.resume()
        scores = await task
        while engine.progress().outstanding_reads:
            await asyncio.sleep(0.01)
        await engine.check_health()
        engine._watch.cancel()
    return verdict, waited, scores


@pytest.mark.parametrize(("which", "idle"), [(engine_cores, False), (workers, False), (workers, True)])
def test_an_engine_that_hangs_is_found_out_by_its_reads_or_by_a_canary(tiny, good_scores, which, idle):
    verdict, waited, scores = tiny.call(stop_a_process, which, idle)
    assert "the engine has made no step for 2." in str(verdict)
    assert ("while 1 reads" in str(verdict)) == idle
    assert 2.0 <= waited < 3.5
    assert not scores.errors
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


async def steps_of(engine: TeacherEngine, read: MatrixRead) -> tuple[int, int]:
    """Steps that the engine makes for a read, as its progress counts them; and reads outstanding in the middle."""
    await asyncio.sleep(0.2)  # vLLM makes one more after a read, without tokens
    before = engine.progress().steps
    task = asyncio.create_task(engine.read_matrix(MatrixBatch.from_reads([read])))
    await asyncio.sleep(0)
    outstanding = engine.progress().outstanding_reads
    await task
    return engine.progress().steps - before, outstanding


def test_every_step_is_counted_also_those_that_give_no_output(tiny):
    steps, outstanding = tiny.call(steps_of, MatrixRead(ids(200, 901), ids(100)))
    assert steps in (5, 6)  # 300 tokens, 64 a step
    assert outstanding == 1


async def steps_while_idle(engine: TeacherEngine) -> tuple[int, int]:
    """Steps within a second of an idle engine that is watched and is asked a canary every 0.3 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_CANARY_AFTER_S", 0.3)
        engine.watch()
        before = engine.progress().steps
        await asyncio.sleep(1.2)
        engine._watch.cancel()
        await asyncio.sleep(0.2)
        await engine.check_health()
    return engine.progress().steps - before, engine.progress().outstanding_tokens


def test_an_idle_engine_is_asked_a_canary_now_and_then(tiny):
    steps, outstanding = tiny.call(steps_while_idle)
    assert 1 <= steps <= 5
    assert outstanding == 0


async def health_after_a_wrong_canary(engine: TeacherEngine) -> tuple:
    """What health says after a canary that failed, and after one that did not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "check_label_answer", lambda values: check_label_answer([float("nan")]))
        await engine._read_canary()
    wrong = (await asyncio.gather(engine.check_health(), return_exceptions=True))[0]
    await engine._read_canary()
    return wrong, await engine.check_health()


def test_a_canary_that_is_answered_wrong_is_a_matter_of_health(tiny):
    wrong, right = tiny.call(health_after_a_wrong_canary)
    assert type(wrong) is WrongEngineAnswer
    assert "NaN" in str(wrong)
    assert right is None


# Weights that change.


@pytest.fixture
def changeable(tiny, tiny_path):
    """The tiny engine, which gets its own weights back."""
    yield tiny
    tiny.call(take_weights, tiny_path, 0, self_test=False)


def test_an_engine_takes_other_weights_in_place(changeable, other_tiny_path, other_tiny_model, good_scores):
    read = MatrixRead(GOOD["prompt_ids"] * 4, GOOD["response_ids"], GOOD["candidate_ids"])
    before = changeable.read_matrix([read, read, MatrixRead(**GOOD)])
    assert before[1].meta.cached_tokens == 64
    check_good(before[2], good_scores)
    checkpoint = changeable.call(take_weights, other_tiny_path, 3)
    due = hf_logprobs(other_tiny_model, GOOD["prompt_ids"] * 4 + GOOD["response_ids"])[79:-1, GOOD["candidate_ids"]]
    assert np.abs(before[0].logprobs - due.numpy()).max() > 1
    after = changeable.read_matrix([read, read])
    for score, cached in zip(after, (0, 64), strict=True):  # what the old weights had left in the cache is gone
        np.testing.assert_allclose(score.logprobs, due.numpy(), rtol=0, atol=TINY)
        assert (score.meta.weight_version, score.meta.checkpoint) == (3, checkpoint)
        assert score.meta.cached_tokens == cached
    (label,) = changeable.read_labels([LabelRead(GOOD["prompt_ids"], [1, 2], expect_version=3)])
    right = hf_logprobs(other_tiny_model, GOOD["prompt_ids"])[-1, [1, 2]].numpy()
    np.testing.assert_allclose(label.logprobs, right, rtol=0, atol=TINY)
    info = changeable.call(TeacherEngine.info)
    assert (info.weight_version, info.checkpoint, info.weights) == (3, checkpoint, str(other_tiny_path))


async def read_while_weights_change(engine: TeacherEngine, path, batches: list[MatrixBatch]) -> list:
    """What becomes of batches: one that is under way, and those that come while the weights change: one that is meant
    for the old weights, one for the new ones, one for any and one whose deadline comes; and what was outstanding."""
    under_way = asyncio.create_task(engine.read_matrix(batches[0], version=0))
    await asyncio.sleep(0.01)
    changing = asyncio.create_task(take_weights(engine, path, 1))
    while not engine._hold.closed:
        await asyncio.sleep(0)
    assert not under_way.done()
    outstanding = engine.progress().outstanding_tokens
    waiting = [
        asyncio.create_task(engine.read_matrix(batches[1], version=version, timeout_s=timeout_s))
        for version, timeout_s in ((0, 60), (1, 60), (None, 60), (0, 0.001))
    ]
    await asyncio.sleep(0)
    outstanding = engine.progress().outstanding_tokens - outstanding
    await changing
    return [*await asyncio.gather(under_way, *waiting, return_exceptions=True), outstanding, engine.progress()]


def test_reads_that_are_under_way_end_by_the_old_weights_and_others_wait_for_the_new_ones(
    changeable, tiny_model, other_tiny_model, other_tiny_path
):
    long = MatrixBatch.from_reads([MatrixRead(ids(200, i), ids(100, -i - 1 + 1000), [1, 2, 3]) for i in range(10)])
    short = MatrixBatch.from_reads([MatrixRead(**GOOD)])
    under_way, old, new, any_, late, waited, progress = changeable.call(
        read_while_weights_change, other_tiny_path, [long, short]
    )
    for read, score in zip(long, under_way, strict=True):
        table = hf_logprobs(tiny_model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()])
        np.testing.assert_allclose(score.logprobs, table[199:-1, [1, 2, 3]].numpy(), rtol=0, atol=TINY)
        assert score.meta.weight_version == 0
    assert type(old) is VersionMismatch and old.details == {"weight_version": 1}
    assert "meant for weight version 0; teacher 'tiny' serves version 1" in str(old)
    right = hf_logprobs(other_tiny_model, GOOD["prompt_ids"] + GOOD["response_ids"])[19:-1, GOOD["candidate_ids"]]
    for scores in (new, any_):
        np.testing.assert_allclose(scores[0].logprobs, right.numpy(), rtol=0, atol=TINY)
        assert scores[0].meta.weight_version == 1
    assert type(late) is DeadlineExceeded and "weights were loaded" in str(late)
    assert waited == 4 * 30  # tokens: those who wait count as outstanding
    assert (progress.outstanding_reads, progress.outstanding_tokens) == (0, 0)


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(tiny, smollm2_path, good_scores, tmp_path):
    with pytest.raises(InvalidCheckpoint, match="cannot take the place of those that are loaded; missing: ") as caught:
        tiny.call(TeacherEngine.check_weights, str(smollm2_path))
    assert [what.split(":")[0] for what in caught.value.details["differences"]] == [
        "missing",
        "unexpected",
        "of another shape or dtype",
        "config.json",
        "tokenizer",
    ]
    for path, said in ((str(tmp_path), "holds no weights"), ("relative", "no absolute path")):
        with pytest.raises(InvalidCheckpoint, match=said):
            tiny.call(TeacherEngine.check_weights, path)
    check_good(tiny.read_matrix([MatrixRead(**GOOD)])[0], good_scores)


async def health_while_held(engine: TeacherEngine, batch: MatrixBatch) -> tuple:
    """Whether a watched engine counts as stalled while it is held for longer than its patience and a read waits; and
    what its longest step was before and after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._meter, "patience_s", 0.5)
        patch.setattr(engine._meter, "_longest_step_s", 0.01)
        engine.watch()
        await engine.hold()
        waiting = asyncio.create_task(engine.read_matrix(batch))
        await asyncio.sleep(1.2)
        stalled, longest = engine.stalled, engine.progress().longest_step_s
        await engine.check_health()
        engine.release()
        await waiting
        engine._watch.cancel()
        return stalled, longest, engine.progress().longest_step_s


def test_an_engine_that_is_held_does_not_count_as_stalled(tiny):
    stalled, before, after = tiny.call(health_while_held, MatrixBatch.from_reads([MatrixRead(**GOOD)]))
    assert not stalled
    assert before == 0.01 and after < 1.0  # the time it was held is no step
