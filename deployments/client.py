"""`ScoringClient` and `AsyncScoringClient`: both reads from any process of the Ray cluster.

Each has a Router of its own: answers come straight from the replicas. Outside the cluster, use
`scoring.http_client`, which has the same methods.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from deployments.router import APP_NAME, Router
from scoring.batches import LabelBatch, MatrixBatch
from scoring.coalescing import Coalescer
from scoring.errors import TeacherUnavailable
from scoring.loop_thread import LoopThread
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScore, LabelScores, MatrixScore, MatrixScores


class AsyncScoringClient(Router):
    """For asynchronous code: a `Router` of the caller's own, with `submit`. Use one from one event loop.

    `ScoringClient` has the same methods; what are coroutines here are ordinary ones there, `iter_matrix` and
    `iter_labels` give asynchronous iterators here, and `submit` an `asyncio.Future`.

    Args:
        app_name: the Serve application.

    Raises:
        TeacherUnavailable: no Ray cluster is running.
    """

    def __init__(self, app_name: str = APP_NAME) -> None:
        _connect(app_name)
        super().__init__(app_name)
        self._coalescer = _coalescer(self)

    def submit(self, read: MatrixRead | LabelRead, *, timeout_s: float = 600) -> asyncio.Future:
        """The future score of one read, asked at once. Reads submitted within a few milliseconds travel together."""
        return self._coalescer.submit(read, timeout_s)

    async def close(self) -> None:
        """For symmetry with the other clients: this one holds nothing to close."""

    async def __aenter__(self) -> AsyncScoringClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


class ScoringClient:
    """For ordinary code, also inside an asynchronous actor (where it blocks that actor's loop while it waits).

    Safe to use from several threads. Connects to the running Ray cluster when this process is not connected yet.

    Args:
        app_name: the Serve application.

    Raises:
        TeacherUnavailable: no Ray cluster is running.
    """

    def __init__(self, app_name: str = APP_NAME) -> None:
        _connect(app_name)
        self._thread = LoopThread("scoring-client")
        self._router = Router(app_name)
        self._coalescer = _coalescer(self._router)

    def teachers(self) -> dict[str, dict[str, Any]]:
        """Per teacher what it is and takes: vocabulary, max_length, max_candidates, dtype, hashes, replicas, ..."""
        return self._thread.run(self._router.teachers())

    def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> MatrixScores:
        """Answer matrix reads, in their order: `scores[i].logprobs` is float32 [n, K].

        Args:
            reads: a list of `MatrixRead`, or a `MatrixBatch`.
            timeout_s: seconds until what is not answered is aborted.
            return_exceptions: put a failed read's exception in its place instead of raising the first.
            trace_headers: W3C trace context, handed to vLLM.

        Raises:
            ScoringError: of the first read that failed, with its index in `read`.
        """
        return self._thread.run(
            self._router.read_matrix(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def read_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> LabelScores:
        """Answer label reads, in their order: `labels[i].logprobs` is float32 [L]. Arguments as for `read_matrix`."""
        return self._thread.run(
            self._router.read_labels(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def iter_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[int, MatrixScore]]:
        """(index, score) of every read as it finishes, in no particular order. Arguments as for `read_matrix`.

        Leaving the loop early cancels the rest.
        """
        return self._thread.iterate(
            self._router.iter_matrix(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def iter_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[int, LabelScore]]:
        """(index, score) of every label read as it finishes; otherwise as `iter_matrix`."""
        return self._thread.iterate(
            self._router.iter_labels(
                reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
            )
        )

    def submit(
        self, read: MatrixRead | LabelRead, *, timeout_s: float = 600
    ) -> concurrent.futures.Future[MatrixScore | LabelScore]:
        """The future score of one read, asked at once: for samples that finish one by one.

        Reads submitted within a few milliseconds travel together.
        """

        async def answer() -> MatrixScore | LabelScore:
            return await self._coalescer.submit(read, timeout_s)

        return self._thread.start(answer())

    def update_weights(self, teacher: str, checkpoint_path: str | Path, *, timeout_s: float = 600) -> int:
        """Have a teacher answer by other weights of its model, on all its replicas at once. See
        `Router.update_weights`. Returns the new weight version."""
        return self._thread.run(self._router.update_weights(teacher, checkpoint_path, timeout_s))

    def add_adapter(self, name: str, base: str, path: str) -> None:
        """Serve a LoRA adapter as the teacher `name`, over the replicas of `base`. See `Router.add_adapter`."""
        self._thread.run(self._router.add_adapter(name, base, path))

    def remove_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        self._thread.run(self._router.remove_adapter(name))

    def close(self) -> None:
        """Stop this client's thread. Reads under way are cancelled."""
        self._thread.close()

    def __enter__(self) -> ScoringClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _coalescer(router: Router) -> Coalescer:
    return Coalescer({MatrixRead: router.iter_matrix, LabelRead: router.iter_labels})


def _connect(app_name: str) -> None:
    if "://" in app_name:
        raise ValueError(f"{app_name!r} is no application's name: over HTTP use scoring.http_client.HttpScoringClient")
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            if _is_about_a_token(error):
                raise TeacherUnavailable(
                    "the Ray cluster asks for a token, and this process brings none that it knows: set RAY_AUTH_MODE="
                    "token in its environment (and RAY_AUTH_TOKEN, where another user started the cluster)"
                ) from error
            raise TeacherUnavailable(
                "no Ray cluster is running on this machine, and this process is not connected to one "
                "(start the service: serve run serve_config.yaml; or connect: ray.init(address=...))"
            ) from error


def _is_about_a_token(error: BaseException | None) -> bool:
    """Whether Ray's own account of a failed connection leads back to its check of tokens."""
    while error is not None and not isinstance(error, AuthenticationError):
        error = error.__cause__ or error.__context__
    return error is not None
