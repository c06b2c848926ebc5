"""Each request of each operation is answered wrongly, alone and in pairs.

What was acknowledged restores, what was committed before is there, and an error says
what is known.
"""

import functools as ft
import itertools
import os
import pathlib
import random
import re
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_last
from faults.workloads import small_chunks, tree
from faults.zygote import Zygote
from helpers import assert_same
from stores import programs, proxy
from stores.fixtures import Clock
from stores.place import Place
from stores.values import bucket_at
from support import bucket_attempt, heartbeat, locate
from versions import thinned


pytestmark = pytest.mark.once


OWN = (eqx_ckpt.CheckpointError, OSError)
# What one wrong answer must not lead to.
CONCLUSIONS = (
    eqx_ckpt.CheckpointExistsError,
    eqx_ckpt.CheckpointNotFoundError,
    eqx_ckpt.CorruptCheckpointError,
)
# All of these share a chunk.
BEFORE = {1: 101, 2: 201}
NEW = 301
STOPPED = ("before", "after", "busy")


# A layout, or the one of steps that refer to each other.
Kind: TypeAlias = Literal["zarr", "ocdbt", "shared"]


def how(run: str, kind: Kind, base: int) -> dict[str, Any]:
    if kind == "shared":
        return {"base": f"{run}/{base:06d}"}
    return {"layout": kind}


@ft.cache
def objects(kind: Kind) -> dict[str, bytes]:
    """Of a run with the steps of `BEFORE`, and of two saves that died.

    If they share, a step before them has a chunk of theirs, and was deleted.
    """
    run = f"memory://{uuid.uuid4().hex}"
    with small_chunks():
        if kind == "shared":
            eqx_ckpt.tree_serialise_leaves(f"{run}/000000", tree(401))
        for step, seed in BEFORE.items():
            eqx_ckpt.tree_serialise_leaves(
                f"{run}/{step:06d}",
                tree(seed),
                metadata={"loss": step},
                **how(run, kind, step - 1),
            )
    base = bucket_at(run)
    found = {key: base.read(key) or b"" for key in base.list_keys()}
    found.pop("000000/zarr.json", None)
    for step, attempt in ((2, "e" * 32), (9, "f" * 32)):
        found[f"{step:06d}/@{attempt}/w/c.0"] = b"left"
    return found


def save(run: str, kind: Kind) -> None:
    with small_chunks():
        path, options = f"{run}/000003", how(run, kind, 2)
        eqx_ckpt.tree_serialise_leaves(path, tree(NEW), **options)


def overwrite(run: str, kind: Kind) -> None:
    with small_chunks():
        path, options = f"{run}/000002", how(run, kind, 2)
        eqx_ckpt.tree_serialise_leaves(path, tree(NEW), overwrite=True, **options)


def retain(run: str, kind: Kind) -> None:
    shares = kind == "shared"
    options: Any = {"incremental": True} if shares else {"layout": kind}
    made = CheckpointManager(run, keep=keep_last(1), **options)
    with small_chunks(), made as manager:
        manager.save(3, tree(NEW)).result()
        manager.wait()


def sweep(run: str, kind: Kind) -> None:
    steps = locate(run).steps()
    clock: Any = heartbeat.clock
    for _ in range(2):
        steps.sweep()
        clock.now += heartbeat.ORPHANED_AFTER + 1


def restore(run: str, kind: Kind) -> None:
    with CheckpointManager(run) as manager:
        assert_same(manager.restore(tree(0)), tree(BEFORE[2]))
        assert manager.best("loss") == 1


def export(run: str, kind: Kind) -> None:
    layout = "zarr" if kind == "shared" else kind
    eqx_ckpt.copy(f"{run}/000002", f"{run}/000003", layout=layout)


def delete(run: str, kind: Kind) -> None:
    with CheckpointManager(run) as manager:
        manager.delete(2)


# What each of them changes: a step, and the seed of its tree, if it is there then.
OPERATIONS: dict[Callable[..., None], dict[int, int | None]] = {
    save: {3: NEW},
    overwrite: {2: NEW},
    retain: {1: None, 2: None, 3: NEW},
    export: {3: BEFORE[2]},
    delete: {2: None},
    sweep: {},
    restore: {},
}
# The request of each of them that changes what is there, for others.
DECIDE = {
    save: ("PUT POST", r"000003(?:/|%2F)zarr\.json"),
    overwrite: ("PUT POST", r"000002(?:/|%2F)zarr\.json"),
    retain: ("PUT POST", r"000003(?:/|%2F)zarr\.json"),
    export: ("PUT POST", r"000003(?:/|%2F)zarr\.json"),
    delete: ("DELETE", r"000002(?:/|%2F)zarr\.json"),
    sweep: ("PUT POST", r"f{32}(?:/|%2F)swept"),
}


def changed(there: dict[int, int], by: Callable[..., None]) -> dict[int, int]:
    found = there | OPERATIONS[by]
    return {step: seed for step, seed in found.items() if seed is not None}


class Run:
    """A run behind a proxy, and what is known about it."""

    # Where a process that is to be stopped says which one it is.
    pid_file: pathlib.Path

    def __init__(self, place: Place, clock: Clock, kind: Kind) -> None:
        self.place, self._clock = place, clock
        self.kind: Kind = kind
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        name = next(self._numbers)
        self.url = f"{self.place.url.removesuffix('run')}{name}/run"
        store = bucket_at(self.url)
        writing = [store.writing(*item) for item in objects(self.kind).items()]
        for future in writing:
            future.result(timeout=300)
        self._manager = locate(self.url).steps()
        self._manager.sweep()
        bucket_attempt._keep_conditions.clear()

    def late(self, exchange: proxy.Exchange) -> None:
        """Another manager takes what it sees for dead while a request is on its way."""
        rules, exchange.server.rules = exchange.server.rules, []
        for _ in range(2):
            self._manager.sweep()
            self._clock.now += heartbeat.ORPHANED_AFTER + 1
        exchange.server.rules = rules
        proxy.passed(exchange)

    def late_answer(self, exchange: proxy.Exchange) -> None:
        """As `late`, while the answer is on its way."""
        reply = exchange.forward()
        rules, exchange.server.rules = exchange.server.rules, []
        for _ in range(2):
            self._manager.sweep()
            self._clock.now += heartbeat.ORPHANED_AFTER + 1
        exchange.server.rules = rules
        exchange.reply(reply)

    def stopped(self, when: str) -> Callable[[proxy.Exchange], None]:
        """The process that saves stops, and a manager takes it for dead."""

        def action(exchange: proxy.Exchange) -> None:
            rules, exchange.server.rules = exchange.server.rules, []
            reply = exchange.forward() if when == "after" else None
            pid = int(self.pid_file.read_text())
            os.kill(pid, signal.SIGSTOP)
            if when == "busy":
                proxy.answered(503)(exchange)
            for _ in range(2):
                self._manager.sweep()
                self._clock.now += heartbeat.ORPHANED_AFTER + 1
            time.sleep(programs.FAIL_AFTER * 1.1)
            os.kill(pid, signal.SIGCONT)
            exchange.server.rules = rules
            if when == "before":
                proxy.passed(exchange)
            elif reply is not None:
                exchange.reply(reply)

        return action

    def actions(self) -> dict[str, Callable[[proxy.Exchange], None]]:
        return {
            "404": proxy.answered(404, "NoSuchKey"),
            "412": proxy.answered(412),
            "503": proxy.answered(503),
            "lost": proxy.lost,
            "torn": proxy.torn,
            "halved": proxy.halved,
            "blind": proxy.blind,
            "late": self.late,
            "late answer": self.late_answer,
            **{f"stopped {when}": self.stopped(when) for when in STOPPED},
        }

    def count(self, operation: Callable[..., None]) -> int:
        """The requests of an operation, without a fault."""
        self._begin()
        self.place.proxy.requests.clear()
        operation(self.url, self.kind)
        number = len(self.place.proxy.requests)
        self._check(operation, None)
        return number

    def strike(
        self,
        operation: Callable[..., None],
        faults: dict[int, str],
        perform: Callable[[str, Kind], None] | None = None,
    ) -> Exception | None:
        """Perform an operation with faults, by the number of a request; look after."""
        self._begin()
        self.place.proxy.requests.clear()
        for number, action in faults.items():
            self.place.proxy.add(self.actions()[action], when={number})
        error: Exception | None = None
        try:
            (perform or operation)(self.url, self.kind)
        except OWN as e:
            error = e
        finally:
            self.place.proxy.rules.clear()
        try:
            self._check(operation, error)
            if len(faults) == 1:
                assert not isinstance(error, CONCLUSIONS), error
        except BaseException as e:
            requests = "\n".join(
                f"{i} {r.method} {r.path.replace('%2F', '/')} {r.stored} {r.status}"
                for i, r in enumerate(self.place.proxy.requests, 1)
            )
            e.add_note(f"{operation.__name__}, {faults}: {said(error)}\n{requests}")
            raise
        return error

    def _check(self, operation: Callable[..., None], error: Exception | None) -> None:
        there, after = self._found(), changed(BEFORE, operation)
        if error is None:
            expected = [after]
        elif "Step 3 was saved." in said(error):
            # Some of the older ones were removed.
            assert after.items() <= there.items() <= (BEFORE | after).items(), there
            return
        elif "is not known" in said(error):
            expected = [BEFORE, BEFORE | after, after]
        else:
            expected = [BEFORE]
        assert there in expected, there

    def _found(self) -> dict[int, int]:
        """The seed of each step; every step that is listed is intact."""
        found: dict[int, int] = {}
        for step in CheckpointManager(self.url).steps():
            path = f"{self.url}/{step:06d}"
            restored = eqx_ckpt.tree_deserialise_leaves(path, tree(0))
            assert_same(restored, tree(restored["step"]))
            found[step] = restored["step"]
        return found


def said(error: Exception | None) -> str:
    return "" if error is None else f"{error!r} {getattr(error, '__notes__', '')}"


@pytest.fixture
def run(request: Any, place: Place, clock: Clock, impatient: None) -> Run:
    return Run(place, clock, request.param)


def actions(run: Run) -> list[str]:
    """TensorStore aborts if a database is answered 404 or 412."""
    found = [name for name in run.actions() if "stopped" not in name]
    return found[2:] if run.kind == "ocdbt" else found


KINDS = pytest.mark.parametrize("run", ["zarr", "ocdbt", "shared"], indirect=True)


@KINDS
@pytest.mark.parametrize(
    "operation", thinned(OPERATIONS, len(OPERATIONS)), ids=lambda f: f.__name__
)
def test_one_fault(run: Run, operation: Callable[..., None]) -> None:
    """Every fifth request once, in S3 or in Google, with one fault or another."""
    draw = random.Random(f"{run.kind}, {operation.__name__}")
    numbers = range(draw.randint(1, 5), run.count(operation) + 1, 5)
    faults = [(number, draw.choice(actions(run))) for number in numbers]
    for number, action in faults[run.url.startswith("gs:") :: 2]:
        run.strike(operation, {number: action})


@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_every_fault(run: Run, operation: Callable[..., None]) -> None:
    for number in range(1, run.count(operation) + 1):
        for action in actions(run):
            run.strike(operation, {number: action})


@pytest.mark.once
@KINDS
@pytest.mark.parametrize(
    "pairs", [2, pytest.param(100, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_two_faults(run: Run, pairs: int) -> None:
    draw = random.Random(pairs)
    for operation in OPERATIONS:
        last = run.count(operation)
        for _ in range(pairs):
            numbers = draw.sample(range(1, last + 2), 2)
            run.strike(operation, {n: draw.choice(actions(run)) for n in numbers})


@pytest.mark.once
@pytest.mark.parametrize("run", ["zarr"], indirect=True)
def test_what_came_of_a_deletion_is_not_seen(run: Run) -> None:
    """The answers are wrong that say whether the manifest is gone."""
    last = run.count(delete)
    requests = enumerate(run.place.proxy.requests[:last], 1)
    (number,) = [n for n, r in requests if r.method == "DELETE" and "zarr" in r.path][
        :1
    ]
    error = run.strike(delete, dict.fromkeys(range(number + 1, number + 9), "halved"))
    assert "Whether step 2 was deleted is not known" in said(error)


@pytest.mark.once
@pytest.mark.parametrize("run", ["zarr"], indirect=True)
def test_whether_the_data_were_swept_is_not_seen_at_once(run: Run) -> None:
    """A manager sweeps before the commit, and the answer after it is wrong."""
    methods, path = DECIDE[save]
    last = run.count(save)
    requests = enumerate(run.place.proxy.requests[:last], 1)
    (number,) = [
        n
        for n, r in requests
        if r.method in methods.split() and re.search(path, r.path)
    ]
    assert run.strike(save, {number: "late", number + 1: "halved"})


@pytest.mark.once
@KINDS
@pytest.mark.parametrize("operation", DECIDE, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "which",
    [
        pytest.param("decides", marks=pytest.mark.slow),
        pytest.param("all", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_that_is_stopped(
    run: Run,
    operation: Callable[..., None],
    which: str,
    zygote: Zygote,
    tmp_path: pathlib.Path,
) -> None:
    """For longer than a manager waits, while a request is on its way.

    At the request that decides: before it or busy in one store, after it in the other.
    """
    run.pid_file = tmp_path / "pid"
    # A sweeper waits for ten minutes between two looks.
    clock = Clock() if operation is sweep else None

    def perform(url: str, kind: Kind) -> None:
        program = ft.partial(programs.stopping, operation, run.pid_file, clock)
        zygote.call(programs.at, programs.environment(run.place), program, url, kind)

    last = run.count(operation)
    numbers, moments = range(1, last + 1), STOPPED
    if which == "decides":
        turn = [*DECIDE].index(operation) + run.url.startswith("gs:")
        moments = STOPPED[turn % 2 :: 2]
        methods, path = DECIDE[operation]
        requests = enumerate(run.place.proxy.requests[:last], 1)
        numbers = [
            number
            for number, request in requests
            if request.method in methods.split() and re.search(path, request.path)
        ][:1]
        assert numbers
    for number, when in itertools.product(numbers, moments):
        run.strike(operation, {number: f"stopped {when}"}, perform)
