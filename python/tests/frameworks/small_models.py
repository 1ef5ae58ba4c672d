"""Small models of transformers, with Weft and with their own eager attention, and how they are compared."""

import copy

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

SMALL = dict(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, initializer_range=0.2, attention_dropout=0.0, pad_token_id=None, bos_token_id=1,
    eos_token_id=2,
)


WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
MIXED = dict(layer_types=["linear_attention", "full_attention"] * 2)  # of hybrid models
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
DELTA = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)


def small(without=(), **changes):
    """SMALL with changes, less what a model does not have."""
    return {name: value for name, value in {**SMALL, **changes}.items() if name not in without}


def rotary(part):
    return dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part})


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama4": lambda: transformers.Llama4TextConfig(  # a chunked layer with rotary embeddings, a full one with temperature
        **small(num_hidden_layers=3), intermediate_size_mlp=40, attention_chunk_size=5, no_rope_layers=[1, 0, 1],
        moe_layers=[1], num_local_experts=2, attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5, use_qk_norm=True),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, **WINDOWS, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=5),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **small(head_dim=256), **WINDOWS, query_pre_attn_scalar=128),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, **WINDOWS, num_local_experts=2, num_experts_per_tok=1),
    "qwen3": lambda: transformers.Qwen3Config(**small(head_dim=128), **WINDOWS, use_sliding_window=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**small(head_dim=128), **EXPERTS),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(  # q and k 192 wide, v 128
        **small(["head_dim"], num_attention_heads=2), qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        q_lora_rank=24, kv_lora_rank=16, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2,
        moe_intermediate_size=24, first_k_dense_replace=1),
    "glm4": lambda: transformers.Glm4Config(**small(head_dim=128), attention_bias=True, **rotary(0.5)),
    "phi3": lambda: transformers.Phi3Config(
        **small(["head_dim"], hidden_size=192, num_attention_heads=2, num_key_value_heads=1), sliding_window=6),
    "olmo2": lambda: transformers.Olmo2Config(**small(["head_dim"], hidden_size=256, num_attention_heads=2)),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **small(head_dim=256, num_hidden_layers=4), **MIXED, **EXPERTS, **DELTA, shared_expert_intermediate_size=24,
        **rotary(0.25)),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**small(head_dim=256, num_hidden_layers=4), **MIXED, **DELTA),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **small(head_dim=256, num_hidden_layers=4), **MIXED, **DELTA, shared_expert_intermediate_size=24,
        **{name: value for name, value in EXPERTS.items() if name != "norm_topk_prob"}),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **small(["head_dim"], hidden_size=256, num_attention_heads=2, num_hidden_layers=4), **MIXED, **DELTA),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **small(["head_dim"], num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=4), **MIXED, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=16, num_experts=4, num_experts_per_token=2, moe_intermediate_size=24,
        linear_head_dim=16, linear_num_heads=2),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **small(["num_hidden_layers"], head_dim=128), mlp_hidden_act="relu2",
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"], mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, chunk_size=16),
    "granite_hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **small(["head_dim"], num_hidden_layers=4), **MIXED, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
        mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24),
    "jamba": lambda: transformers.JambaConfig(
        **small(["head_dim"], num_hidden_layers=4), attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, num_experts=4,
        use_mamba_kernels=False),
    "lfm2": lambda: transformers.Lfm2Config(
        **small(["head_dim"], num_hidden_layers=4), layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **small(["head_dim"], num_hidden_layers=4), layer_types=["conv", "full_attention"] * 2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1),
}


def config_of(name):
    return CONFIGS[name]()


def models(config):
    """The same model with eager attention and with Weft's."""
    torch.manual_seed(1)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
        for name, buffer in eager.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of DeepSeek's routers: zero before training
                buffer.normal_(std=0.1)
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="weft")
    ours.load_state_dict(eager.state_dict())
    assert eager.config._attn_implementation == "eager" and ours.config._attn_implementation == "weft"
    return eager.train(), ours.train()


def tokens(count):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(2))


def alone(model, ids, packing):
    """Logits of each document by itself, at its tokens; the mean loss; gradients of all parameters."""
    following = weft.torch.next_token_labels(ids, packing)
    logits, loss = torch.zeros(len(ids), model.config.vocab_size, dtype=model.dtype, device=ids.device), 0.0
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
    """Relative differences over all ranks' rows: the worst logit, the loss, the worst element of a gradient (of the largest of
    its parameter), and the norm of all gradients together."""
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
    gradients, apart, size = 0.0, 0.0, 0.0
    for name, parameter in ours.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if weft.torch.group.resolve(group) is not None:
            torch.distributed.all_reduce(got)
        want = torch.zeros_like(got) if grads[name] is None else grads[name]
        gradients = max(gradients, worst(got, want, 1e-3 * largest))
        apart, size = apart + float((got - want).double().square().sum()), size + float(want.double().square().sum())
    return dict(logits=worst(mine[valid], logits[valid]), loss=abs(float(total) - loss) / loss, gradients=gradients,
                norm=(apart / size) ** 0.5)


def packing_of(layout):
    starts = [0]
    for length in LENGTHS:
        starts.append(starts[-1] + (length if layout != "dual_chunk" else -(-length // (2 * RANKS)) * 2 * RANKS))
    return weft.Packing(cu_seqlens_q_padded=starts, seqused_q=LENGTHS)
