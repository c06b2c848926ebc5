"""A small transformer that learns a text by heart: model, data, training step.

The text is the description of a data set that comes with scikit-learn. This is ordinary
Equinox and Optax: nothing here knows of devices, or that it will be saved.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_breast_cancer


batch_size, length, width = 16, 32, 64
optimiser = optax.adam(3e-3)

# All that it takes to train on: model, opt_state, step and key.
Training = dict[str, Any]


class Block(eqx.Module):
    """One layer of a transformer."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        key1, key2, key3 = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(8, width, key=key1)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.widen = eqx.nn.Linear(width, 4 * width, key=key2)
        self.narrow = eqx.nn.Linear(4 * width, width, key=key3)

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        y = jax.vmap(self.widen)(jax.vmap(self.norm2)(x))
        return x + jax.vmap(self.narrow)(jax.nn.gelu(y))


class Transformer(eqx.Module):
    """Says, at each place of a text, which of 128 characters may come next."""

    characters: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        self.characters = eqx.nn.Embedding(128, width, key=keys[0])
        self.places = eqx.nn.Embedding(length, width, key=keys[1])
        self.blocks = [Block(key=k) for k in keys[2:4]]
        self.head = eqx.nn.Linear(width, 128, key=keys[4])

    def __call__(self, text: Int[Array, " length"]) -> Float[Array, "length 128"]:
        x = jax.vmap(self.characters)(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def load_text() -> Int[np.ndarray, " characters"]:
    """Some thousand characters of English."""
    bunch: Any = load_breast_cancer()
    text = bunch.DESCR.encode("ascii", "replace")
    return np.frombuffer(text, np.uint8).astype(np.int32)


def init(key: PRNGKeyArray) -> Training:
    """The start of a training."""
    model_key, batch_key = jax.random.split(key)
    model = Transformer(key=model_key)
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    step = jnp.zeros((), jnp.int32)
    return {"model": model, "opt_state": opt_state, "step": step, "key": batch_key}


def take_batch(
    training: Training, text: Int[Array, " characters"]
) -> Int[Array, "..."]:
    """Pieces of the text, which `key` and `step` alone decide."""
    key = jax.random.fold_in(training["key"], training["step"])
    starts = jax.random.randint(key, (batch_size, 1), 0, len(text) - length)
    return text[starts + jnp.arange(length + 1)]


def learn(training: Training, batch: Int[Array, "..."]) -> tuple[Training, Array]:
    """Takes one step; returns its loss too."""

    def loss_fn(model: Transformer) -> Float[Array, ""]:
        logits = jax.vmap(model)(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(training["model"])
    updates, opt_state = optimiser.update(grads, training["opt_state"])
    model = eqx.apply_updates(training["model"], updates)
    changed = {"model": model, "opt_state": opt_state, "step": training["step"] + 1}
    return training | changed, loss
