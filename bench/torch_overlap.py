#!/usr/bin/env python3
"""How much of the exchange runs under attention, over torch's process group of NCCL, as torch.profiler records kernels.

    PYTHONPATH=build/gpu/python python bench/torch_overlap.py [--ranks 2] [--tokens 32768] [--heads 32:4] [--trace FOLDER]

Ranks are processes with a GPU each, or all on one, where messages go by sockets and take long. One forward and backward of
ring and of all_gather in groups of heads, after one to warm up. A line a rank and schedule: the time in kernels of NCCL
(exchange), in kernels of Weft that attend (compute), and in both at once; the share is of the smaller of the two, which is
the most that can overlap. Exits with 1 if on some rank nothing overlaps. --trace: writes traces for chrome://tracing there.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from pathlib import Path

SCHEDULES = {"ring": ("ring", {}), "all_gather, 4 groups": ("all_gather", dict(key_order="rank", head_groups=4))}
ATTENDS = ("forward_kernel", "backward_kernel", "backward_wide_kernel", "dq_kernel")


def joined(intervals):
    """Sorted intervals without overlaps."""
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def total(intervals):
    return sum(end - begin for begin, end in intervals)


def common(a, b):
    """What two lists of joined intervals have in common."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append([begin, end])
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def measured(events):
    """(exchange, compute, both) in microseconds, of the events of a trace."""
    kernels = [(e["name"], [e["ts"], e["ts"] + e["dur"]]) for e in events if e.get("cat") == "kernel"]
    exchange = joined([at for name, at in kernels if "nccl" in name.lower()])
    compute = joined([at for name, at in kernels if "weft" in name and any(word in name for word in ATTENDS)])
    return total(exchange), total(compute), total(common(exchange, compute))


def rank(number, ranks, args, folder, results):
    import torch
    import torch.distributed as dist
    import weft
    import weft.torch

    gpus = torch.cuda.device_count()
    if gpus < ranks:  # NCCL refuses two ranks of one host on one GPU
        os.environ.update(NCCL_HOSTID=f"host{number}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(number % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/rendezvous", rank=number, world_size=ranks)
    packing = weft.Packing([0, args.tokens])
    weft.torch.use_layout(packing, layout="zigzag")  # rows are random numbers
    heads_q, heads_k = map(int, args.heads.split(":"))
    generator = torch.Generator(device="cuda").manual_seed(number)
    rows = args.tokens // ranks
    q, k, v, dout = (torch.randn(rows, heads, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
                     for heads in (heads_q, heads_k, heads_k, heads_q))
    said = {}
    for name, (kind, options) in SCHEDULES.items():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        how = weft.Schedule(kind, **options)

        def step(leaves=leaves, how=how):
            out = weft.torch.context_parallel_attention(*leaves, packing, causal=True, layout="zigzag", schedule=how)
            out.backward(dout)

        step()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        trace = Path(args.trace or folder) / f"{kind}.rank{number}.json"
        profiler.export_chrome_trace(str(trace))
        said[name] = measured(json.loads(trace.read_text())["traceEvents"])
    results[number] = said
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", default="32:4")
    parser.add_argument("--seconds", type=float, default=100, help="the ranks are ended after so many")
    parser.add_argument("--trace", help="a folder for the traces")
    args = parser.parse_args()
    if args.trace:
        os.makedirs(args.trace, exist_ok=True)
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, start.Manager() as manager:
        results = manager.dict()
        processes = [start.Process(target=rank, args=(n, args.ranks, args, folder, results)) for n in range(args.ranks)]
        for process in processes:
            process.start()
        end, running = time.monotonic() + args.seconds, processes
        while running and time.monotonic() < end and all(p.exitcode in (None, 0) for p in processes):
            multiprocessing.connection.wait([p.sentinel for p in running], 1.0)
            running = [p for p in processes if p.exitcode is None]
        for process in running:  # they wait for one that has failed
            process.kill()
            process.join()
        said = dict(results)
    if len(said) < args.ranks:
        return f"torch_overlap: {args.ranks - len(said)} of {args.ranks} ranks failed, see above"
    apart = 0
    for name in SCHEDULES:
        for number in range(args.ranks):
            exchange, compute, both = said[number][name]
            most = min(exchange, compute)
            share = 100 * both / most if most > 0 else 0.0
            apart += share == 0
            print(f"{name}, rank {number}: exchange {exchange / 1e3:.2f} ms, compute {compute / 1e3:.2f} ms, "
                  f"under compute: {both / 1e3:.2f} ms, {share:.0f} % of what can be")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
