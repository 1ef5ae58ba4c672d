"""What other libraries call the options of attention: taken where it means the same, else refused with Weft's word.

docs/coming-from.md says which library has which.
"""

from typing import Any, Collection, Dict, Mapping

from ._arrays import error
from .schedule import unexpected

# Another library's name: Weft's, which means the same.
SAME = {
    "cp_comm_type": "schedule", "cp_group": "group", "cu_seqlens_kv": "cu_seqlens_k",
    "cu_seqlens_kv_padded": "cu_seqlens_k_padded", "is_causal": "causal", "logits_soft_cap": "softcap", "qkv_format": "format",
    "sm_scale": "scale", "softmax_scale": "scale", "window_size": "window",
}

# Taken, and not used: the length of the longest sequence, which Weft reads from cu_seqlens, and that query heads may share K/V
# heads, which they do wherever there are fewer of these.
UNUSED = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "enable_gqa")

# What Weft does not have: (the reason, the way out). Values that ask for nothing (None, False, 0) are taken.
_EXACT = ("attention is exact here, and drops nothing", "leave it out, or drop out activations elsewhere in the model")
_BIAS = ("logits have no bias here", "say which keys a query sees: causal, window, chunk_size or slices")
_WEIGHTS = ("probabilities are never all at hand", "lse is in the result: probabilities are exp(logit - lse)")
_CACHE = ("there is no paged cache here", "for decoding see weft.prepare.KvCache")
_STREAM = ("Weft chooses where messages are moved", "leave it out")
NOT_HERE = {
    "dropout_p": _EXACT, "attention_dropout": _EXACT, "dropout": _EXACT,
    "alibi_slopes": _BIAS, "attn_bias": _BIAS, "attn_mask": _BIAS, "core_attention_bias": _BIAS, "score_mod": _BIAS,
    "return_attn_probs": _WEIGHTS, "return_softmax": _WEIGHTS, "need_weights": _WEIGHTS,
    "block_table": _CACHE, "page_table": _CACHE, "k_cache": _CACHE, "v_cache": _CACHE,
    "cp_group": ("process groups are for weft.torch", "give comm=weft.torch.communicator(group)"),
    "group": ("process groups are for weft.torch", "give comm=weft.torch.communicator(group)"),
    "p2p_comm": ("how ranks exchange keys is the schedule", "give schedule, a name or a weft.Schedule"),
    "cp_stream": _STREAM, "cp_global_ranks": ("ranks are those of the group", "give group (weft.torch) or comm"),
    "sliding_window": ("a window has two sides here, without the token itself", "give window=(sliding_window - 1, 0)"),
    "attn_mask_type": ("a mask is said by its parts", "give causal=True (causal_bottom_right: bottom_right=True too), or window"),
    "q_ranges": ("ranges of a mask are slices here", "give slices=[(q_begin, q_end, k_begin, k_end, lo, hi), ...]"),
}


def own_words(function: str, given: Mapping[str, Any], known: Collection[str], named: Collection[str] = ()) -> Dict[str, Any]:
    """The keywords by Weft's names. named: parameters that the caller has given otherwise, beside `given`."""
    out: Dict[str, Any] = {}
    for name, value in given.items():
        own = SAME.get(name, name)
        if name in UNUSED:
            continue
        if own in known:
            if own != name and (own in given or own in named):
                raise error(f"{name} and {own} are both given", f"they are the same: leave {name} out")
            if own in out:
                raise error(f"{own} is given by two other names, one of them {name}", f"give {own} alone")
            out[own] = value
        elif name not in NOT_HERE:
            unexpected(function, name, known)
        elif value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            problem, remedy = NOT_HERE[name]
            raise error(f"{name} is given to {function}: {problem}", remedy)
    return out
