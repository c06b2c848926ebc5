"""Trains the classifier and saves as it goes. The same command again goes on.

```bash
python -m examples.train RUN --steps 300 --save-every 50
```
"""

import argparse
import json
from pathlib import Path

import equinox as eqx
import jax

import eqx_ckpt

from .digits import accuracy, init, load, load_data, train_step


def train(run: Path, steps: int, save_every: int) -> None:
    """Trains until `steps` are done, from the newest checkpoint in `run` if it has one.

    The end of the run is saved too, and so is the last step after SIGTERM, with which a
    cluster says that it wants the machine back.

    **Arguments:**

    - `run`: a directory for the checkpoints `000050`, `000100`, ..., and for
        `losses.jsonl`, a line for each step that was taken.
    - `steps`: how many steps the training has in all.
    - `save_every`: how many steps to take from one save to the next.
    """
    training_set, test_set = load_data()
    loader = load(*training_set)
    keep = [eqx_ckpt.keep_last(2), eqx_ckpt.keep_best("accuracy", 1, mode="max")]
    with eqx_ckpt.CheckpointManager(run, keep=keep) as manager:
        if manager.latest() is None:
            training = init(jax.random.key(0), loader)
        else:
            # Shapes and dtypes only: no weights are made just to be replaced.
            skeleton = eqx.filter_eval_shape(init, jax.random.key(0), loader)
            training = manager.restore(skeleton)
            print(f"goes on from step {int(training['step'])}")

        for step in range(int(training["step"]) + 1, steps + 1):
            training, loss = train_step(training, loader)
            log(run / "losses.jsonl", step, float(loss))
            ends = step == steps or manager.should_save(step)
            if ends or step % save_every == 0:
                correct = float(
                    accuracy(training["model"], training["state"], *test_set)
                )
                metadata = {"loss": float(loss), "accuracy": correct}
                # Goes on in the background; the end of `with` waits for it.
                manager.save(step, training, metadata=metadata)
                print(f"step {step}: loss {loss:.4f}, test accuracy {correct:.4f}")
            if ends:
                break


def log(file: Path, step: int, loss: float) -> None:
    """Adds a line. After a kill, the steps since the last checkpoint get a second."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as f:
        f.write(json.dumps({"step": step, "loss": loss}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
