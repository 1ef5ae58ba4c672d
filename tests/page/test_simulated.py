"""weft simulate --html in a browser: the page has the numbers of the table and of the JSON file."""

import json
import re

import pytest

SMALL = {"--docs": "3000,500,4692", "--heads": "8:2", "--ranks": "4"}


@pytest.fixture
def simulate(weft, show):
    """A small problem, with other flags where given: (lines of the JSON file, text, page)."""

    def run(*flags, **context):
        said = {**SMALL, **dict(zip(flags[::2], flags[1::2]))}
        text = weft("simulate", *(x for pair in said.items() for x in pair), "--json", "out.json", "--html", "page.html")
        return json.loads((weft.folder / "out.json").read_text())["lines"], text, show.file(weft.folder / "page.html", **context)

    return run


def rows(page):
    return [row.locator("th, td").all_inner_texts() for row in page.locator("table:not(.heat) tbody tr").all()]


@pytest.mark.long
def test_no_text_is_cut_or_lies_over_another(show, simulate):
    for flags in (["--ranks", "2,4,8", "--schedule", "all,auto", "--layout", "contiguous,zigzag,striped,balanced,auto"],
                  ["--ranks", "512,1024", "--docs", "65536", "--schedule", "ring", "--layout", "zigzag"]):
        _, _, page = simulate(*flags)
        pictures = page.evaluate("""() => [...document.querySelectorAll('svg:has(text)')].map((svg) => {
          const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom, e.textContent]; };
          return [box(svg), [...svg.querySelectorAll('text')].map(box)];
        })""")
        assert pictures
        for frame, texts in pictures:
            show.texts_are_apart(texts, frame, slack=1)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_page_table_and_json_agree(simulate):
    """The same columns in page and table; bytes of the rank that receives most in forward and backward together."""
    found, text, page = simulate("--schedule", "all", "--layout", "zigzag")
    table = [x.split() for x in text.splitlines() if " zigzag " in x]
    cells = rows(page)
    assert len(cells) == len(table) == len(found) > 5  # the five, and options that auto would weigh
    bars = page.locator(".loads .value").all_inner_texts()
    for x, row, columns, bar in zip(found, cells, table, bars):
        name, forward, backward, efficiency, overlapped, imbalance, received, memory, tokens = row
        assert name == f"{x['schedule']}, zigzag"
        assert [forward, backward] == [f"{1e3 * x[p]['seconds']:.3f}" for p in ("forward", "backward")] == columns[-9:-7]
        ideal, seconds = (sum(x[p][key] for p in ("forward", "backward")) for key in ("ideal", "seconds"))
        assert efficiency == columns[-6].replace("%", " %") and abs(float(efficiency[:-2]) - 100 * ideal / seconds) <= 0.51
        assert overlapped == columns[-5].replace("%", " %") and imbalance == columns[-4]
        assert float(imbalance) == pytest.approx(max(x[p]["imbalance"] for p in ("forward", "backward")), abs=0.006)
        assert received == columns[-3]
        needed = max(x[p]["memory_bytes"] for p in ("forward", "backward"))
        assert memory.startswith(" ".join(columns[-2:])) and memory.endswith(f"({100 * needed / 80e9:.0f} %)")
        assert float(tokens.replace(",", "")) == pytest.approx(x["tokens_per_second_per_rank"], abs=0.5)
        assert bar.endswith(f" ms, {efficiency} efficiency") and abs(float(bar.split()[0]) - 1e3 * seconds) < 0.01
        least, most = (f(x["forward"]["bytes_in"], x["backward"]["bytes_in"]) for f in (max, lambda a, b: a + b))
        assert least < float(received) * 2**20 + 2**17 and float(received) * 2**20 <= most + 2**17
    even = next(i for i, x in enumerate(found) if x["schedule"] == "all_gather")
    want = (found[even]["forward"]["bytes_in"] + found[even]["backward"]["bytes_in"]) / 2**20
    assert abs(float(cells[even][6]) - want) < 0.1


def test_timelines_are_those_of_the_json(simulate):
    found, _, page = simulate("--schedule", "ring,exact", "--layout", "zigzag")
    charts = page.evaluate("weft.charts.map(({ times }) => times)")
    assert page.locator("canvas.timeline").count() == len(charts) == 2
    for x, times in zip(found, charts):
        for pass_ in ("forward", "backward"):
            assert times[pass_]["end"] == pytest.approx(x[pass_]["seconds"], rel=1e-5)
            for want, got in zip(x[pass_]["timelines"], times[pass_]["ranks"], strict=True):
                assert want["rank"] == got["rank"] and want["events_total"] == got["total"]
                for a, (kind, name, step, begin, end, amount) in zip(want["events"], got["events"], strict=True):
                    assert ["compute", "exchange", "rows", "wait"][kind] == a["kind"]
                    assert (name, step) == (a["name"], a["step"])
                    assert [begin, end] == pytest.approx([a["begin"], a["end"]], abs=2e-9)
                    assert amount == (a["pairs"] if a["kind"] == "compute" else a["bytes_in"])
    page.locator("canvas.timeline").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip dd").first.inner_text() == "0"
    page.get_by_label("backward", exact=True).check()
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_page_is_one_file_and_escapes(weft, simulate):
    name = "<script>window.taken=1</script>\u2028{{script}}"
    machine = {"name": name, "about": "\"quoted\" & 'so'", "levels": [{"name": "all"}],
               "kernels": [{"pass": p, "dtype": "bf16", "flops": 1e12} for p in ("forward", "backward")]}
    (weft.folder / "m<b>&.json").write_text(json.dumps(machine))
    _, _, page = simulate("--machine", "./m<b>&.json", "--ranks", "2,4", "--schedule", "auto,ring")
    assert page.evaluate("window.taken") is None and page.locator("script").count() == 2
    assert page.locator("h1").evaluate("e => e.textContent") == name
    assert machine["about"] in page.locator("#words").inner_text() and "m<b>&.json" in page.locator("#command").inner_text()
    text = (weft.folder / "page.html").read_text()
    assert "http-equiv" in text and text.count("</script>") == 2 and len(text) < 1_000_000
    assert not re.search(r"(src|href)=", text)


@pytest.mark.parametrize("flags", [["--ranks", "2,4,8"], ["--ranks", "4,16,64", "--docs", "262144"],
                                   ["--ranks", "8,64", "--schedule", "exact", "--window", "64,0"]])
def test_page_has_round_ticks(simulate, flags):
    _, _, page = simulate(*flags)
    ticks = [int(t.removesuffix(" %")) for t in page.get_by_label("Efficiency over ranks").locator(".tick").all_text_contents()]
    step = ticks[1]
    assert ticks == [n * step for n in range(len(ticks))] and ticks[-1] <= 100
    assert step in (1, 2, 5, 10, 20, 50), ticks


@pytest.mark.long
def test_page_says_what_it_leaves_out(simulate):
    timelines = "weft.charts.flatMap(({ times }) => [times.forward, times.backward]).filter((t) => t.end > 0).length"
    lines, _, page = simulate("--ranks", "2,4,8", "--schedule", "all,auto", "--layout", "zigzag,balanced")
    assert page.evaluate(timelines) == 24
    assert f"The page has the first 24 of {2 * len(lines)} timelines." in page.locator("#words").inner_text()
    _, _, page = simulate("--ranks", "2", "--schedule", "all_gather,ring,all_to_all,hybrid,exact")
    assert "The page has the first" not in page.locator("#words").inner_text() and page.evaluate(timelines) == 10
    found, _, page = simulate("--ranks", "512", "--schedule", "ring", "--docs", "65536", "--pass", "backward")
    (timeline, *_) = found[0]["backward"]["timelines"]
    assert timeline["events_total"] > len(timeline["events"]) == 1000
    assert f"the first 400 of {timeline['events_total']} events" in page.locator(".cut").inner_text()


def test_page_names_windows_and_what_lines_share(simulate):
    plots = "section:has(svg) > p"
    _, _, page = simulate("--ranks", "2,4", "--schedule", "ring")
    assert page.locator(plots).all_inner_texts() == ["documents 3000,500,4692, heads 8:2"]
    _, _, page = simulate("--ranks", "2,4", "--schedule", "ring", "--window", "64,0/-1,-1", "--heads", "8:2,4:4")
    words = page.locator("#words").inner_text()
    assert any(p.endswith(", heads 4:4, window 64,0") for p in page.locator(plots).all_inner_texts())
    assert "window (64" not in words and "heads 8:2, dim" not in words


def test_page_has_a_curve_for_each_question(simulate):
    """A layout chosen for each of two schedules: two curves, not one through both."""
    found, _, page = simulate("--ranks", "2,4", "--schedule", "ring,exact,auto", "--layout", "auto")
    for plot in ("Efficiency", "Tokens a second and GPU", "Memory, of the GPU's 74.5 GiB"):
        assert page.get_by_label(f"{plot} over ranks").locator("polyline").count() == 3
    curves = [c.get_attribute("points").split() for c in page.get_by_label("Efficiency over ranks").locator("polyline").all()]
    assert all(len(c) == 2 for c in curves)
    assert {"ring, auto layout", "auto, auto layout"} <= set(page.locator(".curves li").all_inner_texts())
    assert page.locator(".why").count() == len(found)


def test_refused_lines_are_on_the_page(simulate):
    found, _, page = simulate("--layout", "striped", "--schedule", "all_gather,ring", "--key-order", "sequence")
    assert page.locator(".refused").count() == 1 and found[0]["refused"] in page.locator(".refused").inner_text()
    assert len(rows(page)) == 1


def test_everything_that_takes_focus_has_a_name(show, simulate):
    _, _, page = simulate("--ranks", "2,4", "--schedule", "ring,exact")
    show.everything_has_a_name(page)


def test_parts_of_the_time_are_those_of_the_json(simulate):
    found, _, page = simulate("--ranks", "2,8", "--schedule", "ring,exact", "--layout", "contiguous")
    assert page.locator(".loads .across").all_inner_texts() == ["2 ranks", "8 ranks"]
    tracks, scale = page.locator(".loads .track").all(), max(sum(x["parts"].values()) for x in found)
    assert len(tracks) == len(found) == 4
    for x, bar in zip(found, tracks):
        parts = [x["parts"][key] for key in ("busy", "imbalance", "exposed_communication")]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(sum(x[p]["seconds"] for p in ("forward", "backward")))
        words = zip(("compute", "imbalance", "exposed communication"), parts)
        assert bar.get_attribute("title") == ", ".join(f"{word} {1e3 * seconds:.3f} ms" for word, seconds in words)
        wide = bar.evaluate("e => [...e.children].map((part) => part.getBoundingClientRect().width / e.clientWidth)")
        assert wide == pytest.approx([p / scale for p in parts], abs=0.005)


def test_heat_map_of_schedules_and_layouts(simulate):
    found, _, page = simulate("--ranks", "4", "--schedule", "all_gather,ring,exact", "--layout", "zigzag,striped",
                              "--key-order", "sequence")
    assert page.locator(".heat thead th").all_inner_texts() == ["ms, both passes", "zigzag", "striped"]
    cells = [row.locator("th, td").all_inner_texts() for row in page.locator(".heat tbody tr").all()]
    times = {(x["schedule"], x["layout"]): "-" if "refused" in x else
             f"{1e3 * sum(x[p]['seconds'] for p in ('forward', 'backward')):.3f}" for x in found}
    schedules = list(dict.fromkeys(x["schedule"] for x in found))
    assert len(schedules) == 3 and times[schedules[0], "striped"] == "-"
    assert cells == [[s, *(times[s, layout] for layout in ("zigzag", "striped"))] for s in schedules]
    _, _, page = simulate("--ranks", "4", "--schedule", "all,auto", "--layout", "zigzag")
    assert page.locator(".heat").count() == 0
