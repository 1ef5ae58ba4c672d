"""Tensors on a GPU: the same answers, in torch's current stream, without waiting, on one rank and on four that share it."""

import contextlib
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import dense  # noqa: E402
import weft  # noqa: E402
import weft.torch  # noqa: E402

REASON = ("this build of Weft has no CUDA (-DWEFT_CUDA=ON)" if not weft._core.has_cuda else
          "torch sees no GPU" if not torch.cuda.is_available() else None)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact"]
# Sequences with padding behind each, one of them a single token.
OFFSETS, LENGTHS, TOKENS = [0, 104, 112, 304, 512], [100, 1, 190, 192], 512
PACKING = weft.Packing(cu_seqlens_q_padded=OFFSETS, seqused_q=LENGTHS, tokens_q=TOKENS)
MASKS = {"full": {}, "causal": dict(causal=True), "window": dict(causal=True, window=(50, 0)), "chunks": dict(causal=True, chunk_size=48)}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NORMS = {"f32": (2e-6, 4e-6), "bf16": (4e-3, 8e-3), "f16": (5e-4, 1e-3)}  # of results and of gradients
attend = weft.torch.context_parallel_attention


def tensors(dtype=torch.float32, heads=(4, 2), dim=64, device="cuda", seed=1, padding=0.0):
    """q, k, v, dout, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(TOKENS, h, dim, generator=generator) for h in (heads[0], heads[1], heads[1], heads[0])]
    empty = torch.from_numpy(dense.places(OFFSETS, LENGTHS, TOKENS)[0] < 0)
    for x in made:
        x[empty] = padding
    return [x.to(dtype).to(device) for x in made]


def run(inputs, dout, packing=PACKING, sink=None, **options):
    """out, lse and the gradients of q, k, v (and the sink)."""
    inputs = [x.detach().requires_grad_() for x in (*inputs, *([] if sink is None else [sink]))]
    out, lse = attend(*inputs[:3], packing, sink=inputs[3] if sink is not None else None, return_lse=True, **options)
    out.backward(dout)
    return [out.detach(), lse, *(x.grad for x in inputs)]


def reference(inputs, dout, mask, **model):
    """The same from the definition, in f64 on the CPU: {name: (values, size of their terms)}, and how steep logits are."""
    q, k, v, dout = (x.double().cpu().numpy() for x in (*inputs, dout))
    see = dense.visible((OFFSETS, LENGTHS, TOKENS), (OFFSETS, LENGTHS, TOKENS), **mask)
    if "sink" in model:
        model["sink"] = model["sink"].double().cpu().numpy()
    d = dense.Dense(q, k, v, see, **model)
    return {"out": (d.out, d.out_terms), "lse": (d.lse, np.ones_like(d.lse)), **d.backward(dout)}, d.steepness


def assert_right(got, wanted, dtype):
    values, steepness = wanted
    for x, (name, (want, terms)) in zip(got, values.items()):
        x = x.double().cpu().numpy()
        dense.assert_close(name, x, want, terms, steepness, "f32" if name in ("lse", "dsink") and dtype == "f32" else dtype)
        if name != "lse":
            limit = NORMS[dtype][name != "out"]
            assert np.linalg.norm(x - want) <= limit * np.linalg.norm(want), name


def assert_same(got, wanted):
    for a, b in zip(got, wanted):
        assert torch.equal(a, b), (a - b).abs().max()


def assert_near(got, wanted, dtype):
    """By norm: one way of computing against another."""
    for a, b in zip(got, wanted):
        a, b = (x.double().nan_to_num(neginf=0) for x in (a, b))
        assert (a - b).norm() <= NORMS[dtype][1] * b.norm()


@contextlib.contextmanager
def no_waiting():
    """torch raises if it has to wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# One rank.

@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(dtype, mask):
    *inputs, dout = tensors(DTYPES[dtype])
    got = run(inputs, dout, **MASKS[mask])
    assert all(x.is_cuda for x in got) and got[0].dtype == DTYPES[dtype] and got[1].dtype == torch.float32
    assert_right(got, reference(inputs, dout, MASKS[mask]), dtype)


def test_features():
    *inputs, dout = tensors(heads=(6, 3), dim=40)
    sink = torch.linspace(-1, 1, 6, device="cuda")
    got = run(inputs, dout, sink=sink, causal=True, softcap=3.0, scale=0.3, head_map=[0, 1, 2, 0, 1, 2])
    assert_right(got, reference(inputs, dout, dict(causal=True), sink=sink, softcap=3.0, scale=0.3, head_map=[0, 1, 2, 0, 1, 2]), "f32")


def test_sdpa_a_document_at_a_time():
    *inputs, dout = tensors(torch.bfloat16, heads=(4, 4))
    got = run(inputs, dout, causal=True)
    whole = [x.detach().requires_grad_() for x in inputs]
    parts = []
    for begin, length in zip(OFFSETS, LENGTHS):
        q, k, v = (x[begin:begin + length].transpose(0, 1)[None] for x in whole)
        parts.append((slice(begin, begin + length), torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
    sum((out[0].transpose(0, 1) * dout[here]).sum() for here, out in parts).backward()
    for here, out in parts:
        assert_near([got[0][here]], [out[0].transpose(0, 1).detach()], "bf16")
    assert_near(got[2:], [x.grad for x in whole], "bf16")


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_batches(format):
    x = torch.randn(2, 3, 50, 4, 32, device="cuda")
    q, k = x if format == "bshd" else x.transpose(2, 1).contiguous()
    packing = weft.Packing.from_batch(3, 50)
    out = attend(q, k, k, packing, causal=True, format=format)
    one = attend(*(y.flatten(0, 1) for y in (x[0], x[1], x[1])), packing, causal=True).view(3, 50, 4, 32)
    assert_same([out], [one if format == "bshd" else one.transpose(0, 1)])


def test_attention_without_autograd():
    *inputs, dout = tensors()
    r = weft.attention(*inputs, packing=PACKING, causal=True, max_logit=True)
    grads = r.backward(dout)
    assert_same([r.out, r.lse, *grads[:3]], run(inputs, dout, causal=True, deterministic=True)[:2] + list(grads[:3]))
    assert r.max_logit.is_cuda and grads.dsink is None
    assert_right([r.out, r.lse, *grads[:3]], reference(inputs, dout, dict(causal=True)), "f32")


def test_a_layer_with_a_sink():
    layer = weft.torch.ContextParallelAttention(sink="learnable", heads=4, return_max_logit=True).cuda()
    q, k, v, dout = tensors()
    out, largest = layer(q, k, v, PACKING)
    out.backward(dout)
    assert layer.sink.grad.is_cuda and largest.shape == (4,)
    on_cpu = weft.torch.ContextParallelAttention(sink="learnable", heads=4, return_max_logit=True)
    want, want_largest = on_cpu(q.cpu(), k.cpu(), v.cpu(), PACKING)
    want.backward(dout.cpu())
    assert_near([out.cpu(), largest.cpu(), layer.sink.grad.cpu()], [want, want_largest, on_cpu.sink.grad], "f32")


def test_padding_is_not_read():
    """NaN in rows that hold no token changes no bit."""
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for padding in (0.0, float("nan")):
            *inputs, dout = tensors(dtype, padding=padding)
            results.append(run(inputs, dout, causal=True, deterministic=True))
        assert_same(*results)
        empty = torch.from_numpy(dense.places(OFFSETS, LENGTHS, TOKENS)[0] < 0).cuda()
        assert all((x[empty] == 0).all() for x in (results[1][0], *results[1][2:]))


def test_deterministic():
    *inputs, dout = tensors(torch.bfloat16)
    assert_same(run(inputs, dout, deterministic=True), run(inputs, dout, deterministic=True))


# Streams.

def long_work():
    torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second


def test_current_stream():
    """Inputs that are written late in a side stream: right results after that stream alone, and the call did not wait."""
    *inputs, dout = tensors()
    want = run(inputs, dout, causal=True, deterministic=True)
    late = [torch.full_like(x, float("nan")) for x in (*inputs, dout)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        long_work()
        for x, y in zip(late, (*inputs, dout)):
            x.copy_(y)
        got = run(late[:3], late[3], causal=True, deterministic=True)
        waited = side.query()
    assert not waited, "the call waited for the GPU"
    side.synchronize()
    assert_same(got, want)


def test_attention_in_a_side_stream():
    *inputs, dout = tensors()
    want = weft.attention(*inputs, packing=PACKING, max_logit=True)
    side = torch.cuda.Stream()
    late = [torch.full_like(x, float("nan")) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        long_work()
        for x, y in zip(late, inputs):
            x.copy_(y)
        got = weft.attention(*late, packing=PACKING, max_logit=True)
        waited = side.query()
    side.synchronize()
    assert not waited
    assert_same([got.out, got.lse, got.max_logit], [want.out, want.lse, want.max_logit])


def test_nothing_waits():
    *inputs, dout = tensors(torch.bfloat16)
    ids = torch.arange(TOKENS, device="cuda")
    layer = weft.torch.ContextParallelAttention(sink="learnable", heads=4).cuda()

    def step():
        q, k, v = (weft.torch.shard(x, PACKING).requires_grad_() for x in inputs)
        weft.torch.shard(weft.torch.next_token_labels(ids, PACKING), PACKING, fill=-100)
        weft.torch.position_ids(PACKING, device="cuda"), weft.torch.valid_rows(PACKING, device="cuda")
        out = layer(q, k, v, PACKING)
        out.backward(dout)
        return weft.torch.unshard(q.grad, PACKING)

    step()
    with no_waiting():
        step()
    with pytest.raises(RuntimeError):
        with no_waiting():
            dout.sum().item()  # it would have said so


def test_memory_does_not_grow():
    *inputs, dout = tensors(torch.bfloat16)

    def held():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    for _ in range(5):
        run(inputs, dout, causal=True)
    torch_before, free_before = held()
    for _ in range(100):
        run(inputs, dout, causal=True)
    torch_after, free_after = held()
    assert torch_after == torch_before and free_before - free_after < 4 << 20


def test_capture(refused):
    """What a CUDA graph cannot hold is refused before anything is captured."""
    *inputs, dout = tensors()
    run(inputs, dout)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        try:
            with refused("graph"):
                attend(*inputs, PACKING)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    assert_same([attend(*inputs, PACKING)], [run(inputs, dout)[0]])


# torch's own checks.

def test_opcheck():
    q, k, v, dout = tensors()
    sink = torch.zeros(4, device="cuda")
    how = weft.torch.op.how_of(causal=True, max_logit=True)
    flat = weft.torch.pack(PACKING)
    for logits in (None, sink):
        args = [x.detach().requires_grad_() for x in (q, k, v)] + [logits, flat, how]
        torch.library.opcheck(torch.ops.weft.attention, args)
        out, lse, _ = torch.ops.weft.attention(q, k, v, logits, flat, how)
        torch.library.opcheck(torch.ops.weft.attention_backward, [dout, q, k, v, logits, out, lse, flat, how])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])  # the second puts what it can into CUDA graphs
def test_compile(mode):
    *inputs, dout = tensors()
    flat = weft.torch.pack(PACKING)

    def layer(q, k, v, packing):
        return attend(q * 2, k, v, packing, causal=True, window=(100, 0), deterministic=True).tanh()

    results, compiled = [], torch.compile(layer, fullgraph=True, mode=mode)
    for call in (layer, compiled, compiled, compiled):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = call(*leaves, flat)
        out.backward(dout)
        results.append([x.clone() for x in (out.detach(), *(x.grad for x in leaves))])
    for got in results[1:]:
        assert_near(got, results[0], "f32")


# Rows.

@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped", "dual_chunk", "balanced"])
def test_rows(layout):
    packing = weft.Packing(cu_seqlens_q_padded=[0, 104, 112, 304, 496], seqused_q=LENGTHS, tokens_q=TOKENS)  # and behind all
    mask = weft.Mask(causal=True)
    wholes = [torch.arange(TOKENS), torch.randn(TOKENS, 3, 5).to(torch.bfloat16), torch.rand(TOKENS) < 0.5,
              torch.randn(TOKENS, 2, 24)[:, :, ::3], torch.randn(TOKENS, 48)[:, 8:24]]
    for whole in wholes:
        parts = [weft.shard(whole.contiguous(), r, ranks=4, packing=packing, layout=layout, mask=mask) for r in range(4)]
        if whole.stride(-1) != 1:
            whole = whole.contiguous()
        got = [weft.shard(whole.cuda(), r, ranks=4, packing=packing, layout=layout, mask=mask) for r in range(4)]
        assert all(x.is_cuda for x in got)
        assert_same([x.cpu().float() for x in got], [x.float() for x in parts])
        together = weft.unshard(got, packing=packing, layout=layout, mask=mask)
        assert_same([together.cpu().float()], [weft.unshard(parts, packing=packing, layout=layout, mask=mask).float()])
    placed = weft.Layout(layout, packing, 4, mask)
    x, orders = torch.randn(TOKENS, 7, device="cuda"), [torch.zeros(4 * placed.rows, 7, device=d) for d in ("cuda", "cpu")]
    for order, source in zip(orders, (x, x.cpu())):
        weft.rows.sequence_to_rank_order(placed, source, order)
    assert_same([orders[0].cpu()], [orders[1]])
    backs = [torch.zeros(TOKENS, 7, device=d) for d in ("cuda", "cpu")]
    for back, order in zip(backs, orders):
        weft.rows.rank_to_sequence_order(placed, order, back)
    assert_same([backs[0].cpu()], [backs[1]])


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("layout", ["dual_chunk", "striped"])
def test_rows_of_batches(format, layout):
    x = torch.randn(3, 16, 2, 4) if format == "bshd" else torch.randn(16, 3, 2, 4)
    for device in ("cpu", "cuda"):
        parts = [weft.shard(x.to(device), r, ranks=4, layout=layout, format=format) for r in range(4)]
        assert_same([weft.unshard(parts, layout=layout, format=format).cpu()], [x])
        wanted = [p.cpu() for p in parts] if device == "cpu" else wanted
        assert_same([p.cpu() for p in parts], wanted)


def test_cache():
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(3)
        k, v = (torch.full((64, 2, 16), float("nan"), device=device) for _ in range(2))
        cache = weft.prepare.KvCache(k, v, offsets=[0, 32, 64])
        for counts in ([20, 7], [1, 3], [0, 1]):
            new = [torch.randn(sum(counts), heads, 16, generator=generator).to(device) for heads in (4, 2, 2)]
            cache.append(counts, *new[1:])
            results.append(cache.attend(counts, new[0]).cpu())
    assert_near(results[3:], results[:3], "f32")


# Four ranks that share the GPU.

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


@pytest.mark.parametrize("drop", [False, True])
def test_micro_sequences(drop):
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
        layer = weft.torch.MicroSequenceAttention(mask=mask, drop=drop, group=comm)
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


def test_transformers():
    pytest.importorskip("transformers")
    try:
        import weft.transformers
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError as e:
        pytest.skip(f"another version of transformers: {e}")
    packing, ids = weft.Packing([0, 20, 21, 64]), torch.randint(3, 61, (64,), generator=torch.Generator().manual_seed(2))
    config = LlamaConfig(vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, attention_dropout=0.0, initializer_range=0.2, pad_token_id=None)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="weft")
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        batch = weft.transformers.inputs(ids.to(device), packing)
        with weft.transformers.packed(packing):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        results.append([x.detach().cpu().clone() for x in (loss, *(p.grad for p in model.parameters()))])
    for got, want in zip(results[1], results[0]):
        assert (got - want).norm() <= 1e-4 * want.norm()


# What is refused, and arrays of others.

def test_refusals(refused):
    q, k, v, dout = tensors()
    with refused("q on GPU 0, k on the CPU, v on GPU 0", "one device"):
        attend(q, k.cpu(), v, PACKING)
    with refused("q on the CPU, k on GPU 0"):
        attend(q.cpu(), k, v, PACKING)
    with refused("sink on the CPU"):
        attend(q, k, v, PACKING, sink=torch.zeros(4))
    with refused("different places", "k on the CPU"):
        weft.attention(q, k.cpu(), v, packing=PACKING)
    with refused("different places", "dout on the CPU"):
        weft.attention(q, k, v, packing=PACKING).backward(dout.cpu())
    with refused("the packing lies on cuda:0", "CPU"):
        attend(q, k, v, weft.torch.pack(PACKING).cuda())
    with refused("cu_seqlens_q", "CPU"):
        weft.attention(q, k, v, cu_seqlens_q=torch.tensor([0, TOKENS], device="cuda"))
    with refused("kernel reference cannot"):
        attend(q, k, v, PACKING, kernel="reference")
    with refused("f64"):
        attend(q.double(), k.double(), v.double(), PACKING)
    with refused("stream is given with a tensor of torch"):
        weft.attention(q, k, v, packing=PACKING, stream=0)
    with refused("different places"):
        weft.prepare.KvCache(k, v, offsets=[0, TOKENS]).append([1], k[:1].cpu(), v[:1].cpu())
    with refused("checked mode"):
        weft.spawn(2, lambda comm: weft.attention(q[:256], k[:256], v[:256], packing=PACKING, comm=comm, checked=True))
    buffer_on_cpu = weft.prepare.MicroSequences(PACKING, micros=1)

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=TOKENS, heads=2, dim=64)
        buffer.begin(buffer_on_cpu)
        buffer.start_gather(0, k, v)

    with refused("the tensors lie on GPU 0, and the K/V buffer was made for the CPU"):
        weft.spawn(1, rank)
    assert attend(q, k, v, PACKING).shape == q.shape


def test_buffer():
    """weft.prepare.KvBuffer on a GPU, whose keys come ahead."""
    micros = weft.prepare.MicroSequences(weft.Packing([0, 100, 101, 512]), micros=4)
    q, k, v, dout = tensors()
    want = run([q, k, v], dout, weft.Packing([0, 100, 101, 512]), causal=True)

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=512, heads=2, dim=64, device="cuda")
        buffer.begin(micros)
        parts = [slice(*micros.rows(0, m)) for m in range(4)]
        buffer.start_gather(0, k[parts[0]], v[parts[0]])
        outs = []
        for m, here in enumerate(parts):
            if m + 1 < len(parts):
                buffer.start_gather(m + 1, k[parts[m + 1]], v[parts[m + 1]])
            outs.append(buffer.forward(m, q[here]))
        grads = [buffer.backward(m, q[parts[m]], *outs[m], dout[parts[m]]) for m in reversed(range(4))][::-1]
        return [torch.cat([o[i] for o in outs]) for i in range(2)] + [torch.cat([g[i] for g in grads]) for i in range(3)]

    assert_near(weft.spawn(1, rank)[0], want, "f32")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cupy(dtype):
    cupy = pytest.importorskip("cupy")
    *inputs, dout = tensors(getattr(torch, dtype))
    want = weft.attention(*inputs, packing=PACKING, causal=True)
    grads = want.backward(dout)
    torch.cuda.synchronize()
    theirs = [cupy.asarray(x) for x in (*inputs, dout)]
    stream = cupy.cuda.Stream(non_blocking=True)
    for options in ({}, {"stream": stream}):
        got = weft.attention(*theirs[:3], packing=PACKING, causal=True, **options)
        dq, dk, dv, _ = got.backward(theirs[3])
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        assert isinstance(got.out, cupy.ndarray) and isinstance(dq, cupy.ndarray)
        assert_same([torch.as_tensor(x, device="cuda") for x in (got.out, got.lse)], [want.out, want.lse])
        assert_near([torch.as_tensor(x, device="cuda") for x in (dq, dk, dv)], grads[:3], "f16")
    parts = [weft.shard(theirs[0], r, ranks=4, packing=PACKING) for r in range(4)]
    assert isinstance(parts[0], cupy.ndarray)
    assert_same([torch.as_tensor(weft.unshard(parts, packing=PACKING), device="cuda")], [inputs[0]])


def test_jax():
    if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
        pytest.skip("JAX_PLATFORMS does not name cuda")
    jax = pytest.importorskip("jax")
    *inputs, dout = tensors()
    want = weft.attention(*inputs, packing=PACKING, causal=True)
    grads = want.backward(dout)
    theirs = [jax.numpy.asarray(x.cpu().numpy()) for x in (*inputs, dout)]
    got = weft.attention(*theirs[:3], packing=PACKING, causal=True)
    theirs_grads = got.backward(theirs[3])
    assert isinstance(got.out, jax.Array) and "cuda" in str(next(iter(got.out.devices()))).lower()
    assert_same([torch.from_numpy(np.array(x)) for x in (got.out, got.lse)], [want.out.cpu(), want.lse.cpu()])
    assert_near([torch.from_numpy(np.array(x)) for x in theirs_grads[:3]], [g.cpu() for g in grads[:3]], "f32")
    assert float((got.out * 2).sum()) == pytest.approx(2 * float(want.out.double().sum()), rel=1e-3, abs=1e-2)
