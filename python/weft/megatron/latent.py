"""Multi-head latent attention whose latent moves, and context-parallel ranks make the keys and values that they attend."""

from __future__ import annotations

from typing import Any, Tuple

import megatron.core
import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import functional as F

from .._arrays import error

_REFUSED = (
    ("apply_rope_fusion", "the fused kernel makes keys and values of all heads before they could move",
     "give the config apply_rope_fusion=False"),
    ("cache_mla_latents", "queries are absorbed there, for generation", "leave generation to Megatron"),
    ("sequence_parallel", "rows are divided among the tensor-parallel ranks too, which nobody has tried with it",
     "turn sequence_parallel off, or leave latent out"),
    ("delay_wgrad_compute", "the up projection's gradient is made while attention goes back", "turn it off"),
    ("fp8", "the up projection multiplies in the dtype of its weight", "leave latent out"),
    ("fp4", "the up projection multiplies in the dtype of its weight", "leave latent out"),
)


def _refuse(config: Any) -> None:
    if not megatron.core.__version__.startswith("0.16."):
        raise error(f"latent=True and megatron-core {megatron.core.__version__}: the layer is written for 0.16",
                    "leave latent out, or use megatron-core 0.16")
    for name, reason, remedy in _REFUSED:
        if getattr(config, name, None):
            raise error(f"latent=True and {name}: {reason}", remedy)
    if config.recompute_granularity == "selective" and "mla_up_proj" in config.recompute_modules:
        raise error("latent=True and mla_up_proj among recompute_modules: keys and values are made again in the backward anyway",
                    "leave mla_up_proj out of recompute_modules")
    if "core_attn" in (getattr(config, "offload_modules", None) or ()):
        raise error("latent=True and core_attn among offload_modules: there are no keys and values to move to the host",
                    "leave core_attn out of offload_modules")


class _SummedGradient(torch.autograd.Function):
    """The same tensor, whose gradient is the sum of all ranks'. Megatron's copy_to_tensor_model_parallel_region sums a copy, and
    loses it, where a gradient is not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class UpProjection(ColumnParallelLinear):
    """linear_kv_up_proj, with Megatron's parameters and checkpoints, of rows of any context-parallel rank.

    It is called as a module, so that whoever waits for its parameters by hooks (a distributed optimizer) does. Gradients of the
    rows are summed over the tensor-parallel ranks elsewhere, once for all calls.
    """

    def forward(self, rows: Tensor, heads: slice = slice(None)) -> Tensor:
        """[rows, heads, qk_head_dim + v_head_dim] of this tensor-parallel rank's heads."""
        width = self.config.qk_head_dim + self.config.v_head_dim
        weight = self.weight.unflatten(0, (-1, width))[heads]
        return F.linear(rows, weight.flatten(0, 1)).unflatten(-1, (-1, width))


class LatentSelfAttention(MLASelfAttention):
    """Megatron's MLASelfAttention, whose core attention gets the latent and expand() in the place of keys and values."""

    def __init__(self, config: Any, submodules: Any, *args: Any, recompute: bool = True, **kwargs: Any) -> None:
        _refuse(config)
        super().__init__(config, submodules, *args, **kwargs)
        self.core_attention.expand, self.core_attention.recompute = self.expand, recompute

    def expand(self, rows: Tensor, heads: slice = slice(None)) -> Tuple[Tensor, Tensor]:
        """Keys and values of rows of what moves, of this tensor-parallel rank's heads."""
        latent, rotated = rows.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        k, v = self.linear_kv_up_proj(latent, heads).split([self.config.qk_head_dim, self.config.v_head_dim], -1)
        return torch.cat((k, rotated[:, None].expand(-1, k.shape[1], -1)), -1), v

    def _down(self, projection: Any, hidden: Tensor, width: int) -> Tensor:
        """[s, b, width], whether or not tensor-parallel ranks have parts of it."""
        found, _ = projection(hidden)
        return found if found.shape[-1] == width else gather_from_tensor_model_parallel_region(found, group=self.tp_group)

    def _angles(self, hidden: Tensor, params: Any) -> Tuple[Tensor, float]:
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, params)
        found = self.rotary_pos_emb(length, packed_seq=params is not None and params.qkv_format == "thd")
        angles, scale = found if isinstance(found, tuple) else (found, 1.0)
        # Of a pack on several ranks Megatron picks each row's angle among those of all positions.
        one = params is None or self.config.context_parallel_size == 1
        return angles[:hidden.shape[0]] if one else angles, scale

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, position_ids: Any = None,
        packed_seq_params: Any = None, inference_context: Any = None, *, inference_params: Any = None,
    ) -> Tuple[Tensor, Tensor, None, Tensor, Tensor]:
        """(queries, what moves, None, the compressed queries, the latent), as MLASelfAttention.forward takes them."""
        if inference_context is not None or inference_params is not None:
            raise error("latent=True and an inference context: weft.megatron is for training", "leave generation to Megatron")
        params: Any = packed_seq_params
        if params is not None and params.local_cp_size is not None:
            raise error(f"MLA and local_cp_size={params.local_cp_size}, which Megatron's MLA does not take",
                        "leave local_cp_size out")
        config = self.config
        low_rank, shared_width = config.q_lora_rank is not None, config.qk_pos_emb_head_dim
        queries = self._down(self.linear_q_down_proj, hidden_states, config.q_lora_rank) if low_rank else hidden_states
        latent, shared = self._down(self.linear_kv_down_proj, hidden_states, config.kv_lora_rank + shared_width).split(
            [config.kv_lora_rank, shared_width], -1)
        if params is not None:  # [t, width], of a batch of one
            queries, latent, shared = (x.squeeze(1) for x in (queries, latent, shared))
        queries, latent = self.q_layernorm(queries) if low_rank else queries, self.kv_layernorm(latent)
        angles, scale = self._angles(hidden_states, params)

        def rotated(x: Tensor) -> Tensor:
            found: Tensor = apply_rotary_pos_emb(x, angles, config=config, cu_seqlens=_padded_offsets(params), mscale=scale,
                                                 cp_group=self.pg_collection.cp)
            return found

        up = self.linear_q_up_proj if low_rank else self.linear_q_proj
        of_heads = up(queries)[0].unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
        plain, turning = of_heads.split([config.qk_head_dim, shared_width], -1)
        source = torch.cat((latent, rotated(shared.unsqueeze(-2)).squeeze(-2)), -1)
        if self.tp_group.size() > 1:  # each rank's gradient is that of its own heads
            source = _SummedGradient.apply(source, self.tp_group)
        return torch.cat((plain, rotated(turning)), -1), source, None, queries, latent


def _padded_offsets(params: Any) -> Any:
    """Of a thd pack, by which Megatron's RoPE goes."""
    if not isinstance(params, PackedSeqParams) or params.qkv_format != "thd":
        return None
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
