"""CUDA graphs from torch: a step captured once and replayed on other packings, against the same step uncaptured."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from weft.torch import offsets, rows

from gpu import PACKING, TOKENS, assert_near, needs_gpu, tensors
from refusals import refused

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import torch_graph

pytestmark = needs_gpu
attend = weft.torch.context_parallel_attention


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def test_a_decoder_trains_in_a_graph():
    """Forward, backward and optimizer of four layers, captured once; 20 packings of 1 to 64 documents, bit for bit."""
    captured, eager = (torch_graph.Training(1024, deterministic=True) for _ in range(2))
    captured.set(0, 5)
    captured.capture()
    eager.like(captured)
    for number in range(20):
        documents = 1 + number * 63 // 19
        for training in (captured, eager):
            training.set(100 + number, documents)
        assert torch.equal(captured.replay(), eager.eager()), documents
        for got, want in zip(captured.gradients(), eager.gradients()):
            assert torch.equal(got, want), documents
    for got, want in zip(captured.model.parameters(), eager.model.parameters()):
        assert torch.equal(got, want)
    rows.check_offsets()


def test_to_rounding_unless_deterministic():
    captured, eager = (torch_graph.Training(1024) for _ in range(2))
    captured.set(0, 5)
    captured.capture()
    for number in range(5):
        for training in (captured, eager):
            training.set(100 + number, 1 + 15 * number)
        eager.like(captured)
        assert torch.allclose(captured.replay(), eager.eager(), rtol=1e-4)
        for got, want in zip(captured.gradients(), eager.gradients()):
            assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()


def test_what_the_graph_of_an_attention_holds():
    """Few launches, and no memory of its own: all of it is torch's."""
    found = torch_graph.attention_nodes()
    assert found["forward"]["kernels"] <= 4 and found["backward"]["kernels"] <= 6, found
    for some in found.values():
        assert some["memsets"] <= 4 and not any(some[name] for name in ("copies", "allocations", "frees", "others")), found


def test_graphed_callables():
    layer = torch_graph.Layer(128, (4, 2), 64, dict(one_rank=True, deterministic=True)).cuda()
    x = torch.randn(256, 128, device="cuda", requires_grad=True)
    positions, cu = torch.arange(256, device="cuda"), ints(0, 100, 256, *[256] * 6)
    names = [name for name, _ in layer.named_parameters()]

    def run(call, x, cu):
        x = x.detach().requires_grad_()
        out = call(x, positions, cu)
        return [out.detach().clone(), *(g.clone() for g in torch.autograd.grad(out.sum(), (x, *layer.parameters())))]

    others = [ints(0, 256, *[256] * 7), ints(0, 3, 3, 90, 91, 200, 200, 230, 231), ints(*[0] * 9)]
    wanted = [run(layer, x * n, other) for n, other in enumerate(others, 1)]
    # The samples become the graph's own inputs, which calls overwrite.
    graphed = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(), positions.clone(), cu))
    for n, (other, want) in enumerate(zip(others, wanted), 1):
        for name, g, w in zip(("out", "x", *names), run(graphed, x * n, other), want):
            assert torch.allclose(g, w, rtol=1e-5, atol=1e-5), (n, name)


@pytest.mark.long
def test_compiled_with_less_overhead():
    """torch.compile puts the operator into its CUDA graphs."""
    from torch._dynamo.utils import counters

    layer = torch_graph.Layer(128, (4, 2), 64, dict(one_rank=True, deterministic=True)).cuda()
    x, positions = torch.randn(256, 128, device="cuda"), torch.arange(256, device="cuda")
    counters.clear()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for cu in [ints(0, 100, 256, 256)] * 3 + [ints(0, 256, 256, 256), ints(0, 3, 3, 90)]:
        results = []
        for call in (compiled, layer):
            leaf = x.clone().requires_grad_()
            layer.zero_grad(set_to_none=True)  # gradients of the last step lie in memory that this one uses again
            torch.compiler.cudagraph_mark_step_begin()
            out = call(leaf, positions, cu)
            out.sum().backward()
            results.append([out.detach().clone(), leaf.grad.clone()])
        for got, want in zip(*results):
            assert (got - want).norm() <= 1e-4 * want.norm(), cu
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]


def test_refused_before_anything_is_captured():
    *inputs, _ = tensors(torch.bfloat16, dim=128)
    cu = ints(0, 100, TOKENS)
    wanted = attend(*inputs, cu, causal=True, one_rank=True)
    own = weft.Mask(slices=[(0, 8, 0, 8, None, None)])
    cases = [("schedule exact, whose messages depend on lengths", dict(packing=cu, schedule="exact")),
             ("a mask of slices", dict(packing=cu, mask=own)), ("captured", dict(packing=PACKING))]
    for said, how in cases:
        with refused(said), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attend(*inputs, one_rank=True, **how)
        torch.cuda.synchronize()
        assert torch.equal(attend(*inputs, cu, causal=True, one_rank=True), wanted)


def test_ranks_that_meet_on_the_host_are_refused():
    *inputs, _ = tensors(torch.bfloat16, dim=128)
    cu = ints(0, 100, TOKENS)

    def rank(comm):
        mine = [rows.shard(x, cu, 2, comm.rank, layout="zigzag") for x in inputs]
        offsets.attention(*mine, cu_seqlens_q=cu, group=comm)
        torch.cuda.synchronize()
        if comm.rank == 0:
            with refused("a CUDA graph is captured over 2 ranks that meet on the host (threads)"), \
                    torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                offsets.attention(*mine, cu_seqlens_q=cu, group=comm)
            torch.cuda.synchronize()
        return True

    assert weft.spawn(2, rank, time_limit=30) == [True, True]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_with_nccl(tmp_path, ranks):
    """Processes that share the GPU: every schedule and the decoder, captured and replayed."""
    import processes

    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    processes.start("cuda_graph_worker.py", tmp_path, ranks, seconds=150)


def test_memory_of_a_graph_is_torchs():
    """After the graph is gone, torch has all of its memory again, and Weft's own pool has not grown."""
    *inputs, dout = tensors(torch.bfloat16, dim=128)
    inputs = [x.requires_grad_() for x in inputs]
    cu = ints(0, 100, TOKENS)

    def step():
        return torch.autograd.grad(attend(*inputs, cu, causal=True, one_rank=True), inputs, dout)

    wanted = step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert_near(got, wanted, "bf16")
    assert torch.cuda.memory_allocated() > before
    del got, graph
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
