"""checked=True: ranks that disagree are told, in the same words, by weft.spawn's ranks (gloo: distributed_worker.py)."""

import numpy as np
import pytest
import weft

RANKS, ODD = 4, 1
CU = [0, 150, 167, 192, 256]
PACKING = weft.Packing(CU)


def tensors(seed, heads=4):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((256, heads, 8), np.float32) for _ in range(3)]


def told(body):
    """The error that every rank has; None if none has one."""
    def rank(comm):
        try:
            body(comm, comm.rank == ODD)
        except weft.Error as e:
            return str(e)

    said = weft.spawn(RANKS, rank)
    assert len(set(said)) == 1, said
    return said[0]


def attend(comm, seed=0, **options):
    rows = [weft.shard(x, comm, packing=PACKING, layout="contiguous") for x in tensors(seed)]
    return weft.attention(*rows, packing=PACKING, causal=True, comm=comm, checked=True, **{"layout": "contiguous", **options})


def test_layouts_dealt_by_another_mask():
    def body(comm, odd):
        mask = weft.Mask() if odd else weft.Mask(causal=True)
        layout = weft.Layout("balanced", PACKING, RANKS, mask)
        attend(comm, layout=layout)

    assert told(body).startswith("layout: rank 1 differs from ranks 0, 2, 3;")


def test_other_values_of_a_sink():
    def body(comm, odd):
        attend(comm, sink=np.array([1, 2, 3, 5 if odd else 4], np.float32))

    assert told(body).startswith("values of the sink: rank 1 differs from ranks 0, 2, 3;")


def test_another_kernel():
    assert told(lambda comm, odd: attend(comm, kernel="reference" if odd else "cpu")).startswith("kernel: rank 1 differs")
    assert told(lambda comm, odd: attend(comm, deterministic=odd)).startswith("deterministic: rank 1 differs")


@pytest.mark.parametrize("order, text", [
    ((0, 2, 2, 3), "rank 1 is at the forward of layer 2, ranks 0, 2, 3 are at the forward of layer 1;"),  # left out
    ((0, 0, 1, 2), "rank 1 is at the forward of layer 0, ranks 0, 2, 3 are at the forward of layer 1;"),  # twice
])
def test_a_rank_one_layer_out_of_step(order, text):
    def body(comm, odd):
        for layer in order if odd else range(4):
            attend(comm, seed=layer, layer=layer)

    assert text in told(body)


def test_a_backward_of_another_forward():
    def body(comm, odd, tagged):
        done = [attend(comm, seed=n, layer=n if tagged else None) for n in range(3)]
        for n in (2, 0, 1) if odd else (2, 1, 0):
            done[n].backward(done[n].out)

    assert "rank 1 is at the backward of layer 0, ranks 0, 2, 3 are at the backward of layer 1" in told(
        lambda c, o: body(c, o, True)
    )
    assert "executor or buffer" in told(lambda c, o: body(c, o, False))  # each call here has one of its own


def test_who_keeps_in_step_is_right():
    whole = [weft.attention(*tensors(n), packing=PACKING, causal=True) for n in range(3)]

    def rank(comm):
        done = [attend(comm, seed=n, layer=n) for n in range(3)]
        grads = [x.backward(x.out) for x in reversed(done)]
        return [x.out for x in done], [g.dk for g in reversed(grads)]

    out, dk = zip(*weft.spawn(RANKS, rank))
    for n in range(3):
        assert np.abs(weft.unshard([x[n] for x in out], packing=PACKING, layout="contiguous") - whole[n].out).max() < 1e-5
        expected = whole[n].backward(whole[n].out).dk
        assert np.abs(weft.unshard([x[n] for x in dk], packing=PACKING, layout="contiguous") - expected).max() < 1e-4


@pytest.mark.parametrize("layer", [-1, True, 1.5, "3"])
def test_layers_are_numbers(layer):
    with pytest.raises(weft.Error, match="give the number of the layer"):
        weft.attention(*tensors(0), packing=PACKING, layer=layer)


# Micro-sequences.

MICROS = 4


def buffer(comm, body, **options):
    micros = weft.prepare.MicroSequences(PACKING, ranks=RANKS, micros=MICROS)
    return weft.prepare.KvBuffer(comm, rows=256, heads=4, dim=8, checked=True, **{"layer": 5, **options}), micros


def forward(comm, kept, micros, m, **settings):
    begin, end = micros.rows(comm.rank, m)
    return kept.forward(m, *(x[begin:end] for x in tensors(0)), **settings)


def test_buffers_of_other_packings_and_masks():
    def packings(comm, odd):
        kept, micros = buffer(comm, odd)
        other = weft.prepare.MicroSequences(weft.Packing([0, 149, 167, 192, 256]), ranks=RANKS, micros=MICROS)
        kept.begin(other if odd else micros)

    def masks(comm, odd):
        kept, micros = buffer(comm, odd)
        kept.begin(micros, weft.Mask(causal=True, window=(9 if odd else 8, 0)))

    def settings(comm, odd):
        kept, micros = buffer(comm, odd)
        kept.begin(micros)
        forward(comm, kept, micros, 0, scale=0.1 if odd else 0.2)

    assert told(packings).startswith("packing: rank 1 differs from ranks 0, 2, 3;")
    assert told(masks).startswith("mask: rank 1 differs from ranks 0, 2, 3;")
    assert told(settings).startswith("attention (scale, softcap, sink, head_map): rank 1 differs from")
    assert told(lambda comm, odd: buffer(comm, odd, drop=odd)).startswith("drop: rank 1 differs from")


def test_a_rank_one_micro_sequence_out_of_step():
    def body(comm, odd):
        kept, micros = buffer(comm, odd)
        for _ in range(2):
            kept.begin(micros)
            for m in range(3 if odd else 4):  # rank 1 leaves out the last
                forward(comm, kept, micros, m)

    text = told(body)
    assert (
        "rank 1 is at the begin of a sequence of layer 5, ranks 0, 2, 3 are at the forward of micro-sequence 3 of layer 5" in text
    )


def test_buffers_that_keep_in_step_are_right():
    whole = weft.attention(*tensors(0), packing=PACKING, causal=True)
    expected = whole.backward(whole.out)

    def rank(comm):
        kept, micros = buffer(comm, False)
        kept.begin(micros)
        done = [forward(comm, kept, micros, m) for m in range(MICROS)]
        worst = 0.0
        for m in reversed(range(MICROS)):
            rows = slice(*micros.rows(comm.rank, m))
            dq, dk, dv, _ = kept.backward(m, tensors(0)[0][rows], *done[m], whole.out[rows])
            pairs = ((done[m][0], whole.out), (dq, expected.dq), (dk, expected.dk), (dv, expected.dv))
            worst = max(worst, *(float(np.abs(got - want[rows]).max()) for got, want in pairs))
        return worst

    assert max(weft.spawn(RANKS, rank)) < 1e-4


# weft.torch.

def test_layers_of_torch_number_themselves():
    torch = pytest.importorskip("torch")
    import weft.torch

    def model(comm, odd, **options):
        if odd:
            weft.torch.ContextParallelAttention(one_rank=True)  # one that a rank has for itself does not count
        return [weft.torch.ContextParallelAttention(group=comm, layout="contiguous", checked=True, **options) for _ in range(4)]

    def body(comm, order, **options):
        layers = model(comm, comm.rank == ODD, **options)
        x = [weft.torch.shard(torch.from_numpy(t), PACKING, comm, layout="contiguous").requires_grad_() for t in tensors(0)]
        total = 0
        for n in order:
            total = total + layers[n](*x, PACKING).sum()
        total.backward()

    assert told(lambda comm, odd: body(comm, range(4))) is None
    # All settings, shapes and tensors are alike: it is the order of calls alone that is not.
    text = told(lambda comm, odd: body(comm, (0, 2, 1, 3) if odd else range(4)))
    assert "rank 1 is at the forward of layer 2, ranks 0, 2, 3 are at the forward of layer 1" in text
    text = told(lambda comm, odd: body(comm, (0, 1), layer=7 if odd else 3))
    assert "rank 1 is at the forward of layer 7, ranks 0, 2, 3 are at the forward of layer 3" in text


def test_one_executor_is_kept_for_all_layers():
    pytest.importorskip("torch")
    from weft.torch import op

    hows = [op.how_of(causal=True, checked=True, layer=n) for n in range(3)]
    assert len(set(hows)) == 3 and len(set(map(op._for_all_layers, hows))) == 1
    assert op.how_of(causal=True, layer=3) == op.how_of(causal=True)  # unchecked it costs nothing


def test_micro_sequences_of_torch():
    torch = pytest.importorskip("torch")
    import weft.torch

    micros = weft.prepare.MicroSequences(PACKING, ranks=RANKS, micros=MICROS)

    def body(comm, order):
        layers = [weft.torch.MicroSequenceAttention(group=comm, checked=True) for _ in range(2)]
        rows = torch.cat([torch.arange(*micros.rows(comm.rank, m)) for m in range(MICROS)])
        x = [torch.from_numpy(t)[rows].requires_grad_() for t in tensors(0)]
        for n in order:
            layers[n](*x, micros).sum().backward()

    assert told(lambda comm, odd: body(comm, (0, 1))) is None
    text = told(lambda comm, odd: body(comm, (1, 0) if odd else (0, 1)))
    assert "rank 1 is at a new K/V buffer of layer 1, ranks 0, 2, 3 are at a new K/V buffer of layer 0" in text


def test_models_of_transformers_give_their_layers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import weft.transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4
    )
    models = [transformers.AutoModelForCausalLM.from_config(config, attn_implementation="weft") for _ in range(RANKS)]
    layers = models[ODD].model.layers

    def body(comm, odd):
        batch = weft.transformers.inputs(torch.arange(256) % 32, PACKING, comm, layout="contiguous")
        with weft.transformers.packed(PACKING, comm, layout="contiguous", checked=True):
            models[comm.rank](**batch, use_cache=False).loss.backward()

    assert told(body) is None
    models[ODD].model.layers = torch.nn.ModuleList((layers[0], layers[2], layers[1]))
    assert "rank 1 is at the forward of layer 2, ranks 0, 2, 3 are at the forward of layer 1" in told(body)
