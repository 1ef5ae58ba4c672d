"""Two ranks over gloo: the second comes late, and the first gets a SIGINT while it waits for it (test_signals.py)."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import processes
import weft
import weft.torch

LATE = 25.0
PACKING = weft.Packing([0, 64])


def attend():
    x = torch.ones(32, 2, 8)
    return weft.torch.context_parallel_attention(x, x, x, PACKING, causal=True, schedule=SCHEDULE, layout="contiguous")


def rank(number):
    weft.torch.shard(torch.ones(64, 2, 8), PACKING, layout="contiguous")
    weft.torch.communicator().barrier()
    if number == 1:
        end = time.monotonic() + LATE
        while time.monotonic() < end and not (FOLDER / "over").exists():
            time.sleep(0.05)
        return
    begin = []

    def interrupt():
        time.sleep(1)
        begin.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        attend()
        print("it came back")
    except KeyboardInterrupt:
        print(f"interrupted {time.monotonic() - begin[0]:.3f}")
    try:
        attend()
    except weft.Error as e:
        print(e.problem)
    (FOLDER / "over").touch()


if __name__ == "__main__":
    FOLDER, SCHEDULE = Path(sys.argv[1]), sys.argv[2]
    processes.fork(2, rank, FOLDER, seconds=60)
