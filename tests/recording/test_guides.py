"""The programs of the documentation are killed, and lose what they say at most."""

import pathlib

import numpy as np
import pytest

from faults.zygote import Zygote
from recording import guides


pytestmark = pytest.mark.once


LONG = 600  # seconds, to compile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "continued"), [("recording.md", 20), ("samplers.md", 1)]
)
def test_killed_at_twenty_moments(
    zygote: Zygote, disk: pathlib.Path, page: str, continued: int
) -> None:
    if page == "samplers.md":
        pytest.importorskip("blackjax")
    whole, log = disk / "whole", disk / "log"
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
    distance = len(copies) // continued
    for copy in copies[distance // 2 :: distance][:continued]:
        args = (page, f"{copy}/folder", f"{copy}/log")
        zygote.call(guides.run, *args, timeout=LONG)
        np.testing.assert_equal(
            zygote.call(guides.recorded, f"{copy}/folder"), expected
        )
