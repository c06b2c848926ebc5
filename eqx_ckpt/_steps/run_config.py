"""The config of a run: what each session was given, in a file beside the steps.

A file never changes, and is there before the first step of its session.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.manifest import NO_DIGEST
from .._format.run_history import History
from .._format.user_metadata import exactly, pack
from .._storage.calls.threads import at_once
from .._storage.interface.committed_manifest import read_history
from .._storage.interface.place import CONFIGS, is_step_at, run_of, Storage
from .._storage.interface.sure_reads import parse_surely
from .._storage.locate import locate
from .._types import PathLike
from .run_steps import Run


logger = logging.getLogger("eqx_ckpt")


# What is raised by a file that is none of these.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


# Where one of two configs has no value.
ABSENT = object()


class _Given(NamedTuple):
    """What a session was given, and the first step that it has saved."""

    config: dict[str, Any]
    step: int


def checked_config(config: Any) -> dict[str, Any] | None:
    """Validate `config`, and return a copy."""
    if config is None:
        return None
    if type(config) is not dict:
        raise TypeError(
            f"`config` is a `{type(config).__name__}`. Pass a dictionary, such as "
            "`dataclasses.asdict(config)` or `OmegaConf.to_container(config, "
            "resolve=True)`; the default is none."
        )
    found = exactly(config, "config")
    # Other programs read it, which know the numbers of JSON alone.
    if pack(found) != found:
        raise CheckpointError(
            "`config` cannot be saved exactly: it has a NaN or an infinity, which JSON "
            "does not have. Use `None` or a string."
        )
    return found


def as_items(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a config; nested ones as `optim/lr`. A list is one value."""
    for key, value in config.items():
        path = f"{name}/{key}" if name else key
        if isinstance(value, dict) and value:
            yield from as_items(value, path)
        else:
            yield path, value


def changes(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """What differs between two configs: by name, both values, or `ABSENT`."""
    before, after = dict(as_items(old or {})), dict(as_items(new or {}))
    found = {
        name: (before.get(name, ABSENT), after.get(name, ABSENT))
        for name in (*before, *(name for name in after if name not in before))
    }
    return {
        name: (a, b) for name, (a, b) in found.items() if in_words(a) != in_words(b)
    }


def in_words(value: Any) -> str:
    """A value of a config as JSON; `-` if there is none."""
    return "-" if value is ABSENT else json.dumps(value, sort_keys=True)


class SessionConfig:
    """The config that a manager was given, for each of its sessions.

    **Attributes:**

    - `given`: the config, or `None`.
    """

    def __init__(
        self, run: Run, mirrors: Sequence[Run], given: dict[str, Any] | None
    ) -> None:
        self._run = run
        self._places = [one.place for one in (run, *mirrors)]
        self.given = given
        self._noted = ""  # The session that has it.

    def restored(self, history: History | None) -> None:
        """Warn if the step that the manager goes on from has another config."""
        if self.given is None or history is None:
            return
        try:
            before = Configs(self._places).of(history)
        except (CheckpointError, OSError) as e:
            logger.warning("The config of step %d is not known: %s", history.step, e)
            return
        found = {} if before is None else changes(before, self.given)
        if found:
            told = ", ".join(
                f"`{name}` was {in_words(a)}, and is {in_words(b)}"
                for name, (a, b) in found.items()
            )
            logger.warning(
                "From step %d on, %s has another `config`: %s. The run keeps both.",
                history.step,
                self._run.directory,
                told,
            )

    def note(self, history: History | None) -> None:
        """Write the config, unless the sessions that have led to a step had it."""
        if self.given is None or history is None:
            return
        session = history.sessions[-1].id
        if session == self._noted:
            return
        if not self._is_known(history):
            data = _to_bytes(session, self.given, history.step)
            self._run.stored.write_beside(_name(session), data)
        self._noted = session

    def _is_known(self, history: History) -> bool:
        # Where there is a mirror, another machine may have had another config since.
        if len(self._places) > 1:
            return False
        known = Configs(self._places).given(history)
        return known is not None and not changes(known.config, self.given)


def _name(session: str) -> str:
    return f"{CONFIGS}{session}.json"


def _session(name: str) -> str:
    return name.removeprefix(CONFIGS).removesuffix(".json")


def _to_bytes(session: str, config: dict[str, Any], step: int) -> bytes:
    about = {"session": session, "step": step, "digest": NO_DIGEST, "config": config}
    text = json.dumps(about, indent=1, allow_nan=False) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(NO_DIGEST, digest, 1).encode()


def _from_bytes(data: bytes, session: str) -> _Given:
    """What a session was given; `ValueError` if the file is not as it was written."""
    try:
        value = json.loads(data)
        digest = value["digest"].encode()
        own = data.replace(digest, NO_DIGEST.encode(), 1)
        is_intact = hashlib.sha256(own).hexdigest().encode() == digest
        if is_intact and value["session"] == session:
            return _Given(checked_config(value["config"]) or {}, int(value["step"]))
    except (*_MALFORMED, CheckpointError):
        pass
    raise ValueError("it is not as it was written")


def _read(place: Storage, session: str) -> _Given:
    """What a session was given, of which a file has been listed."""
    name = _name(session)

    def parse(data: bytes) -> _Given:
        try:
            return _from_bytes(data, session)
        except ValueError as e:
            raise CorruptCheckpointError(
                f"{place.url(name)!r} is damaged: {e}. Copy it from a mirror or a "
                "backup, or delete it: then the config of these steps is not known."
            ) from None

    found = parse_surely(place, name, parse)
    if found is None:
        raise CorruptCheckpointError(f"{place.url(name)!r} is gone. Try again.")
    return found[1]


class Configs:
    """What is beside the steps of a run, of which there may be several places."""

    def __init__(self, places: Sequence[Storage]) -> None:
        # By session.
        self._places = {
            _session(name): place
            for place in places
            for name in place.steps().beside(CONFIGS)
        }
        self._known: dict[str, _Given] = {}

    def of(self, history: History | None) -> dict[str, Any] | None:
        """The config of a step: what the last session was given that was given one."""
        found = self.given(history)
        if found is None and history is not None and history.earlier:
            # The first sessions of a long history are not known any more.
            end = history.sessions[0].step or 0
            every = [self._read(session) for session in self._places]
            before = [one for one in every if one.step <= end]
            found = max(before, key=lambda one: one.step, default=None)
        return None if found is None else found.config

    def given(self, history: History | None) -> _Given | None:
        """As `of`, of the sessions that the history names."""
        for session in reversed(() if history is None else history.sessions):
            if session.id in self._places:
                return self._read(session.id)
        return None

    def _read(self, session: str) -> _Given:
        if session not in self._known:
            self._known[session] = _read(self._places[session], session)
        return self._known[session]


def carry_configs(
    places: Sequence[Storage],
    there: Storage,
    done: set[str],
    is_wanted: Callable[[str], bool] = lambda session: True,
) -> None:
    """Copy the configs beside a run to another place, those but that are `done`."""
    for place in places:
        stored = place.steps()
        for name in stored.beside(CONFIGS):
            session = _session(name)
            if name in done or not is_wanted(session):
                continue
            try:
                given = _read(place, session)
            except CheckpointError as e:
                logger.warning("It stays behind: %s", e)
                continue
            _put(there, name, _to_bytes(session, *given))
            done.add(name)


def _put(there: Storage, name: str, data: bytes) -> None:
    """Write a config, unless it is there; what is there may have been cut off."""
    steps = there.steps()
    if name in steps.beside(CONFIGS):
        if steps.read_beside(name) == data:
            return
        steps.delete_beside([name])
    steps.write_beside(name, data)


def damaged_configs(run: Run) -> dict[str, str]:
    """What is wrong with the configs of a run, by path."""

    def problem(name: str) -> str:
        try:
            _read(run.place, _session(name))
        except CorruptCheckpointError as e:
            return str(e)
        return ""

    found = at_once(problem, run.stored.beside(CONFIGS))
    return {run.place.url(name): why for name, why in found.items() if why}


def read_config(path: PathLike) -> dict[str, Any] | None:
    """The `config` of a run, or of one of its steps.

    That is what the [`eqx_ckpt.CheckpointManager`][] was given that has saved the step,
    or else the one that has saved the step that it went on from, and so on.

    **Arguments:**

    - `path`: the directory or URL of a run, which stands for its newest step, or of a
        step.

    **Returns:**

    A dictionary, or `None` if there is none.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no step.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the config, or the manifest of the step, is
        damaged.

    !!! example

        ```python
        import eqx_ckpt

        config = {"optim": {"lr": 0.1}, "seed": 0}
        with eqx_ckpt.CheckpointManager("runs/a", config=config) as manager:
            manager.save(100, {"w": 1.0})
        assert eqx_ckpt.inspect.read_config("runs/a")["optim"]["lr"] == 0.1
        ```
    """
    place = locate(path)
    try:
        history = read_history(place)
    except CheckpointNotFoundError:
        run = Run(path)
        run.at_least_one()
        return Configs([run.place]).of(run.newest_history())
    return Configs([run_of(place)] if is_step_at(place) else []).of(history)


def read_config_of(runs: Sequence[Run], run: Run, step: int) -> dict[str, Any] | None:
    """As `read_config`, of a step of a run, of which there may be several places."""
    history = read_history(run.location(step))
    return Configs([one.place for one in runs]).of(history)
