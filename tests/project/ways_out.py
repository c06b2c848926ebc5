"""Follow what errors say to do, as they say it, and print what goes wrong.

`python ways_out.py PLACE WORD...` tries those of the table, `ways_out.md`, in which all
the words are, each in a new directory in `PLACE`. Nobody else may look at types.
"""

import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


# As in the tests: compile quickly, onto eight devices.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

from eqx_ckpt.__main__ import main  # noqa: E402


TABLE = Path(__file__).with_name("ways_out.md").read_text()
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.M | re.S)
(_, FIRST), *BLOCKS = BLOCK.findall(TABLE)


def cases() -> list[tuple[str, str, str]]:
    """What is wrong, what that says, and what to do then."""
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds == ["python", "text", "python"] * (len(kinds) // 3)
    texts = [text for _, text in BLOCKS]
    return list(zip(texts[::3], texts[1::3], texts[2::3], strict=True))


def shell(*arguments: str) -> None:
    """Run a command of `eqx-ckpt`; trouble is an error that says what it says."""
    sys.modules.pop("my_code", None)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*arguments])
    if status:
        raise RuntimeError(err.getvalue())


def said_by(wrong: str, names: dict[str, Any]) -> str:
    """What a snippet raises, warns of and logs."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(action="error"):
            exec(wrong, names)
    except Exception as e:
        return "".join(traceback.format_exception_only(e)) + log.getvalue()
    finally:
        logging.getLogger().removeHandler(handler)
    return log.getvalue() or "(nothing)\n"


def problem_of(wrong: str, says: str, right: str) -> str:
    """What is not as the table says, in the current directory, or `''`."""
    names: dict[str, Any] = {"shell": shell}
    exec(FIRST, names)
    said = said_by(wrong, names).replace(os.getcwd(), "HERE")
    if says.strip() not in said:
        return f"It says: {said}"
    try:
        with warnings.catch_warnings(action="error"):
            exec(right, names)
    except Exception as e:
        return f"What it says does not work: {e}\n"
    return ""


def try_all(place: Path, words: list[str]) -> None:
    logging.getLogger("eqx_ckpt").setLevel(logging.INFO)
    sys.path.insert(0, "")
    for number, case in enumerate(cases()):
        if all(word in "".join(case) for word in words):
            here = place / str(number)
            here.mkdir()
            with contextlib.chdir(here):
                problem = problem_of(*case)
            if problem:
                print(f"{case[0]}{case[1]}{problem}")


if __name__ == "__main__":
    try_all(Path(sys.argv[1]), sys.argv[2:])
