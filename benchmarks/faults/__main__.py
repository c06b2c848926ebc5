"""`python -m benchmarks.faults`: what becomes of a run's checkpoints under faults.

Every fault is really done. Then a fresh process asks the library itself which steps are
there, and what they restore to, and that is compared bit for bit with what had been
acknowledged. The table is the one of docs/reliability.md. Power cuts and full disks
need root; without it the cell says so.
"""

import argparse
import contextlib
import functools as ft
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..table import markdown, version
from . import scenes
from .children import ChildError, prepare
from .peers import PEERS
from .scenes import Scene


_SCENARIO_SECONDS = 900


class Fault(NamedTuple):
    """What is done, and the rows of the table that it fills."""

    run: Callable[[Scene], tuple[str, ...]]
    rows: tuple[str, ...]


def _killed(when: str) -> tuple[str, ...]:
    return (
        f"SIGKILL {when}: the newest acknowledged checkpoint is lost",
        "... a listed step does not restore",
        "... the next run leaves files behind",
        "... the next run cannot save",
    )


def _cut(kind: str) -> Fault:
    return Fault(
        ft.partial(scenes.power_cut, kind=kind),
        (
            f"power cut after a save, {kind}: this checkpoint is lost",
            "... and the one before it too",
        ),
    )


FAULTS = {
    "kill": Fault(scenes.kill, _killed("during a save")),
    "retention": Fault(
        scenes.retention, _killed("before a deletion, as an old step is removed")
    ),
    "ext4": _cut("ext4"),
    "xfs": _cut("xfs"),
    "bit": Fault(scenes.bit, ("one flipped bit",)),
    "missing": Fault(scenes.missing, ("one file deleted", "one file cut to half")),
    "full": Fault(
        scenes.full,
        (
            "disk full during a save: it does not raise",
            "... the checkpoint before it is lost",
            "... the space is not given back",
        ),
    ),
    "two": Fault(scenes.two, ("two processes save one step",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-", dir=args.dir) as scratch:
        prepare(Path(scratch))
        for fault in args.faults:
            for peer in args.peers:
                result = _observe(fault, peer, args.repeats, Path(scratch).resolve())
                results.append(result)
                print(_progress(result), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))
    print(_versions(), _table(results, args.peers), sep="\n\n")
    return 1 if any("error" in result for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--repeats", type=int, default=20, help="of each fault")
    parser.add_argument("--dir", type=Path, help="where to save; the default is TMPDIR")
    parser.add_argument("--json", type=Path, help="write all that was seen there")
    return parser


def _observe(fault: str, peer: str, repeats: int, scratch: Path) -> dict[str, Any]:
    """One fault, for one peer, in a directory that is gone afterwards."""
    result: dict[str, Any] = {"fault": fault, "peer": peer}
    start = time.perf_counter()
    directory = scratch / f"{fault}-{peer}"
    directory.mkdir()
    scene = Scene(peer, directory, repeats, [])
    try:
        with _timeout(_SCENARIO_SECONDS):
            result["cells"] = FAULTS[fault].run(scene)
    except (ChildError, OSError, subprocess.CalledProcessError) as e:
        result["error"] = f"{type(e).__name__}: {e}"
    finally:
        shutil.rmtree(directory)
    return result | {"seconds": time.perf_counter() - start, "seen": scene.seen}


@contextlib.contextmanager
def _timeout(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _progress(result: dict[str, Any]) -> str:
    cells = result.get("error") or " | ".join(result["cells"])
    return f"{result['fault']} {result['peer']} {result['seconds']:.0f} s: {cells}"


def _versions() -> str:
    names = ("jax", "tensorstore", "equinox", "orbax-checkpoint", "flax", "safetensors")
    return ", ".join(f"{name} {version(name)}" for name in names)


def _table(results: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """A row says what happened; `?` is where a fault could not be done."""
    rows: list[Sequence[str]] = []
    for fault in dict.fromkeys(result["fault"] for result in results):
        of_it = [result for result in results if result["fault"] == fault]
        for i, row in enumerate(FAULTS[fault].rows):
            cells = [r["cells"][i] if "cells" in r else "?" for r in of_it]
            rows.append((row, *cells))
    return markdown(("", *peers), rows)


if __name__ == "__main__":
    sys.exit(main())
