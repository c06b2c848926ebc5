"""Where the values of any database are that TensorStore has written."""

import gc
import pathlib
import random

import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt
from faults import databases
from support import locate, ocdbt_tree


WORDS = ("layer", "a", "w", "a name that is longer")


@pytest.mark.parametrize("seed", range(40))
def test_the_values_of_any_database(tmp_path: pathlib.Path, seed: int) -> None:
    rng = random.Random(seed)
    config = {
        "compression": rng.choice([None, {"id": "zstd"}]),
        "max_decoded_node_bytes": rng.choice([100, 1000, 2**23]),
        "max_inline_value_bytes": rng.choice([0, 10, 1000]),
        "manifest_kind": rng.choice(["single", "numbered"]),
    }
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    store = ts.KvStore.open(spec, context=ts.Context()).result()
    for _ in range(rng.randint(1, 4)):
        transaction = ts.Transaction(atomic=True)
        for _ in range(rng.choice([1, 5, 300])):
            parts = [rng.choice(WORDS) for _ in range(rng.randint(1, 4))]
            key = "/".join([*parts, str(rng.randrange(300))])
            value = rng.randbytes(rng.choice([0, 3, 50, 2000]))
            store.with_transaction(transaction).write(key, value).result()
        transaction.commit_async().result()
    if seed % 10 == 0:
        store.delete_range(ts.KvStore.KeyRange()).result()

    expected = databases.values_of(tmp_path)
    tree = ocdbt_tree.DatabaseTree(locate(str(tmp_path)))
    assert tree.sizes() == {key: len(value) for key, value in expected.items()}
    found = tree.look_up([*expected, b"another"])
    for key, value in expected.items():
        there = found[key]
        if not isinstance(there, bytes):
            data = (tmp_path / there.file).read_bytes()
            there = data[there.start : there.start + there.nbytes]
        assert there == value
    assert b"another" not in found


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
