"""The processes of a job and a mirror: the first one uploads, and all see the same."""

import pathlib

import pytest

import eqx_ckpt
from faults import jobs, mirrors
from faults.zygote import Zygote
from stores import programs
from stores.place import Place


@pytest.mark.parametrize("kind", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_run_with_a_mirror(
    zygote: Zygote, disk: pathlib.Path, request: pytest.FixtureRequest, kind: str
) -> None:
    there, names = str(disk / "there"), {}
    if kind == "s3":
        place: Place = request.getfixturevalue("s3")
        there, names = place.url, programs.environment(place)
    run = str(disk / "run")
    call = (programs.at, names, mirrors.train_together, run, there)
    first, second = zygote.call(jobs.values, 2, 4, *call)
    assert [now.pop("uploads") for now in first] == [[1, 2, 3], [4]]
    assert [now.pop("uploads") for now in second] == [[], []]
    for seen in (first, second):
        (warning,) = seen[0].pop("warned")
        assert f"step 3 in {there!r} was restored" in warning
    assert first == second
    assert first == [
        {"latest": 3, "steps": [2, 3], "mirrored": [2, 3], "best": 2},
        {"latest": 4, "steps": [3, 4], "mirrored": [3, 4], "best": 4},
    ]
    for step in eqx_ckpt.CheckpointManager(there).steps():
        assert eqx_ckpt.inspect.verify(f"{there}/{step:06}")
    digests = [eqx_ckpt.inspect.digest(f"{where}/000004") for where in (run, there)]
    assert digests[0] == digests[1]
