"""Micro-sequences on two and four ranks against a dense softmax, document by document (test_distributed.py)."""

import functools
import itertools
import math
import sys

import torch
import torch.distributed as dist
import weft
import weft.torch

import processes

RANKS, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
PACKINGS = {
    "even": weft.Packing([0, 5, 14, 37, 48]),
    "ragged": weft.Packing([0, 5, 14, 20, 43]),  # does not divide: padded at the end
    "gaps": weft.Packing.from_lengths([5, 9, 22], multiple=8),
}
MASKS = {
    "causal": weft.Mask(causal=True),
    "window": weft.Mask(causal=True, window=(6, 0)),
    "chunked": weft.Mask(causal=True, chunk_size=7),
    "full": weft.Mask(),
    "both_sides": weft.Mask(window=(4, 3)),
}
AHEAD = ("full", "both_sides")  # look at keys that come later: one micro-sequence has them all
CASES = [f"{mask}-{packing}-{ranks} ranks-{micros} micros-{drop}"
         for mask, packing, ranks, micros, drop in itertools.product(MASKS, PACKINGS, (2, 4), (1, 3), ("kept", "dropped"))
         if micros == 1 or mask not in AHEAD]
CASES += ["sink and softcap", "bf16", "several calls under way", "no gradient wanted"]


def visible(mask, n):
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    left, right = mask.window
    seen = torch.ones(n, n, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if mask.causal:
        seen &= j <= i
    if mask.chunk_size:
        seen &= i // mask.chunk_size == j // mask.chunk_size
    return seen


class Projections(torch.nn.Module):
    """What a layer has around attention: gradients of these weights are what training needs."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.register_parameter(
                name, torch.nn.Parameter((torch.randn(12, heads * DIM, generator=g) / math.sqrt(12)).to(dtype))
            )
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, HEADS).to(dtype))

    def forward(self, x):
        return [(x @ w).unflatten(-1, (-1, DIM)) for w in (self.q, self.k, self.v)]


def inputs(packing):
    g = torch.Generator().manual_seed(0)
    return torch.randn(packing.tokens_q, 12, generator=g), torch.randn(packing.tokens_q, HEADS, DIM, generator=g)


def dense(packing, mask, *, sink=False, softcap=0.0):
    """(output of every token, gradients by name) in f64."""
    x, dout = (t.double() for t in inputs(packing))
    layer = Projections()
    out = torch.zeros_like(dout)
    for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q):
        q, k, v = layer(x[begin:begin + n])
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(DIM)
        logits = (softcap * torch.tanh(logits / softcap) if softcap else logits).masked_fill(~visible(mask, n), -math.inf)
        if sink:
            logits = torch.cat((logits, layer.sink[:, None, None].expand(-1, n, 1)), -1)
        here = torch.einsum("hij,jhd->ihd", logits.softmax(-1)[:, :, :n], v)
        (here * dout[begin:begin + n]).sum().backward()
        out[begin:begin + n] = here.detach()
    return out, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def rows_of(whole, micros, rank):
    """This rank's windows one after another; rows past the end are padding, and may hold anything."""
    padded = torch.cat((whole, torch.full((micros.padding, *whole.shape[1:]), torch.nan)))
    return torch.cat([padded[slice(*micros.rows(rank, m))] for m in range(micros.micros)])


def close(got, expected, what, tolerance=2e-5):
    worst = (got.double() - expected).abs().max().item()
    assert worst <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: off by {worst}"


def real_rows(packing, micros, rank):
    whole = weft.torch.valid_rows(packing, "")
    return torch.cat((whole, torch.zeros(micros.padding, dtype=torch.bool)))[
        torch.cat([torch.arange(*micros.rows(rank, m)) for m in range(micros.micros)])]


def check(packing, mask, group, count, *, drop=False, sink=False, softcap=0.0, dtype=torch.float32, tolerance=2e-5, calls=1):
    rank = dist.get_rank(group)
    micros = weft.prepare.MicroSequences(packing, ranks=dist.get_world_size(group), micros=count, pad=True)
    out, gradients = dense(packing, mask, sink=sink, softcap=softcap)
    layer = weft.torch.MicroSequenceAttention(mask=mask, drop=drop, softcap=softcap, group=group)
    model = Projections(dtype)
    x, dout = (rows_of(t, micros, rank).to(dtype) for t in inputs(packing))
    real = real_rows(packing, micros, rank)
    x[~real] = 0  # a matrix product would spread NaN; attention must not
    dout[~real] = 0
    results = []
    for _ in range(calls):  # all forwards first: each has a buffer until its backward
        q, k, v = model(x)
        results.append(layer(q, k, v, micros, sink=model.sink.float() if sink else None))
        close(results[-1][real], rows_of(out, micros, rank)[real], "out", tolerance)
        assert not results[-1][~real].any(), "padding is not 0"
    for here in results:
        (here * dout).sum().backward()
    for name, expected in gradients.items():
        total = getattr(model, name).grad.float()
        dist.all_reduce(total, group=group)
        close(total / calls, expected, f"gradient of {name}", tolerance)
    assert len(layer._free) == calls, "a buffer was lost"


def nan_in_padding(group):
    packing = PACKINGS["gaps"]
    micros = weft.prepare.MicroSequences(packing, ranks=dist.get_world_size(group), micros=2, pad=True)
    rank = dist.get_rank(group)
    real = real_rows(packing, micros, rank)
    tensors = [torch.randn(len(real), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    results = []
    for filler in (0.0, math.nan):
        leaves = [t.masked_fill(~real[:, None, None], filler).requires_grad_() for t in tensors]
        out = weft.torch.micro_sequence_attention(*leaves, micros, group=group)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def no_gradient_wanted(group):
    packing = PACKINGS["even"]
    micros = weft.prepare.MicroSequences(packing, ranks=dist.get_world_size(group), micros=2, pad=True)
    layer = weft.torch.MicroSequenceAttention(group=group)
    x = torch.randn(2 * micros.local, 2, DIM)
    for _ in range(3):
        with torch.no_grad():
            layer(x, x, x, micros)
    assert len(layer._free) == 1
    y = x.clone().requires_grad_()
    for wants in ((y, x, x), (x, y, x), (x, x, y)):  # a frozen projection
        y.grad = None
        layer(*wants, micros).sum().backward()
        assert y.grad is not None
    try:
        layer(x[1:], x[1:], x[1:], micros)
        raise AssertionError("too few rows were taken")
    except weft.Error as e:
        assert "windows" in str(e)
    out = layer(y, x, x, micros)
    out.sum().backward(retain_graph=True)
    try:
        out.sum().backward()
        raise AssertionError("a second backward was taken")
    except (weft.Error, RuntimeError) as e:
        assert "second backward" in str(e)


def run(name, groups):
    everyone = dist.group.WORLD
    if name == "sink and softcap":
        for group in (everyone, groups[2]):
            check(PACKINGS["ragged"], MASKS["window"], group, 3, sink=True, softcap=2.0)
            check(PACKINGS["even"], MASKS["causal"], group, 2, sink=True, drop=True)
    elif name == "bf16":
        check(PACKINGS["even"], MASKS["causal"], everyone, 3, dtype=torch.bfloat16, tolerance=4e-2)
    elif name == "several calls under way":
        check(PACKINGS["even"], MASKS["window"], everyone, 3, calls=3)
        check(PACKINGS["even"], MASKS["window"], everyone, 3, calls=2, drop=True)
        nan_in_padding(everyone)
    elif name == "no gradient wanted":
        no_gradient_wanted(everyone)
    else:
        mask, packing, ranks, micros, drop = name.split("-")
        check(PACKINGS[packing], MASKS[mask], groups[int(ranks[0])], int(micros[0]), drop=drop == "dropped")


def rank(rank, folder):
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])  # two pairs at once
    groups = {2: low if rank < 2 else high, 4: dist.group.WORLD}
    processes.run_cases(rank, {name: functools.partial(run, name, groups) for name in CASES}, folder)


if __name__ == "__main__":
    ended = processes.fork(RANKS, lambda number: rank(number, sys.argv[1]), sys.argv[1], seconds=240)
    sys.exit(any(status for status, _ in ended))
