"""A small GPT of Megatron-Core on CPUs, packed documents for it, and dense attention in f64 to judge it by.

Megatron asks for CUDA at a few places where CPUs would do; these are replaced here, in the tests alone.
"""

import functools
import itertools

import megatron.core.models.common.embeddings.rotary_pos_embedding as rotary
import megatron.core.models.common.embeddings.yarn_rotary_pos_embedding as yarn
import megatron.core.tensor_parallel.random as random_state
import megatron.core.transformer.multi_latent_attention as mla
import torch
import torch.distributed as dist
import weft
import weft.megatron
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

LENGTHS, VOCABULARY = [13, 5, 24, 1, 9], 96


def _of_rank(emb, dim, group):
    parts, n, r = emb.chunk(2 * group.size(), dim), group.size(), group.rank()
    return torch.cat([parts[r], parts[2 * n - 1 - r]], dim)


torch.cuda.current_device = lambda: "cpu"
rotary.get_pos_emb_on_this_cp_rank = yarn.get_pos_emb_on_this_cp_rank = _of_rank  # Megatron's pins memory
mla.HAVE_TE = False  # 0.16.1 says True where Transformer Engine is missing
random_state._get_cuda_rng_state = lambda *a, **k: torch.zeros(1, dtype=torch.uint8)
random_state._set_cuda_rng_state = lambda *a, **k: None

# What a case changes: of the config; `weft`: options of with_weft; `layout`, `sbhd`, `mla`, `position` are of the test.
CASES = {
    "packed": {}, "window": dict(window_size=(6, 0)), "every other window": dict(window_size=(6, 0), window_attn_skip_freq=2),
    "off-by-one": dict(softmax_type="off-by-one"), "learnable": dict(softmax_type="learnable"),
    "qk_clip": dict(qk_clip=True), "scale": dict(softmax_scale=0.3), "mla": dict(mla=True),
    "mla qk_clip": dict(mla=True, qk_clip=True), "mla yarn": dict(mla=True, rope_type="yarn"),
    "all_gather": dict(cp_comm_type="all_gather"), "a2a": dict(cp_comm_type="a2a"),
    "a2a+p2p": dict(cp_comm_type="a2a+p2p"), "a schedule a layer": dict(weft=dict(schedule=["exact", "all_gather"])),
    "window, sink, exact": dict(window_size=(6, 0), softmax_type="learnable", weft=dict(schedule="exact", checked=True)),
    "chunks": dict(weft=dict(chunk_size=[8, None])), "batch": dict(sbhd=True),
    "batch, window": dict(sbhd=True, window_size=(6, 0)),
    "a batch's own group": dict(own_group=True),
    "recomputed": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "core recomputed": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "balanced": dict(layout="balanced"), "zigzag, a2a": dict(layout="zigzag", cp_comm_type="a2a"),
    "striped": dict(layout="striped"), "contiguous, exact": dict(layout="contiguous", weft=dict(schedule="exact")),
    "balanced mla": dict(layout="balanced", mla=True), "balanced mla yarn": dict(layout="balanced", mla=True, rope_type="yarn"),
    "balanced, window, sink": dict(layout="balanced", window_size=(6, 0), softmax_type="learnable"),
    "balanced, recomputed": dict(layout="balanced", recompute_granularity="full", recompute_method="uniform",
                                 recompute_num_layers=1),
}

LATENT = dict(latent=True)
KEPT = dict(latent=True, recompute=False)
# Of multi-head latent attention whose latent moves.
CASES |= {
    "latent": dict(mla=True, weft=LATENT), "latent, kept": dict(mla=True, weft=KEPT),
    "latent, norms": dict(mla=True, qk_layernorm=True, q_lora_rank=24, weft=LATENT),
    "latent, yarn, qk_clip": dict(mla=True, rope_type="yarn", qk_clip=True, weft=dict(**LATENT, schedule="exact", checked=True)),
    "latent, a2a": dict(mla=True, cp_comm_type="a2a", weft=LATENT),
    "latent, a2a+p2p, kept": dict(mla=True, cp_comm_type="a2a+p2p", weft=KEPT),
    "latent, head groups": dict(mla=True, weft=dict(**LATENT, schedule=weft.Schedule("all_gather", head_groups=2))),
    "latent, window, sink": dict(mla=True, window_size=(6, 0), softmax_type="learnable", weft=LATENT),
    "latent, batch": dict(mla=True, sbhd=True, weft=LATENT),
    "latent, balanced": dict(mla=True, layout="balanced", weft=dict(**LATENT, schedule="all_gather")),
    "latent, balanced, yarn": dict(mla=True, layout="balanced", rope_type="yarn", weft=LATENT),
    "latent, recomputed": dict(mla=True, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
                               weft=KEPT),
    "latent, core recomputed": dict(mla=True, recompute_granularity="selective", recompute_modules=["core_attn"], weft=LATENT),
}

# On two tensor-parallel by two context-parallel ranks. A gated MLP's parts are others there than those of one rank.
TENSOR_PARALLEL = {
    name: dict(gated_linear_unit=False, activation_func=torch.nn.functional.gelu, **case)
    for name, case in {"tensor parallel": {}, "tensor parallel, sink": dict(softmax_type="learnable", window_size=(6, 0)),
                       "tensor parallel, balanced": dict(layout="balanced"), "tensor parallel, mla": dict(mla=True),
                       "tensor parallel, mla, latent queries": dict(mla=True, q_lora_rank=24, sbhd=True),
                       "tensor parallel, mla, balanced": dict(mla=True, layout="balanced", qk_clip=True),
                       "tensor parallel, latent": dict(mla=True, weft=LATENT),
                       "tensor parallel, latent, norms, kept": dict(mla=True, qk_layernorm=True, q_lora_rank=24, sbhd=True,
                                                                    weft=KEPT),
                       "tensor parallel, latent, balanced, a2a": dict(mla=True, layout="balanced", qk_clip=True,
                                                                      cp_comm_type="a2a", weft=LATENT)}.items()
}


class Dense(MegatronModule):
    """The formula, a document at a time, in f64, on one rank."""

    def __init__(self, config, layer_number, softmax_scale=None, chunk_size=None, **other):
        super().__init__(config=config)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window, self.scale = config.window_size if windowed else None, softmax_scale
        self.chunk = chunk_size[layer_number - 1] if chunk_size else None
        self.current_max_attn_logits = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads))
            config.init_method(self.softmax_offset)

    def visible(self, n, causal):
        distance = torch.arange(n)[:, None] - torch.arange(n)
        see = distance >= 0 if causal else torch.ones(n, n, dtype=torch.bool)
        if self.window:
            see = see & (distance <= self.window[0])
        if self.chunk:
            at = torch.arange(n) // self.chunk
            see = see & (at[:, None] == at)
        return see

    def one(self, q, k, v, causal):
        """[n, h, d] of one document."""
        logits = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        logits = logits.masked_fill(~self.visible(len(q), causal), float("-inf"))
        top = logits.detach().amax((1, 2)).float()
        self.current_max_attn_logits = top if self.current_max_attn_logits is None else self.current_max_attn_logits.maximum(top)
        heads = q.shape[1]
        sink = {"vanilla": lambda: torch.full((heads,), float("-inf")), "off-by-one": lambda: torch.zeros(heads),
                "learnable": lambda: self.softmax_offset}[self.config.softmax_type]().double()
        weights = torch.cat([logits, sink[:, None, None].expand(-1, len(q), 1)], -1).softmax(-1)[..., :-1]
        return torch.einsum("hij,jhd->ihd", weights, v)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        causal = attn_mask_type is not AttnMaskType.no_mask
        group = query.shape[-2] // key.shape[-2]
        q, k, v = query.double(), *(x.double().repeat_interleave(group, -2) for x in (key, value))
        if query.dim() == 4:
            parts = [self.one(q[:, b], k[:, b], v[:, b], causal) for b in range(q.shape[1])]
            return torch.stack(parts, 1).flatten(2).to(query.dtype)
        p, parts, end = packed_seq_params, [], 0
        for n, begin in zip(p.cu_seqlens_q.diff().tolist(), p.cu_seqlens_q_padded.tolist()):
            parts += [q.new_zeros(begin - end, q.shape[1], v.shape[2]),
                      self.one(*(x[begin:begin + n] for x in (q, k, v)), causal) if n else q[:0, :, :v.shape[2]]]
            end = begin + n
        return torch.cat([*parts, q.new_zeros(len(q) - end, q.shape[1], v.shape[2])]).flatten(1).to(query.dtype)


def config_of(**changes):
    multi_latent = changes.pop("mla", False)
    given = dict(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128,
                 use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True,
                 activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False,
                 params_dtype=torch.float32, init_method_std=0.15,
                 context_parallel_size=parallel_state.get_context_parallel_world_size(),
                 tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size())
    if not multi_latent:
        return TransformerConfig(**{**given, **changes})
    del given["num_query_groups"]
    widths = dict(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    return MLATransformerConfig(**{**given, **widths, "multi_latent_attention": True, "rope_type": "rope", **changes})


def model_of(case, dense=False):
    changes = {name: value for name, value in case.items() if name not in ("weft", "layout", "sbhd", "own_group")}
    config, options = config_of(**changes), case.get("weft", {})
    if dense:
        options = {name: value for name, value in options.items() if name not in LATENT | KEPT}
    spec = get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention, normalization="RMSNorm",
                                    qk_layernorm=config.qk_layernorm)
    spec = weft.megatron.with_weft(spec, **options)
    if dense:
        core = spec.submodules.self_attention.submodules.core_attention
        core.module, core.params = Dense, {name: value for name, value in options.items() if name == "chunk_size"}
    torch.manual_seed(0)
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=512,
                     position_embedding_type="rope")
    if case.get("layout") and not dense:
        weft.megatron.use_row_positions(model)
    return model


def pack(multiple):
    """(cu_seqlens, padded, a batch [1, tokens]): documents whose tokens do not depend on the padding, to a multiple of each."""
    padded = [-(-n // multiple) * multiple for n in LENGTHS]
    cu, cup = ([0, *itertools.accumulate(x)] for x in (LENGTHS, padded))
    words = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    batch = dict(tokens=torch.full((cup[-1],), 7), labels=torch.zeros(cup[-1], dtype=torch.int64), loss_mask=torch.zeros(cup[-1]),
                 position_ids=torch.zeros(cup[-1], dtype=torch.int64))
    for n, a, b, e in zip(LENGTHS, cu, cup, cup[1:]):
        batch["tokens"][b:b + n] = words[a:a + n]
        batch["labels"][b:b + n - 1] = words[a + 1:a + n]
        batch["loss_mask"][b:b + n - 1] = 1
        batch["position_ids"][b:e] = torch.arange(e - b)
    return torch.tensor(cu, dtype=torch.int32), torch.tensor(cup, dtype=torch.int32), {n: x[None] for n, x in batch.items()}


def batch_of(case, dense=False):
    """(this rank's batch, packed_seq_params, targets of all ranks)"""
    ranks = parallel_state.get_context_parallel_world_size()
    if case.get("sbhd"):
        from megatron.core.utils import get_batch_on_this_cp_rank

        tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
        mask = torch.ones(2, 24)
        mask[:, -1] = 0
        batch = dict(tokens=tokens, labels=tokens.roll(-1, 1), loss_mask=mask, position_ids=torch.arange(24).repeat(2, 1))
        return get_batch_on_this_cp_rank(batch), None, mask.sum()
    if "own_group" in case:
        return own_batch()
    layout = "dual_chunk" if dense else case.get("layout", "dual_chunk")
    cu, cup, batch = pack(2 * ranks if layout == "dual_chunk" else 1)
    return *weft.megatron.get_batch_on_this_cp_rank(batch, cu, cup, layout=layout), batch["loss_mask"].sum()


@functools.lru_cache(None)
def pairs():
    """The group of this rank and its neighbour, of an even number of ranks."""
    groups = [dist.new_group([r, r + 1]) for r in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


def own_batch():
    """One sequence on each pair of ranks: what Megatron calls a hybrid context-parallel batch."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 24)
    mask[:, -1] = 0
    batch = dict(tokens=tokens, labels=tokens.roll(-1, 1), loss_mask=mask, position_ids=torch.arange(24)[None])
    ranks = min(2, dist.get_world_size())
    group, lengths = pairs() if ranks > 1 else None, torch.tensor([0, 24], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=24, max_seqlen_kv=24,
                             local_cp_size=ranks, cp_group=group)
    copies = dist.get_world_size() // ranks  # each counts the same targets
    return get_batch_on_this_cp_rank(batch, cp_group=group) if group else batch, params, mask.sum() * copies


def step(case, dense=False):
    """Loss, gradients of all parameters and maximum logits, of all ranks."""
    model = model_of(case, dense)
    batch, params, targets = batch_of(case, dense)
    losses = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], attention_mask=None, labels=batch["labels"],
                   packed_seq_params=params)
    loss = (losses * batch["loss_mask"]).sum() / targets
    loss.backward()
    found = {"loss": loss.detach().clone(), **{name: p.grad for name, p in model.named_parameters()}}
    for x in found.values():
        dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    for name, p in model.named_parameters():  # parts of tensor-parallel ranks together
        if getattr(p, "tensor_model_parallel", False):
            parts = [torch.empty_like(p.grad) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
            dist.all_gather(parts, p.grad, group=parallel_state.get_tensor_model_parallel_group())
            found[name] = torch.cat(parts, p.partition_dim)
    if case.get("qk_clip"):
        for i, layer in enumerate(model.decoder.layers):
            top = layer.self_attention.core_attention.current_max_attn_logits  # of this tensor-parallel rank's heads
            parts = [torch.empty_like(top) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
            dist.all_gather(parts, top, group=parallel_state.get_tensor_model_parallel_group())
            found[f"top {i}"] = torch.cat(parts)
    return found
