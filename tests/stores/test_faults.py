"""Object stores that fail: a save is there or not, and nobody is told otherwise."""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor as Pool
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt
from eqx_ckpt import StorePath
from faults.workloads import small_chunks, tree
from helpers import assert_same
from stores import proxy
from stores.place import Place
from stores.values import bucket_at
from support import (
    bucket_attempt,
    bucket_steps,
    chunk_values,
    send_window as window,
    tensorstore_calls as kvstore,
)
from versions import thinned


pytestmark = [pytest.mark.once, pytest.mark.usefixtures("impatient")]

OWN = (eqx_ckpt.CheckpointError, OSError)
ACTIONS: dict[str, Callable[..., None]] = {
    "403": proxy.answered(403),
    "404": proxy.answered(404, "NoSuchKey"),
    "409": proxy.answered(409),
    "412": proxy.answered(412),
    "503": proxy.answered(503),
    "blind": proxy.blind,
    "flipped": proxy.flipped,
    "halved": proxy.halved,
    "lost": proxy.lost,
    "misspelled": proxy.misspelled,
    "reset": proxy.reset,
    "torn": proxy.torn,
    "unconditional": proxy.unconditional,
}
# Those that a save or a restore gets over, if they happen once.
PASSING = {"503", "lost", "reset", "torn"}
_ATTEMPT = r"(?:@|%40)[0-9a-f]{32}(?:/|%2F)"
TARGETS = {
    "chunk": _ATTEMPT + r".*(?:/|%2F)c\.",
    "array": _ATTEMPT + r".*(?:/|%2F)zarr\.json",
    "database": _ATTEMPT + r"(?:manifest|d(?:/|%2F))",
    "manifest": r"run(?:/|%2F)zarr\.json",
    "probe": _ATTEMPT + "probe",
    "list": proxy.LIST,
}
# Whether something is replaced, the layout, the requests, and what happens to them.
SAVES = [
    (False, "zarr", "PUT chunk", "403 412 503 lost reset"),
    (False, "zarr", "PUT array", "403 503 lost reset"),
    (False, "zarr", "PUT manifest", "403 409 412 503 lost reset"),
    (False, "zarr", "GET manifest", "403 503 reset"),
    (False, "zarr", "PUT probe", "403 503 lost reset unconditional"),
    (False, "zarr", "GET probe", "503 flipped halved torn"),
    (False, "zarr", "DELETE probe", "403 503 lost reset"),
    (False, "zarr", "GET list", "403 503 blind flipped halved reset torn"),
    (False, "ocdbt", "PUT database", "403 503 lost reset"),
    (False, "ocdbt", "GET database", "403 503 flipped halved reset"),
    (False, "ocdbt", "GET list", "403 503 blind halved reset torn"),
    (True, "zarr", "PUT chunk", "503 lost"),
    (True, "zarr", "PUT manifest", "403 409 412 503 lost reset"),
    (True, "zarr", "GET manifest", "403 503 flipped halved reset torn"),
    (True, "zarr", "PUT probe", "503 lost unconditional"),
    (True, "zarr", "GET list", "503 blind flipped halved misspelled reset"),
    (True, "zarr", "DELETE chunk", "403 503 lost reset"),
    (True, "ocdbt", "DELETE database", "403 503 lost reset"),
]
READS = "403 404 503 flipped halved reset torn"
# Those that a restore gets over, if they happen once.
READ_AGAIN = PASSING | {"404", "flipped", "halved"}


def strike(place: Place, request: str, action: str, when: Container[int]) -> proxy.Rule:
    """Add a rule for such a request as `PUT chunk`."""
    method, target = request.split()
    if method == "PUT" and place.url.startswith("gs:"):
        method = "POST"
    # The key of an object that is read is no part of the query.
    begin = "^[^?]*" if method == "GET" and target != "list" else ""
    return place.proxy.add(ACTIONS[action], method, begin + TARGETS[target], when)


def fresh(place: Place, name: object) -> Place:
    """A place beside that place."""
    url = f"{place.url.removesuffix('run')}{name}/run"
    return replace(place, url=url, path=f"{name}/run/")


def keys(place: Place) -> set[str]:
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    return {key.decode() for key in kv.list().result()}


def debris(place: Place) -> set[str]:
    """The keys that are not of the checkpoint, if there is one."""
    try:
        own = eqx_ckpt.inspect.read_manifest(place.url).root
    except eqx_ckpt.CheckpointNotFoundError:
        return keys(place)
    return {k for k in keys(place) if k != "zarr.json" and not k.startswith(own)}


def save(place: Place, what: Any, **kwargs: Any) -> Exception | None:
    """What a save of a tree, or of that of a seed, raises."""
    state = tree(what) if isinstance(what, int) else what
    try:
        eqx_ckpt.tree_serialise_leaves(place.url, state, **kwargs)
    except OWN as e:
        return e
    return None


def found(place: Place) -> int | None:
    """The seed of the tree that is there, all of it."""
    try:
        restored = eqx_ckpt.tree_deserialise_leaves(place.url, tree(0))
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    assert_same(restored, tree(restored["step"]))
    return restored["step"]


def said(error: Exception | None) -> str:
    return "" if error is None else f"{error} {getattr(error, '__notes__', '')}"


@pytest.mark.parametrize(
    ("overwrite", "layout", "request_", "actions"), thinned(SAVES, 3)
)
def test_a_save(place, overwrite, layout, request_, actions: str, monkeypatch):
    struck = 0
    # A second request is another one only for some.
    again: list[set[int]] = (
        [{2}] if re.search("manifest|probe|database", request_) else []
    )
    faults = itertools.product(actions.split(), ({1}, *again, proxy.ALWAYS))
    for number, (action, when) in enumerate(faults):
        what = f"{action} at {when}"
        here = fresh(place, number)
        before = 1 if overwrite else None
        if overwrite:
            assert save(here, 1, layout=layout) is None
        monkeypatch.setattr(bucket_attempt, "_keep_conditions", set())
        rule = strike(place, request_, action, when)
        error = save(here, 2, layout=layout, overwrite=overwrite)
        place.proxy.rules.clear()
        struck += rule.struck
        what += f": {said(error)!r}"
        if action in PASSING and when is not proxy.ALWAYS:
            assert error is None, what
        # Nobody else was there.
        assert not isinstance(error, eqx_ckpt.CheckpointExistsError), what
        there = found(here)
        if error is None:
            assert there == 2, what
        elif "is not known" in said(error):
            assert there in (before, 2), what
        else:
            assert there == before, what
        left = debris(here)
        assert all(re.match("@[0-9a-f]{32}/", key) for key in left), (what, left)
        # And the next save is right about it.
        later = save(here, 3, layout=layout)
        assert (later is None) == (there is None), what
        assert later is None or isinstance(later, eqx_ckpt.CheckpointExistsError)
    assert struck
    assert save(here, 4, layout=layout, overwrite=True) is None
    assert found(here) == 4
    eqx_ckpt.inspect.verify(here.url)


@pytest.mark.parametrize(
    ("layout", "request_", "actions"),
    [
        ("zarr", "GET chunk", READS),
        ("zarr", "GET array", READS),
        ("zarr", "GET manifest", READS),
        # TensorStore aborts if a database is answered 404.
        ("ocdbt", "GET database", READS.replace("404 ", "")),
        ("ocdbt", "GET list", "403 503 blind flipped halved reset torn"),
    ],
)
def test_a_restore(place, layout, request_, actions):
    assert save(place, 1, layout=layout) is None
    readers: dict[str, Callable[[], Any]] = {
        "restore": lambda: eqx_ckpt.tree_deserialise_leaves(place.url, tree(0)),
        "verify": lambda: eqx_ckpt.inspect.verify(place.url),
        "match": lambda: eqx_ckpt.tree_match(place.url, tree(0)),
    }
    struck = 0
    for action, when, reader in itertools.product(
        actions.split(), ({1}, {2}, proxy.ALWAYS), readers
    ):
        if reader == "match" and "manifest" not in request_:
            continue
        what = f"{reader}: {action} at {when}"
        rule = strike(place, request_, action, when)
        result, error = None, None
        try:
            result = readers[reader]()
        except OWN as e:
            error = e
        assert not isinstance(error, eqx_ckpt.CheckpointNotFoundError), what
        passing = READ_AGAIN if layout == "zarr" else PASSING
        if not rule.struck or (action in passing and when is not proxy.ALWAYS):
            assert error is None, (what, error)
        if action == "404" and when is proxy.ALWAYS and rule.struck:
            assert isinstance(error, ConnectionError), (what, error)
        if error is None and reader == "restore":
            assert_same(result, tree(1))
        place.proxy.rules.clear()
        struck += rule.struck
    assert struck
    assert found(place) == 1


@pytest.mark.once
@pytest.mark.parametrize("action", ["404", "flipped", "halved", "torn", "503", "reset"])
def test_a_commit_of_which_no_news_can_be_trusted(place, action):
    """What is read back after a lost answer may be wrong too."""
    for when in ({2}, range(2, 99)):
        for overwrite in (False, True):
            here = fresh(place, f"{2 in when}-{len(when)}-{overwrite}")
            if overwrite:
                assert save(here, 1) is None
            # The first read is from before the save, in two requests if it is short.
            begin = len(place.proxy.requests)
            strike(place, "PUT manifest", "lost", {1})
            reads = [n + 2 * overwrite - 1 for n in when] if overwrite else when
            strike(place, "GET manifest", action, set(reads))
            error = save(here, 2, overwrite=overwrite)
            place.proxy.rules.clear()
            assert found(here) == 2, said(error)
            assert error is None or "is not known" in said(error)
            assert len(place.proxy.requests) > begin
            eqx_ckpt.inspect.verify(here.url)


def test_one_who_replaces_and_one_who_removes(place):
    """Who finds nothing left to replace is told, and saves nothing."""
    assert save(place, 1) is None

    def remove(exchange: proxy.Exchange) -> None:
        place.proxy.rules.clear()
        bucket_steps._remove(bucket_at(place.url))
        proxy.passed(exchange)

    method = "POST" if place.url.startswith("gs:") else "PUT"
    place.proxy.add(remove, method, TARGETS["manifest"])
    error = save(place, 2, overwrite=True)
    assert isinstance(error, eqx_ckpt.CheckpointError), error
    assert keys(place) == set()


@pytest.mark.once
@pytest.mark.parametrize(
    ("answers", "layout", "rounds"),
    [
        ("all", "zarr", 2),
        ("some lost", "zarr", 2),
        ("lost and 503", "zarr", 1),
        ("some lost", "ocdbt", 1),
    ],
)
def test_sixteen_writers(place, answers, layout, rounds):
    for number in range(rounds):
        here, outcomes = fresh(place, number), dict[int, Exception | None]()
        barrier = threading.Barrier(16)
        if answers != "all":
            strike(place, "PUT manifest", "lost", range(1, 99, 2))
        if answers == "lost and 503":
            strike(place, "PUT manifest", "503", range(2, 99, 6))

        def race(
            seed: int,
            here: Place = here,
            barrier: threading.Barrier = barrier,
            outcomes: dict[int, Exception | None] = outcomes,
        ) -> None:
            barrier.wait()
            outcomes[seed] = save(here, seed, layout=layout)

        threads = [threading.Thread(target=race, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        place.proxy.rules.clear()
        won = [seed for seed, error in outcomes.items() if error is None]
        assert len(outcomes) == 16
        assert won == [found(here)]
        for error in outcomes.values():
            assert error is None or isinstance(error, eqx_ckpt.CheckpointExistsError)
        # A request without an answer may still create its manifest, and needs its data.
        assert answers != "all" or debris(here) == set()
        eqx_ckpt.inspect.verify(here.url)


@pytest.mark.once
def test_writers_who_all_replace(place):
    assert save(place, 0) is None
    outcomes: dict[int, Exception | None] = {}

    def race(seed: int) -> None:
        outcomes[seed] = save(place, seed, overwrite=True)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = {seed for seed, error in outcomes.items() if error is None}
    assert found(place) in won
    for error in outcomes.values():
        assert error is None or isinstance(error, eqx_ckpt.CheckpointExistsError)
    assert debris(place) == set()


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_commits_between_a_read_and_a_list(place, overwrite: bool) -> None:
    """What is listed by then was not there when it was read, and no answer is wrong."""

    def overtake(exchange: proxy.Exchange) -> None:
        assert save(place, 1) is None
        proxy.passed(exchange)

    place.proxy.add(overtake, path=proxy.LIST, when={1})
    error = save(place, 2, overwrite=overwrite)
    if overwrite:
        assert error is None
    else:
        assert isinstance(error, eqx_ckpt.CheckpointExistsError), error
    assert found(place) == 1 + overwrite
    assert debris(place) == set()


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_nothing_is_replaced_by_what_is_not_whole(place, layout) -> None:
    """Somebody deletes a new object before the commit, which does not look at it."""
    assert save(place, 1, layout=layout) is None
    kept = keys(place)

    def lose(exchange: proxy.Exchange) -> None:
        place.proxy.rules.clear()
        new = keys(place) - kept
        chunk = "/d/" if layout == "ocdbt" else "/c."
        bucket_at(place.url).delete([next(key for key in new if chunk in key)])
        proxy.passed(exchange)

    method = "POST" if place.url.startswith("gs:") else "PUT"
    place.proxy.add(lose, method, TARGETS["manifest"])
    error = save(place, 2, overwrite=True, layout=layout)
    assert "is not intact any more: " in said(error)
    assert found(place) == 1
    assert kept <= keys(place)


def test_a_store_without_conditions(s3):
    s3.proxy.add(proxy.unconditional)
    for overwrite in (False, True):
        with pytest.raises(eqx_ckpt.CheckpointError, match="single_writer=True"):
            eqx_ckpt.tree_serialise_leaves(s3.url, tree(1), overwrite=overwrite)
        assert keys(s3) == set()
    alone = StorePath(s3.url, single_writer=True)
    eqx_ckpt.tree_serialise_leaves(alone, tree(1))
    with pytest.raises(eqx_ckpt.CheckpointExistsError):
        eqx_ckpt.tree_serialise_leaves(alone, tree(2))
    assert found(s3) == 1
    with pytest.raises(eqx_ckpt.CheckpointError, match="single_writer=True"):
        eqx_ckpt.tree_serialise_leaves(s3.url, tree(2), overwrite=True)
    strike(s3, "PUT manifest", "lost", {1})
    eqx_ckpt.tree_serialise_leaves(alone, tree(2), overwrite=True)
    assert found(s3) == 2
    assert debris(s3) == set()


def test_a_store_that_creates_but_cannot_replace(s3):
    """Some keep `If-None-Match`, and ignore `If-Match`."""

    def action(exchange: proxy.Exchange) -> None:
        del exchange.headers["If-Match"]
        proxy.passed(exchange)

    s3.proxy.add(action)
    assert save(s3, 1) is None
    error = save(s3, 2, overwrite=True)
    assert "replace a checkpoint only if nobody else has" in said(error)
    assert found(s3) == 1
    assert debris(s3) == set()


# How a save ends with a setting: `retries=1`, or `stalled=1`.
HANGS = """
import sys
import eqx_ckpt
import numpy as np
from eqx_ckpt._storage.bucket import publication
from eqx_ckpt._storage.calls import tensorstore_calls as kvstore

name, _, value = sys.argv[2].partition("=")
if name == "retries":
    kvstore._RETRIES["max_retries"] = int(value)
    publication.PAUSES = (0.001,) * 5
if name == "stalled":
    kvstore._STALLED["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = value
tree = {"w": np.arange(3.0), "step": 1}
try:
    eqx_ckpt.tree_serialise_leaves(sys.argv[1], tree)
except (OSError, eqx_ckpt.CheckpointError) as e:
    print(type(e).__name__, *getattr(e, "__notes__", ()))
else:
    print("saved")
"""


def in_a_process(program: str, *args: str) -> str:
    """What a program says in a process of its own."""
    # Where this process has used TensorStore, its patience is in the environment.
    env = {k: v for k, v in os.environ.items() if k not in kvstore._STALLED}
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout or done.stderr


@pytest.mark.once
@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_slow_line_behind_a_hop_that_buffers(s3, users, layout, monkeypatch):
    """No more waits there than the line carries before a request is sent again.

    That is said of all saves of a process together, and of all restores.
    """
    rate, own = 4e6, 400_000
    monkeypatch.setattr(window, "FIRST", int(rate))
    monkeypatch.setattr(window, "OWN", own)
    monkeypatch.setattr(window, "SLOW", 0.2)
    monkeypatch.setattr(window, "SECONDS", 1.0)
    state = {"w": np.arange(2e6 / users)}

    def save_one(user: int) -> None:
        eqx_ckpt.tree_serialise_leaves(f"{s3.url}/{user}", state, layout=layout)

    def restore_one(user: int) -> None:
        assert_same(eqx_ckpt.tree_deserialise_leaves(f"{s3.url}/{user}", state), state)

    bound = 1.1 * rate + users * own
    s3.proxy.add(there := proxy.Line(rate), "PUT")
    s3.proxy.add((back := proxy.Line(rate)).back, "GET")
    with small_chunks(300_000), Pool(users) as pool:
        for work in (save_one, restore_one):
            assert len([*pool.map(work, range(users))]) == users
    assert there.longest <= bound, there.longest / rate
    assert back.longest <= bound, back.longest / rate


SLOW_LINE = """
import sys
from concurrent.futures import ThreadPoolExecutor

import eqx_ckpt
import numpy as np
from eqx_ckpt._storage.calls import send_window as window, tensorstore_calls as kvstore

url, layout, quicker = sys.argv[1], sys.argv[2], int(sys.argv[3])
patience = "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"
kvstore._STALLED[patience] = str(window.STALLED // quicker)
window.SLOW /= quicker
window.SECONDS /= quicker
state = {"w": np.arange(9e6 / 4)}

def save_one(user):
    eqx_ckpt.tree_serialise_leaves(f"{url}/{user}", state, layout=layout)

with ThreadPoolExecutor(4) as pool:
    assert len([*pool.map(save_one, range(4))]) == 4
print("saved")
"""


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_slow_line_for_longer_than_a_request_may_stall(s3, layout):
    """Four saves, none of which gets more than a quarter of it.

    The line and the patience of the process are twelve times as quick: this is a line
    with a megabyte a second, which takes more than a minute.
    """
    quicker = 12
    s3.proxy.add(line := proxy.Line(quicker * 1e6), "PUT")
    assert in_a_process(SLOW_LINE, s3.url, layout, f"{quicker}") == "saved\n"
    for user in range(4):
        eqx_ckpt.inspect.verify(f"{s3.url}/{user}")
    sent = [r.path for r in s3.proxy.found("PUT") if "manifest" not in r.path]
    assert len(sent) < 1.5 * len({*sent})
    # All of it at once would have waited for longer.
    assert line.longest < window.STALLED * 1e6


@pytest.mark.slow
def test_a_hang_is_asked_again(s3):
    rules = [strike(s3, request, "503", ()) for request in ("PUT chunk", "GET list")]
    for rule in rules:
        rule.action, rule.when = proxy.hung, {1}
    assert in_a_process(HANGS, s3.url, "stalled=1") == "saved\n"
    assert [rule.struck for rule in rules] == [1, 1]
    assert eqx_ckpt.inspect.read_manifest(s3.url).leaves["step"].value == "1"


def test_a_dead_store(place):
    place.proxy.add(proxy.reset)
    assert in_a_process(HANGS, place.url, "retries=1").startswith("ConnectionError")


def test_a_failed_save_does_not_go_on(place, monkeypatch):
    """What waits for its turn is not sent any more."""
    failed = threading.Event()
    cancel = chunk_values._Requests.cancel

    def cancelled(requests: chunk_values._Requests) -> None:
        cancel(requests)
        failed.set()

    def wait(exchange: proxy.Exchange) -> None:
        failed.wait(60)
        proxy.passed(exchange)

    monkeypatch.setattr(chunk_values._Requests, "cancel", cancelled)
    place.proxy.add(proxy.answered(403), path=r"(?:/|%2F)000(?:/|%2F)c\.")
    place.proxy.add(wait, path=TARGETS["chunk"])
    state = {f"{i:03d}": np.full(3, i) for i in range(200)}
    assert isinstance(save(place, state), PermissionError)
    # This one has to wait for its turn, behind those that were not cancelled.
    bucket_at(place.url).write("later", b"")
    sent = [r for r in place.proxy.found(path=TARGETS["chunk"]) if r.method != "DELETE"]
    assert 0 < len(sent) <= 64


@pytest.mark.once
def test_a_store_that_dies_at_the_commit(s3):
    strike(s3, "PUT manifest", "503", ()).when = proxy.ALWAYS
    assert "is not known" in in_a_process(HANGS, s3.url, "retries=1")
    s3.proxy.rules.clear()
    assert found(s3) is None
    assert save(s3, 2) is None
    assert found(s3) == 2
