"""Published forward TFLOP/s a GPU on 8 to 64 H100, beside predictions of a model that saw the 8-GPU column alone.

    PYTHONPATH=build/release/python python bench/published.py

H100 nodes with NVLink, 400 Gb/s a GPU between nodes; 8,192 tokens a GPU, heads 64:8, width 128, bf16, packed causal
documents of which the longest is at most a quarter. Of each published way one number is fitted, its kernel rate, so
that 8 GPUs come out right; everything else is the preset h100-400g.
"""

import json
import math
import random

import weft

GPUS = (8, 16, 32, 64)
PUBLISHED = {
    "all-to-all": (278, 198, 185, 163),
    "ring": (89, 69, 48, 29),
    "all-gather": (288, 292, 241, 181),
    "all-to-all x ring": (261, 251, 255, 193),
    "exact with overlap": (459, 426, 314, 237),
}
# How each is done here. Frameworks cut each document into dual chunks, padded to what that takes, and collective
# libraries pass gathered rows on inside a node.
WAYS = {
    "all-to-all": dict(schedule="all_to_all", layout="contiguous"),
    "ring": dict(schedule=weft.Schedule("ring", ranks_per_step=1), layout="dual_chunk"),
    "all-gather": dict(schedule="all_gather", layout="dual_chunk"),
    "all-to-all x ring": dict(schedule=weft.Schedule("hybrid", ulysses=8, ranks_per_step=1), layout="zigzag"),
    "exact with overlap": dict(schedule=weft.Schedule("exact", head_groups=4), layout="balanced"),
}
QUANTILES = [(0, 16), (0.186, 200), (0.468, 500), (0.714, 1024), (0.870, 2048), (0.944, 4096), (0.974, 8192),
             (0.987, 16384), (0.996, 32768), (1, 196608)]
BATCHES = 5


def documents(tokens, seed):
    """As weft simulate --docs published draws them, with its own numbers; none longer than a quarter of all."""
    rng, lengths, left = random.Random(seed), [], tokens
    while left:
        share = rng.random()
        (a, low), (b, high) = next(p for p in zip(QUANTILES, QUANTILES[1:]) if p[1][0] >= share)
        length = round(math.exp(math.log(low) + (share - a) / (b - a) * math.log(high / low)))
        lengths.append(min(length, tokens // 4, left))
        left -= lengths[-1]
    return weft.Packing.from_lengths(lengths)


def machine(rate):
    given = json.loads(weft.Machine("h100-400g").to_json())
    for kernel in given["kernels"]:
        kernel["flops"] *= rate
    given["relays_gathers"] = True
    return weft.Machine.from_json(json.dumps(given))


def tflops(way, gpus, rate):
    """Mean over batches."""
    mask, how, total = weft.Mask(causal=True), dict(WAYS[way]), 0
    if gpus == 8 and way == "all-to-all x ring":  # a mesh of one node has both sides inside it
        how["schedule"] = weft.Schedule("hybrid", ulysses=4, ranks_per_step=1)
    for seed in range(BATCHES):
        packing = documents(8192 * gpus, seed)
        if how["layout"] == "dual_chunk":
            packing = packing.padded_to(2 * gpus)
        seconds = weft.simulate(packing, mask, ranks=gpus, heads=(64, 8), machine=machine(rate), **how)["seconds"]
        total += weft.Problem(packing, mask).visible_pairs * 64 * 4 * 128 / seconds / gpus * 1e-12
    return total / BATCHES


def fitted(way):
    low, high = 0.01, 20.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if tflops(way, 8, middle) < PUBLISHED[way][0] else (low, middle)
    return math.sqrt(low * high)


def main():
    columns = {}
    print(f"{'way':<20}{'rate':>6}" + "".join(f"{f'{n} GPUs':>24}" for n in GPUS))
    for way, published in PUBLISHED.items():
        rate = fitted(way)
        predicted = [tflops(way, n, rate) for n in GPUS]
        columns[way] = predicted
        cells = "".join(f"{f'{p:.0f} for {q} ({100 * (p / q - 1):+.0f} %)':>24}" for p, q in zip(predicted, published))
        print(f"{way:<20}{rate:>6.2f}{cells}")
    for at, gpus in enumerate(GPUS):
        order = [sorted(table, key=lambda way: -table[way][at]) for table in (PUBLISHED, columns)]
        swapped = [(a, b) for i, a in enumerate(order[0]) for b in order[0][i + 1:] if order[1].index(a) > order[1].index(b)]
        print(
            f"{gpus} GPUs: "
            + ("the same order" if not swapped else "other order: " + "; ".join(f"{b} before {a}" for a, b in swapped))
        )


if __name__ == "__main__":
    main()
