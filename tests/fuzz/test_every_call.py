"""Each call on a run, and on a recording, where one file of JSON says something else.

The digests are those of what it says, as only a program would write that meant it.
"""

import contextlib
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect
from eqx_ckpt.__main__ import main
from faults.manifests import sealed
from interop.mutations import read_rows, replaced

from . import sealing


pytestmark = pytest.mark.once
for name in ("typer", "plotly"):
    pytest.importorskip(name)

SEEDS = range(60)
STEPS = (3, 5)
DRAWS = {"x": jnp.zeros(2), "y": jnp.zeros(())}


def tree(step: int) -> Any:
    weight = jnp.arange(6.0).reshape(2, 3) + step
    return {"a": [{"w": weight}], "key": jax.random.key(step), "n": step, "c": 1 + 2j}


def train(run: pathlib.Path, *steps: int) -> None:
    """Two steps are kept; of those before, the metrics are."""
    how: dict[str, Any] = {"config": {"optim": {"lr": 0.5}}, "incremental": True}
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(2), **how) as manager:
        if manager.latest() is not None:
            manager.restore(tree(0))
        for step in steps:
            manager.save(step, tree(step), metadata={"loss": 1 / step}).result()


def record(path: pathlib.Path, commits: int = 1) -> None:
    with eqx_ckpt.recording.Recording(path, DRAWS, metadata={"a": 1}) as recording:
        if recording.committed:
            recording.resume({"state": jnp.zeros(3)})
        for _ in range(commits):
            recording.extend({"x": jnp.ones((5, 2)), "y": jnp.ones(5)})
            recording.commit({"state": jnp.ones(3)})


Call = Callable[[pathlib.Path], Any]
OF_A_STEP: list[Call] = [
    lambda path: repr(inspect.read_manifest(path)),
    lambda path: inspect.read_manifest(path)._repr_html_(),
    lambda path: list(inspect.iter_leaves(path)),
    inspect.read_config,
    inspect.verify,
    inspect.digest,
    lambda path: repr(inspect.stats(path)),
    eqx_ckpt.tree_like,
    lambda path: str(eqx_ckpt.tree_match(path, tree(0))),
    lambda path: str(inspect.diff(path, path.parent / "000003")),
    lambda path: eqx_ckpt.tree_deserialise_leaves(path, tree(0)),
]
OF_A_RUN: list[Call] = [
    *(
        lambda run, call=c, n=n: call(run / f"{n:06d}")
        for c in OF_A_STEP
        for n in STEPS
    ),
    *(lambda run, n=n: CheckpointManager(run).restore(tree(0), step=n) for n in STEPS),
    lambda run: CheckpointManager(run).restore(tree(0)),
    lambda run: CheckpointManager(run).best("loss"),
    lambda run: CheckpointManager(run)._repr_html_(),
    inspect.metrics,
    inspect.own_bytes,
    lambda run: repr(inspect.leaf_history(run)),
    lambda run: inspect.write_report(run, run.parent / "page.html"),
    lambda run: CheckpointManager(run).fork(run.parent / "fork"),
    lambda run: train(run, 7, 8),
    inspect.garbage_collect,
]
OF_A_RECORDING: list[Call] = [
    lambda path: eqx_ckpt.recording.Samples(path).read(),
    lambda path: repr(eqx_ckpt.recording.Samples(path)),
    lambda path: list(inspect.iter_leaves(path)),
    inspect.verify,
    inspect.digest,
    lambda path: repr(inspect.stats(path)),
    eqx_ckpt.tree_like,
    lambda path: read_rows(eqx_ckpt.data.StoredDataSource(path)),
    record,
    lambda path: eqx_ckpt.recording.Samples(path).read(),
]
COMMANDS = [
    "ls X --json",
    "log X --json",
    "tree X --json",
    "show X a/0/w",
    "show X x",
    "stats X",
    "diff X X --values",
    "verify X",
    "digest X",
    "gc X",
    "copy X copy",
    "convert X out.npz",
    "sync X mirror",
    "fork X another",
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("good")
    train(root / "run", 1, 2, 3)
    train(root / "run", 5)
    record(root / "recording", commits=2)
    return root


def change(root: pathlib.Path, rng: random.Random) -> pathlib.Path:
    """Let a file of JSON say something else; return it."""
    file = rng.choice(sorted(root.rglob("*.json")))
    data = replaced(file.read_bytes(), rng)
    if file.name.startswith("config."):
        sealing.config(file.parent, file.parent / "000005")[1](data)
    else:
        file.write_bytes(sealed(data))
    return file


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call(
    good: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    path = tmp_path / change(tmp_path, rng).relative_to(tmp_path).parts[0]
    calls = [*(OF_A_RUN if path.name == "run" else OF_A_RECORDING)]
    rng.shuffle(calls)
    for call in calls:
        with contextlib.suppress(eqx_ckpt.CheckpointError):
            call(path)
    for command in COMMANDS:
        words = [str(path) if word == "X" else word for word in command.split()]
        assert main(words) in (0, 1, 2), command
