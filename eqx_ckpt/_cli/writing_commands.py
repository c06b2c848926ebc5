"""Commands that write checkpoints, and files of other formats."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import eqx_ckpt

from .._format.source import Source
from .._mirroring.sync import synced
from .._report.write_report import written
from .._steps.run_steps import Run
from .._storage.locate import is_web
from .command_sources import found_at
from .exit_status import DAMAGED, status_of, TROUBLE
from .option_words import in_options
from .terminal import bar, NO_CHECKSUMS, say, say_problem


def copy(source: str, target: str, how: dict[str, Any]) -> int:
    with bar() as progress:
        found = found_at(source)
        eqx_ckpt.copy(found, target, **how, progress=progress(target))
    say(f"copied to {target}")
    return 0


def sync(path: str, mirror: str) -> int:
    status = 0
    there = Run(mirror)
    for step, problem in synced(path, mirror):
        if problem is None:
            say(f"uploaded {os.fspath(there.path(step))}")
        else:
            say_problem(in_options(problem))
            status = max(status, status_of(problem))
    return status


def fork(path: str, new: str, step: int | None) -> int:
    Run(path).at_least_one()
    eqx_ckpt.CheckpointManager(path).fork(new, step)
    there = Run(new)
    begun = there.path(there.readable_or_not()[0])
    say(f"forked to {os.fspath(begun)}")
    try:
        eqx_ckpt.inspect.read_config(begun)
    except (eqx_ckpt.CheckpointError, OSError) as e:
        say_problem(in_options(e))
        return status_of(e)
    return 0


def convert(source: str, target: str, like: str, how: dict[str, Any]) -> int:
    made = _named(like) if like else None
    eqx_ckpt.interop.convert(source, target, like=made, **how)
    say(f"written to {target}")
    return 0


def _named(text: str) -> Any:
    """The PyTree of `MODULE:NAME`, or what the function of that name returns."""
    module, _, name = text.partition(":")
    if not (module and name):
        raise eqx_ckpt.CheckpointError(
            f"{text!r} is not `MODULE:NAME`. Pass such as `--like my_code:make_model`."
        )
    folder = os.getcwd()
    # As `python -m` does, and a script does not.
    sys.path.insert(0, folder)
    try:
        made = _made(getattr(importlib.import_module(module), name))
    except KeyboardInterrupt:
        raise
    # It is the user's code, which can raise anything, and even exit.
    except BaseException as e:
        raise eqx_ckpt.CheckpointError(
            f"`--like {text}`: {type(e).__name__}: {e}"
        ) from e
    finally:
        os.chdir(folder)  # The other paths of the command are relative to it.
    if made is None:
        raise eqx_ckpt.CheckpointError(
            f"`--like {text}` is `None`, or returns it: it has to be a PyTree, or a "
            "function that returns one."
        )
    return made


def _made(found: Any) -> Any:
    import equinox as eqx

    from .._tree.leaves.skeleton import skeleton

    if isinstance(found, eqx.Module) or not callable(found) or _takes_header(found):
        return found
    # The weights are not needed, so they are not computed.
    make: Callable[[], Any] = found
    return skeleton(make)


def _takes_header(make: Callable[..., Any]) -> bool:
    """Whether a function needs an argument, which is the header of a file then."""
    try:
        inspect.signature(make).bind()
    except TypeError:
        return True
    except ValueError:  # Of a builtin, nothing is known.
        return False
    return False


def report(path: str, other: str | None, output: str, how: dict[str, Any]) -> int:
    source = _found(path)
    compared = None if other is None else _found(other)
    try:
        facts = written(source, output, compared, **how)
    except ImportError as e:
        raise eqx_ckpt.CheckpointError(str(e)) from None
    alerts = facts["alerts"]
    for alert in alerts:
        say_problem(alert["text"])
    for column in facts["columns"]:
        if not column["checksums"]:
            say(f"{column['path']}: {NO_CHECKSUMS}")
    say(f"wrote {output}")
    if any(alert["unreadable"] for alert in alerts):
        return TROUBLE
    return DAMAGED if alerts else 0


def _found(path: str) -> str | Source:
    """A run, a checkpoint, or a source of another format."""
    is_run = not is_web(path) and Run(path).readable_or_not()
    return path if is_run else found_at(path)
