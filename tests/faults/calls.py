"""Jobs whose processes do not all call the same; run in all of their processes."""

import functools as ft
import gc
import itertools
import os
import pathlib
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend

import eqx_ckpt
from support import (
    Checkpoint,
    consistent_read as reading,
    DirectorySteps,
    exchange,
    Group,
    jax_service as coordination,
    meeting,
    process_group as group,
    replica_broadcast,
)

from .dying_jobs import die, wait_for
from .failing_jobs import caught, state
from .programs import assert_same, TIMEOUT


Errors = dict[str, tuple[str, str]]
LONG_MARGIN = 15.0  # seconds; a process that waits for as long was not told


def caused(call: Callable[[], Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The type and text of what a call raises, and of its cause."""
    try:
        call()
    except Exception as e:
        causes = e, e.__cause__
        first, second = ((type(cause).__name__, str(cause)) for cause in causes)
        return first, second
    return ("", ""), ("", "")


def out_of_order(directory: str) -> tuple[Errors, list[int]]:
    """Calls of one process only; the next save of all works, each time."""
    index, errors = jax.process_index(), dict[str, tuple[str, str]]()
    manager = eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT)
    manager.save(1, state(1)).result()
    calls: dict[str, Callable[[], Any]] = {
        "latest": manager.latest,
        "should_save": ft.partial(manager.should_save, 7),
        "restore": ft.partial(manager.restore, state(0)),
    }
    step = 1
    for who in (0, 1):
        for name, call in calls.items():
            if index == who:
                errors[name] = caught(call)
            step += 1
            manager.save(step, state(step)).result()
            assert manager.latest() == step
            assert_same(manager.restore(state(0)), state(step))
    if index == 1:
        # As a process has it that is new, and takes the place of this one.
        meeting._circles.clear()
    assert manager.latest() == step
    manager.save(step + 1, state(step)).result()
    manager.close()
    return errors, manager.steps()


def go_on(directory: str) -> list[int]:
    """Save two steps, and a third one that goes on from the first one."""
    with eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
    with eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT) as manager:
        manager.save(3, manager.restore(state(0), 1)).result()
        return manager.steps()


def keep_errors(directory: str) -> list[int]:
    """How many keys the service has, after ever more calls whose errors are kept."""
    like, errors, counts = state(0), list[Exception](), list[int]()
    eqx_ckpt.tree_serialise_leaves(f"{directory}/there", like, timeout=TIMEOUT)
    gc.disable()
    for n in range(30):
        try:
            eqx_ckpt.tree_serialise_leaves(f"{directory}/there", like)
        except eqx_ckpt.CheckpointExistsError as e:
            errors.append(e)
        caught(eqx_ckpt.tree_serialise_leaves, f"{directory}/bad", like, metadata=like)
        eqx_ckpt.tree_deserialise_leaves(f"{directory}/there", like)
        if n >= 9:
            counts.append(len(coordination._client().key_value_dir_get("eqx_ckpt/")))
    assert len(errors) == 30
    return counts


def read_two_versions(directory: str) -> tuple[str, str]:
    """The checkpoint is replaced when one process has read it, and before the other."""
    path, done = pathlib.Path(directory, "new"), pathlib.Path(directory, "read")
    for step in (1, 2):
        eqx_ckpt.tree_serialise_leaves(f"{path}{step}", state(step), timeout=TIMEOUT)
    if jax.process_index() == 0:
        os.rename(f"{path}1", path)
    wait_for([path])
    restore = ft.partial(eqx_ckpt.tree_deserialise_leaves, timeout=TIMEOUT)
    read = Checkpoint.read

    def after_the_other(*args: Any) -> Any:
        if jax.process_index() == 0:
            found = read(*args)
            done.touch()
            return found
        Checkpoint.read = read
        wait_for([done])
        exchange(f"{path}2", str(path))
        return read(*args)

    Checkpoint.read = after_the_other
    found = restore(path, state(0))
    Checkpoint.read = read
    assert_same(found, state(2))
    # One path, and in each process another checkpoint.
    for i in range(2):
        eqx_ckpt.tree_serialise_leaves(f"{directory}/{i}/new", state(i))
    os.chdir(f"{directory}/{jax.process_index()}")
    return caught(restore, "new", state(0))


def read_other_averages(directory: str) -> list[tuple[str, str]]:
    """In each process other weights, or another version of the same checkpoint."""
    index, paths = jax.process_index(), [f"{directory}/{i}" for i in range(2)]
    for i, path in enumerate(paths):
        eqx_ckpt.tree_serialise_leaves(path, state(i), timeout=TIMEOUT)
    sources = [eqx_ckpt.average(paths, [1, index + 1])]
    opened, replaced = (
        pathlib.Path(directory, name) for name in ("opened", "replaced")
    )
    if index == 0:
        sources.append(eqx_ckpt.average(paths[:1]))
        opened.touch()
        wait_for([replaced])
    else:
        wait_for([opened])
        exchange(*paths)
        sources.append(eqx_ckpt.average(paths[:1]))
        replaced.touch()
    calls = [
        ft.partial(eqx_ckpt.tree_deserialise_leaves, like=state(0)),
        ft.partial(eqx_ckpt.copy, path=f"{directory}/copy"),
    ]
    return [
        caught(call, source, timeout=TIMEOUT) for source in sources for call in calls
    ]


def restore_what_fails_on_one(directory: str) -> dict[str, tuple[str, str]]:
    """Process 1 cannot plan, does not see the checkpoint, or is late."""
    path, index = f"{directory}/new", jax.process_index()
    eqx_ckpt.tree_serialise_leaves(path, state(1), timeout=TIMEOUT)
    restore = ft.partial(eqx_ckpt.tree_deserialise_leaves, timeout=TIMEOUT)
    errors: dict[str, tuple[str, str]] = {}
    for once in (False, True):
        name = " once" if once else ""
        like = state(0) | ({"more": 1} if index == 1 else {})
        errors["plan" + name] = caught(restore, path, like, broadcast_replicas=once)
        opened = reading.opened
        if index == 1:
            reading.opened = _not_found
        errors["lag" + name] = caught(restore, path, state(0), broadcast_replicas=once)
        reading.opened = opened
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = 0.5
    read = Checkpoint.read
    given_up = pathlib.Path(f"{directory}/given up")

    def late_and_damaged(*args: Any) -> Any:
        wait_for([given_up])
        raise eqx_ckpt.CorruptCheckpointError("This is damaged.")

    if index == 1:
        Checkpoint.read = late_and_damaged
    late = ft.partial(restore, path, state(0), broadcast_replicas=True, timeout=2.0)
    errors["late"], errors["late because"] = caused(late)
    given_up.touch()
    Checkpoint.read = read
    assert_same(restore(path, state(0), broadcast_replicas=True), state(1))
    return errors


def die_while_sending(directory: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """What a restore raises, and its cause, when process 1 dies in a computation."""
    path = f"{directory}/new"
    eqx_ckpt.tree_serialise_leaves(path, state(1), timeout=TIMEOUT)
    combine, index = Group.combine, jax.process_index()

    def sent(*_: Any) -> Any:
        if index == 1:
            die()
        # JAX takes half a minute to say so.
        raise jax.errors.JaxRuntimeError("Connection closed by peer.")

    def combine_soon(self: Group, topic: str, *how: Any) -> Any:
        if topic == "3":  # By now it has died.
            self._timeout = 1.0
        return combine(self, topic, *how)

    replica_broadcast.Stack.spread, Group.combine = sent, combine_soon
    return caused(
        ft.partial(
            eqx_ckpt.tree_deserialise_leaves,
            path,
            state(0),
            broadcast_replicas=True,
            timeout=TIMEOUT,
        )
    )


def give_up_on_an_answer(directory: str) -> tuple[tuple[str, str], int | None]:
    """Process 1 waits no longer while process 0 answers; and the same call again."""
    given_up = pathlib.Path(f"{directory}/given up")
    manager = eqx_ckpt.CheckpointManager(f"{directory}/run", timeout=TIMEOUT)
    manager.save(1, state(1)).result()
    wait, saved = coordination.Service.wait, DirectorySteps.saved

    def wait_shortly(self: coordination.Service, key: str, seconds: float) -> Any:
        return wait(self, key, 0 if key.endswith("/outcome") else seconds)

    def saved_late(self: DirectorySteps, *args: Any) -> Any:
        wait_for([given_up])
        return saved(self, *args)

    if jax.process_index() == 1:
        coordination.Service.wait = wait_shortly
    DirectorySteps.saved = saved_late
    error = caught(manager.latest)
    given_up.touch()
    coordination.Service.wait, DirectorySteps.saved = wait, saved
    return error, manager.latest()


def delete(directory: str) -> tuple[Errors, list[int]]:
    """Both processes delete a step; then what one, or one of them, cannot delete."""
    other, errors = jax.process_index() == 1, dict[str, tuple[str, str]]()
    manager = eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    manager.delete(2)
    assert manager.steps() == [1, 3]
    errors["gone"] = caught(manager.delete, 2)
    errors["different"] = caught(manager.delete, 3 if other else 1)
    errors["no step"] = caught(manager.delete, -1)

    def delete_while_it_is_read(f: Any, like: Any) -> Any:
        errors["read"] = caught(manager.delete, 3)
        return eqx_ckpt.default_deserialise_filter_spec(f, like)

    if other:
        path, like = f"{directory}/000003", {"step": 0}
        restore = ft.partial(eqx_ckpt.tree_deserialise_leaves, path, like)
        restore(delete_while_it_is_read, where=lambda tree: tree["step"])
    else:
        errors["read"] = caught(manager.delete, 3)
    assert manager.steps() == [1, 3]
    manager.delete(3)
    # It is not there any more, and can be saved again.
    manager.save(3, state(4)).result()
    assert_same(manager.restore(state(0)), state(4))
    manager.close()
    return errors, manager.steps()


def late(directory: str) -> tuple[dict[str, tuple[str, str, float]], list[int]]:
    """The others wait for process 2, which then calls what they do not call."""
    index, errors = jax.process_index(), dict[str, tuple[str, str, float]]()
    marks = [pathlib.Path(f"{directory}.{i}") for i in range(3)]
    begun = pathlib.Path(f"{directory}.begun")
    manager = eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT)
    manager.save(1, {"step": 1}).result()

    def timed(name: str, call: Callable[[], Any]) -> None:
        begin = time.monotonic()
        errors[name] = (*caught(call), time.monotonic() - begin)

    if index < 2:
        manager._disk.timeout, meeting.TIMEOUT_MARGIN = 2.0, LONG_MARGIN
        if index == 0:
            wait_for([begun])
        begun.touch()
        timed("late", manager.latest)
    else:
        wait_for(marks[:2])
        manager._disk.timeout, meeting.TIMEOUT_MARGIN = 0.5, 0.1
        for step in range(20):
            timed("alone", ft.partial(manager.should_save, step))
            manager._disk.timeout = 0.01
        errors["wrong"] = (*caused(ft.partial(manager.delete, -1))[1], 0.0)
    marks[index].touch()
    wait_for([marks[2]])
    manager._disk.timeout = TIMEOUT
    meeting.TIMEOUT_MARGIN = 5.0
    for step in (2, 3):
        manager.save(step, {"step": step}).result()
    manager.close()
    keys = coordination._client().key_value_dir_get("eqx_ckpt/")
    return errors, [len(keys), *manager.steps()]


def call_once_more(directory: str) -> list[int | None]:
    """Process 1 calls what the other one does not; then all make that call."""
    index, client = jax.process_index(), coordination._client()
    manager = eqx_ckpt.CheckpointManager(directory, timeout=TIMEOUT)
    manager.save(1, {"step": 1}).result()
    if index == 1:
        manager._disk.timeout, meeting.TIMEOUT_MARGIN = 0.1, 0.1
        assert "No answer from process 0" in caught(manager.latest)[1]
        manager._disk.timeout, meeting.TIMEOUT_MARGIN = TIMEOUT, 5.0
    # Process 0 hears of the two calls of process 1 at once.
    while index == 0 and not any(
        "save(2)" in said for _, said in client.key_value_dir_get("eqx_ckpt/")
    ):
        time.sleep(0.01)
    manager.save(2, {"step": 2}).result()
    found = [manager.latest(), manager.latest()]
    manager.close()
    return found


def replaced(directory: str, index: int, life: int) -> tuple[int, list[int]]:
    """Process 1 of two ends without a word, and another one takes its place.

    Each of them is started by itself; process 0 goes on. Then both of them initialise
    JAX again.
    """
    place = pathlib.Path(directory)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", None)
    if life == 2:
        _read(place / "ended")
    _initialise(place / "address", index)
    run = eqx_ckpt.CheckpointManager(place / "run", timeout=TIMEOUT)
    for step in range(1, 4) if index == 0 else [[1], [2, 3]][life - 1]:
        assert run.latest() == (step - 1 or None)
        run.save(step, {"step": step}).result()
    if life == 1 and index == 1:
        _write(place / "ended", "")
        os._exit(0)
    keys = len(coordination._client().key_value_dir_get("eqx_ckpt/"))
    # JAX ends a process when process 0 ends.
    if index == 0:
        _read(place / "shut down")
    jax.distributed.shutdown()
    _write(place / "shut down", "")
    jax.extend.backend.clear_backends()
    _initialise(place / "another address", index)
    run.save(4, {"step": 4}).result()
    if index == 1:
        _write(place / "last", str(os.getpid()))
    while index == 0 and os.path.exists(f"/proc/{_read(place / 'last')}"):
        time.sleep(0.01)
    return keys, run.steps()


def _initialise(place: pathlib.Path, index: int) -> None:
    if index == 0:
        # Held until JAX listens there: see `jobs.Job`.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            _write(place, "{}:{}".format(*reserved.getsockname()))
            _join(place, index)
    else:
        _join(place, index)


def _join(place: pathlib.Path, index: int) -> None:
    address = _read(place)
    jax.distributed.initialize(
        address, 2, index, coordinator_bind_address=address, heartbeat_timeout_seconds=5
    )


def _write(path: pathlib.Path, text: str) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.rename(path)


def _read(path: pathlib.Path) -> str:
    """What another process writes, as soon as it has."""
    wait_for([path])
    return path.read_text()


def _not_found(path: Any) -> Any:
    raise eqx_ckpt.CheckpointNotFoundError(f"Nothing at {path} yet.")


def _hear_at_once(topic: str) -> Any:
    """`Group._hear`, with a deadline for this topic that has passed."""
    hear = Group._hear

    def hear_at_once(self: Group, about: str, who: Any, end: float) -> Any:
        return hear(self, about, who, 0 if about == topic else end)

    return hear_at_once


def _look_between(place: pathlib.Path, most: int) -> Any:
    """`Service.look`, after process 0 has gone on, which then waits in `_go_on`.

    After so many times, it waits until process 0 has ended.
    """
    look, looks = coordination.Service.look, itertools.count(1)

    def look_between(self: coordination.Service, key: str) -> Any:
        if not key.endswith("/progress"):
            return look(self, key)
        if (number := next(looks)) > most:
            assert self.wait(key.replace("progress", "outcome"), TIMEOUT)
            return -number
        wait_for([place / f"went on {number}"])
        found = look(self, key)
        _write(place / f"looked {number}", "")
        return found

    return look_between


def _go_on(place: pathlib.Path, number: int) -> None:
    _write(place / f"went on {number}", "")
    wait_for([place / f"looked {number}"])


def retain_slowly(directory: str) -> tuple[list[int], tuple[str, str], list[int]]:
    """Process 0 removes old steps, one after each deadline; then it hangs.

    What is there after that, what the second save raises, and what is left then.
    """
    place, index = pathlib.Path(directory), jax.process_index()
    run, keep = str(place / "run"), eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(run, timeout=TIMEOUT) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
    hear, look = Group._hear, coordination.Service.look
    remove, removals = DirectorySteps.remove, []

    def remove_between(self: DirectorySteps, steps: list[int]) -> None:
        removals.extend(steps)
        _go_on(place, len(removals))
        remove(self, steps)

    manager = eqx_ckpt.CheckpointManager(run, keep=keep, timeout=TIMEOUT)
    if index == 1:
        Group._hear = _hear_at_once("retained")
        coordination.Service.look = _look_between(place, 3)
    DirectorySteps.remove = remove_between
    manager.save(4, state(4)).result()
    first = manager.steps()
    coordination.Service.look = look
    saved = caught(lambda: manager.save(5, state(5)).result())
    if index == 1:
        _write(place / "looked 4", "")
    Group._hear, DirectorySteps.remove = hear, remove
    manager.close()
    return first, saved, manager.steps()


def fall_back_slowly(directory: str) -> tuple[int, int]:
    """Process 0 looks for an older step, one piece after each deadline.

    The step that was restored, and how many pieces the others have waited for.
    """
    place, index = pathlib.Path(directory), jax.process_index()
    with eqx_ckpt.CheckpointManager(place / "run", timeout=TIMEOUT) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
    if index == 0:
        chunk = min(place.glob("run/000002/same/c.*"))
        chunk.write_bytes(chunk.read_bytes()[::-1])
        _write(place / "damaged", "")
    wait_for([place / "damaged"])
    hear, look, goes_on = Group._hear, coordination.Service.look, Group.goes_on
    most, pieces = 2, itertools.count(1)

    def go_on_between(self: Group, topic: str) -> None:
        goes_on(self, topic)
        if (number := next(pieces)) <= most:
            _go_on(place, number)

    if index == 1:
        Group._hear = _hear_at_once("older")
        coordination.Service.look = _look_between(place, most)
    Group.goes_on = go_on_between
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = manager.restore(state(0), on_damage="fallback")
    Group._hear, coordination.Service.look = hear, look
    Group.goes_on = goes_on
    return found["step"], len([*place.glob("looked *")])


def restore_late_on_the_first(directory: str) -> tuple[str, str]:
    """Process 0 has read, and comes when the others have given up."""
    path, index = f"{directory}/new", jax.process_index()
    eqx_ckpt.tree_serialise_leaves(path, state(1), timeout=TIMEOUT)
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = 0.5
    marks = [pathlib.Path(f"{directory}/given up {i}") for i in range(1, 4)]
    read = Checkpoint.read

    def late(*args: Any) -> Any:
        wait_for(marks)
        return read(*args)

    if index == 0:
        Checkpoint.read = late
    restore = eqx_ckpt.tree_deserialise_leaves
    error = caught(restore, path, state(0), timeout=2.0)
    if index:
        marks[index - 1].touch()
    Checkpoint.read = read
    assert_same(restore(path, state(0), timeout=TIMEOUT), state(1))
    return error
