"""A run with a mirror in a store that fails: nothing is lost, and nothing waits."""

import itertools
import os
import pathlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_last, Mirror
from faults import mirrors
from faults.workloads import small_chunks
from faults.zygote import Zygote
from helpers import assert_same
from support import step_upload, uploader

from . import programs, proxy
from .place import Place


pytestmark = pytest.mark.once


PATIENCE = 300.0  # seconds; longer than anything here takes
Action = Callable[[proxy.Exchange], None]


@pytest.fixture(autouse=True)
def impatiently(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    monkeypatch.setattr(uploader, "PAUSES", (0.001,))


def check_there(url: str, steps: list[int]) -> None:
    there = CheckpointManager(url)
    assert there.steps() == steps
    for step in steps:
        assert_same(there.restore(mirrors.state(0), step), mirrors.state(step))
        assert eqx_ckpt.inspect.verify(f"{url}/{step:06}")


FAULTS: dict[str, tuple[Action, str]] = {
    "credentials expire": (proxy.answered(403, "ExpiredToken"), ""),
    "may not write": (proxy.answered(403), "PUT"),
    "quota": (proxy.answered(403, "QuotaExceeded"), "PUT"),
    "full": (proxy.answered(507, "XMinioStorageFull"), "PUT"),
    "clock skew": (proxy.answered(403, "RequestTimeTooSkewed"), ""),
    "down": (proxy.answered(503), ""),
    "reset": (proxy.reset, ""),
    "loses answers": (proxy.lost, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_fails_from_some_request_on(
    tmp_path: pathlib.Path, s3: Place, fault: str
) -> None:
    """The training goes on; when the store works again, the newest step is there."""
    action, method = FAULTS[fault]
    chance = random.Random(fault)
    incremental = chance.random() < 0.5
    mirror = Mirror(s3.url, keep=keep_last(2))
    with CheckpointManager(
        tmp_path / "run", keep=keep_last(1), incremental=incremental, mirror=mirror
    ) as manager:
        manager.save(1, mirrors.state(1)).result(PATIENCE)
        assert manager.uploads()[1].result(PATIENCE) is None
        for step in range(2, 11, 3):
            rule = s3.proxy.add(action, method)
            rule.when = range(rule.seen + chance.randint(1, 25), 10**9)
            for number in range(step, step + 3):
                manager.save(number, mirrors.state(number)).result(PATIENCE)
                # An older one that waited is given up; this one is tried or is there.
                end = time.monotonic() + PATIENCE
                future = manager.uploads()[number]
                while manager.upload_error is None and not future.done():
                    assert time.monotonic() < end
                    time.sleep(0.001)
            s3.proxy.rules.clear()
            assert manager.uploads()[step + 2].result(PATIENCE) is None
            assert manager.upload_error is None
            assert manager.mirrored()[-1] == step + 2
    check_there(s3.url, manager.mirrored())


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [7, pytest.param(1, marks=pytest.mark.exhaustive)], ids="some all".split()
)
def test_kill_at_a_request_of_an_upload(
    tmp_path: pathlib.Path, s3: Place, zygote: Zygote, every: int
) -> None:
    """What was there is there, and a new manager uploads the step."""
    before, pid = tmp_path / "before", tmp_path / "pid"
    with CheckpointManager(before) as manager:
        for step in (1, 2):
            manager.save(step, mirrors.state(step)).result(PATIENCE)
    environment = programs.environment(s3)

    def kill(exchange: proxy.Exchange) -> None:
        if is_late:
            exchange.forward()
        exchange.server.rules.clear()
        os.kill(int(pid.read_text()), signal.SIGKILL)
        exchange.abort()

    for number in itertools.count(1, every):
        run, is_late = tmp_path / f"run {number}", number % 2 == 1
        url = f"{s3.url.removesuffix('run')}{number}/run"
        shutil.copytree(before, run)
        shutil.move(run / "000002", tmp_path / "000002")
        assert eqx_ckpt.sync(run, url) == [1]
        shutil.move(tmp_path / "000002", run / "000002")
        s3.proxy.add(kill, when={number})
        program = (mirrors.upload, str(run), url, str(pid))
        outcome = zygote.run(programs.at, environment, *program)
        if not outcome.signal:
            s3.proxy.rules.clear()
            assert number > 10
            break
        assert outcome.signal == signal.SIGKILL
        assert CheckpointManager(url).steps() in ([1], [1, 2])
        with CheckpointManager(run, mirror=Mirror(url)) as manager:
            pass
        check_there(url, [1, 2])


class Meanwhile:
    """Does something once, before a piece of an upload is sent."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]
    ) -> None:
        self._act = [act]
        real = uploader.upload

        def upload(*others: Any) -> None:
            *first, watch = others

            def watched(nbytes: int) -> None:
                if self._act:
                    self._act.pop()()
                watch(nbytes)

            real(*first, watched)

        monkeypatch.setattr(uploader, "upload", upload)


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_two_managers_upload_the_same_step(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    """Who comes second finds it there."""
    there = str(tmp_path / "there")
    if kind == "s3":
        there = request.getfixturevalue("s3").url

    def again() -> None:
        with CheckpointManager(tmp_path / "run", mirror=Mirror(there)):
            pass
        assert CheckpointManager(there).steps() == [1]

    Meanwhile(monkeypatch, again)
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        manager.save(1, mirrors.state(1)).result(PATIENCE)
        assert manager.uploads()[1].result(PATIENCE) is None
        assert manager.upload_error is None
    check_there(there, [1])


@pytest.mark.parametrize("is_other", [False, True])
def test_the_steps_there_are_looked_at_while_chunks_are_sent(
    tmp_path: pathlib.Path, s3: Place, is_other: bool
) -> None:
    """And nothing is committed before it is known that the step belongs to them."""
    sent, answers = threading.Event(), list[bool]()

    def tell(exchange: proxy.Exchange) -> None:
        sent.set()
        proxy.passed(exchange)

    def answer_late(exchange: proxy.Exchange) -> None:
        answers.append(sent.wait(PATIENCE))
        proxy.passed(exchange)

    with CheckpointManager(tmp_path / "run", mirror=Mirror(s3.url)) as manager:
        manager.save(1, mirrors.state(1)).result(PATIENCE)
        assert manager.uploads()[1].result(PATIENCE) is None
        if is_other:
            CheckpointManager(s3.url).save(3, mirrors.state(3)).result(PATIENCE)
        s3.proxy.add(tell, "PUT", r"/000002/.*/c\.")
        s3.proxy.add(answer_late, "GET", r"prefix=run%2F(&|$)")
        manager.save(2, mirrors.state(2)).result(PATIENCE)
        error = manager.uploads()[2].exception(PATIENCE)
    assert answers
    assert all(answers)
    if is_other:
        assert "step 3 there is of a different history" in str(error)
        assert not s3.proxy.found("PUT", r"/run/000002/zarr\.json")
    else:
        assert error is None
    s3.proxy.rules.clear()
    check_there(s3.url, [1, 3] if is_other else [1, 2])
    left = s3.proxy.found("PUT", r"/run/000002/")
    gone = s3.proxy.found("DELETE", r"/run/000002/")
    assert len(gone) == (len(left) if is_other else 0)


def test_no_more_is_on_its_way_than_said(
    tmp_path: pathlib.Path, s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, more = threading.Lock(), threading.Event()
    now, most = 0, 0

    def held(exchange: proxy.Exchange) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now > 4:
                more.set()
        # It takes this long only if there are no more.
        more.wait(0.1)
        with lock:
            now -= 1
        proxy.passed(exchange)

    monkeypatch.setattr(step_upload, "MAX_IN_FLIGHT", 4 * 2**10)
    s3.proxy.add(held, "PUT", r"/w/c\.")
    with small_chunks(2**10):
        with CheckpointManager(tmp_path / "run", mirror=Mirror(s3.url)) as manager:
            manager.save(1, {"w": np.zeros(2**12)})
        assert manager.mirrored() == [1]
    assert 0 < most <= 4
