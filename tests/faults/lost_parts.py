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
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from support import byte_broadcast, Checkpoint, shard_senders

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
    return {"shared": shared, "local": local() | {"halves": halves(np.arange(8.0))}}


def halves(data: np.ndarray) -> jax.Array:
    """An array that each process has for itself, on two of its devices."""
    on = Mesh(np.array(jax.local_devices()[:2]), ("x",))
    return jax.device_put(data.astype(np.float32), NamedSharding(on, P("x")))


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
    send, sends, found = byte_broadcast._within, [0], list[Any]()

    def sent(seconds: float, data: np.ndarray, is_source: bool) -> np.ndarray:
        sends[0] += is_source
        return send(seconds, data, is_source=is_source)

    for number, lost in enumerate(LOST_OF_FOUR):
        sends[0] = 0
        with mock.patch.object(byte_broadcast, "_within", sent):
            case = Case(AxisType.Explicit, True, lost, False)
            _, error, is_here, _ = restore_case(f"{place}/{number}", case)
        assert is_here
        found.append((sends[0], error))
    return found


@contextlib.contextmanager
def read_of(place: str) -> Generator[list[str]]:
    """The leaves of which data are read from the mirror, once for each time."""
    whole, read = Checkpoint.read, list[str]()

    def spy(self: Checkpoint, *args: Any) -> Any:
        if f"{place}/there" in str(self):
            read.extend(one.name for one in args[0])
        return whole(self, *args)

    with mock.patch.object(Checkpoint, "read", spy):
        yield read


def _damage(place: str, step: int, name: str, which: int = 0) -> None:
    """Change a bit in the first chunk of a shard of a leaf."""
    folder = disk(place) / f"{step:06}" / "shards" / name
    chunk = min(sorted(folder.glob("at*"))[which].glob("c*"))
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

    def spoil_halves(here: str) -> None:
        _damage(here, 2, "shared/columns", index)
        _damage(here, 2, "local/halves", index)

    def lose_beside_half(here: str) -> None:
        if index == 0:
            shutil.rmtree(disk(here) / "000002")
        else:
            _damage(here, 2, "local/halves")

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
    case("halves", spoil_halves)
    case("lost half", lose_beside_half)
    case("lost half, mirrored", lose_beside_half, is_mirrored=True)
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
    send, heard, sends = byte_broadcast._within, list[Any](), [0]

    def change(at: int) -> Callable[..., Any]:
        def sent(seconds: float, data: np.ndarray, is_source: bool) -> np.ndarray:
            found = np.array(send(seconds, data, is_source=is_source))
            found[found.size // 2] ^= 1 if jax.process_index() and sends[0] == at else 0
            sends[0] += 1
            return found

        return sent

    if jax.process_index():
        shutil.rmtree(disk(place))
    with manager(place) as one:
        for at in (0, 1):
            sends[0] = 0
            with mock.patch.object(byte_broadcast, "_within", change(at)):
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
    send, sends = byte_broadcast._within, itertools.count()

    def sent(seconds: float, data: np.ndarray, is_source: bool) -> np.ndarray:
        if is_source and next(sends):
            die()
        return send(seconds, data, is_source=is_source)

    if jax.process_index() == 0:
        shutil.rmtree(disk(place))
    with mock.patch.object(byte_broadcast, "_within", sent):
        one = manager(place, timeout=5.0)
        return caught(one.restore, expected)


class Resharded(NamedTuple):
    """How a leaf is saved, and how it is wanted, over the axes of a mesh."""

    axes: AxisType
    saved: tuple[tuple[int, int], P]
    wanted: tuple[tuple[int, int], P]

    def sharding(self, what: tuple[tuple[int, int], P]) -> NamedSharding:
        shape, spec = what
        on = np.array(jax.devices()).reshape(shape)
        return NamedSharding(Mesh(on, ("x", "y"), axis_types=(self.axes,) * 2), spec)

    def is_here(self, shape: tuple[int, ...]) -> bool:
        """Whether what is saved on this process has each element that it wants."""
        has, wants = np.zeros(shape, bool), np.zeros(shape, bool)
        for mask, what in ((has, self.saved), (wants, self.wanted)):
            indices = self.sharding(what).addressable_devices_indices_map(shape)
            for index in indices.values():
                mask[index] = True
        return bool((has | ~wants).all())


def resharded(chance: random.Random, axes: AxisType) -> Resharded:
    specs = [P(), P("x"), P("y"), P(None, "x"), P(None, "y"), P(("x", "y"))]
    specs += [P("x", "y"), P("y", "x"), P(("y", "x")), P(None, ("x", "y"))]
    shapes = [(2, 4), (4, 2), (8, 1)]
    one, other = (
        (chance.choice(shapes), chance.choice(specs)) for _ in ("saved", "wanted")
    )
    return Resharded(axes, one, other)


def reshard(place: str, seed: int, count: int) -> list[tuple[bool, bool]]:
    """Restore many leaves with other shardings, with a mirror, and then without.

    Return of each whether this process had all that it wants, and what was seen.
    """
    chance, shape = random.Random(seed), (16, 24)
    kinds: list[Any] = [np.float32, ml_dtypes.bfloat16, np.int8, bool, "key"]
    how = {
        "layout": chance.choice(["zarr", "ocdbt"]),
        "compression": chance.choice([None, "zstd"]),
    }
    cases = {
        f"w{i}": resharded(chance, (AxisType.Auto, AxisType.Explicit)[i % 2])
        for i in range(count)
    }

    def array(name: str, what: tuple[tuple[int, int], P]) -> jax.Array:
        number = int(name[1:])
        kind, data = kinds[number % len(kinds)], np.arange(16 * 24).reshape(shape)
        sharding = cases[name].sharding(what)
        if kind == "key":
            pairs = np.stack([data, data + number], -1).astype(np.uint32)
            return jax.random.wrap_key_data(shared(pairs, sharding))
        return shared(((data + number) % 127).astype(kind), sharding)

    saved = {name: array(name, case.saved) for name, case in cases.items()}
    wanted = {name: array(name, case.wanted) for name, case in cases.items()}
    mirror = eqx_ckpt.Mirror(f"{place}/there")
    with manager(place, mirror=mirror, **how) as one:
        one.save(1, saved).result()
    with manager(place, mirror=mirror) as one, read_of(place) as read:
        assert_same(one.restore(wanted), wanted)
    is_here = {name: case.is_here(shape) for name, case in cases.items()}
    alone = manager(place)
    everywhere = [*zip(*multihost_said([*is_here.values()]), strict=True)]
    easy = [name for name, all in zip(cases, everywhere, strict=True) if min(all)]
    some = {name: wanted[name] for name in easy}
    assert_same(alone.restore(some, unexpected="ignore"), some)
    hard = [name for name in cases if name not in easy]
    for name in hard[:1]:
        kind, text = caught(alone.restore, {name: wanted[name]}, unexpected="ignore")
        assert kind == "CheckpointError", text
        assert f"leaf {name!r}" in text
        assert "Restore it with the shardings" in text
    return [(here, name not in read) for name, here in is_here.items()]


def multihost_said(values: list[bool]) -> np.ndarray:
    """What each process says."""
    return np.asarray(multihost_utils.process_allgather(np.array(values)))


def lose_unevenly(place: str) -> list[Any]:
    """The processes have different numbers of devices, and each disk is lost once."""
    seen: list[Any] = []
    on = Mesh(np.array(jax.devices()), ("x",))
    for lost, is_mirrored in itertools.product((0, 1), (False, True)):
        here = f"{place}/{lost}{is_mirrored}"
        specs = {"same": P()} | ({"rows": P("x")} if is_mirrored else {})
        expected = {
            name: shared(value("rows"), NamedSharding(on, spec))
            for name, spec in specs.items()
        } | {"local": local()}
        how = saved(here, expected, 1, is_mirrored=is_mirrored)
        if jax.process_index() == lost:
            shutil.rmtree(disk(here))
        with manager(here, **how) as one, read_of(here) as read:
            assert_same(one.restore(expected), expected)
        assert eqx_ckpt.inspect.verify(disk(here) / "000001")
        seen.append({*read})
    return seen


def lose_beside_a_repaired_part(place: str) -> Any:
    """Process 1 repairs a shard, and then process 2 loses its disk.

    The repaired part has its arrays in another order than that of process 0.
    """
    expected = {"halves": halves(np.arange(8.0))}
    saved(place, expected, 1, is_mirrored=False)
    if jax.process_index() == 1:
        _damage(place, 1, "halves", 1)
    with manager(place) as one:
        assert_same(one.restore(expected, on_damage="fallback"), expected)
    if jax.process_index() == 2:
        shutil.rmtree(disk(place))
    with manager(place) as one:
        error = caught(lambda: assert_same(one.restore(expected), expected))
        assert one.latest() == 1
    return error


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
