"""What a restore may be inside of: none of it changes what comes back."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from .leaves import mesh


T = TypeVar("T")
Run = Callable[[Callable[[], Any], Callable[[Any], T]], T]


def within(*contexts: Callable[[], Any]) -> Run:
    def run(make: Callable[[], Any], check: Callable[[Any], T]) -> T:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return check(make())

    return run


def traced(make: Callable[[], Any], check: Callable[[Any], T]) -> T:
    """What is made while JAX traces a function would be traced."""
    made = make()
    found: list[T] = []

    @jax.jit
    def trace(x: jax.Array) -> jax.Array:
        found.append(check(made))
        return x

    trace(1.0)
    return found[0]


# Call `check(make())` inside of it.
CONTEXTS: Mapping[str, Run] = {
    "x64": within(lambda: jax.enable_x64(True)),
    "debug_nans": within(lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)),
    "checking_leaks": within(lambda: jax.checking_leaks()),
    "auto mesh": within(lambda: jax.set_mesh(mesh(AxisType.Auto))),
    "explicit mesh": within(lambda: jax.set_mesh(mesh(AxisType.Explicit))),
    "default device": within(lambda: jax.default_device(jax.devices()[2])),
    "disabled jit": within(lambda: jax.disable_jit()),
    "strict": within(
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
    ),
    "other keys": within(lambda: jax.default_prng_impl("rbg")),
    "jit": traced,
}
# Of these, the rules say something: where leaves go, and what JAX has.
THAT_MATTER = ("x64", "auto mesh", "explicit mesh", "default device", "jit")
