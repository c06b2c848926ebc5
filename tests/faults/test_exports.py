"""Exports and copies on a disk that fails: a clear error, and the old file is there."""

import pathlib

import pytest

from faults import exports
from faults.failures import assert_says_why, ERRORS
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", exports.WRITERS)
def test_each_operation_fails(
    zygote: Zygote, disk: pathlib.Path, name: str, error: str, old: bool
) -> None:
    fault = Fault("", 0, error, ERRORS[error])
    call = (exports.strike, str(disk), name, old, fault)
    before, after, strikes = zygote.call(*call, timeout=OF_MANY)
    for hits, raised, found, left in strikes:
        where = f"{error} at {hits}: {raised!r}"
        is_cleaning = hits[0].startswith(("unlink", "open"))
        assert not left or is_cleaning, (where, left)
        if raised is None:
            assert found == after, where
            continue
        assert_says_why(raised, error)
        assert found in (before, after), where
        if error == "ENOSPC" and hits[0].startswith("write"):
            assert "delete what is no longer needed" in str(raised), where
            assert str(disk) in str(raised) or "leaf '" in str(raised), where
        # What cannot be flushed may be there all the same; what cannot be written, not.
        if not hits[0].startswith(("sync", "unlink", "open")):
            assert found == before, where
    assert len(strikes) > 2
