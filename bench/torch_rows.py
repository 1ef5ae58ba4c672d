"""Rows of bench/cuda/rows.cu from torch: by weft.torch.rows, and by index_select, as a framework without row kernels does."""

import torch

try:
    from weft.torch import rows
except ImportError:  # torch alone, for comparison
    rows = None


def rank_order(sequences, length, ranks):
    """Token of each row of dual_chunk rank order."""
    piece = length // (2 * ranks)
    t = torch.arange(sequences * length).view(sequences, 2 * ranks, piece)
    return torch.cat([t[:, [r, 2 * ranks - 1 - r]].reshape(-1) for r in range(ranks)]).cuda()


def replay(work, calls=20):
    """A function that replays `calls` calls and returns microseconds of one."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)

    def once():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * begin.elapsed_time(end) / calls

    return once


def median(values):
    return sorted(values)[len(values) // 2]


def line(what, work, copy, moved):
    """Interleaved with a plain copy of as many bytes."""
    times = [(copy(), work()) for _ in range(18)][3:]
    us, beside = median([b for _, b in times]), median([a for a, _ in times])
    share = 100 * median([a / b for a, b in times])
    print(f"| {what} | {us:.1f} | {moved / us / 1e3:.0f} | {beside:.1f} | {share:.1f} % |")


print("\n| rows, from torch | us | GB/s | copy, us | of copy |\n|---|---:|---:|---:|---:|")
for sequences, length in ((16, 4096), (4096, 16)):
    source = [torch.randn(sequences * length, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    target = [torch.empty_like(s) for s in source]
    moved = 2 * source[0].numel() * 2
    copy = replay(lambda i: target[i % 3].copy_(source[i % 3]))
    for ranks in (2, 4, 8):
        forth = rank_order(sequences, length, ranks)
        for name, index in (("to rank order", forth), ("to sequence order", torch.argsort(forth))):
            select = replay(lambda i: torch.index_select(source[i % 3], 0, index, out=target[i % 3]))
            line(f"index_select, {sequences} x {length}, {ranks} ranks, {name}", select, copy, moved)
        if rows is None or length % (2 * ranks):
            continue
        cu = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device="cuda")
        for move in (rows.sequence_to_rank_order, rows.rank_to_sequence_order):
            weft = replay(lambda i: move(source[i % 3], cu, ranks))
            line(f"{move.__name__}, {sequences} x {length}, {ranks} ranks", weft, copy, moved)
    if rows is not None:
        cu = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device="cuda")
        valid = replay(lambda i: rows.copy_valid_rows(source[i % 3], cu))
        line(f"copy_valid_rows, {sequences} x {length}", valid, copy, moved)
