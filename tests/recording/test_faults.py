"""A recording whose process or disk fails at any file operation."""

import errno
import itertools
import os
import pathlib

import jax
import numpy as np
import pytest

import eqx_ckpt
from faults.shim import Fault
from faults.zygote import Zygote
from recording import chains


pytestmark = pytest.mark.once


BLOCKS = 3


def check(zygote: Zygote, path: str, at_least: int) -> None:
    """What was committed is there; going on gives all, to the bit."""
    safe = zygote.call(chains.safe, path)
    assert at_least <= safe <= BLOCKS
    state = zygote.call(chains.sample, path, BLOCKS)
    found = zygote.call(chains.recorded, path)
    for one, other in zip(found, chains.reference(BLOCKS), strict=True):
        assert np.array_equal(one["theta"], other["theta"])
        assert np.array_equal(one["n"], other["n"])
    last = chains.start()
    for _ in range(BLOCKS):
        last, _, _ = chains.block(last)
    assert state["step"] == last["step"]
    assert np.array_equal(state["x"], last["x"])


def test_kill_at_any_operation(zygote: Zygote, disk: pathlib.Path) -> None:
    for n in itertools.count(1, 11):
        path = str(disk / str(n))
        outcome = zygote.run(chains.sample, path, BLOCKS, fault=Fault(path, n))
        assert outcome.error is None
        check(zygote, path, 0)
        if not outcome.signal:
            break
    assert n > 40
    # The steps above may miss one of these.
    for kind in ("create", "write", "sync", "rename"):
        path = str(disk / kind)
        fault = Fault(path, 2, kinds=(kind,))
        outcome = zygote.run(chains.sample, path, BLOCKS, fault=fault)
        assert outcome.signal, kind
        check(zygote, path, 0)


def test_kill_of_the_one_that_goes_on(zygote: Zygote, disk: pathlib.Path) -> None:
    for n in itertools.count(1, 11):
        path = str(disk / str(n))
        zygote.call(chains.sample, path, 2)
        outcome = zygote.run(chains.sample, path, 3, fault=Fault(path, n))
        check(zygote, path, 2)
        if not outcome.signal:
            break
    assert n > 20


def test_a_disk_that_is_full_at_any_operation(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    for n in itertools.count(2, 9):
        path = str(disk / str(n))
        fault = Fault(path, n, "ENOSPC", ("create", "write"), for_ever=True)
        outcome = zygote.run(chains.sample, path, BLOCKS, fault=fault)
        if outcome.error is not None:
            assert isinstance(outcome.error, OSError)
            assert outcome.error.errno == errno.ENOSPC
        check(zygote, path, 0)
        if not outcome.hits:
            break
    assert n > 10


def test_the_error_of_a_full_disk_says_what_is_safe(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    path = str(disk / "run")
    zygote.call(chains.sample, path, 2)
    # The first one is of the metadata.
    fault = Fault(path + "/samples/theta", 2, "ENOSPC", ("write",), for_ever=True)
    error = zygote.run(chains.sample, path, BLOCKS, fault=fault).error
    assert isinstance(error, OSError)
    draws = min(len(chain["n"]) for chain in chains.reference(2))
    text = f"(leaf 'theta', recording {path!r}, {draws} draws are safe; delete"
    assert text in str(error)
    assert "no longer needed, and open the recording again" in str(error)


def fail_and_go_on(path: str, other: str) -> tuple[int, str]:
    """Extend until it fails; how often that was, and what another recording has."""
    recording = eqx_ckpt.recording.Recording(
        path, chains.LIKE, chains=2, chunk_bytes=64
    )
    state, count = chains.start(), 0
    try:
        for count in range(100):  # noqa: B007
            state, samples, _ = chains.block(state)
            recording.extend(samples)
            recording._log._writer.drain()
    except OSError as e:
        message = str(e)
    else:
        message = ""
    recording.close()
    assert chains.sample(other, 2)["step"] == 2 * chains.BLOCK
    return count, message


def test_the_loop_stops_within_two_blocks(zygote: Zygote, disk: pathlib.Path) -> None:
    path = str(disk / "run")
    # The first one is of the metadata.
    fault = Fault(path + "/samples/theta", 2, "ENOSPC", ("create",), for_ever=True)
    outcome = zygote.run(fail_and_go_on, path, str(disk / "other"), fault=fault)
    assert outcome.error is None
    count, message = outcome.value
    assert count <= 3
    assert "0 draws are safe" in message


def extend_a_lot(path: str) -> int:
    """Record 384 MiB in blocks of 32; by how many bytes the process grew at most."""
    like = {"x": np.zeros(2**18, np.float32)}
    block = {"x": np.ones((32, 2**18), np.float32)}
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = []
    with eqx_ckpt.recording.Recording(path, like, chunk_bytes=2**20) as recording:
        for _ in range(12):
            sizes.append(
                page * int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            )
            recording.extend(jax.tree.map(np.copy, block))
    return max(sizes) - sizes[0]


@pytest.mark.slow
def test_memory_is_bounded_when_the_disk_is_slow(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    path = str(disk / "run")
    fault = Fault(path + "/samples", 1, "SLOW", ("write",), for_ever=True)
    outcome = zygote.run(extend_a_lot, path, fault=fault)
    assert outcome.error is None
    # What waits, and a block on its way to the disk.
    assert 128 * 2**20 < outcome.value < (256 + 64) * 2**20
