"""What a restore may be inside of: none of it changes what comes back."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType

from .leaves import mesh


def within(*contexts: Callable[[], Any]) -> Callable[[], AbstractContextManager]:
    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return enter


CONTEXTS: Mapping[str, Callable[[], AbstractContextManager]] = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": within(lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)),
    "checking_leaks": lambda: jax.checking_leaks(),
    "auto mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "default device": lambda: jax.default_device(jax.devices()[2]),
    "disabled jit": lambda: jax.disable_jit(),
    "strict": within(
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
    ),
    "other keys": lambda: jax.default_prng_impl("rbg"),
}
