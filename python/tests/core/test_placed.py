"""Layout placed: what weft.place says is where the rows lie, and attention over them is that of one rank."""

import sys
from pathlib import Path

import numpy as np
import pytest
import weft

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
CAUSAL = weft.Mask(causal=True)
LENGTHS = [40, 900, 0, 25, 310, 64, 64, 7]


def ranks_of(placement, packing):
    """How many ranks hold tokens of each sequence, counted from the rows."""
    layout, cu = placement.layout, packing.cu_seqlens_q
    owner = np.full(packing.tokens_q, -1)
    for rank in range(layout.ranks):
        tokens = layout.tokens(rank)
        tokens = tokens[tokens >= 0]
        assert (owner[tokens] == -1).all()
        owner[tokens] = rank
    assert (owner >= 0).all()
    return [len(set(owner[a:b].tolist())) for a, b in zip(cu, cu[1:])]


def test_the_report_says_where_rows_lie():
    packing = weft.Packing.from_lengths(LENGTHS)
    p = weft.place(packing, 8, node=4)
    assert p.ranks.tolist() == ranks_of(p, packing)
    assert p.layout.kind == "placed" and p.layout.mask == CAUSAL and p.layout.rows <= p.capacity
    assert len(p.reasons) == len(p.work) == len(p.nodes) == len(LENGTHS)
    assert [n <= 1 for n in p.ranks] == [why == "whole" for why in p.reasons]
    assert p.work[1] == max(p.work) and abs(sum(p.work) - 8) < 1e-9
    assert p.why() in repr(p) and "whole on one rank" in p.why() and p.seconds > 0


def test_by_name_it_is_what_place_gives():
    packing = weft.Packing.from_lengths(LENGTHS)
    for ranks in (1, 3, 8):
        a, b = weft.Layout("placed", packing, ranks), weft.place(packing, ranks).layout
        assert [a.fingerprint(r) for r in range(ranks)] == [b.fingerprint(r) for r in range(ranks)]
        assert b.own_options and not a.own_options


@pytest.mark.parametrize("schedule", ["exact", "all_gather", "ring", "auto"])
@pytest.mark.parametrize("window", [None, (20, 0)])
def test_attention_over_ranks(schedule, window):
    packing = weft.Packing.from_lengths(LENGTHS)
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((packing.tokens_q, 2, 8), np.float32) for _ in range(4))
    mask = weft.Mask(causal=True, window=window) if window else CAUSAL
    place = weft.place(packing, 4, mask=mask, capacity=600, node=2, machine="h200-400g", heads=(2, 2), dim=8)
    one = weft.attention(q, k, v, packing, mask)
    wanted = [one.out, *one.backward(dout)[:3]]

    def rank(comm):
        mine = [weft.shard(x, comm, layout=place.layout) for x in (q, k, v, dout)]
        r = weft.attention(*mine[:3], packing, mask, comm=comm, layout=place.layout, schedule=schedule)
        return [r.out, *r.backward(mine[3])[:3]]

    for got, want in zip(zip(*weft.spawn(4, rank)), wanted):
        np.testing.assert_allclose(weft.unshard(list(got), layout=place.layout), want, rtol=2e-4, atol=2e-4)


def test_a_global_batch_is_one_pack():
    """Two data-parallel groups of two ranks: each has its own documents, and all of them are placed as one pack."""
    groups = [[30, 500, 12], [64, 64, 64, 350]]
    packing = weft.Packing.from_lengths([n for group in groups for n in group])
    p = weft.place(packing, 4, node=2)
    assert p.ranks.tolist() == ranks_of(p, packing) and p.ranks[1] > 1
    rows = [int((p.layout.tokens(r) >= 0).sum()) for r in range(4)]
    assert sum(rows) == packing.tokens_q and max(rows) == p.layout.rows


def test_refusals(refused):
    packing = weft.Packing.from_lengths(LENGTHS)
    with refused("capacity of 100 rows on 8 ranks", "1410 tokens", "at least 177"):
        weft.place(packing, 8, capacity=100)
    with refused("nodes of -1"):
        weft.place(packing, 8, node=-1)
    with refused("no machine", "there"):
        weft.place(packing, 8, machine="there")
    with refused("format bshd with layout placed"):
        weft.shard(np.zeros((2, 8, 3)), 0, ranks=2, layout="placed", format="bshd")


def test_groups_of_powers_of_two():
    """The rule that the study compares with: as few ranks as hold the tokens, a power of two, aligned."""
    placed = pytest.importorskip("placed")
    lengths = [100, 3000, 900, 17000, 1024, 1025, 10]
    groups = placed.power_of_two_groups(lengths, 16, 1024)
    assert [size for _, size in groups] == [1, 4, 1, 16, 1, 2, 1]
    assert all(first % size == 0 and first + size <= 16 for first, size in groups)
    firsts = [first for first, size in groups if size < 16]
    assert len(set(firsts)) == len(firsts)  # the least work first, so none shares a rank
    packing = weft.Packing.from_lengths(lengths)
    layout = placed.in_groups(packing, 16, 1024)
    held = np.concatenate([layout.tokens(r) for r in range(16)])
    assert sorted(held[held >= 0].tolist()) == list(range(packing.tokens_q))
