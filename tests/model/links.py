"""Steps of a directory that share equal files by hard links, and their deletion.

O is a committed step with one file. W saves a step whose file has the same bytes, and
links it. Meanwhile a deleter removes O, X saves another content over O, and the disk
may damage the file, at any moment.

After a power cut, names that were not flushed are gone. How a directory is committed is
in `directory.py`; here that is one step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Model, Step


SAME, OTHER, DAMAGED, GONE = "the same", "other bytes", "damaged", ""
ENDED = {"saved"}


class State(NamedTuple):
    # The file that each name leads to, O's and W's; 0: there is none.
    old: int = 1
    new: int = 0
    bytes_of: tuple[str, ...] = (GONE, SAME, GONE, GONE)
    is_flushed: bool = False
    is_listed: bool = False
    at: str = "link"
    writer_is_dead: bool = False
    deleter: str = "idle"
    other: str = "idle"
    damages: int = 1
    deaths: int = 1
    cuts: int = 1


class Links(Model):
    name = "Links in a directory"
    scenes = {"all": "W links to O; a deleter of O, X that overwrites O, a bad disk"}
    guards = {
        "link or write": ("all", "a file that cannot be linked is written"),
        "compare": ("all", "the bytes are compared by the new name, after the link"),
        "flush": ("all", "links are flushed before the commit, as files are"),
        "a new file": ("all", "no file of a step is ever opened for writing again"),
        "unlink": ("all", "a deletion removes names, and truncates nothing"),
    }

    def start(self) -> State:
        return State()

    def steps(self, s: State) -> Iterator[Step]:
        if s.at not in ENDED and not s.writer_is_dead:
            yield from getattr(self, f"_{s.at}")(s)
            if s.deaths:
                yield Step("W dies", s._replace(writer_is_dead=True, deaths=0))
        if s.deleter == "idle" and s.old:
            now = s._replace(old=0, deleter="done")
            if not self.keeps("unlink"):
                now = _fill(now, s.old, GONE)
            yield Step("a deleter removes O's files", now)
        yield from self._other(s)
        if s.damages and s.bytes_of[1] == SAME and not s.new:
            yield Step("the disk damages O's file", _fill(s, 1, DAMAGED, damages=0))
        if s.cuts:
            now = s._replace(cuts=0, deaths=0, damages=0, deleter="done", other="done")
            now = now._replace(writer_is_dead=s.at not in ENDED)
            if not s.is_flushed:
                now = now._replace(new=0)
            yield Step("a power cut", now)

    def _other(self, s: State) -> Iterator[Step]:
        if s.other == "idle" and s.old:
            if self.keeps("a new file"):
                now = _fill(s, 2, OTHER, old=2, other="done")
                yield Step("X puts a new file at O's name", now)
            else:
                now = _fill(s, s.old, OTHER, other="done")
                yield Step("X writes into O's file", now)

    def _link(self, s: State) -> Iterator[Step]:
        after = "again" if self.keeps("compare") else "flush"
        if s.old:
            yield Step("W links O's file", s._replace(new=s.old, at=after))
        elif self.keeps("link or write"):
            yield Step("W finds nothing to link", s._replace(at="write"))
        else:
            yield Step("W finds nothing to link", s._replace(at="flush"))

    def _again(self, s: State) -> Iterator[Step]:
        if s.bytes_of[s.new] == SAME:
            yield Step("W finds the linked file equal", s._replace(at="flush"))
        else:
            words = "W finds the linked file different, and removes the link"
            yield Step(words, s._replace(new=0, at="write"))

    def _write(self, s: State) -> Iterator[Step]:
        yield Step("W writes a file", _fill(s, 3, SAME, new=3, at="flush"))

    def _flush(self, s: State) -> Iterator[Step]:
        if self.keeps("flush"):
            now = s._replace(is_flushed=True, at="commit")
            yield Step("W flushes", now)
        else:
            yield Step("W does not flush", s._replace(at="commit"))

    def _commit(self, s: State) -> Iterator[Step]:
        now = s._replace(is_listed=True, at="saved")
        yield Step("W commits", now)

    def problem(self, s: State) -> str:
        if s.is_listed and s.bytes_of[s.new] != SAME:
            found = s.bytes_of[s.new] or "gone"
            return f"W is listed, and its file is {found}."
        return ""

    def alone(self, s: State) -> Iterator[tuple[str, State]]:
        if s.at not in ENDED and not s.writer_is_dead:
            quiet = s._replace(
                deleter="done", other="done", damages=0, deaths=0, cuts=0
            )
            yield "W", quiet

    def has_ended(self, actor: str, s: State) -> bool:
        return s.at in ENDED


def _fill(s: State, file: int, content: str, **changes: object) -> State:
    """The bytes of a file, by whatever name, are these from now on."""
    bytes_of = [*s.bytes_of]
    bytes_of[file] = content
    return s._replace(bytes_of=tuple(bytes_of), **changes)
