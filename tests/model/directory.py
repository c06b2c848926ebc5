"""The commit of a checkpoint in a directory: a hidden directory, its lock, one rename.

Beside the code: in `_storage/directory`, `directory_place.py` (A and B save one path),
`directory_steps.py` (the deleter) and `attempt_lock.py` (the sweeper); and
`_sources/consistent_read.py` (the reader). "O" is what was there before, with
`overwrite=True`. A writer that cannot flush the names takes its save back.

After a power cut, a name is what it was at the last `fsync` of its directory, or
anything that it has been since; files that were not flushed are gone.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


OLD, DELETER = "O", "D"
ENDED = {"saved", "refused", "done"}

# What a writer is about to do that took back another's save by mistake: until then, a
# death or a power cut may lose that one.
MOMENT = {"put_again", "flush_again"}


class Lock(NamedTuple):
    """A lock file: whether its name is there, and who holds it."""

    is_there: bool = False
    holder: str = ""


class State(NamedTuple):
    target: str = ""  # Whose directory has the name.
    # What else it may be after a power cut.
    before: frozenset[str] = frozenset()
    # The directories with all of their files; those of them that were flushed.
    whole: frozenset[str] = frozenset()
    flushed: frozenset[str] = frozenset()
    # Whose directory is at the hidden name of each attempt; the locks of these names.
    hidden: tuple[str, ...] = ("", "", "")
    locks: tuple[Lock, ...] = (Lock(), Lock(), Lock())
    at: tuple[str, ...] = ("begin", "begin", "begin")
    replaces: tuple[bool, bool] = (False, False)
    sweeper: tuple[str, str] = ("idle", "")
    # What a reader does: of which directory its identity, manifest and chunk are.
    reader: tuple[str, ...] = ()
    good: str = ""  # What was committed, and neither replaced nor deleted since.
    deaths: int = 1
    cuts: int = 1
    bad_flushes: int = 0  # Flushes of the names that fail.
    put_back: str = ""  # Whose directory is there again.
    sweeps: int = 2
    problem: str = ""


NAMES = ("A", "B", DELETER)


class Directory(Model):
    name = "Commit in a directory"
    scenes = {
        "create": "A and B save one path; a sweeper",
        "overwrite": "A and B overwrite one path; a reader, a sweeper",
        "delete": "A overwrites a path; a deleter, a reader, a sweeper",
        "take back": "A and B overwrite one path; a bad disk, a reader, a sweeper",
        "take back new": "A and B save one new path; a bad disk, a reader, a sweeper",
    }
    guards = {
        "flush": ("delete", "the files are flushed before the rename"),
        "refuse": ("create", "the rename fails if something is there"),
        "exchange": (
            "delete",
            "what is replaced is exchanged in one operation, not removed first",
        ),
        "fsync": ("delete", "the rename is flushed before the save has ended"),
        "fsync before deletion": (
            "delete",
            "the rename is flushed before old files are deleted",
        ),
        "flush under the lock": (
            "delete",
            "a sweeper flushes the names once it holds the lock",
        ),
        "hide": ("delete", "a step gets a hidden name before its files are deleted"),
        "lock": ("delete", "a sweeper deletes nothing whose lock is held"),
        "lock first": ("delete", "the lock is held before the hidden directory exists"),
        "look after the lock": (
            "delete",
            "a writer looks whether its lock file is still there",
        ),
        "identity": ("delete", "a reader compares the directory before and after"),
        "look after taking back": (
            "take back",
            "a writer that takes back its save looks whether it took back its own",
        ),
        "flush what was taken back": (
            "take back",
            "a save that was taken back is flushed before its files are deleted",
        ),
    }

    def start(self) -> State:
        if self.scene == "create":
            return State(at=("begin", "begin", "done"))
        if self.scene == "take back new":
            return State(at=("begin", "begin", "done"), bad_flushes=1, sweeps=1)
        at = ("begin", "done" if self.scene == "delete" else "begin")
        at = (*at, "begin" if self.scene == "delete" else "done")
        old = frozenset(OLD)
        state = State(OLD, whole=old, flushed=old, at=at, good=OLD)
        if self.scene == "take back":
            return state._replace(bad_flushes=1, sweeps=1)
        return state

    def steps(self, s: State) -> Iterator[Step]:
        for i, name in enumerate(NAMES):
            if s.at[i] in ENDED or s.at[i] == "dead":
                continue
            if s.deaths and s.at[i] not in MOMENT:
                words = f"{name} is killed"
                yield Step(words, _unlocked(_at(s, i, "dead"), i)._replace(deaths=0))
            does = getattr(self, f"_{s.at[i]}")
            yield from does(s, i, name)
        if s.cuts and MOMENT.isdisjoint(s.at):
            yield from self._power_cut(s)
        yield from self._sweeper(s)
        if self.scene != "create":
            yield from self._reader(s)

    # A writer. The deleter takes its hidden name in the same way.

    def _begin(self, s: State, i: int, name: str) -> Iterator[Step]:
        if i < 2 and s.target and self.scene == "create":
            yield Step(f"{name} sees that the path is taken", _at(s, i, "refused"))
        elif not self.keeps("lock first") and i < 2:
            yield from self._mkdir(s, i, name)
        else:
            after = _lock(s, i, is_there=True)
            yield Step(f"{name} creates its lock file", _at(after, i, "lock"))

    def _lock(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.locks[i].holder:
            # A sweeper has it: another name.
            yield Step(f"{name} finds its lock taken", _at(s, i, "begin"))
        elif not s.locks[i].is_there and self.keeps("look after the lock"):
            yield Step(f"{name} finds its lock file removed", _at(s, i, "begin"))
        else:
            now = _at(s, i, "hide" if i == 2 else "mkdir")
            # A lock on a file without a name is one that nobody else sees.
            if s.locks[i].is_there:
                now = _lock(now, i, holder=name)
            yield Step(f"{name} holds its lock", now)

    def _mkdir(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(hidden=_put(s.hidden, i, name))
        after = "write" if self.keeps("lock first") else "lock_later"
        yield Step(f"{name} makes its hidden directory", _at(now, i, after))

    def _lock_later(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = _lock(s, i, is_there=True, holder=name)
        yield Step(f"{name} creates and holds its lock", _at(after, i, "write"))

    def _write(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.hidden[i] != name:
            words = f"The hidden directory of {name}, which is alive, was swept."
            yield Step(f"{name} writes its files", s._replace(problem=words))
            return
        now = s._replace(whole=s.whole | {name})
        after = "flush" if self.keeps("flush") else "ask"
        yield Step(f"{name} writes its files and its manifest", _at(now, i, after))

    def _flush(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(flushed=s.flushed | ({name} & s.whole))
        yield Step(f"{name} flushes its files", _at(now, i, "ask"))

    def _ask(self, s: State, i: int, name: str) -> Iterator[Step]:
        replaces = bool(s.target) and self.scene != "create"
        now = s._replace(replaces=_put(s.replaces, i, replaces))
        words = "something is" if s.target else "nothing is"
        after = "rename"
        if replaces and not self.keeps("exchange"):
            after = "remove_first"
        yield Step(f"{name} sees that {words} at the path", _at(now, i, after))

    def _remove_first(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _rename(s, "")._replace(replaces=_put(s.replaces, i, False))
        now = now._replace(whole=s.whole - {s.target})
        yield Step(f"{name} removes what is at the path", _at(now, i, "rename"))

    def _rename(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.hidden[i] != name:
            words = f"The hidden directory of {name}, which is alive, was swept."
            yield Step(f"{name} renames", s._replace(problem=words))
        elif s.replaces[i] and not s.target:
            # The exchange fails: it was removed meanwhile.
            yield Step(f"{name} finds nothing to exchange", _at(s, i, "clean"))
        elif not s.replaces[i] and s.target and self.keeps("refuse"):
            yield Step(f"{name} is refused: the path is taken", _at(s, i, "clean"))
        else:
            now = _rename(s, name)._replace(hidden=_put(s.hidden, i, ""))
            if s.replaces[i]:
                now = now._replace(hidden=_put(s.hidden, i, s.target))
            words = "exchanges" if s.replaces[i] else "renames"
            first = s.replaces[i] and not self.keeps("fsync before deletion")
            after = "delete" if first or not self.keeps("fsync") else "fsync"
            yield Step(f"{name} {words}", _at(now, i, after))

    def _fsync(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(before=frozenset())
        if i < 2 and s.target == name:
            now = now._replace(good=name)
        yield Step(f"{name} flushes the rename", _at(now, i, "delete"))
        if s.bad_flushes:
            now = s._replace(bad_flushes=s.bad_flushes - 1)
            yield Step(f"{name} cannot flush the rename", _at(now, i, "look"))

    # A writer that takes its save back. "O" is back if it was replaced.

    def _look(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.target == name:
            yield Step(f"{name} sees its own at the path", _at(s, i, "put_back"))
        else:
            words = f"{name} sees that {s.target or 'nothing'} is at the path"
            yield Step(words, _at(s, i, self._after_taking_back))

    def _put_back(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _taken_back(s, i)
        if s.target == name or not self.keeps("look after taking back"):
            after = self._after_taking_back
        else:
            after = "put_again"
        words = f"{name} takes back what is at the path: {s.target or 'nothing'}"
        yield Step(words, _at(now, i, after))

    def _put_again(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _taken_back(s, i)
        if now.at["AB".index(now.target)] == "saved":
            now = now._replace(good=now.target)
        yield Step(f"{name} puts {now.target} there again", _at(now, i, "flush_again"))

    @property
    def _after_taking_back(self) -> str:
        flushes = self.keeps("flush what was taken back")
        return "flush_names" if flushes else "clean"

    def _flush_names(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(before=frozenset())
        yield Step(f"{name} flushes the names", _at(now, i, "clean"))

    _flush_again = _flush_names

    def _delete(self, s: State, i: int, name: str) -> Iterator[Step]:
        gone = s.hidden[i]
        now = s._replace(whole=s.whole - {gone}, hidden=_put(s.hidden, i, ""))
        words = f"{name} deletes the files of {gone}" if gone else f"{name} goes on"
        yield Step(words, _at(now, i, "unlock"))

    def _clean(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(whole=s.whole - {s.hidden[i]}, hidden=_put(s.hidden, i, ""))
        now = _unlocked(_lock(now, i, is_there=False), i)
        yield Step(f"{name} deletes its hidden directory", _at(now, i, "refused"))

    def _unlock(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _unlocked(_lock(s, i, is_there=False), i)
        if i == 2:
            yield Step(f"{name} has deleted the path", _at(now, i, "done"))
        else:
            good = name if s.target == name else s.good
            now = now._replace(good=good)
            yield Step(f"{name} has saved", _at(now, i, "saved"))

    # The deleter, the sweeper, a reader, and power cuts.

    def _hide(self, s: State, i: int, name: str) -> Iterator[Step]:
        if not s.target:
            yield Step(f"{name} finds nothing to delete", _at(s, i, "unlock"))
        elif not self.keeps("hide"):
            now = s._replace(whole=s.whole - {s.target})
            yield Step(f"{name} deletes some files", _at(now, i, "hide_late"))
        else:
            hidden = _put(s.hidden, i, s.target)
            now = _rename(s, "")._replace(hidden=hidden, good="")
            after = "fsync" if self.keeps("fsync before deletion") else "delete"
            yield Step(f"{name} renames the path to a hidden name", _at(now, i, after))

    def _hide_late(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _rename(s, "")._replace(good="")
        yield Step(f"{name} deletes the directory", _at(now, i, "unlock"))

    def _sweeper(self, s: State) -> Iterator[Step]:
        does, name = s.sweeper
        i = NAMES.index(name) if name else 0
        if does == "idle" and s.sweeps:
            for name, lock, hidden in zip(NAMES, s.locks, s.hidden, strict=True):
                if lock.is_there or hidden:
                    now = s._replace(sweeper=("open", name), sweeps=s.sweeps - 1)
                    if not self.keeps("flush under the lock"):
                        now = now._replace(before=frozenset())
                    yield Step(f"a sweeper lists .{name}.tmp", now)
        elif does == "open":
            if s.locks[i].holder and self.keeps("lock"):
                yield Step("it finds the lock held", s._replace(sweeper=("idle", "")))
            else:
                # It opens the lock file, or creates one, and holds it.
                held = _lock(s, i, is_there=True)
                if not s.locks[i].holder:
                    held = _lock(held, i, holder="sweeper")
                after = "flush" if self.keeps("flush under the lock") else "files"
                yield Step("it holds the lock", held._replace(sweeper=(after, name)))
        elif does == "flush":
            now = s._replace(before=frozenset(), sweeper=("files", name))
            yield Step("it flushes the names", now)
        elif does == "files":
            whole = s.whole - {s.hidden[i]}
            now = s._replace(whole=whole, hidden=_put(s.hidden, i, ""))
            words = f"it deletes .{name}.tmp"
            yield Step(words, now._replace(sweeper=("unlink", name)))
        elif does == "unlink":
            now = _lock(s, i, is_there=False)
            if s.locks[i].holder == "sweeper":
                now = _unlocked(now, i)
            yield Step("it removes the lock file", now._replace(sweeper=("idle", "")))

    def _reader(self, s: State) -> Iterator[Step]:
        seen = s.reader
        if len(seen) == 0 and s.target:
            now = s._replace(reader=(_identity(s),))
            yield Step("a reader looks at the directory", now)
        elif len(seen) == 1:
            yield Step("it reads the manifest", _read(s))
        elif len(seen) == 2:
            yield Step("it reads the chunks", _read(s))
        elif len(seen) == 3 and _identity(s) != seen[0] and self.keeps("identity"):
            yield Step(
                "it sees another directory, and begins again", s._replace(reader=())
            )
        elif len(seen) == 3:
            now = s._replace(reader=(*seen, "end"))
            if seen[1] != seen[2]:
                now = now._replace(problem="A reader has mixed two versions.")
            yield Step("it returns what it has read", now)

    def _power_cut(self, s: State) -> Iterator[Step]:
        off = s._replace(
            at=tuple(at if at in ENDED else "dead" for at in s.at),
            locks=tuple(lock._replace(holder="") for lock in s.locks),
            sweeper=("idle", ""),
            reader=("", "", "", "off"),
            deaths=0,
            cuts=0,
            before=frozenset(),
            whole=s.whole & s.flushed,
        )
        for target in sorted({s.target, *s.before}):
            hidden = tuple("" if of == target else of for of in s.hidden)
            now = off._replace(target=target, hidden=hidden)
            words = f"a power cut; at the path is {target or 'nothing'}"
            yield Step(words, now)

    # What must be true.

    def problem(self, s: State) -> str:
        if s.problem or "put_again" in s.at:
            return s.problem
        if s.target and s.target not in s.whole:
            return f"The checkpoint of {s.target} is listed, and is not intact."
        saved = [n for n, at in zip("AB", s.at, strict=False) if at == "saved"]
        if len(saved) == 2 and self.scene == "create":
            return "Two writers were told that they have saved one path."
        if s.good and not s.target:
            return f"What {s.good} saved is gone."
        if s.good and s.target != s.good and s.target not in "AB":
            return f"What {s.good} saved is gone, and {s.target} is back."
        for name, at in zip("AB", s.at, strict=False):
            if at == "refused" and s.target == name:
                return f"{name} was told that it has not saved, and it has."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        for i, name in enumerate(NAMES):
            if s.at[i] not in ENDED and s.at[i] != "dead":
                quiet = s._replace(
                    at=tuple(
                        at if i == j or at in ENDED else "dead"
                        for j, at in enumerate(s.at)
                    ),
                    locks=tuple(
                        lock if lock.holder == name else lock._replace(holder="")
                        for lock in s.locks
                    ),
                    sweeper=("idle", ""),
                    sweeps=0,
                    reader=("", "", "", "off"),
                    deaths=0,
                    cuts=0,
                )
                yield name, quiet

    def has_ended(self, actor: str, s: State) -> bool:
        return s.at[NAMES.index(actor)] in ENDED or bool(s.problem)


def _put(values: tuple, i: int, value: object) -> tuple:
    return (*values[:i], value, *values[i + 1 :])


def _at(s: State, i: int, at: str) -> State:
    return s._replace(at=_put(s.at, i, at))


def _lock(s: State, i: int, **changes: object) -> State:
    return s._replace(locks=_put(s.locks, i, s.locks[i]._replace(**changes)))


def _unlocked(s: State, i: int) -> State:
    """The kernel releases a lock when its process ends."""
    return (
        _lock(s, i, holder="") if s.locks[i].holder in ("", NAMES[i], "sweeper") else s
    )


def _rename(s: State, target: str) -> State:
    return s._replace(target=target, before=s.before | {s.target})


def _taken_back(s: State, i: int) -> State:
    """Exchange the path and a hidden name, of which one may be nothing."""
    now = _rename(s, s.hidden[i])._replace(hidden=_put(s.hidden, i, s.target))
    return now._replace(put_back=s.hidden[i])


def _identity(s: State) -> str:
    """Of the directory at the path: it has another one once it was put back."""
    return s.target + "'" * (s.target == s.put_back != "")


def _read(s: State) -> State:
    """A file is opened by its path: it is of what has the name now."""
    return s._replace(reader=(*s.reader, s.target or s.reader[0][:1]))
