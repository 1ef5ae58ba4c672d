"""What cases of four ranks over gloo share: problems, and the comparison with one rank."""

import contextlib

import torch
import torch.distributed as dist
import weft
import weft.torch

from refusals import refused

RANKS = 4
CASES = {}
LONG = []  # those left to make test-all
DEVICE = ["cpu"]  # where tensors lie


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def long_case(fn):
    LONG.append(fn.__name__)
    return case(fn)


SELF = weft.Packing([0, 7, 10, 33, 61])
PADDED = weft.Packing.from_lengths([7, 3, 23, 0, 16], multiple=8)
CROSS = weft.Packing.from_lengths([7, 3, 20], [12, 3, 31], multiple=8)
SLICES = [[0, 10, 0, 7, -weft.UNLIMITED, 0], [10, 33, 0, 4, -weft.UNLIMITED, weft.UNLIMITED], [10, 33, 10, 33, -6, 2]]
MASKS = {
    "causal": weft.Mask(causal=True),
    "window": weft.Mask(causal=True, window=(5, 0)),
    "window_right": weft.Mask(window=(3, 4)),
    "chunked": weft.Mask(causal=True, chunk_size=6),
    "cross": weft.Mask(causal=True, bottom_right=True),
    "slices": weft.Mask(slices=SLICES),
}
SCHEDULES = {
    "all_gather": dict(schedule="all_gather"),
    "all_gather_groups": dict(schedule=weft.Schedule("all_gather", head_groups=2)), "ring": dict(schedule="ring"),
    "ring_single": dict(schedule=weft.Schedule("ring", ranks_per_step=1)), "all_to_all": dict(schedule="all_to_all"),
    "hybrid": dict(schedule=weft.Schedule("hybrid", ulysses=2, outer="ring")),
    "hybrid_gather": dict(schedule=weft.Schedule("hybrid", ulysses=2, outer="all_gather")),
    "exact": dict(schedule=weft.Schedule("exact", stages=2)),
    "exact_groups": dict(schedule=weft.Schedule("exact", head_groups=2)), "mesh": dict(schedule="mesh"),
    "mesh_single": dict(schedule=weft.Schedule("mesh", ranks_per_step=1)),
}
LAYOUTS = ["zigzag", "contiguous", "striped", "balanced", "placed", "dual_chunk"]


def tensors(packing, seed=0, *, heads=(4, 2), dim=8, dim_v=12, dtype=torch.float32):
    """q, k, v, dout of all tokens, the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    shapes = (
        (packing.tokens_q, heads[0], dim), (packing.tokens_k, heads[1], dim), (packing.tokens_k, heads[1], dim_v),
        (packing.tokens_q, heads[0], dim_v),
    )
    return [torch.randn(s, generator=g).to(dtype).to(DEVICE[0]) for s in shapes]


def close(got, expected, what, tolerance=2e-5):
    """The worst element decides."""
    worst = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    assert got.shape == expected.shape, f"{what}: {got.shape}, not {expected.shape}"
    assert worst <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: off by {worst}"


def run(q, k, v, dout, *args, sink=None, **options):
    """out, dq, dk, dv (and dsink)"""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)] + ([] if sink is None else [sink.clone().requires_grad_()])
    options = options if sink is None else {**options, "sink": leaves[3]}
    out = weft.torch.context_parallel_attention(*leaves[:3], *args, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(packing, mask, how, *, group=None, layout="zigzag", sink=None, tolerance=2e-5, **more):
    """This rank's rows of the answer on many ranks against those of the answer on one."""
    whole = tensors(packing, **more)
    expected = run(*whole, packing, mask, one_rank=True, sink=sink)
    rows = [weft.torch.shard(x, packing, group, layout=layout, mask=mask, side=side) for x, side in zip(whole, "qkkq")]
    dealt = dict(layout_mask=mask) if layout in ("balanced", "placed") else {}
    got = run(*rows, packing, mask, group=group, layout=layout, sink=sink, **dealt, **how)
    real = [weft.torch.valid_rows(packing, group, layout=layout, mask=mask, side=side, device=DEVICE[0]) for side in "qk"]
    for g, e, side, name in zip(got, expected, "qqkk", ("out", "dq", "dk", "dv")):
        e = weft.torch.shard(e, packing, group, layout=layout, mask=mask, side=side)
        close(g, e, f"{name} of {how}, {layout}, {mask}", tolerance)
        assert not g[~real["qk".index(side)]].any(), f"{name}: padding is not 0"
    if sink is not None:  # parameters' gradients are summed over the group
        total = got[4].clone()
        dist.all_reduce(total, group=group)
        close(total, expected[4], f"dsink of {how}", tolerance)


def told(text, call):
    """Every rank gets an error with these words, or none for None, and the group is as good as before."""
    with contextlib.nullcontext() if text is None else refused(text):
        call()
    compare(SELF, MASKS["causal"], dict(schedule="ring", checked=True))
