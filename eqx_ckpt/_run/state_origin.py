"""Where the state that a manager saves comes from, as far as the manager knows."""

import secrets
from dataclasses import replace
from typing import NamedTuple

from .._format.run_history import continued, History, Session
from .._format.source import Source
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import PartSource
from .._steps.run_steps import Run


class _Restored(NamedTuple):
    """A step that was restored, by the number with which it was saved."""

    step: int
    digest: str
    history: History | None
    is_whole: bool


class StateOrigin:
    """What a manager has restored, and the session in which it saves.

    A session begins with the first save, and with the first one after a restore.
    `config` is the id of the config that the manager was given, if any; without, that
    of the step that a session goes on from holds.
    """

    def __init__(self, run: Run, config: str | None) -> None:
        self._run = run
        self._config = config
        self._restored: _Restored | None = None
        # Of the step that was saved last.
        self._now: History | None = None

    def restored(self, step: int, source: Source, *, is_whole: bool) -> bool:
        """Go on from what was read of a step; return whether a session begins there.

        A part of a step is only looked at, once there was a save, or a whole restore;
        and the step saved last is what the session has anyway.
        """
        history = source.manifest.history
        has_whole = self._restored is not None and self._restored.is_whole
        if not is_whole and (has_whole or self._now is not None):
            return False
        if self._now is not None and history == self._now:
            return False
        if isinstance(source, PartSource):
            source = source.checkpoint
        if isinstance(source, Checkpoint):
            number = step if history is None else history.step
            self._restored = _Restored(number, source.digest, history, is_whole)
            self._now = None
            return True
        return False

    def of_step(self, step: int) -> History:
        """The history of a step that is saved now."""
        now = self._now or self._new_session()
        self._now = replace(now, step=step, config=self._config or now.config)
        return self._now

    def _new_session(self) -> History:
        found, session = self._restored, Session(secrets.token_hex(8))
        before = found and found.history
        if found is not None:
            session = Session(session.id, found.step, found.digest)
        if before is not None:
            return continued(before, session)
        same_run = self._run.newest_history()
        if same_run is not None:
            return replace(same_run, sessions=(session,), earlier=0, config=None)
        return History(secrets.token_hex(16), 0, (session,))
