"""The page in a real browser: it draws, sorts, searches, descends, and asks nobody."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt

from .test_report import InMemory


pytest.importorskip("plotly")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="Install it: pip install playwright"
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Install a browser: apt-get install chromium"
)
EVIL = "<script>window.hacked=1<\u202e"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page about something; it may not complain, nor ask for anything."""
    noise = []

    def opened(*sources, **options):
        eqx_ckpt.inspect.write_report(
            sources[0], tmp_path / "page.html", *sources[1:], overwrite=True
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1200}, **options)
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        url = (tmp_path / "page.html").as_uri()
        page.on("request", lambda r: r.url == url or noise.append(r.url))
        page.goto(url)
        page.wait_for_selector("html[data-drawn]")
        return page

    yield opened
    assert noise == []
    for context in browser.contexts:
        context.close()


@pytest.fixture
def run(tmp_path):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("y", "x"))
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            w = jax.device_put(jnp.arange(64.0).reshape(8, 8) + step, sharding)
            b = jnp.array([1.0, jnp.nan]) if step == 3 else jnp.ones(2)
            tree = {"model": {"w": w, "b": b}, EVIL: jnp.ones(3), "step": step}
            manager.save(step, tree, metadata={"loss": 1 / step, EVIL: step})
    return tmp_path / "run"


def names(page):
    return page.locator("#rows tr.leaf td:first-child").all_inner_texts()


def sort_by(page, title):
    page.locator("#rows th button", has_text=title).first.click()


def test_a_run(run, opened):
    page = opened(run)
    alert = page.locator(".alert")
    assert "1 leaf has NaNs or infinities, in 3" in alert.inner_text()
    alert.locator("button").click()
    assert page.inner_text("#leaf h2") == "model/b"
    assert page.locator("#metrics .scatterlayer .trace").count() == 2
    for place in ("#chosen-metrics", "#metrics", "#about"):
        text = page.locator(place).text_content()
        assert r"hacked=1<\u202e" in text
        assert "\u202e" not in text
    assert page.locator("#parts .scatterlayer .trace").count() == 1
    page.locator("#rows tr.leaf", has_text="model/w").click()
    assert page.inner_text("#leaf h2") == "model/w"
    assert page.locator("#histogram .bars path").count() > 10
    assert page.locator("#way .scatterlayer .trace").count() == 2
    # The array in four times two blocks, then the mesh of two times four devices.
    array, mesh = page.locator("#leaf svg.mesh").all()
    assert array.locator("rect").count() == mesh.locator("rect").count() == 8
    assert mesh.locator("title").nth(1).text_content() == "x=0, y=1: block 2"
    numbers = mesh.locator("text[text-anchor]").all_text_contents()
    assert numbers == ["0", "2", "4", "6", "1", "3", "5", "7"]
    assert page.evaluate("window.hacked") is None
    assert any("script" in name for name in names(page))


def test_a_run_with_a_fork(run, opened):
    like = {"step": 0}
    with eqx_ckpt.CheckpointManager(run) as manager:
        like = manager.restore(like, 1, unexpected="ignore")
        manager.save(4, like)
    said = opened(run).inner_text("#histories").splitlines()
    assert said == ["Step 2: fork of step 1", "Step 3: fork of step 1"]


def test_the_table(opened):
    arrays = {
        f"part{i % 3}/layer{i}": np.full(i + 1, i, np.int8 if i % 2 else np.float32)
        for i in range(12)
    }
    page = opened(InMemory(arrays))
    assert page.locator(".alert").count() == 0
    assert len(names(page)) == 12
    sort_by(page, "bytes")
    assert names(page)[0] == "part1/layer10"
    sort_by(page, "bytes")
    assert names(page)[0] == "part1/layer1" or names(page)[0] == "part0/layer0"
    sort_by(page, "name")
    assert names(page)[:2] == ["part0/layer0", "part0/layer3"]
    assert names(page)[3] == "part0/layer9"
    page.fill("#search", "PART1 float32")
    assert names(page) == ["part1/layer4", "part1/layer10"]
    assert page.inner_text("#count") == "2 of 12 leaves"
    page.focus("#rows")
    page.locator("#rows tr.leaf").first.click()
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#leaf h2") == "part1/layer10"
    page.fill("#search", "")
    page.select_option("#dtype", "int8")
    assert len(names(page)) == 6
    page.select_option("#only", "only damaged or not finite")
    assert names(page) == []


def test_a_leaf_of_one_value(opened):
    """Its bar is seen, and so is what it was before, whatever the value."""
    values = {"zero": 0.0, "one": 1, "tiny": 1e-12, "huge": -1e300}
    arrays = {name: np.full(8, value) for name, value in values.items()}
    before = {name: np.linspace(-1e-3, 1e-3, 8) for name in arrays}
    alone, beside = [InMemory(arrays)], [InMemory(before), InMemory(arrays)]
    for sources, most in ((alone, 200), (beside, 20)):
        page = opened(*sources)
        for name in names(page):
            page.locator("#rows tr.leaf", has_text=name).first.click()
            box = page.locator("#histogram .bars path").last.bounding_box()
            assert 3 < box["width"] < most, name
    page = opened(InMemory({"all": np.zeros(8)}))
    assert "64 B (100 %)" in page.inner_text("#leaf")


def test_the_map_descends_and_comes_back(run, opened):
    page = opened(run / "000001")
    page.click("#map g.slice:has-text('model')", position={"x": 20, "y": 8})
    assert page.inner_text("#crumbs") == "all leaves / model"
    assert names(page) == ["model/b", "model/w"]
    page.click("#map g.slice:has-text('w')", position={"x": 40, "y": 60})
    page.select_option("#colour", "sharding")
    assert "mesh (x=2, y=4)" in page.inner_text("#legend")
    page.locator("#crumbs button").first.click()
    assert len(names(page)) == 4
    assert page.locator("#map g.slice").count() == 5


def test_two_checkpoints_in_the_dark(run, opened):
    page = opened(run / "000001", run / "000002", color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert set(names(page)) == {"model/w", "step"}
    page.select_option("#only", "all leaves")
    assert "equal" in page.inner_text("#rows")
    page.select_option("#colour", "change")
    assert "of the norm" in page.inner_text("#legend")


def test_thousands_of_leaves_are_drawn_in_parts(opened):
    arrays = {f"layers/{i}/w": np.ones(2, np.float32) * i for i in range(5000)}
    page = opened(InMemory(arrays))
    assert page.inner_text("#count") == "5,000 leaves"
    assert len(names(page)) < 60
    assert page.locator("#map g.slice").count() < 200
    page.evaluate("document.getElementById('rows').scrollTop = 60000")
    page.get_by_text("layers/2000/w", exact=True).wait_for()
    assert page.evaluate("document.querySelector('#rows td').offsetHeight") > 50000
    page.click("#map g.slice:has-text('layers')", position={"x": 20, "y": 8})
    page.click("#map g.slice:has-text('0 …')", position={"x": 20, "y": 8})
    assert " … " in page.inner_text("#crumbs")
    assert 0 < len(names(page)) < 5000


EXTREMES = {
    "equal": [1e-320] * 3,
    "subnormal": [0.0, 1e-320, 2e-320],
    "both signs": [5e-324, 0.0, -5e-324],
    "small": [1e-307, 2e-307, 3e-307],
    "large": [1.7e308, -1.7e308, 0.0],
    "all": [1e-320, 1.0, 1.7e308],
    "close": [1.0, 1.0 + 2**-52, 1.0],
    "no float": [10**400, 1, 2],
}


def test_curves_of_extremes(tmp_path, opened):
    """All are drawn, metrics and leaves; a title names the unit of an axis."""
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            now = {name: values[step] for name, values in EXTREMES.items()}
            tree = {n: np.array([v, 0.0]) for n, v in now.items() if n != "no float"}
            manager.save(step, tree | {"w": jnp.full(3, step)}, metadata=now)
    page = opened(tmp_path / "run")
    hidden = page.locator("#chosen-metrics button[aria-pressed=false]")
    while hidden.count():
        hidden.first.click()
    traces = page.locator("#metrics .scatterlayer .trace")
    assert traces.count() == len(EXTREMES)
    assert page.locator("#metrics").text_content().count("× 1e-300") == 4
    assert page.locator("#parts .scatterlayer").count() == 1
    for name in names(page):
        page.locator("#rows tr.leaf", has_text=name).first.click()
        assert page.locator("#way .scatterlayer .trace").count() == 2
        assert page.locator("#histogram .bars path").count() > 0


def test_what_has_changed(tmp_path, opened):
    """A leaf that is not finite any more, or was not, is infinitely far away; and a
    key, which has no distance, is among those that have changed."""
    ones, nans = np.ones(3), np.array([1.0, np.nan, 1.0])
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in range(2):
            tree = {
                "to nan": nans if step else ones,
                "from nan": ones if step else nans,
                "nan": nans,
                "key": jax.random.key(step),
                "same key": jax.random.key(0),
                "same": ones,
                "moved": ones * (step + 1),
                "scalar": np.nan if step else 1.0,
            }
            manager.save(step, tree)
    page = opened(tmp_path / "run")
    page.select_option("#only", "only changed")
    changed = {"to%20nan", "from%20nan", "key", "moved", "scalar"}
    assert set(names(page)) == changed | {"nan"}  # Not finite: that is its status.
    page.select_option("#only", "all leaves")
    cells = page.locator("#rows tr.leaf").all()
    found = {(row := cell.inner_text().split("\t"))[0]: row[4:6] for cell in cells}
    assert found["to%20nan"] == found["from%20nan"] == ["∞", "∞"]
    assert found["scalar"][0] == "∞"
    assert found["key"] == ["–", "–"]
    assert found["same"] == found["nan"] == ["0", "0"]
    sort_by(page, "change")
    assert names(page)[3] == "moved"
    page.select_option("#colour", "change")
    page = opened(tmp_path / "run/000000", tmp_path / "run/000001")
    assert set(names(page)) == changed | {"nan"}


def test_what_has_no_checksums_is_not_called_whole(tmp_path, opened):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": jnp.ones(3)})
    eqx_ckpt.interop.to_safetensors(tmp_path / "c", tmp_path / "w.safetensors")
    ours, file = tmp_path / "c", tmp_path / "w.safetensors"
    file = eqx_ckpt.interop.open_safetensors(file)
    well = opened(ours, file).inner_text(".well")
    assert well.endswith("could be read. There are no checksums to compare with in B.")
    assert opened(ours).inner_text(".well").endswith("byte agrees with its checksum.")
