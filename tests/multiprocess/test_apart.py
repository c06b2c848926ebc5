"""The processes of a job do not see the same disk."""

import pathlib

import pytest

import eqx_ckpt
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


def test_a_disk_of_each_process(zygote: Zygote, disk: pathlib.Path) -> None:
    first, second = zygote.call(jobs.values, 2, 4, apart.lose_disks, str(disk))
    for now, step in zip(first, (2, 4, 5, 6), strict=True):
        assert step in now.pop("uploads")
    assert [now.pop("uploads") for now in second] == [[]] * 4
    read = [[now.pop("read") for now in seen] for seen in (first, second)]
    # Only process 1 reads step 2 from the mirror, and process 0 the damaged chunk.
    assert read[0] == [[], ["disk0"], ["disk0", "there"], ["there"]]
    assert read[1] == [[], ["disk1", "there"], ["disk1"], ["there"]]
    assert first == second
    assert first == [
        {"before": None, "latest": 3, "best": 2, "steps": [2, 3], "there": [2]},
        {"before": 2, "latest": 4, "best": 2, "steps": [2, 3, 4], "there": [2, 4]},
        {"before": 4, "latest": 5, "best": 2, "steps": [2, 4, 5], "there": [2, 4]},
        {
            "before": 4,
            "latest": 6,
            "best": 2,
            "steps": [2, 4, 5, 6],
            "there": [2, 4, 6],
        },
    ]
    for step, last in {2: 3, 4: 4, 6: 6}.items():
        path = disk / "there" / f"{step:06}"
        assert eqx_ckpt.inspect.verify(path)
        assert eqx_ckpt.inspect.read_config(path) == {"last": last, "who": 0}
    for index in range(2):
        assert eqx_ckpt.inspect.verify(disk / f"disk{index}" / "run" / "000006")
    leaves = [
        {*eqx_ckpt.inspect.read_manifest(disk / f"disk{i}/run/000006").leaves}
        for i in range(2)
    ]
    everywhere = {name for name in leaves[0] & leaves[1] if "/w/" in name}
    assert len(leaves[0]) > 30
    assert not everywhere  # Each has its own shards of it.


def test_the_mirror_is_lost_for_some_time(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, 4, apart.lose_the_mirror, str(disk))
    assert zygote.call(jobs.values, *args) == [[2], [2]]
    assert eqx_ckpt.inspect.verify(disk / "there" / "000002")


def test_what_fails_on_one_disk(zygote: Zygote, disk: pathlib.Path) -> None:
    first, second = zygote.call(jobs.values, 2, 4, apart.fail, str(disk))
    assert (first.pop("lost"), second.pop("lost")) == ((1, [1, 2]), (1, [1]))
    for seen in (first, second):
        assert seen.pop("left") == [1]
        assert seen.pop("deleted") == (2, [2])
    half = ("LeafMismatchError", "Leaf 'halves' of process 1 is not that of", 1)
    expected = {
        "exists": ("CheckpointExistsError", "Step 1 exists already in the direct", 1),
        "commit": ("OSError", "Input/output error", 1),
        **dict.fromkeys(("half 0", "half 1"), half),
        "array": ("LeafMismatchError", "Leaf 'numpy' of process 1 is not that of", 1),
        "number": ("LeafMismatchError", "Leaf 'step' of process 1 is not that of", 1),
        "sharding": ("LeafMismatchError", "- process 1: leaf 'w', float32[16, 12]", 1),
        "mesh": ("CheckpointError", "Restore it with the shardings with which it", 2),
        "same": ("CheckpointError", f"same directory '{disk}/one'", None),
    }
    assert first.keys() == second.keys() == expected.keys()
    for seen in (first, second):
        for name, (kind, text, latest) in expected.items():
            assert (seen[name][0], seen[name][2]) == (kind, latest), name
            assert text in seen[name][1], name


def test_room_is_made_after_a_failure(zygote: Zygote, disk: pathlib.Path) -> None:
    """What `keep` does not keep goes on all disks, but for what one of them needs."""
    first, second = zygote.call(jobs.values, 2, 4, apart.make_room, str(disk))
    assert first == second
    assert first == [["000001", "000002", "000003"], ["000002", "000003"], ["000003"]]


def test_two_processes_die_amid_the_commits(zygote: Zygote, disk: pathlib.Path) -> None:
    """What one of them has committed is no step, and is replaced by the next one."""
    zygote.call(jobs.run, 2, 4, apart.die_amid_the_commits, str(disk))
    assert (disk / "disk0/run/000003").is_dir()
    assert not (disk / "disk1/run/000003").exists()
    for seen in zygote.call(jobs.values, 2, 4, apart.train, str(disk), 3):
        assert (seen["before"], seen["latest"]) == (2, 3)
        assert (seen["steps"], seen["there"]) == ([2, 3], [2])
    # Other processes have other shards: they read the newest step of the mirror.
    (seen,) = zygote.call(jobs.values, 1, 8, apart.train, str(disk), 3)
    assert (seen["before"], seen["read"]) == (2, ["there"])


@pytest.mark.once
def test_a_mirror_whose_old_steps_go_slowly(zygote: Zygote, disk: pathlib.Path) -> None:
    """Process 0 removes them after the upload, for which the others do not wait."""
    for error, mirrored in zygote.call(jobs.values, 2, 4, apart.keep_slowly, str(disk)):
        assert (error, mirrored) == ("None", [1])


@pytest.mark.once
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_dies_amid_an_upload(
    zygote: Zygote, disk: pathlib.Path, victim: int
) -> None:
    """The other one waits as long as it was told; nothing is half there, or lost."""
    args = (2, 4, apart.die_amid_an_upload, str(disk), victim)
    ends = zygote.call(jobs.run, *args)
    assert ends[victim].signal == 9
    if victim:  # With the first process, the service of the job is gone, too.
        seconds, error = ends[0].value
        assert seconds < 60.0
        assert "No answer from process 1 of 2 within 5 seconds" in error
    assert eqx_ckpt.CheckpointManager(disk / "there").steps() == [2]
    for seen in zygote.call(jobs.values, 2, 4, apart.train, str(disk), 4):
        assert (seen["before"], seen["latest"], seen["there"]) == (3, 4, [2, 4])
    assert eqx_ckpt.inspect.verify(disk / "there/000004")
    assert not [*(disk / "there").glob(".*")]
