"""Four processes that share a GPU, over a group of gloo or NCCL; every schedule against one rank (test_cuda_ranks.py)."""

import sys

import torch
import weft
import weft.torch

import processes

RANKS = 4


def rank(number):
    import gpu

    *inputs, dout = gpu.tensors(heads=(4, 4))
    one = gpu.run(inputs, dout, causal=True, one_rank=True)
    for schedule in gpu.SCHEDULES:
        parts = [weft.torch.shard(x, gpu.PACKING) for x in (*inputs, dout)]
        for checked in (False, True):
            got = gpu.run(parts[:3], parts[3], causal=True, schedule=schedule, checked=checked)
            gpu.assert_near([weft.torch.unshard(x, gpu.PACKING) for x in got], one, "f32")
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(any(status for status, _ in processes.fork(RANKS, rank, sys.argv[1], seconds=100, backend=sys.argv[2])))
