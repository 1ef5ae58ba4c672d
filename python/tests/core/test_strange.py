"""What looks like an array, a list or an error and is something else: read as it is meant, or refused in plain words."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import weft

from kinds import DlpackOnly

torch = pytest.importorskip("torch")
import weft.torch

CU = [0, 3, 8]
weft.use_layout(CU, ranks=2)
X = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
NEGATED = torch._neg_view(X)  # -X: the same memory, and a flag


def attend(q=X, k=X, v=X, **options):
    return weft.attention(q, k, v, **{"cu_seqlens_q": CU, "causal": True, **options})


def same(got, wanted):
    got, wanted = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, wanted))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# --- Flags of torch that are not in the memory ---


def _kv_cache(k, q):
    cache = weft.prepare.KvCache(torch.zeros(16, 2, 4), torch.zeros(16, 2, 4), offsets=[0, 16])
    cache.append([8], k, k)
    return cache.attend([8], q)


def _kv_buffer(x):
    micros = weft.prepare.MicroSequences(weft.Packing(CU), ranks=1, micros=2)

    def rank(comm):
        buffer = weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)
        buffer.begin(micros)
        return [y for m in range(2) for y in buffer.forward(m, *[x[4 * m:4 * m + 4]] * 3)]

    return weft.spawn(1, rank)[0]


def _rank_order(x):
    out = torch.zeros(8, 2, 4)
    weft.rows.sequence_to_rank_order(weft.Layout("contiguous", weft.Packing(CU), 2), x, out)
    return out


READERS = {
    "q": lambda x: attend(q=x).out,
    "k": lambda x: attend(k=x).out,
    "v": lambda x: attend(v=x).out,
    "dout": lambda x: attend().backward(x)[:3],
    "sink": lambda x: attend(sink=x[0, :, 0]).out,
    "shard": lambda x: weft.shard(x, 1, ranks=2, cu_seqlens=CU),
    "unshard": lambda x: weft.unshard([x[:4], x[4:]], cu_seqlens=CU),
    "shard of torch": lambda x: weft.torch.shard(x, weft.Packing(CU)),
    "rows": _rank_order,
    "the keys of a cache": lambda x: _kv_cache(x, X),
    "the queries of a cache": lambda x: _kv_cache(X, x),
    "a buffer": _kv_buffer,
    "micro-sequences": lambda x: weft.torch.micro_sequence_attention(
        x, x, x, weft.prepare.MicroSequences(weft.Packing(CU), ranks=1, micros=2)),
    "all_gather": lambda x: weft.spawn(2, lambda comm: weft.torch.all_gather(x, comm))[0],
    "the operator": lambda x: weft.torch.context_parallel_attention(x, x, x, weft.Packing(CU)),
}


@pytest.mark.parametrize("reader", READERS)
def test_negated(reader):
    same(READERS[reader](NEGATED), READERS[reader](-X))


@pytest.mark.parametrize("reader", READERS)
def test_zeros_without_memory(reader, refused):
    if reader == "the operator":  # torch makes them one zero, seen many times
        with refused("strides [0, 0, 0]", "contiguous()"):
            READERS[reader](torch._efficientzerotensor(X.shape))
        return
    same(READERS[reader](torch._efficientzerotensor(X.shape)), READERS[reader](torch.zeros(X.shape)))


def test_imaginary_parts_of_conjugates():
    """Where the flag comes from in practice."""
    z = torch.complex(X, X)
    assert z.conj().imag.is_neg()
    same(attend(q=z.conj().imag.contiguous()).out, attend(q=-X).out)
    same(weft.shard(z.conj(), 1, ranks=2, cu_seqlens=CU), weft.shard(z.conj().resolve_conj(), 1, ranks=2, cu_seqlens=CU))


def test_negated_numbers():
    assert weft.Packing(torch._neg_view(torch.tensor([0, -3, -8]))) == weft.Packing(CU)
    assert weft.Packing.from_lengths(torch._neg_view(torch.tensor([-3, -5]))) == weft.Packing(CU)


def test_negated_memory_is_not_written(refused):
    with refused("k has torch's flag for negated", "x.clone()"):
        weft.prepare.KvCache(torch._neg_view(torch.zeros(16, 2, 4)), torch.zeros(16, 2, 4), offsets=[0, 16])
    with refused("zeros instead of elements"):
        weft.prepare.KvCache(torch.zeros(16, 2, 4), torch._efficientzerotensor((16, 2, 4)), offsets=[0, 16])


# --- Tensors without numbers ---


def _fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(8, 2, 4)


def _nested(layout):
    return torch.nested.nested_tensor([torch.zeros(3, 2, 4), torch.zeros(5, 2, 4)], layout=layout)


STRANGE = {
    "a part of a fake": (lambda: _fake()[1:], "FakeTensor"),
    "fake": (_fake, "FakeTensor", "weft.torch.context_parallel_attention"),
    "nested": (lambda: _nested(torch.strided), "is a nested tensor", "x.values()"),
    "jagged": (lambda: _nested(torch.jagged), "is a nested tensor", "x.offsets()"),
    "sparse": (X.to_sparse, "has no memory of its own", "x.to_dense()"),
    "sparse rows": (lambda: X[:, :, 0].to_sparse_csr(), "has no memory of its own", "x.to_dense()"),
    "mkldnn": (X.to_mkldnn, "has no memory of its own", "x.to_dense()"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "is quantized (torch.qint8)", "x.dequantize()"),
    "meta": (lambda: X.to("meta"), "lies on meta", "move it there"),
    "masked": (lambda: np.ma.array(X.numpy(), mask=X.numpy() > 0), "is a masked array", "seqused_q"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRANGE)
def test_no_numbers(name, refused):
    make, *parts = STRANGE[name]
    with refused("q ", *parts):
        attend(q=make())
    with refused(*parts):
        weft.shard(make(), 0, ranks=2, cu_seqlens=CU)
    with refused("k ", *parts):
        weft.prepare.KvCache(make(), X, offsets=[0, 8])


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_to_the_operator(refused):
    for layout in (torch.strided, torch.jagged):
        with refused("q is a nested tensor", "x.values()"):
            weft.torch.context_parallel_attention(*[_nested(layout)] * 3, weft.Packing(CU))
    jagged = _nested(torch.jagged)  # the way out
    assert attend(*[jagged.values()] * 3, cu_seqlens_q=jagged.offsets()).out.shape == (8, 2, 4)


def test_inside_transforms_of_torch(refused):
    with refused("inside a transform of torch.func", "torch.autograd"):
        torch.vmap(lambda x: attend(x).out)(X[None])
    with refused("inside a transform of torch.func"):
        torch.func.grad(lambda x: attend(x.detach()).out.sum())(X)


def test_dtensors(refused, tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        spread = distribute_tensor(X, dist.init_device_mesh("cpu", (1,)))
        with refused("q has no memory of its own: it is a DTensor", "x.to_local()"):
            attend(q=spread)
        assert attend(q=spread.to_local()).out.shape == (8, 2, 4)
    finally:
        dist.destroy_process_group()


# --- JAX ---


def test_inside_jax(refused):
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X.numpy())
    for inside in (
        jax.jit(lambda q: attend(q, x, x).out), jax.grad(lambda q: attend(q, x, x).out.sum()),
        jax.vmap(lambda q: attend(q, q, q).out), jax.jit(lambda q: attend(x, x, x, sink=q[0, :, 0]).out),
        jax.jit(lambda q: weft.shard(q, 0, ranks=2, cu_seqlens=CU)), jax.jit(lambda q: weft.unshard([q], cu_seqlens=CU)),
    ):
        with refused("Tracer of JAX", "no operator of JAX", "outside", "jax.pure_callback"):
            inside(x)
    with refused("cu_seqlens_q: ", "Tracer"):
        jax.jit(lambda cu: weft.Packing(cu).tokens_q)(jax.numpy.asarray(CU))


def test_the_ways_out_of_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X.numpy())

    def attention(q):
        return jax.pure_callback(lambda q: np.asarray(attend(np.asarray(q), X.numpy(), X.numpy()).out),
                                 jax.ShapeDtypeStruct(q.shape, q.dtype), q)

    np.testing.assert_array_equal(jax.jit(attention)(x), attend().out.numpy())
    np.testing.assert_array_equal(attend(x, x, x).backward(x).dq, attend().backward(X).dq.numpy())


# --- Numbers without an end ---


class Endless:
    """A sequence, as Python sees it, that does not say how long it is."""

    def __getitem__(self, i):
        return i


class Grows(list):
    """One that is longer each time it is read."""

    def __iter__(self):
        return itertools.count()


class Adds:
    def __init__(self, to):
        self.to = to

    def __index__(self):
        self.to.append(self)
        return 8


ENDLESS = {
    "a sequence": Endless(),
    "an iterator": itertools.count(),
    "a range": range(10**13),
    "a finite iterator": iter([0, 8]),
}

TAKERS = {
    "cu_seqlens": lambda x: weft.Packing(x),
    "seqused": lambda x: weft.Packing([0, 8], seqused_q=x),
    "lengths": lambda x: weft.Packing.from_lengths(x),
    "pack_documents": lambda x: weft.prepare.pack_documents(x, 100),
    "head_map": lambda x: attend(head_map=x),
    "slices": lambda x: weft.Mask(slices=x),
    "a slice": lambda x: weft.Mask(slices=[x]),
    "runs": lambda x: weft.Layout.explicit(weft.Packing(CU), x),
    "runs of a rank": lambda x: weft.Layout.explicit(weft.Packing(CU), [x]),
    "a run": lambda x: weft.Layout.explicit(weft.Packing(CU), [[x]]),
    "window": lambda x: attend(window=x),
    "offsets": lambda x: weft.prepare.KvCache(X, X, offsets=x),
    "counts": lambda x: weft.prepare.KvCache(torch.zeros(8, 2, 4), torch.zeros(8, 2, 4), offsets=[0, 8]).append(x, X, X),
}


# In a process of its own with a limit of memory: what is read to its end would take the whole machine.
LIMITED = """
import resource, sys
sys.path[:0] = {folders!r}
import test_strange
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
for taker, take in test_strange.TAKERS.items():
    for name in list(test_strange.ENDLESS):
        try:
            take(test_strange.ENDLESS[name])
            print(taker, name, "taken")
        except test_strange.weft.Error as e:
            assert e.problem and e.remedy
        except Exception as e:
            print(taker, name, type(e), e)
"""


@pytest.mark.long
def test_what_has_no_end():
    here = Path(__file__).parent
    program = LIMITED.format(folders=[str(here), str(here.parent)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_lists_that_grow(refused):
    grows = [0]
    grows.append(Adds(grows))
    assert weft.Packing(grows).tokens_q == 8  # as long as it was
    with refused("parts has more than"):
        weft.unshard(itertools.repeat(X[:4]), cu_seqlens=CU)
    with refused("counts has more than"):
        weft.choose(weft.Packing(CU), [weft.Mask()], 2, counts=itertools.repeat(1))
    with refused("detail has more than"):
        weft.simulate(weft.Packing([0, 64]), weft.Mask(causal=True), ranks=2, detail=itertools.repeat(0))


NUMBERS = [("bandwidth", x) for x in (1e-300, 0.5, -1.0, 1e300, float("inf"), float("nan"))]
NUMBERS += [("latency", x) for x in (-1.0, 1e300, float("inf"), float("nan"))]
NUMBERS += [("time_limit", x) for x in (0.0, 1e-300, -1.0, 1e300, float("inf"), float("nan"))]


@pytest.mark.parametrize("name, value", NUMBERS)
def test_links_and_limits_that_make_no_sense(name, value, refused):
    with refused("a time limit of" if name == "time_limit" else "a link of"):
        weft.spawn(2, lambda comm: comm.barrier(), **{name: value})


def test_a_link_slower_than_the_time_limit(refused):
    with refused("bytes over a link of 1 bytes per second", "time limit of 5 seconds"):
        weft.spawn(2, lambda comm: comm.barrier(), bandwidth=1, time_limit=5)
    with refused(f"{2**40} ranks"):
        weft.spawn(2**40, print)


# --- Errors that say what happened ---


class Raises(DlpackOnly):
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **options):
        raise self.error

    def __dlpack_device__(self):
        return 1, 0


class Index:
    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_ends_of_a_program_pass_through(end):
    calls = [lambda: attend(q=Raises(end)), lambda: weft.Packing(Raises(end)), lambda: weft.Packing([0, Index(end)]),
             lambda: weft.Mask(slices=[(0, 1, 0, 1, None, Index(end))]), lambda: attend(head_map=[0, Index(end)])]
    for call in calls:
        with pytest.raises(type(end)) as caught:
            call()
        assert caught.value is end


def test_what_dlpack_said_is_the_cause(refused):
    with pytest.raises(weft.Error, match="its __dlpack__ raised OSError") as caught:
        attend(q=Raises(OSError("it is far away")))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("problem, said", [(5, "rank 0: 5; "), (None, "rank 0: None; "), (b"\xff", "rank 0: b"),
                                           ("lone \ud800", "rank 0: lone ?; ")])
def test_an_error_whose_problem_is_no_text(problem, said, refused):
    def rank(comm):
        e = weft.Error("mine")
        e.problem = problem
        raise e

    with refused(said):
        weft.spawn(1, rank)


def test_an_error_that_cannot_be_printed(refused):
    class Silent:
        def __str__(self):
            raise OSError

    def rank(comm):
        e = weft.Error("mine")
        e.problem, e.remedy = Silent(), Silent()
        raise e

    with refused("rank 0: something of type", "Silent"):
        weft.spawn(1, rank)
