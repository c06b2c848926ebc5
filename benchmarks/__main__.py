"""`python -m benchmarks`: measure, and print the tables of docs/performance.md."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import table
from .machine import machine
from .measure import Result, run
from .peers import PEERS
from .workloads import SAVED_BY, SCALES


# It takes a minute for the large arrays, and is never near the best.
_SKIPPED = {("flax", "A")}
_MEASURED = ("restore", "async", "manager")
_GROWTH = (1000, 5000, 20000)
# Enough to see that everything works, within a minute.
_SMALL = ("eqx_ckpt", "equinox", "orbax", "limit")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    small = args.scale == "small"
    args.peers = args.peers or list(_SMALL if small else PEERS)
    args.repeats = args.repeats or (1 if small else 5)
    results: list[Result] = []
    scratch = Path(tempfile.mkdtemp(prefix="benchmarks-", dir=args.dir))
    try:
        for result in _measurements(args, scratch):
            results.append(result)
            print(_progress(result), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    print(machine(scratch.parent), table.ratios(results), sep="\n\n")
    for workload in args.workloads:
        print(table.seconds(results, workload))
    if "manager" in args.measure:
        print(table.seconds(results, table.LISTING))
    if args.growth:
        print(table.growth(results, _GROWTH))
    failures = table.failures(results)
    for failure in failures:
        print("failed:", failure, file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--workloads", nargs="+", choices=SAVED_BY, default=list(SAVED_BY)
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS)
    parser.add_argument(
        "--measure", nargs="+", choices=_MEASURED, default=_MEASURED, help="only these"
    )
    parser.add_argument("--repeats", type=int)
    parser.add_argument(
        "--scale", choices=SCALES, default="full", help="small: does it work at all?"
    )
    parser.add_argument("--growth", action="store_true", help="1k, 5k and 20k leaves")
    parser.add_argument("--dir", type=Path, help="where to save; the default is TMPDIR")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    return parser


def _measurements(args: argparse.Namespace, scratch: Path) -> Iterator[Result]:
    """Every peer in turn, again and again, so that a slow minute hits all of them."""
    for repeat in range(args.repeats):
        first = repeat % len(args.peers)
        peers = args.peers[first:] + args.peers[:first]
        for saved in dict.fromkeys(SAVED_BY[w] for w in args.workloads):
            wanted = [w for w in args.workloads if SAVED_BY[w] == saved]
            for peer in peers if "restore" in args.measure else ():
                if (peer, saved) not in _SKIPPED:
                    path = scratch / f"{saved}-{peer}-{repeat}"
                    yield from _one_peer(peer, saved, wanted, args.scale, path)
            for action, peer in _of_saves(args.measure, peers, saved):
                path = scratch / f"{saved}-{peer}-{repeat}-{action}"
                yield run(action, peer, saved, args.scale, path)
                _remove(path, saved)
        if args.growth:
            for count in _GROWTH:
                path = scratch / f"growth-{count}-{repeat}"
                name = f"C{count}"
                yield from _one_peer(table.OURS, name, [name], args.scale, path)
        if "manager" in args.measure and table.OURS in peers:
            path = scratch / f"listing-{repeat}"
            yield run("listing", table.OURS, table.LISTING, args.scale, path)
        for _ in range(2 if table.OURS in args.peers else 0):
            yield run("imports", table.OURS, "import", args.scale, scratch)


def _one_peer(
    peer: str, saved: str, workloads: Sequence[str], scale: str, path: Path
) -> Iterator[Result]:
    if saved == "E" and peer not in _ON_MESHES:
        return
    yield run("save", peer, saved, scale, path)
    for workload in workloads:
        if workload != "D" or peer in _RESTORING_PARTS:
            yield run("restore", peer, workload, scale, path)
            yield run("cold", peer, workload, scale, path)
    _remove(path, saved)


def _of_saves(
    measure: Sequence[str], peers: Sequence[str], saved: str
) -> Iterator[tuple[str, str]]:
    """What is measured of saves alone, and of whom."""
    for peer in peers if saved != "E" else ():
        if "async" in measure and peer in _IN_BACKGROUND:
            yield "background", peer
        if "manager" in measure and peer == table.OURS and saved != "A":
            yield "manager", peer


def _remove(path: Path, saved: str) -> None:
    # Many small files stay until the end: for a while after they are deleted, ext4
    # creates new ones many times slower.
    if not saved.startswith("C"):
        shutil.rmtree(path, ignore_errors=True)


_IN_BACKGROUND = {"eqx_ckpt", "orbax", "orbax-files", "orbax-v1", "jax"}
_ON_MESHES = _IN_BACKGROUND
_RESTORING_PARTS = {
    "eqx_ckpt",
    "safetensors",
    "orbax",
    "orbax-files",
    "orbax-v1",
    "jax",
}


def _progress(result: Result) -> str:
    numbers = " ".join(
        f"{k}={v:.3f}" for k, v in result.items() if isinstance(v, float)
    )
    words = (result["workload"], result["peer"], result["action"])
    return f"{' '.join(words)}: {result.get('error', numbers)}"


if __name__ == "__main__":
    sys.exit(main())
