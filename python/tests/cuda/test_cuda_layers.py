"""weft.torch's layers on a GPU: against the CPU, from offsets on the host and on the GPU, compiled, and over ranks."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch

import processes
from gpu import needs_gpu, no_waiting
from refusals import refused

pytestmark = needs_gpu

CU = [0, 100, 104, 300, 512]
HIDDEN = 256
SHAPES = {"thd": (512, HIDDEN), "bshd": (2, 256, HIDDEN), "sbhd": (256, 2, HIDDEN)}
WORDS = dict(num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False, rotary_base=10000.0,
             softmax_type="learnable", window_size=(60, 0), chunk_size=90)


def made(format, device="cuda", dtype=torch.float32, **words):
    torch.manual_seed(0)
    layer = weft.torch.TransformerLayer(HIDDEN, 384, 4, **{**WORDS, "qkv_format": format, **words})
    with torch.no_grad():
        layer.self_attention.core_attention.softmax_offset.normal_()
    for name, parameter in layer.named_parameters():
        if "softmax" not in name:
            parameter.data = parameter.data.to(dtype)
    return layer.to(device)


def results(layer, x, **call):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x, **call)
    out.backward(torch.ones_like(out) / 7 + x.detach())
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def near(got, wanted, bound):
    for number, (a, b) in enumerate(zip(got, wanted)):
        a, b = a.double().cpu(), b.double().cpu()
        assert (a - b).norm() <= bound * b.norm(), (number, ((a - b).norm() / b.norm()).item())


def lengths(format, device="cpu"):
    return dict(cu_seqlens_q=torch.tensor(CU, dtype=torch.int32, device=device)) if format == "thd" else {}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize("format", SHAPES)
def test_as_on_the_cpu(format, dtype, bound):
    x = torch.randn(SHAPES[format], generator=torch.Generator().manual_seed(1))
    expected = results(made(format, "cpu"), x, **lengths(format))
    layer = made(format, dtype=dtype)
    near(results(layer, x.to("cuda", dtype), **lengths(format)), expected, bound)
    if format == "thd":
        near(results(layer, x.to("cuda", dtype), **lengths(format, "cuda")), expected, bound)
        padded = dict(lengths(format, "cuda"), cu_seqlens_q_padded=lengths(format, "cuda")["cu_seqlens_q"])
        near(results(layer, x.to("cuda", dtype), **padded), expected, bound)


def test_nothing_waits():
    layer, x = made("thd", dtype=torch.bfloat16), torch.randn(SHAPES["thd"], device="cuda", dtype=torch.bfloat16)
    call = lengths("thd", "cuda")
    results(layer, x, **call)
    with no_waiting():
        results(layer, x, **call)


@pytest.mark.parametrize("where", ["cpu", "cuda", "bshd"])
def test_compiled(where):
    format = "bshd" if where == "bshd" else "thd"
    layer, x = made(format), torch.randn(SHAPES[format], device="cuda")
    call = lengths(format, where) if format == "thd" else {}
    compiled = torch.compile(layer, fullgraph=True)
    expected = results(layer, x, **call)
    layer.zero_grad()
    y = x.detach().requires_grad_()
    out = compiled(y, **call)
    out.backward(torch.ones_like(out) / 7 + x)
    near([out, y.grad, *(p.grad for p in layer.parameters())], expected, 1e-4)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("format", SHAPES)
def test_ranks(format, kind):
    x = torch.randn(SHAPES[format], device="cuda")
    one = made(format)
    packing = weft.Packing(CU) if format == "thd" else weft.Packing.from_batch(2, 256)
    with torch.no_grad():
        expected = one(x, **lengths(format))

    def rank(comm):
        torch.cuda.synchronize()
        layer = copy.deepcopy(one)
        layer.set_context_parallel_group(comm, cp_comm_type=kind)
        mine = weft.shard(x, comm, packing=packing, format=format, layout="dual_chunk")
        with torch.no_grad():
            out = layer(mine, **lengths(format))
        torch.cuda.synchronize()
        return out

    outs = weft.spawn(2, rank)
    found = weft.unshard(outs, packing=packing, format=format, layout="dual_chunk")
    near([found], [expected], 1e-4)


def test_refused():
    layer, x = made("bshd"), torch.randn(SHAPES["bshd"], device="cuda")
    with refused("cuda", "on the CPU"):
        layer(x, attn_mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, 9, 18], device="cuda"))
    layer, x = made("thd"), torch.randn(SHAPES["thd"], device="cuda")
    offsets = lengths("thd", "cuda")["cu_seqlens_q"]
    with refused("cu_seqlens_kv", "the same one"):
        layer(x, cu_seqlens_q=offsets, cu_seqlens_kv=offsets.clone())
    layer(x, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


def test_ranks_over_nccl(tmp_path):
    """All cases of layers_worker.py, both ranks on this GPU if there is no other."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    processes.start("layers_worker.py", tmp_path, "cpu:gloo,cuda:nccl", seconds=200)
    for rank in range(2):
        wrong = [said for said in json.loads((tmp_path / f"results{rank}.json").read_text()).values() if said is not None]
        assert not wrong, "\n".join(wrong)
