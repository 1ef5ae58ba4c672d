"""Four ranks train the example's model with every schedule; rank 0 saves what came out (test_train.py).

After the folder: the schedules. With `steps` before them they train for all steps, otherwise for two.
"""

import sys
from pathlib import Path

import torch
import torch._dynamo  # once, before ranks are forked

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import processes
import train_packed

SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]
QUICK = ["all_gather", "mesh"]
RANKS, STEPS, TOKENS = 4, 50, 256
CONFIG = train_packed.Config(layers=2, full_every=2, dim=32, hidden=48, chunk_size=24)


def train(steps, **attention):
    """(loss of each step, gradients of the first)"""
    torch.manual_seed(1)
    model = train_packed.Decoder(CONFIG, **attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, first = [], None
    for _, pack in zip(range(steps), train_packed.Text(CONFIG.vocab, 1).packs(TOKENS)):
        optimizer.zero_grad()
        losses.append(train_packed.loss_and_gradients(model, *pack, layout=attention.get("layout", "balanced")))
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, first


def rank(folder, rank, schedules, steps):
    results = {}
    for schedule in schedules:
        results[schedule] = train(steps, schedule=schedule)
        results[f"{schedule}, recomputed"] = train(2, schedule=schedule, recompute=True, layout="contiguous")
        assert len(results[schedule][0]) == steps
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")


if __name__ == "__main__":
    folder, *schedules = sys.argv[1:]
    steps = 2
    if schedules[0] == "steps":
        steps, schedules = STEPS, schedules[1:]
    ended = processes.fork(RANKS, lambda r: rank(folder, r, schedules, steps), folder, seconds=240)
    sys.exit(any(status for status, _ in ended))
