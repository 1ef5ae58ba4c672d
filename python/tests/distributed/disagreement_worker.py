"""One rank of three is given something else, over gloo, without checked mode (test_disagreement.py): a line of JSON a way says
what each rank was told. `disagreement_worker.py FOLDER [BACKEND]`; each way has a process group of its own, which it breaks."""

import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import weft
import weft.torch

import processes

RANKS, ODD, LIMIT = 3, 1, 12.0
PACKING = [0, 24, 30, 54, 96]  # a multiple of 2 * RANKS, so that all layouts have as many rows
SCHEDULES = ["all_gather", "ring", "all_to_all", "exact", "mesh"]
DEVICE = ["cpu"]


def attend(group, packing=PACKING, heads=(6, 6), dim=64, dtype=torch.float32, passes="fb", layout="zigzag", **options):
    pack, rows = weft.Packing(packing), packing[-1] // RANKS
    made = [torch.randn(rows, h, dim, dtype=dtype, device=DEVICE[0], requires_grad=True) for h in (heads[0], heads[1], heads[1])]
    options = {"causal": True, **options}
    weft.torch.use_layout(pack, group, layout=layout)
    kept = []
    for which in passes:
        if which == "f":
            kept.append(weft.torch.context_parallel_attention(*made, pack, group=group, layout=layout, **options))
        else:
            out = kept.pop()
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()
    if DEVICE[0] != "cpu":  # where the verdict is read by the next call, or by check() after the last
        torch.cuda.synchronize()
        weft.torch.communicator(group).check()


# What the odd rank is given, part of what must be said, and what all ranks are given.
WAYS = {
    "cu_seqlens of the same total": (dict(packing=[0, 30, 36, 54, 96]), "the packing", {}),
    "cu_seqlens of another total": (dict(packing=[0, 24, 30, 54, 90]), "the packing", {}),
    "more documents": (dict(packing=[0, 24, 30, 54, 60, 96]), "the packing", {}),
    "causal": (dict(causal=False), "the mask", {}),
    "window": (dict(window=(7, 0)), "the mask", {}),
    "chunk": (dict(chunk_size=8), "the mask", {}),
    "alignment": (dict(bottom_right=True), "the mask", {}),
    "scale": (dict(scale=0.5), "the attention", {}),
    "softcap": (dict(softcap=10.0), "the attention", {}),
    "sink": (dict(sink="off_by_one"), "the attention", {}),
    "layout": (dict(layout="contiguous"), "the layout", {}),
    "schedule": (dict(schedule="ring"), "the schedule", dict(schedule="all_gather")),
    "option of a schedule": (dict(schedule=weft.Schedule("all_gather", head_groups=3)), "the schedule",
                             dict(schedule="all_gather")),
    "deterministic": (dict(deterministic=True), "the schedule", {}),
    "query heads": (dict(heads=(12, 6)), "shapes", {}),
    "K/V heads": (dict(heads=(6, 3)), "shapes", {}),
    "head map": (dict(head_map=[0, 0, 1, 1, 2, 5]), "shapes", dict(head_map=[0, 1, 2, 3, 4, 5])),
    "dim": (dict(dim=32), "shapes", {}),
    "dtype": (dict(dtype=torch.float16), "shapes", dict(dtype=torch.bfloat16)),
    "max_logit": (dict(return_max_logit=True), "shapes", {}),
    "a backward left out": (dict(passes="ffbb"), "in pass 2, a forward", dict(passes="fbfb")),
}


def said_by(call):
    """What it was refused with; None if it was not."""
    try:
        call()
    except weft.Error as e:
        return str(e)
    return None


def run(rank, folder, names):
    file = Path(folder) / f"told{rank}.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for number, (name, (odd, named, everybody)) in enumerate(WAYS.items()):
        if name not in names:
            continue
        group = dist.new_group(list(range(RANKS)))
        weft.torch.communicator(group, time_limit=LIMIT)
        options = {"schedule": SCHEDULES[number % len(SCHEDULES)], **everybody, **(odd if rank == ODD else {})}
        begin = time.monotonic()
        told = said_by(lambda: attend(group, **options))
        if DEVICE[0] != "cpu":  # all have looked, so that a rank whose neighbours agree learns it of the others
            dist.all_reduce(torch.zeros(1))
            told = told or said_by(weft.torch.communicator(group).check)
        results[name] = dict(told=told, named=named, seconds=time.monotonic() - begin)
        print(name, f"{time.monotonic() - begin:.1f} s", told, flush=True)
        file.write_text(json.dumps(results))


def check_told(told, way):
    """What each rank has written of a way: all were told in time, what differs and on which rank."""
    for rank in range(RANKS):
        text, seconds = told[rank][way]["told"], told[rank][way]["seconds"]
        assert text, f"rank {rank} was not told"
        assert seconds < LIMIT, f"rank {rank} was told after {seconds:.1f} s: {text}"
        assert told[rank][way]["named"] in text, f"rank {rank}: {text}"
        assert re.search(rf"ranks? ([\d, ]*|\d and ){ODD}\b", text), text


if __name__ == "__main__":
    folder, *backend = sys.argv[1:]
    if backend and "nccl" in backend[0]:
        DEVICE[0] = "cuda"
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # each way breaks a group, for which torch would end the process
    # NCCL takes a minute now and then to begin where it has given up several connections of the same process.
    names, statuses, each = list(WAYS), [], 3 if DEVICE[0] == "cuda" else len(WAYS)
    for first in range(0, len(names), each):
        some = names[first:first + each]
        ended = processes.fork(RANKS, lambda rank, some=some: run(rank, folder, some), Path(folder) / f"ranks{first}",
                               seconds=240 if each > 3 else 60, backend=backend[0] if backend else "gloo")
        statuses += [status for status, _ in ended]
        for text in sorted((Path(folder) / f"ranks{first}").glob("rank*.txt")):
            with (Path(folder) / text.name).open("a") as all_of:
                all_of.write(text.read_text())
    sys.exit(any(statuses))
