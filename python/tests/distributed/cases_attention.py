"""Attention of four ranks must be that of one. A case runs on every rank, in the same order."""

import itertools

import torch
import torch.distributed as dist
import weft
import weft.torch
from torch.utils.checkpoint import checkpoint

from group_cases import (
    CASES,
    CROSS,
    LAYOUTS,
    MASKS,
    PADDED,
    RANKS,
    SCHEDULES,
    SELF,
    case,
    close,
    compare,
    long_case,
    run,
    tensors,
)
from refusals import refused


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
    swaps = weft.Schedule("all_to_all", head_groups=4)  # two of them share K/V heads
    for how in [*SCHEDULES.values(), dict(schedule="auto"), dict(schedule="ring", checked=True), dict(schedule=swaps)]:
        compare(SELF, MASKS["causal"], how, sink=sink, dtype=torch.float64, tolerance=1e-14)


@case
def keys_made_of_a_latent():
    """expand=: rows of a latent move; gradients of its rows, and of the weights that all ranks expand with, are those of one."""
    weight = torch.randn(2, 8 + 12, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def expand(rows, positions, heads=slice(None)):
        k, v = torch.einsum("tw,hdw->thd", rows, weight[heads]).split([8, 12], -1)
        return k * torch.cos(0.1 * positions)[:, None, None], v

    weight.requires_grad_()
    q, _, _, dout = (x.double() for x in tensors(PADDED))
    latent = torch.randn(PADDED.tokens_k, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(PADDED.cu_seqlens_q_padded.tolist())])
    inputs = [q.requires_grad_(), latent.requires_grad_(), weight]
    out = weft.torch.context_parallel_attention(q, *expand(latent, positions), PADDED, causal=True, one_rank=True)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    for how in (how for name, how in SCHEDULES.items() if "mesh" not in name):  # which is refused
        for layout in ("zigzag", "placed"):
            mine = [weft.torch.shard(x.detach(), PADDED, layout=layout).requires_grad_() for x in (q, latent)]
            out = weft.torch.context_parallel_attention(*mine, PADDED, causal=True, layout=layout, expand=expand, **how)
            got = torch.autograd.grad(out, [*mine, weight], weft.torch.shard(dout, PADDED, layout=layout))
            for g, e, name in zip((out, *got[:2]), expected, ("out", "dq", "dlatent")):
                close(g, weft.torch.shard(e, PADDED, layout=layout), f"{name}, {how}", 1e-12)
            share = got[2].clone()
            dist.all_reduce(share)
            close(share, expected[3], f"dweight, {how}", 1e-12)


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
    with refused("dual_chunk"):
        run(*(x[:, :4] for x in whole), packing, format="bshd", layout="zigzag")


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
    _, lse, largest = weft.torch.context_parallel_attention(
        *whole[:3], SELF, causal=True, softcap=5.0, one_rank=True, return_lse=True, return_max_logit=True
    )
    rows = [weft.torch.shard(x, SELF).requires_grad_() for x in whole]
    for how in SCHEDULES.values():
        out, lse_here, largest_here = weft.torch.context_parallel_attention(
            *rows[:3], SELF, causal=True, softcap=5.0, return_lse=True, return_max_logit=True, **how
        )
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
    for layout in ("zigzag", "contiguous", "balanced", "placed"):
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
        with refused("group"):  # this rank is not in it
            weft.torch.position_ids(SELF, odd)


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


@long_case
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
                results.append(
                    [out.detach(), *(x.grad for x in leaves), layer.weight.grad.clone(), layer.attention.sink.grad.clone()]
                )
            for a, b in zip(*results):
                close(a, b, f"compiled, {packing}", 1e-6)


@long_case
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
