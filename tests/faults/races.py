"""Processes that work on one path at the same time; run in a child of the zygote."""

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

import eqx_ckpt

from . import shim, workloads


_ANSWERS = ["saved", "exists", "failed"]  # by exit status


def save_at_once(path: str, seeds: list[int], overwrite: bool) -> dict[int, str]:
    """Save one tree by each of several processes: who "saved", for whom it "exists".

    The processes start together, from a process that has not used TensorStore.
    """
    start, starter = os.pipe()

    def save(seed: int) -> int:
        os.close(starter)
        os.read(start, 1)  # until every writer is there
        try:
            workloads.save(path, seed, overwrite)
        except eqx_ckpt.CheckpointExistsError:
            return 1
        return 0

    children = {seed: _fork(lambda seed=seed: save(seed)) for seed in seeds}
    os.close(starter)
    os.close(start)
    return {seed: _ANSWERS[_status(pid)] for seed, pid in children.items()}


Call = tuple[Callable[..., Any], tuple[Any, ...]]


def overtake(fault: shim.Fault, first: Call, second: Call) -> tuple[Any, Any] | None:
    """What two calls return or raise, of which the second overtakes the first.

    The first runs in a process of its own until the fault stops it; then the second
    runs from beginning to end, and then what is left of the first. `None`: the first
    has no such operation.
    """
    answer, answers = Pipe(duplex=False)

    def run_first() -> int:
        shim.arm(fault, -1)
        value = _outcome(first)
        shim.disarm()
        answers.send(value)
        return 0

    pid = _fork(run_first)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        return None
    overtaker = _outcome(second)
    os.kill(pid, signal.SIGCONT)
    return answer.recv(), overtaker


def _outcome(call: Call) -> Any:
    function, args = call
    try:
        return function(*args)
    except Exception as e:
        return e


def _fork(function: Callable[[], int]) -> int:
    pid = os.fork()
    return pid if pid else _exit_with(function)


def _exit_with(function: Callable[[], int]) -> NoReturn:
    signal.alarm(30)
    status = len(_ANSWERS) - 1
    try:
        status = function()
    finally:
        os._exit(status)


def _status(pid: int) -> int:
    return min(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(_ANSWERS) - 1)
