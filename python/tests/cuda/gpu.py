"""What the tests on a GPU share: one set of inputs, and comparisons."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

import dense

REASON = ("this build of Weft has no CUDA (-DWEFT_CUDA=ON)" if not weft._core.has_cuda else
          "torch sees no GPU" if not torch.cuda.is_available() else None)
needs_gpu = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SCHEDULES = ["all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh"]
# Sequences with padding behind each, one of them a single token.
OFFSETS, LENGTHS, TOKENS = [0, 104, 112, 304, 512], [100, 1, 190, 192], 512
PACKING = weft.Packing(cu_seqlens_q_padded=OFFSETS, seqused_q=LENGTHS, tokens_q=TOKENS)
MASKS = {
    "full": {}, "causal": dict(causal=True), "window": dict(causal=True, window=(50, 0)),
    "chunks": dict(causal=True, chunk_size=48),
}
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


def long_work():
    torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
