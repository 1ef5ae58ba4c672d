"""Attention from cu_seqlens in the memory of a GPU, against the same packing on the host."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from weft.torch import offsets, rows

from gpu import DTYPES, LENGTHS, MASKS, OFFSETS, PACKING, TOKENS, needs_gpu, run, tensors
from refusals import refused

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import torch_graph

pytestmark = needs_gpu


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def device_run(inputs, dout, sink=None, **options):
    inputs = [x.detach().requires_grad_() for x in (*inputs, *([] if sink is None else [sink]))]
    out, lse, _ = offsets.attention(*inputs[:3], sink=inputs[3] if sink is not None else None, **options)
    out.backward(dout)
    return [out.detach(), lse, *(x.grad for x in inputs)]


def near(got, wanted, what, tolerance=2e-2):
    for number, (g, w) in enumerate(zip(got, wanted)):
        finite = w.isfinite()
        assert torch.equal(g.isfinite(), finite), (what, number)
        far = (g[finite].double() - w[finite].double()).norm() / w[finite].double().norm().clamp(min=1e-9)
        assert far < tolerance, (what, number, far)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_as_the_host_plans(dtype, mask):
    *inputs, dout = tensors(DTYPES[dtype], dim=128)
    sink = torch.randn(4, device="cuda")
    for extra in ({}, {"sink": sink}, {"softcap": 20.0}):
        wanted = run(inputs, dout, PACKING, **MASKS[mask], **extra)
        padded, used = ints(*OFFSETS), ints(*LENGTHS)
        got = device_run(inputs, dout, cu_seqlens_q=padded, seqused_q=used, **MASKS[mask], **extra)
        near(got, wanted, (mask, dtype, extra), 1e-5 if dtype == "f32" else 1e-2)


def test_nothing_waits():
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    padded, used = ints(*OFFSETS), ints(*LENGTHS)
    device_run(inputs, dout, cu_seqlens_q=padded, seqused_q=used, causal=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device_run(inputs, dout, cu_seqlens_q=padded, seqused_q=used, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_is_replayed_on_other_packings(deterministic):
    """Forward and backward captured once; other lengths, other numbers of documents, empty ones."""
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    inputs = [x.requires_grad_() for x in inputs]
    cu = ints(0, 100, 300, 512, *[512] * 61)

    def step():
        out, lse, _ = offsets.attention(*inputs, cu_seqlens_q=cu, causal=True, deterministic=deterministic)
        return [out, lse, *torch.autograd.grad(out, inputs, dout)]

    graph, got = torch_graph.captured(step)
    generator = torch.Generator().manual_seed(5)
    for documents in [1, 2, 3, 17, 64, 0, 64]:
        cuts = torch.randint(0, TOKENS + 1, (documents,), generator=generator).sort().values.tolist()
        cu.copy_(ints(0, *cuts, *[cuts[-1] if cuts else 0] * (64 - documents)))
        graph.replay()
        replayed = [x.clone() for x in got]
        wanted = step()
        for number, (g, w) in enumerate(zip(replayed, wanted)):
            if deterministic or number < 2:
                assert torch.equal(g, w), (documents, number)
        near(replayed, wanted, documents)
    rows.check_offsets()


@pytest.mark.parametrize("wrong", [(0, 600, 512), (0, 400, 300), (-4, 8, 512)])
def test_wrong_offsets_see_nothing_and_are_told(wrong):
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    torch.cuda.synchronize()
    inputs = [x.requires_grad_() for x in inputs]
    out, lse, _ = offsets.attention(*inputs, cu_seqlens_q=ints(*wrong), causal=True)
    torch.cuda.synchronize()
    gradients = torch.autograd.grad(out, inputs, dout)  # calls that follow are not to blame
    assert not out.any() and (lse == -float("inf")).all() and not any(g.any() for g in gradients)
    offsets.attention(*inputs, cu_seqlens_q=ints(0, TOKENS), causal=True)
    torch.cuda.synchronize()
    with refused("queries on the device: sequence"):
        rows.check_offsets()
    rows.check_offsets()


def test_refusals():
    *inputs, _ = tensors(torch.bfloat16, dim=128)
    with refused("layout balanced"):
        offsets.attention(*inputs, cu_seqlens_q=ints(0, TOKENS), layout="balanced")
    with refused("checked is given"):
        offsets.attention(*inputs, cu_seqlens_q=ints(0, TOKENS), checked=True)


@pytest.mark.parametrize("schedule", ["all_gather", "ring", "all_to_all", "hybrid"])
@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk", "zigzag", "striped"])
def test_ranks_as_threads(layout, schedule):
    """Four ranks that are threads, each with its rows by shard from the same offsets."""
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    sink = torch.linspace(-1, 1, 4, device="cuda")
    padded, used = ints(*OFFSETS), ints(*LENGTHS)
    wanted = run(inputs, dout, PACKING, sink, causal=True)
    cu = torch.nn.functional.pad(torch.cumsum(used, 0, dtype=torch.int32), (1, 0))

    def rank(comm):
        mine = [rows.shard(x, cu, 4, comm.rank, cu_seqlens_padded=padded, layout=layout) for x in (*inputs, dout)]
        got = device_run(mine[:3], mine[3], sink, cu_seqlens_q=cu, cu_seqlens_q_padded=padded, causal=True, group=comm,
                         layout=layout, schedule=schedule)
        back = [rows.unshard(x, cu, 4, comm.rank, tokens=TOKENS, cu_seqlens_padded=padded, layout=layout) for x in got[:5]]
        return [*back, got[5]]

    parts = weft.spawn(4, rank)
    real = rows.copy_valid_rows(torch.ones(TOKENS, device="cuda"), cu, padded).bool()
    for number in (0, 2, 3, 4):
        total = sum(part[number].float() for part in parts)
        near([total[real]], [wanted[number][real].float()], (layout, number))
    near([sum(part[5] for part in parts)], [wanted[5]], (layout, schedule, "sink"))
    rows.check_offsets()


@pytest.mark.parametrize("schedule", ["all_gather", "ring", "all_to_all", "hybrid"])
def test_wrong_offsets_over_ranks(schedule):
    """Every rank sees nothing, none waits for another, and the next call is right."""
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    wrong, right = ints(0, 400, 300), ints(0, 300, TOKENS)
    wanted = run(inputs, dout, weft.Packing([0, 300, TOKENS]), causal=True)[0]

    def rank(comm):
        mine = [rows.shard(x, right, 4, comm.rank, layout="zigzag") for x in (*inputs, dout)]
        blind = device_run(mine[:3], mine[3], cu_seqlens_q=wrong, causal=True, group=comm, schedule=schedule)
        assert not any(x.any() for x in (blind[0], *blind[2:]))
        got = device_run(mine[:3], mine[3], cu_seqlens_q=right, causal=True, group=comm, schedule=schedule)[0]
        return rows.unshard(got, right, 4, comm.rank, tokens=TOKENS, layout="zigzag")

    near([sum(weft.spawn(4, rank, time_limit=30))], [wanted], schedule)
    torch.cuda.synchronize()
    with refused("queries on the device: sequence"):
        rows.check_offsets()
