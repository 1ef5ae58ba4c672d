"""A transformer layer written out from its definition, a document at a time: what weft.torch's layers are compared with.

`words` are the constructor's; parameters are taken by Transformer Engine's names from a dict.
"""

import math

import torch

ACTIVATIONS = {
    "gelu": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0), "silu": lambda x: x / (1 + torch.exp(-x)),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)), "srelu": lambda x: x.clamp(min=0)**2,
    "": lambda x: 1 / (1 + torch.exp(-x))}
GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "qgeglu": "qgelu", "sreglu": "srelu", "glu": ""}


def norm(x, kind, eps, weight=None, bias=None, zero_centered=False):
    if kind == "L2Normalization":
        return x / torch.sqrt((x**2).sum(-1, keepdim=True) + eps)
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
    x = x * (1 + weight if zero_centered else weight)
    return x if bias is None else x + bias


def turned(x, base, features, interleaved):
    """Rotary embedding of [n, heads, d] by complex numbers: pair i of `features` / 2 turns by n · base^(-2i / features)."""
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * base**(-torch.arange(0, features, 2, dtype=x.dtype) / features)
    part = x[..., :features]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(z)
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((part, x[..., features:]), -1)


def visible(n, words):
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    left, right = words.get("window_size") or (-1, -1)
    seen = torch.ones(n, n, dtype=torch.bool)
    if "causal" in words.get("attn_mask_type", "causal"):
        seen &= j <= i
    if left >= 0:
        seen &= i - j <= left
    if right >= 0:
        seen &= j - i <= right
    if words.get("chunk_size"):
        seen &= i // words["chunk_size"] == j // words["chunk_size"]
    return seen


def heads_of(x, p, words, d):
    """q [n, hq, d], k, v [n, hk, d] of the normalised input."""
    hq = words["num_attention_heads"]
    hk = words.get("num_gqa_groups") or hq
    def linear(name):
        bias = p.get(name + "bias")
        return x @ p[name + "weight"].T + (0 if bias is None else bias)
    if not words.get("fuse_qkv_params"):
        return [linear(f"layernorm_qkv.{name}_").view(len(x), -1, d) for name in ("query", "key", "value")]
    mixed = linear("layernorm_qkv.").view(len(x), -1, d)
    if not words.get("qkv_weight_interleaved", True):
        return mixed[:, :hq], mixed[:, hq:hq + hk], mixed[:, hq + hk:]
    step = hq // hk + 2
    at = torch.arange(mixed.shape[1])
    return mixed[:, at % step < step - 2], mixed[:, at % step == step - 2], mixed[:, at % step == step - 1]


def attention(x, p, words):
    hidden, hq = words["hidden_size"], words["num_attention_heads"]
    d = words.get("kv_channels") or hidden // hq
    zero = words.get("zero_centered_gamma", False)
    kind, eps = words.get("normalization", "LayerNorm"), words.get("layernorm_epsilon", 1e-5)
    x = norm(x, kind, eps, p["layernorm_qkv.layer_norm_weight"], p.get("layernorm_qkv.layer_norm_bias"), zero)
    q, k, v = heads_of(x, p, words, d)
    by_head = words.get("qk_norm_type")
    def normed(q, k):
        return [norm(x, by_head, words.get("qk_norm_eps", 1e-6), p.get(f"{s}_norm.weight"), p.get(f"{s}_norm.bias"))
                for x, s in ((q, "q"), (k, "k"))]
    if by_head and words.get("qk_norm_before_rope"):
        q, k = normed(q, k)
    if words.get("rotary_base"):
        features = int(d * words.get("rotary_percent", 1.0))
        q, k = (turned(x, words["rotary_base"], features, words.get("rotary_pos_interleaved", False)) for x in (q, k))
    if by_head and not words.get("qk_norm_before_rope"):
        q, k = normed(q, k)
    seen, outs = visible(len(x), words), []
    for h in range(hq):
        g = h // (hq // k.shape[1])
        logits = (q[:, h] @ k[:, g].T / math.sqrt(d)).masked_fill(~seen, -torch.inf)
        if words.get("softmax_type", "vanilla") != "vanilla":
            sink = p["core_attention.softmax_offset"][h] if words["softmax_type"] == "learnable" else torch.zeros(())
            logits = torch.cat((logits, sink.to(x.dtype).expand(len(x), 1)), 1)
        outs.append(torch.softmax(logits, 1)[:, :len(x)] @ v[:, g])
    bias = p.get("proj.bias")
    return torch.cat(outs, 1) @ p["proj.weight"].T + (0 if bias is None else bias)


def mlp(x, p, words):
    zero = words.get("zero_centered_gamma", False)
    kind, eps = words.get("normalization", "LayerNorm"), words.get("layernorm_epsilon", 1e-5)
    x = norm(x, kind, eps, p["layer_norm_weight"], p.get("layer_norm_bias"), zero)
    bias1, bias2 = p.get("fc1_bias"), p.get("fc2_bias")
    wide = x @ p["fc1_weight"].T + (0 if bias1 is None else bias1)
    name = words.get("activation", "gelu")
    if name in GATED:
        half = wide.shape[-1] // 2
        wide = ACTIVATIONS[GATED[name]](wide[:, :half]) * wide[:, half:]
    else:
        wide = ACTIVATIONS[name](wide)
    return wide @ p["fc2_weight"].T + (0 if bias2 is None else bias2)


def layer(x, parameters, words):
    """The layer on one document [n, hidden]."""
    def of(part):
        return {name[len(part):]: p for name, p in parameters.items() if name.startswith(part)}
    x = x + attention(x, of("self_attention."), words)
    return x + mlp(x, of("layernorm_mlp."), words)
