"""Auto against each fixed choice over batches of documents as published, simulated.

    PYTHONPATH=build/release/python python bench/auto_choice.py

A line a fixed schedule and layout, a column a number of ranks: its simulated time over that of what auto chooses, forward
and backward, geometric mean over batches of 8,192 tokens a rank; and how long choosing took.
"""

import math
import time

import weft

import published

RANKS = (8, 64, 512)
BATCHES = 6
FIXED = [weft.Schedule(name, **options) for name, options in (
    ("all_gather", {}), ("all_gather", {"head_groups": 4}), ("ring", {}), ("all_to_all", {}), ("hybrid", {"ulysses": 8}),
    ("hybrid", {"ulysses": 4, "outer": "all_gather"}), ("exact", {"stages": 1}), ("exact", {}))]
LAYOUTS = ("contiguous", "zigzag", "balanced")
HEADS = (64, 8)


def seconds(packing, mask, ranks, schedule, layout, machine):
    return sum(weft.simulate(packing, mask, ranks=ranks, heads=HEADS, machine=machine, backward=b, schedule=schedule,
                             layout=layout)["seconds"] for b in (False, True))


def name(schedule, layout):
    return ", ".join([schedule.name, *(f"{k} {v}" for k, v in schedule.options.items()), layout])


def main():
    machine, rows, spent, took, chosen = weft.Machine("h100-400g"), {}, {}, {}, {}
    masks = {"full": weft.Mask(causal=True), "window 4096": weft.Mask(causal=True, window=(4096, 0))}
    for what, mask in masks.items():
        for ranks in RANKS:
            for seed in range(BATCHES):
                packing = published.documents(8192 * ranks, 100 + seed)
                begin = time.perf_counter()
                choice = weft.choose(packing, mask, ranks, heads=HEADS, machine=machine)
                key = (what, ranks)
                spent[key] = spent.get(key, 0) + time.perf_counter() - begin
                layer = choice.layers[0]
                words = f"{layer.why().split(':')[0]}, {choice.layout}"
                chosen.setdefault(key, {}).setdefault(words, 0)
                chosen[key][words] += 1
                auto = seconds(packing, mask, ranks, weft.Schedule(layer.schedule, **layer.options), choice.layout, machine)
                took[key] = took.get(key, 0) + auto
                best = math.inf
                for layout in LAYOUTS:
                    for fixed in FIXED:
                        too_few_heads = fixed.name == "all_to_all" and ranks > HEADS[0]
                        if fixed.options.get("ulysses", 1) >= ranks or too_few_heads:
                            continue
                        other = seconds(packing, mask, ranks, fixed, layout, machine)
                        best = min(best, other)
                        rows.setdefault(name(fixed, layout), {}).setdefault(key, []).append(math.log(other / auto))
                rows.setdefault("the best of these for each batch", {}).setdefault(key, []).append(math.log(best / auto))
    keys = list(spent)
    print(f"{'fixed choice':<44}" + "".join(f"{f'{what}, {ranks}':>18}" for what, ranks in keys))
    for row, cells in rows.items():
        print(
            f"{row:<44}"
            + "".join(f"{math.exp(sum(cells[k]) / len(cells[k])):>18.2f}" if k in cells else f"{'-':>18}" for k in keys)
        )
    for key in keys:
        print(f"{key[0]}, {key[1]} ranks: choosing took {1e3 * spent[key] / BATCHES:.1f} ms a batch, a layer "
              f"{1e3 * took[key] / BATCHES:.1f} ms; chosen: " + "; ".join(f"{n} x {w}" for w, n in chosen[key].items()))


if __name__ == "__main__":
    main()
