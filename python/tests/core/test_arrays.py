"""Arrays of any framework in, arrays of the same one out, and no element copied on the way."""

import gc
import threading
import time

import numpy as np
import pytest
import weft
from weft import _arrays, _core

from kinds import KINDS, NAMES, DlpackOnly

CU = [0, 5, 12]


def make(kind, seed=0, shape=(12, 2, 8)):
    rng = np.random.default_rng(seed)
    return [kind.make(rng.standard_normal(shape)) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_how_an_array_is_seen(kind):
    x = kind.make(np.zeros((6, 2, 8)))
    view = _arrays.array(x)
    assert view.address == kind.pointer(x)
    assert view.shape == [6, 2, 8] and view.strides == [16, 8, 1]
    assert view.dtype == getattr(_core.DType, kind.dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_copy_in_or_out(kind, seen):
    q, k, v = make(kind)
    r = weft.attention(q, k, v, cu_seqlens_q=CU, causal=True, max_logit=True)
    assert seen["forward"] == [kind.pointer(x) for x in (q, k, v, r.out, r.lse, r.max_logit)]
    for x in (r.out, r.lse, r.max_logit):
        assert type(x) is type(q)
    assert r.out.dtype == q.dtype and r.out.shape == q.shape and r.lse.shape == q.shape[:2]
    dout = make(kind, 1)[0]
    grads = r.backward(dout)
    assert seen["backward"] == [kind.pointer(x) for x in (q, k, v, r.out, r.lse, dout, *grads[:3])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_agree_between_frameworks(kind):
    q, k, v = make(kind)
    r = weft.attention(q, k, v, cu_seqlens_q=CU, causal=True)
    same = _same_numbers(kind)
    if same is None:
        return
    want = weft.attention(*make(same), cu_seqlens_q=CU, causal=True)
    np.testing.assert_array_equal(kind.read(r.out), same.read(want.out))
    np.testing.assert_array_equal(kind.read(r.backward(q).dk), same.read(want.backward(make(same)[0]).dk))


def _same_numbers(kind):
    return next((k for k in KINDS if k.dtype == kind.dtype and k is not kind), None)


@pytest.mark.parametrize("name", ["numpy-f32", "numpy-f16"])
def test_an_array_with_dlpack_alone(name, seen):
    kind = NAMES[name]
    plain = make(kind)
    q, k, v = (DlpackOnly(x) for x in plain)
    r = weft.attention(q, k, v, cu_seqlens_q=CU, causal=True)
    want = weft.attention(*plain, cu_seqlens_q=CU, causal=True)
    assert type(r.out) is np.ndarray
    np.testing.assert_array_equal(r.out, want.out)
    grads = r.backward(DlpackOnly(plain[0]))
    assert seen["backward"][:3] == [kind.pointer(x) for x in plain]
    np.testing.assert_array_equal(grads.dv, want.backward(plain[0]).dv)
    np.testing.assert_array_equal(weft.shard(q, 0, ranks=2, cu_seqlens=CU), weft.shard(plain[0], 0, ranks=2, cu_seqlens=CU))


@pytest.mark.skipif("torch-bf16" not in NAMES, reason="needs torch")
def test_bf16_with_dlpack_alone():
    """numpy has no bf16, so the result stays an object that speaks DLPack."""
    import torch

    plain = make(NAMES["torch-bf16"])
    r = weft.attention(*(DlpackOnly(x) for x in plain), cu_seqlens_q=CU)
    assert torch.equal(torch.from_dlpack(r.out), weft.attention(*plain, cu_seqlens_q=CU).out)
    assert r.backward(plain[0]).dq is not None


@pytest.mark.parametrize("name", [k for k in ("numpy-f32", "ml_dtypes-bf16", "torch-f32", "torch-bf16") if k in NAMES])
@pytest.mark.parametrize("axis", [1, 2])
def test_interleaved_qkv_is_taken_as_it_is(name, axis, seen):
    kind = NAMES[name]
    shape = (12, 3, 2, 8) if axis == 1 else (12, 2, 3, 8)
    qkv = kind.make(np.random.default_rng(0).standard_normal(shape))
    q, k, v = (qkv[:, i] if axis == 1 else qkv[:, :, i] for i in range(3))
    r = weft.attention(q, k, v, cu_seqlens_q=CU, causal=True)
    begin = kind.pointer(qkv)
    step = (16 if axis == 1 else 8) * (4 if kind.dtype == "f32" else 2)
    assert seen["forward"][:3] == [begin, begin + step, begin + 2 * step]
    want = weft.attention(*(kind.make(kind.read(x)) for x in (q, k, v)), cu_seqlens_q=CU, causal=True)
    np.testing.assert_array_equal(kind.read(r.out), kind.read(want.out))
    np.testing.assert_array_equal(kind.read(r.backward(q).dk), kind.read(want.backward(q).dk))


@pytest.mark.parametrize("name", [k for k in ("numpy-f32", "torch-f32") if k in NAMES])
def test_views_with_gaps(name):
    kind = NAMES[name]
    wide = kind.make(np.random.default_rng(0).standard_normal((24, 4, 16)))
    q = wide[::2, 1:3, :8]
    np.testing.assert_array_equal(kind.read(weft.attention(q, q, q, cu_seqlens_q=CU).out),
                                  kind.read(weft.attention(*[kind.make(kind.read(q))] * 3, cu_seqlens_q=CU).out))


def test_an_expanded_head():
    torch = pytest.importorskip("torch")
    one = torch.randn(12, 1, 8)
    many = one.expand(12, 4, 8)  # stride 0
    assert torch.equal(weft.attention(many, many, many, cu_seqlens_q=CU).out,
                       weft.attention(*[many.contiguous()] * 3, cu_seqlens_q=CU).out)


def test_read_only_inputs():
    x = make(NAMES["numpy-f32"])[0]
    want = weft.attention(x, x, x, cu_seqlens_q=CU)
    x.flags.writeable = False
    r = weft.attention(x, x, x, cu_seqlens_q=CU)
    np.testing.assert_array_equal(r.out, want.out)
    assert r.out.flags.writeable
    np.testing.assert_array_equal(r.backward(x).dq, want.backward(x).dq)
    assert weft.shard(x, 1, ranks=2, cu_seqlens=CU).flags.writeable
    cu = np.array(CU)
    cu.flags.writeable = False
    assert weft.Packing(cu).lengths_q.tolist() == [5, 7]
    np.testing.assert_array_equal(weft.attention(memoryview(x), x, x, cu_seqlens_q=CU).out, want.out)


def test_read_only_outputs_are_refused(refused):
    x = np.zeros((12, 2, 8), np.float32)
    fixed = x.copy()
    fixed.flags.writeable = False
    layout = weft.Layout("zigzag", weft.Packing(CU), 2)
    with refused("is read-only"):
        weft.rows.sequence_to_rank_order(layout, x, fixed)
    with refused("is read-only"):
        weft.rows.rank_to_sequence_order(layout, x, fixed)
    with refused("k is read-only"):
        weft.prepare.KvCache(fixed, x, offsets=[0, 12])
    view = _arrays.array(x)
    with refused("out is read-only"):
        _core.OneRank(weft.Problem(weft.Packing(CU), weft.Mask())).forward(
            view, view, view, _core.Format.thd, _core.Settings(), _arrays.array(fixed, True), None, None)


def test_arrays_without_elements():
    for kind in KINDS:
        q = kind.make(np.zeros((0, 2, 8)))
        r = weft.attention(q, q, q, cu_seqlens_q=[0, 0, 0], max_logit=True)
        assert tuple(r.out.shape) == (0, 2, 8) and np.isneginf(kind.read(r.max_logit)).all()
        assert tuple(r.backward(q).dk.shape) == (0, 2, 8)


def test_memory_stays_as_long_as_it_is_needed():
    """The result keeps its inputs for the backward, and outlives what made it."""
    for kind in KINDS:
        q, k, v = make(kind)
        want = kind.read(weft.attention(q, k, v, cu_seqlens_q=CU).backward(q).dq)
        dout = kind.make(kind.read(q))
        r = weft.attention(q, k, v, cu_seqlens_q=CU)
        del q, k, v
        gc.collect()
        junk = [np.full((12, 2, 8), 7.0) for _ in range(64)]
        dq = r.backward(dout).dq
        out = r.out
        kept = kind.read(out).copy()
        del r, junk
        gc.collect()
        junk = [np.full((12, 2, 8), 7.0) for _ in range(64)]
        np.testing.assert_array_equal(kind.read(dq), want)
        np.testing.assert_array_equal(kind.read(out), kept)
        del junk


def test_shards_are_of_the_same_kind():
    for kind in KINDS:
        x = make(kind)[0]
        parts = [weft.shard(x, r, ranks=3, cu_seqlens=CU) for r in range(3)]
        assert all(type(p) is type(x) and p.dtype == x.dtype for p in parts)
        whole = weft.unshard(parts, cu_seqlens=CU)
        assert type(whole) is type(x)
        np.testing.assert_array_equal(kind.read(whole), kind.read(x))


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool", "complex64", "uint16"])
def test_rows_of_anything_can_be_sharded(dtype):
    x = np.arange(24).reshape(12, 2).astype(dtype)
    parts = [weft.shard(x, r, ranks=3, cu_seqlens=CU) for r in range(3)]
    np.testing.assert_array_equal(weft.unshard(parts, cu_seqlens=CU), x)


def _ticks(call):
    """(seconds of the call, how often another thread came to run meanwhile)."""
    times, done = [], threading.Event()

    def tick():
        while not done.is_set():
            times.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    done.set()
    thread.join()
    return end - begin, sum(begin < t < end for t in times)


@pytest.mark.parametrize("what", ["forward", "backward", "ranks"])
def test_other_threads_run_meanwhile(what):
    x = np.random.default_rng(0).standard_normal((1200, 4, 32), np.float32)
    cu = [0, 1200]
    r = weft.attention(x, x, x, cu_seqlens_q=cu, kernel="reference")

    def rank(comm):
        weft.attention(*[weft.shard(x, comm, cu_seqlens=cu)] * 3, cu_seqlens_q=cu, comm=comm, kernel="reference")

    calls = {
        "forward": lambda: weft.attention(x, x, x, cu_seqlens_q=cu, kernel="reference"),
        "backward": lambda: r.backward(x),
        "ranks": lambda: weft.spawn(2, rank),
    }
    seconds, ticks = _ticks(calls[what])
    assert ticks >= 3 and seconds > 0.01, f"{ticks} in {seconds:.3f} s"


def test_arrays_of_jax_that_are_still_computed():
    """JAX computes behind one's back; whoever reads an array waits."""
    jnp = pytest.importorskip("jax.numpy")
    import jax

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y.T @ y / 100), x)

    start = jnp.asarray(np.random.default_rng(0).standard_normal((192, 64), np.float32))
    want = slow(start).block_until_ready().reshape(192, 2, 32)
    got = slow(start).reshape(192, 2, 32)
    np.testing.assert_array_equal(weft.attention(got, got, got, cu_seqlens_q=[0, 192]).out,
                                  weft.attention(want, want, want, cu_seqlens_q=[0, 192]).out)
