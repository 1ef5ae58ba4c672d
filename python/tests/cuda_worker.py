"""Four processes that share a GPU, over a group of gloo or NCCL; every schedule against one rank (test_cuda.py)."""

import sys

import processes
import torch
import weft
import weft.torch

RANKS = 4


def rank(number):
    import test_cuda

    *inputs, dout = test_cuda.tensors(heads=(4, 4))
    one = test_cuda.run(inputs, dout, causal=True, one_rank=True)
    for schedule in test_cuda.SCHEDULES:
        parts = [weft.torch.shard(x, test_cuda.PACKING) for x in (*inputs, dout)]
        got = test_cuda.run(parts[:3], parts[3], causal=True, schedule=schedule)
        test_cuda.assert_near([weft.torch.unshard(x, test_cuda.PACKING) for x in got], one, "f32")
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(any(status for status, _ in processes.fork(RANKS, rank, sys.argv[1], seconds=100, backend=sys.argv[2])))
