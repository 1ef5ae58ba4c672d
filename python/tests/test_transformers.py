"""weft.transformers against the models' own eager attention, run on each document alone."""

import copy
import json
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers
from transformers import AutoModelForCausalLM

LENGTHS = [13, 1, 7, 0, 21, 5]  # 47 tokens: no number of ranks divides them
RANKS = 2
TOLERANCE = 1e-5

_SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=8, max_position_embeddings=64, initializer_range=0.2, attention_dropout=0.0, pad_token_id=None, bos_token_id=1,
              eos_token_id=2)


def config_of(name):
    if name == "llama":
        return transformers.LlamaConfig(**_SMALL)
    if name == "llama4":  # a chunked layer with rotary embeddings, and a full one without but with temperature
        return transformers.Llama4TextConfig(
            **{**_SMALL, "num_hidden_layers": 3}, intermediate_size_mlp=40, attention_chunk_size=5, no_rope_layers=[1, 0, 1], moe_layers=[1],
            num_local_experts=2, attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5, use_qk_norm=True)
    if name == "mistral":
        return transformers.MistralConfig(**_SMALL, sliding_window=6)
    if name == "gemma2":
        return transformers.Gemma2Config(**_SMALL, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
                                         query_pre_attn_scalar=5, layer_types=["sliding_attention", "full_attention"])
    if name == "gpt_oss":
        return transformers.GptOssConfig(**_SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
                                         layer_types=["sliding_attention", "full_attention"])
    raise KeyError(name)


def models(config):
    """The same model with eager attention and with Weft's."""
    torch.manual_seed(1)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="weft")
    ours.load_state_dict(eager.state_dict())
    assert eager.config._attn_implementation == "eager" and ours.config._attn_implementation == "weft"
    return eager.train(), ours.train()


def tokens(count):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(2))


def alone(model, ids, packing):
    """Logits of each document by itself, at its tokens; the mean loss; gradients of all parameters."""
    following = weft.torch.next_token_labels(ids, packing)
    logits, loss = torch.zeros(len(ids), model.config.vocab_size), 0.0
    for begin, length in zip(packing.cu_seqlens_q_padded, packing.lengths_q):
        at = slice(int(begin), int(begin + length))
        if length:
            of = model(ids[None, at], use_cache=False).logits[0]
            logits[at] = of.detach()
            loss = loss + torch.nn.functional.cross_entropy(of, following[at], ignore_index=-100, reduction="sum")
    loss = loss / (following != -100).sum()
    model.zero_grad()
    loss.backward()
    return logits, float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def worst(got, want, least=0.0):
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / max(float(want.abs().max()), least))


def difference(eager, ours, packing, group, layout, schedule, checkpointing=None, **options):
    """The worst relative differences of logits, loss and gradients, over all ranks' rows."""
    ids = tokens(packing.tokens_q)
    logits, loss, grads = alone(eager, ids, packing)
    if checkpointing is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch = weft.transformers.inputs(ids, packing, group, layout=layout)
    with weft.transformers.packed(packing, group, layout, schedule, **options):
        result = ours(**batch, use_cache=False)
    ours.zero_grad()
    result.loss.backward()
    ours.gradient_checkpointing_disable()
    mine = weft.torch.unshard(result.logits.detach(), packing, group, layout=layout, mask=weft.Mask(causal=True), dim=1)[0]
    total = result.loss.detach().clone()
    if weft.torch.group.resolve(group) is not None:
        torch.distributed.all_reduce(total)
    valid = torch.cat([torch.arange(b, b + n) for b, n in zip(packing.cu_seqlens_q_padded.tolist(), packing.lengths_q.tolist())])
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    gradients = 0.0
    for name, parameter in ours.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if weft.torch.group.resolve(group) is not None:
            torch.distributed.all_reduce(got)
        want = torch.zeros_like(got) if grads[name] is None else grads[name]
        gradients = max(gradients, worst(got, want, 1e-3 * largest))
    return dict(logits=worst(mine[valid], logits[valid]), loss=abs(float(total) - loss) / loss, gradients=gradients)


# On two ranks: model, layout, schedule, and other options.

CASES = [
    ("llama", "zigzag", "all_gather", {}),
    ("llama", "zigzag", "ring", {"checked": True}),
    ("llama", "contiguous", "all_to_all", {}),
    ("llama", "striped", "ring", {}),
    ("llama", "balanced", "exact", {}),
    ("gemma2", "balanced", "ring", {}),
    ("llama", "dual_chunk", weft.Schedule("all_gather", head_groups=2), {}),
    ("llama", "zigzag", "hybrid", {}),
    ("llama4", "zigzag", "all_gather", {}),
    ("llama4", "striped", "ring", {}),
    ("llama4", "dual_chunk", "exact", {}),
    ("llama4", "zigzag", "ring", {"checkpointing": False}),
    ("llama4", "zigzag", "exact", {"checkpointing": True}),
    ("mistral", "contiguous", "exact", {}),
    ("mistral", "zigzag", "ring", {}),
    ("gemma2", "zigzag", "all_gather", {}),
    ("gemma2", "zigzag", "ring", {}),
    ("gemma2", "striped", "exact", {}),
    ("gpt_oss", "zigzag", "all_gather", {}),
    ("gpt_oss", "striped", "ring", {}),
    ("gpt_oss", "contiguous", "all_to_all", {}),
    ("gpt_oss", "zigzag", "exact", {"checkpointing": False}),
]


def packing_of(layout):
    starts = [0]
    for length in LENGTHS:
        starts.append(starts[-1] + (length if layout != "dual_chunk" else -(-length // (2 * RANKS)) * 2 * RANKS))
    return weft.Packing(cu_seqlens_q_padded=starts, seqused_q=LENGTHS)


def case_name(case):
    return "-".join([*map(str, case[:3]), *(f"{k}={v}" for k, v in case[3].items())])


def one_rank_of_two(rank, folder):
    torch.set_num_threads(1)
    weft.set_cpu_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    results, made = {}, {}
    for case in CASES:
        name, layout, schedule, options = case
        if name not in made:
            made[name] = models(config_of(name))
        results[case_name(case)] = difference(*made[name], packing_of(layout), None, layout, schedule, **options)
    with open(f"{folder}/results{rank}", "w") as f:
        json.dump(results, f)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for rank in range(RANKS)]
    said = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=300)[0])
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    return [json.loads((folder / f"results{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_two_ranks(on_two_ranks, case):
    for rank, results in enumerate(on_two_ranks):
        for what, value in results[case_name(case)].items():
            assert value < TOLERANCE, f"rank {rank}: {what}"


# On one rank.

NAMES = ["llama", "llama4", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    return models(config_of(request.param))


@pytest.fixture(scope="module")
def llama():
    return models(config_of("llama"))


@pytest.fixture(scope="module")
def llama4():
    return models(config_of("llama4"))


def both(pair, *args, valid=None, **kwargs):
    """The worst relative difference of logits and gradients at valid tokens."""
    logits, grads = [], []
    for model in pair:
        of = model(*args, **kwargs).logits
        of = of if valid is None else of[valid]
        model.zero_grad()
        of.square().sum().backward()
        logits.append(of.detach())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    largest = max(float(g.abs().max()) for g in grads[0].values())
    return max([worst(logits[1], logits[0]), *(worst(grads[1][name], grads[0][name], 1e-3 * largest) for name in grads[0])])


def test_whole_pack_on_one_rank(pair):
    for checkpointing in (None, False, True):
        for what, value in difference(*pair, packing_of("zigzag"), None, "zigzag", "all_gather", checkpointing).items():
            assert value < TOLERANCE, what


def test_settings_matter():
    """What is mapped changes the result by far more than the tolerance."""
    ids = tokens(20)[None]
    for name, changes in [
        ("llama4", {"attention_chunk_size": 6}), ("llama4", {"attn_temperature_tuning": False}), ("llama4", {"floor_scale": 4}),
        ("mistral", {"sliding_window": 7}), ("gemma2", {"sliding_window": 5}), ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"query_pre_attn_scalar": 6}), ("gpt_oss", {"sliding_window": 5}),
    ]:
        config, changed = config_of(name), config_of(name)
        for key, value in changes.items():
            assert hasattr(changed, key)
            setattr(changed, key, value)
        assert worst(models(changed)[1](ids).logits, models(config)[1](ids).logits) > 1e-3, (name, changes)


def test_plain_batch(pair):
    assert both(pair, tokens(34).view(2, 17), use_cache=False) < TOLERANCE
    assert both(pair, tokens(34).view(2, 17), attention_mask=torch.ones(2, 17)) < TOLERANCE


def test_padding(pair):
    mask = torch.ones(3, 14, dtype=torch.int64)
    mask[0, :3] = mask[1, 9:] = mask[2, :5] = mask[2, 12:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert both(pair, tokens(42).view(3, 14), attention_mask=mask, position_ids=positions, valid=mask.bool()) < TOLERANCE
    with pytest.raises(weft.Error, match="zeros inside a sequence"):
        mask[0, 7] = 0
        pair[1](tokens(42).view(3, 14), attention_mask=mask)


def test_positions_that_restart(llama, pair):
    positions = torch.tensor([[*range(5), *range(4), *range(8)], [*range(1), *range(9), *range(7)]])
    if pair[0].config.model_type != "llama4_text":  # whose own temperature goes by rows
        assert both(pair, tokens(34).view(2, 17), position_ids=positions, use_cache=False) < TOLERANCE


def test_positions_that_restart_and_temperature(llama4):
    eager, ours = llama4
    packing, ids = packing_of("zigzag"), tokens(47)
    positions = weft.torch.position_ids(packing)[None]
    want = alone(eager, ids, packing)[0]
    assert worst(ours(ids[None], position_ids=positions, use_cache=False).logits[0], want) < TOLERANCE
    assert worst(eager(ids[None], position_ids=positions, use_cache=False).logits[0], want) > 1e-3


def test_cu_seq_lens(pair):
    eager, ours = pair
    packing, ids = packing_of("zigzag"), tokens(47)
    cu = torch.from_numpy(packing.cu_seqlens_q_padded).int()
    varlen = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=21, max_length_k=21)
    got = ours(ids[None], position_ids=weft.torch.position_ids(packing)[None], use_cache=False, **varlen).logits[0]
    assert worst(got, alone(eager, ids, packing)[0]) < TOLERANCE


def test_cache(pair):
    """Token by token, past windows and chunks, with and without padding before."""
    eager, ours = (model.eval() for model in pair)
    ids = tokens(22).view(2, 11)
    for padded in (0, 3):
        mask = torch.ones(2, 11, dtype=torch.int64)
        mask[0, :padded] = 0
        said = [model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True,
                               eos_token_id=None, pad_token_id=0) for model in (eager, ours)]
        assert torch.equal(said[0].sequences, said[1].sequences)
        assert worst(torch.stack(said[1].logits), torch.stack(said[0].logits)) < TOLERANCE
    with torch.no_grad():  # several at once
        first = ours(ids[:, :6], use_cache=True)
        assert worst(ours(ids[:, 6:], past_key_values=first.past_key_values).logits, eager(ids).logits[:, 6:]) < TOLERANCE
    eager.train(), ours.train()


def test_not_causal(llama):
    assert both(llama, tokens(34).view(2, 17), is_causal=False, use_cache=False) < TOLERANCE
    eager, ours = llama
    packing, ids = weft.Packing([0, 9, 20]), tokens(20)
    with weft.transformers.packed(packing):
        got = ours(**weft.transformers.inputs(ids, packing, labels=False), is_causal=False, use_cache=False).logits[0]
    want = torch.cat([eager(part[None], is_causal=False, use_cache=False).logits[0] for part in (ids[:9], ids[9:])])
    assert worst(got, want) < TOLERANCE


def test_half_precision(llama):
    eager, ours = (copy.deepcopy(model).bfloat16() for model in llama)
    packing, ids = packing_of("zigzag"), tokens(47)
    exact = alone(llama[0], ids, packing)[0]
    with weft.transformers.packed(packing):
        got = ours(**weft.transformers.inputs(ids, packing), use_cache=False)
    assert got.logits.dtype == torch.bfloat16
    assert worst(got.logits[0].float(), exact) < 2 * worst(alone(eager, ids, packing)[0].float(), exact)


def test_nothing_is_copied(llama, monkeypatch):
    seen = []
    whole = weft.torch.context_parallel_attention

    def keep(q, k, v, *args, **kwargs):
        seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
        return whole(q, k, v, *args, **kwargs)

    monkeypatch.setattr(weft.torch, "context_parallel_attention", keep)
    module = llama[1].model.layers[0].self_attn
    q, k, v = (torch.randn(1, 12, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    out, weights = weft.transformers._attention(module, q, k, v)
    assert seen == [x.untyped_storage().data_ptr() for x in (q, k, v)]
    assert out.shape == (1, 12, 4, 8) and weights is None


def test_recomputed_elsewhere(llama4):
    """A layer is computed again in another thread, when another pack is open."""
    eager, ours = llama4
    packing, ids = packing_of("zigzag"), tokens(47)
    want = alone(eager, ids, packing)[2]
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    with weft.transformers.packed(packing):
        loss = ours(**weft.transformers.inputs(ids, packing), use_cache=False).loss
    ours.zero_grad()
    other = weft.Packing([0, 30, 47])
    with weft.transformers.packed(other):
        ours(**weft.transformers.inputs(ids, other), use_cache=False)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    ours.gradient_checkpointing_disable()
    largest = max(float(g.abs().max()) for g in want.values() if g is not None)
    for name, parameter in ours.named_parameters():
        if want[name] is not None:
            assert worst(parameter.grad, want[name], 1e-3 * largest) < TOLERANCE, name


def test_threads_have_their_own_pack(llama):
    eager, ours = (model.eval() for model in llama)
    ids, wrong = tokens(24), []

    def run(cu):
        packing = weft.Packing(cu)
        with torch.no_grad():
            want = torch.cat([eager(ids[None, a:b], use_cache=False).logits[0] for a, b in zip(cu, cu[1:])])
            for _ in range(5):
                with weft.transformers.packed(packing):
                    got = ours(**weft.transformers.inputs(ids, packing), use_cache=False).logits[0]
                if not worst(got, want) < TOLERANCE:
                    wrong.append(cu)

    threads = [threading.Thread(target=run, args=(cu,)) for cu in ([0, 7, 24], [0, 20, 24], [0, 3, 11, 24])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eager.train(), ours.train()
    assert not wrong


def test_labels():
    packing, ids = weft.Packing([0, 4, 7]), torch.arange(10, 17)
    batch = weft.transformers.inputs(ids, packing)
    assert batch["shift_labels"].tolist() == [[11, 12, 13, -100, 15, 16, -100]] == batch["labels"].tolist()
    assert int(batch["num_items_in_batch"]) == 5
    some = ids.clone()
    some[:2] = -100
    batch = weft.transformers.inputs(ids[None], packing, labels=some[None])
    assert batch["shift_labels"].tolist() == [[-100, 12, 13, -100, 15, 16, -100]]
    assert int(batch["num_items_in_batch"]) == 4
    assert set(weft.transformers.inputs(ids, packing, labels=False)) == {"input_ids", "position_ids"}
    with pytest.raises(weft.Error, match=r"labels has shape \[3\]"):
        weft.transformers.inputs(ids, packing, labels=ids[:3])


def test_register_again():
    weft.transformers.register()
    assert transformers.AttentionInterface()["weft"] is weft.transformers._attention


# Refusals.

PACKING = weft.Packing([0, 7, 10])


def run_packed(model, packing=PACKING, inputs_of=None, options=None, **kwargs):
    batch = weft.transformers.inputs(tokens(10), inputs_of or packing, labels=False)
    with weft.transformers.packed(packing, **(options or {})):
        return model(**{**batch, "use_cache": False, **kwargs})


@pytest.mark.parametrize("name, value", [
    ("output_attentions", True), ("head_mask", torch.ones(2, 4)), ("position_bias", torch.zeros(1, 4, 10, 10)), ("indices", torch.zeros(1)),
    ("something_new", 3), ("cache", object()),
])
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
    with pytest.raises(weft.Error, match="dropout 0.1"):
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
    with pytest.raises((weft.Error, AttributeError), match="cache|mask"), torch.no_grad():
        llama[1].eval().generate(tokens(10)[None], max_new_tokens=3, cache_implementation="static")
    llama[1].train()


def test_refused_models():
    config = transformers.Qwen3NextConfig(**_SMALL)
    with pytest.raises(weft.Error, match="layers of linear_attention"):
        weft.transformers._only_attention(config)
    with pytest.raises(weft.Error, match="encoder and a decoder"):
        weft.transformers._only_attention(transformers.BartConfig())
    eager = models(config_of("llama"))[0]
    with pytest.raises(weft.Error, match="no layer of a model asked Weft"):
        run_packed(eager)
    small = {name: value for name, value in _SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    own = AutoModelForCausalLM.from_config(transformers.BloomConfig(**small), attn_implementation="weft")
    with pytest.raises(weft.Error, match="computes its attention itself"):
        own(tokens(10)[None])


def test_refused_options():
    with pytest.raises(weft.Error, match="no option 'causal'"):
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


if __name__ == "__main__":
    one_rank_of_two(int(sys.argv[1]), sys.argv[2])


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
