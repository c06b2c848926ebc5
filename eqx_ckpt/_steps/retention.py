"""Choose the steps of a run to keep: plain functions from steps to steps."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_args, Literal, TypeAlias

from .._types import check_integer, check_text, check_word, is_real, shown


logger = logging.getLogger("eqx_ckpt")


Keep: TypeAlias = Callable[[Mapping[int, Any]], Collection[int]]


"""A function from `{step: metadata}` of all steps to the steps to keep."""


KEEP_ALL: Keep = list


Mode: TypeAlias = Literal["min", "max"]


def keep_last(n: int) -> Keep:
    """Keep the `n` newest steps.

    **Arguments:**

    - `n`: how many, at least 1.

    **Returns:**

    A function for the `keep` of [`eqx_ckpt.CheckpointManager`][].

    **Raises:**

    - `ValueError`: `n` is not a positive integer.

    !!! example

        ```python
        import eqx_ckpt

        keep = eqx_ckpt.keep_last(2)
        assert keep({100: None, 200: None, 300: None}) == [200, 300]
        ```
    """
    n = check_integer("n", n, 1)
    return lambda steps: sorted(steps)[-n:]


def keep_every(n: int) -> Keep:
    """Keep the steps that are multiples of `n`.

    **Arguments:**

    - `n`: the distance between the steps to keep, at least 1.

    **Returns:**

    A function for the `keep` of [`eqx_ckpt.CheckpointManager`][].

    **Raises:**

    - `ValueError`: `n` is not a positive integer.

    !!! example

        ```python
        import eqx_ckpt

        keep = eqx_ckpt.keep_every(1000)
        assert keep({1000: None, 1500: None, 2000: None}) == [1000, 2000]
        ```
    """
    n = check_integer("n", n, 1)
    return lambda steps: [step for step in steps if step % n == 0]


def keep_best(metric: str, n: int, mode: Mode = "min") -> Keep:
    """Keep the `n` steps whose metric is best.

    A step without the metric, or with a NaN, is never one of the best. If no step has
    the metric, all are kept, with a warning.

    **Arguments:**

    - `metric`: a number in the `metadata`, such as `loss`; of a nested one, such as
        `eval/loss`.
    - `n`: how many, at least 1.
    - `mode`: `"min"` if smaller is better, `"max"` if larger is.

    **Returns:**

    A function for the `keep` of [`eqx_ckpt.CheckpointManager`][].

    **Raises:**

    - `ValueError`: `n` is not a positive integer, or `mode` is
        neither of the two.

    !!! example

        ```python
        import eqx_ckpt

        keep = eqx_ckpt.keep_best("loss", 1)
        assert keep({100: {"loss": 0.3}, 200: {"loss": 0.2}}) == [200]
        ```
    """
    check_text("metric", metric)
    n = check_integer("n", n, 1)
    check_mode(mode)

    def keep(steps: Mapping[int, Any]) -> Collection[int]:
        if not any(metric in numbers_in(metadata) for metadata in steps.values()):
            logger.warning("No step has the metric %r: all are kept.", metric)
            return list(steps)
        return sorted(ranked(steps, metric, mode)[:n])

    return keep


def checked_keep(keep: Keep | Iterable[Keep] | None) -> list[Keep]:
    """Validate `keep`, and return its functions as a list; without any, keep all."""
    if keep is None:
        return [KEEP_ALL]
    found: Any = [keep] if callable(keep) else keep
    found = list(found) if isinstance(found, Iterable) else []
    if not found or not all(map(callable, found)):
        raise TypeError(
            f"`keep` is {shown(keep)}. Pass a function such as `keep_last(3)`, or "
            "several in a list; `None` keeps all steps."
        )
    return found


def ranked(steps: Mapping[int, Any], metric: str, mode: Mode) -> list[int]:
    """The steps that have the metric, best first; among equal ones, newest first."""
    sign = 1 if mode == "min" else -1
    values = {step: numbers_in(at).get(metric) for step, at in steps.items()}
    order = [
        (sign * value, -step)
        for step, value in values.items()
        if value is not None and value == value  # Leave out NaN.
    ]
    return [-step for _, step in sorted(order)]


def numbers_in(metadata: Any) -> dict[str, Any]:
    """The numbers in metadata, by name; nested ones as `eval/loss`."""
    found = dict[str, Any]()
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        if is_real(value):
            found[key] = value
        for name, number in numbers_in(value).items():
            found[f"{key}/{name}"] = number
    return found


def check_mode(mode: str) -> None:
    check_word("mode", mode, get_args(Mode))
