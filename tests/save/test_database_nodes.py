"""Where the values of any database are that TensorStore has written."""

import gc
import pathlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt
from eqx_ckpt import CorruptCheckpointError
from faults import databases
from support import chunk_bytes, locate, ocdbt_tree
from versions import thinned


WORDS = ("layer", "a", "w", "a name that is longer")


def new_database(path: pathlib.Path, rng: random.Random, **config: Any) -> ts.KvStore:
    config = {
        "max_decoded_node_bytes": rng.choice([100, 1000, 2**23]),
        "max_inline_value_bytes": rng.choice([0, 10, 1000]),
        "manifest_kind": rng.choice(["single", "numbered"]),
        **config,
    }
    spec = {"driver": "ocdbt", "base": f"file://{path}/", "config": config}
    return ts.KvStore.open(spec, context=ts.Context()).result()


def write(store: ts.KvStore, rng: random.Random, count: int) -> None:
    transaction = ts.Transaction(atomic=True)
    for _ in range(count):
        parts = [rng.choice(WORDS) for _ in range(rng.randint(1, 4))]
        key = "/".join([*parts, str(rng.randrange(300))])
        value = rng.randbytes(rng.choice([0, 3, 50, 2000]))
        store.with_transaction(transaction).write(key, value).result()
    transaction.commit_async().result()


def found(path: pathlib.Path, keys: Iterable[bytes]) -> dict[bytes, Any]:
    """The values of those that are there, or the problems with them."""
    entries = ocdbt_tree.DatabaseTree(locate(str(path))).look_up(keys)
    there = {key: entries[key] for key in keys if key in entries}
    for key, entry in there.items():
        if isinstance(entry, ocdbt_tree.Location):
            there[key] = value_at(path, entry)
    return there


def value_at(
    path: pathlib.Path, place: ocdbt_tree.Location
) -> bytes | chunk_bytes.Problem:
    try:
        place.check()
        data = (path / place.file).read_bytes()
    except (CorruptCheckpointError, FileNotFoundError) as e:
        return chunk_bytes.Problem(str(e))
    value = data[place.start : place.start + place.nbytes]
    return value if len(value) == place.nbytes else chunk_bytes.Problem("too short")


@pytest.mark.parametrize("seed", thinned(range(40), 4))
def test_the_values_of_any_database(tmp_path: pathlib.Path, seed: int) -> None:
    rng = random.Random(seed)
    compression = rng.choice([None, {"id": "zstd"}])
    store = new_database(tmp_path, rng, compression=compression)
    # From 16 versions on, older ones are not in the manifest.
    for most in rng.choice([[300], [5, 300], 20 * [5]]):
        write(store, rng, rng.randint(1, most))
    if seed % 10 == 0:
        store.delete_range(ts.KvStore.KeyRange()).result()

    expected = databases.values_of(tmp_path)
    tree = ocdbt_tree.DatabaseTree(locate(str(tmp_path)))
    assert tree.sizes() == {key: len(value) for key, value in expected.items()}
    assert found(tmp_path, [*expected, b"another"]) == expected


@pytest.mark.parametrize("seed", thinned(range(12), 4))
def test_a_changed_database_is_read_as_tensorstore_does(
    tmp_path: pathlib.Path, seed: int
) -> None:
    """Or is refused: what TensorStore refuses in a node is, too."""
    rng = random.Random(seed)
    write(new_database(tmp_path, rng, compression=None), rng, rng.choice([1, 5, 40]))
    values = databases.values_of(tmp_path)
    refused = 0
    for file in [file for file in tmp_path.rglob("*") if file.is_file()]:
        before = file.read_bytes()
        for data in databases.mutants(before, 100, 100 * seed):
            file.write_bytes(data)
            ours = found(tmp_path, values)
            theirs = read_by_tensorstore(tmp_path, values)
            for key in values:
                one, other = ours.get(key), theirs.get(key)
                refused += isinstance(one, chunk_bytes.Problem)
                if not isinstance(one, chunk_bytes.Problem):
                    # Some of what a manifest says is for writers only.
                    is_same = "manifest" in file.name and one == values[key]
                    assert one == other or (other == REFUSED and is_same), key
        file.write_bytes(before)
    assert refused


REFUSED = "refused"


def read_by_tensorstore(path: pathlib.Path, keys: Iterable[bytes]) -> dict[bytes, Any]:
    try:
        store = databases.opened(path)
    except ValueError:
        return dict.fromkeys(keys, REFUSED)
    values: dict[bytes, Any] = {}
    for key in keys:
        try:
            result = store.read(key).result()
        except ValueError:
            values[key] = REFUSED
        else:
            if result.state == "value":
                values[key] = result.value
    return values


def test_a_node_as_large_as_orbax_lets_them_be(tmp_path: pathlib.Path) -> None:
    config = {"max_decoded_node_bytes": 10**8, "max_inline_value_bytes": 1024}
    store = new_database(tmp_path, random.Random(0), **config)
    sizes = {f"{i:05d}".encode(): 1024 for i in range(90_000)}
    with ts.Transaction(atomic=True) as transaction:
        for key, size in sizes.items():
            store.with_transaction(transaction)[key] = bytes(size)
    assert ocdbt_tree.DatabaseTree(locate(str(tmp_path))).sizes() == sizes


def test_reading_a_database_keeps_nothing(tmp_path: pathlib.Path) -> None:
    tree = {f"w{i}": np.zeros(4, np.float32) for i in range(100)}

    def objects() -> int:
        for _ in range(10):
            eqx_ckpt.tree_serialise_leaves(
                tmp_path / "new", tree, layout="ocdbt", overwrite=True
            )
            eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree)
        gc.collect()
        return len(gc.get_objects())

    objects()
    before = objects()
    assert objects() < before + 20
