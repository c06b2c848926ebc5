"""Several processes save and restore one checkpoint."""

import functools as ft
import pathlib
import re
import signal

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from faults import dying_jobs, failing_jobs, jobs, programs
from faults.zygote import Zygote
from helpers import files_below


OF_ONE = "NumPy int64[4], of one process, compression="


def test_restored_by_any_processes(zygote: Zygote, disk: pathlib.Path) -> None:
    """Saved by two processes, it is what one process would have saved."""
    two, one = disk / "two", disk / "one"
    zygote.call(jobs.values, 2, 4, programs.save_and_restore, str(two))
    zygote.call(jobs.values, 1, 8, programs.save_and_restore, str(one))
    for path in (two, disk / "two-async", disk / "one-async"):
        assert files_below(path) == files_below(one)
        for name in files_below(one):
            assert (path / name).read_bytes() == (one / name).read_bytes(), name
    zygote.call(jobs.values, 1, 8, programs.restore_anywhere, str(two))
    zygote.call(jobs.values, 4, 2, programs.restore_anywhere, str(two))
    zygote.call(jobs.values, 1, 1, programs.restore_on_one_device, str(two))


@pytest.mark.once
def test_saved_by_four_processes(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 4, 2, programs.save_and_restore, str(disk / "four"))
    zygote.call(jobs.values, 2, 4, programs.restore_anywhere, str(disk / "four"))


def test_a_nan_of_one_process_is_refused_by_all(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    heard = zygote.call(jobs.values, 2, 4, programs.save_a_nan, str(disk / "run"))
    for text, steps in heard:
        assert "1 NaN, 0 infinite" in text
        assert steps == []


def test_all_hear_which_leaf_is_not_reproduced(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    found = zygote.call(jobs.values, 2, 4, programs.audit, str(disk / "run"))
    assert found == [[(2, None, ()), (2, 3, ("w",))]] * 2


def test_each_shares_what_it_would_write(zygote: Zygote, disk: pathlib.Path) -> None:
    copied = zygote.call(
        jobs.values, 2, 4, programs.save_incrementally, str(disk / "run")
    )
    assert copied[0][0] | copied[1][0] >= {"object", "keys", "one", "copies"}
    assert [of_process[1:] for of_process in copied] == [[{"other"}, {"same"}]] * 2
    one, two, three = (disk / "run" / f"00000{step}" for step in (1, 2, 3))
    first, second = (
        {key for key in files_below(a) & files_below(b) if (a / key).samefile(b / key)}
        for a, b in ((one, two), (two, three))
    )
    chunks = {f"c.{i}.0" for i in range(4)}
    of_same = {f"same/{name}" for name in (*chunks, "zarr.json")}
    of_other = {f"other/{name}" for name in (*chunks, "zarr.json")}
    always = {key for key in files_below(one) if key[:4] in ("obje", "copi", "keys")}
    always |= {"one/c.0.0", "one/zarr.json"}
    assert first == of_same | {"other/zarr.json"} | always
    assert second == of_other | always
    for path in (one, two, three):
        assert eqx_ckpt.inspect.verify(path)


def test_each_shares_its_shards_on_its_own_disk(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    save = ft.partial(programs.save_incrementally, shared=False)
    copied = zygote.call(jobs.values, 2, 4, save, str(disk))
    leaves = [[{n.split("/")[1] for n in s - {"step"}} for s in of] for of in copied]
    assert leaves[0][0] == {"object", "keys", "one", "copies", "same", "other"}
    assert [of_process[1:] for of_process in leaves] == [[{"other"}, {"same"}]] * 2
    for index in range(2):
        one, two = (disk / f"{index}/00000{step}/shards" for step in (1, 2))
        kept = {k for k in files_below(one) if (one / k).samefile(two / k)}
        chunks = {key for key in files_below(one) - kept if "/c." in key}
        assert {key.split("/")[0] for key in chunks} == {"other"}


def test_a_step_that_cannot_begin(zygote: Zygote, disk: pathlib.Path) -> None:
    found = zygote.call(jobs.values, 2, 4, programs.fail_to_begin, str(disk / "run"))
    assert [steps for _, steps in found] == [[1, 3], [1, 3]]
    assert [text.endswith("no") for text, _ in found] == [True, True]
    assert not programs.hidden(str(disk / "run"))


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_each_writes_and_reads_its_part(
    zygote: Zygote, disk: pathlib.Path, processes: int, devices: int
) -> None:
    path = disk / "new"
    args = (processes, devices, programs.spread, str(path))
    parts = zygote.call(jobs.values, *args)
    pieces = [piece for part in parts for piece in part.pieces]
    assert len(set(pieces)) == len(pieces)
    assert sum(nbytes for *_, nbytes in pieces) == 3 * programs.SPREAD_BYTES
    sizes = [
        {
            name: sum(nbytes for leaf, _, nbytes in part.pieces if leaf == name)
            for name in ("sharded", "partly", "everywhere")
        }
        for part in parts
    ]
    for name in sizes[0]:
        shares = [size[name] for size in sizes]
        assert max(shares) <= 1.2 * min(shares), (name, shares)
    for part, size in zip(parts, sizes, strict=True):
        # What is counted is what reaches the files.
        assert sum(size.values()) <= part.written <= 1.05 * sum(size.values())
        assert part.needed <= part.read <= 1.05 * part.needed


def test_no_buffer_is_larger_than_a_shard(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array is never gathered on the host, not even in one process."""
    data = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    specs = {"both": P("x", "y"), "rows": P("x"), "columns": P(None, "y")}
    mesh = programs.mesh()
    tree = {n: jax.device_put(data, NamedSharding(mesh, s)) for n, s in specs.items()}
    asarray, sizes = np.asarray, []

    def watched(array, *args, **kwargs):
        found = asarray(array, *args, **kwargs)
        if isinstance(array, jax.Array):
            sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(np, "asarray", watched)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "async", tree).result()
    assert len(sizes) == 2 * (8 + 4 + 2)
    assert max(sizes) == data.nbytes // 2
    assert sum(sizes) == 2 * 3 * data.nbytes


def test_what_the_processes_do_not_agree_on(zygote: Zygote, disk: pathlib.Path) -> None:
    first, second = zygote.call(jobs.values, 2, 4, failing_jobs.disagree, str(disk))
    for name, lines in {
        "more": ["no more leaves", "leaf 'zz', Python int"],
        "shape": ["leaf 'numpy', NumPy int64[4]", "leaf 'numpy', NumPy int64[5]"],
        "dtype": ["leaf 'numpy', NumPy int64[4]", "leaf 'numpy', NumPy float64[4]"],
        "sharding": ["leaf 'w', float32[16, 12], sharded as {", "leaf 'w', float32"],
        "overwrite": [f"path '{disk}/new'", f"path '{disk}/new', overwrite=True"],
        "layout": [f"path '{disk}/new', overwrite=False, layout='", "path"],
        "compression": [f"leaf 'numpy', {OF_ONE}None", f"leaf 'numpy', {OF_ONE}'zstd'"],
        "path": [f"save('{disk}/new')", f"save('{disk}/other')"],
        "step": [f"save(1) in '{disk}/after run'", f"save(2) in '{disk}/after run'"],
        "no step": [f"save(3) in '{disk}/after run'", f"save(-3) in '{disk}/after"],
    }.items():
        case, other = first.pop(name), second.pop(name)
        assert (case.kind, case.text) == (other.kind, other.text)
        is_call = name in ("path", "step", "no step")
        verb, kind = ("call", "Checkpoint") if is_call else ("save", "LeafMismatch")
        assert case.kind == f"{kind}Error"
        assert case.text.startswith(f"The processes do not {verb} the same:\n")
        for index, line in enumerate(lines):
            assert f"\n- process {index}: {line}" in case.text, name
        _check_soon_and_clean(case)
    for name, kind, words in [
        ("place", "LeafMismatchError", "Leaf 'one' is on the devices of process "),
        ("impossible", "CheckpointError", "'numpy' is a `jax.ShapeDtypeStruct`"),
        ("exists", "CheckpointExistsError", f"'{disk}/after path' exists already"),
        ("memory", "CheckpointError", "is in the memory of one process"),
    ]:
        for case in (first.pop(name), second.pop(name)):
            assert case.kind == kind
            assert words in case.text
            _check_soon_and_clean(case)
    assert not first
    assert not second


def _check_soon_and_clean(case: failing_jobs.Case) -> None:
    assert case.seconds < programs.TIMEOUT  # So it was not that which ended it.
    assert not case.entries


@pytest.mark.parametrize("program", [failing_jobs.fail, failing_jobs.unseen])
def test_what_fails_on_one_fails_on_all(
    zygote: Zygote, disk: pathlib.Path, program
) -> None:
    first, second = zygote.call(jobs.values, 2, 4, program, str(disk))
    failing = dict.fromkeys(("not shared", "swapped", "disk full", "flush"), 1)
    for name, case in first.items():
        assert case.kind == second[name].kind != "", name
        errors = [case.text, second[name].text]
        culprit = failing.get(name, 0)
        own = re.sub(r"^\[Errno \d+\] ", "", errors[culprit])
        assert f"Process {culprit} failed: {case.kind}: " in errors[1 - culprit], name
        assert own in errors[1 - culprit], name
        _check_soon_and_clean(case)
    if program is failing_jobs.fail:
        path = f"{disk}/.new."
        assert f"Process 1 does not see {path}" in first["not shared"].text
        assert "save to one shared directory" in first["not shared"].text
        assert "is not the directory that process 0 has opened" in first["swapped"].text
    assert not programs.hidden(str(disk))


def test_a_failure_to_remove_old_steps_is_told_to_all(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    ends = zygote.call(
        jobs.values, 2, 4, failing_jobs.fail_to_remove, str(disk / "run")
    )
    for step, kind, text in [(s, *e) for end in ends for s, e in end[0].items()]:
        assert kind == "OSError"
        assert f"Step {step} was saved. Removing older steps failed." in text
    assert [steps for _, steps in ends] == [[4], [4]]


def test_a_deletion_that_a_process_does_not_wait_for(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """It may have happened, as here, and the error says so."""
    args = 2, 4, failing_jobs.give_up_on_a_deletion, str(disk)
    for (kind, text), steps in zygote.call(jobs.values, *args):
        assert kind == "CheckpointError"
        assert "No answer from process 0 of 2" in text
        assert "Whether step 1 was deleted is not known: `steps()` says" in text
        assert steps == [2, 3]


def test_a_run(zygote: Zygote, disk: pathlib.Path) -> None:
    first, second = zygote.call(
        jobs.values, 2, 4, failing_jobs.train, str(disk / "run")
    )
    for seen in (first, second):
        assert seen["after saving"] == [[1], [2, 3], [3, 4]]
        assert (seen["latest"], seen["best"]) == (4, 4)
        kind, text = seen["damaged"]
        assert kind == "CorruptCheckpointError"
        assert "'w': w/c.3.0 is damaged" in text
        assert "Step 3 is intact" in text
        (warning,) = seen["fallback"]
        assert warning.startswith("Step 4 is damaged, and step 3 was restored: ")
        kind, text = seen["another tree"]
        assert kind == "LeafMismatchError"
        assert "'more': Python int in `like`, not in the checkpoint" in text
        assert seen["at the end"] == [4, 5]
    # Only process 1 reads the damaged chunk, and only it has another tree.
    for what in ("damaged", "another tree"):
        assert first[what][1].startswith("Process 1 failed: ")
        assert not second[what][1].startswith("Process ")


def test_damage_that_one_process_reads_for_all(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    args = (2, 4, failing_jobs.read_once_what_is_damaged, str(disk / "new"))
    for kind, text in zygote.call(jobs.values, *args):
        assert kind == "CorruptCheckpointError"
        assert "'same': same/c.0.0 is damaged" in text


@pytest.mark.once
def test_several_saves_in_the_background(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 2, 4, failing_jobs.in_the_background, str(disk))


@pytest.mark.once
@pytest.mark.parametrize("who", [0, 1])
def test_kill_one_process(zygote: Zygote, disk: pathlib.Path, who: int) -> None:
    """The older step is intact, no half of the new one is seen, and no debris stays."""
    calls = [
        (2, 4, dying_jobs.save_and_die, str(disk / point), who, point, 8.0)
        for point in dying_jobs.POINTS
    ]
    for (*_, point, timeout), ends in zip(
        calls, zygote.call(jobs.at_once, calls), strict=True
    ):
        saved = dying_jobs.check_ends(ends, who, point, timeout)
        found = zygote.call(jobs.values, 1, 8, dying_jobs.resume, str(disk / point))
        assert found == [[1, 2] if saved else [1]], point


@pytest.mark.once
def test_process_0_hangs_and_dies(zygote: Zygote, disk: pathlib.Path) -> None:
    calls = [
        (2, 4, dying_jobs.save_and_hang, str(disk / point), 0, point, 3.0)
        for point in dying_jobs.POINTS
    ]
    for (*_, point, timeout), ends in zip(
        calls, zygote.call(jobs.at_once, calls), strict=True
    ):
        dying_jobs.check_names(ends[1], 0, timeout + dying_jobs.TIMEOUT_MARGIN, point)
        saved = point == "after the commit"
        unknown = "Whether this call succeeds is not known" in ends[1].value[1]
        assert unknown or not saved
        found = zygote.call(jobs.values, 1, 8, dying_jobs.resume, str(disk / point))
        assert found == [[1, 2] if saved else [1]], point


@pytest.mark.slow
def test_kill_one_of_four(zygote: Zygote, disk: pathlib.Path) -> None:
    """The others name it, and not process 0, which tells them or is late itself."""
    first, second = str(disk / "first"), str(disk / "second")
    calls = [
        (4, 2, dying_jobs.save_and_die, first, 2, "amid the writes", 12.0),
        (4, 2, dying_jobs.die_while_first_is_late, second, 2, 12.0),
    ]
    for ends in zygote.call(jobs.at_once, calls):
        assert ends[2].signal == signal.SIGKILL
        for index in (0, 1, 3):
            dying_jobs.check_names(
                ends[index], 2, 12.0 + dying_jobs.TIMEOUT_MARGIN, f"process {index}"
            )
            assert "from process 2 of 4 within 12 seconds" in ends[index].value[1]
    for directory in (first, second):
        assert zygote.call(jobs.values, 1, 8, dying_jobs.resume, directory) == [[1]]


@pytest.mark.once
@pytest.mark.parametrize("who", [0, 1])
def test_a_late_process_is_named(zygote: Zygote, disk: pathlib.Path, who: int) -> None:
    """All of them raise, nothing is saved, and the next save works."""
    ends = zygote.call(jobs.values, 2, 4, dying_jobs.be_late, str(disk), who, 3.0)
    for point in ends[0]:
        for case in (cases[point] for cases in ends):
            assert case.kind == "CheckpointError", point
            assert f"No answer from process {who} of 2 within 3 seconds" in case.text
            assert not case.entries, point


def test_without_the_coordination_service(zygote: Zygote, disk: pathlib.Path) -> None:
    ends = zygote.call(jobs.values, 2, 4, failing_jobs.without_a_service, str(disk))
    for warned, different, exists, entries in ends:
        assert [line for line in warned if "no coordination service" in line] == warned
        assert len(warned) == 1
        assert different[0] == "LeafMismatchError"
        assert "- process 1: leaf 'zz', Python int" in different[1]
        assert exists[0] == "CheckpointExistsError"
        assert entries == ["async", "new", "run"]


def test_a_job_of_one_process(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(jobs.values, 1, 8, programs.alone, str(disk / "new"))
