"""The operators of weft.torch in one process: gradients, compiling, checkpoints."""

import copy
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import weft
import weft.torch
from torch.utils.checkpoint import checkpoint

import dense

CU = [0, 3, 3, 10]
attend = weft.torch.context_parallel_attention


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    weft.torch.clear_cache()


def tensors(tokens=10, heads=(4, 2), dim=8, dim_v=8, dtype=torch.float32, grad=True):
    shapes = (tokens, heads[0], dim), (tokens, heads[1], dim), (tokens, heads[1], dim_v)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def results(call, inputs, dout=None):
    """Output and gradients as plain tensors."""
    for x in inputs:
        x.grad = None
    out = call(*inputs)
    out.backward(torch.ones_like(out) if dout is None else dout)
    return [out.detach().clone(), *(x.grad.clone() for x in inputs)]


def assert_same(a, b):
    for x, y in zip(a, b):
        assert torch.equal(x, y)


MASKS = [weft.Mask(causal=True), weft.Mask(window=(2, 1)), weft.Mask(causal=True, chunk_size=3),
         weft.Mask(causal=True, bottom_right=True),
         weft.Mask(slices=[(0, 4, 0, 10, None, None), (4, 10, 2, 7, -3, 3)])]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sink", [None, "off_by_one", "learnable"])
def test_gradcheck(mask, sink):
    inputs = tensors(heads=(2, 1), dim=3, dim_v=2, dtype=torch.float64)
    options = dict(kernel="reference", one_rank=True, softcap=2.0 if sink else 0.0, sink=sink)
    if sink == "learnable":
        inputs.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
    packing = weft.Packing([0, 10] if mask.slices is not None else CU)

    def call(q, k, v, logits=None):
        return attend(q, k, v, packing, mask, **{**options, "sink": sink if logits is None else logits})

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_gradcheck_of_batches(format):
    shape = (2, 4, 2, 3) if format == "bshd" else (4, 2, 2, 3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    packing = weft.Packing.from_batch(2, 4, seqused_q=[4, 2])
    assert torch.autograd.gradcheck(lambda *x: attend(*x, packing, causal=True, format=format, kernel="reference"), inputs)


def test_against_dense():
    q, k, v = tensors(dim_v=6)
    dout = torch.randn(10, 4, 6)
    out, *grads = results(lambda *x: attend(*x, weft.Packing(CU), weft.Mask(causal=True), softcap=3.0), (q, k, v), dout)
    side = CU, [3, 0, 7], 10
    want = dense.Dense(*(x.detach().double().numpy() for x in (q, k, v)), dense.visible(side, side, causal=True), softcap=3.0)
    wanted = want.backward(dout.double().numpy())
    dense.assert_close("out", out, want.out, want.out_terms, want.steepness, "f32")
    for name, got in zip(("dq", "dk", "dv"), grads):
        dense.assert_close(name, got, *wanted[name], want.steepness, "f32")


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("max_logit", [False, True])
def test_opcheck(sink, max_logit):
    q, k, v = tensors()
    logits = torch.randn(4, requires_grad=True) if sink else None
    packing = weft.torch.pack(weft.Packing(CU))
    how = weft.torch.op.how_of(causal=True, max_logit=max_logit)
    torch.library.opcheck(torch.ops.weft.attention.default, (q, k, v, logits, packing, how))
    plain = [x.detach() for x in (q, k, v)]
    held = None if logits is None else logits.detach()
    out, lse, _ = torch.ops.weft.attention(*plain, held, packing, how)
    torch.library.opcheck(torch.ops.weft.attention_backward.default, (torch.ones_like(out), *plain, held, out, lse, packing, how))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.attend = weft.torch.ContextParallelAttention(window=(4, 0), sink="learnable", heads=2, one_rank=True)

    def forward(self, x, packing):
        q, k, v = self.project(x).view(-1, 3, 2, 8).unbind(1)
        return self.attend(q, k, v, packing).flatten(1)


def _layer_results(layer, module, x, packing):
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    out = layer(x, packing)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


compiler = pytest.mark.skipif(not any(shutil.which(name) for name in ("g++", "clang++")), reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=[compiler, pytest.mark.long])])
def test_compile(backend):
    module = Layer()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    first = weft.torch.pack(weft.Packing(CU))
    x = torch.randn(10, 16)
    # The same length with other documents, another number of documents, more rows, and the first one again.
    cases = [(x, first), (x, weft.torch.pack(weft.Packing([0, 5, 5, 10]))), (x, weft.torch.pack(weft.Packing([0, 10]))),
             (torch.randn(17, 16), weft.torch.pack(weft.Packing([0, 2, 9, 17]))), (x, first)]
    for rows, packing in cases:
        want = _layer_results(module, module, rows, packing)
        got = _layer_results(compiled, module, rows, packing)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    different = [_layer_results(compiled, module, x, packing)[0] for _, packing in cases[:3]]
    assert not torch.allclose(different[0], different[1]) and not torch.allclose(different[0], different[2])


def test_compile_with_a_changed_mask():
    q, k, v = tensors(grad=False)
    packing = weft.torch.pack(weft.Packing(CU))
    compiled = torch.compile(lambda q, k, v, packing, window: attend(q, k, v, packing, causal=True, window=window),
                             fullgraph=True, backend="eager")
    for window in ((-1, 0), (1, 0), (0, 0), (-1, 0)):
        assert torch.equal(compiled(q, k, v, packing, window), attend(q, k, v, packing, causal=True, window=window))


def test_compile_with_objects_breaks_the_graph_and_nothing_else():
    q, k, v = tensors(grad=False)
    compiled = torch.compile(lambda q, k, v, packing, mask: attend(2 * q, k, v, packing, mask) + 1, backend="eager")
    for packing in (weft.Packing(CU), weft.Packing([0, 10])):
        for mask in (weft.Mask(causal=True), weft.Mask(), weft.Mask(window=(1, 0))):
            assert torch.equal(compiled(q, k, v, packing, mask), attend(2 * q, k, v, packing, mask) + 1)


def test_modules_can_be_copied():
    q, k, v = tensors(grad=False)
    layer = weft.torch.ContextParallelAttention(sink="learnable", heads=4, one_rank=True)
    assert torch.equal(copy.deepcopy(layer)(q, k, v, weft.Packing(CU)), layer(q, k, v, weft.Packing(CU)))
    cut = weft.prepare.MicroSequences(weft.Packing(CU), micros=2)
    micro = weft.torch.MicroSequenceAttention(mask=weft.Mask(causal=True, window=(2, 0)))
    want = micro(q, k, v, cut)  # it has a buffer now
    again = copy.deepcopy(micro)
    assert len(micro._free) == 1 and not again._free and torch.equal(again(q, k, v, cut), want)


def test_compile_with_options_of_the_call():
    q, k, v = tensors(grad=False)
    packing = weft.torch.pack(weft.Packing(CU))
    sink = torch.randn(4)

    def call(q, k, v, packing, sink, softcap):
        out, lse, largest = attend(q, k, v, packing, sink=sink, softcap=softcap, causal=True, return_lse=True,
                                   return_max_logit=True)
        return out + 1, lse, largest

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for softcap in (0.0, 2.0, 3.0, 2.0):
        assert_same(compiled(q, k, v, packing, sink, softcap), call(q, k, v, packing, sink, softcap))


def test_compile_with_a_schedule():
    """From outside, from a layer, made inside, and with a number that torch.compile takes for a variable."""
    x, packing, ring = tensors(grad=False)[0], weft.torch.pack(weft.Packing(CU)), weft.Schedule("ring", ranks_per_step=1)
    layer = weft.torch.ContextParallelAttention(schedule=ring)
    calls = [lambda n: attend(x, x, x, packing, causal=True, schedule=ring), lambda n: layer(x, x, x, packing),
             lambda n: attend(x, x, x, packing, causal=True, schedule=weft.Schedule("ring", ranks_per_step=n))]
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for n in (1, 2, 3):
            assert torch.equal(compiled(n), call(n))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    module = Layer()
    packing = weft.Packing(CU)
    x = torch.randn(10, 16)
    want = _layer_results(module, module, x, packing)
    got = _layer_results(lambda x, packing: checkpoint(module, x, packing, use_reentrant=reentrant), module, x, packing)
    assert_same(got, want)


def test_layers_between_forward_and_backward():
    """More problems than are kept: the backward makes its plan anew."""
    inputs = tensors()
    calls = [results(lambda *x: attend(*x, weft.Packing([0, i, 10]), causal=True), inputs) for i in range(1, 9)]
    outs = [attend(*inputs, weft.Packing([0, i % 8 + 1, 10]), causal=True, window=(i // 8 + 20, 0)) for i in range(40)]
    for i, out in enumerate(outs):
        for x in inputs:
            x.grad = None
        out.sum().backward()
        assert_same([out, *(x.grad for x in inputs)], calls[i % 8])


def test_module_overrides():
    q, k, v = tensors(grad=False)
    packing = weft.Packing(CU)
    layer = weft.torch.ContextParallelAttention(window=(1, 0), softcap=5.0, one_rank=True)
    assert torch.equal(layer(q, k, v, packing), attend(q, k, v, packing, causal=True, window=(1, 0), softcap=5.0))
    assert torch.equal(layer(q, k, v, packing, window=(-1, 0), softcap=0.0),
                       attend(q, k, v, packing, causal=True, window=(-1, 0)))
    assert torch.equal(layer(q, k, v, packing, weft.Mask(), softcap=0.0), attend(q, k, v, packing))
    assert torch.equal(layer(q, k, v, packing, sink="off_by_one"),
                       attend(q, k, v, packing, causal=True, window=(1, 0), softcap=5.0, sink="off_by_one"))
    out, lse = layer(q, k, v, packing, return_lse=True)
    assert lse.shape == (10, 4) and not lse.requires_grad
    assert "window=(1, 0)" in repr(layer)
    state = weft.torch.ContextParallelAttention(sink="learnable", heads=4).state_dict()
    assert list(state) == ["sink"] and state["sink"].shape == (4,)


def test_settings_from_numpy():
    q, k, v = tensors(grad=False)
    packing = weft.Packing(CU)
    got = attend(q, k, v, packing, window=(np.int64(2), np.int32(0)), head_map=np.array([0, 1, 0, 1]), softcap=np.float32(2))
    assert torch.equal(got, attend(q, k, v, packing, window=(2, 0), head_map=[0, 1, 0, 1], softcap=2.0))


def test_a_process_group_that_comes_again():
    """Groups have names, and a new one may have that of one that is gone."""
    dist = torch.distributed
    q, k, v = tensors()
    want = attend(q, k, v, weft.Packing(CU), causal=True)
    used = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            got = results(lambda *x: attend(*x, weft.Packing(CU), causal=True, schedule="ring"), inputs)
            torch.testing.assert_close(got[0], want)
            used.append(weft.torch.communicator())
            assert all(run.comm in (None, used[-1]) for runs in weft.torch.op._runs.values() for run in runs.values())
        finally:
            dist.destroy_process_group()
    assert used[0] is not used[1]


def test_refusals(refused):
    q, k, v = tensors(grad=False)
    packing = weft.Packing(CU)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'windows'; use .*window"):
        attend(q, k, v, packing, windows=(1, 0))
    with refused("mask is given together with causal"):
        attend(q, k, v, packing, weft.Mask(), causal=True)
    with refused("mask is given together with window"):
        weft.torch.ContextParallelAttention()(q, k, v, packing, weft.Mask(), window=(1, 0))
    with refused("there is no sink 'kitchen'"):
        attend(q, k, v, packing, sink="kitchen")
    with refused("there is no sink 'kitchen'"):
        weft.torch.ContextParallelAttention(sink="kitchen")
    with refused("how many heads"):
        weft.torch.ContextParallelAttention(sink="learnable")
    with refused("packing is of type int", "cu_seqlens"):
        attend(q, k, v, 10)
    with refused("mask is of type str"):
        attend(q, k, v, packing, "causal")
    with refused("slices"):
        attend(q, k, v, weft.torch.pack(packing), weft.Mask(slices=[(0, 2, 0, 2, None, None)]))
    with refused("10 tokens"):
        attend(q[:9], k[:9], v[:9], packing)
    with refused("a packing was expected", "[2, 2]", "cu_seqlens"):
        attend(q, k, v, torch.tensor([CU[:2], CU[:2]]))
    with refused("a packing was expected", "float32"):
        attend(q, k, v, torch.tensor(CU).float())
    with refused("q has shape", "format bshd"):
        attend(q, k, v, packing, format="bshd")
    with refused("q is f32, k is bf16"):
        attend(q, k.bfloat16(), v, packing)
    with refused("layout is a Layout", "give its name"):
        attend(q, k, v, packing, layout=weft.Layout("zigzag", packing, 1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'ranks'"):
        attend(q, k, v, packing, ranks=2)
    with refused("there is no process group"):
        weft.torch.communicator()
    # What failed is forgotten, and what is right goes on.
    assert attend(q, k, v, packing).shape == (10, 4, 8)


@pytest.mark.parametrize("name", ["expanded", "transposed", "strided", "sliced"])
def test_gradients_of_the_output_in_any_shape(name):
    inputs = tensors()
    douts = {"expanded": lambda: torch.tensor(0.5).expand(10, 4, 8), "transposed": lambda: torch.randn(10, 8, 4).transpose(1, 2),
             "strided": lambda: torch.randn(10, 4, 16)[:, :, ::2], "sliced": lambda: torch.randn(20, 5, 9)[::2, 1:, 1:]}
    dout = douts[name]()
    call = lambda *x: attend(*x, weft.Packing(CU), causal=True)
    assert_same(results(call, inputs, dout), results(call, inputs, dout.contiguous()))


def test_inputs_in_any_shape():
    qkv = torch.randn(10, 3, 4, 8, requires_grad=True)
    out = attend(*qkv.unbind(1), weft.Packing(CU), causal=True)
    out.sum().backward()
    inputs = [x.detach().clone().requires_grad_() for x in qkv.unbind(1)]
    want = results(lambda *x: attend(*x, weft.Packing(CU), causal=True), inputs)
    assert torch.equal(out, want[0]) and torch.equal(qkv.grad, torch.stack(want[1:], 1))


def test_no_copies():
    """Kernels get the tensors as they are: torch's operators copy nothing on the way."""
    inputs = [x.requires_grad_() for x in torch.randn(10, 3, 4, 8).unbind(1)]
    dout = torch.randn(10, 4, 8)
    attend(*inputs, weft.Packing(CU), causal=True)  # makes the plan
    packing = weft.torch.pack(weft.Packing(CU))
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attend(*inputs, packing, causal=True), inputs, dout)
    done = {event.key: event.count for event in profile.key_averages() if event.key.startswith(("aten::", "weft::"))}
    assert done == {"weft::run": 1, "weft::run_backward": 1}


@pytest.fixture
def in_python(monkeypatch):
    """As with a torch that has no C interface for kernels."""
    monkeypatch.setattr(weft.torch.runs, "_native", None)


def test_no_copies_in_python(in_python, seen):
    q, k, v = tensors()
    out, lse = attend(q, k, v, weft.Packing(CU), causal=True, return_lse=True)
    assert seen["forward"] == [x.data_ptr() for x in (q, k, v, out, lse)]
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert seen["backward"] == [x.data_ptr() for x in (q, k, v, out, lse, dout, *grads)]


def test_a_second_derivative_is_refused():
    """Not zeros in silence."""
    q, k, v = tensors(dtype=torch.float64)
    out = attend(q, k, v, weft.Packing(CU), causal=True, kernel="reference")
    dq, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        torch.autograd.grad(dq.square().sum(), q)


def test_some_inputs_without_a_gradient():
    q, k, v = tensors()
    k = k.detach()
    attend(q, k, v, weft.Packing(CU), causal=True).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None
    with torch.no_grad():
        assert not attend(q, k, v, weft.Packing(CU)).requires_grad
    with torch.inference_mode():
        assert attend(q, k, v, weft.Packing(CU)).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype):
    inputs = tensors(dtype=dtype)
    got = results(lambda *x: attend(*x, weft.Packing(CU), causal=True), inputs)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    want = results(lambda *x: attend(*x, weft.Packing(CU), causal=True), wide)
    for a, b in zip(got, want):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=5e-2)


def test_autocast():
    module = Layer()
    x = torch.randn(10, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, weft.Packing(CU))  # the projection gives bf16
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert module.project.weight.grad.dtype == torch.float32 and module.attend.sink.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), module(x, weft.Packing(CU)), rtol=5e-2, atol=5e-2)


def test_packing_as_a_tensor():
    for packing in (weft.Packing(CU), weft.Packing([0]), weft.Packing([0, 4], [0, 9]),
                    weft.Packing(cu_seqlens_q_padded=[0, 6], seqused_q=[2], tokens_q=8)):
        again, slices, _ = weft.torch.packed.unpack(weft.torch.pack(packing))
        assert again == packing and slices is None
    own, dealt = np.array([[0, 2, 0, 2, -3, 0]]), np.array([[0, 2, 0, 1, 0, 0], [0, 2, 1, 2, 0, 0]])
    assert weft.torch.packed.unpack(weft.torch.pack(weft.Packing(CU), own))[1].tolist() == own.tolist()
    for slices in (None, own):
        _, *both = weft.torch.packed.unpack(weft.torch.pack(weft.Packing(CU), slices, layout_slices=dealt))
        assert [x is None or x.tolist() for x in both] == [slices is None or own.tolist(), dealt.tolist()]


def test_shards_of_one_rank():
    packing = weft.Packing(CU)
    ids = torch.arange(10)
    assert torch.equal(weft.torch.shard(ids, packing), ids)
    assert torch.equal(weft.torch.shard(ids[None], packing, dim=1), ids[None])
    assert torch.equal(weft.torch.unshard(ids, packing), ids)
    assert weft.torch.position_ids(packing).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert weft.torch.valid_rows(weft.Packing(cu_seqlens_q_padded=[0, 4], seqused_q=[3])).tolist() == [True] * 3 + [False]
    assert weft.torch.next_token_labels(ids, packing).tolist() == [1, 2, -100, 4, 5, 6, 7, 8, 9, -100]
    padded = weft.Packing(cu_seqlens_q_padded=[0, 4, 6, 10], seqused_q=[3, 0, 4])
    assert weft.torch.next_token_labels(ids, padded).tolist() == [1, 2] + [-100] * 4 + [7, 8, 9, -100]


# --- Micro-sequences ---


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("micros", [1, 2, 5])
def test_micro_sequences(micros, drop):
    inputs = tensors(dim_v=6)
    sink = torch.randn(4, requires_grad=True)
    mask = weft.Mask(causal=True, window=(3, 0))
    cut = weft.prepare.MicroSequences(weft.Packing(CU), micros=micros)
    layer = weft.torch.MicroSequenceAttention(mask=mask, drop=drop, softcap=4.0)
    want = results(lambda q, k, v, s: attend(q, k, v, weft.Packing(CU), mask, sink=s, softcap=4.0), [*inputs, sink])
    for _ in range(2):  # a buffer is used again
        got = results(lambda q, k, v, s: layer(q, k, v, cut, sink=s), [*inputs, sink])
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(layer._free) == 1


def test_micro_sequences_two_at_once(refused):
    q, k, v = tensors()
    cut = weft.prepare.MicroSequences(weft.Packing(CU), micros=2)
    layer = weft.torch.MicroSequenceAttention()
    a, b = layer(q, k, v, cut), layer(2 * q, k, v, cut)
    a.sum().backward(retain_graph=True)
    b.sum().backward()
    assert len(layer._free) == 2
    want = [x.grad.clone() for x in (q, k, v)]
    both = results(lambda *x: attend(*x, weft.Packing(CU), causal=True) + attend(2 * x[0], *x[1:], weft.Packing(CU), causal=True),
                   (q, k, v))
    for x, y in zip(want, both[1:]):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    with refused("a second backward"):
        a.sum().backward()


def test_micro_sequences_refuse(refused):
    q, k, v = tensors()
    cut = weft.prepare.MicroSequences(weft.Packing(CU), micros=2)
    with refused("q has shape [9, 4, 8]"):
        weft.torch.micro_sequence_attention(q[:9], k, v, cut)
    with refused("for 2 ranks"):
        weft.torch.micro_sequence_attention(q, k, v, weft.prepare.MicroSequences(weft.Packing([0, 20]), ranks=2, micros=1))
