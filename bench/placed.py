"""Layout placed against fixed choices and against groups of powers of two, simulated.

    PYTHONPATH=build/release/python python bench/placed.py [--ranks 8,64] [--json bench/results/placed.json]

Batches of documents as published and of lognormal lengths (median 800, sigma 1.2, none longer than a quarter of the
batch), 8,192 and 32,768 tokens a rank, heads 64:8, width 128, bf16, causal, forward and backward, preset h100-400g.
Each way's seconds over those of placed with its best schedule, which is what auto takes: geometric mean over the batches, and
the least. Above 1: placed is faster.

    balanced, best      layout balanced with its best schedule; the same of zigzag
    mesh, best          a mesh of the side with the fewest bytes, on whichever of placed, balanced and zigzag is fastest
    dual_chunk, gather  every document in dual chunks over all ranks, keys gathered by a collective library, which
                        passes them on inside a node: what Transformer Engine does
    dual_chunk, ring    the same around a ring
    powers of two       every document in dual chunks on a group of 1, 2, 4, 8 ... ranks: see power_of_two_groups
    floor               all work spread evenly over all ranks at the kernel's rate, and nothing that moves: no layout, and no
                        schedule, is faster
"""

import argparse
import datetime
import json
import math
import pathlib
import random

import weft
from weft import _core, sharding

import published

HEADS, MASK = (64, 8), weft.Mask(causal=True)
NODE = 8
WAYS = ("balanced, best", "zigzag, best", "mesh, best", "dual_chunk, gather", "dual_chunk, ring", "powers of two", "floor")
MOST_RING = 64  # ranks: a ring of more takes long to simulate, and is far behind
SLICES = 12_000_000  # that a choice may simulate: as in weft simulate


def lognormal(tokens, seed):
    rng, lengths, left = random.Random(seed), [], tokens
    while left:
        length = max(16, round(800 * math.exp(1.2 * rng.gauss(0, 1))))
        lengths.append(min(length, tokens // 4, left))
        left -= lengths[-1]
    return weft.Packing.from_lengths(lengths)


KINDS = {"published": published.documents, "lognormal": lognormal}


def lengths_of(packing):
    cu = packing.cu_seqlens_q.tolist()
    return [b - a for a, b in zip(cu, cu[1:])]


def power_of_two_groups(lengths, ranks, limit):
    """Groups as Megatron-Core's dynamic context parallelism forms them, from the description of its pull requests 2282 and 5679.

    A document gets the smallest power of two of ranks on which a rank holds at most `limit` of its tokens. Its work is the
    square of its length over those ranks. The longest first, each goes to the aligned group of that size with the least
    work so far. Returns (first rank, ranks) of each. There documents of a group run one after another, and groups wait for
    each other after each round; here all of them are one pass without a wait, which is the best that they could do.
    """
    work, placed = [0.0] * ranks, [(0, 1)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = 1
        while size * limit < lengths[i] and 2 * size <= ranks:
            size *= 2
        first = min(range(0, ranks - size + 1, size), key=lambda first: max(work[first:first + size]))
        for rank in range(first, first + size):
            work[rank] += lengths[i] ** 2 / size
        placed[i] = (first, size)
    return placed


def in_groups(packing, ranks, limit):
    """Dual chunks of each document over its group, as a layout. Chunks differ by a token where lengths do not divide."""
    pieces, begin = [[] for _ in range(ranks)], 0
    lengths = lengths_of(packing)
    for length, (first, size) in zip(lengths, power_of_two_groups(lengths, ranks, limit)):
        cuts = [length * n // (2 * size) for n in range(2 * size + 1)]
        for n in range(2 * size):
            pieces[first + min(n, 2 * size - 1 - n)].append((begin + cuts[n], cuts[n + 1] - cuts[n]))
        begin += length
    runs = []
    for own in pieces:
        row, rows = 0, []
        for token, count in own:
            if count:
                rows.append((row, token, count))
                row += count
        runs.append(rows)
    return weft.Layout.explicit(packing, runs)


def passes(packing, ranks, schedule, layout, machine, what="seconds"):
    try:
        return sum(weft.simulate(packing, MASK, ranks=ranks, heads=HEADS, machine=machine, backward=b, schedule=schedule,
                                 layout=layout)[what] for b in (False, True))
    except weft.Error:  # more ranks than heads, or too many messages to simulate
        return math.inf


def best(packing, ranks, layout, machine):
    """What auto takes among all candidates that are near the best by the estimate: seconds, and which it is."""
    placed = sharding.layout_of(layout, packing, ranks, MASK)
    found = _core.choose_schedule(weft.Problem(packing, MASK), placed, *HEADS, _core.DType.bf16, 128, 128, machine,
                                  simulated_slices=SLICES)
    return found.seconds, found.why().split(":")[0]


def exact(packing, ranks, layout, machine):
    nodes = [{}] + ([{"node": NODE}] if ranks > NODE else [])
    return min(passes(packing, ranks, weft.Schedule("exact", **how, **node), layout, machine)
               for how in ({"stages": 1}, {"stages": 4}, {"head_groups": 4}) for node in nodes)


def batch(kind, ranks, tokens, seed):
    machine = weft.Machine("h100-400g")
    collective = published.machine(1)  # the same, with gathers passed on inside a node
    packing = KINDS[kind](tokens * ranks, seed)
    padded = packing.padded_to(2 * ranks)
    placed = weft.place(packing, ranks)
    layouts = {"placed": placed.layout, "balanced": "balanced", "zigzag": "zigzag"}
    found = {name: best(packing, ranks, layout, machine) for name, layout in layouts.items()}
    times = {f"{name}, best": seconds for name, (seconds, _) in found.items()}
    times |= {
        "mesh, best": min(passes(packing, ranks, "mesh", layout, machine) for layout in layouts.values()),
        "dual_chunk, gather": passes(padded, ranks, "all_gather", "dual_chunk", collective),
        "dual_chunk, ring": math.inf if ranks > MOST_RING else passes(
            padded, ranks, weft.Schedule("ring", ranks_per_step=1), "dual_chunk", machine),
        "powers of two": exact(packing, ranks, in_groups(packing, ranks, tokens), machine),
        "floor": passes(packing, ranks, weft.Schedule("exact", stages=1), placed.layout, machine, "ideal"),
    }
    return {"lengths": kind, "ranks": ranks, "tokens": tokens, "seed": seed, "documents": len(lengths_of(packing)),
            "rows": placed.layout.rows, "split": int((placed.ranks > 1).sum()),
            "best": {name: words for name, (_, words) in found.items()},
            "ms": {way: None if x == math.inf else round(1e3 * x, 3) for way, x in times.items()}}


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(rows):
    """A line a kind, number of ranks and tokens: geometric mean of time over that of placed, and the least of a batch."""
    lines = ["| lengths | tokens a rank | ranks | placed, best, ms | " + " | ".join(WAYS) + " |",
             "|---|---|---|---|" + "---|" * len(WAYS)]
    what = lambda r: (r["lengths"] != "published", r["lengths"], r["tokens"], r["ranks"])
    for key in sorted({what(r) for r in rows}):
        some, (_, kind, tokens, ranks) = [r for r in rows if what(r) == key], key
        cells = []
        for way in WAYS:
            ratios = [r["ms"][way] / r["ms"]["placed, best"] for r in some if r["ms"][way]]
            cells.append(f"{mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-")
        lines.append(f"| {kind} | {tokens:,} | {ranks} | {mean([r['ms']['placed, best'] for r in some]):.1f} | "
                     + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(path, rows):
    head = {"machine": "Simulated on h100-400g: nodes of 8 H100 SXM joined by NVLink, 400 Gb/s a GPU between nodes",
            "date": str(datetime.date.today()), "command": "python bench/placed.py",
            "about": "causal, heads 64:8, width 128, bf16, forward and backward; ms of one layer"}
    members = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path.write_text(f"{{\n{members}  \"rows\": [\n" + ",\n".join("    " + json.dumps(row) for row in rows) + "\n  ]\n}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="8,16,32,64,128,256,512")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="rows are added to those of the file, or replace them")
    given = parser.parse_args()
    rows = json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else []
    for ranks in map(int, given.ranks.split(",")):
        for tokens in map(int, given.tokens.split(",")):
            for kind in KINDS:
                for seed in range(given.batches):
                    found = batch(kind, ranks, tokens, seed)
                    key = [found[k] for k in ("lengths", "ranks", "tokens", "seed")]
                    rows = [r for r in rows if [r[k] for k in ("lengths", "ranks", "tokens", "seed")] != key] + [found]
                if given.json:
                    write(given.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
