"""weft.torch.TransformerLayer and MultiheadAttention on one rank: against the definition, a document at a time; their words
and parameter names; torch.compile, checkpointing, checkpoints; and what is refused."""

import copy
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import weft
import weft.torch
from torch.utils.checkpoint import checkpoint

import dense_layer

CU = [0, 7, 8, 17]
HIDDEN, HEADS = 32, 4
PLAIN = dict(hidden_size=HIDDEN, ffn_hidden_size=40, num_attention_heads=HEADS)
LLAMA = dict(PLAIN, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False, rotary_base=10000.0)


def made(dtype=torch.float64, seed=0, **words):
    torch.manual_seed(seed)
    layer = weft.torch.TransformerLayer(**words, params_dtype=dtype)
    with torch.no_grad():
        for p in layer.parameters():  # biases, norms and sinks too
            p.normal_(0, 0.3 if p.dim() > 1 else 0.5)
    return layer


def documents(x, format, cu):
    """The documents of an input, as views [n, hidden]."""
    if format == "thd":
        return [x[a:b] for a, b in zip(cu, cu[1:])]
    rows = x if format == "bshd" else x.transpose(0, 1)
    return list(rows)


def dense(layer, x, words, format, cu):
    parameters = dict(layer.named_parameters())
    parts = [dense_layer.layer(doc, parameters, words) for doc in documents(x, format, cu)]
    if format == "thd":
        return torch.cat(parts)
    return torch.stack(parts, 0 if format == "bshd" else 1)


def shape_of(format):
    return {"thd": (CU[-1], HIDDEN), "bshd": (2, 9, HIDDEN), "sbhd": (9, 2, HIDDEN)}[format]


def close(found, expected, bound, name=""):
    assert found is not None and expected is not None, name
    worst = (found.double() - expected.double()).abs().max().item()
    assert worst <= bound * max(1.0, expected.double().abs().max().item()), f"{name}: {worst}"


def compare(words, format, bound=1e-10, dtype=torch.float64, **call):
    layer = made(dtype, **words, qkv_format=format)
    torch.manual_seed(1)
    x = torch.randn(shape_of(format), dtype=dtype, requires_grad=True)
    grad = torch.randn(shape_of(format), dtype=dtype)
    if format == "thd":
        call["cu_seqlens_q"] = torch.tensor(CU, dtype=torch.int32)
    out = layer(x, **call)
    out.backward(grad)
    found = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    x.grad = None
    layer = layer.double()
    layer.zero_grad()
    wide = x.detach().double().requires_grad_()
    expected = dense(layer, wide, words, format, CU)
    expected.backward(grad.double())
    close(out, expected, bound, "out")
    close(found.pop("x"), wide.grad, bound, "x")
    for name, p in layer.named_parameters():
        close(found[name], p.grad, bound, name)


VARIANTS = {
    "llama": LLAMA,
    "gpt": PLAIN,
    "window": dict(LLAMA, window_size=(2, 0)),
    "chunks": dict(LLAMA, chunk_size=3),
    "chunks_window": dict(LLAMA, chunk_size=4, window_size=(1, 0)),
    "no_mask": dict(PLAIN, attn_mask_type="no_mask"),
    "two_sided": dict(PLAIN, attn_mask_type="no_mask", window_size=(2, 1)),
    "two_sided_chunks": dict(PLAIN, attn_mask_type="no_mask", chunk_size=4),
    "learnable": dict(LLAMA, softmax_type="learnable", window_size=(3, 0)),
    "off_by_one": dict(LLAMA, softmax_type="off-by-one", chunk_size=5),
}


@pytest.mark.parametrize("format", ["thd", "bshd", "sbhd"])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_definition(name, format):
    compare(VARIANTS[name], format)


OTHERS = {
    "fused": dict(LLAMA, fuse_qkv_params=True, bias=True),
    "fused_in_order": dict(LLAMA, fuse_qkv_params=True, qkv_weight_interleaved=False),
    "zero_centered": dict(LLAMA, zero_centered_gamma=True, layernorm_epsilon=1e-2),
    "zero_centered_layer_norm": dict(PLAIN, zero_centered_gamma=True),
    "multi_query": dict(LLAMA, num_gqa_groups=1, kv_channels=12),
    "rotary_interleaved": dict(LLAMA, rotary_pos_interleaved=True),
    "rotary_half": dict(LLAMA, rotary_percent=0.5),
    "rms_of_heads": dict(LLAMA, qk_norm_type="RMSNorm", qk_norm_before_rope=True),
    "layer_norm_of_heads": dict(LLAMA, qk_norm_type="LayerNorm"),
    "l2_of_heads": dict(LLAMA, qk_norm_type="L2Normalization", qk_norm_eps=1e-2),
    "bottom_right": dict(LLAMA, attn_mask_type="causal_bottom_right"),
    **{name: dict(PLAIN, activation=name)
       for name in ("geglu", "relu", "reglu", "silu", "qgelu", "qgeglu", "srelu", "sreglu", "glu")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_words_against_the_definition(name):
    compare(OTHERS[name], "thd")


@pytest.mark.parametrize("format", ["thd", "bshd", "sbhd"])
def test_f32(format):
    compare(VARIANTS["learnable"], format, 3e-5, torch.float32)


@pytest.mark.parametrize("format", ["thd", "bshd", "sbhd"])
def test_words_of_a_call_are_those_of_a_layer(format):
    lengths = dict(cu_seqlens_q=CU) if format == "thd" else {}
    x = torch.randn(shape_of(format))
    for own, call in (
        (dict(window_size=(2, 0)), dict(window_size=(2, 0))), (dict(chunk_size=3), dict(chunk_size=3)),
        (dict(attn_mask_type="no_mask"), dict(self_attn_mask_type="no_mask")),
        (dict(attn_mask_type="no_mask", window_size=(1, 2)), dict(attn_mask_type="no_mask", window_size=(1, 2))),
    ):
        expected = made(torch.float32, **LLAMA, **own, qkv_format=format)(x, **lengths)
        assert torch.equal(made(torch.float32, **LLAMA, qkv_format=format)(x, **lengths, **call), expected)
        assert not torch.equal(made(torch.float32, **LLAMA, qkv_format=format)(x, **lengths), expected)
    chunked = made(torch.float32, **LLAMA, chunk_size=3, window_size=(1, 0), qkv_format=format)
    plain = made(torch.float32, **LLAMA, qkv_format=format)(x, **lengths)
    assert torch.equal(chunked(x, **lengths, chunk_size=None, window_size=(-1, -1)), plain)


def test_ways_to_say_documents():
    layer, x = made(torch.float32, **LLAMA, qkv_format="thd"), torch.randn(CU[-1], HIDDEN)
    expected = layer(x, cu_seqlens_q=torch.tensor(CU))
    cp = weft.torch.ContextParallel(CU)
    offsets = torch.tensor(CU, dtype=torch.int32)
    for said in (
        dict(packing=CU), dict(packing=weft.Packing(CU)), dict(packing=weft.torch.pack(CU)), dict(cp=cp),
        dict(cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=3, max_seqlen_kv=None, is_first_microbatch=True),
        dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets.clone(), cu_seqlens_q_padded=offsets, pad_between_seqs=False),
        dict(cu_seqlens_q=offsets, position_ids=cp.position_ids()), dict(packing=CU, position_ids=cp.position_ids()[None]),
    ):
        assert torch.equal(layer(x, **said), expected), list(said)


def test_padding_between_documents_is_never_read():
    cu, padded = torch.tensor([0, 5, 6, 13]), torch.tensor([0, 8, 12, 20])
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip(padded.tolist(), torch.diff(cu).tolist())])
    layer = made(**VARIANTS["learnable"], qkv_format="thd")
    x = torch.full((20, HIDDEN), torch.nan, dtype=torch.float64)
    x[rows] = torch.randn(13, HIDDEN, dtype=torch.float64)
    said = dict(cu_seqlens_q=cu, cu_seqlens_q_padded=padded)
    expected = layer(x[rows], cu_seqlens_q=cu)
    assert torch.equal(layer(x, **said)[rows], expected)
    whole = weft.Packing(cu.tolist(), cu_seqlens_q_padded=padded.tolist())
    assert torch.equal(layer(x, packing=whole)[rows], expected)
    # Positions of documents begin where the padded ones do.
    table = torch.arange(20.0, dtype=torch.float64)[:, None] / 10000.0**(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    table = torch.cat((table, table), 1)[:, None, None]
    assert torch.allclose(layer(x, **said, rotary_pos_emb=table)[rows], expected, rtol=1e-12)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_padded_batches(format):
    layer = made(**dict(LLAMA, attn_mask_type="padding_causal"), qkv_format=format)
    x = torch.randn(3, 6, HIDDEN, dtype=torch.float64)
    lengths = [6, 1, 4]
    real = torch.arange(6) < torch.tensor(lengths)[:, None]
    x[~real] = torch.nan
    cu = torch.tensor([0, 6, 7, 11], dtype=torch.int32)
    out = layer(x if format == "bshd" else x.transpose(0, 1), cu_seqlens_q=cu)
    out = out if format == "bshd" else out.transpose(0, 1)
    parameters = dict(layer.named_parameters())
    for sequence, length, found in zip(x, lengths, out):
        close(found[:length], dense_layer.layer(sequence[:length], parameters, LLAMA), 1e-10)


@pytest.mark.parametrize("format", ["thd", "bshd", "sbhd"])
def test_rotary_table(format):
    """Transformer Engine's table of angles, and position_ids, are what rotary_base says by itself."""
    lengths = dict(cu_seqlens_q=CU) if format == "thd" else {}
    x = torch.randn(shape_of(format), dtype=torch.float64)
    own = made(**LLAMA, qkv_format=format)
    by_table = made(**{k: v for k, v in LLAMA.items() if k != "rotary_base"}, qkv_format=format)
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] / 10000.0**(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    table = torch.cat((angles, angles), 1)[:, None, None]
    expected = own(x, **lengths)
    close(by_table(x, **lengths, rotary_pos_emb=table), expected, 1e-12)
    close(by_table(x, **lengths, rotary_pos_emb=(table, table)), expected, 1e-12)
    if format != "thd":
        b = torch.arange(9).expand(2, 9)
        assert torch.equal(own(x, position_ids=b), expected) and torch.equal(own(x, position_ids=b[0]), expected)
        close(own(x, position_ids=torch.stack((b[0], b[0] + 3))), expected, 1e-10)  # of differences alone
        wider = own(x, position_ids=torch.stack((b[0], 2 * b[0])))  # of the second sequence
        first, second = (0, 1) if format == "bshd" else ((slice(None), 0), (slice(None), 1))
        close(wider[first], expected[first], 1e-10)
        assert (wider[second] - expected[second]).abs().max() > 1e-3


def test_names_and_first_values():
    words = dict(hidden_size=256, ffn_hidden_size=64, num_attention_heads=4, device="cpu")
    layer = weft.torch.TransformerLayer(**words, softmax_type="learnable", qk_norm_type="LayerNorm")
    qkv = "self_attention.layernorm_qkv."
    assert set(layer.state_dict()) == {
        *(f"{qkv}{part}_{kind}" for part in ("layer_norm", "query", "key", "value") for kind in ("weight", "bias")),
        *(f"self_attention.{side}_norm.{kind}" for side in "qk" for kind in ("weight", "bias")),
        "self_attention.core_attention.softmax_offset", "self_attention.proj.weight", "self_attention.proj.bias",
        *(f"layernorm_mlp.{part}_{kind}" for part in ("layer_norm", "fc1", "fc2") for kind in ("weight", "bias"))}
    for name, p in layer.named_parameters():
        if p.dim() == 2:
            assert abs(p.std().item() / 0.023 - 1) < 0.05 and abs(p.mean().item()) < 1e-3, name
        else:
            assert (p == (1 if "norm" in name and name.endswith("weight") else 0)).all(), name
    fused = weft.torch.TransformerLayer(**words, fuse_qkv_params=True, normalization="RMSNorm", bias=False, activation="swiglu",
                                        zero_centered_gamma=True, init_method=torch.nn.init.ones_,
                                        output_layer_init_method=torch.nn.init.zeros_)
    shapes = {name: (list(p.shape), p.sum().item()) for name, p in fused.named_parameters()}
    assert shapes == {
        f"{qkv}layer_norm_weight": ([256], 0), f"{qkv}weight": ([768, 256], 768 * 256),
        "self_attention.proj.weight": ([256, 256], 0), "layernorm_mlp.layer_norm_weight": ([256], 0),
        "layernorm_mlp.fc1_weight": ([128, 256], 128 * 256), "layernorm_mlp.fc2_weight": ([256, 64], 0)}
    alone = weft.torch.MultiheadAttention(256, 4, bias=False)
    assert list(alone.state_dict()) == ["qkv.query_weight", "qkv.key_weight", "qkv.value_weight", "proj.weight"]
    assert list(weft.torch.MultiheadAttention(256, 4, bias=False, fuse_qkv_params=True).state_dict()) == [
        "qkv.weight", "proj.weight"]


def test_checkpoints():
    """A state of Transformer Engine, with the extra state that its modules keep for FP8, loads as it is; and back."""
    layer, x = made(torch.float32, **VARIANTS["learnable"], qkv_format="thd"), torch.randn(CU[-1], HIDDEN)
    state = layer.state_dict()
    theirs = {**state, **{f"{part}._extra_state": extra for part, extra in (
        ("self_attention.layernorm_qkv", None), ("self_attention.core_attention", torch.empty(0, dtype=torch.uint8)),
        ("self_attention.proj", None), ("layernorm_mlp", None))}}
    other = made(torch.float32, 5, **VARIANTS["learnable"], qkv_format="thd")
    assert not torch.equal(other(x, cu_seqlens_q=CU), layer(x, cu_seqlens_q=CU))
    other.load_state_dict(theirs, strict=True)
    assert torch.equal(other(x, cu_seqlens_q=CU), layer(x, cu_seqlens_q=CU))
    assert list(other.state_dict()) == list(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, "self_attention.proj.wieght": x})
    assert torch.equal(copy.deepcopy(layer)(x, cu_seqlens_q=CU), layer(x, cu_seqlens_q=CU))


def test_made_on_meta():
    layer = weft.torch.TransformerLayer(**LLAMA, device="meta", softmax_type="learnable", qkv_format="bshd")
    layer.to_empty(device="cpu")
    for part in layer.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert layer.self_attention.core_attention.softmax_offset.tolist() == [0] * HEADS
    assert torch.isfinite(layer(torch.randn(2, 5, HIDDEN))).all()


def gradients(layer, x, run):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_checkpointing(format):
    layer, x = made(torch.float32, **VARIANTS["learnable"], qkv_format=format), torch.randn(shape_of(format))
    lengths = dict(cu_seqlens_q=CU) if format == "thd" else {}
    expected = gradients(layer, x, lambda x: layer(x, **lengths))
    for run in (lambda x: checkpoint(layer, x, use_reentrant=False, **lengths),
                lambda x: layer(x, checkpoint_core_attention=True, **lengths)):
        for a, b in zip(gradients(layer, x, run), expected):
            assert torch.equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("case", ["offsets", "padded", "packing", "cp", "bshd", "sbhd", "padded_batch"])
def test_compiled(case):
    """One graph; the gradients are those without torch.compile."""
    format = case if case in ("bshd", "sbhd") else "bshd" if case == "padded_batch" else "thd"
    words = dict(VARIANTS["learnable"], chunk_size=5)
    layer, x = made(torch.float32, **words, qkv_format=format), torch.randn(shape_of(format))
    cp = weft.torch.ContextParallel(CU)
    call = {
        "offsets": dict(cu_seqlens_q=torch.tensor(CU, dtype=torch.int32)),
        "padded": dict(cu_seqlens_q=torch.tensor([0, 5, 6, 13]), cu_seqlens_q_padded=torch.tensor(CU)),
        "packing": dict(packing=weft.torch.pack(CU), position_ids=cp.position_ids()),
        "cp": dict(cp=cp, position_ids=cp.position_ids()), "bshd": {}, "sbhd": {},
        "padded_batch": dict(attn_mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, 4, 13])),
    }[case]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(layer, x, lambda x: compiled(x, **call)), gradients(layer, x, lambda x: layer(x, **call))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_hidden_dropout():
    layer, x = made(torch.float32, **LLAMA, qkv_format="bshd", hidden_dropout=0.5), torch.randn(2, 9, HIDDEN)
    plain = made(torch.float32, **LLAMA, qkv_format="bshd")
    assert not torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain(x))


def test_autocast():
    layer, x = made(torch.float32, **VARIANTS["learnable"], qkv_format="thd"), torch.randn(CU[-1], HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, cu_seqlens_q=CU)
    out.sum().backward()
    close(out, layer(x, cu_seqlens_q=CU), 0.05)
    narrow = made(torch.bfloat16, **VARIANTS["learnable"], qkv_format="thd")
    assert narrow(x.bfloat16(), cu_seqlens_q=CU).dtype == torch.bfloat16
    assert narrow.self_attention.core_attention.softmax_offset.dtype == torch.float32


def test_refused_when_made(refused):
    def make(**words):
        return weft.torch.TransformerLayer(**{**PLAIN, **words})
    for words, said in (
        (dict(num_gqa_groups=3), ["num_attention_heads is 4", "num_gqa_groups 3"]),
        (dict(hidden_size=30), ["hidden_size is 30", "num_attention_heads 4"]),
        (dict(attn_mask_type="arbitrary"), ["arbitrary", "tensor", "padding_causal"]),
        (dict(attn_mask_type="causal", self_attn_mask_type="no_mask"), ["self_attn_mask_type is 'no_mask'", "the same"]),
        (dict(attn_mask_type="no_mask", window_size=(-1, 0)), ["(-1, 0)", "no_mask", "(-1, -1)"]),
        (dict(activation="clamped_swiglu"), ["clamped_swiglu", "swiglu"]),
        (dict(normalization="BatchNorm"), ["BatchNorm", "RMSNorm"]),
        (dict(softmax_type="sink"), ["sink", "off-by-one", "learnable"]),
        (dict(qkv_format="bhsd"), ["bhsd", "sbhd"]),
        (dict(qk_norm_type="norm"), ["norm", "L2Normalization"]),
        (dict(tp_size=2), ["tp_size is 2", "FSDP2"]),
        (dict(sequence_parallel=True), ["sequence_parallel"]),
        (dict(layer_type="decoder"), ["decoder", "cross-attention"]),
        (dict(output_layernorm=True), ["output_layernorm", "pre-norm"]),
        (dict(parallel_attention_mlp=True), ["parallel_attention_mlp"]),
        (dict(fuse_wgrad_accumulation=True), ["fuse_wgrad_accumulation", "grad"]),
        (dict(drop_path_rate=0.1), ["drop_path_rate", "stochastic depth"]),
        (dict(hidden_dropout=1.5), ["hidden_dropout is 1.5"]),
        (dict(rotary_base=10000.0, rotary_percent=0.9), ["rotary", "7 of 8"]),
        (dict(cp_comm_type="p2q"), ["p2q"]),
    ):
        with refused(*said):
            make(**words)
    with pytest.raises(TypeError, match="widnow_size"):
        make(widnow_size=(3, 0))
    # Values that ask for nothing are taken.
    make(tp_group=None, tp_size=1, sequence_parallel=False, layer_type="encoder", seq_length=128, micro_batch_size=1,
         set_parallel_mode=True, drop_path_rate=0.0, name="layer", layer_number=3, ub_tp_comm_overlap=False)


def test_refused_in_calls(refused):
    thd, x = made(torch.float32, **LLAMA, qkv_format="thd"), torch.randn(CU[-1], HIDDEN)
    bshd, batch = made(torch.float32, **LLAMA, qkv_format="bshd"), torch.randn(2, 9, HIDDEN)
    lengths = dict(cu_seqlens_q=CU)
    for call, said in (
        ({}, ["which documents", "cu_seqlens_q", "cp="]),
        (dict(cu_seqlens_q=CU, packing=CU), ["packing is given together with cu_seqlens_q"]),
        (dict(cu_seqlens_q_padded=CU), ["without cu_seqlens_q"]),
        (dict(lengths, cu_seqlens_kv=[0, 3, 17]), ["cu_seqlens_kv", "both sides"]),
        (dict(packing=CU, cu_seqlens_kv=CU), ["cu_seqlens_kv", "without cu_seqlens_q"]),
        (dict(lengths, cu_seqlens_kv_padded=CU), ["cu_seqlens_kv_padded", "without cu_seqlens_q_padded"]),
        (dict(lengths, core_attention_bias=torch.zeros(1, 4, 9, 9)), ["core_attention_bias", "bias"]),
        (dict(lengths, core_attention_bias_type="alibi"), ["core_attention_bias_type"]),
        (dict(lengths, alibi_slopes=torch.zeros(4)), ["alibi_slopes"]),
        (dict(lengths, inference_params=object()), ["inference_params", "KvCache"]),
        (dict(lengths, encoder_output=x), ["encoder_output", "cross-attention"]),
        (dict(lengths, attention_mask=torch.zeros(1, 1, 17, 17, dtype=torch.bool)), ["attention_mask", "cu_seqlens_q"]),
        (dict(lengths, attn_mask_type="arbitrary"), ["arbitrary"]),
        (dict(lengths, position_ids=torch.arange(3)), ["position_ids", "[3]"]),
        (dict(lengths, rotary_pos_emb=torch.zeros(4, 1, 1, 8)), ["position 8", "table of 4"]),
        (dict(lengths, rotary_pos_emb=torch.zeros(9, 2, 1, 8)), ["rotary_pos_emb", "[9, 2, 1, 8]"]),
        (dict(lengths, rotary_pos_emb=torch.zeros(9, 1, 1, 12)), ["rotary_pos_emb", "8 features"]),
    ):
        with refused(*said):
            thd(x, **call)
    for call, said in (
        (dict(cu_seqlens_q=[0, 9, 18]), ["without padding in its name", "padding_causal"]),
        (dict(attn_mask_type="padding_causal"), ["how long", "cu_seqlens_q"]),
        (dict(attn_mask_type="padding_causal", cu_seqlens_q=[0, 9, 18], cu_seqlens_kv=[0, 9, 17]), ["both sides"]),
        (dict(attn_mask_type="padding_causal", cu_seqlens_q=[0, 9]), ["[2]", "3 of them"]),
        (dict(attn_mask_type="padding_causal", cu_seqlens_q=[0, 9, 19]), ["10"]),
        (dict(cu_seqlens_q=[0, 9, 18], cu_seqlens_q_padded=[0, 9, 18]), ["cu_seqlens_q_padded", "bshd"]),
        (dict(cp=weft.torch.ContextParallel([0, 9, 18])), ["ContextParallel", "bshd"]),
        (dict(position_ids=torch.zeros(9, 2)), ["[9, 2]"]),
    ):
        with refused(*said):
            bshd(batch, **call)
    with refused("[2, 9, 32]", "thd", "[t, hidden]"):
        thd(batch, **lengths)
    with refused("torch.float64", "torch.float32", "params_dtype"):
        thd(x.double(), **lengths)
    plain = made(torch.float32, **PLAIN, qkv_format="thd", attention_dropout=0.1)
    with refused("attention_dropout is 0.1", "exact"):
        plain(x, **lengths)
    plain.eval()
    with refused("no rotary embedding", "rotary_base"):
        plain(x, **lengths, position_ids=torch.arange(17))
    plain(x, **lengths)
    with pytest.raises(TypeError, match="widnow_size"):
        plain(x, **lengths, widnow_size=(3, 0))


def test_one_rank_without_a_group():
    layer, x = made(torch.float32, **LLAMA, qkv_format="thd"), torch.randn(CU[-1], HIDDEN)
    expected = layer(x, cu_seqlens_q=CU)
    layer.set_context_parallel_group(None, None, None, "a2a")
    assert torch.equal(layer(x, cu_seqlens_q=CU), expected)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", weft.Schedule("a2a+p2p", ulysses=2), "exact"], ids=str)
def test_four_threads_as_ranks(kind):
    cu = [0, 8, 16, 40]
    x = torch.randn(40, HIDDEN)
    one = made(torch.float32, **dict(VARIANTS["learnable"], chunk_size=6), qkv_format="thd")
    expected = gradients(one, x, lambda x: one(x, cu_seqlens_q=cu))

    def rank(comm):
        layer = copy.deepcopy(one)
        layer.set_context_parallel_group(comm, cp_comm_type=kind)
        mine = weft.torch.shard(x, cu, comm, layout="dual_chunk")
        found = gradients(layer, mine, lambda x: layer(x, cu_seqlens_q=cu))
        whole = [weft.torch.unshard(part, cu, comm, layout="dual_chunk") for part in found[:2]]
        return whole + [sum(weft.torch.all_gather(part, comm)) for part in found[2:]]

    for found in weft.spawn(4, rank):
        for a, b in zip(found, expected):
            close(a, b, 1e-5)


def test_the_page():
    """What docs/layers.md shows runs."""
    page = (Path(__file__).parents[3] / "docs/layers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    names = dict(torch=torch, weft=weft, mesh={"cp": None}, cu_seqlens=torch.tensor([0, 8, 16, 32], dtype=torch.int32))
    for block in blocks:
        exec(block, names)
    assert names["y"].shape == names["x"].shape
