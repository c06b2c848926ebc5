"""The faults, and what the libraries say afterwards.

A scene returns the cells of its rows in the table.
"""

import contextlib
import functools as ft
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import powercut, shim

from .children import (
    call,
    Child,
    ChildError,
    DIED,
    Job,
    look,
    OTHER_VALUES,
    race,
    train,
)
from .peers import RETAINING


# A save of it takes long enough to be struck in the middle.
_LARGE_MIB = 64

Found = dict[int, int | str]


class Scene(NamedTuple):
    """Who is struck, where and how often, and what was seen then."""

    peer: str
    scratch: Path
    repeats: int
    seen: list[Any]

    def job(self, keep: int = 2, mib: float = 0.5) -> Job:
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        return Job(self.peer, directory, keep, mib)

    def look(self, job: Job) -> Found:
        found = _look(job)
        self.seen.append(found)
        return found

    def cannot(self, reason: str, rows: int) -> tuple[str, ...]:
        """The reason, and empty cells below it."""
        line = reason.replace(f"{self.scratch}/", "").splitlines()[0]
        return (line, *["-"] * (rows - 1))


def _look(job: Job) -> Found:
    """What the library lists; a step that does not restore, if it cannot even list."""
    try:
        return call(look, job)
    except ChildError as e:
        return {0: str(e)}


class End(NamedTuple):
    """What is wrong with the checkpoints of a run that was killed."""

    lost: bool  # nothing restores that is as new as what was acknowledged
    broken: bool  # a listed step does not restore
    left_over: bool  # the next run leaves what it does not list
    stuck: bool  # the next run cannot save


def _end(scene: Scene, job: Job, acknowledged: int, usual: "Space") -> End:
    """Look, let the next run save two steps, and look what stays.

    The next run begins after the newest step that restores: with the one that was
    being saved, as a training does that was started again.
    """
    found = scene.look(job)
    whole = [seed for seed in found.values() if isinstance(seed, int)]
    begin = max(whole, default=0) + 1
    try:
        call(train, job, [begin, begin + 1])
        stuck = ""
    except ChildError as e:
        stuck = str(e)
    space = _space(job)
    scene.seen.append({"acknowledged": acknowledged, "stuck": stuck, "space": space})
    return End(
        lost=max(whole, default=0) < acknowledged,
        broken=len(whole) < len(found),
        left_over=not stuck and not space.like(usual),
        stuck=bool(stuck),
    )


class Space(NamedTuple):
    """What a directory has beyond one name for each step, and its MiB for each step."""

    names: int
    mib: float

    def like(self, usual: "Space") -> bool:
        return self.names <= usual.names and self.mib <= 1.1 * usual.mib


def _space(job: Job) -> Space:
    steps = len(_look(job))
    size = sum(file.stat().st_size for file in _files(job.directory))
    return Space(len(os.listdir(job.directory)) - steps, size / 2**20 / max(1, steps))


def _counts(bad: Sequence[tuple[bool, ...]]) -> tuple[str, ...]:
    """How often each was bad."""
    counts = [sum(bits) for bits in zip(*bad, strict=True)]
    return tuple(f"**{n} of {len(bad)}**" if n else f"0 of {len(bad)}" for n in counts)


def kill(scene: Scene) -> tuple[str, ...]:
    """The moments are random, one in each of as many equal parts of a save."""
    control = scene.job(mib=_LARGE_MIB)
    seconds = _seconds_of_a_save(control)
    usual = _space(control)
    moments = random.Random(0)
    ends: list[End] = []
    for i in range(scene.repeats):
        job = scene.job(mib=_LARGE_MIB)
        with Child(train, job, [1, 2]) as child:
            _begin_second_save(child)
            time.sleep((i + moments.random()) / scene.repeats * seconds)
            child.kill()
            acknowledged = 1 + child.saved()
        ends.append(_end(scene, job, acknowledged, usual))
        shutil.rmtree(job.directory)
    return _counts(ends)


def _seconds_of_a_save(job: Job) -> float:
    with Child(train, job, [1, 2]) as child:
        _begin_second_save(child)
        start = time.perf_counter()
        child.hear()
        seconds = time.perf_counter() - start
        child.result()
    return seconds


def _begin_second_save(child: Child) -> None:
    for said in ("saving", "saved", "saving"):
        if (heard := child.hear()) != said:
            raise ChildError(f"{heard} instead of {said}")


def retention(scene: Scene) -> tuple[str, ...]:
    """Before each name that is deleted while 2 is saved and 1 is not to be kept.

    Some of them are temporary files of the save of 2.
    """
    if scene.peer not in RETAINING:
        return ("-",) * 4
    if reason := shim.missing():
        return scene.cannot(reason, rows=4)
    control = scene.job(keep=1)
    count = call(train, control, [1, 2], 0)
    usual = _space(control)
    ends: list[End] = []
    for place in _spread(range(1, count + 1), scene.repeats):
        job = scene.job(keep=1)
        with Child(train, job, [1, 2], place) as child:
            acknowledged = child.saved()
        ends.append(_end(scene, job, acknowledged, usual))
    return _counts(ends)


def _spread(places: Sequence[Any], most: int) -> list[Any]:
    """All of the places, or so many of them, evenly spread."""
    count = min(len(places), most)
    return [places[i * len(places) // count] for i in range(count)]


def power_cut(scene: Scene, *, kind: str) -> tuple[str, ...]:
    """Step 1 is on the disk; 2 was acknowledged just now.

    Every other time, another program has flushed a file of its own before the cut.
    """
    if reason := powercut.missing(kind, scene.scratch):
        return scene.cannot(reason, rows=2)
    bad: list[tuple[bool, ...]] = []
    for i in range(2 * min(2, scene.repeats)):
        with powercut.PowerCut(kind, scene.scratch) as power:
            job = Job(scene.peer, power.disk / "run")
            job.directory.mkdir()
            call(train, job, [1])
            os.sync()
            call(train, job, [2])
            if i % 2:
                power.commit_journal()
            power.cut()
            whole = {1, 2} & set(scene.look(job).values())
        bad.append((2 not in whole, not whole))
    return _counts(bad)


def bit(scene: Scene) -> tuple[str, ...]:
    """At random places among all bytes of a checkpoint."""
    places = random.Random(0)

    def flip(directory: Path) -> None:
        files = _files(directory)
        (file,) = places.choices(files, [f.stat().st_size for f in files])
        content = bytearray(file.read_bytes())
        content[places.randrange(len(content))] ^= 1 << places.randrange(8)
        file.write_bytes(content)

    return (_damage(scene, _one_step(scene), [flip] * scene.repeats),)


def missing(scene: Scene) -> tuple[str, ...]:
    """Each file of a checkpoint in turn; of many, the larger ones."""
    saved = _one_step(scene)
    files = range(min(scene.repeats, len(_files(saved.directory))))

    def delete(directory: Path, i: int) -> None:
        _files(directory)[i].unlink()

    def cut(directory: Path, i: int) -> None:
        file = _files(directory)[i]
        os.truncate(file, file.stat().st_size // 2)

    return tuple(
        _damage(scene, saved, [ft.partial(harm, i=i) for i in files])
        for harm in (delete, cut)
    )


def _one_step(scene: Scene) -> Job:
    job = scene.job()
    call(train, job, [1])
    return job


def _damage(scene: Scene, saved: Job, harms: Sequence[Callable[[Path], None]]) -> str:
    """What a copy restores to after each harm, in words."""
    words: Counter[str] = Counter()
    for harm in harms:
        job = saved._replace(directory=scene.scratch / "damaged")
        shutil.copytree(saved.directory, job.directory)
        harm(job.directory)
        words[_word(scene.look(job))] += 1
        shutil.rmtree(job.directory)
    return _tally(words)


def _tally(words: Counter[str]) -> str:
    return ", ".join(f"{n} {word}" for word, n in words.most_common())


def _word(found: Found) -> str:
    (restored,) = found.values() or (None,)
    words = {1: "unharmed", OTHER_VALUES: "**silent**", DIED: "**crash**"}
    return words.get(restored, "not listed" if restored is None else "error")


def _files(directory: Path) -> list[Path]:
    """The largest first."""
    files = [f for f in directory.rglob("*") if f.is_file()]
    return sorted(files, key=lambda f: (-f.stat().st_size, f))


def full(scene: Scene) -> tuple[str, ...]:
    """File systems with a step of 2 MiB, and less room than one of 24 needs."""
    bad: list[tuple[bool, ...]] = []
    for mib in (8, 12, 16)[: scene.repeats]:
        with _small_disk(scene.scratch / "small", mib) as reason:
            if reason:
                return scene.cannot(reason, rows=3)
            bad.append(_fill(scene, scene.scratch / "small" / "run"))
    return _counts(bad)


def _fill(scene: Scene, directory: Path) -> tuple[bool, ...]:
    job = Job(scene.peer, directory, mib=2)
    directory.mkdir()
    call(train, job, [1])
    free = _free(directory)
    try:
        call(train, job._replace(mib=24), [2])
        error = ""
    except ChildError as e:
        error = str(e)
    kept = (free - _free(directory)) / 2**20
    scene.seen.append({"error": error, "kept": kept})
    return (error in ("", DIED), 1 not in scene.look(job).values(), kept > 0.1)


@contextlib.contextmanager
def _small_disk(directory: Path, mib: int) -> Iterator[str]:
    """A file system in memory at `directory`; yields why there is none, or ''."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True)
    try:
        yield done.stderr or "no mount" if done.returncode else ""
    finally:
        if not done.returncode:
            powercut.unmount(directory)


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bfree * found.f_bsize


def two(scene: Scene) -> tuple[str, ...]:
    """Two processes that do not know of each other, as when a job is started twice."""
    words: Counter[str] = Counter()
    for _ in range(scene.repeats):
        job = scene.job(mib=_LARGE_MIB)
        with Child(race, job, 1) as first, Child(race, job, 2) as second:
            both = (first, second)
            if any(child.hear() != "ready" for child in both):
                raise ChildError("a process could not begin")
            for child in both:
                child.go()
            saved = [seed for seed, child in enumerate(both, 1) if child.saved()]
        found = scene.look(job)
        scene.seen.append({"acknowledged": saved})
        words[_race_word(saved, found)] += 1
        shutil.rmtree(job.directory)
    return (_tally(words),)


def _race_word(saved: Sequence[int], found: Found) -> str:
    restored = set(found.values())
    if OTHER_VALUES in restored:
        return "**the values of neither**"
    if any(isinstance(value, str) for value in restored):
        return "**unreadable**"
    if set(saved) - restored:
        return "**one lost in silence**"
    return "as acknowledged" if saved else "none acknowledged"
