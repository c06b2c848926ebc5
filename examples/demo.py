"""Runs the examples, each in a process of its own, and checks what they did.

```bash
python -m examples.demo
```

Everything happens in a temporary directory, or in the new one given as an argument.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import numpy as np

import eqx_ckpt

from .sampling import NAMES, posterior_means, reference_means


project = Path(__file__).resolve().parent.parent
MANIFEST = Path("zarr.json")


def demo(scratch: Path) -> None:
    """Trains, kills, goes on, restores; exits if anything is not as it should be.

    **Arguments:**

    - `scratch`: an empty directory, or a new one.
    """
    start = time.perf_counter()
    run, killed = scratch / "run", scratch / "killed"

    title(
        "1. Train on 1,437 images of digits; save every 50 steps, keep a few of them."
    )
    python("train", run)
    accuracy = eqx_ckpt.inspect.read_manifest(run / "000300").metadata["accuracy"]
    check("the test accuracy is at least 95%", accuracy >= 0.95)

    title("2. Look at the last checkpoint: each leaf is a Zarr array of its own.")
    show_checkpoint(run / "000300")

    title("3. Do the same in another place, kill it in the middle, and do it again.")
    kill_in_the_middle("train", killed)
    python("train", killed)
    compare_runs(run, killed)

    title("4. In a new process, restore the model and its state alone; test them.")
    (line,) = python("evaluate", run / "000300")
    check("it is the accuracy after training", line.endswith(f"{accuracy:.4f}"))

    title("5. In a new process, put its encoder into a model for odd and even digits.")
    lines = python("transfer", run / "000300", "--steps", 30, "--few", 100)
    random, restored = (float(line.split()[-1]) for line in lines)
    check("it learns more from 100 images than from scratch", restored > random)

    title("6. Sample a posterior by four chains, and kill that in the middle, too.")
    sample(scratch / "chains", scratch / "killed chains")

    print(f"\nAll of it is true. This took {time.perf_counter() - start:.0f} seconds.")


def show_checkpoint(checkpoint: Path) -> None:
    """Prints a checkpoint's directory and sizes, and checks every byte of it."""
    manifest = eqx_ckpt.inspect.read_manifest(checkpoint)
    print(f"   {checkpoint}/")
    print(*tree(checkpoint, manifest), sep="\n")
    leaf = "model/encoder/conv1/weight"
    print(f"\n   The files in {leaf}/:")
    for path in sorted((checkpoint / leaf).rglob("*")):
        if path.is_file():
            name = path.relative_to(checkpoint / leaf)
            print(f"      {name!s:43} {path.stat().st_size:,} bytes")
    print("\n   The arrays:")
    for prefix in ("model/encoder/", "model/", "state/", "opt_state/", ""):
        leaves = [r for name, r in manifest.leaves.items() if name.startswith(prefix)]
        size = sum(record.nbytes for record in leaves)
        print(f"      {prefix or 'all':43} {len(leaves)} leaves, {size:,} bytes")
    print(f"\n   What was saved with them: {manifest.metadata}")
    eqx_ckpt.inspect.verify(checkpoint)
    check("every byte agrees with its checksum", True)


def tree(
    folder: Path, manifest: eqx_ckpt.inspect.Manifest, name: str = ""
) -> Iterator[str]:
    """The lines of a directory tree. Each leaf is one of them."""
    indent = "   " * (2 + name.count("/") + bool(name))
    for path in sorted(folder.iterdir()):
        child = f"{name}/{path.name}".lstrip("/")
        line = f"{indent}{path.name}" + "/" * path.is_dir()
        if path.is_file():
            yield f"{line:49} {path.stat().st_size:,} bytes"
        elif child in manifest.leaves:
            yield f"{line:49} {manifest.leaves[child]}"
        elif path.name in ("mu", "nu"):
            yield f"{line:49} of Adam: the same leaves as in model/"
        else:
            yield line
            yield from tree(path, manifest, child)


def sample(run: Path, killed: Path, *arguments: object) -> None:
    """Samples, and samples again with a kill in between; compares the two."""
    python("sampling", run, *arguments)
    total = drawn(run)
    process = start("sampling", killed, *arguments)
    kill_once(process, lambda: drawn(killed) >= total / 4)
    print(f"   It died after {drawn(killed)} committed draws of {total}.")
    python("sampling", killed, *arguments)
    samples, again = (eqx_ckpt.recording.Samples(path).read() for path in (run, killed))
    same = eqx.tree_equal(samples, again)
    check("all draws of all chains are the same to the last bit", bool(same))
    means, exact = posterior_means(run), reference_means()
    print("\n   posterior mean   sampled    integrated")
    for name, mean, expected in zip(NAMES, means, exact, strict=True):
        print(f"   {name:16} {mean:7.4f}    {expected:7.4f}")
    far = np.abs(means - exact).max()
    check("the means are those of numerical integration", bool(far < 0.02))


def drawn(run: Path) -> int:
    """How many draws of each chain are committed."""
    try:
        return int(eqx_ckpt.recording.Samples(run).committed or 0)
    except eqx_ckpt.CheckpointNotFoundError:
        return 0


def kill_in_the_middle(
    example: str, run: Path, *arguments: object, after: int = 100
) -> None:
    """Kills a training once it has saved step `after`, and taken some steps more."""
    process = start(example, run, *arguments)
    kill_once(process, lambda: newest(run) >= after and steps_taken(run) >= 1.2 * after)
    print(f"   It died after step {steps_taken(run)}, and left this:")
    print(*(f"      {path.name}" for path in sorted(run.iterdir())), sep="\n")


def kill_once(process: subprocess.Popen[str], is_time: Callable[[], bool]) -> None:
    """Kills a process as soon as something is true."""
    while not is_time():
        if process.poll() is not None:
            sys.exit(f"{process.args} ended before it could be killed.")
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    show_output(process)
    check("SIGKILL has ended it", process.returncode == -signal.SIGKILL)


def compare_runs(run: Path, killed: Path) -> None:
    """Checks that a run which was killed, and went on, is like one never stopped."""
    losses, killed_losses = read_losses(run), read_losses(killed)
    last = max(losses)
    third = last // 3
    print("\n   step  loss, never stopped    loss, killed and gone on")
    for step in (1, third, third + 1, third + 2, 2 * third, last):
        print(f"   {step:<4}  {losses[step]:21}  {killed_losses[step]}")
    twice = steps_taken(killed) - steps_taken(run)
    print(f"   The killed run has taken {twice} of its steps twice.")
    check("all its losses are the same to the last bit", killed_losses == losses)
    steps = [folder / f"{last:06d}" for folder in (run, killed)]
    files, killed_files = map(read_files, steps)
    # The manifests differ: one says which step its run went on from.
    del files[MANIFEST], killed_files[MANIFEST]
    same = killed_files == files
    check("so is every byte of every array of the last checkpoint", same)
    digest, killed_digest = map(eqx_ckpt.inspect.digest, steps)
    check("so is the digest of its content", killed_digest == digest)


def newest(run: Path) -> int:
    """The newest checkpoint of a run, or 0."""
    return max((int(path.name) for path in run.glob("[0-9]*")), default=0)


def steps_taken(run: Path) -> int:
    """How many steps a run has taken, those taken again counted again."""
    log = run / "losses.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def read_losses(run: Path) -> dict[int, str]:
    """The loss of each step, in hexadecimal; all of them, if it had several."""
    losses: dict[int, set[str]] = {}
    for line in (run / "losses.jsonl").read_text().splitlines():
        step, loss = json.loads(line).values()
        losses.setdefault(step, set()).add(loss.hex())
    return {step: " or ".join(sorted(found)) for step, found in losses.items()}


def read_files(checkpoint: Path) -> dict[Path, bytes]:
    """The files of a checkpoint, and what is in them."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {path.relative_to(checkpoint): path.read_bytes() for path in files}


def title(text: str) -> None:
    print(f"\n{text}\n")


def check(claim: str, holds: bool) -> None:
    """Prints a claim that holds; exits at one that does not."""
    if not holds:
        sys.exit(f"This should be true, and is not: {claim}.")
    print(f"   True: {claim}.")


def python(example: str, *arguments: object) -> list[str]:
    """Runs an example in a new process, and returns the lines that it printed."""
    process = start(example, *arguments)
    lines = show_output(process)
    if process.returncode != 0:
        sys.exit(f"examples.{example} failed.")
    return lines


def start(example: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts an example in a new process."""
    words = ["-m", f"examples.{example}", *map(str, arguments)]
    print("   $ python", *words, flush=True)
    # `-u`: what is printed is not lost with the process.
    command = [sys.executable, "-u", *words]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True)


def show_output(process: subprocess.Popen[str]) -> list[str]:
    """Waits for the end of a process; prints and returns its lines."""
    lines = process.communicate()[0].splitlines()
    for line in lines:
        print(f"   {line}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("directory", type=Path, nargs="?")
    directory = parser.parse_args().directory
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="eqx_ckpt-") as scratch:
            demo(Path(scratch))
    elif directory.exists():
        parser.error(f"{directory} is there already: choose a new directory.")
    else:
        demo(directory.resolve())


if __name__ == "__main__":
    main()
