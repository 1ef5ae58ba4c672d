"""Two ranks: weft.torch's layers over a process group against the same layers on one rank (test_layers_ranks.py).

`layers_worker.py FOLDER [BACKEND]`: gloo unless said; with nccl tensors are on GPUs, or both ranks on one (test_cuda_layers.py).
"""

import sys

import torch
import torch.distributed as dist
import weft
import weft.torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import processes
from refusals import refused

RANKS = 2
BACKEND = sys.argv[2] if __name__ == "__main__" and len(sys.argv) > 2 else "gloo"
DEVICE = "cuda" if "nccl" in BACKEND else "cpu"
BOUND = 1e-5 if DEVICE == "cpu" else 5e-5  # GPUs add up in another order
HIDDEN = 32
CU = [0, 8, 12, 28, 32]
WORDS = dict(num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False, rotary_base=10000.0)
SHAPES = {"thd": (32, HIDDEN), "bshd": (2, 16, HIDDEN), "sbhd": (16, 2, HIDDEN)}
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")


class Model(nn.Module):
    """A layer with a window and a learnable sink, and a chunked one."""

    def __init__(self, format, **words):
        super().__init__()
        torch.manual_seed(0)
        layer = weft.torch.TransformerLayer
        words = {**WORDS, "qkv_format": format, **words}
        self.layers = nn.ModuleList([layer(HIDDEN, 40, 4, window_size=(6, 0), softmax_type="learnable", **words),
                                     layer(HIDDEN, 40, 4, chunk_size=5, layer_number=2, **words)])
        for p in self.parameters():
            nn.init.normal_(p, 0, 0.2)
        self.to(DEVICE)

    def forward(self, x, **call):
        for layer in self.layers:
            x = layer(x, **call)
        return x


def whole(format):
    torch.manual_seed(1)
    return torch.randn(SHAPES[format]).to(DEVICE), torch.randn(SHAPES[format]).to(DEVICE)


def packing_of(format):
    if format == "thd":
        return weft.Packing(CU)
    return weft.Packing.from_batch(2, 16)


def mine(x, format, packing, layout="dual_chunk"):
    return weft.shard(x, dist.get_rank(), ranks=RANKS, packing=packing, format=format, layout=layout)


def one_rank(format, **call):
    """The loss and all gradients on one rank, which has all rows."""
    model, (x, w) = Model(format), whole(format)
    loss = (model(x, **call) * w).sum()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def compare(model, loss, expected):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    assert abs(loss.item() - expected[0]) <= BOUND * max(1, abs(expected[0])), f"loss {loss.item()}, on one rank {expected[0]}"
    for (name, p), grad in zip(model.named_parameters(), expected[1]):
        dist.all_reduce(p.grad)
        worst = (p.grad - grad).abs().max() / grad.abs().max()
        assert worst <= BOUND, f"gradient of {name}: {worst.item()}"


def by_kind(format, kind):
    call = dict(cu_seqlens_q=torch.tensor(CU, dtype=torch.int32)) if format == "thd" else {}
    expected = one_rank(format, **call)
    model, (x, w) = Model(format), whole(format)
    for layer in model.layers:
        layer.set_context_parallel_group(dist.group.WORLD, list(range(RANKS)), None, kind)
    packing = packing_of(format)
    x, w = (mine(t, format, packing) for t in (x, w))
    loss = (model(x, **call) * w).sum()
    loss.backward()
    compare(model, loss, expected)


def padded_documents():
    """Documents whose lengths do not divide by 2·ranks, padded with NaN."""
    cu, padded = torch.tensor([0, 5, 6, 19, 22]), torch.tensor(CU)
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip(CU, torch.diff(cu).tolist())])
    x, w = whole("thd")
    one = Model("thd")
    loss = (one(x[rows], cu_seqlens_q=cu) * w[rows]).sum()
    loss.backward()
    expected = loss.item(), [p.grad for p in one.parameters()]
    model = Model("thd")
    packing = weft.Packing(cu.tolist(), cu_seqlens_q_padded=CU)
    for layer in model.layers:
        layer.set_context_parallel_group(dist.group.WORLD)
    real = torch.zeros(32, 1, device=DEVICE)
    real[rows] = 1
    x, w, real = (mine(t, "thd", packing) for t in (x, w, real))
    out = model(x, cu_seqlens_q=cu, cu_seqlens_q_padded=padded)
    loss = torch.where(real.bool(), out * w, 0).sum()
    loss.backward()
    compare(model, loss, expected)


def padded_batch():
    x, w = whole("bshd")
    cu = torch.tensor([0, 11, 18])
    seen = torch.arange(16) < torch.diff(cu)[:, None]
    w = w * seen[..., None].to(DEVICE)
    one = Model("bshd")
    loss = (one(x, cu_seqlens_q=cu, attn_mask_type="padding_causal") * w).sum()
    loss.backward()
    expected = loss.item(), [p.grad for p in one.parameters()]
    model = Model("bshd")
    for layer in model.layers:
        layer.set_context_parallel_group(dist.group.WORLD)
    packing = weft.Packing.from_batch(2, 16, seqused_q=torch.diff(cu).tolist())
    x, w = (mine(t, "bshd", packing) for t in (x, w))
    loss = (model(x, cu_seqlens_q=cu, attn_mask_type="padding_causal") * w).sum()
    loss.backward()
    compare(model, loss, expected)


def context_parallel_object():
    """Balanced rows, no padding to 2·ranks, the group of a mesh, and an exchange of just what layers see."""
    cu = [0, 7, 9, 26, 31]
    x, w = (t[:31] for t in whole("thd"))
    one = Model("thd")
    loss = (one(x, cu_seqlens_q=cu) * w).sum()
    loss.backward()
    expected = loss.item(), [p.grad for p in one.parameters()]
    mesh = init_device_mesh(DEVICE, (1, RANKS), mesh_dim_names=("dp", "cp"))
    for schedule in ("auto", "exact"):
        cp = weft.torch.ContextParallel(cu, mesh["cp"], schedule=schedule, reduction="sum")
        model = Model("thd")
        loss = (model(cp.shard(x), cp=cp) * cp.shard(w)).sum()
        loss.backward()
        compare(model, loss, expected)
    model = Model("thd", cp_comm_type="a2a")  # the layers' own schedule, over the same rows
    loss = (model(cp.shard(x), cp=cp) * cp.shard(w)).sum()
    loss.backward()
    compare(model, loss, expected)
    with refused("contiguous", "balanced", "cp says"):
        Model("thd", layout="contiguous")(cp.shard(x), cp=cp)


def groups_of_two_levels():
    """cp_group = [a2a group, p2p group], as Transformer Engine takes it."""
    own = [dist.new_group([r]) for r in range(RANKS)][dist.get_rank()]
    expected = one_rank("thd", cu_seqlens_q=CU)
    for groups, ulysses in (([dist.group.WORLD, own], 2), ([own, dist.group.WORLD], 1)):
        model, (x, w) = Model("thd", cp_comm_type="a2a+p2p"), whole("thd")
        for layer in model.layers:
            layer.set_context_parallel_group(groups, list(range(RANKS)), None)
            assert layer.self_attention.core_attention.schedule == weft.Schedule("hybrid", ulysses=ulysses)
        loss = (model(mine(x, "thd", packing_of("thd")), cu_seqlens_q=CU) * mine(w, "thd", packing_of("thd"))).sum()
        loss.backward()
        compare(model, loss, expected)
    model = Model("thd").layers[0]
    with refused("a list of 2 groups", "ring", "a2a+p2p"):
        model.set_context_parallel_group([own, own], [0, 1], None, "p2p")
    with refused("no process group of ranks [0, 7]", "new_group"):
        model.set_context_parallel_group([dist.group.WORLD, own], [0, 7], None, "a2a+p2p")
    with refused("rank 0 of 1", "consecutive"):
        model.set_context_parallel_group([own, own], [0, 1], None, "a2a+p2p")


def other_layout():
    expected = one_rank("thd", cu_seqlens_q=CU)
    model, (x, w) = Model("thd", layout="contiguous", cp_comm_type="all_gather"), whole("thd")
    for layer in model.layers:
        layer.set_context_parallel_group(dist.group.WORLD)
    x, w = (weft.torch.shard(t, CU, layout="contiguous") for t in (x, w))
    loss = (model(x, cu_seqlens_q=CU) * w).sum()
    loss.backward()
    compare(model, loss, expected)


def refusals():
    layer = Model("thd").layers[0]
    x = torch.randn(12, HIDDEN, device=DEVICE)
    with refused("cp_global_ranks are [1, 0]", "[0, 1]"):
        layer.set_context_parallel_group(dist.group.WORLD, [1, 0])
    layer.set_context_parallel_group(dist.group.WORLD)
    cu = [0, 4, 24]
    with refused("never dealt out", "use_layout"):
        layer(x, cu_seqlens_q=cu)
    weft.torch.shard(torch.zeros(24), cu)
    with refused("dual_chunk", "dealt out under balanced"):
        layer(x, cu_seqlens_q=cu)
    cp = weft.torch.ContextParallel(cu, "")
    with refused("ContextParallel", "set_context_parallel_group"):
        layer(x, cp=cp)
    weft.torch.use_layout(cu, layout="dual_chunk")
    assert layer(x, cu_seqlens_q=cu).shape == (12, HIDDEN)
    layer.set_context_parallel_group(None)
    layer(x, cu_seqlens_q=[0, 12])


def compiled():
    """fullgraph over two ranks, by offsets and positions, and as a batch."""
    for format in ("thd", "bshd"):
        call, packing = {}, packing_of(format)
        if format == "thd":
            positions = weft.torch.position_ids(packing, layout="dual_chunk")
            call = dict(cu_seqlens_q=torch.tensor(CU), position_ids=positions)
        model, (x, w) = Model(format), whole(format)
        for layer in model.layers:
            layer.set_context_parallel_group(dist.group.WORLD, cp_comm_type="p2p")
        expected = one_rank(format, **{name: value for name, value in call.items() if name != "position_ids"})
        x, w = (mine(t, format, packing) for t in (x, w))
        loss = (torch.compile(model, fullgraph=True, backend="aot_eager")(x, **call) * w).sum()
        loss.backward()
        compare(model, loss, expected)


def ddp():
    """Averaged gradients are half of their sum."""
    expected = one_rank("thd", cu_seqlens_q=CU)
    model, (x, w) = Model("thd"), whole("thd")
    for layer in model.layers:
        layer.set_context_parallel_group(dist.group.WORLD, cp_comm_type="a2a")
    net = nn.parallel.DistributedDataParallel(model)
    x, w = (mine(t, "thd", packing_of("thd")) for t in (x, w))
    (net(x, cu_seqlens_q=CU, checkpoint_core_attention=True) * w).sum().backward()
    for (name, p), grad in zip(model.named_parameters(), expected[1]):
        assert (p.grad * RANKS - grad).abs().max() <= BOUND * grad.abs().max(), name


def fsdp():
    """FSDP2 averages or, where gloo does not know how, adds up."""
    expected = one_rank("thd", cu_seqlens_q=CU)
    average = torch.empty(1, device=DEVICE)
    dist.reduce_scatter_tensor(average, torch.ones(RANKS, device=DEVICE), op=dist.ReduceOp.AVG)
    model, (x, w) = Model("thd"), whole("thd")
    mesh = init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("cp",))
    for layer in model.layers:
        layer.set_context_parallel_group(mesh)
        fully_shard(layer, mesh=mesh)
    x, w = (mine(t, "thd", packing_of("thd")) for t in (x, w))
    (fully_shard(model, mesh=mesh)(x, cu_seqlens_q=CU) * w).sum().backward()
    for (name, p), grad in zip(model.named_parameters(), expected[1]):
        found = p.grad.full_tensor() * (RANKS if average.item() == 1 else 1)
        assert (found - grad).abs().max() <= BOUND * grad.abs().max(), name


CASES = {f"{format}_{kind}": lambda format=format, kind=kind: by_kind(format, kind) for format in SHAPES for kind in KINDS}
CASES.update({fn.__name__: fn for fn in (padded_documents, padded_batch, context_parallel_object, groups_of_two_levels,
                                         other_layout, refusals, compiled, ddp, fsdp)})


if __name__ == "__main__":
    folder = sys.argv[1]
    ended = processes.fork(RANKS, lambda r: processes.run_cases(r, CASES, folder), folder, seconds=250, backend=BACKEND)
    sys.exit(any(status for status, _ in ended))
