"""Tensors on a GPU: the same answers, in torch's current stream, without waiting."""


import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

import dense
from gpu import (
    DTYPES,
    LENGTHS,
    MASKS,
    OFFSETS,
    PACKING,
    TOKENS,
    assert_near,
    assert_right,
    assert_same,
    attend,
    long_work,
    needs_gpu,
    no_waiting,
    reference,
    run,
    tensors,
)

pytestmark = needs_gpu


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
    assert_right(
        got, reference(inputs, dout, dict(causal=True), sink=sink, softcap=3.0, scale=0.3, head_map=[0, 1, 2, 0, 1, 2]), "f32"
    )


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

def results(q, k, v, dout):
    return run((q, k, v), dout, causal=True, deterministic=True)


def plain_results(q, k, v, dout):
    r = weft.attention(q, k, v, packing=PACKING, max_logit=True)
    return r.out, r.lse, r.max_logit


@pytest.mark.parametrize("call", [results, plain_results])
def test_current_stream(call):
    """Inputs that are written late in a side stream: right results after that stream alone, and the call did not wait."""
    inputs = tensors()
    want = call(*inputs)
    late = [torch.full_like(x, float("nan")) for x in inputs]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        long_work()
        for x, y in zip(late, inputs):
            x.copy_(y)
        got = call(*late)
        waited = side.query()
    assert not waited, "the call waited for the GPU"
    side.synchronize()
    assert_same(got, want)


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
    with pytest.raises(RuntimeError), no_waiting():
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
    both = []
    for device in ("cpu", "cuda"):
        parts = [weft.shard(x.to(device), r, ranks=4, layout=layout, format=format) for r in range(4)]
        assert_same([weft.unshard(parts, layout=layout, format=format).cpu()], [x])
        both.append([p.cpu() for p in parts])
    assert_same(both[1], both[0])


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
