"""Give wrong types to every argument; run in a process that checks no types itself.

Each public function, a call that works, and for its arguments values that are wrong.
Print each of them that is taken, or whose error names neither argument nor value; and
where an integer of NumPy or JAX does not do what one of Python does.
"""

import functools as ft
import inspect
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ck
from eqx_ckpt import data, interop


TREE = {"w": jnp.ones(3), "s": 1}
SAMPLE = {"x": np.ones(3)}
numbers = itertools.count()

SWAPPED = {f"layer {i}": jnp.arange(50) for i in range(20)}
PATH = [3, None, b"c", ["c"], object(), 1.5, SWAPPED]
FLAG = ["x", 1, None]
FUNCTION = [3, "x"]
FUNCTIONS = [3, "x", None]
WORD = [3, "x", None, b"zarr", ["zarr"], np.array(["zarr", "ocdbt"])]
INTEGER = ["x", 1.5, True, [1]]
SECONDS = ["x", True, [1]]
TEXT = [3, None, b"x"]
BAR = ["x", 3]
STEP = ["x", 1.5, True]

Table = dict[str, list[Any]]
SAVE: Table = {"is_leaf": FUNCTION, "filter_spec": FUNCTIONS}
WRITE: Table = SAVE | {
    "path": PATH,
    "overwrite": FLAG,
    "layout": WORD,
    "compression": FUNCTION,
    "progress": BAR,
    "timeout": SECONDS,
}
BASE: Table = {
    "base": [path for path in PATH if path is not None],
    "frozen": [3, "x"],
}
HOW: Table = {
    "is_leaf": FUNCTION,
    "filter_spec": FUNCTIONS,
    "where": FUNCTION,
    "prefix": TEXT,
    "sharding": [3, "x"],
    "casting": WORD,
    "missing": WORD,
    "mismatched": WORD,
    "unexpected": WORD,
    "transform": FUNCTION,
}
MATCH = HOW | {"source": PATH, "broadcast_replicas": FLAG}
READ = MATCH | {
    "max_host_bytes": [*INTEGER, math.inf],
    "progress": BAR,
    "timeout": SECONDS,
}
EXPORT: Table = {"source": PATH, "path": PATH, "strict": FLAG, "overwrite": FLAG}
# Arguments of any value: a PyTree, JSON, or what a function of the user takes.
ANYTHING = {
    "pytree",
    "like",
    "like_state",
    "state",
    "init",
    "xs",
    "metadata",
    "args",
    "kwargs",
    "arrays",
    "dataset",
}


def new() -> str:
    return f"new{next(numbers)}"


def recording() -> ck.recording.Recording:
    return ck.recording.Recording(new(), SAMPLE)


def save(**arguments: Any) -> None:
    ck.CheckpointManager(new()).save(**arguments).result()


def prepare() -> None:
    with ck.recording.Recording("samples", SAMPLE) as written:
        written.append(SAMPLE)
        written.commit()
    ck.tree_serialise_leaves("c", TREE)
    ck.tree_serialise_leaves("arrays", {"x": np.arange(10)})
    with ck.CheckpointManager("run") as manager:
        for step in (1, 2):
            manager.save(step, TREE, metadata={"loss": 1.0})
    interop.to_npz("c", "c.npz")
    interop.to_eqx("c", "c.eqx", TREE)


Case = tuple[str, Callable[..., Any], Callable[[], dict[str, Any]], Table]


def verbs() -> list[Case]:
    one = {"source": PATH}
    part = one | {"prefix": TEXT}
    run = {"directory": PATH}
    c = {"source": "c"}
    return [
        (
            "",
            ck.tree_serialise_leaves,
            lambda: {"path": new(), "pytree": TREE},
            WRITE | BASE,
        ),
        (
            "",
            ck.tree_serialise_leaves_async,
            lambda: {"path": new(), "pytree": TREE},
            WRITE | BASE | {"staging_bytes": ["x", True]},
        ),
        ("", ck.tree_deserialise_leaves, lambda: c | {"like": TREE}, READ),
        (
            "",
            ck.restore_or_init,
            lambda: c | {"init": lambda: TREE},
            READ | {"init": FUNCTIONS},
        ),
        (
            "",
            ck.average,
            lambda: {"sources": ["c", "c"]},
            {
                "sources": [3, None, "c", [3, "c"], [], ["c", None]],
                "weights": [3, "xx", ["x", "y"], [1.0], [1.0, -1.0], [1.0, True]],
                "prefix": TEXT,
            },
        ),
        (
            "",
            ck.rename,
            lambda: {"patterns": {"a": "b"}},
            {"patterns": [3, "x", None, ["x"], {3: "x"}, {"x": 3}, {"(": "x"}]},
        ),
        ("", ck.tree_match, lambda: c | {"like": TREE}, MATCH),
        ("", ck.tree_like, lambda: c, part),
        ("", ck.load, lambda: c, part),
        ("", ck.inspect.stats, lambda: c, part),
        (
            "iter_leaves",
            lambda **given: list(ck.inspect.iter_leaves(**given)),
            lambda: c,
            part,
        ),
        (
            "",
            ck.inspect.diff,
            lambda: {"a": "c", "b": "c"},
            {"a": PATH, "b": PATH, "prefix": TEXT, "values": FLAG, "kinds": FLAG},
        ),
        ("", ck.inspect.digest, lambda: c, one | {"progress": BAR}),
        (
            "",
            ck.inspect.verify,
            lambda: c,
            one | {"digest": [3, b"x", "x", "A" * 64], "progress": BAR},
        ),
        ("", ck.inspect.read_manifest, lambda: c, one),
        (
            "",
            ck.inspect.best_step,
            lambda: {"directory": "run", "metric": "loss"},
            run | {"metric": [*TEXT, ["loss"]], "mode": WORD},
        ),
        (
            "",
            ck.inspect.leaf_history,
            lambda: {"directory": "run"},
            run | {"steps": [["x"], 3, [1.5]]},
        ),
        (
            "",
            ck.inspect.metrics,
            lambda: {"directory": "run"},
            run,
        ),
        (
            "",
            ck.inspect.garbage_collect,
            lambda: {"directory": "run"},
            run | {"dry_run": FLAG},
        ),
        (
            "",
            ck.sync,
            lambda: {"directory": "run", "mirror": new()},
            run | {"mirror": PATH},
        ),
        (
            "",
            ck.copy,
            lambda: c | {"path": new()},
            {k: v for k, v in WRITE.items() if k not in SAVE} | one | {"strict": FLAG},
        ),
        ("", ck.save_every_steps, lambda: {"n": 1}, {"n": INTEGER}),
        (
            "",
            ck.save_every_seconds,
            lambda: {"seconds": 1},
            {"seconds": [*SECONDS, None]},
        ),
        (
            "",
            ck.save_when_idle,
            lambda: {"budget": 0.1},
            {"budget": [*SECONDS, None], "max_steps": INTEGER},
        ),
        ("", ck.keep_last, lambda: {"n": 1}, {"n": INTEGER}),
        ("", ck.keep_every, lambda: {"n": 1}, {"n": INTEGER}),
        (
            "",
            ck.keep_best,
            lambda: {"metric": "loss", "n": 1},
            {"metric": [*TEXT, ["x"]], "n": INTEGER, "mode": WORD},
        ),
        (
            "",
            ck.StorePath,
            lambda: {"url": "s3://bucket/x"},
            {"url": TEXT, "endpoint": [3, b"x"], "region": [3, b"x"]}
            | {"single_writer": FLAG, "anonymous": FLAG},
        ),
    ]


def managers() -> list[Case]:
    manager = ck.CheckpointManager("run")
    in_two_places = ck.CheckpointManager("none", mirror=ck.Mirror("run", when=[]))
    inherited = {"source", "progress", "timeout"}
    restore = {k: v for k, v in READ.items() if k not in inherited}
    return [
        (
            "",
            ck.CheckpointManager,
            lambda: {"directory": "run"},
            {k: WRITE[k] for k in ("layout", "compression", "progress", "timeout")}
            | {"directory": PATH, "keep": [3, "ab"], "when": [3, "ab"]}
            | {"staging_bytes": ["x", True], "check_finite": FLAG}
            | {"incremental": FLAG, "frozen": [3, "x"]}
            | {"mirror": [3, "s3://bucket/run", ""]}
            | {"on_error": WORD, "max_failures": INTEGER, "shared": FLAG}
            | {"config": [3, "x", [1]]},
        ),
        (
            "",
            ck.Mirror,
            lambda: {"path": "there"},
            {"path": PATH, "keep": [3, "ab"], "when": [3, "ab"], "timeout": SECONDS}
            | {"bytes_per_second": ["x", True]},
        ),
        (
            "manager.save",
            save,
            lambda: {"step": 1, "pytree": TREE},
            SAVE | {"step": [*STEP, None]},
        ),
        (
            "manager.restore",
            manager.restore,
            lambda: {"like": TREE},
            restore | {"step": STEP, "on_damage": WORD},
        ),
        *(
            (
                "manager.best",
                one.best,
                lambda: {"metric": "loss"},
                {"metric": [*TEXT, ["loss"]], "mode": WORD},
            )
            for one in (manager, in_two_places)
        ),
        (
            "manager.read_config",
            manager.read_config,
            lambda: {"step": 1},
            {"step": STEP},
        ),
        (
            "manager.audit",
            manager.audit,
            lambda: {"step_fn": lambda tree, step: tree, "like": TREE, "a": 1, "b": 2},
            {"step_fn": FUNCTIONS, "a": STEP, "b": STEP, "sharding": HOW["sharding"]},
        ),
        (
            "manager.fork",
            manager.fork,
            lambda: {"path": new(), "step": 1},
            {"path": PATH, "step": STEP},
        ),
        *(
            (f"manager.{of}", getattr(manager, of), lambda: {"step": 1}, {"step": STEP})
            for of in ("should_save", "delete", "read_manifest", "path")
        ),
    ]


def formats() -> list[Case]:
    def exported(format_: str) -> dict[str, Any]:
        return {"source": "c", "path": new()} | (
            {"like": TREE} if format_ == "eqx" else {}
        )

    more: dict[str, Table] = {
        "eqx": {"is_leaf": FUNCTION},
        "safetensors": {"transform": FUNCTION, "max_shard_bytes": INTEGER},
    }
    path = {"path": PATH}
    return [
        *(
            (
                f"interop.to_{of}",
                getattr(interop, f"to_{of}"),
                ft.partial(exported, of),
                EXPORT | more.get(of, {}),
            )
            for of in ("eqx", "flax", "npz", "orbax", "safetensors")
        ),
        *(
            (
                f"interop.open_{of}",
                getattr(interop, f"open_{of}"),
                lambda: {"path": "c.npz"},
                path,
            )
            for of in ("npz", "flax", "safetensors", "jax_arrays")
        ),
        (
            "interop.open_orbax",
            interop.open_orbax,
            lambda: {"path": "c.npz"},
            path | {"step": INTEGER, "item": [3, b"x", True]},
        ),
        (
            "interop.convert",
            interop.convert,
            lambda: {"source": "c", "path": new() + ".npz"},
            EXPORT | {"to": [3, "x", b"npz"], "format": [3, "x", b"npz"]},
        ),
        (
            "interop.open_source",
            interop.open_source,
            lambda: {"path": "c.npz"},
            path | {"format": [3, "x", b"npz"]},
        ),
        (
            "interop.open_eqx",
            interop.open_eqx,
            lambda: {"path": "c.eqx", "like": TREE},
            path | {"is_leaf": FUNCTION, "filter_spec": [3], "header_lines": INTEGER},
        ),
        (
            "interop.optax_transform",
            interop.optax_transform,
            lambda: {"like": TREE},
            {"prefix": TEXT, "choose": [3, "x", [1]]},
        ),
    ]


def sources() -> list[Case]:
    rows = data.ArrayDataSource(x=np.arange(10))
    return [
        (
            "",
            data.ArrayDataSource,
            lambda: {"x": np.arange(10)},
            {"on_device": FLAG},
        ),
        (
            "",
            data.Loader,
            lambda: {"source": rows, "batch_size": 2},
            {"source": [3, "x", None], "batch_size": [*INTEGER, None]}
            | {"order": WORD, "cache": [*INTEGER, None]},
        ),
        (
            "",
            data.StoredDataSource,
            lambda: {"path": "arrays"},
            {"path": [x for x in PATH if x is not None], "prefix": TEXT}
            | {"window": [*INTEGER, None]},
        ),
        (
            "",
            data.RandomAccessDataSource,
            lambda: {"dataset": [{"x": 1}]},
            {"exclude": [3, None, "x"]},
        ),
    ]


def recordings() -> list[Case]:
    read = ck.recording.Samples("samples")
    steps = {"f": lambda state, _: (state, {"x": np.ones(3)}), "init": 0.0}
    path = {"path": PATH, "overwrite": FLAG}
    return [
        (
            "",
            ck.recording.Recording,
            lambda: {"path": new(), "like": SAMPLE},
            {"path": PATH, "chains": INTEGER, "max_samples": INTEGER}
            | {"compression": FUNCTION, "chunk_bytes": INTEGER, "timeout": SECONDS},
        ),
        (
            "",
            ck.recording.Samples,
            lambda: {"path": "samples"},
            {"path": PATH},
        ),
        (
            "Samples.read",
            read.read,
            lambda: {},
            {"where": FUNCTION, "start": [*INTEGER, None], "stop": INTEGER}
            | {"thin": [*INTEGER, None], "chain": INTEGER},
        ),
        (
            "Samples.to_npz",
            read.to_npz,
            lambda: {"directory": new()},
            {"directory": PATH, "overwrite": FLAG},
        ),
        ("Samples.to_hdf5", read.to_hdf5, lambda: {"path": new()}, path),
        (
            "Recording.recorder",
            lambda **given: recording().recorder(**given),
            lambda: {},
            {"block": INTEGER},
        ),
        (
            "",
            ck.recording.Collector,
            lambda: {"like": SAMPLE, "collect": print},
            {"collect": FUNCTIONS, "chains": INTEGER},
        ),
        (
            "",
            ck.recording.SampleBuffer,
            lambda: {"like": SAMPLE, "capacity": 2},
            {"capacity": [*INTEGER, None]},
        ),
        (
            "",
            ck.recording.record_scan,
            lambda: steps | {"recording": recording(), "length": 2},
            {"f": FUNCTION, "recording": [3, "x"], "length": [*INTEGER, None]}
            | {"thin": [*INTEGER, None], "keep": FUNCTION, "block": INTEGER}
            | {"commit_every": [*INTEGER, None]}
            | {"commit_every_seconds": ["x", True]},
        ),
    ]


def is_clear(error: Exception, argument: str, value: Any) -> bool:
    """Whether an error says which argument is wrong, or shows what was given."""
    if not isinstance(error, TypeError | ValueError):
        return False
    if isinstance(error, ck.CheckpointError):  # These are about checkpoints.
        return False
    if not is_short(error):
        return False
    names = f"`{argument}`", f"`{argument}(", "A `dict` is not a path"
    shown = [f"{value!r} is not a {what}" for what in ("path", "format", "step")]
    return any(
        text in str(error) for text in (*names, *shown, f"{value} is not a step")
    )


def is_short(error: Exception) -> bool:
    """Nobody wants to read all values of a PyTree."""
    return len(str(error)) <= 500


def main() -> None:
    warnings.simplefilter("ignore")
    sys.modules["tqdm"] = None  # type: ignore[assignment]
    os.chdir(sys.argv[1])
    prepare()
    for name, call, arguments, wrong in [
        *verbs(),
        *managers(),
        *formats(),
        *sources(),
        *recordings(),
    ]:
        name = name or call.__name__
        for argument, values in wrong.items():
            for value in values:
                try:
                    call(**arguments() | {argument: value})
                except Exception as e:
                    if is_clear(e, argument, value):
                        continue
                    found = f"{type(e).__name__}: {e}"
                else:
                    found = "was taken"
                # Each on one line.
                given, found = (" ".join(x.split())[:200] for x in (repr(value), found))
                print(f"{name}({argument}={given}): {found}")
            try:
                call(**arguments() | {argument: SWAPPED})
            except Exception as e:
                if not is_short(e):
                    print(f"{name}({argument}=a PyTree): all of it is in the error")
            if set(map(repr, INTEGER)) <= set(map(repr, values)):
                for kind in (np.int64, jnp.int32):
                    of_two = [
                        outcome(call, arguments, argument, n(2)) for n in (int, kind)
                    ]
                    if of_two[0] != of_two[1]:
                        print(f"{name}({argument}={kind(2)!r}): {of_two}")
        if not name.startswith(("interop.", "Recording.", "Samples.", "manager.")):
            missing = untried(call, wrong, arguments())
            if missing:
                print(f"{name}: nothing wrong is tried for {missing}")


def outcome(
    call: Callable[..., Any],
    arguments: Callable[[], dict[str, Any]],
    argument: str,
    value: Any,
) -> str:
    """The type of what a call raises."""
    try:
        call(**arguments() | {argument: value})
    except Exception as e:
        return type(e).__name__
    return "was taken"


def untried(
    call: Callable[..., Any], wrong: Table, arguments: dict[str, Any]
) -> list[str]:
    """The parameters of a function for which there is nothing in the table."""
    parameters = inspect.signature(call).parameters
    return [p for p in parameters if p not in {*wrong, *ANYTHING, "how", "given"}]


main()
