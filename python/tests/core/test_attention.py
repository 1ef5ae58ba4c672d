"""weft.attention against a dense softmax, on one rank and on many."""

import numpy as np
import pytest
import weft
from hypothesis import given

import dense
from kinds import NAMES
from problems import examples, questions


def run(question, padding=np.nan, **more):
    (q, k, v, dout), sink = question.tensors(padding)
    if question.sink == "learnable":
        more["sink"] = sink.astype(np.float64 if question.kind.dtype == "f64" else np.float32)
    elif question.sink:
        more["sink"] = question.sink
    if question.kind.dtype == "f64":
        more["kernel"] = "reference"
    more.setdefault("max_logit", True)
    r = weft.attention(q, k, v, **question.arrays, **question.mask, **question.model, format=question.format, **more)
    return (q, k, v, dout, sink), r


def reference(question, tensors):
    q, k, v, dout, sink = tensors
    q, k, v, dout = (question.rows(question.kind.read(x)) for x in (q, k, v, dout))
    if question.sink == "learnable":
        sink = sink.astype(np.float32).astype(np.float64) if question.kind.dtype != "f64" else sink
    elif question.sink:
        sink = np.zeros(question.heads[0])
    return dense.Dense(q, k, v, question.see(), sink=sink, **question.model), dout


@examples(300)
@given(questions())
def test_against_dense(question):
    tensors, r = run(question)
    want, dout = reference(question, tensors)
    kind = question.kind
    read = lambda x: question.rows(kind.read(x))
    dtype = kind.dtype
    statistics = "f64" if dtype == "f64" else "f32"
    dense.assert_close("out", read(r.out), want.out, want.out_terms, want.steepness, dtype)
    dense.assert_close("lse", read(r.lse), want.lse, 1 + abs(np.nan_to_num(want.lse, neginf=0)), want.steepness, statistics)
    dense.assert_close("max_logit", kind.read(r.max_logit), want.max_logit, 1 + abs(np.nan_to_num(want.max_logit, neginf=0)),
                       want.steepness, statistics)
    grads = r.backward(tensors[3])
    wanted = want.backward(dout)
    for name in ("dq", "dk", "dv"):
        got = getattr(grads, name)
        assert type(got) is type(tensors[0]) and got.dtype == tensors[0].dtype
        dense.assert_close(name, read(got), *wanted[name], want.steepness, dtype)
    if question.sink == "learnable":
        dense.assert_close("dsink", grads.dsink, *wanted["dsink"], want.steepness, dtype)
    else:
        assert grads.dsink is None


@examples(100)
@given(questions())
def test_padding_changes_no_bit(question):
    results = []
    for padding in (np.nan, 0.0, 1e4):
        (_, _, _, dout, _), r = run(question, padding)
        grads = r.backward(dout)
        read = question.kind.read
        results.append([read(r.out), read(r.lse), read(r.max_logit), *(read(x) for x in grads[:3])]
                       + ([] if grads.dsink is None else [np.asarray(grads.dsink, np.float64)]))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            np.testing.assert_array_equal(a, b)


@examples(100)
@given(questions())
def test_rows_that_see_nothing(question):
    _, r = run(question)
    blind = ~question.see().any(1)
    out, lse = question.rows(question.kind.read(r.out)), question.rows(question.kind.read(r.lse))
    assert (out[blind] == 0).all()
    if question.sink is None:
        assert np.isneginf(lse[blind]).all()
    else:
        assert np.isfinite(lse[blind]).all()


def test_known_answers():
    # Queries of zero: the mean of what is visible, and the log of how many there are.
    v = np.arange(12, dtype=np.float32).reshape(6, 1, 2)
    r = weft.attention(np.zeros((6, 1, 4), np.float32), np.ones((6, 1, 4), np.float32), v, cu_seqlens=[0, 4, 6], causal=True,
                       max_logit=True)
    means = [v[begin:i + 1].mean(0) for begin, end in ((0, 4), (4, 6)) for i in range(begin, end)]
    np.testing.assert_allclose(r.out, means, rtol=1e-6)
    np.testing.assert_allclose(r.lse[:, 0], np.log([1, 2, 3, 4, 1, 2]), rtol=1e-6)
    assert r.max_logit.tolist() == [0.0]


def test_max_logit_only_if_asked_for():
    x = np.ones((4, 1, 8), np.float32)
    assert weft.attention(x, x, x, cu_seqlens_q=[0, 4]).max_logit is None
    assert weft.attention(x, x, x, cu_seqlens_q=[0, 4], max_logit=True).max_logit.shape == x.shape[1:2]


def test_a_mask_and_a_packing_say_the_same():
    x = np.random.default_rng(0).standard_normal((20, 2, 8), np.float32)
    parts = weft.attention(x, x, x, cu_seqlens_q=[0, 13, 20], causal=True, window=(4, 0))
    whole = weft.attention(x, x, x, packing=weft.Packing([0, 13, 20]), mask=weft.Mask(causal=True, window=(4, 0)))
    slices = weft.attention(x, x, x, cu_seqlens_q=[0, 13, 20], slices=[(0, 13, 0, 13, -4, 0), (13, 20, 13, 20, -4, 0)])
    np.testing.assert_array_equal(parts.out, whole.out)
    np.testing.assert_array_equal(parts.out, slices.out)


def test_backward_twice_and_in_any_order():
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, 12, 2, 8), np.float32)
    first = weft.attention(x, x, x, cu_seqlens_q=[0, 12], causal=True)
    second = weft.attention(2 * x, x, x, cu_seqlens_q=[0, 12])
    a, b, c = first.backward(dout), second.backward(dout), first.backward(dout)
    for one, other in zip(a[:3], c[:3]):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(a.dq, b.dq)


SCHEDULES = weft._core.schedules()
LAYOUTS = ("contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "explicit")


def _explicit(packing, ranks):
    """Pieces of uneven sizes, the last rank's first."""
    tokens = packing.tokens_q
    rows = -(-tokens // ranks)
    return weft.Layout.explicit(packing, [[(0, r * rows, max(0, min(rows, tokens - r * rows)))] for r in reversed(range(ranks))])


def _case(ranks, layout, kind, seed, mask):
    rng = np.random.default_rng(seed)
    lengths = [0, 1, 13, 30, 7]
    packing = weft.Packing.from_lengths(lengths, multiple=2 * ranks if layout == "dual_chunk" else 1)
    whole = [kind.make(rng.standard_normal((packing.tokens_q, heads, dim))) for heads, dim in ((4, 8), (2, 8), (2, 16), (4, 16))]
    return packing, whole, _explicit(packing, ranks) if layout == "explicit" else layout


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_ranks_give_what_one_gives(schedule, layout, ranks):
    seed = LAYOUTS.index(layout) * 10 + ranks
    kinds = [NAMES[name] for name in ("numpy-f32", "torch-bf16", "numpy-f64") if name in NAMES]
    kind = kinds[seed % len(kinds)]
    mask = weft.Mask(**[dict(causal=True), dict(causal=True, window=(9, 0)), dict(), dict(causal=True, chunk_size=8)][seed % 4])
    sink = np.array([0.1, -1.0, 0.5, 2.0], np.float32)
    packing, (q, k, v, dout), placed = _case(ranks, layout, kind, seed, mask)
    why = weft.support().why_not(layout, schedule)
    how = weft.Schedule(schedule, ulysses=3) if schedule == "hybrid" and ranks == 3 else schedule

    def rank(comm):
        mine = [weft.shard(x, comm, packing=packing, layout=placed, mask=mask) for x in (q, k, v, dout)]
        r = weft.attention(*mine[:3], packing=packing, mask=mask, layout=placed, layout_mask=mask, sink=sink, comm=comm,
                           schedule=how, max_logit=True, checked=seed % 2 == 0)
        return r.out, r.lse, r.max_logit, *r.backward(mine[3])

    if why is not None:
        with pytest.raises(weft.Error):
            weft.spawn(ranks, rank)
        return
    parts = list(zip(*weft.spawn(ranks, rank)))
    one = weft.attention(q, k, v, packing=packing, mask=mask, sink=sink, max_logit=True)
    grads = one.backward(dout)
    # What ranks sum is f64 for f64, which needs no kernel by name.
    close = dict.fromkeys(("rtol", "atol"), {"bf16": 3e-2, "f32": 2e-5, "f64": 1e-13}[kind.dtype])
    for got, want in zip((parts[0], parts[1], *parts[3:6]), (one.out, one.lse, *grads[:3])):
        whole = weft.unshard(got, packing=packing, layout=placed, mask=mask)
        assert type(whole) is type(want)
        np.testing.assert_allclose(kind.read(whole), kind.read(want), **close)
    for got in parts[2]:
        np.testing.assert_allclose(kind.read(got), kind.read(one.max_logit), **close)
    for got in parts[6]:
        np.testing.assert_allclose(got, grads.dsink, **close)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("layout", ["dual_chunk", "striped"])
def test_batches_on_ranks(format, layout):
    rng = np.random.default_rng(3)
    shape = (3, 16, 2, 8) if format == "bshd" else (16, 3, 2, 8)
    q, k, v, dout = rng.standard_normal((4, *shape), np.float32)
    used = [16, 5, 0]
    schedule = "ring"

    def rank(comm):
        mine = [weft.shard(x, comm, seqused=used, layout=layout, format=format) for x in (q, k, v, dout)]
        r = weft.attention(*mine[:3], seqused_q=used, seqused_k=used, causal=True, layout=layout, format=format, comm=comm,
                           schedule=schedule)
        return r.out, *r.backward(mine[3])[:3]

    parts = zip(*weft.spawn(4, rank))
    one = weft.attention(q, k, v, seqused_q=used, seqused_k=used, causal=True, format=format)
    for got, want in zip(parts, (one.out, *one.backward(dout)[:3])):
        whole = weft.unshard(got, seqused=used, layout=layout, format=format)
        valid = np.arange(16)[None, :] < np.array(used)[:, None]
        valid = valid if format == "bshd" else valid.T
        np.testing.assert_allclose(whole[valid], want[valid], rtol=2e-5, atol=2e-5)


def test_cross_attention_on_ranks():
    rng = np.random.default_rng(4)
    packing = weft.Packing(cu_seqlens_q=[0, 5, 12], cu_seqlens_k=[0, 9, 20])
    q, dout = rng.standard_normal((2, 12, 2, 8), np.float32)
    k, v = rng.standard_normal((2, 20, 2, 8), np.float32)
    one = weft.attention(q, k, v, packing=packing, causal=True, bottom_right=True)

    def rank(comm):
        layout = weft.Layout("zigzag", packing, comm.ranks)
        rows, own = weft.shard(q, comm, layout=layout), [weft.shard(x, comm, layout=layout, side="k") for x in (k, v)]
        return weft.attention(rows, *own, packing=packing, causal=True, bottom_right=True, comm=comm, schedule="exact",
                              layout="zigzag").out

    np.testing.assert_allclose(weft.unshard(weft.spawn(3, rank), packing=packing, layout="zigzag"), one.out, rtol=2e-5, atol=2e-5)
