"""Where a step of a run comes from: its sessions, and the processes of a job."""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


# A manifest names the last ones. Each takes up to 120 bytes.
MOST_SESSIONS = 32


_FIELDS = ["run", "step", "earlier", "sessions"]


# Only of a run that was forked, and only of a run that was given a config.
_FORKED, _CONFIG = "forked", "config"


_RUN = re.compile(r"[0-9a-f]{32}")


_SESSION = re.compile(r"[0-9a-f]{16}")


_CONFIG_ID = _RUN


_DIGEST = re.compile(r"[0-9a-f]{64}")


_TOO_LARGE = 2**63


class Session(NamedTuple):
    """What one manager has saved, from one restore to the next.

    **Attributes:**

    - `id`: 16 hexadecimal digits, drawn at random.
    - `step`: the step that its manager restored, and that it goes on from. `None` if
        it restored none: the state is new, or comes from elsewhere.
    - `digest`: that of the manifest of this step, 64 hexadecimal digits, or `None`.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("run") as manager:
            manager.save(1, {"step": 1})
        with eqx_ckpt.CheckpointManager("run") as manager:
            manager.restore({"step": 0})
            manager.save(2, {"step": 2}).result()
            session = manager.read_manifest(2).history.sessions[-1]
        assert session.step == 1
        ```
    """

    id: str
    step: int | None = None
    digest: str | None = None


class Fork(NamedTuple):
    """The step of another run that a run began with.

    **Attributes:**

    - `run`: the id of that run, 32 hexadecimal digits; `None` if the step had no
        history.
    - `step`: the number with which that step was saved.
    - `digest`: that of the manifest of that step, 64 hexadecimal digits.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("run") as manager:
            manager.save(1, {"step": 1}).result()
            manager.fork("other")
        manifest = eqx_ckpt.inspect.read_manifest("run/000001")
        with eqx_ckpt.CheckpointManager("other") as manager:
            manager.restore({"step": 0})
            manager.save(2, {"step": 2}).result()
            forked = manager.read_manifest(2).history.forked
        assert (forked.run, forked.step) == (manifest.history.run, 1)
        ```
    """

    run: str | None
    step: int
    digest: str


@dataclass(frozen=True)
class History:
    """The run of a step, and the sessions that have led to it.

    **Attributes:**

    - `run`: the id of the run, 32 hexadecimal digits, made with its first step.
    - `step`: the number with which the step was saved, whatever its name is now.
    - `sessions`: the last ones, at most 32. The last [`eqx_ckpt.inspect.Session`][] has
        saved this step.
    - `earlier`: how many sessions came before these.
    - `forked`: where the run comes from, an [`eqx_ckpt.inspect.Fork`][], if
        [`eqx_ckpt.CheckpointManager.fork`][] has made it; otherwise `None`.
    - `config`: the id of the `config` of the training that saved the step, 32
        hexadecimal digits; `None` if no session was given one.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("run") as manager:
            manager.save(1, {"step": 1}).result()
            history = manager.read_manifest(1).history
        assert (history.step, len(history.run)) == (1, 32)
        ```
    """

    run: str
    step: int
    sessions: tuple[Session, ...]
    earlier: int = 0
    forked: Fork | None = None
    config: str | None = None


class Part(NamedTuple):
    """Which part of a step it is, if each process of a job has its own disk.

    **Attributes:**

    - `id`: 32 hexadecimal digits; the parts of one step have the same.
    - `process`, `processes`: which process has saved this part, and of how many.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("disk/0", shared=False) as manager:
            manager.save(1, {"step": 1})
        part = eqx_ckpt.inspect.read_manifest("disk/0/000001").part
        assert (part.process, part.processes) == (0, 1)
        ```
    """

    id: str
    process: int
    processes: int

    def __str__(self) -> str:
        return f"part {self.process} of {self.processes} of a step"


def part_from_json(value: Any) -> Part:
    """The part that a manifest states; `ValueError` if there can be none like it."""
    if type(value) is not list or len(value) != len(Part._fields):
        raise ValueError("its part is malformed")
    id, process, processes = value
    is_one = _is(_RUN, id) and _is_number(process) and _is_number(processes)
    if not is_one or process >= processes:
        raise ValueError("its part is malformed")
    return Part(id, process, processes)


def continued(history: History, session: Session) -> History:
    """A history, and a session that goes on from its step."""
    sessions = (*history.sessions, session)
    kept = sessions[-MOST_SESSIONS:]
    earlier = history.earlier + len(sessions) - len(kept)
    return replace(history, sessions=kept, earlier=earlier)


def last_sessions(history: History, count: int) -> History:
    """The history of the same step that names only its last sessions."""
    before = max(len(history.sessions) - count, 0)
    sessions = history.sessions[before:]
    return replace(history, sessions=sessions, earlier=history.earlier + before)


def forked(history: History | None, run: str, step: int, session: Session) -> History:
    """The history of the first step of a run that begins with a step of another one.

    `session` goes on from that step, whose history is the other one.
    """
    assert session.step is not None
    assert session.digest is not None
    fork = Fork(history and history.run, session.step, session.digest)
    before = History(run, step, (session,))
    if history is not None:
        before = continued(replace(history, run=run, step=step), session)
    return replace(before, forked=fork)


def history_to_json(history: History) -> dict[str, Any]:
    values = (history.run, history.step, history.earlier, history.sessions)
    found: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    optional = {_FORKED: history.forked, _CONFIG: history.config}
    return found | {name: value for name, value in optional.items() if value}


def history_from_json(value: Any) -> History:
    """The history that a manifest states; `ValueError` if there can be none like it."""
    if type(value) is not dict or value.keys() - {_FORKED, _CONFIG} != {*_FIELDS}:
        raise ValueError(f"its history has not the fields {', '.join(_FIELDS)}")
    run, step, earlier, listed = [value[name] for name in _FIELDS]
    if type(listed) is not list or not 0 < len(listed) <= MOST_SESSIONS:
        raise ValueError(f"its history has not one to {MOST_SESSIONS} sessions")
    if not (_is(_RUN, run) and _is_number(step) and _is_number(earlier)):
        raise ValueError("the run, or a number, of its history is not one")
    for i, session in enumerate(listed):
        if type(session) is not list or len(session) != len(Session._fields):
            raise ValueError(f"session {i} of its history is not one")
        is_new = session[1:] == [None, None] and i == earlier == 0
        is_known = is_new or (_is_number(session[1]) and _is(_DIGEST, session[2]))
        if not (_is(_SESSION, session[0]) and is_known):
            raise ValueError(f"session {i} of its history is not one")
    if len({session[0] for session in listed}) < len(listed):
        raise ValueError("its history names itself: it has a session twice")
    sessions = tuple([Session(*session) for session in listed])
    fork = _fork_from_json(value[_FORKED]) if _FORKED in value else None
    config = value.get(_CONFIG)
    if _CONFIG in value and not _is(_CONFIG_ID, config):
        raise ValueError("the config of its history is malformed")
    return History(run, step, sessions, earlier, fork, config)


def _fork_from_json(value: Any) -> Fork:
    if type(value) is list and len(value) == len(Fork._fields):
        run, step, digest = value
        if (
            (run is None or _is(_RUN, run))
            and _is_number(step)
            and _is(_DIGEST, digest)
        ):
            return Fork(run, step, digest)
    raise ValueError("what its run was forked from is malformed")


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return type(value) is str and pattern.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _TOO_LARGE
