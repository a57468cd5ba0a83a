"""The `teacher-scoring` command against a stand-in service whose scores anyone can compute. Real teachers:
`test_application.py`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from starlette.responses import JSONResponse
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deployments.ingress import build_api
from scoring import score_file
from scoring.cli import main as cli
from scoring.cli import pieces
from scoring.cli.display import Display
from scoring.errors import InvalidRead, Overloaded
from tests.stand_in_router import BATCH_LIMITS, CHECKPOINT, entropy, score, tail
from tests.stand_in_service import FastRouter
from tests.test_http_api import served

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def shared():
    """One server for the module, and the place of the Router it asks."""
    place: list[FastRouter] = []
    with served(build_api(lambda: place[-1], BATCH_LIMITS)) as url:
        yield url, place


@pytest.fixture
def router(shared) -> FastRouter:
    router = FastRouter()
    shared[1].append(router)
    return router


@pytest.fixture
def run(shared, router, tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder of the test: `run("score", "in.jsonl", ...)`."""
    monkeypatch.chdir(tmp_path)

    def run(command, *arguments, url=shared[0]):
        given = [url] if command == "check" else ["--url", url]
        try:
            code = cli.main([command, *map(str, arguments), *given])
        except SystemExit as ended:  # argparse
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """The folder of a tokenizer of the words w0 to w1999 that puts w0 in front of a text."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(2000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def write_rows(rows, path="in.jsonl"):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def own_rows(count, length=8, seed=0):
    """Rows of ids, each with a prompt of its own."""
    responses = np.random.default_rng(seed).integers(0, 2000, (count, length)).tolist()
    return [{"prompt_ids": list(divmod(i, 2000)), "response_ids": responses[i]} for i in range(count)]


def due(row):
    """The stand-in's scores of a row's own tokens."""
    return [score(token, r) for r, token in enumerate(row["response_ids"])]


def assert_holds(path, rows):
    scores = score_file.load(path).scores
    assert len(scores) == len(rows) and not scores.errors
    for answer, row in zip(scores, rows, strict=True):
        assert answer.response_logprobs.tolist() == due(row)


# ---------------------------------------------------------------- what goes in, what comes out


def test_the_scores_of_a_file_of_ids(run):
    rows = own_rows(1000)
    write_rows(rows)
    code, out, _ = run("score", "in.jsonl", "-o", "out.safetensors")
    assert code == 0
    assert_holds("out.safetensors", rows)
    mean = np.mean([value for row in rows for value in due(row)])
    said = dict(re.findall(r"^(\S+(?: logprob)?) +(.*)$", out, re.MULTILINE))
    assert said["reads"] == "1,000" and said["failed"] == "0" and said["tokens"] == "10,000"
    assert float(said["mean logprob"]) == pytest.approx(mean, abs=1e-4)
    assert CHECKPOINT in said["checkpoint"] and {"seconds", "tokens/s"} < said.keys()
    assert os.listdir() == ["in.jsonl", "out.safetensors"] or sorted(os.listdir()) == ["in.jsonl", "out.safetensors"]


def test_candidates_rows_and_what_the_teacher_thinks_beside_them(run):
    rows = [
        {"prompt_ids": [1], "response_ids": [2, 3], "candidate_ids": [[5, 6], [7]], "reward": 0.5},
        {"prompt_ids": [1], "response_ids": [2, 3, 4], "candidate_ids": [8], "rows": [2, 0]},
        {"prompt_ids": [1], "response_ids": [2, 3, 4], "candidate_ids": None, "rows": [False, True, False]},
        {"prompt_ids": [1], "response_ids": []},
    ]
    write_rows(rows)
    code, _, _ = run("score", "in.jsonl", "-o", "out.safetensors", "--top-k", 1, "--extras", "tail", "entropy")
    assert code == 0
    file = score_file.load("out.safetensors")
    first, second, third, fourth = file.scores
    assert first.logprobs.tolist() == [[-5.0, -6.0], [score(7, 1), -np.inf]]
    assert first.top_ids.tolist() == [[3], [4]] and first.top_logprobs.tolist() == [[-3.0], [score(4, 1)]]
    assert first.tail_logprob.tolist() == [tail(0), tail(1)] and first.entropy.tolist() == [entropy(0), entropy(1)]
    assert second.logprobs.tolist() == [[score(8, 2)], [score(8, 0)]] and second.rows.tolist() == [2, 0]
    assert third.response_logprobs.tolist() == [score(3, 1)] and third.logprobs.shape == (1, 0)
    assert fourth.logprobs.shape == (0, 0)
    assert file.ids.tolist() == [2, 3, 4, 2, 3]  # the token of each row


def test_labels_of_a_file(run):
    write_rows([{"prompt_ids": [1], "label_ids": [9, 8, 9]}, {"prompt_ids": [1, 2], "label_ids": [5]}])
    assert run("labels", "in.jsonl", "-o", "out.safetensors")[0] == 0
    file = score_file.load("out.safetensors")
    assert [answer.logprobs.tolist() for answer in file.scores] == [[-9.0, -8.0, -9.0], [-5.0]]
    assert file.ids.tolist() == [9, 8, 9, 5]
    assert run("labels", "in.jsonl", "-o", "shared.safetensors", "--label-ids", 3, 4)[0] == 0
    shared = score_file.load("shared.safetensors").scores
    assert [answer.logprobs.tolist() for answer in shared] == [[-3.0, -4.0]] * 2


def test_text_is_tokenised_prompt_and_response_apart(run, tokenizer):
    write_rows([{"prompt": "w5 w6", "response": "w7 w8 w9"}, {"prompt": "w1", "response_ids": [4]}])
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", "--tokenizer", tokenizer)
    assert code == 0
    file = score_file.load("out.safetensors")
    assert file.ids.tolist() == [7, 8, 9, 4]
    assert file.scores[0].response_logprobs.tolist() == [score(7, 0), score(8, 1), score(9, 2)]
    assert file.scores.prompt_tokens.tolist() == [3 + 3, 2 + 1]  # the prompts have w0 in front
    assert "note" not in said  # the stand-in's teacher has no tokenizer that could be another


def test_labels_as_text_are_one_token_each(run, tokenizer):
    write_rows([{"prompt": "w5", "labels": ["w3", "w4"]}, {"prompt": "w5", "labels": ["w3 w4"]}])
    code, _, said = run("labels", "in.jsonl", "-o", "out.safetensors", "--tokenizer", tokenizer)
    assert code == 1
    assert "in.jsonl:2: labels[0]: is 'w3 w4', which is 2 tokens; a label is one" in said
    scores = score_file.load("out.safetensors").scores
    assert scores[0].logprobs.tolist() == [-3.0, -4.0] and isinstance(scores[1], InvalidRead)
    code, _, _ = run("labels", "in.jsonl", "-o", "two.safetensors", "--tokenizer", tokenizer, "--labels", "w9", "w8")
    assert code == 0
    assert [s.logprobs.tolist() for s in score_file.load("two.safetensors").scores] == [[-9.0, -8.0]] * 2


def test_a_tokenizer_that_is_not_the_teachers_is_said(run, router, tokenizer, monkeypatch):
    monkeypatch.setattr(router, "info", lambda name: FastRouter.info(router, name) | {"tokenizer": "f" * 16})
    write_rows([{"prompt": "w5 w6", "response": "w7 w8 w9"}])
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", "--tokenizer", tokenizer)
    assert code == 0 and f"is not the file of the teacher's ({'f' * 16})" in said


@pytest.mark.parametrize("options", [[], ["--top-k", 2, "--extras", "tail"]])
def test_the_lines_of_the_readme_read_the_output(run, options):
    rows = own_rows(10)
    write_rows(rows)
    run("score", "in.jsonl", "-o", "out.safetensors", *options)
    ours, plain = re.findall(r"^```py\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(ours + plain, names)
    assert names["score"].response_logprobs.tolist() == names["own"].tolist() == due(rows[0])


def test_parquet_in_and_out(run):
    rows = [
        {"prompt_ids": [1], "response_ids": [2, 3], "candidate_ids": [[5, 6], [7, -1]], "other": "x"},
        {"prompt_ids": [1], "response_ids": [4000], "candidate_ids": None, "other": "x"},
        {"prompt_ids": [1], "response_ids": [4], "candidate_ids": [[9, 8]], "other": "x"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    code, _, said = run("score", "in.parquet", "-o", "out.parquet", "--top-k", 1, "--extras", "entropy")
    assert code == 1 and "in.parquet: row 2: response_ids[0]: is 4000" in said
    first, second, third = pq.read_table("out.parquet").to_pylist()
    assert first["response_logprobs"] == [-2.0, score(3, 1)] and first["ids"] == [2, 3] and first["rows"] == [0, 1]
    assert first["logprobs"] == [[-5.0, -6.0], [score(7, 1), -np.inf]]
    assert first["top_ids"] == [[3], [4]] and first["top_logprobs"] == [[-3.0], [score(4, 1)]]
    assert first["entropy"] == [entropy(0), entropy(1)] and "tail_logprob" not in first
    assert first["error"] is None and first["prompt_tokens"] == 3
    assert second["response_logprobs"] is second["logprobs"] is second["prompt_tokens"] is None
    assert "is 4000" in second["error"]
    assert third["logprobs"] == [[-9.0, -8.0]]
    metadata = pq.read_schema("out.parquet").metadata
    assert json.loads(metadata[b"metas"])[0]["checkpoint"] == CHECKPOINT

    pq.write_table(pa.Table.from_pylist([{"prompt_ids": [1], "label_ids": [9, 8]}]), "labels.parquet")
    assert run("labels", "labels.parquet", "-o", "labels-out.parquet")[0] == 0
    (only,) = pq.read_table("labels-out.parquet").to_pylist()
    assert only["logprobs"] == [-9.0, -8.0] and only["ids"] == [9, 8] and only["error"] is None


# ---------------------------------------------------------------- reads that fail, rows that are wrong


def test_a_failed_read_is_recorded_and_does_not_stop_the_rest(run):
    rows = own_rows(6)
    bad = [{**rows[2], "response_ids": [3, 2048]}, {"prompt_ids": [], "response_ids": [3]}, {"prompt_ids": [1]}]
    lines = [json.dumps(row) for row in (*rows[:2], bad[0], rows[3], bad[1], bad[2])]
    Path("in.jsonl").write_text("\n".join([lines[0], "", *lines[1:], '{"prompt_ids": [1', "[3]"]))
    code, out, said = run("score", "in.jsonl", "-o", "out.safetensors")
    assert code == 1
    scores = score_file.load("out.safetensors").scores
    assert sorted(scores.errors) == [2, 4, 5, 6, 7]
    for i in (0, 1, 3):
        assert scores[i].response_logprobs.tolist() == due(rows[i])
    error = scores[2]
    assert isinstance(error, InvalidRead) and (error.read, error.field) == (2, "response_ids[1]")
    assert error.details["place"] == "in.jsonl:4"  # the empty line counts
    for place, why in (
        (4, "response_ids[1]: is 2048"),
        (6, "prompt_ids: is empty"),
        (7, "has neither response_ids nor response; its columns are prompt_ids"),
        (8, "is not JSON"),
        (9, "is a list; a row is an object"),
    ):
        assert f"in.jsonl:{place}: {why}" in said
    assert re.search(r"^failed +5$", out, re.MULTILINE)


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
@pytest.mark.parametrize(
    "wrong",
    [
        b'{"prompt": "w1 \\ud800", "response": "w5"}',
        b'{"prompt_ids": [1], "response_ids": [2], "\\udc00": 1}',
        b'{"prompt": "w1 \xed\xa0\x80", "response": "w5"}',
        b'{"prompt": "w1 \xff", "response": "w5"}',
    ],
    ids=["half a pair, escaped", "half a pair as a name", "half a pair in bytes", "not UTF-8"],
)
def test_a_line_that_is_no_text_is_a_failed_read_like_others(run, tokenizer, suffix, wrong):
    good = b'{"prompt": "w1 \\ud83d\\ude00", "response": "w5"}'  # a whole pair is a character
    Path("in.jsonl").write_bytes(good + b"\n" + wrong + b"\n" + good + b"\n")
    code, _, err = run("score", "in.jsonl", "-o", f"out{suffix}", "--tokenizer", tokenizer)
    assert code == 1, err
    assert "in.jsonl:2: is not JSON" in err and "in.jsonl:3" not in err
    assert Path(f"out{suffix}").exists()


def test_of_many_failed_reads_the_first_are_said_and_all_are_in_the_output(run):
    write_rows([{"prompt_ids": [1], "response_ids": [5 if i % 3 else 4000]} for i in range(3000)])
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors")
    assert code == 1 and said.count("is 4000") == 10
    assert sorted(score_file.load("out.safetensors").scores.errors) == list(range(0, 3000, 3))


OWN = {"prompt_ids": [1], "response_ids": [2]}
WRONG = [
    (["none.jsonl", "-o", "out.safetensors"], "none.jsonl: there is no such file"),
    (["in.csv", "-o", "out.safetensors"], "in.csv: ends in '.csv'; input is .jsonl or .parquet"),
    (["in.jsonl", "-o", "out.json"], "out.json: ends in '.json'; output is .safetensors or .parquet"),
    (["in.jsonl", "-o", "there.safetensors"], "there.safetensors: is there already"),
    (["in.jsonl", "-o", "no/folder/out.safetensors"], "No such file or directory"),
    (["in.jsonl", "-o", "out.safetensors", "--teacher", "nobody"], "--teacher nobody: is not served; .* default, math"),
    (["in.jsonl", "-o", "out.safetensors", "--top-k", "65"], "--top-k: is 65; this teacher takes at most 64"),
    (["in.jsonl", "-o", "out.safetensors", "--top-k", "-1"], "--top-k: is -1"),
    (
        ["in.jsonl", "-o", "out.safetensors", "--tokenizer", "no"],
        "--tokenizer no: the checkpoint's folder is not on this machine",
    ),
    (["in.jsonl", "-o", "out.safetensors", "--token-file", "empty"], "--token-file empty: holds one token"),
    (["in.jsonl", "-o", "out.safetensors", "--ca-file", "empty"], "--ca-file empty"),
    (["in.jsonl", "-o", "out.safetensors", "--timeout", "0"], "is '0'; allowed are seconds above 0"),
    (["in.jsonl", "-o", "out.safetensors", "--concurrency", "0"], "is '0'; allowed are whole numbers from 1 on"),
    (["in.jsonl", "-o", "out.safetensors", "--extras", "kl"], "invalid choice: 'kl'"),
    (["in.jsonl"], "required: -o/--output"),
    (["text.jsonl", "-o", "out.safetensors"], "text.jsonl:1: prompt: is text, which needs --tokenizer"),
    (["empty.jsonl", "-o", "out.safetensors"], "empty.jsonl: has no rows"),
    (["array.jsonl", "-o", "out.safetensors"], "array.jsonl:1: is a list; a row is an object"),
    (
        ["columns.jsonl", "-o", "out.safetensors"],
        "columns.jsonl:1: has neither prompt_ids nor prompt; its columns are a",
    ),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_what_a_user_got_wrong_is_one_sentence_and_code_2(run, router, arguments, message):
    write_rows([OWN])
    write_rows([{"prompt": "a", "response": "b"}], "text.jsonl")
    write_rows([[OWN]], "array.jsonl")
    write_rows([{"a": 1}], "columns.jsonl")
    for name in ("in.csv", "there.safetensors", "empty", "empty.jsonl"):
        Path(name).touch()
    before = set(os.listdir())
    code, out, said = run("score", *arguments)
    assert code == 2 and not out
    assert re.fullmatch(rf"teacher-scoring: .*{message}.*\n", said) or re.search(message, said), said
    assert "Traceback" not in said
    assert set(os.listdir()) == before and not router.asked


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:p", "http://a:b@host"])
def test_an_address_that_is_none_is_said(run, url):
    write_rows([OWN])
    Path("token").write_text("secret")
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", "--token-file", "token", url=url)
    assert code == 2 and "Traceback" not in said


@pytest.mark.parametrize("url", ["any:SECRET@host", "https://any:SECRET@host:x", "https://any:SEC/RET@host:443"])
def test_no_error_of_an_address_shows_the_token_in_it(run, url):
    write_rows([OWN])
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", url=url)
    assert code == 2 and "is no address; one is like http://127.0.0.1:8000" in said
    assert "host" in said and "SEC" not in said and "RET" not in said


def test_a_service_that_is_not_there_is_code_3(run, monkeypatch):
    monkeypatch.setattr(cli, "_FIRST_ANSWER_S", 0.3)
    write_rows([OWN])
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", url="http://127.0.0.1:9")
    assert code == 3 and "http://127.0.0.1:9/v1/teachers cannot be reached" in said
    assert os.listdir() == ["in.jsonl"]


def test_the_token_is_sent(run, router, shared):
    seen = []
    api = build_api(lambda: router, BATCH_LIMITS)

    async def app(scope, receive, send):
        seen.append(dict(scope["headers"]).get(b"authorization"))
        await api(scope, receive, send)

    write_rows([OWN])
    Path("token").write_text("secret\n")
    with served(app) as url:
        assert run("score", "in.jsonl", "-o", "out.safetensors", "--token-file", "token", url=url)[0] == 0
        assert run("check", "--token-file", "token", url=url)[0] == 0
    assert len(seen) > 3 and set(seen) == {b"Bearer secret"}


# ---------------------------------------------------------------- going on after an end


def start(url, *arguments, **options):
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "scoring.cli", *arguments, "--url", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def finished(output="out.safetensors"):
    """The numbers of the pieces that are finished."""
    return sorted(int(path.stem) for path in Path(f"{output}.pieces").glob("*/*.safetensors"))


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


CONCURRENCY = 3


@pytest.mark.parametrize("how, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_goes_on_and_asks_no_finished_read_again(run, router, shared, how, code):
    rows = own_rows(20 * pieces._READS, length=2)
    write_rows(rows)
    router.delay_s = 0.1
    arguments = ("score", "in.jsonl", "-o", "out.safetensors", "--concurrency", str(CONCURRENCY))
    process = start(shared[0], *arguments)
    wait_until(lambda: len(finished()) >= 5)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    if how != signal.SIGKILL:
        assert "the same command goes on from there" in said and "Traceback" not in said
    kept = finished()
    assert 5 <= len(kept) < 20 and not Path("out.safetensors").exists()
    before = Counter(router.asked)
    router.delay_s = 0.0
    code, out, said = run(*arguments)
    assert code == 0
    assert f"{len(kept) * pieces._READS:,} of them in earlier runs" in out
    assert_holds("out.safetensors", rows)
    assert sorted(os.listdir()) == ["in.jsonl", "out.safetensors"]
    prompts = [tuple(row["prompt_ids"]) for row in rows]
    of_kept = {prompt for number in kept for prompt in prompts[number * pieces._READS : (number + 1) * pieces._READS]}
    total = Counter(router.asked)
    assert all(total[prompt] == 1 for prompt in of_kept)
    assert set(total) == set(prompts) and max(total.values()) <= 2
    assert sum(count - 1 for count in total.values()) <= CONCURRENCY * pieces._READS
    assert before.total() + (20 - len(kept)) * pieces._READS == total.total()


@pytest.fixture
def half_done(run, router, shared):
    """Rows, of which the first six pieces or so are finished by a run that was killed."""
    rows = own_rows(20 * pieces._READS, length=2)
    write_rows(rows)
    router.delay_s = 0.05
    process = start(shared[0], "score", "in.jsonl", "-o", "out.safetensors", "--concurrency", "1")
    wait_until(lambda: len(finished()) >= 6)
    process.kill()
    process.communicate()
    router.delay_s = 0.0
    router.asked.clear()
    return rows


def test_a_row_that_has_changed_meanwhile_is_noticed_and_scored_anew(run, router, half_done):
    rows, kept = half_done, len(finished())
    rows[700] = {**rows[700], "response_ids": [7, 7]}
    write_rows(rows)
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors")
    assert code == 0
    assert "the rows from in.jsonl:513 to in.jsonl:1024, or the options, are not those of the run before" in said
    assert_holds("out.safetensors", rows)
    assert len(router.asked) == (20 - kept + 1) * pieces._READS


def test_other_options_are_noticed_and_everything_is_scored_anew(run, router, half_done):
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", "--top-k", 1)
    assert code == 0 and "or the options, are not those of the run before" in said
    assert_holds("out.safetensors", half_done)
    assert len(router.asked) == len(half_done)


def test_another_checkpoint_is_noticed_and_its_scores_are_never_mixed_in(run, router, half_done):
    kept, router.checkpoint = len(finished()), "f" * 16
    code, out, said = run("score", "in.jsonl", "-o", "out.safetensors")
    assert code == 0 and f"note: the teacher has changed: {kept} finished pieces are of {CHECKPOINT}-" in said
    assert "f" * 16 in out
    assert len(router.asked) == len(half_done)
    scores = score_file.load("out.safetensors").scores
    assert {meta.checkpoint for meta in scores.metas} == {"f" * 16}
    assert len(finished()) == kept  # those of the first checkpoint, which may come back


def test_a_teacher_that_changes_under_way_ends_the_run(run, router, shared):
    rows = own_rows(10 * pieces._READS, length=2)
    write_rows(rows)
    router.before = lambda: None
    ask = router.read_matrix

    async def changing(reads, **options):
        if len(router.asked) > 4 * pieces._READS:
            router.checkpoint = "f" * 16
        return await ask(reads, **options)

    router.read_matrix = changing
    code, _, said = run("score", "in.jsonl", "-o", "out.safetensors", "--concurrency", 1)
    assert code == 3 and f"its checkpoint was {CHECKPOINT}, it is {'f' * 16}" in said
    assert not Path("out.safetensors").exists() and len(finished()) == 5


def test_a_service_that_stays_full_ends_the_run_and_nothing_is_recorded_as_failed(run, router):
    rows = own_rows(3 * pieces._READS, length=2)
    write_rows(rows)
    ask = router.read_matrix

    async def full(reads, **options):
        if len(router.asked) >= pieces._READS:
            raise Overloaded("every replica is full", retry_after_s=0.1)
        return await ask(reads, **options)

    router.read_matrix = full
    arguments = ("score", "in.jsonl", "-o", "out.safetensors", "--concurrency", 1, "--timeout", 0.5)
    code, _, said = run(*arguments)
    assert code == 3 and "every replica is full" in said and "goes on from there" in said
    assert finished() == [0]
    router.read_matrix = ask
    assert run(*arguments)[0] == 0
    assert_holds("out.safetensors", rows)
    assert len(router.asked) == len(rows)


def test_two_runs_on_one_output_do_not_meet(run, router, shared):
    write_rows(own_rows(4 * pieces._READS, length=2))
    router.delay_s = 0.5
    process = start(shared[0], "score", "in.jsonl", "-o", "out.safetensors", "--concurrency", "1")
    try:
        wait_until(lambda: finished())
        code, _, said = run("score", "in.jsonl", "-o", "out.safetensors")
        assert code == 2 and "another run is at work on this output" in said
        assert finished()
    finally:
        process.kill()
        process.communicate()


def test_a_piece_that_is_half_there_is_asked_again(run, router, half_done):
    path = next(Path("out.safetensors.pieces").glob("*/00000002.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    kept = len(finished())
    assert run("score", "in.jsonl", "-o", "out.safetensors")[0] == 0
    assert_holds("out.safetensors", half_done)
    assert len(router.asked) == (20 - kept + 1) * pieces._READS


# ---------------------------------------------------------------- memory


def peak_memory(url, *arguments) -> int:
    """Of a run of the command, in bytes."""
    code = "from scoring.cli.main import main; assert main() == 0; print(open('/proc/self/status').read())"
    run = subprocess.run([sys.executable, "-c", code, *arguments, "--url", url], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return int(re.search(r"VmHWM:\s+(\d+) kB", run.stdout)[1]) * 1024


def test_memory_does_not_grow_with_the_file(run, shared, router):
    sizes = {}
    for times in (1, 10):
        rows = own_rows(1000 * times, length=256)
        write_rows(rows, f"{times}.jsonl")
        router.asked.clear()
        sizes[times] = peak_memory(shared[0], "score", f"{times}.jsonl", "-o", f"{times}.safetensors")
        scores = score_file.load(f"{times}.safetensors").scores
        assert len(scores) == len(rows)
        for i in range(0, len(rows), 97):
            assert scores[i].response_logprobs.tolist() == due(rows[i])
    assert Path("10.jsonl").stat().st_size > 12 << 20 and Path("10.safetensors").stat().st_size > 36 << 20
    assert sizes[10] - sizes[1] < 12 << 20, {times: size >> 20 for times, size in sizes.items()}


# ---------------------------------------------------------------- what it says


class Screen:
    def __init__(self, terminal):
        self.text, self.isatty = "", lambda: terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_on_a_terminal_is_one_line_and_elsewhere_lines_now_and_then(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("scoring.cli.display.time.monotonic", lambda: now)
    for terminal in (True, False):
        now = 1000.0
        screen = Screen(terminal)
        display = Display(1000, screen)
        display.found(200)
        for _ in range(50):
            now += 1
            display.advance(10, 100, 5000)
        lines = [line for line in re.split(r"[\r\n]+(?:\x1b\[K)?", screen.text) if line]
        assert len(lines) == (50 if terminal else 1)
        if terminal:
            assert lines[-1] == "5,000 reads, 5,000 tokens/s, 70%, 0:30 min left"
            assert "\n" not in screen.text
        else:
            assert lines == ["3,000 reads, 5,000 tokens/s, 50%, 0:50 min left"]


def test_check_says_health_teachers_limits_and_one_timed_read(run):
    code, out, _ = run("check")
    assert code == 0
    for said in (
        r"/health +200 alive \(\d+ ms\)",
        r"/ready +200 ready",
        r"one call +max_batch_reads 10,000, max_batch_tokens 1,000,000",
        r"teacher +default \(the default\)",
        r"teacher +math",
        rf"checkpoint +{CHECKPOINT}, weight version 0",
        r"max_length +512 tokens",
        r"max_candidates +64",
        r"one read +\d+ ms for 2 tokens, logprob -?0.0000",
    ):
        assert re.search(said, out), said


@pytest.mark.parametrize("path", ["/scoring", "/scoring/"])
def test_a_service_below_a_path_is_checked_there(run, router, path):
    api, asked = build_api(lambda: router, BATCH_LIMITS), []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            asked.append(scope["path"])
            scope = scope | {"path": scope["path"].removeprefix("/scoring")}
        await api(scope, receive, send)

    with served(app) as url:
        code, out, _ = run("check", url=url + path)
    assert code == 0, out
    assert {"/scoring/health", "/scoring/ready", "/scoring/v1/teachers", "/scoring/v1/matrix-reads"} == set(asked)


def test_check_shows_what_a_proxy_in_front_says_of_a_route(run, router):
    api = build_api(lambda: router, BATCH_LIMITS)

    async def app(scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/ready":
            await JSONResponse({"error": "no upstream"}, 502)(scope, receive, send)
        else:
            await api(scope, receive, send)

    with served(app) as url:
        code, out, _ = run("check", url=url)
    assert code == 3 and re.search(r"/ready +502 no upstream", out)


def test_check_of_a_service_that_is_not_ready_is_code_3(run, router):
    async def broken(reads, **options):
        raise RuntimeError("broken")

    router.read_labels = broken
    with served(build_api(lambda: router, BATCH_LIMITS)) as url:
        code, out, _ = run("check", url=url)
    assert code == 3 and re.search(r"/ready +503", out) and re.search(r"/health +200", out)


@pytest.mark.parametrize("command", [[], ["score"], ["labels"], ["check"]])
def test_help_has_exit_codes_and_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "exit codes:" in said
    assert ("teacher-scoring score in.jsonl -o out.safetensors" in said) == (command != ["check"])


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"teacher-scoring": f"{cli.__name__}:main"}


def test_the_command_needs_no_ray_torch_or_vllm(run, shared):
    write_rows(own_rows(3))
    code = (
        "import sys\n"
        "for name in ('ray', 'torch', 'vllm', 'transformers', 'fastapi', 'pyarrow'): sys.modules[name] = None\n"
        "from scoring.cli.main import main\n"
        "sys.exit(main())"
    )
    arguments = ["score", "in.jsonl", "-o", "out.safetensors", "--url", shared[0]]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    arguments[3] = "out.parquet"
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ended.returncode == 2 and "Parquet needs pyarrow" in ended.stderr
