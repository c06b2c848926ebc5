"""Runs the examples, each in a process of its own, and checks what they did.

```bash
python -m examples.demo
```

Everything happens in a temporary directory, or in the new one given as an argument.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import eqx_ckpt


project = Path(__file__).resolve().parent.parent


def demo(scratch: Path) -> None:
    """Trains, restores in three ways, and exits if anything is not as it should be.

    **Arguments:**

    - `scratch`: an empty directory, or a new one.
    """
    start = time.perf_counter()
    run, resumed = scratch / "run", scratch / "resumed"

    title("1. Train on 1,437 images of handwritten digits; save every 100 steps.")
    python("train", run, "--steps", 300, "--save-every", 100)
    accuracy = eqx_ckpt.read_manifest(run / "000300").metadata["accuracy"]
    check("the test accuracy is at least 95%", accuracy >= 0.95)

    title("2. Look at the last checkpoint: each leaf is a Zarr array of its own.")
    show_checkpoint(run / "000300")

    title("3. In a new process, restore all of step 100, and train on to step 300.")
    python("train", resumed, "--steps", 300, "--resume", run / "000100")
    compare_runs(run, resumed)

    title("4. In a new process, restore the model and its state alone; test them.")
    (line,) = python("evaluate", run / "000300")
    check("it is the accuracy after training", line.endswith(f"{accuracy:.4f}"))

    title("5. In a new process, put its encoder into a model for odd and even digits.")
    lines = python("transfer", run / "000300", "--steps", 30, "--few", 100)
    random, restored = (float(line.split()[-1]) for line in lines)
    check("it learns more from 100 images than from scratch", restored > random)

    print(f"\nAll of it is true. This took {time.perf_counter() - start:.0f} seconds.")


def show_checkpoint(checkpoint: Path) -> None:
    """Prints a checkpoint's directory and sizes, and checks every byte of it."""
    manifest = eqx_ckpt.read_manifest(checkpoint)
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
    eqx_ckpt.verify(checkpoint)
    check("every byte agrees with its checksum", True)


def tree(folder: Path, manifest: eqx_ckpt.Manifest, name: str = "") -> Iterator[str]:
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


def compare_runs(run: Path, resumed: Path) -> None:
    """Checks that a run which was restored at step 100 is like one never stopped."""
    losses, resumed_losses = read_losses(run), read_losses(resumed)
    print("\n   step  loss, never stopped    loss, restored at step 100")
    for step in ("101", "102", "103", "200", "300"):
        print(f"   {step}   {losses[step]:21}  {resumed_losses[step]}")
    last = {step: loss for step, loss in losses.items() if int(step) > 100}
    check("all 200 losses are the same to the last bit", resumed_losses == last)
    leaves = eqx_ckpt.read_manifest(run / "000300").leaves
    resumed_leaves = eqx_ckpt.read_manifest(resumed / "000300").leaves
    check("so is every leaf that the two saved at step 300", resumed_leaves == leaves)


def read_losses(run: Path) -> dict[str, str]:
    """The loss of each step of a run, in hexadecimal: not a bit is rounded away."""
    losses = json.loads((run / "losses.json").read_text())
    return {step: loss.hex() for step, loss in losses.items()}


def title(text: str) -> None:
    print(f"\n{text}\n")


def check(claim: str, holds: bool) -> None:
    """Prints a claim that holds; exits at one that does not."""
    if not holds:
        sys.exit(f"This should be true, and is not: {claim}.")
    print(f"   True: {claim}.")


def python(example: str, *arguments: object) -> list[str]:
    """Runs an example in a new process, and returns the lines that it printed."""
    words = ["-m", f"examples.{example}", *map(str, arguments)]
    print("   $ python", *words, flush=True)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=project, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    for line in lines:
        print(f"   {line}")
    if done.returncode != 0:
        sys.exit(f"examples.{example} failed.")
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
