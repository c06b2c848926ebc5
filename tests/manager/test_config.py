"""The config of a run: written once, and what each step was saved with."""

import math
import os
import pathlib
import random
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect
from eqx_ckpt.__main__ import main
from faults import configs, replay, runs
from faults.configs import config
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote
from stores.place import Place


LIKE = {"w": 0}


@pytest.fixture(params=["directory", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "s3":
        place: Place = request.getfixturevalue("s3")
        return place.url
    is_memory = request.param == "memory"
    return f"memory://{uuid.uuid4().hex}/runs" if is_memory else str(tmp_path)


def files(run: Any) -> list[pathlib.Path]:
    return sorted(pathlib.Path(run).glob("config.*"))


def session(run: Any, step: int, given: Any, restored: int | None = None) -> None:
    """Save a step, which goes on from another one."""
    with CheckpointManager(run, config=given) as manager:
        if restored is not None:
            manager.restore(LIKE, restored)
        manager.save(step, {"w": step})


class Model:
    """The config of each step in each place."""

    def __init__(self, folder: str, random_: random.Random) -> None:
        self.folder, self.random = folder, random_
        self.known: dict[str, dict[int, Any]] = {"a": {}, "mirror": {}}
        self.last = 0

    def act(self) -> None:
        self.last += 1
        what = self.random.choice(["go on", "go on", "go on", "delete", "fork"])
        if what == "go on" or not self.known["a"]:
            self.go_on(self.random.choice([*self.known]))
        elif what == "delete":
            place = self.random.choice([p for p in self.known if self.known[p]])
            step = self.random.choice([*self.known[place]])
            CheckpointManager(f"{self.folder}/{place}").delete(step)
            del self.known[place][step]
        else:
            step, name = self.random.choice([*self.known["a"]]), f"fork {self.last}"
            run = CheckpointManager(f"{self.folder}/a")
            run.fork(f"{self.folder}/{name}", step)
            self.known[name] = {step: self.known["a"][step]}

    def go_on(self, place: str) -> None:
        """A session: of one place, or of both, which have the same steps before."""
        for one, other in (("a", "mirror"), ("mirror", "a")):
            if self.known[one] and place in ("a", "mirror"):
                eqx_ckpt.sync(f"{self.folder}/{one}", f"{self.folder}/{other}")
                known = self.known[one] | self.known[other]
                self.known[other] = {step: known[step] for step in sorted(known)}
        given = self.random.choice([None, {"lr": 1}, {"lr": 2}])
        is_mirrored = place == "a" and self.random.random() < 0.6
        there = self.known["mirror"] if is_mirrored else {}
        how: dict[str, Any] = {}
        if is_mirrored:
            how["mirror"] = eqx_ckpt.Mirror(f"{self.folder}/mirror")
        with CheckpointManager(f"{self.folder}/{place}", config=given, **how) as run:
            known, before = there | self.known[place], None
            if known:
                # From an older one, it would be a branch, which no mirror takes.
                run.restore(LIKE)
                before = known[max(known)]
            run.save(self.last, {"w": self.last}).result()
            if is_mirrored:
                run.uploads()[self.last].result(300)
            for one in [place, *(["mirror"] if is_mirrored else [])]:
                self.known[one][self.last] = before if given is None else given
            assert run.read_config() == self.known[place][self.last]

    def check(self) -> None:
        for place, known in self.known.items():
            manager = CheckpointManager(f"{self.folder}/{place}")
            assert manager.steps() == [*known]
            for step, expected in known.items():
                assert manager.read_config(step) == expected, (place, step)
                assert inspect.read_config(manager.path(step)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_of_each_step(folder: str, seed: int) -> None:
    """Sessions with and without a config, in a run, its mirror and its forks."""
    model = Model(folder, random.Random(seed))
    for _ in range(6 if folder.startswith("s3") else 12):
        model.act()
        model.check()


def test_written_once(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    run = f"{folder}/run"
    session(run, 1, config(1))
    session(run, 2, {"seed": 0, "optim": {"lr": 0.1}}, 1)
    stored = CheckpointManager(run)._run.stored
    assert len(stored.beside("config.")) == 1
    assert not caplog.records
    session(run, 3, config(2), 2)
    assert len(stored.beside("config.")) == 2
    (record,) = caplog.records
    assert "From step 2 on" in record.message
    assert "`optim/lr` was 0.1, and is 0.01. The run keeps both" in record.message
    found = {step: inspect.read_config(f"{run}/{step:06}") for step in (1, 2, 3)}
    assert found == {1: config(1), 2: config(1), 3: config(2)}
    assert inspect.read_config(run) == config(2)
    manager = CheckpointManager(run, keep=eqx_ckpt.keep_last(1))
    manager.restore(LIKE)
    manager.save(4, {"w": 4}).result()
    inspect.garbage_collect(run, dry_run=True)
    manager.delete(4)
    assert len(stored.beside("config.")) == 2
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="no step"):
        manager.read_config()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        inspect.read_config(f"{run}/000003")


def test_back_to_the_first_one(tmp_path: pathlib.Path) -> None:
    """A step goes on from the config that led to it, not from the newest one."""
    session(tmp_path, 1, config(1))
    session(tmp_path, 2, config(2), 1)
    CheckpointManager(tmp_path).delete(2)
    session(tmp_path, 3, config(1), 1)
    assert len(files(tmp_path)) == 2
    assert inspect.read_config(tmp_path) == config(1)


def test_a_mirror_and_a_new_machine(
    folder: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = eqx_ckpt.Mirror(f"{folder}/mirror")
    here = tmp_path / "here"
    for step, given in ((1, config(1)), (2, None), (3, config(2))):
        with CheckpointManager(here, mirror=mirror, config=given) as manager:
            if manager.latest() is not None:
                manager.restore(LIKE)
            manager.save(step, {"w": step})
        shutil.rmtree(here)
    assert "From step 2 on" in caplog.text
    found = [inspect.read_config(f"{folder}/mirror/00000{step}") for step in (1, 2, 3)]
    assert found == [config(1), config(1), config(2)]
    with CheckpointManager(here, mirror=mirror) as manager:
        assert manager.read_config() == manager.read_config(3) == config(2)
        assert manager.read_config(2) == config(1)


def test_two_machines_in_turn(tmp_path: pathlib.Path) -> None:
    """The first one knows nothing of the config that the other one has had since."""
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror")
    for step, machine, given in ((1, "a", 1), (2, "b", 2), (3, "a", 1), (4, "b", None)):
        config_of = None if given is None else config(given)
        run = tmp_path / machine
        with CheckpointManager(run, mirror=mirror, config=config_of) as manager:
            if manager.latest() is not None:
                manager.restore(LIKE)
            manager.save(step, {"w": step})
    found = [manager.read_config(step) for step in (1, 2, 3, 4)]
    assert found == [config(1), config(2), config(1), config(1)]


def test_a_fork_has_what_led_to_it(folder: str) -> None:
    session(f"{folder}/a", 1, config(1))
    session(f"{folder}/a", 2, config(2), 1)
    CheckpointManager(f"{folder}/a").fork(f"{folder}/b", 1)
    fork = CheckpointManager(f"{folder}/b")
    assert len(fork._run.stored.beside("config.")) == 1
    CheckpointManager(f"{folder}/a").delete(1)
    assert fork.read_config() == config(1)


def test_a_long_history(tmp_path: pathlib.Path) -> None:
    """A manifest names the last 32 sessions, and each step its config."""
    session(tmp_path, 1, config(1))
    for step in range(2, 41):
        session(tmp_path, step, None, step - 1)
    session(tmp_path, 41, config(2), 39)
    session(tmp_path, 42, None, 40)
    session(tmp_path, 43, config(1), 42)
    found = [inspect.read_config(tmp_path / f"{step:06}") for step in (40, 41, 42, 43)]
    assert found == [config(1), config(2), config(1), config(1)]
    assert len(files(tmp_path)) == 2


def test_a_new_run_where_another_was(tmp_path: pathlib.Path) -> None:
    session(tmp_path, 100, config(1))
    CheckpointManager(tmp_path).delete(100)
    for step in range(1, 36):
        session(tmp_path, step, None, step - 1 or None)
    assert inspect.read_config(tmp_path) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a/b": 1}, {"a": {"b": 1}}),
        ({"a": {"b": 1}, "a/b": 2}, {"a": {"b": 9}, "a/b": 2}),
        ({"": {"a": 1}}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {}),
        ({"a": 0.0}, {"a": -0.0}),
    ],
)
def test_configs_that_differ(
    tmp_path: pathlib.Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    session(tmp_path, 1, one)
    session(tmp_path, 2, other, 1)
    found = [inspect.read_config(tmp_path / f"00000{step}") for step in (1, 2)]
    assert list(map(repr, found)) == list(map(repr, [one, other]))


def test_nothing_is_written_without_one(tmp_path: pathlib.Path) -> None:
    session(tmp_path, 1, None)
    session(tmp_path, 2, None, 1)
    assert not files(tmp_path)
    assert inspect.read_config(tmp_path) is None
    eqx_ckpt.tree_serialise_leaves(tmp_path / "alone", LIKE)
    assert inspect.read_config(tmp_path / "alone") is None
    CheckpointManager(tmp_path, config=config(1)).restore(LIKE)
    assert not files(tmp_path)
    session(tmp_path, 3, {}, 2)
    assert inspect.read_config(tmp_path) == {}


def test_a_reader_without_a_right_to_write(tmp_path: pathlib.Path) -> None:
    session(tmp_path / "run", 1, config(1))
    os.chmod(tmp_path / "run", 0o555)
    try:
        manager = CheckpointManager(tmp_path / "run", config=config(2))
        assert manager.restore(LIKE) == {"w": 1}
        assert manager.read_config() == config(1)
        manager.close()
    finally:
        os.chmod(tmp_path / "run", 0o755)


def test_numbers_of_arrays(tmp_path: pathlib.Path) -> None:
    given = {"lr": np.float64(0.1), "n": jnp.int32(3), "on": np.bool_(True)}
    with CheckpointManager(tmp_path, config=given) as manager:
        given["lr"] = 7  # The manager has a copy.
        manager.save(1, LIKE)
    assert manager.read_config() == {"lr": 0.1, "n": 3, "on": True}


def nested(value: list[Any], depth: int) -> list[Any]:
    """Of few bytes, but with as many spaces for each element as JSON is indented."""
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> list[Any]:
    """A few lists, each of them twice in the next one."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": math.nan}, "has a NaN or an infinity"),
        ({"a": [math.inf]}, "has a NaN or an infinity"),
        ({"a": (1, 2)}, r"`config\['a'\]` is a `tuple`"),
        ({"a": {1: 2}}, "the key 1, which is not a string"),
        ({"a": {"b": len}}, r"\['b'\]` is a `builtin"),
        ({"a": np.zeros(2)}, r"shape \(2,\)"),
        ({"a": "x" * 2**24}, "16 MiB are allowed"),
        ({"a": nested([0] * 2**19, 30)}, "16 MiB are allowed"),
        pytest.param({"a": doubled(40)}, "8,388,608 values", marks=pytest.mark.slow),
    ],
)
def test_what_is_refused(
    tmp_path: pathlib.Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"`config`.*{words}"):
        CheckpointManager(tmp_path / "run", config=given)
    assert [*tmp_path.iterdir()] == []


def another_number(text: str) -> str:
    return text.replace("0.1", "0.2")


DAMAGE: list[Callable[[str], str]] = [
    another_number,
    lambda text: "{}",
    lambda text: text[:-9],
    lambda text: "[1]",
    lambda text: "[" * 100_000,
    lambda text: "",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(
    tmp_path: pathlib.Path,
    damage: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever asks for the config is told; the weights are there all the same."""
    run = tmp_path / "runs/a"
    session(run, 1, config(1))
    (one,) = files(run)
    one.write_text(damage(one.read_text()))
    for path in (run, run / "000001"):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="not as it was writ"):
            inspect.read_config(path)
    for command in (["ls", run], ["ls", run.parent], ["verify", run]):
        assert main([str(word) for word in command]) == 1
        out, err = capsys.readouterr()
        assert "is damaged" in out + err
    manager = CheckpointManager(run, config=config(2))
    assert manager.restore(LIKE) == {"w": 1}
    assert "The config of step 1 is not known" in caplog.text
    manager.save(2, {"w": 2}).result()
    assert manager.read_config(2) == config(2)
    session(run, 3, config(1), 2)
    assert inspect.read_config(run / "000001") == config(1)
    assert main(["verify", str(run)]) == 0


def test_the_nearest_intact_one(tmp_path: pathlib.Path) -> None:
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror")
    with CheckpointManager(
        tmp_path / "run", mirror=mirror, config=config(1)
    ) as manager:
        manager.save(1, LIKE)
    for place, other in (("run", "mirror"), ("mirror", "run")):
        (one,) = files(tmp_path / place)
        text = one.read_text()
        one.write_text(text[:9])
        assert manager.read_config() == manager.read_config(1) == config(1), other
        one.write_text(text)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_new_disk_has_it(tmp_path: pathlib.Path, is_shared: bool) -> None:
    mirror = eqx_ckpt.Mirror(tmp_path / "mirror")
    how: dict[str, Any] = {"mirror": mirror, "shared": is_shared}
    with CheckpointManager(tmp_path / "run", config=config(1), **how) as manager:
        manager.save(1, {"w": 1})
    shutil.rmtree(tmp_path / "run")
    with CheckpointManager(tmp_path / "run", **how) as manager:
        manager.save(2, manager.restore(LIKE))
    assert inspect.read_config(tmp_path / "run/000002") == config(1)


def test_one_that_is_gone(tmp_path: pathlib.Path) -> None:
    session(tmp_path / "run", 1, config(1))
    eqx_ckpt.sync(tmp_path / "run", tmp_path / "mirror")
    (one,) = files(tmp_path / "mirror")
    one.unlink()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=one.name):
        inspect.read_config(tmp_path / "mirror")
    assert main(["verify", str(tmp_path / "mirror")]) == 1
    assert eqx_ckpt.sync(tmp_path / "run", tmp_path / "mirror") == []
    assert inspect.read_config(tmp_path / "mirror") == config(1)


def test_what_is_damaged_stays_behind(tmp_path: pathlib.Path) -> None:
    session(tmp_path / "run", 1, config(1))
    session(tmp_path / "run", 2, config(2), 1)
    for one in files(tmp_path / "run"):
        one.write_text(another_number(one.read_text()))
    without = "Step 1 is in the mirror without its config"
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=without):
        eqx_ckpt.sync(tmp_path / "run", tmp_path / "mirror")
    assert CheckpointManager(tmp_path / "mirror").steps() == [1, 2]
    assert inspect.read_config(tmp_path / "mirror") == config(2)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="Copy the file"):
        inspect.read_config(tmp_path / "mirror/000001")


def test_an_upload_that_was_cut_off(tmp_path: pathlib.Path) -> None:
    session(tmp_path / "run", 1, config(1))
    (one,) = files(tmp_path / "run")
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / one.name).write_text(one.read_text()[:20])
    eqx_ckpt.sync(tmp_path / "run", tmp_path / "mirror")
    assert inspect.read_config(tmp_path / "mirror") == config(1)


def test_a_full_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is there without its config."""
    real = os.fsync

    def full(fd: int) -> None:
        if "/config." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, os.strerror(28))
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    manager = CheckpointManager(tmp_path, config=config(1))
    with pytest.raises(OSError, match="No space left"):
        manager.save(1, LIKE).result()
    assert manager.steps() == []
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(os, "fsync", real)
    manager.save(1, LIKE).result()
    assert manager.read_config() == config(1)


# Of a save of one number.
OPERATIONS = 30


@pytest.mark.once
def test_kill_at_every_operation(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(configs.save, str(disk / "before/run"), 1)
    hits: dict[str, list[str]] = {}
    ends = 0
    for n in range(1, OPERATIONS + 1):
        place = disk / str(n)
        shutil.copytree(disk / "before", place)
        fault = Fault(str(place), n)
        outcome = zygote.run(configs.save, f"{place}/run", 2, fault=fault)
        assert outcome.error is None
        hits[str(place)] = outcome.hits
        ends += not outcome.signal
    assert ends
    found = zygote.call(runs.each, configs.look, [*hits], timeout=OF_MANY)
    assert {1: config(1), 9: config(9)} in found
    for one, hit in zip(found, hits.values(), strict=True):
        assert one == {step: config(step) for step in one}, hit
        assert {1, 9} <= {*one}, hit


@pytest.mark.once
def test_every_state_that_a_power_cut_leaves(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    (disk / "initial").mkdir()
    zygote.call(configs.save, str(disk / "initial/run"), 1)
    root, log = disk / "root", disk / "log"
    shutil.copytree(disk / "initial", root)
    fault = Fault(str(root), log=str(log))
    assert zygote.run(configs.save, f"{root}/run", 2, fault=fault).error is None

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        manager = CheckpointManager(directory / "run")
        assert {1, *map(int, notes)} <= {*manager.steps()}
        for step in manager.steps():
            assert manager.read_config(step) == config(step)

    result = replay.explore(log, root, disk / "initial", disk, check)
    assert result.states > 20
    assert not result.bad, str(result)


def test_a_run_stands_for_its_newest_step(tmp_path: pathlib.Path) -> None:
    """Also if that has no config, or is damaged: no older one takes its place."""
    session(tmp_path, 1, config(1))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "000002", LIKE)
    manager = CheckpointManager(tmp_path)
    assert inspect.read_config(tmp_path) is None
    assert manager.read_config() is None
    manifest = tmp_path / "000002/zarr.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    for read in (lambda: inspect.read_config(tmp_path), manager.read_config):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError):
            read()
