"""Micro-sequences one at a time on one, two and four ranks against a dense softmax, document by document."""

import itertools
import sys

import micro_worker
from micro_worker import MASKS, PACKINGS, RANKS, a_decoder, check

CASES = [f"{mask}-{ranks} ranks-{micros} micros"
         for mask, ranks, micros in itertools.product(("causal", "window", "chunked"), (1, 2, 4), (1, 2, 4))]
CASES += ["a decoder on 2 ranks", "a decoder on 4 ranks"]
DECODERS = (4, {}), (2, dict(drop=True, saved="layer")), (3, dict(drop=True))


def run(name, groups):
    if name.startswith("a decoder"):
        a_decoder(groups[int(name.split()[-2])], *DECODERS)
        return
    mask, ranks, micros = name.split("-")
    for packing, drop, recompute in itertools.product(("ragged", "gaps"), (False, True), (False, True)):
        check(PACKINGS[packing], MASKS[mask], groups[int(ranks[0])], int(micros[0]), drop=drop, sink=packing == "ragged",
              softcap=2.0 if recompute else 0.0, steps=True, recompute=recompute)


if __name__ == "__main__":
    micro_worker.run_ranks(CASES, run, sys.argv[1])

__all__ = ["CASES", "RANKS"]
