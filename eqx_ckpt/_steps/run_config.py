"""The configs of a run: each in a file beside the steps, which say which one they had.

The name of a file is that of its content, so it never changes, and is the same wherever
it is copied to. It is there before the first step that has it.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.display import printable
from .._format.run_history import History
from .._format.user_metadata import exactly, MAX_METADATA_BYTES, pack
from .._storage.calls.threads import at_once
from .._storage.interface.committed_manifest import read_history
from .._storage.interface.place import CONFIGS, is_step_at, run_of, Storage
from .._storage.interface.sure_reads import parse_surely
from .._storage.locate import locate
from .._types import PathLike
from .run_steps import Run


logger = logging.getLogger("eqx_ckpt")


# Where one of two configs has no value.
ABSENT = object()


# Of a value in a warning.
_MOST_TEXT = 60


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
    if (nbytes := len(_to_bytes(found))) > MAX_METADATA_BYTES:
        raise CheckpointError(
            f"`config` has {nbytes} bytes as indented JSON; "
            f"{MAX_METADATA_BYTES // 2**20} MiB are allowed. Save large arrays as "
            "leaves."
        )
    return found


def as_items(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values in a config; nested ones as `optim/lr`. A list is one value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            for name, inner in as_items(value):
                yield f"{key}/{name}", inner
        else:
            yield key, value


def changes(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """What differs between two configs: by name, both values, or `ABSENT`."""
    before, after = dict(as_items(old or {})), dict(as_items(new or {}))
    found = {
        name: (before.get(name, ABSENT), after.get(name, ABSENT))
        for name in (*before, *(name for name in after if name not in before))
    }
    return {name: (a, b) for name, (a, b) in found.items() if as_json(a) != as_json(b)}


def as_json(value: Any) -> str:
    """A value of a config as JSON; `-` if there is none."""
    return "-" if value is ABSENT else json.dumps(value, sort_keys=True)


def _to_bytes(config: dict[str, Any]) -> bytes:
    """The file of a config: equal ones become equal bytes."""
    text = json.dumps(config, indent=1, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()


def _id_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _name(id: str) -> str:
    return f"{CONFIGS}{id}.json"


class Configs:
    """What is beside the steps of a run, of which there may be several places."""

    def __init__(self, places: Sequence[Storage]) -> None:
        self._places = places
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, history: History | None) -> dict[str, Any] | None:
        """The config of a step, from the nearest place that has it intact."""
        if history is None or history.config is None:
            return None
        if history.config not in self._known:
            self._known[history.config] = self._found(history.config)[1]
        return self._known[history.config]

    def data(self, id: str) -> bytes:
        """The file of a config."""
        return self._found(id)[0]

    def _found(self, id: str) -> tuple[bytes, dict[str, Any]]:
        """The file of a config, and the config."""
        name = _name(id)
        problem: Exception | None = None
        for place in self._places:
            try:
                if found := parse_surely(place, name, lambda data: _parsed(data, id)):
                    return found
            except (CheckpointError, OSError) as e:
                problem = problem or e
        if isinstance(problem, CorruptCheckpointError):
            urls = " or ".join(repr(place.url(name)) for place in self._places)
            raise CorruptCheckpointError(
                f"The config in {urls} is damaged: it is not as it was written. Copy "
                "the file from a mirror or a backup, or delete it, and a manager with "
                "this config writes it again. The steps can be restored without it."
            ) from problem
        if problem:
            raise problem
        where = " or ".join(place.url() for place in self._places) or "its run"
        raise CorruptCheckpointError(
            f"The config {name!r} of the step is missing in {where}. Copy the file "
            "from a mirror or a backup. The steps can be restored without it."
        )


def _parsed(data: bytes, id: str) -> dict[str, Any]:
    """The config in a file that was written as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(data)
        is_written = type(config) is dict and _to_bytes(config) == data
        if is_written and _id_of(data) == id:
            return config
    raise CorruptCheckpointError("it is not as it was written")


def _warn(step: int, problem: Exception) -> None:
    logger.warning("Step %d goes on without its config: %s", step, problem)


class ConfigWriter:
    """Puts the configs of steps beside them, before the steps are there.

    Those that it is not given come from `configs`. `tell` is called with the step and
    the error if one of those cannot be read.
    """

    def __init__(
        self,
        configs: Configs,
        there: Storage,
        tell: Callable[[int, Exception], None] = _warn,
    ) -> None:
        self._there = there
        self._configs = configs
        self._tell = tell
        self._done: set[str] = set()

    def put(self, history: History | None, data: bytes | None = None) -> None:
        """Write the config of a step, unless it is there; `data`, if that is known."""
        if history is None or (id := history.config) is None or id in self._done:
            return
        try:
            data = self._configs.data(id) if data is None else data
        except (CheckpointError, OSError) as e:
            self._tell(history.step, e)
        else:
            _put(self._there, _name(id), data)
        self._done.add(id)


def _put(there: Storage, name: str, data: bytes) -> None:
    """Write a file, unless it is there; what is there may have been cut off."""
    steps = there.steps()
    found = steps.read_beside(name)
    if found == data:
        return
    if found is not None:
        steps.delete_beside([name])
    try:
        steps.write_beside(name, data)
    except FileExistsError:  # Somebody else writes the same.
        return


class GivenConfig:
    """The config that a manager was given, if any.

    **Attributes:**

    - `id`: its id, or `None`.
    """

    def __init__(self, runs: Sequence[Run], given: dict[str, Any] | None) -> None:
        self._run, self._given = runs[0], given
        self._data = None if given is None else _to_bytes(given)
        self.id = None if self._data is None else _id_of(self._data)
        places = [run.place for run in runs]
        self._configs = Configs(places)
        # A new disk may go on from a mirror, and have none yet.
        self._writer = ConfigWriter(self._configs, places[0])
        self._told: set[str] = set()

    def put(self, history: History | None) -> None:
        """Put the config of a step beside it."""
        is_given = history is not None and history.config == self.id
        self._writer.put(history, self._data if is_given else None)

    def restored(self, history: History | None) -> None:
        """Warn once if a step that the manager goes on from has another config."""
        if history is None or history.config is None or self._given is None:
            return
        if history.config in (self.id, *self._told):
            return
        self._told.add(history.config)
        try:
            found = changes(self._configs.of(history), self._given)
        except (CheckpointError, OSError) as e:
            logger.warning("The config of step %d is not known: %s", history.step, e)
            return
        told = ", ".join(
            f"`{printable(name)}` was {_short(a)}, and is {_short(b)}"
            for name, (a, b) in found.items()
        )
        logger.warning(
            "From step %d on, %s has another `config`: %s. The run keeps both.",
            history.step,
            self._run.directory,
            told,
        )


def _short(value: Any) -> str:
    text = as_json(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def config_changes(
    histories: Mapping[int, History | None], configs: Configs
) -> dict[int, dict[str, tuple[Any, Any]]]:
    """How the config of each step differs from that of the step it goes on from.

    Steps that go on from none of these are not in the result.
    """
    by_session: dict[str, dict[int, int]] = {}
    for step, history in histories.items():
        if history is not None:
            by_session.setdefault(history.sessions[-1].id, {})[history.step] = step
    found: dict[int, dict[str, tuple[Any, Any]]] = {}
    for step, history in histories.items():
        before = None if history is None else _goes_on_from(history, by_session)
        if before is not None:
            old, new = configs.of(histories[before]), configs.of(history)
            found[step] = changes(old, new)
    return found


def _goes_on_from(
    history: History, by_session: Mapping[str, Mapping[int, int]]
) -> int | None:
    """The last of some steps that has led to another one."""
    end = history.step - 1
    for session in reversed(history.sessions):
        earlier = [n for n in by_session.get(session.id, ()) if n <= end]
        if earlier:
            return by_session[session.id][max(earlier)]
        end = -1 if session.step is None else session.step
    return None


def damaged_configs(run: Run) -> dict[str, str]:
    """What is wrong with the configs that steps of a run have, by path."""
    # A damaged step is said where its data are looked at.
    histories = at_once(run.readable_history, run.readable_or_not())
    ids = {history.config for history in histories.values() if history}
    configs = Configs([run.place])

    def problem(id: str) -> str:
        try:
            configs.data(id)
        except (CheckpointError, OSError) as e:
            return str(e)
        return ""

    found = at_once(problem, sorted(id for id in ids if id))
    return {run.place.url(_name(id)): why for id, why in found.items() if why}


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
        damaged, or the config is missing.
    - [`eqx_ckpt.CheckpointError`][]: the newest checkpoint is misnamed in the run.

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
        return read_config_of([run], run, run.at_least_one()[-1])
    return Configs([run_of(place)] if is_step_at(place) else [place]).of(history)


def read_config_of(runs: Sequence[Run], run: Run, step: int) -> dict[str, Any] | None:
    """As `read_config`, of a step of a run, of which there may be several places."""
    history = read_history(run.location(step))
    return Configs([one.place for one in runs]).of(history)
