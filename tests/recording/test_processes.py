"""Several processes write one recording: each its own chains, and one commit."""

import pathlib
import signal
from typing import Any

import jax
import numpy as np
import pytest

import eqx_ckpt
from faults import jobs
from faults.zygote import Zygote
from recording import processes
from stores import programs
from stores.place import Place


def recorded(path: str | pathlib.Path) -> dict[str, Any]:
    found = eqx_ckpt.recording.Samples(path)
    found.verify()
    return found.read()


def test_two_processes(zygote: Zygote, disk: pathlib.Path) -> None:
    path = str(disk / "run")
    first = zygote.call(jobs.values, 2, 2, processes.sample, path, 2)
    assert first == [(0, "")] * 2
    np.testing.assert_equal(recorded(path), processes.reference(2))
    # Others go on, whatever their number: one, and four.
    assert zygote.call(jobs.values, 1, 4, processes.sample, path, 3) == [(2, "")]
    four = zygote.call(jobs.values, 4, 1, processes.sample, path, 5)
    assert four == [(3, "")] * 4
    np.testing.assert_equal(recorded(path), processes.reference(5))
    eqx_ckpt.inspect.verify(path)


def test_chunks_that_would_be_of_two_processes(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    path = str(disk / "run")
    # Ten chains each, which are whole bands of two; then five.
    zygote.call(jobs.values, 2, 1, processes.many, path, 0, 2)
    zygote.call(jobs.values, 4, 1, processes.many, path, 2, 4)
    found = eqx_ckpt.recording.Samples(path)
    found.verify()
    blocks = [processes.many_of(i) for i in range(4)]
    for chain in range(20):
        read = found.read(chain=chain)
        n = np.concatenate([n[chain][keep[chain]] for n, keep in blocks])
        np.testing.assert_array_equal(read["n"], n)
        assert (jax.vmap(jax.random.key)(n) == read["key"]).all()


def test_one_is_killed(zygote: Zygote, disk: pathlib.Path) -> None:
    path = str(disk / "run")
    ends = zygote.call(jobs.run, 2, 2, processes.sample, path, 3, 1, 2.0)
    assert ends[1].signal == signal.SIGKILL
    step, error = ends[0].value
    assert step == 0
    assert "No answer from process 1 of 2" in error
    # Nothing after the first commit is there.
    np.testing.assert_equal(recorded(path), processes.reference(1))
    both = zygote.call(jobs.values, 2, 2, processes.sample, path, 3)
    assert both == [(1, "")] * 2
    np.testing.assert_equal(recorded(path), processes.reference(3))


def test_in_an_object_store(zygote: Zygote, s3: Place) -> None:
    names = programs.environment(s3)
    args = (2, 2, programs.at, names, processes.sample, s3.url, 2)
    assert zygote.call(jobs.values, *args) == [(0, "")] * 2
    np.testing.assert_equal(recorded(s3.url), processes.reference(2))


def test_the_end_commits(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 2, 2, processes.keep_and_end, str(disk / "run"))
    found = eqx_ckpt.recording.Samples(disk / "run")
    for chain, n in enumerate(processes.reference(1)["n"]):
        kept = n[np.arange(processes.BLOCK) % 2 == chain % 2]
        assert found.read(chain=chain)["n"].tolist() == kept.tolist()


def test_a_scan(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 2, 2, processes.scan, str(disk / "run"))
    np.testing.assert_equal(recorded(disk / "run"), processes.reference(2))


def test_what_is_local_is_of_the_first(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 2, 2, processes.local, str(disk / "run"))
    np.testing.assert_equal(recorded(disk / "run"), processes.reference(1))


@pytest.mark.parametrize(
    ("which", "texts"),
    [
        ("like", ["Process 1 failed", "is a recording of something else"]),
        ("axis", ["Shard only its first axis"] * 2),
        ("recorder", ["this job has several"] * 2),
    ],
)
def test_what_cannot_be_recorded(
    zygote: Zygote, disk: pathlib.Path, which: str, texts: list[str]
) -> None:
    errors = zygote.call(jobs.values, 2, 2, processes.caught, str(disk / "run"), which)
    for error, text in zip(errors, texts, strict=True):
        assert text in error
