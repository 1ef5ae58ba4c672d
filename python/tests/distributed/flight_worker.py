"""Four ranks over a process group, one of which does not come to a call; each keeps a flight file (test_flight_ranks.py)."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import weft
import weft.flight
import weft.torch

import processes

RANKS, LATE = 4, 2
PACKING = weft.Packing([0, 7, 10, 33, 64])


def attend(device):
    q = torch.randn(16, 4, 8 if device == "cpu" else 64, requires_grad=True, device=device)
    weft.torch.use_layout(PACKING)
    weft.torch.context_parallel_attention(q, q, q, PACKING, causal=True, schedule="ring").sum().backward()
    if device != "cpu":
        torch.cuda.synchronize()


def rank(number):
    weft.flight.keep(FOLDER / f"flight.{number}")
    attend(DEVICE)
    if number == LATE:
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGUSR1)  # somebody wants to know what it is at
        time.sleep(0.5)
        return
    weft.torch.communicator(time_limit=1.5)
    try:
        attend(DEVICE)
        print("it came back")
    except weft.Error as e:
        print(e.problem)


if __name__ == "__main__":
    FOLDER, BACKEND = Path(sys.argv[1]), sys.argv[2]
    DEVICE = "cuda" if "nccl" in BACKEND else "cpu"
    processes.fork(RANKS, rank, FOLDER, seconds=40, backend=BACKEND)
