"""Samples a posterior by Hamiltonian Monte Carlo, and records as it goes.

The model is a Bayesian logistic regression on real data: whether a tumour is benign, by
two of its measures. The same command again goes on, after a kill too.

```bash
python -m examples.sampling RUN --draws 6000
```
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from sklearn.datasets import load_breast_cancer

import eqx_ckpt


CHAINS = 4
STEP_SIZE, LEAPS = 0.15, 8
PRIOR_STD = 5.0
FEATURES = ["mean radius", "mean texture"]
NAMES = ["intercept", *FEATURES]

State = tuple[Key[Array, ""], Float[Array, "chain weight"]]


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Standardised features, after a column of ones, and the class, -1 or 1."""
    data: Any = load_breast_cancer()
    names = list(data["feature_names"])
    x = data["data"][:, [names.index(feature) for feature in FEATURES]]
    x = (x - x.mean(0)) / x.std(0)
    x = np.column_stack([np.ones(len(x)), x])
    return x.astype(np.float32), 2 * data["target"].astype(np.float32) - 1


X, Y = load_data()


def log_density(weights: Float[Array, " weight"]) -> Float[Array, ""]:
    """Of the posterior, but for a constant."""
    prior = -0.5 * jnp.sum((weights / PRIOR_STD) ** 2)
    return prior + jnp.sum(jax.nn.log_sigmoid(Y * (X @ weights)))


def draw(key: Key[Array, ""], weights: Array) -> tuple[Array, dict[str, Array]]:
    """One step of Hamiltonian Monte Carlo, for one chain."""
    slope = jax.grad(log_density)
    momentum_key, accept_key = jax.random.split(key)
    momentum = jax.random.normal(momentum_key, weights.shape)

    def leap(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        position, speed = at
        speed = speed + 0.5 * STEP_SIZE * slope(position)
        position = position + STEP_SIZE * speed
        return position, speed + 0.5 * STEP_SIZE * slope(position)

    position, speed = jax.lax.fori_loop(0, LEAPS, leap, (weights, momentum))
    gain = log_density(position) - log_density(weights)
    gain += 0.5 * (jnp.sum(momentum**2) - jnp.sum(speed**2))
    accepted = jnp.log(jax.random.uniform(accept_key)) < gain
    weights = jnp.where(accepted, position, weights)
    return weights, {"weights": weights, "accepted": accepted}


def step(state: State, _: None) -> tuple[State, dict[str, Array]]:
    """One step of all chains."""
    key, weights = state
    key, *keys = jax.random.split(key, CHAINS + 1)
    weights, samples = jax.vmap(draw)(jnp.stack(keys), weights)
    return (key, weights), samples


def sample(run: Path, draws: int, commit_every: int) -> None:
    """Records until each chain has `draws`, from the last commit if there is one."""
    like = {
        "weights": jax.ShapeDtypeStruct((len(NAMES),), jnp.float32),
        "accepted": jax.ShapeDtypeStruct((), bool),
    }
    state = (jax.random.key(0), jnp.zeros((CHAINS, len(NAMES))))
    with eqx_ckpt.recording.Recording(run, like, chains=CHAINS) as recording:
        if recording.committed is not None:
            state = recording.resume(state)
            print(f"goes on from draw {recording.steps}")
        left = draws - recording.steps
        # Blocks of the same length, wherever it goes on: one program, the same bits.
        eqx_ckpt.recording.record_scan(
            step,
            state,
            length=left,
            recording=recording,
            block=250,
            commit_every=commit_every,
        )


def posterior_means(run: Path, warmup: int = 500) -> np.ndarray:
    """The mean of each weight, over all chains."""
    samples = eqx_ckpt.recording.Samples(run)
    weights = samples.read(where=lambda tree: tree["weights"], start=warmup)
    return weights.mean((0, 1), dtype=np.float64)


@jax.jit
def around_mode() -> tuple[Array, Array]:
    """The most likely weights, and a matrix whose columns are as long as it is wide."""

    def newton(_: Array, at: Array) -> Array:
        return at - jnp.linalg.solve(jax.hessian(log_density)(at), slope(at))

    slope = jax.grad(log_density)
    mode = jax.lax.fori_loop(0, 20, newton, jnp.zeros(len(NAMES)))
    return mode, jnp.linalg.cholesky(jnp.linalg.inv(-jax.hessian(log_density)(mode)))


def reference_means(points: int = 21, width: float = 6.0) -> np.ndarray:
    """The same by numerical integration, on a grid around the most likely weights."""
    mode, axes = map(np.asarray, around_mode())
    ticks = np.linspace(-width, width, points)
    grid = np.stack(np.meshgrid(*[ticks] * len(NAMES)), -1).reshape(-1, len(NAMES))
    weights = mode + grid @ axes.T
    logs = np.asarray(jax.jit(jax.vmap(log_density))(np.float32(weights)), np.float64)
    density = np.exp(logs - logs.max())
    return density @ weights / density.sum()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.sampling")
    parser.add_argument("run", type=Path)
    parser.add_argument("--draws", type=int, default=6000)
    parser.add_argument("--commit-every", type=int, default=500)
    arguments = parser.parse_args()
    sample(**vars(arguments))
    means = posterior_means(arguments.run)
    for name, mean in zip(NAMES, means, strict=True):
        print(f"{name:13} {mean:8.4f}")


if __name__ == "__main__":
    main()
