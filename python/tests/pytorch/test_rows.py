"""Row operators against index formulas written here, on random packings; on a GPU too if there is one."""

import random

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from torch.library import opcheck
from weft.torch import rows

from refusals import refused

DEVICES = ["cpu"] + (["cuda"] if weft._core.has_cuda and torch.cuda.is_available() else [])
LAYOUTS = ["contiguous", "dual_chunk", "zigzag", "striped"]
PACKINGS = 500


def packings(seed, count):
    """(cu_seqlens, cu_seqlens_padded, tokens, ranks, layout), lists and numbers; half of them without padding."""
    r = random.Random(seed)
    for number in range(count):
        layout, ranks = LAYOUTS[number % 4], r.choice([1, 2, 3, 4, 8])
        multiple = 2 * ranks if layout == "dual_chunk" else 1
        cu, padded, plain = [0], [r.choice([0, 0, 3])], r.random() < 0.5
        if plain:
            padded = [0]
        for _ in range(r.choice([1, 1, 2, 5, 40])):
            length = r.choice([0, 1, r.randrange(8), r.randrange(70)])
            room = -(-(length + (0 if plain else r.choice([0, 0, 5]))) // multiple) * multiple
            length = room if plain else length
            cu.append(cu[-1] + length)
            padded.append(padded[-1] + room)
        tokens = padded[-1] + r.choice([0, 0, 7])
        yield cu, padded, tokens, ranks, layout


def tokens_of(padded, tokens, ranks, rank, layout):
    """Token of each row of a rank, from the words of docs/concepts.md."""
    begin, dealt = padded[0], padded[-1] - padded[0]
    if layout == "dual_chunk":
        held = []
        for a, b in zip(padded, padded[1:]):
            piece = (b - a) // (2 * ranks)
            for p in (rank, 2 * ranks - 1 - rank):
                held += range(a + p * piece, a + (p + 1) * piece)
        rows_held = tokens // ranks
    elif layout == "striped":
        held, rows_held = list(range(begin + rank, padded[-1], ranks)), -(-tokens // ranks)
    else:
        pieces = ranks if layout == "contiguous" else 2 * ranks
        piece = -(-dealt // pieces)
        own = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
        held = [t if t < padded[-1] else -1 for p in own for t in range(begin + p * piece, begin + (p + 1) * piece)]
        rows_held = -(-tokens // pieces) * (pieces // ranks)
    return held + [-1] * (rows_held - len(held))


def take(x, tokens):
    """Rows of x by number, zeros for -1."""
    index = torch.tensor(tokens, dtype=torch.long, device=x.device)
    return x[index.clamp(min=0)] * (index >= 0).view(-1, *[1] * (x.dim() - 1)) if len(tokens) and x.shape[0] else x.new_zeros(
        (len(tokens), *x.shape[1:]))


def offsets_on(device, cu, padded, number):
    dtype = torch.int32 if number % 2 else torch.int64
    cu, padded = torch.tensor(cu, dtype=dtype), torch.tensor(padded, dtype=dtype)
    if number % 3:  # every third time those of the CPU for rows on a GPU
        cu, padded = cu.to(device), padded.to(device)
    return cu, None if torch.equal(cu, padded) else padded


def same(got, wanted, what):
    assert got.dtype == wanted.dtype and torch.equal(got, wanted), what


@pytest.mark.parametrize("device", DEVICES)
def test_orders_and_valid_rows(device):
    for number, (cu, padded, tokens, ranks, layout) in enumerate(packings(1, PACKINGS)):
        what = f"problem {number}: {cu} {padded} {tokens} tokens, {layout} on {ranks}"
        offsets, begins = offsets_on(device, cu, padded, number)
        options = dict(cu_seqlens_padded=begins, layout=layout)
        shape, dtype = [(), (3,), (2, 4)][number % 3], [torch.float32, torch.bfloat16, torch.int64, torch.uint8][number % 4]
        x = torch.randint(1, 100, (tokens, *shape), device=device).to(dtype)
        ranks_tokens = [tokens_of(padded, tokens, ranks, r, layout) for r in range(ranks)]
        order = [t for held in ranks_tokens for t in held]
        back = [-1] * tokens
        for row, t in enumerate(order):
            if t >= 0:
                back[t] = row
        ordered = rows.sequence_to_rank_order(x, offsets, ranks, **options)
        same(ordered, take(x, order), what)
        same(rows.rank_to_sequence_order(ordered, offsets, ranks, tokens=tokens, **options), take(ordered, back), what)
        real = set().union(*(range(p, p + b - a) for p, a, b in zip(padded, cu, cu[1:])), ())
        same(rows.copy_valid_rows(x, offsets, begins), take(x, [t if t in real else -1 for t in range(tokens)]), what)
        for rank, held in enumerate(ranks_tokens):
            local = rows.shard(x, offsets, ranks, rank, **options)
            same(local, take(x, held), what)
            at = {t: row for row, t in enumerate(held) if t >= 0}
            same(rows.unshard(local, offsets, ranks, rank, tokens=tokens, **options),
                 take(local, [at.get(t, -1) for t in range(tokens)]), what)
            if ranks > 1:
                noise = torch.where(torch.ones_like(local, dtype=torch.bool), local + 1, local)
                kept = [row if t in real else -1 for row, t in enumerate(held)]
                same(rows.copy_valid_rows(noise, offsets, begins, ranks=ranks, rank=rank, layout=layout), take(noise, kept), what)


@pytest.mark.parametrize("device", DEVICES)
def test_indices_and_offsets(device):
    for number, (cu, padded, tokens, ranks, layout) in enumerate(packings(2, PACKINGS)):
        what = f"problem {number}: {cu} {padded} {tokens} tokens, {layout} on {ranks}"
        offsets, begins = offsets_on(device, cu, padded, 1 + 3 * number)
        for rank in range(ranks):
            held = tokens_of(padded, tokens, ranks, rank, layout)
            options = dict(cu_seqlens_padded=begins, layout=layout)
            indices = rows.partition_indices(offsets, tokens, ranks, rank, **options)
            assert indices.dtype == torch.int32 and indices.tolist() == held, what
            there = rows.cu_seqlens_on_rank(offsets, tokens, ranks, rank, **options)
            some = [t for t in held if t >= 0]
            assert there.cu_seqlens_padded.tolist() == [sum(t < p for t in some) for p in padded], what
            real = [sum(p <= t < p + b - a for t in some) for p, a, b in zip(padded, cu, cu[1:])]
            assert there.cu_seqlens.tolist() == [sum(real[:i]) for i in range(len(cu))], what


def test_rows_suffice():
    for tokens in range(1, 50):
        for ranks in (1, 2, 3, 4):
            for layout in LAYOUTS:
                if layout != "dual_chunk" or tokens % (2 * ranks) == 0:
                    assert rows.rows_for(tokens, ranks, layout) == weft.Layout(layout, weft.Packing([0, tokens]), ranks).rows


def test_dealt_by_offsets():
    """What shard, position_ids and valid_rows do with cu_seqlens on a GPU, here with those of the CPU."""
    from weft.torch.dealt import Dealt

    for number, (cu, padded, tokens, ranks, layout) in enumerate(packings(3, 80)):
        packing = weft.Packing(cu, cu_seqlens_q_padded=padded, tokens_q=tokens)
        placed = weft.Layout(layout, packing, ranks)
        offsets, begins = offsets_on("cpu", cu, padded, number)
        x = torch.arange(1, tokens + 1)
        for rank in range(ranks):
            there = Dealt(offsets, begins, layout, ranks, rank)
            n = placed.rows  # rows for any offsets may be more
            held = torch.from_numpy(placed.tokens(rank))
            filled = there.shard(x, fill=-100)
            assert filled[:n].tolist() == [t + 1 if t >= 0 else -100 for t in held.tolist()] and (filled[n:] == -100).all()
            assert there.positions(tokens).clamp(min=0)[:n].tolist() == placed.position_ids(rank).tolist()
            assert (there.positions(tokens) >= 0)[:n].tolist() == placed.valid(rank).astype(bool).tolist()
            assert (there.positions(tokens)[n:] == -1).all()


def te_indices(cu, tokens, ranks, rank):
    """thd_get_partitioned_indices as Transformer Engine's kernel computes it: token i of a rank's rows, by search."""
    out, scaled = [], [c // ranks for c in cu]
    for i in range(tokens // ranks):
        s = max(j for j in range(len(cu) - 1) if scaled[j] <= i and scaled[j + 1] > i)
        length = scaled[s + 1] - scaled[s]
        index = i - scaled[s]
        offset = cu[s] if index < length // 2 else (ranks - 1) * length + cu[s]
        at = rank if index < length // 2 else -rank
        out.append(index + length // 2 * at + offset)
    return out


def test_partition_indices_are_transformer_engines():
    r = random.Random(5)
    for _ in range(100):
        ranks = r.choice([1, 2, 3, 4, 8])
        cu = [0]
        for _ in range(r.randrange(1, 9)):
            cu.append(cu[-1] + 2 * ranks * r.randrange(0, 9))
        for rank in range(ranks):
            got = rows.partition_indices(torch.tensor(cu, dtype=torch.int32), cu[-1], ranks, rank)
            assert got.tolist() == te_indices(cu, cu[-1], ranks, rank)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_the_host(device):
    masks = [weft.Mask(causal=True), weft.Mask(causal=True, chunk_size=5), weft.Mask(window=(3, 2)),
             weft.Mask(causal=True, bottom_right=True)]
    for number, (cu, padded, tokens, ranks, _) in enumerate([p for p in packings(7, 160) if p[4] == "dual_chunk"]):
        packing = weft.Packing(cu, cu_seqlens_q_padded=padded, tokens_q=tokens)
        offsets, begins = offsets_on(device, cu, padded, 1 + 3 * number)
        mask = masks[number % 4]
        for kind, steps in (("all_gather", 2), ("ring", ranks)):
            if kind == "ring" and (not mask.causal or mask.bottom_right):
                continue
            for rank in {0, ranks - 1}:
                for step in range(steps):
                    got = getattr(rows, f"{kind}_step")(offsets, tokens, ranks, rank, step, mask=mask, cu_seqlens_padded=begins)
                    wanted = getattr(weft.rows, f"{kind}_step")(packing, mask, ranks=ranks, rank=rank, step=step)
                    n = len(wanted.sequence)
                    assert got.count.tolist() == [n, wanted.max_seqlen_q, wanted.max_seqlen_k]
                    for name in rows.Step._fields[:-1]:
                        values = getattr(wanted, name).clip(-(2**31 - 1), 2**31 - 1).tolist()
                        array = getattr(got, name).tolist()
                        assert array[:len(values)] == values, (number, kind, step, name)
                        rest = {"lo": -(2**31 - 1), "hi": 2**31 - 1, "sequence": -1}.get(name, 0)
                        rest = values[-1] if name.startswith("cu") else rest
                        assert array[len(values):] == [rest] * (len(array) - len(values)), (number, kind, step, name)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    cu, padded = torch.tensor([0, 5, 9], device=device), torch.tensor([0, 8, 16], device=device)
    x = torch.randn(18, 3, dtype=torch.float64, device=device, requires_grad=True)
    for layout in LAYOUTS:
        options = dict(cu_seqlens_padded=padded, layout=layout)
        assert torch.autograd.gradcheck(lambda x: rows.sequence_to_rank_order(x, cu, 2, **options), x)
        local = rows.shard(x, cu, 2, 1, **options).detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda y: rows.unshard(y, cu, 2, 1, tokens=18, **options), local)
        assert torch.autograd.gradcheck(lambda y: rows.copy_valid_rows(y, cu, padded, ranks=2, rank=1, layout=layout), local)
        assert torch.autograd.gradgradcheck(lambda x: rows.shard(x, cu, 2, 1, **options), x)
    assert torch.autograd.gradcheck(lambda x: rows.copy_valid_rows(x, cu, padded), x)
    x = torch.full((16, 2), float("nan"), device=device, requires_grad=True)
    out = rows.copy_valid_rows(x, cu, padded)
    out.backward(torch.full_like(out, float("nan")))
    empty = [5, 6, 7, 12, 13, 14, 15]
    assert (out[empty] == 0).all() and (x.grad[empty] == 0).all() and out[:5].isnan().all() and x.grad[8:12].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_operator_and_compile(device):
    cu = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    x = torch.randn(16, 3, device=device, requires_grad=True)
    for way, count in (("to_ranks", 16), ("from_ranks", 16), ("shard", 8), ("valid", 16)):
        opcheck(torch.ops.weft.copy_rows.default, (x, cu, None, way, "zigzag", 2, 1, count))
    compiled = torch.compile(lambda x: rows.shard(x * 2, cu, 2, 1) + 1, fullgraph=True, backend="aot_eager")
    same(compiled(x), rows.shard(x * 2, cu, 2, 1) + 1, "compiled")
    compiled(x).sum().backward()
    same(x.grad, 2 * rows.unshard(torch.ones(8, 3, device=device), cu, 2, 1), "gradient")


def test_relayout_over_threads():
    """Ranks of weft.spawn, explicit runs included; over gloo: distributed/cases_exchange.py."""
    packing = weft.Packing([0, 5, 12, 20])
    own = weft.Layout.explicit(packing, [[(0, 12, 8)], [(0, 0, 3), (3, 5, 4)], [(2, 3, 2), (4, 9, 3)]])
    x = torch.randn(20, 2, dtype=torch.float64)
    weight = torch.randn(20, 2, dtype=torch.float64)

    def rank(comm):
        weft.torch.use_layout(packing, comm, layout=own)
        held = torch.from_numpy(own.tokens(comm.rank))
        mine = take(x, held.tolist()).requires_grad_()
        moved = weft.torch.relayout(mine, own, "zigzag", group=comm)
        same(moved.detach(), weft.torch.shard(x, packing, comm, layout="zigzag"), "moved")
        (moved * weft.torch.shard(weight, packing, comm, layout="zigzag")).sum().backward()
        same(mine.grad, take(weight, held.tolist()), "gradient")

    weft.spawn(3, rank)


def test_refusals():
    x, cu = torch.zeros(8, 2), torch.tensor([0, 8])
    with refused("there is no rank 2 of 2"):
        rows.shard(x, cu, 2, 2)
    for layout in ("balanced", "placed"):
        with refused(f"layout {layout}", "is made on the host"):
            rows.shard(x, cu, 2, 0, layout=layout)
    with refused("8"):
        rows.shard(x, torch.tensor([0, 9]), 2, 0)
    with refused("torch.float32"):
        rows.shard(x, torch.tensor([0.0, 8.0]), 2, 0)
    with refused("cu_seqlens_padded [3]"):
        rows.shard(x, cu, 2, 0, cu_seqlens_padded=torch.tensor([0, 4, 8]))
    with refused("x has 4 rows, and 100 tokens on 2 ranks have 50"):
        rows.unshard(torch.zeros(4, 2), cu, 2, 0, tokens=100)
    with refused("2*ranks"):
        rows.sequence_to_rank_order(x, torch.tensor([0, 3, 8]), 2)
