"""Run every benchmark that the documentation names, as it is written there.

```bash
python -m benchmarks.tables build/tables
```

Each has a file there, with the machine and the versions. On two idle cores, all of them
take some hours; `build/tables mirror data` runs only those two.
"""

import argparse
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .machine import machine


ROOT = Path(__file__).parents[1]
PAGES = ("performance", "design", "reliability")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*")
    args = parser.parse_args()
    known = dict(commands())
    if unknown := {*args.only} - known.keys():
        parser.error(f"{sorted(unknown)} are none of {sorted(known)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name, command in known.items():
        if args.only and name not in args.only:
            continue
        print(f"{datetime.datetime.now():%H:%M:%S} {command}", flush=True)
        with open(args.folder / f"{name}.md", "w") as file:
            file.write(f"`{command}`: {machine(args.folder)}\n\n")
            file.flush()
            words = [sys.executable, *shlex.split(command)[1:]]
            done = subprocess.run(words, cwd=ROOT, stdout=file, check=False)
        if done.returncode:
            failed.append(command)
    for command in failed:
        print("failed:", command, file=sys.stderr)
    return 1 if failed else 0


def commands() -> Iterator[tuple[str, str]]:
    """The name and the command of each; the first one is that of `make bench`."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / f"docs/{page}.md").read_text()
        for command in re.findall(r"`(python -m benchmarks[^`]*)`", text):
            command = " ".join(command.split())
            module = command.split()[2]
            found.setdefault(
                module.removeprefix("benchmarks").strip(".") or "main", command
            )
    yield from found.items()


if __name__ == "__main__":
    sys.exit(main())
