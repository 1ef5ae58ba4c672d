"""Ranks that share a GPU, as threads and as processes, against one rank."""

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

from gpu import (
    DTYPES,
    PACKING,
    SCHEDULES,
    assert_near,
    assert_right,
    assert_same,
    attend,
    long_work,
    needs_gpu,
    reference,
    run,
    tensors,
)

pytestmark = needs_gpu


def on_ranks(inputs, dout, packing=PACKING, own_streams=False, ranks=4, sink=None, group_of=lambda comm: comm, **options):
    def rank(comm):
        comm = group_of(comm)
        stream = torch.cuda.stream(torch.cuda.Stream()) if own_streams else contextlib.nullcontext()
        torch.cuda.synchronize()
        with stream:
            parts = [weft.torch.shard(x, packing, comm) for x in (*inputs, dout)]
            got = run(parts[:3], parts[3], packing, sink, group=comm, **options)
            whole = [weft.torch.unshard(x, packing, comm) for x in got[:5]]
            whole += [sum(weft.torch.all_gather(x, comm)) for x in got[5:]]
            torch.cuda.current_stream().synchronize()
        return whole

    results = weft.spawn(ranks, rank, time_limit=60)
    for other in results[1:]:
        assert_same(results[0], other)
    return results[0]


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "own streams"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_four_ranks(dtype, schedule, own_streams):
    *inputs, dout = tensors(DTYPES[dtype], heads=(4, 4))
    sink = torch.linspace(-1, 1, 4, device="cuda")
    got = on_ranks(inputs, dout, sink=sink, own_streams=own_streams, causal=True, window=(70, 0), schedule=schedule)
    assert_right(got, reference(inputs, dout, dict(causal=True, window=(70, 0)), sink=sink), dtype)
    one = run(inputs, dout, sink=sink, causal=True, window=(70, 0))
    assert_near(got, one, dtype)
    if schedule == "all_gather":
        assert_same(got[:1], one[:1])  # in sequence order a row's bits do not depend on the ranks


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_four_ranks_by_default(dtype):
    """Layout balanced, and the schedule that is predicted to be the best."""
    *inputs, dout = tensors(DTYPES[dtype])
    assert_right(on_ranks(inputs, dout, causal=True), reference(inputs, dout, dict(causal=True)), dtype)


class Mail:
    """A transport as that of a process group with NCCL: a message is one tensor on the GPU, in the order of a stream."""

    def __init__(self, rank, ranks, boxes, arrived):
        self.rank, self.ranks, self.boxes, self.arrived, self.calls = rank, ranks, boxes, arrived, 0

    def meet_on_gpu(self, device):
        pass

    def exchange_on_gpu(self, sends, receives, device, stream):
        self.calls += 1
        assert stream == torch.cuda.current_stream().cuda_stream
        with self.arrived:
            for i, (peer, x) in enumerate(sends):
                self.boxes[self.calls, self.rank, peer, [p for p, _ in sends[:i]].count(peer)] = torch.from_dlpack(x).clone()
            self.arrived.notify_all()
        mail, call = self, self.calls

        class Handle:
            def wait(self):
                for i, (peer, x) in enumerate(receives):
                    at = call, peer, mail.rank, [p for p, _ in receives[:i]].count(peer)
                    with mail.arrived:
                        assert mail.arrived.wait_for(lambda: at in mail.boxes, 30), at
                        torch.from_dlpack(x).copy_(mail.boxes.pop(at))

            def abandon(self):
                pass

        return Handle()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_in_one_piece(schedule):
    """What NCCL would move between GPUs, packed and unpacked, moved between threads."""
    *inputs, dout = tensors(torch.bfloat16, heads=(8, 4))
    sink, boxes, arrived = torch.linspace(-1, 1, 8, device="cuda"), {}, threading.Condition()

    def group_of(comm):
        return weft._core.python_communicator(comm.rank, comm.ranks, "mail", Mail(comm.rank, comm.ranks, boxes, arrived), True)

    got = on_ranks(inputs, dout, sink=sink, group_of=group_of, causal=True, schedule=schedule)
    assert not boxes
    assert_right(got, reference(inputs, dout, dict(causal=True), sink=sink), "bf16")
    weft.torch.clear_cache()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checked_ranks(schedule):
    """The bits of ranks that are not checked."""
    *inputs, dout = tensors(torch.bfloat16, heads=(4, 4))
    sink = torch.linspace(-1, 1, 4, device="cuda")
    options = dict(sink=sink, causal=True, schedule=schedule, deterministic=True)
    assert_same(on_ranks(inputs, dout, checked=True, **options), on_ranks(inputs, dout, **options))


@pytest.mark.parametrize("text, odd", [
    ("attention (scale, softcap, sink, head_map)", dict(softcap=20.0)),
    ("mask", dict(window=(50, 0))),
    ("deterministic", dict(deterministic=True)),
    ("kernel", dict(kernel="cuda.portable")),
])
def test_checked_ranks_that_disagree(text, odd):
    *inputs, dout = tensors(torch.bfloat16, heads=(4, 4), dim=128)
    said = [""] * 4

    def rank(comm):
        parts = [weft.torch.shard(x, PACKING, comm, layout="contiguous") for x in (*inputs, dout)]
        try:
            run(parts[:3], parts[3], group=comm, causal=True, layout="contiguous", checked=True,
                **(odd if comm.rank == 1 else {}))
        except weft.Error as e:
            said[comm.rank] = str(e)

    weft.spawn(4, rank, time_limit=30)
    if text == "kernel" and not said[0]:
        pytest.skip("this GPU has one kernel alone")
    assert said[0].startswith(f"{text}: rank 1 differs from ranks 0, 2, 3") and len(set(said)) == 1, said


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_without_autograd(schedule):
    *inputs, dout = tensors()
    cu = [0, 100, 101, 500]

    def rank(comm):
        q, k, v, d = (weft.shard(x, comm, cu_seqlens=cu) for x in (*inputs, dout))
        r = weft.attention(q, k, v, cu_seqlens_q=cu, causal=True, comm=comm, schedule=schedule, max_logit=True)
        grads = r.backward(d)
        torch.cuda.synchronize()
        return r.out, r.lse, *grads[:3], r.max_logit

    inputs, dout = [x[:500] for x in inputs], dout[:500]
    results = weft.spawn(4, rank, time_limit=60)
    one = weft.attention(*inputs, cu_seqlens_q=cu, causal=True, max_logit=True)
    got = [weft.unshard([r[i] for r in results], cu_seqlens=cu) for i in range(5)]
    assert_near([*got, results[0][5]], [one.out, one.lse, *one.backward(dout)[:3], one.max_logit], "f32")


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("drop", [False, True])
def test_micro_sequences(drop, checked):
    packing, mask = weft.Packing([0, 100, 101, 512]), weft.Mask(causal=True, window=(60, 0))
    micros = weft.prepare.MicroSequences(packing, ranks=4, micros=4)
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(512, h, 32, generator=generator).cuda() for h in (4, 2, 2, 4))
    sink = torch.linspace(-1, 1, 4, device="cuda")
    windows = [torch.cat([torch.arange(*micros.rows(r, m)) for m in range(4)]).cuda() for r in range(4)]

    def rank(comm):
        here = windows[comm.rank]
        inputs = [x[here].requires_grad_() for x in (q, k, v)]
        logits = sink.clone().requires_grad_()
        layer = weft.torch.MicroSequenceAttention(mask=mask, drop=drop, group=comm, checked=checked)
        for _ in range(2):  # buffers are used again
            for x in (*inputs, logits):
                x.grad = None
            out = layer(*inputs, micros, sink=logits)
            out.backward(dout[here])
        torch.cuda.synchronize()
        return out.detach(), *(x.grad for x in (*inputs, logits))

    results = weft.spawn(4, rank, time_limit=60)
    one = run([q, k, v], dout, packing, sink, causal=True, window=(60, 0))
    for r, got in enumerate(results):
        assert_near(got[:4], [x[windows[r]] for x in (one[0], *one[2:5])], "f32")
    assert_near([sum(r[4] for r in results)], [one[5]], "f32")
    alone = weft.torch.MicroSequenceAttention(mask=mask, drop=drop)
    whole = weft.prepare.MicroSequences(packing, micros=4)
    assert_near([alone(q, k, v, whole, sink=sink)], one[:1], "f32")


def test_a_rank_that_fails():
    *inputs, _ = tensors()

    def rank(comm):
        parts = [weft.torch.shard(x, PACKING, comm) for x in inputs]
        if comm.rank == 2:
            raise weft.Error("it rains")
        attend(*parts, PACKING, group=comm, schedule="ring")

    with pytest.raises(weft.Error, match="rains"):
        weft.spawn(4, rank, time_limit=20)
    torch.cuda.synchronize()


# Process groups.

@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_group_of_one(backend):
    dist = torch.distributed
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("torch has no NCCL")
    *inputs, dout = tensors()
    want = run(inputs, dout, causal=True)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        got = run(inputs, dout, causal=True, schedule="ring")
        side = torch.cuda.Stream()
        # The workspace of an executor is used in one stream after another.
        torch.cuda.synchronize()
        long_work()
        first = run(inputs, dout, causal=True, schedule="ring")
        with torch.cuda.stream(side):
            second = run(inputs, dout, causal=True, schedule="ring")
        torch.cuda.synchronize()
        assert_same([weft.torch.unshard(inputs[0], PACKING)], [inputs[0]])
    finally:
        dist.destroy_process_group()
    for some in (got, first, second):
        assert_near(some, want, "f32")


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_processes(tmp_path, backend):
    """Four processes that share the GPU: over gloo by way of the CPU, over NCCL by sockets."""
    import processes

    if "nccl" in backend and not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    processes.start("cuda_worker.py", tmp_path, backend, seconds=120)
