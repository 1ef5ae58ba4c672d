"""What four ranks over gloo must agree on with one (test_distributed.py). A case runs on every rank, in the same order."""

import contextlib
import copy
import gc
import itertools
import json
import sys
import time
import traceback

import numpy as np
import processes
import torch
import torch._dynamo  # once, before ranks are forked
import torch.distributed as dist
import weft
import weft.torch
from torch.utils.checkpoint import checkpoint

RANKS = 4
FOLDER = sys.argv[1] if __name__ == "__main__" else None
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


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
    "all_gather_groups": dict(schedule=weft.Schedule("all_gather", head_groups=2)),
    "ring": dict(schedule="ring"),
    "ring_single": dict(schedule=weft.Schedule("ring", ranks_per_step=1)),
    "all_to_all": dict(schedule="all_to_all"),
    "hybrid": dict(schedule=weft.Schedule("hybrid", ulysses=2, outer="ring")),
    "hybrid_gather": dict(schedule=weft.Schedule("hybrid", ulysses=2, outer="all_gather")),
    "exact": dict(schedule=weft.Schedule("exact", stages=2)),
}
LAYOUTS = ["zigzag", "contiguous", "striped", "balanced", "dual_chunk"]


def tensors(packing, seed=0, *, heads=(4, 2), dim=8, dim_v=12, dtype=torch.float32):
    """q, k, v, dout of all tokens, the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    shapes = (packing.tokens_q, heads[0], dim), (packing.tokens_k, heads[1], dim), (packing.tokens_k, heads[1], dim_v), (packing.tokens_q, heads[0], dim_v)
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def close(got, expected, what, tolerance=2e-5):
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
    dealt = dict(layout_mask=mask) if layout == "balanced" else {}
    got = run(*rows, packing, mask, group=group, layout=layout, sink=sink, **dealt, **how)
    real = [weft.torch.valid_rows(packing, group, layout=layout, mask=mask, side=side) for side in "qk"]
    for g, e, side, name in zip(got, expected, "qqkk", ("out", "dq", "dk", "dv")):
        e = weft.torch.shard(e, packing, group, layout=layout, mask=mask, side=side)
        close(g, e, f"{name} of {how}, {layout}, {mask}", tolerance)
        assert not g[~real["qk".index(side)]].any(), f"{name}: padding is not 0"
    if sink is not None:  # parameters' gradients are summed over the group
        total = got[4].clone()
        dist.all_reduce(total, group=group)
        close(total, expected[4], f"dsink of {how}", tolerance)


def _combination(schedule, layout, mask):
    def check():
        if mask == "cross":
            packing = CROSS
        elif mask == "slices":
            packing = SELF if layout != "dual_chunk" else weft.Packing([0, 8, 16, 40, 64])
        else:
            packing = PADDED if layout == "dual_chunk" else SELF
        compare(packing, MASKS[mask], SCHEDULES[schedule], layout=layout)
    return check


for _s, _l, _m in itertools.product(SCHEDULES, LAYOUTS, MASKS):
    CASES[f"{_s}-{_l}-{_m}"] = _combination(_s, _l, _m)


@case
def f64_to_its_last_digits():
    """What ranks sum is f64 too, and no kernel needs a name."""
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    for how in [*SCHEDULES.values(), dict(schedule="auto"), dict(schedule="ring", checked=True)]:
        compare(SELF, MASKS["causal"], how, sink=sink, dtype=torch.float64, tolerance=1e-14)


@case
def batches():
    """bshd and sbhd with dual_chunk: a rank's rows of a batch are a batch."""
    batch, length = 3, 16
    packing = weft.Packing.from_batch(batch, length, seqused_q=[16, 5, 11])
    comm = weft.torch.communicator()
    for format, axis in (("bshd", 1), ("sbhd", 0)):
        flat = tensors(packing)
        whole = [x.unflatten(0, (batch, length)) for x in flat]
        if format == "sbhd":
            whole = [x.transpose(0, 1).contiguous() for x in whole]
        mask = weft.Mask(causal=True)
        expected = run(*whole, packing, mask, one_rank=True, format=format)
        for layout, schedule in itertools.product(("dual_chunk", "striped"), ("all_gather", "ring", "all_to_all")):
            if layout == "striped" and schedule == "all_gather":
                schedule = weft.Schedule("all_gather", key_order="rank")
            rows = [weft.shard(x, comm, packing=packing, layout=layout, format=format) for x in whole]
            assert rows[0].shape[axis] == length // RANKS
            for g, e in zip(run(*rows, packing, mask, format=format, layout=layout, schedule=schedule), expected):
                close(g, weft.shard(e, comm, packing=packing, layout=layout, format=format), f"{format}, {layout}, {schedule}")
    try:
        run(*(x[:, :4] for x in whole), packing, format="bshd", layout="zigzag")
        raise AssertionError("a batch with zigzag was not refused")
    except weft.Error as e:
        assert "dual_chunk" in str(e)


@case
def sinks():
    logits = torch.linspace(-1, 1, 4)
    for how in SCHEDULES.values():
        compare(SELF, MASKS["window"], how, sink=logits)
    whole = tensors(SELF)
    rows = [weft.torch.shard(x, SELF) for x in whole]
    expected = run(*whole, SELF, causal=True, one_rank=True)
    one = weft.torch.context_parallel_attention(*whole[:3], SELF, causal=True, sink="off_by_one", one_rank=True)
    got = weft.torch.context_parallel_attention(*rows[:3], SELF, causal=True, sink="off_by_one", schedule="ring")
    close(got, weft.torch.shard(one, SELF), "off_by_one")
    assert (one - expected[0]).abs().max() > 1e-3


@case
def a_sink_of_a_layer_is_trained_as_on_one_rank():
    q, k, v, dout = tensors(SELF)
    one = weft.torch.ContextParallelAttention(sink="learnable", heads=4, one_rank=True)
    many = weft.torch.ContextParallelAttention(sink="learnable", heads=4, schedule="ring")
    (one(q, k, v, SELF) * dout).sum().backward()
    rows = [weft.torch.shard(x, SELF) for x in (q, k, v, dout)]
    (many(*rows[:3], SELF) * rows[3]).sum().backward()
    dist.all_reduce(many.sink.grad)
    close(many.sink.grad, one.sink.grad, "the layer's sink")


@case
def lse_and_max_logit():
    whole = tensors(SELF)
    _, lse, largest = weft.torch.context_parallel_attention(*whole[:3], SELF, causal=True, softcap=5.0, one_rank=True, return_lse=True, return_max_logit=True)
    rows = [weft.torch.shard(x, SELF).requires_grad_() for x in whole]
    for how in SCHEDULES.values():
        out, lse_here, largest_here = weft.torch.context_parallel_attention(*rows[:3], SELF, causal=True, softcap=5.0, return_lse=True, return_max_logit=True, **how)
        real = weft.torch.valid_rows(SELF)
        close(lse_here[real], weft.torch.shard(lse, SELF)[real], "lse")
        close(largest_here, largest, "max_logit")
        assert out.requires_grad and not lse_here.requires_grad and not largest_here.requires_grad


@case
def half_precision():
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for how in SCHEDULES.values():
            compare(SELF, MASKS["causal"], how, dtype=dtype, tolerance=bound)


@case
def one_kv_head_and_heads_that_do_not_divide():
    for heads in ((4, 1), (6, 3), (3, 3), (2, 1)):
        for name in ("all_to_all", "hybrid", "ring"):
            compare(SELF, MASKS["causal"], SCHEDULES[name], heads=heads)
    how = dict(schedule="all_to_all", head_map=[1, 0, 1, 1])
    whole = tensors(SELF)
    rows = [weft.torch.shard(x, SELF) for x in whole]
    for g, e in zip(run(*rows, SELF, causal=True, **how), run(*whole, SELF, causal=True, one_rank=True, head_map=[1, 0, 1, 1])):
        close(g, weft.torch.shard(e, SELF), "head_map")


@case
def all_gather_has_the_bits_of_one_rank():
    whole = tensors(SELF)
    out = run(*whole, SELF, causal=True, one_rank=True)[0]
    for layout in ("zigzag", "contiguous", "balanced"):
        rows = [weft.torch.shard(x, SELF, layout=layout, mask=MASKS["causal"]) for x in whole]
        got = run(*rows, SELF, causal=True, layout=layout, layout_mask=MASKS["causal"])[0]
        assert torch.equal(got, weft.torch.shard(out, SELF, layout=layout, mask=MASKS["causal"])), layout


@case
def layers_of_other_masks_on_a_balanced_layout():
    """Rows are dealt out once, by one mask; every layer may have its own."""
    whole, causal = tensors(SELF), MASKS["causal"]
    rows = [weft.torch.shard(x, SELF, layout="balanced", mask=causal) for x in whole]
    for window in ((-1, 0), (5, 0), (3, 4)):
        mask = weft.Mask(window=window)
        for g, e in zip(run(*rows, SELF, mask, layout="balanced", layout_mask=causal), run(*whole, SELF, mask, one_rank=True)):
            close(g, weft.torch.shard(e, SELF, layout="balanced", mask=causal), f"window {window}")
    assert torch.equal(run(*rows, SELF, causal, layout="balanced")[0], run(*rows, SELF, causal, layout_mask=causal)[0])


@case
def gradients_have_the_same_bits_every_time():
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]
    for how in SCHEDULES.values():
        first = run(*rows, SELF, causal=True, deterministic=True, **how)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(*rows, SELF, causal=True, deterministic=True, **how)))


@case
def groups():
    """Some ranks of the world, two groups at once, a rank in several; by object and by name."""
    odd, low, high = dist.new_group([1, 3]), dist.new_group([0, 1]), dist.new_group([2, 3])
    me = dist.get_rank()
    if me in (1, 3):
        compare(SELF, MASKS["causal"], dict(schedule="ring"), group=odd)
        compare(SELF, MASKS["window"], dict(schedule="exact"), group=odd.group_name)
    mine = low if me < 2 else high
    for how in (SCHEDULES["ring"], SCHEDULES["all_to_all"], SCHEDULES["all_gather"]):
        compare(SELF, MASKS["chunked"], how, group=mine, seed=me // 2)
        compare(SELF, MASKS["causal"], how)  # the world in between
        if me in (1, 3):
            compare(PADDED, MASKS["causal"], how, group=odd, layout="dual_chunk")
    if me in (0, 2):
        try:
            weft.torch.position_ids(SELF, odd)
            raise AssertionError("a group that this rank is not in was taken")
        except weft.Error as e:
            assert "group" in str(e)


@case
def ranks_of_different_groups_forget_different_problems():
    """Ranks 1 and 3 meet many more problems than 0 and 2, and checked executors are made together."""
    odd = dist.new_group([1, 3])
    compare(SELF, MASKS["causal"], dict(schedule="hybrid", checked=True))
    if dist.get_rank() in (1, 3):
        for n in range(20):
            compare(weft.Packing([0, 4, 10 + n]), MASKS["causal"], dict(schedule="ring", checked=True), group=odd)
    compare(SELF, MASKS["causal"], dict(schedule="hybrid", checked=True))


@case
def recomputation():
    """A whole layer in a checkpoint: attention runs again in the backward, at the same place on every rank."""
    whole = tensors(SELF)
    expected = run(*whole, SELF, causal=True, one_rank=True)
    rows = [weft.torch.shard(x, SELF) for x in whole]
    for reentrant, how in itertools.product((False, True), SCHEDULES.values()):
        leaves = [x.clone().requires_grad_() for x in rows[:3]]
        layer = weft.torch.ContextParallelAttention(causal=True, **how)
        out = checkpoint(lambda *x: layer(*x, SELF), *leaves, use_reentrant=reentrant)
        out.backward(rows[3])
        for leaf, e in zip(leaves, expected[1:]):
            close(leaf.grad, weft.torch.shard(e, SELF), f"recomputed, {how}")


class _Layer(torch.nn.Module):
    def __init__(self, group, how):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(8, 8, generator=g))
        self.attention = weft.torch.ContextParallelAttention(causal=True, group=group, sink="learnable", heads=4, **how)

    def forward(self, q, k, v, packing, chunk_size=None):
        return self.attention(q @ self.weight, k, v, packing, chunk_size=chunk_size).sin()


@case
def compiled():
    """A layer over a group in one graph, with packings of several sizes."""
    group = dist.new_group([0, 1, 2, 3])
    for name in ("ring", "all_to_all"):
        torch._dynamo.reset()
        layer = _Layer(group, SCHEDULES[name])
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for packing, chunk in ((SELF, None), (weft.Packing([0, 20, 50]), None), (weft.Packing([0, 1, 2, 40]), 6), (SELF, 9)):
            rows = [weft.torch.shard(x, packing, group) for x in tensors(packing)]
            results = []
            for run_it, packed in ((layer, packing), (fast, weft.torch.pack(packing))):
                layer.zero_grad()
                leaves = [x.clone().requires_grad_() for x in rows[:3]]
                out = run_it(*leaves, packed, chunk_size=chunk)
                out.backward(rows[3])
                results.append([out.detach(), *(x.grad for x in leaves), layer.weight.grad.clone(), layer.attention.sink.grad.clone()])
            for a, b in zip(*results):
                close(a, b, f"compiled, {packing}", 1e-6)


@case
def compiled_and_recomputed():
    torch._dynamo.reset()
    layer = _Layer(None, SCHEDULES["ring"])
    fast = torch.compile(lambda *x: checkpoint(layer, *x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]
    results = []
    for run_it in (layer, fast):
        leaves = [x.clone().requires_grad_() for x in rows[:3]]
        run_it(*leaves, weft.torch.pack(SELF)).backward(rows[3])
        results.append([x.grad for x in leaves])
    for a, b in zip(*results):
        close(a, b, "compiled and recomputed", 1e-6)


@case
def distributed_data_parallel():
    """It averages gradients, and moves them while the backward still moves keys over the same group."""
    whole = tensors(SELF)
    rows = [weft.torch.shard(x, SELF) for x in whole]
    one, many = _Layer(None, dict(one_rank=True)), _Layer(None, dict(schedule="ring"))
    (one(*whole[:3], SELF) * whole[3]).sum().backward()
    parallel = torch.nn.parallel.DistributedDataParallel(many, bucket_cap_mb=1e-4)
    for _ in range(2):
        many.zero_grad()
        (RANKS * parallel(*rows[:3], SELF) * rows[3]).sum().backward()
        for (name, p), q in zip(many.named_parameters(), one.parameters()):
            close(p.grad, q.grad, name)


@case
def rows_there_and_back():
    for layout, packing in [*((name, SELF) for name in LAYOUTS[:4]), *((name, PADDED) for name in LAYOUTS)]:
        mask = MASKS["causal"]
        place = dict(layout=layout, mask=mask)
        ids = torch.arange(1, packing.tokens_q + 1)
        mine = weft.torch.shard(ids, packing, **place)
        assert torch.equal(weft.torch.unshard(mine, packing, **place), ids), layout
        batch = weft.torch.shard(ids[None], packing, dim=1, **place)
        assert torch.equal(batch[0], mine) and torch.equal(weft.torch.unshard(batch, packing, dim=1, **place)[0], ids)
        # Positions, real rows and labels are those of the tokens that lie here.
        everything = torch.full((packing.tokens_q,), -1)
        for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q):
            everything[begin:begin + n] = torch.arange(n)
        real = weft.torch.valid_rows(packing, **place)
        expected = weft.torch.shard(everything, packing, fill=-1, **place)
        assert torch.equal(expected >= 0, real)
        assert torch.equal(weft.torch.position_ids(packing, **place), expected.clamp(min=0))
        labels = weft.torch.shard(weft.torch.next_token_labels(ids, packing), packing, fill=-100, **place)
        for token, label in zip(mine.tolist(), labels.tolist()):
            last = any(token == begin + n for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q))
            unreal = token == 0 or everything[token - 1] < 0
            assert label == (-100 if last or unreal else token + 1), (layout, token, label)
        count = torch.tensor([(labels >= 0).sum()])
        dist.all_reduce(count)
        assert count.item() == int(np.maximum(packing.lengths_q - 1, 0).sum())


@case
def copies():
    group = dist.new_group([0, 1, 2, 3])
    rows = [weft.torch.shard(x, SELF, group) for x in tensors(SELF)[:3]]
    layer = weft.torch.ContextParallelAttention(group=group, sink="learnable", heads=4)
    out = layer(*rows, SELF)
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), out)
    micros = weft.prepare.MicroSequences(SELF, ranks=4, micros=2, pad=True)
    micro = weft.torch.MicroSequenceAttention(group=group)
    x = torch.randn(2 * micros.local, 2, 8)
    assert torch.equal(micro(x, x, x, micros), copy.deepcopy(micro)(x, x, x, micros))


@case
def checked_mismatches_name_the_ranks():
    """And the group is as good as before."""
    me = dist.get_rank()
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]

    def wrong(text, *args, **options):
        try:
            run(*rows, *args, checked=True, **options)
        except weft.Error as e:
            assert text in str(e) and "rank 2" in str(e), str(e)
        else:
            raise AssertionError(f"{text}: nobody noticed")

    for _ in range(2):  # the second time the others' problem is known
        right = dict(causal=True, schedule="ring")
        assert run(*rows, SELF, checked=True, **right)
        other = weft.Packing([0, 9, 10, 33, 61])
        wrong("packing", other if me == 2 else SELF, **right)
        wrong("mask", SELF, causal=True, window=(2 if me == 2 else 3, 0), schedule="ring")
        wrong("schedule", SELF, causal=True, schedule="all_gather" if me == 2 else "ring")
        wrong("rank", SELF, scale=0.1 if me == 2 else 0.2, **right)
        compare(SELF, MASKS["causal"], dict(schedule="ring", checked=True))


def told(text, call):
    """Every rank gets an error with these words, and the group is as good as before."""
    try:
        call()
    except weft.Error as e:
        assert text in str(e), str(e)
    else:
        raise AssertionError(f"{text}: nobody noticed")
    compare(SELF, MASKS["causal"], dict(schedule="ring", checked=True))


@case
def checked_layouts_and_sinks():
    odd = dist.get_rank() == 2
    mine = weft.Mask() if odd else MASKS["causal"]
    rows = [weft.torch.shard(x, SELF, layout="balanced", mask=mine) for x in tensors(SELF)]
    told("layout: rank 2 differs from ranks 0, 1, 3",
         lambda: run(*rows, SELF, causal=True, layout="balanced", layout_mask=mine, checked=True))
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]
    sink = torch.tensor([1.0, 2.0, 3.0, 5.0 if odd else 4.0])
    told("values of the sink: rank 2 differs from ranks 0, 1, 3", lambda: run(*rows, SELF, causal=True, sink=sink, checked=True))


@case
def checked_ranks_out_of_step():
    """Rank 2 leaves out a layer, or makes one twice: all other things of the calls are alike."""
    odd = dist.get_rank() == 2
    rows = [[weft.torch.shard(x, SELF) for x in tensors(SELF, seed)] for seed in range(4)]
    layers = [weft.torch.ContextParallelAttention(schedule="ring", checked=True) for _ in range(4)]

    def forward(order):
        return [layers[n](*(x.requires_grad_() for x in rows[n][:3]), SELF) for n in order]

    first = layers[0].number
    told(f"rank 2 is at the forward of layer {first + 3}, ranks 0, 1, 3 are at the forward of layer {first + 2}",
         lambda: forward((0, 1, 3, 3) if odd else range(4)))
    told(f"rank 2 is at the forward of layer {first + 1}, ranks 0, 1, 3 are at the forward of layer {first + 2}",
         lambda: forward((0, 1, 1, 2) if odd else range(4)))

    def backward():
        out = forward(range(4))
        for n in (3, 1, 2, 0) if odd else (3, 2, 1, 0):
            out[n].sum().backward()

    told(f"rank 2 is at the backward of layer {first + 1}, ranks 0, 1, 3 are at the backward of layer {first + 2}", backward)


@case
def checked_backwards_of_other_forwards():
    """Without numbers of layers: each rank knows which of its forwards wrote what a backward is given."""
    odd = dist.get_rank() == 2
    rows = [[weft.torch.shard(x, SELF) for x in tensors(SELF, seed)] for seed in range(3)]

    def step(order):
        out = [weft.torch.context_parallel_attention(*(x.requires_grad_() for x in r[:3]), SELF, causal=True, checked=True) for r in rows]
        for n in order:
            out[n].sum().backward()

    step((0, 2, 1))
    told("the backward: out and lse are those of call", lambda: step((2, 0, 1) if odd else (2, 1, 0)))


@case
def checked_micro_sequences():
    odd = dist.get_rank() == 2
    micros = weft.prepare.MicroSequences(SELF, ranks=4, micros=2, pad=True)
    other = weft.prepare.MicroSequences(weft.Packing([0, 9, 10, 33, 61]), ranks=4, micros=2, pad=True)
    x = torch.randn(2 * micros.local, 2, 8, requires_grad=True)
    plain, checked = weft.torch.MicroSequenceAttention(), weft.torch.MicroSequenceAttention(checked=True)
    assert torch.equal(plain(x, x, x, micros), checked(x, x, x, micros))
    checked(x, x, x, micros).sum().backward()
    told("packing: rank 2 differs from ranks 0, 1, 3", lambda: checked(x, x, x, other if odd else micros))
    told("mask: rank 2 differs", lambda: checked(x, x, x, micros, mask=weft.Mask(causal=True, window=(2 if odd else 3, 0))))
    told("values of the sink: rank 2 differs", lambda: checked(x, x, x, micros, sink=torch.tensor([1.0, 3.0 if odd else 2.0])))
    again = weft.torch.MicroSequenceAttention(checked=True)
    told(f"rank 2 is at a new K/V buffer of layer {again.number}, ranks 0, 1, 3 are at a new K/V buffer of layer "
         f"{checked.number}", lambda: (again if odd else checked)(x, x, x, micros))


@case
def meshes():
    """A DeviceMesh of one dimension is a group; of several, the error says how to name one."""
    from torch.distributed.device_mesh import init_device_mesh

    flat, both = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    compare(SELF, MASKS["causal"], SCHEDULES["ring"], group=flat)
    compare(SELF, MASKS["window"], SCHEDULES["all_gather"], group=both["cp"], seed=dist.get_rank() // 2)
    layer = weft.torch.ContextParallelAttention(group=both["cp"])
    rows = [weft.torch.shard(x, SELF, both["cp"]) for x in tensors(SELF)[:3]]
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), layer(*rows, SELF))
    assert weft.torch.communicator(both["cp"]).ranks == 2
    for use in (weft.torch.shard, weft.torch.unshard):
        try:
            use(rows[0], SELF, both)
            raise AssertionError("a mesh of two dimensions was taken")
        except weft.Error as e:
            assert "2 dimensions" in str(e) and 'mesh["cp"]' in str(e), e


@case
def layouts_that_do_not_agree():
    """Over a group: unchecked and checked, attention and unshard, by group and by its communicator. The group stays whole."""
    packing, causal = weft.Packing([0, 9, 31, 77]), dict(causal=True, schedule="ring")
    x = tensors(packing)[0]

    def wrong(call, *words):
        try:
            call()
            raise AssertionError(f"{words}: nobody noticed")
        except weft.Error as e:
            assert all(word in str(e) for word in words), e

    group = dist.new_group([0, 1, 2, 3])
    contiguous = weft.torch.shard(x, packing, group, layout="contiguous")
    for checked in (False, True):
        wrong(lambda: run(*[contiguous] * 4, packing, group=group, checked=checked, **causal), "under layout balanced", "under contiguous",
              "weft.torch.use_layout")
    wrong(lambda: weft.torch.unshard(contiguous, packing, group), "unshard under layout balanced")
    run(*[contiguous] * 4, packing, group=group, layout="contiguous", **causal)
    weft.torch.use_layout(packing, group, layout="striped")
    run(*[contiguous] * 4, packing, group=group, layout="striped", **causal)
    # Of another group with as many ranks it is known how rows lie, until that group says otherwise.
    other = dist.new_group([0, 1, 2, 3])
    run(*[contiguous] * 4, packing, group=other, layout="contiguous", **causal)
    mine = weft.shard(x.numpy(), weft.torch.communicator(other), packing=packing)
    wrong(lambda: run(*[contiguous] * 4, packing, group=dist.new_group([0, 1, 2, 3]), layout="dual_chunk", **causal), "multiple of 2*ranks")
    wrong(lambda: run(*[torch.from_numpy(mine)] * 4, packing, group=other, layout="zigzag", **causal), "under balanced")
    run(*[torch.from_numpy(mine)] * 4, packing, group=other, **causal)


@case
def groups_that_end_are_forgotten():
    from weft import _placed
    from weft.torch import group as module

    group = dist.new_group([0, 1, 2, 3])
    weft.torch.position_ids(SELF, group)
    scope, name = module.scope_of(group), group.group_name
    assert any(key[0] is scope for key in _placed._known)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    weft.torch.position_ids(SELF)
    assert not any(key[0] is scope for key in _placed._known) and name not in module._scopes


@case
def messages_of_gpus():
    """The operations that NCCL is asked for, by gloo: ranks of a group, in the order of the lists, none for some ranks."""
    from weft.torch import group as module

    group = dist.new_group([3, 1, 2])
    if dist.get_rank() == 0:
        return
    transport, streams = module._Transport(group, 20.0), module._in_stream
    module._in_stream = lambda device, stream: contextlib.nullcontext()
    try:
        mine, got = transport.rank, [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
        to, back = (mine + 1) % 3, (mine - 1) % 3
        sent = [torch.full((8,), 10 * mine + i, dtype=torch.uint8) for i in range(2)]
        transport.exchange_on_gpu([(to, x) for x in sent], [(back, x) for x in got], 0, 0).wait()
        assert [x[0].item() for x in got] == [10 * back, 10 * back + 1], got
        if mine < 2:
            other = 1 - mine
            transport.exchange_on_gpu([(other, sent[0])], [(other, got[0])], 0, 0).wait()
            assert got[0][0].item() == 10 * other
    finally:
        module._in_stream = streams


@case
def a_world_by_the_name_of_one_that_ended():
    """The last case: the world ends, and another begins, in which ranks have other numbers."""
    me, group = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    compare(SELF, MASKS["causal"], dict(schedule="ring"))
    names = dist.group.WORLD.group_name, group.group_name
    dist.destroy_process_group()
    try:
        run(*tensors(SELF), SELF, group=names[1])
        raise AssertionError("a group that has ended was used")
    except weft.Error as e:
        assert names[1] in str(e)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/again", rank=RANKS - 1 - me, world_size=RANKS)
    assert dist.group.WORLD.group_name == names[0]
    weft.torch.communicator(time_limit=20)
    compare(SELF, MASKS["causal"], dict(schedule="ring"))


def rank(rank):
    results = {}
    for name, check in CASES.items():
        begin = time.perf_counter()
        try:
            check()
            results[name] = None
        except Exception:  # the others go on
            results[name] = f"rank {rank}: {traceback.format_exc()}"
        print(f"{time.perf_counter() - begin:.2f} s {name}", flush=True)
    with open(f"{FOLDER}/results{rank}.json", "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        CASES = {name: check for name, check in CASES.items() if any(part in name for part in sys.argv[2:])}
    ended = processes.fork(RANKS, rank, FOLDER, seconds=240)
    sys.exit(any(status for status, _ in ended))
