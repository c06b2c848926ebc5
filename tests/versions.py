"""Which cases of a test run on each Python: see the mark `once`."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """The cases for `parametrize`; one in `step` runs on each Python, others on one."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.once if number % step else (),
        )
        for number, case in enumerate(cases)
    ]
