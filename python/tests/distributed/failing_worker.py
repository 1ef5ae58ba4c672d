"""One rank of four fails in one of many ways; a line of JSON a way says how the others ended (test_failing.py)."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import weft
import weft.torch

import processes

RANKS, LOST = 4, 2
WAITED_FOR = ("late", "another problem")  # not lost: others learn of it while they wait
PACKING = weft.Packing([0, 7, 10, 33, 64])


class Unwell(Exception):
    pass


def _fails_midway(after):
    """This rank's transport raises in its next exchange but `after`, with others under way."""
    from weft.torch import transport
    start, calls = transport.Transport.exchange, [0]

    def exchange(self, sends, receives):
        calls[0] += 1
        if calls[0] > after:
            raise Unwell("the network card fell off")
        return start(self, sends, receives)

    transport.Transport.exchange = exchange


def attend(schedule, rows=16, heads=4, backward=True, packing=PACKING, device="cpu", **options):
    q = torch.randn(rows, heads, 8 if device == "cpu" else 64, requires_grad=True, device=device)
    weft.torch.use_layout(packing)
    out = weft.torch.context_parallel_attention(q, q, q, packing, causal=True, schedule=schedule, **options)
    if backward:
        out.sum().backward()


def way(name, schedule):
    def rank(me):
        attend(schedule)
        if me != LOST:
            if name in WAITED_FOR:
                weft.torch.communicator(time_limit=1.5)
            attend(schedule)
            attend(schedule)
        elif name == "raises":
            raise Unwell("this rank is not well")
        elif name == "exits":
            os._exit(3)
        elif name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "killed before the backward":
            attend(schedule, backward=False)
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "wrong rows":
            attend(schedule, rows=15)
        elif name == "midway":
            _fails_midway(1)
            attend(schedule)
        elif name == "midway, and lives on":
            _fails_midway(1)
            try:
                attend(schedule)
            except Unwell:
                time.sleep(12)  # writes its memoirs
            raise Unwell
        elif name == "another problem":
            weft.torch.communicator(time_limit=1.5)
            attend(schedule, heads=2)
        elif name == "late":
            time.sleep(4)
            attend(schedule)
    return rank


def micro(me):
    micros = weft.prepare.MicroSequences(PACKING, ranks=RANKS, micros=4)
    layer = weft.torch.MicroSequenceAttention()
    q = torch.randn(16, 4, 8, requires_grad=True)
    out = layer(q, q, q, micros)
    if me == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()


WAYS = {f"{name}: {schedule}": way(name, schedule) for name, schedules in {
    "raises": ["ring", "all_gather"],
    "exits": ["ring"],
    "killed": ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"],
    "killed before the backward": ["ring", "exact"],
    "wrong rows": ["ring", "all_to_all"],
    "midway": ["all_gather", "ring", "hybrid"],
    "midway, and lives on": ["ring"],
    "late": ["ring", "all_gather"],
    "another problem": ["ring", "exact"],
}.items() for schedule in schedules}
WAYS["killed: micro-sequences"] = micro


AT_RANDOM = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "another packing": None, "another packing, checked": None}
LIMIT = 3.0  # seconds that a rank waits for another


def at_random(seed, backend):
    """(what happens, to which rank, what each rank does): at a moment that depends on the seed, or on the machine's mood."""
    draw = random.Random(seed)
    name = list(AT_RANDOM)[seed % (3 if "nccl" in backend else 4)]
    lost, delay, calls = draw.randrange(RANKS), draw.uniform(0.0, 0.4), draw.randrange(12)
    device = "cuda" if "nccl" in backend else "cpu"

    def rank(me):
        attend("ring", device=device)  # connections are made
        choose = random.Random(seed)
        if me == lost and AT_RANDOM[name] is not None:
            threading.Timer(delay, os.kill, (os.getpid(), AT_RANDOM[name])).start()
        for call in range(100000):
            odd = me == lost and AT_RANDOM[name] is None and call >= calls
            packing = weft.Packing([0, 7, 10, 40, 64] if name.endswith("checked") else [0, 7, 10, 33, 72]) if odd else PACKING
            attend(choose.choice(["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]), packing=packing, device=device,
                   checked=name.endswith("checked"))
            if device == "cuda":
                torch.cuda.synchronize()

    return name, lost, rank


def run_at_random(folder, seeds, backend):
    for seed in seeds:
        name, lost, fn = at_random(seed, backend)
        here = folder / f"random{seed}"
        ended = processes.fork(RANKS, fn, here, seconds=60, limit=LIMIT, backend=backend,
                               stops=lost if name == "stopped" else None)
        said = [(here / f"rank{r}.txt").read_text() for r in range(RANKS)]
        print(json.dumps(dict(way=f"{seed}: {name}", lost=lost, ended=ended, said=said)), flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:3] == ["random"]:
        run_at_random(folder, range(int(sys.argv[3]), int(sys.argv[4])), sys.argv[5])
        sys.exit()
    for number, (name, fn) in enumerate(WAYS.items()):
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        here = folder / str(number)
        ended = processes.fork(RANKS, fn, here, seconds=40, full_exit=number == 0)
        print(
            json.dumps(dict(way=name, ended=ended, said=[(here / f"rank{r}.txt").read_text() for r in range(RANKS)])), flush=True
        )
