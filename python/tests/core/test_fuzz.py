"""Arrays and numbers of any kind at the boundary: the right answer or weft.Error, never another exception or a crash."""

import numpy as np
import weft
from hypothesis import given
from hypothesis import strategies as st
from weft._core import Machine

import dense
from problems import examples

DTYPES = [np.float16, np.float64, ">f4", np.int8, np.int64, np.uint16, np.complex64, bool, "M8[s]", "S3", object]
EDGES = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 10**30]
numbers = st.one_of(st.integers(-3, 20), st.sampled_from(EDGES))


@st.composite
def arrays(draw, rows, heads, dim, dtype=np.float32):
    """What is asked for; one in two is odd: of any dtype, shape and steps, anywhere in memory."""
    shape, steps, past, way = [rows, heads, dim], [1, 1, 1], 0, 9
    odd = draw(st.integers(0, 11))
    if odd == 0:
        shape[draw(st.integers(0, 2))] = draw(st.integers(0, 7))
    elif odd == 1:
        shape = draw(st.lists(st.integers(0, 4), max_size=5))
    elif odd == 2:
        dtype = draw(st.sampled_from(DTYPES))
    elif odd == 3:
        steps = [draw(st.sampled_from([1, 1, 2, 3])) for _ in shape]
    elif odd == 4:
        past = draw(st.sampled_from([1, np.dtype(dtype).itemsize]))
    elif odd == 5:
        way = draw(st.integers(0, 3))
    dtype, steps = np.dtype(dtype), [*steps, 1, 1][:len(shape)]
    if dtype.hasobject:
        return np.zeros(shape, dtype)
    size = dtype.itemsize * int(np.prod([n * s for n, s in zip(shape, steps)])) + past
    memory = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 60, size + 8, np.uint8)
    whole = np.ndarray([n * s for n, s in zip(shape, steps)], dtype, memory.data, past)
    x = whole[tuple(slice(None, None, s) for s in steps)] if steps else whole
    if dtype.kind == "f":  # the bytes are any floats; these are ones that can be compared
        whole[...] = np.random.default_rng(draw(st.integers(0, 9))).standard_normal(whole.shape).astype(dtype)
    if way == 0:
        x = x[::-1]
    elif way == 1:
        x = x.T
    elif way == 2:
        x = np.broadcast_to(x[:1], x.shape)
    elif way == 3:
        x.flags.writeable = False
    return x


def right(r, q, k, v, cu, causal):
    lengths = np.diff(cu).tolist()
    side_q, side_k = ((list(cu[:-1]), lengths, len(x)) for x in (q, k))
    want = dense.Dense(*(np.asarray(x, np.float64) for x in (q, k, v)), dense.visible(side_q, side_k, causal=causal))
    name = {2: "f16", 4: "f32", 8: "f64"}[q.dtype.itemsize]
    dense.assert_close("out", r.out, want.out, want.out_terms, want.steepness, name)
    grads = r.backward(np.ones(r.out.shape, r.out.dtype))
    wanted = want.backward(np.ones(r.out.shape))
    for of in ("dq", "dk", "dv"):
        dense.assert_close(of, getattr(grads, of), *wanted[of], want.steepness, name)


def test_any_arrays():
    computed = []

    @examples(150)
    @given(st.data())
    def one(data):
        heads_k = data.draw(st.integers(1, 2))
        dim = data.draw(st.integers(1, 5))
        dtype = data.draw(st.sampled_from([np.float32, np.float16, np.float64]))
        q = data.draw(arrays(8, heads_k * 2, dim, dtype))
        k, v = (data.draw(arrays(8, heads_k, dim, dtype)) for _ in range(2))
        causal = data.draw(st.booleans())
        cu = data.draw(st.sampled_from([[0, 8], [0, 3, 8], [0, 0, 5]]))
        try:
            r = weft.attention(q, k, v, cu_seqlens_q=cu, causal=causal, kernel="reference" if q.dtype == np.float64 else None)
        except weft.Error as e:
            assert e.problem and e.remedy
            return
        right(r, q, k, v, cu, causal)
        computed.append(q.dtype.str)

    one()
    assert len(computed) > 40 and len(set(computed)) > 1, "too many were refused to say anything"


Q = np.random.default_rng(3).standard_normal((8, 2, 4), np.float32)


@st.composite
def lists(draw):
    """Offsets as lists, tuples and arrays of any dtype and number of dimensions."""
    values = draw(st.one_of(st.sampled_from([[0, 8], [0, 3, 8]]), st.lists(numbers, max_size=5)))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return tuple(values)
    if kind == 1:
        return [float(x) for x in values]
    if kind == 2 and all(-(2**63) <= x < 2**63 for x in values):
        x = np.array(values, np.int64)
        return draw(
            st.sampled_from([x, x[::-1], x.reshape(1, -1), x.astype(np.int32), x.astype(np.uint64), x.astype(np.float32)])
        )
    if kind == 3:
        return draw(st.sampled_from([None, 5, "0,8", b"08", {}, object(), [None], [[0, 8]], Q]))
    return values


@examples(120)
@given(st.data())
def test_any_numbers(data):
    one = lambda of: (data.draw(st.integers(0, 2)) == 0 and {of: data.draw(lists())}) or {}
    options = {"cu_seqlens_q": data.draw(lists())}
    for name in ("cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "seqused_q", "seqused_k", "head_map", "slices"):
        options.update(one(name))
    if data.draw(st.booleans()):
        options["window"] = (data.draw(numbers), data.draw(numbers))
    if data.draw(st.integers(0, 3)) == 0:
        options["chunk_size"] = data.draw(numbers)
    if data.draw(st.integers(0, 3)) == 0:
        options[data.draw(st.sampled_from(["scale", "softcap"]))] = data.draw(st.floats())
    if data.draw(st.integers(0, 3)) == 0:
        options["sink"] = data.draw(st.one_of(arrays(2, 1, 1), st.just("off_by_one"), st.just("on"), st.integers()))
    try:
        r = weft.attention(Q, Q, Q, **options)
    except weft.Error as e:
        assert e.problem and e.remedy
        return
    except TypeError as e:
        assert "incompatible function arguments" in str(e)
        return
    assert r.out.shape == Q.shape
    finite = all(np.isfinite(x).all() for x in [options.get("scale", 1.0)])
    assert not finite or not np.isnan(r.out).any() or "sink" in options


@examples(120)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), st.lists(st.integers(), max_size=4), st.none()))
def test_any_machine(text):
    try:
        Machine.from_json(text)
    except (weft.Error, TypeError):
        return


@examples(100)
@given(st.one_of(st.text(max_size=20), st.sampled_from(["./\0", "/", "./\udcff", "/dev/null"])))
def test_any_file_name(name):
    try:
        weft.machine(name)
    except weft.Error as e:
        assert e.problem and e.remedy
