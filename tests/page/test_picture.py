"""weft explain --svg, the pictures of the docs, and what a notebook shows."""

import json
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

import model

SOURCE = pathlib.Path(__file__).parents[2]
BOX = r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)"
SVG = "{http://www.w3.org/2000/svg}"


def picture(weft, *args):
    weft("explain", *args, "--svg", "picture.svg")
    return xml.parse(weft.folder / "picture.svg").getroot()


def cells(root):
    """{class: {(query, key)}} of a picture of 16 tokens and one panel: the middles of the drawn rectangles."""
    boxes = {path.get("class"): [[float(n) for n in box] for box in re.findall(BOX, path.get("d", ""))]
             for path in root.iter(f"{SVG}path")}
    [(x0, y0, size, _)] = boxes["empty"]
    found = {}
    for classes, drawn in boxes.items():
        if classes and classes.endswith(" cell"):
            found[classes.split()[0]] = {(int((y + high / 2 - y0) / size * 16), int((x + wide / 2 - x0) / size * 16))
                                         for x, y, wide, high in drawn}
    return found


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_cells_are_those_of_the_mask(weft, layout):
    s = model.stream([7, 3, 6])
    found, want = cells(picture(weft, "--docs", "7,3,6", "--mask", "causal", "--ranks", 4, "--layout", layout)), {}
    for q in range(16):
        for k in range(16):
            if model.visible(s, s, q, k, causal=True):
                rank, other = (model.owner(layout, s, 4, t) for t in (q, k))
                want.setdefault(f"{'r' if rank == other else 'p'}{rank}", set()).add((q, k))
    assert found == want


def test_cells_of_runs_in_any_order(weft):
    runs = '[[{"row":0,"token":8,"count":4},{"row":4,"token":0,"count":4}],[{"row":1,"token":12,"count":4},{"row":6,"token":4,"count":4}]]'
    slices = '[{"q":[0,16],"k":[2,7]},{"q":[3,13],"k":[9,16],"lo":-3,"hi":4}]'
    found = cells(picture(weft, "--docs", "16", "--slices", slices, "--layout", "explicit", "--runs", runs))
    want, owner = {}, lambda t: t // 4 % 2
    for q in range(16):
        for k in range(16):
            if 2 <= k < 7 or (3 <= q < 13 and k >= 9 and -3 <= k - q <= 4):
                name = f"{'r' if owner(q) == owner(k) else 'p'}{owner(q)}"
                want.setdefault(name, set()).add((q, k))
    assert found == want


def test_steps_in_colour(weft):
    s = model.stream([7, 3, 6])
    found = cells(picture(weft, "--docs", "7,3,6", "--mask", "causal", "--ranks", 4, "--schedule", "ring",
                          "--colour", "step"))
    for q in range(16):
        for k in range(16):
            distance = (model.owner("zigzag", s, 4, q) - model.owner("zigzag", s, 4, k)) % 4
            step = (distance + 1) // 2  # two ranks' keys a step
            assert ((q, k) in found.get(f"s{step}", set())) == model.visible(s, s, q, k, causal=True)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
def test_a_million_tokens_are_a_small_picture(weft, layout):
    root = picture(weft, "--docs", "lognormal:count=300,median=2400,sigma=1,min=16,max=65536", "--mask", "causal",
                   "--ranks", 8, "--layout", layout, "--schedule", "ring,exact")
    assert root.tag == f"{SVG}svg" and (weft.folder / "picture.svg").stat().st_size < 1_000_000


def test_a_browser_shows_it(weft, show):
    evil = "</title><script>window.taken=1</script>&\u2028"
    picture(weft, "--docs", "7,3,6", "--ranks", 4, "--title", evil)
    page = show.file(weft.folder / "picture.svg")
    assert page.evaluate("window.taken") is None
    assert page.evaluate("document.querySelector('title').textContent") == evil


PICTURES = {
    "sixteen": "--docs 9000,700,20000,300,40000 --mask causal --ranks 16 --schedule ring,exact",
    "many": "--docs lognormal:count=300,median=2400,max=65536 --ranks 100 --layout zigzag,balanced,striped",
    "few": "--docs 3 --docs-k 90 --ranks 1",
}


@pytest.mark.long
@pytest.mark.parametrize("name", [*(p.stem for p in sorted((SOURCE / "docs/pictures").glob("*.svg"))), *PICTURES])
def test_no_text_lies_over_another(weft, show, name):
    path = SOURCE / f"docs/pictures/{name}.svg"
    if name in PICTURES:
        path = weft.folder / "picture.svg"
        weft("explain", *PICTURES[name].split(), "--svg", path)
    page = show.file(path)
    boxes = page.evaluate("""() => [...document.querySelectorAll('text')].map((e) => {
      const b = e.getBoundingClientRect();
      return [b.left, b.top, b.right, b.bottom, e.textContent];
    })""")
    width, height = page.evaluate("['width', 'height'].map((side) => document.documentElement[side].baseVal.value)")
    assert len(boxes) > 20
    show.texts_are_apart(boxes, [0, 0, width, height])


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)]


def test_pictures_of_the_docs_are_up_to_date(weft):
    subprocess.run([SOURCE / "tools/pictures.sh", weft.command, weft.folder], check=True, timeout=120)
    made = {p.name: p.read_text() for p in weft.folder.glob("*.svg")}
    kept = {p.name: p.read_text() for p in (SOURCE / "docs/pictures").glob("*.svg")}
    assert made.keys() == kept.keys()
    for name, text in made.items():
        # Another processor may round the last digit another way.
        same = re.sub(r"-?\d+(?:\.\d+)?", "", text) == re.sub(r"-?\d+(?:\.\d+)?", "", kept[name])
        assert same and all(abs(a - b) < 0.15 for a, b in zip(numbers(text), numbers(kept[name]))), \
            f"docs/pictures/{name} is out of date; make pictures"


@pytest.mark.parametrize("path", sorted((SOURCE / "bench/results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path):
    found = json.loads(path.read_text())
    assert all(found[key] for key in ("machine", "command", "rows")) and re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])


def test_charts_change_with_their_results(tmp_path):
    """A chart drawn from other numbers is another chart, so the one of the docs can be out of date."""
    for name in ("bench/results", "tools", "docs/pictures"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tools/charts.py").write_text((SOURCE / "tools/charts.py").read_text())
    for path in (SOURCE / "bench/results").glob("*.json"):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            row.update({key: 1.1 * row[key] for key in ("tflops", "ratio", "seconds", "imbalance") if row.get(key)})
            if isinstance(row.get("ms"), dict):
                row["ms"] = {way: ms and ms * (1.3 if way.startswith("balanced") else 1) for way, ms in row["ms"].items()}
        (tmp_path / "bench/results" / path.name).write_text(json.dumps(found))
    subprocess.run([sys.executable, tmp_path / "tools/charts.py"], check=True, timeout=60)
    made = sorted((tmp_path / "docs/pictures").glob("*.svg"))
    assert len(made) == 5 and all(p.read_text() != (SOURCE / "docs/pictures" / p.name).read_text() for p in made)


@pytest.mark.long
def test_a_notebook_shows_the_page(weft, show):
    module = pytest.importorskip("weft")
    e = module.explain([0, 7, 10, 16], module.Mask(causal=True), ranks=4, schedule=["ring", "exact"],
                       layout=["zigzag", "striped"], title="a <b>title</b> & \"quotes\"")
    path = weft.folder / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>n</title><p>before</p>{e._repr_html_()}<p>after</p>")
    page = show.file(path)
    inner = page.frame_locator("iframe")
    assert inner.locator("h1").inner_text() == 'a <b>title</b> & "quotes"'
    assert inner.locator("canvas.matrix").count() == 4 and inner.locator("h2").first.inner_text() == "zigzag, ring"
    e.save(weft.folder / "saved.html")
    e.save(weft.folder / "saved.svg")
    e.save(weft.folder / "saved.txt")
    assert (weft.folder / "saved.txt").read_text() == f"{e}\n" and "55 visible pairs" in str(e)
    assert xml.parse(weft.folder / "saved.svg").getroot().tag == f"{SVG}svg"
    assert show.file(weft.folder / "saved.html").locator("canvas.matrix").count() == 4
    for wrong in (lambda: e.save("x.png"), lambda: module.explain([0, 4], schedule=[]),
                  lambda: module.explain([0, 4], schedule="rings").html(),
                  lambda: module.explain([0, 4], colour="red").svg()):
        with pytest.raises(module.Error):
            wrong()
