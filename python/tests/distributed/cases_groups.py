"""Rows, copies, groups and what checked ranks tell each other. A case runs on every rank, in the same order."""

import contextlib
import copy
import gc
import sys

import numpy as np
import torch
import torch.distributed as dist
import weft
import weft.torch

from group_cases import LAYOUTS, MASKS, PADDED, RANKS, SCHEDULES, SELF, case, compare, run, tensors, told


@case
def rows_there_and_back():
    for layout, packing in [*((name, SELF) for name in LAYOUTS[:4]), *((name, PADDED) for name in LAYOUTS)]:
        mask = MASKS["causal"]
        place = dict(layout=layout, mask=mask)
        ids = torch.arange(1, packing.tokens_q + 1)
        mine = weft.torch.shard(ids, packing, **place)
        assert torch.equal(weft.torch.unshard(mine, packing, **place), ids), layout
        batch = weft.torch.shard(ids[None], packing, dim=1, **place)
        assert torch.equal(batch[0], mine) and torch.equal(weft.torch.unshard(batch, packing, dim=1, **place)[0], ids)
        # Positions, real rows and labels are those of the tokens that lie here.
        everything = torch.full((packing.tokens_q,), -1)
        for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q):
            everything[begin:begin + n] = torch.arange(n)
        real = weft.torch.valid_rows(packing, **place)
        expected = weft.torch.shard(everything, packing, fill=-1, **place)
        assert torch.equal(expected >= 0, real)
        assert torch.equal(weft.torch.position_ids(packing, **place), expected.clamp(min=0))
        labels = weft.torch.shard(weft.torch.next_token_labels(ids, packing), packing, fill=-100, **place)
        for token, label in zip(mine.tolist(), labels.tolist()):
            last = any(token == begin + n for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q))
            unreal = token == 0 or everything[token - 1] < 0
            assert label == (-100 if last or unreal else token + 1), (layout, token, label)
        count = torch.tensor([(labels >= 0).sum()])
        dist.all_reduce(count)
        assert count.item() == int(np.maximum(packing.lengths_q - 1, 0).sum())


@case
def copies():
    group = dist.new_group([0, 1, 2, 3])
    rows = [weft.torch.shard(x, SELF, group) for x in tensors(SELF)[:3]]
    layer = weft.torch.ContextParallelAttention(group=group, sink="learnable", heads=4)
    out = layer(*rows, SELF)
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), out)
    micros = weft.prepare.MicroSequences(SELF, ranks=4, micros=2, pad=True)
    micro = weft.torch.MicroSequenceAttention(group=group)
    x = torch.randn(2 * micros.local, 2, 8)
    assert torch.equal(micro(x, x, x, micros), copy.deepcopy(micro)(x, x, x, micros))


@case
def checked_mismatches_name_the_ranks():
    """And the group is as good as before."""
    me = dist.get_rank()
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]

    def wrong(text, *args, **options):
        try:
            run(*rows, *args, checked=True, **options)
        except weft.Error as e:
            assert text in str(e) and "rank 2" in str(e), str(e)
        else:
            raise AssertionError(f"{text}: nobody noticed")

    for _ in range(2):  # the second time the others' problem is known
        right = dict(causal=True, schedule="ring")
        assert run(*rows, SELF, checked=True, **right)
        other = weft.Packing([0, 9, 10, 33, 61])
        wrong("packing", other if me == 2 else SELF, **right)
        wrong("mask", SELF, causal=True, window=(2 if me == 2 else 3, 0), schedule="ring")
        wrong("schedule", SELF, causal=True, schedule="all_gather" if me == 2 else "ring")
        wrong("rank", SELF, scale=0.1 if me == 2 else 0.2, **right)
        compare(SELF, MASKS["causal"], dict(schedule="ring", checked=True))


@case
def checked_layouts_and_sinks():
    odd = dist.get_rank() == 2
    mine = weft.Mask() if odd else MASKS["causal"]
    rows = [weft.torch.shard(x, SELF, layout="balanced", mask=mine) for x in tensors(SELF)]
    told("layout: rank 2 differs from ranks 0, 1, 3",
         lambda: run(*rows, SELF, causal=True, layout="balanced", layout_mask=mine, checked=True))
    rows = [weft.torch.shard(x, SELF) for x in tensors(SELF)]
    sink = torch.tensor([1.0, 2.0, 3.0, 5.0 if odd else 4.0])
    told("values of the sink: rank 2 differs from ranks 0, 1, 3", lambda: run(*rows, SELF, causal=True, sink=sink, checked=True))


@case
def checked_ranks_out_of_step():
    """Rank 2 leaves out a layer, or makes one twice: all other things of the calls are alike."""
    odd = dist.get_rank() == 2
    rows = [[weft.torch.shard(x, SELF) for x in tensors(SELF, seed)] for seed in range(4)]
    layers = [weft.torch.ContextParallelAttention(schedule="ring", checked=True) for _ in range(4)]

    def forward(order):
        return [layers[n](*(x.requires_grad_() for x in rows[n][:3]), SELF) for n in order]

    first = layers[0].number
    told(f"rank 2 is at the forward of layer {first + 3}, ranks 0, 1, 3 are at the forward of layer {first + 2}",
         lambda: forward((0, 1, 3, 3) if odd else range(4)))
    told(f"rank 2 is at the forward of layer {first + 1}, ranks 0, 1, 3 are at the forward of layer {first + 2}",
         lambda: forward((0, 1, 1, 2) if odd else range(4)))

    def backward():
        out = forward(range(4))
        for n in (3, 1, 2, 0) if odd else (3, 2, 1, 0):
            out[n].sum().backward()

    told(f"rank 2 is at the backward of layer {first + 1}, ranks 0, 1, 3 are at the backward of layer {first + 2}", backward)


@case
def checked_backwards_of_other_forwards():
    """Without numbers of layers: each rank knows which of its forwards wrote what a backward is given."""
    odd = dist.get_rank() == 2
    rows = [[weft.torch.shard(x, SELF) for x in tensors(SELF, seed)] for seed in range(3)]

    def step(order):
        out = [
            weft.torch.context_parallel_attention(*(x.requires_grad_() for x in r[:3]), SELF, causal=True, checked=True)
            for r in rows
        ]
        for n in order:
            out[n].sum().backward()

    step((0, 2, 1))
    told("the backward: out and lse are those of call", lambda: step((2, 0, 1) if odd else (2, 1, 0)))


@case
def checked_micro_sequences():
    odd = dist.get_rank() == 2
    micros = weft.prepare.MicroSequences(SELF, ranks=4, micros=2, pad=True)
    other = weft.prepare.MicroSequences(weft.Packing([0, 9, 10, 33, 61]), ranks=4, micros=2, pad=True)
    x = torch.randn(2 * micros.local, 2, 8, requires_grad=True)
    plain, checked = weft.torch.MicroSequenceAttention(), weft.torch.MicroSequenceAttention(checked=True)
    assert torch.equal(plain(x, x, x, micros), checked(x, x, x, micros))
    checked(x, x, x, micros).sum().backward()
    told("packing: rank 2 differs from ranks 0, 1, 3", lambda: checked(x, x, x, other if odd else micros))
    told("mask: rank 2 differs", lambda: checked(x, x, x, micros, mask=weft.Mask(causal=True, window=(2 if odd else 3, 0))))
    told("values of the sink: rank 2 differs", lambda: checked(x, x, x, micros, sink=torch.tensor([1.0, 3.0 if odd else 2.0])))
    again = weft.torch.MicroSequenceAttention(checked=True)
    told(f"rank 2 is at a new K/V buffer of layer {again.number}, ranks 0, 1, 3 are at a new K/V buffer of layer "
         f"{checked.number}", lambda: (again if odd else checked)(x, x, x, micros))


@case
def meshes():
    """A DeviceMesh of one dimension is a group; of several, the error says how to name one."""
    from torch.distributed.device_mesh import init_device_mesh

    flat, both = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    compare(SELF, MASKS["causal"], SCHEDULES["ring"], group=flat)
    compare(SELF, MASKS["window"], SCHEDULES["all_gather"], group=both["cp"], seed=dist.get_rank() // 2)
    layer = weft.torch.ContextParallelAttention(group=both["cp"])
    rows = [weft.torch.shard(x, SELF, both["cp"]) for x in tensors(SELF)[:3]]
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), layer(*rows, SELF))
    assert weft.torch.communicator(both["cp"]).ranks == 2
    for use in (weft.torch.shard, weft.torch.unshard):
        try:
            use(rows[0], SELF, both)
            raise AssertionError("a mesh of two dimensions was taken")
        except weft.Error as e:
            assert "2 dimensions" in str(e) and 'mesh["cp"]' in str(e), e


@case
def layouts_that_do_not_agree():
    """Over a group: unchecked and checked, attention and unshard, by group and by its communicator. The group stays whole."""
    packing, causal = weft.Packing([0, 9, 31, 77]), dict(causal=True, schedule="ring")
    x = tensors(packing)[0]

    def wrong(call, *words):
        try:
            call()
            raise AssertionError(f"{words}: nobody noticed")
        except weft.Error as e:
            assert all(word in str(e) for word in words), e

    group = dist.new_group([0, 1, 2, 3])
    contiguous = weft.torch.shard(x, packing, group, layout="contiguous")
    for checked in (False, True):
        wrong(
            lambda: run(*[contiguous] * 4, packing, group=group, checked=checked, **causal), "under layout balanced",
            "under contiguous", "weft.torch.use_layout",
        )
    wrong(lambda: weft.torch.unshard(contiguous, packing, group), "unshard under layout balanced")
    run(*[contiguous] * 4, packing, group=group, layout="contiguous", **causal)
    weft.torch.use_layout(packing, group, layout="striped")
    run(*[contiguous] * 4, packing, group=group, layout="striped", **causal)
    # Of another group with as many ranks it is known how rows lie, until that group says otherwise.
    other = dist.new_group([0, 1, 2, 3])
    run(*[contiguous] * 4, packing, group=other, layout="contiguous", **causal)
    mine = weft.shard(x.numpy(), weft.torch.communicator(other), packing=packing)
    wrong(
        lambda: run(*[contiguous] * 4, packing, group=dist.new_group([0, 1, 2, 3]), layout="dual_chunk", **causal),
        "multiple of 2*ranks",
    )
    wrong(lambda: run(*[torch.from_numpy(mine)] * 4, packing, group=other, layout="zigzag", **causal), "under balanced")
    run(*[torch.from_numpy(mine)] * 4, packing, group=other, **causal)


@case
def groups_that_end_are_forgotten():
    from weft import _placed
    from weft.torch import group as module

    group = dist.new_group([0, 1, 2, 3])
    weft.torch.position_ids(SELF, group)
    scope, name = module.scope_of(group), group.group_name
    assert any(key[0] is scope for key in _placed._known)
    dist.barrier()  # every rank has connected: one that leaves before would break the others' new_group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    weft.torch.position_ids(SELF)
    assert not any(key[0] is scope for key in _placed._known) and name not in module._scopes


@case
def messages_of_gpus():
    """The operations that NCCL is asked for, by gloo: ranks of a group, in the order of the lists, none for some ranks."""
    from weft.torch import group as module

    group = dist.new_group([3, 1, 2])
    if dist.get_rank() == 0:
        return
    transport, streams = module._Transport(group, 20.0), module._in_stream
    module._in_stream = lambda device, stream: contextlib.nullcontext()
    try:
        mine, got = transport.rank, [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
        to, back = (mine + 1) % 3, (mine - 1) % 3
        sent = [torch.full((8,), 10 * mine + i, dtype=torch.uint8) for i in range(2)]
        transport.exchange_on_gpu([(to, x) for x in sent], [(back, x) for x in got], 0, 0).wait()
        assert [x[0].item() for x in got] == [10 * back, 10 * back + 1], got
        if mine < 2:
            other = 1 - mine
            transport.exchange_on_gpu([(other, sent[0])], [(other, got[0])], 0, 0).wait()
            assert got[0][0].item() == 10 * other
    finally:
        module._in_stream = streams


@case
def a_world_by_the_name_of_one_that_ended():
    """The last case: the world ends, and another begins, in which ranks have other numbers."""
    me, group = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    compare(SELF, MASKS["causal"], dict(schedule="ring"))
    names = dist.group.WORLD.group_name, group.group_name
    dist.destroy_process_group()
    try:
        run(*tensors(SELF), SELF, group=names[1])
        raise AssertionError("a group that has ended was used")
    except weft.Error as e:
        assert names[1] in str(e)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/again", rank=RANKS - 1 - me, world_size=RANKS)
    assert dist.group.WORLD.group_name == names[0]
    weft.torch.communicator(time_limit=20)
    compare(SELF, MASKS["causal"], dict(schedule="ring"))
