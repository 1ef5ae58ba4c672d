"""Micro-sequences on two and four ranks against a dense softmax, document by document (test_distributed.py)."""

import functools
import itertools
import math
import sys

import torch
import torch._dynamo  # once, before ranks are forked
import torch.distributed as dist
import weft
import weft.torch
from weft.torch.micro import windows_of

import dense
import processes
import small_decoder
from refusals import refused

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
OF = (MASKS, PACKINGS, (2, 4), (1, 3), ("kept", "dropped"))
ALL = [(sum(option.index(x) for option, x in zip(map(list, OF), of)), "{}-{}-{} ranks-{} micros-{}".format(*of))
       for of in itertools.product(*OF) if of[3] == 1 or of[0] not in AHEAD]
CASES = [name for parity, name in ALL if parity % 2 == 0]  # half of them, in which every two options meet
LONG = [name for parity, name in ALL if parity % 2 == 1]
CASES += ["sink and softcap", "bf16", "several calls under way", "no gradient wanted"]
CASES += ["steps", "steps, a decoder", "steps, micro-batches"]  # more in micro_steps_worker.py


def whole(packing, mask, sink, softcap):
    """q, k, v, dout, the sink's logits, and {name: what attention and its gradients are from the definition}, of all tokens."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(packing.tokens_q, heads, DIM, generator=g) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    logits = torch.linspace(-1, 1, HEADS) if sink else None
    side = packing.cu_seqlens_q_padded, packing.lengths_q, packing.tokens_q
    see = dense.visible(side, side, causal=mask.causal, window=mask.window, chunk_size=mask.chunk_size)
    q, k, v, dout = (x.double().numpy() for x in tensors)
    want = dense.Dense(q, k, v, see, softcap=softcap, sink=logits.double().numpy() if sink else None)
    values = {"out": want.out, **{name: gradient for name, (gradient, _) in want.backward(dout).items()}}
    return tensors, logits, {name: torch.from_numpy(value) for name, value in values.items()}


def rows_of(x, micros, rank):
    """This rank's windows one after another; rows past the end are padding, and may hold anything."""
    padded = torch.cat((x, torch.full((micros.padding, *x.shape[1:]), torch.nan)))
    return torch.cat([padded[slice(*micros.rows(rank, m))] for m in range(micros.micros)])


def close(got, expected, what, tolerance):
    worst = (got.double() - expected).abs().max().item()
    assert worst <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: off by {worst}"


def real_rows(packing, micros, rank):
    valid = weft.torch.valid_rows(packing, "")
    return torch.cat((valid, torch.zeros(micros.padding, dtype=torch.bool)))[
        torch.cat([torch.arange(*micros.rows(rank, m)) for m in range(micros.micros)])]


def one_at_a_time(layer, micros, inputs, logits, dout, *, recompute):
    """The output of all windows; the backward is done too."""
    rows, outs = windows_of(micros.cut, micros.rank), {}

    def loss(step):
        out = layer(*(x[rows[step.micro]] for x in inputs), step, sink=logits)
        outs[step.micro] = out.detach()
        return (out * dout[rows[step.micro]]).sum()

    micros.forward_backward(loss, recompute=recompute)
    return torch.cat([outs[m] for m in range(micros.micros)])


def check(packing, mask, group, count, *, drop=False, sink=False, softcap=0.0, dtype=torch.float32, tolerance=2e-5, calls=1,
          steps=False, recompute=False, checked=False, even_work=None):
    rank, ranks = (0, 1) if group == "" else (dist.get_rank(group), dist.get_world_size(group))
    micros = weft.prepare.MicroSequences(packing, ranks=ranks, micros=count, pad=True, even_work=even_work)
    tensors, logits, wanted = whole(packing, mask, sink, softcap)
    layer = weft.torch.MicroSequenceAttention(mask=mask, drop=drop, softcap=softcap, group=group, checked=checked)
    *inputs, dout = (rows_of(x, micros, rank).to(dtype).requires_grad_() for x in tensors)
    logits = logits.requires_grad_() if sink else None
    real = real_rows(packing, micros, rank)
    if steps:
        results = [one_at_a_time(layer, weft.torch.MicroSequences(packing, count, group, even_work=even_work), inputs, logits,
                                 dout.detach(), recompute=recompute)]
    else:
        # All forwards first: each has a buffer until its backward.
        results = [layer(*inputs, micros, sink=logits) for _ in range(calls)]
        for out in results:
            out.backward(dout.detach())
    for name, got in (*(("out", out) for out in results), *zip(("dq", "dk", "dv"), (x.grad / calls for x in inputs))):
        close(got[real], rows_of(wanted[name], micros, rank)[real], name, tolerance)
        assert not got[~real].any(), f"{name}: padding is not 0"
    if sink:
        if ranks > 1:
            dist.all_reduce(logits.grad, group=group)
        close(logits.grad / calls, wanted["dsink"], "dsink", tolerance)
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
    with refused("windows"):
        layer(x[1:], x[1:], x[1:], micros)
    out = layer(y, x, x, micros)
    out.sum().backward(retain_graph=True)
    with refused("second backward"):
        out.sum().backward()


def a_decoder(group, *ways):
    """Four layers driven micro by micro on all ranks, against the whole sequence on one."""
    packing = PACKINGS["ragged"]
    ids, labels = small_decoder.text(packing)
    want = small_decoder.Decoder()
    expected = want.whole_loss(packing, ids, labels)
    expected.backward()
    for count, how in ways:
        model = small_decoder.Decoder(group=group, **how)
        micros = weft.torch.MicroSequences(packing, count, group)
        loss = micros.forward_backward(lambda step: model.loss(step, ids, labels), recompute=count > 2)
        dist.all_reduce(loss, group=group)
        assert abs(loss - expected) <= 1e-6 * abs(expected), (loss, expected)
        for (name, p), q in zip(model.named_parameters(), want.parameters()):
            dist.all_reduce(p.grad, group=group)
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name


def micro_batches(group):
    """Two under way, forward and backward in turn as in a pipeline of 1F1B; a rank that takes another step is told."""
    layer = weft.torch.MicroSequenceAttention(group=group, checked=True)
    x = torch.randn(24, 2, DIM, requires_grad=True)

    def forward(n):
        micros = weft.torch.MicroSequences(weft.Packing([0, 24 * dist.get_world_size(group)]), 2, group, batch=n)
        return micros, [layer(*3 * [x[12 * step.micro:12 * step.micro + 12]], step).sum() for step in micros.forward_steps()]

    flights = [forward(0), forward(1)]
    for n in range(2, 5):
        micros, losses = flights.pop(0)
        for step in micros.backward_steps():
            step.backward(losses[step.micro])
        flights.append(forward(n))
    for micros, losses in flights:
        for step in micros.backward_steps():
            step.backward(losses[step.micro])
    assert len(layer._free) == 2
    count = 2 if dist.get_rank(group) else 4
    micros = weft.torch.MicroSequences(weft.Packing([0, 24 * dist.get_world_size(group)]), count, group)
    rows = torch.randn(micros.cut.local, 2, DIM)
    with refused("micro-sequences"):
        layer(rows, rows, rows, next(micros.forward_steps()))


def run(name, groups):
    everyone = dist.group.WORLD
    if name == "steps":
        check(PACKINGS["ragged"], MASKS["window"], everyone, 3, steps=True, checked=True, recompute=True, drop=True, sink=True)
        check(PACKINGS["gaps"], MASKS["causal"], groups[2], 2, steps=True, even_work=MASKS["causal"])
        check(PACKINGS["ragged"], MASKS["window"], everyone, 3, even_work=MASKS["causal"], drop=True)
        check(PACKINGS["even"], MASKS["causal"], everyone, 3, steps=True, dtype=torch.bfloat16, tolerance=4e-2)
    elif name == "steps, a decoder":
        a_decoder(everyone, (3, dict(drop=True)))
    elif name == "steps, micro-batches":
        micro_batches(everyone)
    elif name == "sink and softcap":
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


def run_ranks(cases, run, folder):
    """What the worker does: run(name, groups by ranks) of each case on all ranks."""

    def rank(rank):
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])  # two pairs at once
        groups = {1: "", 2: low if rank < 2 else high, 4: dist.group.WORLD}
        processes.run_cases(rank, {name: functools.partial(run, name, groups) for name in cases}, folder)

    ended = processes.fork(RANKS, rank, folder, seconds=240)
    sys.exit(any(status for status, _ in ended))


if __name__ == "__main__":
    run_ranks(LONG if sys.argv[2:] == ["long"] else CASES, run, sys.argv[1])
