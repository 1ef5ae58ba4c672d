"""Row operators on a GPU: without waiting, captured, and with wrong offsets. Their results: pytorch/test_rows.py."""

import pytest

torch = pytest.importorskip("torch")
from weft.torch import rows

from gpu import needs_gpu
from refusals import refused

pytestmark = needs_gpu


def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def everything(x, cu, padded=None):
    """Each operator once; a list of tensors."""
    options = dict(cu_seqlens_padded=padded)
    ordered = rows.sequence_to_rank_order(x, cu, 2, **options)
    local = rows.shard(x, cu, 2, 1, **options)
    tokens = x.shape[0]
    return [ordered, rows.rank_to_sequence_order(ordered, cu, 2, **options), local,
            rows.unshard(local, cu, 2, 1, tokens=tokens, **options), rows.copy_valid_rows(x, cu, padded),
            rows.partition_indices(cu, tokens, 2, 1, **options), *rows.cu_seqlens_on_rank(cu, tokens, 2, 1, **options),
            *rows.all_gather_step(cu, tokens, 2, 1, 0, **options), *rows.ring_step(cu, tokens, 2, 1, 1, **options)]


def test_nothing_waits():
    cu, x = offsets(0, 8, 32), torch.randn(32, 3, device="cuda", requires_grad=True)
    everything(x, cu)  # contexts are made once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(x, cu)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("padded", [False, True])
def test_graphs_are_replayed_on_other_offsets(padded):
    """Other lengths, fewer documents, empty ones: the last offset is repeated."""
    x = torch.randn(32, 5, device="cuda")
    cases = [((0, 8, 32, 32), (0, 8, 32, 32)), ((0, 3, 4, 10), (0, 4, 8, 20)), ((0, 0, 0, 0), (0, 0, 0, 0)), ((0, 16, 16, 29),
                                                                                                          (0, 16, 16, 32))]
    cu, begins = offsets(*cases[0][0]), offsets(*cases[0][1])
    everything(x, cu, begins)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(x, cu, begins if padded else None)
    for real, starts in cases:
        cu.copy_(offsets(*(real if padded else starts)))
        begins.copy_(offsets(*starts))
        graph.replay()
        wanted = everything(x.cpu(), cu.cpu(), begins.cpu() if padded else None)
        for number, (g, w) in enumerate(zip(got, wanted)):
            assert torch.equal(g.cpu(), w), (real, starts, number)
    rows.check_offsets()


@pytest.mark.parametrize("wrong", [(0, 40, 32), (0, 8, 4), (-4, 8, 32), (0, 7, 32)])
def test_wrong_offsets_are_told(wrong):
    """A defined result, and an error that names the values, once, when it is asked for."""
    x, cu = torch.ones(32, 3, device="cuda"), offsets(*wrong)
    torch.cuda.synchronize()
    first = rows.sequence_to_rank_order(x, cu, 2)
    torch.cuda.synchronize()
    with refused("queries on the device: sequence"):
        rows.check_offsets()
    rows.check_offsets()
    again = rows.sequence_to_rank_order(x, cu, 2)
    torch.cuda.synchronize()
    rows.partition_indices(offsets(0, 32), 32, 2, 0)  # the next call is not to blame
    with refused("queries on the device: sequence"):
        rows.check_offsets()
    assert torch.equal(first, again) and ((first == 0) | (first == 1)).all()
    there = rows.cu_seqlens_on_rank(cu, 32, 2, 1)
    torch.cuda.synchronize()
    with refused("on the device"):
        rows.check_offsets()
    assert not there.cu_seqlens.any() and not there.cu_seqlens_padded.any()


def test_offsets_elsewhere():
    with refused("cu_seqlens lie on cuda:0 and rows on cpu"):
        rows.shard(torch.zeros(8, 2), offsets(0, 8), 2, 0)
    x = torch.randn(8, 2, device="cuda")
    assert torch.equal(rows.shard(x, torch.tensor([0, 8]), 2, 0), rows.shard(x, offsets(0, 8), 2, 0))
