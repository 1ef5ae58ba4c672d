"""Eager calls of weft.torch: what kernels of the module check, and what is left to Python."""

import gc
import logging
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import weft
import weft.torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft.torch import how, runs

CU = [0, 3, 3, 10]
attend = weft.torch.context_parallel_attention
native = pytest.mark.skipif(runs._native is None, reason="this torch has no C interface for kernels")


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    weft.torch.clear_cache()


@pytest.fixture
def python_refused(monkeypatch):
    """Kernels of the module do all: Python's own way is an error."""

    def never(*args):
        raise AssertionError("Python's way was taken")

    monkeypatch.setattr(runs, "_forward_of", never)
    monkeypatch.setattr(runs, "_backward_of", never)


def tensors(*shape, grad=True, **options):
    return [torch.randn(shape or (10, 2, 8), **options).requires_grad_(grad) for _ in range(3)]


def call_of(**options):
    return runs.call_of(how.how_of(**options))


@native
def test_kernels_of_the_module_are_used(python_refused):
    q, k, v = tensors()
    sink = torch.randn(2, requires_grad=True)
    for options in ({}, {"sink": sink}, {"return_max_logit": True}, {"sink": "off_by_one"}):
        out = attend(q, k, v, weft.Packing(CU), causal=True, **options)
        torch.autograd.grad(out[0].sum() if isinstance(out, tuple) else out.sum().contiguous(), (q, k, v))
    dout = torch.randn(10, 2, 8)
    torch.autograd.grad(attend(q, k, v, torch.tensor(CU, dtype=torch.int32), causal=True), (q, k, v), dout)


@native
def test_the_same_bits_as_by_python(monkeypatch):
    sink = torch.randn(4, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q, k, v = (torch.randn(10, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
        results = []
        for way in (runs._native, None):
            monkeypatch.setattr(runs, "_native", way)
            out, lse, largest = attend(q, k, v, weft.Packing(CU), causal=True, window=(4, 0), softcap=3.0, sink=sink,
                                       return_lse=True, return_max_logit=True)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
            results.append([out, lse, largest, *grads])
            monkeypatch.undo()
        for a, b in zip(*results):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


# --- Checks of the kernels: without them the numbers would be wrong, in silence ---


@native
def test_kernels_refuse_an_expanded_gradient(refused):
    """context_parallel_attention copies it first; the kernel must not take it for a contiguous one."""
    q, k, v = tensors(grad=False)
    packing, call = weft.torch.pack(weft.Packing(CU)), call_of(causal=True)
    out, lse, _ = runs.forward(q, k, v, None, packing, call)
    dout = torch.tensor(0.5).expand(10, 2, 8)
    with refused("dout", "strides [0, 0, 0]", "not contiguous"):
        runs._tried(runs._native[1], dout, q, k, v, q, out, lse, packing, call.number)
    got = runs.backward(dout, q, k, v, None, out, lse, packing, call)
    wanted = runs.backward(dout.contiguous(), q, k, v, None, out, lse, packing, call)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@native
@pytest.mark.parametrize("which", range(3))
def test_kernels_refuse_wrong_strides(python_refused, refused, which):
    inputs = tensors(grad=False)
    inputs[which] = torch.randn(10, 8, 2).transpose(1, 2)
    with refused("qkv"[which] + " has shape [10, 2, 8] and strides [16, 1, 2]", "contiguous()"):
        attend(*inputs, weft.Packing(CU))
    assert attend(*(x.contiguous() for x in inputs), weft.Packing(CU)).shape == (10, 2, 8)


@pytest.mark.parametrize("which", range(3))
def test_a_tensor_on_another_device(refused, which):
    inputs = tensors(grad=False)
    inputs[which] = inputs[which].to("meta")
    if which == 0:  # shapes alone, as torch's operators do it
        assert attend(*inputs, weft.Packing(CU)).device.type == "meta"
        return
    with refused("qkv"[which] + " lies on meta"):
        attend(*inputs, weft.Packing(CU))


def backward(dout, x, out):
    return runs.backward(dout, x, x, x, None, out, x[..., 0], weft.torch.pack(weft.Packing(CU)), call_of())


BAD = {
    "rows": lambda x: attend(x[:9], x[:9], x[:9], weft.Packing(CU)),
    "dtypes": lambda x: attend(x, x.bfloat16(), x, weft.Packing(CU)),
    "whole numbers": lambda x: attend(x.long(), x, x, weft.Packing(CU)),
    "dimensions": lambda x: attend(x[0], x, x, weft.Packing(CU)),
    "one dimension": lambda x: attend(x[0, 0], x, x, weft.Packing(CU)),
    "heads": lambda x: attend(x[:, :1], x, x, weft.Packing(CU)),
    "a sink of other heads": lambda x: attend(x, x, x, weft.Packing(CU), sink=torch.zeros(3)),
    "a sink of whole numbers": lambda x: attend(x, x, x, weft.Packing(CU), sink=torch.zeros(2).long()),
    "a packing": lambda x: attend(x, x, x, torch.tensor([0, 4, 3])),
    "a packing of floats": lambda x: attend(x, x, x, torch.tensor([0.0, 10.0])),
    "a packing of two dimensions": lambda x: attend(x, x, x, torch.tensor([[0, 10]])),
    "a gradient's shape": lambda x: backward(x[:9], x, x),
    "an output's strides": lambda x: backward(x, x, torch.randn(10, 8, 2).transpose(1, 2)),
    "f64 without the reference": lambda x: attend(x.double(), x.double(), x.double(), weft.Packing(CU), kernel="cpu"),
}


@pytest.mark.parametrize("bad", BAD)
def test_errors_have_the_same_text_by_both_ways(monkeypatch, refused, bad):
    x = torch.randn(10, 2, 8)
    said = []
    for way in (runs._native, None):
        monkeypatch.setattr(runs, "_native", way)
        with refused() as caught:
            BAD[bad](x)
        said.append(str(caught.value))
    assert said[0] == said[1]


@native
def test_unknown_settings(refused):
    q, k, v = tensors(grad=False)
    with refused("there are no settings"):
        runs._tried(runs._native[0], q, k, v, q, torch.tensor(CU), 1 << 40)
    with pytest.raises(RuntimeError, match="there are no settings"):
        torch.ops.weft.run(q, k, v, q, torch.tensor(CU), 1 << 40)


# --- What watches tensors sees the operators ---


def test_modes_see_the_operators():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    q, k, v = tensors()
    want = torch.autograd.grad(attend(q, k, v, weft.Packing(CU), causal=True).sum(), (q, k, v))
    with Seen():
        got = torch.autograd.grad(attend(q, k, v, weft.Packing(CU), causal=True).sum(), (q, k, v))
    assert "weft.attention.default" in names and "weft.attention_backward.default" in names
    assert not any(name.startswith("weft.run") for name in names)  # numbers of this process, of no use in a graph
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_selective_checkpointing_can_keep_attention():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []

    def policy(ctx, func, *args, **kwargs):
        calls.append(str(func))
        return CheckpointPolicy.MUST_SAVE if func is torch.ops.weft.attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = tensors()
    f = lambda q, k, v: attend(2 * q, k, v, weft.Packing(CU), causal=True).square()
    want = torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
    out = checkpoint(f, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert "weft.attention.default" in calls and all(torch.equal(a, b) for a, b in zip(got, want))


# --- The log ---


@pytest.fixture
def log(caplog):
    yield caplog
    weft.torch.log(0)


def test_a_line_for_every_call(log, refused):
    q, k, v = tensors()
    weft.torch.log(1)
    attend(q, k, v, weft.Packing(CU), causal=True).sum().backward()
    said = [record.getMessage() for record in log.records]
    assert len(said) == 2 and said[0].startswith("forward: q [10, 2, 8]") and said[1].startswith("backward: q [10, 2, 8]")
    assert all("f32 on cpu, one rank, kernel cpu" in line and "the best that can" in line for line in said)
    attend(q.double(), k.double(), v.double(), weft.Packing(CU), kernel="reference")
    assert "kernel reference (asked for)" in log.records[-1].getMessage()
    weft.torch.log(0)
    attend(q, k, v, weft.Packing(CU))
    assert len(log.records) == 3
    with refused("a log of level 3"):
        weft.torch.log(3)


def test_steps_are_logged(log):
    packing = weft.Packing([0, 16])
    weft.torch.log(2)

    def rank(comm):
        q, k, v = (weft.torch.shard(x, packing, comm) for x in tensors(16, 2, 8, grad=False))
        attend(q, k, v, packing, causal=True, group=comm, schedule=weft.Schedule("ring", ranks_per_step=1))

    weft.spawn(2, rank)
    said = [record.getMessage() for record in log.records]
    calls = [line for line in said if "schedule ring of 2 steps" in line]
    assert len(calls) == 2 and "rank 0 of 2" in "".join(calls) and "rank 1 of 2" in "".join(calls)
    sent = 16 // 2 * 2 * 2 * 8 * 4  # this rank's rows of K and of V
    assert all(f"sends {sent} bytes" in line or ("sends" in line and "bytes in" in line) for line in calls)
    assert sum("step 0 of 2, compute" in line for line in said) == sum("step 1 of 2, compute" in line for line in said) == 2


# --- What is remembered between calls ---


def test_offsets_that_change_in_place():
    q, k, v = tensors()
    cu = torch.tensor(CU, dtype=torch.int32)
    first = attend(q, k, v, cu, causal=True)
    cu[1] = cu[2] = 6
    second = attend(q, k, v, cu, causal=True)
    assert torch.equal(second, attend(q, k, v, weft.Packing([0, 6, 6, 10]), causal=True)) and not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_settings_are_not_mixed_up():
    q, k, v = tensors(grad=False)
    want = {}
    packing = weft.Packing(CU)
    options = [dict(causal=c, softcap=s, window=w) for c in (True, False) for s in (0.0, 1.0) for w in ((-1, -1), (1, 0), (0, 1))]
    for _ in range(2):
        for i, some in enumerate(options):
            out = attend(q, k, v, packing, **some)
            assert torch.equal(out, want.setdefault(i, out))
            mask = weft.Mask(some["causal"], window=some["window"])
            assert torch.equal(out, attend(q, k, v, packing, mask, softcap=some["softcap"]))
    with pytest.raises(weft.Error, match="causal"):  # equal to True, and no bool
        attend(q, k, v, packing, causal=1)


def test_a_torch_without_the_interface_says_so(monkeypatch, caplog):
    monkeypatch.setattr(weft._core, "torch_load", lambda libraries: "aoti_torch_of_tomorrow")
    with caplog.at_level(logging.WARNING, "weft.torch"):
        assert runs._kernels() is None
    assert "has no aoti_torch_of_tomorrow" in caplog.text and len(caplog.records) == 1


@native
def test_libraries_that_are_not_torch():
    code = "from weft import _core; print(_core.torch_load(['libm.so.6']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("aoti_torch_")


@pytest.mark.long
def test_nothing_is_left_behind():
    """4,000 calls with packings, settings and errors of their own."""
    q, k, v = tensors(16, 2, 8)

    def call(i):
        out = attend(q, k, v, weft.Packing([0, 1 + i % 15, 16]), causal=True, scale=1.0 + (i % 1000) / 1000)
        torch.autograd.grad(out.sum(), (q, k, v))
        with pytest.raises(weft.Error):
            attend(q[:9], k[:9], v[:9], weft.Packing(CU), causal=True)

    def now():
        gc.collect()
        with open("/proc/self/statm") as f:
            return sum(type(x) is torch.Tensor for x in gc.get_objects()), int(f.read().split()[1]) * 4096

    for i in range(2100):
        call(i)
    tensors_before, before = now()
    for i in range(4000):
        call(i)
    tensors_after, after = now()
    assert tensors_after <= tensors_before + 64  # packings that are remembered
    assert after - before < 4 << 20  # a kilobyte a call; the allocator's own pages come and go by one megabyte
