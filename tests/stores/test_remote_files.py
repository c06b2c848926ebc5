"""Files of other programs in stores, and behind the URLs of web servers."""

import functools as ft
import json
import pathlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import interop
from eqx_ckpt.__main__ import main
from faults import jobs
from faults.zygote import Zygote
from stores import programs, proxy
from stores.place import Place
from stores.web import Web


TREE = {
    "rows": np.arange(2**19, dtype=np.float32).reshape(512, 1024),
    "wide": np.arange(2**17, dtype=np.int32).reshape(4, 2**15),
    "bias": np.linspace(0, 1, 16, dtype=np.float32),
    "step": np.int32(7),
}
NBYTES = sum(value.nbytes for value in TREE.values())
SHARDED = [P("x"), P(None, "x"), P()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The files that the tests put somewhere."""
    folder = tmp_path_factory.mktemp("made")
    source = folder / "checkpoint"
    eqx_ckpt.tree_serialise_leaves(source, jax.tree.map(jax.numpy.asarray, TREE))
    interop.to_safetensors(source, folder / "one.safetensors")
    (folder / "split").mkdir()
    to = folder / "split" / "model.safetensors"
    interop.to_safetensors(source, to, max_shard_bytes=2**20)
    np.savez(folder / "plain.npz", **TREE)
    np.savez_compressed(folder / "packed.npz", **TREE)
    return folder


def content(made: pathlib.Path) -> dict[str, bytes]:
    files = [*made.glob("*.*"), *made.glob("split/*")]
    return {str(file.relative_to(made)): file.read_bytes() for file in files}


@pytest.fixture
def store(place: Place, made: pathlib.Path) -> Place:
    """A store that has the files."""
    put(place, content(made))
    return place


def put(place: Place, files: dict[str, bytes]) -> None:
    kv = ts.KvStore.open(place.spec).result()
    for name, data in files.items():
        kv.write(name, data).result()


@pytest.fixture
def web(made: pathlib.Path) -> Iterator[Web]:
    server = Web()
    server.files = {f"/{name}": data for name, data in content(made).items()}
    yield server
    server.stop()


def like(spec: P) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def one(value: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec if np.ndim(value) == 2 else P())
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    return jax.tree.map(one, TREE)


def check(restored: dict[str, Any]) -> None:
    assert restored.keys() == TREE.keys()
    for name, value in TREE.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), value)


FILES: dict[str, Callable[[str], interop.Source]] = {
    "one.safetensors": interop.open_safetensors,
    "split": interop.open_safetensors,
    "split/model.safetensors.index.json": interop.open_safetensors,
    "plain.npz": interop.open_npz,
    "packed.npz": interop.open_npz,
}


def test_an_empty_file_is_no_file_of_the_format(store: Place, web: Web) -> None:
    put(store, {"empty.npz": b"", "empty.safetensors": b""})
    web.files |= {"/empty.npz": b"", "/empty.safetensors": b""}
    for url in (store.url, web.url):
        for name in ("npz", "safetensors"):
            with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"valid {name}"):
                interop.open_source(f"{url}/empty.{name}")


@pytest.mark.once
@pytest.mark.parametrize("name", FILES)
def test_read_once(store: Place, name: str) -> None:
    sent: list[int] = []

    def count(exchange: proxy.Exchange) -> None:
        reply = exchange.forward()
        sent.append(len(reply.body) if exchange.command == "GET" else 0)
        exchange.reply(reply)

    store.proxy.add(count)
    check(eqx_ckpt.load(interop.open_source(f"{store.url}/{name}")))
    source = FILES[name](f"{store.url}/{name}")
    for spec in SHARDED:
        sent.clear()
        check(eqx_ckpt.tree_deserialise_leaves(source, like(spec)))
        # Beside the data, a zip has headers.
        assert sum(sent) <= NBYTES + 4096
        assert len(sent) <= 8


@pytest.mark.parametrize("name", ["one.safetensors", "plain.npz", "packed.npz"])
def test_behind_a_url(web: Web, name: str) -> None:
    source = interop.open_source(f"{web.url}/{name}?key=a%2Fb")
    assert "a%2Fb" not in str(source)
    web.sent.clear()
    check(eqx_ckpt.tree_deserialise_leaves(source, like(P("x"))))
    assert sum(web.sent) <= NBYTES + 4096


@pytest.mark.parametrize(
    "command", ["verify", "digest", "tree", "stats", "report -o page.html"]
)
def test_commands_of_a_url(
    web: Web,
    command: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    assert main([name, f"{web.url}/plain.npz", *options]) == 0
    assert main([name, f"{web.url}/none.npz", *options]) != 0
    assert "There is no file" in capsys.readouterr().err


def test_an_index_behind_a_url(web: Web, tmp_path: pathlib.Path) -> None:
    url = f"{web.url}/split/model.safetensors.index.json"
    interop.convert(url, tmp_path / "new", to="checkpoint")
    check(eqx_ckpt.load(tmp_path / "new"))


def test_only_what_is_wanted(store: Place) -> None:
    source = interop.open_safetensors(f"{store.url}/one.safetensors")
    before = len(store.proxy.requests)
    found = eqx_ckpt.load(source, prefix="bias")
    np.testing.assert_array_equal(np.asarray(found), TREE["bias"])
    assert len(store.proxy.requests) == before + 1


def restore_rows(url: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shardings = {
        name: NamedSharding(mesh, P("x") if np.ndim(value) == 2 else P())
        for name, value in TREE.items()
    }
    source = interop.open_safetensors(url)
    as_read = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings[name])
        for name, value in TREE.items()
    }
    found = eqx_ckpt.tree_deserialise_leaves(source, as_read, broadcast_replicas=True)
    for name, value in TREE.items():
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def test_a_job_reads_each_byte_once(
    s3: Place, made: pathlib.Path, zygote: Zygote
) -> None:
    put(s3, content(made))
    asked: list[tuple[str, int, int]] = []

    def note(exchange: proxy.Exchange) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", exchange.headers.get("Range", ""))
        if span and exchange.path.endswith(".safetensors"):
            asked.append((exchange.path, int(span[1]), int(span[2]) + 1))
        proxy.passed(exchange)

    s3.proxy.add(note)
    args = (programs.environment(s3), restore_rows, f"{s3.url}/split")
    zygote.call(jobs.values, 2, 2, programs.at, *args)
    shards = sorted(made.glob("split/*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        # Without what is asked to learn where the file ends.
        spans = sorted(
            (begin, end)
            for path, begin, end in asked
            if path.endswith(shard.name) and begin >= start and end - begin > 1
        )
        ends = [start, *(end for _, end in spans)]
        assert [begin for begin, _ in spans] == ends[:-1]
        assert ends[-1] == len(data)


@pytest.mark.parametrize("name", ["one.safetensors", "packed.npz"])
def test_replaced(store: Place, made: pathlib.Path, name: str) -> None:
    url = f"{store.url}/{name}"
    source = interop.open_source(url)
    data = (made / name).read_bytes()
    for other in (data + b"\0", data[: len(data) // 2]):
        put(store, {name: other})
        with pytest.raises(eqx_ckpt.CheckpointError, match="was replaced") as raised:
            eqx_ckpt.load(source)
        assert url in str(raised.value)
    put(store, {name: data})
    check(eqx_ckpt.load(interop.open_source(url)))


@pytest.mark.parametrize("tags", [True, False])
def test_replaced_behind_a_url(web: Web, tags: bool) -> None:
    web.tags = tags
    source = interop.open_source(f"{web.url}/one.safetensors")
    check(eqx_ckpt.load(source))
    changed = bytearray(web.files["/one.safetensors"])
    changed[-1] ^= 1
    web.files["/one.safetensors"] = bytes(changed)
    web.changes["/one.safetensors"] = "today"
    with pytest.raises(eqx_ckpt.CheckpointError, match="was replaced"):
        eqx_ckpt.load(source)


def fails(
    url: str, error: type[Exception], text: str, to: pathlib.Path, shown: str = ""
) -> None:
    """It cannot be converted, which an error says that names the URL."""
    with pytest.raises(error, match=text) as raised:
        interop.convert(url, to / "new", to="checkpoint")
    assert (shown or url) in str(raised.value)
    assert not [*to.iterdir()]


@pytest.mark.parametrize("cut", [-1, 1, 3000])
def test_other_sizes(
    place: Place, made: pathlib.Path, tmp_path: pathlib.Path, cut: int
) -> None:
    for name in ("one.safetensors", "plain.npz"):
        data = (made / name).read_bytes()
        put(place, {name: data[:cut] if cut > 0 else b"\0" + data + b"\0"})
        url = f"{place.url}/{name}"
        fails(url, eqx_ckpt.CorruptCheckpointError, "is not a valid", tmp_path)


def test_a_directory_that_lies(
    s3: Place, made: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = bytearray((made / "plain.npz").read_bytes())
    at = data.rfind(b"PK\5\6") + 16
    for start in (0, 2**31):
        data[at : at + 4] = struct.pack("<L", start)
        put(s3, {"a.npz": bytes(data)})
        url = f"{s3.url}/a.npz"
        fails(url, eqx_ckpt.CorruptCheckpointError, "its directory ends", tmp_path)


def test_what_is_missing(store: Place, tmp_path: pathlib.Path) -> None:
    not_found = eqx_ckpt.CheckpointNotFoundError
    fails(f"{store.url}/nothing.npz", not_found, "nothing.npz", tmp_path)
    with pytest.raises(not_found, match="There is no file"):
        interop.open_npz(f"{store.url}/nothing.npz")
    index = {"weight_map": {"w": "gone.safetensors"}}
    put(store, {"a.safetensors.index.json": json.dumps(index).encode()})
    url = f"{store.url}/a.safetensors.index.json"
    fails(url, not_found, "'gone.safetensors', which is not there", tmp_path)


def test_denied(s3: Place, tmp_path: pathlib.Path) -> None:
    s3.proxy.add(proxy.answered(403), path="one.safetensors")
    url = f"{s3.url}/one.safetensors"
    with pytest.raises(PermissionError, match=re.escape(url)):
        interop.open_safetensors(url)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("action", [proxy.torn, proxy.answered(503)])
def test_answers_that_fail(
    s3: Place, made: pathlib.Path, action: Any, tmp_path: pathlib.Path
) -> None:
    put(s3, content(made))
    url = f"{s3.url}/one.safetensors"
    source = interop.open_safetensors(url)
    # A few are asked for again, and then there is an error.
    rule = s3.proxy.add(action, path="one.safetensors", when=range(1, 3))
    check(eqx_ckpt.load(source))
    assert rule.struck == 2
    s3.proxy.add(action, path="one.safetensors")
    with pytest.raises(ConnectionError, match=re.escape(url)):
        interop.convert(source, tmp_path / "new", to="checkpoint")
    assert not [*tmp_path.iterdir()]


def test_web_servers_that_do_not_serve(web: Web, tmp_path: pathlib.Path) -> None:
    failing = ft.partial(fails, to=tmp_path)
    error = eqx_ckpt.CheckpointError
    web.moved = {"/there": "https://elsewhere.example/x?secret=1"}
    url = f"{web.url}/there"
    failing(url, error, "elsewhere .*'https://elsewhere.example/x.\\*\\*\\*'")
    web.refused = {"/denied": 403}
    failing(f"{web.url}/denied", PermissionError, "denies")
    failing(f"{web.url}/none.npz", eqx_ckpt.CheckpointNotFoundError, "There is no file")
    web.files["/text"] = b"not a file of arrays, although it is long enough" * 20
    failing(f"{web.url}/text", error, "format of .* is not known")
    user = web.url.replace("://", "://me:secret@")
    failing(user, error, "without a user", shown="***@")
    failing(f"{web.url}/a b", error, "percent-encoded")
    with pytest.raises(error, match="not read from a web server"):
        eqx_ckpt.load(f"{web.url}/one.safetensors")
    web.sends_parts = False
    failing(f"{web.url}/one.safetensors", error, "does not send parts of files")
