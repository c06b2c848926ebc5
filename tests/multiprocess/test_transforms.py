"""Several processes restore through a transform."""

import pathlib

import pytest

from faults import jobs, transforms
from faults.zygote import Zygote


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_computed_together(
    zygote: Zygote, disk: pathlib.Path, processes: int, devices: int
) -> None:
    args = (processes, devices, transforms.restore, str(disk / "new"))
    # No process reads a whole large leaf: those on the mesh are sharded over x.
    for most in zygote.call(jobs.values, *args):
        assert 0 < most <= 2**22 // 2


def test_damage_that_one_process_reads(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, 4, transforms.damaged, str(disk / "new"))
    texts = []
    for kind, text in zygote.call(jobs.values, *args):
        assert kind == "CorruptCheckpointError"
        assert "'blocks/1/w'" in text
        texts.append(text)
    assert texts[0].startswith("Process 1 failed: ")
