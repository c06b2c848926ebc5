"""A cursor goes on with the same global batches on any number of processes."""

import pathlib

from faults import jobs, loading
from faults.zygote import Zygote


def test_resumed_by_other_processes(zygote: Zygote, disk: pathlib.Path) -> None:
    ((expected, taken),) = zygote.call(
        jobs.values, 1, 4, loading.draw, str(disk / "a"), 9
    )
    assert taken >= 9 * 8
    run = str(disk / "b")
    first = zygote.call(jobs.values, 2, 2, loading.draw, run, 4)
    second = zygote.call(jobs.values, 4, 1, loading.draw, run, 3)
    third = zygote.call(jobs.values, 1, 2, loading.draw, run, 2)
    found = [rows for job in (first, second, third) for rows in job[0][0]]
    assert found == expected
    for job, share in ((first, 2), (second, 4)):
        assert all(rows == job[0][0] for rows, _ in job)
        # Each process reads the rows of its own devices; groups are read ahead.
        assert all(taken <= 2 * 4 * 8 / share for _, taken in job)
