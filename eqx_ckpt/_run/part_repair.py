"""Make the parts of a step whole again, of what other processes and the mirror have.

Each shard that is lacking is sent by one process that has it; what no process has is
read from the mirror. All processes take part: they agree on what is lacking, tell what
they send, send it, and hear whether all have what they lacked.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .._distributed.byte_broadcast import Broadcast
from .._distributed.process_errors import failure_in, to_json
from .._distributed.process_group import Group, Solo
from .._errors import CheckpointError
from .._format.manifest import Manifest
from .._saving.new_part import NewPart, OldPart, Received
from .._sources.checkpoint_source import Checkpoint
from .._sources.part_source import StepPart
from .._sources.shard_senders import Lacking, Parcel, sent_by, Shard
from .._types import PathLike


class PartRepair:
    """One repair, which all processes of a job make together, each of its own part.

    `damaged` are the shards of this process that are known to be.
    """

    def __init__(
        self,
        group: Group | Solo,
        place: PathLike,
        part: StepPart | None,
        damaged: Collection[Shard],
        find_whole: Callable[[Manifest], Checkpoint | None],
    ) -> None:
        self._group = group
        self._place = place
        self._part = part
        self._damaged = damaged
        self._find_whole = find_whole

    def run(self, timeout: float, *, overwrite: bool) -> bool:
        """Repair what is lacking anywhere; raise on all processes if that fails.

        Return whether there are parts: if no process has one, nothing is done.
        """
        lacking = self._agree()
        if [*lacking.values()].count(None) == self._group.size:
            return False
        if not lacking:
            return True
        mine, part, sent = None, self._part, iter(())
        if part is not None and (names := sent_by(part, lacking)):
            mine = Parcel.of(part, names)
            sent = mine.arrays(part)
        needs = self._group.index in lacking
        sending = error = None
        try:
            parcels = self._tell(mine, timeout, keep=needs)
            sizes = self._sizes("data", mine.nbytes if mine else 0)
            broadcast = Broadcast(self._group, sizes, timeout)
            received = broadcast.buffers(sent)
            try:
                if needs:
                    self._renew(parcels, received, overwrite=overwrite)
            finally:
                for _ in received:  # The others wait for this process.
                    pass
                sending = broadcast.error
        except Exception as e:
            error = e
        self._end(sending, error)
        return True

    def _renew(
        self, parcels: Mapping[int, bytes], received: Received, *, overwrite: bool
    ) -> None:
        at = self._group.index, self._group.size
        told = {i: Parcel.from_bytes(data) for i, data in parcels.items()}
        new = NewPart(OldPart(self._part, self._damaged), at, told, self._find_whole)
        new.save(self._place, received, overwrite=overwrite)

    def _agree(self) -> Lacking:
        """What is lacking, and where."""
        id = "" if self._part is None else self._part.part.id
        damaged = sorted([leaf, [*start]] for leaf, start in self._damaged)

        def compare(said: Sequence[Sequence[Any]]) -> list[Any]:
            ids = {id for id, _ in said if id}
            if len(ids) > 1:
                raise CheckpointError(
                    f"{self._place} was replaced on one of the disks. Begin again."
                )
            return [
                [i, shards if id else None]
                for i, (id, shards) in enumerate(said)
                if shards or not id
            ]

        found = self._group.combine("lacking", [id, damaged], compare)
        return {
            process: None
            if shards is None
            else {(leaf, tuple(start)) for leaf, start in shards}
            for process, shards in found
        }

    def _sizes(self, topic: str, nbytes: int) -> list[list[int]]:
        """The processes that send something, and how much."""
        return self._group.combine(
            topic,
            nbytes,
            lambda said: [[i, size] for i, size in enumerate(said) if size],
        )

    def _tell(
        self, mine: Parcel | None, timeout: float, *, keep: bool
    ) -> dict[int, bytes]:
        """Say what this process sends; return what each sends, if that is needed."""
        text = np.frombuffer(b"" if mine is None else mine.to_bytes(), np.uint8)
        sizes = self._sizes("parcels", text.size)
        broadcast = Broadcast(self._group, sizes, timeout)
        texts: dict[int, bytearray] = {}
        for process, data in broadcast.buffers([text]):
            if keep:
                texts.setdefault(process, bytearray()).extend(data.data)
        return {i: bytes(text) for i, text in texts.items()}

    def _end(self, sending: Exception | None, error: Exception | None) -> None:
        """Raise on all processes what has failed on one; first, what was not sent."""

        def first(said: Sequence[Sequence[Any]]) -> dict[str, Any]:
            failed = sorted(
                (not of_sender, i) for i, (of_sender, e) in enumerate(said) if e
            )
            who = failed[0][1] if failed else None
            return {"failed": None if who is None else [who, said[who][1]]}

        own = sending or error
        said = [sending is not None, None if own is None else to_json(own)]
        try:
            failure = failure_in(self._group.combine("repaired", said, first))
        except CheckpointError as e:
            raise e from own
        if failure is not None:
            raise failure from own
