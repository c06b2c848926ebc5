"""Measures the test accuracy of a checkpoint. Reads the model, not the optimiser.

```bash
python -m examples.evaluate RUN/000300
```
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax

import eqx_ckpt

from .digits import accuracy, init, load, load_data


def evaluate(checkpoint: Path) -> float:
    """The test accuracy of the model in a checkpoint.

    **Arguments:**

    - `checkpoint`: what `examples.train` saved.

    **Returns:**

    The part of the test images which the model labels rightly.
    """
    training_set, (images, labels) = load_data()
    skeleton = eqx.filter_eval_shape(init, jax.random.key(0), load(*training_set))
    # What `where` does not pick is not read: it stays a `jax.ShapeDtypeStruct`.
    training = eqx_ckpt.tree_deserialise_leaves(
        checkpoint, skeleton, where=lambda s: (s["model"], s["state"])
    )
    return float(accuracy(training["model"], training["state"], images, labels))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.evaluate")
    parser.add_argument("checkpoint", type=Path)
    correct = evaluate(**vars(parser.parse_args()))
    print(f"test accuracy {correct:.4f}")


if __name__ == "__main__":
    main()
