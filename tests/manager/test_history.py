"""Which steps belong together: what is written of it, and what `ls` makes of it."""

import hashlib
import itertools
import json
import pathlib
import shutil
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main
from eqx_ckpt._format.run_history import (
    continued,
    History,
    MOST_SESSIONS,
    Session,
)
from eqx_ckpt._steps.compare_histories import relations
from faults import calls, jobs
from faults.manifests import edited
from faults.zygote import Zygote
from stores.place import Place


TREE = {"a": np.arange(3.0), "b": np.arange(2)}


@dataclass(eq=False)
class Saved:
    """A step as it was saved, wherever copies of it are; a plain one has no run."""

    number: int
    run: object = None
    before: "Saved | None" = None
    restored_as: int | None = None

    def line(self) -> "list[Saved]":
        """This step, and all that it came from."""
        return [self, *(self.before.line() if self.before else [])]


@dataclass
class Manager:
    """A manager, the step that it goes on from, and whether it has saved since."""

    folder: str
    real: eqx_ckpt.CheckpointManager
    at: Saved | None = None
    restored_as: int | None = None
    has_saved: bool = False
    has_whole: bool = False


@dataclass
class World:
    """Some runs, and who has saved which of their steps."""

    root: str
    folders: dict[str, dict[int, Saved]] = field(default_factory=dict)
    managers: list[Manager] = field(default_factory=list)

    def begin(self, folder: str) -> Manager:
        steps = self.folders.setdefault(folder, {})
        assert steps is not None
        real = eqx_ckpt.CheckpointManager(f"{self.root}/{folder}")
        self.managers.append(Manager(folder, real))
        return self.managers[-1]

    def restore(self, manager: Manager, step: int, *, is_part: bool) -> None:
        part = {"like": TREE["a"], "prefix": "a"} if is_part else {"like": TREE}
        manager.real.restore(**part, step=step)
        found = self.folders[manager.folder][step]
        if is_part:
            goes_on = not (manager.has_saved or manager.has_whole)
        else:
            goes_on = not (manager.has_saved and found is manager.at)
        if goes_on:
            manager.has_whole = not is_part
            manager.at, manager.restored_as = found, step if found.run is None else None
            manager.has_saved = False

    def save(self, manager: Manager, by: int) -> None:
        steps = self.folders[manager.folder]
        first = manager.at.number if manager.at and manager.has_saved else -1
        number = next(n for n in range(first + by, 10**6) if n >= 0 and n not in steps)
        manager.real.save(number, TREE).result()
        runs = [steps[n].run for n in sorted(steps) if steps[n].run is not None]
        own = manager.at and manager.at.run
        run = own or (runs[-1] if runs else object())
        manager.at = Saved(number, run, manager.at, manager.restored_as)
        manager.restored_as, manager.has_saved = None, True
        steps[number] = manager.at

    def put(self, source: tuple[str, int], folder: str, number: int) -> None:
        """Copy a step."""
        paths = [f"{self.root}/{f}/{n:06d}" for f, n in (source, (folder, number))]
        found = self.folders[source[0]][source[1]]
        if "://" in self.root:
            eqx_ckpt.copy(*paths)
            # Another manifest, by which nobody knows the first one.
            found = found if found.run is not None else Saved(found.number)
        else:
            shutil.copytree(*paths)
        self.folders.setdefault(folder, {})[number] = found

    def remove(self, folder: str, number: int) -> None:
        eqx_ckpt.CheckpointManager(f"{self.root}/{folder}").delete(number)
        del self.folders[folder][number]

    def do(self, what: str, one: int, other: int, by: int) -> None:
        """Do something, unless nothing is there to do it with."""
        if what == "begin":
            self.begin([*self.folders, "new"][one % (len(self.folders) + 1)])
            return
        manager = self.managers[one % len(self.managers)]
        folder, steps = manager.folder, self.folders[manager.folder]
        free = max(steps, default=0) + by
        if what == "save":
            self.save(manager, by)
        elif what == "plain":
            path = f"{self.root}/{folder}/{free:06d}"
            eqx_ckpt.tree_serialise_leaves(path, TREE)
            steps[free] = Saved(free)
        if not steps:
            return
        step = sorted(steps)[other % len(steps)]
        if what == "resume":
            manager = self.begin(folder)
            self.restore(manager, step, is_part=False)
            self.save(manager, by)
        if what in ("restore", "look"):
            self.restore(manager, step, is_part=what == "look")
        elif what == "delete":
            self.remove(folder, step)
        elif what == "rename":
            self.put((folder, step), folder, free)
            self.remove(folder, step)
        elif what == "fork":
            there = f"{folder}{uuid.uuid4().hex[:8]}"
            for number in steps:
                self.put((folder, number), there, number)
            self.begin(there)
        elif what == "copy":
            there = sorted(self.folders)[by % len(self.folders)]
            number = max(self.folders[there], default=0) + by
            self.put((folder, step), there, number)

    def expected(self, folder: str) -> dict[int, Any]:
        """What `ls` has to say of each step."""
        steps = self.folders[folder]
        runs = {n: saved for n, saved in steps.items() if saved.run is not None}
        newest = runs[max(runs)] if runs else None
        near = [n for n in runs if _is_on_one_line(runs[n], newest)]
        last = max(near, key=lambda n: (runs[n].number, n), default=None)
        return {
            n: None if n not in runs else (saved.number, *_related(saved, runs[last]))
            for n, saved in steps.items()
        }


def _is_on_one_line(one: Saved, other: Saved) -> bool:
    return one in other.line() or other in one.line()


def _related(one: Saved, last: Saved) -> tuple[str, int | None]:
    if one.run is not last.run:
        return "run", None
    if _is_on_one_line(one, last):
        return "same", None
    lines = one.line(), last.line()
    shared = next((saved for saved in lines[0] if saved in lines[1]), None)
    if shared is None:
        return "start", None
    if shared.run is None:  # It is known by the name that it had.
        names = [s.restored_as for line in lines for s in line if s.before is shared]
        return "fork", min(names)
    return "fork", shared.number


def listed(path: str, capsys: pytest.CaptureFixture[str]) -> dict[int, Any]:
    capsys.readouterr()
    assert main(["ls", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    return {entry["step"]: entry["history"] for entry in found}


def check(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    ids: dict[object, str] = {}
    for folder, steps in world.folders.items():
        if not steps:
            continue
        found = listed(f"{world.root}/{folder}", capsys)
        keys = ("saved_as", "relation", "common")
        said = {n: h and tuple(h[key] for key in keys) for n, h in found.items()}
        assert said == world.expected(folder)
        for step, history in found.items():
            if history is not None:
                run = steps[step].run
                assert ids.setdefault(run, history["run"]) == history["run"]
    assert len({*ids.values()}) == len(ids)


WHAT = (
    "resume resume resume save save begin restore look look fork copy rename plain "
    "delete"
).split()
CALLS = st.lists(
    st.tuples(st.sampled_from(WHAT), *[st.integers(0, 9)] * 2, st.integers(1, 3)),
    min_size=6,
    max_size=16,
)
SETTINGS = {
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],
}


def play(root: str, calls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(f"{root}/{uuid.uuid4().hex}")
    for folder in ("a", "b"):
        world.save(world.begin(folder), 1)
    for call in calls:
        world.do(*call)
    check(world, capsys)


@pytest.mark.once
@hypothesis.settings(max_examples=25, **SETTINGS)
@hypothesis.given(calls=CALLS)
def test_ls_tells_which_steps_belong_together(
    calls: Any, disk: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(str(disk), calls, capsys)


@hypothesis.settings(max_examples=8, **SETTINGS)
@hypothesis.given(calls=CALLS)
def test_in_memory(calls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play("memory://histories", calls, capsys)


@pytest.mark.slow
@hypothesis.settings(max_examples=4, **SETTINGS)
@hypothesis.given(calls=CALLS)
def test_in_a_bucket(calls: Any, s3: Place, capsys: pytest.CaptureFixture[str]) -> None:
    play(f"{s3.url}/histories", calls, capsys)


def manager(run: Any, **options: Any) -> eqx_ckpt.CheckpointManager:
    return eqx_ckpt.CheckpointManager(run, **options)


def save(found: eqx_ckpt.CheckpointManager, *steps: int) -> None:
    for step in steps:
        found.save(step, TREE).result()


def history(path: Any) -> eqx_ckpt.inspect.History:
    found = eqx_ckpt.inspect.read_manifest(path).history
    assert found is not None
    return found


def test_a_session_is_what_is_saved_between_two_restores(
    tmp_path: pathlib.Path,
) -> None:
    one = manager(tmp_path)
    save(one, 1, 2)
    one.restore(TREE)  # What it has saved last.
    one.restore(TREE["a"], 1, prefix="a")  # A part.
    one.restore(TREE, 1, where=lambda tree: tree["a"])
    save(one, 3)
    first = history(tmp_path / "000001").sessions
    assert len(first) == 1
    assert first[0][1:] == (None, None)
    assert {history(tmp_path / f"00000{n}").sessions for n in (2, 3)} == {first}
    one.restore(TREE, 2)
    save(one, 4)
    before, last = history(tmp_path / "000004").sessions
    text = (tmp_path / "000002/zarr.json").read_text()
    assert (before,) == first
    assert last.step == 2
    assert f'"digest": "{last.digest}"' in text
    # Before a save, the parts of a state may be restored one by one.
    other = manager(tmp_path)
    for part in TREE:
        other.restore(TREE[part], 3, prefix=part)
    save(other, 5)
    assert [s.step for s in history(tmp_path / "000005").sessions] == [None, 3]


def test_a_part_of_a_step_takes_the_place_of_no_whole_one(
    tmp_path: pathlib.Path,
) -> None:
    """Whole and partial restores of several steps, and saves, in any order."""
    for step in (1, 2, 3):
        with manager(tmp_path / "base", config={"of": step}) as one:
            if step > 1:
                one.restore(TREE)
            save(one, step)
    for calls_ in itertools.product("wps", repeat=3):
        run = tmp_path / "".join(calls_)
        shutil.copytree(tmp_path / "base", run)
        one, how, at = manager(run), "", None
        for step, call in zip((3, 1, 2), calls_, strict=True):
            if call == "s":
                save(one, 3 + step)
                how = "saved"
            elif call == "w":
                one.restore(TREE, step)
                how, at = "whole", step
            else:
                one.restore(TREE, step, where=lambda tree: tree["a"])
                if how in ("", "part"):
                    how, at = "part", step
        save(one, 9)
        assert history(run / "000009").sessions[-1].step == at, calls_
        found = one.read_config(9)
        assert found == (None if at is None else {"of": at}), calls_


def test_a_renamed_step_is_known_by_the_number_with_which_it_was_saved(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(manager(tmp_path), 1, 2, 3)
    (tmp_path / "000002").rename(tmp_path / "000005")
    one = manager(tmp_path)
    one.restore(TREE, 5)
    save(one, 6)
    assert history(tmp_path / "000006").sessions[-1].step == 2
    found = listed(str(tmp_path), capsys)
    assert {step: h["relation"] for step, h in found.items()} == {
        1: "same",
        3: "fork",
        5: "same",
        6: "same",
    }
    assert found[3]["common"] == 2


def test_keep_looks_at_steps_and_does_not_go_on_from_them(
    tmp_path: pathlib.Path,
) -> None:
    def keep(steps: Any) -> Any:
        for step in steps:
            one.restore(TREE, step)
        return steps

    one = manager(tmp_path, keep=keep)
    save(one, 1, 2, 3)
    assert len({history(tmp_path / f"00000{n}").sessions for n in (1, 2, 3)}) == 1


def test_a_fallback_goes_on_from_the_step_that_was_restored(
    tmp_path: pathlib.Path,
) -> None:
    save(manager(tmp_path), 1, 2, 3)
    (tmp_path / "000003/a/c.0").write_bytes(b"")
    one = manager(tmp_path)
    with pytest.warns(UserWarning, match="step 2 was restored"):
        one.restore(TREE, on_damage="fallback")
    save(one, 3)
    assert history(tmp_path / "000003").sessions[-1].step == 2


def test_a_step_that_cannot_be_read_does_not_stop_a_save(
    tmp_path: pathlib.Path,
) -> None:
    save(manager(tmp_path), 1, 2)
    run = history(tmp_path / "000001").run
    (tmp_path / "000002/zarr.json").write_bytes(b"damaged")
    save(manager(tmp_path), 3)
    assert history(tmp_path / "000003").run == run
    for step in (1, 3):
        (tmp_path / f"{step:06d}/zarr.json").write_bytes(b"damaged")
    save(manager(tmp_path), 4)
    assert history(tmp_path / "000004").run != run


def test_what_has_no_history(tmp_path: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(tmp_path / "plain", TREE)
    eqx_ckpt.copy(tmp_path / "plain", tmp_path / "copy")
    for name in ("plain", "copy"):
        assert eqx_ckpt.inspect.read_manifest(tmp_path / name).history is None


def test_a_copy_keeps_it_and_the_digest_of_the_content_does_not_have_it(
    tmp_path: pathlib.Path,
) -> None:
    save(manager(tmp_path / "run"), 1)
    other = manager(tmp_path / "run")
    other.restore(TREE)
    save(other, 2)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "plain", TREE)
    digests = set[str]()
    for step in (1, 2):
        path, new = tmp_path / f"run/00000{step}", tmp_path / f"copy-{step}"
        eqx_ckpt.copy(path, new, layout="ocdbt", compression="zstd")
        assert history(new) == history(path)
        digests |= {eqx_ckpt.inspect.digest(path), eqx_ckpt.inspect.digest(new)}
    assert digests == {eqx_ckpt.inspect.digest(tmp_path / "plain")}
    eqx_ckpt.interop.to_npz(tmp_path / "run/000002", tmp_path / "x.npz")
    source = eqx_ckpt.interop.open_npz(tmp_path / "x.npz")
    assert source.manifest.history is None


def test_the_oldest_sessions_of_many_are_dropped_and_counted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = MOST_SESSIONS + 8
    for step in range(1, count + 1):
        one = manager(tmp_path)
        if step > 1:
            one.restore(TREE)
        save(one, step)
    found = history(tmp_path / f"{count:06d}")
    assert len(found.sessions) == MOST_SESSIONS
    assert found.earlier == 8
    assert [s.step for s in found.sessions] == list(range(8, count))
    # The steps in between tell it.
    assert {h["relation"] for h in listed(str(tmp_path), capsys).values()} == {"same"}
    for step in range(2, count):
        shutil.rmtree(tmp_path / f"{step:06d}")
    relations = [h["relation"] for h in listed(str(tmp_path), capsys).values()]
    assert relations == ["unknown", "same"]
    eqx_ckpt.tree_serialise_leaves(tmp_path / "plain", TREE)
    sizes = [
        (tmp_path / name / "zarr.json").stat().st_size
        for name in ("plain", f"{count:06d}")
    ]
    assert sizes[1] - sizes[0] < 4096


def test_a_forged_circle_of_sessions_ends(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["0" * 16, "1" * 16]
    for step, (first, last) in {1: ids, 2: ids[::-1]}.items():
        save(manager(tmp_path), step)
        sessions = [[first, 5, "0" * 64], [last, 5, "0" * 64]]
        path = tmp_path / f"{step:06d}/zarr.json"
        forged = {"run": "0" * 32, "step": step, "earlier": 1, "sessions": sessions}
        path.write_bytes(
            edited(
                path.read_bytes(), lambda c, h=forged: c["optional"].update(history=h)
            )
        )
    assert len(listed(str(tmp_path), capsys)) == 2


def test_a_source_with_a_history_that_no_step_has(tmp_path: pathlib.Path) -> None:
    class Odd(eqx_ckpt.interop.Source):
        @property
        def manifest(self) -> eqx_ckpt.inspect.Manifest:
            found = eqx_ckpt.inspect.History("a run", 1, ())
            return eqx_ckpt.inspect.Manifest({}, history=found)

        def read(self, reads: Any, damage: Any, report: Any = None) -> list[Any]:
            return []

        def __str__(self) -> str:
            return "an odd source"

    with pytest.raises(eqx_ckpt.CheckpointError, match="odd source has a `history`"):
        eqx_ckpt.copy(Odd(), tmp_path / "copy")


def test_a_job_has_the_history_of_its_first_process(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    assert zygote.call(jobs.values, 2, 4, calls.go_on, str(disk)) == [[1, 2, 3]] * 2
    last = history(disk / "000003")
    assert [s.step for s in last.sessions] == [None, 1]
    assert last.sessions[:1] == history(disk / "000002").sessions


WORDS = ["".join(word) for n in (1, 2, 3) for word in itertools.product("ab", repeat=n)]


def as_in_the_model(word: str) -> eqx_ckpt.inspect.History:
    """The history of a step of `model/tiers.py`: who saved it, and those before."""
    found, step = None, 0
    for letter, group in itertools.groupby(word):
        until = step + len([*group])
        key = f"{word[:step]}{letter}".encode()
        session = Session(hashlib.sha256(key).hexdigest()[:16], step or None)
        if found is None:
            found = History("0" * 32, until, (session,))
        else:
            found = replace(continued(found, session), step=until)
        step = until
    assert found is not None
    return found


def test_what_is_written_suffices_for_the_model_of_two_tiers() -> None:
    """Of two steps, one came from the other if its word begins with the other's."""
    for one, other in itertools.product(WORDS, repeat=2):
        # A step is found under its number; a second one of that number, beside it.
        found = relations({1: as_in_the_model(one), 2: as_in_the_model(other)})
        is_same = one.startswith(other) or other.startswith(one)
        assert (found[1].kind == found[2].kind == "same") == is_same, (one, other)


def test_ls_marks_what_is_unusual(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(manager(tmp_path / "a"), 100, 200)
    save(manager(tmp_path / "b"), 150)
    one = manager(tmp_path / "a")
    one.restore(TREE, 100)
    save(one, 300)
    shutil.copytree(tmp_path / "b/000150", tmp_path / "a/000150")
    shutil.copytree(tmp_path / "a/000200", tmp_path / "a/000250")
    assert main(["ls", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    marks = {line.split()[0]: line.partition("[")[2].rstrip("]") for line in lines}
    assert marks == {
        "100": "",
        "150": "another run",
        "200": "fork of step 100",
        "250": "fork of step 100, saved as step 200",
        "300": "latest",
    }
