"""A process that dies at any file operation of an upload loses nothing."""

import itertools
import pathlib
import shutil

from faults import mirrors, runs
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote


def test_kill_at_every_operation_of_an_upload(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    zygote.call(mirrors.train, str(disk / "before"), 1)
    hits: list[list[str]] = []
    for n in itertools.count(1):
        place = disk / str(n)
        shutil.copytree(disk / "before", place)
        fault = Fault(str(place / "there"), n)
        outcome = zygote.run(mirrors.train, str(place), 2, fault=fault)
        assert outcome.error is None
        if not outcome.signal:
            break
        hits.append(outcome.hits)
    places = [str(disk / str(n + 1)) for n in range(len(hits))]
    found = zygote.call(runs.each, mirrors.again, places, timeout=OF_MANY)
    for there, hit in zip(found, hits, strict=True):
        # Old steps are removed after an upload.
        assert there in ([2], [1, 2]), hit
    assert len(hits) > 10
