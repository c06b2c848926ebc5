"""Trains the classifier and saves as it goes. Continues from any of its checkpoints.

```bash
python -m examples.train RUN --steps 300 --save-every 100
python -m examples.train RUN2 --steps 300 --resume RUN/000100
```
"""

import argparse
import json
from pathlib import Path

import equinox as eqx
import jax

import eqx_ckpt

from .digits import accuracy, init, load_data, train_step


def train(run: Path, steps: int, save_every: int, resume: Path | None = None) -> None:
    """Trains until `steps` are done, and saves to `run` each `save_every` steps.

    **Arguments:**

    - `run`: a directory for the checkpoints `000100`, `000200`, ..., and for
        `losses.json`, the loss of each step.
    - `steps`: how many steps the training has in all.
    - `save_every`: how many steps to take from one save to the next.
    - `resume`: a checkpoint to continue from. Without it a new training is begun.
    """
    if resume is None:
        training = init(jax.random.key(0))
    else:
        # Shapes and dtypes only: no weights are made just to be replaced.
        skeleton = eqx.filter_eval_shape(init, jax.random.key(0))
        training = eqx_ckpt.tree_deserialise_leaves(resume, skeleton)

    run.mkdir(parents=True, exist_ok=True)
    (images, labels), test_set = load_data()
    losses = {}
    for step in range(int(training["step"]) + 1, steps + 1):
        training, loss = train_step(training, images, labels)
        losses[step] = float(loss)
        if step % save_every == 0:
            correct = float(accuracy(training["model"], training["state"], *test_set))
            metadata = {"loss": losses[step], "accuracy": correct}
            checkpoint = run / f"{step:06d}"
            eqx_ckpt.tree_serialise_leaves(checkpoint, training, metadata=metadata)
            print(f"step {step}: loss {losses[step]:.4f}, test accuracy {correct:.4f}")
    (run / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", type=Path)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
