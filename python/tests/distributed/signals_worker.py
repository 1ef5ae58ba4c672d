"""Two ranks over gloo: the second comes late, and the first gets a SIGINT while it waits for it (test_signals.py), or
another of its threads calls meanwhile (test_many_threads.py)."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import weft
import weft.torch

import processes

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


def threads(number):
    """A second thread is refused, and the first one's call and the group are as if it had not been there."""
    weft.torch.use_layout(PACKING, layout="contiguous")
    wanted = attend()
    if number == 1:
        while not (FOLDER / "refused").exists():
            time.sleep(0.01)
        attend()
        attend()
        return
    got = []
    first = threading.Thread(target=lambda: got.append(attend()))
    first.start()
    while first.is_alive():
        try:
            time.sleep(0.2)  # the first one is in its call, or soon will be
            attend()
            print("not refused")
            break
        except weft.Error as e:
            print(e.problem)
            (FOLDER / "refused").touch()
            break
    first.join()
    got.append(attend())
    print("right" if all(torch.equal(x, wanted) for x in got) else "wrong")


if __name__ == "__main__":
    FOLDER, SCHEDULE = Path(sys.argv[1]), sys.argv[2]
    processes.fork(2, threads if sys.argv[3:] == ["threads"] else rank, FOLDER, seconds=60)
