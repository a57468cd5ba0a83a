"""A `TeacherEngine` in a process of its own: one process can host one engine, and the tests need several.

`EngineProcess` is the test's side of the pipe. It sends a function and its arguments; the process calls the
function with its engine in front of them and sends back what it returned or raised. The function travels by its
name, so it is a method of `TeacherEngine` or stands at the top of a module of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from scoring.batches import LabelBatch, MatrixBatch
from scoring.environment import prepare_engine_environment
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScores, MatrixScores

if TYPE_CHECKING:
    from scoring.engine import EngineSettings, TeacherEngine

START_S = 240  # an engine takes 20 s on an idle machine
ANSWER_S = 120
SHUTDOWN_S = 30


@contextlib.asynccontextmanager
async def hosted_engine(settings: EngineSettings) -> AsyncIterator[TeacherEngine]:
    """The engine that a process hosts."""
    from scoring.engine import TeacherEngine

    if settings.engine_args.get("async_scheduling"):
        _keep_async_scheduling()
    engine = TeacherEngine(settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def _keep_async_scheduling() -> None:
    """Let an engine on a CPU have it: vLLM's platform turns it off there, as of no use."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def and_keep(platform: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(and_keep)


class EngineProcess:
    """An engine on one core. Comes up in the background: the first call waits for it.

    Args:
        settings: what the engine is started with.
        core: the logical core its threads are bound to.
        log: a file for what its processes print; its end is shown when they fail.
        host: gives what takes the engine's place in calls, made of `settings`.
    """

    def __init__(
        self,
        settings: Any,
        core: int,
        log: Path,
        host: Callable[[Any], contextlib.AbstractAsyncContextManager] = hosted_engine,
    ) -> None:
        self.core, self.log = core, log
        self._connection, theirs = Pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine_process", str(theirs.fileno()), str(core)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent.parent,
                start_new_session=True,  # an interrupt of the test run reaches the tests alone, which shut it down
            )
        theirs.close()
        self._tree: list[psutil.Process] = []
        self._connection.send((host, settings))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function(engine, *args, **kwargs)` returns in the engine's process, awaited there if need be.

        Raises:
            Exception: what the function raised.
        """
        self.wait_until_up()
        self._connection.send((function, args, kwargs))
        return self._receive(ANSWER_S)

    def read_matrix(self, reads: MatrixBatch | Sequence[MatrixRead], **options: Any) -> MatrixScores:
        from scoring.engine import TeacherEngine

        batch = reads if isinstance(reads, MatrixBatch) else MatrixBatch.from_reads(reads)
        return self.call(TeacherEngine.read_matrix, batch, **options)

    def read_labels(self, reads: LabelBatch | Sequence[LabelRead], **options: Any) -> LabelScores:
        from scoring.engine import TeacherEngine

        batch = reads if isinstance(reads, LabelBatch) else LabelBatch.from_reads(reads)
        return self.call(TeacherEngine.read_labels, batch, **options)

    def wait_until_up(self) -> None:
        if not self._tree:
            self._receive(START_S)
            host = psutil.Process(self._process.pid)
            self._tree = [host, *host.children(recursive=True)]

    def start_closing(self) -> None:
        """Tell the process to shut its engine down, without waiting for it."""
        self._connection.close()  # the end of its input is the order to leave

    def close(self) -> None:
        """Shut the engine down and wait for its processes.

        Raises:
            AssertionError: one of them would not end, and was killed.
        """
        self.start_closing()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_S)
        if self._process.poll() is None:
            host = psutil.Process(self._process.pid)
            self._tree = [host, *host.children(recursive=True)]
        _, left = psutil.wait_procs(self._tree, timeout=5)
        for process in left:
            process.kill()
        self._process.wait(SHUTDOWN_S)
        assert not left, f"processes {[p.pid for p in left]} outlived their engine:\n{self._end_of_log()}"

    def _receive(self, timeout_s: float) -> Any:
        try:
            assert self._connection.poll(timeout_s), f"no answer in {timeout_s} s:\n{self._end_of_log()}"
            answer, error = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the engine's process has ended:\n{self._end_of_log()}") from None
        if error is not None:
            raise error
        return answer

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Engines:
    """The engines of a test run by name, in pairs: asking for one starts both, each on a core of its own where there
    are two, and closes the pair before. So never more than two are alive, and tests of one pair belong together.

    Args:
        pairs: per engine its name and a function that gives its settings.
        cores: the logical cores there are.
        logs: a folder for what the engines print.
    """

    def __init__(
        self, pairs: Sequence[Mapping[str, Callable[[], EngineSettings]]], cores: Sequence[int], logs: Path
    ) -> None:
        self.pairs, self.logs = pairs, logs
        self._cores = [cores[0], cores[-1]]
        self._alive: dict[str, EngineProcess] = {}
        self._closing: list[EngineProcess] = []

    def __getitem__(self, name: str) -> EngineProcess:
        if name not in self._alive:
            self._start_closing()  # takes seconds, in which the next pair can begin to start
            pair = next(pair for pair in self.pairs if name in pair)
            self._alive = {
                each: EngineProcess(settings(), core, self.logs / f"{each}.log")
                for (each, settings), core in zip(pair.items(), self._cores, strict=True)
            }
        return self._alive[name]

    def close(self) -> None:
        """Close them and wait for their processes. They start again when asked for."""
        self._start_closing()
        while self._closing:
            self._closing.pop().close()

    def _start_closing(self) -> None:
        for engine in self._alive.values():
            engine.start_closing()
        self._closing += self._alive.values()
        self._alive = {}


async def _serve(engine: TeacherEngine, connection: Connection) -> None:
    while True:
        try:
            function, args, kwargs = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        try:
            answer = function(engine, *args, **kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
            connection.send((answer, None))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, error))


async def _main(connection: Connection) -> None:
    host, settings = connection.recv()
    async with contextlib.AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(host(settings))
        except Exception as error:
            connection.send((None, error))
            raise
        connection.send((None, None))
        await _serve(engine, connection)


if __name__ == "__main__":
    prepare_engine_environment([int(sys.argv[2])])
    asyncio.run(_main(Connection(int(sys.argv[1]))))
