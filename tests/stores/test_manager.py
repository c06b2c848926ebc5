"""A training run through its manager, in object stores."""

import contextlib
import functools as ft
import itertools
import json
import re
import signal
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from faults.manifests import sealed
from faults.zygote import Zygote
from helpers import assert_same
from stores import programs, proxy
from stores.fixtures import Clock
from stores.place import Place
from stores.s3 import GIVEN
from stores.values import bucket_at
from support import bucket_steps, heartbeat, store_at


pytestmark = pytest.mark.once


STEPS = (100, 200, 300)
TIMEOUT = 30.0  # seconds; longer than anything here takes
LISTS = proxy.LIST
# How an S3 and a GCS are asked for a listing, and how the latter is asked whether one
# may list: without that right, it denies what is not there.
DENIED = rf"{LISTS}|%40\?"


def state(step):
    return {"w": jnp.full(3, step), "history": np.full(5, step), "step": step}


@pytest.fixture(params=["memory", "s3", "gcs"])
def empty(request: pytest.FixtureRequest) -> str:
    """A place in a store where nothing is."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    return request.getfixturevalue(request.param).url


@ft.cache
def objects() -> dict[str, bytes]:
    """Of a run with the steps 100, 200 and 300."""
    run = save_steps(f"memory://{uuid.uuid4().hex}")
    return {key: bucket_at(run).read(key) or b"" for key in keys(run)}


def save_step(manager: CheckpointManager, step: int) -> None:
    """Save a step, and let the sweep that follows end."""
    manager.save(step, state(step)).result(TIMEOUT)
    manager.wait()


def save_steps(run: str) -> str:
    with CheckpointManager(run) as manager:
        for step in STEPS:
            metadata = {"loss": 1 / step, "acc": step % 200}
            manager.save(step, state(step), metadata=metadata)
    return run


def write_all(run: str, values: dict[str, bytes]) -> str:
    store = store_at(run)
    for writing in [store.write(key, value) for key, value in values.items()]:
        writing.result(timeout=TIMEOUT)
    return run


@pytest.fixture
def run(empty: str) -> str:
    """A run in a store with the steps 100, 200 and 300."""
    return write_all(empty, objects())


@pytest.fixture
def behind(place: Place) -> Place:
    """A place with such a run, and a proxy that has seen nothing yet."""
    write_all(place.url, objects())
    place.proxy.requests.clear()
    return place


def keys(run: str, below: str = "") -> list[str]:
    found = [key.decode() for key in store_at(run).list().result()]
    return sorted(key for key in found if key.startswith(below))


def data_of(run: str, step: int) -> dict[str, bytes | None]:
    base = bucket_at(run)
    return {key: base.read(key) for key in keys(run, f"{step:06d}/")}


def flip(run: str, pattern: str) -> None:
    """Change a bit of the object or file whose key this is found in."""
    store = store_at(run)
    (key,) = [key for key in keys(run) if re.search(pattern, key)]
    data = bytearray(store.read(key).result().value)
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data)).result()


def leave_debris(run: str, step: int, attempt: str = "f" * 32) -> str:
    """What a save of this step leaves that dies before its commit."""
    base, prefix = bucket_at(run), f"{step:06d}/@{attempt}/"
    for key in keys(run, "000300/@"):
        base.write(prefix + key.split("/", 2)[2], base.read(key) or b"")
    return prefix


class Slow:
    """A save that waits before its commit."""

    def __init__(self, run: str, step: int) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self._manager = CheckpointManager(run, progress=self._wait)
        self.saving = self._manager.save(step, state(step))
        assert self._reached.wait(TIMEOUT)
        (self.prefix,) = {
            "/".join(key.split("/")[:2]) + "/" for key in keys(run, f"{step:06d}/@")
        }

    def _wait(self, phase, leaf, done, total) -> None:
        if phase == "commit":
            self._reached.set()
            self._go_on.wait(TIMEOUT)

    def go_on(self) -> None:
        self._go_on.set()
        with contextlib.suppress(eqx_ckpt.CheckpointError):
            self.saving.result(TIMEOUT)


@pytest.fixture
def slowly() -> Iterator[Callable[[str, int], Slow]]:
    saves: list[Slow] = []

    def begin(run: str, step: int) -> Slow:
        saves.append(Slow(run, step))
        return saves[-1]

    yield begin
    for save in saves:
        save.go_on()


def test_a_place_with_options(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    store = eqx_ckpt.StorePath(s3.url, endpoint=s3.endpoint)
    with CheckpointManager(store, keep=eqx_ckpt.keep_last(1)) as manager:
        for step in STEPS:
            manager.save(step, state(step))
    assert manager.steps() == [300]
    assert_same(manager.restore(state(300)), state(300))


def test_the_steps_are_one_list(behind: Place) -> None:
    manager = CheckpointManager(behind.url)
    behind.proxy.requests.clear()
    assert manager.steps() == [100, 200, 300]
    assert len(behind.proxy.found("GET", LISTS)) == 1
    # And whether one may list.
    assert len(behind.proxy.requests) == (1 if behind.url.startswith("s3") else 2)
    behind.proxy.requests.clear()
    assert manager.latest() == 300
    assert len(behind.proxy.found("GET", LISTS)) == 1


def together(n: int) -> Callable[[proxy.Exchange], None]:
    """The first `n` requests wait until all of them are there."""
    barrier, numbers = threading.Barrier(n), itertools.count()

    def action(exchange: proxy.Exchange) -> None:
        if next(numbers) < n:
            barrier.wait(TIMEOUT)
        proxy.passed(exchange)

    return action


def test_metadata_are_read_at_once(behind: Place) -> None:
    behind.proxy.add(together(len(STEPS)), "GET", r"zarr\.json")
    assert CheckpointManager(behind.url).best("loss") == 300


def test_metadata_are_read_once(behind: Place) -> None:
    manager = CheckpointManager(behind.url)
    manager.best("loss")
    behind.proxy.requests.clear()
    assert manager.best("acc", "max") == 300
    assert manager.best("loss") == 300
    assert not behind.proxy.found("GET", r"zarr\.json")
    manager.save(400, state(400), metadata={"loss": 0}).result(TIMEOUT)
    behind.proxy.requests.clear()
    assert manager.best("loss") == 400
    read = behind.proxy.found("GET", r"zarr\.json")
    assert read
    assert all("000400" in request.path for request in read)
    manager.close()


def test_metadata_of_a_step_that_was_replaced(run: str) -> None:
    if not is_replaceable(run):
        return
    manager = CheckpointManager(run)
    assert manager.best("loss") == 300
    save = ft.partial(eqx_ckpt.tree_serialise_leaves, f"{run}/000100", overwrite=True)
    save(state(100), metadata={"loss": 0})
    assert manager.best("loss") == 100
    # Without arrays, nothing but the manifest says which one it is.
    for loss, best in ((1, 300), (0, 100), (2, 300)):
        save({"step": 100}, metadata={"loss": loss})
        assert manager.best("loss") == best


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("tree", [{"w": np.ones(3), "step": 100}, {"step": 100}, {}])
def test_metadata_of_a_step_whose_old_data_could_not_be_deleted(
    run: str, tree, layout
) -> None:
    if not is_replaceable(run):
        return
    manager = CheckpointManager(run)
    assert manager.best("loss") == 300
    old = {key: v for key, v in data_of(run, 100).items() if "/@" in key}
    eqx_ckpt.tree_serialise_leaves(
        f"{run}/000100", tree, metadata={"loss": 0}, overwrite=True, layout=layout
    )
    write_all(run, {key: value or b"" for key, value in old.items()})
    for _ in range(2):
        assert manager.best("loss") == 100
    eqx_ckpt.inspect.verify(f"{run}/000100")
    assert_same(eqx_ckpt.tree_deserialise_leaves(f"{run}/000100", tree), tree)


def test_metadata_that_cannot_be_read(run: str) -> None:
    manager = CheckpointManager(run)
    flip(run, "000200/zarr.json")
    for _ in range(2):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="000200"):
            manager.best("loss")
    keep = eqx_ckpt.keep_best("loss", 1)
    with CheckpointManager(run, keep=keep) as manager:
        manager.save(400, state(400), metadata={"loss": 1}).result(TIMEOUT)
        assert manager.steps() == [200, 300, 400]


def test_many_objects_are_deleted_at_a_time(behind: Place) -> None:
    write_all(behind.url, {f"{key_of_data(behind.url)}{i}": b"" for i in range(20)})
    behind.proxy.add(together(16), "DELETE", r"000100(?:/|%2F)(?:@|%40)")
    with CheckpointManager(behind.url, keep=eqx_ckpt.keep_last(3)) as manager:
        save_step(manager, 400)
    assert not keys(behind.url, "000100")


def key_of_data(run: str) -> str:
    """A key below the data of step 100."""
    return keys(run, "000100/@")[0]


def deleted(place: Place) -> list[str]:
    """The keys of the run that were deleted, in order."""
    paths = [request.path for request in place.proxy.found("DELETE")]
    return [re.sub(r"%2F", "/", path).split("/run/")[1] for path in paths]


def test_the_manifest_is_deleted_first(behind: Place) -> None:
    with CheckpointManager(behind.url, keep=eqx_ckpt.keep_last(2)) as manager:
        save_step(manager, 400)
    for step in ("000100", "000200"):
        of_step = [key for key in deleted(behind) if key.startswith(step)]
        assert of_step[0].split("?")[0] == f"{step}/zarr.json"
        # The manifest, the data, and the mark that they are being deleted.
        assert len({*of_step}) == 1 + 4 + 1
    assert not keys(behind.url, "0001")


@pytest.mark.parametrize("which", range(1, 6))
def test_an_interrupted_delete(behind: Place, clock: Clock, which: int) -> None:
    """However far it came, no half of a step is listed, and its data go later."""
    refused = behind.proxy.add(
        proxy.answered(403), "DELETE", "000100", range(which, 1000)
    )
    manager = CheckpointManager(behind.url, keep=eqx_ckpt.keep_last(3))
    with pytest.raises(PermissionError) as raised:
        save_step(manager, 400)
    assert "Step 400 was saved. Removing older steps failed." in raised.value.__notes__
    listed = [100, 200, 300, 400] if which == 1 else [200, 300, 400]
    assert refused.struck
    assert CheckpointManager(behind.url).steps() == manager.steps() == listed
    for step in listed:
        eqx_ckpt.inspect.verify(f"{behind.url}/{step:06d}")
    assert_same(manager.restore(state(400)), state(400))
    behind.proxy.rules.clear()
    save_step(manager, 500)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    save_step(manager, 600)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    save_step(manager, 700)
    first = {key[:7] for key in keys(behind.url)}
    assert first == {"000500/", "000600/", "000700/", "metrics"}
    manager.close()


def test_a_damaged_step_is_removed_too(run: str, clock: Clock) -> None:
    """Its data too, although its manifest does not say where they are."""
    flip(run, "000100/zarr.json")
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(2)) as manager:
        assert manager.steps() == [100, 200, 300]
        save_step(manager, 400)
        assert manager.steps() == [300, 400]
        for step in (500, 600):
            clock.now += heartbeat.ORPHANED_AFTER + 1
            save_step(manager, step)
        assert not keys(run, "0001")


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_what_was_seen_intact_is_not_looked_at_again(
    place: Place, layout: eqx_ckpt.typing.Layout
) -> None:
    keep = [eqx_ckpt.keep_last(1), eqx_ckpt.keep_every(100)]
    with CheckpointManager(place.url, keep=keep, layout=layout) as manager:
        for step in (100, 101, 102):
            save_step(manager, step)
        place.proxy.requests.clear()
        save_step(manager, 103)
        assert manager.steps() == [100, 103]
    assert not place.proxy.found(path="000100")


def test_a_manifest_that_a_sweep_does_not_find(behind: Place, clock: Clock) -> None:
    """It is listed: one wrong answer deletes nothing."""
    with CheckpointManager(behind.url) as manager:
        clock.now += heartbeat.ORPHANED_AFTER + 1
        lost = proxy.answered(404, "NoSuchKey")
        rule = behind.proxy.add(lost, "GET", r"^[^?]*000100(?:/|%2F)zarr")
        save_step(manager, 400)
        assert rule.struck
        behind.proxy.rules.clear()
        assert manager.steps() == [*STEPS, 400]
    assert_same(manager.restore(state(100), 100), state(100))


def test_a_sweep_reads_many_manifests_at_a_time_and_once(
    behind: Place, clock: Clock
) -> None:
    with CheckpointManager(behind.url) as manager:
        manager.restore(state(100))  # Otherwise a save looks of which run it is.
        behind.proxy.requests.clear()
        behind.proxy.add(together(len(STEPS)), "GET", r"00(?:/|%2F)zarr\.json")
        # Not before: a sweep that still goes on would read some of them alone.
        clock.now += heartbeat.ORPHANED_AFTER + 1
        save_step(manager, 401)
        assert len(behind.proxy.found("GET", r"00(?:/|%2F)zarr\.json")) == len(STEPS)
        clock.now += heartbeat.ORPHANED_AFTER + 1
        behind.proxy.requests.clear()
        save_step(manager, 402)
        assert not behind.proxy.found("GET", r"00(?:/|%2F)zarr\.json")


def test_the_time_of_an_attempt_begins_when_no_manifest_names_it(
    run: str, clock: Clock
) -> None:
    """Whoever replaced that manifest may have to put it back."""
    base = bucket_at(run)
    old = base.read("000100/zarr.json")
    data = [key for key in keys(run, "000100/@")]
    prefix = f"000100/@{uuid.uuid4().hex}/"
    copies = {key: re.sub("^.*@[0-9a-f]{32}/", prefix, key) for key in data}
    with CheckpointManager(run) as manager:
        for key, other in copies.items():
            base.write(other, base.read(key) or b"")
        save_step(manager, 401)
        clock.now += heartbeat.ORPHANED_AFTER - 1
        save_step(manager, 402)
        new = re.sub(rb"@[0-9a-f]{32}", prefix.split("/")[1].encode(), old)
        base.write("000100/zarr.json", sealed(new))
        clock.now += 2
        for step in (403, 404):
            save_step(manager, step)
        assert {*data} <= {*keys(run, "000100/@")}
        clock.now += heartbeat.ORPHANED_AFTER + 1
        save_step(manager, 405)
        assert {*copies.values()} == {*keys(run, "000100/@")}


def test_nothing_is_removed_beside_a_manifest_without_data(
    run: str, clock: Clock
) -> None:
    """It was put there by a process that was suspended: the other data are all."""
    base = bucket_at(run)
    (named,) = {key.split("/")[1] for key in keys(run, "000100/@")}
    left = f"000100/@{uuid.uuid4().hex}/w/c.0"
    base.write(left, b"the only copy")
    base.delete([key for key in keys(run, f"000100/{named}")])
    with CheckpointManager(run) as manager:
        for step in (401, 402, 403):
            save_step(manager, step)
            clock.now += heartbeat.ORPHANED_AFTER + 1
    assert left in keys(run)


@pytest.mark.parametrize("ask", ["steps", "latest", "best", "restore", "save"])
def test_a_denied_list_is_an_error(behind: Place, ask: str, caplog) -> None:
    manager = CheckpointManager(behind.url)
    before = data_of(behind.url, 300)
    behind.proxy.add(proxy.answered(403), "GET", DENIED)
    calls = {
        "steps": manager.steps,
        "latest": manager.latest,
        "best": lambda: manager.best("loss"),
        "restore": lambda: manager.restore(state(300)),
        "save": lambda: manager.save(400, state(400)),
    }
    with pytest.raises(PermissionError, match="denies"):
        calls[ask]()
    # Who may not list may still read a step whose number is known.
    assert_same(CheckpointManager(behind.url).restore(state(300), 300), state(300))
    assert f"Could not clean up in {behind.url}" in caplog.text
    behind.proxy.rules.clear()
    assert manager.steps() == [100, 200, 300]
    assert data_of(behind.url, 300) == before


@pytest.mark.parametrize("action", [proxy.answered(503), proxy.reset, proxy.torn])
def test_a_list_that_fails_twice(impatient: None, behind: Place, action) -> None:
    manager = CheckpointManager(behind.url)
    rule = behind.proxy.add(action, "GET", LISTS, range(1, 3))
    assert manager.latest() == 300
    assert rule.struck == 2


def test_half_a_list_is_an_error(behind: Place) -> None:
    manager = CheckpointManager(behind.url)
    behind.proxy.add(proxy.halved, "GET", LISTS)
    with pytest.raises((eqx_ckpt.CheckpointError, OSError)):
        manager.latest()


def test_a_long_list(place: Place) -> None:
    """One that comes in parts: the newest step is in the second one."""
    # A store lists a thousand keys at a time.
    write_all(place.url, objects() | {f"000150/{i}": b"" for i in range(1000)})
    manager = CheckpointManager(place.url)
    place.proxy.requests.clear()
    assert manager.steps() == [100, 200, 300]
    assert len(place.proxy.found("GET", LISTS)) == 2
    rest = [2] if place.url.startswith("s3") else [2, 3]
    place.proxy.add(proxy.answered(403), "GET", DENIED, rest)
    with pytest.raises(PermissionError):
        manager.latest()


def test_foreign_objects_are_left_alone(run: str) -> None:
    base = bucket_at(run)
    group = json.dumps({"zarr_format": 3, "node_type": "group"}).encode()
    foreign = {
        "notes.txt": b"mine",
        "000400": b"a step's name",
        "000500/zarr.json": group,
        "000700/notes.txt": b"mine",
        "000700/@mine/data": b"mine",
        "100/zarr.json": base.read("000100/zarr.json"),
        "0000080/zarr.json": base.read("000100/zarr.json"),
        "best/zarr.json": base.read("000100/zarr.json"),
        "000300.bak/zarr.json": base.read("000100/zarr.json"),
        "000900/deeper/zarr.json": base.read("000100/zarr.json"),
    }
    for key, value in foreign.items():
        base.write(key, value or b"")
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
        assert manager.steps() == [100, 200, 300]
        assert manager.latest() == 300
        assert_same(manager.restore(state(300)), state(300))
        save_step(manager, 301)
        for step, words in ((500, "exists already"), (700, "something else")):
            with pytest.raises(eqx_ckpt.CheckpointExistsError, match=words):
                manager.save(step, state(step))
    assert manager.steps() == [301]
    others = [k for k in keys(run) if not k.startswith(("000301", "metrics."))]
    assert others == sorted(foreign)
    assert {key: base.read(key) for key in foreign} == foreign


def test_a_copied_directory_is_a_step(empty: str, tmp_path) -> None:
    """Its arrays lie beside its manifest, and are removed with it."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", state(1))
    for file in (tmp_path / "new").rglob("*"):
        if file.is_file():
            name = str(file.relative_to(tmp_path / "new"))
            bucket_at(empty).write(f"000001/{name}", file.read_bytes())
    bucket_at(empty).write("000001/notes.txt", b"mine")
    with CheckpointManager(empty, keep=eqx_ckpt.keep_last(1)) as manager:
        assert manager.steps() == [1]
        assert_same(manager.restore(state(1)), state(1))
        save_step(manager, 2)
        assert manager.steps() == [2]
    assert keys(empty, "000001") == ["000001/notes.txt"]


def is_replaceable(run: str) -> bool:
    """Whether the store replaces an object on a condition."""
    return not (GIVEN and run.startswith("s3"))


def test_a_fallback_with_a_single_writer(s3: Place) -> None:
    """It needs no condition of the store."""
    write_all(s3.url, objects())
    flip(s3.url, "000300/.*/w/c.0")
    store = eqx_ckpt.StorePath(s3.url, single_writer=True)
    with CheckpointManager(store) as manager:
        with pytest.warns(UserWarning, match="Step 300 is damaged, and step 200 was"):
            manager.restore(state(200), on_damage="fallback")
        save_step(manager, 300)
        assert_same(manager.restore(state(300)), state(300))


@pytest.mark.parametrize("status", [400, 403])
def test_a_training_survives_a_store_that_refuses_a_request(
    behind: Place, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Whichever request of a save it is: one before it begins, or in the background."""
    refused = 0
    caplog.set_level("CRITICAL", "eqx_ckpt")
    with CheckpointManager(
        behind.url, on_error="warn", max_failures=99, incremental=True
    ) as manager:
        for step in itertools.count(401):
            which = range(step - 401, 1000)
            rule = behind.proxy.add(proxy.answered(status), when=which)
            error = manager.save(step, state(step)).exception(TIMEOUT)
            manager.wait()
            behind.proxy.rules.remove(rule)
            if error is None:
                break
            assert isinstance(error, PermissionError | eqx_ckpt.CheckpointError)
            refused += 1
    assert refused > 5
    assert_same(manager.restore(state(0)), state(step))


def test_an_unreachable_step_is_no_damage(behind: Place) -> None:
    """Then there is no fallback to an older one."""
    manager = CheckpointManager(behind.url)
    behind.proxy.add(proxy.answered(403), "GET", "000300.*w(/|%2F)c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PermissionError):
            manager.restore(state(300), on_damage="fallback")


def test_debris_is_removed_after_a_while(run: str, clock: Clock) -> None:
    with CheckpointManager(run) as manager:
        debris = [leave_debris(run, 400), leave_debris(run, 300)]
        save_step(manager, 301)
        clock.now += heartbeat.ORPHANED_AFTER - 1
        save_step(manager, 302)
        assert all(keys(run, prefix) for prefix in debris)
        # One of them changes.
        bucket_at(run).write(debris[0] + "w/c.1", b"")
        clock.now += 2
        save_step(manager, 303)
        assert keys(run, debris[0])
        assert not keys(run, debris[1])
        clock.now += heartbeat.ORPHANED_AFTER + 1
        save_step(manager, 304)
        assert not keys(run, debris[0])
        assert manager.steps() == [*STEPS, 301, 302, 303, 304]
    for step in manager.steps():
        eqx_ckpt.inspect.verify(f"{run}/{step:06d}")


def test_sweep_watches_what_may_live(run: str, clock: Clock, monkeypatch) -> None:
    """What changes meanwhile lives; the rest is removed, and nothing else."""
    assert eqx_ckpt.inspect.garbage_collect(run) == {}
    dead, alive = leave_debris(run, 400), leave_debris(run, 300)
    numbers = itertools.count()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        bucket_at(run).write(f"{alive}alive.{next(numbers)}", b"1")

    # Servers sleep too.
    monkeypatch.setattr(bucket_steps, "time", types.SimpleNamespace(sleep=sleep))
    both = {f"{run}/{prefix}" for prefix in (dead, alive)}
    assert eqx_ckpt.inspect.garbage_collect(run, dry_run=True).keys() == both
    assert eqx_ckpt.inspect.garbage_collect(run).keys() == {f"{run}/{dead}"}
    assert not keys(run, dead)
    assert keys(run, alive)
    assert CheckpointManager(run).steps() == [*STEPS]


def test_another_manager_looks_for_itself(run: str, clock: Clock) -> None:
    CheckpointManager(run)
    debris = leave_debris(run, 400)
    clock.now += 10 * heartbeat.ORPHANED_AFTER
    with CheckpointManager(run) as manager:
        save_step(manager, 401)
        assert keys(run, debris)


def test_a_manifest_that_is_damaged_keeps_its_data(run: str, clock: Clock) -> None:
    flip(run, "000300/zarr.json")
    before = data_of(run, 300)
    with CheckpointManager(run) as manager:
        for step in (400, 500):
            clock.now += heartbeat.ORPHANED_AFTER + 1
            save_step(manager, step)
    assert data_of(run, 300) == before


def beat(run: str, save: Slow) -> None:
    """Wait until another sign of life has begun and ended."""

    def signs() -> list[int]:
        return [int(k.split(".")[-1]) for k in keys(run, save.prefix) if "alive" in k]

    last, end = max(signs(), default=-1) + 2, time.monotonic() + TIMEOUT
    while max(signs(), default=-1) < last:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_gives_signs_of_life_is_no_debris(
    run: str, clock: Clock, slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.05)
    slow = slowly(run, 400)
    with CheckpointManager(run) as manager:
        for step in (500, 600, 700):
            for _ in range(3):
                clock.now += heartbeat.ORPHANED_AFTER / 3 + 1
                beat(run, slow)
            save_step(manager, step)
        slow.go_on()
        slow.saving.result(TIMEOUT)
        assert manager.steps() == [*STEPS, 400, 500, 600, 700]
        assert_same(manager.restore(state(400), 400), state(400))
    assert not [key for key in keys(run) if "alive" in key]


def test_who_was_suspended_does_not_commit(run: str, clock: Clock, slowly) -> None:
    slow = slowly(run, 400)
    clock.now += heartbeat.FAIL_AFTER + 1
    slow.go_on()
    with pytest.raises(eqx_ckpt.CheckpointError, match="For 301 seconds this save was"):
        slow.saving.result(TIMEOUT)
    assert CheckpointManager(run).steps() == [100, 200, 300]
    assert not keys(run, "000400")
    assert heartbeat.FAIL_AFTER + 2 * heartbeat.INTERVAL < heartbeat.ORPHANED_AFTER


def test_who_goes_on_after_that_does_not_commit_either(
    run: str, clock: Clock, slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.05)
    slow = slowly(run, 400)
    beat(run, slow)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    beat(run, slow)
    slow.go_on()
    with pytest.raises(eqx_ckpt.CheckpointError, match="save was suspended"):
        slow.saving.result(TIMEOUT)
    assert CheckpointManager(run).steps() == [100, 200, 300]


def test_whose_data_were_removed_does_not_commit(
    run: str, clock: Clock, slowly
) -> None:
    """A manager takes it for dead only when it takes itself for dead."""
    slow = slowly(run, 400)
    with CheckpointManager(run) as manager:
        clock.now += heartbeat.ORPHANED_AFTER + 1
        save_step(manager, 500)
        assert not keys(run, slow.prefix)
        slow.go_on()
        with pytest.raises(eqx_ckpt.CheckpointError, match="may have removed its data"):
            slow.saving.result(TIMEOUT)
        assert manager.steps() == [*STEPS, 500]


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_killed_save(place: Place, zygote: Zygote, clock: Clock, layout: str) -> None:
    """Nothing of it is listed, and its step can be saved again at once."""
    args = (programs.environment(place), programs.save_and_die, place.url, layout)
    assert zygote.run(programs.at, *args).signal == signal.SIGKILL
    left = keys(place.url, "000002/@")
    assert left
    with CheckpointManager(place.url, layout=layout) as manager:
        assert manager.steps() == [1]
        assert_same(manager.restore(programs.small(1)), programs.small(1))
        manager.save(2, programs.small(2)).result(TIMEOUT)
        manager.wait()
        assert manager.steps() == [1, 2]
        assert {*left} < {*keys(place.url)}
        clock.now += heartbeat.ORPHANED_AFTER + 1
        manager.save(3, programs.small(3)).result(TIMEOUT)
        manager.wait()
        assert not {*left} & {*keys(place.url)}
        for step in (1, 2, 3):
            assert_same(manager.restore(programs.small(0), step), programs.small(step))


def test_there_is_no_bucket(place: Place) -> None:
    """A run that finds nothing would begin at step 0."""
    manager = CheckpointManager(place.url.replace(place.bucket, "no-such-bucket", 1))
    for ask in (manager.latest, manager.steps, lambda: manager.restore(state(0))):
        with pytest.raises(eqx_ckpt.CheckpointError, match="there is no such bucket"):
            ask()
    with pytest.raises(eqx_ckpt.CheckpointError, match="there is no such bucket"):
        manager.save(1, state(1))
    place.proxy.add(proxy.answered(503), "GET", "/b/[^/]*$")
    assert CheckpointManager(place.url).latest() is None
