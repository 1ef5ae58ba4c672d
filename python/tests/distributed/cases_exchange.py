"""Rows from one layout to another."""

import itertools

import torch
import torch.distributed as dist
import weft
import weft.torch
from torch.library import opcheck

from group_cases import CROSS, LAYOUTS, PADDED, SELF, case, compare, run, tensors
from refusals import refused

CAUSAL = weft.Mask(causal=True)


def pairs_of(packing):
    allowed = [x for x in LAYOUTS if x != "dual_chunk" or packing is not SELF]
    return itertools.product(allowed, allowed)


def expect_moved(packing, group=None, side="q", shape=(2, 3), dtype=torch.float32):
    tokens = packing.tokens_q if side == "q" else packing.tokens_k
    x = torch.randint(1, 100, (tokens, *shape)).to(dtype) if dtype != torch.bool else torch.rand(tokens, *shape) < 0.5
    dist.broadcast(x, 0)
    for first, second in pairs_of(packing):
        before = weft.torch.shard(x, packing, group, layout=first, side=side)
        wanted = weft.torch.shard(x, packing, group, layout=second, side=side)
        got = weft.torch.relayout(before, first, second, packing, group, side=side)
        assert got.dtype == dtype and torch.equal(got, wanted), f"{first} to {second}, {side}, {dtype}"


@case
def relayout_between_all_pairs():
    for packing in (SELF, PADDED):
        expect_moved(packing)
    expect_moved(CROSS, side="k")
    expect_moved(SELF, shape=(), dtype=torch.int64)
    expect_moved(SELF, shape=(5,), dtype=torch.bool)
    expect_moved(SELF, shape=(1, 2, 2), dtype=torch.bfloat16)


@case
def relayout_on_two_ranks():
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            x = torch.arange(SELF.tokens_q * 2.0).view(-1, 2)
            for first, second in pairs_of(SELF):
                got = weft.torch.relayout(weft.torch.shard(x, SELF, group, layout=first), first, second, SELF, group)
                assert torch.equal(got, weft.torch.shard(x, SELF, group, layout=second)), f"{first} to {second}"


@case
def relayout_gradients():
    """The sum over ranks of <weight, relayout(x)> has the gradient of weight, moved back."""
    for first, second in (("zigzag", "contiguous"), ("balanced", "striped"), ("contiguous", "contiguous")):
        x, weight = (t[..., 0].double() for t in tensors(SELF)[::3])
        mine = weft.torch.shard(x, SELF, layout=first).requires_grad_()
        out = weft.torch.relayout(mine, first, second, SELF)
        (out * weft.torch.shard(weight, SELF, layout=second)).sum().backward()
        assert torch.equal(mine.grad, weft.torch.shard(weight, SELF, layout=first)), f"{first} to {second}"
    # Every rank perturbs the same element of its own rows, and only sums over ranks are compared.
    mine = torch.randn(weft.Layout("zigzag", SELF, 4).rows, 1, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    weight = torch.randn(weft.Layout("contiguous", SELF, 4).rows, 1, dtype=torch.float64)

    def value(x):
        return (weft.torch.relayout(x, "zigzag", "contiguous", SELF) * weight).sum()

    (gradient,) = torch.autograd.grad(value(mine), mine)
    for row in range(mine.shape[0]):
        change = torch.zeros_like(mine)
        change[row] = 1e-3
        both = torch.stack([value(mine + change) - value(mine - change), torch.zeros((), dtype=torch.float64)]).detach()
        both[1] = gradient[row].sum() * 2e-3
        dist.all_reduce(both)
        assert abs(both[0] - both[1]) < 1e-9, (row, both)


@case
def relayout_operator():
    from weft.torch.relayout import _moves

    me = dist.get_rank()
    first, second = (weft.Layout(kind, SELF, 4) for kind in ("zigzag", "striped"))
    moves = _moves(first, second, me, "q", torch.device("cpu"))
    x = torch.randn(first.rows, 3, requires_grad=True)
    name = dist.group.WORLD.group_name
    arguments = (x, moves.send, moves.send_counts, moves.receive, moves.receive_counts, second.rows, name)
    opcheck(torch.ops.weft.exchange_rows.default, arguments, test_utils=("test_schema", "test_autograd_registration",
                                                                         "test_faketensor"))
    wanted = weft.torch.relayout(x, first, second)
    assert torch.equal(torch.ops.weft.exchange_rows(*arguments), wanted)


@case
def relayout_then_attention():
    """Attention under the new layout is allowed then, and right; under a third one it is refused."""
    group = dist.new_group([0, 1, 2, 3])
    packing = weft.Packing([0, 9, 30, 64])
    q, k, v, dout = tensors(packing)
    wanted = run(q, k, v, dout, packing, CAUSAL, one_rank=True)
    rows = [weft.torch.shard(x, packing, group, layout="contiguous") for x in (q, k, v, dout)]
    with refused("under contiguous"):
        run(*rows, packing, CAUSAL, group=group, layout="zigzag")
    rows = [weft.torch.relayout(x, "contiguous", "zigzag", packing, group) for x in rows]
    got = run(*rows, packing, CAUSAL, group=group, layout="zigzag", schedule="ring")
    for g, w in zip(got, wanted):
        back = weft.torch.relayout(g, "zigzag", "contiguous", packing, group)
        assert (back - weft.torch.shard(w, packing, group, layout="contiguous")).abs().max() < 1e-5
    with refused("attention under layout striped"):
        run(*rows, packing, CAUSAL, group=group, layout="striped")
    with refused("relayout under layout striped"):
        weft.torch.relayout(rows[0], "striped", "zigzag", packing, group)


@case
def relayout_refusals():
    rows = weft.Layout("zigzag", SELF, 4).rows
    with refused(f"x has shape [{rows + 1}, 2]", f"{rows} rows under layout zigzag"):
        weft.torch.relayout(torch.zeros(rows + 1, 2), "zigzag", "striped", SELF)
    with refused("of no packing"):
        weft.torch.relayout(torch.zeros(rows, 2), "zigzag", "striped")
    with refused("the layout is of 2 ranks, not 4"):
        weft.torch.relayout(torch.zeros(rows, 2), "zigzag", weft.Layout("zigzag", SELF, 2), SELF)
    with refused("the layout was made for"):
        weft.torch.relayout(torch.zeros(rows, 2), weft.Layout("zigzag", SELF, 4), weft.Layout("zigzag", PADDED, 4))
    compare(SELF, CAUSAL, dict(schedule="ring"))  # nobody has sent anything
