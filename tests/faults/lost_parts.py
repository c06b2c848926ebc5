"""What processes with disks of their own lose, and restore; run in all of them."""

import contextlib
import itertools
import pathlib
import random
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt._distributed import byte_broadcast
from eqx_ckpt._sources import shard_senders
from eqx_ckpt._sources.checkpoint_source import Checkpoint

from .dying_jobs import die
from .failing_jobs import caught
from .programs import assert_same, leaf, local, shared, TIMEOUT, value


# The mesh has one row for each process. So each process has all of these,
EVERYWHERE = {
    "nowhere": P(),
    "columns": P(None, "y"),
    "bfloat16": P("y"),
    "keys": P("y"),
    "same_keys": P(),
    "bits": P("y"),
}
# and only its own rows of these.
APART = {"rows": P("x"), "both": P("x", "y"), "one_axis": P(("x", "y"))}


# The processes of four whose disks are empty.
LOST_OF_FOUR = (1,), (0, 2), (0, 1, 3)


class Case(NamedTuple):
    """`lost`: the processes whose disks are empty."""

    axes: AxisType
    is_everywhere: bool
    lost: tuple[int, ...]
    is_mirrored: bool


def cases() -> Iterator[Case]:
    axes = AxisType.Auto, AxisType.Explicit
    lost = (), (0,), (1,), (0, 1)
    for case in itertools.product(axes, (True, False), lost, (False, True)):
        yield Case(*case)


def mesh(axes: AxisType) -> Mesh:
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    return Mesh(devices, ("x", "y"), axis_types=(axes, axes))


def tree(on: Mesh, *, is_everywhere: bool) -> dict[str, Any]:
    specs = EVERYWHERE if is_everywhere else EVERYWHERE | APART
    shared = {name: leaf(name, NamedSharding(on, spec)) for name, spec in specs.items()}
    return {"shared": shared, "local": local()}


def manager(place: str, **how: Any) -> eqx_ckpt.CheckpointManager:
    return eqx_ckpt.CheckpointManager(
        f"{place}/disk{jax.process_index()}",
        shared=False,
        **({"timeout": TIMEOUT} | how),
    )


def disk(place: str) -> pathlib.Path:
    return pathlib.Path(place, f"disk{jax.process_index()}")


def saved(place: str, saved: Any, *steps: int, is_mirrored: bool) -> dict[str, Any]:
    """Save steps; return the arguments of a manager with the same mirror."""
    how = {"mirror": eqx_ckpt.Mirror(f"{place}/there")} if is_mirrored else {}
    with manager(place, **how) as one:
        for step in steps:
            one.save(step, saved).result()
    return how


def restore_what_is_left(place: str) -> dict[str, Any]:
    """What each case restores, and how many reads are from the mirror."""
    return {
        str(case): restore_case(f"{place}/{number}", case)
        for number, case in enumerate(cases())
    }


def restore_case(place: str, case: Case) -> tuple[int | None, Any, bool, int]:
    """The newest step, what a restore raises, whether it is here, and those reads."""
    on = mesh(case.axes)
    expected = tree(on, is_everywhere=case.is_everywhere)
    how = saved(place, expected, 1, is_mirrored=case.is_mirrored)
    if jax.process_index() in case.lost:
        shutil.rmtree(disk(place))
    with (
        manager(place, **how) as one,
        jax.set_mesh(on),
        read_of(place) as read,
        mock.patch.object(byte_broadcast, "_BUFFER_BYTES", 2**11),
    ):
        latest = one.latest()
        error = caught(lambda: assert_same(one.restore(expected), expected))
        assert one.latest() == latest
    return latest, error, (disk(place) / "000001").is_dir(), len(read)


def share_the_sending(place: str) -> list[tuple[int, Any]]:
    """How many buffers this process sends in each case, and what a restore raises."""
    send, sends, found = multihost_utils.broadcast_one_to_all, [0], list[Any]()

    def sent(data: np.ndarray, is_source: bool) -> np.ndarray:
        sends[0] += is_source
        return send(data, is_source=is_source)

    for number, lost in enumerate(LOST_OF_FOUR):
        sends[0] = 0
        with mock.patch.object(multihost_utils, "broadcast_one_to_all", sent):
            case = Case(AxisType.Explicit, True, lost, False)
            _, error, is_here, _ = restore_case(f"{place}/{number}", case)
        assert is_here
        found.append((sends[0], error))
    return found


@contextlib.contextmanager
def read_of(place: str) -> Generator[list[str]]:
    """The reads of data from the mirror."""
    whole, read = Checkpoint.read, list[str]()

    def spy(self: Checkpoint, *args: Any) -> Any:
        if f"{place}/there" in str(self):
            read.append(str(self))
        return whole(self, *args)

    with mock.patch.object(Checkpoint, "read", spy):
        yield read


def _damage(place: str, step: int, name: str) -> None:
    """Change a bit in the first chunk of the first shard of a leaf."""
    folder = disk(place) / f"{step:06}" / "shards" / name
    chunk = min(folder.glob("at*/c*"))
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)


def damage(place: str) -> dict[str, Any]:
    """What each process hears of damage, and what it restores with a fallback."""
    index, heard = jax.process_index(), dict[str, Any]()
    on = mesh(AxisType.Explicit)

    def case(
        name: str,
        spoil: Callable[[str], Any],
        *,
        is_everywhere: bool = True,
        is_mirrored: bool = False,
    ) -> None:
        """Spoil the second of two steps, and restore the newest."""
        here = f"{place}/{name}"
        expected = tree(on, is_everywhere=is_everywhere)
        how = saved(here, expected, 1, 2, is_mirrored=is_mirrored)
        spoil(here)
        with manager(here, **how) as one:
            raised = caught(one.restore, expected)
            there = (disk(here) / "000002").is_dir()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                assert_same(one.restore(expected, on_damage="fallback"), expected)
            messages = [str(w.message) for w in warned]
            if messages:
                one.save(2, expected).result()
            assert_same(one.restore(expected, 2), expected)
        assert eqx_ckpt.inspect.verify(disk(here) / "000002")
        heard[name] = raised, there, messages

    def spoil_two(here: str) -> None:
        _damage(here, 2, ("shared/nowhere", "shared/columns")[index])

    def spoil_same(here: str) -> None:
        _damage(here, 2, "shared/nowhere")

    def spoil_local(here: str) -> None:
        _damage(here, 2, ("local/numpy", "local/key")[index])

    def spoil_apart(here: str) -> None:
        _damage(here, 2, ("shared/both", "shared/rows")[index])

    def spoil_step(here: str) -> None:
        if index == 1:
            chunk = disk(here) / "000002/step/c.0"
            chunk.write_bytes(bytes(chunk.stat().st_size))

    def cut_manifest(here: str) -> None:
        if index == 1:
            manifest = disk(here) / "000002/zarr.json"
            manifest.write_bytes(manifest.read_bytes()[:-9])

    def lose_beside_damage(here: str) -> None:
        if index == 0:
            _damage(here, 2, "shared/bits")
        else:
            shutil.rmtree(disk(here))

    case("two", spoil_two)
    case("same", spoil_same)
    case("same, mirrored", spoil_same, is_mirrored=True)
    case("local", spoil_local)
    case("apart", spoil_apart, is_everywhere=False)
    case("apart, mirrored", spoil_apart, is_everywhere=False, is_mirrored=True)
    case("step", spoil_step)
    case("manifest", cut_manifest)
    case("lost", lose_beside_damage)
    heard["in transit"] = _change_in_transit(f"{place}/transit", on)
    return heard


def _change_in_transit(place: str, on: Mesh) -> Any:
    """What all hear if one bit changes on the way to process 1, in any of the sends."""
    expected = tree(on, is_everywhere=True)
    saved(place, expected, 1, is_mirrored=False)
    send, heard, sends = multihost_utils.broadcast_one_to_all, list[Any](), [0]

    def change(at: int) -> Callable[..., Any]:
        def sent(data: np.ndarray, is_source: bool) -> np.ndarray:
            found = np.array(send(data, is_source=is_source))
            found[found.size // 8] ^= 1 if jax.process_index() and sends[0] == at else 0
            sends[0] += 1
            return found

        return sent

    if jax.process_index():
        shutil.rmtree(disk(place))
    with manager(place) as one:
        for at in (0, 1):
            sends[0] = 0
            with mock.patch.object(multihost_utils, "broadcast_one_to_all", change(at)):
                error = caught(one.restore, expected)
            heard.append([error, (disk(place) / "000001").is_dir()])
        with mock.patch.object(shard_senders, "read_regions", _fail):
            error = caught(one.restore, expected)
            heard.append([error, (disk(place) / "000001").is_dir()])
        jax.config.update("jax_transfer_guard", "disallow")
        found = one.restore(expected)
        jax.config.update("jax_transfer_guard", "allow")
        assert_same(found, expected)
    return heard


def _fail(*args: Any) -> None:
    raise ValueError("what no one has thought of")


def die_while_sending(place: str) -> tuple[str, str]:
    """Process 1 dies when it is to send its second buffer; process 0 lacks all."""
    expected = tree(mesh(AxisType.Auto), is_everywhere=True)
    saved(place, expected, 1, is_mirrored=False)
    send, sends = multihost_utils.broadcast_one_to_all, itertools.count()

    def sent(data: np.ndarray, is_source: bool) -> np.ndarray:
        if is_source and next(sends):
            die()
        return send(data, is_source=is_source)

    if jax.process_index() == 0:
        shutil.rmtree(disk(place))
    with mock.patch.object(multihost_utils, "broadcast_one_to_all", sent):
        one = manager(place, timeout=5.0)
        return caught(one.restore, expected)


def train_incrementally(place: str, seed: int) -> dict[tuple[int, ...], int]:
    """Change leaves, save, and lose disks at random; count the losses.

    Compare which files of a step are those of the step before, here and in the mirror.
    """
    chance, on = random.Random(seed), mesh(AxisType.Explicit)
    specs, versions, saved = EVERYWHERE | APART, dict[str, int](), list[Any]()
    process = jax.process_index()

    def now() -> dict[str, Any]:
        return {
            name: shared(
                value(name).view(np.uint8) + versions.get(name, 0),
                NamedSharding(on, spec),
            )
            for name, spec in specs.items()
        }

    def opened() -> eqx_ckpt.CheckpointManager:
        mirror = eqx_ckpt.Mirror(f"{place}/there")
        one = manager(place, incremental=True, mirror=mirror)
        if saved:
            assert_same(one.restore(now()), saved[-1])
        return one

    def save(changed: set[str]) -> None:
        step = len(saved) + 1
        saved.append(now())
        one.save(step, saved[-1]).result()
        one.wait()
        if process == 0:
            assert one.uploads()[step].result(TIMEOUT) is None
        for run in (disk(place), pathlib.Path(place, "there")):
            is_base = (run / f"{step - 1:06}").is_dir()  # It is not if all is lost.
            if is_base and (run == disk(place) or process == 0):
                new = {c.parts[-2 - (run == disk(place))] for c in _own(run, step)}
                assert new == changed, (run, step)

    def _own(run: pathlib.Path, step: int) -> list[pathlib.Path]:
        """The chunks of leaves that are not those of the step before."""
        old, new = (run / f"{number:06}" for number in (step - 1, step))
        chunks = [path for path in new.rglob("c.*") if "step" not in path.parts]
        return [c for c in chunks if not c.samefile(old / c.relative_to(new))]

    changed, losses = set[str](), dict[tuple[int, ...], int]()
    one = opened()
    for what in [chance.choice(["change", "save", "lose"]) for _ in range(9)]:
        if what == "change":
            name = chance.choice(sorted(specs))
            versions[name] = versions.get(name, 0) + 1
            changed.add(name)
        elif what == "save":
            save({*changed})
            changed.clear()
        elif not changed and saved:
            one.close()
            lost = chance.choice([(0,), (1,), (0, 1)])
            if process in lost:
                shutil.rmtree(disk(place))
            losses[lost] = losses.get(lost, 0) + 1
            one = opened()
    one.close()
    return losses
