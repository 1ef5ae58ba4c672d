"""DeepSeek-V3 of transformers whose latent moves, in bf16 on four ranks, against eager attention in f32 (test_cuda_latent.py).

    python latent_worker.py FOLDER cuda|cpu      # over NCCL or gloo; figures in rank0.txt
"""

import copy
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))
import weft

import processes
import test_transformers_latent as in_f32
from small_models import alone, packing_of, tokens

RANKS = 4
CASES = {"-".join(map(str, case)): case for case in (
    ("balanced", "all_gather", {}), ("balanced", weft.Schedule("all_gather", head_groups=2), {}), ("zigzag", "ring", {}),
    ("zigzag", "hybrid", {}), ("balanced", "exact", {"checkpointing": False}), ("zigzag", "ring", {"recompute": False}),
    ("placed", "auto", {}),
)}


@functools.lru_cache(None)
def models(device):
    """Eager attention in f32 and in bf16, and Weft's in bf16, of the same weights, which bf16 can hold."""
    eager, ours = (copy.deepcopy(model).to(device, torch.bfloat16) for model in in_f32.pair_of("deepseek_v3"))
    return copy.deepcopy(eager).float(), eager, ours


@functools.lru_cache(None)
def wanted(layout, device):
    """Of eager attention, on one rank: in f32, and how far it is off in bf16."""
    exact, eager, _ = models(device)
    packing = packing_of(layout)
    in_single, in_half = (alone(model, tokens(packing.tokens_q).to(device), packing) for model in (exact, eager))
    return in_single, in_f32.apart(in_half, in_single)


def check(device, layout, schedule, options):
    exact, eager = wanted(layout, device)
    found = in_f32.apart(in_f32.of_ranks(models(device)[2], packing_of(layout), layout, schedule, **options), exact)
    print({name: {what: f"{x:.1e}" for what, x in of.items()} for name, of in (("weft", found), ("eager", eager))})
    assert all(found[what] <= 1.5 * eager[what] + 1e-3 for what in ("logits", "loss", "norm")), (found, eager)


def run(rank):
    processes.run_cases(rank, {name: functools.partial(check, sys.argv[2], *case) for name, case in CASES.items()}, sys.argv[1])


if __name__ == "__main__":
    backend = "cpu:gloo,cuda:nccl" if sys.argv[2] == "cuda" else "gloo"
    ended = processes.fork(RANKS, run, sys.argv[1], seconds=200, backend=backend)
    print((Path(sys.argv[1]) / "rank0.txt").read_text())
    sys.exit(any(status for status, _ in ended))
