"""The commit of a checkpoint in a bucket: conditions, heartbeats, and the sweep.

Beside the code: in `_storage/bucket`, `bucket_attempt.py` and `publication.py` (A and
B), `bucket_steps.py` (the sweeper, the deleter) and `heartbeat.py`; and
`_sources/consistent_read.py`. A and B save the same step. "O" is what was committed
there before, with `overwrite=True`; without, there is an older step 1, which retention
removes once step 2 is there. A process that gives up a request and sends another one is
sure of the first: it has landed by then, or never will.

Time is one thing only: a writer can be *suspended for longer than any lease*, once, at
any moment. A sweeper sees the silence of a writer that is suspended, dead or done.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


OLD = "O"
BEFORE = ("begin", "write", "check")
ENDED = {"saved", "refused", "failed", "unknown"}


class Writer(NamedTuple):
    at: str = "begin"
    old: str = ""  # The manifest that it read, whose version is its condition.
    is_suspended: bool = False
    suspended_at: str = ""
    is_dead: bool = False
    is_sent: bool = False  # Its manifest is on the way, and may land after its death.
    # A request had no answer: it does not know whether it has landed, or will.
    is_unanswered: bool = False


class State(NamedTuple):
    manifest: str
    data: frozenset[str]  # The attempts whose chunks are all there.
    step_1: bool
    writers: tuple[Writer, Writer]
    # The sweeper: what it does, about which prefix, and what it has seen so far.
    sweeper: tuple[str, str, bool] = ("idle", "", False)
    reader: tuple[str, str] = ("idle", "")
    deleter: tuple[str, str] = ("idle", "")
    # What was committed, and neither replaced nor deleted since.
    good: str = ""
    # Faults that are left: lost answers, wrong 404s, suspensions, deaths.
    faults: tuple[int, int, int, int] = (1, 1, 1, 1)


LOST, WRONG, SUSPENDED, DEATHS = range(4)


class Bucket(Model):
    name = "Commit in a bucket"
    scenes = {
        "create": "A and B create one step; retention, a sweeper, a reader",
        "overwrite": "A and B overwrite one step; a sweeper, a reader",
        "delete": "A overwrites a step; a deleter, a sweeper, a reader",
        "alone": "A creates a step; retention, a sweeper, a reader",
        "at once": "A creates a step; a deleter, a sweeper, a reader",
    }
    guards = {
        "condition": (
            "delete",
            "the manifest is written on the condition of the version read",
        ),
        "compare": (
            "alone",
            "after a refusal, the manifest there is compared with one's own",
        ),
        "check before": (
            "alone",
            "the heartbeat is checked before the manifest is written",
        ),
        "check after": (
            "alone",
            "it is checked again before anything is acknowledged or removed",
        ),
        "look again": (
            "at once",
            "who had no answer looks for its data, too: both may have been deleted",
        ),
        "take back": ("alone", "a manifest whose data were swept is taken back"),
        "two answers of a writer": (
            "delete",
            "a writer that finds no manifest believes that if a listing agrees",
        ),
        "two answers": ("alone", "a sweeper deletes nothing that its list contradicts"),
        "ask": ("alone", "a sweeper asks for the manifest before it deletes"),
        "grace": (
            "alone",
            "a sweeper waits until an attempt has been silent for ten minutes",
        ),
        "keep beside damage": (
            "delete",
            "nothing is swept beside a manifest whose data are gone",
        ),
        "data in flight stay": ("alone", "data stay if the manifest may still arrive"),
        "manifest first": ("delete", "a deletion begins with the manifest"),
        "mark": (
            "alone",
            "a sweeper marks what it deletes before it asks; a late writer looks",
        ),
        "mark of a deleter": (
            "at once",
            "so does a deleter, before it looks for a manifest that came again",
        ),
        "identity": ("alone", "a reader compares the manifest before and after"),
    }

    def start(self) -> State:
        first, second = Writer(), Writer()
        if self.scene in ("delete", "alone", "at once"):
            second = Writer("failed", is_dead=True)
        if not self.overwrites:
            has_older = self.scene != "at once"
            return State("", frozenset(), has_older, (first, second))
        return State(OLD, frozenset(OLD), False, (first, second), good=OLD)

    @property
    def overwrites(self) -> bool:
        return self.scene in ("overwrite", "delete")

    def steps(self, s: State) -> Iterator[Step]:
        for i, name in enumerate("AB"):
            w = s.writers[i]
            if w.is_sent:
                yield from self._lands(s, i, name)
            if w.is_dead or w.at in ENDED:
                continue
            if w.is_suspended:
                now = _set(s, i, is_suspended=False)
                yield Step(f"{name} continues", now)
                continue
            if s.faults[SUSPENDED] and not w.suspended_at:
                now = _set(s, i, is_suspended=True, suspended_at=w.at)
                words = f"{name} is suspended for longer than any lease"
                yield Step(words, _without(now, SUSPENDED))
            if s.faults[DEATHS]:
                yield Step(f"{name} dies", _without(_set(s, i, is_dead=True), DEATHS))
            yield from getattr(self, f"_{w.at}")(s, i, name)
        yield from self._sweeper(s)
        yield from self._reader(s)
        if self.scene in ("delete", "at once"):
            yield from self._deleter(s)

    # A writer.

    def _begin(self, state: State, i: int, name: str) -> Iterator[Step]:
        for found, how, s in _get(state):
            words = f"{name} reads the manifest: {how}"
            if found and not self.overwrites:
                yield Step(f"{words}; it raises", _set(s, i, at="refused"))
            else:
                yield Step(words, _set(s, i, at="write", old=found))

    def _write(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = _set(s._replace(data=s.data | {name}), i, at="check")
        yield Step(f"{name} writes its chunks below @{name}/", after)

    def _check(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.writers[i].suspended_at and self.keeps("check before"):
            yield Step(f"{name} finds its heartbeat late", _set(s, i, at="clean"))
        else:
            yield Step(f"{name} finds its heartbeat in time", _set(s, i, at="put"))

    def _put(self, s: State, i: int, name: str) -> Iterator[Step]:
        s = _set(s, i, is_sent=False)
        w = s.writers[i]
        if s.manifest == w.old or not self.keeps("condition"):
            after = _replaced(s, i, name)
            # The store has it; whether the answer arrives is another matter.
            yield Step(f"{name} puts its manifest: done", _set(after, i, at="look"))
            if s.faults[LOST]:
                words = f"{name} puts its manifest: done, and the answer is lost"
                after = _set(after, i, at="compare", is_unanswered=True)
                yield Step(words, _without(after, LOST))
        else:
            yield Step(f"{name} puts its manifest: 412", _set(s, i, at="compare"))
        if s.faults[LOST]:
            words = f"{name} puts its manifest: no answer, the request is on its way"
            after = _set(s, i, at="compare", is_sent=True, is_unanswered=True)
            yield Step(words, _without(after, LOST))

    def _lands(self, s: State, i: int, name: str) -> Iterator[Step]:
        # A request lands within the grace, or never.
        landed = _set(s, i, is_sent=False)
        if s.manifest == s.writers[i].old or not self.keeps("condition"):
            after = _replaced(landed, i, name)
            yield Step(f"the late manifest of {name} lands", after)
        yield Step(f"the late manifest of {name} is lost, or refused", landed)

    def _compare(self, state: State, i: int, name: str) -> Iterator[Step]:
        w = state.writers[i]
        if not self.keeps("compare"):
            yield Step(f"{name} was refused: it raises", _set(state, i, at="clean"))
            return
        for found, how, s in _get(state):
            words = f"{name} reads the manifest: {how}"
            if found == name:
                yield Step(f"{words}, its own", _set(s, i, at="look"))
            elif found and found != w.old:
                stays = w.is_unanswered and self.keeps("data in flight stay")
                words += ", another one's; it raises" + ", and cleans nothing" * stays
                yield Step(words, _set(s, i, at="refused" if stays else "clean"))
            elif found != w.old and not self.keeps("two answers of a writer"):
                words += "; so somebody removed it, it concludes"
                yield Step(words, _set(s, i, at="clean"))
            elif found != w.old and not s.manifest:
                stays = w.is_unanswered and self.keeps("data in flight stay")
                words += (
                    ", and a listing agrees: it raises" + ", and cleans nothing" * stays
                )
                yield Step(words, _set(s, i, at="refused" if stays else "clean"))
            elif w.is_unanswered and not self.keeps("data in flight stay"):
                yield Step(f"{words}; it raises", _set(s, i, at="clean"))
            else:
                yield Step(f"{words}; it tries again", _set(s, i, at="put"))
                if w.is_unanswered:
                    words += "; it gives up, and the outcome is unknown"
                    yield Step(words, _set(s, i, at="unknown"))

    def _look(self, s: State, i: int, name: str) -> Iterator[Step]:
        """Its manifest is there. Were its data, all the time?"""
        w = s.writers[i]
        had_no_answer = w.is_unanswered and self.keeps("look again")
        if not (w.suspended_at or had_no_answer) or not self.keeps("check after"):
            words = f"{name} has saved"
        elif name not in s.data:
            at = "take_back" if self.keeps("take back") else "failed"
            yield Step(f"{name} finds its data gone", _set(s, i, at=at))
            return
        elif self._is_marked(s, name):
            words = (
                f"{name} finds that its data are being deleted: the outcome is unknown"
            )
            yield Step(words, _set(s, i, at="unknown"))
            return
        else:
            words = f"{name} finds its data there: it has saved"
        good = name if s.manifest == name else s.good
        yield Step(words, _set(s._replace(good=good), i, at="tidy"))

    def _is_marked(self, s: State, prefix: str) -> bool:
        at, of, _ = s.sweeper
        is_swept = at in ("ask", "delete") and of == prefix and self.keeps("mark")
        at, of = s.deleter
        is_deleted = at in ("look", "data") and of == prefix
        return is_swept or is_deleted and self.keeps("mark of a deleter")

    def _take_back(self, s: State, i: int, name: str) -> Iterator[Step]:
        old = s.writers[i].old
        old = old if old in s.data else ""
        is_open = s.writers[i].is_unanswered
        after = _set(s, i, at="unknown" if is_open else "failed")
        if s.manifest == name:
            words = f"{name} takes its manifest back, and puts what was there before"
            yield Step(words, after._replace(manifest=old))
        else:
            yield Step(f"{name} finds its manifest replaced", after)

    def _tidy(self, s: State, i: int, name: str) -> Iterator[Step]:
        old = s.writers[i].old
        after = _set(s, i, at="saved")
        if self.overwrites:
            after = after._replace(data=s.data - {old})
            yield Step(f"{name} deletes the data of what it replaced", after)
        else:
            yield Step(f"{name} removes step 1", after._replace(step_1=False))

    def _clean(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = _set(s._replace(data=s.data - {name}), i, at="failed")
        yield Step(f"{name} deletes its chunks, and raises", after)

    # The others.

    def _is_silent(self, s: State, prefix: str) -> bool:
        """Whether nothing has changed below a prefix for ten minutes."""
        if not self.keeps("grace"):
            return True
        if prefix == OLD:
            return True
        w = s.writers["AB".index(prefix)]
        return (w.is_suspended or w.is_dead or w.at in ENDED) and not w.is_sent

    def _grace_passes(self, s: State) -> bool:
        """Whether ten minutes may pass: nobody is in the middle of a few requests."""
        return not any(
            w.at in ("look", "take_back", "tidy", "compare", "clean")
            and not (w.is_suspended or w.is_dead)
            for w in s.writers
        )

    def _sweeper(self, s: State) -> Iterator[Step]:
        at, prefix, listed = s.sweeper
        if at == "idle":
            for prefix in sorted(s.data):
                if s.manifest == prefix:
                    continue
                now = s._replace(sweeper=("unreferenced", prefix, False))
                yield Step(f"a sweeper sees @{prefix}/, which no manifest names", now)
        elif at == "unreferenced":
            if self._is_silent(s, prefix) and self._grace_passes(s):
                listed = bool(s.manifest)
                words = f"it sees @{prefix}/ unchanged for ten minutes"
                if not self.keeps("grace"):
                    words = f"it lists @{prefix}/ again"
                yield Step(words, s._replace(sweeper=("ask", prefix, listed)))
        elif at == "ask":
            yield from self._ask(s, prefix, listed)
        elif at == "delete":
            after = s._replace(data=s.data - {prefix}, sweeper=("idle", "", False))
            yield Step(f"it deletes @{prefix}/", after)

    def _ask(self, state: State, prefix: str, listed: bool) -> Iterator[Step]:
        if not self.keeps("ask"):
            dead = state._replace(sweeper=("delete", prefix, listed))
            yield Step(f"it takes @{prefix}/ for dead", dead)
            return
        for found, how, s in _get(state):
            words = f"it reads the manifest: {how}"
            is_damaged = bool(found) and found not in s.data
            keeps = found == prefix or (is_damaged and self.keeps("keep beside damage"))
            if not found and listed and self.keeps("two answers"):
                keeps = True
            at = ("idle", "", False) if keeps else ("delete", prefix, listed)
            yield Step(words, s._replace(sweeper=at))

    def _reader(self, s: State) -> Iterator[Step]:
        at, seen = s.reader
        if at == "idle" and s.manifest:
            words = f"a reader reads the manifest of {s.manifest}"
            yield Step(words, s._replace(reader=("chunks", s.manifest)))
        elif at == "chunks" and seen in s.data:
            yield Step(
                f"it reads the chunks of {seen}", s._replace(reader=("idle", ""))
            )
        elif at == "chunks":
            yield Step("it misses a chunk", s._replace(reader=("missed", seen)))
        elif at == "missed":
            if s.manifest != seen and self.keeps("identity"):
                words = "it sees another manifest, and begins again"
                yield Step(words, s._replace(reader=("idle", "")))
            else:
                at = "damaged" if s.manifest == seen else "wrongly damaged"
                yield Step("it says: damaged", s._replace(reader=(at, seen)))

    def _deleter(self, s: State) -> Iterator[Step]:
        at, seen = s.deleter
        if at == "idle" and s.manifest:
            words = f"a deleter reads the manifest of {s.manifest}"
            first = "manifest" if self.keeps("manifest first") else "data"
            yield Step(words, s._replace(deleter=(first, s.manifest)))
        elif at == "manifest":
            after = s._replace(manifest="", good="", deleter=("look", seen))
            words = f"it deletes the manifest, and marks @{seen}/"
            yield Step(words, after)
        elif at == "look":
            at = "done" if s.manifest else "data"
            yield Step("it looks whether one is there", s._replace(deleter=(at, seen)))
        elif at == "data":
            at = "done" if self.keeps("manifest first") else "manifest"
            after = s._replace(data=s.data - {seen}, deleter=(at, seen))
            yield Step(f"it deletes @{seen}/", after)

    # What must be true.

    def problem(self, s: State) -> str:
        is_whole = s.manifest in s.data
        acknowledged = [
            name
            for name, w in zip("AB", s.writers, strict=True)
            if w.at in ("saved", "tidy")
        ]
        if s.good and not is_whole and s.good not in s.data:
            return f"What {s.good} saved is gone."
        if s.good and s.manifest != s.good and s.manifest in ("", *acknowledged):
            return f"What {s.good} saved is not there."
        if s.manifest and not is_whole:
            w = None if s.manifest == OLD else s.writers["AB".index(s.manifest)]
            # One that was suspended between its check and its manifest, or had no
            # answer, looks again; if it dies before, or the data are being deleted just
            # then, the step stays damaged.
            is_late = w is not None and (
                w.suspended_at not in ("", *BEFORE) or w.is_unanswered
            )
            if w is None or not is_late or w.at in ("saved", "tidy"):
                return "A step is listed, and its data are gone."
        has_retained = self.scene in ("create", "alone")
        if not s.step_1 and has_retained and not is_whole:
            return "Retention has removed step 1, and step 2 is not there."
        if len(acknowledged) == 2 and not self.overwrites:
            return "Two writers were told that they have saved one step."
        if s.reader[0] == "wrongly damaged":
            return "A reader calls a checkpoint damaged that was replaced or deleted."
        for name, w in zip("AB", s.writers, strict=True):
            if w.at == "failed" and s.manifest == name and not w.is_dead:
                return f"{name} was told that it has not saved, and it has."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        quiet = s._replace(
            faults=(0, 0, 0, 0),
            sweeper=("stopped", "", False),
            reader=("stopped", ""),
            deleter=("stopped", ""),
        )
        for i, name in enumerate("AB"):
            if not s.writers[i].is_dead and s.writers[i].at not in ENDED:
                yield name, _set(quiet, 1 - i, is_dead=True, is_sent=False)

    def has_ended(self, actor: str, state: State) -> bool:
        return state.writers["AB".index(actor)].at in ENDED


def _set(s: State, i: int, **changes: object) -> State:
    writers = [*s.writers]
    writers[i] = writers[i]._replace(**changes)
    return s._replace(writers=tuple(writers))


def _replaced(s: State, i: int, name: str) -> State:
    """The manifest is there: a commit, unless its writer has to look again."""
    w = s.writers[i]
    is_deleted = name not in s.data or s.deleter == ("data", name)
    is_doubtful = w.suspended_at or w.is_unanswered and is_deleted
    good = s.good if is_doubtful else name
    return s._replace(manifest=name, good=good)


def _without(s: State, fault: int) -> State:
    faults = [*s.faults]
    faults[fault] -= 1
    return s._replace(faults=tuple(faults))


def _get(s: State) -> Iterator[tuple[str, str, State]]:
    """A GET of the manifest, which one time in all is answered 404 in error."""
    yield s.manifest, f"that of {s.manifest}" if s.manifest else "404", s
    if s.manifest and s.faults[WRONG]:
        yield "", "404, which is wrong", _without(s, WRONG)
