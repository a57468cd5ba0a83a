"""`HttpScoringClient` and `AsyncHttpScoringClient`: both reads over HTTP, from anywhere.

They need httpx, numpy and safetensors; no ray, no torch, no vllm. Methods, arguments and errors are those of the
clients inside the cluster, where alone adapters are added and removed.

An exchange is written once, as a generator that says what to send and how long to wait; the two clients only carry
that out, each in its own way. What is too big for one call is cut, once the service has said what it takes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import numpy as np

from scoring import wire
from scoring.batches import SCHEMA_VERSION, LabelBatch, MatrixBatch, cut_by_tokens
from scoring.coalescing import Coalescer
from scoring.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    WrongEngineAnswer,
)
from scoring.limits import BatchLimits
from scoring.loop_thread import LoopThread
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScore, LabelScores, MatrixScore, MatrixScores, one_by_one

logger = logging.getLogger(__name__)

# A connection is reused only while the server surely still holds it: uvicorn drops an idle one after 5 s, Serve's
# proxy after 90.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)
_CONNECT_S = 10.0
_GRACE_S = 0.25  # the server keeps the deadline; this is for its answer to travel
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_RETRIED = (429, 502, 503, 504)
_PASSING = (Overloaded, TeacherUnavailable)  # a read's errors that another attempt may not meet
_PIECE_TOKENS = 16_384  # `iter_matrix` asks for about this many tokens a call, and
_PIECES_AT_ONCE = 4  # has this many calls under way
_UPLOAD_PIECE = 256 * 1024  # bytes of a request between two looks at the clock
_JSON_SIZE = 3  # an id in JSON, against its 4 bytes
_HEADER_BYTES = 4096  # of a batch in safetensors: the names of its arrays and of the teachers
# The connection broke, or never was. Reads are idempotent, so it does not matter how far the request had come.
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
# What a status means in an answer that is not the service's own, but a proxy's.
_BY_STATUS = {413: BatchTooLarge, 429: Overloaded, 504: DeadlineExceeded} | dict.fromkeys(
    (500, 502, 503), TeacherUnavailable
)


@dataclass(frozen=True)
class _Send:
    """Send this, and hand back the response or the error httpx raised."""

    method: str
    url: str
    content: bytes | None
    headers: Mapping[str, str]
    timeout: httpx.Timeout


@dataclass(frozen=True)
class _Wait:
    """Wait so many seconds."""

    seconds: float


_Part = tuple[np.ndarray, MatrixScores | LabelScores, np.ndarray]
"""(target, scores, source): read `source[j]` of `scores` is read `target[j]` of the batch (see `assemble`)."""

_Steps = Generator[_Send | _Wait, httpx.Response | httpx.RequestError | None, Any]


class _Client:
    """What both clients are made with; see `HttpScoringClient`."""

    _http_class: type[httpx.Client] | type[httpx.AsyncClient]

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = wire.DEFAULT_TIMEOUT_S,
        binary: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = wire.ReadOptions(timeout_s).timeout_s
        self._binary = binary
        self._limits: BatchLimits | None = None  # known once a call was too big
        self._made_with = {"base_url": base_url, "token": token, "timeout_s": timeout_s, "binary": binary, "tls": tls}
        url = httpx.URL(base_url)
        if url.userinfo and token is not None:
            raise ValueError("a token is given twice: as token, and in base_url")
        self._http = self._http_class(
            base_url=url.copy_with(userinfo=b""),  # errors name the URL
            auth=(url.username, url.password) if url.userinfo else None,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            limits=_LIMITS,
            trust_env=False,
            verify=tls or True,
        )

    def _read(
        self,
        kind: wire.Kind,
        reads: Any,
        timeout_s: float | None,
        return_exceptions: bool,
        trace_headers: Mapping[str, str] | None,
    ) -> _Steps:
        """The exchanges of a batch for its scores: one, or as many as the service's limits and refusals ask for."""
        options = wire.ReadOptions(self._timeout_s if timeout_s is None else timeout_s, return_exceptions)
        batch = wire.BATCH[kind].of(reads)
        deadline = time.monotonic() + options.timeout_s
        left, parts, refusals = [np.arange(len(batch))], [], 0
        failures: list[ScoringError] = []  # of whole pieces
        while True:
            if not left:
                parts, left = _of_newest_weights(parts)
                if not left:
                    break
            piece = left.pop(0)
            part = batch if len(piece) == len(batch) else batch.select(piece)
            if parts and time.monotonic() >= deadline:
                late = DeadlineExceeded("not asked before its deadline (timeout_s)")
                if not return_exceptions:
                    raise late.at(int(piece[0]))
                parts.append((piece, wire.SCORES[kind].failed(late, len(piece)), np.arange(len(piece))))
                continue
            limits = self._limits
            if limits and len(cut := limits.cut(part)) > 1:
                left = [piece[reads] for reads in cut] + left
                continue
            options = replace(options, timeout_s=max(deadline - time.monotonic(), 0.001))
            try:
                scores = yield from _read(kind, part, options, self._binary, trace_headers or {})
            except ScoringError as error:
                if isinstance(error, BatchTooLarge):
                    self._learn(error)
                    if len(piece) > 1 and self._limits != limits:
                        left.insert(0, piece)
                        continue
                failure = error if error.read is None else error.at(int(piece[error.read]))
                if not return_exceptions or len(piece) == len(batch):
                    raise failure from error
                failures.append(failure)  # what other pieces are answered is not lost
                parts.append((piece, wire.SCORES[kind].failed(failure, len(piece)), np.arange(len(piece))))
                continue
            again = np.array([i for i, e in scores.errors.items() if isinstance(e, _PASSING)], dtype=np.int64)
            pause = _pause(refusals, scores.errors[int(again[0])]) if len(again) else 0.0
            if time.monotonic() + pause >= deadline:
                again = again[:0]
            if len(again):
                refusals += 1
                left.insert(0, piece[again])
                yield _Wait(pause)
            kept = np.setdiff1d(np.arange(len(piece)), again)
            parts.append((piece[kept], scores, kept))
        if failures and len(failures) == len(parts):
            raise failures[0]
        return parts[0][1] if len(parts) == 1 else wire.SCORES[kind].assemble(len(batch), parts)

    def _learn(self, error: BatchTooLarge) -> None:
        """Take in the limits that came with a refusal, where any did."""
        try:
            limits = BatchLimits(**{f.name: int(error.details[f.name]) for f in fields(BatchLimits)})
        except (KeyError, TypeError, ValueError):
            return
        room = limits.max_request_bytes - _HEADER_BYTES if self._binary else limits.max_request_bytes // _JSON_SIZE
        self._limits = replace(limits, max_request_bytes=max(room, 1))


class HttpScoringClient(_Client):
    """For ordinary code. Safe to use from several threads; close it, or use it in a `with` block.

    Args:
        base_url: of the service, such as "http://127.0.0.1:8000". A token may stand in it, "https://any:TOKEN@host".
        token: sent as a bearer token; None sends none.
        timeout_s: seconds for a whole call, retries included, where the call names none.
        binary: safetensors both ways; False speaks JSON, which costs a hundred times the time.
        tls: whom to trust over https; None trusts the public authorities that certifi lists.

    The environment has no say (httpx's `trust_env` is off): no proxy and no `.netrc` comes between a caller and the
    URL given.
    """

    _http_class = httpx.Client

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock = threading.Lock()
        self._background: tuple[LoopThread, AsyncHttpScoringClient] | None = None
        self._closed = False

    def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> MatrixScores:
        """Answer matrix reads, in their order.

        Args:
            reads: a batch, or reads.
            timeout_s: seconds until what is not answered is given up, retries included; None takes the client's.
            return_exceptions: put a failed read's exception in its place instead of raising the first. A call that
                failed as a whole raises; of a batch that was cut into several, it stands in the place of its reads.
            trace_headers: W3C trace context (`traceparent`, `tracestate`).

        Raises:
            ScoringError: of the first read that failed, with its index; or of the call, when the service stayed
                unreachable or overloaded until the deadline, or when its answer is not the answer to these reads.
        """
        return self._run(self._read("matrix", reads, timeout_s, return_exceptions, trace_headers))

    def read_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> LabelScores:
        """Answer label reads, in their order; arguments and errors as for `read_matrix`."""
        return self._run(self._read("label", reads, timeout_s, return_exceptions, trace_headers))

    def iter_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[int, MatrixScore]]:
        """(index, score) of every read as it finishes, in no particular order. Arguments as for `read_matrix`.

        The reads travel in several calls, a few at a time. Leaving the loop early cancels the rest.
        """
        thread, client = self._beside()
        return thread.iterate(
            client.iter_matrix(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def iter_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[int, LabelScore]]:
        """(index, score) of every label read as it finishes; otherwise as `iter_matrix`."""
        thread, client = self._beside()
        return thread.iterate(
            client.iter_labels(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def submit(
        self, read: MatrixRead | LabelRead, *, timeout_s: float | None = None
    ) -> concurrent.futures.Future[MatrixScore | LabelScore]:
        """The future score of one read, asked at once: for samples that finish one by one.

        Reads submitted within a few milliseconds travel together.
        """
        thread, client = self._beside()

        async def answer() -> MatrixScore | LabelScore:
            return await client.submit(read, timeout_s=timeout_s)

        return thread.start(answer())

    def teachers(self) -> dict[str, dict[str, Any]]:
        """What every teacher is and takes, by name."""
        return self._run(_teachers(self._timeout_s))

    def close(self) -> None:
        """Close the connections. Submitted reads under way are cancelled."""
        with self._lock:
            self._closed = True
            if self._background is not None:
                thread, client = self._background
                thread.run(client.close())
                thread.close()
                self._background = None
        self._http.close()

    def _beside(self) -> tuple[LoopThread, AsyncHttpScoringClient]:
        """An asynchronous client in a thread of its own, made when it is first needed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._background is None:
                self._background = LoopThread("http-scoring-client"), AsyncHttpScoringClient(**self._made_with)
            return self._background

    def __enter__(self) -> HttpScoringClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self, steps: _Steps) -> Any:
        reply = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as finished:
                return finished.value
            reply = None
            if isinstance(step, _Wait):
                time.sleep(step.seconds)
                continue
            try:
                reply = self._exchange(step)
            except httpx.RequestError as error:
                reply = error

    def _exchange(self, step: _Send) -> httpx.Response:
        """The response, whole. httpx bounds every piece of an exchange; all of it together is bounded here."""
        end = time.monotonic() + step.timeout.read
        request = self._http.build_request(**vars(step))
        if step.content is not None:
            request.stream = _InTime(_cut(step.content), end, httpx.WriteTimeout)
        with contextlib.closing(self._http.send(request, stream=True)) as response:
            response.stream = _InTime(response.stream, end, httpx.ReadTimeout)
            response.read()
        return response


class AsyncHttpScoringClient(_Client):
    """For asynchronous code: `HttpScoringClient` with coroutines, its arguments included."""

    _http_class = httpx.AsyncClient

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coalescer = Coalescer({MatrixRead: self.iter_matrix, LabelRead: self.iter_labels})

    async def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> MatrixScores:
        """See `HttpScoringClient.read_matrix`."""
        return await self._run(self._read("matrix", reads, timeout_s, return_exceptions, trace_headers))

    async def read_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> LabelScores:
        """See `HttpScoringClient.read_labels`."""
        return await self._run(self._read("label", reads, timeout_s, return_exceptions, trace_headers))

    def iter_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[int, MatrixScore]]:
        """See `HttpScoringClient.iter_matrix`."""
        return self._iterate("matrix", reads, timeout_s, return_exceptions, trace_headers)

    def iter_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[int, LabelScore]]:
        """See `HttpScoringClient.iter_labels`."""
        return self._iterate("label", reads, timeout_s, return_exceptions, trace_headers)

    def submit(self, read: MatrixRead | LabelRead, *, timeout_s: float | None = None) -> asyncio.Future:
        """See `HttpScoringClient.submit`."""
        return self._coalescer.submit(read, self._timeout_s if timeout_s is None else timeout_s)

    async def _iterate(
        self,
        kind: wire.Kind,
        reads: Any,
        timeout_s: float | None,
        return_exceptions: bool,
        trace_headers: Mapping[str, str] | None,
    ) -> AsyncIterator[tuple[int, Any]]:
        batch = wire.BATCH[kind].of(reads)
        deadline = time.monotonic() + wire.ReadOptions(self._timeout_s if timeout_s is None else timeout_s).timeout_s
        turns = asyncio.Semaphore(_PIECES_AT_ONCE)

        async def ask(piece: np.ndarray) -> tuple[np.ndarray, Any]:
            async with turns:
                left = max(deadline - time.monotonic(), 0.001)
                try:
                    return piece, await self._run(self._read(kind, batch.select(piece), left, True, trace_headers))
                except ScoringError as error:
                    return piece, wire.SCORES[kind].failed(error, len(piece))

        asking = [asyncio.create_task(ask(piece)) for piece in cut_by_tokens(batch.tokens(), _PIECE_TOKENS)]
        try:
            for answered in asyncio.as_completed(asking):
                piece, scores = await answered
                for item in one_by_one(piece, scores, np.arange(len(piece)), return_exceptions):
                    yield item
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def teachers(self) -> dict[str, dict[str, Any]]:
        """See `HttpScoringClient.teachers`."""
        return await self._run(_teachers(self._timeout_s))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncHttpScoringClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _run(self, steps: _Steps) -> Any:
        reply = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as finished:
                return finished.value
            reply = None
            if isinstance(step, _Wait):
                await asyncio.sleep(step.seconds)
                continue
            request = self._http.build_request(**vars(step))
            try:
                async with asyncio.timeout(step.timeout.read):
                    reply = await self._http.send(request)
            except httpx.RequestError as error:
                reply = error
            except TimeoutError:
                reply = httpx.ReadTimeout(_SLOW, request=request)


_SLOW = "the exchange took too long as a whole"


class _InTime(httpx.SyncByteStream):
    """A body in pieces, given up with `error` when they go on beyond `end`."""

    def __init__(self, pieces: Iterable[bytes], end: float, error: type[httpx.TimeoutException]) -> None:
        self._pieces, self._end, self._error = pieces, end, error

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            if time.monotonic() > self._end:
                raise self._error(_SLOW)
            yield piece

    def close(self) -> None:
        if isinstance(self._pieces, httpx.SyncByteStream):
            self._pieces.close()


def _of_newest_weights(parts: list[_Part]) -> tuple[list[_Part], list[np.ndarray]]:
    """The answers by the newest weights of each teacher, and the reads that older ones have answered, where the weights
    changed between the calls of a batch. What failed stays."""
    newest: dict[str, int] = {}
    for _, scores, _ in parts:
        for meta in scores.metas:
            newest[meta.teacher] = max(newest.get(meta.teacher, 0), meta.weight_version)
    kept, behind = [], []
    for target, scores, source in parts:
        old = [i for i, meta in enumerate(scores.metas) if meta.weight_version < newest[meta.teacher]]
        late = np.isin(scores.meta_index[source], old)
        if late.any():
            behind.append(target[late])
            target, source = target[~late], source[~late]
        kept.append((target, scores, source))
    return kept, behind


def _cut(content: bytes) -> Iterator[bytes]:
    return (content[at : at + _UPLOAD_PIECE] for at in range(0, len(content), _UPLOAD_PIECE))


def _read(
    kind: wire.Kind,
    batch: MatrixBatch | LabelBatch,
    options: wire.ReadOptions,
    binary: bool,
    trace_headers: Mapping[str, str],
) -> _Steps:
    """The exchange of one batch for its scores."""
    if not len(batch):
        return wire.SCORES[kind].assemble(0, [])
    form = wire.SAFETENSORS if binary else "application/json"

    def request(left: float) -> _Send:
        beside = {"timeout_s": left, "return_exceptions": options.return_exceptions}
        if binary:
            content = wire.encode_batch(batch, **beside)
        else:
            content = json.dumps(wire.batch_to_json(batch, **beside), allow_nan=False).encode()
        headers = {**trace_headers, "content-type": form, "accept": form}
        return _Send("POST", f"/v1/{kind}-reads", content, headers, _timeout(left))

    response = yield from _attempts(request, options.timeout_s)
    given = response.headers.get("content-type", "")
    if given.split(";")[0].strip() != form:  # a proxy may add a charset
        raise WrongEngineAnswer(f"came as {given!r}; {form!r} was asked for")
    if binary:
        scores = wire.decode_scores(kind, response.content)
    else:
        scores = wire.scores_from_json(kind, wire.loads(response.content, WrongEngineAnswer))
    wire.check_answer(batch, scores)
    return scores if options.return_exceptions else scores.raise_first()


def _teachers(timeout_s: float) -> _Steps:
    """The exchange for what the teachers are."""
    response = yield from _attempts(
        lambda left: _Send("GET", "/v1/teachers", None, {"accept": "application/json"}, _timeout(left)), timeout_s
    )
    body = wire.loads(response.content, WrongEngineAnswer)
    if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION or "teachers" not in body:
        raise WrongEngineAnswer(f"is no list of teachers of schema {SCHEMA_VERSION}")
    return body["teachers"]


def _attempts(request: Callable[[float], _Send], timeout_s: float) -> _Steps:
    """The response 200 to `request(seconds left)`, tried again while it helps and the deadline allows.

    Raises:
        ScoringError: what the last attempt failed with.
    """
    deadline = time.monotonic() + timeout_s
    error: ScoringError = DeadlineExceeded(f"not sent within its timeout_s of {timeout_s:g} s")
    for attempt in itertools.count():
        left = deadline - time.monotonic()
        if left <= 0:  # the pause before it took longer than it was meant to
            raise error
        reply = yield request(left)
        if isinstance(reply, httpx.Response) and reply.status_code == 200:
            return reply
        error, again = _failure(reply)
        pause = _pause(attempt, error)
        if not again or time.monotonic() + pause >= deadline:
            raise error
        if attempt == 0:
            logger.warning("%s; trying again until the deadline, %.3g s from now", error, deadline - time.monotonic())
        yield _Wait(pause)


def _timeout(left: float) -> httpx.Timeout:
    """httpx's own limits: each counts a piece of the exchange, and none may pass the deadline."""
    return httpx.Timeout(left + _GRACE_S, connect=min(_CONNECT_S, left))


def _pause(attempt: int, error: ScoringError) -> float:
    """Seconds before the next attempt: doubling, and never the same for two clients, or they would come back as one."""
    pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
    return max(pause, error.details.get("retry_after_s", 0) * random.uniform(1.0, 1.25))


def _failure(reply: httpx.Response | httpx.RequestError) -> tuple[ScoringError, bool]:
    """The error of a failed attempt, and whether another attempt may succeed."""
    if isinstance(reply, httpx.Response):
        error = _error_of(reply)
        # A 500 that is not the service's own is its proxy's, whose connection to the service broke.
        return error, reply.status_code in _RETRIED or (reply.status_code == 500 and type(error) is TeacherUnavailable)
    where, what = reply.request.url, f"{type(reply).__name__}: {reply}".rstrip(": ")
    if isinstance(reply, _BROKEN):
        return TeacherUnavailable(f"{where} cannot be reached ({what})"), True
    if isinstance(reply, httpx.TimeoutException):
        return DeadlineExceeded(f"{where} did not answer within the deadline, timeout_s ({what})"), False
    return ScoringError(f"{where}: {what}"), False


def _error_of(response: httpx.Response) -> ScoringError:
    """The error of a response that is not 200: the service's own, or one made from the status of a proxy's."""
    try:
        error = wire.error_from_json(wire.loads(response.content, WrongEngineAnswer)["error"])
    except (WrongEngineAnswer, KeyError, TypeError):
        text = " ".join(response.text.split())[:200]
        kind = _BY_STATUS.get(response.status_code, ScoringError)
        error = kind(f"{response.request.url} answered {response.status_code}: {text}")
    given = error.details.pop("retry_after_s", response.headers.get("retry-after"))
    if (seconds := _seconds(given)) is not None:
        error.details["retry_after_s"] = max(0.0, seconds)
    return error


def _seconds(retry_after: Any) -> float | None:
    """How long a Retry-After asks to wait: it is a number of seconds or a date. None where it is neither."""
    try:
        return float(retry_after)
    except (TypeError, ValueError):
        pass
    try:
        return (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):
        return None
