"""Multi-head attention with its projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from ..._arrays import error
from ...types import AnySchedule, FormatName, LayoutName
from .core import CoreAttention, Rows
from .parts import HeadNorm, InitMethod, Linear, Norm, angles_of, rotate, usual_init
from .words import FORMATS, CallOptions, OtherOptions, attention_options, mask_of, one_of, refuse_in_call, same

if TYPE_CHECKING:
    from typing_extensions import Unpack

NORMS = ("LayerNorm", "RMSNorm")
_WORDS = (
    "hidden_size", "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "init_method",
    "output_layer_init_method", "layer_number", "attn_mask_type", "window_size", "chunk_size", "num_gqa_groups", "params_dtype",
    "input_layernorm", "fuse_qkv_params", "zero_centered_gamma", "qkv_weight_interleaved", "rotary_pos_interleaved",
    "rotary_base", "rotary_percent", "bias", "normalization", "device", "qkv_format", "qk_norm_type", "qk_norm_eps",
    "qk_norm_before_rope", "softmax_type", "cp_comm_type", "layout")


def _divided(name: str, whole: int, by: int, other: str) -> int:
    if by < 1 or whole % by:
        raise error(f"{name} is {whole} and {other} {by}", f"let {name} be a multiple of {other}")
    return whole // by


class MultiheadAttention(torch.nn.Module):
    """Projections, rotary embedding, attention over this rank's and all other rows, and the output projection.

    Words and names of parameters are Transformer Engine's: layernorm_qkv.{layer_norm_weight, query_weight, key_weight,
    value_weight} (qkv.* without input_layernorm, `weight` alone with fuse_qkv_params), core_attention.softmax_offset,
    proj.weight. Weft's own are chunk_size, rotary_base with rotary_percent (rotary embedding without a table), layout, scale,
    softcap, kernel, deterministic and checked. What cannot be mapped is refused with the reason (docs/layers.md).

        >>> import torch, weft.torch
        >>> layer = weft.torch.MultiheadAttention(64, 4, num_gqa_groups=2, qkv_format="thd", window_size=(4, 0))
        >>> layer(torch.randn(16, 64), cu_seqlens_q=[0, 7, 16]).shape
        torch.Size([16, 64])
        >>> layer(torch.randn(16, 64), cu_seqlens_q=[0, 7, 16], window_size=(-1, -1), chunk_size=8).shape
        torch.Size([16, 64])
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: Optional[int] = None, *, attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5, init_method: Optional[InitMethod] = None,
        output_layer_init_method: Optional[InitMethod] = None, layer_number: Optional[int] = None,
        attn_mask_type: str = "causal", window_size: Optional[Tuple[int, int]] = None, chunk_size: Optional[int] = None,
        num_gqa_groups: Optional[int] = None, params_dtype: Optional[torch.dtype] = None, input_layernorm: bool = False,
        fuse_qkv_params: bool = False, zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False, rotary_base: Optional[float] = None, rotary_percent: float = 1.0, bias: bool = True,
        normalization: str = "LayerNorm", device: Any = None, qkv_format: FormatName = "sbhd", qk_norm_type: Optional[str] = None,
        qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
        cp_comm_type: Optional[AnySchedule] = None, layout: Optional[LayoutName] = None, **other: Unpack[OtherOptions],
    ) -> None:
        super().__init__()
        options = attention_options("MultiheadAttention", {**other}, _WORDS)
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        _divided("num_attention_heads", num_attention_heads, self.groups, "num_gqa_groups")
        self.channels = kv_channels or _divided("hidden_size", hidden_size, num_attention_heads, "num_attention_heads")
        self.hidden_size, self.attention_dropout = hidden_size, attention_dropout
        self.attn_mask_type, self.window_size, self.chunk_size = attn_mask_type, window_size, chunk_size
        mask_of(attn_mask_type, window_size, chunk_size)
        self.qkv_format = one_of("qkv_format", qkv_format, FORMATS)
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_base, self.rotary_interleaved = rotary_base, rotary_pos_interleaved
        self.rotary_dim = int(self.channels * rotary_percent)
        if rotary_base is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.channels):
            raise error(f"rotary embedding of {self.rotary_dim} of {self.channels} features a head",
                        "let kv_channels * rotary_percent be even and not more than kv_channels")
        place: Dict[str, Any] = dict(dtype=params_dtype, device=device)
        q, kv = self.channels * self.heads, self.channels * self.groups
        norm = Norm(one_of("normalization", normalization, NORMS), layernorm_epsilon, zero_centered_gamma)
        qkv = Linear(hidden_size, q + 2 * kv, init=init_method or usual_init, bias=bias, norm=norm if input_layernorm else None,
                     split=None if fuse_qkv_params else {"query": q, "key": kv, "value": kv}, **place)
        self.input_layernorm = input_layernorm
        self.add_module("layernorm_qkv" if input_layernorm else "qkv", qkv)
        self.norm_before_rope = qk_norm_before_rope
        kind = None if qk_norm_type is None else Norm(
            one_of("qk_norm_type", qk_norm_type, (*NORMS, "L2Normalization")), qk_norm_eps)
        self.q_norm, self.k_norm = (None if kind is None else HeadNorm(kind, self.channels, **place) for _ in range(2))
        self.core_attention = CoreAttention(
            num_attention_heads, qkv_format=qkv_format, softmax_type=softmax_type, cp_comm_type=cp_comm_type, layout=layout,
            layer_number=layer_number, options=options, **place)
        self.proj = Linear(q, hidden_size, init=output_layer_init_method or usual_init, bias=bias, **place)

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None,
                                   cp_comm_type: Optional[AnySchedule] = None) -> None:
        """The ranks that rows are spread over: a process group, its name or a DeviceMesh of one dimension; None for one rank.

        cp_comm_type names the schedule, the layer's own unless given; with a2a+p2p cp_group may be [the a2a group, the p2p
        group]. cp_global_ranks are compared with the group's. cp_stream is not used: Weft has streams of its own.
        """
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_comm_type)

    def _heads_of(self, mixed: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, channels] of the projection."""
        if self.interleaved:  # of each group its query heads, then its key, then its value
            a_group = self.heads // self.groups
            parts = mixed.unflatten(-1, (self.groups, a_group + 2, self.channels))
            q, k, v = parts.split((a_group, 1, 1), -2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        heads = mixed.unflatten(-1, (self.heads + 2 * self.groups, self.channels))
        q, k, v = heads.split((self.heads, self.groups, self.groups), -2)
        return q, k, v

    def _check(self, hidden_states: Tensor) -> None:
        wanted = 2 if self.qkv_format == "thd" else 3
        if hidden_states.dim() != wanted or hidden_states.shape[-1] != self.hidden_size:
            raise error(f"hidden_states has shape {list(hidden_states.shape)}, qkv_format is {self.qkv_format} and hidden_size "
                        f"{self.hidden_size}", "give thd [t, hidden], bshd [b, s, hidden], sbhd [s, b, hidden]")
        weight = self.proj.weight
        if hidden_states.dtype != weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
            raise error(f"hidden_states are {hidden_states.dtype} and parameters {weight.dtype}",
                        "convert one of them (params_dtype=), or use torch.autocast")
        if self.training and self.attention_dropout > 0:
            raise error(f"attention_dropout is {self.attention_dropout} in training: attention is exact here and drops nothing",
                        "use attention_dropout=0.0; hidden_dropout is there")

    def _angles(self, table: Any, given: Optional[Tensor], hidden_states: Tensor, rows: Rows) -> Any:
        """Angles of rotary embedding for queries and for keys, of all rows; None if there is none."""
        if table is None and self.rotary_base is None:
            if given is not None:
                raise error("position_ids are given, and the layer has no rotary embedding",
                            "give rotary_pos_emb too, or make the layer with rotary_base=10000.0")
            return None
        shape = tuple(hidden_states.shape[:-1])
        positions = self._positions(given, shape, hidden_states.device) if given is not None \
            else self.core_attention.positions(shape, rows, hidden_states.device)
        if self.qkv_format == "sbhd":
            positions = positions[:, None] if positions.dim() == 1 else positions.transpose(0, 1)
        if table is not None:
            tables = table if isinstance(table, tuple) else (table, table)
            return tuple(_looked_up(t, positions, self.channels) for t in tables)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        assert self.rotary_base is not None
        return (angles_of(positions, self.rotary_base, self.rotary_dim, self.rotary_interleaved, dtype),) * 2

    def _positions(self, given: Tensor, shape: Tuple[int, ...], device: torch.device) -> Tensor:
        """position_ids as [t], or [s] or [b, s] of batches."""
        if self.qkv_format == "thd":
            known = [(shape[0],), (1, shape[0])]
        else:
            b, s = shape if self.qkv_format == "bshd" else (shape[1], shape[0])
            known = [(s,), (b, s), (1, s)]
        if tuple(given.shape) not in known:
            raise error(f"position_ids have shape {list(given.shape)}", f"give one of {known}: those of this rank's rows")
        return (given[0] if self.qkv_format == "thd" and given.dim() == 2 else given).to(device)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **options: Unpack[CallOptions]) -> Tensor:
        """Of this rank's rows: [t, hidden] (thd), [b, s, hidden] (bshd) or [s, b, hidden] (sbhd); the same shape comes out.

        attn_mask_type, window_size and chunk_size take the place of the layer's own in this call. Documents of a pack are said
        by cu_seqlens_q (with cu_seqlens_q_padded) of the whole pack, by a weft.Packing as packing=, or by a ContextParallel as
        cp=, whose group and layout are then used. Rotary embedding is by rotary_pos_emb, a table of angles [positions, 1, 1,
        features], or the layer's rotary_base; position_ids, those of the rows, are found out unless given.
        """
        call: Dict[str, Any] = {**options}
        if attention_mask is not None:
            call["attention_mask"] = attention_mask
        refuse_in_call("MultiheadAttention", call)
        self._check(hidden_states)
        kind = same("self_attn_mask_type", call.get("self_attn_mask_type"), "attn_mask_type", call.get("attn_mask_type"),
                    self.attn_mask_type)
        window = call.get("window_size")
        mask = mask_of(kind, self.window_size if window is None else window, call.get("chunk_size", self.chunk_size))
        core = self.core_attention
        rows = core.rows_of(tuple(hidden_states.shape[:-1]), call, "padding" in kind)
        q, k, v = self._heads_of((self.layernorm_qkv if self.input_layernorm else self.qkv)(hidden_states))
        if self.norm_before_rope:
            q, k = self._normed(q, k)
        angles = self._angles(call.get("rotary_pos_emb"), call.get("position_ids"), hidden_states, rows)
        if angles is not None:
            q, k = (rotate(x, a, self.rotary_interleaved) for x, a in zip((q, k), angles))
        if not self.norm_before_rope:
            q, k = self._normed(q, k)
        out = core(q, k, v, mask, rows, bool(call.get("checkpoint_core_attention", False)))
        result: Tensor = self.proj(out.flatten(-2))
        return result

    def _normed(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def extra_repr(self) -> str:
        """The settings, for print(model)."""
        return (f"heads={self.heads}, groups={self.groups}, channels={self.channels}, attn_mask_type={self.attn_mask_type!r}, "
                f"window_size={self.window_size}, chunk_size={self.chunk_size}, rotary_base={self.rotary_base}")


def _looked_up(table: Tensor, positions: Tensor, channels: int) -> Tensor:
    """Rows of a table of angles [positions, 1, 1, features]."""
    features = table.shape[-1]
    if table.numel() != table.shape[0] * features or features > channels or features % 2:
        raise error(f"rotary_pos_emb has shape {list(table.shape)}, and heads have {channels} features",
                    "give a table of angles [positions, 1, 1, features], the same for all sequences of a batch")
    angles = table.reshape(-1, features).to(positions.device)
    if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
        last = int(positions.max())
        if last >= angles.shape[0]:
            raise error(f"a row has position {last} and rotary_pos_emb is a table of {angles.shape[0]}", "make a longer table")
    return angles.to(torch.promote_types(angles.dtype, torch.float32))[positions]
