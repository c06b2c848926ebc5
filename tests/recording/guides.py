"""The programs of the documentation that go on after they were killed."""

import functools
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np

import eqx_ckpt
from faults.races import Racer
from faults.shim import Fault


DOCS = pathlib.Path(__file__).parents[2] / "docs/usage"
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def programs(page: str) -> list[str]:
    snippets = _SNIPPET.findall((DOCS / page).read_text())
    return [snippet for snippet in snippets if ".resume(" in snippet]


def run(page: str, folder: str, log: str) -> None:
    """Run the programs of a page in a folder; note the steps that they take.

    `log` gets a file for each recording, with a byte for each step of a scan, and one
    with its `commit_every`.
    """
    os.chdir(folder)
    scan = eqx_ckpt.recording.record_scan

    @functools.wraps(scan)
    def watched(step: Any, *args: Any, recording: Any, **kwargs: Any) -> Any:
        name = pathlib.Path(recording._log.where.strip("'")).name
        every = pathlib.Path(log, f"{name}.every")
        every.write_text(str(kwargs.get("commit_every") or 0))
        steps = os.open(f"{log}/{name}.steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        # Those of an earlier process, as far as they were committed.
        os.truncate(steps, 0)
        os.write(steps, bytes(recording.steps))

        def noted(state: Any, x: Any) -> Any:
            jax.debug.callback(lambda: os.write(steps, b"."))
            return step(state, x)

        return scan(noted, *args, recording=recording, **kwargs)

    eqx_ckpt.recording.record_scan = watched
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for program in programs(page):
        exec(program, namespace)


def run_and_copy(
    page: str, folder: str, log: str, copies: str, wanted: int, timeout: int
) -> list[str]:
    """Run the programs of a page once; copy what a kill would leave, many times.

    For programs that take long to compile. Before some of the file operations, as many
    as `wanted` or up to twice that, the process is stopped, and `folder` and `log` are
    copied.
    """
    fault = Fault(folder, 1, "STOP", for_ever=True)
    racer = Racer(fault, (run, (page, folder, log)), timeout)
    kept: list[str] = []
    stops, distance = 0, 1
    while racer.is_stopped:
        if stops % distance == 0:
            kept.append(f"{copies}/{stops}")
            shutil.copytree(folder, f"{kept[-1]}/folder")
            shutil.copytree(log, f"{kept[-1]}/log")
        if len(kept) == 2 * wanted:
            for path in kept[1::2]:
                shutil.rmtree(path)
            kept, distance = kept[::2], 2 * distance
        stops += 1
        racer.go_on()
    error = racer.finish()
    if error is not None:
        raise error
    return kept


def check(folder: str, log: str) -> dict[str, int]:
    """Of each recording that was begun, how many steps are lost; all is verified."""
    lost: dict[str, int] = {}
    for every in pathlib.Path(log).glob("*.every"):
        name, most = every.stem, int(every.read_text())
        record = json.loads(
            pathlib.Path(folder, "runs", name, "recording.json").read_text()
        )
        taken = pathlib.Path(log, f"{name}.steps").stat().st_size
        lost[name] = taken - record["steps"]
        assert not most or lost[name] <= most, (name, lost[name], most)
        eqx_ckpt.recording.Samples(f"{folder}/runs/{name}").verify()
    return lost


def recorded(folder: str) -> dict[str, dict[str, np.ndarray]]:
    """What all recordings have."""
    return {
        path.name: eqx_ckpt.recording.Samples(path).read()
        for path in sorted(pathlib.Path(folder, "runs").iterdir())
    }
