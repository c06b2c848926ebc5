"""A small convolutional network for handwritten digits: model, data, training step.

The data are the 1,797 images of 8 by 8 pixels that come with scikit-learn. This is
ordinary Equinox and Optax: nothing of the model knows that it will be saved.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits

from eqx_ckpt.data import ArrayDataSource, Loader


batch_size = 64
optimiser = optax.adamw(3e-3)

Images = Float[Array, "batch 8 8"]
Labels = Int[Array, " batch"]
Model = Callable[[Array, eqx.nn.State], tuple[Array, eqx.nn.State]]
# All that it takes to train on: model, state, opt_state, step, and the loader's cursor.
Training = dict[str, Any]


class Encoder(eqx.Module):
    """Turns an image into 64 features."""

    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        key1, key2, key3 = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 16, 3, padding=1, use_bias=False, key=key1)
        self.norm1 = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch", momentum=0.9)
        self.conv2 = eqx.nn.Conv2d(16, 32, 3, stride=2, use_bias=False, key=key2)
        self.norm2 = eqx.nn.BatchNorm(32, axis_name="batch", mode="batch", momentum=0.9)
        self.linear = eqx.nn.Linear(32 * 3 * 3, 64, key=key3)

    def __call__(
        self, image: Float[Array, "8 8"], state: eqx.nn.State
    ) -> tuple[Float[Array, "64"], eqx.nn.State]:
        x = self.conv1(image[None])
        x, state = self.norm1(x, state)
        x = self.conv2(jax.nn.relu(x))
        x, state = self.norm2(x, state)
        x = self.linear(jax.nn.relu(x).reshape(-1))
        return jax.nn.relu(x), state


class Classifier(eqx.Module):
    """Says which of the ten digits an image shows."""

    encoder: Encoder
    head: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        encoder_key, head_key = jax.random.split(key)
        self.encoder = Encoder(key=encoder_key)
        self.head = eqx.nn.Linear(64, 10, key=head_key)

    def __call__(
        self, image: Float[Array, "8 8"], state: eqx.nn.State
    ) -> tuple[Float[Array, "10"], eqx.nn.State]:
        features, state = self.encoder(image, state)
        return self.head(features), state


def load_data() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """The images and labels for training, and those for testing: every fifth one."""
    pixels, digits = load_digits(return_X_y=True)
    images = jnp.asarray(pixels.reshape(-1, 8, 8) / 16, jnp.float32)
    labels = jnp.asarray(digits, jnp.int32)
    test = np.arange(len(images)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def load(images: Images, labels: Labels) -> Loader:
    """Batches of images and labels, in another order in every epoch."""
    source = ArrayDataSource(x=np.asarray(images), y=np.asarray(labels))
    return Loader(source, batch_size, order="shuffle", cache=4)


def init(
    key: PRNGKeyArray, loader: Loader, make_model: Callable[..., Model] = Classifier
) -> Training:
    """The start of a training: what is saved, and how it is shaped, is decided here."""
    model, state = eqx.nn.make_with_state(make_model)(key=key)
    return {
        "model": model,
        "state": state,
        "opt_state": optimiser.init(eqx.filter(model, eqx.is_inexact_array)),
        "step": jnp.zeros((), jnp.int32),
        "cursor": loader.start(seed=0),
    }


@eqx.filter_jit
def train_step(training: Training, loader: Loader) -> tuple[Training, Float[Array, ""]]:
    """Takes one step on the next batch, which the cursor alone decides."""
    model, state = training["model"], training["state"]
    cursor, batch = loader.next(training["cursor"])
    grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = grad_fn(model, state, batch["x"], batch["y"])
    weights = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optimiser.update(grads, training["opt_state"], weights)
    changed = {
        "model": eqx.apply_updates(model, updates),
        "state": state,
        "opt_state": opt_state,
        "step": training["step"] + 1,
        "cursor": cursor,
    }
    return training | changed, loss


def loss_fn(
    model: Model, state: eqx.nn.State, images: Images, labels: Labels
) -> tuple[Float[Array, ""], eqx.nn.State]:
    """The mean cross entropy over a batch, and the new state."""
    logits, state = predict(model, state, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state


@eqx.filter_jit
def accuracy(
    model: Model, state: eqx.nn.State, images: Images, labels: Labels
) -> Float[Array, ""]:
    """The part of the images which the model labels rightly."""
    logits, _ = predict(eqx.nn.inference_mode(model), state, images)
    return jnp.mean(logits.argmax(axis=-1) == labels)


def predict(
    model: Model, state: eqx.nn.State, images: Images
) -> tuple[Float[Array, "batch classes"], eqx.nn.State]:
    """The logits for a batch, and the new state, which `BatchNorm` keeps."""
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(images, state)
