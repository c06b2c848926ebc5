"""Jobs of several processes on this machine; run in a child of the zygote.

A process of a job costs a fork and a backend there, not an import of JAX.
"""

import ctypes
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import jax


TIMEOUT = 100.0  # seconds, for one job; the zygote's child lives a little longer
_PR_SET_PDEATHSIG = 1


class End(NamedTuple):
    """What became of a process: a value, an error, or a signal that killed it."""

    value: Any = None
    error: str = ""
    signal: int = 0


class Job:
    """A program that runs on each of several processes, with so many devices each.

    `devices` may be different numbers.
    """

    def __init__(
        self,
        processes: int,
        devices: int | Sequence[int],
        program: Callable[..., Any],
        *args: Any,
    ) -> None:
        self._end = time.monotonic() + TIMEOUT
        self._outputs = [os.memfd_create("output") for _ in range(processes)]
        self._processes: list[tuple[int, Connection]] = []
        # Held until the job has begun; the coordinator may listen there all the same.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            address = "{}:{}".format(*reserved.getsockname())
            for index in range(processes):
                ours, theirs = Pipe()
                pid = os.fork()
                if pid == 0:
                    # The others see the end of a pipe only if nobody else has it.
                    for _, other in self._processes:
                        other.close()
                    ours.close()
                    _redirect(self._outputs[index])
                    here = devices if isinstance(devices, int) else devices[index]
                    start = (address, processes, index, here)
                    _live(theirs, start, program, args)
                theirs.close()
                self._processes.append((pid, ours))
            answers = self._answers()
        self.ends = self._ends(answers)
        for output in self._outputs:
            os.close(output)

    def _answers(self) -> dict[int, tuple[Any, str]]:
        """What each process says, unless it dies or hangs before."""
        answers: dict[int, tuple[Any, str]] = {}
        waiting = {pipe: index for index, (_, pipe) in enumerate(self._processes)}
        while waiting and (left := self._end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                index = waiting.pop(pipe)
                try:
                    answers[index] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    continue
        for index in waiting.values():
            answers[index] = None, f"It hangs:\n{self._output(index)}"
            os.kill(self._processes[index][0], signal.SIGKILL)
        return answers

    def _ends(self, answers: dict[int, tuple[Any, str]]) -> list[End]:
        for _, pipe in self._processes:
            pipe.close()  # Now all of them may end.
        ends: list[End] = []
        for index, (pid, _) in enumerate(self._processes):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            value, error = answers.get(index, (None, ""))
            if index in answers:
                ends.append(End(value, error))
            else:
                ends.append(End(error=self._output(index), signal=max(0, -status)))
        return ends

    def _output(self, index: int) -> str:
        """What a process has written, without what gloo says of its connections."""
        size = os.fstat(self._outputs[index]).st_size
        text = os.pread(self._outputs[index], size, 0).decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if "[Gloo]" not in line)


def run(
    processes: int,
    devices: int | Sequence[int],
    program: Callable[..., Any],
    *args: Any,
) -> list[End]:
    """What becomes of the processes of a job."""
    return Job(processes, devices, program, *args).ends


def values(
    processes: int,
    devices: int | Sequence[int],
    program: Callable[..., Any],
    *args: Any,
) -> list[Any]:
    """What the program returns on each process; raises if it fails on one."""
    ends = run(processes, devices, program, *args)
    failures = [
        f"Process {index}: signal {end.signal}: {end.error}"
        for index, end in enumerate(ends)
        if end.error or end.signal
    ]
    if failures:
        raise AssertionError("\n".join(failures))
    return [end.value for end in ends]


def at_once(calls: list[tuple[Any, ...]]) -> list[list[End]]:
    """Several jobs at the same time, each from the arguments of `run`."""
    children: list[Connection] = []
    for call in calls:
        ours, theirs = Pipe()
        if os.fork() == 0:
            try:
                _die_with_parent()
                theirs.send(run(*call))
            finally:
                os._exit(0)
        theirs.close()
        children.append(ours)
    return [child.recv() for child in children]


def _redirect(output: int) -> None:
    for descriptor in (1, 2):
        os.dup2(output, descriptor)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(
    pipe: Connection,
    start: tuple[str, int, int, int],
    program: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """One process, from its own side; it never returns."""
    try:
        _die_with_parent()
        signal.alarm(0)
        try:
            _initialise(*start)
            answer = program(*args), ""
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)
        # JAX ends the others when one ends, so that they wait for the last one.
        pipe.poll(TIMEOUT)
    finally:
        os._exit(0)


def _initialise(address: str, processes: int, index: int, devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        # JAX's own reaction to a dead process must not come before ours.
        jax.distributed.initialize(
            address,
            processes,
            index,
            coordinator_bind_address=address,
            heartbeat_timeout_seconds=100,
        )
