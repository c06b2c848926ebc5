"""The processes of a job share the work of a copy."""

import pathlib

import numpy as np
import pytest

import eqx_ckpt
from faults import copies, jobs
from faults.zygote import Zygote


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_each_process_copies_a_part(
    zygote: Zygote, disk: pathlib.Path, layout: str
) -> None:
    large = {f"w.{i}": np.arange(2**19, dtype=np.float32) + i for i in range(8)}
    arrays = {**large, "small": np.ones(3)}
    np.savez(disk / "a.npz", **arrays)
    target = str(disk / "b")
    args = (2, 1, copies.archive, str(disk / "a.npz"), target, layout)
    read = zygote.call(jobs.values, *args)
    assert sum(read) == sum(array.nbytes for array in arrays.values())
    assert max(read) <= 1.1 * min(read)
    eqx_ckpt.inspect.verify(target)
    found = {
        name.replace("/", "."): x for name, _, x in eqx_ckpt.inspect.iter_leaves(target)
    }
    np.testing.assert_equal(found, arrays)
    # What is there is kept, and all processes raise.
    for kind, _ in zygote.call(jobs.values, 2, 1, copies.caught, target, target):
        assert kind == "CheckpointExistsError"


def test_damage_is_an_error_on_all_processes(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    tree = {"a": np.ones(2**18), "b": np.ones(2**18), "step": 5}
    eqx_ckpt.tree_serialise_leaves(disk / "a", tree)
    chunk = disk / "a" / "b" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    args = (2, 1, copies.caught, str(disk / "a"), str(disk / "b"))
    errors = zygote.call(jobs.values, *args)
    for kind, text in errors:
        assert kind == "CorruptCheckpointError"
        assert "'b'" in text
    assert {path.name for path in disk.iterdir()} == {"a"}


def test_a_missing_source_is_an_error_on_all_processes(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    args = (2, 1, copies.caught, str(disk / "none"), str(disk / "b"))
    for kind, text in zygote.call(jobs.values, *args):
        assert kind == "CheckpointNotFoundError"
        assert str(disk / "none") in text
