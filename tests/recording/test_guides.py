"""The programs of the documentation are killed, and lose what they say at most."""

import pathlib
import shutil

import numpy as np
import pytest

from faults.shim import Fault
from faults.zygote import Zygote
from recording import guides


pytestmark = pytest.mark.once


PAGE = "recording.md"
LONG = 600  # seconds, to compile


@pytest.mark.slow
def test_killed_at_twenty_moments(zygote: Zygote, disk: pathlib.Path) -> None:
    log = disk / "log"

    def run(folder: pathlib.Path, nth: int = 0):
        shutil.rmtree(log, ignore_errors=True)
        log.mkdir()
        folder.mkdir(exist_ok=True)
        fault = Fault(str(folder), nth)
        return zygote.run(guides.run, PAGE, str(folder), str(log), fault=fault)

    whole = run(disk / "whole")
    assert whole.error is None
    expected = zygote.call(guides.recorded, str(disk / "whole"))
    assert len(expected) == len(guides.programs(PAGE))
    lost: list[int] = []
    for nth in np.linspace(2, whole.count, 20, dtype=int).tolist():
        folder = disk / str(nth)
        assert run(folder, nth).signal
        lost += zygote.call(guides.check, str(folder), str(log)).values()
        assert run(folder).error is None
        np.testing.assert_equal(zygote.call(guides.recorded, str(folder)), expected)
        shutil.rmtree(folder)
    assert max(lost) > 0


@pytest.mark.slow
def test_programs_of_blackjax_at_twenty_moments(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    pytest.importorskip("blackjax")
    page, whole, log = "samplers.md", disk / "whole", disk / "log"
    whole.mkdir()
    log.mkdir()
    args = (page, str(whole), str(log), str(disk), 20, LONG)
    copies = zygote.call(guides.run_and_copy, *args, timeout=LONG)
    assert len(copies) >= 20
    lost = [
        steps
        for copy in copies
        for steps in zygote.call(guides.check, f"{copy}/folder", f"{copy}/log").values()
    ]
    assert max(lost) > 0
    expected = zygote.call(guides.recorded, str(whole))
    assert len(expected) == len(guides.programs(page))
    middle = f"{copies[len(copies) // 2]}"
    args = (page, f"{middle}/folder", f"{middle}/log")
    zygote.call(guides.run, *args, timeout=LONG)
    np.testing.assert_equal(zygote.call(guides.recorded, f"{middle}/folder"), expected)
