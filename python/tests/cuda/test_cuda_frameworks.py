"""Other frameworks on a GPU (transformers, CuPy, JAX), and what is refused there."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

from gpu import (
    PACKING,
    TOKENS,
    assert_near,
    assert_same,
    attend,
    needs_gpu,
    no_waiting,
    run,
    tensors,
)

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs(dtype):
    """Of a policy: as on the CPU, with the gradient, and without waiting."""
    cp, generator = weft.torch.ContextParallel([0, 20, 21, 64]), torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (64,), generator=generator)
    logits = torch.randn(1, 64, 61, generator=generator).to(dtype).requires_grad_()
    there, ids_there = logits.detach().cuda().requires_grad_(), ids.cuda()[None]
    cp.log_probs(there, ids_there, temperature=0.7)
    with no_waiting():
        got = cp.log_probs(there, ids_there, temperature=0.7)
        (gradient,) = torch.autograd.grad(got.exp().sum(), there)
    expected = cp.log_probs(logits, ids[None], temperature=0.7)
    (expected_gradient,) = torch.autograd.grad(expected.exp().sum(), logits)
    assert got.is_cuda and got.dtype == torch.float32 and gradient.dtype == dtype
    assert torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(gradient.cpu().float(), expected_gradient.float(), rtol=rounding, atol=1e-5)


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_audit(ranks):
    """Tensors on a GPU, and what comes back is read from there; gradients too."""
    def fn(q, k, v, case):
        inputs = [torch.from_numpy(x).cuda().requires_grad_() for x in (q, k, v)]
        sink = None if case.sink is None else torch.from_numpy(case.sink).cuda()
        out = attend(*inputs, case.packing, causal=case.causal, window=case.window, sink=sink,
                     group="" if case.comm is None else case.comm)
        return out, lambda dout: torch.autograd.grad(out, inputs, torch.from_numpy(dout).cuda())

    report = weft.audit(fn, ranks=ranks, dim=16)
    assert {v.result for v in report} == {"right"}, str(report)


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
    attend(q, k, v, weft.torch.pack(PACKING).cuda())  # taken for cu_seqlens, which are none
    torch.cuda.synchronize()
    with refused("on the device"):
        weft.torch.rows.check_offsets()
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
