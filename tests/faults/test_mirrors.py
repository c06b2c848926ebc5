"""A process that dies at any file operation of an upload loses nothing."""

import pathlib
import shutil

import pytest

from faults import mirrors, runs
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote


# Of an upload of two arrays, one of them shared, and the removal of the step before.
OPERATIONS = 28


@pytest.mark.once
def test_kill_at_every_operation_of_an_upload(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    zygote.call(mirrors.train, str(disk / "before"), 1)
    hits: dict[str, list[str]] = {}
    for n in range(1, OPERATIONS + 1):
        place = disk / str(n)
        shutil.copytree(disk / "before", place)
        fault = Fault(str(place / "there"), n)
        outcome = zygote.run(mirrors.train, str(place), 2, fault=fault)
        assert outcome.error is None
        hits[str(place)] = outcome.hits
    assert any(hits.values())
    found = zygote.call(runs.each, mirrors.again, [*hits], timeout=OF_MANY)
    for there, hit in zip(found, hits.values(), strict=True):
        # Old steps are removed after an upload.
        assert there in ([2], [1, 2]), hit
