"""Puts the trained encoder into another model, and trains that with few images.

The other model says whether a digit is odd or even.

```bash
python -m examples.transfer RUN/000300
```
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

import eqx_ckpt
from eqx_ckpt.data import Loader

from .digits import accuracy, Encoder, init, load, load_data, train_step, Training


class OddOrEven(eqx.Module):
    """Says whether an image shows an odd digit: the same encoder, a wider head."""

    encoder: Encoder
    head: eqx.nn.MLP

    def __init__(self, *, key: PRNGKeyArray):
        encoder_key, head_key = jax.random.split(key)
        self.encoder = Encoder(key=encoder_key)
        self.head = eqx.nn.MLP(64, 2, width_size=128, depth=1, key=head_key)

    def __call__(
        self, image: Float[Array, "8 8"], state: eqx.nn.State
    ) -> tuple[Float[Array, "2"], eqx.nn.State]:
        features, state = self.encoder(image, state)
        return self.head(features), state


def restore_encoder(checkpoint: Path, training: Training) -> Training:
    """Puts the encoder of a checkpoint, and its state, into another training.

    **Arguments:**

    - `checkpoint`: what `examples.train` saved.
    - `training`: one whose model has an `encoder`.

    **Returns:**

    `training` with that encoder; the head and the optimiser stay as they are.
    """
    model = training["model"]
    encoder = eqx_ckpt.tree_deserialise_leaves(
        checkpoint, model.encoder, prefix="model/encoder"
    )
    # All of the state is the encoder's: the running averages of its `BatchNorm`s.
    state = eqx_ckpt.tree_deserialise_leaves(
        checkpoint, training["state"], prefix="state"
    )
    model = eqx.tree_at(lambda m: m.encoder, model, encoder)
    return training | {"model": model, "state": state}


def load_few(few: int) -> Loader:
    """The first `few` images for training alone, and whether each is odd."""
    (images, labels), _ = load_data()
    return load(images[:few], labels[:few] % 2)


def fit(training: Training, steps: int, loader: Loader) -> str:
    """Trains for some steps, and says in a line how that went."""
    _, (test_images, test_labels) = load_data()
    losses = []
    for _ in range(steps):
        training, loss = train_step(training, loader)
        losses.append(float(loss))
    model, state = training["model"], training["state"]
    correct = float(accuracy(model, state, test_images, test_labels % 2))
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {correct:.4f}"


def transfer(checkpoint: Path, steps: int, few: int) -> None:
    """Trains the same model twice: with a random encoder, and with a restored one.

    **Arguments:**

    - `checkpoint`: what `examples.train` saved.
    - `steps`: how many steps to train for.
    - `few`: how many images to train on; at least `examples.digits.batch_size`.
    """
    loader = load_few(few)
    training = init(jax.random.key(1), loader, OddOrEven)
    restored = restore_encoder(checkpoint, training)
    print("random encoder:  ", fit(training, steps, loader))
    print("restored encoder:", fit(restored, steps, loader))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.transfer")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--few", type=int, default=100)
    transfer(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
