"""Draws that a number identifies, and programs that record them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .expected import Draw


LIKE = {
    "n": jax.ShapeDtypeStruct((), jnp.int32),
    "x": jax.ShapeDtypeStruct((2,), jnp.float32),
}
FORMS = ("while", "cond", "keep", "scan", "unrolled", "vmap", "each", "donated")
# The numbers of two chains differ by this.
APART = 100_000
MOST = 8


def lead_of(chains: int | None) -> np.ndarray:
    return np.array(0 if chains is None else np.arange(chains) * APART, np.int32)


def draws_of(numbers: Any, chains: int | None) -> list[Draw]:
    return [np.asarray(lead_of(chains) + n, np.int32) for n in numbers]


def apart(first: int, count: int, chains: int | None) -> list[Draw]:
    """Half of `count` draws: even numbers of even chains, odd ones of the others."""
    parity = 0 if chains is None else np.arange(chains)
    lead = lead_of(chains) + first + (parity - first) % 2
    return [np.asarray(lead + 2 * i, np.int32) for i in range(count // 2)]


def sample(n: Any) -> dict[str, Any]:
    x = n[..., None] * 0.5 + np.array([0, 0.25])
    return {"n": n, "x": x.astype(np.float32)}


def block(draws: list[Draw], chains: int | None) -> dict[str, np.ndarray]:
    """Samples with an axis for chains, if there are any, and one for draws."""
    shape = (len(draws),) if chains is None else (len(draws), chains)
    return sample(np.array(draws, np.int32).reshape(shape).T)


@functools.cache
def program(form: str, chains: int | None) -> Callable[..., Any]:
    """Saves the draws `first`, ..., `first + count - 1`, or half of them."""
    lead = lead_of(chains)

    def save(recorder: Any, n: Any, keep: Any = True) -> Any:
        return recorder.save(sample(jnp.asarray(lead + n, jnp.int32)), keep)

    def loop(body: Any) -> Any:
        return lambda recorder, first, count: jax.lax.fori_loop(
            first, first + count, body, recorder
        )

    def scan(recorder: Any, first: Any, count: Any) -> Any:
        def body(recorder: Any, i: Any) -> Any:
            return save(recorder, first + i, keep=i < count), None

        return jax.lax.scan(body, recorder, jnp.arange(MOST))[0]

    def cond(n: Any, recorder: Any) -> Any:
        return jax.lax.cond(n % 2 == 0, lambda r: save(r, n), lambda r: r, recorder)

    def unrolled(recorder: Any, first: Any, count: Any) -> Any:
        for i in range(MOST):
            recorder = save(recorder, first + i, keep=i < count)
        return recorder

    def mapped(is_kept: Any) -> Any:
        def run(recorder: Any, first: Any, count: Any) -> Any:
            def one(recorder: Any, chain: Any) -> Any:
                def body(n: Any, recorder: Any) -> Any:
                    number = jnp.asarray(n + chain * APART, jnp.int32)
                    return recorder.save(sample(number), is_kept(n, chain))

                return jax.lax.fori_loop(first, first + count, body, recorder)

            # On an Explicit mesh, JAX must see that both are sharded alike.
            where = jax.typeof(recorder._count).sharding
            chain = jnp.arange(chains or 1, dtype=jnp.int32)
            if AxisType.Explicit in where.mesh.axis_types:
                chain = jax.sharding.reshard(chain, where)
            return jax.vmap(one)(recorder, chain)

        return run

    forms = {
        "while": loop(lambda n, recorder: save(recorder, n)),
        "cond": loop(cond),
        "keep": loop(lambda n, recorder: save(recorder, n, keep=n % 2 == 0)),
        "scan": scan,
        "unrolled": unrolled,
        "vmap": mapped(lambda n, chain: True),
        "each": mapped(lambda n, chain: n % 2 == chain % 2),
    }
    if form == "donated":
        return jax.jit(forms["while"], donate_argnums=0)
    return jax.jit(forms[form])


def saved(form: str, first: int, count: int, chains: int | None) -> list[Draw]:
    """The draws that a program saves."""
    if form == "each":
        return apart(first, count, chains)
    is_half = form in ("cond", "keep")
    numbers = [n for n in range(first, first + count) if not is_half or n % 2 == 0]
    return draws_of(numbers, chains)


class Watch:
    """Instead of a clock: each step takes some time, and sees what may be lost."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.begin(0, 1.0, lambda: 0)

    def clock(self) -> float:
        return self.now

    def begin(self, first: int, step: float, steps: Callable[[], int]) -> None:
        """The next steps are numbered from `first`; `steps` are those committed."""
        self._first, self._start, self._step = first, self.now, step
        self._steps, self._before = steps, steps()
        self.lost = 0

    def stepped(self, number: Any) -> None:
        # Several devices may compute the same step.
        taken = int(number) - self._first
        self.now = max(self.now, self._start + (taken + 1) * self._step)
        self.lost = max(self.lost, taken - (self._steps() - self._before))


WATCH = Watch()


def begin_scan(first: int, chains: int | None) -> dict[str, Any]:
    return {"i": jnp.int32(first), "n": jnp.asarray(lead_of(chains) + first)}


def step(state: dict[str, Any], _: None) -> tuple[dict[str, Any], dict[str, Any]]:
    jax.debug.callback(WATCH.stepped, state["i"])
    return {"i": state["i"] + 1, "n": state["n"] + 1}, sample(state["n"])


def is_even(state: dict[str, Any], _: Any) -> Any:
    return state["i"] % 2 == 0
