"""Text that is made to do harm, in each field of each format, as it is shown.

It may not move the cursor of a terminal, turn text around, begin a line of its own, or
become HTML.
"""

import io
import json
import struct
import zipfile

import jax
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main
from faults.manifests import rewritten

from .everything import make


pytestmark = pytest.mark.once


pytest.importorskip("typer")
EVIL = (
    "x\x1b[35m\x07\r\nFORGED\x0b\x85\u2028FORGED \x9b35m\x7f\u202e\u2066\ud800\x00"
    "<script>alert(1)</script>{{facts}}&[bold]`%1B"
)
# A text, and of how many fields the next one is tried.
TEXTS = {"evil": (EVIL, 1), "long": (EVIL * 200, 9)}
LOOKS = ("tree X", "show X w[0]", "verify X --json", "copy X copied --overwrite")


def with_text(value, text):
    """Each version of JSON in which one of its texts, or of its keys, is another."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, list):
        for i, item in enumerate(value):
            for other in with_text(item, text):
                yield [*value[:i], other, *value[i + 1 :]]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {text if k == key else k: v for k, v in value.items()}
            for other in with_text(item, text):
                yield value | {key: other}


def is_harmless(out):
    """Whether a terminal shows this as it is, and no line begins with what was told."""
    lines = out.split("\n")
    return all(line.isprintable() and not line.startswith("FORGED") for line in lines)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    make(root)
    mesh = jax.make_mesh((2,), ("axis",))
    sharding = jax.NamedSharding(mesh, jax.P("axis"))
    tree = {"w": jax.device_put(np.arange(6.0, dtype=np.float32), sharding)}
    tree |= {"text": "left out", "n": 3, "key": jax.random.key(0)}
    eqx_ckpt.tree_serialise_leaves(root / "ours", tree, metadata={"note": "said"})
    return root


@pytest.fixture
def look(places, monkeypatch, capsys):
    """Runs all commands that look at a path; what they print is harmless."""
    monkeypatch.chdir(places)

    def look(path, commands=LOOKS):
        for line in commands:
            status = main([str(path) if word == "X" else word for word in line.split()])
            out, err = capsys.readouterr()
            assert status in (0, 1, 2)
            for text in (out, err):
                assert is_harmless(text), (line, text[:3000])
                text.encode()
            assert "Traceback" not in err

    return look


def manifest_of(data, text):
    content = json.loads(data)["attributes"]["eqx_ckpt"]
    for other in with_text(content, text):
        if other.keys() == content.keys():
            yield rewritten(data, lambda found, other=other: found.update(other))


def json_of(data, text):
    for other in with_text(json.loads(data), text):
        yield json.dumps(other).encode()


def safetensors_of(data, text):
    (length,) = struct.unpack("<Q", data[:8])
    for header in json_of(data[8 : 8 + length], text):
        yield struct.pack("<Q", len(header)) + header + data[8 + length :]


def npz_of(data, text):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text = text.replace("\ud800", "").replace("\x00", "")
    for name in members:
        yield _zipped(
            {(text + ".npy" if n == name else n): m for n, m in members.items()}
        )
    descr = members["w.npy"].replace(b"'<f4'", repr(text).encode()[:300])
    yield _zipped(members | {"w.npy": descr})


def _zipped(members):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return target.getvalue()


def msgpack_of(data, text):
    """Names of one to 31 bytes have a byte with their length before them."""
    for name in (b"w", b"b"):
        evil = text.encode("utf-8", "surrogatepass")[:60000]
        long = b"\xda" + struct.pack(">H", len(evil)) + evil
        yield data.replace(bytes([0xA0 + len(name)]) + name, long, 1)


FILES = {
    "ours/zarr.json": manifest_of,
    "ours/w/zarr.json": json_of,
    "safetensors": safetensors_of,
    "npz": npz_of,
    "flax.msgpack": msgpack_of,
    "orbax/_METADATA": json_of,
    "orbax/_CHECKPOINT_METADATA": json_of,
    "orbax/array_metadatas/process_0": json_of,
    "levanter/metadata.json": json_of,
    "levanter/w/zarr.json": json_of,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", TEXTS)
@pytest.mark.parametrize("name", FILES)
def test_each_field_of_each_format(places, look, name, size):
    file = places / name
    if not file.exists():
        pytest.skip(f"there is no {name}")
    data = file.read_bytes()
    count = 0
    try:
        text, every = TEXTS[size]
        for count, changed in enumerate(FILES[name](data, text), 1):
            if count % every == 0 or count == 1:
                file.write_bytes(changed)
                look(name.split("/")[0])
    finally:
        file.write_bytes(data)
    assert count >= 2


@pytest.mark.filterwarnings("ignore")
def test_all_fields_at_once(places, look, tmp_path):
    """In lists, comparisons and pages, and in notebooks."""
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            tree = {EVIL: np.full(2, step), "inside": {EVIL: EVIL}, "w": np.ones(2)}
            manager.save(step, tree, metadata={EVIL: float(step), "note": [EVIL]})
        text = manager._repr_html_()
    first, second = sorted((tmp_path / "run").glob("0*"))
    unsaved = {"name": EVIL}
    for step in (first, second):
        manifest = (step / "zarr.json").read_bytes()
        changed = rewritten(manifest, lambda found: found.update(unsaved=unsaved))
        (step / "zarr.json").write_bytes(changed)
    look(tmp_path / "run", ("ls X", "ls X --best nothing", "ls X --json", "verify X"))
    look(first, ("tree X", "stats X", f"diff X {second} --values", "show X w"))
    manifest = eqx_ckpt.inspect.read_manifest(first)
    match = eqx_ckpt.tree_match(first, {EVIL: np.zeros(2), "name": print})
    records = manifest.leaves.values()
    for shown in (text, *(x._repr_html_() for x in (manifest, match, *records))):
        assert is_harmless(shown)
        assert "<script" not in shown
    for shown in (repr(manifest), str(match)):
        assert is_harmless(shown)


@pytest.mark.filterwarnings("ignore")
def test_the_page(places, tmp_path):
    """All of it is JSON that a script cannot leave."""
    pytest.importorskip("plotly")
    tree = {EVIL: np.ones(2), "w": np.ones(2)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree, metadata={EVIL: [EVIL, 1.0]})
    pages: list[str] = []
    for source in (tmp_path / "c", places / "checkpoint"):
        eqx_ckpt.inspect.write_report(source, tmp_path / "page.html")
        pages.append((tmp_path / "page.html").read_text())
        (tmp_path / "page.html").unlink()
    evil, plain = pages
    for tag in ("<script", "</script", "<!--"):
        assert evil.count(tag) == plain.count(tag)
    body = evil[evil.index('id="facts"') : evil.index("showTexts()")]
    assert body.split("</script>")[0].isprintable()
