"""What cannot be computed is refused with the values and the way out, and nothing is left behind."""

import ctypes
import gc
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

import weft
from kinds import DlpackOnly

X = np.random.default_rng(0).standard_normal((8, 2, 4), np.float32)
CU = [0, 3, 8]


def attend(q=X, k=X, v=X, **options):
    if not {"cu_seqlens_q", "cu_seqlens_q_padded", "packing", "format"} & set(options):
        options["cu_seqlens_q"] = CU
    return weft.attention(q, k, v, **options)


class OnCuda(DlpackOnly):
    def __dlpack__(self, **options):
        raise BufferError("it is far away")

    def __dlpack_device__(self):
        return 2, 1


class OnVulkan(OnCuda):
    def __dlpack_device__(self):
        return 7, 1


def batch(*shape):
    return np.zeros(shape, np.float32)


BAD = {
    "whole numbers": (lambda: attend(*[X.astype(np.int32)] * 3), "q: its elements of 4 bytes are no floats", "f32, bf16, f16"),
    "complex": (lambda: attend(*[X.astype(complex)] * 3), "q: its elements of 16 bytes"),
    "objects": (lambda: attend(*[X.astype(object)] * 3), "q: an array of numbers was expected", "dtype('O')"),
    "another byte order": (lambda: attend(X, X.astype(">f4"), X), "k: an array of numbers", ">f4"),
    "mixed dtypes": (lambda: attend(X, X.astype(np.float16), X), "q is f32, k is f16 and v is f32"),
    "heads with gaps": (lambda: attend(*[batch(8, 2, 8)[:, :, ::2]] * 3), "q has shape [8, 2, 4] and strides [16, 8, 2]",
                        "contiguous"),
    "k with gaps": (lambda: attend(X, batch(8, 4, 2).transpose(0, 2, 1), X), "k has shape [8, 2, 4]", "do not lie side by side"),
    "negative strides": (lambda: attend(*[X[::-1]] * 3), "q has a negative stride", "-8"),
    "misaligned": (lambda: attend(*[np.frombuffer(bytearray(257), np.uint8)[1:].view(np.float32).reshape(8, 2, 4)] * 3),
                   "misaligned"),
    "two dimensions": (lambda: attend(X[:, 0]), "q has shape [8, 4] and format thd", "[t, h, d]"),
    "four dimensions": (lambda: attend(X, X, X[None]), "v has shape [1, 8, 2, 4]"),
    "three dimensions of a batch": (lambda: attend(format="bshd"), "q has shape [8, 2, 4] and format bshd", "[b, s, h, d]"),
    "no array": (lambda: attend([[1.0]]), "q: an array of numbers was expected, not list", "__dlpack__"),
    "None": (lambda: attend(X, None), "k: an array of numbers was expected, not NoneType"),
    "on a GPU": (lambda: attend(OnCuda(X)), "q lies on GPU 1", "CPU"),
    "on another device": (lambda: attend(OnVulkan(X)), "q lies on device 1 of DLPack type 7", "CPU"),
    "a stream of the CPU": (lambda: attend(stream="fast"), "stream is of type str", "cudaStream_t"),
    "cu_seqlens falls": (lambda: attend(cu_seqlens_q=[0, 5, 3, 8]), "cu_seqlens[2] = 3 is less than cu_seqlens[1] = 5"),
    "cu_seqlens negative": (lambda: attend(cu_seqlens_q=[-1, 8]), "-1"),
    "cu_seqlens too long": (lambda: attend(cu_seqlens_q=[0, 9]), "8 rows", "ends at row 9"),
    "cu_seqlens_k too long": (lambda: attend(cu_seqlens_k=[0, 3, 9]), "8 rows", "ends at row 9"),
    "other sequences": (lambda: attend(cu_seqlens_k=[0, 8]), "queries have 2 sequences and keys have 1"),
    "cu_seqlens of floats": (lambda: attend(cu_seqlens_q=np.array([0.0, 8.0])), "cu_seqlens_q: ndarray array([0., 8.]) given",
                             "int32 or int64"),
    "a float among them": (lambda: attend(cu_seqlens_q=[0, 8.5]), "cu_seqlens_q: float 8.5"),
    "cu_seqlens of two dimensions": (lambda: attend(cu_seqlens_q=np.zeros((2, 2), int)), "cu_seqlens_q", "one-dimensional"),
    "cu_seqlens of bytes": (lambda: attend(cu_seqlens_q=np.array([0, 8], np.uint8)), "cu_seqlens_q", "uint8"),
    "a number": (lambda: attend(cu_seqlens_q=8), "cu_seqlens_q: int 8 given"),
    "past 64 bits": (lambda: attend(cu_seqlens_q=[0, 2**70]), "cu_seqlens_q", str(2**70)),
    "empty cu_seqlens": (lambda: attend(cu_seqlens_q=[]), "cu_seqlens is empty"),
    "no cu_seqlens": (lambda: weft.attention(X, X, X), "cu_seqlens_q is not given"),
    "padded too short": (lambda: attend(cu_seqlens_q=CU, cu_seqlens_q_padded=[0, 2, 8]), "3", "2"),
    "padded of another count": (lambda: attend(cu_seqlens_q=CU, cu_seqlens_q_padded=[0, 8]), "2", "3"),
    "used too much": (lambda: attend(seqused_q=[4, 5]), "4"),
    "used without offsets": (lambda: weft.attention(X, X, X, seqused_q=[4, 5]), "cu_seqlens_q"),
    "all three": (lambda: attend(cu_seqlens_q=CU, cu_seqlens_q_padded=CU, seqused_q=[1, 1]), "are all given"),
    "packing and cu_seqlens": (lambda: attend(packing=weft.Packing(CU), cu_seqlens_q=CU),
                               "packing is given together with cu_seqlens_q"),
    "packing of other rows": (lambda: attend(packing=weft.Packing([0, 4])), "q has 8 rows", "4"),
    "cu_seqlens of a batch": (lambda: attend(*[batch(2, 4, 2, 4)] * 3, format="bshd", cu_seqlens_q=CU),
                              "cu_seqlens_q is given with format bshd"),
    "other batches": (lambda: attend(batch(2, 4, 2, 4), *[batch(3, 4, 2, 4)] * 2, format="bshd"),
                      "q has a batch of 2 and k one of 3"),
    "heads that do not divide": (lambda: attend(batch(8, 3, 4)), "q has 3 heads and k has 2", "multiple"),
    "heads of k and v": (lambda: attend(v=batch(8, 1, 4)), "k has 8 rows of 2 heads and v has 8 rows of 1 heads"),
    "rows of k and v": (lambda: attend(v=batch(7, 2, 4)), "k has 8 rows", "v has 7 rows"),
    "dims of q and k": (lambda: attend(k=batch(8, 2, 5)), "q has dim 4 and k has dim 5"),
    "no heads": (lambda: attend(*[batch(8, 0, 4)] * 3), "q has shape [8, 0, 4]"),
    "window below -1": (lambda: attend(window=(-2, 0)), "window left = -2 is below -1"),
    "right window below -1": (lambda: attend(window=(0, -7)), "window right = -7"),
    "a window of three": (lambda: attend(window=(1, 2, 3)), "window is (1, 2, 3)", "(left, right)"),
    "a window of one": (lambda: attend(window=5), "window is 5"),
    "no chunk": (lambda: attend(chunk_size=0), "chunk size 0 is below 1"),
    "slices overlap": (lambda: attend(slices=[(0, 2, 0, 2, None, None), (1, 3, 1, 3, None, None)]), "slices 0", "and 1",
                       "overlap"),
    "slices outside": (lambda: attend(slices=[(0, 9, 0, 9, None, None)]), "9"),
    "slices of five": (lambda: attend(slices=[(0, 2, 0, 2, 0)]), "q_begin, q_end, k_begin, k_end, lo, hi"),
    "slices of text": (lambda: attend(slices=["abcdef"]), "slices"),
    "slices and causal": (lambda: attend(causal=True, slices=[(0, 2, 0, 2, None, None)]),
                          "slices are given together with causal"),
    "mask and causal": (lambda: attend(causal=True, mask=weft.Mask()), "mask is given together with causal"),
    "an unknown kernel": (lambda: attend(kernel="gpu"), "there is no kernel 'gpu'", "cpu.scalar", "reference"),
    "an unknown format": (lambda: attend(format="hdt"), "there is no format 'hdt'", "thd", "bshd", "sbhd"),
    "an unknown layout": (lambda: weft.Layout("tartan", weft.Packing(CU), 2), "'tartan'", "zigzag", "dual_chunk"),
    "an unknown sink": (lambda: attend(sink="kitchen"), "there is no sink 'kitchen'", "off_by_one"),
    "a sink of other heads": (lambda: attend(sink=np.zeros(3, np.float32)), "sink", "3", "2"),
    "a sink of whole numbers": (lambda: attend(sink=np.zeros(2, int)), "sink: its elements"),
    "softcap below 0": (lambda: attend(softcap=-1.0), "softcap is -1"),
    "head_map of another length": (lambda: attend(head_map=[0]), "head_map has 1 entries and q has 2 heads"),
    "head_map outside": (lambda: attend(head_map=[0, 5]), "query head 1 to K/V head 5 of 2"),
    "a mask by name": (lambda: attend(mask="causal"), "mask is of type str"),
    "a number as packing": (lambda: attend(packing=8), "packing is of type int", "cu_seqlens"),
    "an unknown dtype": (lambda: weft.explain(CU, dtype="f8"), "there is no dtype 'f8'", "bf16"),
    "no communicator": (lambda: attend(comm=5), "comm is of type int"),
    "f64 with a fast kernel": (lambda: attend(*[X.astype(float)] * 3, kernel="cpu.scalar"), "f64"),
    "dout of other rows": (lambda: attend().backward(X[:4]), "dout has shape [4, 2, 4]"),
    "dout of whole numbers": (lambda: attend().backward(X.astype(int)), "dout: its elements of 8 bytes"),
    "no dout": (lambda: attend().backward(None), "dout: an array of numbers"),
    "no ranks": (lambda: weft.spawn(0, print), "0 ranks"),
    "no time": (lambda: weft.spawn(1, print, time_limit=0), "time limit of 0"),
    "a rank that is not": (lambda: weft.shard(X, 4, ranks=4, cu_seqlens=CU), "there is no rank 4 of 4"),
    "one row for all": (lambda: weft.shard(np.broadcast_to(X[:1], (8, 2, 4)), 0, ranks=4, cu_seqlens=[0, 8]),
                        "strides [0, 4, 1]: all its rows are one", "copy it first"),
    "ranks not said": (lambda: weft.shard(X, 4, cu_seqlens=CU), "rank 4 of how many?"),
    "no side": (lambda: weft.shard(X, 0, ranks=2, cu_seqlens=CU, side="v"), "there is no side 'v'"),
    "layout of other ranks": (lambda: weft.shard(X, 0, ranks=2, layout=weft.Layout("zigzag", weft.Packing(CU), 3)),
                              "of 3 ranks, not 2"),
    "layout of another packing": (lambda: weft.shard(X, 0, ranks=2, packing=weft.Packing([0, 8]),
                                                     layout=weft.Layout("zigzag", weft.Packing(CU), 2)),
                                  "the layout was made for"),
    "dual_chunk of odd lengths": (lambda: weft.Layout("dual_chunk", weft.Packing(CU), 2), "sequence 0", "3", "4"),
    "a batch that falls apart": (lambda: weft.shard(batch(2, 4, 2), 0, ranks=2, format="bshd", layout="zigzag"),
                                 "a rank's rows are no batch"),
    "no parts": (lambda: weft.unshard([], cu_seqlens=CU), "no parts"),
    "parts that differ": (lambda: weft.unshard([X[:4], X[:4].astype(int)], cu_seqlens=CU), "part 1", "int64"),
    "keys of nobody": (lambda: weft.plan(weft.Packing(CU), layout="zigzag", ranks=2, keys="mine"), "keys: 'mine'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, refused):
    call, *parts = BAD[name]
    with refused(*parts):
        call()


def test_torch_elsewhere(refused):
    torch = pytest.importorskip("torch")
    with refused("q lies on meta"):
        attend(*[torch.zeros(8, 2, 4, device="meta")] * 3)
    with refused("k has no memory of its own"):
        attend(torch.zeros(8, 2, 4), torch.zeros(8, 2, 4).to_sparse(), torch.zeros(8, 2, 4))
    with refused("cu_seqlens_q"):
        attend(cu_seqlens_q=torch.tensor([0, 8], device="meta"))


def test_buffers_elsewhere(refused):
    for device in ("tpu", "cuda:x", "cuda:1:2"):
        with refused(f"there is no device '{device}'", "cuda:1"):
            weft.prepare.KvBuffer(None, rows=1, heads=1, dim=1, device=device)
    if not weft._core.has_cuda:
        for device in ("cuda:1", 1):
            with refused("GPU 1", "WEFT_CUDA=ON"):
                weft.prepare.KvBuffer(None, rows=1, heads=1, dim=1, device=device)


def test_what_error_is():
    assert issubclass(weft.Error, ValueError) and weft.Error.__doc__
    assert weft.Error.__module__ == "weft"
    with pytest.raises(ValueError, match="window"):
        attend(window=(-2, 0))


@pytest.mark.parametrize("option, value, names", [
    ("schedule", "rings", weft._core.schedules()),
    ("layout", "tartan", ["contiguous", "dual_chunk", "zigzag", "striped", "balanced"]),
    ("kernel", "gpu", ["cpu", "reference"]),
])
def test_unknown_names_on_ranks(option, value, names, refused):
    def rank(comm):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        return weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm, **{option: value})

    with refused("rank ", value, *names):
        weft.spawn(2, rank)


def test_unknown_names_of_options(refused):
    with refused("key_order", "alphabetic", "auto", "sequence", "rank"):
        weft.Schedule("all_gather", key_order="alphabetic")
    with refused("outer", "rings", "ring", "all_gather"):
        weft.Schedule("hybrid", outer="rings")


@pytest.mark.parametrize("option", ["schedule", "layout"])
def test_unknown_names_on_one_rank(option, refused):
    q = np.ones((4, 1, 8), np.float32)
    with refused(f"there is no {option} 'tartan'", "ring" if option == "schedule" else "zigzag"):
        weft.attention(q, q, q, cu_seqlens_q=[0, 4], **{option: "tartan"})


def test_gradients_that_would_be_lost(refused):
    torch = pytest.importorskip("torch")
    q = torch.ones((4, 1, 8), requires_grad=True)
    with refused("requires a gradient", "weft.torch.context_parallel_attention"):
        weft.attention(q, q, q, cu_seqlens_q=[0, 4])
    with torch.no_grad():
        assert weft.attention(q, q, q, cu_seqlens_q=[0, 4]).out.shape == (4, 1, 8)


def test_rows_that_are_not_the_ranks(refused):
    with refused("rank ", "8", "4"):
        weft.spawn(2, lambda comm: attend(comm=comm))


# --- Ranks that end ---


def test_a_communicator_ends_with_spawn(refused):
    kept = []

    def rank(comm):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        buffer = weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)
        kept.append((comm, comm.split(0, comm.rank), buffer, weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm)))

    weft.spawn(2, rank)
    micros = weft.prepare.MicroSequences(weft.Packing(CU), ranks=2, micros=1)
    for comm, split, buffer, r in kept:
        for use in (lambda: comm.rank, lambda: comm.ranks, lambda: comm.name, comm.barrier, lambda: comm.split(0, 0),
                    lambda: comm.bytes_sent,
                    lambda: attend(comm=comm), lambda: r.backward(r.out), lambda: buffer.begin(micros), lambda: buffer.missing(0),
                    lambda: buffer.forward(0, X, X, X), lambda: weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)):
            with refused("the ranks of this communicator have ended", "inside"):
                use()
        with refused("of a split"):
            split.barrier()
        assert buffer.bytes_held > 0
    del comm, split, buffer, r
    kept.clear()
    gc.collect()


def test_an_exception_of_one_rank_is_raised_while_others_wait():
    class Mine(Exception):
        pass

    def rank(comm):
        if comm.rank == 1:
            raise Mine("it was me")
        comm.barrier()

    begin = time.perf_counter()
    with pytest.raises(Mine, match="it was me") as caught:
        weft.spawn(3, rank)
    assert time.perf_counter() - begin < 20
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["on rank 1 of weft.spawn"]


def test_an_exception_while_others_attend():
    def rank(comm):
        mine = weft.shard(X, comm, cu_seqlens=CU)
        if comm.rank == 2:
            raise KeyError("lost")
        return weft.attention(mine, mine, mine, cu_seqlens_q=CU, comm=comm, schedule="ring")

    with pytest.raises(KeyError, match="lost"):
        weft.spawn(4, rank)


def test_an_error_of_weft_names_the_rank(refused):
    def rank(comm):
        if comm.rank == 1:
            raise weft._arrays.error("a problem of mine", "a remedy")
        comm.barrier()

    with refused("rank 1: a problem of mine; a remedy"):
        weft.spawn(2, rank)
    try:
        weft.spawn(2, rank)
    except weft.Error as e:
        assert str(e.__cause__) == "a problem of mine; a remedy"
        assert e.__cause__.__traceback__.tb_frame.f_code.co_name == "rank"


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
def test_ends_that_are_no_exceptions(end):
    def rank(comm):
        if comm.rank == 0:
            raise end
        comm.barrier()

    with pytest.raises(type(end)):
        weft.spawn(2, rank)


def test_a_rank_that_returns_too_early(refused):
    with refused("has left"):
        weft.spawn(2, lambda comm: comm.barrier() if comm.rank else None)


def test_a_rank_that_never_comes(refused):
    come = threading.Event()

    def rank(comm):
        if comm.rank == 0:
            come.wait(20)
        else:
            try:
                comm.barrier()
            finally:
                come.set()

    with refused("rank 1 waited 0.2 seconds", "for rank 0"):
        weft.spawn(2, rank, time_limit=0.2)


def test_spawn_inside_spawn():
    def outer(comm):
        return weft.spawn(2, lambda inner: (comm.rank, inner.rank))

    assert weft.spawn(2, outer) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


# --- A transport written in Python ---


class Transport:
    """Of one rank that sends to itself; fails where it is told to."""

    def __init__(self, fails):
        self.fails, self.abandoned = fails, 0

    def exchange(self, sends, receives):
        if self.fails == "exchange":
            raise OSError("no exchange")
        return self

    def wait(self):
        if self.fails in ("wait", "wait and abandon"):
            raise OSError("no wait")

    def abandon(self):
        self.abandoned += 1
        if self.fails == "wait and abandon":
            raise OSError("no abandon")


def _attend_by(transport):
    comm = weft._core.python_communicator(0, 1, "test", transport)
    return weft.attention(X, X, X, cu_seqlens_q=CU, comm=comm)


def test_a_transport_that_works():
    np.testing.assert_array_equal(_attend_by(Transport(None)).out, attend().out)


@pytest.mark.parametrize("fails", ["exchange", "wait", "wait and abandon"])
def test_an_exception_of_a_transport_comes_through(fails, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda e: unraisable.append(str(e.exc_value)))
    transport = Transport(fails)
    with pytest.raises(OSError, match=f"no {fails.split()[0]}"):
        _attend_by(transport)
    assert transport.abandoned == (fails != "exchange")
    assert unraisable == (["no abandon"] if "abandon" in fails else [])


def test_no_rank_of_a_transport(refused):
    with refused("there is no rank 2 of 2"):
        weft._core.python_communicator(2, 2, "test", Transport(None))


# --- Nothing is left behind ---


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _heap():
    """Bytes that malloc has handed out in this thread's arena and by mmap; None where it cannot be asked."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def _resident():
    """Bytes of memory in use now."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grown(call, count):
    """(objects, traced bytes, heap bytes, resident bytes) that `count` calls leave behind."""
    def now():
        gc.collect()
        return np.array([len(gc.get_objects()), tracemalloc.get_traced_memory()[0], _heap() or 0, _resident()])

    tracemalloc.start()
    for i in range(count // 4):
        call(i)
    rounds = [now()]
    for _ in range(2):  # caches of others may fill once; what leaks does so again
        for i in range(count):
            call(i)
        rounds.append(now())
    tracemalloc.stop()
    return np.minimum(rounds[1] - rounds[0], rounds[2] - rounds[1]).tolist()


def _assert_nothing_left(call, count=1000):
    objects, traced, heap, resident = _grown(call, count)
    # One array of a call would be 32 KiB times `count`, one small object of C++ 32 bytes or more; the rest is for others' caches.
    assert objects < count // 10, f"{objects} objects"
    assert traced < 20 * count, f"{traced} bytes of Python"
    assert heap < 24 * count + 20_000, f"{heap} bytes of malloc"
    assert resident < 4000 * count, f"{resident} bytes resident"


def test_bad_calls_leave_nothing_behind():
    big = np.zeros((512, 4, 16), np.float32)
    calls = [call for call, *_ in BAD.values()]
    calls += [lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 600]),
              lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 512], window=(-3, 0)),
              lambda: weft.attention(big, big, big, cu_seqlens_q=[0, 512], kernel="gpu")]

    def call(i):
        with pytest.raises(weft.Error):
            calls[i % len(calls)]()

    _assert_nothing_left(call)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_good_calls_leave_nothing_behind(framework):
    x = np.random.default_rng(0).standard_normal((64, 4, 32), np.float32)
    if framework == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    elif framework == "jax":
        x = pytest.importorskip("jax.numpy").asarray(x)
    sink = np.zeros(4, np.float32)

    def call(i):
        weft.attention(x, x, x, cu_seqlens_q=[0, 20, 64], causal=True, sink=sink).backward(x)

    _assert_nothing_left(call)


def test_ranks_leave_nothing_behind():
    x = np.zeros((64, 4, 32), np.float32)

    def rank(comm):
        mine = weft.shard(x, comm, cu_seqlens=[0, 64])
        return weft.attention(mine, mine, mine, cu_seqlens_q=[0, 64], comm=comm, schedule="ring").out

    def failing(comm):
        rank(comm)
        raise OSError

    def call(i):
        weft.spawn(2, rank)
        with pytest.raises(OSError):
            weft.spawn(2, failing)

    _assert_nothing_left(call, 600)  # many: Python caches attributes of tracebacks by the address of their name, and fills up slowly


# --- The end of the process ---

ENDS = {
    "everything held": """
        import weft, numpy as np
        x = np.ones((8, 2, 4), np.float32)
        kept = []
        def rank(comm):
            kept.append((comm, comm.split(0, 0), weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4),
                         weft.attention(x[:4], x[:4], x[:4], cu_seqlens_q=[0, 8], comm=comm)))
        weft.use_layout([0, 8], ranks=2)
        weft.spawn(2, rank)
        r = weft.attention(x, x, x, cu_seqlens_q=[0, 8])
        """,
    "a transport held": """
        import weft, numpy as np
        class Transport:
            def exchange(self, sends, receives): return self
            def wait(self): pass
            abandon = wait
        comm = weft._core.python_communicator(0, 1, "test", Transport())
        x = np.ones((8, 2, 4), np.float32)
        r = weft.attention(x, x, x, cu_seqlens_q=[0, 8], comm=comm)
        Transport.kept = r
        """,
    "a thread in a call": """
        import threading, time, weft, numpy as np
        x = np.ones((3000, 4, 32), np.float32)
        threading.Thread(target=lambda: weft.attention(x, x, x, cu_seqlens_q=[0, 3000], kernel="reference"), daemon=True).start()
        time.sleep(0.1)
        """,
    "torch with everything kept": """
        import warnings
        warnings.simplefilter("ignore")
        import torch, weft, weft.torch
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        q = torch.ones(8, 2, 4, requires_grad=True)
        out = weft.torch.context_parallel_attention(q, q, q, weft.Packing([0, 8]), causal=True, schedule="ring")
        out.sum().backward()
        layer = weft.torch.MicroSequenceAttention()
        held = layer(q, q, q, weft.prepare.MicroSequences(weft.Packing([0, 8]), micros=2))
        """,
    "keys under way": """
        import weft, numpy as np
        kept = []
        def rank(comm):
            micros = weft.prepare.MicroSequences(weft.Packing([0, 8]), ranks=2, micros=2)
            buffer = weft.prepare.KvBuffer(comm, rows=8, heads=2, dim=4)
            buffer.begin(micros)
            buffer.start_gather(0, np.ones((2, 2, 4), np.float32), np.ones((2, 2, 4), np.float32))
            kept.append(buffer)
        weft.spawn(2, rank)
        """,
}


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends_well(name):
    if "import torch" in ENDS[name]:
        pytest.importorskip("torch")
    code = re.sub(r"^ {8}", "", ENDS[name], flags=re.M) + "\nprint('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["end"]), done.stderr
    # torch has things to say of machines that are set up in odd ways; what ends badly says one of these.
    assert not re.search("Traceback|Exception|terminate|Fatal|nanobind|leak|Segmentation|weft", done.stderr), done.stderr


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None; import weft.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "weft.torch needs PyTorch; pip install '.[torch]'" in done.stderr, done.stderr
