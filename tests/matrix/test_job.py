"""Every kind of leaf, saved and restored by two processes."""

from faults import jobs
from faults.zygote import Zygote

from . import job


def test_two_processes(zygote: Zygote, disk):
    assert zygote.call(jobs.values, 2, 4, job.run, disk / "new") == [[], []]
