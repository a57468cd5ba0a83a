"""Strangers at the door of the real service, with a real engine: no 5xx, no dead engine, and the next read is right.

`FUZZ_SECONDS` is how long each of both fuzzers runs, `FUZZ_SEED` where they begin. What they found, once mended, stands
as a plain test in tests/test_wire.py, tests/test_http_api.py or beside the route.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from ray import serve

from deployments.router import APP_NAME
from scoring import LabelRead, MatrixRead, wire
from scoring.http_client import HttpScoringClient
from tests.fuzz.seeds import seeds
from tests.serve_process import ServeProcess, two_replicas_of
from tests.text_teacher import make_text_teacher

SECONDS = int(os.environ.get("FUZZ_SECONDS", "20"))
SEED = os.environ.get("FUZZ_SEED", "1")
TOKEN = "a-token-of-many-letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}
ROOT = Path(__file__).parent.parent.parent
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,ignored_auth"
)
READS = [MatrixRead([1, 2, 3], [4, 5], [[6, 7], [8, 9]], extras=("tail",)), MatrixRead([9] * 60, [4, 5, 6])]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One replica of a tiny teacher that reads text, behind a token. This process is connected to its Ray cluster."""
    folder, model = tmp_path_factory.mktemp("service"), make_text_teacher(tmp_path_factory.mktemp("text-teacher"))
    tokens = folder / "tokens"
    tokens.write_text(f"fuzzer: {TOKEN}\n")
    tokens.chmod(0o600)
    args = {"teachers": {"default": two_replicas_of(model) | {"num_replicas": 1}}, "token_file": str(tokens)}
    service = ServeProcess(folder, args, headers=BEARER)
    with service.connected():
        yield service


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The inputs that Atheris kept: each took a way through the code that no other had taken."""
    folder = tmp_path_factory.mktemp("binary")
    run = fuzz_binary(folder)
    assert run.returncode == 0, run.stderr[-4000:]
    counts = json.loads((folder / "counts.json").read_text())
    print(counts)
    assert counts["inputs"] > 500 * SECONDS and counts["parsed"] > 5 * SECONDS < counts["answered"], counts
    return folder / "corpus"


def fuzz_binary(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.fuzz.binary", "--folder", str(folder), "--seed", SEED]
    command += ["--seconds", str(SECONDS), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 100)


@pytest.fixture
def unharmed(service):
    """The engine is the same process before and after, and answers the same bit for bit."""

    def look() -> tuple:
        (place,) = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("placement").results(timeout_s=30)
        with HttpScoringClient(service.url, token=TOKEN) as client:
            scores, labels = client.read_matrix(READS), client.read_labels([LabelRead([1, 2], [3, 4])])
        return (place["pid"], *sorted(place["engine"])), np.concatenate([scores.values, labels.values])

    processes, values = look()
    yield
    processes_after, values_after = look()
    assert processes_after == processes
    np.testing.assert_array_equal(values_after, values)


def test_a_missing_check_would_be_found(tmp_path):
    run = fuzz_binary(tmp_path, "--without-bounds")
    assert run.returncode == 77 and "Uncaught Python exception" in run.stdout + run.stderr
    assert list(tmp_path.glob("crash-*"))


def test_no_bytes_break_what_reads_them(corpus):
    assert len(list(corpus.iterdir())) > len(seeds())


def test_the_service_answers_every_input_that_was_kept(service, corpus, unharmed):
    statuses = Counter()
    with httpx.Client(base_url=service.url, headers=BEARER | {"content-type": wire.SAFETENSORS}, timeout=60) as http:
        for path in corpus.iterdir():
            data = path.read_bytes()
            kind = "label" if data[:1] == b"\x01" else "matrix"
            response = http.post(f"/v1/{kind}-reads", content=data[1:])
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code == 504, (path, response.text)
    print(statuses)
    assert statuses[200] and statuses[422]


def test_the_openapi_document_is_kept_by_every_answer(service, unharmed, tmp_path):
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{service.url}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {TOKEN}", "--seed", SEED, "--max-time", str(SECONDS)]
    command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--checks", CHECKS]
    run = subprocess.run(
        command,
        cwd=tmp_path,  # it keeps what failed there, and would begin with that the next time
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
    )
    print(run.stdout[-6000:])
    assert run.returncode == 0
    told = re.compile(r"(POST|GET) (/\S+) (\d{3}) [0-9.]+ ms, asked by (?:fuzzer|anybody)")
    logs = "".join(path.read_text(errors="replace") for path in service.log_files() if "Ingress" in path.name)
    seen = Counter((path, status) for _, path, status in told.findall(logs))
    document = httpx.get(f"{service.url}/openapi.json", headers=BEARER).json()
    for path in document["paths"]:
        assert seen[path, "200"], f"{path} was never asked well: {seen}"
