"""A save shares what is equal with an earlier checkpoint, by hard links."""

import os
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from faults.workloads import every_kind, small_chunks
from helpers import assert_same, files_below


MANIFEST = "zarr.json"


def leaves(seed):
    """Every kind of leaf, and an array on eight devices."""
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    numbers = np.random.default_rng(seed).standard_normal((16, 5), np.float32)
    return {
        **every_kind(seed),
        "empty": np.zeros((0, 3)),
        "sharded": jax.device_put(numbers, rows),
        "raw": numbers.T,  # Not contiguous.
    }


def mixed(seeds):
    made = {seed: leaves(seed) for seed in {*seeds.values()}}
    return {name: made[seed][name] for name, seed in seeds.items()}


def save(path, tree, **how):
    with small_chunks():
        eqx_ckpt.tree_serialise_leaves(path, tree, **how)


def check(path, tree):
    assert eqx_ckpt.inspect.verify(path)
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, tree), tree)


def shared(path, base):
    """The files of a checkpoint that it shares with another one."""
    both = files_below(path) & files_below(base)
    return {key for key in both if (path / key).samefile(base / key)}


def equal(path, base):
    """The files but for the manifest that have the same bytes."""
    both = files_below(path) & files_below(base) - {MANIFEST}
    return {k for k in both if (path / k).read_bytes() == (base / k).read_bytes()}


@settings(max_examples=12)
@given(data=st.data())
def test_whatever_is_equal_is_shared_and_nothing_else(tmp_path_factory, data):
    disk = tmp_path_factory.mktemp("disk")
    names = sorted(leaves(1))
    of_base = dict.fromkeys(data.draw(st.sets(st.sampled_from(names)), "base"), 1)
    seeds = data.draw(
        st.fixed_dictionaries({n: st.sampled_from([1, 2]) for n in names})
    )
    codecs = st.sampled_from([None, "zstd"])
    of_base, codec = of_base or {"f32": 1}, data.draw(codecs, "compression")
    save(disk / "base", mixed(of_base), compression=codec)
    how = {"compression": data.draw(codecs, "new compression"), "base": disk / "base"}
    path = data.draw(st.sampled_from([disk / "new", disk / "base"]), "path")
    shutil.copytree(disk / "base", disk / "before", copy_function=os.link)
    tree = mixed(seeds)
    with small_chunks():
        if data.draw(st.booleans(), "in the background"):
            eqx_ckpt.tree_serialise_leaves_async(
                path, tree, overwrite=True, **how
            ).result()
        else:
            eqx_ckpt.tree_serialise_leaves(path, tree, overwrite=True, **how)
    check(path, tree)
    check(disk / "before", mixed(of_base))
    assert shared(path, disk / "before") == equal(path, disk / "before")
    # It is what it would be without.
    save(disk / "alone", tree, compression=how["compression"])
    assert files_below(disk / "alone") == files_below(path)
    assert equal(path, disk / "alone") == files_below(path) - {MANIFEST}


def test_chunks_with_the_same_crc_32c_are_told_apart(tmp_path):
    def ending_alike(text):
        return np.frombuffer(text + crc32.iscsi(text).to_bytes(4, "little"), np.uint8)

    # What is followed by its own CRC has the same one, whatever it is.
    one, two = ending_alike(b"12345678"), ending_alike(b"abcdefgh")
    for name, tree in {
        "base": {"w": one, "v": two},
        "new": {"w": two, "v": one},
    }.items():
        how = {"base": tmp_path / "base"} if name == "new" else {}
        eqx_ckpt.tree_serialise_leaves(tmp_path / name, tree, **how)
    records = [
        eqx_ckpt.inspect.read_manifest(tmp_path / name).leaves
        for name in ("base", "new")
    ]
    assert records[0]["w"].checksums[0][:8] == records[1]["w"].checksums[0][:8]
    check(tmp_path / "base", {"w": one, "v": two})
    check(tmp_path / "new", {"w": two, "v": one})
    assert shared(tmp_path / "new", tmp_path / "base") == {"w/zarr.json", "v/zarr.json"}


def flip(file):
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def cut(file):
    os.truncate(file, 3)


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"more")


def link_away(file):
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to("../elsewhere")


def make_pipe(file):
    file.unlink()
    os.mkfifo(file)


def make_folder(file):
    file.unlink()
    file.mkdir()


def link_folder(file):
    folder = file.parent
    folder.rename(folder.parent / "moved")
    folder.symlink_to("moved")


DAMAGE = [
    flip,
    cut,
    lengthen,
    link_away,
    make_pipe,
    make_folder,
    link_folder,
    lambda file: file.unlink(),
]


@pytest.mark.parametrize("key", ["chunks/c.1.0", "chunks/zarr.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_not_shared(tmp_path, damage, key):
    base, new, tree = tmp_path / "base", tmp_path / "new", every_kind(1)
    save(base, tree)
    damage(base / key)
    save(new, tree, base=base)
    check(new, tree)
    assert key not in shared(new, base)
    assert not (new / key).is_symlink()
    # All else is.
    assert shared(new, base) >= {k for k in equal(new, base) if "chunks" not in k}


def test_a_base_that_is_removed_meanwhile(tmp_path):
    base, new, tree = tmp_path / "base", tmp_path / "new", every_kind(1)
    save(base, tree)

    def remove(phase, leaf, done, total):
        shutil.rmtree(base, ignore_errors=True)

    save(new, tree, base=base, progress=remove)
    check(new, tree)


def test_a_base_that_is_replaced_meanwhile(tmp_path):
    base, new, tree = tmp_path / "base", tmp_path / "new", every_kind(1)
    save(base, tree)
    other, calls = every_kind(2), []

    def replace(phase, leaf, done, total):
        if not calls:
            calls.append(phase)
            save(base, other, overwrite=True)

    save(new, tree, base=base, progress=replace)
    assert calls
    check(new, tree)
    check(base, other)


def test_a_copy_and_a_deletion_do_not_matter(tmp_path):
    base, new, tree = tmp_path / "base", tmp_path / "new", every_kind(1)
    save(base, tree)
    save(new, tree, base=base)
    eqx_ckpt.copy(new, tmp_path / "copy")
    assert not shared(tmp_path / "copy", new)
    shutil.rmtree(base)
    check(new, tree)
    check(tmp_path / "copy", tree)


def test_another_grid_shares_nothing(tmp_path):
    tree = {"w": jnp.arange(64.0), "s": jnp.ones(3)}
    save(tmp_path / "base", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, base=tmp_path / "base")
    check(tmp_path / "new", tree)
    assert shared(tmp_path / "new", tmp_path / "base") == {"s/c.0", "s/zarr.json"}


def test_what_cannot_be_shared(tmp_path):
    tree = {"w": np.ones(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "database", tree, layout="ocdbt")
    eqx_ckpt.tree_serialise_leaves("memory://base/x", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "base", tree)
    for path, how, words in [
        (tmp_path / "new", {"base": tmp_path / "database"}, "has layout='ocdbt'"),
        (tmp_path / "new", {"base": "memory://base/x"}, "Nothing can be shared"),
        (tmp_path / "new", {"base": tmp_path / "base", "layout": "ocdbt"}, "`base` is"),
        ("memory://new/x", {"base": tmp_path / "base"}, "Nothing can be shared"),
    ]:
        with pytest.raises(ValueError, match=words):
            eqx_ckpt.tree_serialise_leaves(path, tree, **how)
    for verb in (
        eqx_ckpt.tree_serialise_leaves,
        eqx_ckpt.tree_serialise_leaves_async,
    ):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="nowhere"):
            verb(tmp_path / "new", tree, base=tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == ["base", "database"]


def test_a_filter_spec_that_writes(tmp_path):
    def spec(f, leaf):
        if eqx.is_array(leaf):
            f.write(np.asarray(leaf).tobytes())

    tree = {"a": jnp.ones(9), "b": jnp.ones(9)}
    with small_chunks(16):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "base", tree, spec)
        tree["b"] = tree["b"] + 1
        eqx_ckpt.tree_serialise_leaves(
            tmp_path / "new", tree, spec, base=tmp_path / "base"
        )
    assert eqx_ckpt.inspect.verify(tmp_path / "new")
    assert shared(tmp_path / "new", tmp_path / "base") == equal(
        tmp_path / "new", tmp_path / "base"
    )
    assert {"a/c.0", "a/c.1", "b/zarr.json"} <= equal(
        tmp_path / "new", tmp_path / "base"
    )
