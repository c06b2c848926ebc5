"""Calls of which one process passes something else; run in all processes of a job."""

import functools as ft
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt

from .failing_jobs import caught, state
from .programs import assert_same, mesh, shared, TIMEOUT


# How a restore of any function reads.
HOW = {
    "filter_spec": "same",
    "is_leaf": "own",
    "where": "same",
    "prefix": "same",
    "sharding": "same",
    "casting": "same",
    "missing": "same",
    "mismatched": "same",
    "unexpected": "same",
    "transform": "same",
    "broadcast_replicas": "same",
    "max_host_bytes": "own",
}
RUNS = {"progress": "own", "timeout": "own"}

# What the processes of a job pass to each function. "same": all of them have to pass
# the same, and all raise if one does not. "first": what the first one passes counts.
# "own": each may pass another value, and the call succeeds.
ARGUMENTS: dict[str, dict[str, str]] = {
    "tree_serialise_leaves": {
        "path": "same",
        "pytree": "same",
        "filter_spec": "same",
        "is_leaf": "same",
        "metadata": "first",
        "overwrite": "same",
        "layout": "same",
        "compression": "same",
        "base": "own",
        "frozen": "own",
        "progress": "own",
        "timeout": "own",
    },
    "tree_deserialise_leaves": {"source": "same", "like": "same", **HOW, **RUNS},
    "restore_or_init": {
        "source": "same",
        "init": "same",
        "args": "own",
        **HOW,
        **RUNS,
    },
    "copy": {
        "source": "same",
        "path": "same",
        "overwrite": "same",
        "layout": "same",
        "compression": "same",
        "strict": "same",
        "progress": "own",
        "timeout": "own",
    },
    "CheckpointManager": {
        "directory": "same",
        "keep": "first",
        "when": "own",
        "layout": "same",
        "compression": "same",
        "progress": "own",
        "staging_bytes": "own",
        "timeout": "own",
        "check_finite": "same",
        "incremental": "same",
        "frozen": "own",
        "mirror": "same",
        "on_error": "same",
        "max_failures": "same",
        "shared": "same",
        "config": "first",
    },
    "CheckpointManager.save": {
        "step": "same",
        "pytree": "same",
        "filter_spec": "same",
        "is_leaf": "same",
        "metadata": "first",
    },
    "CheckpointManager.restore": {
        "like": "same",
        "step": "same",
        **HOW,
        "on_damage": "same",
    },
    "CheckpointManager.delete": {"step": "same"},
    "CheckpointManager.fork": {"path": "same", "step": "same"},
    "CheckpointManager.audit": {
        "step_fn": "own",
        "like": "same",
        "a": "same",
        "b": "same",
        "sharding": "same",
    },
    "CheckpointManager.should_save": {"step": "same"},
    "recording.Recording": {
        "path": "same",
        "like": "same",
        "chains": "same",
        "max_samples": "same",
        "metadata": "same",
        "compression": "same",
        "chunk_bytes": "same",
        "timeout": "own",
    },
    "recording.Recording.commit": {"state": "same"},
    "recording.record_scan": {
        "f": "own",
        "init": "same",
        "xs": "own",
        "length": "same",
        "recording": "same",
        "thin": "same",
        "keep": "same",
        "block": "same",
        "commit_every": "same",
        "commit_every_seconds": "same",
    },
}


# A function, an argument or two words about it, the call that all make, and that of the
# process that differs.
Case = tuple[str, str, Callable[[], Any], Callable[[], Any]]
# Words about an argument, what all pass, and what the process passes that differs.
Change = tuple[str, dict[str, Any], dict[str, Any]]


def differ(directory: str, who: int) -> dict[tuple[str, str], tuple[str, str]]:
    """What each call raises of which process `who` passes another argument.

    After each of them, a call that all make works.
    """
    is_other = jax.process_index() == who
    found: dict[tuple[str, str], tuple[str, str]] = {}
    tree = {"a": state(1), "b": state(2)}
    eqx_ckpt.tree_serialise_leaves(f"{directory}/there", tree, timeout=TIMEOUT)
    eqx_ckpt.tree_serialise_leaves(f"{directory}/other", tree, timeout=TIMEOUT)
    run = eqx_ckpt.CheckpointManager(f"{directory}/run", timeout=TIMEOUT)
    for function, argument, usual, other in _cases(directory):
        found[function, argument] = caught(other if is_other else usual)
        assert run.latest() is None, (function, argument, found[function, argument])
    return found


def _cases(directory: str) -> Iterator[Case]:
    yield from _saves(directory)
    yield from _restores(directory)
    yield from _initialised(directory)
    yield from _copies(directory)
    yield from _runs(directory)
    yield from _recordings(directory)


def _changed(
    function: str,
    call: Callable[..., Any],
    usual: dict[str, Any],
    changes: dict[str, Any],
) -> Iterator[Case]:
    """The call, with each of the changes by itself."""
    for words, value in changes.items():
        argument = words.split(":")[0]
        change = value if isinstance(value, _Several) else {argument: value}
        other = ft.partial(call, **{**usual, **change})
        yield function, words, ft.partial(call, **usual), other


class _Several(dict[str, Any]):
    """Several arguments that change together."""


def _saves(directory: str) -> Iterator[Case]:
    numbers = itertools.count()

    def save(path: str, **how: Any) -> None:
        path = path.replace("?", str(next(numbers)))
        eqx_ckpt.tree_serialise_leaves(path, **how)

    tree = state(1)
    usual = {"path": f"{directory}/save ?", "pytree": tree, "timeout": TIMEOUT}
    spec = eqx_ckpt.default_serialise_filter_spec
    changes = {
        "path": f"{directory}/elsewhere ?",
        "pytree: more": tree | {"more": 1},
        "pytree: less": {"w": tree["w"]},
        "pytree: dtype": tree | {"w": tree["w"].astype("float16")},
        "pytree: sharding": tree | {"w": state(1, P("y", "x"))["w"]},
        "filter_spec": lambda f, x: None if x is tree["w"] else spec(f, x),
        "is_leaf": lambda x: isinstance(x, dict),
        "metadata": {"loss": 1.0},
        "overwrite": True,
        "layout": "ocdbt",
        "compression": "zstd",
        "base": f"{directory}/there",
        "progress": lambda *_: None,
        "timeout": TIMEOUT + 1,
    }
    yield from _changed("tree_serialise_leaves", save, usual, changes)
    usual["base"] = f"{directory}/there"
    yield from _changed("tree_serialise_leaves", save, usual, {"frozen": True})


def _restores(directory: str) -> Iterator[Case]:
    like = state(0)
    half = like | {"w": like["w"].astype("float16")}
    rows = NamedSharding(mesh(), P("x"))
    spec = eqx_ckpt.default_deserialise_filter_spec

    def restore(**how: Any) -> None:
        found = eqx_ckpt.tree_deserialise_leaves(**how)
        if how["like"] is like and not (how.keys() - usual.keys()):
            assert_same(found, state(1))

    def refuses(name: str, struct: Any) -> Any:
        raise ValueError(name)

    usual: dict[str, Any] = {
        "source": f"{directory}/there",
        "like": like,
        "prefix": "a",
        "timeout": TIMEOUT,
    }
    function = "tree_deserialise_leaves"
    same = {
        "source": f"{directory}/other",
        "like: dtype": _Several(like=half, casting="unsafe"),
        "like: sharding": state(0, P("y", "x")),
        "like: more": like | {"more": 1},
        "filter_spec": lambda f, x: spec(f, x),
        "is_leaf": lambda x: x is like["w"],
        "where": lambda tree: tree["same"],
        "prefix": "b",
        "sharding: other": rows,
        "sharding: function": lambda name, struct: rows,
        "sharding: mesh": mesh(),
        "transform": lambda old: jax.tree.map(lambda x: x, old) | {"w": old["w"] * 1},
        "broadcast_replicas": True,
        "max_host_bytes": 10**6,
        "progress": lambda *_: None,
        "timeout": TIMEOUT + 1,
    }
    yield from _changed(function, restore, usual, same)
    more = like | {"more": shared(np.zeros((4, 4), np.float32), rows)}
    larger = like | {"w": shared(np.zeros((4, 4), np.float32), rows)}
    fewer = {key: x for key, x in like.items() if key != "step"}
    pairs: Iterable[Change] = [
        ("casting", {"like": half, "casting": "unsafe"}, {"casting": "no"}),
        ("missing", {"like": more, "missing": "keep"}, {"missing": "raise"}),
        (
            "missing: kept",
            {"like": more, "missing": "keep"},
            {"like": like | {"more": more["more"].astype("float16")}},
        ),
        (
            "mismatched",
            {"like": larger, "mismatched": "keep"},
            {"mismatched": "raise"},
        ),
        (
            "unexpected",
            {"like": fewer, "unexpected": "ignore"},
            {"unexpected": "raise"},
        ),
        ("sharding: refused", {"sharding": lambda n, s: rows}, {"sharding": refuses}),
        *_transforms(),
    ]
    for words, one, other in pairs:
        first = {**usual, **one}
        both = ft.partial(restore, **first), ft.partial(restore, **first | other)
        yield function, words, *both


def _transforms() -> Iterator[Change]:
    both = {"like": {"w": state(0)["w"]}}

    def returns(make: Callable[[Any], Any]) -> dict[str, Any]:
        return {"transform": lambda old: {"w": make(old)}}

    twice, thrice = np.full((16, 12), 2.0, np.float32), np.full((16, 12), 3.0, "f4")
    for words, one, other in [
        ("computes", lambda old: old["w"] * 2, lambda old: old["w"] * 3),
        ("constant", lambda old: old["w"] * twice, lambda old: old["w"] * thrice),
        ("renames", lambda old: old["w"], lambda old: old["same"]),
        ("value", lambda old: twice, lambda old: thrice),
    ]:
        yield f"transform: {words}", both | returns(one), returns(other)


def _initialised(directory: str) -> Iterator[Case]:
    rows = NamedSharding(mesh(), P("x"))

    def init(dtype: Any) -> Callable[[], Any]:
        return lambda: {"w": jnp.zeros((16, 12)), "new": jnp.ones((8, 2), dtype)}

    usual: dict[str, Any] = {
        "source": f"{directory}/there",
        "init": init("float32"),
        "prefix": "a",
        "unexpected": "ignore",
        "sharding": rows,
        "timeout": TIMEOUT,
    }
    changes = {
        "source": f"{directory}/other",
        "init": init("int32"),
        "sharding": NamedSharding(mesh(), P(None, "x")),
        "broadcast_replicas": True,
    }
    restore = eqx_ckpt.restore_or_init
    yield from _changed("restore_or_init", restore, usual, changes)


def _copies(directory: str) -> Iterator[Case]:
    numbers = itertools.count()

    def copy(path: str, **how: Any) -> None:
        eqx_ckpt.copy(path=path.replace("?", str(next(numbers))), **how)

    usual = {
        "source": f"{directory}/there",
        "path": f"{directory}/copy ?",
        "timeout": TIMEOUT,
    }
    changes = {
        "source": f"{directory}/other",
        "path": f"{directory}/copy elsewhere ?",
        "overwrite": True,
        "layout": "ocdbt",
        "compression": "zstd",
        "strict": "no flag",
        "progress": lambda *_: None,
        "timeout": TIMEOUT + 1,
    }
    yield from _changed("copy", copy, usual, changes)


def _runs(directory: str) -> Iterator[Case]:
    numbers = itertools.count()
    manager = eqx_ckpt.CheckpointManager(f"{directory}/steps", timeout=TIMEOUT)
    manager.save(1, state(1)).result()

    def made(directory: str, **how: Any) -> None:
        run = eqx_ckpt.CheckpointManager(directory, **how)
        run.should_save(7)
        run.save(10 + next(numbers), state(1)).result()
        run.close()

    usual: dict[str, Any] = {"directory": f"{directory}/made", "timeout": TIMEOUT}
    usual["when"] = eqx_ckpt.save_every_steps(3)
    changes = {
        "directory": f"{directory}/made elsewhere",
        "keep": eqx_ckpt.keep_last(2),
        "when": eqx_ckpt.save_every_steps(5),
        "layout": "ocdbt",
        "compression": "zstd",
        "progress": lambda *_: None,
        "staging_bytes": 2**30,
        "timeout": TIMEOUT + 1,
        "check_finite": True,
        "incremental": True,
        "mirror": eqx_ckpt.Mirror(f"{directory}/made in a mirror"),
        "on_error": "warn",
        "config": {"lr": 0.1},
    }
    yield from _changed("CheckpointManager", made, usual, changes)
    usual |= {"incremental": True, "on_error": "warn"}
    changes = {"frozen": True, "max_failures": 5}
    yield from _changed("CheckpointManager", made, usual, changes)

    def save(step: int, pytree: Any, **how: Any) -> None:
        manager.save(10 * step + next(numbers), pytree, **how).result()

    tree = state(1)
    skip = lambda f, x: None  # noqa: E731
    changes = {
        "step": 9,
        "pytree": tree | {"more": 1},
        "filter_spec": skip,
        "is_leaf": lambda x: isinstance(x, dict),
        "metadata": {"loss": 2.0},
    }
    name = "CheckpointManager.save"
    yield from _changed(name, save, {"step": 2, "pytree": tree}, changes)
    like = state(0)
    rows = NamedSharding(mesh(), P("x"))
    changes = {
        "like": state(0, P("y", "x")),
        "step": 1,
        "filter_spec": lambda f, x: eqx_ckpt.default_deserialise_filter_spec(f, x),
        "is_leaf": lambda x: x is like["w"],
        "broadcast_replicas": True,
        "on_damage": "fallback",
        "sharding": rows,
    }
    name = "CheckpointManager.restore"
    yield from _changed(name, manager.restore, {"like": like}, changes)

    def fork(path: str, step: int) -> None:
        manager.fork(path.replace("?", str(next(numbers))), step)

    usual = {"path": f"{directory}/fork ?", "step": 1}
    changes = {"path": f"{directory}/fork elsewhere ?", "step": 3}
    yield from _changed("CheckpointManager.fork", fork, usual, changes)
    audited = eqx_ckpt.CheckpointManager(f"{directory}/audited", timeout=TIMEOUT)
    for number in (1, 2, 3):
        audited.save(number, state(number)).result()
    usual = {"step_fn": lambda tree, number: state(number), "like": like}
    usual |= {"a": 1, "b": 3}
    changes = {
        "step_fn": lambda tree, number: tree,
        "like": state(0, P("y", "x")),
        "a": 2,
        "b": 2,
        "sharding": rows,
    }
    yield from _changed("CheckpointManager.audit", audited.audit, usual, changes)
    for name, call in [
        ("CheckpointManager.delete", manager.delete),
        ("CheckpointManager.should_save", manager.should_save),
    ]:
        yield from _changed(name, call, {"step": 1}, {"step": 3})


def _recordings(directory: str) -> Iterator[Case]:
    numbers = itertools.count()

    def begin(path: str, like: Any, **how: Any) -> None:
        path = path.replace("?", str(next(numbers)))
        eqx_ckpt.recording.Recording(path, like, **how)._log.abandon()

    like = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    path = f"{directory}/recording ?"
    usual = {"path": path, "like": like, "chains": 2, "timeout": TIMEOUT}
    usual |= {"compression": "zstd", "chunk_bytes": 2**16, "metadata": {"a": 1}}
    usual |= {"max_samples": 100}
    changes = {
        "path": f"{directory}/recording elsewhere ?",
        "like": {"x": jax.ShapeDtypeStruct((4,), jnp.float32)},
        "chains": 4,
        "max_samples": 50,
        "metadata": {"a": 2},
        "compression": lambda name, record: None,
        "chunk_bytes": 2**18,
        "timeout": TIMEOUT + 1,
    }
    yield from _changed("recording.Recording", begin, usual, changes)

    def commit(state: Any) -> None:
        name = f"{directory}/committed {next(numbers)}"
        recording = eqx_ckpt.recording.Recording(name, like, chains=2, timeout=TIMEOUT)
        try:
            recording.commit(state)
        finally:
            recording._log.abandon()

    yield from _changed(
        "recording.Recording.commit", commit, {"state": {"a": 1}}, {"state": None}
    )

    def scan(**how: Any) -> None:
        name = f"{directory}/scanned {next(numbers)}"
        recording = eqx_ckpt.recording.Recording(name, like, chains=2, timeout=TIMEOUT)
        try:
            eqx_ckpt.recording.record_scan(recording=recording, **how)
        finally:
            recording._log.abandon()

    chains = NamedSharding(jax.make_mesh((2,), ("c",), devices=_one_of_each()), P("c"))
    start = shared(np.zeros((2, 3), np.float32), chains)

    def step(state: Any, x: Any) -> Any:
        return state + 1, {"x": state}

    usual = {"f": step, "init": start, "length": 8}
    changes = {
        "length": 16,
        "thin": 2,
        "keep": lambda state, sample: jnp.ones(2, bool),
        "block": 2,
        "commit_every": 4,
        "commit_every_seconds": 100.0,
    }
    yield from _changed("recording.record_scan", scan, usual, changes)


def _one_of_each() -> list[Any]:
    devices = jax.devices()
    return [next(d for d in devices if d.process_index == i) for i in range(2)]
