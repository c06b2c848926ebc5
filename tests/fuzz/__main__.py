"""Fuzz the readers, guided by what they cover: `make fuzz MINUTES=10 TARGETS=manifest`.

A run begins with the corpus of each target, `tests/fuzz/corpus/NAME.zip`, and adds what
covers more, and what failed; the tests read all of it again.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers import use_memory

from .corpus import pack, unpack


# Of one input.
SECONDS, MEGABYTES = 20, 3000


def fuzz(name: str) -> None:
    """Run a target until the options of libFuzzer, in `sys.argv`, end it."""
    import atheris

    # Before anything else imports the package.
    with atheris.instrument_imports(include=["eqx_ckpt"]):
        from tests.interop.mutations import replaced

        from .targets import targets

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """A change of bytes, or of JSON: few changes of bytes leave it valid."""
        rng = random.Random(seed)
        changed = replaced(data, rng) if rng.random() < 0.5 else data
        return changed[:most] if changed != data else atheris.Mutate(data, most)

    # libFuzzer ends this process: whoever started it deletes the folder.
    folder = Path(tempfile.mkdtemp())
    target = targets(folder)[name]
    seeds = folder / "seeds"
    seeds.mkdir()
    for data in target.seeds():
        (seeds / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    atheris.Setup([*sys.argv, str(seeds)], target.check, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*")
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    use_memory()
    failed: list[str] = []
    for name in args.target or names():
        print(f"fuzzing {name}", flush=True)
        with (
            tempfile.TemporaryDirectory() as corpus,
            tempfile.TemporaryDirectory() as scratch,
        ):
            if _run(name, Path(corpus), scratch, args.minutes):
                failed.append(name)
    print("failed:", ", ".join(failed) or "none")
    return 1 if failed else 0


def _run(name: str, corpus: Path, scratch: str, minutes: float) -> int:
    unpack(name, corpus)
    options = [
        f"-max_total_time={int(60 * minutes)}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-artifact_prefix={corpus}/",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    code = f"from tests.fuzz.__main__ import fuzz; fuzz({name!r})"
    command = [sys.executable, "-W", "ignore", "-c", code, *options, str(corpus)]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": scratch}, check=False)
    pack(name, corpus)
    return done.returncode


def names() -> list[str]:
    from .targets import targets

    with tempfile.TemporaryDirectory() as folder:
        return [*targets(Path(folder))]


if __name__ == "__main__":
    sys.exit(main())
