"""A process that has imported everything and forks a child for each fault.

A fault that kills its process then costs a fork (20 ms), not an import of JAX. The
process runs under the fault shim, which sleeps until a child arms it. It never uses
TensorStore itself, since a process that has used it cannot fork.
"""

import gc
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tests.helpers import keep_compiled

from . import shim


TIMEOUT = 120  # seconds; a child that takes longer dies by SIGALRM
OF_MANY = 300  # seconds, for a child that does the same in many directories
TIMEOUT_MARGIN = 10  # seconds more, for a child that hangs before it has set its alarm
_MAIN = f"import sys, {__name__}; {__name__}.serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Outcome:
    """What became of a child."""

    value: Any = None  # what the function returned
    error: Exception | None = None  # or what it raised
    signal: int = 0  # or what killed the child
    count: int = 0  # how many operations the shim counted
    hits: list[str] = field(default_factory=list)  # "kind path" of those it struck

    @property
    def kind(self) -> str:
        """The kind of the first operation that was hit, or ''."""
        return self.hits[0].split(" ", 1)[0] if self.hits else ""


class Zygote:
    """The process, seen from the tests."""

    def __init__(self, libraries: str) -> None:
        ours, theirs = Pipe()
        here = pathlib.Path(__file__).resolve().parent
        self.environment = {
            **os.environ,
            **keep_compiled("children"),
            "LD_PRELOAD": libraries,
            "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _MAIN, str(theirs.fileno())],
            env=self.environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._pipe = ours

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        fault: shim.Fault | None = None,
        memory: int = 0,
        timeout: int = TIMEOUT,
    ) -> Outcome:
        """Call a function in a fresh child, under a fault and with bounded `memory`."""
        self._pipe.send((function, args, fault, memory, timeout))
        if not self._pipe.poll(timeout + 2 * TIMEOUT_MARGIN):
            raise TimeoutError(f"The zygote hangs:\n{_threads(self._process.pid)}")
        return self._pipe.recv()

    def call(
        self, function: Callable[..., Any], *args: Any, timeout: int = TIMEOUT
    ) -> Any:
        """Call a function in a fresh child; what it raises is raised here."""
        outcome = self.run(function, *args, timeout=timeout)
        if outcome.error is not None:
            raise outcome.error
        assert not outcome.signal, f"signal {outcome.signal} in {function}{args}"
        return outcome.value

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """The process, from its own side: answer requests until the pipe is closed."""
    import tensorstore  # noqa: F401

    import eqx_ckpt

    for name in eqx_ckpt.__all__:
        getattr(eqx_ckpt, name)
    pipe = Connection(descriptor)
    gc.collect()
    gc.freeze()
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork(*request))


def _fork(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    fault: shim.Fault | None,
    memory: int,
    timeout: int,
) -> Outcome:
    """Run a function in a child, and gather what became of it."""
    answer, answers = Pipe(duplex=False)
    report, reports = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A child must not return into the parent's loop, whatever happens.
        try:
            signal.alarm(timeout)
            if memory:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            _answer(answers, _run(function, args, fault, reports))
        finally:
            os._exit(1)
    answers.close()
    os.close(reports)
    try:
        if not answer.poll(timeout + TIMEOUT_MARGIN):
            raise TimeoutError(f"A child hangs:\n{_threads(pid)}")
        value, error, count = answer.recv()
    except EOFError:
        value, error, count = None, None, 0
    except TimeoutError as e:
        value, error, count = None, e, 0
        os.kill(pid, signal.SIGKILL)
    with open(report, errors="surrogateescape") as lines:
        hits = lines.read().splitlines()
    answer.close()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Outcome(value, error, max(0, -status), count, hits)


def _threads(pid: int) -> str:
    """What each thread of a process waits for in the kernel."""
    return "\n".join(
        f"{task.name} {what}: {(task / what).read_text().strip()}"
        for task in sorted(pathlib.Path(f"/proc/{pid}/task").iterdir())
        for what in ("comm", "wchan", "syscall", "stat")
    )


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    fault: shim.Fault | None,
    reports: int,
) -> tuple[Any, Exception | None, int]:
    value, error, count = None, None, 0
    if fault is not None:
        shim.arm(fault, reports)
    try:
        value = function(*args)
    except Exception as e:
        error = e
    if fault is not None:
        count = shim.disarm()
    return value, error, count


def _answer(answers: Connection, answer: tuple[Any, Exception | None, int]) -> None:
    try:
        pickle.loads(pickle.dumps(answer))
    except Exception as e:
        answer = None, RuntimeError(f"{answer} cannot be sent: {e}"), 0
    answers.send(answer)
    os._exit(0)
