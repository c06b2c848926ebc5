"""What the REPL and notebooks show."""

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import eqx_ckpt


class Document(html.parser.HTMLParser):
    """The tags and the text of some HTML; every tag that is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def manifest(tmp_path):
    tree = {"model": {"w": np.ones((300, 2)), "b": jnp.ones(3)}, "step": 5}
    metadata = {"note": "<script>alert(1)</script>"}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree, metadata=metadata)
    return eqx_ckpt.inspect.read_manifest(tmp_path / "c")


def test_a_manifest(manifest):
    text = repr(manifest)
    assert text.startswith("Manifest of 3 leaves, 4.7 KiB, saved by eqx_ckpt ")
    assert "\n  model/w: NumPy float64[300, 2]" in text


def test_a_manifest_of_many_leaves_fits_a_screen(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", [1.0] * 6000)
    manifest = eqx_ckpt.inspect.read_manifest(tmp_path / "c")
    lines = repr(manifest).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  ... and 5980 more"
    assert "... and 1000 more leaves" in Document(manifest._repr_html_()).text


def test_a_manifest_in_a_notebook(manifest):
    document = Document(manifest._repr_html_())
    assert document.tags.count("details") == 2
    assert document.tags.count("li") == 4
    assert "NumPy float64[300, 2]" in document.text
    assert "script" not in document.tags
    assert "<script>alert(1)</script>" in document.text


def test_a_record(manifest):
    assert repr(manifest.leaves["model/w"]) == "<LeafRecord: NumPy float64[300, 2]>"


def test_a_match(manifest, tmp_path):
    like = {"model": {"w": np.ones((300, 2)), "b": jnp.ones(4)}, "<b>": 1}
    match = eqx_ckpt.tree_match(tmp_path / "c", like)
    assert repr(match) == str(match)
    assert "'model/b': different shape" in repr(match)
    document = Document(match._repr_html_())
    assert document.tags.count("tr") == 4
    assert "b" not in document.tags
    same = eqx_ckpt.tree_match(tmp_path / "c", eqx_ckpt.tree_like(tmp_path / "c"))
    assert "table" not in Document(same._repr_html_()).tags


def test_a_record_in_a_notebook(tmp_path):
    mesh = jax.make_mesh((2,), ("<b>",))
    w = jax.device_put(jnp.zeros(4), NamedSharding(mesh, jax.P("<b>")))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": w, "n": 5})
    leaves = eqx_ckpt.inspect.read_manifest(tmp_path / "c").leaves
    document = Document(leaves["w"]._repr_html_())
    assert "float32[4] 16 B" in document.text
    assert "'axis_names': ['<b>']" in document.text
    assert "b" not in document.tags
    assert "Python int" in Document(leaves["n"]._repr_html_()).text


def test_a_manager(tmp_path):
    manager = eqx_ckpt.CheckpointManager(tmp_path / "a")
    assert Document(manager._repr_html_()).text == f"{manager!r}: 0 steps"
    for step in range(60):
        metadata = {"loss": step / 2, "note": "<script>alert(1)</script>"}
        manager.save(step, {"n": step}, metadata=metadata)
    manager.close()
    file = tmp_path / "a/000058/zarr.json"
    file.write_bytes(file.read_bytes()[:-9])
    document = Document(manager._repr_html_())
    assert "60 steps" in document.text
    assert "59loss=29.5, note='<script>" in document.text
    assert "is damaged" in document.text
    assert "... and 10 older ones" in document.text
    assert document.tags.count("tr") == 51
    assert "script" not in document.tags


def test_a_recording(tmp_path):
    like = {"<script>": jax.ShapeDtypeStruct((5,), jnp.float32)}
    with eqx_ckpt.recording.Recording(
        tmp_path / "r", like, chains=2, metadata="<b>"
    ) as recording:
        recording.extend({"<script>": np.zeros((2, 10, 5), np.float32)})
        recording.commit()
        texts = [recording._repr_html_()]
    texts.append(eqx_ckpt.recording.Samples(tmp_path / "r")._repr_html_())
    for document in map(Document, texts):
        assert "%3Cscript%3E float32[5] 400 B" in document.text
        assert "10, 10 draws" in document.text
        assert not {"script", "b"} & {*document.tags}
