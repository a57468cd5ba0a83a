"""A `TeacherEngine` in a process of its own: one process can host one engine, and the tests need several.

`EngineProcess` is the test's side of the pipe. It sends a function and its arguments; the process calls the
function with its engine in front of them and sends back what it returned or raised. The function travels by its
name, so it is a method of `TeacherEngine` or stands at the top of a module of the tests.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
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

START_S = 120  # an engine takes 15 s on an idle machine
ANSWER_S = 120
SHUTDOWN_S = 30


class EngineProcess:
    """An engine on one core. Comes up in the background: the first call waits for it.

    Args:
        settings: what the engine is started with.
        core: the logical core its threads are bound to.
        log: a file for what its processes print; its end is shown when they fail.
    """

    def __init__(self, settings: EngineSettings, core: int, log: Path) -> None:
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
        self._connection.send(settings)

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

    def close(self) -> None:
        """Shut the engine down and wait for its processes.

        Raises:
            AssertionError: one of them would not end, and was killed.
        """
        self._connection.close()  # the process reads the end of its input as the order to leave
        try:
            self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
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
    """The engines of a test run by name: started when first asked for, and never more than two at a time.

    Each has a core to itself where there are two. Asking for a third closes the one that was asked for longest
    ago, so tests of one engine belong together.
    """

    def __init__(self, settings: Mapping[str, Callable[[], EngineSettings]], cores: Sequence[int], logs: Path) -> None:
        self.settings, self.logs = settings, logs
        self._cores = [cores[0], cores[-1]]
        self._alive: dict[str, EngineProcess] = {}  # the one asked for last comes last

    def __getitem__(self, name: str) -> EngineProcess:
        engine = self._alive.pop(name, None)
        if engine is None:
            while len(self._alive) > 1:
                self._alive.pop(next(iter(self._alive))).close()
            free = list(self._cores)
            for other in self._alive.values():
                free.remove(other.core)
            engine = EngineProcess(self.settings[name](), free[0], self.logs / f"{name}.log")
        self._alive[name] = engine
        return engine

    def close(self) -> None:
        """Close all of them. They start again when asked for."""
        while self._alive:
            self._alive.popitem()[1].close()


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
    settings = connection.recv()
    from scoring.engine import TeacherEngine

    try:
        engine = TeacherEngine(settings)
    except Exception as error:
        connection.send((None, error))
        raise
    try:
        connection.send((None, None))
        await _serve(engine, connection)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    prepare_engine_environment([int(sys.argv[2])])
    asyncio.run(_main(Connection(int(sys.argv[1]))))
