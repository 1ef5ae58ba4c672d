"""Packs, micro-sequences, the K/V buffer and the cache, by brute force."""

import itertools

import numpy as np
import pytest
import weft
from hypothesis import given
from hypothesis import strategies as st

import dense
from dense import pairs
from problems import examples


@examples(60)
@given(st.lists(st.integers(0, 40), max_size=20), st.sampled_from([1, 4]), st.booleans(), st.booleans(),
       st.sampled_from([0, 1.1]))
def test_packs(lengths, multiple, keep_order, split, limit):
    budget, keep_order = 32, keep_order and not limit
    if not split:
        lengths = [min(n, budget) for n in lengths]
    packs = weft.prepare.pack_documents(lengths, budget, multiple, keep_order, split, limit)
    held = [np.zeros(n, int) for n in lengths]
    empty = 0
    for i in range(len(packs)):
        pieces, packing = packs.pieces(i), packs.packing(i)
        assert packing.lengths_q.tolist() == pieces[:, 2].tolist() and packing.tokens_q == budget
        rows = sum(-(-n // multiple) * multiple for n in pieces[:, 2])
        assert rows <= budget and (packing.cu_seqlens_q_padded % multiple == 0).all()
        empty += budget - rows
        for document, begin, length in pieces:
            held[document][begin:begin + length] += 1
    assert all((x == 1).all() for x in held)
    if limit and len(packs):
        pairs = [(n * (n + 1) / 2).sum() for n in (packs.pieces(i)[:, 2] for i in range(len(packs)))]
        longest = max(min(n, 32) for n in lengths)
        assert max(pairs) <= max(limit * np.mean(pairs), longest * (longest + 1) / 2) + 1e-9
    report = packs.report
    assert report["tokens"] == sum(lengths) and report["packs"] == len(packs) and report["empty"] == empty
    assert len(packs) >= report["least_packs"] == -(-sum(lengths) // budget)


def test_packs_refuse(refused):
    with refused("41", "32"):
        weft.prepare.pack_documents([3, 41], 32)
    with refused("there is no pack 1 of 1"):
        weft.prepare.pack_documents([3], 32).packing(1)


@pytest.mark.parametrize("ranks, micros, pad", [(1, 1, False), (2, 2, True), (3, 2, True), (1, 4, True)])
def test_windows(ranks, micros, pad):
    packing = weft.Packing([0, 5, 14, 20, 23])
    if not pad and 23 % (ranks * micros):
        return
    made = weft.prepare.MicroSequences(packing, ranks=ranks, micros=micros, pad=pad)
    total = -(-23 // (ranks * micros)) * ranks * micros
    assert (made.ranks, made.micros, made.local, made.padding) == (ranks, micros, total // (ranks * micros), total - 23)
    sequence, position = dense.places([0, 5, 14, 20, 23], [5, 9, 6, 3], total)
    see = dense.visible(([0, 5, 14, 20, 23], [5, 9, 6, 3], total), ([0, 5, 14, 20, 23], [5, 9, 6, 3], total), causal=True)
    covered = np.zeros(total, int)
    for rank, micro in itertools.product(range(ranks), range(micros)):
        begin, end = made.rows(rank, micro)
        assert begin == rank * made.local + micro * total // micros and end - begin == made.local
        covered[begin:end] += 1
        window = made.window(rank, micro)
        assert (window.begin, window.end) == (begin, end)
        here = sequence[begin:end]
        np.testing.assert_array_equal(window.position_ids[here >= 0], position[begin:end][here >= 0])
        order = list(dict.fromkeys(here.tolist()))
        assert window.documents.tolist() == order and window.lengths.tolist() == [int((here == s).sum()) for s in order]
        first = window.first_document_begin
        np.testing.assert_array_equal(pairs(made.slices(weft.Mask(causal=True), rank, micro), end - begin, end - first),
                                      see[begin:end, first:end])
        assert not see[begin:end, :first].any() and not see[begin:end, end:].any()
        np.testing.assert_array_equal(np.array(order)[window.document_index_q - 1], here)
    assert (covered == 1).all()


def check_kv_buffer(offsets, ranks, micros, mask, drop, seed):
    """Documents through a K/V buffer, beside the dense softmax of them all."""
    rng = np.random.default_rng(seed)
    packing, tokens = weft.Packing(offsets), offsets[-1]
    q, dout = rng.standard_normal((2, tokens, 4, 8), np.float32)
    k, v = rng.standard_normal((2, tokens, 2, 8), np.float32)
    sink = rng.standard_normal(4).astype(np.float32)
    made = weft.prepare.MicroSequences(packing, ranks=ranks, micros=micros)
    options = dict(softcap=3.0, sink=sink)

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=made.key_rows(weft.Mask(**mask), drop, ahead=True), heads=2, dim=8, drop=drop,
                                       checked=micros > 1, layer=5)
        buffer.begin(made, weft.Mask(**mask))
        windows = [slice(*made.rows(comm.rank, m)) for m in range(micros)]
        results = []
        for m, here in enumerate(windows):
            if m == 0:
                buffer.start_gather(0, k[here], v[here])
            if m + 1 < micros:
                buffer.start_gather(m + 1, k[windows[m + 1]], v[windows[m + 1]])
            results.append(buffer.forward(m, q[here], **options))
        grads = []
        for m in reversed(range(micros)):
            while drop and (again := buffer.missing(m)) is not None:
                buffer.gather_again(again, k[windows[again]], v[windows[again]])
            grads.append(buffer.backward(m, q[windows[m]], *results[m], dout[windows[m]], **options))
        assert buffer.bytes_held > 0
        return windows, results, grads[::-1]

    out, lse, dsink = np.zeros_like(q), np.zeros((tokens, 4), np.float32), np.zeros(4)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for number, (windows, results, grads) in enumerate(weft.spawn(ranks, rank)):
        for here, result, grad in zip(windows, results, grads):
            out[here], lse[here] = result
            dq[here], dk[here], dv[here] = grad[:3]
            if number == 0:  # over all ranks already
                dsink += grad[3]
    parts = offsets, np.diff(offsets).tolist(), tokens
    want = dense.Dense(*(x.astype(float) for x in (q, k, v)), dense.visible(parts, parts, **mask), softcap=3.0,
                       sink=sink.astype(float))
    wanted = want.backward(dout.astype(float))
    dense.assert_close("out", out, want.out, want.out_terms, want.steepness, "f32")
    dense.assert_close("lse", lse, want.lse, 1 + abs(want.lse), want.steepness, "f32")
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv), ("dsink", dsink)):
        dense.assert_close(name, got, *wanted[name], want.steepness, "f32")


@pytest.mark.parametrize("ranks, micros", [(1, 1), (1, 3), (2, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize("mask", [dict(causal=True), dict(causal=True, window=(4, 0)), dict(causal=True, chunk_size=6)], ids=str)
@pytest.mark.parametrize("drop", [False, True])
def test_kv_buffer(ranks, micros, mask, drop):
    check_kv_buffer([0, 5, 14, 20, 24], ranks, micros, mask, drop, ranks * 10 + micros)


def test_kv_buffer_of_another_width_for_values():
    """start_gather brings the values, so forward learns their width from the buffer."""
    x, v = np.ones((6, 1, 8), np.float32), np.ones((6, 1, 3), np.float32)
    made = weft.prepare.MicroSequences(weft.Packing([0, 6]), micros=1)

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=6, heads=1, dim=8, dim_v=3)
        buffer.begin(made)
        buffer.start_gather(0, x, v)
        return buffer.forward(0, x)[0].shape

    assert weft.spawn(1, rank) == [(6, 1, 3)]


def test_keys_under_way_stay_alive():
    """Whoever drops them after start_gather changes nothing."""
    import gc

    x = np.random.default_rng(0).standard_normal((8, 1, 4), np.float32)
    made = weft.prepare.MicroSequences(weft.Packing([0, 8]), ranks=2, micros=1)
    want = weft.attention(x, x, x, cu_seqlens_q=[0, 8], causal=True).out

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=8, heads=1, dim=4)
        buffer.begin(made)
        here = slice(*made.rows(comm.rank, 0))
        buffer.start_gather(0, x[here].copy(), x[here].copy())
        gc.collect()
        junk = [np.full((4, 1, 4), 9, np.float32) for _ in range(100)]
        comm.barrier()
        out = buffer.forward(0, x[here])[0]
        del junk
        return out

    np.testing.assert_allclose(np.concatenate(weft.spawn(2, rank)), want, rtol=1e-5, atol=1e-6)


def test_kv_cache(refused):
    rng = np.random.default_rng(0)
    k, v = np.full((2, 30, 1, 8), np.nan, np.float32)
    cache = weft.prepare.KvCache(k, v, offsets=[0, 12, 30])
    full_k, full_v = rng.standard_normal((2, 2, 12, 1, 8)).astype(np.float32)
    lengths = [0, 0]
    for counts in ([4, 2], [1, 1], [0, 3], [1, 0]):
        new = [np.concatenate([full[i, lengths[i]:lengths[i] + n] for i, n in enumerate(counts)]) for full in (full_k, full_v)]
        cache.append(counts, *new)
        lengths = [a + b for a, b in zip(lengths, counts)]
        assert [cache.used(i) for i in range(2)] == lengths and cache.room(0) == 12 - lengths[0]
        q = rng.standard_normal((sum(counts), 2, 8)).astype(np.float32)
        got = cache.attend(counts, q)
        at = 0
        for i, n in enumerate(counts):
            see = np.arange(lengths[i])[None, :] <= np.arange(lengths[i] - n, lengths[i])[:, None]
            want = dense.Dense(*(x.astype(float) for x in (q[at:at + n], full_k[i, :lengths[i]], full_v[i, :lengths[i]])), see)
            dense.assert_close("out", got[at:at + n], want.out, want.out_terms, want.steepness, "f32")
            at += n
    cache.keep(0, 2)
    assert cache.used(0) == 2 and cache.sequences == 2
    with refused("10", "11"):
        cache.append([11, 0], *np.zeros((2, 11, 1, 8), np.float32))
    with refused():
        cache.used(2)
