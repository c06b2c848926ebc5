"""The digest of the content: one for each content, however it is stored."""

import functools as ft
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt
from eqx_ckpt.interop import Source
from matrix.leaves import tree as leaves
from support import chunk_grid, content_digest


METADATA = {"z": [1, 2.5, None], "a": float("nan"), "ü": {"b": True, "a": "\n"}}
ACTIVATION = jax.nn.relu


def expected(tree: dict[str, Any], metadata: Any, unsaved: dict[str, str]) -> str:
    """The digest, as docs/format.md defines it, of leaves of these names."""
    lines: list[list[Any]] = [["eqx_ckpt digest 1", metadata, None]]
    lines += [["unsaved", *entry] for entry in sorted(unsaved.items())]
    lines += [line(name, leaf) for name, leaf in sorted(tree.items())]
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def line(name: str, leaf: Any) -> list[Any]:
    if is_key(leaf):
        data, impl = jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
        return ["key", name, "key", [*leaf.shape], impl, False, sha256(data)]
    if isinstance(leaf, jax.Array):
        about = leaf.dtype.name, [*leaf.shape], None, leaf.weak_type
        return ["jax", name, *about, sha256(leaf)]
    dtype = leaf.dtype
    is_named = dtype.isnative and dtype.kind not in "mM"
    kind = "numpy" if isinstance(leaf, np.ndarray) else "numpy_scalar"
    about = dtype.name if is_named else dtype.str, [*leaf.shape], None, False
    return [kind, name, *about, sha256(leaf)]


def sha256(array: Any) -> str:
    array = np.asarray(array)
    little = array.astype(array.dtype.newbyteorder("<"), order="C")
    return hashlib.sha256(little.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def every() -> dict[str, Any]:
    return leaves()


@pytest.fixture(scope="module")
def pinned(every, tmp_path_factory):
    """A checkpoint with every leaf and what is not saved, and its digest."""
    path = tmp_path_factory.mktemp("pinned") / "c"
    save(path, every)
    return path, eqx_ckpt.inspect.digest(path)


def save(path: Any, tree: dict[str, Any], **how: Any) -> None:
    tree = {**tree, "activation": ACTIVATION}
    eqx_ckpt.tree_serialise_leaves(path, tree, metadata=METADATA, **how)


def test_it_is_what_the_format_says(every, tmp_path):
    kinds = jax.Array | np.ndarray | np.generic
    arrays = {name: x for name, x in every.items() if isinstance(x, kinds)}
    save(tmp_path / "c", arrays)
    packed = METADATA | {"a": {"@float": "nan"}}
    unsaved = {"activation": "jax._src.nn.functions.relu"}
    assert eqx_ckpt.inspect.digest(tmp_path / "c") == expected(arrays, packed, unsaved)


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_each_way_to_store_has_the_same(every, pinned, tmp_path, layout, compression):
    path, digest = pinned
    how = {"layout": layout, "compression": compression}
    save("memory://digest", every, **how, overwrite=True)
    eqx_ckpt.copy("memory://digest", tmp_path / "copy")
    eqx_ckpt.copy(path, tmp_path / "other", **how)
    for place in ("memory://digest", tmp_path / "copy", tmp_path / "other"):
        assert eqx_ckpt.inspect.digest(place) == digest
        assert eqx_ckpt.inspect.verify(place, digest=digest)


def test_in_object_stores(place):
    tree = {"w": np.arange(12.0).reshape(3, 4), "key": jax.random.key(0), "n": 3}
    eqx_ckpt.tree_serialise_leaves("memory://digest", tree, overwrite=True)
    digest = eqx_ckpt.inspect.digest("memory://digest")
    eqx_ckpt.tree_serialise_leaves(f"{place.url}/a", tree, compression="zstd")
    assert eqx_ckpt.inspect.verify(f"{place.url}/a", digest=digest)


SPECS = [jax.P(), jax.P("x"), jax.P(None, "y"), jax.P("y", "x"), jax.P(("x", "y"))]


@pytest.mark.parametrize("nbytes", [24, 2**23])
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_on_each_mesh_and_in_chunks_of_each_size(layout, nbytes, monkeypatch):
    """In chunks of 24 bytes, most arrays are cut along both axes."""
    monkeypatch.setattr(chunk_grid, "TARGET_BYTES", nbytes)
    monkeypatch.setattr(chunk_grid, "_PART_BYTES", nbytes)
    tree = {
        "f32": jnp.arange(128.0).reshape(16, 8),
        "bf16": jnp.arange(128).astype(jnp.bfloat16).reshape(16, 8),
        "keys": jax.random.split(jax.random.key(0), (16, 8)),
    }
    digests = set()
    for spec in SPECS:
        for shape in ((2, 4), (8, 1)):
            mesh = jax.make_mesh(
                shape, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
            )
            sharded = jax.device_put(tree, jax.NamedSharding(mesh, spec))
            path = "memory://digest"
            eqx_ckpt.tree_serialise_leaves(path, sharded, layout=layout, overwrite=True)
            digests.add(eqx_ckpt.inspect.digest(path))
    assert digests == {expected(tree, None, {})}


class InMemory(Source):
    """One array, in chunks of any shape; keeps what was read of it."""

    def __init__(self, array: np.ndarray, chunk: tuple[int, ...]) -> None:
        path = (("key", "w"),)
        kind = {"path": path, "kind": "numpy"}
        of_array = eqx_ckpt.inspect.LeafRecord.of_array
        record = of_array(array.shape, array.dtype, **kind)
        self.record = record._replace(chunk_shape=chunk)
        self.array = array
        self.regions: list[tuple[slice, ...]] = []

    @property
    def manifest(self) -> eqx_ckpt.inspect.Manifest:
        return eqx_ckpt.inspect.Manifest({"w": self.record})

    def read(self, reads, damage, report=None):
        self.regions += [read.region for read in reads]
        return [self.array[read.region].copy() for read in reads]

    def __str__(self) -> str:
        return "an array in memory"


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=4),
    st.sampled_from([4, 16, 64]),
    st.sampled_from([64, 256, 10**6]),
)
def test_pieces_are_contiguous_and_of_bounded_size(axes, slab, largest):
    shape = tuple(size for size, _ in axes)
    chunk = tuple(c for _, c in axes)
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    source = InMemory(array, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_digest, "_SLAB", slab)
        patch.setattr(content_digest, "_LARGEST_SLAB", largest)
        assert eqx_ckpt.inspect.digest(source) == expected({"w": array}, None, {})
    read = [array[region].tobytes() for region in source.regions]
    assert b"".join(read) == array.tobytes()
    assert max(map(len, read)) <= max(slab, largest)
    rows = [size for size in (*shape, 1) if size > 1][:1] or [1]
    row = array.nbytes // rows[0]
    in_row = [c for size, c in axes if size > 1][:1] or [1]
    # A row of chunks is read whole if it is small enough, so each chunk is read once.
    if row * in_row[0] <= largest and in_row[0] > 1:
        first = next(axis for axis, size in enumerate(shape) if size > 1)
        starts = [region[first].start for region in source.regions]
        assert all(start % in_row[0] == 0 for start in starts)


def altered(leaf: Any) -> Any:
    """An array of which the first bit that is stored is another one."""
    data = bytearray(np.asarray(leaf).tobytes())
    data[0] ^= 1
    array = np.frombuffer(bytes(data), np.asarray(leaf).dtype).reshape(leaf.shape)
    if not isinstance(leaf, jax.Array):
        return array if isinstance(leaf, np.ndarray) else array[()]
    with jax.enable_x64(True):
        return jnp.asarray(array)


def nan(bits: int) -> np.ndarray:
    return np.array([bits], np.uint32).view(np.float32)


def changes() -> list[dict[str, Any]]:
    """Trees and metadata, no two of which are the same content."""
    w = np.array([[1.0, 2.0], [-0.0, 3.0]], np.float32)
    base: dict[str, Any] = {"w": w, "n": 1, "f": ACTIVATION, "k": jax.random.key(0)}
    ways: dict[str, list[Any]] = {
        "w": [
            *(jnp.asarray(w), w.T, w.reshape(4), w.reshape(1, 4), w.view(np.int32)),
            *(w.astype(">f4"), w.astype(np.float64), w.view("m8[s]"), w + 0.0),
            *(np.stack([w, w]), w[:1], np.zeros((0, 2), np.float32), np.float32(1.0)),
            *(w[:, :0], np.where(w == 3, nan(0x7FC00000), w), w.view("m8[ms]")),
            np.where(w == 3, nan(0x7FC00001), w),
            np.where(w == 3, nan(0xFFC00000), w),
        ],
        "n": [
            *(2, 1.0, True, 1 + 0j, 0.0, -0.0, np.int64(1), np.array(1)),
            *(jnp.asarray(1), jnp.int32(1), float("nan"), -float("nan")),
            "not saved",
        ],
        "f": [jax.nn.gelu, "jax.nn.relu", 0],
        "k": [
            *(jax.random.key(1), jax.random.key(0, impl="rbg")),
            *(
                jax.random.key_data(jax.random.key(0)),
                jax.random.split(jax.random.key(0)),
            ),
        ],
    }
    found = [{"tree": base}]
    found += [{"tree": base | {name: x}} for name, xs in ways.items() for x in xs]
    found += [{"tree": {k: v for k, v in base.items() if k != name}} for name in base]
    found += [
        {"tree": {k.upper() if k == name else k: v for k, v in base.items()}}
        for name in base
    ]
    found += [
        {"tree": base, "metadata": metadata}
        for metadata in (
            *({}, [], 1, 1.0, True, "1", "null", 0.0, -0.0, float("nan"), float("inf")),
            *({"a": 1}, {"a": 1, "b": None}, {"a": [1, 2]}, {"a": [2, 1]}, [[]], "ü"),
        )
    ]
    return found


def test_each_change_gives_another_one():
    digests: dict[str, Any] = {}
    for content in changes():
        tree, metadata = content["tree"], content.get("metadata")
        path = "memory://digest"
        eqx_ckpt.tree_serialise_leaves(path, tree, metadata=metadata, overwrite=True)
        digest = eqx_ckpt.inspect.digest(path)
        assert digest not in digests, (content, digests[digest])
        digests[digest] = content


def test_a_bit_of_each_leaf(every):
    kinds = jax.Array | np.ndarray | np.generic
    changed = {
        name: altered(leaf)
        for name, leaf in every.items()
        if isinstance(leaf, kinds) and np.size(leaf) and not is_key(leaf)
    }
    found = set()
    for name, leaf in changed.items():
        for tree in ({name: leaf}, {name: every[name]}):
            eqx_ckpt.tree_serialise_leaves("memory://digest", tree, overwrite=True)
            found.add(eqx_ckpt.inspect.digest("memory://digest"))
    assert len(found) == 2 * len(changed)


def test_how_metadata_are_ordered_does_not_count():
    digests = set()
    for metadata in ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}):
        save_one = eqx_ckpt.tree_serialise_leaves
        save_one("memory://digest", [1], metadata=metadata, overwrite=True)
        digests.add(eqx_ckpt.inspect.digest("memory://digest"))
    assert len(digests) == 1


def test_damage_is_named(tmp_path):
    tree = {name: np.arange(6) for name in "abc"}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    digest = eqx_ckpt.inspect.digest(tmp_path / "c")
    chunk = tmp_path / "c/b/c.0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    (tmp_path / "c/c/c.0").unlink()
    verify = ft.partial(eqx_ckpt.inspect.verify, digest=digest)
    for read in (eqx_ckpt.inspect.digest, verify):
        said = "These leaves are not what was saved:\n- 'b': .*\n- 'c': .*missing"
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=said):
            read(tmp_path / "c")


def test_another_content_is_an_error(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": jnp.ones(3)})
    found = eqx_ckpt.inspect.digest(tmp_path / "c")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": jnp.zeros(3)}, overwrite=True)
    now = eqx_ckpt.inspect.digest(tmp_path / "c")
    said = f"its content has the digest {now}, and {found} was expected"
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=said):
        eqx_ckpt.inspect.verify(tmp_path / "c", digest=found)


def test_values_that_were_changed_so_that_their_checksum_stays(tmp_path):
    tree = {"w": np.arange(4, dtype=np.int64)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    digest = eqx_ckpt.inspect.digest(tmp_path / "c")
    chunk = tmp_path / "c/w/c.0"
    data = int.from_bytes(chunk.read_bytes(), "little")
    # The polynomial of CRC-32C itself.
    changed = data ^ (1 | 0x82F63B78 << 1)
    chunk.write_bytes(changed.to_bytes(chunk.stat().st_size, "little"))
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", tree)
    assert restored["w"].tolist() != tree["w"].tolist()
    assert eqx_ckpt.inspect.digest(tmp_path / "c") != digest
    with pytest.raises(eqx_ckpt.CorruptCheckpointError):
        eqx_ckpt.inspect.verify(tmp_path / "c", digest=digest)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n"])
def test_what_is_no_digest(tmp_path, digest):
    with pytest.raises(ValueError, match="`digest` is .* 64 hexadecimal digits"):
        eqx_ckpt.inspect.verify(tmp_path / "none", digest=digest)


def test_all_is_read_once(tmp_path):
    array = np.arange(3 * 2**21, dtype=np.int64).reshape(3, -1)
    source = InMemory(array, (1, 2**20))
    digest = eqx_ckpt.inspect.digest(source)
    source.regions.clear()
    assert eqx_ckpt.inspect.verify(source, digest=digest)
    assert sum(array[region].size for region in source.regions) == array.size
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": array, "v": array[0]})
    total = eqx_ckpt.inspect.read_manifest(tmp_path / "c").nbytes
    for phase in ("digest", "verify"):
        heard = []
        report = lambda *said: heard.append(said)  # noqa: E731, B023
        if phase == "digest":
            digest = eqx_ckpt.inspect.digest(tmp_path / "c", progress=report)
        else:
            eqx_ckpt.inspect.verify(tmp_path / "c", digest=digest, progress=report)
        assert {said[0] for said in heard} == {phase}
        assert heard[-1][2:] == (total, total)


class Wrong(InMemory):
    def read(self, reads, damage, report=None):
        return [array[..., :1] for array in super().read(reads, damage, report)]


def test_a_source_that_returns_something_else():
    source = Wrong(np.arange(4), (4,))
    with pytest.raises(eqx_ckpt.CheckpointError, match=r"int64\[1\] for a region of"):
        eqx_ckpt.inspect.digest(source)


@pytest.mark.filterwarnings("ignore:.*does not keep")
@pytest.mark.parametrize("format", ["npz", "safetensors", "flax"])
def test_a_file_and_its_copy_have_the_same(tmp_path, format):
    tree = {"a.b": np.arange(6.0).reshape(2, 3), "c": {"d": jnp.ones(3, jnp.bfloat16)}}
    if format == "npz":
        tree["c"] = {"d": np.arange(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    eqx_ckpt.interop.convert(tmp_path / "c", tmp_path / "file", to=format)
    source = getattr(eqx_ckpt.interop, f"open_{format}")(tmp_path / "file")
    digest = eqx_ckpt.inspect.digest(source)
    eqx_ckpt.copy(source, tmp_path / "copy", layout="ocdbt")
    assert eqx_ckpt.inspect.verify(tmp_path / "copy", digest=digest)
    # Without a checksum, it is the digest that says what is there.
    assert not source.has_checksums
    assert eqx_ckpt.inspect.verify(source, digest=digest)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"and {'0' * 64} was"):
        eqx_ckpt.inspect.verify(source, digest="0" * 64)


def test_a_recording_and_its_copy_have_the_same(tmp_path):
    path, like = tmp_path / "r", {"x": np.float32(0), "n": np.zeros(2, np.int32)}
    rows = np.arange(60, dtype=np.int32).reshape(3, 20)
    samples = {"x": rows.astype(np.float32), "n": np.stack([rows, -rows], -1)}
    how = {"chains": 3, "chunk_bytes": 64, "metadata": {"eps": 0.5}}
    with eqx_ckpt.recording.Recording(path, like, **how) as recording:
        recording.extend(samples)
        recording.commit({"step": 20})
        digest = eqx_ckpt.inspect.digest(path)
        eqx_ckpt.copy(path, tmp_path / "copy")
        assert eqx_ckpt.inspect.verify(tmp_path / "copy", digest=digest)
        assert eqx_ckpt.inspect.verify(path, digest=digest)
        state = eqx_ckpt.inspect.digest(recording.state_path)
        eqx_ckpt.tree_serialise_leaves(tmp_path / "state", {"step": 20})
        assert eqx_ckpt.inspect.digest(tmp_path / "state") == state
        recording.extend(samples)
        recording.commit({"step": 40})
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=digest):
        eqx_ckpt.inspect.verify(path, digest=digest)


def test_metadata_that_are_not_json():
    class Odd(InMemory):
        @property
        def manifest(self) -> eqx_ckpt.inspect.Manifest:
            return eqx_ckpt.inspect.Manifest({}, metadata={"a": object()})

    with pytest.raises(eqx_ckpt.CheckpointError, match="`metadata` cannot be saved"):
        eqx_ckpt.inspect.digest(Odd(np.arange(3), (3,)))


def test_the_program_of_the_format_page(every, tmp_path, monkeypatch):
    """With each leaf; the page itself runs it on a few."""
    monkeypatch.chdir(tmp_path)
    save("000100", every)
    page = Path(__file__).parents[2] / "docs/format.md"
    _, _, section = page.read_text().partition("\n## Digest\n")
    program = section.partition("```python\n")[2].partition("```")[0]
    exec(program, {"eqx_ckpt": eqx_ckpt})
