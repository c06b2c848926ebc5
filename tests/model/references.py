"""Steps of a bucket that refer to chunks of earlier attempts, and their deletion.

O is a committed step. W and V each save a step of their own, whose one chunk is equal
to that of O: their manifests refer to it, in O's prefix. A deleter removes O's step; a
sweeper then removes the chunks to which nothing refers. A step names the prefix where a
chunk lies, so references form no chains.

A list may lag by less than ten minutes. A writer can be suspended for longer, once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


ENDED = {"saved", "failed", "unknown"}


class Writer(NamedTuple):
    at: str = "base"
    refers: bool = False  # Its manifest refers to O's chunk; otherwise it has its own.
    has_pin: bool = False
    suspended_at: str = ""
    is_suspended: bool = False
    is_dead: bool = False


class State(NamedTuple):
    # The steps with a manifest; the prefixes whose chunk is there.
    listed: frozenset[str] = frozenset("O")
    chunks: frozenset[str] = frozenset("O")
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    # What was written so recently that a list may lack it.
    fresh: frozenset[str] = frozenset()
    sweeper: tuple[str, str] = ("idle", "")
    deleter: str = "idle"
    suspensions: int = 1
    deaths: int = 1
    # Which step the deleter removes first.
    deletes: str = "O"


NAMES = "WV"


class References(Model):
    name = "References in a bucket"
    scenes = {
        "one": "W refers to O; a deleter of O, a sweeper",
        "two": "W and V refer to O; a deleter of O and then of W, a sweeper",
    }
    guards = {
        "pin": ("one", "a writer says first, below its prefix, what it will refer to"),
        "look again": ("one", "then it looks whether the base is still committed"),
        "mark manifests": ("one", "a chunk to which a manifest refers is not swept"),
        "mark pins": ("one", "a chunk to which a living attempt refers is not swept"),
        "mark after": (
            "one",
            "what is marked is read after the ten minutes, not before",
        ),
        "grace": ("one", "ten minutes pass between a deletion and the sweep"),
        "manifest first": ("one", "a deletion deletes the manifest only"),
        "check before": (
            "one",
            "the heartbeat is checked before the manifest is written",
        ),
        "check after": ("one", "it is checked again before anything is acknowledged"),
        "take back": ("one", "a manifest whose chunks were swept is taken back"),
    }

    def start(self) -> State:
        second = Writer("failed", is_dead=True) if self.scene == "one" else Writer()
        return State(writers=(Writer(), second))

    def steps(self, s: State) -> Iterator[Step]:
        for i, name in enumerate(NAMES):
            w = s.writers[i]
            if w.is_dead or w.at in ENDED:
                continue
            if w.is_suspended:
                yield Step(f"{name} continues", _set(s, i, is_suspended=False))
                continue
            if s.suspensions:
                now = _set(s, i, is_suspended=True, suspended_at=w.at)
                words = f"{name} is suspended for longer than ten minutes"
                yield Step(words, now._replace(suspensions=0))
            if s.deaths:
                yield Step(f"{name} dies", _set(s, i, is_dead=True)._replace(deaths=0))
            yield from getattr(self, f"_{w.at}")(s, i, name)
        yield from self._deleter(s)
        yield from self._sweeper(s)

    def _base(self, s: State, i: int, name: str) -> Iterator[Step]:
        if "O" in s.listed:
            after = "pin" if self.keeps("pin") else "check"
            now = _set(s, i, at=after, refers=True)
            yield Step(f"{name} reads the manifest of O: the chunk is equal", now)
        else:
            yield Step(f"{name} finds no base", _set(s, i, at="write"))

    def _pin(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = "look_again" if self.keeps("look again") else "check"
        now = _set(s, i, at=after, has_pin=True)
        now = now._replace(fresh=s.fresh | {name})
        yield Step(f"{name} writes that it will refer to @O/", now)

    def _look_again(self, s: State, i: int, name: str) -> Iterator[Step]:
        if "O" in s.listed:
            yield Step(f"{name} finds O still committed", _set(s, i, at="check"))
        else:
            now = _set(s, i, at="write", refers=False)
            yield Step(f"{name} finds O deleted", now)

    def _write(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = s._replace(chunks=s.chunks | {name}, fresh=s.fresh | {name})
        yield Step(f"{name} writes its chunk", _set(now, i, at="check", has_pin=True))

    def _check(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.writers[i].suspended_at and self.keeps("check before"):
            yield Step(f"{name} finds its heartbeat late", _set(s, i, at="failed"))
        else:
            yield Step(f"{name} finds its heartbeat in time", _set(s, i, at="put"))

    def _put(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = "look" if self.keeps("check after") else "saved"
        now = _set(s._replace(listed=s.listed | {name}), i, at=after)
        yield Step(f"{name} puts its manifest", now)

    def _look(self, s: State, i: int, name: str) -> Iterator[Step]:
        w = s.writers[i]
        if not w.suspended_at:
            yield Step(f"{name} finds its heartbeat in time", _set(s, i, at="saved"))
        elif ("O" if w.refers else name) in s.chunks:
            words = f"{name} finds its heartbeat late; the outcome is unknown"
            yield Step(words, _set(s, i, at="unknown"))
        else:
            after = "take_back" if self.keeps("take back") else "failed"
            words = f"{name} finds its heartbeat late, and its chunk gone"
            yield Step(words, _set(s, i, at=after))

    def _take_back(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _set(s._replace(listed=s.listed - {name}), i, at="failed")
        yield Step(f"{name} deletes its manifest", now)

    def _deleter(self, s: State) -> Iterator[Step]:
        name = s.deletes
        if s.deleter == "idle" and name in s.listed:
            listed = s.listed - {name}
            if not self.keeps("manifest first"):
                now = s._replace(chunks=s.chunks - {name})
                yield Step(f"a deleter deletes @{name}/", now._replace(deleter="late"))
            else:
                after = "W" if self.scene == "two" and name == "O" else ""
                now = s._replace(listed=listed, deletes=after)
                yield Step(f"a deleter deletes the manifest of {name}", now)
        elif s.deleter == "late":
            now = s._replace(listed=s.listed - {name}, deleter="done")
            yield Step("it deletes the manifest", now)

    def _marks(self, s: State, of: str) -> Iterator[tuple[bool, str]]:
        """Whether something refers to the chunk of a prefix, by the lists."""
        known = fresh = of in s.listed
        for name, w in zip(NAMES, s.writers, strict=True):
            refers = name == of or w.refers and of == "O"
            is_alive = w.at not in ENDED and not (w.is_dead or w.is_suspended)
            by_pin = is_alive and w.has_pin and self.keeps("mark pins")
            by_manifest = name in s.listed and self.keeps("mark manifests")
            if refers and (by_pin or by_manifest):
                fresh = True
                known = known or name not in s.fresh
        yield fresh, "something refers to it" if fresh else "nothing refers to it"
        if fresh and not known:
            yield False, "nothing refers to it, says a list that lags"

    def _sweeper(self, s: State) -> Iterator[Step]:
        does, of = s.sweeper
        if does == "idle":
            for of in sorted(s.chunks):
                for is_marked, words in self._marks(s, of):
                    if not is_marked:
                        after = "wait" if self.keeps("grace") else "delete"
                        words = f"a sweeper looks at @{of}/: {words}"
                        yield Step(words, s._replace(sweeper=(after, of)))
        elif does == "wait":
            after = "mark" if self.keeps("mark after") else "delete"
            now = s._replace(fresh=frozenset(), sweeper=(after, of))
            yield Step("ten minutes pass", now)
        elif does == "mark":
            for is_marked, words in self._marks(s, of):
                after = ("idle", "") if is_marked else ("delete", of)
                yield Step(f"it looks again: {words}", s._replace(sweeper=after))
        elif does == "delete":
            now = s._replace(chunks=s.chunks - {of}, sweeper=("idle", ""))
            yield Step(f"it deletes @{of}/", now)

    def problem(self, s: State) -> str:
        if "O" in s.listed and "O" not in s.chunks:
            return "O is listed, and its chunk is gone."
        for name, w in zip(NAMES, s.writers, strict=True):
            of = "O" if w.refers else name
            if name in s.listed and of not in s.chunks:
                late = w.suspended_at not in ("", *BEFORE) and w.at != "saved"
                if not late or w.at == "failed":
                    return f"{name} is listed, and the chunk of {of} is gone."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        quiet = s._replace(
            suspensions=0, deaths=0, sweeper=("stopped", ""), deleter="stopped"
        )
        for i, name in enumerate(NAMES):
            if not s.writers[i].is_dead and s.writers[i].at not in ENDED:
                yield name, _set(quiet, 1 - i, is_dead=True)

    def has_ended(self, actor: str, s: State) -> bool:
        return s.writers[NAMES.index(actor)].at in ENDED


BEFORE = ("base", "pin", "look_again", "write", "check")


def _set(s: State, i: int, **changes: object) -> State:
    writers = [*s.writers]
    writers[i] = writers[i]._replace(**changes)
    return s._replace(writers=tuple(writers))
