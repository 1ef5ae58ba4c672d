"""A transformer layer: attention and an MLP, each after a norm and beside a residual connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._arrays import error
from ...types import AnySchedule, FormatName
from .attention import MultiheadAttention
from .parts import InitMethod, Norm, NormMlp, usual_init
from .words import CallOptions, LayerOptions, same

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TransformerLayer(torch.nn.Module):
    """A pre-norm layer, x + attention(norm(x)) and then y + MLP(norm(y)), with Transformer Engine's words and parameter names.

    Its parts are self_attention, a MultiheadAttention that takes all keywords not named here (rotary_base, chunk_size,
    softmax_type, qk_norm_type, ...), and layernorm_mlp with fc1_weight and fc2_weight. attn_mask_type and qkv_format go by
    self_attn_mask_type and attn_input_format too. Rows that hold no token give some finite numbers, which nobody attends to.

        >>> import torch, weft.torch
        >>> layer = weft.torch.TransformerLayer(64, 128, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu",
        ...                                     bias=False, qkv_format="thd", rotary_base=10000.0)
        >>> layer(torch.randn(16, 64), cu_seqlens_q=[0, 7, 16]).shape
        torch.Size([16, 64])
        >>> [name for name, _ in layer.named_parameters()][:3]
        ['self_attention.layernorm_qkv.layer_norm_weight', 'self_attention.layernorm_qkv.query_weight', \
'self_attention.layernorm_qkv.key_weight']
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: Optional[int] = None, *,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
        init_method: Optional[InitMethod] = None, output_layer_init_method: Optional[InitMethod] = None,
        kv_channels: Optional[int] = None, attn_mask_type: Optional[str] = None, self_attn_mask_type: Optional[str] = None,
        window_size: Optional[Tuple[int, int]] = None, chunk_size: Optional[int] = None,
        params_dtype: Optional[torch.dtype] = None, zero_centered_gamma: bool = False, bias: bool = True,
        activation: str = "gelu", normalization: str = "LayerNorm", device: Any = None, qkv_format: Optional[FormatName] = None,
        attn_input_format: Optional[FormatName] = None, cp_comm_type: Optional[AnySchedule] = None,
        **attention: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if not 0 <= hidden_dropout < 1:
            raise error(f"hidden_dropout is {hidden_dropout}", "give a probability below 1")
        self.hidden_dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, num_gqa_groups=num_gqa_groups, layernorm_epsilon=layernorm_epsilon,
            attention_dropout=attention_dropout, init_method=init_method, output_layer_init_method=output_layer_init_method,
            attn_mask_type=same("self_attn_mask_type", self_attn_mask_type, "attn_mask_type", attn_mask_type, "causal"),
            window_size=window_size, chunk_size=chunk_size, params_dtype=params_dtype, zero_centered_gamma=zero_centered_gamma,
            bias=bias, normalization=normalization, device=device, input_layernorm=True, cp_comm_type=cp_comm_type,
            qkv_format=same("attn_input_format", attn_input_format, "qkv_format", qkv_format, "sbhd"), **attention)
        self.layernorm_mlp = NormMlp(
            hidden_size, ffn_hidden_size, norm=Norm(normalization, layernorm_epsilon, zero_centered_gamma), activation=activation,
            bias=bias, init=init_method or usual_init, output_init=output_layer_init_method or usual_init, dtype=params_dtype,
            device=device)

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None,
                                   cp_comm_type: Optional[AnySchedule] = None) -> None:
        """The ranks that rows are spread over, as of MultiheadAttention."""
        self.self_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training) if self.hidden_dropout else x

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **options: Unpack[CallOptions]) -> Tensor:
        """Of this rank's rows, in the shape of qkv_format; keywords are those of a call of MultiheadAttention."""
        attended = self.self_attention(hidden_states, attention_mask, **options)
        hidden_states = hidden_states + self._dropped(attended)
        return hidden_states + self._dropped(self.layernorm_mlp(hidden_states))
