"""Transformer Engine's words: what they mean here, which ask for nothing, and which are refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple, TypedDict, Union

from torch import Tensor

from ..._arrays import error
from ...schedule import unexpected
from ...types import LayoutName
from ..packed import AnyPacking

if TYPE_CHECKING:
    from ..context import ContextParallel

# Queries and keys are the same tokens, so a mask aligned to the last ones is the one aligned to the first.
CAUSAL = {"no_mask": False, "padding": False, "causal": True, "padding_causal": True, "causal_bottom_right": True,
          "padding_causal_bottom_right": True}
SOFTMAX = ("vanilla", "off-by-one", "learnable")
FORMATS = ("sbhd", "bshd", "thd")


class CallOptions(TypedDict, total=False):
    """Keywords of a call of MultiheadAttention or TransformerLayer."""

    attn_mask_type: Optional[str]
    self_attn_mask_type: Optional[str]
    window_size: Optional[Tuple[int, int]]
    chunk_size: Optional[int]
    cp: Optional[ContextParallel]
    packing: Optional[AnyPacking]
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    cu_seqlens_q_padded: Any
    cu_seqlens_kv_padded: Any
    position_ids: Optional[Tensor]
    rotary_pos_emb: Union[None, Tensor, Tuple[Tensor, Tensor]]
    checkpoint_core_attention: bool
    # Taken, and not used.
    max_seqlen_q: Optional[int]
    max_seqlen_kv: Optional[int]
    is_first_microbatch: Optional[bool]
    fast_zero_fill: bool
    pad_between_seqs: Optional[bool]
    bottom_right_diagonal: Optional[bool]
    # Refused, unless they ask for nothing.
    encoder_output: Any
    inference_params: Any
    core_attention_bias_type: str
    core_attention_bias: Any
    alibi_slopes: Any


class OtherOptions(TypedDict, total=False):
    """Keywords of a constructor beside its named parameters: Weft's own for its attention, and what asks for nothing."""

    scale: Optional[float]
    softmax_scale: Optional[float]
    softcap: float
    kernel: Optional[str]
    deterministic: bool
    checked: bool
    # Taken, and not used: about tensor parallelism's communication, a decoder's second attention, warm-up, or names.
    bottom_right_diagonal: Optional[bool]
    set_parallel_mode: bool
    get_rng_state_tracker: Any
    seq_length: Optional[int]
    micro_batch_size: Optional[int]
    name: Optional[str]
    enc_dec_attn_mask_type: Optional[str]
    enc_dec_bottom_right_diagonal: Optional[bool]
    enc_dec_window_size: Any
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_bulk_dgrad: bool
    ub_bulk_wgrad: bool
    # Refused, unless they ask for nothing.
    tp_group: Any
    tp_size: int
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool
    return_bias: bool
    return_layernorm_output: bool
    attention_type: str
    layer_type: str
    apply_residual_connection_post_layernorm: bool
    output_layernorm: bool
    parallel_attention_mlp: bool
    drop_path_rate: float
    activation_params: Any
    ub_tp_comm_overlap: bool


class LayerOptions(OtherOptions, total=False):
    """Keywords of TransformerLayer that are its attention's."""

    layer_number: Optional[int]
    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    rotary_pos_interleaved: bool
    rotary_base: Optional[float]
    rotary_percent: float
    qk_norm_type: Optional[str]
    qk_norm_eps: float
    qk_norm_before_rope: bool
    softmax_type: str
    layout: Optional[LayoutName]


CALL = tuple(CallOptions.__annotations__)

_BIAS = ("logits have no bias here", "say which keys a query sees: attn_mask_type, window_size, chunk_size")
_CROSS = ("keys are those of the queries' own tokens", "leave cross-attention to another layer")
_TENSOR = ("tensors are not split over ranks by heads or features here", "leave it out, and shard parameters with FSDP2")
_PRE_NORM = ("layers are pre-norm, one part after the other", "leave it out")

# (the value that asks for nothing, why there is no other, the way out)
_REFUSED_IN_CALLS: Dict[str, Tuple[Any, str, str]] = {
    "attention_mask": (None, "there are no masks as tensors here",
                       "leave it out: a padded batch is attn_mask_type='padding_causal' with cu_seqlens_q of its lengths on the "
                       "CPU, a pack is qkv_format='thd'"),
    "encoder_output": (None, *_CROSS),
    "inference_params": (None, "these layers are for training and keep no cache", "for decoding see weft.prepare.KvCache"),
    "core_attention_bias_type": ("no_bias", *_BIAS),
    "core_attention_bias": (None, *_BIAS),
    "alibi_slopes": (None, *_BIAS),
}
_REFUSED: Dict[str, Tuple[Any, str, str]] = {
    "tp_group": (None, *_TENSOR), "tp_size": (1, *_TENSOR), "sequence_parallel": (False, *_TENSOR),
    "fuse_wgrad_accumulation": (False, "gradients are torch's own, in grad", "leave it out"),
    "return_bias": (False, "the bias is added by the layer", "leave it out"),
    "return_layernorm_output": (False, "the normalised input is not kept", "leave it out"),
    "attention_type": ("self", *_CROSS), "layer_type": ("encoder", *_CROSS),
    "apply_residual_connection_post_layernorm": (False, *_PRE_NORM), "output_layernorm": (False, *_PRE_NORM),
    "parallel_attention_mlp": (False, *_PRE_NORM),
    "drop_path_rate": (0.0, "there is no stochastic depth here", "leave it out"),
    "activation_params": (None, "activations have no parameters here", "leave it out"),
    "ub_tp_comm_overlap": (False, *_TENSOR),
}
# Weft's own, for its attention.
ATTENTION = ("scale", "softcap", "kernel", "deterministic", "checked")
_OTHERS = frozenset(OtherOptions.__annotations__)


def attention_options(what: str, other: Dict[str, Any], known: Tuple[str, ...]) -> Dict[str, Any]:
    """Those of Weft's attention among a constructor's other keywords; the rest must ask for nothing."""
    options: Dict[str, Any] = {}
    for name, value in other.items():
        if name in ATTENTION:
            options[name] = value
        elif name == "softmax_scale":
            options["scale"] = value
        elif name in _REFUSED:
            nothing, reason, remedy = _REFUSED[name]
            if value is not None and value != nothing:
                raise error(f"{name} is {value!r}: {reason}", remedy)
        elif name not in _OTHERS:
            unexpected(what, name, (*known, *ATTENTION))
    return options


def refuse_in_call(what: str, call: Dict[str, Any]) -> None:
    """Raises for what a call asks for and the layer does not have."""
    for name, value in call.items():
        if name in _REFUSED_IN_CALLS:
            nothing, reason, remedy = _REFUSED_IN_CALLS[name]
            if value is not None and value is not nothing and not (isinstance(value, str) and value == nothing):
                raise error(f"{name} is given to {what}: {reason}", remedy)
        elif name not in CALL:
            unexpected(what, name, CALL)


def one_of(name: str, value: Any, known: Any) -> Any:
    """The value; an Error if it is none of those that there are."""
    if value not in known:
        raise error(f"{name} is {value!r}", f"use {', '.join(map(str, known))}")
    return value


def same(theirs: str, value: Any, name: str, other: Any, usual: Any) -> Any:
    """One setting that has two names, of which one is given, both alike, or none."""
    if value is not None and other is not None and value != other:
        raise error(f"{theirs} is {value!r} and {name} {other!r}", "they are the same: give one of them")
    if value is None:
        value = other
    return usual if value is None else value


def mask_of(attn_mask_type: str, window_size: Optional[Tuple[int, int]], chunk_size: Optional[int]) -> Dict[str, Any]:
    """The parts of Weft's mask."""
    if attn_mask_type not in CAUSAL:
        why = ": its keys are said by a tensor alone" if attn_mask_type == "arbitrary" else ""
        raise error(f"attn_mask_type is {attn_mask_type!r}{why}", f"use {', '.join(CAUSAL)}, with window_size or chunk_size")
    causal = CAUSAL[attn_mask_type]
    if window_size is None:
        window_size = (-1, -1)
    elif not causal and tuple(window_size) == (-1, 0):
        raise error(f"window_size is (-1, 0) with attn_mask_type {attn_mask_type}: causal to some, and no window to others",
                    f"say attn_mask_type='{'padding_' if attn_mask_type == 'padding' else ''}causal', or window_size=(-1, -1)")
    return dict(causal=causal, window=(window_size[0], window_size[1]), chunk_size=chunk_size)
