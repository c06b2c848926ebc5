"""One measurement, in a process of its own: `run`. This module is also that process.

No measurement then inherits the compiled functions, the warm allocator or the imports
of another.
"""

import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .memory import warm_memory


ROOT = Path(__file__).resolve().parent.parent

# Steps of the run that is listed.
_STEPS = 1000
# More than a save and a restore of the largest tree take together.
_WARM_BYTES = 5 * 2**30
# A peer that takes longer than this is of no interest.
_TIMEOUT_SECONDS = 600

Result = dict[str, Any]
# Begins a save, and returns what waits for its end.
Start = Callable[[Path, Any], Callable[[], Any]]


class Timed(NamedTuple):
    """What a function returned, and what that took; `cpu` is of all threads."""

    seconds: float
    cpu: float
    value: Any


def run(action: str, peer: str, workload: str, scale: str, path: Path) -> Result:
    """What one of the `ACTIONS` returns in a fresh process."""
    result = {"action": action, "peer": peer, "workload": workload, "scale": scale}
    command = [sys.executable, "-m", "benchmarks.measure"]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    if workload == "E":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    # Without compiled files an import would be a compilation.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            [*command, action, peer, workload, scale, str(path)],
            capture_output=True,
            cwd=ROOT,
            env=environment,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        return result | json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return result | {"error": f"more than {_TIMEOUT_SECONDS} seconds"}
    except (IndexError, ValueError):
        return result | {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}


def save(peer: str, workload: str, scale: str, path: Path) -> Result:
    """A durable save, and the memory that it takes beside the tree."""
    from .peers import PEERS
    from .workloads import filled, nbytes, skeleton

    opened = PEERS[peer]()
    tree = filled(skeleton(workload, scale))
    adapted = opened.adapt(tree)
    os.sync()
    _warm_memory(scale)
    base = reset_peak()
    saving = _timed(lambda: opened.save(path, adapted))
    return {
        "save": saving.seconds,
        "save_cpu": saving.cpu,
        "save_peak": peak_memory() - base,
        "nbytes": nbytes(tree),
    }


def restore(peer: str, workload: str, scale: str, path: Path) -> Result:
    """The first restore in a process from the page cache, then two more."""
    restore_once, check = _restorer(peer, workload, scale, path)
    for file in _files(path):
        _read_through(file)
    _warm_memory(scale)
    base, read = reset_peak(), _bytes_read()
    first = timed = _timed(restore_once)
    peak, read = peak_memory() - base, _bytes_read() - read
    first = first._replace(value=None)
    later: list[Timed] = []
    for _ in range(2):
        del timed
        _warm_memory(scale)
        timed = _timed(restore_once)
        later.append(timed._replace(value=None))
    check(timed.value)
    return {
        "first": first.seconds,
        "first_cpu": first.cpu,
        "steady": sum(t.seconds for t in later) / 2,
        "steady_cpu": sum(t.cpu for t in later) / 2,
        "restore_peak": peak,
        "read": read,
    }


def cold(peer: str, workload: str, scale: str, path: Path) -> Result:
    """The first restore in a process, when nothing of the files is in memory."""
    restore_once, check = _restorer(peer, workload, scale, path)
    _warm_memory(scale)
    how = _forget(path)
    timed = _timed(restore_once)
    check(timed.value)
    return {"cold": timed.seconds, "cold_cpu": timed.cpu, "forgotten_by": how}


def background(peer: str, workload: str, scale: str, path: Path) -> Result:
    """Three saves in the background; then five, each with a step right behind it.

    The step donates all arrays, so it pays for what a save still holds of them.
    """
    from .peers import PEERS
    from .workloads import check_same, filled, nbytes, skeleton

    opened = PEERS[peer]()
    if opened.start is None:
        raise NotImplementedError(f"{peer} cannot save in the background")
    like = opened.adapt(skeleton(workload, scale))
    tree = opened.adapt(filled(skeleton(workload, scale)))
    _warm_memory(scale)
    base = reset_peak()
    first, _ = _started(opened.start, path / "0", tree)
    peak = peak_memory() - base
    later = [_started(opened.start, path / str(i), tree) for i in (1, 2)]

    training = _Training(tree, path.parent / "compiled")
    del tree
    step = statistics.median([_timed(training.step).seconds for _ in range(5)][2:])
    _warm_memory(scale)
    base = reset_peak()
    stepped = [training.step_behind(opened.start, path / str(i)) for i in range(3, 8)]
    step_peak = peak_memory() - base

    again = _Training(opened.adapt(filled(skeleton(workload, scale))))
    for _ in range(9):
        again.step()
    check_same(opened.restore(path / "7", like), again.tree)
    return {
        "blocked_first": first.seconds,
        "blocked": statistics.fmean(blocked.seconds for blocked, _ in later),
        "blocked_cpu": statistics.fmean(blocked.cpu for blocked, _ in later),
        "blocked_step": statistics.median(stepped) - step,
        "step": step,
        "durable": statistics.fmean(whole.seconds for _, whole in later),
        "durable_cpu": statistics.fmean(whole.cpu for _, whole in later),
        "async_peak": peak,
        "step_peak": step_peak,
        "nbytes": nbytes(like),
    }


def _started(start: Start, path: Path, tree: Any) -> tuple[Timed, Timed]:
    """A save in the background, until its call returns, and until it is durable."""
    os.sync()
    blocked = _timed(lambda: start(path, tree))
    rest = _clocked(blocked.value)
    whole = Timed(blocked.seconds + rest.seconds, blocked.cpu + rest.cpu, None)
    return blocked, whole


class _Training:
    """A tree that a compiled step changes in its own memory."""

    def __init__(self, tree: Any, compiled: Path | None = None) -> None:
        import jax

        if compiled is not None:
            # For C it takes half a minute, and is the same for all peers.
            jax.config.update("jax_compilation_cache_dir", str(compiled))
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self._step = jax.jit(lambda leaves: [x + 1 for x in leaves], donate_argnums=0)

    @property
    def tree(self) -> Any:
        return self._treedef.unflatten(self._leaves)

    def step(self) -> Any:
        self._leaves = self._step(self._leaves)
        return self._leaves

    def step_behind(self, start: Start, path: Path) -> float:
        """Seconds until a save has begun, and the step behind it is done."""
        os.sync()
        timed = _timed(lambda: (start(path, self.tree), self.step()))
        timed.value[0]()
        return timed.seconds


def manager(peer: str, workload: str, scale: str, path: Path) -> Result:
    """The same save by a manager, and without one, in turn."""
    import eqx_ckpt

    from .workloads import filled, skeleton

    tree = filled(skeleton(workload, scale))
    run = eqx_ckpt.CheckpointManager(path / "run")
    ways: dict[str, Callable[[int], None]] = {
        "alone": lambda i: eqx_ckpt.tree_serialise_leaves(path / f"{i}", tree),
        "managed": lambda i: run.save(i, tree).result(),
    }
    timed: dict[str, list[Timed]] = {key: [] for key in ways}
    for i in range(4):
        for key in sorted(ways, reverse=i % 2 == 1):
            os.sync()
            _warm_memory(scale)
            timed[key].append(_timed(lambda save=ways[key], i=i: save(i)))
    run.close()
    # The first one of a process is slower, whichever it is.
    later = {key: found[1:] for key, found in timed.items()}
    seconds = {k: statistics.median(t.seconds for t in v) for k, v in later.items()}
    cpu = {f"{k}_cpu": statistics.median(t.cpu for t in v) for k, v in later.items()}
    return seconds | cpu


def listing(peer: str, workload: str, scale: str, path: Path) -> Result:
    """What is asked of a run of 1,000 steps, each with a manifest as large as B's."""
    import eqx_ckpt

    from .workloads import filled, skeleton, tiny

    tree = filled(tiny(skeleton("B", scale)))
    eqx_ckpt.tree_serialise_leaves(path / f"{0:06d}", tree, metadata={"loss": 1.0})
    for step in range(1, _STEPS):
        # Nothing but the manifest of a step is looked at.
        (path / f"{step:06d}").mkdir()
        shutil.copy(path / f"{0:06d}/zarr.json", path / f"{step:06d}")
    run = eqx_ckpt.CheckpointManager(path)
    results: Result = {"steps": _timed(run.steps).seconds}
    results["latest"] = _timed(run.latest).seconds
    results["best"] = _timed(lambda: run.best("loss")).seconds
    results["best_again"] = _timed(lambda: run.best("loss")).seconds

    keep = eqx_ckpt.keep_best("loss", 2 * _STEPS)
    keeping = eqx_ckpt.CheckpointManager(path, keep=keep)
    alone = eqx_ckpt.CheckpointManager(path / "alone")
    managers = {
        "save_alone": alone,
        "save_among": run,
        "save_best": keeping,
        "save_best_again": keeping,
    }
    for i, (key, manager) in enumerate(managers.items()):
        os.sync()
        timed = _timed(lambda m=manager, step=_STEPS + i: _save_one(m, step))
        results[key] = timed.seconds
    return results


def _save_one(manager: Any, step: int) -> None:
    """Save a step that `keep_best` keeps, so that none is removed."""
    manager.save(step, 0.0, metadata={"loss": 1.0}).result()


def imports(*_: Any) -> Result:
    """What importing eqx_ckpt adds to importing equinox."""
    import equinox  # noqa: F401

    def import_ours() -> None:
        import eqx_ckpt  # noqa: F401

    return {"import": _timed(import_ours).seconds}


def _restorer(
    peer: str, workload: str, scale: str, path: Path
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What restores once, and what checks the values."""
    import jax

    from .peers import PEERS
    from .workloads import check_same, filled, SAVED_BY, skeleton, target

    opened = PEERS[peer]()
    like = target(workload, scale)
    adapted = opened.adapt(like)
    function = opened.restore
    if workload == "D":
        if opened.restore_part is None:
            raise NotImplementedError(f"{peer} cannot restore a part")
        function = opened.restore_part
    jax.block_until_ready(jax.device_put(0.0))

    def check(restored: Any) -> None:
        tree = filled(skeleton(SAVED_BY.get(workload, workload), scale))
        check_same(restored, {"model": tree["model"]} if workload == "D" else tree)

    return lambda: function(path, adapted), check


def _timed(function: Callable[[], Any]) -> Timed:
    gc.collect()
    return _clocked(function)


def _warm_memory(scale: str) -> None:
    if scale != "small":
        warm_memory(_WARM_BYTES)


def _clocked(function: Callable[[], Any]) -> Timed:
    import jax

    start, cpu = time.perf_counter(), time.process_time()
    value = jax.block_until_ready(function())
    return Timed(time.perf_counter() - start, time.process_time() - cpu, value)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _read_through(file: Path) -> None:
    buffer = bytearray(2**20)
    with open(file, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


def _forget(path: Path) -> str:
    """Empty the page cache of what is below `path`; of names too where we may."""
    os.sync()
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("2")
        return "fadvise, drop_caches"
    return "fadvise"


def _bytes_read() -> int:
    """What this process has read so far, from files and from the page cache."""
    for line in Path("/proc/self/io").read_text().splitlines():
        key, _, value = line.partition(": ")
        if key == "rchar":
            return int(value)
    raise ValueError("no rchar in /proc/self/io")


def reset_peak() -> int:
    """Let the peak of this process's memory begin anew; the memory it has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {key} in /proc/self/status")


_ALL = (save, restore, cold, background, manager, listing, imports)
ACTIONS = {f.__name__: f for f in _ALL}


if __name__ == "__main__":
    action, peer, workload, scale, path = sys.argv[1:]
    print(json.dumps(ACTIONS[action](peer, workload, scale, Path(path))))
