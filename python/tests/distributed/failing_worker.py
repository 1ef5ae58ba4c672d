"""One rank of four fails in one of many ways; a line of JSON a way says how the others ended (test_failing.py)."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import weft
import weft.torch

import processes

RANKS, LOST = 4, 2
WAITED_FOR = ("late", "another problem")  # not lost: others learn of it by the time limit
PACKING = weft.Packing([0, 7, 10, 33, 64])


class Unwell(Exception):
    pass


def _fails_midway(after):
    """This rank's transport raises in its next exchange but `after`, with others under way."""
    from weft.torch import group
    start, calls = group._Transport.exchange, [0]

    def exchange(self, sends, receives):
        calls[0] += 1
        if calls[0] > after:
            raise Unwell("the network card fell off")
        return start(self, sends, receives)

    group._Transport.exchange = exchange


def attend(schedule, rows=16, heads=4, backward=True):
    q = torch.randn(rows, heads, 8, requires_grad=True)
    weft.torch.use_layout(PACKING)
    out = weft.torch.context_parallel_attention(q, q, q, PACKING, causal=True, schedule=schedule)
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
    "killed": ["all_gather", "ring", "all_to_all", "hybrid", "exact"],
    "killed before the backward": ["ring", "exact"],
    "wrong rows": ["ring", "all_to_all"],
    "midway": ["all_gather", "ring", "hybrid"],
    "midway, and lives on": ["ring"],
    "late": ["ring", "all_gather"],
    "another problem": ["ring", "exact"],
}.items() for schedule in schedules}
WAYS["killed: micro-sequences"] = micro


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for number, (name, fn) in enumerate(WAYS.items()):
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        here = folder / str(number)
        ended = processes.fork(RANKS, fn, here, seconds=40, full_exit=number == 0)
        print(
            json.dumps(dict(way=name, ended=ended, said=[(here / f"rank{r}.txt").read_text() for r in range(RANKS)])), flush=True
        )
