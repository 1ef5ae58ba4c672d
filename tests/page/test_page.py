"""weft explain --html in a browser: what it says of pairs, and whether mouse, touch and keys work."""

import io
import random
import re

import PIL.Image
import pytest

import model

MASKS = {
    "full": ("", {}),
    "causal": ("--mask causal", {"causal": True}),
    "window": ("--window 5,2", {"left": 5, "right": 2}),
    "chunked": ("--mask causal --chunk 4", {"causal": True, "chunk": 4}),
}
MILLION = "lognormal:count=300,median=2400,sigma=1,min=16,max=65536"


def describe(page, q, k, panel=0):
    return page.evaluate("([q, k, p]) => weft.page.panels[p].describe(q, k)", [q, k, panel])


def tip(page):
    """The lines of the tip, by name."""
    assert page.locator("#tip").is_visible()
    return dict(zip(page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts()))


def cell(page, q, k):
    """Where a pair is on the screen."""
    return page.evaluate("""([q, k]) => {
      const { matrix } = weft.page.panels[0], box = matrix.canvas.getBoundingClientRect(), [x, y] = matrix.point(q, k);
      return [box.left + x, box.top + y];
    }""", [q, k])


def pixel(page, q, k):
    """The colour that is seen of a cell, beside what is written in it."""
    page.wait_for_function("() => weft.state.sharp")
    x, y = cell(page, q, k)
    shot = page.screenshot(clip={"x": x - 8, "y": y - 8, "width": 2, "height": 2})
    return PIL.Image.open(io.BytesIO(shot)).convert("RGB").getpixel((0, 0))


def step(schedule, ranks, q, k):
    """In which step the rank of a query meets the keys of another, by the definition of each schedule."""
    distance = (q - k) % ranks
    if schedule == "ring":  # two distances a step
        return (distance + 1) // 2
    if schedule == "exact":  # four stages of nearly as many distances each
        stages = min(4, ranks - 1)
        return 0 if distance == 0 else 1 + next(s for s in range(stages) if distance <= (ranks - 1) * (s + 1) // stages)
    if schedule == "hybrid":  # 2 x ranks / 2
        return (q // 2 - k // 2) % (ranks // 2)
    if schedule == "mesh":  # 2 x 2: own queries and own keys, the other's and own keys, both with the keys that come
        foreign, far = (k - q) % 2, (q // 2 - k // 2) % 2
        return 3 - foreign if far else foreign
    return 0


@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout, multiple", [("zigzag", 1), ("contiguous", 3), ("striped", 1), ("dual_chunk", 8)])
def test_every_pair_is_as_the_plan_says(weft, show, mask, layout, multiple):
    flags, meaning = MASKS[mask]
    schedules = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]
    page = show("--docs", "17,1,0,30,9", "--padded-to", multiple, "--layout", layout, "--ranks", 4, *flags.split(),
                "--heads", "8:4", "--schedule", ",".join(schedules), context={"viewport": {"width": 480, "height": 400}})
    s = model.stream([17, 1, 0, 30, 9], multiple)
    pairs = [(q, k) for q in range(s.tokens) for k in range(s.tokens)]
    chosen = random.Random(0).sample(pairs, 250) + [(q, q) for q in range(s.tokens)]
    rows = {r: [t for t in range(s.tokens) if model.owner(layout, s, 4, t) == r] for r in range(4)}
    for panel, schedule in enumerate(schedules):
        found = page.evaluate("([pairs, p]) => pairs.map(([q, k]) => weft.page.panels[p].describe(q, k))",
                              [chosen, panel])
        for (q, k), said in zip(chosen, found):
            owners = [model.owner(layout, s, 4, t) for t in (q, k)]
            for token, rank, end in zip((q, k), owners, (said["query"], said["key"])):
                assert end["token"] == token and end["rank"] == rank
                assert end["row"] == rows[rank].index(token)
                place = s.place(token)
                assert end["padding"] == (place is None)
                if place:
                    assert (end["document"], end["position"]) == place
            see = model.visible(s, s, q, k, **meaning)
            assert said["visible"] == see
            if not see:
                assert said["slice"] is None
                continue
            assert said["step"] == step(schedule, 4, *owners), (schedule, q, k)
            slice = said["slice"]
            group = {"all_to_all": 4, "hybrid": 2}.get(schedule, 1)
            part = sum(owners) % 2 if schedule == "mesh" else owners[0] % group  # mesh: own queries, then the other's
            row = part * max(map(len, rows.values())) + said["query"]["row"]
            assert slice["q"][0] <= row < slice["q"][1]


def test_slices_are_those_of_the_text(weft, show):
    flags = ["--docs", "9,4,11", "--mask", "causal", "--ranks", 3, "--window", "6,0"]
    listed, rank = {}, None
    for line in weft("explain", *flags).split("Slices:")[1].splitlines():
        if match := re.match(r"\w rank (\d+)", line):
            rank = int(match[1])
        elif match := re.match(r" +q \[(\d+), (\d+)\) +k \[(\d+), (\d+)\)", line):
            listed.setdefault(rank, set()).add(tuple(map(int, match.groups())))
    page, seen = show(*flags), {}
    for q in range(24):
        for k in range(24):
            said = describe(page, q, k)
            if said["visible"]:
                seen.setdefault(said["query"]["rank"], set()).add((*said["slice"]["q"], *said["slice"]["k"]))
    assert seen == listed and len(seen) == 3


def test_slices_of_your_own(show):
    slices = '[{"q":[0,8],"k":[0,3]},{"q":[4,8],"k":[3,8],"lo":-2,"hi":1},{"q":[0,2],"k":[6,8]}]'
    page = show("--docs", "8", "--slices", slices, "--ranks", 2, "--schedule", "ring")
    for q in range(8):
        for k in range(8):
            see = k < 3 or (q >= 4 and k >= 3 and -2 <= k - q <= 1) or (q < 2 and k >= 6)
            assert describe(page, q, k)["visible"] == see, (q, k)


def test_cross_attention(show):
    page = show("--docs", "3,4", "--docs-k", "5,4", "--padded-to", 6, "--mask", "causal", "--align", "bottom_right",
                "--ranks", 2)
    q, k = model.stream([3, 4], 6), model.stream([5, 4], 6)
    for i in range(q.tokens):
        for j in range(k.tokens):
            assert describe(page, i, j)["visible"] == model.visible(q, k, i, j, causal=True, bottom_right=True), (i, j)


def test_hover_and_colours(show):
    page = show("--docs", "7,3,6", "--mask", "causal", "--ranks", 4, "--schedule", "ring")
    page.mouse.move(*cell(page, 6, 2))
    said = tip(page)
    assert said["Query"] == "token 6 · document 0, position 6 · rank 3, row 0"
    assert said["Key"] == "token 2 · document 0, position 2 · rank 1, row 0"
    assert said["Attended"] == "by rank 3 in step 1 of 3; the key comes from rank 1"
    assert said["Slice"].startswith("1 of 2: q [0, 1), k [4, 6)")  # after those of rank 2
    page.mouse.move(*cell(page, 2, 6))
    assert tip(page)["Visible"] == "no: outside the mask"
    page.mouse.move(*cell(page, 12, 2))
    assert tip(page)["Visible"] == "no: another document"
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()

    empty, own, other = pixel(page, 2, 6), pixel(page, 6, 6), pixel(page, 6, 2)
    assert own == (204, 121, 167) and len({empty, own, other}) == 3
    page.get_by_label("step", exact=True).check()
    assert pixel(page, 6, 6) == pixel(page, 0, 0) != pixel(page, 6, 2)  # both in step 0
    page.get_by_label("key's rank").check()
    assert pixel(page, 0, 0) == (0, 114, 178)
    page.get_by_role("button", name="Highlight rank 1").click()
    assert pixel(page, 0, 0) != (0, 114, 178) and pixel(page, 2, 2) == (230, 159, 0)


@pytest.fixture
def million(show, weft):
    """1,105,905 tokens in 300 documents, under every schedule."""
    page = show("--docs", MILLION, "--mask", "causal", "--ranks", 8, "--schedule", "all", "--heads", "32:8")
    return page, model.stream(model.lognormal(0, 300, 2400, 1, 16, 65536)), weft.folder / "page.html"


@pytest.mark.long
def test_a_million_tokens(million):
    page, s, path = million
    assert s.tokens > 1_000_000 and len(s.lengths) == 300
    assert path.stat().st_size < 5_000_000
    # From all of it down to single tokens, at a place inside a document.
    longest = s.lengths.index(max(s.lengths))
    q, k = s.offsets[longest] + 4000, s.offsets[longest] + 1234
    for _ in range(80):
        page.mouse.move(*cell(page, q, k))
        page.mouse.wheel(0, -240)
    page.wait_for_function("weft.view.size[0] < 8")
    page.wait_for_timeout(200)
    page.mouse.move(*cell(page, q, k))
    said = tip(page)
    owners = [model.owner("zigzag", s, 8, t) for t in (q, k)]
    assert said["Query"].startswith(f"token {q:,} · document {longest}, position 4,000 · rank {owners[0]}, row ")
    assert said["Key"].startswith(f"token {k:,} · document {longest}, position 1,234 · rank {owners[1]}, row ")
    assert "Attended" in said and "Slice" in said
    # Its neighbours in the document before are not seen.
    assert not describe(page, q, s.offsets[longest] - 1)["visible"] and describe(page, q, s.offsets[longest])["visible"]
    # Dragged by a cell.
    x, y = cell(page, q, k)
    before = page.evaluate("weft.view.begin[1]")
    page.mouse.down()
    page.mouse.move(x - 60, y, steps=4)
    page.mouse.up()
    assert page.evaluate("weft.view.begin[1]") > before
    page.get_by_role("button", name="Show all").click()
    assert page.evaluate("weft.view.size") == [s.tokens, s.tokens]


def test_a_frame_of_a_million_tokens_ends_soon(million):
    page, _, _ = million
    took = page.evaluate("""() => {
      const { page, state, view } = weft, matrix = page.panels[0].matrix, times = [];
      for (let i = 0; i < 9; ++i) {
        view.zoom(0.5, [0.4, 0.4]);
        const begin = performance.now();
        matrix.draw(state.theme, state.mode, -1, 1, true);
        times.push(performance.now() - begin);
      }
      return times.sort((a, b) => a - b)[4];
    }""")
    assert took < 5000, f"{took:.0f} ms a frame"  # some 15 on a free core; whatever the load, no loop over tokens


def test_every_layout_and_schedule_of_a_million_tokens_fits(weft):
    for layout in ("contiguous", "zigzag", "striped", "balanced", "dual_chunk"):
        weft("explain", "--docs", MILLION, "--padded-to", 16, "--mask", "causal", "--ranks", 8, "--schedule", "all",
             "--layout", layout, "--html", f"{layout}.html")
        assert (weft.folder / f"{layout}.html").stat().st_size < 5_000_000


@pytest.mark.long
def test_a_million_documents_are_drawn_in_bundles(weft, show):
    page = show("--docs", "lognormal:count=1000000,median=1,sigma=0.01,min=1,max=1", "--mask", "causal", "--ranks", 4)
    assert (weft.folder / "page.html").stat().st_size < 5_000_000
    assert "25 documents are drawn as one" in page.inner_text("#words")
    lines = page.evaluate("weft.pairLines(weft.page.panels[0], [60, 60])")
    said = dict(map(tuple, lines))
    assert said["Query"].startswith("token 60 · one of documents 50 to 74 · rank 0, row ")
    assert said["Visible"] == "not known: 25 slices are drawn as one"


@pytest.mark.long
def test_many_ranks(weft, show):
    page = show("--docs", "30000,10000,5000", "--mask", "causal", "--ranks", 256, "--schedule", "ring")
    s = model.stream([30000, 10000, 5000])
    owner = model.owner("zigzag", s, 256, 20000)
    assert describe(page, 20000, 17)["step"] == step("ring", 256, owner, 0)  # the key is on rank 0
    page.get_by_label("Highlight one rank").fill("7")
    page.keyboard.press("Enter")
    assert page.evaluate("weft.state.chosen") == 7


def test_chosen_ones_say_why(show):
    page = show("--docs", "3000,500,700", "--mask", "causal", "--ranks", 4, "--layout", "auto,contiguous",
                "--schedule", "ring,auto")
    names = page.locator("h2").all_inner_texts()
    assert len(names) == 4 and names[2] == "contiguous, ring"
    notes = page.locator(".note").all_inner_texts()
    assert len(notes) == 2 and all(re.match(r"chosen: \w+.*: .* ms", note) for note in notes), notes


def test_keyboard(show):
    page = show("--docs", "7,3,6", "--mask", "causal", "--ranks", 4, "--schedule", "ring")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('matrix')"):
            break
    matrix = page.locator("canvas.matrix")
    assert page.evaluate("document.activeElement.classList.contains('matrix')")
    assert matrix.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")  # the cross appears in the middle
    assert page.evaluate("weft.view.cross") == [8, 8]
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("weft.view.cross") == [8, 7]
    assert "token 8 · document 1, position 1" in page.locator("#said").inner_text()
    assert tip(page)["Attended"] == "by rank 3 in step 0 of 3; the key is its own"
    page.keyboard.press("Control+ArrowRight")
    assert page.evaluate("weft.view.cross") == [8, 10]
    for _ in range(6):
        page.keyboard.press("+")
    assert page.evaluate("weft.view.size") == [4, 4]
    for _ in range(12):
        page.keyboard.press("ArrowUp")  # the picture follows
    begin, size = page.evaluate("[weft.view.begin, weft.view.size]")
    assert page.evaluate("weft.view.cross") == [0, 10] and begin[0] <= 0 < begin[0] + size[0]
    page.keyboard.press("Shift+ArrowDown")
    assert page.evaluate("weft.view.begin[0]") > begin[0]
    page.keyboard.press("0")
    assert page.evaluate("weft.view.size") == [16, 16]
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("3")
    assert page.evaluate("weft.state.mode") == "step"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "timeline"
    page.keyboard.press("ArrowRight")
    assert tip(page)["Rank"] == "0" and "Rank: 0" in page.locator("#said").inner_text()


def test_everything_that_takes_focus_has_a_name(show):
    show.everything_has_a_name(show("--docs", "7,3,6", "--mask", "causal", "--ranks", 4, "--schedule", "ring,exact"))


def test_touch(show):
    page = show("--docs", "400,300", "--mask", "causal", "--ranks", 4, context={"has_touch": True})
    session = page.context.new_cdp_session(page)

    def touch(kind, *points):
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [
            {"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]})

    x, y = cell(page, 350, 350)
    touch("touchStart", (x - 30, y), (x + 30, y))
    for spread in (50, 80, 120):
        touch("touchMove", (x - spread, y), (x + spread, y))
    touch("touchEnd")
    size = page.evaluate("weft.view.size[0]")
    assert size < 300
    begin = page.evaluate("weft.view.begin[0]")
    touch("touchStart", (x, y))
    touch("touchMove", (x, y - 40))
    touch("touchMove", (x, y - 90))
    touch("touchEnd")
    assert page.evaluate("weft.view.begin[0]") > begin and page.evaluate("weft.view.size[0]") == size
    touch("touchStart", (x, y))
    touch("touchEnd")
    assert "document" in tip(page)["Query"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(show, scheme):
    page = show("--docs", "7,3,6", "--ranks", 2, context={"color_scheme": scheme})

    def lightness():
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red), pixel(page, 2, 9)[0]  # the page, and an empty cell

    first = lightness()
    page.get_by_role("button", name="Light" if scheme == "dark" else "Dark", exact=True).click()
    second = lightness()
    dark, light = (first, second) if scheme == "dark" else (second, first)
    assert max(dark) < 60 and min(light) > 200


@pytest.mark.long
def test_print_is_light(show):
    page = show("--docs", "7,3,6", "--ranks", 2, context={"color_scheme": "dark"})
    seen = page.evaluate("""() => {
      dispatchEvent(new Event('beforeprint'));
      const { matrix } = weft.page.panels[0], { canvas } = matrix, [x, y] = matrix.point(2, 9);
      const ratio = canvas.width / canvas.clientWidth;
      const red = canvas.getContext('2d').getImageData((x - 7) * ratio, (y - 7) * ratio, 1, 1).data[0];
      dispatchEvent(new Event('afterprint'));
      return [red, weft.state.theme.dark];
    }""")
    assert seen[0] > 200 and seen[1]
    assert page.pdf().startswith(b"%PDF")


def test_nothing_from_outside_becomes_html(weft, show):
    evil = "</script><script>window.taken=1</script><img src=x onerror=window.taken=2>\u2028'\"&{{data}}"
    name = weft.folder / "a<b onclick='x'>\"&\u2028{{script}}.json"
    name.write_text('[{"q":[0,4],"k":[0,4],"hi":0}]')
    page = show("--docs", "4", "--slices", name.name, "--ranks", 2, "--title", evil)
    assert page.evaluate("window.taken") is None
    assert page.locator("h1").evaluate("e => e.textContent") == evil
    assert page.evaluate("document.querySelector('title').textContent") == evil
    assert page.locator("h1").evaluate("e => e.children.length") == 0
    assert name.name.split("'")[0] in page.locator("#command").evaluate("e => e.textContent")
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    text = (weft.folder / "page.html").read_text()
    assert "\u2028" not in text.split('id="data">')[1] and text.count("</script>") == 2


def test_titles_that_are_no_text(weft, show):
    page = show("--docs", "4", "--title", b"a\xff\xc3(\x01b")
    assert page.locator("h1").evaluate("e => e.textContent") == "a\ufffd\ufffd(\x01b"
    assert page.title() == "a\ufffd\ufffd(\ufffdb"


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--docs 0", "--docs 0,0,5 --ranks 7", "--docs 1", "--docs 5 --tokens 40",
                                   "--docs 8 --slices []", "--docs 3,4 --docs-k 50,0 --ranks 3 --schedule all_gather"])
def test_small_and_empty_problems(show, flags):
    page = show(*flags.split())
    page.mouse.wheel(0, -500)
    assert page.locator("canvas.matrix").count() == 1
