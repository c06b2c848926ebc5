"""`python -m benchmarks.stores`: an object store, the two layouts, and zstd.

The object store is the small S3 of the tests, in a process of its own on this machine,
which is new for each measurement: what counts are ratios, the number of requests, and
how long the server was busy. `S3, 20 ms` waits so long before each answer, as a
store that is far away: that is short only if many requests are made at a time.
"""

import argparse
import contextlib
import functools as ft
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import PyTree

from .measure import _files, _read_through, _timed, peak_memory, reset_peak
from .memory import warm_memory
from .table import markdown
from .workloads import check_same, filled, named, nbytes, skeleton, Transformer


MIB = 2**20
_SECONDS = {"S3": 0.0, "S3, 20 ms": 0.02}
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_REGION = "us-east-1"
_BUCKET = "benchmarks"

Result: TypeAlias = dict[str, Any]


class Case(NamedTuple):
    """Where something is saved, what it is, and how."""

    place: str
    tree: str
    way: str


class Place(NamedTuple):
    """A directory, or a prefix in an object store with an endpoint."""

    path: Path
    endpoint: str | None

    @property
    def ours(self) -> Any:
        import eqx_ckpt

        if self.endpoint is None:
            return self.path
        url = f"s3://{_BUCKET}/{self.path.name}"
        return eqx_ckpt.StorePath(url, endpoint=self.endpoint)

    @property
    def kvstore(self) -> dict[str, Any]:
        """What a TensorStore spec says of it."""
        if self.endpoint is None:
            return {"driver": "file", "path": f"{self.path}/"}
        return {
            "driver": "s3",
            "bucket": _BUCKET,
            "path": f"{self.path.name}/",
            "endpoint": self.endpoint,
            "aws_region": _REGION,
            "aws_credentials": {"type": "environment"},
        }


class Way(NamedTuple):
    """How to save a tree, and how to restore it."""

    save: Callable[[Place, PyTree], None]
    restore: Callable[[Place, PyTree], PyTree]


def _ours(**options: Any) -> Way:
    import tensorstore  # noqa: F401

    import eqx_ckpt

    def save(place: Place, tree: PyTree) -> None:
        eqx_ckpt.tree_serialise_leaves(place.ours, tree, **options)

    def restore(place: Place, like: PyTree) -> PyTree:
        return eqx_ckpt.tree_deserialise_leaves(place.ours, like)

    return Way(save, restore)


def _jax(*, ocdbt: bool) -> Way:
    """What JAX brings along, without compression too; its paths know no endpoint."""
    import tensorstore as ts
    from jax.experimental.array_serialization.serialization import (
        GlobalAsyncCheckpointManager,
    )

    manager = GlobalAsyncCheckpointManager()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def specs(place: Place, names: Sequence[str]) -> list[dict[str, Any]]:
        base = place.kvstore
        if ocdbt:
            stores = [{"driver": "ocdbt", "base": base, "path": n} for n in names]
        else:
            stores = [{**base, "path": base["path"] + n} for n in names]
        return [{"driver": "zarr3", "kvstore": store} for store in stores]

    def save(place: Place, tree: PyTree) -> None:
        arrays = named(tree)
        transaction = ts.Transaction(atomic=True) if ocdbt else None
        manager.serialize(
            list(arrays.values()),
            specs(place, list(arrays)),
            on_commit_callback=lambda: None,
            transaction=transaction,
        )
        manager.wait_until_finished()
        if transaction is not None:
            transaction.commit_async().result()
        if place.endpoint is None:
            os.sync()

    def restore(place: Place, like: PyTree) -> PyTree:
        structs = named(like)
        arrays = manager.deserialize(
            [sharding] * len(structs),
            specs(place, list(structs)),
            [struct.shape for struct in structs.values()],
            [struct.dtype for struct in structs.values()],
        )
        return dict(zip(structs, arrays, strict=True))

    return Way(save, restore)


_WAYS: dict[str, Callable[[], Way]] = {
    "zarr": _ours,
    "ocdbt": ft.partial(_ours, layout="ocdbt"),
    "zstd": ft.partial(_ours, compression="zstd"),
    "jax": ft.partial(_jax, ocdbt=False),
    "jax, ocdbt": ft.partial(_jax, ocdbt=True),
}


def _model_and_moments() -> PyTree:
    """The training state of a transformer: 985 leaves, 1.03 GiB."""
    structs = eqx.filter_eval_shape(lambda k: Transformer(512, 27, key=k), jr.key(0))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), structs)
    return filled({"model": half, "mu": structs, "nu": structs, "step": _scalar()})


def _scalar() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.int32)


def _normal(dtype: jnp.dtype) -> PyTree:
    numbers = np.random.default_rng(0).standard_normal((64, 2**20), np.float32)
    return {f"array{i}": jnp.asarray(x, dtype) for i, x in enumerate(numbers)}


@ft.cache
def _trained() -> tuple[PyTree, PyTree]:
    """A perceptron that was trained on the digits of scikit-learn, and Adam's state."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    model = eqx.nn.MLP(64, 10, 2048, 4, key=jr.key(0))
    optimiser = optax.adam(1e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    def loss(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            jax.vmap(model)(x), y
        ).mean()

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimiser.update(eqx.filter_grad(loss)(model, x, y), state)
        return eqx.apply_updates(model, updates), state

    for i in range(0, 64 * 28, 64):
        model, state = step(model, state, images[i : i + 64], labels[i : i + 64])
    return eqx.filter(model, eqx.is_array), state


def _trained_half() -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), _trained()[0])


_TREES: dict[str, Callable[[], PyTree]] = {
    "985 leaves": _model_and_moments,
    "B": lambda: filled(skeleton("B", "full")),
    "C": lambda: filled(skeleton("C", "full")),
    "small": lambda: filled(skeleton("C", "small")),
    "normal float32": ft.partial(_normal, jnp.float32),
    "normal bfloat16": ft.partial(_normal, jnp.bfloat16),
    "trained float32": lambda: _trained()[0],
    "trained bfloat16": _trained_half,
    "its moments": lambda: _trained()[1],
}

# Not JAX with OCDBT: for each range of a large file, moto reads all of it.
_ON_S3 = ("zarr", "ocdbt", "jax")

# Of each table, the cases, and the way to which the others are compared.
_TABLES: dict[str, tuple[list[Case], str]] = {
    "s3": (
        [Case("S3", "985 leaves", way) for way in _ON_S3],
        "jax",
    ),
    "slow": (
        [Case("S3, 20 ms", "985 leaves", way) for way in _ON_S3],
        "jax",
    ),
    "ocdbt": (
        [Case("disk", tree, way) for tree in "BC" for way in ("zarr", "ocdbt")],
        "zarr",
    ),
    "zstd": (
        [
            Case("disk", tree, way)
            for tree in _TREES
            if len(tree.split()) == 2 and tree[0].isalpha()
            for way in ("zarr", "zstd")
        ],
        "zarr",
    ),
    "small": (
        [Case(place, "small", way) for way in _WAYS for place in ("disk", *_SECONDS)],
        "jax",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    os.environ.update(_CREDENTIALS, JAX_PLATFORMS="cpu")
    results: list[Result] = []
    scratch = Path(tempfile.mkdtemp(prefix="stores-", dir=args.dir))
    try:
        for table in args.tables:
            cases = [c for c in _TABLES[table][0] if c.way in args.ways]
            for result in _measurements(cases, args.repeats, scratch):
                results.append(result)
                print(result, file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    for table in args.tables:
        cases = [c for c in _TABLES[table][0] if c.way in args.ways]
        print(_table(cases, _TABLES[table][1], results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stores", description=__doc__
    )
    usual = [table for table in _TABLES if table != "small"]
    parser.add_argument("--tables", nargs="+", choices=_TABLES, default=usual)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to save; the default is TMPDIR")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    return parser


def _measurements(
    cases: Sequence[Case], repeats: int, scratch: Path
) -> Iterator[Result]:
    """Every case in turn, again and again, each in a fresh process."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        for repeat in range(repeats):
            for i, case in enumerate(cases if repeat % 2 == 0 else cases[::-1]):
                path = scratch / f"{repeat}-{i}"
                with _server(case.place) as (endpoint, pid):
                    place = Place(path, endpoint)
                    saved = processes.submit(_save, case, place, pid).result()
                    read = processes.submit(_restore, case, place, pid).result()
                    yield saved | read
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _server(place: str) -> Iterator[tuple[str | None, int]]:
    """A new S3 with an empty bucket: its endpoint, and the id of its process."""
    if place not in _SECONDS:
        yield None, os.getpid()
        return
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(_SECONDS[place], its))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}", process.pid or 0
    finally:
        process.terminate()
        process.join()


def _serve(seconds: float, started: Connection) -> None:
    """Answer for ever, each request after so many seconds."""
    from tests.stores import serving, small_s3

    store = small_s3.Store()
    store.make_bucket(_BUCKET)

    class Exchange(serving.Exchange):
        def respond(self) -> None:
            time.sleep(seconds)
            status, headers, body, length = store.ask(self)
            self.answer(status, headers, body, length=length)

    started.send(serving.Server(Exchange).port)
    threading.Event().wait()


def _save(case: Case, place: Place, server: int) -> Result:
    """Seconds, memory, requests, and seconds of the server."""
    way, tree = _WAYS[case.way](), _TREES[case.tree]()
    result: Result = case._asdict() | {"nbytes": nbytes(tree)}
    os.sync()
    warm_memory(nbytes(tree))
    with _watched(server, result, "save"):
        result["save"] = _timed(lambda: way.save(place, tree)).seconds
    files = _files(place.path)
    return result | {"files": len(files), "stored": sum(_size(f) for f in files)}


def _size(file: Path) -> int:
    return file.stat().st_size


def _restore(case: Case, place: Place, server: int) -> Result:
    """As `_save`, in another process: JAX keeps what it saved or read in a cache."""
    way, tree = _WAYS[case.way](), _TREES[case.tree]()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    for file in _files(place.path):
        _read_through(file)
    result: Result = {}
    warm_memory(nbytes(tree))
    with _watched(server, result, "restore"):
        first = _timed(lambda: way.restore(place, like))
    check_same(named(first.value), named(tree))
    result["restore"] = first.seconds
    if place.endpoint is None:
        del first
        warm_memory(nbytes(tree))
        later = [_timed(lambda: way.restore(place, like)).seconds for _ in range(2)]
        result["steady"] = statistics.fmean(later)
    return result


@contextlib.contextmanager
def _watched(server: int, result: Result, key: str) -> Iterator[None]:
    """Put into `result` what it takes beside time; the tree is there before."""
    base, requests, busy = reset_peak(), _requests(), _cpu(server)
    yield
    result[f"{key}peak"] = peak_memory() - base
    result[f"{key}_requests"] = _requests() - requests
    result[f"{key}_server"] = _cpu(server) - busy


def _requests() -> int:
    """How many TensorStore has made by HTTP in this process so far."""
    if (tensorstore := sys.modules.get("tensorstore")) is None:
        return 0
    name = "/tensorstore/http/request_started"
    metrics = tensorstore.experimental_collect_matching_metrics(name)
    return sum(value["value"] for metric in metrics for value in metric["values"])


def _cpu(pid: int) -> float:
    """Seconds that a process was busy."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_TIMES = {"save": "save", "restore": "first restore", "steady": "steady restore"}
_NUMBERS = {
    "save_requests": ("requests of a save", 1),
    "restore_requests": ("of a restore", 1),
    "save_server": ("server busy, save, s", 1),
    "restore_server": ("restore, s", 1),
    "files": ("files", 1),
    "stored": ("on disk, MiB", MIB),
    "save_peak": ("memory of a save, MiB", MIB),
    "restore_peak": ("of a restore, less the arrays", MIB),
}


def _table(cases: Sequence[Case], base: str, results: Sequence[Result]) -> str:
    """Medians; seconds are followed by the ratio to the way `base`."""

    def median(case: Case, key: str) -> float:
        of_it = [r for r in results if case == tuple(r[f] for f in Case._fields)]
        found = statistics.median(r.get(key, 0) for r in of_it)
        return found - (of_it[0]["nbytes"] if key == "restore_peak" else 0)

    times = [k for k in _TIMES if any(median(case, k) > 0 for case in cases)]
    keys = [k for k in _NUMBERS if any(median(case, k) > 0 for case in cases)]
    rows: list[Sequence[str]] = []
    for case in cases:
        usual = case._replace(way=base)
        usual = usual if usual in cases else case
        cells = [
            f"{seconds:.3g} s ({seconds / median(usual, k):.2f})" if seconds else ""
            for k in times
            for seconds in [median(case, k)]
        ]
        cells += [f"{median(case, k) / _NUMBERS[k][1]:.4g}" for k in keys]
        rows.append((*case, *cells))
    titles = [_TIMES[k] for k in times] + [_NUMBERS[k][0] for k in keys]
    return markdown((*Case._fields, *titles), rows)


if __name__ == "__main__":
    sys.exit(main())
