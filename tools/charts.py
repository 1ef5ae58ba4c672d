#!/usr/bin/env python3
"""Draws the charts of the docs from the results in bench/results/.

    tools/charts.py [FOLDER]          draw all charts into FOLDER (docs/pictures if not given)
    tools/charts.py --record WEFT     simulate anew what two of the charts show, by this command

A result file has `machine`, `date`, `command` and `rows`; the rows of a GPU's and a CPU's file are those that
`weft bench --json` writes. Python's standard library alone: a chart is a few bars or lines, and text stays text.
"""
import datetime
import html
import json
import math
import pathlib
import shlex
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[1]
RESULTS = SOURCE / "bench/results"
# As src/draw/palette.cpp: told apart without telling red from green.
LIGHT = {"ink": "#1b1f24", "quiet": "#5a6470", "grid": "#d5dae0",
         "series": ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#6b6b6b"]}
DARK = {"ink": "#e8ebee", "quiet": "#a3acb6", "grid": "#353c44",
        "series": ["#4ba3e3", "#f2b134", "#2ec4a0", "#e7a3c8", "#f0743a", "#bdbdbd"]}


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def number(value):
    return f"{value:.1f}".rstrip("0").rstrip(".")


class Picture:
    """Shapes by class: bars f0, f1, .. and lines l0, l1, .. in the colours of the series, grid lines; then labels by class."""

    def __init__(self, title, about):
        self.title, self.about, self.paths, self.labels = title, about, {}, {}
        self.label(16, 26, title, "title")
        for i, line in enumerate(about):
            self.label(16, 46 + 15 * i, line, "quiet")
        self.top = 46 + 15 * len(about)

    def box(self, x, y, width, height, kind):
        self.paths.setdefault(kind, []).append(f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z")

    def line(self, points, kind):
        self.paths.setdefault(kind, []).append("M" + "L".join(f"{number(x)} {number(y)}" for x, y in points))

    def label(self, x, y, text, kind=""):
        self.labels.setdefault(kind, []).append(f'<text x="{number(x)}" y="{number(y)}">{html.escape(text)}</text>')

    def legend(self, names, x=16):
        for i, name in enumerate(names):
            self.box(x, self.top, 10, 10, f"f{i}")
            self.label(x + 14, self.top + 9, name)
            x += 34 + 6.6 * len(name)
        self.top += 34

    def svg(self, width, height):
        def colours(of):
            series = "".join(f".f{i}{{fill:{c}}}.l{i}{{stroke:{c}}}" for i, c in enumerate(of["series"]))
            return f"svg{{fill:{of['ink']}}}.quiet,.tick{{fill:{of['quiet']}}}.grid{{stroke:{of['grid']}}}{series}"

        style = ("svg{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}.title{font-size:16px;"
                 "font-weight:600}.name{font-weight:600}.end{text-anchor:end}.mid,.tick{text-anchor:middle}.small,.tick,.quiet{"
                 "font-size:11px}[class^=l]{fill:none;stroke-width:2}.l0{stroke-width:5}" + colours(LIGHT)
                 + "@media(prefers-color-scheme:dark){" + colours(DARK) + "}")
        below_others = sorted(self.paths.items(), key=lambda path: path[0] != "grid")
        shapes = "".join(f'<path class="{kind}" d="{"".join(d)}"/>\n' for kind, d in below_others)
        labels = "".join(f'<g class="{kind}">{"".join(all_of)}</g>\n' for kind, all_of in self.labels.items())
        size = f'viewBox="0 0 {width} {number(height)}" width="{width}" height="{number(height)}"'
        words = f'<title>{html.escape(self.title)}</title>\n<desc>{html.escape(" ".join(self.about))}</desc>'
        return (f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{words}\n<style>{style}</style>\n'
                f"{shapes}{labels}</svg>\n")


GPU_CASES = {
    "One GPU": {"dense": "one document of 16,384", "packed": "18 documents, 65,536 tokens", "window": "window of 4,096 in 32,768",
                "mha-causal": "16 heads (MHA), 16,384", "mha-full": "the same without a mask", "width-64": "width 64, 16 x 4,096",
                "width-256": "width 256, 8,192 tokens"},
    "One rank of 8": {"rank-of-8": "18 documents, all-gather", "long-rank-of-8": "one of 131,072, all-gather",
                      "short-rank-of-8": "short documents, all-gather", "ring-rank-of-8": "18 documents, ring",
                      "long-ring-of-8": "one of 131,072, ring", "short-ring-of-8": "short documents, ring"},
}


def speed():
    run, other = results("h200"), results("h200-flash-attention-3")
    rates = {(r["case"], r["pass"]): [r["tflops"], None, r.get("peer_tflops")] for r in run["rows"]}
    for r in other["rows"]:
        rates[r["case"], r["pass"]][1] = r["tflops"]
    p = Picture("Attention kernels on an H200, useful TFLOP/s, bf16",
                ["Weft beside cuDNN (through torch, which has no call for packs, windows and ranks), in the same rounds, "
                 f"{run['date']}.", "FlashAttention-3: the same shapes on another H200."])
    p.legend(["Weft", "FlashAttention-3", "cuDNN"])
    left, wide, gap, scale = 194, 200, 190, 200 / 800
    columns = {"forward": left, "backward": left + wide + gap}
    for name, x in columns.items():
        p.label(x, p.top, name, "name")
    y, begin = p.top + 14, p.top + 8
    for group, cases in GPU_CASES.items():
        p.label(16, y + 8, group, "name")
        y += 20
        for case, words in cases.items():
            p.label(left - 8, y + 13, words, "small end")
            for name, x in columns.items():
                ours, *peers = rates[case, name]
                p.box(x, y, ours * scale, 9, "f0")
                for i, theirs in enumerate(peers):
                    if theirs:
                        p.box(x, y + 10 + 6 * i, theirs * scale, 5, f"f{i + 1}")
                ratios = ", ".join(f"{ours / theirs:.2f}\N{MULTIPLICATION SIGN} {who}"
                                   for who, theirs in zip(("FA-3", "cuDNN"), peers) if theirs)
                p.label(x + max(ours, *(t or 0 for t in peers)) * scale + 5, y + 12, f"{ours:.0f}: {ratios}", "small")
            y += 27
        y += 4
    for x in columns.values():
        for tflops in (200, 400, 600, 800):
            p.line([(x + tflops * scale, begin), (x + tflops * scale, y)], "grid")
            p.label(x + tflops * scale, y + 12, str(tflops), "tick")
    return p.svg(left + 2 * wide + 2 * gap, y + 24)


CPU_BARS = [("dense128", "f32", "one call", "dim 128, f32"), ("dense64", "f32", "one call", "dim 64, f32"),
            ("packed", "f32", "loop", "40 packed documents, f32: a loop over split()"),
            ("packed", "f32", "slices", "the same: a loop over q[begin:end]"),
            ("packed", "bf16", "f32 loop", "the same in bf16: torch's loop in f32"),
            ("packed", "bf16", "f32 slices", "the same in bf16: q[begin:end] in f32")]


def cpu():
    run = results("arm")
    ratios = {(r["case"], r["dtype"], r["peer"], r["pass"]): r["ratio"] for r in run["rows"]}
    in_bf16 = [round(r["ratio"]) for r in run["rows"] if r["dtype"] == "bf16" and r["peer"] == "one call"]
    p = Picture("CPU: times the speed of torch's scaled_dot_product_attention",
                [f"{run['machine']}.",
                 f"The same problem, causal, in the same rounds. torch's own bf16 is {min(in_bf16)} to {max(in_bf16)} times "
                 "slower and not drawn."])
    p.legend(["forward", "backward"])
    left, scale, y = 290, 45, p.top
    begin = y - 8
    for case, dtype, peer, words in CPU_BARS:
        p.label(left - 8, y + 16, words, "small end")
        for i, name in enumerate(("forward", "backward")):
            ratio = ratios.get((case, dtype, peer, name))
            if ratio:
                p.box(left, y + 13 * i, ratio * scale, 11, f"f{i}")
                p.label(left + ratio * scale + 5, y + 10 + 13 * i, f"{ratio:.2f}", "small")
        y += 36
    for times in range(1, 12, 2):
        p.line([(left + times * scale, begin), (left + times * scale, y)], "grid")
        p.label(left + times * scale, y + 12, f"{times} x", "tick")
    return p.svg(860, y + 24)


def curves(p, x, title, rows, key, names, value, say):
    """Values of the rows over ranks, a line for each name, on two logarithmic axes."""
    ranks = sorted({r["ranks"] for r in rows})
    low = math.floor(math.log2(min(value(r) for r in rows)))
    high = math.ceil(math.log2(max(value(r) for r in rows)))
    wide, tall, top = 330, 230, p.top + 18
    at_x = lambda n: x + 46 + wide * ranks.index(n) / (len(ranks) - 1)
    at_y = lambda v: top + tall * (high - math.log2(v)) / (high - low)
    p.label(x, p.top, title, "name")
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        p.line([(x + 46, at_y(2.0**power)), (x + 46 + wide, at_y(2.0**power))], "grid")
        p.label(x + 40, at_y(2.0**power) + 4, say(2.0**power), "quiet end")
    for n in ranks:
        p.label(at_x(n), top + tall + 16, str(n), "tick")
    p.label(x + 46 + wide / 2, top + tall + 32, "ranks", "tick")
    for i, name in enumerate(names):
        points = sorted((r["ranks"], value(r)) for r in rows if r[key] == name)
        p.line([(at_x(n), at_y(v)) for n, v in points], f"l{i}")
        for n, v in points:
            p.box(at_x(n) - 2.5, at_y(v) - 2.5, 5, 5, f"f{i}")
    return top + tall + 40


def schedules():
    run = results("schedules")
    names = list(dict.fromkeys(r["schedule"] for r in run["rows"]))
    p = Picture("Schedules over ranks: bytes and predicted time of a layer's attention",
                [f"{run['machine']}.", f"{run['about']}."])
    p.legend(names)
    gib = lambda v: f"{v:g} GiB" if v >= 1 else f"{1024 * v:g} MiB"
    curves(p, 16, "Received by the rank that receives most", run["rows"], "schedule", names, lambda r: r["bytes_in"] / 2**30, gib)
    bottom = curves(p, 436, "Forward and backward, predicted", run["rows"], "schedule", names, lambda r: 1e3 * r["seconds"],
                    lambda v: f"{v:g} ms")
    return p.svg(830, bottom)


def layouts():
    run = results("layouts")
    names = list(dict.fromkeys(r["layout"] for r in run["rows"]))
    ranks = sorted({r["ranks"] for r in run["rows"]})
    p = Picture("Imbalance by layout: the busiest rank's compute over the mean", [f"{run['machine']}.", f"{run['about']}."])
    p.legend(names)
    most = max(r["imbalance"] for r in run["rows"])
    left, wide, tall, top = 46, 880, 200, p.top
    scale = tall / math.ceil(most)
    for times in range(1, math.ceil(most) + 1):
        p.line([(left, top + tall - times * scale), (left + wide, top + tall - times * scale)], "grid")
        p.label(left - 6, top + tall - times * scale + 4, str(times), "quiet end")
    group = wide / len(ranks)
    bar = 0.8 * group / len(names)
    for r in run["rows"]:
        x = left + group * (ranks.index(r["ranks"]) + 0.1) + bar * names.index(r["layout"])
        y = top + tall - r["imbalance"] * scale
        p.box(x, y, bar - 2, r["imbalance"] * scale, f"f{names.index(r['layout'])}")
        p.label(x + bar / 2 - 1, y - 4, f"{r['imbalance']:.2f}", "tick")
    for i, n in enumerate(ranks):
        p.label(left + group * (i + 0.5), top + tall + 16, f"{n} ranks", "tick")
    return p.svg(left + wide + 16, top + tall + 28)


def placed():
    run = results("placed")
    names = ["placed, best", "balanced, best", "mesh, best", "dual_chunk, gather", "powers of two"]
    tokens = min(r["tokens"] for r in run["rows"])
    p = Picture("Layout placed beside fixed choices: predicted time of a layer's attention",
                [f"{run['machine']}.", f"{run['about']}; {tokens:,} tokens a rank, geometric mean of batches."])
    p.legend(names)

    def rows(kind):
        for ranks in sorted({r["ranks"] for r in run["rows"]}):
            for name in names:
                ms = [r["ms"][name] for r in run["rows"] if (r["lengths"], r["ranks"], r["tokens"]) == (kind, ranks, tokens)]
                if ms and None not in ms:
                    yield {"ranks": ranks, "way": name, "ms": math.exp(sum(map(math.log, ms)) / len(ms))}

    unit = lambda v: f"{v:g} ms"
    curves(p, 16, "Documents as published", list(rows("published")), "way", names, lambda r: r["ms"], unit)
    bottom = curves(p, 436, "Lognormal, median 800, sigma 1.2", list(rows("lognormal")), "way", names, lambda r: r["ms"], unit)
    return p.svg(830, bottom)


CHARTS = {"placed": placed, "speed": speed, "cpu": cpu, "schedules-over-ranks": schedules, "imbalance": layouts}


def record(weft):
    problem = "--docs published:tokens=1048576 --ranks 8,16,32,64,128"
    about = "documents as published, 1,048,576 tokens, causal, heads 64:8, width 128, bf16"
    both = lambda x, key: sum(x[pass_][key] for pass_ in ("forward", "backward"))
    schedule = lambda x: {"schedule": x["schedule"].split()[0], "options": x["schedule"], "bytes_in": both(x, "bytes_in"),
                          "seconds": both(x, "seconds")}
    runs = {"schedules": (f"simulate {problem} --layout balanced --schedule all",
                          f"{about}; layout balanced, each schedule with its quickest options", schedule),
            "layouts": (f"simulate {problem} --layout all --schedule all_gather --pass forward", f"{about}; schedule all_gather",
                        lambda x: {"layout": x["layout"], "imbalance": x["forward"]["imbalance"]})}
    for name, (flags, about, row) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "out.json")
            said = subprocess.run([weft, *shlex.split(flags), "--json", out], check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(out.read_text())
        rows = [{"ranks": x["ranks"], **row(x)} for x in found["lines"]]
        if name == "schedules":
            quickest = {}  # in the order of the table
            for r in rows:
                key = r["ranks"], r["schedule"]
                quickest[key] = min(quickest.get(key, r), r, key=lambda x: x["seconds"])
            rows = list(quickest.values())
        head = {"machine": f"Simulated on {said.stdout.splitlines()[0]}", "date": str(datetime.date.today()),
                "command": f"weft {flags}", "about": f"{found['lines'][0]['documents']} {about}"}
        write(name, head, rows)


def write(name, head, rows):
    """A line a row, so that a change shows where it is."""
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    members = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    (RESULTS / f"{name}.json").write_text(f"{{\n{members}  \"rows\": [\n{lines}\n  ]\n}}\n")


def main():
    if sys.argv[1:2] == ["--record"]:
        return record(sys.argv[2])
    folder = pathlib.Path(sys.argv[1]) if sys.argv[1:] else SOURCE / "docs/pictures"
    for name, draw in CHARTS.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
