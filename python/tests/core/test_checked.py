"""checked=True: ranks that disagree are told, in the same words, by weft.spawn's ranks (gloo: distributed_worker.py)."""

import numpy as np
import pytest
import weft

import checked
from checked import CASES, ODD, PACKING, RANKS, attend, tensors


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


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    body, text = CASES[name]
    said = told(body)
    assert said is None if text is None else text in said, said


def test_layers_of_torch_number_themselves():
    """By the order in which a rank, which is a thread of its own here, makes them."""
    pytest.importorskip("torch")
    text = told(lambda comm, odd: checked.layers(comm, odd, (0, 2, 1, 3) if odd else range(4)))
    assert "rank 1 is at the forward of layer 2, ranks 0, 2, 3 are at the forward of layer 1" in text


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


def test_one_executor_is_kept_for_all_layers():
    pytest.importorskip("torch")
    from weft.torch import how

    hows = [how.how_of(causal=True, checked=True, layer=n) for n in range(3)]
    assert len(set(hows)) == 3 and len(set(map(how.for_all_layers, hows))) == 1
    assert how.how_of(causal=True, layer=3) == how.how_of(causal=True)  # unchecked it costs nothing


@pytest.mark.long
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
