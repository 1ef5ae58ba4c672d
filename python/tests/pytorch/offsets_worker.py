"""Processes over gloo: attention from cu_seqlens as tensors by every schedule, against one rank (test_offsets.py)."""

import sys

import torch
import torch.distributed as dist
import weft
import weft.torch
from weft.torch import offsets, rows

import processes

RANKS = 4


def rank(number):
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(72, h, 8, generator=generator) for h in (4, 2, 2, 4)]
    cu = torch.tensor([0, 13, 13, 40, 70], dtype=torch.int32)

    def run(inputs, dout, **how):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = offsets.attention(*inputs, cu_seqlens_q=cu, causal=True, **how)[0]
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    wanted = [rows.shard(x, cu, RANKS, number, layout="zigzag") for x in run(whole[:3], whole[3])]
    mine = [rows.shard(x, cu, RANKS, number, layout="zigzag") for x in whole]
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][number // 2]
    for schedule in ("all_gather", "ring", "all_to_all", weft.Schedule("hybrid", ulysses=2)):
        for _ in range(2):  # the second time by the executor of the first
            for got, want in zip(run(mine[:3], mine[3], group=None, schedule=schedule), wanted):
                assert torch.allclose(got, want, atol=2e-5), schedule
        # The same in groups of two, which have executors of their own.
        half = [rows.shard(x, cu, 2, number % 2, layout="zigzag") for x in (*whole, run(whole[:3], whole[3])[0])]
        got = run(half[:3], half[3], group=pair, schedule=schedule)[0]
        assert torch.allclose(got, half[4], atol=2e-5), schedule


if __name__ == "__main__":
    sys.exit(any(status for status, _ in processes.fork(RANKS, rank, sys.argv[1], seconds=100)))
