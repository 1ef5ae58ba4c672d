"""torch's index_select of the same rows as bench/cuda/rows.cu: what a framework without row kernels does."""

import torch


def rank_order(sequences, length, ranks):
    """Token of each row of dual_chunk rank order."""
    piece = length // (2 * ranks)
    t = torch.arange(sequences * length).view(sequences, 2 * ranks, piece)
    return torch.cat([t[:, [r, 2 * ranks - 1 - r]].reshape(-1) for r in range(ranks)]).cuda()


def microseconds(work, calls=20, rounds=15):
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)
    times = []
    for _ in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return sorted(times[3:])[rounds // 2]


print("\n| torch index_select | us | GB/s |\n|---|---:|---:|")
for sequences, length in ((16, 4096), (4096, 16)):
    source = [torch.randn(sequences * length, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    target = [torch.empty_like(s) for s in source]
    moved = 2 * source[0].numel() * 2
    for ranks in (2, 4, 8):
        index = rank_order(sequences, length, ranks)
        us = microseconds(lambda i: torch.index_select(source[i % 3], 0, index, out=target[i % 3]))
        print(f"| {sequences} x {length}, {ranks} ranks | {us:.1f} | {moved / us / 1e3:.0f} |")
