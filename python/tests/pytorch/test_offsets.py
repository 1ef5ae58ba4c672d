"""Attention from cu_seqlens as tensors, one rank and many, here by the host's planner; on a GPU: cuda/test_cuda_offsets.py."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from torch.library import opcheck
from weft.torch import dealt, offsets, rows, sharding

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import torch_graph
from refusals import refused

PADDED, USED, TOKENS = [0, 16, 24, 48, 64], [13, 0, 24, 9], 66
CU = [0, 13, 13, 37, 46]
PACKING = weft.Packing(CU, cu_seqlens_q_padded=PADDED, tokens_q=TOKENS)
MASKS = {"full": {}, "causal": dict(causal=True), "window": dict(causal=True, window=(5, 0)),
         "chunks": dict(causal=True, chunk_size=6), "bottom_right": dict(causal=True, bottom_right=True)}
attend = weft.torch.context_parallel_attention


def ints(numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def tensors(dtype=torch.float32, tokens=TOKENS):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, h, 8, generator=g, dtype=torch.float64).to(dtype) for h in (4, 2, 2, 4)]


def gradients(call, inputs, dout, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = call(*inputs, **options)[:2]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)]


def same(got, wanted, what, tolerance=0.0):
    for number, (g, w) in enumerate(zip(got, wanted)):
        assert torch.equal(g, w) if not tolerance else torch.allclose(g, w, atol=tolerance, rtol=tolerance), (what, number)


@pytest.mark.parametrize("mask", MASKS)
def test_one_rank(mask):
    *inputs, dout = tensors()
    for extra in ({}, {"softcap": 5.0}, {"scale": 0.3}):
        wanted = gradients(attend, inputs, dout, packing=PACKING, return_lse=True, one_rank=True, **MASKS[mask], **extra)
        for lengths in (dict(cu_seqlens_q=ints(CU), cu_seqlens_q_padded=ints(PADDED)),
                        dict(cu_seqlens_q=ints(PADDED, torch.int64), seqused_q=ints(USED))):
            same(gradients(offsets.attention, inputs, dout, **lengths, **MASKS[mask], **extra), wanted, (mask, extra))


def test_other_keys_and_sinks():
    (q, _, _, dout), (_, k, v, _) = tensors(), tensors(tokens=40)
    packing = weft.Packing(CU, [0, 9, 12, 30, 40], cu_seqlens_q_padded=PADDED, tokens_q=TOKENS)
    lengths = dict(cu_seqlens_q=ints(CU), cu_seqlens_q_padded=ints(PADDED), cu_seqlens_k=ints([0, 9, 12, 30, 40]))
    for extra in ({}, dict(causal=True, bottom_right=True)):
        wanted = gradients(attend, (q, k, v), dout, packing=packing, return_lse=True, one_rank=True, **extra)
        same(gradients(offsets.attention, (q, k, v), dout, **lengths, **extra), wanted, extra)
    sink = torch.randn(4).requires_grad_()
    results = []
    for call, how in ((attend, dict(packing=packing, one_rank=True)), (offsets.attention, lengths)):
        out = call(q, k, v, sink=sink, **how)
        out = out[0] if isinstance(out, tuple) else out
        results.append((out.detach(), *torch.autograd.grad(out, sink, dout)))
    same(*results, "sink")


def test_gradcheck():
    q, k, v, _ = (x.requires_grad_() for x in tensors(torch.float64))
    cu, padded = ints(CU), ints(PADDED)
    assert torch.autograd.gradcheck(
        lambda q, k, v: offsets.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_q_padded=padded, causal=True)[0], (q, k, v),
        fast_mode=True)


@pytest.mark.long
def test_opcheck():
    q, k, v, _ = (x.requires_grad_() for x in tensors())
    cu, padded = ints(CU), ints(PADDED)
    opcheck(torch.ops.weft.attention_offsets.default, (q, k, v, None, cu, padded, None, None, '{"causal": true}'))


SCHEDULES = {"all_gather": "all_gather", "by head groups": weft.Schedule("all_gather", head_groups=2), "ring": "ring",
             "all_to_all": "ulysses", "hybrid": weft.Schedule("hybrid", ulysses=2),
             "hybrid, gathers": weft.Schedule("hybrid", ulysses=2, outer="all_gather"),
             "swaps by head groups": weft.Schedule("all_to_all", head_groups=2)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout, ranks", [("dual_chunk", 2), ("zigzag", 4),
                                           pytest.param("contiguous", 2, marks=pytest.mark.long),
                                           pytest.param("striped", 4, marks=pytest.mark.long)])
def test_ranks(layout, ranks, schedule):
    """Each rank's rows by rows.shard of the same offsets; more tokens than documents fill, so ranks have empty rows too."""
    *inputs, dout = tensors(tokens=72)
    packing = weft.Packing(CU, cu_seqlens_q_padded=PADDED, tokens_q=72)
    cu, padded = ints(CU), ints(PADDED)
    for mask in MASKS.values():
        wanted = gradients(attend, inputs, dout, packing=packing, return_lse=True, one_rank=True, **mask)
        largest = attend(*inputs, packing, return_max_logit=True, one_rank=True, **mask)[1]

        def rank(comm):
            how = dict(cu_seqlens_padded=padded, layout=layout)
            mine = [rows.shard(x, cu, ranks, comm.rank, **how) for x in (*inputs, dout)]
            lengths = dict(cu_seqlens_q=cu, cu_seqlens_q_padded=padded, group=comm, layout=layout,
                           schedule=SCHEDULES[schedule], **mask)
            got = gradients(offsets.attention, mine[:3], mine[3], **lengths)
            assert torch.allclose(offsets.attention(*mine[:3], **lengths)[2], largest)
            return [rows.unshard(x, cu, ranks, comm.rank, tokens=72, **how) for x in got]

        parts = weft.spawn(ranks, rank)
        real = rows.copy_valid_rows(torch.ones(72), cu, padded).bool()
        for number in (0, 2, 3, 4):
            same([sum(part[number] for part in parts)[real]], [wanted[number][real]], (layout, mask, number), 2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_keys_and_sinks_over_ranks(schedule):
    """Keys of other lengths, fewer rows of them, and a sink whose gradients of all ranks sum up to one rank's."""
    (q, _, _, dout), (_, k, v, _) = tensors(tokens=72), tensors(tokens=40)
    cu, padded, cu_k = ints(CU), ints(PADDED), ints([0, 9, 12, 30, 38])
    sink = torch.linspace(-1, 1, 4)
    how = dict(causal=True, bottom_right=True, softcap=3.0)

    def run(inputs, dout, **more):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, lse, _ = offsets.attention(*inputs[:3], sink=inputs[3], cu_seqlens_q=cu, cu_seqlens_q_padded=padded,
                                        cu_seqlens_k=cu_k, **how, **more)
        return [out.detach(), lse, *torch.autograd.grad(out, inputs, dout)]

    wanted = run((q, k, v, sink), dout)

    def rank(comm):
        on_q = dict(cu_seqlens_padded=padded, layout="zigzag")
        mine = [rows.shard(q, cu, 4, comm.rank, **on_q), *(rows.shard(x, cu_k, 4, comm.rank, layout="zigzag") for x in (k, v))]
        got = run((*mine, sink), rows.shard(dout, cu, 4, comm.rank, **on_q), group=comm, schedule=SCHEDULES[schedule])
        back = [rows.unshard(got[i], cu, 4, comm.rank, tokens=72, **on_q) for i in (0, 2)]
        return [*back, *(rows.unshard(got[i], cu_k, 4, comm.rank, tokens=40, layout="zigzag") for i in (3, 4)), got[5]]

    parts = weft.spawn(4, rank)
    real = rows.copy_valid_rows(torch.ones(72), cu, padded).bool()
    for got, want in zip((sum(x) for x in zip(*parts)), (wanted[0][real], wanted[2][real], *wanted[3:])):
        same([got[real] if got.shape[0] == 72 else got], [want], schedule, 2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_depend_on_capacity_alone(schedule):
    """The same bytes for one document and for many, so that a graph of one is right for the other."""
    *inputs, dout = tensors(tokens=72)
    sent = []
    for cu in ([0, 72, 72, 72, 72], [0, 3, 3, 40, 41], [0, 0, 0, 0, 0]):
        cu = ints(cu)

        def rank(comm):
            mine = [rows.shard(x, cu, 4, comm.rank, layout="zigzag") for x in (*inputs, dout)]
            comm.reset_traffic()
            gradients(offsets.attention, mine[:3], mine[3], cu_seqlens_q=cu, group=comm, causal=True,
                      schedule=SCHEDULES[schedule])
            return comm.bytes_sent, comm.bytes_received, comm.messages_sent

        sent.append(weft.spawn(4, rank))
    assert sent[0] == sent[1] == sent[2] and sent[0][0][0] > 0


@pytest.mark.long
def test_processes(tmp_path):
    import processes

    processes.start("offsets_worker.py", tmp_path, seconds=120)


@pytest.mark.long
def test_compiled(monkeypatch):
    """One node, without a break, forward and backward, also by the names of context_parallel_attention."""
    *inputs, dout = tensors()
    cu = ints(CU)
    monkeypatch.setattr(offsets, "given_on_gpu", lambda packing, options: True)

    def call(q, k, v):
        return offsets.attention(q, k, v, cu_seqlens_q=cu, causal=True, schedule="ring", softcap=2.0)[:2]

    def by_name(q, k, v):
        return attend(q, k, v, cu, causal=True, deterministic=True, return_lse=True, one_rank=True)

    for some in (call, by_name):
        compiled = torch.compile(some, fullgraph=True, backend="aot_eager")
        same(gradients(compiled, inputs, dout), gradients(some, inputs, dout), some)


def test_a_decoder_over_ranks(monkeypatch):
    """The training step that graphs capture (bench/torch_graph.py): labels, positions and rows all by offsets as tensors."""
    for module, name in ((offsets, "given_on_gpu"), (dealt, "on_gpu"), (sharding, "on_gpu")):
        monkeypatch.setattr(module, name, lambda *packing: True)
    model = dict(documents=6, device="cpu", dtype=torch.float32, layers=2, hidden=32, heads=(4, 2), dim=8, words=50)
    same_start = torch_graph.Training(60, **model).model.state_dict()  # threads share torch's seed
    for seed, documents in ((1, 1), (2, 3), (3, 6)):

        def loss(group, **options):
            training = torch_graph.Training(60, **model, group=group, **options)
            training.model.load_state_dict(same_start)
            training.set(seed, documents)
            share = training.model.loss(training.ids, training.cu)
            share.backward()
            return [share.detach(), *training.gradients()]

        alone = loss("")
        assert alone[0] > 3  # log 50 at the beginning
        parts = weft.spawn(4, lambda comm: loss(comm, schedule=["all_gather", "ring", "all_to_all"][seed - 1]))
        for number, want in enumerate(alone):
            got = sum(part[number] for part in parts)
            assert (got - want).norm() <= 1e-4 * want.norm(), (documents, number)


def test_refusals():
    *inputs, _ = tensors()
    cu = ints([0, TOKENS])
    for layout in ("balanced", "placed"):
        with refused(f"layout {layout}", "zigzag"):
            offsets.attention(*inputs, cu_seqlens_q=cu, layout=layout)
    with refused("checked is given"):
        offsets.attention(*inputs, cu_seqlens_q=cu, checked=True)
    with refused("k has shape [66, 16]"):
        offsets.attention(inputs[0], inputs[1].flatten(1), inputs[2], cu_seqlens_q=cu)
    with refused("seqused_q has shape [2]"):
        offsets.attention(*inputs, cu_seqlens_q=cu, seqused_q=ints([3, 4]))
    with refused("less than"):
        offsets.attention(*inputs, cu_seqlens_q=ints([0, 40, 30]))
    with refused("a mask of slices"):
        offsets.context_parallel(*inputs, {"cu_seqlens_q": cu}, weft.Mask(slices=[[0, 4, 0, 4, 0, 0]]), "", None, {})

    def over(schedule):
        def rank(comm):
            mine = [rows.shard(x, cu, 2, comm.rank) for x in inputs]
            offsets.attention(*mine, cu_seqlens_q=cu, group=comm, schedule=schedule)

        weft.spawn(2, rank)

    with refused("schedule exact, whose messages depend on lengths"):
        over("exact")
    with refused("schedule mesh, whose steps attend other ranks' queries"):
        over("mesh")
    with refused("ranks_per_step = 3"):
        over(weft.Schedule("ring", ranks_per_step=3))
    with refused("keys in sequence order"):
        over(weft.Schedule("all_gather", key_order="sequence"))


def test_the_log(caplog):
    *inputs, dout = tensors(tokens=72)
    cu = ints([0, 30, 70])

    def rank(comm):
        mine = [rows.shard(x, cu, 4, comm.rank, layout="zigzag") for x in (*inputs, dout)]
        gradients(offsets.attention, mine[:3], mine[3], cu_seqlens_q=cu, causal=True, group=comm, schedule="ring")

    with caplog.at_level("INFO", "weft.torch"):
        weft.torch.log(1)
        try:
            weft.spawn(4, rank)
            offsets.attention(*inputs, cu_seqlens_q=cu)
        finally:
            weft.torch.log(0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 9 and sum("backward: q [18, 4, 8]" in line for line in said) == 4, said
    assert sum("schedule ring of 4 steps, sends " in line for line in said) == 8 and "one rank" in said[-1], said


def test_auto_goes_by_capacity():
    """What is predicted best for a document that fills all rows, the same for any offsets, and never exact."""
    for mask, rows_a_rank in ((weft.Mask(causal=True), 64), (weft.Mask(causal=True, window=(8, 0)), 1 << 16)):
        name, options = offsets._chosen((rows_a_rank, rows_a_rank), 8, "zigzag", mask, (32, 8), weft._core.DType.bf16,
                                        (128, 128), 0)
        assert name in ("all_gather", "ring", "all_to_all", "hybrid") and "ranks_per_step" not in options
    *inputs, _ = tensors(tokens=72)
    cu = ints([0, 30, 70])
    wanted = offsets.attention(*inputs, cu_seqlens_q=cu, causal=True)[0]

    def rank(comm):
        mine = [rows.shard(x, cu, 4, comm.rank, layout="zigzag") for x in inputs]
        out = offsets.attention(*mine, cu_seqlens_q=cu, causal=True, group=comm, schedule="auto")[0]
        return rows.unshard(out, cu, 4, comm.rank, tokens=72, layout="zigzag")

    same([sum(weft.spawn(4, rank))], [wanted], "auto", 2e-5)


def test_the_call_by_any_names():
    cu, other = ints([0, TOKENS]), ints([0, TOKENS])
    found = offsets.offsets_of(None, dict(cu_seqlens_q=cu, cu_seqlens_k=cu))
    assert found["cu_seqlens_q"] is cu and found["cu_seqlens_k"] is None
    assert offsets.offsets_of(None, dict(cu_seqlens_q=cu, cu_seqlens_k=other))["cu_seqlens_k"] is other
    with refused("packing is given together with cu_seqlens_q"):
        offsets.offsets_of(cu, dict(cu_seqlens_q=cu))
    with refused("there are no cu_seqlens of the queries"):
        offsets.offsets_of(None, dict(seqused_q=cu))
    *inputs, _ = tensors()
    got = offsets.context_parallel(*inputs, offsets.offsets_of(cu, {}), weft.Mask(causal=True), "", "off_by_one",
                                   dict(format="thd", layer=3, layout=None))
    wanted = attend(*inputs, cu, causal=True, sink="off_by_one", one_rank=True, return_lse=True)
    same(got[:2], wanted, "off_by_one")


def test_context_parallel_attention_goes_this_way(monkeypatch):
    """As for cu_seqlens on a GPU, by the names that it takes."""
    *inputs, _ = tensors()
    cu = ints([0, 30, TOKENS])
    wanted = attend(*inputs, cu, causal=True, softcap=4.0, return_lse=True, return_max_logit=True, one_rank=True)
    monkeypatch.setattr(offsets, "given_on_gpu", lambda packing, options: True)
    got = attend(*inputs, cu, softmax_scale=None, is_causal=True, softcap=4.0, return_lse=True, return_max_logit=True)
    same(got, wanted, "all three")
    same([attend(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, softcap=4.0)], wanted, "out alone")
    padded = attend(*inputs, cu_seqlens_q=ints(PADDED), seqused_q=ints(USED), one_rank=True)
    monkeypatch.undo()
    same([padded], [attend(*inputs, PACKING, one_rank=True)], "padded")


def test_one_tensor_for_both_sides_and_lengths_of_one():
    """Keys have the lengths that their own arguments say, also where both sides begin at the same tensor."""
    q, k, v, _ = tensors()
    cu, used = ints([0, 16, 24, 48, 66]), ints([13, 0, 24, 9])
    for shorter in ("seqused_q", "seqused_k"):
        outs = [offsets.context_parallel(q, k, v, offsets.offsets_of(None, {"cu_seqlens_q": cu, name: keys, shorter: used}),
                                         None, "", None, {})[0]
                for name, keys in (("cu_seqlens_k", cu), ("cu_seqlens_k", cu.clone()), ("cu_seqlens_kv", cu))]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), shorter
    with refused("cu_seqlens_q, cu_seqlens_q_padded and seqused_q are all given"):
        offsets.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_q_padded=cu, seqused_q=used)
    with refused("cu_seqlens_kv and cu_seqlens_k are both given"):
        offsets.offsets_of(cu, {"cu_seqlens_k": cu, "cu_seqlens_kv": cu})
