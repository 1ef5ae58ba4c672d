"""Counts the kernels of NCCL that calls launch on GPUs: `launches_worker.py FOLDER BACKEND`, two ranks (cuda/test_nccl.py).

The fingerprint of a pass travels with its first messages; that must take no launch: one kernel of NCCL's for each call. Over
"gloo" the messages of tensors on GPUs go by Weft's own NCCL, over "cpu:gloo,cuda:nccl" by torch's.
"""

import os
import sys
from pathlib import Path

import torch
import weft
import weft.torch
from torch.profiler import ProfilerActivity, profile

import processes

RANKS, CU = 2, [0, 700, 1000, 2048]


def moved(record):
    """The numbers of calls that moved bytes."""
    return {int(line.split()[0][1:]) for line in record.splitlines() if " bytes " in line}


def run(rank):
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    comm, pack = weft.torch.communicator(), weft.Packing(CU)
    x = torch.randn(CU[-1] // RANKS, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weft.torch.use_layout(pack, layout="zigzag")
    for schedule in ("ring", "all_gather", "all_to_all", "exact", "mesh"):
        def attend(schedule=schedule):
            out = weft.torch.context_parallel_attention(x, x, x, pack, causal=True, schedule=schedule, layout="zigzag")
            out.backward(out.detach())
            torch.cuda.synchronize()

        for _ in range(2):
            attend()
        before = moved(comm.flight_record())
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            attend()
        calls = moved(comm.flight_record()) - before
        names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        nccl = [name for name in names if name.startswith("nccl") and "Kernel" in name]
        copies = [name for name in names if name.startswith("Memcpy")]
        print(f"{schedule}: {len(calls)} calls, {len(nccl)} kernels of NCCL, {len(names)} in all, {len(copies)} copies")
        assert calls and len(nccl) == len(calls), (schedule, calls, names)


if __name__ == "__main__":
    folder, backend = sys.argv[1:]
    ended = processes.fork(RANKS, run, folder, seconds=100, backend=backend)
    print((Path(folder) / "rank0.txt").read_text())
    sys.exit(any(status for status, _ in ended))
