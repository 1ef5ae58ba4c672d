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


def config_of(name):
    if name == "llama":
        return transformers.LlamaConfig(**SMALL)
    if name == "llama4":  # a chunked layer with rotary embeddings, and a full one without but with temperature
        return transformers.Llama4TextConfig(
            **{**SMALL, "num_hidden_layers": 3}, intermediate_size_mlp=40, attention_chunk_size=5, no_rope_layers=[1, 0, 1],
            moe_layers=[1], num_local_experts=2, attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5,
            use_qk_norm=True,
        )
    if name == "mistral":
        return transformers.MistralConfig(**SMALL, sliding_window=6)
    if name == "gemma2":
        return transformers.Gemma2Config(**SMALL, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
                                         query_pre_attn_scalar=5, layer_types=["sliding_attention", "full_attention"])
    if name == "gpt_oss":
        return transformers.GptOssConfig(**SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
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


def packing_of(layout):
    starts = [0]
    for length in LENGTHS:
        starts.append(starts[-1] + (length if layout != "dual_chunk" else -(-length // (2 * RANKS)) * 2 * RANKS))
    return weft.Packing(cu_seqlens_q_padded=starts, seqused_q=LENGTHS)
