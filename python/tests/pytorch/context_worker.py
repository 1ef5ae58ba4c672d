"""Two ranks: ContextParallel with DDP, with FSDP2 and with gradients added up by hand (test_context_ranks.py)."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
import weft.torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import fsdp2
import processes
from refusals import refused

RANKS = 2
IDS, CU = fsdp2.batch(0, 0)


def model():
    torch.manual_seed(0)
    return fsdp2.Decoder()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def norm(parameters):
    return torch.stack([whole(p.grad).norm() for p in parameters]).norm().item()


def one_rank():
    """(loss, norm of gradients) on one rank, without any of Weft's loss: plain cross_entropy over the whole pack."""
    alone = model()
    cp = weft.torch.ContextParallel(CU, "")
    logits = alone(IDS, weft.torch.position_ids(CU, ""), cp)
    loss = F.cross_entropy(logits, weft.torch.next_token_labels(IDS, weft.Packing(CU)))
    loss.backward()
    return loss.item(), norm(alone.parameters())


def compare(net, cp, after=lambda parameters: None):
    loss = fsdp2.loss_and_gradients(net, IDS, cp).item()
    after(net.parameters())
    expected, found = one_rank(), (loss, norm(net.parameters()))
    for name, a, b in zip(("loss", "norm of gradients"), found, expected):
        assert abs(a - b) <= 1e-5 * abs(b), f"{name}: {a}, on one rank {b}"


def add_up(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)


def summed_by_hand():
    compare(model(), weft.torch.ContextParallel(CU, dist.group.WORLD, reduction="sum"), add_up)


def averaged_by_hand():
    def average(parameters):
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= RANKS
    compare(model(), weft.torch.ContextParallel(CU, reduction="mean"), average)


def ddp():
    compare(nn.parallel.DistributedDataParallel(model()), weft.torch.ContextParallel(CU, reduction="mean"))


def ddp_said_to_sum_is_wrong():
    """What the keyword is for: a test of the test."""
    net = nn.parallel.DistributedDataParallel(model())
    fsdp2.loss_and_gradients(net, IDS, weft.torch.ContextParallel(CU, reduction="sum"))
    assert abs(norm(net.parameters()) / one_rank()[1] - 1 / RANKS) < 1e-5


def ddp_every_schedule():
    net = nn.parallel.DistributedDataParallel(model())
    for schedule, layout in zip(("all_gather", "ring", "all_to_all", "hybrid", "exact", "mesh", "auto"),
                                ("zigzag", "balanced", "contiguous", "striped", "balanced", "striped", "auto")):
        net.zero_grad()
        compare(net, weft.torch.ContextParallel(CU, layout=layout, schedule=schedule, reduction="mean"))


def fsdp():
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
    compare(fsdp2.sharded(model(), mesh), weft.torch.ContextParallel(CU, mesh["cp"], reduction="mean"))


def fsdp_as_it_comes():
    """FSDP2 asks its backend for the average. Whether gloo knows what that is decides what has to be said."""
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, torch.ones(RANKS), op=dist.ReduceOp.AVG)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    net = model()
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    compare(net, weft.torch.ContextParallel(CU, mesh, reduction="mean" if out.item() == 1 else "sum"))


def names_of_dimensions():
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
    with mesh:
        assert weft.torch.ContextParallel(CU, "cp").ranks == RANKS
        assert weft.torch.ContextParallel(CU, "dp").ranks == 1
    assert weft.torch.ContextParallel(CU, mesh["cp"].get_group().group_name).ranks == RANKS
    with refused("named 'cp'", 'mesh["cp"]', "with mesh"):
        weft.torch.ContextParallel(CU, "cp")
    with refused("DeviceMesh of 2 dimensions (dp, cp)", 'mesh["cp"]'):
        weft.torch.ContextParallel(CU, mesh)


def rows_and_back():
    cp = weft.torch.ContextParallel(CU, reduction="mean", schedule="ring", mask=weft.Mask(causal=True, window=(9, 0)))
    other = cp.next([0, 30, 31])
    x = torch.arange(31)
    assert torch.equal(other.unshard(other.shard(x)), x)
    assert torch.equal(other.unshard(other.shard(x[None])), x[None])
    assert (other.mask, other.reduction, other.group, other.rows) == (cp.mask, "mean", cp.group, 16)
    labels = other.labels(x)
    assert (labels[~other.valid_rows()] == -100).all()
    assert sum(int(valid.sum()) for valid in weft.torch.all_gather(other.valid_rows())) == 31  # of 32 rows
    # A row without a token is nobody's loss, whatever it says.
    loss = torch.where(other.valid_rows(), 1.0, float("nan"))
    assert other.reduce(other.loss(loss, targets=31)).item() == 1


def attention_of_layers():
    """Each layer's own mask, where rows lie by another: against one rank."""
    torch.manual_seed(0)
    tokens = CU[-1]
    q, k, v = (torch.randn(tokens, 4, 8) for _ in range(3))
    sink = torch.randn(4)
    mine = weft.Mask(causal=True, window=(9, 0))
    slices = [(a, b, a, b, -weft.UNLIMITED, 0) for a, b in zip(CU, CU[1:])]
    for mask in (None, mine, weft.Mask(), weft.Mask(slices=slices)):
        cp, one = weft.torch.ContextParallel(CU, mask=mask), weft.torch.ContextParallel(CU, "", mask=mask)
        local = [cp.shard(x) for x in (q, k, v)]
        layers = [{}, dict(sink=sink, softcap=20.0)]
        if mask is not None and mask.slices is not None:
            with refused("window", "slices", "mask="):
                cp.attention(*local, window=(3, 0))
        else:
            layers += [dict(window=(20, 0)), dict(chunk_size=16), dict(mask=weft.Mask(causal=True)), dict(window_size=(3, 3))]
        for layer in layers:
            out = cp.unshard(cp.attention(*local, **layer))
            torch.testing.assert_close(out, one.attention(q, k, v, **layer), rtol=1e-5, atol=1e-5)


def other_rows():
    cp = weft.torch.ContextParallel([0, 40, 57, 77])
    q = torch.randn(cp.rows, 2, 8)
    with refused("never dealt out"):
        cp.attention(q, q, q)
    weft.torch.shard(torch.zeros(77), [0, 40, 57, 77], layout="contiguous")
    for checked in (False, True):
        with refused("dealt out under contiguous"):
            cp.attention(q, q, q, checked=checked)
    with refused("q has shape [77, 2, 8]", f"{cp.rows} rows"):
        cp.attention(torch.zeros(77, 2, 8), q, q)
    cp.use_layout()
    cp.attention(q, q, q)


def nobody_said_the_reduction():
    cp = weft.torch.ContextParallel(CU)
    labels = cp.labels(IDS)
    for call in (lambda: cp.loss(labels.float()), lambda: cp.scale, lambda: cp.reduce(torch.ones(()))):
        with refused("2 ranks", 'reduction="mean"', "DDP", '"sum"'):
            call()


def buffers_in_place():
    ids, labels = IDS[None].clone(), weft.torch.next_token_labels(IDS, weft.Packing(CU))[None]
    again = [ids.clone(), labels.clone()]
    net = nn.parallel.DistributedDataParallel(model())
    with weft.torch.context_parallel(CU, buffers=[ids, labels], reduction="mean") as cp:
        assert torch.equal(ids, cp.shard(again[0])) and torch.equal(labels, cp.labels(IDS[None]))
        logits = net(ids[0], cp.position_ids(), cp)
        loss = cp.loss(F.cross_entropy(logits, labels[0], reduction="none"))
        loss.backward()
    assert torch.equal(ids, again[0]) and torch.equal(labels, again[1])
    expected, found = one_rank(), (cp.reduce(loss).item(), norm(net.parameters()))
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(found, expected)), (found, expected)


CASES = {fn.__name__: fn for fn in (
    summed_by_hand, averaged_by_hand, ddp, ddp_said_to_sum_is_wrong, ddp_every_schedule, fsdp, fsdp_as_it_comes,
    names_of_dimensions, rows_and_back, attention_of_layers, other_rows, nobody_said_the_reduction, buffers_in_place)}


if __name__ == "__main__":
    folder = sys.argv[1]
    ended = processes.fork(RANKS, lambda r: processes.run_cases(r, CASES, folder), folder, seconds=200)
    sys.exit(any(status for status, _ in ended))
