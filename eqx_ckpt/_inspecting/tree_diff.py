"""What differs between two checkpoints, as a table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._format.display import escape, printable, table, table_html


_MOST_ROWS = 100


@dataclass(frozen=True)
class LeafDiff:
    """How a leaf of one checkpoint differs from that of another.

    **Attributes:**

    - `status`: `"only in a"`, `"only in b"`, `"different type"`, `"different value"`
        (of a Python number), or `"different values"` (of an array).
    - `a`, `b`: the type of the leaf in each checkpoint, or the value of a Python
        number; `None` where it is missing.
    - `count`: how many elements of the arrays differ.
    - `max_abs`, `max_rel`: the largest difference, and the largest as a share of the
        larger number. Of dates, `max_abs` is in their unit, and `max_rel` is `None`.
    - `norm_rel`: the norm of the differences as a share of the norm of the array in
        `a`; infinite if that is zero, or if a number became NaN. `None` for what has no
        norm, such as PRNG keys and dates.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        for step in (1, 2):
            eqx_ckpt.tree_serialise_leaves(f"{step}", {"w": jnp.arange(3.0) * step})
        found = eqx_ckpt.inspect.diff("1", "2", values=True)["w"]
        assert (found.status, found.count) == ("different values", 2)
        assert (found.max_abs, found.norm_rel) == (2, 1)
        ```
    """

    status: str
    a: str | None
    b: str | None
    count: int = 0
    max_abs: float = 0.0
    max_rel: float | None = None
    norm_rel: float | None = None


class TreeDiff(dict[str, LeafDiff]):
    """The leaves that differ, by name; it prints as a table.

    First come the leaves that one checkpoint lacks or whose types differ, then arrays
    of floating-point and complex numbers, those that changed most first, and then
    counters, PRNG keys, dates and Python numbers.

    **Attributes:**

    - `compared`: how many leaves were compared, whether they differ or not.

    !!! example

        ```python
        import eqx_ckpt

        eqx_ckpt.tree_serialise_leaves("a", {"step": 1, "lr": 0.1})
        eqx_ckpt.tree_serialise_leaves("b", {"step": 2, "lr": 0.1})
        found = eqx_ckpt.inspect.diff("a", "b")
        assert ([*found], found.compared) == (["step"], 2)
        print(found)
        ```
    """

    compared: int

    def __init__(self, leaves: Iterable[tuple[str, LeafDiff]], compared: int) -> None:
        super().__init__(leaves)
        self.compared = compared

    @property
    def summary(self) -> str:
        """One line: how many leaves differ, and how."""
        if not self:
            return f"No difference in {self.compared} leaves."
        counts = Counter(leaf.status for leaf in self.values())
        shown = ", ".join(f"{n} {status}" for status, n in counts.items())
        return f"{len(self)} of {self.compared} leaves differ: {shown}."

    def __str__(self) -> str:
        lines = [self.summary]
        if self:
            lines += table(_HEAD, self._rows())
        if len(self) > _MOST_ROWS:
            lines.append(f"... and {len(self) - _MOST_ROWS} more")
        return "\n".join(map(printable, lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = table_html(_HEAD, self._rows()) if self else ""
        return f"<p>{escape(self.summary)}</p>{rows}"

    def _rows(self) -> list[list[str]]:
        chosen = [*self.items()][:_MOST_ROWS]
        return [
            [
                name,
                str(leaf.count or "-"),
                *map(_number, (leaf.max_abs or None, leaf.max_rel, leaf.norm_rel)),
                leaf.a or "-",
                leaf.b or "-",
                leaf.status,
            ]
            for name, leaf in chosen
        ]


_HEAD = ("leaf", "count", "max_abs", "max_rel", "norm_rel", "a", "b", "status")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"
