"""What weft.megatron refuses, on two ranks, and what Megatron's traps come to (test_megatron.py)."""

import sys

import processes

RANKS = 2
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def core(mask="causal", kind="self", layer=1, listed=None, **changes):
    """A core attention, built as SelfAttention builds it. listed: cp_comm_type of the config."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    own = {name: changes.pop(name) for name in list(changes) if name in ("schedule", "chunk_size", "num_splits", "cp_comm_type")}
    config = m.config_of(num_layers=len(listed or "12"), cp_comm_type=listed, **changes)
    return weft.megatron.WeftCoreAttention(
        config=config, layer_number=layer, attn_mask_type=AttnMaskType[mask],
        attention_type=kind, softmax_scale=None, pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]), **own)


def rows(n, *middle):
    return [torch.randn(n, *middle, heads, 16) for heads in (4, 2, 2)]


def thd(lengths=(8, 4), padded=None, **more):
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cup = cu if padded is None else torch.tensor([0, *itertools.accumulate(padded)], dtype=torch.int32)
    most = max(padded or lengths)
    given = dict(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cup, cu_seqlens_kv_padded=cup,
                 max_seqlen_q=most, max_seqlen_kv=most)
    return PackedSeqParams(**{**given, **more})


@case
def config():
    for changes, words in (
        (dict(attention_dropout=0.1), ("attention_dropout is 0.1", "attention_dropout=0.0")), (dict(kind="cross"), ("cross",)),
        (dict(fp8_dot_product_attention=True), ("fp8_dot_product_attention",)), (dict(num_splits=2), ("num_splits=2",)),
        (dict(schedule=["ring"], layer=2), ("schedule has 1 entries", "layer 2")),
        (dict(context_parallel_size=4), ("context_parallel_size is 4", "2 ranks")),
        (dict(cp_comm_type="a2a+p2p"), ("no ranks", "hierarchical_context_parallel_sizes=[ulysses, ring]")),
    ):
        with refused(*words):
            core(**changes)


@case
def list_of_schedules_counts_from_the_first_layer():
    """Megatron 0.16 hands layer 1 the second entry."""
    found = [core(layer=layer, listed=["all_gather", "p2p", "a2a"], cp_comm_type=given).schedule.name
             for layer, given in ((1, "p2p"), (2, "a2a"))]
    assert found == ["all_gather", "ring"]


@case
def off_where_the_config_says_one():
    assert core(context_parallel_size=1).group is None
    out = core(context_parallel_size=1)(*rows(5), None, packed_seq_params=thd([3, 2]))  # odd lengths, all rows here
    assert out.shape == (5, 64)


@case
def batches_may_turn_it_off():
    attention, (q, k, v) = core(), rows(6, 1)
    alone = PackedSeqParams(qkv_format="sbhd", local_cp_size=1)
    expected = weft.torch.context_parallel_attention(q, k, v, [0, 6], causal=True, one_rank=True, format="sbhd")
    assert torch.equal(attention(q, k, v, None, packed_seq_params=alone), expected.flatten(-2))
    with refused("local_cp_size is 2 and the batch has no cp_group"):
        attention(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd", local_cp_size=2))
    with refused("a context-parallel group of its own", "sbhd"):
        attention(*rows(12), None, packed_seq_params=thd(local_cp_size=1))


@case
def arguments():
    attention, made = core(), rows(6)
    mask = torch.zeros(1, 1, 6, 12, dtype=torch.bool)
    for call, words in (
        (dict(attention_bias=torch.zeros(1)), ("attention_bias",)), (dict(attn_mask_type=AttnMaskType.arbitrary), ("arbitrary",)),
        (dict(attention_mask=mask), ("attention_mask is given with thd", "cu_seqlens_q_padded")), (dict(x=1), ("called with x",)),
    ):
        with refused(*words):
            attention(*made, call.pop("attention_mask", None), packed_seq_params=thd(), **call)
    with refused("6 rows of queries and 7 of keys"):
        attention(made[0], *rows(7)[1:], None, packed_seq_params=thd())
    with refused("padding", "attention_mask=None"):
        attention(*rows(6, 1), mask, attn_mask_type=AttnMaskType.padding)
    with refused("qkv_format is 'bshd'"):
        attention(*rows(6, 1), None, packed_seq_params=thd(qkv_format="bshd"))


@case
def masks_that_say_what_the_type_says():
    from megatron.core.utils import get_batch_on_this_cp_rank

    causal = torch.ones(12, 12).triu(1).bool()[None, None]
    attention, made = core(), rows(6, 1)
    mine = get_batch_on_this_cp_rank(dict(attention_mask=causal))["attention_mask"]
    assert torch.equal(attention(*made, mine), attention(*made, None))
    documents = causal.clone()
    documents[..., 6:, :6] = True
    with refused("hides other keys than a causal mask", "packed_seq_params"):
        attention(*made, get_batch_on_this_cp_rank(dict(attention_mask=documents))["attention_mask"])


@case
def lengths():
    """A max_seqlen below a padded length ends one rank in RoPE; the others must not wait for it."""
    attention = core()
    for params, n, words in (
        (thd([7, 4], [8, 4], max_seqlen_q=7), 6, ("max_seqlen_q is 7", "max_seqlen_q=8")),
        (thd(), 5, ("5 rows a rank on 2 ranks", "end at 12")), (thd([7, 5]), 6, ("7", "multiple")),
        (thd(cu_seqlens_kv=torch.tensor([0, 4, 12])), 6, ("cu_seqlens_kv",)), (thd(cu_seqlens_q=None), 6, ("no cu_seqlens_q",)),
    ):
        with refused(*words):
            attention(*rows(n), None, packed_seq_params=params)
    for kind, words in (("mtp", ("multi-token prediction", "padding")), ("whole", ("balanced", "multi-token"))):
        attention.config.mtp_num_layers, attention.by_row = 1, True
        params = thd([7, 4], [8, 4]) if kind == "mtp" else m.batch_of(dict(layout="balanced"))[1]
        with refused(*words):
            attention(*rows(6), None, packed_seq_params=params)


@case
def packings_are_made_once_a_batch():
    from weft.megatron import batch

    made, real = [], batch.packing_of
    batch.packing_of = lambda *given: made.append(given) or real(*given)
    try:
        model = m.model_of({})
        inputs, params, _ = m.batch_of({})
        made.clear()
        model(input_ids=inputs["tokens"], position_ids=inputs["position_ids"], attention_mask=None, packed_seq_params=params)
        assert len(made) == 1  # of two layers
        params.cu_seqlens_q = params.cu_seqlens_kv = params.cu_seqlens_q_padded.clone()
        model(input_ids=inputs["tokens"], position_ids=inputs["position_ids"], attention_mask=None, packed_seq_params=params)
        assert len(made) == 2  # and again for what has changed
    finally:
        batch.packing_of = real


@case
def whole_packs():
    cu, _, whole = m.pack(1)
    batch, params = weft.megatron.get_batch_on_this_cp_rank(whole, cu, layout="balanced")
    assert batch["tokens"].shape[1] == sum(m.LENGTHS) // 2  # nothing is padded
    with refused("use_row_positions(model)"):
        core()(*rows(26), None, packed_seq_params=params)
    del whole["loss_mask"]
    with refused("loss_mask"):
        weft.megatron.get_batch_on_this_cp_rank({name: x[:, :-1] for name, x in whole.items()}, torch.tensor([0, 13, 51]),
                                                layout="zigzag")
    with refused("tokens has shape", "[1, 52]"):
        weft.megatron.get_batch_on_this_cp_rank(dict(tokens=whole["tokens"][0]), cu)
    with refused("max_seqlen is 3"):
        weft.megatron.get_batch_on_this_cp_rank(whole, cu, max_seqlen=torch.tensor([3]))


@case
def indices():
    """Of Transformer Engine's thd_get_partitioned_indices, as its documentation has them."""
    generator = torch.Generator().manual_seed(0)
    for ranks, rank in ((1, 0), (2, 1), (3, 0), (4, 2), (8, 7)):
        chunks = torch.randint(0, 5, (6,), generator=generator)
        padded = torch.cat([torch.zeros(1, dtype=torch.int64), (chunks * 2 * ranks).cumsum(0)])
        expected = [t for begin, n in zip(padded.tolist(), chunks.tolist()) for chunk in (rank, 2 * ranks - 1 - rank)
                    for t in range(begin + chunk * n, begin + (chunk + 1) * n)]
        found = weft.megatron.partition_indices(padded, int(padded[-1]), ranks, rank)
        assert (sorted(found.tolist()) if ranks == 1 else found.tolist()) == (sorted(expected) if ranks == 1 else expected)
    with refused("end at 8 and there are 9 tokens"):
        weft.megatron.partition_indices(torch.tensor([0, 8]), 9)


@case
def specs():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    plain = get_gpt_layer_local_spec()
    changed = weft.megatron.with_weft(plain, schedule="exact").submodules.self_attention.submodules.core_attention
    assert changed.module is weft.megatron.WeftCoreAttention and changed.params == {"schedule": "exact"}
    assert plain.submodules.self_attention.submodules.core_attention is DotProductAttention  # as it was
    block = weft.megatron.with_weft(get_gpt_decoder_block_spec(m.config_of(), use_transformer_engine=False))
    for layer in block.layer_specs:
        assert layer.submodules.self_attention.submodules.core_attention.module is weft.megatron.WeftCoreAttention
    with refused("no option window", "chunk_size"):
        weft.megatron.with_weft(plain, window=(1, 0))
    with refused("no core_attention in a ModuleSpec"):
        weft.megatron.with_weft(plain.submodules.mlp)
    plain.submodules.self_attention.submodules.core_attention = m.Dense
    with refused("core attention is Dense"):
        weft.megatron.with_weft(plain)


@case
def latents_on_tensor_parallel_ranks():
    """Megatron 0.16 takes a part of a gradient for the whole (small_megatron.TENSOR_PARALLEL): of what other versions do nobody
    knows yet."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from weft.megatron import attention as module

    spec = weft.megatron.with_weft(get_gpt_layer_local_spec(multi_latent_attention=True), schedule="exact")
    assert spec.submodules.self_attention.submodules.core_attention.params == {"schedule": "exact", "gathered_latent": True}
    latent, plain = m.config_of(mla=True), m.config_of()
    found = [module._sums_position_gradient(*given) for given in (
        (latent, True, 2), (latent, True, 1), (latent, False, 2), (plain, True, 2))]
    assert found == [True, False, False, False]
    version, module.megatron.core.__version__ = module.megatron.core.__version__, "0.17.0"
    try:
        with refused("2 tensor-parallel ranks", "0.17.0", "tensor_model_parallel_size=1"):
            module._sums_position_gradient(latent, True, 2)
        assert not module._sums_position_gradient(latent, True, 1)
    finally:
        module.megatron.core.__version__ = version


@case
def latents_move():
    """With latent=True ranks exchange the latent and the rotated part of the keys, in both passes, and no keys or values."""
    config = m.config_of(mla=True)
    heads = config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim)
    group, found = weft.torch.group.name_of(parallel_state.get_context_parallel_group()), {}
    comm = weft.torch.group.communicator(group)
    for latent in (False, True):
        case = dict(mla=True, weft=dict(latent=latent, schedule="all_gather"))
        model = m.model_of(case)
        batch, params, _ = m.batch_of(case)
        comm.reset_traffic()
        out = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], attention_mask=None, packed_seq_params=params)
        forward = comm.bytes_received
        out.sum().backward()
        found[latent] = forward, comm.bytes_received - forward
    layers, rows, width = config.num_layers, batch["tokens"].shape[1], config.kv_lora_rank + config.qk_pos_emb_head_dim
    assert found == {latent: (layers * rows * numbers * 4, layers * rows * numbers * 8)
                     for latent, numbers in ((False, heads), (True, width))}


@case
def kept_keys_are_not_made_again():
    for recompute in (True, False):
        case, calls = dict(mla=True, weft=dict(latent=True, recompute=recompute)), []
        model = m.model_of(case)
        for layer in model.decoder.layers:
            layer.self_attention.linear_kv_up_proj.register_forward_hook(lambda *_: calls.append(1))
        batch, params, _ = m.batch_of(case)
        out = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], attention_mask=None, packed_seq_params=params)
        forward = len(calls)
        out.sum().backward()
        assert forward > 0 and (len(calls) > forward) is recompute


@case
def latents_that_cannot_move():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from weft.megatron import latent as module

    for name, value, words in (
        ("apply_rope_fusion", True, ("apply_rope_fusion=False",)), ("cache_mla_latents", True, ("generation",)),
        ("sequence_parallel", True, ("turn sequence_parallel off",)), ("delay_wgrad_compute", True, ("turn it off",)),
        ("fp8", "hybrid", ("fp8", "dtype of its weight")), ("offload_modules", ["core_attn"], ("core_attn", "host")),
    ):
        config = m.config_of(mla=True)
        setattr(config, name, value)
        with refused(*words):
            module._refuse(config)
    config = m.config_of(mla=True, recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    with refused("mla_up_proj", "made again"):
        module._refuse(config)
    version, module.megatron.core.__version__ = module.megatron.core.__version__, "0.17.0"
    try:
        with refused("written for 0.16", "0.17.0"):
            module._refuse(m.config_of(mla=True))
    finally:
        module.megatron.core.__version__ = version
    with refused("self-attention is SelfAttention", "multi_latent_attention=True"):
        weft.megatron.with_weft(get_gpt_layer_local_spec(), latent=True)
    with refused("recompute is given without latent=True"):
        weft.megatron.with_weft(get_gpt_layer_local_spec(), recompute=False)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    with refused("latent=True and a MLASelfAttentionSubmodules", "give the spec of the layer"):
        weft.megatron.with_weft(spec.submodules.self_attention.submodules, latent=True)
    spec.submodules.self_attention.submodules.linear_kv_up_proj = torch.nn.Linear
    with refused("linear_kv_up_proj is Linear", "get_gpt_layer_local_spec"):
        weft.megatron.with_weft(spec, latent=True)
    layer = m.model_of(dict(mla=True, weft=dict(latent=True))).decoder.layers[0].self_attention
    with refused("an inference context"):
        layer.get_query_key_value_tensors(torch.zeros(2, 1, 64), inference_context=object())
    with refused("there are no values", "latent=True"):
        core()(torch.zeros(2, 4, 16), torch.zeros(2, 40), None, packed_seq_params=thd([4]))


@case
def checkpoints():
    made = core(softmax_type="learnable")
    found = made.sharded_state_dict("decoder.", metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)})
    assert list(found) == ["decoder.softmax_offset"]
    assert found["decoder.softmax_offset"].global_shape == (4,)
    assert not core().sharded_state_dict("decoder.", metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)})


if __name__ == "__main__":
    import itertools

    import torch
    import weft
    import weft.megatron
    import weft.torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    import small_megatron as m
    from refusals import refused

    def rank(number):
        parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
        processes.run_cases(number, CASES, sys.argv[1])

    ended = processes.fork(RANKS, rank, sys.argv[1], seconds=240)
    sys.exit(any(status for status, _ in ended))
