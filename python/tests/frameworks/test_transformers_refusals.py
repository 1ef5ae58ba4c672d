"""What weft.transformers refuses, and rows of one rank outside packed()."""

import sys
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import weft
import weft.torch
import weft.transformers
from transformers import AutoModelForCausalLM

from small_models import SMALL, config_of, models, tokens

PACKING = weft.Packing([0, 7, 10])


def run_packed(model, packing=PACKING, inputs_of=None, options=None, **kwargs):
    batch = weft.transformers.inputs(tokens(10), inputs_of or packing, labels=False)
    with weft.transformers.packed(packing, **(options or {})):
        return model(**{**batch, "use_cache": False, **kwargs})


@pytest.mark.parametrize(
    "name, value",
    [
        ("output_attentions", True), ("head_mask", torch.ones(2, 4)), ("position_bias", torch.zeros(1, 4, 10, 10)),
        ("indices", torch.zeros(1)), ("something_new", 3), ("cache", object()),
    ],
)
def test_refused_arguments(llama, name, value):
    q = torch.randn(1, 4, 10, 8)
    with pytest.raises(weft.Error, match=f"given {name}"):
        weft.transformers._attention(llama[1].model.layers[0].self_attn, q, q, q, None, **{name: value})


def test_refused_attentions(llama):
    with pytest.raises(weft.Error, match="output_attentions"):
        llama[1](tokens(10)[None], output_attentions=True)


def test_refused_dropout():
    config = config_of("llama")
    config.attention_dropout = 0.1
    model = models(config)[1]
    with pytest.raises(weft.Error, match=r"dropout 0\.1"):
        model(tokens(10)[None])
    model.eval()(tokens(10)[None])


def test_refused_masks(llama):
    ours = llama[1]
    with pytest.raises(weft.Error, match=r"mask that is a Tensor of shape \[1, 1, 10, 10\]"):
        ours(tokens(10)[None], attention_mask=torch.zeros(1, 1, 10, 10))
    mask = torch.ones(1, 10)
    mask[0, :2] = 0
    with pytest.raises(weft.Error, match="attention_mask with zeros together with packed"):
        run_packed(ours, attention_mask=mask)
    run_packed(ours, attention_mask=torch.ones(1, 10))
    cu = torch.tensor([0, 4, 10])
    with pytest.raises(weft.Error, match="cu_seq_lens_q together with packed"):
        run_packed(ours, cu_seq_lens_q=cu)
    with pytest.raises(weft.Error, match="cu_seq_lens_q together with an attention_mask"):
        ours(tokens(10)[None], attention_mask=mask, cu_seq_lens_q=cu)
    with pytest.raises(weft.Error, match="batch of 2"):
        ours(tokens(20).view(2, 10), cu_seq_lens_q=cu)


def test_refused_mask_functions():
    utils = transformers.masking_utils
    for function, name in [
        (utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(torch.zeros(1, 4))), "or_masks"),
        (utils.and_masks(utils.causal_mask_function, lambda b, h, q, k: q > 3), "lambda"),
    ]:
        with pytest.raises(weft.Error, match=name):
            weft.transformers._mask(1, 4, 4, mask_function=function)


def test_refused_rows(llama):
    ours = llama[1]
    with pytest.raises(weft.Error, match="batch of 1 with 9 queries and 9 keys, where this rank has 10 rows"):
        run_packed(ours, input_ids=tokens(9)[None], position_ids=torch.arange(9)[None])
    with pytest.raises(weft.Error, match="batch of 2"):
        run_packed(ours, input_ids=tokens(20).view(2, 10), position_ids=torch.arange(10)[None])
    past = ours(tokens(5)[None], use_cache=True).past_key_values
    with pytest.raises(weft.Error, match="no past keys"):
        run_packed(ours, past_key_values=past, use_cache=True)


def test_refused_positions(llama, llama4):
    for ours in (llama[1], llama4[1]):
        with pytest.raises(weft.Error, match="position_ids are not those"):
            run_packed(ours, position_ids=None)
        with pytest.raises(weft.Error, match="position_ids are not those"):
            run_packed(ours, inputs_of=weft.Packing([0, 6, 10]))
        run_packed(ours, position_ids=None, options={"check_positions": False})


def test_refused_static_cache(llama):
    with pytest.raises((weft.Error, AttributeError), match=r"cache|mask"), torch.no_grad():
        llama[1].eval().generate(tokens(10)[None], max_new_tokens=3, cache_implementation="static")
    llama[1].train()


def test_refused_models():
    config = transformers.MiniMaxConfig(**SMALL, num_local_experts=2, layer_types=["linear_attention", "full_attention"])
    lightning = AutoModelForCausalLM.from_config(config, attn_implementation="weft")
    with pytest.raises(weft.Error, match="layers of linear_attention"):
        run_packed(lightning)
    with pytest.raises(weft.Error, match="layers of linear_attention"):  # and outside, where documents are told by positions
        lightning(tokens(10)[None], position_ids=weft.torch.position_ids(PACKING)[None], use_cache=False)
    with pytest.raises(weft.Error, match="encoder and a decoder"):
        weft.transformers._batches.only_attention(transformers.BartConfig())
    eager = models(config_of("llama"))[0]
    with pytest.raises(weft.Error, match="no layer of a model asked Weft"):
        run_packed(eager)
    small = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    own = AutoModelForCausalLM.from_config(transformers.BloomConfig(**small), attn_implementation="weft")
    with pytest.raises(weft.Error, match="computes its attention itself"):
        own(tokens(10)[None])


def test_refused_of_hybrid_models(monkeypatch):
    eager, ours = models(config_of("qwen3_next"))
    cu, positions = torch.tensor([0, 7, 10], dtype=torch.int32), weft.torch.position_ids(PACKING)[None]
    with pytest.raises(weft.Error, match="no past keys"):
        run_packed(ours, use_cache=True, past_key_values=ours(tokens(4)[None], use_cache=True).past_key_values)
    with pytest.raises(weft.Error, match="cu_seq_lens_q is given to a recurrent layer"):
        run_packed(ours, cu_seq_lens_q=cu)
    with pytest.raises(weft.Error, match="seq_idx is given to a recurrent layer"):
        run_packed(ours, seq_idx=torch.zeros(1, 10))
    with pytest.raises(weft.Error, match=r"cu_seq_lens_q \[0, 6, 10\] and position_ids that restart elsewhere"):
        ours(tokens(10)[None], position_ids=positions, cu_seq_lens_q=torch.tensor([0, 6, 10]), use_cache=False)
    with torch.no_grad():
        want = ours(tokens(10)[None], position_ids=positions, use_cache=False).logits
        got = ours(tokens(10)[None], position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False).logits
        assert torch.equal(got, want)
        # Another model in the same context is left alone, recurrent layers too.
        whole = eager(tokens(10)[None], use_cache=False).logits
        with weft.transformers.packed(PACKING):
            ours(**weft.transformers.inputs(tokens(10), PACKING, labels=False), use_cache=False)
            assert torch.equal(eager(tokens(10)[None], use_cache=False).logits, whole)
    module = sys.modules[type(ours).__module__]
    monkeypatch.setattr(module, "create_recurrent_attention_mask", lambda **_: None)
    with pytest.raises(weft.Error, match="none of them ran on whole documents"):
        run_packed(ours)


def test_refused_options():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'; use group, layout"):
        weft.transformers.packed(PACKING, causal=True)
    with pytest.raises(weft.Error, match="layout is a Layout"):
        weft.transformers.packed(PACKING, layout=weft.Layout("zigzag", PACKING, 1))
    with pytest.raises(weft.Error, match="other sequences for k"):
        weft.transformers.packed(weft.Packing([0, 4], [0, 6]))


def test_refused_thread(llama):
    raised = []

    def call():
        try:
            llama[1](tokens(10)[None])
        except weft.Error as e:
            raised.append(str(e))

    with pytest.raises(weft.Error, match="no layer"), weft.transformers.packed(PACKING):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert raised and "another thread" in raised[0]


def test_refused_temperature(llama4, monkeypatch):
    """A version whose temperature goes by something else than rows."""
    kind = type(llama4[1].model.layers[1].self_attn)
    assert weft.transformers._goes_by_row(llama4[1].model.layers[1].self_attn)
    monkeypatch.setitem(weft.transformers._by_row, kind, False)
    with pytest.raises(weft.Error, match="attn_temperature_tuning"):
        run_packed(llama4[1])


# --- Rows of one rank outside packed() ---

@pytest.mark.parametrize("layout", [None, "contiguous", "zigzag"])
def test_refused_outside_packed(llama, layout):
    """One rank's rows as they come from inputs(): its loss would be wrong, and nobody would know."""
    _, ours = llama
    ids = tokens(PACKING.tokens_q)

    def rank(comm, change):
        batch = change(weft.transformers.inputs(ids, PACKING, comm, layout=layout))
        with pytest.raises(weft.Error, match="outside packed") as caught, torch.no_grad():
            ours(**batch, use_cache=False)
        return "weft.transformers.packed(packing, group)" in caught.value.remedy

    assert weft.spawn(2, lambda comm: rank(comm, dict)) == [True, True]
    with pytest.raises(weft.Error, match="outside packed"):  # without labels, as for an evaluation
        weft.spawn(2, lambda comm: ours(**weft.transformers.inputs(ids, PACKING, comm, layout=layout, labels=False)))

    def moved(comm):  # tensors that are others with the same numbers: seen where a document begins on another rank
        batch = {name: x.clone() for name, x in weft.transformers.inputs(ids, PACKING, comm, layout=layout).items()}
        positions = batch["position_ids"][0]
        if bool(positions[torch.cat([torch.ones(1, dtype=torch.bool), positions.diff() != 1])].any()):
            with pytest.raises(weft.Error, match="outside packed"):
                ours(**batch, use_cache=False)
            return True
        return False

    assert any(weft.spawn(2, moved))


def test_rows_of_positions_outside_packed(llama):
    _, ours = llama

    def rank(comm):
        rows = weft.torch.shard(tokens(PACKING.tokens_q), PACKING, comm, layout="contiguous")
        positions = weft.torch.position_ids(PACKING, comm, layout="contiguous")
        if comm.rank == 1:
            with pytest.raises(weft.Error, match="outside packed"):
                ours(input_ids=rows[None], position_ids=positions[None], use_cache=False)

    weft.spawn(2, rank)


def test_plain_batches_beside_packed_ones(llama):
    """What is no rank's is as before: also with as many rows, with the same first positions, or with a cache."""
    _, ours = llama
    rows = weft.spawn(2, lambda comm: weft.transformers.inputs(tokens(40), weft.Packing([0, 40]), comm, layout="contiguous"))
    for ids in (tokens(20)[None], tokens(40)[None]):
        with torch.no_grad():
            plain = ours(input_ids=ids, use_cache=False).logits
            again = ours(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
        assert torch.equal(plain, again)
    with torch.no_grad():
        ours.generate(tokens(20)[None], max_new_tokens=3, do_sample=False)
    assert rows[1]["position_ids"][0, 0] == 20


def test_cu_seqlens_for_a_packing(llama):
    _, ours = llama
    ids, cu = tokens(PACKING.tokens_q), PACKING.cu_seqlens_q
    want = run_packed(ours).logits
    for given in (cu.tolist(), cu, torch.from_numpy(cu), torch.from_numpy(cu).int(), weft.torch.pack(PACKING)):
        batch = weft.transformers.inputs(ids, given)
        with weft.transformers.packed(given):
            assert torch.equal(ours(**batch, use_cache=False).logits, want)


@pytest.mark.parametrize("options, words", [
    (dict(schedule="rnig"), "there is no schedule 'rnig'"), (dict(layout="spiral"), "there is no layout 'spiral'"),
    (dict(schedule=3), "schedule is 3"), (dict(kernel="gpu"), "there is no kernel 'gpu'"),
    (dict(checked="yes"), "checked is 'yes'"),
    (dict(deterministic=1), "deterministic is 1"), (dict(layout=5), "layout is a int"),
])
def test_options_are_refused_at_once(options, words):
    with pytest.raises(weft.Error, match=words):
        weft.transformers.packed(PACKING, **options)


def test_names_of_frameworks(llama):
    _, ours = llama
    for name in ("p2p", "a2a", "a2a+p2p"):
        assert torch.equal(run_packed(ours, options=dict(schedule=name)).logits, run_packed(ours).logits)
