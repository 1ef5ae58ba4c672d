"""weft.torch over ranks that are threads of this process: a communicator of weft.spawn is as good as a process group."""

import copy

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

CU, RANKS = [0, 13, 14, 40, 64], 4
PACKING = weft.Packing(CU)
SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]


def tensors(seed=1, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, h, 16, generator=generator) for h in (heads, kv_heads, kv_heads, heads)]


def run(*whole, **options):
    """out, lse, and gradients of q, k, v and the sink."""
    *inputs, dout = whole
    inputs = [*(x.requires_grad_() for x in inputs), torch.linspace(-1, 1, 4, requires_grad=True)]
    out, lse = weft.torch.context_parallel_attention(*inputs[:3], PACKING, causal=True, sink=inputs[3], return_lse=True,
                                                     **options)
    out.backward(dout)
    return out.detach(), lse, *(x.grad for x in inputs)


def on_threads(**options):
    """The same of all ranks: rows are put together, the sink's gradient is summed."""

    def rank(comm):
        *parts, dsink = run(*(weft.torch.shard(x, PACKING, comm) for x in tensors()), group=comm, **options)
        return *(weft.torch.unshard(x, PACKING, comm) for x in parts), sum(weft.torch.all_gather(dsink, comm))

    results = weft.spawn(RANKS, rank)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    return results[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    for got, wanted in zip(on_threads(schedule=schedule), run(*tensors(), one_rank=True)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_kept():
    before = set(weft.torch.op._runs)
    on_threads()
    assert set(weft.torch.op._runs) <= before and not weft.torch.group._given


def test_no_split_is_kept():
    def rank(comm):
        for _ in range(3):
            part = comm.split(comm.rank % 2, comm.rank)
            q, k, v, _ = (weft.torch.shard(x, PACKING, part) for x in tensors())
            weft.torch.context_parallel_attention(q, k, v, PACKING, group=part)
        comm.barrier()

    before = set(weft.torch.op._runs)
    weft.spawn(RANKS, rank)
    assert set(weft.torch.op._runs) <= before and not weft.torch.group._given and not weft.torch.group._given_by


def test_a_layer():
    """A layer keeps the communicator by its name, so that it can be copied."""

    def rank(comm):
        layer = copy.deepcopy(weft.torch.ContextParallelAttention(schedule="ring", group=comm))
        q, k, v, _ = (weft.torch.shard(x, PACKING, comm) for x in tensors())
        return weft.torch.unshard(layer(q, k, v, PACKING), PACKING, comm)

    alone = weft.torch.context_parallel_attention(*tensors()[:3], PACKING, causal=True, one_rank=True)
    torch.testing.assert_close(weft.spawn(RANKS, rank)[0], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True])
def test_micro_sequences(drop):
    micros = weft.prepare.MicroSequences(PACKING, ranks=RANKS, micros=4)

    def windows(rank):
        return torch.cat([torch.arange(*micros.rows(rank, m)) for m in range(4)])

    def rank(comm):
        *inputs, dout = (x[windows(comm.rank)] for x in tensors())
        inputs = [x.requires_grad_() for x in inputs]
        layer = weft.torch.MicroSequenceAttention(drop=drop, group=comm)
        out = layer(*inputs, micros)
        out.backward(dout)
        return [weft.torch.all_gather(x, comm) for x in (out, *(x.grad for x in inputs))]

    q, k, v, dout = tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = weft.torch.context_parallel_attention(*inputs, PACKING, causal=True, one_rank=True)
    wanted.backward(dout)
    for got, want in zip(weft.spawn(RANKS, rank)[0], (wanted.detach(), *(x.grad for x in inputs))):
        for r, part in enumerate(got):
            torch.testing.assert_close(part, want[windows(r)], rtol=1e-5, atol=1e-5)


def test_after_the_ranks_have_ended(refused):
    comms = weft.spawn(2, lambda comm: comm)
    q, k, v, _ = tensors()
    with refused("the ranks of this communicator have ended"):
        weft.torch.context_parallel_attention(q, k, v, PACKING, group=comms[0])


def test_all_gather():
    def rank(comm):
        parts = weft.torch.all_gather(torch.full((2, 3), comm.rank, dtype=torch.int16), comm)
        empty = weft.torch.all_gather(torch.zeros(0, 3), comm)
        return [int(p[0, 0]) for p in parts] == [0, 1, 2] and len(empty) == 3 and parts[0].shape == (2, 3)

    assert all(weft.spawn(3, rank))
    assert weft.torch.all_gather(torch.ones(2))[0].tolist() == [1, 1]


def test_a_rank_that_fails(refused):
    def rank(comm):
        q, k, v, _ = (weft.torch.shard(x, PACKING, comm) for x in tensors())
        if comm.rank == 1:
            raise weft.Error("it rains")
        weft.torch.context_parallel_attention(q, k, v, PACKING, group=comm, schedule="ring")

    with pytest.raises(weft.Error, match="rains"):
        weft.spawn(3, rank)
