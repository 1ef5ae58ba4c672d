"""What cannot be computed is refused with the values and the way out."""


import numpy as np
import pytest
import weft

from kinds import DlpackOnly

X = np.random.default_rng(0).standard_normal((8, 2, 4), np.float32)
CU = [0, 3, 8]
HAS_CUDA = any(kernel["name"].startswith("cuda") for kernel in weft._core.kernels())


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
    "k with gaps": (lambda: attend(X, batch(8, 4, 2).transpose(0, 2, 1), X), "k has shape [8, 2, 4]", "are not contiguous"),
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
    "a GPU's kernel": (lambda: attend(kernel="cuda.none"), "there is no kernel 'cuda.none'",
                       *(() if HAS_CUDA else ("without CUDA", "+cu13", "-DWEFT_CUDA=ON"))),
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


def test_unknown_names_of_options(refused):
    with refused("key_order", "alphabetic", "auto", "sequence", "rank"):
        weft.Schedule("all_gather", key_order="alphabetic")
    with refused("outer", "rings", "ring", "all_gather"):
        weft.Schedule("hybrid", outer="rings")


def test_gradients_that_would_be_lost(refused):
    torch = pytest.importorskip("torch")
    q = torch.ones((4, 1, 8), requires_grad=True)
    with refused("requires a gradient", "weft.torch.context_parallel_attention"):
        weft.attention(q, q, q, cu_seqlens_q=[0, 4])
    with torch.no_grad():
        assert weft.attention(q, q, q, cu_seqlens_q=[0, 4]).out.shape == (4, 1, 8)


def test_rows_that_are_not_the_ranks(refused):
    weft.use_layout(CU, ranks=2)
    with refused("rank ", "8", "4"):
        weft.spawn(2, lambda comm: attend(comm=comm))
