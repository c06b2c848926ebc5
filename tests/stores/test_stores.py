"""Checkpoints in object stores: what is saved comes back, in few requests."""

import errno
import os
import pathlib
import re
import subprocess
import sys
import threading
import traceback
import uuid
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import StorePath
from faults.databases import set_options
from faults.workloads import tree
from helpers import assert_same, files_below, until
from stores import proxy
from stores.place import Place
from stores.s3 import GIVEN
from support import (
    bucket_attempt,
    heartbeat,
    KeyValues,
    store_at,
    tensorstore_calls as kvstore,
)


pytestmark = pytest.mark.usefixtures("impatient")

TREE = {
    "model": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
    "opt": {"m": np.arange(4), "n": 7},
}
# Those by hand, see CONTRIBUTING.md.
replacing = pytest.mark.skipif(
    bool(GIVEN), reason="A Ceph gateway does not replace an object on a condition."
)
ATTEMPT = re.compile(r"@[0-9a-f]{32}/")


def keys(place: Place) -> set[str]:
    """All keys below the place."""
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    return {key.decode() for key in kv.list().result()}


def counted(place: Place) -> Counter[str]:
    """How many requests of each kind there were since the last time."""
    requests = place.proxy.found()
    place.proxy.requests.clear()
    return Counter(
        "LIST"
        if re.search(proxy.LIST, r.path) and r.method == "GET"
        else {"POST": "PUT"}.get(r.method, r.method)
        for r in requests
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_manifest_of_a_database_is_verified(tmp_path, monkeypatch, on_disk):
    set_options(monkeypatch, KeyValues, max_transaction=2**12)
    url = str(tmp_path / "new") if on_disk else f"memory://{uuid.uuid4().hex}"
    state = {f"{i}": np.full(2000, i) for i in range(3)}
    eqx_ckpt.tree_serialise_leaves(url, state, layout="ocdbt")
    store = store_at(url)
    manifests = [key for key in store.list().result() if b"manifest." in key]
    assert len(manifests) == 1 if on_disk else len(manifests) > 3
    for key in manifests:
        eqx_ckpt.inspect.verify(url)
        whole = store.read(key).result().value
        for position in range(0, len(whole), 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1
            store.write(key, bytes(damaged)).result()
            with pytest.raises(eqx_ckpt.CorruptCheckpointError):
                eqx_ckpt.inspect.verify(url)
        store.write(key, b"").result()
        with pytest.raises(eqx_ckpt.CorruptCheckpointError):
            eqx_ckpt.inspect.verify(url)
        store.write(key, whole).result()
    assert_same(eqx_ckpt.tree_deserialise_leaves(url, state), state)


def test_requests_of_a_save_and_a_restore(place):
    eqx_ckpt.tree_serialise_leaves(place.url, TREE)
    is_gcs = place.url.startswith("gs:")
    counted(place)
    # A LIST of GCS that is denied or fails looks empty: one more of each tells.
    # And two GETs for each location above, which could be a checkpoint or a recording.
    asking = Counter(GET=1 + is_gcs + 2, LIST=1 + is_gcs)
    eqx_ckpt.tree_serialise_leaves(place.url + "-2", TREE)
    assert counted(place) == asking + Counter(PUT=3 * 2 + 1)
    eqx_ckpt.tree_deserialise_leaves(place.url + "-2", TREE)
    # The manifest twice, since its size is not known, and what it begins with twice.
    assert counted(place) == Counter(GET=3 + 4)
    eqx_ckpt.tree_match(place.url + "-2", TREE)
    assert counted(place) == Counter(GET=2)
    eqx_ckpt.inspect.verify(place.url + "-2")
    assert counted(place) == Counter(GET=3 * 2 + 4)


def test_a_save_asks_all_at_once(place: Place) -> None:
    """What is there, and whether something above is a checkpoint."""
    eqx_ckpt.tree_serialise_leaves(place.url, TREE)  # It asks for conditions, once.
    all_asked = threading.Barrier(3)
    answers: list[int] = []

    def together(exchange: proxy.Exchange) -> None:
        answers.append(all_asked.wait(30.0))
        proxy.passed(exchange)

    for path in (r"run-2(/|%2F)zarr\.json", proxy.LIST, r"recording\.json"):
        place.proxy.add(together, "GET", path, when={1})
    eqx_ckpt.tree_serialise_leaves(place.url + "-2", TREE)
    assert sorted(answers) == [0, 1, 2]


def test_only_what_is_wanted_is_requested(place):
    eqx_ckpt.tree_serialise_leaves(place.url, TREE)
    place.proxy.requests.clear()
    like = jax.tree.map(lambda leaf: leaf, TREE)
    like["model"]["b"] = jnp.zeros(3, jnp.bfloat16)
    restored = eqx_ckpt.tree_deserialise_leaves(
        place.url, like, where=lambda tree: tree["model"]["w"]
    )
    assert_same(restored, like)
    part = eqx_ckpt.tree_deserialise_leaves(place.url, TREE["opt"], prefix="opt")
    assert_same(part, TREE["opt"])
    chunks = place.proxy.found(path=r"(/|%2F)c\.")
    assert [
        re.findall(r"(?:/|%2F)(\w)(?:/|%2F)c\.", request.path) for request in chunks
    ] == [["w"], ["m"]]


def test_a_chunk_is_requested_once_for_all_its_regions(place):
    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    eqx_ckpt.tree_serialise_leaves(place.url, {"w": jnp.asarray(weight)})
    place.proxy.requests.clear()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    like = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}
    restored = eqx_ckpt.tree_deserialise_leaves(place.url, like)
    assert restored["w"].sharding == sharding
    assert np.asarray(restored["w"]).tobytes() == weight.tobytes()
    assert len(place.proxy.found(path=r"(/|%2F)c\.")) == 1


@replacing
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_directory_that_was_copied(place, layout, tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "local", TREE, layout=layout)
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    for name in files_below(tmp_path / "local"):
        kv.write(name, (tmp_path / "local" / name).read_bytes()).result()
    assert_same(eqx_ckpt.tree_deserialise_leaves(place.url, TREE), TREE)
    eqx_ckpt.inspect.verify(place.url)
    eqx_ckpt.tree_serialise_leaves(place.url, tree(1), overwrite=True)
    assert_same(eqx_ckpt.tree_deserialise_leaves(place.url, tree(0)), tree(1))
    root = eqx_ckpt.inspect.read_manifest(place.url).root
    assert {key for key in keys(place) if not key.startswith(root)} == {"zarr.json"}


def test_a_store_with_arguments(s3, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    run = StorePath(s3.url, endpoint=s3.endpoint + "/", region="us-east-1")
    eqx_ckpt.tree_serialise_leaves(run / "000100", TREE)
    assert str(run / "000100") == os.fspath(run / "000100") == s3.url + "/000100"
    assert_same(eqx_ckpt.tree_deserialise_leaves(run / "000100", TREE), TREE)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for region in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(region, "us-east-1")
        assert_same(eqx_ckpt.tree_deserialise_leaves(s3.url + "/000100/", TREE), TREE)
        monkeypatch.delenv(region)
    # Of an endpoint of one's own, no region need be known.
    assert_same(eqx_ckpt.tree_deserialise_leaves(s3.url + "/000100", TREE), TREE)


KEEP = eqx_ckpt.keep_last(2)


@pytest.mark.parametrize("host", ["{bucket}.localhost:", "127.0.0.1:"])
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_bucket_in_the_endpoint(s3, s3_backend, monkeypatch, host, layout):
    """In the name of the host, or in a path that the user gives."""
    in_path = "" if host.startswith("{") else "/{bucket}"
    endpoint = f"http://{host}{s3_backend.port}{in_path}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with eqx_ckpt.CheckpointManager(s3.url, layout=layout, keep=KEEP) as run:
        for step in range(3):
            run.save(step, TREE).result()
        assert run.steps() == [1, 2]
    assert_same(eqx_ckpt.tree_deserialise_leaves(f"{s3.url}/000002", TREE), TREE)
    spec = {"driver": "zarr3", "kvstore": {**s3.spec, "path": "plain/"}}
    ts.open(spec, create=True, dtype=ts.int32, shape=[7]).result()
    rows = eqx_ckpt.data.StoredDataSource(x=f"s3://{s3.bucket}/plain")
    loader = eqx_ckpt.data.Loader(rows, 7, order="sequential")
    _, batch = loader.next(loader.start())
    assert batch["x"].tolist() == [0] * 7
    loader.close()
    # It is the same bucket.
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert_same(eqx_ckpt.tree_deserialise_leaves(f"{s3.url}/000001", TREE), TREE)


@pytest.mark.parametrize("endpoint", ["{bucket}.x", "https://{b}.x", "https://{bucket"])
def test_an_endpoint_that_is_no_url(s3, endpoint):
    store = StorePath(s3.url, endpoint=endpoint)
    with pytest.raises(eqx_ckpt.CheckpointError, match="is not a URL"):
        eqx_ckpt.tree_serialise_leaves(store / "a", TREE)


QUIET = """
import contextlib
import sys
import eqx_ckpt
import numpy as np

tree = {"w": np.arange(3.0), "step": 1}
for layout in ("zarr", "ocdbt"):
    url = f"{sys.argv[1]}/{layout}"
    eqx_ckpt.tree_serialise_leaves(url, tree, layout=layout)
    restored = eqx_ckpt.tree_deserialise_leaves(url, tree)
    assert restored["w"].tolist() == [0.0, 1.0, 2.0]
# Here nothing else checks its type.
for url in (sys.argv[1], "local"):
    with contextlib.suppress(ValueError):
        eqx_ckpt.tree_serialise_leaves(url, tree, layout="zip")
        raise AssertionError("there is no such layout")
"""


def test_nothing_is_written_to_stderr(s3, tmp_path):
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "AWS_ACCESS_KEY_ID": os.environ["AWS_ACCESS_KEY_ID"],
        "AWS_SECRET_ACCESS_KEY": os.environ["AWS_SECRET_ACCESS_KEY"],
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": s3.endpoint,
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", QUIET, s3.url]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_zarr_reads_a_copy(place, tmp_path):
    zarr = pytest.importorskip("zarr")
    eqx_ckpt.tree_serialise_leaves(place.url, {"w": jnp.arange(3.0), "deep": [TREE]})
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    for key in keys(place):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(kv.read(key).result().value)
    group = zarr.open_group(tmp_path, mode="r")
    root = eqx_ckpt.inspect.read_manifest(place.url).root
    assert group[f"{root}w"][:].tolist() == [0.0, 1.0, 2.0]
    assert group[f"{root}deep/0/opt/m"][:].tolist() == [0, 1, 2, 3]


# What is wrong with the arguments, the bucket, or who asks.


def readers(url: Any) -> list[Any]:
    return [
        lambda: eqx_ckpt.tree_serialise_leaves(url, TREE),
        lambda: eqx_ckpt.tree_deserialise_leaves(url, TREE),
        lambda: eqx_ckpt.inspect.verify(url),
        lambda: eqx_ckpt.tree_match(url, TREE),
    ]


def test_no_such_bucket(place):
    url = place.url.replace(place.bucket, f"{place.bucket}-absent", 1)
    for reader in readers(url):
        with pytest.raises(eqx_ckpt.CheckpointError, match="absent.*no such bucket"):
            reader()


@pytest.mark.parametrize("method", ["", "PUT", "GET", "LIST"])
def test_denied(place, method):
    path = proxy.LIST if method == "LIST" else ""
    if place.url.startswith("gs:") and method == "LIST":
        # Google denies what is not there to who may not list.
        path = proxy.LIST + "|/o/.*%40[?]"
    if method == "LIST":
        method = "GET"
    if method == "PUT" and place.url.startswith("gs:"):
        method = "POST"
    place.proxy.add(proxy.answered(403), method, path)
    with pytest.raises(PermissionError, match="denies") as caught:
        eqx_ckpt.tree_serialise_leaves(place.url, TREE)
    assert place.bucket in str(caught.value)
    place.proxy.rules.clear()
    assert keys(place) == set()
    eqx_ckpt.tree_serialise_leaves(place.url, TREE)
    if method in ("", "GET") and not path:
        place.proxy.add(proxy.answered(403), method, path)
        for reader in readers(place.url)[1:]:
            with pytest.raises(PermissionError, match="denies"):
                reader()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "AuthorizationHeaderMalformed"),
        (301, "PermanentRedirect"),
        (400, "ExpiredToken"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (400, "InvalidToken"),
        (400, "TokenRefreshRequired"),
    ],
)
def test_the_wrong_region_or_credentials(s3, status, code):
    s3.proxy.add(proxy.answered(status, code))
    for reader in readers(s3.url):
        with pytest.raises(PermissionError, match="(?s)credentials.*region"):
            reader()


def redirected(exchange: proxy.Exchange) -> None:
    exchange.reply(proxy.Reply(307, {"Location": "http://127.0.0.1:9/"}, b"", None))


def without_etag(exchange: proxy.Exchange) -> None:
    reply = exchange.forward()
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "etag"}
    exchange.reply(reply._replace(headers=headers))


def page(exchange: proxy.Exchange) -> None:
    """That of a login, for whatever is asked."""
    headers = {"Content-Type": "text/html", "ETag": '"page"'}
    exchange.reply(proxy.Reply(200, headers, b"<!DOCTYPE html><p>Log in</p>", None))


def without_ranges(exchange: proxy.Exchange) -> None:
    """A cache that knows whole objects only."""
    del exchange.headers["Range"]
    proxy.passed(exchange)


def partial(exchange: proxy.Exchange) -> None:
    """The status of a part, without a word about which one it is."""
    exchange.reply(exchange.forward()._replace(status=206))


@pytest.mark.parametrize(
    ("action", "path", "words"),
    [
        (redirected, "", "sends requests for .* elsewhere"),
        (without_etag, r"run/zarr\.json$", "as no store does.*proxy"),
        (page, proxy.LIST, "as no store does.*login"),
        (proxy.answered(407), "", "asks for a login"),
        (partial, r"run/zarr\.json$", "as no store does.*proxy"),
        (proxy.answered(416), "", "The store refuses"),
        (proxy.answered(404, "NoSuchKey"), proxy.LIST, "knows nothing at"),
        (proxy.answered(412), proxy.LIST, "contradict each other"),
    ],
)
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_no_answer_of_a_store_is_damage(s3, action, path, words, layout):
    """A server in between says so, or the wrong one."""
    eqx_ckpt.tree_serialise_leaves(s3.url, TREE, layout=layout)
    s3.proxy.add(action, path=path)
    asked = [lambda: eqx_ckpt.inspect.garbage_collect(s3.url, dry_run=True)]
    if path != proxy.LIST:
        asked = readers(s3.url)
    elif layout == "ocdbt":
        asked += readers(s3.url)[1:3]
    for ask in asked:
        with pytest.raises((eqx_ckpt.CheckpointError, OSError), match=words) as raised:
            ask()
        assert not isinstance(raised.value, eqx_ckpt.CorruptCheckpointError)


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_cache_that_ignores_ranges_is_no_damage(s3, layout):
    """Whole objects are read: some readers need no parts, and others say so."""
    eqx_ckpt.tree_serialise_leaves(s3.url, TREE, layout=layout)
    s3.proxy.add(without_ranges)
    for ask in readers(s3.url)[1:]:
        try:
            ask()
        except eqx_ckpt.CorruptCheckpointError as e:
            pytest.fail(f"It is called damage: {e}")
        except eqx_ckpt.CheckpointError:
            pass


def test_a_page_of_a_login_is_no_object_of_gcs(gcs):
    """S3 is known by its ETags."""
    eqx_ckpt.tree_serialise_leaves(gcs.url, TREE)
    gcs.proxy.add(page)
    for ask in readers(gcs.url):
        with pytest.raises(eqx_ckpt.CheckpointError, match="as no store does.*login"):
            ask()
    gcs.proxy.rules.clear()
    eqx_ckpt.inspect.verify(gcs.url)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "ExpiredToken", PermissionError),
        (403, "AccessDenied", PermissionError),
        (400, "MalformedXML", eqx_ckpt.CheckpointError),
        (307, "", eqx_ckpt.CheckpointError),
    ],
)
@pytest.mark.parametrize("everything", [False, True])
def test_a_refused_commit_is_known(s3, status, code, kind, everything):
    """Also if nothing is answered any more after that."""
    action = redirected if status == 307 else proxy.answered(status, code)

    def refuse(phase: str, *_: object) -> None:
        if phase == "commit":
            path = "" if everything else r"run/zarr\.json$"
            s3.proxy.add(action, "" if everything else "PUT", path)

    with pytest.raises(kind) as raised:
        eqx_ckpt.tree_serialise_leaves(s3.url, TREE, progress=refuse)
    assert "is not known" not in "".join(getattr(raised.value, "__notes__", ()))
    s3.proxy.rules.clear()
    assert everything or keys(s3) == set()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.inspect.read_manifest(s3.url)


def test_the_wrong_time(impatient: None, s3: Place) -> None:
    s3.proxy.add(proxy.answered(403, "RequestTimeTooSkewed"))
    for reader in readers(s3.url):
        with pytest.raises(PermissionError, match="clock of this machine is wrong"):
            reader()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidToken", PermissionError),
        (400, "TokenRefreshRequired", PermissionError),
        (400, "EntityTooLarge", eqx_ckpt.CheckpointError),
        (405, "MethodNotAllowed", eqx_ckpt.CheckpointError),
        (413, "TooLarge", eqx_ckpt.CheckpointError),
        (501, "NotImplemented", eqx_ckpt.CheckpointError),
    ],
)
def test_a_write_that_is_refused_for_another_reason(
    s3: Place, monkeypatch: pytest.MonkeyPatch, status: int, code: str, kind: type
) -> None:
    """Nobody is told to do without conditions, who has only an old token."""
    monkeypatch.setattr(bucket_attempt, "_keep_conditions", set())
    s3.proxy.add(proxy.answered(status, code), "PUT")
    for store in (s3.url, StorePath(s3.url, single_writer=True)):
        with pytest.raises(kind, match=code) as caught:
            eqx_ckpt.tree_serialise_leaves(store, TREE)
        assert "single_writer" not in str(caught.value)
        assert not isinstance(caught.value, eqx_ckpt.CorruptCheckpointError)


@pytest.mark.once
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "QuotaExceeded"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        (507, "XMinioStorageFull"),
        (507, "InsufficientStorage"),
    ],
)
def test_a_quota(impatient: None, place: Place, layout, status: int, code: str) -> None:
    """It is not for the credentials, nor a store that is too busy."""
    eqx_ckpt.tree_serialise_leaves(f"{place.url}/old", TREE)
    before = keys(place)
    place.proxy.add(proxy.answered(status, code), "PUT")
    place.proxy.add(proxy.answered(status, code), "POST")
    for url, overwrite in ((f"{place.url}/new", False), (f"{place.url}/old", True)):
        with pytest.raises(OSError, match=f"{place.bucket}.*{code}.*quota") as caught:
            eqx_ckpt.tree_serialise_leaves(
                url, TREE, overwrite=overwrite, layout=layout
            )
        assert caught.value.errno == errno.EDQUOT
    assert keys(place) == before
    assert_same(eqx_ckpt.tree_deserialise_leaves(f"{place.url}/old", TREE), TREE)


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "X")])
def test_conditions_that_are_refused(
    s3: Place, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    monkeypatch.setattr(bucket_attempt, "_keep_conditions", set())

    def action(exchange: proxy.Exchange) -> None:
        has_condition = "If-None-Match" in exchange.headers
        refused = proxy.answered(status, code)
        (refused if has_condition else proxy.passed)(exchange)

    s3.proxy.add(action, "PUT")
    with pytest.raises(eqx_ckpt.CheckpointError, match="single_writer=True"):
        eqx_ckpt.tree_serialise_leaves(s3.url, TREE)
    assert keys(s3) == set()
    eqx_ckpt.tree_serialise_leaves(StorePath(s3.url, single_writer=True), TREE)


# What somebody has put into a URL, or a server says, is not for logs.


SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.mark.parametrize(
    "endpoint",
    [
        f"http://me:{SECRET}@127.0.0.1:9000",
        f"https://{SECRET.replace('/', '')}@host/path",
        f"me:{SECRET}@host:9000",
        f"https://host/?X-Amz-Signature={SECRET}",
    ],
)
def test_no_password_in_an_endpoint_is_shown(
    s3: Place, monkeypatch: pytest.MonkeyPatch, endpoint: str, caplog
) -> None:
    texts: list[str] = []
    store = StorePath(s3.url, endpoint=endpoint)
    texts += [repr(store), str(store), repr(store / "a"), repr([store])]
    for reader in readers(store):
        with pytest.raises(eqx_ckpt.CheckpointError, match="environment") as caught:
            reader()
        texts += traceback.format_exception(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(eqx_ckpt.CheckpointError) as caught:
        eqx_ckpt.CheckpointManager(s3.url)
    texts += [repr(caught.value), caplog.text]
    assert not [text for text in texts if "K7MDENG" in text or "wJalr" in text]


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@bucket/run",
        f"http://AKIA:{SECRET}@bucket/run",
        f"s3:/AKIA:{SECRET}@bucket/run",
        f"AKIA:{SECRET}@bucket",
    ],
)
def test_no_password_in_a_url_is_shown(url: str) -> None:
    read = eqx_ckpt.inspect.read_manifest
    for ask in (lambda: StorePath(url), *[lambda: read(url)] * ("://" in url)):
        try:
            texts = [repr(ask())]
        except eqx_ckpt.CheckpointError as e:
            texts = [str(e), repr(e)]
        assert not [text for text in texts if "K7MDENG" in text or "wJalr" in text]


def test_a_store_is_shown_as_it_is_written(s3: Place) -> None:
    store = StorePath(s3.url, endpoint="http://127.0.0.1:9000/s3", region="eu-west-1")
    assert eval(repr(store)) == store
    alone = StorePath("s3://bucket/run/@attempt/x", single_writer=True)
    assert repr(alone) == "StorePath('s3://bucket/run/@attempt/x', single_writer=True)"
    public = StorePath("s3://bucket/run", anonymous=True)
    assert repr(public / "1") == "StorePath('s3://bucket/run/1', anonymous=True)"


def test_a_public_bucket(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read without credentials, whether there are any or not."""
    eqx_ckpt.tree_serialise_leaves(f"{s3.url}/000001", TREE)
    signed: list[bool] = []
    # Which this server needs.
    signature = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"

    def action(exchange: proxy.Exchange) -> None:
        signed.append("Authorization" in exchange.headers)
        exchange.headers["Authorization"] = signature
        proxy.passed(exchange)

    s3.proxy.add(action)
    run = StorePath(s3.url, anonymous=True)
    for _ in range(2):
        restored = eqx_ckpt.tree_deserialise_leaves(run / "000001", TREE)
        assert_same(restored, TREE)
        assert eqx_ckpt.CheckpointManager(run).latest() == 1
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    step = f"{s3.url}/000001"
    with pytest.raises(PermissionError, match="anonymous=True"):
        eqx_ckpt.inspect.read_manifest(step)
    for said in ("true", "YES", "1"):
        monkeypatch.setenv("AWS_NO_SIGN_REQUEST", said)
        assert_same(eqx_ckpt.tree_deserialise_leaves(step, TREE), TREE)
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "no")
    with pytest.raises(PermissionError, match="AWS_NO_SIGN_REQUEST=true"):
        eqx_ckpt.inspect.read_manifest(step)
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "perhaps")
    with pytest.raises(eqx_ckpt.CheckpointError, match="'perhaps'. Set it to 'true'"):
        eqx_ckpt.inspect.read_manifest(step)
    assert not any(signed)


def test_no_token_in_an_answer_is_shown(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Servers repeat a token that they refuse; and it is in every request."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    caplog.set_level("DEBUG")

    def action(exchange: proxy.Exchange) -> None:
        assert exchange.headers["Authorization"]
        body = f"""<Error><Code>InvalidToken</Code><Message>Malformed.</Message>
            <Token-0>{SECRET}</Token-0></Error>{exchange.headers}"""
        headers = {"Content-Type": "application/xml"}
        exchange.reply(proxy.Reply(400, headers, body.encode(), None))

    place.proxy.add(action)
    for reader in readers(place.url):
        with pytest.raises((PermissionError, eqx_ckpt.CheckpointError)) as caught:
            reader()
        error: BaseException | None = caught.value
        while error is not None:
            shown = f"{error!r} {error} {getattr(error, '__notes__', '')}"
            assert SECRET not in shown
            assert "Authorization" not in shown
            error = error.__cause__ or error.__context__
    assert SECRET not in caplog.text


def test_nobody_at_the_endpoint(place, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for reader in readers(place.url):
        with pytest.raises(ConnectionError, match="does not answer"):
            reader()


def test_no_credentials(s3, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for reader in readers(s3.url):
        with pytest.raises(PermissionError, match="No credentials"):
            reader()


@pytest.mark.parametrize("name", ["thesis.tex", "w/c.0", "@attempt/w", "zarr.json/x"])
def test_what_is_not_of_a_checkpoint_is_left_alone(place, name):
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    kv.write(name, b"years of work").result()
    for overwrite in (False, True):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=name):
            eqx_ckpt.tree_serialise_leaves(place.url, TREE, overwrite=overwrite)
    assert keys(place) == {name}
    assert kv.read(name).result().value == b"years of work"


def values(place: Place) -> dict[bytes, bytes]:
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    return {key: kv.read(key).result().value for key in kv.list().result()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_checkpoints_below_and_above_are_left_alone(place, overwrite):
    like = {"x": np.float32(0)}
    with eqx_ckpt.CheckpointManager(f"{place.url}/run") as manager:
        manager.save(1, TREE)
    with eqx_ckpt.recording.Recording(f"{place.url}/chain", like) as recording:
        recording.extend({"x": np.zeros(4, np.float32)})
        recording.commit(TREE)
    before = values(place)
    step = f"{place.url}/run/000001"
    inside = [f"{step}/in", f"{step}/a/b/c", f"{place.url}/chain/in"]
    inside += [f"{place.url}/chain/states/000001/in", f"{place.url}/chain/samples"]
    for url in [place.url, f"{place.url}/run", f"{place.url}/chain", *inside]:
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=url):
            eqx_ckpt.tree_serialise_leaves(url, TREE, overwrite=overwrite)
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=url):
            eqx_ckpt.copy(step, url, overwrite=overwrite)
    for url in (*inside, place.url, f"{place.url}/run"):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=url):
            eqx_ckpt.recording.Recording(url, like)
    assert values(place) == before


def test_what_is_above_may_be_denied_but_not_unknown(impatient: None, place: Place):
    above = rf"{place.bucket}(/|/o/)(zarr|recording)\.json"
    place.proxy.add(proxy.answered(403), "GET", above)
    eqx_ckpt.tree_serialise_leaves(f"{place.url}/a", TREE)
    assert_same(eqx_ckpt.tree_deserialise_leaves(f"{place.url}/a", TREE), TREE)
    before = keys(place)
    place.proxy.rules[:] = []
    place.proxy.add(proxy.answered(503), "GET", above)
    with pytest.raises(ConnectionError, match="too busy"):
        eqx_ckpt.tree_serialise_leaves(f"{place.url}/b", TREE)
    assert keys(place) == before


@pytest.mark.parametrize("text", [b'{"zarr_format": 3}', b"damaged", b""])
def test_a_manifest_that_is_none(place, text):
    kv = ts.KvStore.open(place.spec, context=kvstore.context()).result()
    kv.write("zarr.json", text).result()
    for overwrite in (False, True):
        with pytest.raises(eqx_ckpt.CheckpointError, match=place.url):
            eqx_ckpt.tree_serialise_leaves(place.url, TREE, overwrite=overwrite)
    for reader in readers(place.url)[1:]:
        with pytest.raises(eqx_ckpt.CheckpointError, match=place.url):
            reader()
    assert keys(place) == {"zarr.json"}
    assert kv.read("zarr.json").result().value == text


def test_keys_that_are_too_long(place):
    leaf: Any = np.ones(1)
    for i in range(5):
        leaf = {f"{i}" * 200: leaf}
    for deep in (leaf, {"x" * 100: leaf}):
        with pytest.raises(eqx_ckpt.LeafNameError, match="0{200}.*(?s:.)*ocdbt"):
            eqx_ckpt.tree_serialise_leaves(place.url, deep)
    assert keys(place) == set()
    eqx_ckpt.tree_serialise_leaves(place.url, leaf, layout="ocdbt")
    assert_same(eqx_ckpt.tree_deserialise_leaves(place.url, leaf), leaf)


def test_keys_that_are_just_short_enough(s3):
    """S3 takes a key or we say before that it does not."""
    outcomes = []
    for length in range(170, 200):
        deep: Any = {"y" * length: np.ones(1)}
        for _ in range(4):
            deep = {"x" * 195: deep}
        before = keys(s3)
        try:
            eqx_ckpt.tree_serialise_leaves(f"{s3.url}/{length}", deep)
            outcomes.append(True)
        except eqx_ckpt.LeafNameError:
            outcomes.append(False)
            assert keys(s3) == before
    assert outcomes == sorted(outcomes, reverse=True)
    assert len(set(outcomes)) == 2


@pytest.mark.parametrize("length", [950, 980, 1000, 1020])
def test_a_path_that_is_too_long(s3, length):
    url = s3.url + "/x" * (length // 2)
    for layout in ("zarr", "ocdbt"):
        with pytest.raises(eqx_ckpt.LeafNameError, match="1024"):
            eqx_ckpt.tree_serialise_leaves(url, TREE, layout=layout)
        with pytest.raises(eqx_ckpt.LeafNameError, match="1024"):
            eqx_ckpt.tree_serialise_leaves(url, {"n": 1}, layout=layout)
    assert keys(s3) == set()


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///x", "s3://b", "s3://bucket/a//b", "s3://bucket/../b",
        "s3://bucket/a\\b", "s3://bucket/a\nb", "gs://", "s4://bucket/x",
        "s3:/bucket/x", pathlib.Path("s3://bucket/x"), pathlib.Path("gs://bucket/x"),
        "s3:bucket/x", "gs:bucket/x", "S3:bucket/x", "S3://bucket/x", "s3-x://bucket/x",
        "file:///tmp/x", "file:/tmp/x", "file:x", "dbfs:/x", pathlib.Path("https://x/y"),
    ],
)  # fmt: skip
def test_urls_that_are_none(s3, url):
    for reader in readers(url):
        with pytest.raises(eqx_ckpt.CheckpointError, match=r"Pass|Choose") as caught:
            reader()
        assert type(caught.value) is eqx_ckpt.CheckpointError
    assert s3.proxy.requests == []


@pytest.mark.parametrize("url", ["bucket/x", "/tmp/x", "s3:/x", "http://x", ""])
def test_a_store_that_is_none(url):
    with pytest.raises(eqx_ckpt.CheckpointError, match="not a URL of an object store"):
        StorePath(url)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", 3), ("url", None), ("url", b"s3://bucket/x"),
        ("url", pathlib.Path("/x")), ("endpoint", 9000), ("endpoint", b"http://x"),
        ("region", 1), ("single_writer", "no"), ("single_writer", None),
        ("anonymous", 1),
    ],
)  # fmt: skip
def test_arguments_of_a_store(unchecked, name, value):
    """None is true, or part of a path, only because of its type."""
    with pytest.raises(TypeError, match=f"`{name}`"):
        unchecked.StorePath(**{"url": "s3://bucket/x", name: value})


def test_names_below_a_store(unchecked):
    store = unchecked.StorePath("s3://bucket/x/")
    for name in ("y", pathlib.Path("y")):
        assert store / name == unchecked.StorePath("s3://bucket/x/y")
    for name in (None, 3, b"y"):
        with pytest.raises(TypeError):
            _ = store / name
    for name in ("", "/"):
        with pytest.raises(unchecked.CheckpointError, match="is not a name. Pass"):
            _ = store / name


@pytest.mark.parametrize("endpoint", ["localhost:9000", "http://", "ftp://x", "http:x"])
def test_an_endpoint_that_is_none(s3, endpoint):
    for reader in readers(StorePath(s3.url, endpoint=endpoint)):
        with pytest.raises(
            eqx_ckpt.CheckpointError, match="is not a URL. Pass `https:"
        ):
            reader()


def test_google_has_no_endpoint(gcs):
    for store in (
        StorePath(gcs.url, endpoint=gcs.endpoint),
        StorePath(gcs.url, region="us-east-1"),
        StorePath(gcs.url, single_writer=True),
        StorePath(gcs.url, anonymous=True),
    ):
        for reader in readers(store):
            with pytest.raises(eqx_ckpt.CheckpointError, match="are for S3"):
                reader()


@pytest.mark.parametrize("name", ["gzip", "", 7])
def test_no_such_compression(place, name):
    with pytest.raises(eqx_ckpt.CheckpointError, match=r"(?s)compressed.*Pass"):
        eqx_ckpt.tree_serialise_leaves(place.url, TREE, compression=lambda *_: name)
    assert place.proxy.requests == []


def written(place: Place, key: str) -> int:
    """How often a key that has this in it was written."""
    methods = ("PUT", "POST")
    return sum(len(place.proxy.found(method, key)) for method in methods)


def test_a_save_that_was_suspended(place, monkeypatch):
    """Who comes back later than a manager waits has to begin again."""
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    late = [0.0]
    clock = heartbeat.clock
    monkeypatch.setattr(heartbeat, "clock", lambda: clock() + late[0])

    def suspended(phase, leaf, done, total):
        if phase == "write":
            late[0] = 400.0
            # It beats again before it commits, as if nothing had happened.
            before = written(place, "alive")
            until(lambda: written(place, "alive") >= before + 3)

    with pytest.raises(eqx_ckpt.CheckpointError, match="suspended"):
        eqx_ckpt.tree_serialise_leaves(place.url, {"w": np.ones(3)}, progress=suspended)
    assert keys(place) == set()


def test_signs_of_life_go_with_the_save(place, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)

    def wait(phase, leaf, done, total):
        until(lambda: phase != "write" or written(place, "alive") >= 2)

    eqx_ckpt.tree_serialise_leaves(place.url, {"w": np.ones(3)}, progress=wait)
    assert {ATTEMPT.sub("", key) for key in keys(place)} == {
        "zarr.json",
        "w/zarr.json",
        "w/c.0",
    }


def test_the_first_threads_get_one_context(monkeypatch):
    """Another one would not see what the first has saved to memory."""
    monkeypatch.setattr(kvstore, "_contexts", {})
    found, make = [], ts.Context
    other = threading.Thread(target=lambda: found.append(kvstore.context()))

    def slowly(*args: Any) -> ts.Context:
        if other.ident is None:
            other.start()
            other.join(0.1)  # It waits for this one, or has made one.
        return make(*args)

    monkeypatch.setattr(ts, "Context", slowly)
    found.append(kvstore.context())
    other.join()
    assert found[0] is found[1]
