"""Processes that work on one path at the same time; run in a child of the zygote."""

import dataclasses
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

import eqx_ckpt
from support import exchange

from . import shim


TIMEOUT = 110  # seconds; less than that of the zygote's child
_ANSWERS = ["saved", "exists", "failed"]  # by exit status


Call = tuple[Callable[..., Any], tuple[Any, ...]]


def at_once(calls: dict[int, Call]) -> dict[int, str]:
    """Save by each of several processes: who "saved", for whom it "exists".

    The processes start together, from a process that has not used TensorStore.
    """
    start, starter = os.pipe()

    def save(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
        os.close(starter)
        os.read(start, 1)  # until every writer is there
        try:
            function(*args)
        except eqx_ckpt.CheckpointExistsError:
            return 1
        return 0

    children = {i: fork(lambda call=call: save(*call)) for i, call in calls.items()}
    os.close(starter)
    os.close(start)
    return {i: _ANSWERS[_status(pid)] for i, pid in children.items()}


class Racer:
    """A call in a process of its own, which a fault stops, once or again and again."""

    def __init__(self, fault: shim.Fault, call: Call, timeout: int = TIMEOUT) -> None:
        self._answer, answers = Pipe(duplex=False)

        def run() -> int:
            shim.arm(fault, -1)
            value = _outcome(call)
            shim.disarm()
            answers.send(value)
            return 0

        self._pid = fork(run, timeout)
        self.is_stopped = self._wait()

    def _wait(self) -> bool:
        return os.WIFSTOPPED(os.waitpid(self._pid, os.WUNTRACED)[1])

    def go_on(self) -> None:
        """Until the fault stops it again, or it ends."""
        os.kill(self._pid, signal.SIGCONT)
        self.is_stopped = self._wait()

    def finish(self) -> Any:
        """What the call returns or raises."""
        while self.is_stopped:
            self.go_on()
        return self._answer.recv()


def overtake(fault: shim.Fault, first: Call, second: Call) -> tuple[Any, Any] | None:
    """What two calls return or raise, of which the second overtakes the first.

    The first runs in a process of its own until the fault stops it; then the second
    runs from beginning to end, and then what is left of the first. `None`: the first
    has no such operation.
    """
    racer = Racer(fault, first)
    if not racer.is_stopped:
        return None
    overtaker = _outcome(second)
    return racer.finish(), overtaker


def overtake_and_look(
    fault: shim.Fault, first: Call, second: Call, look: Call
) -> tuple[Any, Any, Any] | None:
    """As `overtake`, and then what a third call returns or raises."""
    answers = overtake(fault, first, second)
    return None if answers is None else (*answers, _outcome(look))


def overtake_often(
    fault: shim.Fault, first: Call, second: Call, distance: int
) -> tuple[Any, list[Any]]:
    """As `overtake`, but the second runs again and again, at a distance."""
    racer = Racer(dataclasses.replace(fault, for_ever=True), first)
    overtakers: list[Any] = []
    stops = 0
    while racer.is_stopped:
        if stops % distance == 0:
            overtakers.append(_outcome(second))
        racer.go_on()
        stops += 1
    return racer.finish(), overtakers


def finish_first(
    fault: shim.Fault, first: Call, later_fault: shim.Fault, later: Call
) -> tuple[Any, Any] | None:
    """What two calls return or raise, of which the first ends amid the later one.

    The first runs until it is stopped, then the later one does; and then what is left
    of the first, and of the later one. `None`: one has no such operation.
    """
    racer = Racer(fault, first)
    follower = Racer(later_fault, later)
    both = racer.is_stopped and follower.is_stopped
    answers = racer.finish(), follower.finish()
    return answers if both else None


def swap_meanwhile(
    racer: Racer, find: Callable[[], str], aside: str, first: int, last: int
) -> tuple[Any, int]:
    """What a call returns or raises, and how often it was stopped.

    From one stop to another, what is `aside` takes the place of the directory that
    `find` finds, if that is there at the first of them. It is not put back if it has
    been moved since.
    """
    planted, swapped = os.lstat(aside), ""
    stops = 0
    while racer.is_stopped:
        stops += 1
        if stops == first and (swapped := find()):
            exchange(swapped, aside)
        if stops == last and swapped and _is_at(planted, swapped):
            exchange(swapped, aside)
        racer.go_on()
    return racer.finish(), stops


def _is_at(found: os.stat_result, path: str) -> bool:
    return os.path.lexists(path) and os.path.samestat(found, os.lstat(path))


def _outcome(call: Call) -> Any:
    function, args = call
    try:
        return function(*args)
    except Exception as e:
        return e


def fork(function: Callable[[], int], timeout: int = TIMEOUT) -> int:
    pid = os.fork()
    return pid if pid else _exit_with(function, timeout)


def _exit_with(function: Callable[[], int], timeout: int) -> NoReturn:
    signal.alarm(timeout)
    status = len(_ANSWERS) - 1
    try:
        status = function()
    finally:
        os._exit(status)


def _status(pid: int) -> int:
    return min(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(_ANSWERS) - 1)
