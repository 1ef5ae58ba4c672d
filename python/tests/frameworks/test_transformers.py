"""weft.transformers on one rank against the models' own eager attention, run on each document alone."""

import copy
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.torch
import weft.transformers

from small_models import TOLERANCE, alone, config_of, difference, models, packing_of, tokens, worst


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
    if pair[0].config.model_type not in ("llama4_text", "gpt_oss"):  # whose own temperature goes by rows, whose mask by none
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
        said = [
            model.generate(
                ids, attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True,
                return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
            )
            for model in (eager, ours)
        ]
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
