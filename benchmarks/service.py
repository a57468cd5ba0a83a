"""Level c: through the service, one replica with one engine on one core, beside the same engine without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from benchmarks.arithmetic import Decoder, ideal_reuse
from benchmarks.engines import TOKENS, WIDTH, bare
from benchmarks.rows import Result, Row, Way, rows_of, take_turns
from benchmarks.setup import Setup
from benchmarks.vllm_server import VllmServer, ask
from benchmarks.workloads import Reads, as_array
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import MatrixScores
from tests.engine_process import EngineProcess
from tests.serve_process import ServeProcess

CLIENTS, HTTP_READS, HTTP_WIDTH = 8, 64, 64
GROUP, GROUP_PROMPT, GROUP_RESPONSE, BLOCK = 8, 1024, 128, 32
LABELS, LABEL_PROMPT, LABEL_TOKENS = 256, 512, 16


_HTTP = f"{CLIENTS} clients, {HTTP_READS} distinct reads of {TOKENS} tokens, half of them scored, K = {HTTP_WIDTH}"
_GROUP = f"{GROUP} responses of {GROUP_RESPONSE} to one prompt of {GROUP_PROMPT}, at once"
_LABELS = f"{LABELS} of {LABEL_TOKENS} new tokens after {LABEL_PROMPT} cached ones"
KINDS = {
    "service": ("ScoringClient, one replica", "AsyncLLM", f"64 x {TOKENS} tokens, K = {WIDTH}"),
    "http": ("HttpScoringClient, a read a call", "vLLM's HTTP server", _HTTP),
    "route": ("vLLM's route here", "vLLM's HTTP server", _HTTP),
    "calls": ("HttpScoringClient, a call a client", "vLLM's HTTP server, all reads at once", _HTTP),
    "cold": ("a group with reuse of its prompt", "prefix_reuse: false", f"{_GROUP}, new"),
    "warm": ("a group with its prompt cached", "prefix_reuse: false", _GROUP),
    "labels": ("label reads in one call", "one by one", _LABELS),
}


class ServiceStage:
    """The rows of level c for one teacher.

    Args:
        due: per kind of row, the least ratio; of `cold` and `warm`, the least part of the arithmetic ideal.
    """

    def __init__(self, teacher: str, **due: float) -> None:
        self.teacher = teacher
        self.rows = rows_of("c", KINDS, teacher, due)

    def measure(self, setup: Setup, rows: Mapping[str, Row]) -> Iterator[Result]:
        from deployments import ScoringClient

        teacher = setup.teachers[self.teacher]
        teachers = {"default": teacher.config}
        if rows.keys() & {"cold", "warm"}:
            teachers["without"] = {**teacher.config, "prefix_reuse": False}
        folder = setup.folder / f"service-{self.teacher}"
        folder.mkdir()
        service = ServeProcess(folder, {"teachers": teachers})
        with service.connected(), ScoringClient() as client:
            core = core_of("default")
            if "service" in rows:
                yield self._beside_bare(setup, client, core, rows["service"])
            if rows.keys() & {"http", "route", "calls"}:
                yield from self._beside_vllm(setup, service.url, core, rows)
            if "labels" in rows:
                yield self._labels(setup, client, rows["labels"])
            if rows.keys() & {"cold", "warm"}:
                yield from self._group(setup, client, rows)

    def _beside_bare(self, setup: Setup, client: Any, core: int, row: Row) -> Result:
        teacher = setup.teachers[self.teacher]
        count = setup.count(64, self.teacher)
        with contextlib.closing(
            EngineProcess(teacher.settings, core, setup.folder / f"bare-{self.teacher}.log")
        ) as engine:

            def reads(number: int) -> Reads:
                return Reads(teacher.vocabulary, count if number else 16, 1, TOKENS - 1, WIDTH, number)

            ways = {
                "ours": lambda n: timed(client.read_matrix, reads(n).batch()),
                "bare": lambda n: engine.call(bare, reads(n).reads()),
            }
            turns = take_turns(ways, setup.rounds, teacher.limit)
        return turns.result(row, "ours", "bare", reads=count)

    def _beside_vllm(self, setup: Setup, url: str, core: int, rows: Mapping[str, Row]) -> Iterator[Result]:
        from scoring.http_client import HttpScoringClient

        teacher = setup.teachers[self.teacher]
        count = setup.count(HTTP_READS, self.teacher)

        def reads(number: int) -> list[MatrixRead]:
            half = TOKENS // 2
            return Reads(teacher.vocabulary, count if number else CLIENTS, half, half, HTTP_WIDTH, number).reads()

        with (
            VllmServer(teacher.settings, core, setup.folder / f"vllm-{self.teacher}.log") as theirs,
            httpx.Client(base_url=theirs.url, timeout=600, limits=httpx.Limits(max_connections=count)) as to_them,
            httpx.Client(base_url=url, timeout=600) as to_us,
            HttpScoringClient(url) as client,
            ThreadPoolExecutor(CLIENTS) as clients,
            ThreadPoolExecutor(count) as all_at_once,
        ):

            def each(threads: ThreadPoolExecutor, one: Callable[[MatrixRead], np.ndarray]) -> Way:
                """A call a read, as many at a time as there are threads."""

                def way(number: int) -> tuple[float, np.ndarray]:
                    asked = reads(number)
                    started = time.perf_counter()
                    answers = list(threads.map(one, asked))
                    return time.perf_counter() - started, np.stack(answers)

                return way

            def together(number: int) -> tuple[float, np.ndarray]:
                """A call a client."""
                asked = reads(number)
                shares = [asked[i::CLIENTS] for i in range(CLIENTS)]
                started = time.perf_counter()
                answers = list(clients.map(client.read_matrix, shares))
                took = time.perf_counter() - started
                return took, np.stack([scores.logprobs for some in zip(*answers, strict=True) for scores in some])

            ways = {
                "http": each(clients, lambda read: client.read_matrix([read])[0].logprobs),
                "route": each(clients, lambda read: ask(to_us, read)),
                "vllm": each(clients, lambda read: ask(to_them, read)),
                "calls": together,
                "vllm, all at once": each(all_at_once, lambda read: ask(to_them, read)),
            }
            against = {"http": "vllm", "route": "vllm", "calls": "vllm, all at once"}
            against = {kind: other for kind, other in against.items() if kind in rows}
            ways = {name: way for name, way in ways.items() if name in against or name in against.values()}
            turns = take_turns(ways, setup.rounds, teacher.limit)
        for kind, other in against.items():
            yield turns.result(rows[kind], kind, other, reads=count)

    def _group(self, setup: Setup, client: Any, rows: Mapping[str, Row]) -> Iterator[Result]:
        """The same group three times: without reuse, with its prompt unknown, and with its prompt known."""
        teacher = setup.teachers[self.teacher]

        def group(number: int, name: str) -> Any:
            shape = (GROUP, GROUP_PROMPT, GROUP_RESPONSE, WIDTH)
            return Reads(teacher.vocabulary, *shape, seed=number, shared_prompt=True).batch(teacher=name)

        cached: dict[str, list[int]] = {"without": [], "cold": [], "warm": []}

        def ask_group(number: int, kind: str) -> tuple[float, np.ndarray]:
            batch = group(number, "without" if kind == "without" else "default")
            started = time.perf_counter()
            scores = client.read_matrix(batch)
            took = time.perf_counter() - started
            cached[kind] = scores.cached_tokens.tolist()
            return took, as_array(scores)

        ways = {kind: lambda n, kind=kind: ask_group(n, kind) for kind in cached}
        turns = take_turns(ways, setup.rounds, teacher.limit)
        model = Decoder.of(teacher.model)
        for kind in ("cold", "warm"):
            if kind in rows:
                ideal = ideal_reuse(model, GROUP_PROMPT, GROUP_RESPONSE, GROUP, BLOCK, cold=kind == "cold")
                row = replace(rows[kind], due=rows[kind].due * ideal)
                yield turns.result(row, kind, "without", ideal=ideal, cached=cached)

    def _labels(self, setup: Setup, client: Any, row: Row) -> Result:
        teacher = setup.teachers[self.teacher]

        def reads(number: int) -> list[LabelRead]:
            rng = np.random.default_rng([number, LABELS])
            prompt = rng.integers(0, teacher.vocabulary, LABEL_PROMPT)
            tails = rng.integers(0, teacher.vocabulary, (LABELS if number else 8, LABEL_TOKENS))
            return [LabelRead(np.concatenate([prompt, tail]), [1, 2]) for tail in tails]

        def together(number: int) -> tuple[float, np.ndarray]:
            asked = reads(number)
            client.read_labels(asked[:1])  # the prompt is cached from here on, in both ways
            started = time.perf_counter()
            scores = client.read_labels(asked)
            return time.perf_counter() - started, np.stack([s.logprobs for s in scores])[:, None]

        def one_by_one(number: int) -> tuple[float, np.ndarray]:
            asked = reads(number)
            started = time.perf_counter()
            scores = [client.read_labels([read])[0] for read in asked]
            return time.perf_counter() - started, np.stack([s.logprobs for s in scores])[:, None]

        turns = take_turns({"ours": together, "each": one_by_one}, setup.rounds, teacher.limit)
        return turns.result(row, "ours", "each")


def core_of(teacher: str) -> int:
    """The core that the one replica of a teacher has bound."""
    from ray import serve

    from deployments.router import APP_NAME

    (placed,) = serve.get_deployment_handle(f"Teacher-{teacher}", APP_NAME).broadcast("placement").results(timeout_s=60)
    (core,) = placed["cores"]
    return core


def timed(ask: Callable[[Any], MatrixScores], batch: Any) -> tuple[float, np.ndarray]:
    """Seconds of a call, and its scores as float32 [N, rows, 1 + K]."""
    started = time.perf_counter()
    scores = ask(batch)
    return time.perf_counter() - started, as_array(scores)
