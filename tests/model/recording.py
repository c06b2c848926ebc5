"""A recording in a bucket: its lease, the take-over of its record, and its chunks.

Beside the code: `_storage/bucket/bucket_writer.py` and
`recording/_writing/_recording_place.py`. A and B each want to append one chunk and
commit it. In a directory a lock takes the place of all of this, which the kernel
releases.

A writer can be suspended for longer than its lease, once, at any step. A request can
land after its writer was suspended or has died.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


# Who finds its place taken says so; whether its commit came first, the record says.
ENDED = {"committed", "refused", "taken"}


class Writer(NamedTuple):
    at: str = "lease"
    seen: tuple[str, ...] | str = ""  # What it read, whose version is its condition.
    chunk: str = ""  # Of the key that it writes next: the version that it knows.
    is_suspended: bool = False
    is_dead: bool = False


class State(NamedTuple):
    lease: str = ""
    # The record: who wrote it, and whose chunks it names.
    record: tuple[str, ...] = ("O",)
    # Whose bytes each key has.
    chunks: tuple[str, str] = ("", "")
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    committed: tuple[str, ...] = ()  # The chunks that a writer was told are safe.
    late: tuple[str, int, str] | None = None
    suspensions: int = 1
    deaths: int = 1
    lost: int = 1
    problem: str = ""


class Recording(Model):
    name = "Recording with its lease"
    scenes = {"two": "A and B record to one place", "one": "A alone"}
    guards = {
        "lease": (
            "two",
            "a writer that sees the lease change gives up before it writes",
        ),
        "take over": ("two", "a new writer replaces the record before it writes"),
        "condition of the record": (
            "two",
            "a record replaces only the version that was read",
        ),
        "condition of a chunk": (
            "two",
            "a chunk replaces only the version that was known",
        ),
        "compare": ("one", "what is there after a refusal is compared with one's own"),
        "ask again": (
            "two",
            "before a writer writes over a chunk, it asks for the lease",
        ),
        "delete nothing": ("two", "nothing is deleted: the next writer writes over it"),
    }

    def start(self) -> State:
        writers = (Writer(), Writer(is_dead=self.scene == "one"))
        # What a dead writer left after its last commit.
        return State(chunks=("O", ""), writers=writers)

    def steps(self, s: State) -> Iterator[Step]:
        for i, name in enumerate("AB"):
            w = s.writers[i]
            if w.is_dead:
                continue
            if w.at in ENDED:
                if s.lease == name:
                    yield Step(f"{name} gives the lease back", s._replace(lease=""))
                continue
            if w.is_suspended:
                yield Step(f"{name} continues", _set(s, i, is_suspended=False))
                continue
            if s.suspensions:
                words = f"{name} is suspended for longer than its lease"
                now = _set(s, i, is_suspended=True)
                yield Step(words, now._replace(suspensions=0))
            if s.deaths:
                yield Step(f"{name} dies", _set(s, i, is_dead=True)._replace(deaths=0))
            yield from getattr(self, f"_{w.at}")(s, i, name)
            if s.lease != name and w.at not in ("lease", "compare_record"):
                yield Step(f"{name} finds the lease taken", _set(s, i, at="refused"))
        if s.late:
            yield from self._lands(s)

    def _lease(self, s: State, i: int, name: str) -> Iterator[Step]:
        """Watch the lease for as long as it may be silent, and take it."""
        other = s.writers[1 - i]
        lives = not (other.is_suspended or other.is_dead or other.at in ENDED)
        beats = s.lease == "BA"[i] and lives
        if beats and self.keeps("lease"):
            yield Step(f"{name} sees the lease change", _set(s, i, at="refused"))
        else:
            now = _set(s._replace(lease=name), i, at="look")
            yield Step(f"{name} takes the lease", now)

    def _look(self, s: State, i: int, name: str) -> Iterator[Step]:
        after = "take" if self.keeps("take over") else "trim"
        yield Step(f"{name} reads the record", _set(s, i, at=after, seen=s.record))

    def _take(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.record != s.writers[i].seen and self.keeps("condition of the record"):
            yield Step(f"{name} finds another record", _set(s, i, at="refused"))
        else:
            record = (name, *s.writers[i].seen[1:])
            now = _set(s._replace(record=record), i, at="trim", seen=record)
            yield Step(f"{name} replaces the record by its own", now)

    def _trim(self, s: State, i: int, name: str) -> Iterator[Step]:
        """What came after the last commit: write over it, later, or delete it."""
        position = len(s.writers[i].seen) - 1
        if self.keeps("delete nothing"):
            found = s.chunks[position]
            after = "ask" if found and self.keeps("ask again") else "write"
            now = _set(s, i, at=after, chunk=found)
            yield Step(f"{name} lists what came after the last commit", now)
        elif s.lease == name:
            yield Step(f"{name} finds the lease its own", _set(s, i, at="delete"))

    def _delete(self, s: State, i: int, name: str) -> Iterator[Step]:
        now = _put(s, len(s.writers[i].seen) - 1, "")
        words = f"{name} deletes what came after the last commit"
        yield Step(words, _set(now, i, at="write", chunk=""))

    def _write(self, s: State, i: int, name: str) -> Iterator[Step]:
        position, known = len(s.writers[i].seen) - 1, s.writers[i].chunk
        if s.chunks[position] == known or not self.keeps("condition of a chunk"):
            now = _set(_put(s, position, name), i, at="commit")
            yield Step(f"{name} puts chunk {position}: done", now)
            if s.lost:
                words = f"{name} puts chunk {position}: done, and the answer is lost"
                yield Step(words, _set(now, i, at="compare_chunk")._replace(lost=0))
        else:
            now = _set(s, i, at="compare_chunk")
            yield Step(f"{name} puts chunk {position}: 412", now)
        if s.lost:
            words = (
                f"{name} puts chunk {position}: no answer, the request is on its way"
            )
            now = _set(s, i, at="compare_chunk")
            yield Step(words, now._replace(late=(name, position, known), lost=0))

    def _compare_chunk(self, s: State, i: int, name: str) -> Iterator[Step]:
        found = s.chunks[len(s.writers[i].seen) - 1]
        if found == name and self.keeps("compare"):
            yield Step(f"{name} finds its own chunk", _set(s, i, at="commit"))
        elif not self.keeps("compare"):
            yield Step(f"{name} gives up", _set(s, i, at="taken"))
        else:
            after = "ask" if self.keeps("ask again") else "write"
            words = f"{name} finds another chunk, and its version"
            yield Step(words, _set(s, i, at=after, chunk=found))

    def _ask(self, s: State, i: int, name: str) -> Iterator[Step]:
        if s.lease == name:
            yield Step(f"{name} finds the lease its own", _set(s, i, at="write"))

    def _commit(self, s: State, i: int, name: str) -> Iterator[Step]:
        seen = s.writers[i].seen
        if s.record != seen and self.keeps("condition of the record"):
            yield Step(f"{name} commits: 412", _set(s, i, at="compare_record"))
            return
        record = (name, *seen[1:], name)
        now = s._replace(record=record)
        yield Step(f"{name} commits: done", _told(now, i, record))
        if s.lost:
            words = f"{name} commits: done, and the answer is lost"
            yield Step(words, _set(now, i, at="compare_record")._replace(lost=0))

    def _compare_record(self, s: State, i: int, name: str) -> Iterator[Step]:
        record = (name, *s.writers[i].seen[1:], name)
        if s.record == record and self.keeps("compare"):
            yield Step(f"{name} finds its own record", _told(s, i, record))
        else:
            yield Step(f"{name} finds another record", _set(s, i, at="taken"))

    def _lands(self, s: State) -> Iterator[Step]:
        assert s.late is not None
        name, position, known = s.late
        gone = s._replace(late=None)
        if s.chunks[position] == known or not self.keeps("condition of a chunk"):
            words = f"the late chunk {position} of {name} lands"
            yield Step(words, _put(gone, position, name))
        yield Step("the late chunk is lost, or refused", gone)

    def problem(self, s: State) -> str:
        for position, owner in enumerate(s.record[1:]):
            if s.chunks[position] != owner:
                found = s.chunks[position] or "nothing"
                return f"The record names a chunk of {owner}, and there is {found}."
        if s.record[1 : len(s.committed) + 1] != s.committed:
            return "A committed chunk is no longer in the record."
        for name, w in zip("AB", s.writers, strict=True):
            if w.at == "taken" and self.scene == "one":
                return f"{name} was told of another writer, and there is none."
            if w.at == "refused" and name in s.record[1:]:
                return f"{name} was told that it has not committed, and it has."
            beats = w.at in ("write", "commit") and not (w.is_suspended or w.is_dead)
            other = s.writers["BA".index(name)]
            both = beats and other.at in ("write", "commit") and not other.is_dead
            if both and not other.is_suspended and s.suspensions:
                return "Two writers write, although the lease of neither lapsed."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        quiet = s._replace(suspensions=0, deaths=0, lost=0, late=None)
        for i, name in enumerate("AB"):
            if not s.writers[i].is_dead and s.writers[i].at not in ENDED:
                yield name, _set(quiet, 1 - i, is_dead=True)

    def has_ended(self, actor: str, s: State) -> bool:
        return s.writers["AB".index(actor)].at in ENDED


def _set(s: State, i: int, **changes: object) -> State:
    writers = [*s.writers]
    writers[i] = writers[i]._replace(**changes)
    return s._replace(writers=tuple(writers))


def _put(s: State, position: int, owner: str) -> State:
    chunks = [*s.chunks]
    chunks[position] = owner
    return s._replace(chunks=tuple(chunks))


def _told(s: State, i: int, record: tuple[str, ...]) -> State:
    return _set(s._replace(committed=record[1:]), i, at="committed")
