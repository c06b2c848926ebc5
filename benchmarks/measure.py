"""One measurement, in a process of its own: `run`. This module is also that process.

No measurement then inherits the compiled functions, the warm allocator or the imports
of another.
"""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


ROOT = Path(__file__).resolve().parent.parent

# A peer that takes longer than this is of no interest.
_TIMEOUT_SECONDS = 600

Result = dict[str, Any]


def run(action: str, peer: str, workload: str, scale: str, path: Path) -> Result:
    """What `save`, `restore`, `cold` or `imports` returns in a fresh process."""
    result = {"action": action, "peer": peer, "workload": workload, "scale": scale}
    command = [sys.executable, "-m", "benchmarks.measure"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
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
    base = _reset_peak()
    saving = _timed(lambda: opened.save(path, adapted))
    return {
        "save": saving.seconds,
        "save_cpu": saving.cpu,
        "save_peak": _peak() - base,
        "nbytes": nbytes(tree),
    }


def restore(peer: str, workload: str, scale: str, path: Path) -> Result:
    """The first restore in a process from the page cache, then two more."""
    restore_once, check = _restorer(peer, workload, scale, path)
    for file in _files(path):
        _read_through(file)
    base = _reset_peak()
    first = timed = _timed(restore_once)
    peak = _peak() - base
    first = first._replace(value=None)
    later: list[Timed] = []
    for _ in range(2):
        del timed
        timed = _timed(restore_once)
        later.append(timed._replace(value=None))
    check(timed.value)
    return {
        "first": first.seconds,
        "first_cpu": first.cpu,
        "steady": sum(t.seconds for t in later) / 2,
        "steady_cpu": sum(t.cpu for t in later) / 2,
        "restore_peak": peak,
    }


def cold(peer: str, workload: str, scale: str, path: Path) -> Result:
    """The first restore in a process, when nothing of the files is in memory."""
    restore_once, check = _restorer(peer, workload, scale, path)
    how = _forget(path)
    timed = _timed(restore_once)
    check(timed.value)
    return {"cold": timed.seconds, "cold_cpu": timed.cpu, "forgotten_by": how}


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
    from .workloads import check_same, filled, SAVED_BY, skeleton

    opened = PEERS[peer]()
    like = skeleton(workload, scale)
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


class Timed(NamedTuple):
    """What a function returned, and what that took; `cpu` is of all threads."""

    seconds: float
    cpu: float
    value: Any


def _timed(function: Callable[[], Any]) -> Timed:
    import jax

    gc.collect()
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


def _reset_peak() -> int:
    """Let the peak of this process's memory begin anew; the memory it has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {key} in /proc/self/status")


ACTIONS = {f.__name__: f for f in (save, restore, cold, imports)}


if __name__ == "__main__":
    action, peer, workload, scale, path = sys.argv[1:]
    print(json.dumps(ACTIONS[action](peer, workload, scale, Path(path))))
