"""The processes of a job do not see the same disk."""

import pathlib

import pytest

from faults import apart, jobs
from faults.zygote import Zygote


def test_one_path_of_two_disks(zygote: Zygote, disk: pathlib.Path) -> None:
    (disk / "scratch").mkdir()
    first, second = zygote.call(jobs.values, 2, 4, apart.use_one_path, str(disk))
    if not (first and second):
        pytest.skip("no process here may mount a disk for itself")
    left = first.pop("left"), second.pop("left")
    assert left == (["run"], [])
    assert first == second
    assert (first["latest"], first["steps"]) == (1, [])
    for name, above in {"manager": "/run", "again": "/run", "save": ""}.items():
        kind, text = first[name]
        assert kind == "CheckpointError"
        assert f"different directories at '{disk}/scratch{above}'" in text
        assert "process 0 has made there, process 1 of 2 does not see" in text
        assert "Nothing was saved. All processes have to save to one shared" in text
    for name in ("restore", "of a step"):
        kind, text = first[name]
        assert kind == "CheckpointNotFoundError"
        assert "Process 1 does not see, or not yet, the checkpoint that" in text
        assert f"process 0 sees in restore({disk}/scratch/run/000001)" in text
        assert "All processes have to restore from one shared directory" in text


def test_two_paths(zygote: Zygote, disk: pathlib.Path) -> None:
    first, second = zygote.call(jobs.values, 2, 4, apart.use_two_paths, str(disk))
    assert first == second
    for (kind, text), call in zip(first, ("latest", "restore", "save"), strict=True):
        assert kind == "CheckpointError"
        for index in range(2):
            assert f"\n- process {index}: {call}(" in text
            assert f"in '{disk}/{index}'\n" in text
        assert "have to use one shared directory, or one store" in text
